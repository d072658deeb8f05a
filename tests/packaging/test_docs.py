"""The pages point at things that exist: files, commands, options, make targets, recipes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

CHECKOUT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *CHECKOUT.glob("*.md"),
        *(CHECKOUT / "docs").rglob("*.md"),
        *(CHECKOUT / "calib_data").glob("*.md"),
    ]
)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)[^)]*\)")
PATH = re.compile(r"`((?:qdeploy|kernels|tests|docs|recipes|scripts|calib_data)/[\w./-]+)`")
SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^qdeploy ([a-z]+)(.*)$", re.MULTILINE)


def relative(page: Path) -> str:
    """Test id of a page."""
    return str(page.relative_to(CHECKOUT))


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    missing += [path for path in PATH.findall(text) if not (CHECKOUT / path).exists()]
    assert not missing


def commands() -> dict[str, set[str]]:
    """Names of the CLI's commands, each with its options."""
    from qdeploy.cli import app

    group = typer.main.get_command(app)
    found: dict[str, set[str]] = {}
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        options = [option for param in command.params for option in param.opts]
        found[name] = {option for option in options if option.startswith("-")}
    return found


def test_readme_commands_and_options_exist() -> None:
    known = commands()
    blocks = SHELL.findall((CHECKOUT / "README.md").read_text(encoding="utf-8"))
    lines = COMMAND.findall("\n".join(blocks))
    assert {"quantize", "eval", "serve", "recipes"} <= {name for name, _ in lines}
    for name, rest in lines:
        assert name in known
        used = {word for word in re.split(r"[\s=]", rest.split("#")[0]) if word.startswith("-")}
        assert used <= known[name], (name, used - known[name])


def test_readme_lists_every_command() -> None:
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    for name in commands():
        assert f"`qdeploy {name}" in text, name


def test_make_has_the_targets_that_the_pages_name() -> None:
    rules = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z%-]+):", rules, re.MULTILINE))
    for page in PAGES:
        for name in re.findall(r"^make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert name in targets, (page.name, name)


def test_make_offers_every_recipe() -> None:
    done = subprocess.run(
        ["make", "-C", str(CHECKOUT), "-s", "help", f"PYTHON={sys.executable}"],
        check=True,
        capture_output=True,
        text=True,
    )
    for path in (CHECKOUT / "recipes").glob("*.yaml"):
        assert path.stem in done.stdout


def test_no_path_of_a_machine_in_the_pages_or_the_build() -> None:
    files = [*PAGES, CHECKOUT / "Makefile", CHECKOUT / "pyproject.toml", CHECKOUT / ".ci" / "run"]
    for path in files:
        assert not re.search(r"(?<![\w.])/(root|home|opt|tmp)/", path.read_text(encoding="utf-8"))
