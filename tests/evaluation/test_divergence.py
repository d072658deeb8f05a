"""Divergence against the textbook formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from qdeploy.calibration.memory import MIB, resident_bytes
from qdeploy.evaluation.divergence import Divergence


def test_equal_logits_cost_nothing() -> None:
    logits = torch.randn(10, 7)
    total = Divergence()
    total.add(logits, logits.clone(), torch.randint(0, 7, (9,)))
    metrics = total.metrics()
    assert metrics["kl_mean"] == 0
    assert metrics["top1_agreement"] == 1
    assert metrics["perplexity_ratio"] == 1


def test_matches_torch_over_several_windows() -> None:
    total, kl, nll, ref_nll, agree = Divergence(), [], 0.0, 0.0, 0
    for length in (130, 70):  # more rows than one slice
        ref, model = torch.randn(length, 11), torch.randn(length, 11)
        targets = torch.randint(0, 11, (length - 1,))
        total.add(ref, model, targets)
        pair = log_softmax(model.double(), -1), log_softmax(ref.double(), -1)
        kl.append(kl_div(*pair, reduction="none", log_target=True).sum(-1))
        nll += float(cross_entropy(model.double()[:-1], targets, reduction="sum"))
        ref_nll += float(cross_entropy(ref.double()[:-1], targets, reduction="sum"))
        agree += int((ref.argmax(-1) == model.argmax(-1)).sum())
    metrics = total.metrics()
    assert metrics["kl_mean"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-9)
    assert metrics["perplexity"] == pytest.approx(math.exp(nll / 198), rel=1e-9)
    assert metrics["reference_perplexity"] == pytest.approx(math.exp(ref_nll / 198), rel=1e-9)
    assert metrics["top1_agreement"] == agree / 200


def test_memory_does_not_grow_with_the_text() -> None:
    """A real vocabulary's rows; what is kept of each slice must not pin the heap around it."""
    logits, total = torch.zeros(64, 49152), Divergence()
    targets = torch.zeros(64, dtype=torch.int64)
    for _ in range(3):
        total.add(logits, logits, targets)
    before = resident_bytes()
    for _ in range(24):
        total.add(logits, logits, targets)
    assert resident_bytes() - before < 150 * MIB
