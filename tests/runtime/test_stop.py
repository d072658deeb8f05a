from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from qdeploy.runtime.stop import StopStrings

TEXTS = st.text(st.sampled_from("ab"), max_size=12)


@settings(deadline=None)
@given(
    pieces=st.lists(TEXTS, max_size=8),
    stops=st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stop_strings_cut_at_the_match_that_ends_first(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    matcher, shown, found = StopStrings(stops, include_stop=include), "", None
    for piece in pieces:
        for character in piece:
            text, found = matcher.push(character)
            shown += text
            if found:
                break
        if found:
            break
    whole = "".join(pieces)
    ends = [(whole.find(s) + len(s), whole.find(s), s) for s in stops if s in whole]
    if not ends:
        assert found is None
        assert shown + matcher.flush() == whole
        return
    end, start, stop = min(ends)
    assert found == stop
    assert shown == whole[: end if include else start]


def test_text_is_held_back_only_while_a_stop_may_come() -> None:
    matcher = StopStrings(["\nUser:"])
    assert matcher.push("Hello") == ("Hello", None)
    assert matcher.push("\nUs") == ("", None)
    assert matcher.push("ing") == ("\nUsing", None)
    assert matcher.push("\nUser: no") == ("", "\nUser:")


def test_a_stop_string_inside_a_longer_piece() -> None:
    assert StopStrings(["END"]).push("abcENDdef") == ("abc", "END")
    assert StopStrings(["END"], include_stop=True).push("abcENDdef") == ("abcEND", "END")


def test_before_min_tokens_nothing_stops() -> None:
    matcher = StopStrings(["END"])
    assert matcher.push("E") == ("", None)
    assert matcher.push("ND", may_stop=False) == ("END", None)
    assert matcher.push("END") == ("", "END")
