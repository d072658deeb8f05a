from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qdeploy.runtime.noise import MAX_GUMBEL, MIN_GUMBEL, gumbel, mix64, noise_key
from qdeploy.runtime.request import Request
from qdeploy.runtime.sampler import choose, filter_tokens, process_logits, sample
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


def with_output(tokens: list[int], **params: object) -> Request:
    r = request(prompt=4, **params)
    for token in tokens:
        r.append(token, 0.0)
    return r


def draws(logits: torch.Tensor, count: int, **params: object) -> torch.Tensor:
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


LOGITS = 1.5 * torch.randn(20, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_r11_sampling_has_the_softmax_distribution(temperature: float) -> None:
    counts = draws(LOGITS, 10_000, temperature=temperature)
    assert chi_square(counts, torch.softmax(LOGITS.double() / temperature, 0)) > 1e-3


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}])
def test_filtered_sampling_has_the_renormalized_distribution(filters: dict[str, float]) -> None:
    probs = torch.softmax(LOGITS.double(), 0)
    ranked, order = probs.sort(descending=True)
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
    wrong = torch.bincount(
        torch.multinomial(torch.softmax(LOGITS * 1.1, 0), 10_000, replacement=True), minlength=20
    )
    assert chi_square(wrong, torch.softmax(LOGITS.double(), 0)) < 1e-3


@pytest.mark.parametrize("temperature", [0, 1e-9, 1e-4])
def test_r04_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.tensor([0.0, 3.0, 2.5, -1e30])
    assert {
        sample(logits, request(temperature=temperature, seed=s)).token_id for s in range(50)
    } == {1}


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert sample(torch.tensor([0.0, 5.0, 5.0]), request(temperature=0)).token_id == 1


def test_noise_is_splitmix64() -> None:
    # Reference outputs of SplitMix64 seeded with 1234567 (Vigna's splitmix64.c).
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    gamma = 0x9E3779B97F4A7C15
    assert [mix64(1234567 + (i + 1) * gamma) for i in range(3)] == expected
    uniform = [((x >> 12) + 0.5) * 2.0**-52 for x in expected]
    theirs = -torch.log(-torch.log(torch.tensor(uniform, dtype=torch.float64)))
    torch.testing.assert_close(gumbel(1234567, torch.arange(3)), theirs, rtol=0, atol=1e-15)


@given(key=st.integers(0, 2**64 - 1), ids=st.lists(st.integers(0, 2**31), min_size=1, max_size=50))
def test_noise_depends_on_the_token_alone(key: int, ids: list[int]) -> None:
    noise = gumbel(key, torch.tensor(ids))
    alone = torch.cat([gumbel(key, torch.tensor([i])) for i in ids])
    torch.testing.assert_close(noise, alone, rtol=1e-14, atol=1e-14)
    assert bool(((noise >= MIN_GUMBEL) & (noise <= MAX_GUMBEL)).all())


def test_noise_has_mean_and_variance_of_gumbel_and_no_correlation() -> None:
    noise = torch.stack([gumbel(noise_key(7, 0, p), torch.arange(2000)) for p in range(100)])
    assert abs(float(noise.mean()) - 0.5772) < 0.012
    assert abs(float(noise.var()) - 1.6449) < 0.04
    rows = torch.corrcoef(noise) - torch.eye(100, dtype=torch.float64)
    assert float(rows.abs().max()) < 0.12
    keys = {noise_key(s, i, p) for s in range(20) for i in range(20) for p in range(20)}
    assert len(keys) == 8000


def test_pruning_is_exact() -> None:
    logits = torch.linspace(0, -60, 200)
    for seed in range(200):
        r = request(seed=seed, temperature=1.3)
        noise = gumbel(noise_key(seed, 0, 1), torch.arange(200))
        assert choose(logits, r) == int((logits.double() / 1.3 + noise).argmax())


def test_r20_penalties_equal_the_openai_and_hf_formulas() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(30, generator=torch.Generator().manual_seed(1))
    output = [5, 5, 5, 9, 2]
    r = with_output(output, repetition_penalty=1.3)
    ids = torch.tensor([[*range(4), *output]])
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits[None].clone())[0]
    torch.testing.assert_close(process_logits(logits, r, ()), theirs)
    r = with_output(output, frequency_penalty=0.5, presence_penalty=0.25)
    counts = torch.bincount(torch.tensor(output), minlength=30)
    expected = logits - counts * 0.5 - (counts > 0) * 0.25
    torch.testing.assert_close(process_logits(logits, r, ()), expected)


def test_processing_leaves_the_raw_logits_alone() -> None:
    logits = torch.zeros(8)
    r = request(logit_bias={3: 5.0}, allowed_token_ids=[3, 4], logprobs=2, temperature=0)
    sampled = sample(logits, r, banned=[4])
    assert sampled.token_id == 3
    assert torch.equal(logits, torch.zeros(8))
    assert sampled.logprob is not None
    assert sampled.logprob.logprob == pytest.approx(-2.0794, abs=1e-3)


def test_no_token_left_is_an_error_not_token_zero() -> None:
    sampled = sample(torch.zeros(8), request(allowed_token_ids=[4]), banned=[4])
    assert sampled.token_id == -1
    assert "leave no token" in str(sampled.error)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_x01_non_finite_logits_are_an_error(value: float) -> None:
    logits = torch.zeros(8)
    logits[5] = value
    assert "1 non-finite logits of 8" in str(sample(logits, request(temperature=0)).error)


def test_logprobs_come_from_raw_logits() -> None:
    sampled = sample(LOGITS, request(temperature=0, logprobs=3, logit_bias={0: 100.0}))
    logprobs = torch.log_softmax(LOGITS, 0)
    assert sampled.logprob is not None
    assert sampled.logprob.token_id == 0
    assert sampled.logprob.rank == 1 + int((logprobs > logprobs[0]).sum())
    assert [i for i, _ in sampled.logprob.top] == logprobs.topk(3).indices.tolist()


@settings(max_examples=60)
@given(
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 25),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_filters_keep_the_best_and_compose(
    top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(seed)).double()
    scaled = logits - logits.max()
    params = SamplingParams(top_p=top_p, top_k=top_k, min_p=min_p)
    ids, _ = filter_tokens(torch.arange(20), scaled, params)
    assert int(logits.argmax()) in ids.tolist()
    assert top_k == 0 or len(ids) <= max(top_k, 1)
    assert bool((scaled[ids].exp() >= min_p * (1 - 1e-12)).all())
    dropped = scaled[[i for i in range(20) if i not in ids.tolist()]]
    assert len(dropped) == 0 or float(dropped.max()) <= float(scaled[ids].min())


def test_seeds() -> None:
    assert request_seed(5, 0, "a") == request_seed(5, 1, "b") == 5
    assert request_seed(None, 0, "a") == request_seed(None, 0, "a")
    assert len({request_seed(None, e, r) for e in range(9) for r in "abc"}) == 27


def test_sampled_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample(LOGITS, request()).token_id = 1  # type: ignore[misc]
