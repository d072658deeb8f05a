"""benchmarks/runtime.py end to end on a tiny model: every measure runs and yields its rows."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark_scripts import BENCHMARKS, run
from tiny_models import tiny_checkpoint

KEYS = {"name", "value", "unit", "ratio", "against", "n", "command", "machine"}
FIGURES = {
    "continuous batching",
    "static batching",
    "KV slots wasted",
    "sequences at a time, paged",
    "sequences at a time, reserved",
    "sealed bits per element",
    "sequences of 128 tokens held",
    "sequences of 192 tokens held",
    "first token after a shared prompt of 130 tokens",
    "longest gap of 4 streams",
    "longest gap of 4 streams, prompts whole",
    *(f"preempting {n} tokens, {way}" for n in (128, 192) for way in ("recompute", "swap", "auto")),
    "prompt lookup, copy-heavy answers",
    "prompt lookup, open answers",
    "prompt lookup, open answers, temperature 0.8",
    "prompt lookup beside OpenVINO GenAI's",
    "draft model, all answers",
    "self, all answers",
}
#: Stands in for a Python with openvino-genai and its exporter: a token a second.
OPENVINO = """
import json, os, sys
if sys.argv[1] == "-c":
    if "export" in sys.argv:
        os.mkdir(sys.argv[-1])
    sys.exit()
assert sys.argv[1].endswith("openvino_lookup_driver.py")
assert set(json.loads(sys.argv[2])) == {"model", "threads", "kv"}
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    load = json.loads(line)
    assert set(load) == {"prompt", "output", "drafts", "ngram"}
    print(json.dumps({"times_s": list(range(load["output"]))}), flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    sizes["max_position_embeddings"] = 2048  # a byte is a token: questions have up to 800
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("model"), **sizes)


