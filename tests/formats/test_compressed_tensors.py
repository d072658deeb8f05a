"""compressed-tensors of integers: fixtures, round trips, older bytes, configs, broken files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from formats.layer_samples import (
    CHECKPOINTS,
    Q_PROJ,
    copy_checkpoint,
    random_fp8_layer,
    random_layer,
    same,
)
from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.packing import pack_bits
from qdeploy.formats.weight_format import WEIGHT_FORMATS
from qdeploy.quantization.scheme import Bits, QuantizedLinear, QuantScheme

CT = WEIGHT_FORMATS.get("compressed-tensors")
Tensors = dict[str, Tensor]


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    rows=st.integers(1, 40),
    groups=st.tuples(st.sampled_from([8, 24, 32, 40]), st.integers(1, 4)),
    symmetric=st.booleans(),
    dynamic=st.booleans(),
    bias=st.booleans(),
)
def test_a04_round_trip(
    bits: int, rows: int, groups: tuple[int, int], symmetric: bool, dynamic: bool, bias: bool
) -> None:
    """Also of zero points whose rows don't fill their words, and columns that don't."""
    scheme = QuantScheme(
        bits=cast(Bits, bits),
        group_size=groups[0],
        symmetric=symmetric,
        activations="dynamic" if dynamic else None,
    )
    layer = random_layer(scheme, rows, groups[0] * groups[1], bias=bias)
    assert same(CT.unpack(CT.pack(layer), scheme), layer)


@pytest.mark.parametrize("name", sorted(WEIGHT_FORMATS))
def test_a03_scales_that_make_a_weight_infinite_are_refused(name: str) -> None:
    """Finite themselves, but not times a code."""
    if name == "fp8":
        layer = random_fp8_layer(128, 128, block_rows=128, group_size=128)
    else:
        layer = random_layer(QuantScheme(symmetric=name == "gptq"))
    fmt = WEIGHT_FORMATS.get(name)
    tensors = fmt.pack(layer)
    scales = next(n for n in tensors if "scale" in n)
    tensors[scales] = tensors[scales].float()
    tensors[scales][0, 0] = 1e38
    with pytest.raises(FormatError, match="weight infinite"):
        fmt.unpack(tensors, layer.scheme)


def test_a12_documented_shapes_and_words() -> None:
    """formats.md §1 and §4."""
    layer = random_layer(QuantScheme(group_size=128), 256, 256)
    tensors = CT.pack(layer)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "weight_packed": ((256, 32), torch.int32),
        "weight_scale": ((256, 2), torch.float16),
        "weight_shape": ((2,), torch.int64),
        "weight_zero_point": ((32, 2), torch.int32),
    }
    layer.codes[0, :16] = torch.arange(16, dtype=torch.uint8)
    layer.zero_points[:16, 0] = torch.arange(16, dtype=torch.uint8)
    tensors = CT.pack(layer)
    words = [int(word) & 0xFFFFFFFF for word in tensors["weight_packed"][0, :2]]
    zeros = [int(word) & 0xFFFFFFFF for word in tensors["weight_zero_point"][:2, 0]]
    assert words == zeros == [0x76543210, 0xFEDCBA98]
    eight = random_layer(QuantScheme(bits=8, group_size=-1, activations="dynamic"), 1, 8)
    eight.codes[0, :4] = torch.tensor([0, 127, 128, 255], dtype=torch.uint8)
    stored = CT.pack(eight)
    assert stored["weight"][0, :4].tolist() == [-128, -1, 0, 127]
    assert {name: stored[name].dtype for name in ("weight", "weight_zero_point")} == {
        "weight": torch.int8,
        "weight_zero_point": torch.int8,
    }


def test_fixtures_of_equal_codes_dequantize_alike() -> None:
    awq, ct = (open_checkpoint(CHECKPOINTS / name) for name in ("awq", "ct_asym"))
    assert ct.schemes == awq.schemes
    assert len(ct.packed) == 14
    for module in ct.packed:
        assert torch.equal(ct.weight(module), awq.weight(module))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("ct_sym", "W4A16"), ("ct_asym", "W4A16_ASYM"), ("ct_int8", "W8A8")],
)
def test_fixtures_are_near_the_dense_model(name: str, scheme: str) -> None:
    checkpoint, dense = open_checkpoint(CHECKPOINTS / name), open_checkpoint(CHECKPOINTS / "dense")
    assert checkpoint.scheme_name == scheme
    for module in checkpoint.packed:
        linear = checkpoint.linear(module)
        assert isinstance(linear, QuantizedLinear)
        error = (checkpoint.weight(module) - dense.weight(module)).abs().max()
        assert error <= linear.scales.float().max() * 1.01


@pytest.mark.parametrize("name", ["ct_sym", "ct_asym", "ct_int8"])
def test_what_is_written_again_is_the_file(name: str) -> None:
    checkpoint = open_checkpoint(CHECKPOINTS / name)
    for module in checkpoint.packed:
        linear = checkpoint.linear(module)
        assert isinstance(linear, QuantizedLinear)
        for part, tensor in CT.pack(linear).items():
            stored = checkpoint.tensor(f"{module}.{part}")
            assert torch.equal(stored, tensor)
            assert stored.dtype == tensor.dtype


def test_old_words_of_three_bits() -> None:
    """Until 2025 ten codes a word, two bits unused."""
    scheme = QuantScheme(bits=3, group_size=32, symmetric=True)
    layer = random_layer(scheme, 8, 96)
    tensors = CT.pack(layer)
    padded = torch.nn.functional.pad(layer.codes, (0, 4)).view(8, 10, 10).int()
    words = sum((padded[..., i] << 3 * i for i in range(10)), torch.zeros(8, 10, dtype=torch.int32))
    assert same(CT.unpack(tensors | {"weight_packed": words}, scheme), layer)


def test_group_index_of_older_versions() -> None:
    scheme = QuantScheme(group_size=32, symmetric=True, act_order=True)
    layer = random_layer(scheme, 8, 96)
    plain = QuantScheme(group_size=32, symmetric=True)
    tensors = CT.pack(random_layer(plain, 8, 96))
    tensors["weight_packed"] = pack_bits(layer.codes, 4)
    tensors["weight_scale"] = layer.scales
    assert layer.g_idx is not None
    assert same(CT.unpack(tensors | {"weight_g_idx": layer.g_idx}, scheme), layer)
    with pytest.raises(FormatError, match="g_idx"):
        CT.unpack(tensors | {"weight_g_idx": layer.g_idx + 9}, scheme)
    with pytest.raises(UsageError, match="--format gptq_v2"):
        CT.check(scheme)


def test_one_integer_scale_a_tensor() -> None:
    scheme = QuantScheme(bits=8, group_size=-1, symmetric=True, activations="static")
    weight = torch.randint(-128, 128, (6, 8), dtype=torch.int8)
    tensors = {"weight": weight, "weight_scale": torch.tensor([0.5]), "input_scale": torch.ones(1)}
    assert torch.equal(CT.unpack(tensors, scheme).dequantize(), weight.float() / 2)


def quantization(name: str) -> dict[str, Any]:
    data = json.loads((CHECKPOINTS / name / "config.json").read_text())
    found: dict[str, Any] = data["quantization_config"]
    return found


def test_configs_are_those_of_the_fixtures() -> None:
    """Ours say the format of each group, too, and every key of its arguments."""
    for name in ("ct_sym", "ct_asym", "ct_int8"):
        theirs = quantization(name)
        scheme = CT.parse_config(theirs).default
        assert scheme is not None
        ours = json.loads(json.dumps(CT.quantization_config({"m": scheme}, ["lm_head"])))
        (group,) = ours["config_groups"].values()
        assert group.pop("format") == ours["format"]
        if group["input_activations"]:
            assert group["input_activations"].pop("group_size") is None
        assert ours == theirs


WEIGHTS = ("config_groups", "group_0", "weights")
INPUTS = ("config_groups", "group_0", "input_activations")
Path_ = tuple[str, ...]
REFUSED: dict[str, tuple[Path_, Any, str]] = {
    "no groups": (("config_groups",), {}, "config_groups"),
    "groups of another type": (("config_groups",), [1], "config_groups"),
    "no weights": (WEIGHTS, None, "weights"),
    "bits": ((*WEIGHTS, "num_bits"), 5, "bits=5"),
    "bits of another type": ((*WEIGHTS, "num_bits"), "4", "num_bits"),
    "type": ((*WEIGHTS, "type"), "nf4", "type"),
    "floats of 4 bits": ((*WEIGHTS, "type"), "float", "4-bit floats"),
    "strategy": ((*WEIGHTS, "strategy"), "tensor_group", "strategy"),
    "blocks of integers": ((*WEIGHTS, "strategy"), "block", "blocks"),
    "dynamic weights": ((*WEIGHTS, "dynamic"), True, "dynamic"),
    "order": ((*WEIGHTS, "actorder"), "dynamic", "actorder"),
    "group size": ((*WEIGHTS, "group_size"), None, "group_size"),
    "symmetric": ((*WEIGHTS, "symmetric"), "yes", "symmetric"),
    "inputs of 4 bits": (INPUTS, {"num_bits": 4, "type": "int"}, "num_bits"),
    "local inputs": (INPUTS, {"num_bits": 8, "type": "int", "dynamic": "local"}, "dynamic"),
    "float inputs": (INPUTS, {"num_bits": 8, "type": "float", "dynamic": True}, "inputs of type"),
    "format": (("format",), "marlin-24", "format"),
    "other format": (("format",), "int-quantized", "format"),
    "group's format": (("config_groups", "group_0", "format"), "nvfp4-pack-quantized", "format"),
    "sparse": (("sparsity_config",), {"format": "sparse-bitmask"}, "sparsity_config"),
    "transform": (("transform_config",), {"u": 1}, "transform_config"),
    "status": (("quantization_status",), "calibration", "quantization_status"),
    "ignore": (("ignore",), "lm_head", "ignore"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_cannot_be_honoured_are_named(case: str) -> None:
    keys, value, named = REFUSED[case]
    config = quantization("ct_sym")
    at: Any = config
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    with pytest.raises(FormatError, match=named) as info:
        CT.parse_config(config)
    assert "\n" not in str(info.value)


def test_what_older_configs_leave_out() -> None:
    config = quantization("ct_sym")
    del config["config_groups"]["group_0"]["weights"]["strategy"]
    assert CT.parse_config(config).default == QuantScheme(group_size=64, symmetric=True)
    block = json.loads(json.dumps(quantization("ct_fp8")))
    weights = block["config_groups"]["group_0"]["weights"]
    weights |= {"strategy": "block", "block_structure": "128x64"}
    scheme = CT.parse_config(block).default
    assert scheme is not None
    assert scheme.block(1000, 1000) == (128, 64)
    weights["block_structure"] = "128xx"
    with pytest.raises(FormatError, match="block_structure"):
        CT.parse_config(block)


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(f"{Q_PROJ}.{name}")


def put(name: str, tensor: Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({f"{Q_PROJ}.{name}": tensor})


BROKEN: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "no words": ("ct_sym", drop("weight_packed"), "missing"),
    "no scales": ("ct_sym", drop("weight_scale"), "missing"),
    "no shape": ("ct_sym", drop("weight_shape"), "missing"),
    "no zero points": ("ct_asym", drop("weight_zero_point"), "weight_zero_point is missing"),
    "no integer scales": ("ct_int8", drop("weight"), "missing"),
    "shape": ("ct_sym", put("weight_shape", torch.tensor([128, 120])), "weight_shape says"),
    "shape of shapes": ("ct_sym", put("weight_shape", torch.tensor([128])), "weight_shape"),
    "words": ("ct_sym", put("weight_packed", torch.zeros(128, 15).int()), "words a row"),
    "no words at all": ("ct_sym", put("weight_packed", torch.zeros(0, 16).int()), "weight_packed"),
    "dtype": ("ct_sym", put("weight_packed", torch.zeros(128, 16).long()), "dtype int64"),
    "scales": ("ct_sym", put("weight_scale", torch.ones(127, 2)), "weight_scale"),
    "integer scales": ("ct_sym", put("weight_scale", torch.ones(128, 2).int()), "scales"),
    "NaN": ("ct_int8", put("weight_scale", torch.full((128, 1), float("nan"))), "NaN"),
    "zero points": ("ct_asym", put("weight_zero_point", torch.zeros(128, 2).int()), "zero_point"),
    "asymmetric": ("ct_sym", put("weight_zero_point", torch.zeros(16, 2).int()), "symmetric"),
    "unknown": ("ct_sym", put("weight_extra", torch.zeros(1)), "unexpected"),
    "bias": ("ct_sym", put("bias", torch.zeros(3)), "bias"),
    "a second copy": ("ct_sym", put("weight", torch.zeros(128, 128)), "unexpected"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_one_line(case: str, tmp_path: Path) -> None:
    name, edit, named = BROKEN[case]
    path = copy_checkpoint(name, tmp_path / "c", tensors=edit)
    with pytest.raises(FormatError) as info:
        open_checkpoint(path).linear(Q_PROJ)
    message = str(info.value)
    assert all(text in message for text in (str(path), Q_PROJ, named)), message
    assert "\n" not in message


def test_codes_of_more_bits_than_the_config_says(tmp_path: Path) -> None:
    """W4A8 is stored as int8; its codes must be within four bits."""

    def four(config: dict[str, Any]) -> None:
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["weights"]["num_bits"] = 4

    path = copy_checkpoint("ct_int8", tmp_path / "c", config=four)
    with pytest.raises(FormatError, match="4 bits can't"):
        open_checkpoint(path).linear(Q_PROJ)
    small = copy_checkpoint(
        "ct_int8",
        tmp_path / "d",
        config=four,
        tensors=lambda t: t.update({f"{Q_PROJ}.weight": t[f"{Q_PROJ}.weight"] // 16}),
    )
    linear = open_checkpoint(small).linear(Q_PROJ)
    assert isinstance(linear, QuantizedLinear)
    assert linear.scheme.name == "W4A8"
