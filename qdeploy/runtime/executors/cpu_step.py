"""A step and its blocks as flat arrays that the C++ library reads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from torch import Tensor

from qdeploy.runtime.batch import BlockCopy, SequenceSlice, StepBatch
from qdeploy_kernels.cpu import abi


class StepArrays:
    """A StepBatch as flat arrays, in microseconds: a step may take no more than a thousand.

    An `array` of a list is made faster than a NumPy array, and than an array is extended by it.
    """

    def __init__(self, batch: StepBatch, block_size: int, num_groups: int) -> None:
        self._tokens, self._starts, self._counts = array("i"), array("i"), array("i")
        self._num_logits, self._table_starts = array("i"), array("q")
        self._tables = [array("i") for _ in range(2 * num_groups)]  # open ones, then sealed ones
        self._copies = _flat(batch.copies)
        self.num_logits = 0
        for piece in batch.slices:
            self._add(piece, block_size)
        places = [_address(table) for table in self._tables]
        self._open = array("Q", places[:num_groups])
        self._sealed = array("Q", places[num_groups:])

    def _add(self, piece: SequenceSlice, block_size: int) -> None:
        count = len(piece.token_ids)
        self._starts.append(piece.start)
        self._counts.append(count)
        self._num_logits.append(piece.num_logits)
        self.num_logits += piece.num_logits
        self._tokens.extend(array("i", piece.token_ids))
        begin = len(self._tables[0])
        self._table_starts.append(begin)
        tables = (*piece.open_blocks, *piece.sealed_blocks)
        needed = -(-(piece.start + count) // block_size)
        end = begin + (len(tables[0]) if tables else 0)
        if len(tables) != len(self._tables) or end - begin < needed:
            raise RuntimeError(
                f"a slice needs {len(self._tables)} block tables of {needed} entries each"
            )
        for joined, table in zip(self._tables, tables, strict=True):
            joined.extend(array("i", table))
            if len(joined) != end:
                raise RuntimeError("the block tables of a slice differ in length")

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


def _flat(copies: Sequence[BlockCopy]) -> array[int]:
    """qd_block_copy one after the other: three int32 each."""
    flat = array("i")
    for copy in copies:
        flat.extend((copy.group, copy.source, copy.target))
    return flat


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]
