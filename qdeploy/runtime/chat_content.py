"""Message content before the chat template sees it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qdeploy.errors import UsageError

_PRIVATE_USE = range(0xE000, 0xF8FF)


def flatten_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join lists of text parts; UsageError for no messages, no role or a part that isn't text."""
    if not messages:
        raise UsageError("messages is empty; give at least one message", param="messages")
    return [_flatten(message) for message in messages]


def _flatten(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise UsageError("a message has no role; give system, user or assistant", param="messages")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "".join(_text_of(part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise UsageError(
            f"message content of type {type(content).__name__} is not supported; give text",
            param="messages",
        )
    return {**message, "content": content}


def _text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise UsageError(
            f"content part of type {kind!r} is not supported; this model reads text parts only",
            param="messages",
        )
    return text


class Placeholders:
    """Hides the text of special tokens in messages from the template, and finds it again.

    A hidden text is one private-use character that occurs in no message, an index, and the
    character again.
    """

    def __init__(self, special_texts: Sequence[str]) -> None:
        longest_first = sorted((t for t in special_texts if t), key=len, reverse=True)
        self._texts = longest_first
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._mark = ""
        self._used = False

    def hide(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with every special text in any string (content, role, name, …) replaced."""
        everything = repr(messages)
        marks = (chr(c) for c in _PRIVATE_USE)
        # repr escapes private-use characters, so look for the escape too.
        free = (m for m in marks if m not in everything and repr(m)[1:-1] not in everything)
        mark = next(free, None)
        if mark is None:
            raise UsageError(
                "the messages use every private-use character; leave one out", param="messages"
            )
        self._mark = mark
        return [self._hide(message) for message in messages]

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """Pieces of rendered text, in order, with whether a piece is to be read literally."""
        if not self._used:
            yield text, False
            return
        pieces = re.split(f"{self._mark}(\\d+){self._mark}", text)
        for number, piece in enumerate(pieces):
            if number % 2:
                yield self._texts[int(piece)], True
            elif piece:
                yield piece, False

    def _hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(self._replace, value)
        if isinstance(value, Mapping):
            return {key: self._hide(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._hide(item) for item in value]
        return value

    def _replace(self, match: re.Match[str]) -> str:
        self._used = True
        return f"{self._mark}{self._texts.index(match.group())}{self._mark}"
