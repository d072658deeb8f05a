"""FP8 weights: E4M3 values, a scale for each row, each block of 128 x 128, or the whole tensor.

Only static activations need calibration: engines that round a layer's inputs by a stored scale
want max |x| / 448 of all tokens. Here no inputs are rounded (docs/formats.md).

A scale is absmax / 448, or up to twice that: where the large weights fall between powers of two
decides how finely they are rounded, so the factor of the least squared error is taken. Scales are
rounded to their dtype on disk before anything is computed from them: codes belong to the scales
that a reader sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from qdeploy.quantization.hessian import AbsoluteMax
from qdeploy.quantization.method import LayerContext, LayerOutcome
from qdeploy.quantization.numerics import e4m3_codes, e4m3_values, storable_scales
from qdeploy.quantization.rtn import each_on_its_own, stored_bias
from qdeploy.quantization.scheme import E4M3_MAX, QuantizedLinear, QuantScheme

#: What absmax / 448 is multiplied by. A factor of 2 only shifts exponents.
SCALE_FACTORS = tuple(2 ** (step / 8) for step in range(8))


def fp8_quantize(
    weight: Tensor,
    scheme: QuantScheme,
    *,
    scale_dtype: torch.dtype = torch.float32,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> QuantizedLinear:
    """Nearest E4M3 values of weight [out, in], any float dtype; inputs are untouched.

    scale_dtype: of the scales on disk, input_scale [1] among them. A last block may be smaller
    than the others.
    """
    out_features, in_features = weight.shape
    rows, columns = scheme.block(out_features, in_features)
    padded = pad(weight.float(), (0, -in_features % columns, 0, -out_features % rows))
    blocks = padded.view(-1, rows, padded.shape[1] // columns, columns)
    grid = _searched_scales(blocks, scale_dtype)
    codes = e4m3_codes(blocks / grid[:, None, :, None].float()).view(padded.shape)
    scales = grid.repeat_interleave(rows, dim=0)[:out_features].contiguous()
    return QuantizedLinear(
        codes=codes[:out_features, :in_features].contiguous(),
        scales=scales,
        zero_points=torch.zeros(scales.shape, dtype=torch.uint8),
        scheme=scheme,
        g_idx=short_last_group(in_features, columns),
        bias=bias,
        input_scale=None if input_scale is None else storable_scales(input_scale, scale_dtype),
    )


def _searched_scales(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales [block rows, groups] of blocks [block rows, rows, groups, columns], in `dtype`."""
    largest = torch.amax(blocks.abs(), (1, 3))
    plain = torch.where(largest > 0, largest / E4M3_MAX, torch.ones_like(largest))
    best = storable_scales(plain, dtype)
    least = torch.full_like(plain, torch.inf)
    for factor in SCALE_FACTORS:
        scales = storable_scales(plain * factor, dtype)
        spread = scales[:, None, :, None].float()
        error = (e4m3_values(e4m3_codes(blocks / spread)) * spread - blocks).square_().sum((1, 3))
        better = error < least
        best, least = torch.where(better, scales, best), torch.where(better, error, least)
    return best


def short_last_group(in_features: int, group: int) -> Tensor | None:
    """g_idx where the last group is smaller than the others; None where all are full."""
    if in_features % group == 0:
        return None
    return (torch.arange(in_features) // group).to(torch.int32)


@dataclass(frozen=True)
class Fp8:
    """Every target rounded on its own. needs_calibration: for static activations."""

    needs_calibration: bool = False

    def check(self, model_type: str) -> None:
        """Any architecture."""

    def quantize_layer(self, context: LayerContext) -> LayerOutcome:
        """See each_on_its_own."""
        inputs, outputs = _input_scales(context) if self.needs_calibration else ({}, [])

        def rounded(name: str, weight: Tensor) -> QuantizedLinear:
            return fp8_quantize(
                weight,
                context.scheme,
                scale_dtype=_scale_dtype(context, name),
                bias=stored_bias(context, name),
                input_scale=inputs.get(name),
            )

        outcome = each_on_its_own(context, rounded)
        outcome.outputs = outputs
        return outcome


def _input_scales(context: LayerContext) -> tuple[dict[str, Tensor], Sequence[Tensor]]:
    """Scales [1] of the targets' inputs, 1 where all are zero; and the layer's outputs."""
    assert context.forward is not None
    seen = {names[0]: AbsoluteMax() for names in context.input_groups}
    outputs = context.forward(seen)
    scales: dict[str, Tensor] = {}
    for names in context.input_groups:
        largest = seen[names[0]].max.amax().reshape(1)
        scale = torch.where(largest > 0, largest / E4M3_MAX, torch.ones_like(largest))
        scales |= dict.fromkeys(names, scale)
    return scales, outputs


def _scale_dtype(context: LayerContext, name: str) -> torch.dtype:
    """float32 for blocks; the model's own dtype for rows: compressed-tensors rounds to that."""
    if context.scheme.group_size != -1:
        return torch.float32
    dtype = context.store_dtypes[f"{name}.weight"]
    assert isinstance(dtype, torch.dtype)
    return dtype
