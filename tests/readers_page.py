"""The table of other engines in docs/formats.md, from what `make readers` measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from qdeploy.formats.readers import Reader, fault

TABLE_BEGIN = "<!-- readers: written by `make readers` -->"
TABLE_END = "<!-- readers: end -->"


def table(readers: Sequence[Reader]) -> list[str]:
    """Lines of a Markdown table: a row for each format and kind, a column for each engine."""
    engines = list(dict.fromkeys(reader.engine for reader in readers))
    head = ["format", "scheme", *(f"{engine} on a CPU" for engine in engines)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for format, kind in dict.fromkeys((reader.format, reader.kind) for reader in readers):
        cells = [f"`{format}`", kind]
        for engine in engines:
            key = (format, kind, engine)
            tried = [each for each in readers if (each.format, each.kind, each.engine) == key]
            cells.append("; ".join(_cell(reader) for reader in tried))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cell(reader: Reader) -> str:
    if not reader.agrees:
        return f"**no** with {reader.needs}: {fault(reader)}"
    return f"yes with {reader.needs} ({reader.error:.0e})"


def write_readers(readers: Sequence[Reader], json_file: Path, page: Path) -> None:
    """Write readers.json and the table between the marks of a Markdown page."""
    rows = [asdict(reader) for reader in readers]
    json_file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    assert text.count(TABLE_BEGIN) == text.count(TABLE_END) == 1, f"{page} has no place for a table"
    head, _, rest = text.partition(TABLE_BEGIN)
    _, _, tail = rest.partition(TABLE_END)
    middle = "\n".join([TABLE_BEGIN, *table(readers), TABLE_END])
    page.write_text(head + middle + tail, encoding="utf-8")
