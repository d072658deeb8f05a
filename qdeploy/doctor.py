"""What this machine can run, and why: each check is a `Finding` with the next step."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from qdeploy.errors import SourceError

Status = Literal["ok", "warn", "missing"]

#: Oldest release series (major, minor) that we work with; the same bounds as in pyproject.toml.
REQUIRED = {
    "transformers": (5, 17),
    "tokenizers": (0, 22),
    "safetensors": (0, 6),
    "huggingface_hub": (1, 0),
    "gguf": (0, 17),
    "pydantic": (2, 10),
    "starlette": (0, 46),
    "uvicorn": (0, 32),
    "prometheus-client": (0, 21),
}
TORCH = (2, 11)
GIB = 1 << 30
#: A quantize run of the demo model fits in this; less is only a warning.
COMFORTABLE_MEMORY_BYTES = 4 * GIB
COMFORTABLE_DISK_BYTES = 2 * GIB
#: CPU features by the names in Linux's /proc/cpuinfo (x86, then Arm).
ISA_FLAGS = (
    "avx2",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "asimddp",
    "i8mm",
    "bf16",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: `detail` is what was found, `next_step` what to do (empty when all is well)."""

    name: str
    status: Status
    detail: str
    next_step: str = ""


def diagnose() -> list[Finding]:
    """Run every check; never raises because something is absent."""
    return [
        check_python(sys.version_info[:2]),
        check_torch(),
        check_packages(),
        check_cpu(_cpuinfo()),
        check_memory(_available_memory_bytes()),
        check_gpu(),
        check_triton(),
        check_cache(),
        *check_backends(),
    ]


def check_python(version: tuple[int, ...]) -> Finding:
    """Python 3.10 to 3.13 are tested."""
    detail = f"{'.'.join(map(str, version))} ({platform.python_implementation()})"
    if (3, 10) <= version <= (3, 13):
        return Finding(name="python", status="ok", detail=detail)
    return Finding(name="python", status="warn", detail=detail, next_step="use Python 3.10 to 3.13")


def check_package(name: str, minimum: tuple[int, int]) -> Finding:
    """Whether an installed distribution is recent enough."""
    wanted = f"{name}>={minimum[0]}.{minimum[1]}"
    step = f'pip install "{wanted}"'
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name=name, status="missing", detail="not installed", next_step=step)
    if _series(found) < minimum:
        return Finding(name=name, status="warn", detail=f"{found} is too old", next_step=step)
    return Finding(name=name, status="ok", detail=found)


def check_packages() -> Finding:
    """All packages but torch, as one finding; names the first that doesn't fit."""
    found = [check_package(name, minimum) for name, minimum in REQUIRED.items()]
    for finding in found:
        if finding.status != "ok":
            return Finding(
                name="packages",
                status=finding.status,
                detail=f"{finding.name} {finding.detail}",
                next_step=finding.next_step,
            )
    detail = ", ".join(f"{finding.name} {finding.detail}" for finding in found)
    return Finding(name="packages", status="ok", detail=detail)


def check_torch() -> Finding:
    """The torch version, and the device that it computes on."""
    finding = check_package("torch", TORCH)
    if finding.status != "ok":
        return finding
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    detail = f"{torch.__version__}, device {device}, {torch.get_num_threads()} threads"
    return Finding(name="torch", status="ok", detail=detail)


def check_cpu(cpuinfo: str) -> Finding:
    """Cores that this process may use, and the instruction sets that matter to quantized code."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    flags = isa_flags(cpuinfo)
    detail = f"{platform.machine()}, {cores} cores, {' '.join(flags) or 'no known vector flags'}"
    return Finding(name="cpu", status="ok", detail=detail)


def isa_flags(cpuinfo: str) -> list[str]:
    """Those of ISA_FLAGS that /proc/cpuinfo lists, in the order of ISA_FLAGS."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return [flag for flag in ISA_FLAGS if flag in value.split()]
    return []


