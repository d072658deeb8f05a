"""Packing to tiles loses nothing: an independent reader finds the weights that went in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpu.tile_oracle import unpack
from formats.layer_samples import random_fp8_layer, random_layer
from qdeploy.quantization.scheme import Bits, QuantizedLinear, QuantScheme
from qdeploy_kernels.cpu.abi import Kind
from qdeploy_kernels.cpu.fusion import Weight, pack_matrix, tile_group
from qdeploy_kernels.cpu.tiles import TileMatrix


def dense(part: Weight) -> Tensor:
    return part.float() if isinstance(part, Tensor) else cast(QuantizedLinear, part).dequantize()


def layer(bits: int, group: int, rows: int, cols: int, **more: Any) -> QuantizedLinear:
    seed = more.pop("seed", bits + rows)
    scheme = QuantScheme(bits=cast(Bits, bits), group_size=group, **more)
    return random_layer(scheme, rows, cols, seed=seed)


def joined(parts: list[Weight]) -> Tensor:
    """What the tiles must hold: the parts' rows and zero rows up to a multiple of 32."""
    rows = torch.cat([dense(part) for part in parts]).double()
    return torch.cat((rows, rows.new_zeros(-len(rows) % 32, rows.shape[1])))


def check(parts: list[Weight], **options: Any) -> TileMatrix:
    packed = pack_matrix(parts, [None] * len(parts), **options)
    assert torch.equal(unpack(packed).float(), joined(parts).float())
    assert (packed.rows, packed.cols) == (
        sum(map(len, map(dense, parts))),
        dense(parts[0]).shape[1],
    )
    assert packed.tiles.shape[1] % 64 == 0
    return packed


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    rows=st.integers(1, 70),
    group=st.sampled_from([8, 16, 24, 64, 128]),
    groups=st.integers(1, 4),
    symmetric=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_quantized_matrix_keeps_every_weight(
    bits: int, rows: int, group: int, groups: int, symmetric: bool, seed: int
) -> None:
    part = layer(bits, group, rows, group * groups, symmetric=symmetric, seed=seed)
    packed = check([part])
    assert packed.kind is (Kind.W8 if bits == 8 else Kind.W4)
    assert packed.group == group
    assert packed.symmetric or not symmetric


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 300),
    group=st.sampled_from([-1, 8, 128]),
    block_rows=st.sampled_from([1, 40, -1]),
    seed=st.integers(0, 99),
)
def test_float8_keeps_every_weight_in_a_byte(
    rows: int, cols: int, group: int, block_rows: int, seed: int
) -> None:
    part = random_fp8_layer(rows, cols, block_rows=block_rows, group_size=group, seed=seed)
    packed = check([part])
    assert packed.kind is Kind.FP8
    groups = part.scales.shape[1]
    padding = 4 * groups  # each group is filled to fours
    assert packed.tiles.shape[1] <= 32 * (cols + padding) + 128 * groups


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_of_symmetric_groups_are_moved_to_the_middle(bits: int) -> None:
    """So that no zero points are stored, and the kernels' faster path is taken."""
    assert check([layer(bits, 32, 40, 64, symmetric=True)]).symmetric
    asymmetric = layer(bits, 32, 40, 64)
    assert check([asymmetric]).symmetric == (bits in (2, 3))


def test_zero_points_beyond_the_codes_and_scales_of_zero() -> None:
    """GPTQ's older files can say 16; a scale of zero makes any code and zero point zero."""
    part = layer(4, 32, 33, 64)
    part.zero_points.fill_(8)
    part.zero_points[3, 1], part.zero_points[5, 0], part.scales[5, 0] = 16, 1, 0
    assert not check([part]).symmetric
    part.zero_points[3, 1] = 8
    assert check([part]).symmetric


GROUPS = {8: 8, 40: 40, 64: 64, 128: 128, 256: 128, 576: 96, 1536: 128, 264: 88, 136: 8, 12: None}


