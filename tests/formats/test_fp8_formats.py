"""FP8 checkpoints: bytes, both directions, configs of other tools, and broken files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from formats.layer_samples import CHECKPOINTS, Q_PROJ, copy_checkpoint, random_fp8_layer, same
from qdeploy.errors import FormatError, QdeployError, UsageError
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.inspect import inspect_artifact
from qdeploy.formats.weight_format import WEIGHT_FORMATS, default_format
from qdeploy.quantization.scheme import QuantScheme, fp8_scheme

FP8, CT = WEIGHT_FORMATS.get("fp8"), WEIGHT_FORMATS.get("compressed-tensors")
BLOCK, ROW = fp8_scheme("FP8_BLOCK"), fp8_scheme("FP8_DYNAMIC")
CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
Tensors = dict[str, Tensor]


@settings(max_examples=30, deadline=None)
@given(blocks=st.tuples(st.integers(1, 3), st.integers(1, 3)), bias=st.booleans())
def test_round_trip_of_blocks(blocks: tuple[int, int], bias: bool) -> None:
    shape = (blocks[0] * 128, blocks[1] * 128)
    layer = random_fp8_layer(*shape, block_rows=128, group_size=128, bias=bias)
    for fmt in (FP8, CT):
        assert same(fmt.unpack(fmt.pack(layer), layer.scheme), layer)


@settings(max_examples=30, deadline=None)
@given(shape=st.tuples(st.integers(1, 70), st.integers(1, 70)), whole=st.booleans())
def test_round_trip_of_rows_and_tensors(shape: tuple[int, int], whole: bool) -> None:
    layer = random_fp8_layer(*shape, block_rows=-1 if whole else 1)
    assert same(CT.unpack(CT.pack(layer), layer.scheme), layer)


def test_a12_documented_names_shapes_and_bytes() -> None:
    block = FP8.pack(random_fp8_layer(256, 128, block_rows=128, group_size=128))
    assert {name: (tuple(t.shape), t.dtype) for name, t in block.items()} == {
        "weight": ((256, 128), torch.float8_e4m3fn),
        "weight_scale_inv": ((2, 1), torch.float32),
    }
    row = CT.pack(random_fp8_layer(64, 32))
    assert {name: tuple(t.shape) for name, t in row.items()} == {
        "weight": (64, 32),
        "weight_scale": (64, 1),
    }
    layer = random_fp8_layer(1, 4)
    layer.codes[:] = torch.tensor([[0x7E, 0x01, 0x80, 0xB8]], dtype=torch.uint8)
    layer.scales[:] = 2
    assert layer.dequantize().tolist() == [[896, 2 * 2.0**-9, 0, -2]]
    assert CT.pack(layer)["weight"].float().tolist() == [[448, 2.0**-9, 0, -1]]


def test_rows_of_a_block_that_differ_are_refused() -> None:
    layer = random_fp8_layer(128, 128, block_rows=128, group_size=128)
    layer.scales[5] *= 2
    for fmt in (FP8, CT):
        with pytest.raises(UsageError, match="scales of their own"):
            fmt.pack(layer)


def test_configs_are_those_of_the_tools() -> None:
    assert FP8.quantization_config({"m": BLOCK}, ["lm_head"]) == CONFIG
    assert FP8.parse_config(CONFIG).default == BLOCK
    theirs = json.loads((CHECKPOINTS / "ct_fp8" / "config.json").read_text())
    config = CT.quantization_config({"m": ROW}, ["lm_head"])
    theirs, ours = theirs["quantization_config"], json.loads(json.dumps(config))
    (group,) = ours["config_groups"].values()
    assert group.pop("format") == "float-quantized"
    assert group["input_activations"].pop("group_size") is None
    assert ours == theirs
    for scheme in (ROW, BLOCK, QuantScheme(group_size=64), QuantScheme(symmetric=True, bits=8)):
        assert CT.parse_config(CT.quantization_config({"m": scheme}, [])).default == scheme
    assert (default_format("fp8", ROW), default_format("fp8", BLOCK)) == (CT.name, "fp8")


def test_transformers_parses_the_fp8_config() -> None:
    from transformers import FineGrainedFP8Config

    parsed = FineGrainedFP8Config.from_dict(FP8.quantization_config({"m": BLOCK}, ["lm_head"]))
    assert tuple(parsed.weight_block_size) == (128, 128)
    assert parsed.modules_to_not_convert == ["lm_head"]


@pytest.mark.parametrize(
    "change",
    [
        {"fmt": "e5m2"},
        {"activation_scheme": "none"},
        {"weight_block_size": [128]},
        {"weight_block_size": [128, 0]},
        {"weight_block_size": "128x128"},
        {"weight_block_size": [128, True]},
        {"modules_to_not_convert": "lm_head"},
        {"ignored_layers": [1]},
        {"scale_fmt": "int8"},
    ],
)
def test_fp8_configs_that_cannot_be_honoured_are_named(change: dict[str, object]) -> None:
    with pytest.raises(FormatError, match=next(iter(change))) as info:
        FP8.parse_config(CONFIG | change)
    assert "\n" not in str(info.value)


def scales_of(tensors: Tensors, suffix: str) -> list[str]:
    return [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]


def per_tensor(name: str, shape: tuple[int, ...]) -> Callable[[Tensors], None]:
    """The block fixture with one scale a tensor, under a tool's name and shape."""

    def edit(tensors: Tensors) -> None:
        for module in scales_of(tensors, ".weight_scale_inv"):
            grid = tensors.pop(f"{module}.weight_scale_inv")
            tensors[f"{module}.{name}"] = grid.flatten()[0].reshape(shape)
            tensors[f"{module}.input_scale"] = torch.ones(())

    return edit


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_a_tensor(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """AutoFP8's static checkpoints, and transformers' without blocks."""

    def static(config: dict[str, Any]) -> None:
        more = {"activation_scheme": "static", "weight_block_size": None, "ignored_layers": []}
        config["quantization_config"] |= more

    edit = per_tensor(name, shape)
    checkpoint = open_checkpoint(
        copy_checkpoint("fp8block", tmp_path / "c", tensors=edit, config=static)
    )
    assert checkpoint.scheme_name == "FP8"
    stored = open_checkpoint(CHECKPOINTS / "fp8block")
    weight = stored.tensor(f"{Q_PROJ}.weight").float()
    scale = stored.tensor(f"{Q_PROJ}.weight_scale_inv").flatten()[0]
    assert torch.equal(checkpoint.weight(Q_PROJ), weight * scale)
    assert inspect_artifact(checkpoint.path).findings == []


def test_scales_of_exponents_alone(tmp_path: Path) -> None:
    """DeepSeek's ue8m0: bytes are powers of two."""
    powers = {}

    def edit(tensors: Tensors) -> None:
        for module in scales_of(tensors, ".weight_scale_inv"):
            name = f"{module}.weight_scale_inv"
            exponent = tensors[name].log2().round()
            powers[module] = exponent.exp2()
            tensors[name] = (exponent + 127).to(torch.uint8)

    checkpoint = open_checkpoint(copy_checkpoint("fp8block", tmp_path / "c", tensors=edit))
    weight = checkpoint.tensor(f"{Q_PROJ}.weight").float()
    assert torch.equal(checkpoint.weight(Q_PROJ), weight * powers[Q_PROJ])


@pytest.mark.parametrize(("rows", "cols"), [(200, 300), (64, 576), (128, 4), (1, 129)])
def test_blocks_may_be_cut_off_in_a_foreign_file(rows: int, cols: int) -> None:
    grid = torch.rand(-(-rows // 128), -(-cols // 128)) + 0.5
    weight = torch.randn(rows, cols).to(torch.float8_e4m3fn)
    layer = FP8.unpack({"weight": weight, "weight_scale_inv": grid}, BLOCK)
    spread = grid[torch.arange(rows) // 128][:, torch.arange(cols) // 128]
    assert torch.equal(layer.dequantize(), weight.float() * spread)


def test_equal_codes_dequantize_alike_in_both_formats(tmp_path: Path) -> None:
    """The block fixture's tensors are compressed-tensors', under another name."""

    def rename(tensors: Tensors) -> None:
        for module in scales_of(tensors, ".weight_scale_inv"):
            tensors[f"{module}.weight_scale"] = tensors.pop(f"{module}.weight_scale_inv")

    def config(data: dict[str, Any]) -> None:
        data["quantization_config"] = CT.quantization_config({"m": BLOCK}, ["lm_head"])

    path = copy_checkpoint("fp8block", tmp_path / "c", tensors=rename, config=config)
    ours, theirs = open_checkpoint(path), open_checkpoint(CHECKPOINTS / "fp8block")
    assert set(ours.schemes.values()) == set(theirs.schemes.values()) == {BLOCK}
    for module in theirs.packed:
        assert torch.equal(ours.weight(module), theirs.weight(module))


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for module in checkpoint.packed:
        checkpoint.linear(module)


def refused(path: Path, *named: str) -> None:
    with pytest.raises(FormatError) as info:
        read_all(path)
    message = str(info.value)
    assert "\n" not in message
    assert all(name in message for name in (str(path), *named)), message


SCALE = {"fp8block": "weight_scale_inv", "ct_fp8": "weight_scale"}
WEIGHT = f"{Q_PROJ}.weight"


@pytest.mark.parametrize("name", SCALE)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(name: str, value: float, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.{SCALE[name]}"][0, 0] = value

    refused(copy_checkpoint(name, tmp_path / "c", tensors=edit), Q_PROJ, "NaN or infinity")


@pytest.mark.parametrize("name", SCALE)
def test_weights_that_are_nan(name: str, tmp_path: Path) -> None:
    for code in (0x7F, 0xFF):

        def edit(tensors: Tensors, code: int = code) -> None:
            tensors[WEIGHT].view(torch.uint8)[3, 4] = code

        refused(copy_checkpoint(name, tmp_path / f"{code}", tensors=edit), Q_PROJ, "NaN")


@pytest.mark.parametrize("name", SCALE)
@pytest.mark.parametrize("shape", [(2, 2), (3,), (0,), (1, 1, 1), (64, 3)])
def test_scales_of_another_shape(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.{SCALE[name]}"] = torch.ones(shape)

    refused(copy_checkpoint(name, tmp_path / "c", tensors=edit), Q_PROJ, SCALE[name], "shape")


@pytest.mark.parametrize("name", SCALE)
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8, torch.float16])
def test_weights_of_another_dtype(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[WEIGHT] = tensors[WEIGHT].float().to(dtype)

    refused(copy_checkpoint(name, tmp_path / "c", tensors=edit), Q_PROJ, "dtype")


def test_blocks_beyond_any_memory_are_one_block(tmp_path: Path) -> None:
    def huge(config: dict[str, Any]) -> None:
        config["quantization_config"]["weight_block_size"] = [2**40, 2**40]

    def single(tensors: Tensors) -> None:
        for module in scales_of(tensors, ".weight_scale_inv"):
            name = f"{module}.weight_scale_inv"
            tensors[name] = tensors[name][:1, :1]

    path = copy_checkpoint("fp8block", tmp_path / "c", tensors=single, config=huge)
    checkpoint = open_checkpoint(path)
    for module in checkpoint.packed:
        scale = checkpoint.tensor(f"{module}.weight_scale_inv")
        weight = checkpoint.tensor(f"{module}.weight").float()
        assert torch.equal(checkpoint.weight(module), weight * scale)


def test_scales_of_the_kv_cache_are_left_alone(tmp_path: Path) -> None:
    def scales(tensors: Tensors) -> None:
        for layer in range(2):
            for name in ("k_scale", "v_scale"):
                tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.full((1,), 0.5).half()

    def scheme(config: dict[str, Any]) -> None:
        kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
        config["quantization_config"]["kv_cache_scheme"] = kv | {"symmetric": True}

    path = copy_checkpoint("ct_fp8", tmp_path / "c", tensors=scales, config=scheme)
    checkpoint, plain = open_checkpoint(path), open_checkpoint(CHECKPOINTS / "ct_fp8")
    assert checkpoint.packed == plain.packed
    assert torch.equal(checkpoint.weight(Q_PROJ), plain.weight(Q_PROJ))


@pytest.mark.parametrize("name", SCALE)
def test_float8_without_its_scale_is_no_dense_weight(name: str, tmp_path: Path) -> None:
    path = copy_checkpoint(name, tmp_path / "c", tensors=lambda t: t.pop(f"{Q_PROJ}.{SCALE[name]}"))
    refused(path, WEIGHT, "no scale")


@pytest.mark.parametrize("name", SCALE)
def test_a_scale_without_its_weight(name: str, tmp_path: Path) -> None:
    path = copy_checkpoint(name, tmp_path / "c", tensors=lambda t: t.pop(WEIGHT))
    refused(path, WEIGHT, "missing")


@pytest.mark.parametrize("name", SCALE)
def test_a02_scales_without_a_config(name: str, tmp_path: Path) -> None:
    path = copy_checkpoint(name, tmp_path / "c", config=lambda c: c.pop("quantization_config"))
    refused(path, "packed tensors found", "no quantization config")


def test_float8_alone_without_a_config(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        for module in scales_of(tensors, ".weight_scale_inv"):
            del tensors[f"{module}.weight_scale_inv"]

    path = copy_checkpoint(
        "fp8block", tmp_path / "c", tensors=edit, config=lambda c: c.pop("quantization_config")
    )
    refused(path, "float8", "no scale")


def test_two_scales_are_one_too_many(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.weight_scale"] = tensors[f"{Q_PROJ}.weight_scale_inv"].clone()

    refused(copy_checkpoint("fp8block", tmp_path / "c", tensors=edit), Q_PROJ, "both are stored")


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_ignored_layers_are_dense(key: str, tmp_path: Path) -> None:
    """As the tensors show; a packed layer on the list is a contradiction."""
    dense = open_checkpoint(CHECKPOINTS / "dense")

    def undo(tensors: Tensors) -> None:
        del tensors[f"{Q_PROJ}.weight_scale_inv"]
        tensors[WEIGHT] = dense.tensor(WEIGHT)

    def listed(config: dict[str, Any]) -> None:
        config["quantization_config"][key] = ["lm_head", Q_PROJ]

    checkpoint = open_checkpoint(
        copy_checkpoint("fp8block", tmp_path / "c", tensors=undo, config=listed)
    )
    assert torch.equal(checkpoint.weight(Q_PROJ), dense.weight(Q_PROJ))
    assert Q_PROJ not in checkpoint.packed
    refused(copy_checkpoint("fp8block", tmp_path / "d", config=listed), Q_PROJ, "as dense")


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_changed_byte_is_read_or_refused(data: st.DataObject) -> None:
    """Of a small file: nothing but a QdeployError comes out."""
    tensors = FP8.pack(random_fp8_layer(128, 128, block_rows=128, group_size=128))
    name = data.draw(st.sampled_from(sorted(tensors)))
    raw = tensors[name].contiguous().view(torch.uint8).flatten()
    at = data.draw(st.integers(0, min(len(raw), 64) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(QdeployError):
        layer = FP8.unpack(tensors, BLOCK)
        assert bool(layer.dequantize().isfinite().all())
