"""AWQ's scales: searched for each group of linears, folded away (arXiv 2306.00978, §3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qdeploy.quantization.folding import fold_groups
from qdeploy.quantization.hessian import InputStatistics
from qdeploy.quantization.method import LayerContext
from qdeploy.quantization.numerics import fake_quantize
from qdeploy.quantization.scheme import QuantScheme
from qdeploy.quantization.smoothing import (
    SmoothingGroup,
    expand_heads,
    share_heads,
    smoothing_groups,
)

#: Powers of |activation| and of |weight| that are tried in all combinations; 0 and 0 is identity.
ACTIVATION_POWERS = tuple(i / 8 for i in range(9))
WEIGHT_POWERS = tuple(i / 4 for i in range(5))

#: What a squared rounding error of each input feature costs, [in], given H and the scheme.
Importance = Callable[[Tensor, QuantScheme], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Scales [source rows] of a group, with the cost of rounding at them and at scale 1."""

    scales: Tensor
    loss: float
    identity_loss: float


@torch.no_grad()
def scale_layer(context: LayerContext, importance: Importance) -> dict[str, Tensor]:
    """Search and fold scales of every smoothing group, in place; nothing is rounded.

    AWQ judges scales by the output error of a whole block on a few tokens. Here it is Σ e² over
    rounding errors e of the weights, each times its feature's importance, which comes from H of
    all tokens: it costs no forward pass, so that powers of activation and weight can be chosen
    apart, and with GPTQ's importance it knows which errors GPTQ is going to make up for.

    Returns dense parameters that changed (norms, biases, linears that are no target), as stored.
    Raises CalibrationError if the folded layer no longer computes the same function.
    """
    assert context.forward is not None
    inputs = {names[0]: InputStatistics() for names in context.input_groups}
    context.forward(inputs, stop_after=context.input_groups[-1][0])
    shared = {name: inputs[names[0]] for names in context.input_groups for name in names}
    groups = [
        group
        for group in smoothing_groups(context.model_type)
        if any(name in context.targets for name in group.balance)
    ]
    return fold_groups(context, {g: _search(context, g, shared, importance) for g in groups})


def _search(
    context: LayerContext,
    group: SmoothingGroup,
    inputs: Mapping[str, InputStatistics],
    importance: Importance,
) -> Tensor:
    """Grid search of one group's scales; identity is in the grid, so it can't do harm."""
    names = [name for name in group.balance if name in context.targets]
    statistics, scheme = inputs[names[0]], context.scheme
    weight = torch.cat([context.linear(name).weight.detach() for name in names])
    rows = _source_rows(context, group)
    x = share_heads(statistics.absolute_mean, group, rows, context.head_dim)
    w = share_heads(_weight_mean(weight, scheme), group, rows, context.head_dim)
    costs = importance(statistics.matrix, scheme)
    choice = search_scales(weight, costs, scheme, candidates(x, w), context.head_dim)
    if choice is None:
        context.warn(
            f"{context.name}: every AWQ scale of {group.source} gave a loss that is not finite; "
            "scale 1 is kept"
        )
        return torch.ones(rows)
    return choice.scales


def candidates(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    """x^a / w^b for all powers, identity first, normalized to √(max·min) = 1.

    x: mean |activation| and w: mean relative |weight| of each feature, [rows], float32. AWQ's own
    grids are a = r, b = 0 and, "duo", b = 1 − r.
    """
    for a in ACTIVATION_POWERS:
        for b in WEIGHT_POWERS:
            scales = (x.pow(a) / (w.pow(b) + 1e-4)).clamp(min=1e-4)
            scales = scales / (scales.max() * scales.min()).sqrt()
            yield torch.where(scales.isfinite() & (scales > 0), scales, torch.ones_like(scales))


def search_scales(
    weight: Tensor, costs: Tensor, scheme: QuantScheme, tries: Iterator[Tensor], head_dim: int
) -> Choice | None:
    """The scales of least cost Σ e² c, e the rounding error; None if none is finite.

    weight: [out, in], all linears of a group; costs: c of each feature, [in].
    """
    best: Choice | None = None
    identity = float("nan")
    for number, scales in enumerate(tries):
        columns = expand_heads(scales, weight.shape[1], head_dim)
        error = fake_quantize(weight * columns, scheme).div_(columns).sub_(weight)
        loss = (error.square_().sum(0) @ costs).item()
        identity = loss if number == 0 else identity
        if math.isfinite(loss) and (best is None or loss < best.loss):
            best = Choice(scales=scales, loss=loss, identity_loss=identity)
    return best


def _weight_mean(weight: Tensor, scheme: QuantScheme) -> Tensor:
    """Mean over all rows of |W| relative to its group's largest, [in]."""
    grouped = weight.abs().view(weight.shape[0], scheme.groups(weight.shape[1]), -1)
    return (grouped / (grouped.amax(-1, keepdim=True) + 1e-6)).mean(0).reshape(-1)


def _source_rows(context: LayerContext, group: SmoothingGroup) -> int:
    source = context.layer.get_submodule(group.source)
    assert isinstance(source.weight, Tensor)
    return int(source.weight.shape[0])
