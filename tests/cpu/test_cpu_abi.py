"""The ctypes mirrors against the C header: names, order, sizes and offsets."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from qdeploy_kernels.cpu import abi

HEADER = Path(__file__).parents[2] / "kernels" / "cpp" / "qdeploy_cpu.h"
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "qd_matrix": abi.Matrix,
    "qd_layer": abi.Layer,
    "qd_model": abi.Model,
    "qd_kv_group": abi.KVGroup,
    "qd_block_copy": abi.BlockCopy,
    "qd_step": abi.Step,
}
ENUMS = {
    "qd_kind": abi.Kind,
    "qd_activation": abi.Activation,
    "qd_act_mode": abi.ActMode,
    "qd_kv_dtype": abi.KVDtype,
}


def header() -> str:
    return re.sub(r"//[^\n]*", "", HEADER.read_text(encoding="utf-8"))


def members(struct: str) -> list[str]:
    """Names of a struct's members, in order."""
    body = re.search(rf"struct {struct} \{{(.*?)\n\}};", header(), re.S)
    assert body is not None, f"{struct} is not in the header"
    names = []
    for declaration in body.group(1).split(";"):
        first, *others = declaration.split(",")
        if first.strip():
            names += [re.findall(r"\w+", part)[-1] for part in (first, *others)]
    return names


@pytest.mark.parametrize("struct", STRUCTS)
def test_members_stand_in_the_headers_order(struct: str) -> None:
    assert [name for name, _ in STRUCTS[struct]._fields_] == members(struct)


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_the_headers_values(name: str) -> None:
    body = re.search(rf"enum {name} \{{(.*?)\}}", header())
    assert body is not None, f"{name} is not in the header"
    prefix = {"qd_act_mode": "QD_ACT_", "qd_kv_dtype": "QD_KV_"}.get(name, "QD_")
    found = dict(re.findall(rf"{prefix}(\w+) = (\d+)", body.group(1)))
    assert found == {member.name: str(member.value) for member in ENUMS[name]}


def test_version_is_the_headers() -> None:
    assert f"#define QD_ABI_VERSION {abi.ABI_VERSION}\n" in header()


def test_every_function_is_declared() -> None:
    functions = set(re.findall(r"^QD_API [^(]*?(\w+)\(", header(), re.M))

    class Library(dict[str, object]):
        def __getattr__(self, name: str) -> object:
            return self.setdefault(name, type("Function", (), {})())

    library = Library()
    abi.declare(library)  # type: ignore[arg-type]
    assert len(functions) == 19
    assert set(library) == functions


def test_sizes_and_offsets_are_the_compilers(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "this test compiles a small program; install g++ or clang++"
    lines = [
        f'std::printf("{struct} {name} %zu\\n", offsetof({struct}, {name}));'
        for struct, mirror in STRUCTS.items()
        for name, _ in mirror._fields_
    ] + [f'std::printf("{struct} sizeof %zu\\n", sizeof({struct}));' for struct in STRUCTS]
    source = tmp_path / "layout.cpp"
    body = "\n".join(lines)
    source.write_text(
        f'#include <cstdio>\n#include <cstddef>\n#include "{HEADER}"\nint main() {{\n{body}\n}}\n'
    )
    program = tmp_path / "layout"
    subprocess.run([compiler, "-std=c++17", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    expected = {
        f"{struct} {name} {getattr(mirror, name).offset}"
        for struct, mirror in STRUCTS.items()
        for name, _ in mirror._fields_
    } | {f"{struct} sizeof {ctypes.sizeof(mirror)}" for struct, mirror in STRUCTS.items()}
    assert set(printed.split("\n")) - {""} == expected
