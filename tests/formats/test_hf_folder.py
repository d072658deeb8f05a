"""TensorFolder: hostile headers, escaping paths, pickles, indexes; and what it reads."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from qdeploy.errors import FormatError
from qdeploy.formats.hf import open_folder
from qdeploy.formats.safetensors_header import DTYPES, read_header

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.ones(4, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 5, dtype=torch.int32),
}


def folder(tmp_path: Path, *shards: dict[str, torch.Tensor]) -> Path:
    """A model folder of one file, or of shards with an index."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if len(shards) == 1:
        save_file(shards[0], tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path
    weight_map = {}
    for number, shard in enumerate(shards):
        save_file(shard, tmp_path / f"shard{number}.safetensors")
        weight_map.update(dict.fromkeys(shard, f"shard{number}.safetensors"))
    write_index(tmp_path, weight_map)
    return tmp_path


def write_index(path: Path, weight_map: Any) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_reads_names_shapes_dtypes_and_values(tmp_path: Path) -> None:
    opened = open_folder(folder(tmp_path, TENSORS))
    assert opened.names() == frozenset(TENSORS)
    assert opened.config == {"model_type": "llama"}
    assert opened.metadata == {"format": "pt"}
    for name, tensor in TENSORS.items():
        assert torch.equal(opened.tensor(name), tensor)
        assert opened.shape(name) == tuple(tensor.shape)
        assert opened.dtype(name) == tensor.dtype
    with pytest.raises(FormatError, match="no tensor 'c'"):
        opened.tensor("c")


def test_weights_hash_ignores_sharding_and_sees_every_byte(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "two", "changed")]
    for path in paths:
        path.mkdir()
    one = open_folder(folder(paths[0], TENSORS)).weights_sha256()
    two = open_folder(
        folder(paths[1], {"b": TENSORS["b"]}, {"a": TENSORS["a"]}, {"empty": TENSORS["empty"]})
    ).weights_sha256()
    changed = {**TENSORS, "a": TENSORS["a"].clone()}
    changed["a"][1, 2] += 1
    assert one == two
    assert open_folder(folder(paths[2], changed)).weights_sha256() != one