@pytest.mark.parametrize(("group", "expected"), GROUPS.items())
def test_groups_of_tiles(group: int, expected: int | None) -> None:
    assert tile_group(group) == expected


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("cols", "group"), [(576, 96), (256, 128), (40, 8)])
def test_one_group_a_row_is_cut_into_smaller_ones(bits: int, cols: int, group: int) -> None:
    assert check([layer(bits, -1, 20, cols)]).group == (40 if cols == 40 else group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cols", [1, 7, 32])
def test_dense_weights_are_bfloat16_only_where_that_is_exact(dtype: torch.dtype, cols: int) -> None:
    torch.manual_seed(cols)
    weight = torch.randn(37, cols).to(dtype)
    packed = check([weight])
    assert packed.kind is (Kind.BF16 if dtype == torch.bfloat16 else Kind.F32)
    assert check([weight.bfloat16().float()]).kind is Kind.BF16


def test_what_tiles_cannot_hold_stays_exact_as_a_dense_matrix() -> None:
    odd_group = layer(4, 12, 10, 24)
    fine_scales = layer(4, 16, 10, 32)
    fine_scales = replace(fine_scales, scales=fine_scales.scales.float() * (1 + 2**-20))
    irregular = layer(4, 16, 10, 32)
    in_order = torch.tensor([0] * 8 + [1] * 24, dtype=torch.int32)
    for part in (
        odd_group,
        fine_scales,
        replace(irregular, g_idx=in_order),
        replace(irregular, g_idx=in_order.flip(0).contiguous()),
    ):
        assert check([part]).kind in (Kind.BF16, Kind.F32)


def test_activation_order_becomes_a_permutation() -> None:
    part = layer(4, 16, 40, 64, act_order=True)
    packed = check([part])
    assert packed.kind is Kind.W4
    assert packed.permutation is not None
    assert sorted(packed.permutation.tolist()) == list(range(64))
    assert check([part], permutable=False).kind is Kind.F32
    straight = replace(part, g_idx=torch.arange(64, dtype=torch.int32) // 16)
    assert check([straight]).permutation is None


def test_parts_share_a_permutation_or_are_dense() -> None:
    first, second = (layer(4, 16, 40, 64, act_order=True, seed=s) for s in (1, 2))
    finer = replace(layer(4, 8, 8, 64), g_idx=_finer(first))
    assert check([first, replace(second, g_idx=first.g_idx)]).permutation is not None
    assert check([first, finer]).group == 8
    for others in ([first, second], [first, layer(4, 16, 8, 64)]):
        assert check(list(others)).kind is Kind.F32


def _finer(part: QuantizedLinear) -> Tensor:
    """g_idx of groups half as large that keep the other's order of columns."""
    assert part.g_idx is not None
    order = torch.argsort(part.g_idx, stable=True)
    g_idx = torch.empty(64, dtype=torch.int32)
    g_idx[order] = torch.arange(64, dtype=torch.int32) // 8
    return g_idx


MIXES: dict[str, tuple[list[Weight], Kind]] = {
    "bits": ([layer(4, 16, 9, 64), layer(8, 16, 30, 64)], Kind.W8),
    "low bits": ([layer(2, 16, 9, 64), layer(3, 16, 30, 64), layer(4, 16, 1, 64)], Kind.W4),
    "groups": ([layer(4, 16, 9, 96), layer(4, 24, 30, 96)], Kind.W4),
    "symmetry": ([layer(4, 16, 9, 64, symmetric=True), layer(4, 16, 30, 64)], Kind.W4),
    "float8": ([random_fp8_layer(9, 64), random_fp8_layer(30, 64, block_rows=-1)], Kind.FP8),
    "float8 groups": ([random_fp8_layer(9, 64), random_fp8_layer(8, 64, group_size=16)], Kind.FP8),
    "float8 and integers": ([random_fp8_layer(9, 64), layer(8, 16, 30, 64)], Kind.F32),
    "float8 and dense": ([random_fp8_layer(9, 64), torch.ones(4, 64)], Kind.F32),
    "dense": ([layer(4, 16, 9, 64), torch.ones(4, 64)], Kind.F32),
    "dtypes": ([torch.ones(4, 64), torch.ones(4, 64, dtype=torch.bfloat16)], Kind.BF16),
}


@pytest.mark.parametrize("mix", MIXES)
def test_parts_of_different_schemes_are_lifted_to_a_common_one(mix: str) -> None:
    parts, kind = MIXES[mix]
    assert check(parts).kind is kind


@pytest.mark.parametrize("inner", [16, 24, 33])
@pytest.mark.parametrize("quantized", [True, False])
def test_gate_and_up_are_interleaved(inner: int, quantized: bool) -> None:
    gate, up = layer(4, 16, inner, 32, seed=1), layer(4, 16, inner, 32, seed=2)
    parts: list[Weight] = [gate, up] if quantized else [dense(gate), dense(up)]
    bias = torch.randn(inner)
    packed = pack_matrix(parts, [None, bias], interleave=True)
    weights = unpack(packed)
    assert packed.bias is not None
    assert packed.rows == 2 * inner
    for row in range(-(-inner // 16) * 16):
        tile, lane = divmod(row, 16)
        for half, part, expected_bias in ((0, gate, torch.zeros(inner)), (1, up, bias)):
            at = 32 * tile + 16 * half + lane
            inside = row < inner
            expected = part.dequantize()[row].double() if inside else torch.zeros(32).double()
            assert torch.equal(weights[at], expected)
            assert packed.bias[at] == (expected_bias[row] if inside else 0)


def test_biases_are_padded_and_missing_ones_are_zeros() -> None:
    parts: list[Weight] = [torch.ones(20, 8), torch.ones(30, 8)]
    assert pack_matrix(parts, [None, None]).bias is None
    packed = pack_matrix(parts, [torch.arange(20.0), None])
    assert packed.bias is not None
    assert packed.bias.tolist() == [*map(float, range(20)), *[0.0] * 44]


def test_the_struct_points_at_the_arrays() -> None:
    part = layer(4, 16, 40, 64, act_order=True)
    packed = pack_matrix([part], [torch.ones(40)])
    struct = packed.struct()
    assert packed.bias is not None
    assert packed.permutation is not None
    assert (struct.rows, struct.cols, struct.kind, struct.group) == (40, 64, Kind.W4, 16)
    assert struct.tile_bytes * 2 == packed.tiles.nbytes
    assert struct.tiles == packed.tiles.ctypes.data
    assert struct.bias == packed.bias.ctypes.data
    assert struct.permutation == packed.permutation.ctypes.data
    assert pack_matrix([part.codes.float()], [None]).struct().permutation is None
