"""How far a quantized model's predictions lie from the reference's, position by position."""

from __future__ import annotations

import math
from array import array

import torch
from torch import Tensor

#: Rows compared at once: float64 copies of 64 rows of a 262k vocabulary take 134 MB each.
_ROWS = 64


class Divergence:
    """Accumulates KL(reference ‖ model), top-1 agreement and both perplexities."""

    def __init__(self) -> None:
        # Not tensors: one small block left behind between two large ones keeps the heap from
        # reusing what lies there, which cost 0.4 GB a window of 1,024 tokens.
        self._kl = array("d")
        self._agree = 0
        self._nll = [0.0, 0.0]
        self._num_predicted = 0

    def add(self, reference: Tensor, model: Tensor, targets: Tensor) -> None:
        """Compare one window, or a piece of it.

        reference, model: raw logits [num_tokens, vocab], float32
        targets: int64, the next token at every position; the window's last has none
        """
        for start in range(0, reference.shape[0], _ROWS):
            rows = slice(start, start + _ROWS)
            self._add_rows(reference[rows], model[rows], targets[rows])

    def _add_rows(self, reference: Tensor, model: Tensor, targets: Tensor) -> None:
        ref_logp = torch.log_softmax(reference.double(), dim=-1)
        logp = torch.log_softmax(model.double(), dim=-1)
        self._kl.extend((ref_logp.exp() * (ref_logp - logp)).sum(-1).tolist())
        self._agree += int((reference.argmax(-1) == model.argmax(-1)).sum())
        for index, values in enumerate((ref_logp, logp)):
            picked = values[: len(targets)].gather(-1, targets[:, None])
            self._nll[index] -= float(picked.sum())
        self._num_predicted += len(targets)

    def metrics(self) -> dict[str, float]:
        """KL in nats over all positions (mean, standard error, 99th percentile), agreement 0..1."""
        kl = torch.tensor(self._kl, dtype=torch.float64)
        reference_ppl, ppl = (_perplexity(nll / self._num_predicted) for nll in self._nll)
        return {
            "perplexity": ppl,
            "reference_perplexity": reference_ppl,
            "perplexity_ratio": ppl / reference_ppl,
            "kl_mean": float(kl.mean()),
            "kl_stderr": float(kl.std() / math.sqrt(len(kl))) if len(kl) > 1 else 0.0,
            "kl_p99": float(torch.quantile(kl, 0.99)),
            "top1_agreement": self._agree / len(kl),
        }


def _perplexity(nll: float) -> float:
    """e^nll; infinite for a model so broken that no float64 holds it."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf
