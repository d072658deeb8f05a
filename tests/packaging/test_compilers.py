"""Compilers that are absent, broken or old never fail an install: they drop what fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from qdeploy_kernels.cpu import library

CHECKOUT = Path(__file__).parents[2]
#: Knows no AVX-512, and then fails on the kernels themselves.
WORN_OUT = """#!/bin/sh
case "$*" in *avx512*|*kernels/cpp/*) echo "internal compiler error" >&2; exit 1;; esac
exec {compiler} "$@"
"""


def build_wheel(tmp_path: Path, cxx: str) -> tuple[Path, str]:
    """(the wheel that a compiler gives from a fresh build folder, what pip printed)."""
    options = ["-v", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "out")]
    options.append(f"--config-settings=build-dir={tmp_path / 'build'}")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(CHECKOUT)],
        capture_output=True,
        text=True,
        env={**os.environ, "CXX": cxx},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = (tmp_path / "out").glob("*.whl")
    return wheel, " ".join((done.stdout + done.stderr).split())


def libraries(wheel: Path) -> list[str]:
    """Shared libraries in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith(".so")]


def test_an_install_without_a_compiler_works_and_says_so(tmp_path: Path) -> None:
    wheel, output = build_wheel(tmp_path, "/bin/false")
    assert libraries(wheel) == []
    assert "CPU kernels are left out: there is no working C++ compiler" in output
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = (
        "import json, qdeploy_kernels.cpu.library as library\n"
        "print(json.dumps([library.__file__, library.cpu_library_problem()]))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "QDEPLOY_CPU_ISA"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(tmp_path / "installed")},
        check=True,
        capture_output=True,
        text=True,
        cwd="/",
    )
    found, problem = json.loads(done.stdout)
    assert Path(found).is_relative_to(tmp_path)
    assert problem.startswith("no CPU kernels were compiled")


def test_a_compiler_that_fails_drops_only_what_it_fails_on(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:  # then every compiler fails, and the test above has it
        return
    script = tmp_path / "c++"
    script.write_text(WORN_OUT.format(compiler=compiler))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    wheel, output = build_wheel(tmp_path, str(script))
    assert libraries(wheel) == []
    assert "CPU kernels for portable can't be built; left out" in output
    if os.uname().machine == "x86_64":
        assert "can't compile for avx512; left out" in output
        assert "can't compile for avx2" not in output
        assert "CPU kernels for avx2 can't be built; left out" in output


def test_the_loader_and_the_build_know_the_same_instruction_sets() -> None:
    text = (CHECKOUT / "cmake" / "kernels.cmake").read_text(encoding="utf-8")
    assert set(re.findall(r"set\(flags_(\w+)", text)) == set(library.ISA_FLAGS)


@pytest.mark.parametrize("name", ["CMakeLists.txt", "cmake/kernels.cmake"])
def test_results_stay_the_same_bits(name: str) -> None:
    """Options that let a compiler reorder or fuse sums would break invariance over batches."""
    options = [
        line
        for line in (CHECKOUT / name).read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    assert "-ffast-math" not in "".join(options)
    assert "-Ofast" not in "".join(options)
