"""FP8 weights: rounding, scales, blocks, and what the recipe and the command make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

from qdeploy.cli import app
from qdeploy.errors import UsageError
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.quantization.fp8 import fp8_quantize
from qdeploy.quantization.numerics import e4m3_codes, e4m3_values
from qdeploy.quantization.scheme import QuantScheme, fp8_scheme
from qdeploy.recipes import load_recipe, parse_recipe
from tiny_models import tiny_checkpoint

SCHEMES = ("FP8_DYNAMIC", "FP8_BLOCK")


def e4m3(byte: int) -> float:
    """The value of a byte, by the format's definition."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


VALUES = torch.tensor([e4m3(byte) for byte in range(256) if byte % 128 != 127])


def test_every_float8_is_its_own_code() -> None:
    codes = torch.tensor([b for b in range(256) if b % 128 != 127], dtype=torch.uint8)
    assert torch.equal(e4m3_values(codes), VALUES)
    assert torch.equal(e4m3_codes(VALUES), codes)
    assert not e4m3_values(torch.tensor([0x7F, 0xFF], dtype=torch.uint8)).isfinite().any()


@settings(deadline=None)
@given(st.lists(st.floats(-600, 600, width=32), min_size=1, max_size=50))
def test_codes_are_the_nearest_ones(numbers: list[float]) -> None:
    x = torch.tensor(numbers)
    held = x.clamp(-448, 448)
    found = e4m3_values(e4m3_codes(x))
    nearest = (VALUES[None] - held[:, None]).abs().amin(1)
    assert torch.equal((found - held).abs(), nearest)


def test_what_is_beyond_the_largest_is_the_largest() -> None:
    x = torch.tensor([449.0, 1e9, float("inf"), -1e9])
    assert e4m3_values(e4m3_codes(x)).tolist() == [448, 448, 448, -448]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(SCHEMES),
    rows=st.integers(1, 300),
    cols=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_the_error_is_a_sixteenth_of_a_weight(
    name: str, rows: int, cols: int, dtype: torch.dtype, seed: int
) -> None:
    """Or, of small weights, half a step of the smallest float8."""
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    q = fp8_quantize(weight, fp8_scheme(name), scale_dtype=dtype)
    per = torch.arange(cols) // (cols if name == "FP8_DYNAMIC" else 128)
    scales = q.scales.float()[:, per]
    error = (q.dequantize() - weight).abs()
    assert (error <= (weight.abs() / 16).maximum(scales * 2.0**-10) * 1.001).all()
    assert q.scales.dtype == dtype
    assert int(q.codes.bitwise_and(127).max()) <= 126


