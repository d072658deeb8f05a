"""benchmarks/cpu.py end to end on a tiny model beside stand-in peers, and the tables made of it."""

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
#: A prompt of 16 tokens in 2 s, then 3 tokens in 0.5 s.
BATCHED_BENCH = """
import json, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert words["-npp"] == "16" and words["-ntg"] == "3" and words["-c"] == "20" and words["-t"] == "1"
assert open(words["-m"]).read() == "Q4_0"
print(json.dumps({"t_pp": 2.0, "t_tg": 0.5}))
"""
QUANTIZE = """
import sys
assert open(sys.argv[1], "rb").read(4) == b"GGUF"
open(sys.argv[2], "w").write(sys.argv[3])
"""
#: Stands in for a Python with openvino-genai but no exporter: one token a second.
OPENVINO = """
import json, sys
if sys.argv[1] == "-c":
    sys.exit(1)
assert sys.argv[1].endswith("openvino_driver.py") and json.loads(sys.argv[2])["kv"] == "u8"
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    late = json.loads(line)["output"] - 1
    told = {"first_s": 1.0, "total_s": 1.0 + late, "late_tokens": late}
    print(json.dumps(told), flush=True)
"""


def program(path: Path, code: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    model = tiny_checkpoint("llama", folder / "model", **sizes)
    program(folder / "bin" / "llama-batched-bench", BATCHED_BENCH)
    program(folder / "bin" / "llama-quantize", QUANTIZE)
    python = program(folder / "bin" / "python", OPENVINO)
    done = run(
        "cpu.py",
        *("--quick", "--backend", "reference", "--repeats", "2", "--threads", "1"),
        *(
            "--model",
            str(model),
            "--work",
            str(folder / "work"),
            "--only",
            r"SmolLM2-135M \| decode \|",
        ),
        *("--llama-cpp", str(folder / "bin"), "--openvino", str(python)),
        *("--json", str(folder / "out.json")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out.json"


def test_rows_compare_ours_with_the_best_peer(out: Path) -> None:
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    assert all(set(row) == KEYS and row["n"] == 2 for row in rows)
    by_engine = {row["name"].removeprefix("SmolLM2-135M | decode | "): row for row in rows}
    assert by_engine["llama.cpp Q4_0 KV f16"]["value"] == 6
    assert by_engine["OpenVINO Q4_0 KV u8"]["value"] == 1
    ours = by_engine["qdeploy W4 head 8-bit KV int8"]
    assert ours["against"] == "llama.cpp Q4_0 KV f16"
    assert ours["ratio"] == ours["value"] / 6 > 0


def test_tables_have_a_line_for_each_of_our_rates(out: Path) -> None:
    done = run("table.py", str(out))
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "W4 head 8-bit" in line)
    assert line.startswith("| SmolLM2-135M, decode: W4 head 8-bit KV int8 |")
    assert "| 6.0 | 1.0 |" in line


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cpu_cases
    import cpu_rows
    import figures
    from peers import contestant, lines

    return SimpleNamespace(
        cases=cpu_cases, rows=cpu_rows, figures=figures, contestant=contestant, lines=lines
    )


def timing(modules: SimpleNamespace, total_s: float, **extras: float) -> Any:
    load = modules.contestant.Load(batch=1, prompt=10, output=11)
    return modules.contestant.Timing(
        load=load, first_s=1.0, total_s=total_s, late_tokens=10, extras=extras
    )


def test_steps_count_tokens_from_when_every_request_has_one(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([1.0, 3.0, 9.0])
    monkeypatch.setattr(modules.lines.time, "perf_counter", lambda: next(clock))
    load = {"batch": 2, "prompt": 4, "output": 3}
    steps = [[(0, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1)], [(1, 1)]]
    told = modules.lines.timed(load, 0.0, steps)
    assert told == {"first_s": 3.0, "total_s": 9.0, "late_tokens": 3}


def test_prompts_are_new_for_every_seed(modules: SimpleNamespace) -> None:
    first, again, other = (
        modules.lines.random_prompts({"batch": 2, "prompt": 8, "seed": seed}, 1000)
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first[0] != first[1]


def test_kv_formats_are_compared_repeat_by_repeat(modules: SimpleNamespace) -> None:
    workload = modules.cases.Workload(
        model="M",
        load=modules.contestant.Load(batch=1, prompt=10, output=11),
        rates={"decode": "decode_rate"},
        compare_kvs=(("int8", "bf16"),),
    )
    # int8 is twice as fast in each repeat, though the second repeat is slow for both.
    ours = {
        (8, "bf16"): [timing(modules, 3.0), timing(modules, 41.0)],
        (8, "int8"): [timing(modules, 2.0), timing(modules, 21.0)],
    }
    rows = list(modules.rows.workload_rows(workload, ours, {}))
    found = next(row for row in rows if "over bf16" in row["name"])
    assert found["ratio"] == 2.0


def test_step_facts_are_ratios_to_the_raw_step_and_to_the_read(modules: SimpleNamespace) -> None:
    workload = modules.cases.Workload(
        model="SmolLM2-135M",
        load=modules.contestant.Load(batch=1, prompt=10, output=11),
        rates={"decode": "decode_rate"},
        step_facts=True,
    )
    told = {"step_s": 0.12, "raw_step_s": 0.1, "read_s": 0.08, "step_bytes": 5e6}
    ours = {(4, "int8"): [timing(modules, 2.0, **told)]}
    rows = list(modules.rows.workload_rows(workload, ours, {}))
    ratios = {row["name"]: row["ratio"] for row in rows}
    engine = "qdeploy W4 head 4-bit KV int8"
    assert ratios[f"SmolLM2-135M | decode, engine over raw step | {engine}"] == pytest.approx(1.2)
    bound = f"SmolLM2-135M | decode, of the bandwidth bound | {engine}"
    assert ratios[bound] == pytest.approx(0.8)  # ten tokens a second, 0.08 s each at best
    missed = [
        line
        for line in modules.figures.verdicts(rows, modules.cases.TARGETS)
        if line.startswith("MISSED")
    ]
    assert len(missed) == 1
    assert "engine over raw step" in missed[0]


def test_every_target_is_about_a_row_that_a_full_run_has(modules: SimpleNamespace) -> None:
    told = {"step_s": 0.12, "raw_step_s": 0.1, "read_s": 0.08, "step_bytes": 5e6}
    rows = []
    for workload in modules.cases.WORKLOADS:
        variants = [(head, kv) for head in workload.heads for kv in workload.kvs]
        ours = {variant: [timing(modules, 2.0, **told)] for variant in variants}
        rows += modules.rows.workload_rows(workload, ours, {"peer": [timing(modules, 2.0)]})
    rows += modules.rows.long_prefill_rows(rows)
    names = [row["name"] for row in rows if row["ratio"] is not None]
    for target in modules.cases.TARGETS:
        assert any(re.search(target.pattern, name) for name in names), target.pattern
