"""The whole way on a real model: quantize, measure, serve, ask with the official openai client.

usage: demo.py [RECIPE] [OUTPUT]

Exits 0 only if the accuracy gate passes and the served model knows the capital of France. The
server is stopped in every case: success, failure, Ctrl-C, SIGTERM or running out of time.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import OpenAI

LIMIT_SECONDS = 12 * 60
QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
QDEPLOY = str(Path(sys.executable).with_name("qdeploy"))


class DemoError(Exception):
    """The demo can't go on; the message says which step failed."""


class Clock:
    """Time left of the demo's limit."""

    def __init__(self, limit_seconds: float) -> None:
        self.start = time.monotonic()
        self.limit_seconds = limit_seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    @property
    def left(self) -> float:
        """Seconds left, at least a little so that a timeout is never negative."""
        return max(self.limit_seconds - self.elapsed, 0.1)


def main(recipe: str, output: Path) -> None:
    """Run the four steps."""
    clock = Clock(LIMIT_SECONDS)
    # Measured by `eval` below, so not twice.
    step(
        ["quantize", "--recipe", recipe, "-o", str(output), "--overwrite", "--eval", "none"], clock
    )
    step(["eval", str(output)], clock)
    with server(output, clock) as url:
        answer = ask(url, clock)
    print(f"\nQ: {QUESTION}\nA: {answer}\n")
    if EXPECTED not in answer:
        raise DemoError(f"the answer doesn't name {EXPECTED}")
    size = sum(path.stat().st_size for path in output.iterdir() if path.is_file())
    print(f"demo passed in {clock.elapsed:.0f} s; {output} is {size / 1e6:.1f} MB on disk")


def step(arguments: list[str], clock: Clock) -> None:
    """Run one qdeploy command in the foreground; its output is the demo's."""
    print(f"\n$ qdeploy {' '.join(arguments)}", flush=True)
    try:
        done = subprocess.run([QDEPLOY, *arguments], timeout=clock.left, check=False)
    except subprocess.TimeoutExpired:
        raise DemoError(f"`qdeploy {arguments[0]}` ran past the {LIMIT_SECONDS} s limit") from None
    if done.returncode:
        raise DemoError(f"`qdeploy {arguments[0]}` exited with code {done.returncode}")


@contextmanager
def server(artifact: Path, clock: Clock) -> Iterator[str]:
    """A running server's base URL; SIGTERM on the way out, SIGKILL if it doesn't drain."""
    port = free_port()
    command = ["serve", str(artifact), "--port", str(port)]
    print(f"\n$ qdeploy {' '.join(command)} &", flush=True)
    process = subprocess.Popen([QDEPLOY, *command])
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process, clock)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(url: str, process: subprocess.Popen[bytes], clock: Clock) -> None:
    """Poll /ready; raises DemoError when the server exits or time runs out."""
    while clock.left > 1:
        if process.poll() is not None:
            raise DemoError(f"`qdeploy serve` exited with code {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise DemoError("the server wasn't ready in time")


def ask(url: str, clock: Clock) -> str:
    """One greedy chat answer through the openai client."""
    client = OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=clock.left, max_retries=0)
    model = client.models.list().data[0].id
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=40,
    )
    return reply.choices[0].message.content or ""


def _terminated(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    chosen = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-awq"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else Path("artifacts") / chosen
    try:
        main(chosen, target)
    except DemoError as failure:
        sys.exit(f"demo failed: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
