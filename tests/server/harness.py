"""A server on a real socket over the real engine, with an executor that recites the alphabet."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import torch
import uvicorn
from numpy.typing import NDArray
from torch import Tensor

from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVGroup, KVPoolSize
from qdeploy.runtime.async_engine import AsyncEngine
from qdeploy.runtime.batch import BlockIds, StepBatch
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.tokenizer import Tokenizer
from qdeploy.server.app import create_app
from qdeploy.server.listen import DrainingServer, bind, url_of
from qdeploy.server.settings import ServerSettings
from runtime.tiny_tokenizer import CHATML, save_tokenizer, write_json

ALPHABET = "abcdefghijklménopqrstuvwxyz"
MODEL = "tiny"
KV = KVCacheConfig(dtype="int4", block_size=8)
HI = [{"role": "user", "content": "Hi"}]


class AlphabetExecutor:
    """After each letter the next one (é after m, byte by byte), after z the end of sequence."""

    name = "alphabet"

    def __init__(self, tokenizer: Tokenizer, max_model_len: int = 256) -> None:
        self.spec = SimpleNamespace(vocab_size=tokenizer.vocab_size, max_model_len=max_model_len)
        self.kv_config = KV
        self.kv_groups = (KVGroup(layers=(0,), config=KV),)
        self.open_block_bytes, self.sealed_block_bytes = (4096,), (1152,)
        self.step_s = 0.0
        self.fail_next: BaseException | None = None
        self.nan_next = False
        self.num_steps = 0
        ids = tokenizer.encode(ALPHABET, add_special_tokens=False)
        self._eos = tokenizer.token_to_id("</s>")
        self._next = dict(zip(ids, [*ids[1:], self._eos], strict=True))
        self._first = ids[0]

    def allocate_kv(self, pools: Sequence[KVPoolSize]) -> None:
        pass

    def read_blocks(self, ids: Sequence[BlockIds]) -> NDArray[np.uint8]:
        sizes = (self.open_block_bytes[0], self.sealed_block_bytes[0])
        num_bytes = len(ids[0].open) * sizes[0] + len(ids[0].sealed) * sizes[1]
        return np.zeros(num_bytes, np.uint8)

    def write_blocks(self, ids: Sequence[BlockIds], data: NDArray[np.uint8]) -> None:
        assert len(data) == len(self.read_blocks(ids))

    def execute(self, batch: StepBatch) -> Tensor:
        self.num_steps += 1
        time.sleep(self.step_s)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        rows = [
            self._row(token)
            for part in batch.slices
            for token in list(part.token_ids)[len(part.token_ids) - part.num_logits :]
        ]
        if self.nan_next and rows:
            rows[0], self.nan_next = torch.full((self.spec.vocab_size,), float("nan")), False
        return torch.stack(rows) if rows else torch.empty(0, self.spec.vocab_size)

    def _row(self, token: int) -> Tensor:
        row = torch.zeros(self.spec.vocab_size)
        row[self._next.get(token, self._first)] = 100.0
        return row


@dataclass
class Served:
    """A running server: `url`, and its parts to look into."""

    url: str
    api_key: str
    executor: AlphabetExecutor
    core: Engine
    engine: AsyncEngine
    tokenizer: Tokenizer
    server: DrainingServer
    client: httpx.Client

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return self.client.post(path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "xa", **body})

    def chat(self, **body: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": HI, **body})

    def wait_idle(self, timeout: float = 5.0) -> None:
        """Until no request is open and no block is held."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            stats = self.engine.stats
            used = stats.num_open_blocks_used + stats.num_sealed_blocks_used
            if not (used or self.engine.num_open_requests or self.core.has_unfinished):
                return
            time.sleep(0.01)
        raise AssertionError(f"still busy: {self.engine.stats}")


def alphabet_tokenizer(
    template: str = CHATML, *, add_bos: bool = False, extra_eos: str | None = None
) -> Tokenizer:
    """extra_eos: one more end token, in a list in generation_config.json only."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder), template=template, add_bos=add_bos)
        if extra_eos is not None:
            first = Tokenizer.load(folder)
            ids = [first.token_to_id(token) for token in ("<s>", extra_eos)]
            write_json(Path(folder), "generation_config.json", {"eos_token_id": ids})
        return Tokenizer.load(folder)


@contextlib.contextmanager
def serving(
    *,
    max_model_len: int = 256,
    num_kv_blocks: int | None = None,
    tokenizer: Tokenizer | None = None,
    sampling_defaults: dict[str, Any] | None = None,
    **changes: Any,
) -> Iterator[Served]:
    """Run a server in a thread; ends with its own drain."""
    settings = replace(ServerSettings(port=0, served_model_name=MODEL), **changes)
    tokenizer = tokenizer or alphabet_tokenizer()
    executor = AlphabetExecutor(tokenizer, max_model_len)
    config = EngineConfig(
        kv=KV,
        max_num_seqs=settings.max_num_seqs,
        enable_prefix_caching=settings.enable_prefix_caching,
        preemption=settings.preemption,
        swap_space_bytes=settings.swap_space_bytes,
        num_kv_blocks=num_kv_blocks,
        seed=settings.seed,
    )
    core = Engine(executor, config, tokenizer.eos_token_ids, tokenizer=tokenizer)  # type: ignore[arg-type]
    engine = AsyncEngine(
        core,
        max_num_seqs=settings.max_num_seqs,
        max_waiting=settings.max_queued_requests,
        request_timeout=settings.request_timeout,
    )
    app = create_app(engine, tokenizer, settings, sampling_defaults=sampling_defaults)
    listener = bind(settings.host, settings.port)
    ready = threading.Event()
    server = DrainingServer(
        uvicorn.Config(app, log_config=None, access_log=False),
        engine,
        settings.shutdown_timeout,
        ready.set,
    )
    url = url_of(listener)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    assert ready.wait(10)
    key = settings.api_key or "none"
    client = httpx.Client(base_url=url, timeout=30)
    try:
        yield Served(url, key, executor, core, engine, tokenizer, server, client)
    finally:
        client.close()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def sse(text: str) -> list[str]:
    """The data of each server-sent event."""
    events = [event for event in text.split("\n\n") if event]
    assert all(event.startswith("data: ") for event in events), events
    return [event.removeprefix("data: ") for event in events]
