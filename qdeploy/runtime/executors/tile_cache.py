"""Where packed tiles are kept: a file beside the artifact, else in the user's cache, else memory.

`ARTIFACT/compiled/cpu-KEY.tiles` is read into huge pages, or mapped where there are none: a second
start packs nothing. KEY stands for what the tiles are made from: weights, config, the embeddings
policy and the version of the layout, which is the same for every instruction set. `sha256.json`
beside it remembers digests by a file's size, times and inode, so that nothing is read twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from qdeploy.errors import SourceError
from qdeploy.formats.checkpoint import Checkpoint, file_sha256
from qdeploy.formats.hf import COMPILED
from qdeploy.formats.manifest import write_atomic
from qdeploy.formats.sources import cache_folder
from qdeploy.runtime.executors.tile_arena import Arena, ArenaError, ArenaWriter, open_arena

log = logging.getLogger("qdeploy")

#: Raise it when the packing, or the rounding of embeddings, gives other bytes than before.
LAYOUT_VERSION: Final = 1
_MEMO = "sha256.json"
#: Says how a tensor was quantized, besides config.json, in folders of older writers.
_CONFIGS = ("config.json", "quantize_config.json", "quant_config.json")

Pack = Callable[[ArenaWriter], None]
Check = Callable[[Arena], None]


class Digests:
    """sha256 of files, remembered by what a change of the file would change, too."""

    def __init__(self, places: list[Path]) -> None:
        self._known: dict[str, str] = {}
        self._used: dict[str, str] = {}
        for place in places:
            self._known |= _read_memo(place / _MEMO)

    def of(self, path: Path) -> str:
        """Hex sha256 of a file's bytes."""
        return self.remembered(path) or self.remember(path, file_sha256(path))

    def remembered(self, path: Path) -> str | None:
        """The digest of a file that hasn't changed since; None for any other."""
        digest = self._known.get(_identity(path))
        return None if digest is None else self.remember(path, digest)

    def remember(self, path: Path, digest: str) -> str:
        """Keep a digest of the file as it is now; returns the digest."""
        self._used[_identity(path)] = digest
        return digest

    def save(self, place: Path) -> None:
        """Write what was used to a place that can be written; else it is found out again."""
        if _read_memo(place / _MEMO) != self._used:
            try:
                write_atomic(place / _MEMO, json.dumps(self._used, indent=1) + "\n")
            except OSError as error:
                log.debug("%s can't be kept: %s", place / _MEMO, error)


def open_tiles(checkpoint: Checkpoint, pack: Pack, check: Check) -> Arena:
    """The checkpoint's tiles, mapped if they are kept somewhere, else packed.

    pack: writes all matrices, may raise FormatError; check: raises ArenaError for an arena that
    isn't the model's. Safe among processes: files appear whole, by renaming.
    """
    places = _places(checkpoint.path)
    digests = Digests(places)
    key = tile_key(checkpoint, digests)
    for place in places:
        arena = _kept(place, key, check, digests)
        if arena is not None:
            return arena
    for place in places:
        try:
            return _packed(place, key, pack, check, digests)
        except OSError as error:
            log.debug("tiles can't be kept in %s: %s", place, error)
    log.info("packed tiles are not kept: neither %s can be written", " nor ".join(map(str, places)))
    return pack_in_memory(pack, key)


def tile_key(checkpoint: Checkpoint, digests: Digests) -> str:
    """16 hex digits that name everything tiles are made from."""
    manifest = checkpoint.manifest
    embeddings = None if manifest is None else manifest.embeddings
    configs = [checkpoint.path / name for name in _CONFIGS]
    parts = {
        "layout": LAYOUT_VERSION,
        "weights": sorted(digests.of(path) for path in checkpoint.weight_files()),
        "configs": [file_sha256(path) if path.is_file() else None for path in configs],
        "embeddings": None if embeddings is None else embeddings.model_dump(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _places(folder: Path) -> list[Path]:
    """Where tiles of a folder may be, the best first."""
    places = [folder / COMPILED]
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    try:
        places.append(cache_folder() / COMPILED / name)
    except SourceError as error:
        log.debug("%s", error)
    return places


def _file(place: Path, key: str) -> Path:
    return place / f"cpu-{key}.tiles"


def _kept(
    place: Path, key: str, check: Check, digests: Digests, level: int = logging.WARNING
) -> Arena | None:
    """The tiles in a place; None, and one line that says why, if they can't be used."""
    path = _file(place, key)
    try:
        arena = open_arena(path, key)
        if digests.remembered(path) != arena.sha256:
            if arena.data_sha256() != arena.sha256:
                raise ArenaError("its bytes are not those that were written")
            digests.remember(path, arena.sha256)
        check(arena)
    except FileNotFoundError:
        return None
    except (ArenaError, OSError) as error:
        log.log(level, "%s: %s; packing again", path, error)
        return None
    digests.save(place)
    return arena


def _packed(place: Path, key: str, pack: Pack, check: Check, digests: Digests) -> Arena:
    """Pack into a place; OSError when it can't be written."""
    path = _file(place, key)
    with _locked(place):
        # Another process may have been faster; what is broken has been said.
        arena = _kept(place, key, check, digests, logging.DEBUG)
        if arena is not None:
            return arena
        _clear(place)
        temporary = place / f".{path.name}.tmp-{os.getpid()}"
        try:
            with temporary.open("wb") as stream:
                _write(stream, key, pack)
                os.fsync(stream.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        arena = open_arena(path, key)
        digests.remember(path, arena.sha256)
        digests.save(place)
    log.info("packed tiles are kept in %s", path)
    return arena


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """One process at a time packs into a place; the lock goes with the process that holds it."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / ".lock").open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process packs the tiles of %s; waiting for it", place.parent)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _clear(place: Path) -> None:
    """Remove other versions' tiles, and what a killed process left. Mappings of them live on."""
    for path in [*place.glob("cpu-*.tiles"), *place.glob(".cpu-*.tiles.tmp-*")]:
        path.unlink(missing_ok=True)


def pack_in_memory(pack: Pack, key: str = "") -> Arena:
    """Tiles that nobody else sees and that go with the process."""
    with _anonymous() as stream:
        _write(stream, key, pack)
        return Arena(stream, key)


def _anonymous() -> BinaryIO:
    """A file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("qdeploy-tiles"), "w+b")
    return tempfile.TemporaryFile()


def _write(stream: BinaryIO, key: str, pack: Pack) -> None:
    writer = ArenaWriter(stream)
    pack(writer)
    writer.finish(key)


def _identity(path: Path) -> str:
    found = path.stat()
    numbers = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
    return "-".join(map(str, numbers))


def _read_memo(path: Path) -> dict[str, str]:
    try:
        memo = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    valid = isinstance(memo, dict) and all(isinstance(value, str) for value in memo.values())
    return memo if valid else {}
