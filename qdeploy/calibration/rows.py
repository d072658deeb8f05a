"""Rows of calibration data, {"messages"}, {"text"} or {"prompt", "completion"}, as token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qdeploy.calibration.windows import CalibrationTokenizer, text_prefix, windows
from qdeploy.errors import CalibrationError, UsageError

NO_TEMPLATE = "this model has no chat template that takes the rows; chat rows are used as text"
#: Keys that a row must have one of.
KEYS = ("messages", "text", "prompt")


@dataclass(slots=True, kw_only=True)
class RowPieces:
    """Rows cut into pieces of at most seqlen ids; kept, blank, split: counts of rows."""

    pieces: list[list[int]] = field(default_factory=list)
    kept: int = 0
    blank: int = 0
    split: int = 0
    chat: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, name: str, seqlen: int) -> str:
        """One line for the user."""
        pieces = len(self.pieces) - self.kept + self.split
        return (
            f"{name}: {self.kept} rows kept ({self.split} longer than {seqlen} tokens were split "
            f"into {pieces} sequences), {self.blank} blank rows dropped"
        )


def row_pieces(
    rows: Iterator[tuple[str, Mapping[str, Any]]], tokenizer: CalibrationTokenizer, seqlen: int
) -> RowPieces:
    """Tokenize rows, each with the place that a message about it names.

    Long rows are split, never dropped. CalibrationError names a row that can't be used.
    """
    found, prefix = RowPieces(), text_prefix(tokenizer)
    for place, row in rows:
        ids, is_chat = _row_ids(place, row, tokenizer, found.notes)
        if not ids:
            found.blank += 1
            continue
        own = prefix if not is_chat or ids[: len(prefix)] == prefix else []
        pieces = windows(ids, seqlen, own)
        found.pieces += pieces
        found.kept, found.chat = found.kept + 1, found.chat + is_chat
        found.split += len(pieces) > 1
    return found


def json_rows(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Objects of a .jsonl, blank lines as blank rows."""
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{path}, line {number}"
        if not line.strip():
            yield place, {"text": ""}
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise CalibrationError(f"{place}: not JSON; write one object a line") from None
        if not isinstance(row, dict) or not any(key in row for key in KEYS):
            raise CalibrationError(
                f'{place}: needs the key "text", "messages" or "prompt"; add one'
            )
        yield place, row


def _row_ids(
    place: str, row: Mapping[str, Any], tokenizer: CalibrationTokenizer, notes: list[str]
) -> tuple[list[int], bool]:
    """Ids of one row, [] for a blank one, and whether the chat template made them."""
    messages = _messages(place, row)
    if not messages:
        text = str(row.get("text") or "") or _joined(row)
        return (tokenizer.encode(text, False) if text.strip() else []), False
    contents = [str(message.get("content") or "") for message in messages]
    if not any(content.strip() for content in contents):
        return [], False
    open_ended = messages[-1].get("role") != "assistant"
    try:
        return tokenizer.chat(messages, add_generation_prompt=open_ended), True
    except UsageError:
        if NO_TEMPLATE not in notes:
            notes.append(NO_TEMPLATE)
        return tokenizer.encode("\n\n".join(contents), False), False


def _messages(place: str, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The row's conversation, [] when it is of text. Prompt and completion may be messages."""
    parts = {key: row.get(key) for key in ("messages", "prompt", "completion")}
    found: list[Mapping[str, Any]] = []
    for key, value in parts.items():
        if value is None or (isinstance(value, str) and key != "messages"):
            continue
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise CalibrationError(
                f'{place}: "{key}" must be a list of objects with "role" and "content"; '
                "correct the row"
            )
        found += value
    return found


def _joined(row: Mapping[str, Any]) -> str:
    """Prompt and completion of text are one text, as training libraries read them."""
    return "".join(str(row.get(key) or "") for key in ("prompt", "completion"))
