"""AWQ GEMM: bytes, what it can't hold, and its configs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from formats.layer_samples import random_layer, same
from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.weight_format import WEIGHT_FORMATS, default_format
from qdeploy.quantization.scheme import QuantScheme

AWQ = WEIGHT_FORMATS.get("awq")
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


@given(
    seed=st.integers(0, 999),
    out_features=st.sampled_from([32, 64, 96]),
    group_size=st.sampled_from([-1, 16, 32, 64]),
    bias=st.booleans(),
)
def test_a04_round_trip(seed: int, out_features: int, group_size: int, bias: bool) -> None:
    scheme = QuantScheme(group_size=group_size)
    layer = random_layer(scheme, out_features, 192, seed=seed, bias=bias)
    assert same(AWQ.unpack(AWQ.pack(layer), scheme), layer)


def test_a12_documented_shapes_and_order() -> None:
    layer = random_layer(QuantScheme(group_size=64))
    tensors = AWQ.pack(layer)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "qweight": ((128, 8), torch.int32),
        "qzeros": ((2, 8), torch.int32),
        "scales": ((2, 64), torch.float16),
    }
    word = int(tensors["qweight"][5, 1]) & 0xFFFFFFFF
    expected = [int(layer.codes[8 + channel, 5]) for channel in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert [(word >> (4 * nibble)) & 15 for nibble in range(8)] == expected


def test_every_code_and_zero_dequantizes_from_float32_scales() -> None:
    layer = random_layer(QuantScheme(group_size=16), 32, 32)
    layer.zero_points[:] = (torch.arange(64) % 16).reshape(32, 2)
    layer.codes[:] = (torch.arange(1024) % 16).reshape(32, 32)
    weight = AWQ.unpack(AWQ.pack(layer), layer.scheme).dequantize()
    zeros, scales = (t.float().repeat_interleave(16, 1) for t in (layer.zero_points, layer.scales))
    assert torch.equal(weight, (layer.codes.float() - zeros) * scales)


@pytest.mark.parametrize(
    ("scheme", "named"),
    [
        (QuantScheme(bits=8, symmetric=True), "--format gptq"),
        (QuantScheme(bits=3), "--format gptq_v2"),
        (QuantScheme(act_order=True), "--format gptq_v2"),
    ],
)
def test_scheme_it_cannot_hold_names_one_that_can(scheme: QuantScheme, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        AWQ.check(scheme)


def test_ragged_shapes_are_refused_early() -> None:
    with pytest.raises(UsageError, match="multiple of 32, this layer has 40"):
        AWQ.check_shape(QuantScheme(group_size=64), 40, 64)
    with pytest.raises(UsageError, match="group size 128 does not divide 576"):
        AWQ.check_shape(QuantScheme(group_size=128), 64, 576)
    AWQ.check_shape(QuantScheme(group_size=64), 192, 576)


def test_scales_that_float16_would_round_are_refused() -> None:
    layer = random_layer(QuantScheme(group_size=64))
    layer.scales = layer.scales.float() * 1.0001
    with pytest.raises(UsageError, match="float16"):
        AWQ.pack(layer)


def test_config_is_transformers_own() -> None:
    config = AWQ.quantization_config({"m": QuantScheme(group_size=64)}, ["lm_head"])
    assert config == CONFIG | {"modules_to_not_convert": None}
    ignored = AWQ.quantization_config({"m": QuantScheme()}, ["model.layers.0.mlp.up_proj"])
    assert ignored["modules_to_not_convert"] == ["model.layers.0.mlp.up_proj"]
    assert AWQ.parse_config(config).default == QuantScheme(group_size=64)


def test_transformers_parses_the_config() -> None:
    from transformers import AwqConfig

    parsed = AwqConfig.from_dict(
        AWQ.quantization_config({"m": QuantScheme(group_size=32)}, ["a.b"])
    )
    assert (parsed.bits, parsed.group_size, parsed.zero_point) == (4, 32, True)
    assert parsed.modules_to_not_convert == ["a.b"]
    assert str(parsed.format) in ("gemm", "AwqFormat.GEMM")


def test_config_aliases() -> None:
    old = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
    assert AWQ.parse_config(old).default == QuantScheme(group_size=128)
    superset = CONFIG | {"checkpoint_format": "gemm", "desc_act": False, "meta": {}, "sym": False}
    assert AWQ.parse_config(superset).default == QuantScheme(group_size=64)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "gemv"},
        {"bits": 8},
        {"bits": "4"},
        {"bits": None},
        {"group_size": 0},
        {"group_size": True},
        {"zero_point": False},
        {"zero_point": "yes"},
        {"pack_dtype": "int16"},
        {"lm_head": True},
    ],
)
def test_config_that_cannot_be_honoured_is_named(change: dict[str, object]) -> None:
    with pytest.raises(FormatError) as info:
        AWQ.parse_config(CONFIG | change)
    assert next(iter(change)) in str(info.value)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("method", "scheme", "name"),
    [
        ("awq", QuantScheme(), "awq"),
        ("awq", QuantScheme(symmetric=True), "compressed-tensors"),
        ("rtn", QuantScheme(), "compressed-tensors"),
        ("rtn", QuantScheme(symmetric=True, bits=8), "compressed-tensors"),
        ("gptq", QuantScheme(symmetric=True, bits=2), "gptq"),
        ("gptq", QuantScheme(symmetric=True, bits=3), "gptq"),
        ("gptq", QuantScheme(), "gptq_v2"),
        ("rtn", QuantScheme(bits=3), "compressed-tensors"),
        ("awq", QuantScheme(bits=8), "compressed-tensors"),
        ("awq+gptq", QuantScheme(), "awq"),
        ("awq+gptq", QuantScheme(bits=3), "gptq_v2"),
        ("awq+gptq", QuantScheme(bits=3, symmetric=True), "gptq"),
        ("awq", QuantScheme(act_order=True), "gptq_v2"),
    ],
)
def test_default_format_holds_the_scheme(method: str, scheme: QuantScheme, name: str) -> None:
    assert default_format(method, scheme) == name
    WEIGHT_FORMATS.get(name).check(scheme)
