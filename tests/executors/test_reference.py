"""What an executor must survive: hostile pools, broken tables, a neighbour's NaN, bad weights.

On every backend that is there, unless a test looks inside the reference executor.
"""

from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backends import BACKENDS
from qdeploy.errors import CapacityError, FormatError, UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.batch import SequenceSlice, StepBatch
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.executors.base import Executor
from tables import SequenceTables, fresh_pools, pool_sizes, run_chunks
from tiny_models import tiny_checkpoint

INT4 = KVCacheConfig(dtype="int4", block_size=16)
TOKENS = torch.randint(0, 256, (75,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=BACKENDS)
def base(folder: Path, request: pytest.FixtureRequest) -> Executor:
    return load_executor(folder, backend=request.param, kv_config=INT4)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Executor:
    return load_executor(folder, backend="reference", kv_config=INT4)


@pytest.mark.parametrize("dtype", ["bf16", "int4", "k8v4", "fp8"])
@pytest.mark.parametrize(("sink", "residual"), [(0, 0), (1, 2), (2, 1)])
def test_only_what_was_written_is_read(
    base: Executor, dtype: str, sink: int, residual: int
) -> None:
    """Pools start as NaN and ids are reused at once; blocks of 8 cut the query tiles, too."""
    size = 8 if base.name == "reference" else 16
    executor = base.with_kv(
        KVCacheConfig(dtype=dtype, block_size=size, sink_blocks=sink, residual_blocks=residual)
    )
    whole = run_chunks(executor, TOKENS, [75])
    assert whole.isfinite().all()
    for bounds in ([8, 16, 75], [3, 4, 30, 31, 32, 75], [74, 75]):
        assert torch.equal(run_chunks(executor, TOKENS, bounds), whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gemma_keeps_its_bits_too(tmp_path: Path, backend: str) -> None:
    """Sliding windows, soft caps, (1 + w) norms and two rotations, in chunks."""
    caps = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 20.0}
    folder = tiny_checkpoint("gemma3_text", tmp_path / "m", **caps)
    executor = load_executor(folder, backend=backend, kv_config=INT4)
    whole = run_chunks(executor, TOKENS, [75])
    for bounds in ([16, 75], [1, 2, 3, 40, 41, 75]):
        assert torch.equal(run_chunks(executor, TOKENS, bounds), whole)


def test_a_large_batch_of_mixed_lengths(base: Executor) -> None:
    """20 decodes and a prefill in one step: rows share tiles with other requests' rows."""
    solo = [run_chunks(base, TOKENS[i:], [75 - i])[-1] for i in range(21)]
    ids = fresh_pools(base, 200)
    tables = [SequenceTables(ids) for _ in range(21)]
    for i in range(20):
        base.execute(StepBatch([tables[i].slice(TOKENS[i:74], 0, num_logits=0)]))
    pieces = [tables[i].slice(TOKENS[74:], 74 - i, num_logits=1) for i in range(20)]
    pieces.insert(7, tables[20].slice(TOKENS[20:], 0, num_logits=1))
    order = [*range(7), 20, *range(7, 20)]
    got = base.execute(StepBatch(pieces))
    for row, i in zip(got, order, strict=True):
        assert torch.equal(row, solo[i])


def test_logits_are_of_the_last_tokens_and_the_callers_own(base: Executor) -> None:
    whole = run_chunks(base, TOKENS, [75])
    for count in (0, 1, 17):
        tables = SequenceTables(fresh_pools(base))
        got = base.execute(StepBatch([tables.slice(TOKENS, 0, num_logits=count)]))
        assert got.dtype == torch.float32
        assert torch.equal(got, whole[75 - count :])
        got.add_(1)  # a sampler may write into them


def test_a_neighbours_nan_stays_its_own(reference: Executor) -> None:
    """P5: a sequence whose cache is NaN shares every tile with a healthy one."""
    solo = run_chunks(reference, TOKENS, [75])[-1]
    ids = fresh_pools(reference)
    sick, well = SequenceTables(ids), SequenceTables(ids)
    for tables in (sick, well):
        reference.execute(StepBatch([tables.slice(TOKENS[:74], 0, num_logits=0)]))
    (pools,) = reference._pools  # type: ignore[attr-defined]
    pools.open[list(sick.groups[0].open.values())] = float("nan")
    pieces = [tables.slice(TOKENS[74:], 74, num_logits=1) for tables in (sick, well)]
    got = reference.execute(StepBatch(pieces))
    assert got[0].isnan().all()
    assert torch.equal(got[1], solo)


@pytest.mark.parametrize("kind", ["open", "sealed"])
def test_a_missing_id_is_an_error_and_not_the_last_block(base: Executor, kind: str) -> None:
    base.allocate_kv(pool_sizes(base, 8, 8))
    lists = {"open": [0, -1, 1], "sealed": [-1, 1, -1]}
    block = {"open": 0, "sealed": 1}[kind]
    lists[kind][block] = -1
    piece = SequenceSlice(
        token_ids=[1], start=40, open_blocks=[lists["open"]], sealed_blocks=[lists["sealed"]]
    )
    with pytest.raises(RuntimeError, match=f"block {block} is read {kind}"):
        base.execute(StepBatch([piece]))


def test_two_kv_formats_on_one_set_of_weights(base: Executor) -> None:
    other = base.with_kv(KVCacheConfig())
    before = run_chunks(base, TOKENS, [75])
    run_chunks(other, TOKENS, [75])
    assert other.sealed_block_bytes == (0,)
    assert base.sealed_block_bytes > (0,)
    assert torch.equal(run_chunks(base, TOKENS, [75]), before)


def test_a_cache_that_does_not_fit_is_one_line(base: Executor) -> None:
    executor = base.with_kv(INT4)
    with pytest.raises(CapacityError, match=r"GiB.*kv_cache_memory"):
        executor.allocate_kv(pool_sizes(executor, 10**9, 10**9))


@pytest.mark.parametrize("threads", [0, -2])
def test_threads_are_positive(folder: Path, threads: int) -> None:
    with pytest.raises(UsageError, match=f"threads={threads}"):
        load_executor(folder, kv_config=INT4, threads=threads)


def test_threads_are_set(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        load_executor(folder, backend="reference", kv_config=INT4, threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_choice_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="qdeploy"):
        load_executor(folder, backend="reference", kv_config=INT4)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("backend")]
    assert lines == ["backend reference (asked for), fp32 activations, KV cache int4/b16/s1/r0"]


BROKEN = {
    "nan": ("model.layers.1.mlp.up_proj.weight", lambda t: t.fill_(float("nan")), "NaN"),
    "inf": ("model.norm.weight", lambda t: t.fill_(float("inf")), "infinite"),
    "shape": (
        "model.layers.0.self_attn.k_proj.weight",
        lambda t: t[:16],
        r"\[16, 64\].*\[32, 64\]",
    ),
    "norm": ("model.layers.2.input_layernorm.weight", lambda t: t[:3], r"\[3\].*\[64\]"),
    "bias": ("model.layers.0.self_attn.o_proj.bias", lambda t: torch.ones(64), "no such bias"),
}


def broken_copy(folder: Path, target: Path, name: str, change: object) -> Path:
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.get(name, torch.zeros(64))
    tensors[name] = change(tensor).contiguous()  # type: ignore[operator]
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_weights_are_named(folder: Path, tmp_path: Path, kind: str, backend: str) -> None:
    name, change, message = BROKEN[kind]
    target = broken_copy(folder, tmp_path / "m", name, change)
    with pytest.raises(FormatError, match=f"{re.escape(name)}.*{message}"):
        load_executor(target, backend=backend, kv_config=INT4)


def test_zero_biases_of_older_writers_are_nothing(
    folder: Path, tmp_path: Path, base: Executor
) -> None:
    name = "model.layers.0.self_attn.o_proj.bias"
    target = broken_copy(folder, tmp_path / "m", name, torch.zeros_like)
    executor = load_executor(target, backend=base.name, kv_config=INT4)
    assert torch.equal(run_chunks(executor, TOKENS, [75]), run_chunks(base, TOKENS, [75]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tied_model_that_stores_another_head_uses_it(tmp_path: Path, backend: str) -> None:
    """As transformers 5: the tensors win over config.json."""
    tied = tiny_checkpoint("llama", tmp_path / "a", tie_word_embeddings=True)
    head = "lm_head.weight"
    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    same = broken_copy(tied, tmp_path / "b", head, lambda _: embedding.clone())
    other = broken_copy(tied, tmp_path / "c", head, lambda _: embedding * 2)
    logits = [
        run_chunks(load_executor(f, backend=backend, kv_config=INT4), TOKENS, [75])
        for f in (tied, same, other)
    ]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0] * 2, logits[2])


def test_an_untied_model_without_a_head_is_an_error(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    target = tmp_path / "m"
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(FormatError, match="lm_head"):
        load_executor(target, kv_config=INT4)


def test_prefix_hits_share_blocks_in_both_pools(base: Executor) -> None:
    """Another request computed the prefix and went on differently; ids are reused at once."""
    for residual, hit in itertools.product((0, 1, 2), (1, 2, 3, 4)):
        executor = base.with_kv(
            KVCacheConfig(dtype="int4", block_size=16, residual_blocks=residual)
        )
        whole = run_chunks(executor, TOKENS, [75])
        ids = fresh_pools(executor)
        first, second = (SequenceTables(ids) for _ in range(2))
        other = [*TOKENS[: 16 * hit], 7, 8, 9]
        executor.execute(StepBatch([first.slice(other[:5], 0, num_logits=0)]))
        executor.execute(StepBatch([first.slice(other[5:], 5, num_logits=1)]))
        second.share_prefix(first, hit)
        rest = second.slice(TOKENS[16 * hit :], 16 * hit, num_logits=75 - 16 * hit)
        assert torch.equal(executor.execute(StepBatch([rest])), whole[16 * hit :])
