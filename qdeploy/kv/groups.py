"""KV groups: layers whose K/V lie in one block, and how many blocks a sequence needs (DESIGN §5).

A block is one id in one group. Two layers share a group iff they keep K/V by the same policy and
see the same window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qdeploy.errors import UsageError
from qdeploy.kv.config import KVCacheConfig

if TYPE_CHECKING:
    from qdeploy.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolSize:
    """Sizes of one group's two pools, in blocks."""

    num_open_blocks: int
    num_sealed_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """layers: indices, ascending. config: their policy, without overrides. window: a query at t
    sees keys t − window + 1 … t; 0 for all.
    """

    layers: tuple[int, ...]
    config: KVCacheConfig
    window: int = 0

    def first_block(self, position: int) -> int:
        """The first block that a query at `position`, or a later one, reads: once `position`
        tokens are computed, the blocks before it can go.
        """
        if not self.window:
            return 0
        return max(0, position - self.window + 1) // self.config.block_size

    def blocks_for_tokens(self, num_tokens: int, lookahead_tokens: int = 0) -> tuple[int, int]:
        """(open, sealed) blocks that one sequence needs to grow to num_tokens, block by block.

        Open: sinks, the residual and the tail. Of a windowed group, no more than the window
        touches while a block is being filled. A prompt chunk that spans blocks may hold more until
        the step is done; the scheduler then ends it at a block's end. lookahead_tokens: drafts
        beyond, which fill blocks that stay open as well.
        """
        kv, ahead = self.config, -(-lookahead_tokens // self.config.block_size)
        held = -(-num_tokens // kv.block_size)
        most = -(-(self.window - 1) // kv.block_size) + 1 if self.window else held
        if not kv.seals:
            return min(held, most) + ahead, 0
        num_open = min(held, most, kv.sink_blocks + kv.residual_blocks + 1)
        num_sealed = max(0, num_tokens // kv.block_size - kv.sink_blocks)
        return num_open + ahead, min(num_sealed, most) + ahead

    def blocks_held(self, num_tokens: int) -> tuple[int, int]:
        """(open, sealed) blocks that a sequence holds between steps, num_tokens being computed."""
        kv, size = self.config, self.config.block_size
        blocks = range(self.first_block(num_tokens), -(-num_tokens // size))
        num_open = sum(not kv.reads_sealed(block, num_tokens // size) for block in blocks)
        full = sum(kv.sink_blocks <= block < num_tokens // size for block in blocks)
        return num_open, full if kv.seals else 0


def require_layers(config: KVCacheConfig, num_layers: int) -> None:
    """UsageError when `config` names a layer that a model of num_layers hasn't got."""
    for policy in config.layers:
        if policy.layer >= num_layers:
            raise UsageError(
                f"kv_cache layer {policy.layer} is not in a model of {num_layers} layers; "
                f"give 0 … {num_layers - 1}"
            )


def kv_groups(spec: DecoderSpec, config: KVCacheConfig) -> tuple[KVGroup, ...]:
    """The groups of a model's layers, in the order of their first layers.

    A window of at least the model's context hides nothing and counts as none. UsageError when
    `config` names a layer that the model hasn't got.
    """
    require_layers(config, spec.num_layers)
    layers: dict[tuple[KVCacheConfig, int], list[int]] = {}
    for layer, window in enumerate(spec.sliding_windows):
        seen = 0 if window is None or window >= spec.max_model_len else window
        layers.setdefault((config.for_layer(layer), seen), []).append(layer)
    return tuple(
        KVGroup(layers=tuple(indices), config=policy, window=window)
        for (policy, window), indices in layers.items()
    )
