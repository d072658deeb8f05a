"""Drafters that provoke mistakes, and storms that compare with runs without speculation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from qdeploy.kv.groups import KVGroup
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.request import Request
from qdeploy.runtime.speculation.base import Draft, Drafter
from qdeploy.runtime.speculation.config import SpeculativeConfig
from runtime.storm import Outcome, Storm, ride, solo_run, storm_config

MakeEngine = Callable[[EngineConfig, Drafter | None], Engine]
Answers = dict[tuple[str, int], tuple[int, ...]]


class StressDrafter:
    """Drafts right tokens, wrong ones after some right ones, or any tokens.

    answers: outputs by (request id, sample). Knows when it is used as it must not be.
    """

    name, free = "stress", True

    def __init__(self, answers: Answers, vocab_size: int, seed: int) -> None:
        self.answers, self.vocab_size = answers, vocab_size
        self.random = random.Random(seed)
        self.alive: set[str] = set()
        self.num_observed = self.num_accepted = 0

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        return [self._propose(r, count) for r, count in zip(requests, counts, strict=True)]

    def _propose(self, request: Request, count: int) -> Draft:
        self.alive.add(request.sequence_id)
        answer = self.answers.get((request.request_id, request.index), ())
        right = list(answer[request.num_output_tokens :][:count])
        kind = self.random.choice(("right", "half", "any", "none"))
        kept = {"right": len(right), "half": self.random.randint(0, len(right))}.get(kind, 0)
        if kind == "none":
            return Draft()
        length = self.random.randint(min(kept, 1), count)
        rest = [self.random.randrange(self.vocab_size) for _ in range(count - kept)]
        return Draft([*right[:kept], *rest][:length], [0] * length)

    def observe(self, request: Request, num_accepted: int) -> None:
        self.num_observed += 1
        self.num_accepted += num_accepted

    def forget(self, request: Request) -> None:
        self.alive.discard(request.sequence_id)

    def seconds(self, num_requests: int) -> float:
        return 0.0

    def catch_up_seconds(self, request: Request) -> float:
        return 0.0


@pytest.fixture
def every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify all that is drafted, whatever it costs."""

    def all_of_them(rates: Sequence[Sequence[float]], *_: object) -> tuple[list[int], float]:
        return [len(chances) for chances in rates], 2.0

    monkeypatch.setattr("qdeploy.runtime.speculation.speculator.best_counts", all_of_them)


def speculating(config: EngineConfig, max_drafts: int, method: str = "ngram") -> EngineConfig:
    speculative = SpeculativeConfig(
        method=method,
        model="draft" if method == "draft_model" else None,
        num_speculative_tokens=max_drafts,
    )
    return replace(config, speculative=speculative)


def assert_drafts_change_nothing(
    storm: Storm,
    make_engine: MakeEngine,
    make_drafter: Callable[[EngineConfig, Answers], Drafter],
    max_drafts: int,
    method: str = "ngram",
) -> Engine:
    """Every request's tokens are those of its solo run without drafts; returns the engine."""
    roomy = EngineConfig(
        kv=storm.kv, max_model_len=storm.max_model_len, max_num_batched_tokens=storm.max_model_len
    )
    solo = make_engine(roomy, None)
    expected = {i: solo_run(solo, f"r{i}", a) for i, a in enumerate(storm.arrivals)}
    answers = {
        (f"r{i}", index): tokens
        for i, outcomes in expected.items()
        for index, (tokens, _) in outcomes.items()
    }
    groups: tuple[KVGroup, ...] = solo.executor.kv_groups
    config = speculating(storm_config(storm, groups), max_drafts, method)
    engine = make_engine(config, make_drafter(config, answers))
    found = ride(storm, engine)
    for (name, index), outcome in found.items():
        assert_same(outcome, expected[int(name[1:])][index])
    assert engine.speculator is not None
    assert engine.speculator.drafter is not None, "the drafter failed"
    return engine


def assert_same(found: Outcome, expected: Outcome) -> None:
    tokens, reason = found
    if reason == "abort":
        assert tokens == expected[0][: len(tokens)]
    else:
        assert (tokens, reason) == expected
