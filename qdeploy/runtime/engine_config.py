"""What an engine may use, and how it behaves."""

from __future__ import annotations

from dataclasses import dataclass

from qdeploy.errors import UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.preemption import check_preemption
from qdeploy.runtime.speculation.config import NO_SPECULATION, SpeculativeConfig

DEFAULT_SWAP_SPACE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Capacity and policy of an engine.

    max_model_len: None takes the model's context. kv_cache_memory_bytes or num_kv_blocks (open
    and sealed together) sizes the cache; with neither, see kv_budget.plan_kv_pools.
    enable_prefix_caching: K/V of equal prompt beginnings are computed once. preemption: `recompute`
    or `swap` to at most swap_space_bytes of host memory, or `auto`, the cheaper of both by
    measured cost. speculative: how tokens are drafted. seed: for requests that give none.
    """

    kv: KVCacheConfig
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    preemption: str = "auto"
    swap_space_bytes: int = DEFAULT_SWAP_SPACE_BYTES
    kv_cache_memory_bytes: int | None = None
    num_kv_blocks: int | None = None
    speculative: SpeculativeConfig = NO_SPECULATION
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"{name}={getattr(self, name)} is not allowed; give 1 or more", param=name
                )
        check_preemption(self.preemption, self.swap_space_bytes)
