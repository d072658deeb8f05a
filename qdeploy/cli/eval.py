"""`qdeploy eval`: what did quantization cost?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdeploy.cli.console import RichProgress, print_json, run, stdout
from qdeploy.cli.options import Act, Artifact, Backend, Json, Quiet, Threads, Verbose
from qdeploy.errors import UsageError
from qdeploy.kv.config import KV_DTYPES, KVCacheConfig
from qdeploy.progress import Progress

if TYPE_CHECKING:
    from qdeploy.evaluation.evaluate import Evaluation


def evaluate_command(
    artifact: Artifact,
    reference: Annotated[
        str | None, typer.Option(help="Model to compare with; default: the artifact's base.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Held-out text; default: shipped.")] = None,
    ctx_len: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 2048,
    stride: Annotated[
        int, typer.Option(min=0, help="Tokens from window to window; 0: no gap.")
    ] = 0,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto (the artifact's), a comma list of formats, or all.")
    ] = "auto",
    suite: Annotated[str, typer.Option(help="quick: 4 windows; full: the whole text.")] = "quick",
    gate: Annotated[str | None, typer.Option(help="E.g. kl<0.05,top1>0.9, or a file.")] = None,
    backend: Backend = "auto",
    act: Act = None,
    threads: Threads = None,
    write: Annotated[
        bool | None,
        typer.Option("--write/--no-write", help="Record in the artifact; default: if it can."),
    ] = None,
    as_json: Json = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Score ARTIFACT through the runtime against its unquantized reference."""

    def body() -> None:
        if suite not in ("quick", "full"):
            raise UsageError(f"--suite {suite!r} is unknown; choose quick or full")
        from qdeploy.cli.tables import accuracy_table
        from qdeploy.evaluation import session as sessions
        from qdeploy.formats.manifest import read_manifest
        from qdeploy.formats.sources import resolve_model

        progress = RichProgress()
        folder = resolve_model(artifact, progress)
        manifest = read_manifest(folder)
        if write and manifest is None:
            raise UsageError(f"{artifact} has no qdeploy.json to write to; use --no-write")
        evaluations = sessions.session(
            folder,
            sessions.reference_of(folder, manifest, reference),
            _policies(folder, kv_cache_dtype),
            sessions.gate_for(manifest, gate),
            text=text,
            ctx_len=ctx_len,
            max_windows=sessions.QUICK_WINDOWS if suite == "quick" else None,
            stride=stride,
            backend=backend,
            act=act,
            threads=threads,
            progress=progress,
        )
        if write or (write is None and manifest is not None):
            _write(folder, evaluations, progress, required=bool(write))
        if as_json:
            items = [sessions.to_json(item, artifact) for item in evaluations]
            print_json(items[0] if len(items) == 1 else {"evaluations": items})
        else:
            stdout.print(accuracy_table(evaluations))
        sessions.enforce(evaluations, folder)

    run(body)


def _write(
    folder: Path, evaluations: Sequence[Evaluation], progress: Progress, *, required: bool
) -> None:
    """Record in the artifact; one that can't be written is a warning unless it was asked for."""
    from qdeploy.evaluation.records import write_records

    try:
        write_records(folder, evaluations)
    except OSError as error:
        if required:
            raise
        progress.warn(f"{folder} can't be written ({error.strerror}); the record isn't kept")


def _policies(folder: Path, dtypes: str) -> list[KVCacheConfig]:
    from qdeploy.runtime.llm import resolve_kv_config

    names = KV_DTYPES if dtypes == "all" else tuple(name.strip() for name in dtypes.split(","))
    return [resolve_kv_config(folder, name) for name in names]
