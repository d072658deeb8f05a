"""Mixed precision by recipe: `overrides` reach the layers, the files and the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qdeploy.errors import UsageError
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.manifest import read_manifest
from qdeploy.kv.config import KVCacheConfig
from qdeploy.pipeline import QuantizeResult, quantize_checkpoint
from qdeploy.quantization.scheme import QuantizedLinear
from qdeploy.recipes import parse_recipe
from qdeploy.runtime.executors import load_executor
from tables import run_chunks
from tiny_models import tiny_checkpoint

DATA = {"samples": 6, "seqlen": 48}
TOKENS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(3)).tolist()
#: Parts of layers, and a whole one.
OVERRIDES = {
    "model.layers.0.*": {"scheme": "FP8_DYNAMIC"},
    "*.down_proj": {"bits": 8, "group_size": -1, "symmetric": True},
    r"re:.*\.v_proj$": {"scheme": "FP8_DYNAMIC"},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama") / "model")


def quantize(source: Path, out: Path, **recipe: Any) -> QuantizeResult:
    data = {"method": "rtn", "group_size": 32, "calibration": DATA} | recipe
    return quantize_checkpoint(str(source), out, parse_recipe(data, "test"))


def logits(folder: Path, backend: str) -> torch.Tensor:
    executor = load_executor(folder, backend=backend, kv_config=KVCacheConfig(), act="fp32")
    return run_chunks(executor, TOKENS, [40])


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "awq+gptq", "signround"])
def test_every_layer_gets_its_scheme_and_the_runtime_serves_it(
    method: str, llama: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"method": method}
    if method == "signround":
        options["iters"] = 4
    result = quantize(llama, tmp_path / "out", overrides=OVERRIDES, **options)
    plain = quantize(llama, tmp_path / "plain", format="compressed-tensors", **options)
    assert result.format == "compressed-tensors"
    assert result.scheme == "W4A16_ASYM + FP8_DYNAMIC + W8A16"
    checkpoint = open_checkpoint(tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    recorded = {layer.name: layer.scheme for layer in manifest.layers}
    for module in checkpoint.packed:
        linear = checkpoint.linear(module)
        assert isinstance(linear, QuantizedLinear)
        layer, last = module.split(".")[2], module.rpartition(".")[2]
        expected = "W8A16" if last == "down_proj" else "W4A16_ASYM"
        expected = "FP8_DYNAMIC" if layer == "0" or last == "v_proj" else expected
        assert linear.scheme.name == recorded[module] == expected
    dense, mixed = logits(llama, "reference"), logits(tmp_path / "out", "reference")
    # More bits lose less.
    assert (mixed - dense).square().mean() < (
        logits(plain.output, "reference") - dense
    ).square().mean()
    assert torch.allclose(logits(tmp_path / "out", "cpu"), mixed, atol=2e-3, rtol=1e-3)


def test_fp8_with_some_layers_in_integers(llama: Path, tmp_path: Path) -> None:
    overrides = {"*.o_proj": {"bits": 4, "group_size": 32, "symmetric": False}}
    result = quantize_checkpoint(
        str(llama), tmp_path / "out", parse_recipe({"method": "fp8", "overrides": overrides}, "t")
    )
    assert result.scheme == "FP8_DYNAMIC + W4A16_ASYM"


def test_a_killed_mixed_run_resumes_alike(llama: Path, tmp_path: Path) -> None:
    import qdeploy.calibration.layers as layers

    whole = quantize(llama, tmp_path / "whole", method="gptq", overrides=OVERRIDES)
    original, seen = layers.quantize_layer, []

    def killed(*args: Any) -> Any:
        seen.append(args)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return original(*args)

    layers.quantize_layer = killed
    try:
        with pytest.raises(KeyboardInterrupt):
            quantize(llama, tmp_path / "out", method="gptq", overrides=OVERRIDES)
    finally:
        layers.quantize_layer = original
    quantize(llama, tmp_path / "out", method="gptq", overrides=OVERRIDES)
    from qdeploy.formats.hf import open_folder

    digests = {open_folder(folder).weights_sha256() for folder in (whole.output, tmp_path / "out")}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({"overrides": {"*.qkv_proj": {"bits": 8}}}, "overrides pattern .* matches no linear"),
        ({"overrides": {"lm_head": {"bits": 8}}}, "matches only layers that stay dense"),
        ({"overrides": {"*.down_proj": {"group_size": 64}}}, "64 does not divide"),
        ({"overrides": {"*.down_proj": {"bits": 8}}, "format": "awq"}, "use --format compressed"),
        ({"overrides": {"*.down_proj": {"bits": 8}}, "format": "gptq_v2"}, "one scheme for all"),
        ({"overrides": {"*.down_proj": {}}}, "give either scheme"),
        ({"overrides": {"*.down_proj": {"bits": 8, "scheme": "FP8_BLOCK"}}}, "give either scheme"),
        ({"overrides": {"*.down_proj": {"bit": 8}}}, "bit"),
        ({"overrides": {"*": {"scheme": "FP8_BLOCK"}}}, "needs multiples of 128"),
        ({"overrides": {"*": {"bits": 8}}, "method": "none"}, "no effect on method none"),
    ],
)
def test_q19_overrides_that_cannot_be_honoured_are_named(
    recipe: dict[str, Any], expected: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=expected) as info:
        quantize(llama, tmp_path / "out", **recipe)
    assert "\n" not in str(info.value)
    assert list(tmp_path.iterdir()) == []
