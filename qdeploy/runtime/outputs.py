"""What the engine hands back: one RequestOutput per sample per step, joined by LLM at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token under the raw logits (before bias, penalties, temperature).

    rank: 1 for the most likely token. top: the `logprobs` most likely tokens as
    (token id, logprob), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of one sample, seconds of time.monotonic(); None where it hasn't happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one step added to one sample of a request.

    token_ids, text, logprobs: the new ones only. `text` lags behind `token_ids` while bytes of a
        character or a possible stop string are pending; its concatenation over a request is the
        whole text, ended before a stop string.
    prompt_logprobs: with the first output of a request that asked for them: of each token of the
        prompt, None for the first one.
    finish_reason: None while the sample runs. stop_reason: the stop string or stop token id that
        ended it (None for eos). error: one line when finish_reason is "error"; unanswerable:
        whether the request's own parameters are to blame for it.
    num_cached_tokens: tokens of the prompt whose K/V came from the prefix cache.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    unanswerable: bool = False
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    metrics: RequestMetrics

    @property
    def finished(self) -> bool:
        """Whether this is the sample's last output."""
        return self.finish_reason is not None

    @staticmethod
    def joined(parts: Sequence[RequestOutput]) -> RequestOutput:
        """Several outputs of one sample as one: what they add, and the state after the last."""
        last = parts[-1]
        if len(parts) == 1:
            return last
        logprobs = [part.logprobs for part in parts if part.logprobs is not None]
        return replace(
            last,
            token_ids=tuple(token for part in parts for token in part.token_ids),
            text="".join(part.text for part in parts),
            logprobs=tuple(chain.from_iterable(logprobs)) if logprobs else None,
            prompt_logprobs=parts[0].prompt_logprobs,
        )


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One finished sample, as vLLM's CompletionOutput."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the chosen tokens' log-probabilities, None when none were asked for."""
        return None if self.logprobs is None else sum(t.logprob for t in self.logprobs)


@dataclass(slots=True, kw_only=True)
class GenerationOutput:
    """All samples of one prompt, as vLLM's (offline) RequestOutput.

    prompt_logprobs: of each token of the prompt, None for the first one; None if not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(o.finish_reason is not None for o in self.outputs)

    def add(self, output: RequestOutput) -> None:
        """Append what one step added to one sample."""
        sample = self.outputs[output.index]
        sample.token_ids.extend(output.token_ids)
        sample.text += output.text
        if output.logprobs is not None:
            sample.logprobs = [*(sample.logprobs or ()), *output.logprobs]
        sample.finish_reason = output.finish_reason
        sample.stop_reason, sample.error = output.stop_reason, output.error
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = list(output.prompt_logprobs)
        self.num_cached_tokens = output.num_cached_tokens
        self.metrics = output.metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Counters since the start, then gauges.

    num_drafts: verified proposals; per_position: accepted tokens at each place of a proposal.
    acceptance_rate: of a draft, recently; num_speculative_tokens: drafts per request in the last
    step that decoded.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    per_position: tuple[int, ...] = ()
    acceptance_rate: float = 0.0
    num_speculative_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine: gauges first, then counters since the start.

    *_blocks_used counts blocks held by requests, *_blocks_cached those that only the prefix cache
    remembers; pools are fixed at start-up. num_swaps_total: preemptions that kept the K/V on the
    host. prefix_cache_*: tokens that were looked up, and found. finished counts samples by
    finish_reason.
    """

    num_requests_running: int
    num_requests_waiting: int
    num_open_blocks: int
    num_open_blocks_used: int
    num_open_blocks_cached: int
    num_sealed_blocks: int
    num_sealed_blocks_used: int
    num_sealed_blocks_cached: int
    swap_space_used_bytes: int
    num_steps: int
    last_step_tokens: int
    last_step_seqs: int
    last_step_time: float
    prompt_tokens_total: int
    generation_tokens_total: int
    num_preemptions_total: int
    num_swaps_total: int
    prefix_cache_queries_total: int
    prefix_cache_hits_total: int
    finished: Mapping[str, int]
    speculation: SpeculationStats = SpeculationStats()

    @property
    def kv_cache_usage(self) -> float:
        """Share of all KV blocks that requests hold, 0 … 1."""
        total = self.num_open_blocks + self.num_sealed_blocks
        return (self.num_open_blocks_used + self.num_sealed_blocks_used) / max(total, 1)
