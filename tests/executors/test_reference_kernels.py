"""The reference kernels against float64, and the row-invariance that P2 stands on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qdeploy_kernels.reference.attention import attend_tile
from qdeploy_kernels.reference.elementwise import (
    activate,
    rms_norm,
    rope_angles,
    rotate,
    soft_cap,
)
from qdeploy_kernels.reference.linear import ROW_TILE, pad_rows, tiled_linear


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 70), st.sampled_from([(8, 24), (64, 33), (576, 192), (1536, 576)]))
@settings(max_examples=30, deadline=None)
def test_a_row_has_the_same_bits_anywhere(rows: int, shape: tuple[int, int]) -> None:
    x, weight, bias = random(rows, shape[0]), random(shape[1], shape[0]), random(shape[1])
    together = tiled_linear(pad_rows(x), weight, bias)
    assert together.shape == (-(-rows // ROW_TILE) * ROW_TILE, shape[1])
    expected = x.double() @ weight.double().T + bias
    torch.testing.assert_close(together[:rows].double(), expected, atol=1e-3, rtol=0)
    for row in {0, rows // 2, rows - 1}:
        alone = tiled_linear(pad_rows(x[row : row + 1]), weight, bias)
        assert torch.equal(alone[0], together[row])


@given(st.integers(1, 70), st.sampled_from([16, 33, 64, 576]))
@settings(max_examples=30, deadline=None)
def test_elementwise_rows_keep_their_bits(rows: int, size: int) -> None:
    x, weight = pad_rows(random(rows, size)), random(size)
    row = rows - 1
    alone = pad_rows(x[row : row + 1].clone())
    assert torch.equal(rms_norm(x, weight, 1e-5)[row], rms_norm(alone, weight, 1e-5)[0])
    for kind in ("silu", "gelu", "gelu_tanh"):
        assert torch.equal(activate(x, kind)[row], activate(alone, kind)[0])


@pytest.mark.parametrize("size", [1000, 2048, 2049])
def test_threads_do_not_change_elements(size: int) -> None:
    """torch splits 64 · size elements between threads at places that no vector ends at."""
    x = random(64, size)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 7):
            torch.set_num_threads(threads)
            kinds = [activate(x, kind) for kind in ("silu", "gelu", "gelu_tanh")]
            angles = rope_angles(torch.arange(700), random(32), 1.0)
            results.append([*kinds, soft_cap(x, 3.0), rms_norm(x, x[0], 1e-6), *angles])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    for kind in ("silu", "gelu", "gelu_tanh"):
        assert torch.equal(activate(x[5:6], kind)[0], activate(x, kind)[5])
    alone = rope_angles(torch.tensor([333]), random(32), 1.0)
    assert torch.equal(alone[0][0], results[0][-2][333])


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


def test_rotation_turns_pairs_by_their_angle() -> None:
    positions, frequencies = torch.tensor([0, 5, 900]), torch.tensor([1.0, 0.01])
    cos, sin = rope_angles(positions, frequencies, 2.0)
    x = random(3, 2, 4)
    got = torch.view_as_complex(torch.stack(rotate(x, cos, sin).chunk(2, -1), -1).double())
    pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).double())
    angles = positions[:, None, None].double() * frequencies.double()
    expected = 2 * pairs * torch.exp(1j * angles)
    assert (got - expected).abs().max() < 2e-4


def naive(q: Tensor, k: Tensor, v: Tensor, start: int, window: int, cap: float | None) -> Tensor:
    out = torch.zeros_like(q, dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[0]
    for i in range(len(q)):
        seen = slice(max(0, start + i - window + 1), start + i + 1)
        for head in range(q.shape[1]):
            scores = k[head // group, seen] @ q[i, head]
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            out[i, head] = torch.softmax(scores, 0) @ v[head // group, seen]
    return out


@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2), (9, 3)])
@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_attention(heads: tuple[int, int], window: int | None, cap: float | None) -> None:
    q = random(16, heads[0], 8) / math.sqrt(8)
    k, v = random(heads[1], 64, 8, seed=1), random(heads[1], 64, 8, seed=2)
    got = attend_tile(q, k, v, 32, window=window, cap=cap)
    torch.testing.assert_close(
        got.double(), naive(q, k, v, 32, window or 64, cap), atol=1e-5, rtol=0
    )


def test_a_query_is_the_same_alone_and_whatever_stands_after_it() -> None:
    q, k, v = random(16, 4, 16), random(2, 64, 16, seed=1), random(2, 64, 16, seed=2)
    full = attend_tile(q, k, v, 16)
    for row in range(16):
        alone, keys, values = torch.zeros_like(q), k.clone(), v.clone()
        alone[row] = q[row]
        keys[:, 17 + row :] = float("nan")
        values[:, 17 + row :] = 0
        assert torch.equal(attend_tile(alone, keys, values, 16)[row], full[row])


def test_soft_cap_bounds() -> None:
    x = torch.tensor([-1e6, 0.0, 0.5, 1e6])
    torch.testing.assert_close(soft_cap(x, 30.0), torch.tensor([-30.0, 0.0, 0.49995, 30.0]))
    assert soft_cap(x, None) is x


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 5])
def test_a_value_that_is_not_seen_spoils_nothing(bad: float, window: int | None) -> None:
    """0 · NaN is NaN: a draft's NaN must not reach the rows before it, nor one that has left."""
    q, k, v = random(16, 4, 8), random(2, 32, 8, seed=1), random(2, 32, 8, seed=2)
    clean = attend_tile(q, k, v, 16, window=window)
    k[:, 24], v[0, 24, 3] = bad, bad
    got = attend_tile(q, k, v, 16, window=window)
    sees = [t for t in range(16) if 16 + t >= 24 and (window is None or 16 + t < 24 + window)]
    others = [t for t in range(16) if t not in sees]
    assert torch.equal(got[others], clean[others])
    assert got[sees].isnan().any(dim=(1, 2)).all()
