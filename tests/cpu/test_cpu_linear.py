"""Fuzz of qd_linear: any shape, kind and group against float64, and rows that stay themselves."""

from __future__ import annotations

import tempfile
from ctypes import byref
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpu.conftest import ISAS
from cpu.tile_oracle import unpack
from formats.layer_samples import random_fp8_layer, random_layer
from qdeploy.models.spec import spec_from_config
from qdeploy.quantization.scheme import Bits, QuantScheme
from qdeploy.runtime.executors.cpu import CpuModel
from qdeploy.runtime.executors.cpu_model import ModelData
from qdeploy.runtime.executors.tile_arena import Arena, ArenaWriter
from qdeploy_kernels.cpu.abi import ActMode, Kind
from qdeploy_kernels.cpu.fusion import Weight, pack_matrix
from qdeploy_kernels.cpu.library import load_library
from qdeploy_kernels.cpu.tiles import TileMatrix
from tiny_models import tiny_config

CONFIG = tiny_config("llama", num_hidden_layers=1).to_dict() | {
    "architectures": ["LlamaForCausalLM"]
}
SHAPES = {"qkv": (128, 64), "o": (64, 64), "gate_up": (192, 64), "down": (64, 96)}


@cache
def model(isa: str, act: ActMode) -> CpuModel:
    """qd_linear takes the mode and the threads of a model; this one is never run."""
    spec = spec_from_config(CONFIG)
    with tempfile.TemporaryFile() as stream:
        writer = ArenaWriter(stream)
        for name, shape in SHAPES.items():
            writer.add_matrix(f"0.{name}", pack_matrix([torch.ones(shape)], [None]))
        for name in ("0.input_layernorm", "0.post_attention_layernorm", "norm"):
            writer.add(name, np.ones(64, dtype=np.float32))
        writer.add_matrix("embedding", pack_matrix([torch.ones(288, 64)], [None]))
        writer.finish("key")
        data = ModelData(Arena(stream, "key"), spec, act)
    return CpuModel(load_library(isa), data, spec, 1)


def linear(isa: str, act: ActMode, matrix: TileMatrix, x: Tensor) -> Tensor:
    """[rows of x, matrix.rows]; also checks that padding comes out as zeros (or NaN)."""
    x = x.contiguous()
    out = torch.full((len(x), len(matrix.tiles) * 32), float("nan"))
    owner = model(isa, act)
    failed = owner.library.cdll.qd_linear(
        owner.handle, byref(matrix.struct()), x.data_ptr(), len(x), out.data_ptr()
    )
    assert not failed, owner.library.error()
    assert not out[:, matrix.rows :].nan_to_num(0).any()
    return out[:, : matrix.rows]


@st.composite
def matrices(draw: st.DrawFn) -> tuple[TileMatrix, Tensor]:
    """A packed matrix and input rows; activations of one row differ by magnitudes."""
    kind = draw(st.sampled_from(["2", "3", "4", "8", "fp8", "bf16", "f32"]))
    rows, seed = draw(st.integers(1, 100)), draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    part: Weight
    if kind.isdigit():
        group = draw(st.sampled_from([8, 16, 24, 32, 64, 96, 128]))
        cols = group * draw(st.integers(1, 5))
        scheme = QuantScheme(
            bits=cast(Bits, int(kind)),
            group_size=group,
            symmetric=draw(st.booleans()),
            act_order=draw(st.booleans()),
        )
        part = random_layer(scheme, rows, cols, seed=seed)
    elif kind == "fp8":
        cols = draw(st.integers(1, 300))
        group = draw(st.sampled_from([-1, 8, 64, 128]))
        part = random_fp8_layer(rows, cols, group_size=group, seed=seed)
    else:
        cols = draw(st.integers(1, 200))
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        part = torch.randn(rows, cols, generator=generator).to(dtype)
    bias = torch.randn(rows, generator=generator) if draw(st.booleans()) else None
    count = draw(st.sampled_from([1, 2, 3, 5, 6, 7, 8, 12, 13, 16, 17, 31, 33, 64, 70]))
    x = torch.randn(count, cols, generator=generator)
    x[:, :: draw(st.integers(1, 9))] *= draw(st.sampled_from([1e-6, 1.0, 30.0, 1e4]))
    if draw(st.booleans()):
        x[0] = 0
    return pack_matrix([part], [bias]), x


def exact(matrix: TileMatrix, x: Tensor) -> tuple[Tensor, Tensor]:
    """The product, float64, and Σ|x·w|, which float32's rounding errors are a share of."""
    weight = unpack(matrix)[: matrix.rows]
    bias = 0 if matrix.bias is None else torch.from_numpy(matrix.bias).double()[: matrix.rows]
    return x.double() @ weight.T + bias, x.double().abs() @ weight.abs().T + abs(bias)


