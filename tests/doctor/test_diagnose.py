"""`diagnose` says what runs here, and every finding that isn't ok carries a next step."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from qdeploy import doctor
from qdeploy.runtime.executors import BACKENDS
from qdeploy_kernels.cpu import library

X86 = "processor\t: 0\nflags\t\t: fpu sse2 avx avx2 avx512f avx512_vnni avx512_bf16\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm bf16\n"


def test_every_check_reports_and_names_are_unique() -> None:
    findings = doctor.diagnose()
    names = [finding.name for finding in findings]
    assert len(set(names)) == len(names)
    expected = {"python", "torch", "packages", "cpu", "memory", "gpu", "triton", "cache"}
    assert expected | {f"backend {name}" for name in BACKENDS} == set(names)
    for finding in findings:
        assert finding.detail
        assert (finding.status == "ok") == (not finding.next_step), finding


def test_q15_a_cpu_only_machine_is_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    findings = {finding.name: finding for finding in doctor.diagnose()}
    assert findings["gpu"].status == "ok"
    assert "CPU" in findings["gpu"].detail
    assert findings["backend reference"].status == "ok"


def test_every_registered_backend_is_reported() -> None:
    reported = {finding.name for finding in doctor.check_backends()}
    assert reported == {f"backend {name}" for name in BACKENDS}


@pytest.mark.parametrize(
    ("cpuinfo", "flags"),
    [
        (X86, ["avx2", "avx512_vnni", "avx512_bf16"]),
        (ARM, ["asimddp", "i8mm", "bf16"]),
        ("", []),
    ],
)
def test_isa_flags(cpuinfo: str, flags: list[str]) -> None:
    assert doctor.isa_flags(cpuinfo) == flags


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 9), "warn"), ((3, 10), "ok"), ((3, 13), "ok"), ((3, 14), "warn")],
)
def test_python_bounds(version: tuple[int, int], status: str) -> None:
    assert doctor.check_python(version).status == status


@pytest.mark.parametrize(
    ("installed", "status"),
    [("5.17.0", "ok"), ("5.24.1", "ok"), ("5.16.9", "warn"), ("4.57.1", "warn"), ("6", "ok")],
)
def test_old_package_is_named(installed: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    finding = doctor.check_package("transformers", (5, 17))
    assert finding.status == status
    if status == "warn":
        assert finding.next_step == 'pip install "transformers>=5.17"'


def test_absent_torch_stops_the_backend_with_a_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    backends = doctor.check_backends()
    assert len(backends) == len(list(BACKENDS))
    for backend in backends:
        assert backend.status == "missing"
        assert "torch" in backend.next_step


def test_cpu_backend_names_the_chosen_library(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = library.Library(isa="avx2", path=Path("x.so"), cdll=None)  # type: ignore[arg-type]
    monkeypatch.setattr(library, "load_library", lambda: chosen)
    monkeypatch.setattr(library, "built_isas", lambda: ["avx512", "avx2"])
    finding = doctor.check_cpu_backend()
    assert finding.status == "ok"
    assert "for avx2 (built: avx512, avx2)" in finding.detail


def test_cpu_backend_without_a_library_is_a_warning_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(library.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    finding = doctor.check_cpu_backend()
    assert finding.status == "warn"
    assert "compiler" in finding.next_step


@pytest.mark.parametrize(
    ("available", "status"), [(1 << 30, "warn"), (64 << 30, "ok"), (None, "ok")]
)
def test_memory(available: int | None, status: str) -> None:
    assert doctor.check_memory(available).status == status


def test_cache_that_is_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QDEPLOY_CACHE", str(tmp_path / "file" / "cache"))
    finding = doctor.check_cache()
    assert finding.status == "missing"
    assert "QDEPLOY_CACHE" in finding.next_step


def test_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDEPLOY_CACHE", str(tmp_path))
    assert doctor.check_cache().detail.startswith(f"{tmp_path}, ")


@pytest.mark.parametrize(("free", "status"), [(1 << 20, "warn"), (1 << 40, "ok")])
def test_little_disk_is_a_warning(
    free: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QDEPLOY_CACHE", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    assert doctor.check_cache().status == status


def test_bounds_equal_those_of_the_package() -> None:
    """doctor asks for what pip asks for, no more and no less."""
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    text = pyproject.read_text(encoding="utf-8")
    for name, (major, minor) in {**doctor.REQUIRED, "torch": doctor.TORCH}.items():
        assert re.search(rf'"{re.escape(name)}>={major}\.{minor}"', text), name
