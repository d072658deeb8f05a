from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qdeploy.runtime.filters import filter_tokens, top_p_threshold
from qdeploy.runtime.logprobs import token_logprob
from qdeploy.runtime.noise import (
    MAX_GUMBEL,
    MIN_GUMBEL,
    gumbel,
    may_exceed,
    mix64,
    noise_key,
    token_noise,
)
from qdeploy.runtime.request import Request
from qdeploy.runtime.row_passes import Row
from qdeploy.runtime.sampler import draw, sample
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.seeds import request_seed


def request(*, prompt: int = 1, index: int = 0, seed: int = 0, **params: object) -> Request:
    return Request(
        request_id="a",
        index=index,
        order=0,
        prompt_token_ids=range(prompt),
        params=SamplingParams(**params),
        max_tokens=16,
        seed=seed,
    )


def draws(logits: Row, count: int, **params: object) -> torch.Tensor:
    """Counts of `count` draws that differ in seed, sample index and position."""
    found = []
    for i in range(count):
        r = request(prompt=1 + i % 7, index=i % 3, seed=i // 3, **params)
        found.append(sample(logits, r).token_id)
    return torch.bincount(torch.tensor(found), minlength=len(logits))


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """p-value of Pearson's test; cells with no probability must be empty."""
    live = probs > 0
    assert int(counts[~live].sum()) == 0
    expected = probs[live] * counts.sum()
    statistic = ((counts[live] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((int(live.sum()) - 1) / 2.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic.double() / 2))


def normal(size: int, seed: int, scale: float = 1.0) -> Row:
    return np.random.default_rng(seed).normal(scale=scale, size=size).astype(np.float32)


LOGITS: Row = (1.5 * torch.randn(20, generator=torch.Generator().manual_seed(3))).numpy()
PROBS = torch.softmax(torch.from_numpy(LOGITS).double(), 0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_r11_sampling_has_the_softmax_distribution(temperature: float) -> None:
    counts = draws(LOGITS, 10_000, temperature=temperature)
    assert (
        chi_square(counts, torch.softmax(torch.from_numpy(LOGITS).double() / temperature, 0)) > 1e-3
    )


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}])
def test_filtered_sampling_has_the_renormalized_distribution(filters: dict[str, float]) -> None:
    ranked, order = PROBS.sort(descending=True)
    keep = {
        "top_k": torch.arange(20) < 5,
        "top_p": ranked.cumsum(0) - ranked < 0.7,
        "min_p": ranked >= 0.05 * ranked[0],
    }[next(iter(filters))]
    target = torch.zeros(20, dtype=torch.float64)
    target[order[keep]] = ranked[keep] / ranked[keep].sum()
    assert 1 < int(keep.sum()) < 20
    assert chi_square(draws(LOGITS, 5_000, **filters), target) > 1e-3


def test_chi_square_would_see_a_wrong_sampler() -> None:
    wrong = torch.bincount(torch.multinomial(PROBS**1.1, 10_000, replacement=True), minlength=20)
    assert chi_square(wrong, PROBS) < 1e-3


@pytest.mark.parametrize("temperature", [0, 1e-9, 1e-4])
def test_r04_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = np.array([0.0, 3.0, 2.5, -1e30], np.float32)
    assert {
        sample(logits, request(temperature=temperature, seed=s)).token_id for s in range(50)
    } == {1}


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert sample(np.array([0, 5, 5], np.float32), request(temperature=0)).token_id == 1


def test_noise_is_splitmix64() -> None:
    # Reference outputs of SplitMix64 seeded with 1234567 (Vigna's splitmix64.c).
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    gamma = 0x9E3779B97F4A7C15
    assert [mix64(1234567 + (i + 1) * gamma) for i in range(3)] == expected
    uniform = [((x >> 12) + 0.5) * 2.0**-52 for x in expected]
    theirs = -np.log(-np.log(np.array(uniform)))
    np.testing.assert_allclose(gumbel(1234567, np.arange(3)), theirs, rtol=0, atol=1e-15)


