"""Imports only point downwards: the layers of docs/architecture.md, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import qdeploy
import qdeploy_kernels

#: Top-level modules and packages of qdeploy, lowest layer first. A new one must be placed here.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "registry", "progress", "_resources"}),
    frozenset({"quantization", "formats", "models", "kv", "recipes"}),
    frozenset({"runtime", "calibration", "engines"}),
    frozenset({"server", "bench", "evaluation", "pipeline", "planner", "doctor"}),
    frozenset({"cli"}),
)

ROOT = Path(qdeploy.__file__).parent
KERNELS = Path(qdeploy_kernels.__file__).parent


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Dotted names that a module imports anywhere in it; `package` resolves relative imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            prefix = ".".join([*base, node.module or ""] if node.level else [node.module or ""])
            yield from (f"{prefix.rstrip('.')}.{alias.name}" for alias in node.names)


def component(dotted: str) -> str | None:
    """`qdeploy.runtime.engine` → `runtime`; None for other packages and the bare package."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == "qdeploy" and len(parts) > 1 else None


def layer_of(name: str) -> int:
    """Index into LAYERS."""
    return next(i for i, names in enumerate(LAYERS) if name in names)


def qdeploy_modules() -> list[Path]:
    """All sources but the root `__init__`, which names its lazy exports."""
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imports_of(path: Path, root: Path) -> list[str]:
    """Imports of one file below a package's root."""
    package = ".".join([root.name, *path.relative_to(root).parent.parts])
    return list(imported_modules(path.read_text(encoding="utf-8"), package))


def violations(own: str, imports: list[str]) -> list[str]:
    """The imports of a module of component `own` that point upwards."""
    targets = {name: component(name) for name in imports}
    return [
        name
        for name, target in targets.items()
        if target is not None and target != "__version__" and layer_of(target) > layer_of(own)
    ]


def test_every_module_has_a_layer() -> None:
    found = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in qdeploy_modules()}
    assert len(found) > 10
    assert found <= frozenset().union(*LAYERS)


@pytest.mark.parametrize("path", qdeploy_modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert not violations(own, imports_of(path, ROOT))


def test_quantization_never_imports_runtime() -> None:
    for path in (ROOT / "quantization").rglob("*.py"):
        assert "runtime" not in {component(name) for name in imports_of(path, ROOT)}, path


def test_kernels_never_import_qdeploy() -> None:
    files = sorted(KERNELS.rglob("*.py"))
    assert files
    for path in files:
        assert not [n for n in imports_of(path, KERNELS) if n.split(".")[0] == "qdeploy"], path


@pytest.mark.parametrize("name", ["scheduler", "block_manager"])
def test_no_torch_in(name: str) -> None:
    """Scheduling is arithmetic on ids: it must be testable without a tensor."""
    tops = {n.split(".")[0] for n in imports_of(ROOT / "runtime" / f"{name}.py", ROOT)}
    assert not tops & {"torch", "numpy", "transformers"}


@pytest.mark.parametrize(
    ("own", "source"),
    [
        ("quantization", "from qdeploy.runtime.engine import Engine"),
        ("quantization", "def f():\n    from qdeploy.runtime import engine"),
        ("quantization", "from qdeploy import runtime"),
        ("quantization", "from ..runtime import engine"),
        ("runtime", "import qdeploy.server.app"),
        ("evaluation", "from qdeploy.cli import console"),
        ("errors", "from qdeploy.recipes import Recipe"),
    ],
)
def test_the_check_itself_sees(own: str, source: str) -> None:
    assert violations(own, list(imported_modules(source, f"qdeploy.{own}")))


def test_the_check_lets_downward_imports_pass() -> None:
    source = "from qdeploy.kv.config import KVCacheConfig\nfrom . import batch\nimport torch"
    assert not violations("runtime", list(imported_modules(source, "qdeploy.runtime")))
