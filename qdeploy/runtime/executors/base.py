"""The executor seam: three backends run the same DecoderSpec on the same StepBatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qdeploy.errors import CapacityError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVGroup, KVPoolSize
from qdeploy.models.spec import DecoderSpec
from qdeploy.runtime.batch import BlockIds, StepBatch


class Executor(Protocol):
    """Owns the weights and two KV pools for each group of layers; knows nothing of requests.

    kv_groups: how this executor keeps `kv_config`; block tables, pools and block bytes are per
    group, in this order. Block ids are 0 … num_open_blocks − 1 and 0 … num_sealed_blocks − 1; who
    uses which is the block manager's affair. act: `int8`, `bf16` or `fp32`, what activations of
    quantized weights are multiplied as; it goes into accuracy records.
    """

    name: str
    act: str
    spec: DecoderSpec
    kv_config: KVCacheConfig
    kv_groups: tuple[KVGroup, ...]
    open_block_bytes: tuple[int, ...]
    sealed_block_bytes: tuple[int, ...]

    def allocate_kv(self, pools: Sequence[KVPoolSize]) -> None:
        """Allocate every group's pools; drops what they held before."""

    def with_kv(self, kv_config: KVCacheConfig) -> Executor:
        """A second executor on the same weights, with its own, not yet allocated KV pools."""

    def execute(self, batch: StepBatch) -> Tensor:
        """Run one step: writes the slices' K/V, returns logits [batch.num_logits, vocab], float32.

        The result belongs to the caller. Rows follow the order of slices, then of positions.
        """

    def read_blocks(self, ids: Sequence[BlockIds]) -> NDArray[np.uint8]:
        """The packed bytes of blocks, for swapping: one flat array, group by group, in each the
        open blocks, then the sealed ones, in the order of their ids. ids: one per group.
        """

    def write_blocks(self, ids: Sequence[BlockIds], data: NDArray[np.uint8]) -> None:
        """Put back what `read_blocks` gave for as many blocks, under these ids."""


def unallocated(executor: Executor, pools: Sequence[KVPoolSize]) -> CapacityError:
    """The error for pools that memory doesn't hold."""
    sizes = zip(pools, executor.open_block_bytes, executor.sealed_block_bytes, strict=True)
    needed = sum(p.num_open_blocks * a + p.num_sealed_blocks * b for p, a, b in sizes)
    return CapacityError(
        f"{needed / 2**30:.1f} GiB of KV cache can't be allocated; lower kv_cache_memory or "
        "num_kv_blocks"
    )
