"""What goes wrong in one request: who ends, and who doesn't notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qdeploy.errors import UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.batch import StepBatch
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.tokenizer import Tokenizer
from runtime.fake_executor import VOCAB, FakeExecutor
from runtime.tiny_tokenizer import save_tokenizer

KV = KVCacheConfig(dtype="int4", block_size=8)
POISON = 31
PROMPT = [*range(1, 20), POISON, *range(1, 10)]


class Poisoned(FakeExecutor):
    """A slice with POISON raises, or gets logits that aren't numbers."""

    raises = False

    def execute(self, batch: StepBatch) -> Tensor:
        logits, row = super().execute(batch), 0
        for part in batch.slices:
            if POISON in part.token_ids:
                if self.raises:
                    raise RuntimeError("poisoned")
                logits[row : row + part.num_logits] = torch.nan
            row += part.num_logits
        return logits


def engine(*, raises: bool = False) -> Engine:
    executor = Poisoned(KV)
    executor.raises = raises
    return Engine(executor, EngineConfig(kv=KV, max_num_batched_tokens=10))


def reasons(e: Engine) -> list[tuple[str, int, str | None]]:
    found = []
    while e.has_unfinished:
        found += [(o.request_id, o.index, o.finish_reason) for o in e.step() if o.finished]
        e.scheduler.check_integrity()
    return sorted(found)


@pytest.mark.parametrize("raises", [False, True])
def test_a_prompt_that_fails_ends_all_samples_that_wait_for_it(raises: bool) -> None:
    e = engine(raises=raises)
    params = SamplingParams(n=3, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    e.add_request("a", PROMPT, params)
    assert reasons(e) == [("a", 0, "error"), ("a", 1, "error"), ("a", 2, "error")]
    assert e.stats().num_steps == 2, "the prompt was tried again"


def test_scoring_leaves_a_request_of_the_same_name_alone() -> None:
    e = engine()
    e.add_request("score-1", [1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    with pytest.raises(UsageError, match="in use"):
        e.score([1, 2, 3], lambda start, rows: None)
    assert reasons(e) == [("score-1", 0, "length")]


def test_min_tokens_with_an_end_token_that_the_model_has_not_got() -> None:
    e = Engine(FakeExecutor(KV), EngineConfig(kv=KV), frozenset({-1, VOCAB, VOCAB + 5}))
    e.add_request("a", [1, 2], SamplingParams(min_tokens=2, max_tokens=4))
    assert reasons(e) == [("a", 0, "length")]


def test_words_that_have_no_tokens_are_refused_before_anything_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="give text without lone"):
        SamplingParams(bad_words=["\ud800"])

    def fail(*_: object, **__: object) -> list[int]:
        raise ValueError("no tokens")

    tokenizer = Tokenizer.load(save_tokenizer(tmp_path))
    e = Engine(FakeExecutor(KV), EngineConfig(kv=KV), tokenizer=tokenizer)
    monkeypatch.setattr(Tokenizer, "encode", fail)
    with pytest.raises(ValueError, match="no tokens"):
        e.add_request("a", [1, 2], SamplingParams(bad_words=["x"]))
    assert not e.has_unfinished
