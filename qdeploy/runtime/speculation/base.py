"""The drafter seam. How to write one: docs/add-a-drafter.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qdeploy.runtime.request import Request


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next.

    kinds: for each of them a small number, or none: tokens of one kind are right equally often, so
    that the drafter's own confidence decides how many are verified.
    """

    token_ids: Sequence[int] = ()
    kinds: Sequence[int] = ()


#: Kinds are 0 … NUM_KINDS − 1.
NUM_KINDS = 16


class Drafter(Protocol):
    """Guesses the tokens that come next. A wrong guess costs time, never a wrong token.

    A drafter sees requests as they are, with every token so far in `request.token_ids`, and keeps
    what it needs under `request.sequence_id`. It may be asked after any number of tokens that it
    has not seen, and not at all; tokens that it has seen never change.
    name: in logs. free: whether guessing takes microseconds, so that a guess may be made only to
    be compared with what comes.
    """

    name: str
    free: bool

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """At most counts[i] ≥ 1 tokens that may follow requests[i].token_ids, none for no idea."""

    def observe(self, request: Request, num_accepted: int) -> None:
        """The last proposal was verified: its first num_accepted tokens, and one more of the
        target's own, now end request.token_ids.
        """

    def forget(self, request: Request) -> None:
        """The request has ended; unknown ones are ignored."""

    def seconds(self, num_requests: int) -> float:
        """Predicted seconds of one more drafted token each for num_requests requests."""

    def catch_up_seconds(self, request: Request) -> float:
        """Predicted seconds to learn the tokens of a request that the drafter hasn't seen."""
