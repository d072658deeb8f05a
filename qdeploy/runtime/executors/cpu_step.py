"""A step and its blocks as flat arrays that the C++ library reads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from qdeploy.runtime.batch import BlockCopy, SequenceSlice, StepBatch
from qdeploy_kernels.cpu import abi


class StepArrays:
    """A StepBatch as flat arrays, in microseconds: a step may take no more than a thousand.

    An `array` of a list is made faster than a NumPy array, and than an array is extended by it.
    """

    def __init__(self, batch: StepBatch, block_size: int, num_groups: int) -> None:
        slices = batch.slices
        counts = [len(s.token_ids) for s in slices]
        self._starts = array("i", [s.start for s in slices])
        self._counts = array("i", counts)
        self._num_logits = array("i", [s.num_logits for s in slices])
        self.num_logits = sum(self._num_logits)
        self._tokens = _joined([s.token_ids for s in slices])
        sizes = _table_sizes(slices, counts, block_size, num_groups)
        self._table_starts = array("q", accumulate(sizes, initial=0))
        opened, sealed = [s.open_blocks for s in slices], [s.sealed_blocks for s in slices]
        self._tables = [
            _joined([tables[g] for tables in of_pool])
            for of_pool in (opened, sealed)
            for g in range(num_groups)
        ]
        places = array("Q", map(_address, self._tables))
        self._open, self._sealed = places[:num_groups], places[num_groups:]
        self._copies = _flat(batch.copies)

    def struct(self, logits: Tensor) -> abi.Step:
        """qd_step over these arrays and `logits`, which must stay alive."""
        return abi.Step(
            len(self._starts),
            len(self._tokens),
            _address(self._tokens),
            _address(self._starts),
            _address(self._counts),
            _address(self._num_logits),
            _address(self._table_starts),
            _address(self._open),
            _address(self._sealed),
            logits.data_ptr(),
            logits.stride(0),
            len(self._copies) // 3,
            _address(self._copies),
        )


def _table_sizes(
    slices: Sequence[SequenceSlice], counts: Sequence[int], block_size: int, num_groups: int
) -> list[int]:
    """Entries of each slice's tables; RuntimeError unless they are as many in all groups, and
    enough.
    """
    sizes = []
    for piece, count in zip(slices, counts, strict=True):
        opened, sealed = piece.open_blocks, piece.sealed_blocks
        fits = len(opened) == len(sealed) == num_groups
        needed = size = -(-(piece.start + count) // block_size)
        if fits:
            size = len(opened[0])
            for table in opened:
                fits = fits and len(table) == size
            for table in sealed:
                fits = fits and len(table) == size
        if not fits or size < needed:
            raise RuntimeError(
                f"a slice needs {2 * num_groups} block tables of the same length, {needed} or more"
            )
        sizes.append(size)
    return sizes


def _joined(parts: Sequence[Sequence[int]]) -> array[int]:
    """int32 of all parts."""
    if len(parts) == 1:
        return array("i", parts[0])
    joined = array("i")
    for part in parts:
        joined.extend(array("i", part))
    return joined


def _flat(copies: Sequence[BlockCopy]) -> array[int]:
    """qd_block_copy one after the other: three int32 each."""
    flat = array("i")
    for copy in copies:
        flat.extend((copy.group, copy.source, copy.target))
    return flat


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]
