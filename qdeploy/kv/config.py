"""The KV-cache policy: which format, and which blocks stay open (DESIGN §5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from qdeploy.errors import UsageError

KV_DTYPES = ("bf16", "int8", "int4", "k8v4", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPolicy:
    """What one layer keeps instead of the model's policy."""

    layer: int
    dtype: str
    sink_blocks: int
    residual_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """A query at position t reads block b sealed iff b is full, b ≥ sink_blocks and
    b < t // block_size − residual_blocks; else open. `bf16` never seals.

    layers: policies of single layers; kept sorted, without those that change nothing.
    """

    dtype: str = "bf16"
    block_size: int = 64
    sink_blocks: int = 1
    residual_blocks: int = 0
    layers: tuple[LayerPolicy, ...] = ()

    def __post_init__(self) -> None:
        if self.block_size < 8 or self.block_size & (self.block_size - 1):
            raise UsageError(
                f"block_size={self.block_size} is not supported; choose a power of two ≥ 8",
                param="block_size",
            )
        _check(self, "")
        for policy in self.layers:
            _check(policy, f" of layer {policy.layer}")
        indices = [policy.layer for policy in self.layers]
        for layer in indices:
            if layer < 0 or indices.count(layer) > 1:
                fault = "is negative" if layer < 0 else "is given twice"
                raise UsageError(f"kv_cache layer {layer} {fault}; name each layer once, from 0")
        own = (self.dtype, self.sink_blocks, self.residual_blocks)
        kept = sorted((p for p in self.layers if _values(p) != own), key=lambda p: p.layer)
        object.__setattr__(self, "layers", tuple(kept))

    @property
    def seals(self) -> bool:
        """Whether blocks are ever quantized, in layers without a policy of their own."""
        return self.dtype != "bf16"

    def reads_sealed(self, block: int, query_block: int) -> bool:
        """The position rule: does a query in `query_block` read `block` sealed?"""
        return (
            self.seals and block >= self.sink_blocks and block < query_block - self.residual_blocks
        )

    def for_layer(self, layer: int) -> KVCacheConfig:
        """The policy of one layer; it has no overrides."""
        for policy in self.layers:
            if policy.layer == layer:
                return KVCacheConfig(
                    dtype=policy.dtype,
                    block_size=self.block_size,
                    sink_blocks=policy.sink_blocks,
                    residual_blocks=policy.residual_blocks,
                )
        return replace(self, layers=())

    def with_dtype(self, dtype: str) -> KVCacheConfig:
        """One format in all layers, with this policy's block counts."""
        return replace(self, dtype=dtype, layers=())

    @property
    def label(self) -> str:
        """The format and those of layers with their own, for tables and messages."""
        return self.dtype + layers_key(self.layers)

    @property
    def key(self) -> str:
        """Names the policy in manifests and messages, e.g. int4/b64/s1/r0+0-1=int8/s1/r0."""
        own = f"{self.dtype}/b{self.block_size}/s{self.sink_blocks}/r{self.residual_blocks}"
        return own + layers_key(self.layers)


def layers_key(layers: Sequence[LayerPolicy]) -> str:
    """The part of a key that names overrides: layers in order, neighbours of one policy as one."""
    found = ""
    runs = groupby(enumerate(layers), key=lambda item: (item[1].layer - item[0], _values(item[1])))
    for (_, (dtype, sink, residual)), items in runs:
        run = [policy.layer for _, policy in items]
        name = f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}"
        found += f"+{name}={dtype}/s{sink}/r{residual}"
    return found


def _values(policy: KVCacheConfig | LayerPolicy) -> tuple[str, int, int]:
    return policy.dtype, policy.sink_blocks, policy.residual_blocks


def _check(policy: KVCacheConfig | LayerPolicy, where: str) -> None:
    if policy.dtype not in KV_DTYPES:
        raise UsageError(
            f"kv_cache_dtype {policy.dtype!r}{where} is unknown; "
            f"choose one of {', '.join(KV_DTYPES)}",
            param="kv_cache_dtype",
        )
    if policy.sink_blocks < 0 or policy.residual_blocks < 0:
        raise UsageError(f"sink_blocks and residual_blocks{where} must be ≥ 0")
