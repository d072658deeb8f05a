"""Drives an executor by hand: block tables as the block manager would build them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qdeploy.kv.config import KVCacheConfig
from qdeploy.kv.groups import KVGroup
from qdeploy.models.spec import spec_from_config
from qdeploy.progress import Silent
from qdeploy.runtime.batch import SequenceSlice, StepBatch
from qdeploy.runtime.executors.reference import ReferenceExecutor
from qdeploy.runtime.executors.weights import load_weights


class ModelTensors:
    """The part of Checkpoint that load_weights reads, over a model in memory."""

    manifest = None

    def __init__(self, model: PreTrainedModel) -> None:
        self._tensors = model.state_dict()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def linear(self, module: str) -> Tensor:
        return self._tensors[f"{module}.weight"]


def executor_of(model: PreTrainedModel, config: KVCacheConfig) -> ReferenceExecutor:
    """A reference executor of a transformers model."""
    data = model.config.to_dict() | {"architectures": [type(model).__name__]}
    spec = spec_from_config(data)
    weights = load_weights(ModelTensors(model), spec, Silent())  # type: ignore[arg-type]
    return ReferenceExecutor(spec, weights, config)


def piece(
    executor: ReferenceExecutor, ids: Sequence[int], start: int, end: int, base: int = 0
) -> SequenceSlice:
    """Positions start … end − 1, logical block b under pool id base + b in all pools."""
    tables = [_tables(group, start, end, base) for group in executor.kv_groups]
    return SequenceSlice(
        token_ids=ids[start:end],
        start=start,
        open_blocks=[opened for opened, _ in tables],
        sealed_blocks=[sealed for _, sealed in tables],
        num_logits=end - start,
    )


def _tables(group: KVGroup, start: int, end: int, base: int) -> tuple[list[int], list[int]]:
    """A block has an open id only if a query of this or a later step reads it open, and was either
    begun before the step or is needed after it; a sealed id once it is full; none before the
    window.
    """
    config, size = group.config, group.config.block_size
    first, last = start // size, end // size
    blocks = range(-(-end // size))
    seen = range(group.first_block(start), len(blocks))
    open_now = {
        b
        for b in seen
        if not config.reads_sealed(b, last)
        or (b * size < start and not config.reads_sealed(b, first))
    }
    sealed = {b for b in seen if config.seals and b >= config.sink_blocks and (b + 1) * size <= end}
    opened, packed = ([base + b if b in ids else -1 for b in blocks] for ids in (open_now, sealed))
    return opened, packed


def logits_in_chunks(
    executor: ReferenceExecutor, ids: Sequence[int], bounds: Sequence[int], start: int = 0
) -> Tensor:
    """Logits [len(ids) − start, vocab] of the steps that end at `bounds`; KV is kept before."""
    parts = []
    for end in bounds:
        batch = StepBatch([piece(executor, ids, start, end)])
        parts.append(executor.execute(batch))
        start = end
    return torch.cat(parts)


def chunks(length: int, step: int, start: int = 0) -> list[int]:
    """Ends of chunks of `step` tokens."""
    return [*range(start + step, length, step), length]