@settings(deadline=None)
@given(key=st.integers(0, 2**64 - 1), ids=st.lists(st.integers(0, 2**31), min_size=1, max_size=50))
def test_noise_depends_on_the_token_alone(key: int, ids: list[int]) -> None:
    noise = gumbel(key, np.array(ids))
    np.testing.assert_allclose(noise, [token_noise(key, i) for i in ids], rtol=1e-14, atol=1e-14)
    assert bool(((noise >= MIN_GUMBEL) & (noise <= MAX_GUMBEL)).all())


@settings(deadline=None)
@given(key=st.integers(0, 2**64 - 1), limit=st.floats(-5, 40))
def test_no_noise_above_the_limit_is_missed_and_few_others_are_found(
    key: int, limit: float
) -> None:
    noise = gumbel(key, np.arange(5000))
    limit = min(limit, float(noise.max()))  # the largest one is always to be found
    found = may_exceed(key, 5000, limit)
    assert bool(found[noise >= limit].all())
    assert not bool(found[noise < limit - 1e-5].any()) or limit > 15  # 31 bits are compared


def test_noise_has_mean_and_variance_of_gumbel_and_no_correlation() -> None:
    noise = np.stack([gumbel(noise_key(7, 0, p), np.arange(2000)) for p in range(100)])
    assert abs(float(noise.mean()) - 0.5772) < 0.012
    assert abs(float(noise.var()) - 1.6449) < 0.04
    assert float(np.abs(np.corrcoef(noise) - np.eye(100)).max()) < 0.12
    keys = {noise_key(s, i, p) for s in range(20) for i in range(20) for p in range(20)}
    assert len(keys) == 8000


@pytest.mark.parametrize("temperature", [0.3, 1.3, 30.0])
def test_pruning_is_exact(temperature: float) -> None:
    logits = np.linspace(0, -60, 3000, dtype=np.float32)
    for seed in range(200):
        r = request(seed=seed, temperature=temperature)
        noise = gumbel(noise_key(seed, 0, 1), np.arange(3000))
        assert draw(logits, 0, r) == int((logits.astype(float) / temperature + noise).argmax())


def test_a_token_far_below_the_best_wins_where_its_noise_does() -> None:
    logits = np.full(200_000, -9.5, np.float32)  # each has 7e-5 of the best one's probability
    logits[0] = 0.0
    found = [sample(logits, request(seed=s)).token_id for s in range(40)]
    noise = [gumbel(noise_key(s, 0, 1), np.arange(200_000)) for s in range(40)]
    assert found == [int((logits + n).argmax()) for n in noise]
    assert sum(token > 0 for token in found) > 30


def test_processing_leaves_the_raw_logits_alone() -> None:
    logits = np.zeros(8, np.float32)
    r = request(logit_bias={3: 5.0}, allowed_token_ids=[3, 4], logprobs=2, temperature=0)
    sampled = sample(logits, r, banned=[4])
    assert sampled.token_id == 3
    assert not logits.any()
    assert sampled.logprob is not None
    assert sampled.logprob.logprob == pytest.approx(-2.0794, abs=1e-3)


def test_no_token_left_is_an_error_not_token_zero() -> None:
    sampled = sample(np.zeros(8, np.float32), request(allowed_token_ids=[4]), banned=[4])
    assert sampled.token_id == -1
    assert "leave no token" in str(sampled.error)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_x01_non_finite_logits_are_an_error(value: float) -> None:
    logits = np.zeros(8, np.float32)
    logits[5] = value
    assert "1 non-finite logits of 8" in str(sample(logits, request(temperature=0)).error)


def test_logprobs_come_from_raw_logits() -> None:
    sampled = sample(LOGITS, request(temperature=0, logprobs=3, logit_bias={0: 100.0}))
    logprobs = PROBS.log()
    assert sampled.logprob is not None
    assert sampled.logprob.token_id == 0
    assert sampled.logprob.rank == 1 + int((logprobs > logprobs[0]).sum())
    assert [i for i, _ in sampled.logprob.top] == logprobs.topk(3).indices.tolist()


