"""What the measures of benchmarks/runtime.py run on: engines of one model, and what they gave."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from runtime_sizes import Sizes
from torch import Tensor

from qdeploy.evaluation.text import default_text
from qdeploy.kv.config import KVCacheConfig
from qdeploy.progress import Silent
from qdeploy.runtime.batch import StepBatch
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.executors.base import Executor
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.speculation.loading import load_drafter
from qdeploy.runtime.tokenizer import Tokenizer


@dataclass(slots=True)
class Trace:
    """One request: its new tokens, when each came (seconds by the clock), and its text."""

    asked_s: float
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.times_s[0] - self.asked_s


class Session:
    """An engine and a trace of each request; an output with an error ends the benchmark."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.traces: list[Trace] = []

    def ask(self, prompt: Sequence[int], max_tokens: int, **params: Any) -> Trace:
        """Queue a request: greedy to exactly max_tokens unless `params` say otherwise."""
        wanted = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | params
        self.traces.append(trace := Trace(time.perf_counter()))
        self.engine.add_request(str(len(self.traces) - 1), prompt, SamplingParams(**wanted))
        return trace

    def step(self) -> float:
        """Run one step; its seconds."""
        begin = time.perf_counter()
        outputs = self.engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise SystemExit(f"a request failed: {output.error}")
            trace = self.traces[int(output.request_id)]
            trace.token_ids += output.token_ids
            trace.times_s += [now] * len(output.token_ids)
            trace.text += output.text
        return now - begin

    def finish(self, after_step: Callable[[], None] | None = None) -> float:
        """Run until nothing is left; seconds, without those that after_step takes."""
        seconds = 0.0
        while self.engine.has_unfinished:
            seconds += self.step()
            if after_step is not None:
                after_step()
        return seconds


class NoModel:
    """Stands in for an executor: blocks of the same bytes, but nothing is allocated or computed."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def allocate_kv(self, *pools: Any) -> None:
        """Nothing to keep."""

    def execute(self, batch: StepBatch) -> Tensor:
        """Logits of which none is the largest."""
        return torch.zeros(1, self._executor.spec.vocab_size).expand(batch.num_logits, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model, loaded once, and how much to run of it. title: what rows call the model.

    draft: a draft model. openvino: a Python that has OpenVINO GenAI, and the model exported for it.
    """

    title: str
    folder: Path
    tokenizer: Tokenizer
    executor: Executor
    threads: int
    sizes: Sizes
    repeats: int
    text: tuple[int, ...]
    draft: Path
    openvino: tuple[str, Path] | None

    def session(self, kv: str = "int8", *, stand_in: bool = False, **config: Any) -> Session:
        """A session on an engine of its own, the weights being shared, or left out."""
        policy = KVCacheConfig(dtype=kv)
        eos, wanted = self.tokenizer.eos_token_ids, EngineConfig(kv=policy, **config)
        executor = self.executor.with_kv(policy)
        drafter = load_drafter(
            wanted,
            executor,
            folder=self.folder,
            tokenizer=self.tokenizer,
            threads=self.threads,
            progress=Silent(),
        )
        if stand_in:
            executor = cast(Executor, NoModel(executor))
        return Session(Engine(executor, wanted, eos, tokenizer=self.tokenizer, drafter=drafter))

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Different passages of the shipped text, so many tokens of each; a seed chooses which."""
        chooser = random.Random(seed)
        begins = chooser.sample(range(len(self.text) - max(lengths)), len(lengths))
        return [list(self.text[at : at + n]) for at, n in zip(begins, lengths, strict=True)]

    def name(self, figure: str, kv: str = "int8") -> str:
        """A row's name; benchmarks/runtime_table.py reads it so."""
        return f"{self.title} | {figure} | qdeploy KV {kv}"


def load_setup(
    title: str,
    folder: Path,
    sizes: Sizes,
    *,
    backend: str,
    threads: int,
    repeats: int,
    draft: Path,
    openvino: tuple[str, Path] | None = None,
) -> Setup:
    """Load an artifact, and run it once so that no measure pays for the first time."""
    kv = KVCacheConfig(dtype="int8")
    executor = load_executor(folder, backend=backend, kv_config=kv, threads=threads)
    tokenizer = Tokenizer.load(folder)
    text = tuple(tokenizer.encode(default_text().read_text(encoding="utf-8")))
    setup = Setup(
        title=title,
        folder=folder,
        tokenizer=tokenizer,
        executor=executor,
        threads=threads,
        sizes=sizes,
        repeats=repeats,
        text=text,
        draft=draft,
        openvino=openvino,
    )
    session = setup.session()
    session.ask(text[:64], 8)
    session.finish()
    return setup


def insist(holds: bool, what: str) -> None:
    """End the benchmark when its outputs are wrong: speed of wrong text isn't shown (X16)."""
    if not holds:
        raise SystemExit(f"no figures, for the output is wrong: {what}")
