from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdeploy.runtime.speculation.controller import MARGIN, Acceptance, best_counts
from qdeploy.runtime.speculation.step_cost import StepCost


def free(_: int) -> float:
    return 0.0


def flat(_: int) -> float:
    return 1.0


def proportional(tokens: int) -> float:
    return float(tokens)


def test_as_many_as_allowed_where_a_step_costs_the_same() -> None:
    assert best_counts([[0.9] * 4], flat, free)[0] == [4]
    assert best_counts([[0.9] * 4, [0.9] * 2], flat, free)[0] == [4, 2]


def test_none_where_every_token_costs_as_much_as_the_first() -> None:
    assert best_counts([[0.9] * 4, [0.5] * 4], proportional, free) == ([0, 0], 1.0)


def test_none_before_anything_was_measured() -> None:
    assert best_counts([[0.9] * 4], StepCost(), free) == ([0], 1.0)


def test_the_likelier_request_gets_more() -> None:
    counts, gain = best_counts([[0.9] * 8, [0.3] * 8], lambda n: 1 + 0.1 * n, free)
    assert counts[0] > counts[1]
    assert gain > 1


def test_a_doubtful_first_draft_can_pay_for_sure_ones_after_it() -> None:
    assert best_counts([[0.5] + [0.99] * 7], lambda n: 1 + 0.1 * n, free)[0] == [8]
    assert best_counts([[0.5] * 8], lambda n: 1 + 0.1 * n, free)[0][0] < 4


def test_drafting_has_its_price() -> None:
    assert best_counts([[0.8] * 8], flat, lambda n: 0.1)[0][0] < 8
    assert best_counts([[0.8] * 8], flat, lambda n: 1.0)[0] == [0]


def test_load_turns_speculation_off() -> None:
    def seconds(tokens: int) -> float:  # memory-bound up to 8 tokens, then compute-bound
        return 1.0 if tokens <= 8 else tokens / 8

    assert best_counts([[0.7] * 5], seconds, free)[0] == [5]
    assert sum(best_counts([[0.7] * 5] * 8, seconds, free)[0]) == 0


@given(
    rates=st.lists(st.lists(st.floats(0.05, 0.99), max_size=4), min_size=1, max_size=3),
    base=st.floats(0.1, 5),
    slope=st.floats(0.0, 1),
    draft=st.floats(0.0, 1),
)
def test_no_other_choice_is_better(
    rates: list[list[float]], base: float, slope: float, draft: float
) -> None:
    def seconds(tokens: int) -> float:
        return base + slope * tokens

    def value(counts: tuple[int, ...]) -> float:
        tokens = sum(
            math.prod(chances[:j])
            for chances, k in zip(rates, counts, strict=True)
            for j in range(k + 1)
        )
        rounds = [sum(k >= level for k in counts) for level in range(1, 5)]
        drafting = draft * sum(1 for n in rounds if n)
        return tokens / (seconds(len(rates) + sum(counts)) + drafting)

    counts, gain = best_counts(rates, seconds, lambda n: draft)
    plain = value((0,) * len(rates))
    assert value(tuple(counts)) / plain == pytest.approx(gain)
    # Drafts that are hardly ever right aren't considered, and a hair's gain is none.
    every = itertools.product(*(range(len(chances) + 1) for chances in rates))
    best = max(map(value, every)) / plain
    assert gain == pytest.approx(best, rel=0.02) or best <= MARGIN + 0.02


def test_acceptance_follows_what_happens() -> None:
    acceptance = Acceptance()
    assert acceptance.rate(0.6, 2) == pytest.approx(0.6)
    for accepted, low, high in [(True, 0.9, 1.0), (False, 0.0, 0.2), (True, 0.9, 1.0)]:
        for _ in range(40):
            acceptance.update(accepted)
        assert low < acceptance.rate(0.6, 2) < high


def test_cost_is_learned_and_interpolated() -> None:
    cost = StepCost()
    assert cost(3) == 0
    for tokens, seconds in [(1, 1.0), (5, 2.0), (64, 10.0)]:
        for _ in range(5):
            cost.note(tokens, seconds)
    assert cost(1) == pytest.approx(1)
    assert cost(2) == pytest.approx(1.05), "what wasn't measured is worth a try"
    assert cost(5) == pytest.approx(2)
    assert cost(64) == pytest.approx(10)
    assert cost(5) < cost(20) < cost(64) < cost(100)


def test_a_stall_is_forgotten() -> None:
    cost = StepCost()
    for seconds in [1.0] * 5 + [100.0]:
        cost.note(4, seconds)
    assert cost(4) < 1.2
    cost = StepCost()
    for seconds in [100.0] + [1.0] * 45:
        cost.note(4, seconds)
    assert cost(4) < 1.2


def test_a_bad_moment_of_one_size_is_corrected_by_the_larger_ones() -> None:
    cost = StepCost()
    for tokens, seconds in [(1, 1.0), (4, 50.0), (8, 2.0)]:
        for _ in range(3):
            cost.note(tokens, seconds)
    assert cost(4) <= 2.0


def test_a_slower_machine_is_noticed() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.note(1, 1.0)
    for _ in range(100):
        cost.note(1, 3.0)
    assert cost(1) == pytest.approx(3, rel=0.05)
