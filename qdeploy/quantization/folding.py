"""Folding scales of smoothing groups into a decoder layer, and the proof that it's harmless."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qdeploy.errors import CalibrationError
from qdeploy.quantization.method import LayerContext, layer_output
from qdeploy.quantization.smoothing import SmoothingGroup, fold

#: Folding computes the same function; float32 rounding may change outputs by this much.
FOLD_TOLERANCE = 1e-3


@torch.no_grad()
def fold_groups(
    context: LayerContext, scales: Mapping[SmoothingGroup, Tensor]
) -> dict[str, Tensor]:
    """Fold every group's scales [source rows], in place.

    Returns dense parameters that changed (norms, biases, linears that are no target), as stored.
    Raises CalibrationError if the layer no longer computes the same function.
    """
    before = _output(context)
    for group, values in scales.items():
        dtype: torch.dtype = context.store_dtypes[f"{group.source}.weight"]
        fold(context.layer, group, values, context.head_dim, dtype)
    _check(context, before)
    return _changed(context, list(scales))


def _changed(context: LayerContext, groups: Sequence[SmoothingGroup]) -> dict[str, Tensor]:
    """Dense parameters that folding changed, in their dtype on disk."""
    names = [name for group in groups for name in (group.source, *group.balance)]
    changed: dict[str, Tensor] = {}
    for name in dict.fromkeys(names):
        if name in context.targets:
            continue
        for local, parameter in context.layer.get_submodule(name).named_parameters():
            dtype = context.store_dtypes[f"{name}.{local}"]
            changed[f"{name}.{local}"] = parameter.detach().to(dtype)
    return changed


def _output(context: LayerContext) -> Tensor:
    """The layer's output on the first search batch."""
    batch = context.search_batches[0]
    return layer_output(context.layer(batch.hidden, **batch.kwargs))


def _check(context: LayerContext, expected: Tensor) -> None:
    """Raise CalibrationError unless the folded layer still computes the same function."""
    # float64: squares of large activations overflow float32.
    error = (_output(context) - expected).double().norm()
    relative = (error / expected.double().norm().clamp(min=1e-300)).item()
    if expected.isfinite().all() and not relative <= FOLD_TOLERANCE:
        raise CalibrationError(
            f"{context.name}: folding scales changed the layer's output by {relative:.1e} "
            f"(limit {FOLD_TOLERANCE:.0e}); use --method gptq without smoothing and report this "
            "architecture"
        )
