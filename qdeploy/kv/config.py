"""The KV-cache policy: which format, and which blocks stay open (DESIGN §5)."""

from __future__ import annotations

from dataclasses import dataclass

from qdeploy.errors import UsageError

KV_DTYPES = ("bf16", "int8", "int4", "k8v4", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """A query at position t reads block b sealed iff b is full, b ≥ sink_blocks and
    b < t // block_size − residual_blocks; else open. `bf16` never seals.
    """

    dtype: str = "bf16"
    block_size: int = 64
    sink_blocks: int = 1
    residual_blocks: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in KV_DTYPES:
            raise UsageError(
                f"kv_cache_dtype {self.dtype!r} is unknown; choose one of {', '.join(KV_DTYPES)}",
                param="kv_cache_dtype",
            )
        if self.block_size < 8 or self.block_size & (self.block_size - 1):
            raise UsageError(
                f"block_size={self.block_size} is not supported; choose a power of two ≥ 8",
                param="block_size",
            )
        if self.sink_blocks < 0 or self.residual_blocks < 0:
            raise UsageError("sink_blocks and residual_blocks must be ≥ 0")

    @property
    def seals(self) -> bool:
        """Whether blocks are ever quantized."""
        return self.dtype != "bf16"

    def reads_sealed(self, block: int, query_block: int) -> bool:
        """The position rule: does a query in `query_block` read `block` sealed?"""
        return (
            self.seals and block >= self.sink_blocks and block < query_block - self.residual_blocks
        )

    @property
    def key(self) -> str:
        """Names the policy in manifests and messages, e.g. int4/b64/s1/r0."""
        return f"{self.dtype}/b{self.block_size}/s{self.sink_blocks}/r{self.residual_blocks}"
