"""The two KV pools of a group of layers, and their exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVGroup, KVPoolSize, kv_groups
from qdeploy.kv.kivi import BITS, SealedLayout
from qdeploy.models.spec import DecoderSpec


def sealed_layout(config: KVCacheConfig, num_kv_heads: int, head_dim: int) -> SealedLayout:
    """Layout of one layer's sealed block; `config` must seal."""
    bits_k, bits_v = BITS[config.dtype]
    return SealedLayout(
        bits_k=bits_k,
        bits_v=bits_v,
        block_size=config.block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        e4m3=config.dtype == "fp8",
    )


def sealed_block_bytes(spec: DecoderSpec, group: KVGroup) -> int:
    """Bytes of a group's sealed block; 0 for a format that never seals."""
    if not group.config.seals:
        return 0
    layout = sealed_layout(group.config, spec.num_kv_heads, spec.head_dim)
    return len(group.layers) * layout.num_bytes


def open_block_bytes(spec: DecoderSpec, group: KVGroup, itemsize: int) -> int:
    """Bytes of a group's open block, at `itemsize` bytes an element."""
    elements = 2 * len(group.layers) * spec.num_kv_heads * spec.head_dim
    return elements * group.config.block_size * itemsize


def bytes_per_token(spec: DecoderSpec, config: KVCacheConfig) -> float:
    """Stored bytes of one token's K and V over all layers, sealed where a layer seals.

    UsageError when the policy names a layer that the model hasn't got.
    """
    groups = kv_groups(spec, config)
    blocks = (sealed_block_bytes(spec, g) or open_block_bytes(spec, g, itemsize=2) for g in groups)
    return sum(blocks) / config.block_size


def _zeros(shape: tuple[int, ...], dtype: type) -> Tensor:
    """Zeros whose pages the system hands out at the first write: torch.zeros writes them all,
    which takes seconds for a pool of 2 GiB. Raises RuntimeError, as torch does, without memory.
    """
    try:
        return torch.from_numpy(numpy.zeros(shape, dtype))
    except (MemoryError, ValueError) as error:  # ValueError: more than addresses can count
        raise RuntimeError(str(error)) from error


class KVPools:
    """One group's pools; `layer` below is the model's own index of a layer of the group.

    open: float32 [num_open, layers, 2, kv_heads, block_size, head_dim]
    sealed: uint8 [num_sealed, layers, bytes of a layer's block]
    """

    def __init__(self, spec: DecoderSpec, group: KVGroup, size: KVPoolSize) -> None:
        config, layers = group.config, len(group.layers)
        block = (layers, 2, spec.num_kv_heads, config.block_size, spec.head_dim)
        self.open = _zeros((size.num_open_blocks, *block), numpy.float32)
        heads = (spec.num_kv_heads, spec.head_dim)
        self.layout = sealed_layout(config, *heads) if config.seals else None
        num_bytes = self.layout.num_bytes if self.layout is not None else 0
        self.sealed = _zeros((size.num_sealed_blocks, layers, num_bytes), numpy.uint8)
        self._place = {layer: place for place, layer in enumerate(group.layers)}

    @property
    def num_bytes(self) -> int:
        """Bytes that both pools hold."""
        return self.open.nbytes + self.sealed.nbytes

    def write_open(self, block: int, layer: int, offset: int, kv: Tensor) -> None:
        """Put kv [2, kv_heads, num_tokens, head_dim] at token `offset` of an open block."""
        self.open[block, self._place[layer], :, :, offset : offset + kv.shape[2]] = kv

    def read_open(self, block: int, layer: int, num_tokens: int) -> Tensor:
        """K and V of the block's first tokens, float32 [2, kv_heads, num_tokens, head_dim]."""
        return self.open[block, self._place[layer], :, :, :num_tokens]

    def copy_open(self, source: int, target: int) -> None:
        """Make one open block, of all layers, what another is."""
        self.open[target] = self.open[source]

    def seal(self, block: int, layer: int, k: Tensor, v: Tensor) -> None:
        """Quantize k, v [kv_heads, block_size, head_dim], float32, into a sealed block."""
        assert self.layout is not None
        self.sealed[block, self._place[layer]] = self.layout.seal(k, v)

    def read_sealed(self, blocks: Sequence[int], layer: int) -> Tensor:
        """K and V of sealed blocks, float32 [2, kv_heads, num_blocks, block_size, head_dim]."""
        assert self.layout is not None
        packed = self.sealed[torch.tensor(blocks), self._place[layer]]
        return torch.stack(self.layout.unseal(packed)).transpose(1, 2)

    def read_bytes(self, open_blocks: Sequence[int], sealed_blocks: Sequence[int]) -> Tensor:
        """The bytes of blocks of both pools, one after another, uint8 [n]."""
        parts = self.open[list(open_blocks)], self.sealed[list(sealed_blocks)]
        return torch.cat([part.flatten().view(torch.uint8) for part in parts])

    def write_bytes(
        self, open_blocks: Sequence[int], sealed_blocks: Sequence[int], data: Tensor
    ) -> Tensor:
        """Put back what `read_bytes` gave for as many blocks; returns the rest of data, uint8."""
        for pool, blocks in ((self.open, open_blocks), (self.sealed, sealed_blocks)):
            if blocks:
                size = len(blocks) * pool[0].nbytes
                part, data = data[:size].clone(), data[size:]  # a clone is aligned
                pool[list(blocks)] = part.view(pool.dtype).view(len(blocks), *pool.shape[1:])
        return data
