"""Tokens to text one at a time, never splitting a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
# Tokens that may wait for the rest of a character. A character has at most 4 bytes, so more than
# this is not text; it is let go so that garbage output can't make the window grow.
_MAX_PENDING = 16
_CONTEXT_TOKENS = 5


class Detokenizer:
    """Decodes a window of tokens twice, with and without the newest, and shows the difference.

    The window (a few tokens back) gives decoders the context that they need for spaces; this is
    the method of vLLM's and TGI's incremental detokenizers.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._shown = len(self._window)  # tokens of the window whose text is out
        self._before: str | None = None  # that text, once decoded

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain, "" while a character is incomplete."""
        self._window.append(token_id)
        pending = len(self._window) - self._shown
        return self._take(force=pending > _MAX_PENDING)

    def flush(self) -> str:
        """The text of what is pending; an incomplete character shows as U+FFFD."""
        return self._take(force=True)

    def _take(self, *, force: bool) -> str:
        if self._before is None:
            self._before = self._decode(self._window[: self._shown])
        before = self._before
        after = self._decode(self._window)
        if after.endswith(_REPLACEMENT) and not force:
            return ""
        if len(after) <= len(before) and not force:
            return ""  # a special token, or text that a later token will settle
        self._window = self._window[self._shown :]
        self._shown, self._before = len(self._window), None
        return after[len(before) :]
