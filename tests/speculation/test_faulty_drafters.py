"""Drafters that break the rules of `Drafter`: they cost nobody a token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from qdeploy.runtime.request import Request
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.speculation.base import NUM_KINDS, Draft
from speculation.stress import every_draft
from speculation.test_speculating_engine import engine, run, tokens_of

__all__ = ["every_draft"]
PARAMS = SamplingParams(temperature=0, max_tokens=60)


class Knowing:
    """Drafts the right tokens, `more` than it was asked for, all of one kind or of none."""

    name, free = "knowing", True

    def __init__(self, answer: Sequence[int], more: int = 0, kind: int | None = None) -> None:
        self.answer, self.more, self.kind = answer, more, kind

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        found = []
        for request, count in zip(requests, counts, strict=True):
            tokens = self.answer[request.num_output_tokens :][: count + self.more]
            found.append(Draft(tokens, () if self.kind is None else [self.kind] * len(tokens)))
        return found

    def observe(self, request: Request, num_accepted: int) -> None: ...

    def forget(self, request: Request) -> None: ...

    def seconds(self, num_requests: int) -> float:
        return 0.0

    def catch_up_seconds(self, request: Request) -> float:
        return 0.0


class FailingObserve(Knowing):
    def observe(self, request: Request, num_accepted: int) -> None:
        raise RuntimeError("observe failed")


class FailingForget(Knowing):
    def forget(self, request: Request) -> None:
        raise RuntimeError("forget failed")


@pytest.fixture(scope="module")
def answer() -> tuple[int, ...]:
    return tokens_of(run(engine(), PARAMS))


@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize("more", [0, 5])
@pytest.mark.parametrize("kind", [None, 0])
def test_drafts_without_kinds_count_and_too_many_are_cut(
    answer: tuple[int, ...], more: int, kind: int | None
) -> None:
    e = engine(Knowing(answer, more, kind))
    assert tokens_of(run(e, PARAMS)) == answer
    assert e.stats().speculation.num_accepted_tokens > 40


@pytest.mark.usefixtures("every_draft")
def test_what_a_drafter_raises_turns_it_off(answer: tuple[int, ...]) -> None:
    for drafter in (FailingObserve(answer), FailingForget(answer), Knowing(answer, 0, NUM_KINDS)):
        e = engine(drafter)
        assert tokens_of(run(e, PARAMS)) == answer
        assert e.speculator is not None
        assert e.speculator.drafter is None
