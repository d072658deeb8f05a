"""How many open and sealed blocks of each KV group a memory budget holds, by exact arithmetic.

Pools grow together, so that none runs out much before another: the budget buys sequences of
TYPICAL_TOKENS up to max_num_seqs, then makes them longer up to max_model_len, then keeps prefixes
without a sequence; and one request of max_model_len always fits (DESIGN §5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from qdeploy.errors import CapacityError, UsageError
from qdeploy.kv.groups import KVGroup, KVPoolSize

DEFAULT_KV_CACHE_BYTES = 2 << 30
#: For so many sequences, the sinks of one more lie in the prefix cache.
RUNNING_PER_CACHED = 4

#: Few blocks for many sequences would be open ones only, and no sequence could grow.
TYPICAL_TOKENS = 512

#: Of every group in turn: open, sealed.
Counts = list[int]
CountsOf = Callable[[int], Counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBudget:
    """A budget and what a block of each pool costs, in the same unit (bytes, or blocks).

    costs: of every group in turn, an open block and a sealed one. lookahead_tokens: drafts that a
    step may compute beyond what is committed.
    """

    groups: tuple[KVGroup, ...]
    costs: tuple[int, ...]
    total: int
    unit: str = "bytes"
    lookahead_tokens: int = 0

    def price(self, counts: Iterable[int]) -> int:
        """What so many blocks cost."""
        return sum(count * cost for count, cost in zip(counts, self.costs, strict=True))

    def cost(self, num_tokens: int) -> int:
        """Cost of the smallest pools in which one sequence of num_tokens runs."""
        return self.price(self._needs(num_tokens))

    def longest(self, limit: int) -> int:
        """The largest max_model_len ≤ limit that fits."""
        return self._largest(limit, self._needs)

    def full(self, max_model_len: int, max_num_seqs: int) -> int:
        """Cost of pools that hold max_num_seqs requests of max_model_len."""
        return self.price(self._wanted(max_num_seqs, max_model_len, max_model_len))

    def level(self, max_model_len: int, max_num_seqs: int) -> tuple[int, int]:
        """(sequences, tokens of each) that the pools are made for; sequences may be 0."""
        typical = min(TYPICAL_TOKENS, max_model_len)
        seqs = self._largest(max_num_seqs, lambda n: self._wanted(n, typical, max_model_len))
        if seqs < max_num_seqs:
            return seqs, typical
        longer = self._largest(
            max_model_len - typical, lambda n: self._wanted(seqs, typical + n, max_model_len)
        )
        return seqs, typical + longer

    def split(self, max_model_len: int, max_num_seqs: int) -> tuple[KVPoolSize, ...]:
        """Pool sizes per group; CapacityError when one request of max_model_len doesn't fit."""
        if self.cost(max_model_len) > self.total:
            raise self._too_small(max_model_len)
        seqs, length = self.level(max_model_len, max_num_seqs)
        counts = self._wanted(seqs, length, max_model_len)
        if seqs < max_num_seqs:
            goal = self._wanted(seqs + 1, length, max_model_len)
        elif length < max_model_len:
            goal = self._wanted(seqs, length + 1, max_model_len)
        else:
            idle = self._idle(max_model_len)
            times = (self.total - self.price(counts)) // self.price(idle)
            counts = [n + times * more for n, more in zip(counts, idle, strict=True)]
            goal = [n + more for n, more in zip(counts, idle, strict=True)]
        return _pool_sizes(self._fill(counts, goal))

    def _needs(self, num_tokens: int, lookahead_tokens: int = 0) -> Counts:
        needs = (g.blocks_for_tokens(num_tokens, lookahead_tokens) for g in self.groups)
        return [count for pair in needs for count in pair]

    def _wanted(self, seqs: int, length: int, max_model_len: int) -> Counts:
        """Pools for `seqs` sequences of `length`, and for one of max_model_len alone."""
        alone = self._needs(max_model_len)
        if seqs == 0:
            return alone
        each, spare = self._needs(length, self.lookahead_tokens), self._spare(seqs)
        together = [seqs * n + more for n, more in zip(each, spare, strict=True)]
        return [max(pair) for pair in zip(alone, together, strict=True)]

    def _spare(self, seqs: int) -> Counts:
        """Open blocks for cached sinks, and for one prompt chunk that spans blocks."""
        cached = -(-seqs // RUNNING_PER_CACHED)
        spare = []
        for kv in (group.config for group in self.groups):
            spare += [cached * kv.sink_blocks + kv.residual_blocks + 1 if kv.seals else 0, 0]
        return spare

    def _idle(self, max_model_len: int) -> Counts:
        """What a cached prefix keeps: no tail, no residual."""
        counts = self._needs(max_model_len)
        for index, kv in enumerate(group.config for group in self.groups):
            if kv.seals:
                counts[2 * index] = min(counts[2 * index], kv.sink_blocks)
        return counts if any(counts) else self._needs(max_model_len)

    def _fill(self, counts: Counts, goal: Counts) -> Counts:
        """Spend the rest block by block, each time on the pool that is furthest from its goal."""
        counts, rest = list(counts), self.total - self.price(counts)
        while True:
            open_to = [i for i, cost in enumerate(self.costs) if goal[i] and cost <= rest]
            if not open_to:
                return counts
            furthest = min(open_to, key=lambda i: counts[i] / goal[i])
            counts[furthest] += 1
            rest -= self.costs[furthest]

    def _largest(self, limit: int, counts_of: CountsOf) -> int:
        """The largest n ≤ limit whose counts can be paid for; they grow with n, so bisect."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.price(counts_of(middle)) <= self.total
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _too_small(self, max_model_len: int) -> CapacityError:
        option = "kv_cache_memory" if self.unit == "bytes" else "num_kv_blocks"
        longest, needed = self.longest(max_model_len), self.cost(max_model_len)
        policy = " and ".join(dict.fromkeys(group.config.key for group in self.groups))
        fits = f"max_model_len={longest}, or " if longest else ""
        return CapacityError(
            f"max_model_len={max_model_len} needs {needed} {self.unit} of KV cache as {policy} "
            f"but {option} is {self.total}; give {fits}{option}={needed}, or a smaller "
            "kv_cache_dtype"
        )


def plan_kv_pools(
    groups: Sequence[KVGroup],
    open_block_bytes: Sequence[int],
    sealed_block_bytes: Sequence[int],
    *,
    max_model_len: int,
    max_num_seqs: int,
    kv_cache_memory_bytes: int | None = None,
    num_kv_blocks: int | None = None,
    lookahead_tokens: int = 0,
) -> tuple[KVPoolSize, ...]:
    """Split a byte budget, or a number of blocks of any kind, into the pools of each group.

    open_block_bytes, sealed_block_bytes: of a block, per group. With neither budget given: what
    max_num_seqs requests of max_model_len need, at most 2 GiB.
    """
    if kv_cache_memory_bytes is not None and num_kv_blocks is not None:
        raise UsageError("give kv_cache_memory or num_kv_blocks, not both", param="num_kv_blocks")
    pairs = zip(open_block_bytes, sealed_block_bytes, strict=True)
    budget = KVBudget(
        groups=tuple(groups),
        costs=tuple(cost for pair in pairs for cost in pair),
        total=DEFAULT_KV_CACHE_BYTES if kv_cache_memory_bytes is None else kv_cache_memory_bytes,
        lookahead_tokens=lookahead_tokens,
    )
    if num_kv_blocks is not None:
        ones = (1,) * len(budget.costs)
        budget = replace(budget, costs=ones, total=num_kv_blocks, unit="blocks")
    elif kv_cache_memory_bytes is None:
        full = budget.full(max_model_len, max_num_seqs)
        budget = replace(budget, total=min(budget.total, full))
    return budget.split(max_model_len, max_num_seqs)


def sequences_held(
    groups: Sequence[KVGroup],
    open_block_bytes: Sequence[int],
    sealed_block_bytes: Sequence[int],
    *,
    num_bytes: int,
    num_tokens: int,
) -> int:
    """How many sequences of num_tokens computed tokens num_bytes hold: sinks, residual and tail
    at an open block's bytes, the rest at a sealed one's.
    """
    each = 0
    sizes = zip(groups, open_block_bytes, sealed_block_bytes, strict=True)
    for group, open_bytes, sealed_bytes in sizes:
        num_open, num_sealed = group.blocks_held(num_tokens)
        each += num_open * open_bytes + num_sealed * sealed_bytes
    return num_bytes // each


def _pool_sizes(counts: Counts) -> tuple[KVPoolSize, ...]:
    pairs = zip(counts[::2], counts[1::2], strict=True)
    return tuple(KVPoolSize(num_open_blocks=a, num_sealed_blocks=b) for a, b in pairs)
