"""P2 and P5 on the compiled kernels: bits that no batch, chunk, thread or neighbour changes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cpu.quantized_models import KINDS, WeightKind, quantized_checkpoint
from qdeploy.kv.config import KV_DTYPES, KVCacheConfig
from qdeploy.runtime.batch import StepBatch
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.executors.base import Executor
from tables import SequenceTables, fresh_pools, run_chunks
from tiny_models import tiny_checkpoint

LENGTH = 75
TOKENS = torch.randint(0, 256, (1600,), generator=torch.Generator().manual_seed(5)).tolist()
PROMPT = TOKENS[:LENGTH]
POLICIES = [
    KVCacheConfig(dtype=dtype, block_size=size, sink_blocks=sink, residual_blocks=residual)
    for dtype, size, (sink, residual) in itertools.product(
        KV_DTYPES, (16, 32), ((0, 0), (1, 0), (1, 1))
    )
    if dtype != "bf16" or (sink, residual) == (0, 0)
]
INT4 = KVCacheConfig(dtype="int4", block_size=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quantized linears and 4-bit tables: every matrix takes int8 activations."""
    return quantized_checkpoint("llama", tmp_path_factory.mktemp("q"), KINDS["4-bit tables"])


def load(
    folder: Path, kv: KVCacheConfig = INT4, threads: int = 1, act: str | None = "int8"
) -> Executor:
    return load_executor(folder, backend="cpu", kv_config=kv, threads=threads, act=act)


@pytest.mark.parametrize("act", ["int8", "fp32"])
def test_spike_query_tiles_that_straddle_a_block_equal_one_query_decode(
    folder: Path, act: str, isa: str
) -> None:
    """A tile of queries from both sides of a block's end: the later ones read it sealed."""
    base = load(folder, act=act)
    for policy in POLICIES:
        executor = base.with_kv(policy)
        single = run_chunks(executor, PROMPT, range(1, LENGTH + 1))
        assert single.isfinite().all()
        for bounds in ([LENGTH], [13, 40, LENGTH], [*range(5, LENGTH, 5), LENGTH], [31, 34, 75]):
            assert torch.equal(run_chunks(executor, PROMPT, bounds), single), (policy.key, bounds)


@pytest.mark.parametrize("dtype", ["bf16", "int4"])
def test_long_contexts_are_split_at_fixed_places(folder: Path, dtype: str, isa: str) -> None:
    """More context than one piece of work: prefill in chunks, then single queries."""
    found = []
    for threads, bounds in ((1, [1500, *range(1501, 1511)]), (2, [700, 701, 1510]), (3, [1510])):
        executor = load(folder, KVCacheConfig(dtype=dtype, block_size=64), threads)
        found.append(run_chunks(executor, TOKENS[:1510], bounds)[-10:])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_r28_r03_threads_and_neighbours_change_no_bit(folder: Path, threads: int, isa: str) -> None:
    """Decoding one, verifying six, prefill: in one step, among 12 others, on any threads."""
    solo = run_chunks(load(folder), PROMPT, [LENGTH])
    executor = load(folder, threads=threads)
    ids = fresh_pools(executor, 120)
    tables = [SequenceTables(ids) for _ in range(14)]
    first = [tables[i].slice(PROMPT[: 60 + i], 0, 0) for i in range(13)]
    executor.execute(StepBatch(first))
    counts = [6 if i % 2 else 1 for i in range(13)]
    pieces = [
        tables[i].slice(PROMPT[60 + i : 60 + i + counts[i]], 60 + i, counts[i])
        for i in range(13)
        if 60 + i + counts[i] <= LENGTH
    ]
    pieces.insert(4, tables[13].slice(PROMPT[:50], 0, 2))
    got = executor.execute(StepBatch(pieces))
    row = 0
    for piece in pieces:
        end = piece.start + len(piece.token_ids)
        wanted = solo[end - piece.num_logits : end]
        assert torch.equal(got[row : row + piece.num_logits], wanted), piece.start
        row += piece.num_logits
    assert row == len(got)


