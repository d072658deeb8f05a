"""Writing artifacts: all or nothing, no shard in memory, every tensor exactly once."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from qdeploy import __version__
from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.checkpoint import file_sha256
from qdeploy.formats.hf import TensorFolder, inside
from qdeploy.formats.manifest import MANIFEST_NAME, Manifest, write_manifest
from qdeploy.formats.model_card import CARD_NAME, render_card
from qdeploy.formats.module_schemes import distinct, schemes_name
from qdeploy.formats.shards import ShardWriter
from qdeploy.formats.weight_format import WEIGHT_FORMATS, WeightFormat
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
#: Everything a tokenizer or a chat needs, and the base model's licence.
COPIED = (
    *("tokenizer*", "chat_template*", "generation_config.json", "special_tokens*"),
    *("added_tokens.json", "vocab*", "merges*", "*.model", "*.tiktoken"),
    *("LICENSE*", "NOTICE*"),
)
#: Not weights: old checkpoints store them, nobody reads them.
_OPTIONAL_SUFFIX = "rotary_emb.inv_freq"
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.tmp-(?P<pid>\d+)")


class ArtifactWriter:
    """Context manager that writes into a temporary sibling of `out`; `finish` renames it.

    Leaving without `finish`, by an exception or Ctrl-C, leaves nothing behind. With `overwrite`
    the old artifact is replaced at the very end. code: whether the base model's Python files are
    copied. Raises UsageError when `out` can't be written.
    """

    def __init__(
        self,
        out: Path,
        base: TensorFolder,
        *,
        overwrite: bool,
        max_shard_size: int = DEFAULT_MAX_SHARD_BYTES,
        code: bool = False,
    ) -> None:
        if max_shard_size <= 0:
            raise UsageError(f"max_shard_size={max_shard_size} must be > 0", param="max_shard_size")
        self.out = Path(out)
        self._base = base
        _check_target(self.out, base.path, overwrite)
        self._temporary = self.out.parent / f".{self.out.name}.tmp-{os.getpid()}"
        self._shards = ShardWriter(self._temporary, max_shard_size)
        self._schemes: dict[str, QuantScheme] = {}  # of packed linears
        self._unpacked: set[str] = set()  # packed in the base, dense here
        self._added: set[str] = set()
        self._omitted: set[str] = set()
        # Looked up now: a link out of the folder must fail before the work, not after it.
        self._companions = _companions(base.path, (*COPIED, "*.py") if code else COPIED)

    def __enter__(self) -> ArtifactWriter:
        _remove_stale(self.out)
        try:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"can't write to {self.out.parent}: {error.strerror}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._shards.abandon()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor as it is. A tied `lm_head.weight` is left out: it is the embedding."""
        if name == "lm_head.weight" and self._base.config.get("tie_word_embeddings"):
            return
        self._shards.add(name, tensor)

    def add_scale(self, name: str, tensor: Tensor) -> None:
        """Write a tensor that the base model doesn't have and no linear layer belongs to."""
        self._added.add(name)
        self._shards.add(name, tensor)

    def omit(self, name: str) -> None:
        """Leave a tensor of the base model out on purpose."""
        self._omitted.add(name)

    def add_stored(self, name: str, tensor: Tensor) -> None:
        """Write a tensor as it is, a tied head that was stored, too: it may differ."""
        self._shards.add(name, tensor)

    def add_linear(
        self, module: str, q: QuantizedLinear, format: WeightFormat | str
    ) -> dict[str, Tensor]:
        """Pack a linear layer, bias and all, and return what was written, by local name.

        UsageError names a layer that can't be held.
        """
        chosen = WEIGHT_FORMATS.get(format) if isinstance(format, str) else format
        try:
            tensors = chosen.pack(q)
        except UsageError as error:
            raise UsageError(f"{module}: {error}", param=error.param) from None
        self._schemes[module] = q.scheme
        for name, tensor in tensors.items():
            self._shards.add(f"{module}.{name}", tensor)
        return tensors

    def add_unpacked(self, module: str, weight: Tensor, bias: Tensor | None) -> None:
        """A linear that the base model has packed, as a dense weight [out, in]."""
        self._unpacked.add(module)
        self._shards.add(f"{module}.weight", weight)
        if bias is not None:
            self._shards.add(f"{module}.bias", bias)

    def finish(self, manifest: Manifest, quantization_config: dict[str, Any] | None) -> Path:
        """Write config, tokenizer, manifest and card, then rename; returns the artifact's path.

        `manifest.files` and `manifest.capacity.weight_bytes` are filled in here. A tensor of the
        base model that was not written, or one that it doesn't have, fails the save (A10).
        """
        self._check_complete()
        schemes = distinct(self._schemes.values())
        self._shards.close(_metadata(manifest, quantization_config, schemes))
        self._write_config(quantization_config)
        self._copy_companions()
        files = {path.name: file_sha256(path) for path in sorted(self._temporary.iterdir())}
        capacity = manifest.capacity.model_copy(update={"weight_bytes": self._shards.total_bytes})
        manifest = manifest.model_copy(update={"files": files, "capacity": capacity})
        # Neither is in `files`: both change when `eval` adds a record.
        method = (quantization_config or {}).get("quant_method")
        card = render_card(self.out.name, manifest, method, schemes)
        (self._temporary / CARD_NAME).write_text(card, encoding="utf-8")
        write_manifest(self._temporary, manifest)
        self._publish()
        return self.out

    def _check_complete(self) -> None:
        tied = {"lm_head.weight"} if self._base.config.get("tie_word_embeddings") else set()
        rewritten = self._schemes.keys() | self._unpacked
        expected = {
            name
            for name in self._base.names() - tied - self._omitted
            if not name.endswith(_OPTIONAL_SUFFIX) and name.rpartition(".")[0] not in rewritten
        }
        missing = sorted(expected - self._shards.names)
        if missing:
            raise FormatError(
                f"{self.out}: {len(missing)} tensors of the base model were not written "
                f"({missing[0]}, …); this is a bug, report it"
            )
        unknown = sorted(
            name
            for name in self._shards.names - self._base.names() - self._added
            if name.rpartition(".")[0] not in rewritten
        )
        if unknown:
            raise FormatError(
                f"{self.out}: {unknown[0]} is not a tensor of the base model; "
                "this is a bug, report it"
            )

    def _write_config(self, quantization_config: dict[str, Any] | None) -> None:
        config = {k: v for k, v in self._base.config.items() if k != "quantization_config"}
        if quantization_config is not None:
            config["quantization_config"] = quantization_config
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (self._temporary / "config.json").write_text(text, encoding="utf-8")

    def _copy_companions(self) -> None:
        for path in self._companions:
            shutil.copyfile(path, self._temporary / path.name)

    def _publish(self) -> None:
        """Rename into place; an old artifact is out of the way only for the rename itself."""
        old = self.out.parent / f".{self.out.name}.tmp-{os.getpid()}-old"
        try:
            if self.out.exists():
                self.out.rename(old)
            self._temporary.rename(self.out)
        except BaseException:
            if old.exists() and not self.out.exists():
                old.rename(self.out)
            raise
        finally:
            shutil.rmtree(old, ignore_errors=True)


