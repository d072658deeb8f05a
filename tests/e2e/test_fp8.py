"""FP8 on the real models: quantize → eval → serve by the shipped recipes."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from conftest import GEMMA3, SMOLLM2
from qdeploy.evaluation.gate import parse_gate
from qdeploy.evaluation.records import write_records
from qdeploy.evaluation.session import enforce, session
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.pipeline import quantize_checkpoint
from qdeploy.progress import Silent
from qdeploy.recipes import load_recipe
from server.test_serve_command import started

CASES = {
    "smollm2-135m-fp8": (SMOLLM2, "FP8_DYNAMIC", "compressed-tensors", 256),
    "gemma3-270m-fp8-block": (GEMMA3, "FP8_BLOCK", "fp8", 128),
}


@pytest.mark.model
@pytest.mark.parametrize("name", CASES)
def test_p1_what_is_quantized_is_measured_and_served(name: str, tmp_path: Path) -> None:
    model, scheme, format, ctx_len = CASES[name]
    recipe, out = load_recipe(name), tmp_path / "out"
    assert recipe.model == model
    result = quantize_checkpoint(model, out, recipe)
    assert (result.scheme, result.format) == (scheme, format)
    assert result.bits_per_weight < 8.1
    assert recipe.gate is not None
    evaluations = session(
        out,
        model,
        [recipe.kv_cache.config()],
        parse_gate(recipe.gate),
        text=None,
        ctx_len=ctx_len,
        max_windows=1,
        progress=Silent(),
    )
    enforce(evaluations, out)
    assert (evaluations[0].backend, evaluations[0].act) == ("cpu", "bf16")
    assert evaluations[0].metrics["kl_mean"] < 0.03
    write_records(out, evaluations)
    assert open_checkpoint(out, verify_checksums=True).scheme_name == scheme
    with started(str(out), "--served-model-name", "m", "--max-model-len", "256") as (_, url):
        body = {"model": "m", "prompt": "The sea is", "max_tokens": 8, "temperature": 0}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] >= 1
