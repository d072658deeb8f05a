"""continue_final_message: render a conversation so that it ends within its last message."""

from __future__ import annotations

from typing import Any

#: As transformers', trailing space included, so that templates that strip text are seen.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def mark_continued(chat: list[dict[str, Any]], field: str, template: str) -> str:
    """Mark the end of the last message's `field` in place; returns its text.

    Raises ValueError when there is no such text or the template doesn't show it.
    """
    message = chat[-1] if chat else {}
    value = message.get(field)
    if value is None:
        raise ValueError(f"the final message has no {field!r} to continue")
    same = [name for name in _REASONING_FIELDS if message.get(name) == value]
    names = same if field in _REASONING_FIELDS else [field]
    if not any(name in template for name in names):
        raise ValueError(f"the chat template doesn't show a message's {field!r}")
    if isinstance(value, list):
        return _mark_part(value)
    for name in names:
        message[name] = value + _TAG
    return str(value)


def _mark_part(parts: list[Any]) -> str:
    for part in reversed(parts):
        if isinstance(part, dict) and "text" in part:
            text = str(part["text"])
            part["text"] = text + _TAG
            return text
    raise ValueError("the final message has no text to continue")


def cut_continued(text: str, final: str) -> str:
    """The rendered text up to the mark. ValueError when the template left out the message."""
    if final.strip() not in text or _TAG.strip() not in text:
        raise ValueError("the chat template leaves out the final message; it can't be continued")
    end = text.rindex(_TAG.strip())
    kept = text[:end]
    # without the mark's space the template strips messages, so the text must be stripped, too
    return kept if text[end:].startswith(_TAG) else kept.rstrip()