def _metadata(
    manifest: Manifest, config: dict[str, Any] | None, schemes: Sequence[QuantScheme]
) -> dict[str, str]:
    """The safetensors `__metadata__` beside format=pt (A08); its values must be strings."""
    metadata = {"qdeploy_version": __version__, "method": str(manifest.recipe.get("method", ""))}
    if config is not None and schemes:
        metadata |= {
            "quant_method": str(config["quant_method"]),
            "scheme": schemes_name(schemes),
            "bits": ",".join(str(scheme.bits) for scheme in schemes),
            "group_size": ",".join(str(scheme.group_size) for scheme in schemes),
        }
    return metadata


def _companions(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Files in the folder that match; FormatError for a link that leaves it."""
    return [
        inside(folder, path.name)
        for path in sorted(folder.iterdir())
        if path.is_file() and any(path.match(pattern) for pattern in patterns)
    ]


def _check_target(out: Path, base: Path, overwrite: bool) -> None:
    if out.name in ("", "..") or (out.exists() and out.resolve() == base.resolve()):
        raise UsageError(f"output {out} can't be written to; name a new folder")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise UsageError(f"output {out} exists; name another folder or give --overwrite")
    if not out.is_dir() or not (out / MANIFEST_NAME).is_file():
        # --overwrite on a home folder, say, must not delete it.
        raise UsageError(f"output {out} is no artifact (no {MANIFEST_NAME}); remove it yourself")


def _remove_stale(out: Path) -> None:
    """Remove what a killed process left beside `out`."""
    if not out.parent.is_dir():
        return
    for path in out.parent.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and match["name"] == out.name and not _alive(int(match["pid"])):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
