"""One sample of one request while it lives in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from qdeploy.runtime.outputs import RequestMetrics
from qdeploy.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from qdeploy.runtime.processors import Processor, TokenMask


#: One step of priority is worth so much waiting: a request is served as if it had come that many
#: seconds later per unit. So priorities age by themselves, and nobody starves.
PRIORITY_SECONDS = 60.0


class RequestStatus(Enum):
    """Where a request is; a preempted one waits again, or waits with its K/V on the host."""

    WAITING = "waiting"
    SWAPPED = "swapped"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """Tokens and progress of one sample; `n` samples are n of these under one request_id.

    order: admission order, smaller is older. max_tokens: resolved, never None.
    priority: smaller is sooner. rank: the static order of service, by priority and age.
    cache_salt: prefixes are shared only between requests with the same one.
    scoring: wants the logits of every position, and no sampled token.
    sequence_id: names the sample in the block manager.
    num_scored: positions whose logits were handed over (a preempted one isn't scored twice).
    bad_words: token sequences that must not come. token_mask: the sample's own grammar.
    processors: the sampler's, made of these and of params for the first token.
    num_cached_tokens: of the prompt, found in the prefix cache when the request began.
    draft_token_ids: proposed to follow token_ids, not verified yet. The engine sets them before a
        step; the scheduler keeps those for which there is room.
    followers: the other samples of a request whose prompt isn't computed yet; they begin with a
        fork of this one, their leader, and take their first tokens from its row of logits.
    """

    request_id: str
    index: int = 0
    order: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    scoring: bool = False
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    token_ids: list[int] = field(init=False)
    sequence_id: str = field(init=False)
    rank: tuple[float, int, int] = field(init=False)
    draft_token_ids: list[int] = field(default_factory=list)
    followers: list[Request] = field(default_factory=list)
    leader: Request | None = field(default=None, repr=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_scored: int = 0
    num_preemptions: int = 0
    status: RequestStatus = RequestStatus.WAITING
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    bad_words: Sequence[Sequence[int]] = ()
    token_mask: TokenMask | None = None
    processors: tuple[Processor, ...] | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.sequence_id = f"{self.request_id}/{self.index}"
        due = self.arrival_time + self.priority * PRIORITY_SECONDS
        self.rank = (due, self.order, self.index)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K/V are not in the cache."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether exactly the last sampled token is left to compute."""
        return self.num_output_tokens > 0 and self.num_uncomputed_tokens == 1

    @property
    def num_samples(self) -> int:
        """Sequences that this one will become."""
        return 1 + len(self.followers)

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether positions of the prompt whose logits are wanted haven't been handed over: they
        must be computed, and none taken from the cache. Samples after the first one leave it to it.
        """
        if self.params.prompt_logprobs is None or self.index > 0:
            return self.scoring
        return self.num_scored < self.num_prompt_tokens

    def num_logits(self, start: int, end: int) -> int:
        """How many of the positions start … end − 1, the last ones, want logits. Positions of
        drafts follow the last token's.
        """
        first = self.num_scored if self.needs_prompt_logits else self.num_tokens - 1
        return max(0, end - max(start, first))

    def append(self, token_id: int, now: float) -> None:
        """Take a sampled token at time `now`."""
        self.token_ids.append(token_id)
        self.first_token_time = now if self.first_token_time is None else self.first_token_time
        self.last_token_time = now

    def metrics(self) -> RequestMetrics:
        """The times so far."""
        return RequestMetrics(
            arrival_time=self.arrival_time,
            first_scheduled_time=self.first_scheduled_time,
            first_token_time=self.first_token_time,
            last_token_time=self.last_token_time,
            num_preemptions=self.num_preemptions,
        )
