"""Predicted memory: limits are kept by spilling, then by smaller batches, or refused up front."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdeploy.calibration.memory import MIB, Sizes, available_bytes, plan_memory, resident_bytes
from qdeploy.errors import CapacityError

#: Llama-2-7B, 128 x 2,048 tokens.
LARGE = Sizes(
    method="awq",
    layer=202_383_360,
    linear=4096 * 11008,
    in_features=11008,
    features=11008,
    hidden=4096,
    vocab=32000,
    table_bytes=2 * 32000 * 4096,
    tokens=128 * 2048,
    longest=2048,
)
BASE = 500 * MIB


def test_q04_the_peak_is_this_process_own() -> None:
    """Not that of the process that started it."""
    ballast = np.ones(600 * MIB, dtype=np.uint8)
    code = "from qdeploy.calibration.memory import peak_resident_bytes as p; print(p())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 20 * MIB < int(done.stdout) < ballast.nbytes


def test_without_a_limit_everything_stays_in_memory() -> None:
    tiny = replace(LARGE, tokens=4096, layer=10**6, linear=10**5, hidden=64, in_features=64)
    plan = plan_memory(tiny, base_bytes=BASE, limit=None)
    assert (plan.spill, plan.batch_tokens) == (False, 4096)
    assert "in memory" in plan.note


@pytest.mark.parametrize("method", ["awq", "gptq", "signround", "rtn", "a method of tomorrow"])
def test_q04_limits_are_met_in_order_of_cost(method: str) -> None:
    sizes = replace(LARGE, method=method)
    whole = plan_memory(sizes, base_bytes=BASE, limit=1 << 50)
    spilled = plan_memory(sizes, base_bytes=BASE, limit=whole.peak_bytes - 1)
    assert (whole.spill, spilled.spill) == (False, True)
    assert spilled.batch_tokens == whole.batch_tokens == 4096
    assert spilled.peak_bytes < whole.peak_bytes - 2 * 4 * sizes.hidden * sizes.tokens * 0.9


def test_q03_peak_grows_with_one_layers_activations_alone() -> None:
    """Twice the samples: twice one layer's inputs and outputs, whatever the number of layers."""
    once = plan_memory(LARGE, base_bytes=BASE, limit=1 << 50).peak_bytes
    twice = plan_memory(
        replace(LARGE, tokens=2 * LARGE.tokens), base_bytes=BASE, limit=1 << 50
    ).peak_bytes
    one_layer = 4 * LARGE.hidden * LARGE.tokens
    assert 2 * one_layer <= twice - once <= 2.5 * one_layer
    spilled = [
        plan_memory(replace(LARGE, tokens=n), base_bytes=BASE, limit=10 << 30).peak_bytes
        for n in (LARGE.tokens, 8 * LARGE.tokens)
    ]
    assert spilled[0] == spilled[1]


def test_q04_too_little_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(CapacityError, match=r"--max-memory 1024MiB is too little.*about") as caught:
        plan_memory(LARGE, base_bytes=BASE, limit=1 << 30)
    least = int(str(caught.value).split("give --max-memory ")[1].split("MiB")[0])
    plan = plan_memory(LARGE, base_bytes=BASE, limit=least * MIB)
    assert plan.spill
    assert plan.batch_tokens == LARGE.longest
    with pytest.raises(CapacityError):
        plan_memory(LARGE, base_bytes=BASE, limit=least * MIB - 2 * MIB)
    assert "\n" not in str(caught.value)


@given(
    limit=st.integers(0, 1 << 36),
    tokens=st.integers(0, 1 << 22),
    longest=st.integers(0, 8192),
    base=st.integers(0, 1 << 30),
)
def test_a_plan_is_never_above_its_limit(limit: int, tokens: int, longest: int, base: int) -> None:
    sizes = replace(LARGE, tokens=tokens, longest=min(longest, tokens))
    try:
        plan = plan_memory(sizes, base_bytes=base, limit=limit)
    except CapacityError:
        return
    assert plan.peak_bytes <= limit
    assert plan.batch_tokens >= sizes.longest
    assert plan.peak_bytes > base


def test_a_sequence_longer_than_a_batch_is_a_batch() -> None:
    sizes = replace(LARGE, tokens=9000, longest=9000)
    assert plan_memory(sizes, base_bytes=BASE, limit=1 << 50).batch_tokens == 9000


def test_q04_what_the_machine_has_is_kept_to_or_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan_memory(LARGE, base_bytes=BASE, limit=1 << 50).peak_bytes - BASE
    for room, spill, warned in ((whole, False, False), (whole - 1, True, False), (MIB, True, True)):
        monkeypatch.setattr("qdeploy.calibration.memory.available_bytes", lambda room=room: room)
        plan = plan_memory(LARGE, base_bytes=BASE, limit=None)
        assert (plan.spill, plan.warning is not None) == (spill, warned)
        assert plan.batch_tokens == 4096  # bits don't depend on the machine's memory


def test_this_machine_says_what_it_has() -> None:
    assert resident_bytes() > 10 * MIB
    room = available_bytes()
    assert room is None or room > 0
