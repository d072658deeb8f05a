"""Attention of one query tile; every shape is a function of positions only (ADR 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from qdeploy_kernels.reference.elementwise import soft_cap


def attend_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    *,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Causal grouped-query attention of the tile at positions start … start + tile − 1.

    q: [tile, num_q_heads, head_dim], scaled; k, v: [kv_heads, num_keys, head_dim], the keys of
    positions 0 … num_keys − 1; all float32. What a query doesn't see may hold anything; a value
    that it sees and that isn't finite makes its channel NaN. window: a query sees that many newest
    keys. Returns [tile, num_q_heads, head_dim].
    """
    (tile, _, dim), (heads, num_keys, _) = q.shape, k.shape
    grouped = q.view(tile, heads, -1, dim).permute(1, 2, 0, 3).reshape(heads, -1, dim)
    scores = soft_cap(torch.matmul(grouped, k.transpose(1, 2)), cap)
    hidden = _hidden(torch.arange(start, start + tile), torch.arange(num_keys), window)
    scores = scores.view(heads, -1, tile, num_keys).masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1).view(heads, -1, num_keys)
    out = torch.matmul(weights, v).view(heads, -1, tile, dim)
    if not out.isfinite().all():
        out = _without_unseen(weights, v, hidden)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _without_unseen(weights: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Weights · v, [heads, queries of a KV head, tile, head_dim], where a masked NaN isn't 0 · NaN.

    The products are of the same shapes as ever, so a row without NaN keeps its bits.
    """
    spoiled = ~v.isfinite()
    out = torch.matmul(weights, v.masked_fill(spoiled, 0))
    sees_one = torch.matmul((~hidden).float(), spoiled.float()) > 0  # [heads, tile, head_dim]
    out = out.view(v.shape[0], -1, hidden.shape[0], v.shape[2])
    return out.masked_fill(sees_one[:, None], float("nan"))


def _hidden(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Mask [tile, num_keys]: True where a query must not look."""
    hidden = keys > queries[:, None]
    return hidden if window is None else hidden | (keys <= queries[:, None] - window)
