"""What `qdeploy serve` loads before it answers: nothing heavy that its path doesn't need."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from qdeploy.server.serve import _no_collections
from qdeploy.server.stopwatch import Stopwatch
from tiny_models import tiny_checkpoint

#: Each takes from 0.1 s to seconds to import.
HEAVY = (
    "fastapi",
    "gguf",
    "huggingface_hub",
    "networkx",
    "pandas",
    "requests",
    "scipy",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "transformers",
    "triton",
    "yaml",
)

#: Serves a folder, asks for one chat and one metrics page, and prints what is imported by then.
SCRIPT = """
import asyncio, json, sys
sys.argv = ["qdeploy", *sys.argv[1:]]
from qdeploy.cli import main
from qdeploy.server.listen import DrainingServer

async def ask(path, body=b""):
    reader, writer = await asyncio.open_connection(*DrainingServer.address)
    method = b"POST" if body else b"GET"
    writer.write(method + b" %s HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n" % path)
    writer.write(b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
    return await reader.read()

async def talk(server):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}
    stream = await ask(b"/v1/chat/completions", json.dumps(chat).encode())
    assert b"data: [DONE]" in stream, stream
    chat["stream"] = False
    whole = await ask(b"/v1/chat/completions", json.dumps(chat).encode())
    assert b'"completion_tokens":3' in whole, whole
    assert b"qdeploy:generation_tokens_total 6.0" in await ask(b"/metrics")
    print(json.dumps(sorted(sys.modules)))
    server.should_exit = True

startup = DrainingServer.startup

async def started(self, sockets=None):
    await startup(self, sockets)
    DrainingServer.address = sockets[0].getsockname()
    self.talk = asyncio.ensure_future(talk(self))

DrainingServer.startup = started
main()
"""


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_served_answer_needs_nothing_heavy(tmp_path: Path, backend: str) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    command = [sys.executable, "-c", SCRIPT, "serve", str(folder), "--port", "0"]
    done = subprocess.run(
        [*command, "--backend", backend], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    modules = set(json.loads(done.stdout))
    assert "torch" in modules
    assert sorted(modules.intersection(HEAVY)) == []


def test_the_command_line_itself_needs_no_torch() -> None:
    code = "import sys, qdeploy.cli; print(sorted(set(sys.modules) & set(sys.argv[1:])))"
    unwanted = [*HEAVY, "torch", "numpy", "pydantic", "uvicorn", "tokenizers"]
    done = subprocess.run([sys.executable, "-c", code, *unwanted], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_what_a_start_made_is_not_collected_again() -> None:
    gc.collect()
    with _no_collections():
        assert not gc.isenabled()
        kept = [[index] for index in range(1000)]
    try:
        assert gc.isenabled()
        assert gc.get_freeze_count() >= len(kept)
    finally:
        gc.unfreeze()


def test_a_failed_start_leaves_collection_on() -> None:
    with pytest.raises(ValueError, match="no"), _no_collections():
        raise ValueError("no")
    assert gc.isenabled()


def test_the_benchmark_reads_a_starts_phases(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    script = Path(__file__).parents[2] / "benchmarks" / "startup.py"
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(script), str(folder), "--runs", "2", "--json", str(figures)]
    done = subprocess.run(
        [*command, "--", "--backend", "reference", "--num-kv-blocks", "20"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    values = {row["name"]: row["value"] for row in json.loads(figures.read_text())}
    phases = [values[f"startup {name}"] for name in ("imports", "tokenizer", "weights")]
    assert 0 < sum(phases) < values["startup ready"] < values["startup first token"]


def test_a_stopwatch_adds_up() -> None:
    watch = Stopwatch()
    watch.lap("imports")
    watch.lap("weights")
    assert str(watch).startswith(f"{sum(watch.phases.values()):.2f} s: imports 0.0")
