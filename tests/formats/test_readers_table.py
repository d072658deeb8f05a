"""The docs' table of readers is readers.json, and inspect says nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.layer_samples import CHECKPOINTS
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.inspect import failing_readers_of, readers_of
from qdeploy.formats.readers import Reader, kind_of, measured_readers
from qdeploy.formats.weight_format import WEIGHT_FORMATS
from qdeploy.quantization.scheme import QuantScheme, fp8_scheme
from readers_page import TABLE_BEGIN, TABLE_END, table, write_readers

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
ROW = Reader(format="awq", kind="W4A16_ASYM", engine="e 1", needs="p 2", error=1e-3)


def test_the_page_has_the_measured_table() -> None:
    readers = measured_readers()
    assert {reader.format for reader in readers} == set(WEIGHT_FORMATS)
    assert "\n".join([TABLE_BEGIN, *table(readers), TABLE_END]) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "needs"), [("awq", "accelerate"), ("gptq_v2", "gptqmodel"), ("ct_asym", "dequantize")]
)
def test_readers_of_foreign_checkpoints(name: str, needs: str) -> None:
    assert needs in " ".join(readers_of(open_checkpoint(CHECKPOINTS / name)))


def test_a_reader_that_fails_is_named() -> None:
    (reason,) = failing_readers_of(open_checkpoint(CHECKPOINTS / "ct_asym"))
    assert "doesn't load" in reason


def test_kinds_tell_apart_what_readers_differ_in() -> None:
    four, eight = QuantScheme(), QuantScheme(bits=8)
    order = QuantScheme(act_order=True)
    found = [
        kind_of(s)
        for s in ([four, four], [order], [four, eight], [four, fp8_scheme("FP8_DYNAMIC")])
    ]
    assert found == ["W4A16_ASYM", "W4A16_ASYM, activation order", "mixed", "mixed with FP8"]


def test_writing_replaces_the_table_only(tmp_path: Path) -> None:
    page, rows = (
        tmp_path / "page.md",
        [ROW, Reader(**{**_fields(ROW), "engine": "f", "error": None})],
    )
    page.write_text(f"before\n{TABLE_BEGIN}\nold\n{TABLE_END}\nafter\n")
    write_readers(rows, tmp_path / "readers.json", page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| `awq` | W4A16_ASYM | yes with p 2 (1e-03) | **no** with p 2: doesn't load |" in text


def _fields(reader: Reader) -> dict[str, object]:
    return {name: getattr(reader, name) for name in ("format", "kind", "engine", "needs", "error")}