@pytest.mark.parametrize("scale", [0.1, 3.0, 20.0])
def test_logprobs_equal_log_softmax_however_flat(scale: float) -> None:
    logits = normal(5000, 2, scale)
    found = token_logprob(logits, 7, 20)
    logprobs = torch.log_softmax(torch.from_numpy(logits).double(), 0)
    assert found.logprob == pytest.approx(float(logprobs[7]), abs=2e-6)
    values, ids = logprobs.topk(20)
    assert [i for i, _ in found.top] == ids.tolist()
    assert [v for _, v in found.top] == pytest.approx(values.tolist(), abs=2e-6)


@settings(max_examples=100, deadline=None)
@given(
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 400),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 1e-4, 0.1, 1.0]),
    scale=st.sampled_from([0.1, 3.0, 20.0]),
    size=st.sampled_from([400, 5000]),
    seed=st.integers(0, 99),
)
def test_filters_equal_their_definitions(
    top_p: float, top_k: int, min_p: float, scale: float, size: int, seed: int
) -> None:
    logits = normal(size, seed, scale)
    params = SamplingParams(top_p=top_p, top_k=top_k, min_p=min_p, temperature=0.8)
    ids, scaled = filter_tokens(logits, logits.max(), params)
    every = (logits.astype(float) - float(logits.max())) / 0.8
    assert np.array_equal(scaled, every[ids])
    order = [i for i in np.argsort(-every, kind="stable") if np.exp(every[i]) >= min_p]
    order = order[: top_k or None]
    probs = np.exp(every[order]) / np.exp(every[order]).sum()
    before = probs.cumsum() - probs
    surely = {i for i, mass in zip(order, before, strict=True) if mass < top_p - 1e-6}
    perhaps = {i for i, mass in zip(order, before, strict=True) if mass < top_p + 1e-6}
    assert surely <= set(ids.tolist()) <= perhaps


def test_tokens_that_tie_with_the_last_one_kept_stay() -> None:
    logits = np.array([1.0, 2.0, 1.0, 2.0, 1.0], np.float32)
    assert filter_tokens(logits, logits.max(), SamplingParams(top_k=1))[0].tolist() == [1, 3]
    assert filter_tokens(logits, logits.max(), SamplingParams(top_p=0.5))[0].tolist() == [1, 3]
    assert filter_tokens(logits, logits.max(), SamplingParams(top_k=3))[0].tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("size", [3, 3000])  # sorted at once, or by bins first
def test_a_cut_that_depends_on_the_error_of_the_mass_is_not_made(size: int) -> None:
    scaled = np.linspace(0, -7, size)
    reached = np.exp(scaled).cumsum()
    for kept in (1, size // 2, size - 1):
        exactly = float(reached[kept - 1] / reached[-1])
        for top_p, sure in ((exactly * (1 + 1e-7), False), (exactly * (1 - 1e-7), False)):
            assert (top_p_threshold(scaled, top_p, float(reached[-1]), 1e-6) is not None) == sure
        middle = float((reached[kept - 1] + reached[kept]) / 2 / reached[-1])
        found = top_p_threshold(scaled, middle, float(reached[-1]), 1e-9)
        assert found == top_p_threshold(scaled, middle, float(reached[-1]), 0.0) == scaled[kept]
    assert top_p_threshold(scaled, 0.5, float(reached[-1]) * 2, 1e-6) is None
    assert top_p_threshold(scaled, 0.5, float(reached[-1]) * 3, 1e-6) == -np.inf


def test_seeds() -> None:
    assert request_seed(5, 0, "a") == request_seed(5, 1, "b") == 5
    assert request_seed(None, 0, "a") == request_seed(None, 0, "a")
    assert len({request_seed(None, e, r) for e in range(9) for r in "abc"}) == 27


def test_sampled_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample(LOGITS, request()).token_id = 1  # type: ignore[misc]
