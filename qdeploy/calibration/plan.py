"""Which layers are quantized, and how: everything that can be refused before any calibration."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qdeploy.calibration.memory import Sizes
from qdeploy.calibration.walk import DecoderWalk
from qdeploy.errors import UsageError
from qdeploy.formats.hf import TensorFolder
from qdeploy.formats.module_schemes import distinct
from qdeploy.formats.weight_format import WEIGHT_FORMATS, activations_note, default_format
from qdeploy.quantization.method import QuantMethod
from qdeploy.quantization.methods import method_for
from qdeploy.quantization.scheme import QuantScheme
from qdeploy.quantization.signround import SignRound
from qdeploy.recipes import Recipe

#: Sizes that `auto` tries, largest first, and those that messages list.
AUTO_GROUP_SIZES = (128, 64, 32, 16)
LISTED_GROUP_SIZES = (256, 128, 96, 64, 48, 32, 16)
NEVER_QUANTIZED = ("lm_head", "model.embed_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantPlan:
    """A recipe resolved against a checkpoint.

    recipe: with `auto` values filled in; method: None copies the weights
    scheme: of layers without an override; schemes: of every target by full name
    targets: per decoder layer, names of its linears that are quantized, relative to it
    shapes: (out, in) of every target by full name; dense: full names of linears kept
    """

    recipe: Recipe
    method: QuantMethod | None
    scheme: QuantScheme
    schemes: dict[str, QuantScheme] = field(default_factory=dict)
    format: str
    targets: tuple[tuple[str, ...], ...] = ()
    shapes: dict[str, tuple[int, int]]
    dense: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def quantization_config(self) -> dict[str, Any] | None:
        """config.json's `quantization_config`; None when nothing is quantized."""
        if self.method is None:
            return None
        return WEIGHT_FORMATS.get(self.format).quantization_config(self.schemes, self.dense)

    def local_schemes(self, layer: str) -> dict[str, QuantScheme]:
        """Schemes of one decoder layer's targets, by names relative to it."""
        prefix = f"{layer}."
        return {n.removeprefix(prefix): s for n, s in self.schemes.items() if n.startswith(prefix)}

    @property
    def in_features(self) -> int:
        """The largest number of a target's inputs; 0 without targets."""
        return max((columns for _, columns in self.shapes.values()), default=0)

    def sizes(self, folder: TensorFolder, walk: DecoderWalk, lengths: Sequence[int]) -> Sizes:
        """What decides the run's memory; lengths: tokens of every calibration sequence."""
        table = "model.embed_tokens.weight"
        vocab, hidden = folder.shape(table)
        return Sizes(
            method=self.recipe.method,
            layer=max(sum(p.numel() for p in layer.parameters()) for layer in walk.layers),
            linear=max((rows * columns for rows, columns in self.shapes.values()), default=0),
            in_features=self.in_features,
            features=max(map(max, self.shapes.values()), default=hidden),
            hidden=hidden,
            vocab=vocab,
            table_bytes=vocab * hidden * folder.dtype(table).itemsize,
            tokens=sum(lengths),
            longest=max(lengths, default=0),
        )


def make_plan(folder: TensorFolder, walk: DecoderWalk | None, recipe: Recipe) -> QuantPlan:
    """Resolve targets, scheme and format.

    Raises UsageError for an ignore pattern without a match, nothing left to quantize, fused
    experts, a group size that doesn't divide, and a format that can't hold the result.
    """
    if walk is None:
        scheme = recipe.integer_scheme(-1)
        return QuantPlan(recipe=recipe, method=None, scheme=scheme, format="none", shapes={})
    method = _method(recipe)
    method.check(walk.model_type)
    _refuse_fused(walk)
    names = [[f"{walk.layer_name(i)}.{n}" for n in walk.linear_names(i)] for i in _layers(walk)]
    every = [*(name for layer in names for name in layer), *NEVER_QUANTIZED]
    ignored = match_ignored(recipe.ignore, every)
    if recipe.quantize_embeddings is not None and ignored & set(NEVER_QUANTIZED):
        raise UsageError(
            f"quantize_embeddings={recipe.quantize_embeddings}, but embedding or head is ignored; "
            "leave one of the two out",
            param="quantize_embeddings",
        )
    targets = tuple(
        tuple(n for n in walk.linear_names(i) if f"{walk.layer_name(i)}.{n}" not in ignored)
        for i in _layers(walk)
    )
    shapes = {
        f"{walk.layer_name(i)}.{name}": _shape(folder, f"{walk.layer_name(i)}.{name}.weight")
        for i in _layers(walk)
        for name in targets[i]
    }
    if not shapes:
        raise UsageError("no linear layer is left to quantize; check --ignore")
    scheme, notes, update = _resolve_scheme(recipe, shapes)
    schemes = _overridden(recipe, scheme, shapes, every)
    chosen = recipe.format
    name = default_format(recipe.method, *schemes.values()) if chosen == "auto" else str(chosen)
    _check_format(name, schemes, shapes)
    if isinstance(method, SignRound):
        update |= {"iters": method.iters, "lr": method.lr}
    resolved = recipe.model_copy(update=update | {"format": name})
    return QuantPlan(
        recipe=resolved,
        method=method,
        scheme=scheme,
        schemes=schemes,
        format=name,
        targets=targets,
        shapes=shapes,
        dense=(*sorted(ignored - set(NEVER_QUANTIZED)), "lm_head"),
        notes=tuple(notes),
    )


