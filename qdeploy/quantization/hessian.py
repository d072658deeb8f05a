"""Second moments of a linear layer's inputs, summed in float32 over real tokens only."""

from __future__ import annotations

import torch
from torch import Tensor


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
        self._sum.addmm_(rows.t(), rows)
        self.rows += rows.shape[0]

    @property
    def matrix(self) -> Tensor:
        """The mean over tokens, [in, in]; raises ValueError before the first row."""
        if self._sum is None or not self.rows:
            raise ValueError("no rows were observed")
        return self._sum / self.rows


class GroupMoments:
    """What AWQ needs of all tokens: mean |x|, [in], and H within each group, [groups, g, g]."""

    def __init__(self, group_size: int) -> None:
        self.rows = 0
        self._group_size = group_size
        self._absolute: Tensor | None = None
        self._blocks: Tensor | None = None

    def __call__(self, rows: Tensor) -> None:
        rows = rows.reshape(-1, rows.shape[-1]).float()
        size = rows.shape[1] if self._group_size == -1 else self._group_size
        grouped = rows.view(rows.shape[0], -1, size).transpose(0, 1)
        blocks = grouped.transpose(1, 2) @ grouped
        absolute = rows.abs().sum(0)
        first = self._blocks is None or self._absolute is None
        self._blocks = blocks if first else self._blocks + blocks  # type: ignore[operator]
        self._absolute = absolute if first else self._absolute + absolute  # type: ignore[operator]
        self.rows += rows.shape[0]

    @property
    def absolute_mean(self) -> Tensor:
        """Mean |x| of each input feature, [in]; raises ValueError before the first row."""
        if self._absolute is None:
            raise ValueError("no rows were observed")
        return self._absolute / self.rows

    @property
    def blocks(self) -> Tensor:
        """Mean of x xᵀ within each group, [groups, g, g]; ValueError before the first row."""
        if self._blocks is None:
            raise ValueError("no rows were observed")
        return self._blocks / self.rows
