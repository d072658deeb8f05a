"""Peak memory of quantizing, predicted before it begins, and kept below a limit.

What is resident is one decoder layer, the method's copies of its weights and moments, a batch's
activations, and the layer's inputs and outputs for all calibration tokens: nothing grows with
the number of layers. Below a limit the inputs and outputs go to disk first, which changes no bit;
then batches get smaller, which rounds differently and is therefore part of a run's fingerprint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from qdeploy.calibration.walk import BATCH_TOKENS
from qdeploy.errors import CapacityError
from qdeploy.quantization.gptq import FLOAT64_FEATURES

#: float32 copies of the largest two linears that a method holds at once, about.
_COPIES = {"rtn": 4, "fp8": 6, "awq": 7, "gptq": 7, "awq+gptq": 7}
_OTHER_COPIES = 12
#: Methods with second moments of whole inputs: sums of all inputs of a layer (less than two of
#: the widest), mean, permuted, damped and three factors; twice as large where they are float64.
_WITH_HESSIAN = frozenset({"awq", "gptq", "awq+gptq"})
_HESSIANS = 8
#: Methods that train all linears of a layer at once, with copies of all of it: weights, offsets,
#: squares, two states to go back to, gradients; and with the unquantized model's activations.
_TRAINS = frozenset({"signround"})
_TRAINED_COPIES = 7
#: Fragments of freed memory, thread buffers, tokenizer: what no formula counts.
SLACK = 1.2
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What decides the memory of a run.

    layer: parameters of the largest decoder layer; linear: of its largest linear; in_features,
    features: the largest number of a linear's inputs, and of inputs or outputs
    vocab, table_bytes: rows and stored bytes of the embedding
    tokens, longest: of all calibration sequences, of one
    """

    method: str
    layer: int
    linear: int
    in_features: int
    features: int
    hidden: int
    vocab: int
    table_bytes: int
    tokens: int
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How a run stays below its limit, and the peak (bytes, of the whole process) that it needs."""

    batch_tokens: int = BATCH_TOKENS
    spill: bool = False
    base_bytes: int
    peak_bytes: int
    warning: str | None = None

    @property
    def note(self) -> str:
        """One line for the user."""
        where = "on disk" if self.spill else "in memory"
        return (
            f"memory: about {self.peak_bytes / MIB:.0f} MiB at most, {self.base_bytes / MIB:.0f} "
            f"of them in use already; activations {where}, {self.batch_tokens} tokens at a time"
        )


def plan_memory(sizes: Sizes, *, base_bytes: int, limit: int | None) -> MemoryPlan:
    """The fastest way whose peak is at most `limit` bytes; None: of what the machine has.

    base_bytes: what the process holds already. CapacityError names the least that works.
    """
    plans = list(_plans(sizes, base_bytes))
    if limit is None:
        return _in_available(plans[:2], available_bytes())
    for plan in plans:
        if plan.peak_bytes <= limit:
            return plan
    least = -(-plans[-1].peak_bytes // MIB)
    raise CapacityError(
        f"--max-memory {limit // MIB}MiB is too little: this run needs about {least} MiB even with "
        f"activations on disk and {plans[-1].batch_tokens} tokens at a time; give --max-memory "
        f"{least}MiB, or a shorter --calib-seqlen"
    )


def require_memory(what: str, needed: int, limit: int | None, instead: str) -> None:
    """CapacityError when `needed` bytes on top of what is resident would break the limit."""
    total = resident_bytes() + needed
    if limit is not None and total > limit:
        raise CapacityError(
            f"--max-memory {limit // MIB}MiB: {what} loads the whole model, about "
            f"{total // MIB} MiB; {instead}"
        )


def _in_available(plans: list[MemoryPlan], room: int | None) -> MemoryPlan:
    """The first that fits in what the machine has, or the last one with a warning."""
    for plan in plans:
        if room is None or plan.peak_bytes - plan.base_bytes <= room:
            return plan
    needed = plans[-1].peak_bytes - plans[-1].base_bytes
    warning = (
        f"about {needed // MIB} MiB more are needed and {(room or 0) // MIB} MiB are available; "
        "should the system stop the run, give --max-memory"
    )
    return replace(plans[-1], warning=warning)


def _plans(sizes: Sizes, base_bytes: int) -> Iterator[MemoryPlan]:
    """From the fastest to the smallest."""
    batches = list(_batches(sizes))
    for spill, batch_tokens in [(False, batches[0]), *((True, b) for b in batches)]:
        working = max(
            _layer_bytes(sizes, batch_tokens, spill), _table_bytes(sizes, batch_tokens, spill)
        )
        yield MemoryPlan(
            batch_tokens=batch_tokens,
            spill=spill,
            base_bytes=base_bytes,
            peak_bytes=base_bytes + int(SLACK * working),
        )


def _batches(sizes: Sizes) -> Iterator[int]:
    batch = BATCH_TOKENS
    while batch > sizes.longest:
        yield batch
        batch //= 2
    yield max(sizes.longest, 1)


def _layer_bytes(sizes: Sizes, batch_tokens: int, spill: bool) -> int:
    """While a layer is calibrated and quantized, float32."""
    trains = sizes.method in _TRAINS
    weights = 2 * _COPIES.get(sizes.method, _OTHER_COPIES) * sizes.linear
    if trains:
        weights = _TRAINED_COPIES * sizes.layer
    moments = sizes.method in _WITH_HESSIAN or sizes.method not in {*_COPIES, *_TRAINS}
    count = _HESSIANS * (2 if sizes.in_features <= FLOAT64_FEATURES else 1)
    hessian = count * sizes.in_features**2 if moments else 0
    batch = max(min(batch_tokens, sizes.tokens), sizes.longest)
    forward = batch * max(3 * sizes.features + 4 * sizes.hidden, 9 * sizes.hidden)
    # Quantizing begins when the forward pass is over; training keeps what its gradients need.
    graph = sizes.longest * (8 * sizes.features + 20 * sizes.hidden) if trains else 0
    working = max(weights + hessian + graph, forward)
    held = _held(sizes, batch, spill) * (2 if trains else 1)
    return 4 * (sizes.layer + working) + held


def _table_bytes(sizes: Sizes, batch_tokens: int, spill: bool) -> int:
    """While the embedding's rows are looked up, in float32, or copied as stored."""
    rows = min(sizes.tokens, sizes.vocab)
    looked_up = 4 * rows * sizes.hidden + sizes.table_bytes + _held(sizes, batch_tokens, spill)
    return max(looked_up, 2 * sizes.table_bytes)


def _held(sizes: Sizes, batch: int, spill: bool) -> int:
    """Inputs and outputs of all tokens, or of the batches at work."""
    return 4 * sizes.hidden * (3 * min(batch, sizes.tokens) if spill else 2 * sizes.tokens)


def resident_bytes() -> int:
    """What this process holds now; 0 where the system doesn't say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Most that this process has held so far; 0 where the system doesn't say.

    Not getrusage's on Linux: that begins with what the parent held when it started this process.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) * 1024
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes, KiB


def available_bytes() -> int | None:
    """Memory that can be had without swapping, in the container too; None: the system won't say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        own = int((group / "memory.max").read_text()) - resident_bytes()
    except (OSError, ValueError):  # no such file, or "max"
        return int(kib) * 1024
    return min(int(kib) * 1024, max(own, 0))
