"""Activations on disk: the same bits, one batch in memory, gone when nobody needs them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qdeploy.calibration.activations import Spill, StoredBatches, write_batches
from qdeploy.errors import UsageError

BATCHES = [torch.randn(2, 5, 8), torch.randn(1, 3, 8).to(torch.bfloat16), torch.zeros(1, 1, 8)]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    stored = Spill(tmp_path / "new")(iter(BATCHES))
    assert len(stored) == 3
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(stored, BATCHES, strict=True)
    )
    assert torch.equal(stored[-1], BATCHES[-1])
    assert len(stored[1:]) == 2
    with pytest.raises(IndexError):
        stored[3]


def test_batches_are_written_as_they_come(tmp_path: Path) -> None:
    made: list[int] = []

    def batches() -> Iterator[Tensor]:
        for number, batch in enumerate(BATCHES):
            assert len(list(tmp_path.rglob("*.safetensors"))) == number
            made.append(number)
            yield batch

    assert Spill(tmp_path)(batches())[0].shape == (2, 5, 8)
    assert made == [0, 1, 2]


def test_files_go_with_the_object_unless_they_are_kept(tmp_path: Path) -> None:
    spill = Spill(tmp_path)
    gone, kept = spill(BATCHES), spill(BATCHES)
    kept.keep(tmp_path / "kept")
    assert gone.folder.is_dir()
    del gone, kept
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    again = StoredBatches.open(tmp_path / "kept")
    assert torch.equal(again[0], BATCHES[0])
    del again
    gc.collect()
    assert (tmp_path / "kept").is_dir()


def test_what_a_killed_run_left_is_written_over(tmp_path: Path) -> None:
    write_batches(tmp_path / "spill-00000", BATCHES)
    assert len(Spill(tmp_path)(BATCHES[:1])) == 1


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    stored = Spill(tmp_path)(BATCHES)
    (stored.folder / "00001.safetensors").write_bytes(b"short")
    with pytest.raises(UsageError, match=r"00001\.safetensors: .*start over with --no-resume"):
        stored[1]