@pytest.mark.parametrize("group", [8, 16, 64, 128, 512, 1024, -1])
def test_a06_prefill_equals_decode_for_every_group_size(group: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 64, "num_key_value_heads": 64}
    kind = WeightKind(format="gptq", symmetric=True, group=group)
    executor = load(quantized_checkpoint("llama", tmp_path, kind, **sizes))
    whole = run_chunks(executor, PROMPT[:20], [20])
    assert torch.equal(run_chunks(executor, PROMPT[:20], range(1, 21)), whole)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a05_every_bit_width_keeps_its_bits(bits: int, tmp_path: Path) -> None:
    kind = WeightKind(format="gptq_v2", bits=bits)
    executor = load(quantized_checkpoint("qwen2", tmp_path, kind))
    whole = run_chunks(executor, PROMPT, [LENGTH])
    assert torch.equal(run_chunks(executor, PROMPT, [20, 21, 22, LENGTH]), whole)


@pytest.mark.parametrize("kind", ["float8 rows", "float8 blocks"])
def test_a05_float8_keeps_its_bits(kind: str, isa: str, tmp_path: Path) -> None:
    path = quantized_checkpoint("llama", tmp_path, KINDS[kind])
    for act in (None, "fp32"):
        whole = run_chunks(load(path, act=act), PROMPT, [LENGTH])
        executor = load(path, act=act, threads=3)
        for bounds in ([20, 21, 22, LENGTH], range(1, LENGTH + 1)):
            assert torch.equal(run_chunks(executor, PROMPT, bounds), whole)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_x07_a_nearly_full_pool_gives_the_same_bits(folder: Path, dtype: str, isa: str) -> None:
    executor = load(folder, KVCacheConfig(dtype=dtype, block_size=16))
    expected = run_chunks(executor, PROMPT, [LENGTH])
    ids = fresh_pools(executor, 384)
    for start in range(0, 65 * 20, 20):  # 5 blocks each, 325 of 384
        other = SequenceTables(ids)
        executor.execute(StepBatch([other.slice(TOKENS[start : start + 75], 0, 1)]))
    assert torch.equal(run_chunks(executor, PROMPT, [30, LENGTH], ids), expected)


def with_a_token_that_overflows(folder: Path) -> Path:
    """Gemma multiplies embeddings: 3e38 becomes infinite, its norm NaN. 255 is that token."""
    path = tiny_checkpoint("gemma3_text", folder, tie_word_embeddings=False)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][255] = 3e38
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("act", ["int8", "fp32"])
def test_p5_a_neighbours_nan_stays_its_own(act: str, isa: str, tmp_path: Path) -> None:
    """In prefill and in decoding, and its blocks don't poison who gets them next."""
    executor = load(with_a_token_that_overflows(tmp_path), act=act)
    well = [t % 255 for t in PROMPT]
    sick = [*well[:9], 255, *well[10:]]
    solo = run_chunks(executor, well, [LENGTH])
    assert solo.isfinite().all()
    ids = fresh_pools(executor)
    tables = [SequenceTables(ids) for _ in range(3)]
    rows: list[Tensor] = []
    for low, high in ((0, 40), (40, 41), (41, LENGTH)):
        texts = (well, sick, well)
        pieces = [t.slice(x[low:high], low, 1) for t, x in zip(tables, texts, strict=True)]
        rows.append(executor.execute(StepBatch(pieces)))
    for row, position in zip(rows, (39, 40, LENGTH - 1), strict=True):
        assert torch.equal(row[0], solo[position])
        assert torch.equal(row[2], solo[position])
        assert not row[1].isfinite().all()
    for block in tables[1].groups[0].open.values():
        ids[0].give_open(block)
    assert torch.equal(run_chunks(executor, well, [20, LENGTH], ids), solo)


def test_instruction_sets_agree_within_a_tolerance(
    folder: Path, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to the bit: vectors of another width add in another order."""
    mine = run_chunks(load(folder, KVCacheConfig(block_size=16), act="fp32"), PROMPT, [LENGTH])
    monkeypatch.setenv("QDEPLOY_CPU_ISA", "portable")
    other = run_chunks(load(folder, KVCacheConfig(block_size=16), act="fp32"), PROMPT, [LENGTH])
    assert (mine - other).abs().max() <= 1e-5 * other.abs().max()
