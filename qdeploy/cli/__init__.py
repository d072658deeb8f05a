"""The `qdeploy` command. One file a command: parse, call one function, print."""

from __future__ import annotations

from typing import Annotated

import typer

from qdeploy.cli.console import set_verbosity
from qdeploy.cli.doctor import doctor
from qdeploy.cli.environment import bound_spinning
from qdeploy.cli.eval import evaluate_command
from qdeploy.cli.export import export
from qdeploy.cli.inspect import inspect
from qdeploy.cli.quantize import quantize
from qdeploy.cli.recipes import recipes
from qdeploy.cli.serve import serve

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Quantize a language model, prove what it cost, and serve it.",
)


def _version(show: bool) -> None:
    if show:
        from qdeploy import __version__

        print(f"qdeploy {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Quantize a language model, prove what it cost, and serve it."""
    set_verbosity(0)  # -v and -q, which belong to the commands, come after this


# In pipeline order, which is the order of --help.
app.command("quantize")(quantize)
app.command("eval")(evaluate_command)
app.command("serve")(serve)
app.command("inspect")(inspect)
app.command("export")(export)
app.command("recipes")(recipes)
app.command("doctor")(doctor)


def main() -> None:
    """Entry point of the console script."""
    bound_spinning()
    app()
