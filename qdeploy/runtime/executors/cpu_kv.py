"""KV groups, pools and blocks of the C++ library."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from qdeploy.kv.groups import KVGroup, KVPoolSize
from qdeploy.runtime.batch import BlockIds
from qdeploy_kernels.cpu import abi
from qdeploy_kernels.cpu.library import Library

#: int32 in the ABI.
_MAX_BLOCKS = 2**31 - 1


class KVEngine:
    """qd_engine: pools for each group of layers. Whoever calls makes sure that it is alone.

    open_block_bytes, sealed_block_bytes: per group. Raises RuntimeError when the library refuses
    the groups.
    """

    def __init__(self, library: Library, model: int, groups: Sequence[KVGroup]) -> None:
        self._library, cdll = library, library.cdll
        layers = [array("i", group.layers) for group in groups]
        structs = (abi.KVGroup * len(groups))(
            *(_struct(group, own) for group, own in zip(groups, layers, strict=True))
        )
        self.handle: int = cdll.qd_engine_create(model, structs, len(groups))
        if not self.handle:
            raise RuntimeError(library.error())
        numbers = range(len(groups))
        self.open_block_bytes = tuple(cdll.qd_open_block_bytes(self.handle, g) for g in numbers)
        self.sealed_block_bytes = tuple(cdll.qd_sealed_block_bytes(self.handle, g) for g in numbers)

    def allocate(self, pools: Sequence[KVPoolSize]) -> bool:
        """Allocate all pools, one size per group; False when there is no memory."""
        if len(pools) != len(self.open_block_bytes):
            raise RuntimeError(f"{len(pools)} pool sizes for {len(self.open_block_bytes)} groups")
        sizes = [[p.num_open_blocks for p in pools], [p.num_sealed_blocks for p in pools]]
        if max(map(max, sizes)) > _MAX_BLOCKS:
            return False
        counts = [array("i", of_pool) for of_pool in sizes]
        places = [count.buffer_info()[0] for count in counts]
        return not self._library.cdll.qd_kv_allocate(self.handle, *places)

    def read(self, ids: Sequence[BlockIds]) -> NDArray[np.uint8]:
        """Executor.read_blocks."""
        data = np.empty(self._num_bytes(ids), np.uint8)
        self._move(self._library.cdll.qd_read_blocks, ids, data)
        return data

    def write(self, ids: Sequence[BlockIds], data: NDArray[np.uint8]) -> None:
        """Executor.write_blocks."""
        needed = self._num_bytes(ids)
        if data.dtype != np.uint8 or data.size != needed:
            raise RuntimeError(f"{data.size} {data.dtype} values for blocks of {needed} bytes")
        self._move(self._library.cdll.qd_write_blocks, ids, np.ascontiguousarray(data))

    def _num_bytes(self, ids: Sequence[BlockIds]) -> int:
        return sum(len(blocks) * size for _, _, blocks, size in self._pools(ids))

    def _move(
        self, function: Callable[..., int], ids: Sequence[BlockIds], data: NDArray[np.uint8]
    ) -> None:
        place = data.ctypes.data
        for group, sealed, blocks, size in self._pools(ids):
            numbers = array("i", blocks)
            if function(self.handle, group, sealed, len(blocks), numbers.buffer_info()[0], place):
                raise RuntimeError(self._library.error())
            place += len(blocks) * size

    def _pools(self, ids: Sequence[BlockIds]) -> Iterator[tuple[int, int, tuple[int, ...], int]]:
        """(group, whether sealed, blocks, bytes of a block), in the order of their bytes."""
        sizes = zip(ids, self.open_block_bytes, self.sealed_block_bytes, strict=True)
        for group, (blocks, open_bytes, sealed_bytes) in enumerate(sizes):
            yield group, 0, blocks.open, open_bytes
            yield group, 1, blocks.sealed, sealed_bytes


def _struct(group: KVGroup, layers: array[int]) -> abi.KVGroup:
    config = group.config
    return abi.KVGroup(
        dtype=abi.KVDtype[config.dtype.upper()],
        block_size=config.block_size,
        sink_blocks=config.sink_blocks,
        residual_blocks=config.residual_blocks,
        window=group.window,
        num_layers=len(layers),
        layers=layers.buffer_info()[0],
    )
