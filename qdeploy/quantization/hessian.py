"""Statistics of a linear layer's inputs, in float32, over real tokens only."""

from __future__ import annotations

import torch
from torch import Tensor

#: What H is dampened by at least, as a share of its mean diagonal (GPTQ §3.3).
DAMPENING = 0.01
#: H is symmetric: of each band of so many rows only what lies right of the diagonal is summed.
BAND = 512


class Hessian:
    """H = Σ x xᵀ, [in, in]; one for all layers that share the input (GPTQ, eq. 1 up to a factor).

    Feed rows [tokens, in], without padding. A sum, not a running mean: dividing once is stabler.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._sum: Tensor | None = None

    def __call__(self, rows: Tensor) -> None:
        rows = rows.reshape(-1, rows.shape[-1]).float()
        if self._sum is None:
            self._sum = torch.zeros(rows.shape[1], rows.shape[1])
        for start in range(0, rows.shape[1], BAND):
            band = rows[:, start : start + BAND]
            self._sum[start : start + BAND, start:].addmm_(band.t(), rows[:, start:])
        self.rows += rows.shape[0]

    @property
    def matrix(self) -> Tensor:
        """The mean over tokens, [in, in]; raises ValueError before the first row."""
        if self._sum is None or not self.rows:
            raise ValueError("no rows were observed")
        upper = self._sum.triu()
        return (upper + upper.triu(1).t()).div_(self.rows)


def dampened(hessian: Tensor, share: float = DAMPENING) -> Tensor:
    """H with a share of its mean diagonal added to the diagonal: few tokens don't say everything.

    Features that never were seen (H_ii = 0) don't count in the mean, and get all of it.
    """
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    mean = torch.ones_like(diagonal[0]) if bool(dead.all()) else diagonal[~dead].mean()
    result = hessian.clone()
    result.diagonal().add_(share * mean)
    result.diagonal()[dead] = mean
    return result


class InputStatistics(Hessian):
    """H, and mean |x| of each input feature: AWQ's measure of what is salient."""

    def __init__(self) -> None:
        super().__init__()
        self._absolute: Tensor | None = None

    def __call__(self, rows: Tensor) -> None:
        super().__call__(rows)
        total = rows.reshape(-1, rows.shape[-1]).abs().sum(0, dtype=torch.float32)
        self._absolute = total if self._absolute is None else self._absolute + total

    @property
    def absolute_mean(self) -> Tensor:
        """[in], float32; raises ValueError before the first row."""
        if self._absolute is None or not self.rows:
            raise ValueError("no rows were observed")
        return self._absolute / self.rows


class AbsoluteMax:
    """max |x| of each input feature, [in], over all rows that it is called with."""

    def __init__(self) -> None:
        self._max: Tensor | None = None

    def __call__(self, rows: Tensor) -> None:
        found = rows.reshape(-1, rows.shape[-1]).float().abs().amax(0)
        self._max = found if self._max is None else torch.maximum(self._max, found)

    @property
    def max(self) -> Tensor:
        """[in], float32; raises ValueError before the first row."""
        if self._max is None:
            raise ValueError("no rows were observed")
        return self._max
