"""Token tables (embedding and head) in few bits: rounded when a model is loaded, no calibration.

The arithmetic is part of what an artifact means: its files keep the dense table, and its accuracy
was measured on these codes. So it gives the same bits on every machine: elementwise operations
and sums in a fixed order only.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from qdeploy.errors import UsageError
from qdeploy.quantization.numerics import storable_scales
from qdeploy.quantization.rtn import rtn_quantize
from qdeploy.quantization.scheme import (
    TABLE_BITS,
    TABLE_GROUP_SIZES,
    Bits,
    QuantizedLinear,
    QuantScheme,
)

#: Where the search puts a group's largest magnitude, in codes. Beyond 8 it is clipped.
_TOP_CODES = (7.0, 7.5, 8.0, 8.5, 9.0, 9.5, 10.0)
#: Values in a piece: few enough that torch does each operation on the calling thread. Its own
#: threads meet after every operation, which on a busy machine takes 30 times as long.
_PIECE_VALUES = 1 << 15


def table_scheme(bits: Bits, hidden_size: int) -> QuantScheme:
    """Symmetric groups along each row; UsageError for other bits or an odd hidden size."""
    if bits not in TABLE_BITS:
        raise UsageError(
            f"quantize_embeddings={bits} is not supported; choose 8 or 4",
            param="quantize_embeddings",
        )
    for size in TABLE_GROUP_SIZES:
        if hidden_size % size == 0:
            return QuantScheme(bits=bits, group_size=size, symmetric=True)
    raise UsageError(
        f"quantize_embeddings needs a hidden size that 8 divides, this model has {hidden_size}; "
        "leave it out",
        param="quantize_embeddings",
    )


def table_bytes(shape: tuple[int, int], scheme: QuantScheme) -> int:
    """Bytes of a table [rows, hidden]: packed codes, float16 scales, and a byte for each zero
    point of asymmetric groups.
    """
    rows, hidden = shape
    per_group = 2 if scheme.symmetric else 3
    return rows * (hidden * scheme.bits // 8 + scheme.groups(hidden) * per_group)


def quantize_table(table: Tensor, scheme: QuantScheme) -> QuantizedLinear:
    """Codes of table [rows, hidden], any float dtype, finite; deterministic on every machine.

    Symmetric groups of 4 bits take the scale of the least squared error; others are plain
    rounding to nearest. Raises UsageError when the group size doesn't divide `hidden`.
    """
    groups = scheme.groups(table.shape[1])
    search = scheme.bits == 4 and scheme.symmetric
    codes = torch.empty(table.shape, dtype=torch.uint8)
    scales = torch.empty(table.shape[0], groups, dtype=torch.float16)
    zeros = torch.full(scales.shape, scheme.mid_code, dtype=torch.uint8)

    def quantize_rows(rows: slice) -> None:
        values = table[rows].float()
        found = searched_scales(values.unflatten(1, (groups, -1))) if search else None
        qparams = None if found is None else (found.float(), zeros[rows])
        q = rtn_quantize(values, scheme, qparams=qparams)
        codes[rows], scales[rows], zeros[rows] = q.codes, q.scales, q.zero_points

    step = max(1, _PIECE_VALUES // table.shape[1])
    pieces = [slice(start, start + step) for start in range(0, table.shape[0], step)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(quantize_rows, pieces))
    return QuantizedLinear(codes=codes, scales=scales, zero_points=zeros, scheme=scheme)


def searched_scales(grouped: Tensor) -> Tensor:
    """float16 scales [rows, groups] for grouped [rows, groups, group], float32; never zero.

    Codes reach from −8 to 7, so the value of the largest magnitude gets a negative code: the
    scale's sign is against that value's. Each candidate maps that value to another code, and for
    the codes c that this gives to values x, the best scale is Σxc / Σcc; the squared error is then
    Σxx − (Σxc)² / Σcc, and the candidate with the most (Σxc)² / Σcc wins.
    """
    high, low = _fold(grouped, torch.maximum), _fold(grouped, torch.minimum)
    extreme = torch.where(high >= -low, high, low).unsqueeze(-1)
    extreme = torch.where(extreme == 0, 1.0, extreme)
    best_gain = torch.full(grouped.shape[:-1], -1.0)
    best_scale = torch.ones(grouped.shape[:-1])
    for top in _TOP_CODES:
        codes = (grouped * (-top / extreme)).round_().clamp_(-8, 7)
        cross, square = _fold(grouped * codes, torch.add), _fold(codes * codes, torch.add)
        scale = cross / square.clamp_(min=1)
        gain = cross * scale
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_scale = torch.where(better, scale, best_scale)
    magnitude = storable_scales(best_scale.abs(), torch.float16)
    return torch.where(best_scale < 0, -magnitude, magnitude)


def _fold(values: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Reduce the last dimension, a power of two long, by halves: one order on every machine."""
    while values.shape[-1] > 1:
        values = combine(*values.chunk(2, dim=-1))
    return values.squeeze(-1)
