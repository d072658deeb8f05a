"""The executor seam: three backends run the same DecoderSpec on the same StepBatch."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from qdeploy.kv.config import KVCacheConfig
from qdeploy.models.spec import DecoderSpec
from qdeploy.runtime.batch import StepBatch


class Executor(Protocol):
    """Owns the weights and the two KV pools; knows nothing of requests.

    Block ids are 0 … num_open_blocks − 1 and 0 … num_sealed_blocks − 1; who uses which is the
    block manager's affair. act: `int8` or `fp32`, what activations are multiplied as; it goes
    into accuracy records.
    """

    name: str
    act: str
    spec: DecoderSpec
    kv_config: KVCacheConfig
    open_block_bytes: int
    sealed_block_bytes: int

    def allocate_kv(self, num_open_blocks: int, num_sealed_blocks: int) -> None:
        """Allocate both pools; drops what they held before."""

    def with_kv(self, kv_config: KVCacheConfig) -> Executor:
        """A second executor on the same weights, with its own, not yet allocated KV pools."""

    def execute(self, batch: StepBatch) -> Tensor:
        """Run one step: writes the slices' K/V, returns logits [batch.num_logits, vocab], float32.

        The result belongs to the caller. Rows follow the order of slices, then of positions.
        """
