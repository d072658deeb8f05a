"""Data sets by name: rows, columns and splits; what is missing is said in one line, offline."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qdeploy.calibration.hub import MIN_ROWS, dataset_rows, is_dataset_name
from qdeploy.errors import CalibrationError, SourceError, UsageError


class Package(ModuleType):
    """Stands for the package `datasets`: one data set of endless rows."""

    __version__ = "5.2.0"

    def __init__(self) -> None:
        super().__init__("datasets")
        self.calls: list[tuple[tuple[str, ...], dict[str, Any]]] = []
        self.error: Exception | None = None

    def load_dataset(self, *name: str, **options: Any) -> Iterator[dict[str, Any]]:
        self.calls.append((name, options))
        if self.error is not None:
            raise self.error
        return ({"text": f"row {i}", "id": i, "turns": [{"role": "user"}]} for i in iter(int, 1))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    found = Package()
    monkeypatch.setitem(sys.modules, "datasets", found)
    return found


def test_rows_are_streamed_from_the_split_asked_for(package: Package) -> None:
    rows = list(dataset_rows("org/set:validation", 1))
    assert len(rows) == MIN_ROWS
    assert rows[0] == ("org/set, row 0", {"text": "row 0", "id": 0, "turns": [{"role": "user"}]})
    list(dataset_rows("org/set/config", 1))
    assert package.calls == [
        (("org/set",), {"split": "validation", "streaming": True}),
        (("org/set", "config"), {"split": "train", "streaming": True}),
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [("s:train:text", {"text": "row 0"}), ("s::turns", {"messages": [{"role": "user"}]})],
)
def test_a_column_is_text_or_a_conversation(
    source: str, expected: dict[str, Any], package: Package
) -> None:
    assert next(dataset_rows(source, 1))[1] == expected


def test_a_column_that_is_not_there_is_named_with_those_that_are(package: Package) -> None:
    with pytest.raises(CalibrationError, match="no column 'body'; its columns are text, id, turns"):
        next(dataset_rows("s:train:body", 1))


def test_q13_what_cannot_be_fetched_is_one_line(package: Package) -> None:
    package.error = ConnectionError("Couldn't reach the Hub\n(offline)")
    with pytest.raises(
        SourceError, match=r"s: Couldn't reach the Hub \(offline\); check name"
    ) as e:
        next(dataset_rows("s", 1))
    assert "--calib default" in str(e.value)


def test_q13_without_the_package_the_next_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"'pile' is no file.*pip install 'qdeploy\[datasets\]'"):
        next(dataset_rows("pile", 1))


def test_p6_versions_that_run_a_data_sets_code_are_refused(package: Package) -> None:
    package.__version__ = "3.6.0"
    with pytest.raises(UsageError, match="may run code"):
        next(dataset_rows("s", 1))


def test_names_and_paths(tmp_path: Path) -> None:
    assert all(map(is_dataset_name, ("pile", "org/set", "org/set/en:test", "s::text")))
    assert not any(map(is_dataset_name, ("/no/such", "../up", "a:b:c:d", "a b", "")))
    assert is_dataset_name(str(tmp_path))


@pytest.mark.interop
def test_the_real_package_reads_a_local_folder(tmp_path: Path) -> None:
    rows = [{"body": f"text {i}", "n": i} for i in range(3)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = [row for _, row in dataset_rows(f"{tmp_path}:train:body", 4)]
    assert found == [{"text": f"text {i}"} for i in range(3)]
    with pytest.raises(CalibrationError, match="its columns are body, n"):
        list(dataset_rows(str(tmp_path), 4))
    with pytest.raises(SourceError, match="check name, split and network"):
        list(dataset_rows(f"{tmp_path}:test:body", 4))
