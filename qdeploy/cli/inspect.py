"""`qdeploy inspect`: what is in an artifact, and is it whole?"""

from __future__ import annotations

from typing import Annotated

import typer

from qdeploy.cli.console import print_json, run, stdout
from qdeploy.cli.options import Artifact, Json, Quiet, Verbose


def inspect(
    artifact: Artifact,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every file's sha256 with the manifest.")
    ] = False,
    as_json: Json = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Show ARTIFACT's manifest, sizes and readers, and check its integrity."""

    def body() -> None:
        from qdeploy.errors import FormatError
        from qdeploy.formats.inspect import inspect_artifact
        from qdeploy.formats.sources import resolve_model

        inspection = inspect_artifact(resolve_model(artifact), verify=verify)
        if as_json:
            print_json(inspection.to_json())
        else:
            for line in inspection.lines():
                stdout.print(line, markup=False, soft_wrap=True)
        if inspection.findings:
            raise FormatError(f"{artifact}: {'; '.join(inspection.findings)}")

    run(body)
