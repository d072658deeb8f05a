"""The reference executor against a naive float64 model: one query at a time, by the rule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from executors.driving import executor_of, logits_in_chunks
from kivi_oracle import seal_group, seal_group_e4m3
from qdeploy.kv.config import KVCacheConfig, LayerPolicy
from qdeploy.kv.kivi import BITS
from qdeploy.kv.pool import KVPools
from qdeploy.runtime.executors.reference import ReferenceExecutor
from tables import pool_sizes
from tiny_models import VOCAB_SIZE, tiny_model

HEADS, KV_HEADS, DIM, EPS = 4, 2, 16, 1e-6


class Sealed:
    """What the executor sealed, as float32 K and V, in the order of blocks, per layer.

    Rounding to codes is a step function: K/V that differ in the last bit may land on either side
    of an edge. The naive model therefore checks the executor's K/V against its own, then seals
    the executor's, so that everything after it can be compared closely.
    """

    def __init__(self, executor: ReferenceExecutor) -> None:
        self.blocks: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for pools in executor._pools:
            self._record(pools)

    def _record(self, pools: KVPools) -> None:
        seal = pools.seal

        def recording(block: int, layer: int, k: Tensor, v: Tensor) -> None:
            self.blocks.setdefault(layer, []).append((k.clone(), v.clone()))
            seal(block, layer, k, v)

        pools.seal = recording  # type: ignore[method-assign]


def through_codes(x: Tensor, dim: int, bits: int, dtype: str) -> Tensor:
    """x [heads, tokens, channels] with each group along `dim` sealed and read back, float64."""
    out = torch.empty_like(x)
    for group, target in zip(x.unbind(3 - dim), out.unbind(3 - dim), strict=True):
        for row, into in zip(group, target, strict=True):
            group_of = row.numpy()
            sealed = seal_group_e4m3(group_of) if dtype == "fp8" else seal_group(group_of, bits)
            into.copy_(torch.from_numpy(sealed))
    return out.double()


def naive_logits(
    model: PreTrainedModel, ids: list[int], config: KVCacheConfig, sealed: Sealed
) -> Tensor:
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    eps = model.config.rms_norm_eps

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]

    hidden = weights["model.embed_tokens.weight"][ids]
    for layer in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        x = norm(hidden, f"{prefix}.input_layernorm")
        q, k, v = (
            (x @ weights[f"{prefix}.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, DIM))
            for name in "qkv"
        )
        blocks = sealed.blocks.get(layer, [])
        attended = naive_attention(rotated(q), rotated(k), v, config.for_layer(layer), blocks)
        hidden = hidden + attended @ weights[f"{prefix}.self_attn.o_proj.weight"].T
        x = norm(hidden, f"{prefix}.post_attention_layernorm")
        gate = torch.nn.functional.silu(x @ weights[f"{prefix}.mlp.gate_proj.weight"].T)
        up = x @ weights[f"{prefix}.mlp.up_proj.weight"].T
        hidden = hidden + (gate * up) @ weights[f"{prefix}.mlp.down_proj.weight"].T
    return norm(hidden, "model.norm") @ weights["lm_head.weight"].T


def rotated(x: Tensor) -> Tensor:
    frequency = 10000.0 ** (-torch.arange(0, DIM, 2).double() / DIM)
    angle = torch.arange(len(x)).double()[:, None, None] * frequency
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, config: KVCacheConfig, blocks: list[tuple[Tensor, Tensor]]
) -> Tensor:
    size, out = config.block_size, torch.empty_like(q)
    sealed_k, sealed_v = k.clone(), v.clone()
    first = config.sink_blocks
    assert len(blocks) == (max(len(k) // size - first, 0) if config.seals else 0)
    for block, (block_k, block_v) in enumerate(blocks, start=first):
        span = slice(block * size, (block + 1) * size)
        for mine, theirs in ((k[span], block_k), (v[span], block_v)):
            torch.testing.assert_close(theirs.transpose(0, 1).double(), mine, atol=1e-4, rtol=0)
        bits_k, bits_v = BITS[config.dtype]
        sealed_k[span] = through_codes(block_k, 1, bits_k, config.dtype).transpose(0, 1)
        sealed_v[span] = through_codes(block_v, 2, bits_v, config.dtype).transpose(0, 1)
    for t in range(len(q)):
        choose = [config.reads_sealed(s // size, t // size) for s in range(t + 1)]
        pick = torch.tensor(choose)[:, None, None]
        keys = torch.where(pick, sealed_k[: t + 1], k[: t + 1])
        values = torch.where(pick, sealed_v[: t + 1], v[: t + 1])
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = keys[:, kv_head] @ q[t, head] / math.sqrt(DIM)
            out[t, head] = torch.softmax(scores, 0) @ values[:, kv_head]
    return out.flatten(1)


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4", "k8v4", "fp8"])
@pytest.mark.parametrize(("sink", "residual"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_agrees_with_one_query_at_a_time(dtype: str, sink: int, residual: int) -> None:
    check(KVCacheConfig(dtype=dtype, block_size=16, sink_blocks=sink, residual_blocks=residual))


@pytest.mark.parametrize("dtype", ["int4", "bf16"])
def test_every_layer_by_its_own_policy(dtype: str) -> None:
    layers = (
        LayerPolicy(layer=2, dtype="k8v4", sink_blocks=2, residual_blocks=0),
        LayerPolicy(layer=0, dtype="int8", sink_blocks=0, residual_blocks=1),
    )
    check(KVCacheConfig(dtype=dtype, block_size=16, layers=layers))


def check(config: KVCacheConfig) -> None:
    model = tiny_model("llama")
    executor = executor_of(model, config)
    executor.allocate_kv(pool_sizes(executor, 10, 10))
    ids = torch.randint(0, VOCAB_SIZE, (71,), generator=torch.Generator().manual_seed(1)).tolist()
    sealed = Sealed(executor)
    actual = logits_in_chunks(executor, ids, [13, 40, 71])
    expected = naive_logits(model, ids, config, sealed)
    torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=0)
