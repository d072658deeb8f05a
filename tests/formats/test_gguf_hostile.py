"""Damaged and hostile GGUF headers end in one line, at once, and never in a loop or a crash."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_builder import tiny_model, write_gguf
from qdeploy.errors import FormatError
from qdeploy.formats import gguf as converter
from qdeploy.formats.gguf import convert_gguf
from qdeploy.formats.gguf_file import GgufFile, open_gguf
from qdeploy.formats.gguf_header import read_gguf_header

HUGE = 1 << 60


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(num_tensors: int, num_fields: int, body: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + body


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


ARRAY_OF = text("k") + struct.pack("<I", 9)
HOSTILE = {
    "empty": b"",
    "not gguf": b"PK\x03\x04" + bytes(60),
    "only magic": b"GGUF",
    "version 1": header(0, 0, b"", version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "huge field count": header(0, HUGE, b""),
    "huge tensor count": header(HUGE, 0, b""),
    "huge key": header(0, 1, struct.pack("<Q", HUGE)),
    "huge string": header(0, 1, text("k") + struct.pack("<IQ", 8, HUGE)),
    "huge array": header(0, 1, ARRAY_OF + struct.pack("<IQ", 4, HUGE)),
    "huge string array": header(0, 1, ARRAY_OF + struct.pack("<IQ", 8, HUGE)),
    "nested array": header(0, 1, ARRAY_OF + struct.pack("<IQ", 9, 1)),
    "unknown value type": header(0, 1, text("k") + struct.pack("<I", 99)),
    "bad utf-8": header(0, 1, struct.pack("<Q", 2) + b"\xff\xfe"),
    "duplicate key": header(0, 2, 2 * (text("k") + struct.pack("<II", 4, 1))),
    "zero alignment": header(0, 1, text("general.alignment") + struct.pack("<II", 4, 0)),
    "no dimensions": header(1, 0, tensor("w", (), 0, 0)),
    "five dimensions": header(1, 0, tensor("w", (1, 1, 1, 1, 1), 0, 0)),
    "unknown tensor type": header(1, 0, tensor("w", (4,), 250, 0)),
    "ragged block": header(1, 0, tensor("w", (31,), 2, 0) + bytes(200)),
    "past the end": header(1, 0, tensor("w", (1024,), 0, 0)),
    "overflowing shape": header(1, 0, tensor("w", (HUGE, HUGE), 0, 0) + bytes(200)),
    "overlap": header(2, 0, tensor("a", (8,), 0, 0) + tensor("b", (8,), 0, 16) + bytes(200)),
    "duplicate tensor": header(2, 0, 2 * tensor("a", (8,), 0, 0) + bytes(200)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header(case: str, tmp_path: Path) -> None:
    file = tmp_path / "hostile.gguf"
    file.write_bytes(HOSTILE[case])
    with pytest.raises(FormatError, match=r"hostile\.gguf") as caught:
        read_gguf_header(file)
    assert "\n" not in str(caught.value)


def broken_copy(folder: Path, position: int, flip: int) -> Path:
    """A tiny GGUF cut at `position` (flip = 0) or with the byte there changed."""
    good = folder / "good.gguf"
    if not good.exists():
        folder.mkdir(exist_ok=True)
        write_gguf(good, "llama", tiny_model("llama"))
    raw = bytearray(good.read_bytes())
    if flip:
        raw[position] ^= flip
    bad = folder / "bad.gguf"
    bad.write_bytes(raw if flip else raw[:position])
    return bad


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(position=st.integers(0, 9000), flip=st.integers(0, 255))
def test_any_change_is_an_error_or_harmless(
    position: int, flip: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cut or change a byte anywhere in the header: a FormatError of one line, or it converts."""
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    bad = broken_copy(folder, position, flip)
    out = folder / "out"
    out.mkdir(exist_ok=True)
    message = ""
    try:
        size = bad.stat().st_size
        assert all(info.end <= size for info in open_gguf(bad).tensors.values())
        convert_gguf(bad, out)
    except FormatError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", "many"),
        ("llama.block_count", (1 << 32) - 1),
        ("llama.attention.head_count", 0),
        ("llama.embedding_length", "wide"),
        ("llama.attention.head_count_kv", [1, 2]),
        ("llama.rope.scaling.type", "longrope"),
        ("tokenizer.ggml.tokens", ["a", "a"]),
        ("tokenizer.ggml.tokens", 7),
        ("tokenizer.ggml.bos_token_id", 1 << 20),
        ("tokenizer.ggml.merges", ["no-pair"]),
        ("tokenizer.ggml.merges", ["zz yy"]),
        ("tokenizer.ggml.token_type", [1]),
    ],
)
def test_inconsistent_metadata(
    key: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    source = open_gguf(file)
    changed = GgufFile(path=file, fields={**source.fields, key: value}, tensors=source.tensors)
    monkeypatch.setattr(converter, "open_gguf", lambda path: changed)
    with pytest.raises(FormatError, match=r"m\.gguf") as caught:
        convert_gguf(file, tmp_path)
    assert "\n" not in str(caught.value)
