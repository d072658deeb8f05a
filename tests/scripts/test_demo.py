"""The demo must fail on a wrong answer, and never leave a server behind."""

from __future__ import annotations

import importlib.util
import stat
import sys
import textwrap
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo.py"

#: A stand-in for the `qdeploy` command: `serve` answers like an OpenAI server.
COMMAND = """
    #!{python}
    import json, os, sys, time
    from http.server import BaseHTTPRequestHandler, HTTPServer

    open({log!r}, "a").write(f"{{os.getpid()}} {{sys.argv[1]}}\\n")
    if sys.argv[1] == {broken!r}:
        sys.exit(1)
    if sys.argv[1] == "quantize":
        out = sys.argv[sys.argv.index("-o") + 1]
        os.makedirs(out, exist_ok=True)
    if sys.argv[1] != "serve":
        sys.exit(0)

    class Handler(BaseHTTPRequestHandler):
        def reply(self, body):
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            model = {{"id": "m", "object": "model", "created": 0, "owned_by": "x"}}
            self.reply({{"object": "list", "data": [model]}})

        def do_POST(self):
            message = {{"role": "assistant", "content": {answer!r}}}
            choice = {{"index": 0, "finish_reason": "stop", "message": message}}
            self.reply({{"id": "1", "object": "chat.completion", "created": 0, "model": "m",
                        "choices": [choice]}})

        def log_message(self, *args):
            pass

    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/demo.py as a module."""
    spec = importlib.util.spec_from_file_location("demo_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo_script", module)
    spec.loader.exec_module(module)
    return module


def install(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, answer: str, broken: str = ""
) -> Path:
    """Put a stand-in command in place; returns its log of `PID COMMAND` lines."""
    log, command = folder / "log", folder / "qdeploy"
    text = (
        textwrap.dedent(COMMAND)
        .strip()
        .format(python=sys.executable, log=str(log), answer=answer, broken=broken)
    )
    command.write_text(text)
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(demo, "QDEPLOY", str(command))
    return log


def calls(log: Path) -> list[tuple[int, str]]:
    """What was run, in order."""
    return [(int(pid), name) for pid, name in map(str.split, log.read_text().splitlines())]


def is_running(pid: int) -> bool:
    """Whether a process of this id exists and isn't a zombie."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_right_answer_passes(
    demo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = install(demo, monkeypatch, tmp_path, "The capital of France is Paris.")
    demo.main("some-recipe", tmp_path / "out")
    assert [name for _, name in calls(log)] == ["quantize", "eval", "serve"]
    assert not is_running(calls(log)[-1][0])
    assert "A: The capital of France is Paris." in capsys.readouterr().out


def test_wrong_answer_fails_and_stops_the_server(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = install(demo, monkeypatch, tmp_path, "!!!!!!!!")
    with pytest.raises(demo.DemoError, match="Paris"):
        demo.main("some-recipe", tmp_path / "out")
    assert not is_running(calls(log)[-1][0])


@pytest.mark.parametrize("broken", ["quantize", "eval", "serve"])
def test_a_failed_step_is_named(
    broken: str, demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = install(demo, monkeypatch, tmp_path, "Paris", broken)
    with pytest.raises(demo.DemoError, match=f"`qdeploy {broken}` exited with code 1"):
        demo.main("some-recipe", tmp_path / "out")
    assert calls(log)[-1][1] == broken


def test_a_server_that_never_gets_ready_is_stopped(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = install(demo, monkeypatch, tmp_path, "Paris")
    monkeypatch.setattr(demo.urllib.request, "urlopen", _refuse)
    clock = demo.Clock(4)
    with pytest.raises(demo.DemoError, match="ready"), demo.server(tmp_path, clock):
        pass
    assert not is_running(calls(log)[-1][0])
    assert time.monotonic() - clock.start < 10


def _refuse(*args: object, **kwargs: object) -> None:
    raise OSError("refused")
