"""One pool of equal KV blocks with reference counts, and a memory for what they still hold."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence


class BlockPool:
    """Ids 0 … size − 1. A block is free, live (somebody holds it), or cached: nobody holds it, but
    its content can still be found. Cached blocks are handed out when no free one is left, the one
    that was released first goes first; `forget(block)` is told.
    """

    def __init__(self, name: str, size: int, forget: Callable[[int], None] | None = None) -> None:
        self.name = name
        self.size = size
        self.ref_counts = [0] * size
        # A stack that hands out 0, 1, 2, … first: block ids stay dense in a young pool.
        self._free = list(range(size - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._findable: set[int] = set()
        self._forget = forget

    @property
    def num_free(self) -> int:
        """Blocks whose content nobody needs."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds, but whose content can be found."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_live(self) -> int:
        """Blocks that somebody holds."""
        return self.size - self.num_available

    def take(self) -> int:
        """Hand out a block with reference count 1; KeyError when all are live."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._findable.remove(block)
            if self._forget is not None:
                self._forget(block)
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a holder to a live or cached block."""
        if self.ref_counts[block] == 0:
            if block not in self._cached:
                raise ValueError(f"{self.name} block {block} is free and can't be shared")
            del self._cached[block]
        self.ref_counts[block] += 1

    def publish(self, block: int) -> None:
        """From now on the content of a live block can be found: released, it becomes cached."""
        if self.ref_counts[block] == 0:
            raise ValueError(f"{self.name} block {block} is not live and can't be published")
        self._findable.add(block)

    def release(self, block: int) -> None:
        """Drop one holder; the last one makes the block cached or free."""
        if self.ref_counts[block] == 0:
            raise ValueError(f"{self.name} block {block} was released twice")
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            if block in self._findable:
                self._cached[block] = None
            else:
                self._free.append(block)

    def check_integrity(self, held: Sequence[int], findable: Sequence[int] = ()) -> None:
        """Assert that `held` (with repetition) explains every reference count, and that free,
        live and cached blocks are told apart as `findable` says.
        """
        counts = Counter(held)
        assert all(0 <= b < self.size for b in counts), f"{self.name}: id out of range"
        expected = [counts[b] for b in range(self.size)]
        assert expected == self.ref_counts, f"{self.name}: reference counts disagree with tables"
        assert len(set(findable)) == len(findable), f"{self.name}: one block, two contents"
        assert set(findable) == self._findable, f"{self.name}: findable blocks disagree"
        idle = {b for b in range(self.size) if self.ref_counts[b] == 0}
        assert len(set(self._free)) == len(self._free), f"{self.name}: a block is free twice"
        assert set(self._free) == idle - self._findable, f"{self.name}: free list is wrong"
        assert set(self._cached) == idle & self._findable, f"{self.name}: cached list is wrong"
