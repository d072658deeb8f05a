from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from qdeploy.runtime.request import Request
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.speculation.base import NUM_KINDS
from qdeploy.runtime.speculation.ngram import NgramDrafter


def request(tokens: list[int], name: str = "a") -> Request:
    return Request(
        request_id=name,
        order=0,
        prompt_token_ids=tokens,
        params=SamplingParams(),
        max_tokens=100,
    )


def drafts(tokens: list[int], count: int = 4, low: int = 2, high: int = 5) -> list[int]:
    return list(NgramDrafter(low, high).propose([request(tokens)], [count])[0].token_ids)


def test_what_followed_before() -> None:
    assert drafts([1, 2, 3, 4, 5, 6, 1, 2]) == [3, 4, 5, 6]
    assert drafts([1, 2, 3, 4, 5, 6, 1, 2], 2) == [3, 4]


def test_no_match_no_draft() -> None:
    assert drafts([1, 2, 3, 4]) == []
    assert drafts([1]) == []
    assert drafts([1, 2, 3, 2]) == []


def test_r16_the_smallest_match_is_configurable() -> None:
    """A short match on structured text guesses branches that aren't taken."""
    text = [7, 8, 1, 2, 3, 9, 9, 1, 2]
    assert drafts(text, low=2) == [3, 9, 9, 1]
    assert drafts(text, low=3) == []


def test_the_longest_match_wins_over_the_latest() -> None:
    text = [5, 6, 1, 2, 30, 9, 1, 2, 40, 5, 6, 1, 2]
    assert drafts(text, 1) == [30]
    assert drafts(text, 1, high=2) == [40]


def test_among_equal_matches_the_most_frequent_continuation_wins_then_the_latest() -> None:
    assert drafts([1, 2, 30, 0, 1, 2, 30, 8, 1, 2, 40, 9, 1, 2], 2) == [30, 8]
    assert drafts([1, 2, 30, 0, 1, 2, 40, 9, 1, 2], 1) == [40]


def test_a_repeating_text_goes_on_repeating() -> None:
    assert drafts([1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert drafts([4, 4, 4], 3) == [4, 4, 4]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.data())
def test_an_index_that_grows_equals_one_made_at_once(
    tokens: list[int], data: st.DataObject
) -> None:
    grown, drafter = request(tokens[:1]), NgramDrafter(2, 4)
    for token in tokens[1:]:
        if data.draw(st.booleans()):
            drafter.propose([grown], [3])
        grown.append(token, 0.0)
    found = list(drafter.propose([grown], [3])[0].token_ids)
    assert found == drafts(tokens, 3, 2, 4)
    place = longest_earlier_match(tokens, 2, 4)
    assert bool(found) == (place > 0)


def longest_earlier_match(tokens: list[int], low: int, high: int) -> int:
    """The length of the longest one, by trying all."""
    for size in range(min(high, len(tokens) - 1), low - 1, -1):
        if any(tokens[i : i + size] == tokens[-size:] for i in range(len(tokens) - size)):
            return size
    return 0


def test_kinds_say_how_long_the_match_is() -> None:
    drafter = NgramDrafter(2, 4)
    assert drafter.propose([request([1, 2, 3, 4, 1, 2])], [3])[0].kinds == [1, 2, 3]
    assert drafter.propose([request([5] * 40, "b")], [20])[0].kinds[-1] == NUM_KINDS - 1


def test_requests_are_apart_and_forgotten() -> None:
    drafter = NgramDrafter(2, 4)
    a, b = request([1, 2, 3, 1, 2], "a"), request([1, 2, 9, 1, 2], "b")
    assert [d.token_ids for d in drafter.propose([a, b], [1, 1])] == [[3], [9]]
    drafter.forget(a)
    drafter.forget(request([1], "unknown"))
    assert drafter.propose([request([1, 2, 7, 1, 2], "a")], [1])[0].token_ids == [7]


def test_a_proposal_takes_microseconds_however_long_the_text() -> None:
    text = [t * t % 50 for t in range(30_000)]  # many places of each n-gram
    drafter, long = NgramDrafter(2, 8), request(text)
    drafter.propose([long], [15])
    times = []
    for token in text[:200]:
        long.append(token, 0.0)
        start = time.perf_counter()
        drafter.propose([long], [15])
        times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 2] < 200e-6
