"""Calibration text as token sequences: shipped, own files, a hub data set, or the model's own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from qdeploy._resources import resource_dir
from qdeploy.calibration.hub import dataset_rows, is_dataset_name
from qdeploy.calibration.rows import RowPieces, json_rows, row_pieces
from qdeploy.calibration.windows import (
    CalibrationTokenizer,
    draw,
    encode_long,
    text_prefix,
    windows,
)
from qdeploy.errors import CalibrationError, UsageError
from qdeploy.recipes import CalibrationSection

#: Chat and code may each fill this share of the shipped mix; prose fills the rest.
SIDE_SHARE = 4
#: Tokens for each input feature below which second moments are noise (H needs one to have rank).
TOKENS_PER_FEATURE = 8
#: What GPTQ's paper and most tools take.
USUAL_SEQUENCES = 128

#: Writes the sequences of source `self`, and a line that says how; made by `self_model`.
OwnSequences = Callable[[], tuple[list[list[int]], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationData:
    """Sequences of 1 … seqlen token ids, never padded; `notes` are lines for the user.

    sha256: over the token ids, so that it changes with the text, the tokenizer and the seed.
    rows_kept, rows_blank: of a source of rows, None of other sources
    """

    sequences: list[list[int]]
    source: str
    sha256: str
    samples_used: int
    samples_requested: int
    tokens: int
    rows_kept: int | None = None
    rows_blank: int | None = None
    notes: tuple[str, ...] = ()

    def warnings(self, in_features: int) -> list[str]:
        """Lines about text that doesn't suffice for layers of up to in_features inputs."""
        found = []
        if self.samples_used < self.samples_requested:
            found.append(
                f"{self.samples_used} of {self.samples_requested} requested calibration samples: "
                f"{self.source} has no more text"
            )
        if self.tokens < TOKENS_PER_FEATURE * in_features:
            found.append(
                f"{self.tokens} calibration tokens are fewer than {TOKENS_PER_FEATURE} for each of "
                f"{in_features} input features: statistics are poor, give more text"
            )
        return found


@dataclass(slots=True, kw_only=True)
class _Chosen:
    sequences: list[list[int]]
    name: str
    rows: RowPieces | None = None
    notes: list[str] = field(default_factory=list)


def load_calibration(
    section: CalibrationSection,
    tokenizer: CalibrationTokenizer,
    own_sequences: OwnSequences | None = None,
) -> CalibrationData:
    """Read, tokenize, cut and draw `samples` sequences.

    Documents longer than seqlen are split, never dropped; blank rows are dropped and counted.
    own_sequences: for source `self`. Raises CalibrationError when nothing usable is left,
    UsageError for a source that is neither file nor data set, SourceError for a data set that
    can't be fetched.
    """
    chosen = _choose(section, tokenizer, own_sequences)
    if not chosen.sequences:
        raise CalibrationError(
            f"calibration source {section.source} has no usable text "
            f"(0 of {section.samples} samples); give one with text, or --calib default"
        )
    return _finish(section, chosen)


def _choose(
    section: CalibrationSection,
    tokenizer: CalibrationTokenizer,
    own_sequences: OwnSequences | None,
) -> _Chosen:
    source = section.source
    path = Path(source)
    if source == "default":
        return _default_mix(section, tokenizer)
    if source == "self":
        if own_sequences is None:
            raise UsageError("calibration source self needs the model", param="calib")
        sequences, note = own_sequences()
        return _Chosen(sequences=sequences, name=source, notes=[note])
    if path.suffix == ".txt":
        text = _read(path)
        ids = encode_long(tokenizer, text) if text.strip() else []
        pieces = windows(ids, section.seqlen, text_prefix(tokenizer))
        drawn = draw(pieces, section.samples, section.seqlen, section.seed)
        return _Chosen(sequences=drawn, name=path.name)
    if path.suffix == ".jsonl":
        rows = json_rows(path, _read(path))
        return _from_rows(
            section, row_pieces(rows, tokenizer, section.seqlen), path.name, tokenizer
        )
    if is_dataset_name(source):
        rows = dataset_rows(source, section.samples)
        return _from_rows(section, row_pieces(rows, tokenizer, section.seqlen), source, tokenizer)
    raise UsageError(
        f"calibration source {source!r} is unknown; give default, self, a .jsonl or .txt file, "
        "or a data set as NAME[:SPLIT][:COLUMN]",
        param="calib",
    )


def _from_rows(
    section: CalibrationSection, rows: RowPieces, name: str, tokenizer: CalibrationTokenizer
) -> _Chosen:
    notes = [*rows.notes, rows.note(name, section.seqlen)]
    if not rows.chat and not rows.notes and _has_template(tokenizer):
        notes.append(
            f"{name} has no chat rows, but this model a chat template: its control tokens are "
            'calibrated with rows of "messages", or with --calib self'
        )
    drawn = draw(rows.pieces, section.samples, section.seqlen, section.seed)
    return _Chosen(sequences=drawn, name=name, rows=rows, notes=notes)


def _has_template(tokenizer: CalibrationTokenizer) -> bool:
    try:
        tokenizer.chat([{"role": "user", "content": "a"}], add_generation_prompt=True)
    except UsageError:
        return False
    return True


def _finish(section: CalibrationSection, chosen: _Chosen) -> CalibrationData:
    used, tokens = len(chosen.sequences), sum(map(len, chosen.sequences))
    coverage = f"calibrating on {used} of {section.samples} requested samples, {tokens} tokens"
    if used < USUAL_SEQUENCES:
        coverage += f" ({USUAL_SEQUENCES} samples are usual; more cost time and steady the result)"
    return CalibrationData(
        sequences=chosen.sequences,
        source=chosen.name,
        sha256=hashlib.sha256(json.dumps(chosen.sequences).encode()).hexdigest(),
        samples_used=used,
        samples_requested=section.samples,
        tokens=tokens,
        rows_kept=chosen.rows.kept if chosen.rows is not None else None,
        rows_blank=chosen.rows.blank if chosen.rows is not None else None,
        notes=(*chosen.notes, coverage),
    )


def _default_mix(section: CalibrationSection, tokenizer: CalibrationTokenizer) -> _Chosen:
    """Chat and code up to a quarter each, the rest prose."""
    folder, seqlen, seed = resource_dir("calib_data"), section.seqlen, section.seed
    prefix = text_prefix(tokenizer)
    chat_file = folder / "chat.jsonl"
    chat = row_pieces(json_rows(chat_file, _read(chat_file)), tokenizer, seqlen)
    sides = [
        # A conversation after the other; each begins as the template lets it.
        windows([id for piece in chat.pieces for id in piece], seqlen, []),
        windows(encode_long(tokenizer, _read(folder / "code.txt")), seqlen, prefix),
    ]
    limit = section.samples // SIDE_SHARE
    chosen = [piece for side in sides for piece in draw(side, limit, seqlen, seed)]
    prose = windows(encode_long(tokenizer, _read(folder / "prose.txt")), seqlen, prefix)
    chosen += draw(prose, section.samples - len(chosen), seqlen, seed)
    drawn = draw(chosen, section.samples, seqlen, seed)
    return _Chosen(sequences=drawn, name=section.source, notes=chat.notes)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"calibration source {path}: {error.strerror}", param="calib") from None
    except UnicodeDecodeError:
        raise CalibrationError(f"{path}: not UTF-8 text; convert it") from None
