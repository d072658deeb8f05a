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


class RequestStatus(Enum):
    """Where a request is; a preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """Tokens and progress of one sample; `n` samples are n of these under one request_id.

    order: admission order, smaller is older. max_tokens: resolved, never None.
    scoring: wants the logits of every position, and no sampled token.
    sequence_id: names the sample in the block manager.
    num_scored: positions whose logits were handed over (a preempted one isn't scored twice).
    bad_words: token sequences that must not come. token_mask: the sample's own grammar.
    processors: the sampler's, made of these and of params for the first token.
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
    token_ids: list[int] = field(init=False)
    sequence_id: str = field(init=False)
    num_computed_tokens: int = 0
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
