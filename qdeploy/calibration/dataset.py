"""Calibration text as token sequences: shipped, .jsonl or .txt; offline and deterministic."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qdeploy._resources import resource_dir
from qdeploy.errors import CalibrationError, UsageError
from qdeploy.recipes import CalibrationSection

#: Chat and code may each fill this share of the shipped mix; prose fills the rest.
SIDE_SHARE = 4
ENCODE_CHARS = 8192


class CalibrationTokenizer(Protocol):
    """What calibration needs of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids."""

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Messages to ids by the model's template, which writes BOS itself; UsageError: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationData:
    """Sequences of 1 … seqlen token ids, never padded; `notes` are lines for the user.

    sha256: over the token ids, so that it changes with the text, the tokenizer and the seed.
    """

    sequences: list[list[int]]
    source: str
    sha256: str
    samples_used: int
    samples_requested: int
    tokens: int
    notes: tuple[str, ...] = ()


def load_calibration(
    section: CalibrationSection, tokenizer: CalibrationTokenizer
) -> CalibrationData:
    """Read, tokenize, cut and draw `samples` sequences.

    Documents longer than seqlen are split, never dropped; blank rows are dropped and counted.
    Raises CalibrationError when nothing usable is left, UsageError for a source that is no file.
    """
    notes: list[str] = []
    if section.source == "default":
        chosen = _default_mix(section, tokenizer, notes)
    else:
        pieces = _read_pieces(Path(section.source), section.seqlen, tokenizer, notes)
        chosen = _draw(pieces, section.samples, section.seed)
    if not chosen:
        raise CalibrationError(
            f"calibration source {section.source} has no usable text "
            f"(0 of {section.samples} samples); give one with text, or --calib default"
        )
    return _finish(section, chosen, notes)


def _finish(
    section: CalibrationSection, chosen: list[list[int]], notes: list[str]
) -> CalibrationData:
    tokens = sum(map(len, chosen))
    used = f"calibrating on {len(chosen)} of {section.samples} requested samples, {tokens} tokens"
    return CalibrationData(
        sequences=chosen,
        source=section.source if section.source == "default" else Path(section.source).name,
        sha256=hashlib.sha256(json.dumps(chosen).encode()).hexdigest(),
        samples_used=len(chosen),
        samples_requested=section.samples,
        tokens=tokens,
        notes=(*notes, used),
    )


def _default_mix(
    section: CalibrationSection, tokenizer: CalibrationTokenizer, notes: list[str]
) -> list[list[int]]:
    """Chat and code up to a quarter each, the rest prose."""
    folder, seqlen = resource_dir("calib_data"), section.seqlen
    rows = [json.loads(line) for line in _read(folder / "chat.jsonl").splitlines() if line.strip()]
    chat_ids = [id for row in rows for id in _row_ids(row, tokenizer, notes)]
    prefix = _prefix(tokenizer)
    sides = [
        _windows(chat_ids, seqlen, []),  # the template has its own BOS
        _windows(_encode_long(tokenizer, _read(folder / "code.txt")), seqlen, prefix),
    ]
    limit = section.samples // SIDE_SHARE
    chosen = [piece for side in sides for piece in _draw(side, limit, section.seed)]
    prose = _windows(_encode_long(tokenizer, _read(folder / "prose.txt")), seqlen, prefix)
    chosen += _draw(prose, section.samples - len(chosen), section.seed)
    return _draw(chosen, section.samples, section.seed)


def _read_pieces(
    path: Path, seqlen: int, tokenizer: CalibrationTokenizer, notes: list[str]
) -> list[list[int]]:
    if path.suffix not in (".jsonl", ".txt"):
        raise UsageError(
            f"calibration source {str(path)!r} is unknown; give default, a .jsonl or a .txt file",
            param="calib",
        )
    if path.suffix == ".txt":
        text = _read(path)
        ids = _encode_long(tokenizer, text) if text.strip() else []
        return _windows(ids, seqlen, _prefix(tokenizer))
    kept = blank = split = 0
    pieces: list[list[int]] = []
    for row in _json_rows(path):
        ids = _row_ids(row, tokenizer, notes)
        kept, blank, split = kept + bool(ids), blank + (not ids), split + (len(ids) > seqlen)
        pieces += _windows(ids, seqlen, [])
    notes.append(
        f"{path.name}: {kept} rows kept ({split} longer than {seqlen} tokens were split into "
        f"{len(pieces) - kept + split} sequences), {blank} blank rows dropped"
    )
    return pieces


def _json_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            yield {"text": ""}
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise CalibrationError(
                f"{path}, line {number}: not JSON; write one object a line"
            ) from (None)
        if not isinstance(row, dict) or not ("text" in row or "messages" in row):
            raise CalibrationError(
                f'{path}, line {number}: needs the key "text" or "messages"; add one'
            )
        if not _are_messages(row.get("messages")):
            raise CalibrationError(
                f'{path}, line {number}: "messages" must be a list of objects with "role" and '
                '"content"; correct the row'
            )
        yield row


def _are_messages(value: object) -> bool:
    """Whether a row's `messages` can be given to a chat template; absent or null is fine."""
    return value is None or (
        isinstance(value, list) and all(isinstance(item, dict) for item in value)
    )


