"""Packed tiles are kept, found again, and never trusted when they aren't whole or aren't these."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qdeploy.errors import FormatError
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.hf import COMPILED
from qdeploy.formats.inspect import inspect_artifact
from qdeploy.formats.manifest import (
    BaseModelRecord,
    EmbeddingsRecord,
    Manifest,
    write_manifest,
)
from qdeploy.runtime.executors.tile_arena import Arena, ArenaError, ArenaWriter, _index
from qdeploy.runtime.executors.tile_cache import Digests, open_tiles, tile_key
from qdeploy_kernels.cpu.fusion import pack_matrix
from tiny_models import edit_json, tiny_checkpoint

WEIGHT = torch.arange(40 * 24.0).reshape(40, 24)


class Model:
    """A stand-in for a model of one matrix and one norm; counts how often it is packed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packed = 0

    def open(self) -> Arena:
        arena = open_tiles(open_checkpoint(self.folder), self._pack, self.check)
        self.check(arena)
        return arena

    def _pack(self, writer: ArenaWriter) -> None:
        self.packed += 1
        writer.add_matrix("m", pack_matrix([WEIGHT], [torch.ones(40)]))
        writer.add("norm", np.arange(5, dtype=np.float32))

    @staticmethod
    def check(arena: Arena) -> None:
        expected = pack_matrix([WEIGHT], [torch.ones(40)])
        found = arena.matrix("m", 40, 24)
        assert np.array_equal(found.tiles, expected.tiles)
        assert found.bias is not None
        assert found.tiles.ctypes.data % 64 == found.bias.ctypes.data % 64 == 0
        assert arena.array("norm", "float32", (5,)).tolist() == [0, 1, 2, 3, 4]

    @property
    def files(self) -> list[Path]:
        return sorted((self.folder / COMPILED).glob("*.tiles"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QDEPLOY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("original"))


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Model:
    return Model(Path(shutil.copytree(original, tmp_path / "m")))


def test_a_second_start_packs_nothing(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="qdeploy")
    model.open()
    model.open()
    assert model.packed == 1
    assert len(model.files) == 1
    assert [r.getMessage() for r in caplog.records] == [
        f"packed tiles are kept in {model.files[0]}"
    ]


def test_a_second_start_reads_no_file_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model.open()
    monkeypatch.setattr(Arena, "data_sha256", lambda _: pytest.fail("read all tiles"))
    read: list[str] = []
    module = "qdeploy.runtime.executors.tile_cache"
    real = __import__(module, fromlist=["file_sha256"]).file_sha256
    monkeypatch.setattr(f"{module}.file_sha256", lambda p: read.append(p.name) or real(p))
    model.open()
    assert read == ["config.json"]


def test_a_copied_artifact_keeps_its_tiles(model: Model, tmp_path: Path) -> None:
    model.open()
    model.folder = Path(shutil.copytree(model.folder, tmp_path / "copy"))
    model.open()
    assert model.packed == 1


def rewrite_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def set_policy(folder: Path) -> None:
    policy = EmbeddingsRecord(bits=4, group_size=64, symmetric=True)
    base = BaseModelRecord(name="tiny")
    write_manifest(folder, Manifest(base_model=base, recipe={}, embeddings=policy))


CHANGES = {
    "weights": rewrite_weights,
    "config": lambda folder: edit_json(folder / "config.json", rms_norm_eps=1e-5),
    "older config": lambda folder: (folder / "quant_config.json").write_text("{}"),
    "embeddings": set_policy,
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_contents_have_other_tiles(model: Model, change: str) -> None:
    checkpoint = open_checkpoint(model.folder)
    before = tile_key(checkpoint, Digests([]))
    model.open()
    CHANGES[change](model.folder)
    if change == "older config":
        after = tile_key(checkpoint, Digests([]))
    else:
        model.open()
        assert model.packed == 2
        assert len(model.files) == 1, "older tiles of the same artifact stayed"
        after = tile_key(open_checkpoint(model.folder), Digests([]))
    assert before != after


def test_an_accuracy_record_changes_nothing(model: Model) -> None:
    base = BaseModelRecord(name="tiny")
    write_manifest(model.folder, Manifest(base_model=base, recipe={}))
    model.open()
    write_manifest(model.folder, Manifest(base_model=base, recipe={"method": "rtn"}))
    model.open()
    assert model.packed == 1


def flip(data: bytearray, at: int) -> bytearray:
    data[at] ^= 16
    return data


BREAKS = {
    "empty": (lambda data: data[:0], "truncated"),
    "cut": (lambda data: data[:-100], "truncated"),
    "grown": (lambda data: data + b"x", "truncated"),
    "version": (lambda data: flip(data, 7), "version"),
    "tile": (lambda data: flip(data, 1000), "bytes are not those"),
    "last byte": (lambda data: flip(data, -2), "index is broken"),
    "digest": (lambda data: flip(data, 24), "bytes are not those"),
    "key": (lambda data: flip(data, data.index(b'"key": "') + 9), "other weights"),
    "symmetric": (lambda data: data.replace(b"false", b"true "), "bytes are not those"),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_a_broken_file_is_packed_again_with_one_line(
    model: Model, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model.open()
    path, (change, reason) = model.files[0], BREAKS[kind]
    data = path.read_bytes()
    path.write_bytes(change(bytearray(data)))
    assert path.read_bytes() != data
    model.open()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert reason in warnings.pop()
    assert model.packed == 2
    assert path.read_bytes() == data
    model.open()
    assert model.packed == 2


def test_a_file_that_isnt_the_models_is_packed_again(model: Model) -> None:
    model.open()

    def refuse(arena: Arena) -> None:
        arena.array("norm", "float32", (6,))

    packed = open_tiles(open_checkpoint(model.folder), model._pack, refuse)
    assert model.packed == 2
    Model.check(packed)


def test_what_killed_processes_left_is_removed(model: Model) -> None:
    place = model.folder / COMPILED
    place.mkdir()
    (place / ".cpu-0123.tiles.tmp-1").write_bytes(b"half")
    (place / "cpu-0123.tiles").write_bytes(b"old")
    model.open()
    assert sorted(p.name for p in place.iterdir()) == sorted(
        [".lock", "sha256.json", model.files[0].name]
    )


def test_a_folder_that_cannot_be_written_uses_the_cache(model: Model, cache: Path) -> None:
    (model.folder / COMPILED).write_text("in the way")
    model.open()
    model.open()
    assert model.packed == 1
    assert len(list((cache / COMPILED).rglob("*.tiles"))) == 1


def test_without_any_place_tiles_stay_in_memory(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="qdeploy")
    (model.folder / COMPILED).write_text("in the way")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QDEPLOY_CACHE", str(tmp_path / "file" / "cache"))
    model.open()
    model.open()
    assert model.packed == 2
    lines = [r.getMessage() for r in caplog.records if "not kept" in r.getMessage()]
    assert len(lines) == 2


def test_a_full_disk_is_no_end(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first place fails in the middle of writing; nothing of it stays."""
    real, failed = os.fsync, []

    def fsync(number: int) -> None:
        if not failed:
            failed.append(number)
            raise OSError(28, "No space left on device")
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    model.open()
    assert failed
    assert [p.name for p in (model.folder / COMPILED).iterdir()] == [".lock"]


def test_a_checkpoint_that_cannot_be_packed_leaves_nothing(model: Model) -> None:
    def pack(writer: ArenaWriter) -> None:
        raise FormatError("broken")

    with pytest.raises(FormatError, match="broken"):
        open_tiles(open_checkpoint(model.folder), pack, model.check)
    assert [p.name for p in (model.folder / COMPILED).iterdir()] == [".lock"]


def test_starts_at_the_same_time_pack_once(model: Model) -> None:
    opened: list[Arena] = []
    barrier = threading.Barrier(4)

    def start() -> None:
        barrier.wait()
        opened.append(model.open())

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 4
    assert model.packed == 1


def test_a_mapped_file_outlives_its_replacement(model: Model) -> None:
    arena = model.open()
    edit_json(model.folder / "config.json", rms_norm_eps=1e-5)
    model.open()
    Model.check(arena)


def test_compiled_files_are_no_part_of_an_artifact(model: Model) -> None:
    before = inspect_artifact(model.folder)
    model.open()
    after = inspect_artifact(model.folder)
    assert (after.size_bytes, after.findings) == (before.size_bytes, [])


@pytest.mark.parametrize("order", [[0, 1, 1], [0, 1, 3], [-1, 1, 2]])
def test_a_permutation_is_checked(order: list[int], tmp_path: Path) -> None:
    """Kernels read memory through it."""
    with (tmp_path / "arena").open("w+b") as stream:
        writer = ArenaWriter(stream)
        writer.add_matrix("m", pack_matrix([torch.ones(2, 3)], [None]))
        writer.add("m.permutation", np.array(order, dtype=np.int32))
        writer.finish("key")
        arena = Arena(stream, "key")
    with pytest.raises(ArenaError, match="permutation"):
        arena.matrix("m", 2, 3)


INDEXES = {
    "kind": {"kind": 9},
    "group": {"kind": 0, "group": 12},
    "no group": {"kind": 0, "group": 0},
    "rows": {"rows": 3},
    "bool": {"symmetric": 1},
}


@pytest.mark.parametrize("kind", INDEXES)
def test_a_forged_index_is_an_error(kind: str, tmp_path: Path) -> None:
    with (tmp_path / "arena").open("w+b") as stream:
        writer = ArenaWriter(stream)
        writer.add_matrix("m", pack_matrix([torch.ones(2, 8)], [None]))
        writer._matrices["m"].update(INDEXES[kind])
        writer.finish("key")
        arena = Arena(stream, "key")
    with pytest.raises(ArenaError):
        arena.matrix("m", 2, 8)


def test_json_that_is_nested_too_deep_is_broken(tmp_path: Path) -> None:
    """A downloaded folder may bring its own `compiled`."""
    deep = b"[" * 100_000
    with pytest.raises(ArenaError, match="index is broken"):
        _index(deep)
    (tmp_path / "sha256.json").write_bytes(deep)
    assert Digests([tmp_path]).remembered(tmp_path) is None


@pytest.mark.parametrize("offset", [0, 65, -64, 1 << 40, None, 64.0])
def test_offsets_stay_inside(offset: object, tmp_path: Path) -> None:
    with (tmp_path / "arena").open("w+b") as stream:
        writer = ArenaWriter(stream)
        writer.add("a", np.ones(4, dtype=np.float32))
        writer._arrays["a"]["offset"] = offset
        writer.finish("key")
        arena = Arena(stream, "key")
    with pytest.raises(ArenaError):
        arena.array("a", "float32", (4,))


def test_a_second_start_maps_100_mb_quickly(tmp_path: Path) -> None:
    """Key, checks and mapping in less than 0.3 s; the best of a few on a busy machine."""
    folder = tiny_checkpoint("llama", tmp_path / "m")
    save_file({"x": torch.zeros(25_000_000)}, folder / "other.safetensors")
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    big = np.zeros(100_000_000, dtype=np.uint8)

    def pack(writer: ArenaWriter) -> None:
        writer.add("big", big)

    def start() -> float:
        began = time.perf_counter()
        arena = open_tiles(open_checkpoint(folder), pack, lambda arena: None)
        assert arena.array("big", "uint8", big.shape)[-1] == 0
        return time.perf_counter() - began

    start()
    assert json.loads((folder / COMPILED / "sha256.json").read_text())
    assert min(start() for _ in range(5)) < 0.3
