"""R11: speculation doesn't change what is drawn, measured, not only argued."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.batch import StepBatch
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.speculation.base import Drafter
from qdeploy.runtime.speculation.loading import make_model_drafter
from qdeploy.runtime.speculation.ngram import NgramDrafter
from runtime.fake_executor import FakeExecutor
from speculation.stress import every_draft, speculating

__all__ = ["every_draft"]
VOCAB = 20
KV = KVCacheConfig(dtype="bf16", block_size=64)
P_VALUE = 0.001


class Markov(FakeExecutor):
    """Logits depend on the last token alone: rows of a table [VOCAB, VOCAB]."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__(KV)
        self.spec.vocab_size = VOCAB
        generator = torch.Generator().manual_seed(0)
        table = 1.5 * torch.randn(VOCAB, VOCAB, generator=generator)
        self.table = table + noise * torch.randn(VOCAB, VOCAB, generator=generator)

    def execute(self, batch: StepBatch) -> Tensor:
        ends = [t for s in batch.slices for t in s.token_ids[len(s.token_ids) - s.num_logits :]]
        return self.table[ends]


def drafters(method: str, config: EngineConfig, target: Markov) -> Drafter | None:
    if method == "draft_model":
        return make_model_drafter(Markov(noise=0.7), config, target, frozenset())
    return NgramDrafter(1, 3) if method == "ngram" else None


def sampled_pairs(
    method: str, params: SamplingParams, num_samples: int
) -> Counter[tuple[int, int]]:
    """How often each token followed each other one."""
    config, target = EngineConfig(kv=KV, max_num_seqs=50, max_model_len=256), Markov()
    if method != "none":
        config = speculating(config, 4, method)
    engine = Engine(target, config, drafter=drafters(method, config, target))
    pairs: Counter[tuple[int, int]] = Counter()
    per_request = 250
    for seed in range(num_samples // per_request):
        own = replace(params, seed=seed, max_tokens=per_request)
        engine.add_request(f"r{seed}", [seed % VOCAB], own)
    last: dict[str, int] = {f"r{seed}": seed % VOCAB for seed in range(num_samples // per_request)}
    while engine.has_unfinished:
        for output in engine.step():
            for token in output.token_ids:
                pairs[last[output.request_id], token] += 1
                last[output.request_id] = token
    stats = engine.stats().speculation
    assert method == "none" or 0.05 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95
    return pairs


def p_value(pairs: Counter[tuple[int, int]], params: SamplingParams) -> float:
    """Of the counts under the target's own distribution: chi-square over all rows."""
    logits = Markov().table.double() / params.temperature
    if params.top_k:
        least = logits.topk(params.top_k).values[:, -1:]
        logits = torch.where(logits >= least, logits, -math.inf)
    chances = logits.softmax(-1)
    statistic, freedom = 0.0, 0
    for before in range(VOCAB):
        total = sum(pairs[before, after] for after in range(VOCAB))
        rest_seen, rest_expected, cells = 0.0, 0.0, 0
        for after in range(VOCAB):
            seen, expected = pairs[before, after], total * float(chances[before, after])
            assert expected > 0 or seen == 0, "a token that has no chance was drawn"
            if expected < 5:  # too few for the approximation: pooled
                rest_seen, rest_expected = rest_seen + seen, rest_expected + expected
                continue
            statistic += (seen - expected) ** 2 / expected
            cells += 1
        if rest_expected >= 5:
            statistic += (rest_seen - rest_expected) ** 2 / rest_expected
            cells += 1
        freedom += max(0, cells - 1)
    # Wilson and Hilferty 1931: a chi-square's cube root is nearly normal.
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_r11_tokens_follow_the_target(method: str) -> None:
    params = SamplingParams(temperature=1.0)
    assert p_value(sampled_pairs(method, params, 10_000), params) > P_VALUE


@pytest.mark.slow
@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=1.0), SamplingParams(temperature=0.6, top_k=7)]
)
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_r11_tokens_follow_the_target_over_200_000_samples(
    method: str, params: SamplingParams
) -> None:
    assert p_value(sampled_pairs(method, params, 200_000), params) > P_VALUE


def test_the_test_notices_a_wrong_distribution() -> None:
    params = SamplingParams(temperature=1.0)
    pairs = sampled_pairs("none", SamplingParams(temperature=0.9), 10_000)
    assert p_value(pairs, params) < 1e-6


@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_change_no_single_draw(method: str) -> None:
    params = SamplingParams(temperature=1.0)
    assert sampled_pairs(method, params, 2_500) == sampled_pairs("none", params, 2_500)