def raw_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: Any = "F32", shape: Any = (1,), begin: Any = 0, end: Any = 4) -> dict[str, Any]:
    shape = list(shape) if isinstance(shape, tuple) else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "empty file": (b"", "too few"),
    "header length past the file": (raw_file({}, length=1 << 62), "header length"),
    "header length over the limit": (raw_file({}, length=100_000_001), "header length"),
    "not json": (raw_file(b"{not json"), "JSON"),
    "not an object": (raw_file([1]), "JSON object"),
    "bad utf-8": (raw_file(b"\xff\xfe{}"), "JSON"),
    "deep nesting": (raw_file(b"[" * 100_000), "JSON"),
    "duplicate name": (
        raw_file(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
        "twice",
    ),
    "unknown dtype": (raw_file({"a": entry("F13")}, bytes(4)), "dtype 'F13'"),
    "dtype no string": (raw_file({"a": entry(["F32"])}, bytes(4)), "dtype"),
    "missing key": (raw_file({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)), "exactly"),
    "negative shape": (raw_file({"a": entry(shape=(-1,))}, bytes(4)), "shape"),
    "boolean shape": (raw_file({"a": entry(shape=(True,))}, bytes(4)), "shape"),
    "float offsets": (raw_file({"a": entry(end=4.0)}, bytes(4)), "data_offsets"),
    "reversed offsets": (raw_file({"a": entry(begin=4, end=0)}, bytes(4)), "data_offsets"),
    "offsets past the file": (raw_file({"a": entry(shape=(2,), end=8)}, bytes(4)), "ends at"),
    "size mismatch": (raw_file({"a": entry(shape=(2,))}, bytes(4)), "needs 8 bytes"),
    "overflowing shape": (raw_file({"a": entry(shape=(1 << 62, 4))}, bytes(4)), "needs"),
    "overlap": (raw_file({"a": entry(), "b": entry()}, bytes(4)), "overlaps"),
    "gap": (raw_file({"a": entry(begin=4, end=8)}, bytes(8)), "gap"),
    "trailing bytes": (raw_file({"a": entry()}, bytes(9)), "after the last"),
    "metadata no strings": (raw_file({"__metadata__": {"a": 1}}), "__metadata__"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header(case: str, tmp_path: Path) -> None:
    raw, message = HOSTILE[case]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(FormatError, match=message) as caught:
        open_folder(tmp_path)
    assert "model.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 300), value=st.integers(0, 255), cut=st.booleans())
def test_fuzzed_header(
    position: int, value: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is accepted here must be accepted by safetensors too, with the same shapes."""
    from safetensors import safe_open

    file = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    save_file(TENSORS, file)
    raw = bytearray(file.read_bytes())
    position %= len(raw)
    raw = raw[:position] if cut else raw
    if not cut:
        raw[position] = value
    file.write_bytes(raw)
    try:
        header = read_header(file)
    except FormatError:
        return
    with safe_open(str(file), framework="pt") as handle:
        names = set(handle.keys())
        assert names == set(header.entries)
        for name in names:
            assert tuple(handle.get_slice(name).get_shape()) == header.entries[name].shape


def test_all_dtypes_round_trip(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(4, dtype=dtype) for name, dtype in DTYPES.items()}
    opened = open_folder(folder(tmp_path, tensors))
    assert {name: opened.dtype(name) for name in tensors} == DTYPES
    assert all(opened.tensor(name).dtype == dtype for name, dtype in DTYPES.items())


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/secret.safetensors", "a\\b", ""])
def test_index_entry_that_leaves_the_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    path = folder(tmp_path / "model", {"a": torch.ones(1)}, {"b": torch.ones(1)})
    write_index(path, {"a": "shard0.safetensors", "b": name})
    with pytest.raises(FormatError, match="leaves the model folder"):
        open_folder(path)


@pytest.mark.parametrize("linked", ["model.safetensors", "config.json"])
def test_symlink_that_leaves_the_folder(linked: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    folder(path, TENSORS)
    outside = tmp_path / "outside"
    (path / linked).rename(outside)
    (path / linked).symlink_to(outside)
    with pytest.raises(FormatError, match="link leaves the model folder"):
        open_folder(path)


def test_links_of_the_hub_cache_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "models--org--name" / "snapshots" / "abc"
    path.mkdir(parents=True)
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir()
    folder(path, TENSORS)
    (path / "model.safetensors").rename(blobs / "hash")
    (path / "model.safetensors").symlink_to("../../blobs/hash")
    assert open_folder(path).names() == frozenset(TENSORS)


def test_only_pickles_is_refused_without_reading_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(FormatError, match="convert to safetensors"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "shard0.safetensors"}, "'b' is missing|not in"),
        ({"a": "shard0.safetensors", "b": "shard0.safetensors"}, "'b' is not in"),
        ({"a": "shard0.safetensors", "b": "gone.safetensors"}, "gone.safetensors is missing"),
        ({"a": "shard0.safetensors", "b": 5}, "weight_map"),
        ({}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_index_must_match_the_files(weight_map: Any, message: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "x": torch.ones(1)}, tmp_path / "shard0.safetensors")
    path = folder(tmp_path, {"a": torch.ones(1)}, {"b": torch.ones(1)})
    if weight_map == {"a": "shard0.safetensors"}:
        save_file({"a": torch.ones(1), "b": torch.ones(1)}, path / "shard0.safetensors")
    write_index(path, weight_map)
    with pytest.raises(FormatError, match=message):
        open_folder(path)


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"a": torch.ones(1)}, tmp_path / name)
    with pytest.raises(FormatError, match=r"in both x\.safetensors and y\.safetensors"):
        open_folder(tmp_path)


@pytest.mark.parametrize("config", [None, "[]", "{", '{"a": 1, "a": 2}'])
def test_broken_config(config: str | None, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(FormatError, match=r"config\.json"):
        open_folder(tmp_path)
