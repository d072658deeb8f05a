"""Install the one wheel of a folder into a new environment that borrows our dependencies.

usage: install_wheel.py WHEEL_FOLDER ENVIRONMENT

The borrowed site-packages come after the environment's own and their .pth files are not read, so
the editable install in them stays invisible: `import qdeploy` finds the wheel or nothing.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def main(wheel_folder: Path, environment: Path) -> None:
    """Install, then prove that both packages come from the environment."""
    (wheel,) = wheel_folder.glob("*.whl")
    python = environment.resolve() / "bin" / "python"
    purelib = _output(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True)
    Path(purelib, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for package in ("qdeploy", "qdeploy_kernels"):
        found = _output(python, f"import {package}; print({package}.__file__)")
        if not Path(found).is_relative_to(purelib):
            sys.exit(f"{package} was imported from {found}, not from the wheel in {purelib}")


def _output(python: Path, code: str) -> str:
    # Elsewhere than the checkout, which -c would put on sys.path.
    command = [str(python), "-c", code]
    return subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, cwd=python.parent
    ).stdout.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
