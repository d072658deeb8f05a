"""Log-probabilities of the prompt: every position once, whatever the schedule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qdeploy.errors import UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.logprobs import prompt_logprobs
from qdeploy.runtime.outputs import CompletionOutput, GenerationOutput
from qdeploy.runtime.sampling_params import SamplingParams
from runtime.fake_executor import VOCAB, FakeExecutor

KV = KVCacheConfig(dtype="int4", block_size=8)
PROMPT = [t * 5 % VOCAB for t in range(100)]


def engine(**options: object) -> Engine:
    return Engine(FakeExecutor(KV), EngineConfig(kv=KV, **options))  # type: ignore[arg-type]


def run(
    e: Engine, requests: dict[str, tuple[list[int], SamplingParams]]
) -> dict[str, GenerationOutput]:
    results = {}
    for name, (prompt, params) in requests.items():
        e.add_request(name, prompt, params)
        results[name] = GenerationOutput(
            request_id=name,
            prompt=None,
            prompt_token_ids=prompt,
            outputs=[CompletionOutput(index=i) for i in range(params.n)],
        )
    firsts = set()
    while e.has_unfinished:
        for output in e.step():
            if output.prompt_logprobs is not None:
                assert output.request_id not in firsts, "given twice"
                assert not results[output.request_id].outputs[0].token_ids
                firsts.add(output.request_id)
            results[output.request_id].add(output)
        e.scheduler.check_integrity()
    assert e.stats().num_open_blocks_used == e.stats().num_sealed_blocks_used == 0
    return results


def asking(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 6, "prompt_logprobs": 2, **changes})


def expected(prompt: list[int]) -> list[list[float]]:
    """log_softmax [prompt, vocab] of every position, by `score`."""
    rows: list[torch.Tensor] = []
    engine().score(prompt, lambda start, logits: rows.append(logits.clone()))
    return torch.log_softmax(torch.cat(rows).double(), -1).tolist()


def check(result: GenerationOutput, num_top: int = 2) -> None:
    found, prompt = result.prompt_logprobs, result.prompt_token_ids
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    for token, entry, row in zip(prompt[1:], found[1:], expected(prompt), strict=False):
        assert entry is not None
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=1e-5)
        assert entry.rank == 1 + sum(value > row[token] for value in row)
        best = sorted(range(VOCAB), key=lambda i: -row[i])[:num_top]
        assert [i for i, _ in entry.top] == best


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 2}])
def test_every_position_is_scored_and_the_answer_is_the_same(options: dict[str, object]) -> None:
    plain = run(engine(), {"a": (PROMPT, SamplingParams(temperature=0, max_tokens=6))})["a"]
    neighbours = {f"n{i}": ([i] * 20, SamplingParams(max_tokens=9, seed=1)) for i in range(4)}
    result = run(engine(**options), {"a": (PROMPT, asking()), **neighbours})["a"]
    check(result)
    assert result.outputs[0].token_ids == plain.outputs[0].token_ids


def test_r05_the_same_prompt_three_times() -> None:
    """With the prefix cache on: nothing stale, nothing missing, nothing cut."""
    e = engine()
    found = [run(e, {name: (PROMPT, asking())})[name].prompt_logprobs for name in "abc"]
    assert found[0] == found[1] == found[2]
    again = run(e, {"d": (PROMPT, SamplingParams(temperature=0, max_tokens=6))})["d"]
    assert again.num_cached_tokens > 0
    check(run(e, {"e": (PROMPT, asking())})["e"])


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_requests_are_scored_once(preemption: str) -> None:
    prompts = {
        str(i): ([(t + i) % VOCAB for t in range(40)], asking(max_tokens=30)) for i in range(4)
    }
    e = engine(num_kv_blocks=26, max_model_len=96, preemption=preemption, max_num_batched_tokens=24)
    results = run(e, prompts)
    assert e.stats().num_preemptions_total > 0
    for result in results.values():
        check(result)


def test_samples_share_the_prompt() -> None:
    result = run(engine(), {"a": (PROMPT, asking(n=3, temperature=1.0, seed=4))})["a"]
    check(result)
    assert len({tuple(o.token_ids) for o in result.outputs}) == 3


@pytest.mark.parametrize("n", [1, 2])
def test_r02_no_tokens_but_the_prompts_logprobs(n: int) -> None:
    result = run(engine(max_num_batched_tokens=16), {"a": (PROMPT, asking(max_tokens=0, n=n))})["a"]
    check(result)
    assert [(o.token_ids, o.finish_reason) for o in result.outputs] == [([], "length")] * n
    one = run(engine(), {"a": ([3], asking(max_tokens=0))})["a"]
    assert one.prompt_logprobs == [None]
    with pytest.raises(UsageError, match="max_tokens=0"):
        SamplingParams(max_tokens=0)


def test_x01_non_finite_logits_in_a_prompt_end_that_request() -> None:
    e = engine()
    e.executor.nan_token = 31
    bad = [1, 31, *range(20)]
    results = run(e, {"bad": (bad, asking()), "good": ([1, 2, 3], asking())})
    assert results["bad"].outputs[0].finish_reason == "error"
    assert "non-finite logits" in str(results["bad"].outputs[0].error)
    check(results["good"])


def test_rows_that_are_not_finite_are_refused() -> None:
    rows = np.zeros((2, 8), np.float32)
    rows[1, 3] = np.inf
    with pytest.raises(ValueError, match="non-finite"):
        prompt_logprobs(rows, [1, 2], 0)
