"""Sampled tokens follow the target distribution: Pearson's chi-square over 200,000 draws each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qdeploy.runtime import sampler
from qdeploy.runtime.request import Request
from qdeploy.runtime.row_passes import NumpyPasses, Row
from qdeploy.runtime.sampling_params import SamplingParams

NUM_DRAWS = 200_000
Probs = NDArray[np.float64]


def chi_square(counts: NDArray[np.int64], probs: Probs) -> float:
    """p-value; cells with no probability must be empty, those expecting few are put together."""
    assert counts[probs == 0].sum() == 0
    expected = probs * counts.sum()
    rare = expected < 10
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2).double()))


def draws(logits: Row, num_draws: int = NUM_DRAWS, **params: Any) -> NDArray[np.int64]:
    """Tokens of many seeds, of three samples and of positions that follow each other."""
    wanted, found = SamplingParams(**params), []
    requests = [
        Request(
            request_id="a",
            index=i % 3,
            order=0,
            prompt_token_ids=[0],
            params=wanted,
            max_tokens=10**6,
            seed=i // 3,
        )
        for i in range(num_draws // 100)
    ]
    for request in requests:
        for _ in range(100):
            found.append(sampler.sample(logits, request).token_id)
            request.token_ids.append(0)
    return np.array(found)


def row(size: int, scale: float) -> Row:
    return np.random.default_rng(4).normal(scale=scale, size=size).astype(np.float32)


def target(
    logits: Row, temperature: float, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Probs:
    """The definition, sorted: min_p, then top_k, then top_p of what is left."""
    exponents = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.argsort(-exponents)
    kept = [i for i in order if exponents[i] >= min_p][: top_k or None]
    shares = exponents[kept] / exponents[kept].sum()
    before = shares.cumsum() - shares
    kept = [i for i, mass in zip(kept, before, strict=True) if mass < top_p]
    probs = np.zeros(len(logits))
    probs[kept] = exponents[kept] / exponents[kept].sum()
    return probs


MANY = {"top_k": 12, "top_p": 0.8, "min_p": 0.02}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "filters"),
    [
        (1.0, {}),
        (1.0, {"top_k": 5}),
        (1.0, {"top_p": 0.7}),
        (1.0, {"min_p": 0.1}),
        (1.0, MANY),
        (0.5, {}),
        (0.5, MANY),
        (1.8, {}),
        (1.8, MANY),
    ],
)
def test_r11_tokens_follow_the_distribution(temperature: float, filters: dict[str, Any]) -> None:
    logits = row(20, 1.0)
    probs = target(logits, temperature, **filters)
    assert np.count_nonzero(probs) > 1
    counts = np.bincount(draws(logits, temperature=temperature, **filters), minlength=20)
    assert chi_square(counts, probs) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_r11_pruning_keeps_the_distribution_of_a_vocabulary(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(sampler, "row_passes", NumpyPasses)
    logits = row(4000, 3.0)
    counts = np.bincount(draws(logits), minlength=4000)
    assert chi_square(counts, target(logits, 1.0)) > 1e-3


@pytest.mark.slow
def test_r11_positions_are_independent() -> None:
    logits = row(8, 1.0)
    tokens = draws(logits)
    pairs = np.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
    probs = target(logits, 1.0)
    assert chi_square(pairs, np.outer(probs, probs).ravel()) > 1e-3


def test_chi_square_sees_a_distribution_that_is_slightly_off() -> None:
    logits = row(20, 1.5)
    wrong = np.random.default_rng(0).choice(20, NUM_DRAWS, p=target(logits, 1.03))
    assert chi_square(np.bincount(wrong, minlength=20), target(logits, 1.0)) < 1e-3
    right = np.random.default_rng(0).choice(20, NUM_DRAWS, p=target(logits, 1.0))
    assert chi_square(np.bincount(right, minlength=20), target(logits, 1.0)) > 1e-3
