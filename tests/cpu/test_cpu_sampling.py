"""The kernels' passes over a row of logits give the tokens that NumPy gives, on every build."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdeploy.runtime import filters, sampler
from qdeploy.runtime.noise import gumbel
from qdeploy.runtime.request import Request
from qdeploy.runtime.row_passes import CompiledPasses, NumpyPasses, Row, RowPasses, exact_mass
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy_kernels.cpu.library import available_isas, load_library


def winner(scores: Row, key: int, temperature: float, ids: np.ndarray | None = None) -> int:
    """By definition: every token's noise."""
    ids = np.arange(scores.size) if ids is None else ids
    scaled = (scores[ids].astype(np.float64) - float(scores.max())) / temperature
    return int(ids[np.argmax(scaled + gumbel(key, ids))])


def drawn(isa: str, scores: Row, key: int, temperature: float) -> int:
    best = int(scores.argmax())
    ids = CompiledPasses(load_library(isa)).contenders(scores, best, key, temperature)
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
    slow = NumpyPasses().contenders(scores, int(scores.argmax()), key, temperature)
    assert winner(scores, key, temperature, slow) == expected


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_a_real_vocabulary_leaves_one_token(isa: str, scale: float) -> None:
    passes = CompiledPasses(load_library(isa))
    scores = np.random.default_rng(1).normal(scale=scale, size=49_152).astype(np.float32)
    best = int(scores.argmax())
    for key in range(100):
        ids = passes.contenders(scores, best, key, 0.8)
        assert ids.tolist() == [winner(scores, key, 0.8)]


@pytest.mark.parametrize("isa", available_isas())
def test_equal_noisy_scores_are_all_found(isa: str) -> None:
    """A temperature so high that only the noise decides, and a row that is not contiguous."""
    scores = np.zeros((1000, 2), np.float32)[:, 0]
    for key in range(50):
        assert drawn(isa, scores, key, 1e30) == winner(scores, key, 1e30)


@pytest.mark.parametrize("isa", available_isas())
@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 2000),
    scale=st.sampled_from([0.0, 1.0, 5.0, 1e4]),
    temperature=st.sampled_from([2e-5, 0.5, 1.0, 1e3, 1e40]),
    seed=st.integers(0, 99),
)
def test_near_and_mass(isa: str, size: int, scale: float, temperature: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    scores = (random.normal(size=size) * scale).astype(np.float32)
    scores[random.random(size) < 0.2] = -np.inf
    scores[0] = 1.0
    passes, best = CompiledPasses(load_library(isa)), scores.max()
    for lowest in (best, np.float32(0), np.float32(-np.inf)):
        assert passes.near(scores, lowest).tolist() == np.flatnonzero(scores >= lowest).tolist()
    expected = exact_mass(scores, best, temperature)
    assert passes.mass(scores, best, temperature) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("isa", available_isas())
@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 3000),
    scale=st.sampled_from([0.0, 0.2, 1.5, 4.0]),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 1.0, 1.7]),
        top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
        top_k=st.sampled_from([0, 0, 1, 20]),
        min_p=st.sampled_from([0.0, 0.0, 0.02]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        logprobs=st.sampled_from([None, 3]),
    ),
    banned=st.sampled_from([(), (0, 1)]),
    seed=st.integers(0, 999),
)
def test_every_build_samples_what_numpy_samples(
    isa: str,
    size: int,
    scale: float,
    params: SamplingParams,
    banned: tuple[int, ...],
    seed: int,
) -> None:
    scores = np.random.default_rng(seed).normal(scale=scale, size=size + 2).astype(np.float32)
    found = [sampled(passes, scores, params, banned, seed) for passes in both(isa)]
    assert found[0] == found[1]


def both(isa: str) -> list[RowPasses]:
    return [CompiledPasses(load_library(isa)), NumpyPasses()]


def sampled(
    passes: RowPasses, scores: Row, params: SamplingParams, banned: tuple[int, ...], seed: int
) -> list[sampler.Sampled]:
    """Three tokens in a row."""
    request = Request(
        request_id="a",
        order=0,
        prompt_token_ids=[0],
        params=params,
        max_tokens=9,
        seed=seed,
    )
    found = []
    with (
        patch.object(filters, "row_passes", lambda: passes),
        patch.object(sampler, "row_passes", lambda: passes),
    ):
        for _ in range(3):
            found.append(sampler.sample(scores, request, banned))
            request.append(found[-1].token_id, 0.0)
    return found


@pytest.mark.parametrize("isa", available_isas())
def test_a_cut_that_rounding_could_move_is_made_by_numpy(isa: str) -> None:
    """top_p at exactly what some of the tokens have together."""
    scores = np.log(np.array([4, 2, 1, 1], np.float32))
    for top_p in (0.5, 0.75, np.nextafter(0.5, 1), np.nextafter(0.5, 0), 0.5 + 1e-7):
        params = SamplingParams(top_p=float(top_p))
        kept = []
        for passes in both(isa):
            with patch.object(filters, "row_passes", lambda passes=passes: passes):
                ids, _ = filters.filter_tokens(scores, scores.max(), params)
            kept.append(ids.tolist())
        assert kept[0] == kept[1]
