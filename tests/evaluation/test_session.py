"""What `eval` scores is what `serve` computes (P1), against the right reference and text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qdeploy.errors import UsageError
from qdeploy.evaluation.evaluate import evaluate
from qdeploy.evaluation.gate import parse_gate
from qdeploy.evaluation.session import gate_for, quick_evaluation, session
from qdeploy.evaluation.text import EvalText, load_text
from qdeploy.formats.manifest import read_manifest
from qdeploy.pipeline import quantize_checkpoint
from qdeploy.progress import Silent
from qdeploy.recipes import parse_recipe
from qdeploy.runtime.llm import LLM, resolve_kv_config
from qdeploy.runtime.sampler import token_logprob
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.tokenizer import Tokenizer
from tiny_models import tiny_checkpoint

RECIPE = {
    "method": "rtn",
    "group_size": 32,
    "kv_cache": {"dtype": "int4", "block_size": 16},
}


def quantized(base: Path, out: Path) -> Path:
    return quantize_checkpoint(str(base), out, parse_recipe(RECIPE, "test")).output


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def artifact(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(base, tmp_path_factory.mktemp("artifact") / "out")


def test_p1_served_logprobs_are_the_evaluated_ones_bit_for_bit(artifact: Path) -> None:
    """Decoded token by token, beside another request, or scored as one prompt: equal."""
    llm = LLM(artifact, max_model_len=128)
    prompts = [list(range(1, 40)), list(range(100, 60, -1))]
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=0, ignore_eos=True)
    for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True):
        (sample,) = result.outputs
        tokens = [*prompt, *sample.token_ids]
        rows: list[torch.Tensor] = []
        llm.engine.score(tokens, lambda _, logits, rows=rows: rows.append(logits))
        scored = torch.cat(rows)[len(prompt) - 1 : -1].numpy()
        expected = [
            token_logprob(row, token, 0).logprob
            for row, token in zip(scored, sample.token_ids, strict=True)
        ]
        assert sample.logprobs is not None
        assert [item.logprob for item in sample.logprobs] == expected


def test_p1_metrics_come_from_packed_weights_and_quantized_kv(base: Path, artifact: Path) -> None:
    """Against itself an artifact costs nothing but its KV format."""
    text = EvalText(
        windows=[[7 * t % 250 for t in range(70)]],
        sha256="",
        source="test",
        ctx_len=70,
        stride=70,
        bos=False,
    )
    kv = resolve_kv_config(artifact, "auto")
    bf16, int4 = resolve_kv_config(artifact, "bf16"), kv
    gate = parse_gate("kl<9")
    same, cost = (
        r.metrics
        for r in evaluate(artifact, artifact, [bf16, int4], text, gate, backend="reference")
    )
    assert same["kl_mean"] == 0
    assert same["top1_agreement"] == 1
    assert cost["kl_mean"] > 0
    (weights,) = evaluate(artifact, base, [bf16], text, gate)
    assert weights.metrics["kl_mean"] > 0


def test_a_changed_base_model_is_refused(tmp_path: Path) -> None:
    base = tiny_checkpoint("llama", tmp_path / "model")
    artifact = quantized(base, tmp_path / "out")
    tiny_checkpoint("llama", base, seed=1)
    manifest = read_manifest(artifact)
    assert manifest is not None
    with pytest.raises(UsageError, match="isn't the model any more"):
        session(
            artifact,
            str(base),
            [resolve_kv_config(artifact, "auto")],
            gate_for(manifest, None),
            text=None,
            ctx_len=64,
            max_windows=1,
            progress=Silent(),
        )


def test_an_architecture_for_other_engines_is_quantized_and_not_measured(tmp_path: Path) -> None:
    base = tiny_checkpoint("granite", tmp_path / "model")
    progress = Silent()
    artifact = quantized(base, tmp_path / "out")
    assert quick_evaluation(artifact, parse_gate("kl<9"), None, progress) == []
    assert "GraniteForCausalLM" in progress.warnings[0]


@pytest.mark.parametrize("bos", [False, True])
def test_windows_leave_no_token_out(bos: bool, base: Path, tmp_path: Path) -> None:
    class Prefixed(Tokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            start = [self.bos_token_id or 0] if bos and add_special_tokens else []
            return start + super().encode(text, add_special_tokens=False)

    path = tmp_path / "text.txt"
    path.write_text("abcdefghij" * 10)
    tokenizer = Prefixed.load(base)
    text = load_text(path, tokenizer, ctx_len=8, max_windows=None)
    assert text.bos == bos
    assert all(len(window) == 8 for window in text.windows)
    read = [id for window in text.windows for id in window[int(bos) :]]
    assert read == tokenizer.encode(path.read_text(), False)[: len(read)]
    assert len(read) > 90
