"""`qdeploy serve` as a process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from qdeploy.server.listen import bind
from runtime.tiny_tokenizer import write_json
from server.harness import HI
from tiny_models import VOCAB_SIZE, tiny_checkpoint

COMMAND = [sys.executable, "-c", "from qdeploy.cli import main; main()", "serve"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a byte tokenizer."""
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL, once it says that it is ready."""
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        yield process, ready_url(process)
    finally:
        process.kill()
        process.communicate()


def ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stderr
    seen = []
    for line in process.stderr:
        seen.append(line)
        match = re.search(r"ready: (http://\S+)/v1", line)
        if match:
            return match.group(1)
    raise AssertionError("".join(seen))


def test_h13_a_taken_port_ends_the_second_server_before_it_loads() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        start = time.monotonic()
        done = subprocess.run(
            [*COMMAND, "no-such-model", "--port", str(port)], capture_output=True, text=True
        )
        assert time.monotonic() - start < 3
    assert done.returncode == 2
    assert str(port) in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_server_answers_drains_on_sigterm_and_exits_0(folder: Path) -> None:
    options = ["--served-model-name", "tiny", "--api-key", "k", "--kv-cache-dtype", "int4"]
    options += ["--block-size", "16", "--max-model-len", "128", "--max-num-seqs", "2"]
    with started(str(folder), *options) as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        assert client.models.list().data[0].id == "tiny"
        replies = [
            client.chat.completions.create(
                model="tiny",
                messages=HI,  # type: ignore[arg-type]
                max_tokens=30,
                temperature=0,
            )
            for _ in range(2)
        ]
        assert replies[0].usage
        assert replies[0].usage.completion_tokens == 30
        assert replies[0].choices[0].message == replies[1].choices[0].message
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0


def test_a_stream_equals_the_whole_answer_and_ctrl_c_exits_130(folder: Path) -> None:
    with started(str(folder)) as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        model = client.models.list().data[0].id
        assert model == str(folder)
        body = {"model": model, "prompt": "abc", "max_tokens": 40, "seed": 5, "logprobs": 2}
        whole = client.completions.create(**body).choices[0]  # type: ignore[call-overload]
        text = "".join(
            chunk.choices[0].text
            for chunk in client.completions.create(**body, stream=True)  # type: ignore[call-overload]
        )
        assert text == whole.text
        assert len(whole.logprobs.tokens) == 40
        assert httpx.get(f"{url}/metrics").status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 130


def test_a13_end_token_list_of_generation_config_ends_a_chat(folder: Path) -> None:
    """Every token is an end token by generation_config.json, so one token ends the chat."""
    write_json(folder, "generation_config.json", {"eos_token_id": list(range(VOCAB_SIZE))})
    try:
        with started(str(folder)) as (_, url):
            reply = httpx.post(f"{url}/v1/chat/completions", json={"messages": HI}).json()
    finally:
        write_json(folder, "generation_config.json", {})
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-cache-dtype", "int3"], "int3"),
        (["--max-model-len", "100000"], "100000"),
        (["--backend", "warp"], "warp"),
        (["--preemption", "evict"], "auto, recompute, swap"),
        (["--swap-space", "-1GiB"], "--swap-space"),
    ],
)
def test_options_that_cannot_be_honoured_are_one_line(
    folder: Path, options: list[str], message: str
) -> None:
    done = subprocess.run(
        [*COMMAND, str(folder), "--port", "0", *options], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    error = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(error) == 1
    assert message in error[0]


@pytest.mark.model
def test_a_real_model_answers_alone_as_in_company(smollm2_folder: Path) -> None:
    """SmolLM2: the right answer, ended by its end token, the same amid 3 other requests (P5)."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with started(str(smollm2_folder), "--kv-cache-dtype", "int8", "--max-num-seqs", "4") as (
        _,
        url,
    ):

        def ask(content: str) -> dict[str, Any]:
            messages = [{"role": "user", "content": content}]
            body = {"messages": messages, "temperature": 0, "max_tokens": 40}
            return dict(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json())

        alone = ask(question[0]["content"])
        with ThreadPoolExecutor() as pool:
            others = [pool.submit(ask, f"Write {n} words.") for n in (3, 5, 7)]
            amid = ask(question[0]["content"])
            assert all(job.result()["choices"] for job in others)
    choice = alone["choices"][0]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert amid["choices"] == alone["choices"]
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    assert alone["usage"]["prompt_tokens"] == len(ids)  # R22
