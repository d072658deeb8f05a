"""The embeddings policy: every executor gets the same codes; the reference computes with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from executors.driving import chunks, logits_in_chunks
from qdeploy.errors import UsageError
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.manifest import BaseModelRecord, EmbeddingsRecord, Manifest, write_manifest
from qdeploy.kv.config import KVCacheConfig
from qdeploy.models.spec import spec_from_config
from qdeploy.quantization.embeddings import quantize_table
from qdeploy.quantization.scheme import QuantizedLinear
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.executors.reference import ReferenceExecutor
from qdeploy.runtime.executors.weights import WeightSource
from tables import pool_sizes
from tiny_models import tiny_checkpoint

FOUR = EmbeddingsRecord(bits=4, group_size=64, symmetric=True)
POLICIES = (
    FOUR,
    EmbeddingsRecord(bits=8, group_size=32, symmetric=True),
    EmbeddingsRecord(bits=4, group_size=16, symmetric=False),
)


def with_policy(folder: Path, policy: EmbeddingsRecord) -> Path:
    manifest = Manifest(base_model=BaseModelRecord(name="base"), recipe={}, embeddings=policy)
    write_manifest(folder, manifest)
    return folder


def source_of(folder: Path) -> WeightSource:
    checkpoint = open_checkpoint(folder)
    return WeightSource(checkpoint, spec_from_config(checkpoint.config))


def edit_tensors(folder: Path, changes: dict[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | changes, path, metadata={"format": "pt"})


def logits(folder: Path) -> Tensor:
    executor = load_executor(folder, backend="reference", kv_config=KVCacheConfig(block_size=16))
    assert isinstance(executor, ReferenceExecutor)
    executor.allocate_kv(pool_sizes(executor, 4, 0))
    return logits_in_chunks(executor, list(range(40, 90)), chunks(50, 20))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.key)
def test_logits_are_those_of_the_dequantized_tables(
    policy: EmbeddingsRecord, tied: bool, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "m", tie_word_embeddings=tied)
    dense = tiny_checkpoint("llama", tmp_path / "dense", tie_word_embeddings=tied)
    before = logits(dense)
    tables = [f"{name}.weight" for name in ("model.embed_tokens", "lm_head")[: 1 if tied else 2]]
    stored = load_file(dense / "model.safetensors")
    rounded = {name: quantize_table(stored[name], policy.scheme()) for name in tables}
    edit_tensors(dense, {name: q.dequantize() for name, q in rounded.items()})
    expected = logits(dense)
    assert torch.equal(logits(with_policy(folder, policy)), expected)
    assert not torch.equal(expected, before)


def test_a_tied_table_is_rounded_once_for_both(tmp_path: Path) -> None:
    folder = with_policy(tiny_checkpoint("llama", tmp_path, tie_word_embeddings=True), FOUR)
    source = source_of(folder)
    embedding = source.embedding()
    assert isinstance(embedding, QuantizedLinear)
    assert embedding.scheme == FOUR.scheme()
    assert source.head() is None
    # a copy of the table stored as the head is still one table
    edit_tensors(folder, {"lm_head.weight": open_checkpoint(folder).weight("model.embed_tokens")})
    assert source_of(folder).head() is None


def test_untied_tables_are_both_rounded(tmp_path: Path) -> None:
    source = source_of(with_policy(tiny_checkpoint("llama", tmp_path), FOUR))
    embedding, head = source.embedding(), source.head()
    assert isinstance(embedding, QuantizedLinear)
    assert isinstance(head, QuantizedLinear)
    assert not torch.equal(embedding.codes, head.codes)


def test_without_a_policy_tables_stay_as_stored(tmp_path: Path) -> None:
    source = source_of(tiny_checkpoint("llama", tmp_path))
    assert isinstance(source.embedding(), Tensor)
    assert isinstance(source.head(), Tensor)
    weight, bias = source.linear(0, "mlp.up_proj")
    assert isinstance(weight, Tensor)
    assert weight.shape == (96, 64)
    assert bias is None


@pytest.mark.parametrize("change", [{"bits": 5}, {"group_size": 48}, {"group_size": -1}])
def test_an_unknown_policy_is_refused(change: dict[str, int], tmp_path: Path) -> None:
    policy = FOUR.model_copy(update=change)
    folder = with_policy(tiny_checkpoint("llama", tmp_path), policy)
    with pytest.raises(UsageError, match="aren't known to this qdeploy") as info:
        load_executor(folder, backend="reference", kv_config=KVCacheConfig())
    assert "\n" not in str(info.value)
