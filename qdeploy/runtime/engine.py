"""The engine: schedule, run, sample, collect. Synchronous, one thread, no I/O."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qdeploy.errors import QdeployError, UsageError
from qdeploy.runtime.admission import check_prompt, make_samples, resolve_max_model_len
from qdeploy.runtime.batch import SequenceSlice, StepBatch
from qdeploy.runtime.block_manager import BlockManager
from qdeploy.runtime.collector import OutputCollector, known_tokens
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.kv_budget import plan_kv_pools
from qdeploy.runtime.outputs import EngineStats, FinishReason, RequestOutput, SpeculationStats
from qdeploy.runtime.preemption import PreemptionPolicy
from qdeploy.runtime.request import Request
from qdeploy.runtime.sampler import Sampled, sample
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.scheduler import ScheduledStep, Scheduler
from qdeploy.runtime.speculation.base import Drafter
from qdeploy.runtime.speculation.speculator import Speculator
from qdeploy.runtime.swap_space import SwapSpace
from qdeploy.runtime.swapper import Swapper
from qdeploy.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from qdeploy.runtime.executors.base import Executor

OnLogits = Callable[[int, Tensor], None]


class Engine:
    """Runs requests on an executor. Every token is what the request would get alone (P2, P5)."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        eos_token_ids: Set[int] = frozenset(),
        *,
        tokenizer: Tokenizer | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """drafter: what `config.speculative` asks for; see speculation.loading.load_drafter."""
        if config.speculative.enabled != (drafter is not None):
            raise UsageError(
                f"speculative_method {config.speculative.method} and the drafter given disagree"
            )
        if executor.kv_config != config.kv:
            raise UsageError(
                f"the executor keeps KV as {executor.kv_config.key} but {config.kv.key} is asked"
            )
        self.executor = executor
        self.max_model_len = resolve_max_model_len(config, executor.spec.max_model_len)
        self.config = config
        self.eos_token_ids = known_tokens(eos_token_ids, executor.spec.vocab_size)
        pools = plan_kv_pools(
            executor.kv_groups,
            executor.open_block_bytes,
            executor.sealed_block_bytes,
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            num_kv_blocks=config.num_kv_blocks,
            lookahead_tokens=config.speculative.max_drafts,
        )
        executor.allocate_kv(pools)
        self.blocks = BlockManager(
            executor.kv_groups, pools, prefix_caching=config.enable_prefix_caching
        )
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            policy=PreemptionPolicy(mode=config.preemption),
            swap=SwapSpace(
                config.swap_space_bytes,
                [
                    num_bytes
                    for pair in zip(
                        executor.open_block_bytes, executor.sealed_block_bytes, strict=True
                    )
                    for num_bytes in pair
                ],
            ),
        )
        self._swapper = Swapper(executor, self.scheduler)
        self.speculator = (
            None
            if drafter is None
            else Speculator(drafter, config.speculative.max_drafts, executor.spec.vocab_size)
        )
        self._collector = OutputCollector(self.eos_token_ids, tokenizer)
        self._samples: dict[str, list[Request]] = {}
        self._on_logits: dict[str, OnLogits] = {}
        self._scoring_error: Exception | None = None
        self._pending: list[RequestOutput] = []
        self._num_added = 0
        self._counters: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._last_step = (0, 0, time.monotonic())

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has work, or outputs to hand over."""
        return bool(self._samples or self._pending)

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """Queue a request; UsageError or CapacityError if it can't be run exactly as asked."""
        self._collector.check(params)
        samples = make_samples(
            request_id,
            prompt_token_ids,
            params,
            order=self._num_added,
            vocab_size=self.executor.spec.vocab_size,
            max_model_len=self.max_model_len,
            engine_seed=self.config.seed,
        )
        self._add(request_id, samples)
        for request in samples:
            self._collector.add(request)

    def abort(self, request_id: str) -> None:
        """End all samples of a request and free their blocks; unknown ids are ignored.

        The final outputs (finish_reason "abort") come with the next `step`.
        """
        for request in list(self._samples.get(request_id, ())):
            self._finish(request, "abort", self._pending)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns what it added to each sample."""
        outputs, self._pending = self._pending, []
        if self.speculator is not None:
            self.speculator.propose(self.scheduler.running)
        began = time.perf_counter()
        step = self.scheduler.schedule()
        self._swapper.move(step)
        if not step.num_scheduled_tokens:
            return outputs
        self._note_schedule(step)
        batch = self.scheduler.batch(step)
        decoding_only = all(request.is_decoding for request in step.num_scheduled_tokens)
        logits = self._execute(step, batch, outputs)
        if self.speculator is not None:
            seconds = time.perf_counter() - began
            self.speculator.note_step(step.num_tokens, seconds, decoding_only=decoding_only)
        if logits is not None:
            self._collect(step, batch, logits, outputs)
        self._last_step = (step.num_tokens, len(step.num_scheduled_tokens), time.monotonic())
        return outputs

    def score(self, token_ids: Sequence[int], on_logits: OnLogits) -> None:
        """Run a prompt and hand over the raw logits of every position, chunk by chunk.

        on_logits(start, logits [num_tokens, vocab], float32): row i predicts the token at
        position start + i + 1. Other requests go on; their outputs come with the next `step`.
        """
        check_prompt(token_ids, self.executor.spec.vocab_size)
        if len(token_ids) > self.max_model_len:
            raise UsageError(
                f"{len(token_ids)} tokens exceed max_model_len={self.max_model_len}", param="prompt"
            )
        request_id = f"score-{self._num_added}"
        request = Request(
            request_id=request_id,
            order=self._num_added,
            prompt_token_ids=tuple(token_ids),
            params=SamplingParams(),
            max_tokens=0,
            scoring=True,
            arrival_time=time.monotonic(),
        )
        self._add(request_id, [request])
        self._on_logits[request_id], self._scoring_error = on_logits, None
        held: list[RequestOutput] = []
        try:
            while request_id in self._samples:
                held += self.step()
        finally:
            self.abort(request_id)
            del self._on_logits[request_id]
            mine = [o for o in held + self._pending if o.request_id == request_id]
            self._pending = [o for o in held + self._pending if o.request_id != request_id]
        if self._scoring_error is not None:
            raise self._scoring_error
        if mine[-1].finish_reason == "error":
            raise QdeployError(f"scoring failed: {mine[-1].error}")

    def stats(self) -> EngineStats:
        """A snapshot of gauges and counters."""
        tokens, seqs, when = self._last_step
        opened, sealed = self.blocks.pools[0::2], self.blocks.pools[1::2]
        return EngineStats(
            num_requests_running=self.scheduler.num_running,
            num_requests_waiting=self.scheduler.num_waiting,
            num_open_blocks=sum(pool.size for pool in opened),
            num_open_blocks_used=sum(pool.num_live for pool in opened),
            num_open_blocks_cached=sum(pool.num_cached for pool in opened),
            num_sealed_blocks=sum(pool.size for pool in sealed),
            num_sealed_blocks_used=sum(pool.num_live for pool in sealed),
            num_sealed_blocks_cached=sum(pool.num_cached for pool in sealed),
            swap_space_used_bytes=self.scheduler.swap.num_used_bytes,
            num_steps=self._counters["steps"],
            last_step_tokens=tokens,
            last_step_seqs=seqs,
            last_step_time=when,
            prompt_tokens_total=self._counters["prompt_tokens"],
            generation_tokens_total=self._counters["generation_tokens"],
            num_preemptions_total=self.scheduler.num_preemptions,
            num_swaps_total=self.scheduler.num_swaps,
            prefix_cache_queries_total=self.scheduler.num_prefix_queries,
            prefix_cache_hits_total=self.scheduler.num_prefix_hits,
            finished=dict(self._finished),
            speculation=(
                SpeculationStats() if self.speculator is None else self.speculator.stats()
            ),
        )

    def _add(self, request_id: str, samples: list[Request]) -> None:
        if request_id in self._samples:
            raise UsageError(f"request id {request_id!r} is in use; choose another")
        self.scheduler.add(samples)
        self._samples[request_id] = samples
        self._num_added += 1

    def _note_schedule(self, step: ScheduledStep) -> None:
        self._counters["steps"] += 1
        now = time.monotonic()
        for request in step.num_scheduled_tokens:
            if request.first_scheduled_time is None:
                self._counters["prompt_tokens"] += request.num_prompt_tokens
                for sample in (request, *request.followers):
                    sample.first_scheduled_time = now

    def _execute(
        self, step: ScheduledStep, batch: StepBatch, outputs: list[RequestOutput]
    ) -> Tensor | None:
        """Run the executor; a failure ends the step's requests with an error, nobody else."""
        prompts = sum(n for r, n in step.num_scheduled_tokens.items() if not r.is_decoding)
        try:
            began = time.perf_counter()
            logits = self.executor.execute(batch)
            seconds = time.perf_counter() - began
            self.scheduler.policy.note_step(prompts, step.num_tokens, seconds)
            return logits
        except Exception as error:
            message = one_line(f"the {self.executor.name} executor failed", error)
            for request in step.num_scheduled_tokens:
                self._fail(request, message, outputs)
            return None

    def _collect(
        self, step: ScheduledStep, batch: StepBatch, logits: Tensor, outputs: list[RequestOutput]
    ) -> None:
        """Give each slice its rows of logits [num_logits, vocab]."""
        rows, end = logits.cpu().numpy(), 0
        for request, part in zip(step.num_scheduled_tokens, batch.slices, strict=True):
            start, end = end, end + part.num_logits
            takers = self._advance(request, part)
            left = self._take_prompt(takers, rows[start:end], outputs)
            for taker in takers:
                if taker.scoring:
                    self._take_scores(taker, logits[start:end], outputs)
                elif len(left):
                    outputs.append(self._take_tokens(taker, left))

    def _advance(self, request: Request, part: SequenceSlice) -> list[Request]:
        """A slice is computed; returns the samples that its last row of logits is for.

        Of a slice with drafts, how much is kept is known once its rows are sampled.
        """
        if not request.draft_token_ids:
            self.scheduler.commit(request, len(part.token_ids))
        if request.followers and request.num_uncomputed_tokens == 0:
            return [request, *self.scheduler.fork(request)]
        return [request]

    def _take_scores(self, request: Request, rows: Tensor, outputs: list[RequestOutput]) -> None:
        try:
            if len(rows):
                start, request.num_scored = request.num_scored, request.num_scored + len(rows)
                self._on_logits[request.request_id](start, rows)
        except Exception as error:  # the requests after this one still get their rows (P5)
            self._scoring_error = error
            self._finish(request, "error", outputs, error=one_line("scoring failed", error))
            return
        if request.num_uncomputed_tokens == 0:
            self._finish(request, "stop", outputs)

    def _take_prompt(
        self, takers: Sequence[Request], rows: NDArray[np.float32], outputs: list[RequestOutput]
    ) -> NDArray[np.float32]:
        """Hand over the rows of the prompt's positions, if they are asked for; returns those of
        rows [n, vocab] to sample from. What goes wrong ends all samples, and leaves no rows.
        """
        leader = takers[0]
        if leader.scoring or not leader.needs_prompt_logits:
            return rows
        count = min(len(rows), leader.num_prompt_tokens - leader.num_scored)
        try:
            self._collector.take_prompt(leader, rows[:count])
        except Exception as error:
            for taker in takers:
                self._fail(taker, one_line("scoring the prompt failed", error), outputs)
            return rows[:0]
        leader.num_scored += count
        complete = leader.num_scored == leader.num_prompt_tokens
        return rows[count - 1 if complete else count :]

    def _take_tokens(self, request: Request, rows: NDArray[np.float32]) -> RequestOutput:
        """Draw a token, and another one for each draft [rows − 1] that was right: what comes out
        is what would have come without drafts.
        """
        drafts, request.draft_token_ids = request.draft_token_ids, []
        taken: list[RequestOutput] = []
        for row, draft in zip(rows, (*drafts, None), strict=True):
            taken.append(self._take_token(request, row))
            if taken[-1].finished or request.token_ids[-1] != draft:
                break
        if drafts:
            self.scheduler.commit(request, len(taken))
        if self.speculator is not None:
            self.speculator.observe(request, len(drafts), len(taken) - 1)
        output = RequestOutput.joined(taken)
        if output.finish_reason is not None:
            self._retire(request, output.finish_reason)
        return output

    def _take_token(self, request: Request, row: NDArray[np.float32]) -> RequestOutput:
        """Draw a token from row [vocab]; what goes wrong ends this request alone (P5)."""
        if request.max_tokens == 0:  # only the prompt was wanted
            return self._collector.final(request, "length")
        try:
            sampled = sample(row, request, self._collector.banned(request))
            if sampled.error is None:
                request.append(sampled.token_id, time.monotonic())
                self._counters["generation_tokens"] += 1
                return self._collector.collect(request, sampled)
        except Exception as failure:
            sampled = Sampled(error=one_line("sampling failed", failure))
        final = self._collector.final(request, "error")
        return replace(final, error=sampled.error, unanswerable=sampled.unanswerable)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        outputs: list[RequestOutput],
        *,
        error: str | None = None,
    ) -> None:
        """End a request for a reason other than its tokens."""
        output = self._collector.final(request, reason)
        outputs.append(replace(output, error=error))
        self._retire(request, reason)

    def _fail(self, request: Request, error: str, outputs: list[RequestOutput]) -> None:
        """End a request, and the samples that wait for its prompt: it would fail them, too, and
        each time the step's other requests.
        """
        for one in (*request.followers, request):
            self._finish(one, "error", outputs, error=error)

    def _retire(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request)
        self._collector.remove(request)
        if self.speculator is not None:
            self.speculator.forget(request)
        self._finished[reason] += 1
        alive = [r for r in self._samples[request.request_id] if r is not request]
        if alive:
            self._samples[request.request_id] = alive
        else:
            del self._samples[request.request_id]


def one_line(what: str, error: Exception) -> str:
    """What failed and why."""
    return " ".join(f"{what}: {str(error) or type(error).__name__}".split())