def int8_slack(matrix: TileMatrix, x: Tensor) -> Tensor:
    """What rounding each group of activations to int8 can change: half a step times Σ|w|."""
    order = matrix.permutation
    columns = slice(None) if order is None else torch.from_numpy(order).long()
    weight = unpack(matrix)[: matrix.rows][:, columns].abs().unflatten(1, (-1, matrix.group))
    steps = x.double()[:, columns].abs().unflatten(1, (-1, matrix.group)).amax(-1) / 127
    return steps @ weight.sum(-1).T / 2


@pytest.mark.parametrize("name", ISAS)
@settings(max_examples=40, deadline=None)
@given(case=matrices())
def test_fp32_activations_are_exact_to_rounding(name: str, case: tuple[TileMatrix, Tensor]) -> None:
    matrix, x = case
    expected, size = exact(matrix, x)
    error = (linear(name, ActMode.FP32, matrix, x).double() - expected).abs()
    assert (error <= 2e-6 * size + 1e-30).all()


@pytest.mark.parametrize("name", ISAS)
@settings(max_examples=40, deadline=None)
@given(case=matrices())
def test_int8_activations_err_by_half_a_step_at_most(
    name: str, case: tuple[TileMatrix, Tensor]
) -> None:
    """Those of bfloat16 and float8 matrices are rounded to bfloat16, of float32 not at all."""
    matrix, x = case
    expected, size = exact(matrix, x)
    slack: Any = 2.0**-8 * size if matrix.kind in (Kind.BF16, Kind.FP8) else 0
    if matrix.kind in (Kind.W4, Kind.W8):
        slack = int8_slack(matrix, x)
    error = (linear(name, ActMode.INT8, matrix, x).double() - expected).abs()
    assert (error <= 1.001 * slack + 2e-6 * size + 1e-30).all()


@pytest.mark.parametrize("name", ISAS)
@settings(max_examples=40, deadline=None)
@given(case=matrices(), act=st.sampled_from(list(ActMode)), data=st.data())
def test_a_row_has_the_same_bits_among_any_others(
    name: str, case: tuple[TileMatrix, Tensor], act: ActMode, data: st.DataObject
) -> None:
    matrix, x = case
    whole = linear(name, act, matrix, x)
    first = data.draw(st.integers(0, len(x) - 1))
    last = data.draw(st.integers(first + 1, len(x)))
    assert torch.equal(linear(name, act, matrix, x[first:last]), whole[first:last])


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("act", ActMode)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_stays_alone(name: str, act: ActMode, bad: float) -> None:
    """P5; and what it gives is never a number that looks right."""
    parts: list[Weight] = [
        *(random_layer(QuantScheme(bits=bits, group_size=32), 40, 96) for bits in (4, 8)),
        *(random_fp8_layer(40, 96, group_size=group) for group in (-1, 32)),
    ]
    for part in parts:
        matrix = pack_matrix([part], [None])
        x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
        clean = linear(name, act, matrix, x)
        x[3, 50] = bad
        out = linear(name, act, matrix, x)
        assert torch.equal(out[[0, 1, 2, 4, 5, 6]], clean[[0, 1, 2, 4, 5, 6]])
        assert not out[3].isfinite().any()


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("act", ActMode)
def test_x12_every_float8_is_widened_exactly(name: str, act: ActMode) -> None:
    """Subnormals, both zeros, and the largest; each value comes out as it is, at every place."""
    codes = torch.tensor([c for c in range(256) if c % 128 != 127], dtype=torch.uint8)
    part = random_fp8_layer(len(codes), 8)
    for column in range(8):
        part.codes.fill_(1)
        part.codes[:, column], part.scales[:] = codes, 1
        x = torch.zeros(1, 8)
        x[0, column] = 1
        out = linear(name, act, pack_matrix([part], [None]), x)
        assert torch.equal(out[0], codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("name", ISAS)
def test_wrong_matrices_are_named(name: str) -> None:
    matrix = pack_matrix([random_layer(QuantScheme(group_size=32), 40, 96)], [None])
    owner, x = model(name, ActMode.INT8), torch.zeros(1, 96)
    out = torch.zeros(1, 64)
    for field, value in (("kind", 9), ("group", 36), ("group", 0), ("tile_bytes", 64)):
        struct = matrix.struct()
        setattr(struct, field, value)
        call = owner.library.cdll.qd_linear
        assert call(owner.handle, byref(struct), x.data_ptr(), 1, out.data_ptr())
        assert "matrix" in owner.library.error()
    matrix = pack_matrix([random_fp8_layer(40, 96, group_size=32)], [None])
    for field, value in (("kind", 5), ("group", 0), ("group", 6), ("group", -4), ("tile_bytes", 0)):
        struct = matrix.struct()
        setattr(struct, field, value)
        assert call(owner.handle, byref(struct), x.data_ptr(), 1, out.data_ptr())
        assert "matrix" in owner.library.error()


def test_libraries_know_their_names() -> None:
    for name in ISAS:
        assert load_library(name).cdll.qd_isa() == name.encode()
