"""Words that must not come, as token sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def ban_sequences(
    words: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """The sequences of tokens that write `words`, each at the start of a text and after a space.

    encode: text to ids, without special tokens. As in vLLM, only the tokens that the tokenizer
    itself chooses are found, not other ways to spell the word.
    """
    found: dict[tuple[int, ...], None] = {}  # in order, each once
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(encode(text))
            if ids:
                found[ids] = None
    return tuple(found)