def _row_ids(
    row: Mapping[str, Any], tokenizer: CalibrationTokenizer, notes: list[str]
) -> list[int]:
    """Ids of one row; [] for a blank one. Without a chat template, messages become plain text."""
    messages = row.get("messages")
    if not messages:
        text = str(row.get("text") or "")
        return tokenizer.encode(text, True) if text.strip() else []
    contents = [str(message.get("content") or "") for message in messages]
    if not any(content.strip() for content in contents):
        return []
    try:
        return tokenizer.chat(messages)
    except UsageError:
        note = "this model has no chat template that takes the rows; chat rows are used as text"
        if note not in notes:
            notes.append(note)
        return tokenizer.encode("\n\n".join(contents), True)


def _encode_long(tokenizer: CalibrationTokenizer, text: str) -> list[int]:
    """Ids of a long text, cut at blank lines: tokenizers are slow, and warn, on a whole book."""
    ids: list[int] = []
    part: list[str] = []
    size = 0
    for paragraph in text.split("\n\n"):
        part.append(paragraph)
        size += len(paragraph)
        if size >= ENCODE_CHARS:
            ids += tokenizer.encode("\n\n".join([*part, ""]), False)
            part, size = [], 0
    return ids + (tokenizer.encode("\n\n".join(part), False) if part else [])


def _prefix(tokenizer: CalibrationTokenizer) -> list[int]:
    """Ids that the tokenizer puts before a text (BOS), which every window of it then begins with.

    Without BOS, models trained with one (Gemma) have statistics they never show in use.
    """
    plain, full = tokenizer.encode("a", False), tokenizer.encode("a", True)
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []


def _windows(ids: list[int], seqlen: int, prefix: list[int]) -> list[list[int]]:
    """Cut into windows of seqlen ids, the last one shorter; each begins with `prefix`."""
    step = max(seqlen - len(prefix), 1)
    return [prefix + ids[start : start + step] for start in range(0, len(ids), step)]


def _draw(pieces: list[list[int]], count: int, seed: int) -> list[list[int]]:
    """Up to `count` pieces in seeded random order, full windows before shorter remainders."""
    order = list(pieces)
    random.Random(seed).shuffle(order)
    longest = max(map(len, order), default=0)
    order.sort(key=lambda piece: len(piece) < longest // 2)
    return order[:count]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"calibration source {path}: {error.strerror}", param="calib") from None
    except UnicodeDecodeError:
        raise CalibrationError(f"{path}: not UTF-8 text; convert it") from None
