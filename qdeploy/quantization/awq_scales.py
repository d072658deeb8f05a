"""AWQ's scales: searched for each group of linears, folded away (arXiv 2306.00978, §3.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qdeploy.errors import CalibrationError
from qdeploy.quantization.folding import fold_groups
from qdeploy.quantization.hessian import AbsoluteMean
from qdeploy.quantization.method import LayerContext
from qdeploy.quantization.numerics import fake_quantize
from qdeploy.quantization.scheme import QuantScheme
from qdeploy.quantization.smoothing import (
    SmoothingGroup,
    expand_heads,
    share_heads,
    smoothing_groups,
)

GRID_POINTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Scales [source rows] of a group, with the block's output error (mean squared)."""

    scales: Tensor
    loss: float
    identity_loss: float


@dataclass(frozen=True, slots=True)
class Call:
    """How a block was called on one batch, and what it answered."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Tensor


@torch.no_grad()
def scale_layer(context: LayerContext) -> dict[str, Tensor]:
    """Search and fold scales of every smoothing group, in place, none rounded.

    Returns dense parameters that changed (norms, biases, linears that are no target), as stored.
    Raises CalibrationError if the folded layer no longer computes the same function.
    """
    assert context.forward is not None
    means = {names[0]: AbsoluteMean() for names in context.input_groups}
    context.forward(means)
    shared = {name: means[names[0]].mean for names in context.input_groups for name in names}
    groups = [
        group
        for group in smoothing_groups(context.model_type)
        if any(name in context.targets for name in group.balance)
    ]
    return fold_groups(context, {g: _search(context, g, shared).scales for g in groups})


def _search(context: LayerContext, group: SmoothingGroup, means: Mapping[str, Tensor]) -> Choice:
    """Grid search of one group's scales; identity is in the grid, so it can't do harm."""
    absolute = next(means[name] for name in group.balance if name in means)
    linears = [context.linear(name) for name in group.balance if name in context.targets]
    rows = _source_rows(context, group)
    x = share_heads(absolute, group, rows, context.head_dim)
    w = share_heads(_weight_mean(linears, context.scheme), group, rows, context.head_dim)
    block = context.layer.get_submodule(group.block)
    calls = record_calls(block, context)
    choice = search_scales(
        block, calls, linears, context.scheme, candidates(x, w), context.head_dim
    )
    if choice is None:
        context.warn(
            f"{context.name}: every AWQ scale of {group.source} gave a loss that is not finite; "
            "scale 1 is kept"
        )
        return Choice(scales=torch.ones(rows), loss=float("nan"), identity_loss=float("nan"))
    return choice


def candidates(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    """Identity, then x^r / w^(1−r) for r from 0 to 1 inclusive, normalized to √(max·min) = 1.

    x: mean |activation| and w: mean relative |weight| of each feature, [rows], float32.
    """
    yield torch.ones_like(x)
    for i in range(GRID_POINTS):
        r = i / (GRID_POINTS - 1)
        scales = (x.pow(r) / (w.pow(1 - r) + 1e-4)).clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        yield torch.where(scales.isfinite() & (scales > 0), scales, torch.ones_like(scales))


def search_scales(
    block: nn.Module,
    calls: Sequence[Call],
    linears: Sequence[nn.Linear],
    scheme: QuantScheme,
    tries: Iterator[Tensor],
    head_dim: int,
) -> Choice | None:
    """The scales of least mean squared error of the block's output; None if none is finite."""
    best: Choice | None = None
    identity = float("nan")
    with _kept_weights(linears) as originals:
        for number, scales in enumerate(tries):
            columns = expand_heads(scales, linears[0].in_features, head_dim)
            for linear, original in zip(linears, originals, strict=True):
                linear.weight.data = fake_quantize(original * columns, scheme).div_(columns)
            loss = _block_loss(block, calls)
            identity = loss if number == 0 else identity
            if torch.isfinite(torch.tensor(loss)) and (best is None or loss < best.loss):
                best = Choice(scales=scales, loss=loss, identity_loss=identity)
    return best


def record_calls(block: nn.Module, context: LayerContext) -> list[Call]:
    """Arguments and outputs of a block on the search batches, as the layer itself calls it."""
    seen: list[Call] = []

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen.append(Call(args, kwargs, _first(output)))

    handle = block.register_forward_hook(hook, with_kwargs=True)
    try:
        for batch in context.search_batches:
            context.layer(batch.hidden, **batch.kwargs)
    finally:
        handle.remove()
    if not seen:
        raise CalibrationError(f"{context.name}: calibration did not reach {block}")
    return seen


def _block_loss(block: nn.Module, calls: Sequence[Call]) -> float:
    total, count = 0.0, 0
    for call in calls:
        error = _first(block(*call.args, **call.kwargs)) - call.output
        total += error.square().sum(dtype=torch.float64).item()
        count += error.numel()
    return total / count


@contextmanager
def _kept_weights(linears: Sequence[nn.Linear]) -> Iterator[list[Tensor]]:
    originals = [linear.weight.data for linear in linears]
    try:
        yield originals
    finally:
        for linear, original in zip(linears, originals, strict=True):
            linear.weight.data = original


def _weight_mean(linears: Sequence[nn.Linear], scheme: QuantScheme) -> Tensor:
    """Mean over all rows of |W| relative to its group's largest, [in]."""
    weight = torch.cat([linear.weight.detach() for linear in linears]).abs()
    grouped = weight.view(weight.shape[0], scheme.groups(weight.shape[1]), -1)
    return (grouped / (grouped.amax(-1, keepdim=True) + 1e-6)).mean(0).reshape(-1)


def _source_rows(context: LayerContext, group: SmoothingGroup) -> int:
    source = context.layer.get_submodule(group.source)
    assert isinstance(source.weight, Tensor)
    return int(source.weight.shape[0])


def _first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor
