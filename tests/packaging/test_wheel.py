"""What the wheel holds, and that importing it is cheap."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel under test: the one that `make test` built, else a fresh one."""
    given = os.environ.get("QDEPLOY_TEST_WHEEL")
    if given:
        return Path(given)
    out = tmp_path_factory.mktemp("wheel")
    options = ["-q", "--no-deps", "--no-build-isolation", "-w", str(out)]
    command = [sys.executable, "-m", "pip", "wheel", *options]
    subprocess.run([*command, str(CHECKOUT)], check=True)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    """Names of the files in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_q13_calibration_data_ships_in_the_wheel(names: set[str]) -> None:
    for path in (CHECKOUT / "calib_data").iterdir():
        assert f"qdeploy/calib_data/{path.name}" in names


def test_q13_recipes_ship_in_the_wheel(names: set[str]) -> None:
    recipes = sorted(path.name for path in (CHECKOUT / "recipes").glob("*.yaml"))
    assert recipes
    assert all(f"qdeploy/recipes/{name}" in names for name in recipes)


def test_type_checkers_see_both_packages(names: set[str]) -> None:
    assert {"qdeploy/py.typed", "qdeploy_kernels/py.typed"} <= names


def test_every_source_is_in_the_wheel_and_nothing_else_is_importable(names: set[str]) -> None:
    for root, package in ((CHECKOUT, "qdeploy"), (CHECKOUT / "kernels", "qdeploy_kernels")):
        sources = {p.relative_to(root).as_posix() for p in (root / package).rglob("*.py")}
        assert sources <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == {
        "qdeploy",
        "qdeploy_kernels",
    }


def test_wheel_is_small_and_fits_every_python_of_the_platform(wheel: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    assert wheel.stat().st_size < 2_000_000


def compiles(*options: str) -> bool:
    """Whether there is a C++ compiler, and it knows these options."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    command = [compiler or "false", *options, "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_every_instruction_set_that_the_compiler_knows_is_in_the_wheel(names: set[str]) -> None:
    expected = {"portable"} if compiles() else set()
    if os.uname().machine == "x86_64":
        if compiles("-mavx2", "-mfma", "-mf16c"):
            expected.add("avx2")
        if compiles("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"):
            expected.add("avx512")
    folder = "qdeploy_kernels/cpu"
    found = {name for name in names if name.endswith(".so")}
    assert found == {f"{folder}/_qdeploy_cpu_{isa}.so" for isa in expected}


def test_no_source_of_the_kernels_is_in_the_wheel(names: set[str]) -> None:
    assert not [name for name in names if name.endswith((".cpp", ".h", ".cmake"))]


def test_import_does_not_load_torch() -> None:
    """`qdeploy --help` must answer at once."""
    code = "import sys, qdeploy.cli; print({'torch', 'transformers'} & {*sys.modules} or 'light')"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/"
    )
    assert done.stdout.strip() == "light"


def test_public_names_load_on_first_use() -> None:
    import qdeploy

    assert {"LLM", "SamplingParams", "quantize"} <= set(dir(qdeploy))
    assert qdeploy.SamplingParams(temperature=0).temperature == 0
    assert callable(qdeploy.quantize)
    assert callable(qdeploy.LLM)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = qdeploy.no_such_name


def test_make_test_imports_the_wheel_not_the_checkout() -> None:
    import qdeploy
    import qdeploy_kernels

    in_checkout = {
        Path(module.__file__ or "").is_relative_to(CHECKOUT / folder)
        for module, folder in ((qdeploy, "qdeploy"), (qdeploy_kernels, "kernels"))
    }
    assert in_checkout == {"QDEPLOY_TEST_WHEEL" not in os.environ}