def check_memory(available_bytes: int | None) -> Finding:
    """Memory that is free for weights, activations and the KV cache."""
    if available_bytes is None:
        return Finding(name="memory", status="ok", detail="not known on this system")
    detail = f"{available_bytes / GIB:.1f} GiB available"
    if available_bytes >= COMFORTABLE_MEMORY_BYTES:
        return Finding(name="memory", status="ok", detail=detail)
    step = "close other programs, or choose a smaller model and --kv-cache-memory"
    return Finding(name="memory", status="warn", detail=detail, next_step=step)


def check_gpu() -> Finding:
    """GPUs that torch sees. None is needed: every command runs on a CPU."""
    if find_spec("torch") is None:
        return Finding(
            name="gpu", status="missing", detail="torch is absent", next_step="install torch first"
        )
    import torch

    if not torch.cuda.is_available():
        return Finding(name="gpu", status="ok", detail="none; every command runs on the CPU")
    names = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        names.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})")
    return Finding(name="gpu", status="ok", detail=", ".join(names))


def check_triton() -> Finding:
    """Triton's presence; no backend of this release uses it."""
    try:
        found = metadata.version("triton")
    except metadata.PackageNotFoundError:
        found = "not installed"
    return Finding(name="triton", status="ok", detail=f"{found}; not used by this release")


def check_cache() -> Finding:
    """Free disk space, and the right to write, where downloaded and converted models go."""
    step = "set QDEPLOY_CACHE to a folder that can be written"
    try:
        from qdeploy.formats.sources import cache_folder

        folder = cache_folder()
    except ImportError as error:
        step = "install the packages that are missing above"
        return Finding(name="cache", status="missing", detail=str(error), next_step=step)
    except SourceError as error:
        return Finding(name="cache", status="missing", detail=str(error), next_step=step)
    if not os.access(folder, os.W_OK):
        detail = f"{folder} can't be written"
        return Finding(name="cache", status="missing", detail=detail, next_step=step)
    free = shutil.disk_usage(folder).free
    detail = f"{folder}, {free / GIB:.1f} GiB free"
    if free >= COMFORTABLE_DISK_BYTES:
        return Finding(name="cache", status="ok", detail=detail)
    step = "free some space, or set QDEPLOY_CACHE to a folder on another disk"
    return Finding(name="cache", status="warn", detail=detail, next_step=step)


def check_backends() -> list[Finding]:
    """The executors of this installation, and whether each can run here."""
    from qdeploy.runtime.executors import BACKENDS

    torch = check_package("torch", TORCH)
    if torch.status == "ok":
        checks = {"cpu": check_cpu_backend, "reference": check_reference_backend}
        return [checks[name]() for name in BACKENDS]
    return [
        Finding(
            name=f"backend {name}",
            status=torch.status,
            detail=f"needs torch: {torch.detail}",
            next_step=torch.next_step,
        )
        for name in BACKENDS
    ]


def check_reference_backend() -> Finding:
    """Needs torch and nothing else."""
    detail = "plain torch in float32; runs on any CPU, slowly: the oracle of the others"
    return Finding(name="backend reference", status="ok", detail=detail)


def check_cpu_backend() -> Finding:
    """Which library of compiled kernels is chosen, and which there are."""
    from qdeploy_kernels.cpu.library import CpuLibraryError, built_isas, load_library

    try:
        chosen = load_library().isa
    except CpuLibraryError as error:
        # Not a fault of the machine: everything runs, on the reference backend.
        return Finding(
            name="backend cpu", status="warn", detail=error.problem, next_step=error.next_step
        )
    detail = f"C++ kernels for {chosen} (built: {', '.join(built_isas())}); what `auto` picks"
    return Finding(name="backend cpu", status="ok", detail=detail)


def _series(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as 2.13.0+cpu or 5.17.0.dev0."""
    major, minor, *_ = [*version.split("+")[0].split("."), "0"]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _available_memory_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = {line.split(":")[0]: line.split()[1] for line in lines if ":" in line}
    return int(kib["MemAvailable"]) * 1024 if "MemAvailable" in kib else None
