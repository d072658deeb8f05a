"""Options, vocabularies, the model's own copy: what is refused, and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backends import BACKENDS
from cpu.quantized_models import KINDS, quantized_checkpoint
from qdeploy import LLM, SamplingParams
from qdeploy.cli import app
from qdeploy.errors import UsageError
from qdeploy.runtime.executors.cpu import CpuExecutor
from qdeploy.runtime.speculation.config import SpeculativeConfig
from qdeploy.runtime.speculation.draft_model import ModelDrafter
from tiny_models import tiny_checkpoint

PROMPT = list(b"the cat sat on the mat, the cat sat on the")
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "eagle"}, "choose one of none, ngram"),
        ({"method": "draft_model"}, "needs speculative_model"),
        ({"method": "ngram", "model": "x"}, "does nothing with speculative_method ngram"),
        ({"num_speculative_tokens": 3}, "does nothing without a speculative_method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "not within 1"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "not within 1"),
        ({"method": "ngram", "ngram_min": 0}, "1 ≤ ngram_min ≤ ngram_max"),
        ({"method": "ngram", "ngram_min": 4, "ngram_max": 3}, "1 ≤ ngram_min ≤ ngram_max"),
        ({"method": "ngram", "num_speculative_tokens": "3"}, "'3' must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": True}, "True must be a whole number"),
        ({"method": "ngram", "ngram_min": 1.5}, "1.5 must be a whole number"),
        ({"method": "draft_model", "model": 5}, "speculative_model=5 is no folder"),
        ("ngram", "must be a dict"),
        ({"ngram_min": 3}, "ngram_min=3 does nothing with speculative_method none"),
        ({"method": "self", "ngram_max": 3}, "ngram_max=3 does nothing with .* self; use ngram"),
        ({"method": "ngram", "k": 3}, "unknown field 'k'"),
    ],
)
def test_options_that_can_t_be_honoured_are_one_line(fields: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        SpeculativeConfig.from_mapping(fields)
    assert "\n" not in str(caught.value)


def test_serve_names_a_wrong_option(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--speculative-method", "eagle"])
    assert result.exit_code == 2
    assert "speculative_method 'eagle' is unknown" in result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[int]:
    return LLM(folder, max_model_len=256).generate([PROMPT], PARAMS)[0].outputs[0].token_ids


def speculative(folder: Path, **fields: Any) -> LLM:
    return LLM(folder, max_model_len=256, speculative_config=fields)


def test_prompt_lookup_through_llm(folder: Path, plain: list[int]) -> None:
    llm = speculative(folder, method="ngram", num_speculative_tokens=4)
    assert llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids == plain


def test_a_draft_model_through_llm(folder: Path, plain: list[int], tmp_path: Path) -> None:
    """Another model with the same tokenizer; its table has more rows."""
    draft = tiny_checkpoint("qwen3", tmp_path, seed=3, vocab_size=320, num_hidden_layers=1)
    llm = speculative(folder, method="draft_model", model=str(draft))
    assert llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids == plain
    assert llm.engine.stats().speculation.num_drafts > 0


def test_a_draft_with_other_tokens_is_refused_by_the_first_that_differs(
    folder: Path, tmp_path: Path
) -> None:
    draft = tiny_checkpoint("llama", tmp_path)
    path = draft / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    a, b = (next(t for t, i in vocab.items() if i == wanted) for wanted in (70, 90))
    vocab[a], vocab[b] = vocab[b], vocab[a]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(UsageError, match=r"token 70 is .* in the draft model .* in the model") as e:
        speculative(folder, method="draft_model", model=str(draft))
    assert "\n" not in str(e.value)
    del tokenizer["added_tokens"][-1]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(UsageError, match="is nothing in the draft model"):
        speculative(folder, method="draft_model", model=str(draft))


def test_self_is_refused_where_it_can_t_help(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UsageError, match="self needs backend cpu"):
        LLM(folder, backend="reference", speculative_config={"method": "self"})


if "cpu" in BACKENDS:

    def own_copy(llm: LLM) -> CpuExecutor:
        assert llm.engine.speculator is not None
        drafter = llm.engine.speculator.drafter
        assert isinstance(drafter, ModelDrafter)
        assert isinstance(drafter._executor, CpuExecutor)
        return drafter._executor

    @pytest.mark.parametrize("kind", ["8 bits", "8-bit tables", "a dense part"])
    def test_self_rounds_what_has_more_than_four_bits(kind: str, tmp_path: Path) -> None:
        quantized = quantized_checkpoint("llama", tmp_path, KINDS[kind])
        expected = LLM(quantized).generate([PROMPT], PARAMS)[0].outputs[0].token_ids
        llm = speculative(quantized, method="self", num_speculative_tokens=3)
        assert llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids == expected
        copy, target = own_copy(llm), llm.engine.executor
        assert isinstance(target, CpuExecutor)
        assert copy.model.weight_bytes < target.model.weight_bytes
        assert copy.kv_config.dtype == "int4"

    def test_self_of_dense_weights_is_a_quarter(folder: Path, plain: list[int]) -> None:
        llm = speculative(folder, method="self")
        assert llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids == plain
        target = llm.engine.executor
        assert isinstance(target, CpuExecutor)
        assert own_copy(llm).model.weight_bytes < 0.4 * target.model.weight_bytes

    def test_self_shares_weights_of_four_bits_and_has_cheaper_kv(tmp_path: Path) -> None:
        quantized = quantized_checkpoint("llama", tmp_path, KINDS["4-bit tables"])
        llm = LLM(quantized, kv_cache_dtype="bf16", speculative_config={"method": "self"})
        assert own_copy(llm).model is llm.engine.executor.model  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="self can't help"):
            LLM(quantized, kv_cache_dtype="int4", speculative_config={"method": "self"})
