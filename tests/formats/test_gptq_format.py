"""GPTQ v1 and v2: bytes, zero points, group index, wrong labels, configs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from formats.layer_samples import random_layer, same
from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.weight_format import WEIGHT_FORMATS
from qdeploy.quantization.scheme import Bits, QuantScheme

V1, V2, AWQ = (WEIGHT_FORMATS.get(name) for name in ("gptq", "gptq_v2", "awq"))
CONFIG: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}
BITS: tuple[Bits, ...] = (2, 3, 4, 8)


@given(
    seed=st.integers(0, 999),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from([-1, 16, 32, 64]),
    act_order=st.booleans(),
    bias=st.booleans(),
)
def test_a05_round_trip_of_every_width(
    seed: int, bits: Bits, group_size: int, act_order: bool, bias: bool
) -> None:
    scheme = QuantScheme(bits=bits, group_size=group_size, act_order=act_order)
    if group_size == -1:
        scheme = replace(scheme, act_order=False)
    layer = random_layer(scheme, 96, 192, seed=seed, bias=bias)
    assert same(V2.unpack(V2.pack(layer), scheme), layer)
    layer.zero_points.clamp_(min=1)
    assert same(V1.unpack(V1.pack(layer), scheme), layer)


@pytest.mark.parametrize(
    ("bits", "v1_word", "v2_word"),
    [
        (2, 0x55555555, 0xAAAAAAAA),
        (3, 0xDB6DB6DB, 0x24924924),
        (4, 0x77777777, 0x88888888),
        (8, 0x7F7F7F7F, 0x80808080),
    ],
)
def test_symmetric_zero_words(bits: Bits, v1_word: int, v2_word: int) -> None:
    layer = random_layer(QuantScheme(bits=bits, symmetric=True))
    assert int(V1.pack(layer)["qzeros"][0, 0]) & 0xFFFFFFFF == v1_word
    assert int(V2.pack(layer)["qzeros"][0, 0]) & 0xFFFFFFFF == v2_word


def test_documented_words() -> None:
    layer = random_layer(QuantScheme(group_size=16), 32, 32)
    layer.codes[:] = torch.arange(32) % 16
    layer.zero_points[:] = torch.tensor([8, 3], dtype=torch.uint8)
    tensors = V1.pack(layer)
    column = [int(word) & 0xFFFFFFFF for word in tensors["qweight"][:, 0]]
    assert column == [0x76543210, 0xFEDCBA98, 0x76543210, 0xFEDCBA98]
    rows = [int(word) & 0xFFFFFFFF for word in tensors["qzeros"][:, 0]]
    assert rows == [0x77777777, 0x22222222]


def test_a12_documented_shapes() -> None:
    layer = random_layer(QuantScheme(bits=3, group_size=64))
    assert {name: (tuple(t.shape), t.dtype) for name, t in V2.pack(layer).items()} == {
        "qweight": ((12, 64), torch.int32),
        "qzeros": ((2, 6), torch.int32),
        "scales": ((2, 64), torch.float16),
        "g_idx": ((128,), torch.int32),
    }


def test_a04_v1_refuses_zero_point_0_and_v2_keeps_all_16() -> None:
    layer = random_layer(QuantScheme(group_size=64))
    layer.zero_points[:] = (torch.arange(128) % 16).reshape(64, 2)
    with pytest.raises(UsageError, match="gptq_v2"):
        V1.pack(layer)
    with pytest.raises(UsageError, match="gptq_v2 or awq"):
        V1.check(layer.scheme)
    assert same(V2.unpack(V2.pack(layer), layer.scheme), layer)


def test_v1_reader_masks_per_code_without_carry() -> None:
    scheme = QuantScheme(group_size=64)
    tensors = V2.pack(random_layer(scheme, 32, 64))
    tensors["qzeros"].fill_(0xE60FE72F - (1 << 32))  # the documented word, signed
    zeros = V1.unpack(tensors, scheme).zero_points
    assert zeros[:8, 0].tolist() == [0, 3, 8, 15, 0, 1, 7, 15]


@pytest.mark.parametrize("bits", BITS)
def test_symmetric_words_win_over_a_wrong_label(bits: Bits) -> None:
    layer = random_layer(QuantScheme(bits=bits, group_size=64, symmetric=True))
    assert same(V1.unpack(V2.pack(layer), layer.scheme), layer)
    assert same(V2.unpack(V1.pack(layer), layer.scheme), layer)


def test_sym_that_the_words_contradict_is_read_as_asymmetric() -> None:
    layer = random_layer(QuantScheme(group_size=64), min_zero=1)
    loaded = V1.unpack(V1.pack(layer), replace(layer.scheme, symmetric=True))
    assert same(loaded, layer)
    assert not loaded.scheme.symmetric


def test_codes_convert_between_awq_and_gptq_v2_bit_exactly() -> None:
    layer = random_layer(QuantScheme(group_size=32))
    there = V2.unpack(V2.pack(AWQ.unpack(AWQ.pack(layer), layer.scheme)), layer.scheme)
    back = AWQ.unpack(AWQ.pack(there), layer.scheme)
    assert same(back, layer)
    assert torch.equal(back.dequantize(), layer.dequantize())


def test_a07_all_zero_g_idx_without_act_order_is_sequential() -> None:
    layer = random_layer(QuantScheme(group_size=32))
    tensors = V2.pack(layer)
    tensors["g_idx"].zero_()
    assert same(V2.unpack(tensors, layer.scheme), layer)
    del tensors["g_idx"]
    assert same(V2.unpack(tensors, layer.scheme), layer)


@pytest.mark.parametrize("value", [-1, 4, 2**31 - 1])
def test_a07_g_idx_outside_the_groups_is_refused(value: int) -> None:
    layer = random_layer(QuantScheme(group_size=32))
    tensors = V2.pack(layer)
    tensors["g_idx"][7] = value
    with pytest.raises(FormatError, match=re.escape("outside 0 … 3")):
        V2.unpack(tensors, layer.scheme)


@pytest.mark.parametrize("missing", [True, False])
def test_act_order_needs_its_g_idx(missing: bool) -> None:
    layer = random_layer(QuantScheme(group_size=32, act_order=True))
    tensors = V2.pack(layer)
    tensors["g_idx"].zero_()
    if missing:
        del tensors["g_idx"]
    with pytest.raises(FormatError, match="desc_act"):
        V2.unpack(tensors, layer.scheme)


def test_short_last_group_is_read() -> None:
    """AutoGPTQ writes ceil(in / g) rows; here 96 inputs in groups of 64."""
    scheme = QuantScheme(group_size=64)
    full = random_layer(scheme, 32, 128)
    tensors = V2.pack(full)
    tensors["qweight"] = tensors["qweight"][:12]
    tensors["g_idx"] = tensors["g_idx"][:96]
    weight = V2.unpack(tensors, scheme).dequantize()
    assert torch.equal(weight, full.dequantize()[:, :96])
    del tensors["g_idx"]
    assert torch.equal(V2.unpack(tensors, scheme).dequantize(), weight)


def test_shapes_that_the_readers_would_truncate_are_refused() -> None:
    for out_features, in_features in ((40, 64), (64, 48)):
        with pytest.raises(UsageError, match="multiple of 32"):
            V2.check_shape(QuantScheme(group_size=16), out_features, in_features)


@pytest.mark.parametrize("scheme", [QuantScheme(symmetric=True), QuantScheme(act_order=True)])
def test_config_round_trip(scheme: QuantScheme) -> None:
    config = V2.quantization_config({"m": scheme}, ["lm_head"])
    assert V2.parse_config(config).default == scheme
    assert config["checkpoint_format"] == "gptq_v2"
    assert config["desc_act"] is scheme.act_order
    assert "dynamic" not in config


@pytest.mark.parametrize("name", ["gptq", "gptq_v2"])
def test_transformers_parses_the_config(name: str) -> None:
    from transformers import GPTQConfig

    scheme = QuantScheme(bits=3, group_size=32, symmetric=True, act_order=True)
    config = WEIGHT_FORMATS.get(name).quantization_config({"m": scheme}, [])
    parsed = GPTQConfig.from_dict(config)
    assert (parsed.bits, parsed.group_size, parsed.sym, parsed.desc_act) == (3, 32, True, True)
    assert parsed.to_dict()["checkpoint_format"] == name


def test_layers_left_dense_become_skip_rules() -> None:
    config = V1.quantization_config(
        {"m": QuantScheme(symmetric=True)}, ["model.layers.0.mlp.up_proj"]
    )
    (rule,) = config["dynamic"]
    assert rule.startswith("-:")
    assert re.match(rule[2:], "model.layers.0.mlp.up_proj")
    assert not re.match(rule[2:], "model.layers.0xmlp.up_proj")
    V1.parse_config(config)


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint_format": "gptq_p"},
        {"checkpoint_format": "marlin"},
        {"is_marlin_format": True},
        {"pack_dtype": "int64"},
        {"lm_head": True},
        {"bits": 5},
        {"bits": None},
        {"group_size": 3},
        {"sym": "true"},
        {"desc_act": 1},
        {"dynamic": {"+:.*down_proj": {"pack_dtype": "int64"}}},
        {"dynamic": {"+:(": {"bits": 8}}},
        {"dynamic": [1]},
    ],
)
def test_config_that_cannot_be_honoured_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as info:
        V1.parse_config(CONFIG | change)
    assert next(iter(change)) in str(info.value)
    assert "\n" not in str(info.value)


def test_config_harmless_keys() -> None:
    more = {"dynamic": {"-:.*gate": {}, "+:.*": {"bits": 4}}, "meta": {"quantizer": ["x"]}}
    assert V1.parse_config(CONFIG | more).default == QuantScheme(group_size=64, symmetric=True)
