"""How many open and sealed blocks a memory budget holds, by exact arithmetic (DESIGN §5)."""

from __future__ import annotations

from dataclasses import dataclass

from qdeploy.errors import CapacityError, UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.block_manager import blocks_for_tokens

DEFAULT_KV_CACHE_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPools:
    """Sizes of the two pools, in blocks."""

    num_open_blocks: int
    num_sealed_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBudget:
    """A budget and what one block of each pool costs, in the same unit (bytes, or blocks)."""

    kv: KVCacheConfig
    total: int
    open_cost: int
    sealed_cost: int
    unit: str = "bytes"

    def cost(self, num_tokens: int) -> int:
        """Cost of the smallest pools in which one sequence of num_tokens runs."""
        num_open, num_sealed = blocks_for_tokens(self.kv, num_tokens)
        return num_open * self.open_cost + num_sealed * self.sealed_cost

    def longest(self, limit: int) -> int:
        """The largest max_model_len ≤ limit that fits; `cost` grows with length, so bisect."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.cost(middle) <= self.total else (low, middle - 1)
        return low

    def split(self, max_model_len: int, max_num_seqs: int) -> KVPools:
        """Open blocks for every sequence's sinks, residual and tail; the rest is sealed.

        One request of max_model_len tokens always fits; CapacityError when it can't.
        """
        if self.cost(max_model_len) > self.total:
            raise self._too_small(max_model_len)
        if not self.kv.seals:
            return KVPools(num_open_blocks=self.total // self.open_cost, num_sealed_blocks=0)
        num_open, num_sealed = blocks_for_tokens(self.kv, max_model_len)
        wanted = max_num_seqs * num_open + self.kv.residual_blocks + 1
        affordable = (self.total - num_sealed * self.sealed_cost) // self.open_cost
        num_open = min(wanted, affordable)
        rest = self.total - num_open * self.open_cost
        return KVPools(num_open_blocks=num_open, num_sealed_blocks=rest // self.sealed_cost)

    def _too_small(self, max_model_len: int) -> CapacityError:
        option = "kv_cache_memory" if self.unit == "bytes" else "num_kv_blocks"
        longest = self.longest(max_model_len)
        fits = f"max_model_len={longest}, or " if longest else ""
        return CapacityError(
            f"max_model_len={max_model_len} needs {self.cost(max_model_len)} {self.unit} of KV"
            f" cache as {self.kv.key} but {option} is {self.total}; give {fits}"
            f"{option}={self.cost(max_model_len)}, or a smaller kv_cache_dtype"
        )


def plan_kv_pools(
    *,
    kv: KVCacheConfig,
    max_model_len: int,
    max_num_seqs: int,
    open_block_bytes: int,
    sealed_block_bytes: int,
    kv_cache_memory_bytes: int | None = None,
    num_kv_blocks: int | None = None,
) -> KVPools:
    """Split a byte budget, or a number of blocks of either kind, into the two pools.

    With neither given: what max_num_seqs requests of max_model_len need, at most 2 GiB.
    """
    if kv_cache_memory_bytes is not None and num_kv_blocks is not None:
        raise UsageError("give kv_cache_memory or num_kv_blocks, not both", param="num_kv_blocks")
    if num_kv_blocks is not None:
        budget = KVBudget(kv=kv, total=num_kv_blocks, open_cost=1, sealed_cost=1, unit="blocks")
        return budget.split(max_model_len, max_num_seqs)
    total = DEFAULT_KV_CACHE_BYTES if kv_cache_memory_bytes is None else kv_cache_memory_bytes
    budget = KVBudget(
        kv=kv, total=total, open_cost=open_block_bytes, sealed_cost=max(sealed_block_bytes, 1)
    )
    if kv_cache_memory_bytes is None:
        full = max_num_seqs * budget.cost(max_model_len)
        full += (kv.residual_blocks + 1) * open_block_bytes
        budget = KVBudget(
            kv=kv,
            total=min(total, full),
            open_cost=budget.open_cost,
            sealed_cost=budget.sealed_cost,
        )
    return budget.split(max_model_len, max_num_seqs)
