"""One pool of equal KV blocks with reference counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class BlockPool:
    """Ids 0 … size − 1. A block is free iff its reference count is 0."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.ref_counts = [0] * size
        # A stack that hands out 0, 1, 2, … first: block ids stay dense in a young pool.
        self._free = list(range(size - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.size - len(self._free)

    def take(self) -> int:
        """Hand out a free block with reference count 1; IndexError when there is none."""
        block = self._free.pop()
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a holder to a block that is held already."""
        if self.ref_counts[block] == 0:
            raise ValueError(f"{self.name} block {block} is free and can't be shared")
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Drop one holder; the last one frees the block."""
        if self.ref_counts[block] == 0:
            raise ValueError(f"{self.name} block {block} was released twice")
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self._free.append(block)

    def check_integrity(self, held: Sequence[int]) -> None:
        """Assert that `held` (with repetition) explains every reference count and the free list."""
        counts = Counter(held)
        assert all(0 <= b < self.size for b in counts), f"{self.name}: id out of range"
        expected = [counts[b] for b in range(self.size)]
        assert expected == self.ref_counts, f"{self.name}: reference counts disagree with tables"
        assert len(set(self._free)) == len(self._free), f"{self.name}: a block is free twice"
        free = {b for b in range(self.size) if self.ref_counts[b] == 0}
        assert free == set(self._free), f"{self.name}: free list disagrees with counts"
