"""How much is drafted, in a simulated engine with a clock of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from qdeploy.runtime.request import Request
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.speculation import speculator as module
from qdeploy.runtime.speculation.base import Draft
from qdeploy.runtime.speculation.speculator import Speculator

STEP = 0.010  # seconds of a step of one token


class World:
    """A clock, a drafter whose drafts are right with a chance, and steps of a known cost.

    memory_bound: tokens of a step that cost nothing.
    """

    name = "simulated"

    def __init__(
        self, *, free: bool, draft_seconds: float = 0.0, read_seconds: float = 0.0, size: int = 8
    ) -> None:
        self.now, self.free = 0.0, free
        self.draft_seconds, self.read_seconds = draft_seconds, read_seconds
        self.chance, self.size = 0.5, size
        self.random = random.Random(0)
        self.truth: dict[str, list[int]] = {}
        self.seen: dict[str, int] = {}
        self.num_proposals = 0
        self.speculator = Speculator(self, 8, 100)

    # The drafter: a right token is the one that the engine will take.
    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        self.num_proposals += 1
        self.now += sum(self.catch_up_seconds(r) for r in requests)
        self.now += max(counts) * self.draft_seconds
        for request in requests:
            self.seen[request.sequence_id] = request.num_tokens
        return [Draft(self._guess(r, n), [0] * n) for r, n in zip(requests, counts, strict=True)]

    def _guess(self, request: Request, count: int) -> list[int]:
        right = self._ahead(request, count)
        return [t if self.random.random() < self.chance else 99 for t in right]

    def _ahead(self, request: Request, count: int) -> list[int]:
        """The next tokens that the request will take."""
        truth, start = self.truth.setdefault(request.sequence_id, []), request.num_output_tokens
        while len(truth) < start + count:
            truth.append(self.random.randrange(50))
        return truth[start : start + count]

    def observe(self, request: Request, num_accepted: int) -> None: ...

    def forget(self, request: Request) -> None: ...

    def seconds(self, num_requests: int) -> float:
        return self.draft_seconds

    def catch_up_seconds(self, request: Request) -> float:
        return self.read_seconds * (request.num_tokens - self.seen.get(request.sequence_id, 0))

    # The engine.
    def step_seconds(self, tokens: int) -> float:
        return STEP * max(1.0, tokens / self.size)

    def run(self, requests: Sequence[Request], num_tokens: int) -> float:
        """Seconds until each request has num_tokens more; without drafts, a step for each."""
        start, goal = self.now, {r: r.num_output_tokens + num_tokens for r in requests}
        while True:
            running = [r for r in requests if r.num_output_tokens < goal[r]]
            if not running:
                return self.now - start
            for request in running:
                request.num_computed_tokens = request.num_tokens - 1
            self.speculator.propose(running)
            tokens = len(running) + sum(len(r.draft_token_ids) for r in running)
            self.now += self.step_seconds(tokens)
            self.speculator.note_step(tokens, self.step_seconds(tokens), decoding_only=True)
            for request in running:
                self._take(request)

    def _take(self, request: Request) -> None:
        drafts, request.draft_token_ids = request.draft_token_ids, []
        accepted = 0
        for draft in (*drafts, None):
            token = self._ahead(request, 1)[0]
            request.append(token, 0.0)
            if token != draft:
                break
            accepted += 1
        self.speculator.observe(request, len(drafts), accepted)


Make = Callable[..., World]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(**options: float | bool) -> World:
        found = World(**options)  # type: ignore[arg-type]
        monkeypatch.setattr(module, "perf_counter", lambda: found.now)
        return found

    return make


def request(name: str = "a", prompt: int = 1) -> Request:
    found = Request(
        request_id=name,
        order=0,
        prompt_token_ids=[0] * prompt,
        params=SamplingParams(),
        max_tokens=10**6,
    )
    found.append(0, 0.0)
    return found


@pytest.mark.parametrize("draft_seconds", [0.05 * STEP, 0.3 * STEP, 1.0 * STEP, 3 * STEP])
@pytest.mark.parametrize("read_seconds", [0.0, 0.1 * STEP])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_drafter_that_can_t_help_costs_a_twentieth_at_most(
    world: Make, draft_seconds: float, read_seconds: float, size: int
) -> None:
    w = world(free=False, draft_seconds=draft_seconds, read_seconds=read_seconds, size=size)
    w.chance = 0.02
    assert w.run([request(prompt=50)], 2000) < 2000 * STEP / 0.95


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_free_drafter_that_can_t_help_costs_nothing(world: Make, size: int) -> None:
    w = world(free=True, size=size)
    w.chance = 0.02
    assert w.run([request()], 1000) < 1000 * STEP / 0.98


def test_a_good_drafter_is_used(world: Make) -> None:
    w = world(free=False, draft_seconds=0.1 * STEP, size=8)
    w.chance = 0.95
    assert w.run([request()], 1000) < 1000 * STEP / 2.5


def test_a_free_drafter_is_noticed_at_once_when_the_text_becomes_predictable(world: Make) -> None:
    w, r = world(free=True, size=2), request()
    w.chance = 0.0
    w.run([r], 300)
    w.chance = 1.0
    assert w.run([r], 100) < 70 * STEP


def test_a_costly_one_is_tried_again_and_noticed_later(world: Make) -> None:
    w, r = world(free=False, draft_seconds=0.2 * STEP), request()
    w.chance = 0.0
    w.run([r], 500)
    before = w.num_proposals
    w.run([r], 500)
    assert 1 <= w.num_proposals - before < 30
    w.chance = 0.98
    w.run([r], 1000)
    assert w.run([r], 500) < 250 * STEP


def test_load_turns_drafts_off_and_its_end_on_again(world: Make) -> None:
    w = world(free=False, draft_seconds=0.1 * STEP, size=8)
    w.chance = 0.8
    first, others = request("a"), [request(f"r{i}") for i in range(15)]
    alone = w.run([first], 400)
    assert alone < 250 * STEP
    plain = 400 * w.step_seconds(16)
    assert w.run([first, *others], 400) < plain / 0.95
    assert w.run([first], 400) < 250 * STEP


def test_the_better_request_gets_the_drafts(world: Make) -> None:
    w = world(free=True, size=6)
    good, bad = request("good"), request("bad")
    guess = w._guess
    w._guess = lambda r, n: guess(r, n) if r is good else [99] * n  # type: ignore[method-assign]
    w.chance = 0.95
    w.run([good, bad], 100)
    for r in (good, bad):
        r.num_computed_tokens = r.num_tokens - 1
    w.speculator.propose([good, bad])
    assert len(good.draft_token_ids) >= 3
    assert len(bad.draft_token_ids) == 0


def test_a_prompt_isn_t_read_for_a_few_tokens(world: Make) -> None:
    w = world(free=False, draft_seconds=0.05 * STEP, read_seconds=0.1 * STEP)
    w.chance = 0.9
    w.run([request("a")], 300)
    before = w.num_proposals
    short = request("b", prompt=2000)
    short.max_tokens = 10
    w.run([short], 10)
    assert w.num_proposals == before