def test_scales_are_of_rows_or_of_blocks() -> None:
    weight = torch.full((200, 300), 1.5)
    weight[:, -1] = torch.arange(200)
    weight[::2, 0], weight[100, :] = 0, 7
    rows = fp8_quantize(weight, fp8_scheme("FP8_DYNAMIC"))
    largest = weight.abs().amax(1, keepdim=True)
    assert ((rows.scales * 448 >= largest * 0.999) & (rows.scales * 224 < largest)).all()
    blocks = fp8_quantize(weight, fp8_scheme("FP8_BLOCK"))
    assert blocks.scales.shape == (200, 3)
    for r, c in ((0, 0), (0, 2), (1, 1)):
        block = weight[128 * r : 128 * (r + 1), 128 * c : 128 * (c + 1)]
        inside = blocks.scales[128 * r : 128 * (r + 1), c]
        assert inside.unique().numel() == 1
        assert 0.999 * block.max() / 448 <= inside[0] < block.max() / 224
    assert blocks.g_idx is not None
    assert blocks.g_idx.bincount().tolist() == [128, 128, 44]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_searched_scale_is_never_worse_than_the_largest_weights(name: str) -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    q = fp8_quantize(weight, fp8_scheme(name))
    rows, columns = q.scheme.block(256, 384)
    error = (q.dequantize() - weight).square().view(256 // rows, rows, -1, columns).sum((1, 3))
    plain = weight.abs().view(256 // rows, rows, -1, columns).amax((1, 3)) / 448
    spread = plain.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    rounded = e4m3_values(e4m3_codes(weight / spread)) * spread
    other = (rounded - weight).square().view(256 // rows, rows, -1, columns).sum((1, 3))
    assert (error <= other * 1.0001).all()
    assert error.sum() < 0.99 * other.sum()


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_zero_tiny_and_huge_weights(name: str, size: float) -> None:
    weight = torch.full((130, 256), size)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q = fp8_quantize(weight, fp8_scheme(name), scale_dtype=dtype)
        assert bool(q.scales.isfinite().all())
        assert bool((q.scales > 0).all())
        assert bool(q.dequantize().isfinite().all())
    q = fp8_quantize(weight, fp8_scheme(name))
    assert torch.allclose(q.dequantize(), weight, rtol=1 / 16, atol=0)


def test_names() -> None:
    assert [fp8_scheme(name).name for name in SCHEMES] == list(SCHEMES)
    for bits, more, name in ((8, {"activations": "dynamic"}, "W8A8"), (4, {}, "W4A16")):
        assert QuantScheme(bits=bits, symmetric=True, **more).name == name
    with pytest.raises(UsageError, match="bits=4"):
        QuantScheme(bits=4, number="e4m3")


def test_recipes_say_it_once() -> None:
    assert parse_recipe({"method": "fp8"}, "r").named_scheme() == fp8_scheme("FP8_DYNAMIC")
    for name, scheme in (("smollm2-135m-fp8", SCHEMES[0]), ("gemma3-270m-fp8-block", SCHEMES[1])):
        assert load_recipe(name).named_scheme().name == scheme
    for data, named in (
        ({"method": "awq", "scheme": "FP8_BLOCK"}, "needs method fp8, not awq"),
        ({"method": "fp8", "bits": 8}, "bits has no effect on method fp8"),
        ({"method": "fp8", "group_size": 64}, "group_size has no effect"),
        ({"method": "fp8", "scheme": "FP8_ROW"}, "scheme"),
    ):
        with pytest.raises(UsageError, match=named) as info:
            parse_recipe(data, "r")
        assert "\n" not in str(info.value)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("base") / "tiny", **sizes, **heads)


def command(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*map(str, args)])
    return result.exit_code, result.stdout, result.stderr


FORMATS = {"FP8_DYNAMIC": "compressed-tensors", "FP8_BLOCK": "fp8"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_command_writes_what_it_says(scheme: str, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--method", "fp8", "--scheme", scheme, "--eval", "none", "--json")
    code, printed, err = command("quantize", base, "-o", out, *options)
    assert code == 0, err
    data: dict[str, Any] = json.loads(printed)
    assert (data["scheme"], data["format"]) == (scheme, FORMATS[scheme])
    assert 8 < data["bits_per_weight"] < 8.3
    assert "engines such as vLLM also round activations" in err.replace("\n", " ")
    checkpoint, dense = open_checkpoint(out), open_checkpoint(base)
    assert checkpoint.manifest is not None
    assert checkpoint.manifest.recipe["scheme"] == scheme
    assert {layer.scheme for layer in checkpoint.manifest.layers} == {scheme}
    assert len(checkpoint.packed) == 21
    for module in checkpoint.packed:
        weight: Tensor = dense.weight(module)
        assert (checkpoint.weight(module) - weight).norm() < 0.04 * weight.norm()
    card = (out / "README.md").read_text()
    assert "8-bit floats (E4M3), one scale a" in card
    assert f"Activations: {scheme}" in card
    code, printed, _ = command("inspect", out)
    assert code == 0
    assert scheme in printed
    assert "activations" in printed


def test_resuming_gives_the_same_bits(base: Path, tmp_path: Path) -> None:
    """Codes, scales and all go through the resume store."""
    from qdeploy.calibration.resume import ResumeStore
    from qdeploy.progress import Silent
    from qdeploy.quantization.method import LayerOutcome

    q = fp8_quantize(torch.randn(256, 130), fp8_scheme("FP8_BLOCK"))
    store = ResumeStore(tmp_path / "out", {"a": "b"}, Silent(), enabled=True)
    store.save(0, LayerOutcome(linears={"mlp.up_proj": q}), None)
    found = store.load(0, {"mlp.up_proj": q.scheme})[0].linears["mlp.up_proj"]
    assert torch.equal(found.dequantize(), q.dequantize())


REFUSED = {
    "other kind": (("--method", "fp8", "--scheme", "W4A16"), "FP8_DYNAMIC"),
    "other method": (("--method", "rtn", "--scheme", "FP8_BLOCK"), "needs method fp8"),
    "bits": (("--method", "fp8", "--bits", "8"), "bits has no effect"),
    "group": (("--method", "fp8", "--group-size", "64"), "group_size has no effect"),
    "twice": (("--scheme", "W4A16", "--bits", "4"), "leave one of them out"),
    "unknown": (
        (
            "--scheme",
            "W5A16",
        ),
        "scheme",
    ),
    "awq": (("--method", "fp8", "--format", "awq"), "--format compressed-tensors"),
    "gptq": (("--method", "fp8", "--scheme", "FP8_BLOCK", "--format", "gptq"), "--format fp8"),
    "rows as blocks": (("--method", "fp8", "--format", "fp8"), "holds FP8_BLOCK"),
    "calibration": (("--method", "fp8", "--calib-samples", "8"), "never calibrates"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_one_line(case: str, base: Path, tmp_path: Path) -> None:
    options, named = REFUSED[case]
    code, _, err = command("quantize", base, "-o", tmp_path / "out", *options)
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert code == 2
    assert len(errors) == 1
    assert named in " ".join(err.split())


def test_blocks_that_do_not_fit_are_an_early_error(tmp_path: Path) -> None:
    """SmolLM2: 576 is four and a half blocks."""
    base = tiny_checkpoint("llama", tmp_path / "base")
    options = ("--method", "fp8", "--scheme", "FP8_BLOCK")
    code, _, err = command("quantize", base, "-o", tmp_path / "out", *options)
    text = " ".join(err.split())
    assert code == 2
    assert "model.layers.0.self_attn.q_proj: FP8_BLOCK needs multiples of 128 × 128" in text
    assert "--scheme FP8_DYNAMIC" in text
    assert not (tmp_path / "out").exists()


def test_integer_schemes_are_bits_and_symmetry(base: Path, tmp_path: Path) -> None:
    for scheme in ("W8A16", "W4A16_ASYM"):
        options = ("--method", "rtn", "--scheme", scheme, "--eval", "none", "--json")
        code, printed, err = command("quantize", base, "-o", tmp_path / scheme, *options)
        assert code == 0, err
        data = json.loads(printed)
        assert (data["scheme"], data["format"]) == (scheme, "compressed-tensors")


def test_a_recipe_of_integers_can_be_run_with_fp8(base: Path, tmp_path: Path) -> None:
    options = ("--recipe", "smollm2-135m-awq", "--method", "fp8", "--eval", "none", "--json")
    code, printed, err = command("quantize", base, "-o", tmp_path / "out", *options)
    assert code == 0, err
    assert json.loads(printed)["scheme"] == "FP8_DYNAMIC"
