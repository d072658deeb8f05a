"""The cpu executor's logits against the reference executor's, which share nothing but a spec."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cpu.quantized_models import KINDS, bfloat16_checkpoint, quantized_checkpoint
from qdeploy.kv.config import KV_DTYPES, KVCacheConfig, LayerPolicy
from qdeploy.runtime.executors import load_executor
from tables import run_chunks
from tiny_models import ARCHITECTURES, tiny_checkpoint

TOKENS = torch.randint(0, 256, (75,), generator=torch.Generator().manual_seed(5)).tolist()
BF16 = KVCacheConfig(block_size=16)


def logits(folder: Path, backend: str, act: str | None, kv: KVCacheConfig = BF16) -> Tensor:
    executor = load_executor(folder, backend=backend, act=act, kv_config=kv, threads=1)
    return run_chunks(executor, TOKENS, [40, 41, 75])


def difference(folder: Path, act: str, kv: KVCacheConfig = BF16) -> float:
    """Largest difference over the largest logit."""
    expected = logits(folder, "reference", "fp32", kv)
    worst = (logits(folder, "cpu", act, kv) - expected).abs().max()
    return float(worst / expected.abs().max())


def divergence(folder: Path, act: str | None, kv: KVCacheConfig = BF16) -> float:
    """Mean KL of the cpu executor's distributions from the reference's, nats."""
    p = logits(folder, "reference", "fp32", kv).double().log_softmax(-1)
    q = logits(folder, "cpu", act, kv).double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture(arch: str, isa: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(arch, tmp_path)
    assert difference(folder, "fp32") < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_weight(kind: str, isa: str, tmp_path: Path) -> None:
    folder = quantized_checkpoint("llama", tmp_path, KINDS[kind])
    assert difference(folder, "fp32") < 1e-5
    assert divergence(folder, KINDS[kind].act) < 0.02


def test_a_bfloat16_model(isa: str, tmp_path: Path) -> None:
    assert difference(bfloat16_checkpoint("qwen3", tmp_path), "fp32") < 1e-5


def test_biases_and_windows_of_quantized_models(isa: str, tmp_path: Path) -> None:
    for arch, kind in (("qwen2", "awq"), ("gemma3_text", "act-order"), ("qwen3", "8 bits")):
        folder = quantized_checkpoint(arch, tmp_path / arch, KINDS[kind])
        assert difference(folder, "fp32") < 1e-5


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("sink", "residual"), [(0, 0), (1, 0), (0, 1), (2, 1)])
def test_every_kv_policy(dtype: str, sink: int, residual: int, isa: str, tmp_path: Path) -> None:
    """x12: each width against the reference. A K/V at the edge of two codes may take either one,
    so that few logits may be off by the weight of a code; the mean tells a wrong code.
    """
    kv = KVCacheConfig(dtype=dtype, block_size=16, sink_blocks=sink, residual_blocks=residual)
    folder = tiny_checkpoint("qwen2", tmp_path)
    assert difference(folder, "fp32", kv) < 5e-3
    assert divergence(folder, "fp32", kv) < 1e-6
    assert divergence(folder, "int8", kv) < 0.02


@pytest.mark.parametrize("arch", ["qwen2", "gemma3_text"])
def test_policies_of_single_layers(arch: str, isa: str, tmp_path: Path) -> None:
    """With and without windows; other policies are at least four times as far off."""
    kv = KVCacheConfig(
        dtype="int4",
        block_size=16,
        layers=(
            LayerPolicy(layer=0, dtype="int8", sink_blocks=0, residual_blocks=1),
            LayerPolicy(layer=1, dtype="bf16", sink_blocks=1, residual_blocks=0),
            LayerPolicy(layer=2, dtype="k8v4", sink_blocks=2, residual_blocks=0),
        ),
    )
    folder = tiny_checkpoint(arch, tmp_path)
    assert difference(folder, "fp32", kv) < 5e-3
    assert divergence(folder, "fp32", kv) < 1e-6
    expected = logits(folder, "reference", "fp32", kv)
    uniform = logits(folder, "cpu", "fp32", kv.for_layer(3))
    assert (uniform - expected).abs().max() > 0.02 * expected.abs().max()


def test_caps_and_windows_of_gemma(isa: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint("gemma3_text", tmp_path, final_logit_softcapping=30.0)
    for dtype in KV_DTYPES:
        assert divergence(folder, "fp32", KVCacheConfig(dtype=dtype, block_size=16)) < 1e-6


def test_larger_heads_and_odd_sizes(isa: str, tmp_path: Path) -> None:
    """Rows that don't fill a tile, columns that don't fill a vector, one KV head, wide heads."""
    sizes = {"hidden_size": 56, "intermediate_size": 104, "head_dim": 80, "vocab_size": 271}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    folder = tiny_checkpoint("qwen3", tmp_path, **sizes, **heads)
    for dtype in KV_DTYPES:
        assert divergence(folder, "fp32", KVCacheConfig(dtype=dtype, block_size=32)) < 1e-6
    assert difference(folder, "fp32") < 1e-5
