"""What a KV policy does to one layer's attention: its queries, keys and values, tried by position.

The codes are the cache's own (`SealedLayout`) and blocks are read by the rule of DESIGN §5, so a
trial is what the layer would be served with; only float32 sums may differ in their last bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qdeploy.errors import UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.pool import sealed_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Inputs of one layer's attention on whole sequences, float32, rotated, as a model makes them.

    q: [batch, q_heads, tokens, head_dim]; k, v: [batch, kv_heads, tokens, head_dim]
    mask: broadcasts to [batch, q_heads, tokens, tokens], True or 0 where a key is seen; None is
    causal. scale: factor of q · k.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float

    def __post_init__(self) -> None:
        if self.k.shape != self.v.shape:
            raise UsageError(
                f"keys of {list(self.k.shape)} and values of {list(self.v.shape)} can't share a KV "
                "block; choose kv_cache_dtype bf16"
            )


@dataclass(slots=True)
class TrialError:
    """Squared error of attention outputs, and the squared outputs, summed over the queries that
    read at least one sealed block.
    """

    error: float = 0.0
    norm: float = 0.0
    queries: int = 0

    @property
    def relative(self) -> float:
        """‖error‖ / ‖output‖; NaN before the first query."""
        if not self.queries:
            return float("nan")
        return (self.error / self.norm) ** 0.5 if self.norm else float(self.error > 0)


def try_policy(
    call: AttentionCall, exact: Tensor, config: KVCacheConfig, total: TrialError
) -> None:
    """Add to `total` what reading `call` through the KV policy does to its outputs.

    exact: the outputs on K and V as they are, `attend(call, call.k, call.v, 0, tokens)`. A sealed
    block that the window hides from a query counts as read: it can do no harm.
    """
    size, tokens = config.block_size, call.q.shape[2]
    layout = sealed_layout(config, call.k.shape[1], call.k.shape[3])
    k, v = call.k.clone(), call.v.clone()
    # The first query block that reads a sealed block, which is the one after the sinks.
    for block in range(config.sink_blocks + config.residual_blocks + 1, -(-tokens // size)):
        newest = block - 1 - config.residual_blocks
        rows = slice(newest * size, (newest + 1) * size)
        k[:, :, rows], v[:, :, rows] = layout.unseal(layout.seal(k[:, :, rows], v[:, :, rows]))
        low, high = block * size, min((block + 1) * size, tokens)
        expected = exact[:, :, low:high]
        error = (attend(call, k, v, low, high) - expected).double().square().sum()
        total.error += error.item()
        total.norm += expected.double().square().sum().item()
        total.queries += (high - low) * call.q.shape[0]


def attend(call: AttentionCall, k: Tensor, v: Tensor, low: int, high: int) -> Tensor:
    """Outputs [batch, q_heads, high − low, head_dim] of queries low … high − 1 over keys before
    `high`.
    """
    repeat = call.q.shape[1] // k.shape[1]
    if call.mask is None:
        mask = torch.ones(high - low, high, dtype=torch.bool).tril(low)
    else:
        mask = call.mask[..., low:high, :high]
    return scaled_dot_product_attention(
        call.q[:, :, low:high],
        k[:, :, :high].repeat_interleave(repeat, dim=1),
        v[:, :, :high].repeat_interleave(repeat, dim=1),
        attn_mask=mask,
        scale=call.scale,
    )
