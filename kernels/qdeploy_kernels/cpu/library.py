"""Finds, checks and loads the compiled CPU kernels: one shared library per instruction set.

CMake puts `_qdeploy_cpu_<isa>.so` beside this file: in a wheel, and in a checkout's folder for an
editable install and `make kernels`. An installation without a compiler has none of them.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from qdeploy_kernels.cpu.abi import ABI_VERSION, declare

#: Environment variable that names the instruction set to use.
ISA_VARIABLE = "QDEPLOY_CPU_ISA"
_AVX2 = frozenset({"avx2", "fma", "f16c"})
#: Instruction sets, the fastest first, with the flags of /proc/cpuinfo that their code needs.
#: They are those of the compiler options in CMakeLists.txt.
ISA_FLAGS: dict[str, frozenset[str]] = {
    "avx512": (
        _AVX2
        | {"bmi1", "bmi2", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
        | {"avx512_vnni", "avx512_bf16"}
    ),
    "avx2": _AVX2,
    "portable": frozenset(),
}
_FOLDER = Path(__file__).parent
_CPUINFO = Path("/proc/cpuinfo")
_REBUILD = "install qdeploy again where a C++17 compiler is, or run `make kernels` in a checkout"


class CpuLibraryError(RuntimeError):
    """No usable library of CPU kernels; the message is one line: the problem; the next step."""

    def __init__(self, problem: str, next_step: str) -> None:
        super().__init__(f"{problem}; {next_step}")
        self.problem, self.next_step = problem, next_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A loaded library. cdll: the functions of qdeploy_cpu.h, with types set; they hold no GIL."""

    isa: str
    path: Path
    cdll: ctypes.CDLL

    def error(self) -> str:
        """Message of this thread's last failed call."""
        message: bytes | None = self.cdll.qd_error()
        return (message or b"").decode("utf-8", errors="replace")


def load_library(isa: str | None = None) -> Library:
    """Load the fastest library that is built and that this CPU runs.

    isa: a key of ISA_FLAGS to insist on; by default that of QDEPLOY_CPU_ISA, if set and not empty.
    Raises CpuLibraryError when there is none, or not the one that was asked for.
    """
    if isa is not None:
        return _open(_insist(isa, f"isa={isa}"))
    asked = os.environ.get(ISA_VARIABLE)
    return _open(_insist(asked, f"{ISA_VARIABLE}={asked}") if asked else _choose())


def cpu_library_problem() -> str | None:
    """Why `load_library()` finds nothing, with a next step; None when it does.

    Raises CpuLibraryError instead when QDEPLOY_CPU_ISA asks for what can't be had: a wish that is
    spelled out must not end in another backend.
    """
    try:
        load_library()
    except CpuLibraryError as error:
        if os.environ.get(ISA_VARIABLE):
            raise
        return str(error)
    return None


def built_isas() -> list[str]:
    """Instruction sets whose library this installation has, the fastest first."""
    return [isa for isa in ISA_FLAGS if _path(isa).is_file()]


def available_isas() -> list[str]:
    """Those of `built_isas()` that this CPU runs, the fastest first."""
    flags = cpu_flags()
    return [isa for isa in built_isas() if ISA_FLAGS[isa] <= flags]


def cpu_flags() -> frozenset[str]:
    """Features that every core has, by their names in /proc/cpuinfo; empty where there is none."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    rows = (line.partition(":") for line in text.splitlines())
    cores = [frozenset(v.split()) for key, _, v in rows if key.strip() in ("flags", "Features")]
    return frozenset.intersection(*cores) if cores else frozenset()


def _choose() -> str:
    available = available_isas()
    if available:
        return available[0]
    built = built_isas()
    if built:
        problem = f"this CPU can't run any of the compiled CPU kernels ({', '.join(built)})"
        raise CpuLibraryError(problem, "install qdeploy from source on this machine")
    raise CpuLibraryError("no CPU kernels were compiled in this installation", _REBUILD)


def _insist(isa: str, wish: str) -> str:
    """`isa` itself, once it is known, built, and something that this CPU runs; else the `wish`
    heads the error.
    """
    available = available_isas()
    step = f"choose one of: {', '.join(available)}" if available else _REBUILD
    if isa not in ISA_FLAGS:
        raise CpuLibraryError(f"{wish} is unknown", step)
    if isa not in built_isas():
        raise CpuLibraryError(f"{wish} is not in this installation", step)
    missing = sorted(ISA_FLAGS[isa] - cpu_flags())
    if missing:
        problem = f"{wish} needs {', '.join(missing)}, which this CPU ({platform.machine()}) lacks"
        raise CpuLibraryError(problem, step)
    return isa


def _open(isa: str) -> Library:
    path = _path(isa)
    try:
        cdll = ctypes.CDLL(str(path))
        version = cdll.qd_abi_version()
        if version == ABI_VERSION:
            declare(cdll)
    except (OSError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise CpuLibraryError(f"{path.name} can't be loaded ({reason})", _REBUILD) from None
    if version != ABI_VERSION:
        problem = f"{path.name} has ABI {version}, but ABI {ABI_VERSION} is needed"
        raise CpuLibraryError(problem, _REBUILD)
    return Library(isa=isa, path=path, cdll=cdll)


def _path(isa: str) -> Path:
    return _FOLDER / f"_qdeploy_cpu_{isa}.so"
