"""compressed-tensors itself, and transformers with it: it reads what we write, we read its files.

Run with `make test-interop`, which installs the package; no other test needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cpu.quantized_models import WeightKind, quantized_checkpoint
from formats.layer_samples import random_fp8_layer, random_layer
from qdeploy.formats.weight_format import WEIGHT_FORMATS
from qdeploy.kv.config import KVCacheConfig
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme
from qdeploy.runtime.executors import load_executor
from tables import run_chunks

pytestmark = pytest.mark.interop
CT = WEIGHT_FORMATS.get("compressed-tensors")
LAYERS = {
    "W4A16": random_layer(QuantScheme(group_size=32, symmetric=True), 48, 96),
    "W4A16_ASYM": random_layer(QuantScheme(group_size=32), 48, 96),
    "W3A16": random_layer(QuantScheme(bits=3, group_size=32, symmetric=True), 48, 96),
    "W8A16": random_layer(QuantScheme(bits=8, group_size=96, symmetric=True), 48, 96),
    "W8A16 rows": random_layer(QuantScheme(bits=8, group_size=-1, symmetric=True), 48, 96),
    "W8A8": random_layer(
        QuantScheme(bits=8, group_size=-1, symmetric=True, activations="dynamic"), 48, 96
    ),
    "W8A8_ASYM": random_layer(QuantScheme(bits=8, group_size=-1, activations="dynamic"), 48, 96),
    "FP8_DYNAMIC": random_fp8_layer(48, 96),
    "FP8": random_fp8_layer(48, 96, block_rows=-1, activations="static"),
    "FP8_BLOCK": random_fp8_layer(256, 384, block_rows=128, group_size=128),
}


def theirs(scheme: QuantScheme) -> tuple[Any, Any]:
    """Their compressor and scheme, from the config that we write."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(CT.quantization_config({"m": scheme}, ["lm_head"]))
    (group,) = config.config_groups.values()
    return BaseCompressor.get_value_from_registry(config.format), group


def exact(layer: QuantizedLinear) -> QuantizedLinear:
    """With float32 scales: what is dequantized has the scales' dtype."""
    layer.scales = layer.scales.float()
    return layer


@pytest.mark.parametrize("name", LAYERS)
def test_it_decompresses_what_we_pack(name: str) -> None:
    layer = exact(LAYERS[name])
    compressor, scheme = theirs(layer.scheme)
    weight = compressor.decompress(CT.pack(layer), scheme)["weight"]
    assert torch.equal(weight.float(), layer.dequantize())


@pytest.mark.parametrize("name", LAYERS)
def test_we_unpack_what_it_compresses(name: str) -> None:
    layer = exact(LAYERS[name])
    compressor, scheme = theirs(layer.scheme)
    packed = CT.pack(layer)
    state = {
        "weight": layer.dequantize(),
        "weight_scale": packed["weight_scale"],
    }
    if not layer.scheme.symmetric:
        zeros = layer.zero_points.to(torch.int16) - layer.scheme.mid_code
        state["weight_zero_point"] = zeros.to(torch.int8)
    compressed = compressor.compress(state, scheme)
    assert {n: (t.dtype, t.shape) for n, t in compressed.items()} == {
        n: (t.dtype, t.shape) for n, t in packed.items()
    }
    for part, tensor in compressed.items():
        same = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        ours = packed[part].view(same.dtype) if tensor.dtype != same.dtype else packed[part]
        if name.startswith("FP8") and part == "weight":  # it has no negative zero
            same, ours = (torch.where(t == 0x80, 0, t) for t in (same, ours))
        assert torch.equal(same, ours), part
    assert torch.equal(CT.unpack(compressed, layer.scheme).dequantize(), layer.dequantize())


TOKENS = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(3))
#: Weights alone: activations in full precision, as ours are.
ARTIFACTS = {
    "pack-quantized": WeightKind(format="compressed-tensors", symmetric=True),
    "pack-quantized, asymmetric": WeightKind(format="compressed-tensors"),
    "float-quantized": WeightKind(
        format="compressed-tensors", bits=8, symmetric=True, block_rows=1, group=-1
    ),
    "fp8": WeightKind(format="fp8", bits=8, symmetric=True, block_rows=128, group=128),
}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.parametrize("name", ARTIFACTS)
def test_transformers_gives_our_logits(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder = quantized_checkpoint("llama", tmp_path, ARTIFACTS[name], **SIZES)
    options: dict[str, Any] = {"dtype": torch.float32}
    if name != "fp8":
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    with torch.no_grad():
        expected = model(TOKENS).logits[0].float()
    executor = load_executor(folder, backend="reference", kv_config=KVCacheConfig())
    found = run_chunks(executor, TOKENS[0].tolist(), [40])
    # What is dequantized in bfloat16 (fp8), or in the scales' float16, is rounded to it.
    tolerance = {"fp8": 2e-2, "float-quantized": 1e-4}.get(name, 5e-3)
    assert (found - expected).abs().max() < tolerance * expected.abs().max()
