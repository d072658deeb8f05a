from __future__ import annotations

import pytest

from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.outputs import CompletionOutput, GenerationOutput
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.tokenizer import Tokenizer
from runtime.fake_executor import FakeExecutor
from runtime.tiny_tokenizer import save_tokenizer

KV = KVCacheConfig(dtype="int4", block_size=8)
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def complete(
    tokenizer: Tokenizer, params: SamplingParams, eos: frozenset[int] = frozenset()
) -> CompletionOutput:
    engine = Engine(FakeExecutor(KV), EngineConfig(kv=KV), eos, tokenizer=tokenizer)
    engine.add_request("a", PROMPT, params)
    result = GenerationOutput(
        request_id="a", prompt=None, prompt_token_ids=PROMPT, outputs=[CompletionOutput(index=0)]
    )
    while engine.has_unfinished:
        for output in engine.step():
            result.add(output)
    assert result.finished
    assert engine.stats().num_open_blocks_used == 0
    return result.outputs[0]


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 20, **changes})


def test_text_is_the_decoded_tokens(tokenizer: Tokenizer) -> None:
    result = complete(tokenizer, params(logprobs=2))
    assert result.text == tokenizer.decode(result.token_ids)
    assert len(result.text) == 20
    assert result.logprobs is not None
    assert [p.token_id for p in result.logprobs] == result.token_ids
    assert result.cumulative_logprob == pytest.approx(sum(p.logprob for p in result.logprobs))
    assert all(len(p.top) == 2 and p.top[0][0] == p.token_id for p in result.logprobs)


@pytest.mark.parametrize("include", [False, True])
def test_text_ends_before_a_stop_string_over_several_tokens(
    tokenizer: Tokenizer, include: bool
) -> None:
    text = complete(tokenizer, params()).text
    stop = text[7:10]
    at = text.find(stop)
    result = complete(tokenizer, params(stop=[stop, "zz"], include_stop_str_in_output=include))
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert result.text == text[: at + 3 if include else at]
    assert len(result.token_ids) == at + 3


def test_held_back_text_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    free = complete(tokenizer, params())
    result = complete(tokenizer, params(stop=free.text[-2:] + "more"))
    assert (result.text, result.finish_reason) == (free.text, "length")


def test_min_tokens_holds_for_stop_strings(tokenizer: Tokenizer) -> None:
    free = complete(tokenizer, params())
    result = complete(tokenizer, params(stop=free.text[0], min_tokens=20))
    assert len(result.token_ids) == 20


def test_text_of_a_stop_token_is_not_part_of_the_answer(tokenizer: Tokenizer) -> None:
    free = complete(tokenizer, params())
    token = free.token_ids[6]
    first = free.token_ids.index(token)
    for result in (
        complete(tokenizer, params(stop_token_ids=[token])),
        complete(tokenizer, params(), frozenset({token})),
    ):
        assert result.finish_reason == "stop"
        assert result.token_ids == free.token_ids[: first + 1]
        assert result.text == free.text[:first]


def test_r20_frequency_penalty_changes_the_text(tokenizer: Tokenizer) -> None:
    texts = {complete(tokenizer, params(frequency_penalty=f)).text for f in (0.0, 2.0)}
    assert len(texts) == 2
