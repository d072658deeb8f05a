"""`qdeploy export`: an artifact, or a foreign checkpoint, in another format."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdeploy.cli.console import RichProgress, print_json, run, stdout
from qdeploy.cli.options import Artifact, Json, MaxShardSize, Quiet, Verbose, parse_size

if TYPE_CHECKING:
    from qdeploy.formats.convert import ExportResult


def export(
    artifact: Artifact,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")],
    format: Annotated[
        str,
        typer.Option(help="awq, gptq, gptq_v2, compressed-tensors, fp8; or dense, dequantized."),
    ],
    max_shard_size: MaxShardSize = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUTPUT.")] = False,
    as_json: Json = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Write ARTIFACT in another format: the same codes and scales, so its records stay valid."""

    def body() -> None:
        from qdeploy.formats.convert import export_checkpoint
        from qdeploy.formats.sources import resolve_model

        progress = RichProgress()
        result = export_checkpoint(
            resolve_model(artifact, progress),
            output,
            format,
            name=artifact,
            overwrite=overwrite,
            max_shard_size=parse_size(max_shard_size, "--max-shard-size"),
            progress=progress,
        )
        if as_json:
            print_json(dataclasses.asdict(result))
        else:
            _print(result)

    run(body)


def _print(result: ExportResult) -> None:
    how = "every weight unchanged" if result.lossless else "weights rounded to the dense dtype"
    stdout.print(
        f"{result.output}: {result.scheme} ({result.format}) from {result.source_format}, "
        f"{result.layers} layers, {how}, {result.size_bytes / 1e6:.1f} MB",
        soft_wrap=True,
    )
    kept = result.accuracy_records
    step = "serve" if kept else "eval"
    stdout.print(f"accuracy records kept: {kept}; next: qdeploy {step} {result.output}")