@pytest.fixture(scope="module")
def out(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    words = ["--quick", "--repeats", "1", "--threads", "1"]
    words += ["--model", str(model), "--work", str(folder / "work")]
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\n{OPENVINO}")
    python.chmod(0o755)
    words += ["--openvino", str(python)]
    done = run("runtime.py", *words, "--json", str(folder / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out.json"


@pytest.fixture(scope="module")
def rows(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def test_every_measure_yields_its_rows(rows: list[dict[str, Any]]) -> None:
    assert all(set(row) == KEYS for row in rows)
    assert {row["name"].split(" | ")[1] for row in rows} == FIGURES
    assert "--openvino OPENVINO_PYTHON --json FILE.json" in rows[0]["command"]


def test_every_target_is_about_a_row_that_has_a_ratio(
    modules: SimpleNamespace, rows: list[dict[str, Any]]
) -> None:
    names = [row["name"] for row in rows if row["ratio"] is not None]
    quick, full = modules.sizes.QUICK.held, modules.sizes.FULL.held
    for target in modules.sizes.TARGETS:
        pattern = target.pattern
        for small, large in zip(quick, full, strict=True):
            pattern = pattern.replace(f"{large:,} tokens", f"{small:,} tokens")
        assert any(re.search(pattern, name) for name in names), target.pattern


def test_openvino_is_what_our_prompt_lookup_is_compared_with(rows: list[dict[str, Any]]) -> None:
    by_figure = {row["name"].split(" | ")[1]: row for row in rows}
    ours = by_figure["prompt lookup, copy-heavy answers"]
    beside = by_figure["prompt lookup beside OpenVINO GenAI's"]
    assert beside["ratio"] == beside["value"] / 1 == ours["value"]


def test_bits_are_those_of_the_layout(rows: list[dict[str, Any]]) -> None:
    """Heads of 32: keys have 4 bytes of scale and minimum for 64 tokens, values for 32 channels."""
    extra = (32 / 64 + 32 / 32) / 2
    bits = {row["name"][-4:]: row["value"] for row in rows if "sealed bits" in row["name"]}
    assert bits == {"int8": 8 + extra, "int4": 4 + extra}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import runtime_batching
    import runtime_capacity
    import runtime_check
    import runtime_session
    import runtime_sizes
    import runtime_table

    return SimpleNamespace(
        batching=runtime_batching,
        capacity=runtime_capacity,
        check=runtime_check,
        session=runtime_session,
        sizes=runtime_sizes,
        table=runtime_table,
    )


@pytest.fixture
def setup(modules: SimpleNamespace, model: Path) -> Any:
    sizes = modules.sizes.QUICK
    return modules.session.load_setup(
        "tiny", model, sizes, backend="cpu", threads=1, repeats=1, draft=model
    )


def test_x16_a_model_that_computes_nothing_gets_no_figures(
    modules: SimpleNamespace, setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules.check.check_model(setup)
    right = setup.executor.with_kv
    monkeypatch.setattr(setup.executor, "with_kv", lambda kv: modules.session.NoModel(right(kv)))
    with pytest.raises(SystemExit, match="output is wrong: KL"):
        modules.check.check_model(setup)


def test_x16_other_answers_get_no_figures(
    modules: SimpleNamespace, setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all = modules.batching.run_all

    def wrong(*arguments: Any) -> Any:
        answers, seconds = run_all(*arguments)
        return [*answers[:-1], [0]], seconds

    monkeypatch.setattr(modules.batching, "run_all", wrong)
    with pytest.raises(SystemExit, match="changes an answer"):
        list(modules.batching.batching(setup))


def test_a_static_batch_runs_to_its_longest_answer(modules: SimpleNamespace, setup: Any) -> None:
    asked = list(zip(setup.prompts([9] * 4, 0), (2, 7, 1, 3), strict=True))
    answers, _ = modules.batching.run_static(setup, asked)
    assert [len(answer) for answer in answers] == [2, 7, 1, 3]
    assert answers == modules.batching.run_all(setup, asked)[0]


def test_as_many_sequences_are_held_as_arithmetic_says(
    modules: SimpleNamespace, setup: Any
) -> None:
    """128 tokens and more: 3 blocks in bf16; in int8 2 open ones and a sealed one."""
    executor = setup.executor.with_kv(modules.session.KVCacheConfig(dtype="int8"))
    (opened,), (sealed,) = executor.open_block_bytes, executor.sealed_block_bytes
    held = modules.capacity.most_held
    assert held(setup, "bf16", 128, 27 * opened) == 9
    assert held(setup, "bf16", 128, 27 * opened - 1) == 8
    # The engine sets open blocks aside, for a step and for cached sinks; some may be free now.
    each = 2 * opened + sealed
    assert 9 <= held(setup, "int8", 128, 9 * each + (1 + 3) * opened) <= 9 + 4 * opened // each


def test_a_shared_block_counts_once_and_a_second_copy_is_waste(modules: SimpleNamespace) -> None:
    """Blocks of 8: both share sealed block 5; the first holds its second one twice, in part."""
    tables = {"a": (((-1, 3, 4),), ((5, 6, -1),)), "b": (((-1, 7, -1),), ((5, -1, -1),))}
    requests = [
        SimpleNamespace(sequence_id="a", num_computed_tokens=20),
        SimpleNamespace(sequence_id="b", num_computed_tokens=9),
        SimpleNamespace(sequence_id="has none yet", num_computed_tokens=0),
    ]
    engine = SimpleNamespace(
        config=SimpleNamespace(kv=SimpleNamespace(block_size=8)),
        scheduler=SimpleNamespace(running=requests),
        blocks=SimpleNamespace(
            tables={name: SimpleNamespace(ids=lambda ids=ids: ids) for name, ids in tables.items()}
        ),
    )
    slots = modules.batching.Slots()
    slots.note(engine)
    assert (slots.held, slots.filled) == (5 * 8, 8 + 8 + 4 + 1)
    assert (slots.sequences, slots.tokens) == (2, 29)


def test_the_page_shows_the_results_beside_it(modules: SimpleNamespace) -> None:
    """After a run: python benchmarks/runtime_table.py RESULTS docs/runtime-figures.md"""
    results = json.loads((BENCHMARKS / "results" / "runtime.json").read_text(encoding="utf-8"))
    page = (BENCHMARKS.parent / "docs" / "runtime-figures.md").read_text(encoding="utf-8")
    assert modules.table.with_table(page, modules.table.runtime_table(results)) == page
    assert all(set(row) == KEYS for row in results)


def test_the_page_takes_the_table_between_its_marks(
    modules: SimpleNamespace, rows: list[dict[str, Any]], out: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures: begin -->\nold\n<!-- figures: end -->\nafter\n")
    for _ in range(2):  # the second time replaces the first
        done = run("runtime_table.py", str(out), str(page))
        assert done.returncode == 0, done.stderr
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert len(lines) == 4 + 2 + len(rows)
    assert any(line.startswith("| sealed bits per element, KV int4 | 4.75 bits") for line in lines)
    page.write_text("no place")
    assert run("runtime_table.py", str(out), str(page)).returncode
