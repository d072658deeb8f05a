"""Opening checkpoints: the fixtures that third-party readers loaded, and broken copies of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from formats.layer_samples import CHECKPOINTS, Q_PROJ, copy_checkpoint
from qdeploy.errors import FormatError, QdeployError
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.inspect import inspect_artifact
from qdeploy.quantization.scheme import QuantizedLinear

PACKED = ("awq", "gptq", "gptq_v2", "gptq_act")
Tensors = dict[str, Tensor]


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for module in checkpoint.packed:
        checkpoint.linear(module)


def fault(read: Callable[[], object]) -> str | None:
    """The message of the QdeployError that reading raises; None when it reads."""
    try:
        read()
    except QdeployError as error:
        return str(error)
    return None


def refused(path: Path, *named: str) -> None:
    """Opening, or reading every layer, is one line that names each of `named`."""
    with pytest.raises(FormatError) as info:
        read_all(path)
    message = str(info.value)
    assert "\n" not in message
    assert all(name in message for name in (str(path), *named)), message


@pytest.mark.parametrize("name", PACKED)
def test_fixture_dequantizes_near_the_dense_model(name: str) -> None:
    checkpoint, dense = open_checkpoint(CHECKPOINTS / name), open_checkpoint(CHECKPOINTS / "dense")
    assert len(checkpoint.packed) == 14
    for module in checkpoint.packed:
        linear = checkpoint.linear(module)
        assert isinstance(linear, QuantizedLinear)
        weight, scales = dense.weight(module), linear.scales.float()
        assert linear.dequantize().shape == weight.shape
        # Half a step of rounding; a zero point rounded to a whole step can cost another half.
        assert (checkpoint.weight(module) - weight).abs().max() <= scales.max() * 1.01


def test_formats_of_equal_codes_dequantize_alike() -> None:
    awq, v1, v2 = (open_checkpoint(CHECKPOINTS / name) for name in ("awq", "gptq", "gptq_v2"))
    for module in awq.packed:
        assert torch.equal(awq.weight(module), v2.weight(module))
        assert torch.equal(v1.weight(module), v2.weight(module))


def test_fixture_schemes_and_scale_dtype() -> None:
    for name in PACKED:
        checkpoint = open_checkpoint(CHECKPOINTS / name)
        (scheme,) = set(checkpoint.schemes.values())
        assert (scheme.bits, scheme.group_size) == (4, 64)
        linear = checkpoint.linear(Q_PROJ)
        assert isinstance(linear, QuantizedLinear)
        assert linear.scales.dtype == torch.float16
        assert (linear.g_idx is not None) == (name == "gptq_act")
    dense = open_checkpoint(CHECKPOINTS / "dense")
    assert (dense.format, dense.scheme_name, dense.packed) == (None, None, {})
    assert isinstance(dense.linear(Q_PROJ), Tensor)
    assert dense.has("lm_head.weight")


@pytest.mark.parametrize("name", PACKED)
def test_a01_missing_quant_method(name: str, tmp_path: Path) -> None:
    def drop(config: dict[str, Any]) -> None:
        del config["quantization_config"]["quant_method"]

    path = copy_checkpoint(name, tmp_path / "c", config=drop)
    refused(path, "'quant_method'", "config.json", "awq, gptq")


def test_unknown_quant_method(tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["quant_method"] = "bitsandbytes"

    refused(copy_checkpoint("awq", tmp_path / "c", config=change), "'bitsandbytes'", "awq, gptq")


@pytest.mark.parametrize("name", PACKED)
def test_a02_packed_tensors_without_config(name: str, tmp_path: Path) -> None:
    path = copy_checkpoint(name, tmp_path / "c", config=lambda c: c.pop("quantization_config"))
    refused(path, "packed tensors found", "no quantization config")


@pytest.mark.parametrize(("name", "file"), [("gptq", "quantize_config"), ("awq", "quant_config")])
def test_a11_legacy_config_file(name: str, file: str, tmp_path: Path) -> None:
    moved: dict[str, Any] = {}
    path = copy_checkpoint(
        name, tmp_path / "c", config=lambda c: moved.update(c.pop("quantization_config"))
    )
    del moved["quant_method"]  # what the file is called says it
    (path / f"{file}.json").write_text(json.dumps(moved))
    legacy, modern = open_checkpoint(path), open_checkpoint(CHECKPOINTS / name)
    assert (legacy.format, legacy.schemes) == (modern.format, modern.schemes)
    assert torch.equal(legacy.weight(Q_PROJ), modern.weight(Q_PROJ))


def test_a11_config_json_wins_over_a_legacy_file(tmp_path: Path) -> None:
    path = copy_checkpoint("gptq", tmp_path / "c")
    (path / "quantize_config.json").write_text('{"bits": 8, "group_size": 32}')
    (scheme,) = set(open_checkpoint(path).schemes.values())
    assert (scheme.bits, scheme.group_size) == (4, 64)


def test_a03_mixed_layers_load(tmp_path: Path) -> None:
    dense = open_checkpoint(CHECKPOINTS / "dense")

    def undo(tensors: Tensors) -> None:
        for name in ("qweight", "qzeros", "scales"):
            del tensors[f"{Q_PROJ}.{name}"]
        tensors[f"{Q_PROJ}.weight"] = dense.tensor(f"{Q_PROJ}.weight")

    checkpoint = open_checkpoint(copy_checkpoint("awq", tmp_path / "c", tensors=undo))
    assert torch.equal(checkpoint.weight(Q_PROJ), dense.weight(Q_PROJ))
    assert isinstance(checkpoint.linear(Q_PROJ.replace("q_proj", "k_proj")), QuantizedLinear)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("tensor", ["qweight", "qzeros", "scales"])
def test_missing_tensor_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    path = copy_checkpoint(name, tmp_path / "c", tensors=lambda t: t.pop(f"{Q_PROJ}.{tensor}"))
    refused(path, f"{Q_PROJ}.{tensor}", "missing")


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_scale_is_named(name: str, value: float, tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.scales"][1, 3] = value

    path = copy_checkpoint(name, tmp_path / "c", tensors=spoil)
    refused(path, Q_PROJ, "NaN or infinity")
    assert any(Q_PROJ in finding for finding in inspect_artifact(path).findings)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("group_size", [32, 128, 48, -1])
def test_group_size_of_another_model_is_refused(name: str, group_size: int, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["group_size"] = group_size

    path = copy_checkpoint(name, tmp_path / "c", config=change)
    with pytest.raises(FormatError, match=r"qzeros has shape|does not divide"):
        open_checkpoint(path)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_bits_of_another_model_are_refused(bits: int, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["bits"] = bits

    with pytest.raises(FormatError):
        open_checkpoint(copy_checkpoint("gptq", tmp_path / "c", config=change))


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", 64), ("intermediate_size", 512), ("vocab_size", 257)],
)
@pytest.mark.parametrize("name", ["awq", "dense"])
def test_config_of_another_size_is_refused(name: str, key: str, value: int, tmp_path: Path) -> None:
    path = copy_checkpoint(name, tmp_path / "c", config=lambda c: c.update({key: value}))
    refused(path, key, str(value))


def test_missing_decoder_layer_is_refused(tmp_path: Path) -> None:
    path = copy_checkpoint("awq", tmp_path / "c", config=lambda c: c.update(num_hidden_layers=3))
    refused(path, "decoder layer 2 of 3")


@pytest.mark.parametrize("extra", ["weight", "pre_quant_scale", "weight_scale_2"])
def test_tensor_that_would_be_ignored_is_refused(extra: str, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.{extra}"] = torch.ones(128, 128)

    refused(copy_checkpoint("awq", tmp_path / "c", tensors=add), f"{Q_PROJ}.{extra}")


def test_config_without_packed_tensors(tmp_path: Path) -> None:
    def claim(config: dict[str, Any]) -> None:
        config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 64}

    refused(copy_checkpoint("dense", tmp_path / "c", config=claim), "no tensor is packed")


def test_missing_linear_is_named() -> None:
    with pytest.raises(FormatError, match=r"model\.layers\.9\.mlp\.up_proj"):
        open_checkpoint(CHECKPOINTS / "awq").linear("model.layers.9.mlp.up_proj")


def test_g_idx_out_of_range_names_the_layer(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.g_idx"][0] = 2

    refused(copy_checkpoint("gptq_act", tmp_path / "c", tensors=spoil), Q_PROJ, "g_idx")


def _mutations(data: bytes) -> dict[str, Callable[[int], bytes]]:
    return {
        "cut": lambda at: data[: at % len(data)],
        "flip": lambda at: data[: (n := at % 4000)] + bytes([data[n] ^ 255]) + data[n + 1 :],
        "grow": lambda at: data + bytes(at % 64 + 1),
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(kind=st.sampled_from(["cut", "flip", "grow"]), at=st.integers(0, 2**20))
def test_damaged_file_is_an_error_or_equal_names(kind: str, at: int, tmp_path: Path) -> None:
    """Any damage of the header is our one-line error, never another exception."""
    path = tmp_path / "c"
    if not path.exists():
        copy_checkpoint("gptq", path)
    original = (CHECKPOINTS / "gptq" / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(_mutations(original)[kind](at))
    message = fault(lambda: read_all(path))
    if message is None:
        assert kind == "flip"  # inside a name of a tensor that isn't read, or of metadata
    else:
        assert "\n" not in message


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(
    key=st.sampled_from(["bits", "group_size", "desc_act", "sym", "checkpoint_format", "dynamic"]),
    value=st.none()
    | st.booleans()
    | st.integers(-9, 300)
    | st.text(max_size=4)
    | st.lists(st.none()),
)
def test_any_config_value_is_read_or_refused(key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "c"
    if not path.exists():
        copy_checkpoint("gptq_v2", path)
    config = json.loads((CHECKPOINTS / "gptq_v2" / "config.json").read_text())
    config["quantization_config"][key] = value
    (path / "config.json").write_text(json.dumps(config))
    message = fault(lambda: open_checkpoint(path).linear(Q_PROJ))
    assert message is None or "\n" not in message
