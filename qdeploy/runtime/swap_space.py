"""Host memory for the KV blocks of preempted sequences, within a limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qdeploy.runtime.block_manager import SwappedTable

Bytes = NDArray[np.uint8]


class SwapSpace:
    """Tables and bytes by sequence. A reservation comes first, the bytes follow before the step.

    block_bytes: per column of the block manager (group by group: open, then sealed), as executors
    order the bytes of blocks that they read.
    """

    def __init__(self, num_bytes: int, block_bytes: Sequence[int]) -> None:
        self.num_bytes = num_bytes
        self.block_bytes = tuple(block_bytes)
        self.num_used_bytes = 0
        self._tables: dict[str, SwappedTable] = {}
        self._data: dict[str, Bytes] = {}

    def size(self, counts: Sequence[int]) -> int:
        """Bytes of so many blocks per column."""
        return sum(n * size for n, size in zip(counts, self.block_bytes, strict=True))

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes fit now."""
        return self.num_used_bytes + num_bytes <= self.num_bytes

    def reserve(self, sequence_id: str, table: SwappedTable) -> None:
        """Make room for the blocks of a table; see has_room."""
        self._tables[sequence_id] = table
        self.num_used_bytes += self._table_bytes(table)

    def table(self, sequence_id: str) -> SwappedTable:
        """What a sequence held; KeyError if it isn't here."""
        return self._tables[sequence_id]

    def fill(self, sequence_id: str, data: Bytes) -> None:
        """The bytes of a reservation."""
        self._data[sequence_id] = data

    def take(self, sequence_id: str, rows: Sequence[Sequence[int]]) -> Bytes:
        """Give up a sequence's bytes; returns those of the blocks `rows` (per column, counted in
        the order of the table).
        """
        table, data = self._tables[sequence_id], self._data[sequence_id]
        self.drop(sequence_id)
        if all(len(r) == len(b) for r, b in zip(rows, table.blocks, strict=True)):
            return data
        parts, start = [np.empty(0, np.uint8)], 0
        for wanted, blocks, size in zip(rows, table.blocks, self.block_bytes, strict=True):
            stop = start + len(blocks) * size
            parts.append(data[start:stop].reshape(len(blocks), size)[list(wanted)].ravel())
            start = stop
        return np.concatenate(parts)

    def drop(self, sequence_id: str) -> None:
        """Forget a sequence; unknown ones are ignored."""
        table = self._tables.pop(sequence_id, None)
        self._data.pop(sequence_id, None)
        if table is not None:
            self.num_used_bytes -= self._table_bytes(table)

    def check_integrity(self, swapped: Sequence[str]) -> None:
        """Assert that exactly these sequences are here, and that the bytes add up."""
        assert set(swapped) == set(self._tables), "swapped requests and swap space disagree"
        used = sum(self._table_bytes(table) for table in self._tables.values())
        assert used == self.num_used_bytes <= self.num_bytes, "swap space miscounted"

    def _table_bytes(self, table: SwappedTable) -> int:
        return self.size([len(blocks) for blocks in table.blocks])
