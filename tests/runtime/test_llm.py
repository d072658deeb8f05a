from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qdeploy.errors import CapacityError, UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.llm import LLM, resolve_kv_config
from qdeploy.runtime.sampling_params import SamplingParams
from tiny_models import tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tiny_checkpoint("llama", tmp_path_factory.mktemp("llm"))
    return LLM(folder, max_model_len=128, kv_cache_dtype="int4", block_size=16)


def test_generate_keeps_order_and_takes_every_kind_of_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello")
    results = llm.generate(["Hello", ids, {"prompt": "Hello"}, {"prompt_token_ids": ids}], GREEDY)
    assert [r.prompt for r in results] == ["Hello", None, "Hello", None]
    assert all(r.prompt_token_ids == ids for r in results)
    assert len({tuple(r.outputs[0].token_ids) for r in results}) == 1
    assert results[0].outputs[0].text == llm.tokenizer.decode(results[0].outputs[0].token_ids)
    for flat in (ids, [np.int64(token) for token in ids]):
        assert llm.generate(flat, GREEDY)[0].outputs[0].token_ids == results[0].outputs[0].token_ids
    assert llm.engine.stats().num_open_blocks_used == 0


def test_params_for_each_prompt_and_samples(llm: LLM) -> None:
    several = [SamplingParams(n=3, seed=1, max_tokens=6), SamplingParams(max_tokens=2)]
    first, second = llm.generate(["a", "b"], several)
    assert [o.index for o in first.outputs] == [0, 1, 2]
    assert len(second.outputs[0].token_ids) <= 2
    with pytest.raises(UsageError, match="1 params for 2 prompts"):
        llm.generate(["a", "b"], several[:1])


def test_chat_one_or_several(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hi"}]
    (one,) = llm.chat(talk, GREEDY)
    assert one.prompt_token_ids == llm.tokenizer.chat(talk)
    assert [r.outputs[0].token_ids for r in llm.chat([talk, talk], GREEDY)] == [
        one.outputs[0].token_ids
    ] * 2


def test_a_refused_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(CapacityError, match="leaves no room"):
        llm.generate(["fine", "x" * 500], GREEDY)
    assert len(llm.generate("fine", GREEDY)) == 1
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("prompt", [5, None, [None], [1.5], ["a", 5], {"prompt": 5}, {"x": 1}])
def test_what_is_no_prompt_is_named(llm: LLM, prompt: Any) -> None:
    with pytest.raises(UsageError, match=r"^prompt .* is not text, token ids"):
        llm.generate(prompt, GREEDY)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("size", ["1GiB", float("nan"), float("inf"), -1, True, None])
def test_swap_space_that_is_no_size_is_named(tmp_path: Path, size: Any) -> None:
    with pytest.raises(UsageError, match=r"swap_space=.* is not a size") as caught:
        LLM(tiny_checkpoint("llama", tmp_path), swap_space=size)
    assert caught.value.param == "swap_space"


def test_defaults_come_from_the_model(llm: LLM) -> None:
    (llm.folder / "generation_config.json").write_text('{"temperature": 0.25}')
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.25)


def test_kv_policy_is_the_manifests_unless_asked(tmp_path: Path) -> None:
    from qdeploy.formats.manifest import KVCacheRecord

    assert resolve_kv_config(tmp_path, "auto") == KVCacheConfig()
    assert resolve_kv_config(tmp_path, "int4", 32) == KVCacheConfig(dtype="int4", block_size=32)
    assert KVCacheRecord(dtype="int8", sink_blocks=2).config() == KVCacheConfig(
        dtype="int8", sink_blocks=2
    )
    with pytest.raises(UsageError, match="kv_cache_dtype 'int5'"):
        resolve_kv_config(tmp_path, "int5")


@pytest.mark.model
def test_the_real_model_answers(smollm2_folder: Path) -> None:
    llm = LLM(smollm2_folder, kv_cache_dtype="int4", max_model_len=256, max_num_seqs=2)
    talk = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    (answer,) = llm.chat(talk, SamplingParams(temperature=0, max_tokens=24))
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"


def repeated(tokens: list[int], size: int = 4) -> float:
    """Share of the n-grams that came before, 0 … 1."""
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1 - len(set(grams)) / len(grams)


@pytest.mark.model
def test_x06_quantized_kv_loops_no_more_than_bf16(smollm2_folder: Path) -> None:
    """A prompt of code with many newlines, on which int8 KV of others fell into loops."""
    prompt = (
        "from typing import List\n\n\n\ndef below_zero(operations: List[int]) -> bool:\n"
        '    """ Return whether the balance falls below zero.\n\n\n    >>> below_zero([1, 2, 3])\n'
        '    False\n\n    """\n\n\n\n'
    )
    params = SamplingParams(temperature=0, max_tokens=96)
    shares = {}
    for dtype in ("bf16", "int8", "k8v4"):
        llm = LLM(smollm2_folder, kv_cache_dtype=dtype, max_model_len=256, max_num_seqs=1)
        shares[dtype] = repeated(llm.generate(prompt, params)[0].outputs[0].token_ids)
    assert max(shares.values()) <= shares["bf16"] + 0.15, shares