def _method(recipe: Recipe) -> QuantMethod:
    """The method, with the recipe's options when it has any."""
    scheme = recipe.named_scheme() or recipe.integer_scheme(-1)
    method = method_for(recipe.method, scheme, recipe.alpha, recipe.true_sequential)
    if isinstance(method, SignRound):
        return method.configured(recipe.iters, recipe.lr, recipe.calibration.seed)
    return method


def _resolve_scheme(
    recipe: Recipe, shapes: dict[str, tuple[int, int]]
) -> tuple[QuantScheme, list[str], dict[str, Any]]:
    """The scheme, lines that say why, and the recipe's keys that were open."""
    scheme = recipe.named_scheme()
    if scheme is not None:
        note = activations_note([scheme])
        return scheme, [note] if note else [], _said(recipe, scheme)
    group_size, notes = resolve_group_size(recipe.group_size, shapes)
    return recipe.integer_scheme(group_size), notes, {"group_size": group_size}


def _said(recipe: Recipe, scheme: QuantScheme) -> dict[str, Any]:
    """The keys of a named scheme as they were taken, with defaults filled in."""
    alpha = recipe.alpha
    smoothing = {} if scheme.number != "int" else {"smoothquant": "off" if alpha is None else alpha}
    return {"scheme": scheme.name, **smoothing}


def _overridden(
    recipe: Recipe,
    scheme: QuantScheme,
    shapes: dict[str, tuple[int, int]],
    names: Sequence[str],
) -> dict[str, QuantScheme]:
    """The scheme of every target; UsageError for an override without a target, or one whose
    group size doesn't divide a target's inputs.
    """
    schemes: dict[str, QuantScheme] = {}
    for pattern, section in recipe.overrides.items():
        matched = match_pattern(pattern, names, "overrides") & shapes.keys()
        if not matched:
            raise UsageError(
                f"overrides pattern {pattern!r} matches only layers that stay dense; leave it out",
                param="overrides",
            )
        own = section.apply(scheme)
        if own.number == "int":
            resolve_group_size(own.group_size, {name: shapes[name] for name in sorted(matched)})
        schemes = dict.fromkeys(sorted(matched), own) | schemes  # the first that matches wins
    return {name: schemes.get(name, scheme) for name in shapes}


def match_ignored(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """Names that match one of the patterns; UsageError for a pattern without a match."""
    return {name for pattern in patterns for name in match_pattern(pattern, names, "ignore")}


def match_pattern(pattern: str, names: Sequence[str], key: str) -> set[str]:
    """Names that match: shell-like, or a regular expression after `re:`; at least one."""
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            raise UsageError(f"{key} pattern {pattern!r}: {error}", param=key) from None
        matched = {name for name in names if expression.match(name)}
    else:
        matched = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
    if not matched:
        raise UsageError(
            f"{key} pattern {pattern!r} matches no linear layer; names look like {names[0]}",
            param=key,
        )
    return matched


def resolve_group_size(
    wanted: int | str, shapes: dict[str, tuple[int, int]]
) -> tuple[int, list[str]]:
    """The group size, and lines that say why; UsageError when it doesn't divide every input."""
    widths = sorted({columns for _, columns in shapes.values()})
    listed = ", ".join(map(str, widths))
    if wanted != "auto":
        size = int(wanted)
        bad = [name for name, (_, columns) in shapes.items() if size != -1 and columns % size]
        if size != -1 and (size < 8 or bad):
            fits = [g for g in LISTED_GROUP_SIZES if all(width % g == 0 for width in widths)]
            where = f"{shapes[bad[0]][1]} input features of {bad[0]}" if bad else "any layer"
            raise UsageError(
                f"group size {size} does not divide the {where}; sizes that divide every layer: "
                f"{', '.join(map(str, fits)) or 'only -1 (whole rows)'}",
                param="group_size",
            )
        return size, []
    for size in AUTO_GROUP_SIZES:
        if all(width % size == 0 for width in widths):
            reason = f"group size {size}: the largest usual one that divides all inputs ({listed})"
            return size, [reason]
    raise UsageError(
        f"no usual group size divides all inputs ({listed}); give --group-size -1",
        param="group_size",
    )


def _layers(walk: DecoderWalk) -> range:
    return range(len(walk.layers))


def _shape(folder: TensorFolder, name: str) -> tuple[int, int]:
    out_features, in_features = folder.shape(name)
    return out_features, in_features


def _refuse_fused(walk: DecoderWalk) -> None:
    """Fused expert tensors are no linear modules: they would stay dense without a word (P4)."""
    for name, parameter in walk.layers.named_parameters():
        if parameter.dim() >= 3:
            raise UsageError(
                f"model.layers.{name} holds fused experts, which this version can't quantize; "
                "use --method none for a KV-cache policy alone"
            )


def _check_format(
    name: str, schemes: dict[str, QuantScheme], shapes: dict[str, tuple[int, int]]
) -> None:
    weight_format = WEIGHT_FORMATS.get(name)
    weight_format.quantization_config(schemes, ())  # one scheme for all, if it must be
    for scheme in distinct(schemes.values()):
        weight_format.check(scheme)
    for module, (out_features, in_features) in shapes.items():
        try:
            weight_format.check_shape(schemes[module], out_features, in_features)
        except UsageError as error:
            raise UsageError(f"{module}: {error}", param=error.param) from None
