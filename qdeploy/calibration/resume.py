"""Finished layers beside the output, so that a killed run goes on where it was.

`OUT.qdeploy-resume/` holds `fingerprint.json`, `layer-00007.safetensors` for every finished layer
and the folders `inputs-00008`, what the next layer is fed, and `references-00008`, what it is fed
in the unquantized model. Stored, not recomputed: the resumed run then gives bit-identical tensors.
Everything is written under another name and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qdeploy.calibration.activations import StoredBatches, write_batches
from qdeploy.errors import UsageError
from qdeploy.kv.auto import KVLayerStats
from qdeploy.progress import Progress
from qdeploy.quantization.method import LayerOutcome, LinearReport
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme

_FINGERPRINT = "fingerprint.json"
#: Of the fingerprint: a resumed run takes it from the store instead of starting over.
_ADOPTED = "threads"
_PARTS = ("codes", "scales", "zero_points", "g_idx", "bias", "input_scale")


class ResumeStore:
    """Finished layers of one run; `finished` counts them.

    fingerprint: everything that decides the tensors (weights, recipe, calibration, versions); a
    store with another one is of another run, and is started over. Only `threads` may differ: torch
    rounds sums by how it shares them out, so that a context `with store` has as many as the run
    began with.
    """

    def __init__(
        self, out: Path, fingerprint: Mapping[str, str], progress: Progress, *, enabled: bool
    ) -> None:
        self.folder = out.parent / f"{out.name}.qdeploy-resume"
        self._enabled, self._progress = enabled, progress
        self.finished = 0
        self._threads_before = torch.get_num_threads()
        self._threads = fingerprint.get(_ADOPTED)
        found = self._read_fingerprint()
        if found is not None:
            keys = {**fingerprint, **found}.keys() - {_ADOPTED}
            changed = sorted(key for key in keys if found.get(key) != fingerprint.get(key))
            if enabled and not changed:
                self.finished = self._count()
            else:
                reason = f"changed {', '.join(changed)}" if changed else "--no-resume"
                progress.info(f"starting over: {self.folder} is of another run ({reason})")
        if found is not None and self.finished:
            self._threads = found.get(_ADOPTED)
            progress.info(f"resuming: {self.finished} finished layers in {self.folder}")
        else:
            self._start(fingerprint)

    def __enter__(self) -> ResumeStore:
        """As many threads as the run began with: the same sums in the same order."""
        wanted = int(self._threads or self._threads_before)
        if wanted != self._threads_before:
            self._progress.info(
                f"{wanted} threads, as the run began, not {self._threads_before}: its bits depend "
                "on them (--no-resume starts over)"
            )
            torch.set_num_threads(wanted)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """What can't be resumed is of no use once the run has ended."""
        torch.set_num_threads(self._threads_before)
        if not self._enabled:
            self.remove()

    def load(
        self, index: int, schemes: Mapping[str, QuantScheme]
    ) -> tuple[LayerOutcome, KVLayerStats | None]:
        """A finished layer, without its outputs, and its K/V statistics if there were any.

        schemes: of its linears by local name.
        """
        tensors, metadata = _read(self.folder / f"layer-{index:05}.safetensors")
        outcome = LayerOutcome(linears={})
        outcome.reports = [LinearReport(**report) for report in metadata["reports"]]
        for name in dict.fromkeys(key.split("/")[1] for key in tensors if key.startswith("q/")):
            parts = {part: tensors.get(f"q/{name}/{part}") for part in _PARTS}
            outcome.linears[name] = QuantizedLinear(scheme=schemes[name], **parts)  # type: ignore[arg-type]
        outcome.dense = {
            key.removeprefix("d/"): tensor for key, tensor in tensors.items() if key[:2] == "d/"
        }
        kv = metadata["kv"]
        return outcome, KVLayerStats(**kv) if kv is not None else None

    def load_inputs(self) -> tuple[StoredBatches, StoredBatches]:
        """Inputs of the first unfinished layer, and the unquantized model's there; read when asked
        for. The latter are none for methods that don't train.
        """
        index = self.finished
        return StoredBatches.open(self._inputs(index)), StoredBatches.open(self._references(index))

    def save(self, index: int, outcome: LayerOutcome, kv: KVLayerStats | None) -> None:
        """Keep a layer and its outputs; the layer's file comes last and makes it finished."""
        if not self._enabled:
            return
        if len(outcome.references):
            self._save_batches(self._references(index + 1), outcome.references)
        if len(outcome.outputs):
            self._save_batches(self._inputs(index + 1), outcome.outputs)
        tensors = {f"d/{name}": tensor for name, tensor in outcome.dense.items()}
        for name, q in outcome.linears.items():
            values = {part: getattr(q, part) for part in _PARTS}
            tensors |= {f"q/{name}/{p}": v for p, v in values.items() if v is not None}
        reports = [asdict(report) for report in outcome.reports]
        metadata = {"reports": reports, "kv": asdict(kv) if kv is not None else None}
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        _write(self.folder / f"layer-{index:05}.safetensors", contiguous, metadata)
        shutil.rmtree(self._inputs(index), ignore_errors=True)
        shutil.rmtree(self._references(index), ignore_errors=True)
        self.finished = index + 1

    def remove(self) -> None:
        """The run is complete, or can't go on later."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _save_batches(self, target: Path, batches: Sequence[Tensor]) -> None:
        shutil.rmtree(target, ignore_errors=True)  # of a run that was killed just here
        if isinstance(batches, StoredBatches):
            batches.keep(target)
            return
        temporary = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        write_batches(temporary, batches)
        temporary.rename(target)

    def _inputs(self, index: int) -> Path:
        return self.folder / f"inputs-{index:05}"

    def _references(self, index: int) -> Path:
        return self.folder / f"references-{index:05}"

    def _count(self) -> int:
        count = 0
        while (self.folder / f"layer-{count:05}.safetensors").is_file():
            count += 1
        return count

    def _read_fingerprint(self) -> dict[str, str] | None:
        try:
            found = json.loads((self.folder / _FINGERPRINT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _start(self, fingerprint: Mapping[str, str]) -> None:
        self.remove()
        if not self._enabled:
            return
        try:
            self.folder.mkdir(parents=True)
            text = json.dumps(dict(fingerprint), indent=2)
            (self.folder / _FINGERPRINT).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"can't write to {self.folder.parent}: {error.strerror}") from None


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    save_file(dict(tensors), str(temporary), metadata={"qdeploy": json.dumps(metadata)})
    temporary.replace(path)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads((file.metadata() or {}).get("qdeploy", "{}"))
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path}: {error}; start over with --no-resume") from None
