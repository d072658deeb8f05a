"""The main job's figures on the real model (slow): methods beat rounding, KV formats cost little.

The bounds are those of the issue; benchmarks/quantization.py measures the figures themselves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import SMOLLM2
from qdeploy.evaluation.evaluate import Evaluation
from qdeploy.evaluation.gate import parse_gate
from qdeploy.evaluation.session import session
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.kv.config import KVCacheConfig
from qdeploy.pipeline import QuantizeResult, quantize_checkpoint
from qdeploy.progress import Silent
from qdeploy.recipes import load_recipe, parse_recipe

pytestmark = [pytest.mark.slow, pytest.mark.model]

CALIBRATION = {"samples": 16, "seqlen": 256}
BF16 = KVCacheConfig()


def measured(model: Path, policies: list[KVCacheConfig]) -> list[Evaluation]:
    """Two windows of 1,024 tokens of the held-out text, against the unquantized model."""
    return session(
        model,
        SMOLLM2,
        policies,
        parse_gate("kl<100"),
        text=None,
        ctx_len=1024,
        max_windows=2,
        stride=2048,
        progress=Silent(),
    )


def quantized(folder: Path, method: str, symmetric: bool) -> QuantizeResult:
    recipe = parse_recipe(
        {"method": method, "symmetric": symmetric, "group_size": 64, "calibration": CALIBRATION},
        "test",
    )
    return quantize_checkpoint(SMOLLM2, folder / f"{method}-{symmetric}", recipe)


@pytest.mark.parametrize(
    ("method", "symmetric"), [("awq", False), ("awq+gptq", False), ("gptq", True)]
)
def test_q20_method_beats_rounding_at_the_same_scheme(
    tmp_path: Path, method: str, symmetric: bool
) -> None:
    losses = {}
    for name in ("rtn", method):
        result = quantized(tmp_path, name, symmetric)
        assert 100e6 <= result.size_bytes <= 125e6
        losses[name] = measured(result.output, [BF16])[0].metrics["kl_mean"]
    assert losses[method] < 0.75 * losses["rtn"], losses
    assert losses[method] < 0.3, losses


def test_q20_signround_beats_awq(tmp_path: Path) -> None:
    """A tenth of the recipe's training; the figures are in docs/adr/0008."""
    recipe = load_recipe("smollm2-135m-signround").model_dump()
    recipe["calibration"] |= CALIBRATION
    losses = {}
    for method, iters in (("awq", None), ("signround", 30)):
        changed = parse_recipe(recipe | {"method": method, "iters": iters}, "test")
        result = quantize_checkpoint(SMOLLM2, tmp_path / method, changed)
        losses[method] = measured(result.output, [BF16])[0].metrics["kl_mean"]
    assert losses["signround"] < 0.9 * losses["awq"], losses


def test_kv_formats_cost_little_on_unquantized_weights(smollm2_folder: Path) -> None:
    policies = [KVCacheConfig(dtype=dtype) for dtype in ("int8", "k8v4", "int4")]
    int8, k8v4, int4 = (item.metrics["kl_mean"] for item in measured(smollm2_folder, policies))
    assert int8 < 0.0002
    assert int8 < k8v4 < int4 < 0.0025


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(quantized(tmp_path, "rtn", False).output)
    assert checkpoint.config["tie_word_embeddings"]
    assert checkpoint.has("model.embed_tokens.weight")
    assert not checkpoint.has("lm_head.weight")
