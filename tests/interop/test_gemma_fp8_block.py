"""FP8_BLOCK on a real model whose widths are multiples of 128: transformers gives our logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qdeploy.kv.config import KVCacheConfig
from qdeploy.pipeline import quantize_checkpoint
from qdeploy.recipes import parse_recipe
from qdeploy.runtime.executors import load_executor
from tables import run_chunks

pytestmark = [pytest.mark.interop, pytest.mark.model]


@pytest.mark.parametrize("format", ["fp8", "compressed-tensors"])
def test_gemma3_fp8_block(format: str, gemma3_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    recipe = {"method": "fp8", "scheme": "FP8_BLOCK", "format": format}
    folder = quantize_checkpoint(
        str(gemma3_folder), tmp_path / "out", parse_recipe(recipe, "test")
    ).output
    config = CompressedTensorsConfig(dequantize=True) if format != "fp8" else None
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **({"quantization_config": config} if config else {})
    ).eval()
    tokens = torch.randint(5, 5000, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits[0].float()
    executor = load_executor(folder, backend="reference", kv_config=KVCacheConfig())
    found = run_chunks(executor, tokens[0].tolist(), [24])
    kl = (expected.log_softmax(-1).exp() * (expected.log_softmax(-1) - found.log_softmax(-1))).sum(
        -1
    )
    assert kl.mean() < 1e-3
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9
