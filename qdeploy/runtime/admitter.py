"""Whether a waiting request should begin now: what it would find in the prefix cache, whether it
would find more later, and whether there are blocks for it. Decides nothing about order or seats.
"""

from __future__ import annotations

from collections.abc import Sequence

from qdeploy.runtime.block_manager import BlockManager
from qdeploy.runtime.prefix_cache import PrefixHit
from qdeploy.runtime.request import Request, RequestStatus


class Admitter:
    """Looks at blocks and requests, and changes neither."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks

    def match(self, request: Request) -> PrefixHit:
        """The blocks in the prefix cache with which a request would begin."""
        if request.status is RequestStatus.SWAPPED or request.needs_prompt_logits:
            return PrefixHit()
        return self.blocks.match(request.token_ids, request.cache_salt)

    def will_hit_more(self, request: Request, hit: PrefixHit, running: Sequence[Request]) -> bool:
        """Whether a running request is computing most of what this one would have to: then it
        waits until that is in the cache, at most until the other's prompt is computed.
        """
        if not self.blocks.caches_every_block or request.status is RequestStatus.SWAPPED:
            return False
        if request.needs_prompt_logits:
            return False
        uncomputed = request.num_tokens - hit.num_tokens
        return any(
            2 * (self._num_shared_tokens(request, other) - hit.num_tokens) >= uncomputed
            for other in running
            if not other.is_decoding and other.cache_salt == request.cache_salt
        )

    def has_room(self, request: Request, hit: PrefixHit, running: Sequence[Request]) -> bool:
        """Whether the available blocks hold all tokens that the request has so far and one more
        for each sample, besides the prompts that are being computed. Alone, it always has room.
        """
        if not running:
            return True
        costs = self.blocks.cost_of(hit, request.num_tokens + 1)
        reserved = [self._outstanding(r) for r in running if not r.is_decoding]
        for index, (column, pool) in enumerate(
            zip(self.blocks.columns, self.blocks.pools, strict=True)
        ):
            tails = 0 if column.sealed else len(request.followers)
            others = sum(counts[index] for counts in reserved)
            if costs[index] + tails + others > pool.num_available:
                return False
        return True

    def _num_shared_tokens(self, request: Request, other: Request) -> int:
        """Tokens of whole blocks with which both begin; at least one more is left to compute."""
        size = self.blocks.block_size
        longest = min(request.num_tokens - 1, other.num_tokens) // size * size
        for start in range(0, longest, size):
            part = slice(start, start + size)
            if request.token_ids[part] != other.token_ids[part]:
                return start
        return longest

    def _outstanding(self, request: Request) -> list[int]:
        """Blocks per column that a running request needs until its prompt is computed."""
        needs = self.blocks.blocks_for(request.num_tokens + 1)
        held = self.blocks.held_by(request.sequence_id)
        tails = len(request.followers)
        return [
            max(0, need - has) + (0 if column.sealed else tails)
            for column, need, has in zip(self.blocks.columns, needs, held, strict=True)
        ]
