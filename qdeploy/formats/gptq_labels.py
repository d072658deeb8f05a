"""Which of GPTQ's two conventions the zero points of a file follow, whatever its label says.

`gptq` stores z − 1, `gptq_v2` stores z, and checkpoints with the wrong label exist (vllm#38966:
symmetric words of v2, labelled gptq, give "!!!"). The data give the convention away: symmetric
words are all 2^(b−1) − 1 or all 2^(b−1), and the mean of a layer's weights is near zero, hence
that of code − z, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from qdeploy.formats.packing import unpack_bits
from qdeploy.quantization.scheme import QuantScheme

#: Labels by the mean of code − stored zero point.
LABELS = {"gptq_v2": 0.0, "gptq": 1.0}
#: How far the mean may be from a label's; in 8 bits an offset of one is within what weights do.
_TOLERANCE = 0.2
_MAX_BITS = 4
_MIN_CODES = 1 << 12
_LAYERS = 3


def smallest(packed: Mapping[str, tuple[int, int]]) -> list[str]:
    """The few layers that are asked: the smallest, so that opening a checkpoint stays cheap."""
    return sorted(packed, key=lambda module: packed[module][0] * packed[module][1])[:_LAYERS]


def label_of(layers: Iterable[tuple[Mapping[str, Tensor], QuantScheme]]) -> str | None:
    """`gptq` or `gptq_v2` where all of these layers, stored tensors by local name, agree on it."""
    found = {_label(tensors, scheme) for tensors, scheme in layers}
    return found.pop() if len(found) == 1 else None


def _label(tensors: Mapping[str, Tensor], scheme: QuantScheme) -> str | None:
    bits, out_features = scheme.bits, tensors["scales"].shape[1]
    if any(tensors[name].dtype != torch.int32 for name in ("qweight", "qzeros")):
        return None  # a broken file, which unpacking names
    stored = unpack_bits(tensors["qzeros"], bits, out_features)
    if scheme.symmetric:
        for label, offset in LABELS.items():
            if bool((stored == scheme.mid_code - int(offset)).all()):
                return label
    in_features = tensors["qweight"].shape[0] * 32 // bits
    uneven = in_features % stored.shape[0] != 0
    if bits > _MAX_BITS or out_features * in_features < _MIN_CODES or uneven:
        return None
    codes = unpack_bits(tensors["qweight"], bits, in_features, dim=0)
    mean = (codes.float().mean() - stored.float().mean()).item()
    near = [label for label, value in LABELS.items() if abs(mean - value) < _TOLERANCE]
    return near[0] if near else None
