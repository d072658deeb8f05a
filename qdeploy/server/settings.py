"""Everything that `qdeploy serve` can be told, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from qdeploy.errors import UsageError
from qdeploy.runtime.engine_config import DEFAULT_SWAP_SPACE_BYTES
from qdeploy.runtime.preemption import check_preemption
from qdeploy.runtime.speculation.config import NO_SPECULATION, SpeculativeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Sizes in bytes, times in seconds; None is "decide from the model" or "no limit".

    port: 0 takes a free one. kv_cache_dtype: `auto` is the artifact's policy. act: None is the
    backend's default. enable_prefix_caching, preemption, swap_space_bytes: see EngineConfig.
    max_queued_requests: sequences that may wait beyond the max_num_seqs that run; more get 503.
    request_timeout: from arrival to the last token. shutdown_timeout: how long a SIGTERM lets
    open requests finish. stall_timeout: a step that takes longer makes /health answer 503.
    cors_origin: allowed origins; empty sends no CORS headers. seed: of requests that give none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    num_kv_blocks: int | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    preemption: str = "auto"
    swap_space_bytes: int = DEFAULT_SWAP_SPACE_BYTES
    speculative: SpeculativeConfig = NO_SPECULATION
    backend: str = "auto"
    act: str | None = None
    threads: int | None = None
    allow_unverified: bool = False
    verify_checksums: bool = False
    max_queued_requests: int = 256
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    stall_timeout: float = 120.0
    max_body_size: int = 8 * 2**20
    cors_origin: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError(
                "api_key is empty, which would leave the server open; give a key or none",
                param="api_key",
            )
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_body_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} must be at least 1", param=name)
        check_preemption(self.preemption, self.swap_space_bytes)
        if self.max_queued_requests < 0 or self.shutdown_timeout < 0:
            raise UsageError("max_queued_requests and shutdown_timeout must be at least 0")
