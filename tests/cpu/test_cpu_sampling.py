"""The kernels' pass over a row of logits finds the token that NumPy draws, on every build."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdeploy.runtime.contenders import in_cpp, in_numpy
from qdeploy.runtime.filters import Row
from qdeploy.runtime.noise import gumbel
from qdeploy_kernels.cpu.library import available_isas, load_library


def winner(scores: Row, key: int, temperature: float, ids: np.ndarray | None = None) -> int:
    """By definition: every token's noise."""
    ids = np.arange(scores.size) if ids is None else ids
    scaled = (scores[ids].astype(np.float64) - float(scores.max())) / temperature
    return int(ids[np.argmax(scaled + gumbel(key, ids))])


def drawn(isa: str, scores: Row, key: int, temperature: float) -> int:
    best = int(scores.argmax())
    ids = in_cpp(load_library(isa).cdll)(scores, best, key, temperature)
    assert ids.tolist() == sorted(set(ids.tolist()))
    return winner(scores, key, temperature, ids)


@pytest.mark.parametrize("isa", available_isas())
@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 3000),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0, 1e4, 1e30]),
    temperature=st.sampled_from([2e-5, 0.3, 1.0, 2.5, 1e3, 1e30]),
    banned=st.sampled_from([0.0, 0.5, 1.0]),
    key=st.integers(0, 2**64 - 1),
    seed=st.integers(0, 99),
)
def test_the_winner_is_always_found(
    isa: str, size: int, scale: float, temperature: float, banned: float, key: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    scores = (random.normal(size=size) * scale).astype(np.float32)
    scores[random.random(size) < banned] = -np.inf
    scores[seed % size] = min(scale, 3.0)
    expected = winner(scores, key, temperature)
    assert drawn(isa, scores, key, temperature) == expected
    slow = in_numpy(scores, int(scores.argmax()), key, temperature)
    assert winner(scores, key, temperature, slow) == expected


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_a_real_vocabulary_leaves_one_token(isa: str, scale: float) -> None:
    find = in_cpp(load_library(isa).cdll)
    scores = np.random.default_rng(1).normal(scale=scale, size=49_152).astype(np.float32)
    best = int(scores.argmax())
    for key in range(100):
        ids = find(scores, best, key, 0.8)
        assert ids.tolist() == [winner(scores, key, 0.8)]


@pytest.mark.parametrize("isa", available_isas())
def test_equal_noisy_scores_are_all_found(isa: str) -> None:
    """A temperature so high that only the noise decides, and a row that is not contiguous."""
    scores = np.zeros((1000, 2), np.float32)[:, 0]
    for key in range(50):
        assert drawn(isa, scores, key, 1e30) == winner(scores, key, 1e30)
