"""Which library of CPU kernels is chosen, by what is built and by what /proc/cpuinfo says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qdeploy_kernels.cpu import library
from qdeploy_kernels.cpu.library import CpuLibraryError, load_library

AVX2 = "fpu sse2 avx avx2 fma f16c bmi1 bmi2"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni avx512_bf16"
SKYLAKE = AVX512.replace(" avx512_vnni avx512_bf16", "")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of libraries, and nothing asked for."""
    monkeypatch.delenv(library.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading answers with the name alone."""
    monkeypatch.setattr(library, "_open", lambda isa: isa)


def cpu(flags: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pretend to be a CPU of two cores with these flags."""
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n")
    monkeypatch.setattr(library, "_CPUINFO", path)


def build(folder: Path, *isas: str) -> None:
    """Put empty libraries there."""
    for isa in isas:
        (folder / f"_qdeploy_cpu_{isa}.so").write_bytes(b"")


@pytest.mark.parametrize(
    ("flags", "built", "chosen"),
    [
        (AVX512, ("avx512", "avx2", "portable"), "avx512"),
        (SKYLAKE, ("avx512", "avx2", "portable"), "avx2"),
        (AVX2, ("avx512", "avx2", "portable"), "avx2"),
        ("fpu sse2", ("avx512", "avx2", "portable"), "portable"),
        (AVX512, ("portable", "avx2"), "avx2"),
        ("", ("portable",), "portable"),
    ],
)
@pytest.mark.usefixtures("opened")
def test_the_fastest_that_is_built_and_runs(
    flags: str, built: tuple[str, ...], chosen: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(folder, *built)
    cpu(flags, monkeypatch, folder)
    assert load_library() == chosen
    assert library.cpu_library_problem() is None


@pytest.mark.usefixtures("opened")
def test_a_core_without_the_flags_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(folder, "avx2", "portable")
    path = folder / "cpuinfo"
    path.write_text(f"flags : {AVX2}\n\nflags : fpu sse2\n")
    monkeypatch.setattr(library, "_CPUINFO", path)
    assert load_library() == "portable"


@pytest.mark.usefixtures("opened")
def test_without_cpuinfo_only_portable_is_safe(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(folder, "avx512", "avx2", "portable")
    monkeypatch.setattr(library, "_CPUINFO", folder / "absent")
    assert library.available_isas() == ["portable"]


@pytest.mark.usefixtures("opened")
def test_environment_and_argument_override(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(folder, "avx512", "avx2", "portable")
    cpu(AVX512, monkeypatch, folder)
    monkeypatch.setenv(library.ISA_VARIABLE, "avx2")
    assert load_library() == "avx2"
    assert load_library("portable") == "portable"
    monkeypatch.setenv(library.ISA_VARIABLE, "")
    assert load_library() == "avx512"


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ("neon", "QDEPLOY_CPU_ISA=neon is unknown"),
        ("avx2", "QDEPLOY_CPU_ISA=avx2 is not in this installation"),
        ("avx512", "QDEPLOY_CPU_ISA=avx512 needs avx512_bf16, avx512_vnni, which this CPU"),
    ],
)
def test_what_was_asked_for_and_is_not_there_is_one_line(
    asked: str, problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(folder, "avx512", "portable")
    cpu(SKYLAKE, monkeypatch, folder)
    monkeypatch.setenv(library.ISA_VARIABLE, asked)
    with pytest.raises(CpuLibraryError) as caught:
        load_library()
    text = str(caught.value)
    assert text.startswith(problem)
    assert text.endswith("; choose one of: portable")
    assert "\n" not in text
    with pytest.raises(CpuLibraryError):  # never an excuse for another backend
        library.cpu_library_problem()


def test_an_installation_without_libraries_says_what_to_do() -> None:
    problem = library.cpu_library_problem()
    assert problem is not None
    assert problem.startswith("no CPU kernels were compiled")
    assert "compiler" in problem


def test_libraries_for_another_cpu_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(folder, "avx512", "avx2")
    cpu("fpu sse2", monkeypatch, folder)
    assert "(avx512, avx2)" in (library.cpu_library_problem() or "")


def test_a_broken_library_is_one_line(folder: Path) -> None:
    build(folder, "portable")
    with pytest.raises(
        CpuLibraryError, match=r"_qdeploy_cpu_portable\.so can't be loaded"
    ) as caught:
        load_library("portable")
    assert "\n" not in str(caught.value)


def test_loading_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, qdeploy_kernels.cpu.library; print({'torch', 'numpy'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/"
    )
    assert done.stdout.strip() == "set()"
