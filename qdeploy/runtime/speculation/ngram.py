"""Prompt lookup: what followed the last few tokens when they stood in the text before.

After Saxena 2023, "Prompt Lookup Decoding", with an index instead of a scan, the longest match
instead of the first one, and a vote among equally long matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qdeploy.runtime.request import Request
from qdeploy.runtime.speculation.base import NUM_KINDS, Draft

#: Places of one n-gram that are looked at, the latest first: bounds the time of a proposal.
_CANDIDATES = 16


@dataclass(slots=True)
class _Index:
    """Where each n-gram of `tokens` ended last, and before that: one entry a token.

    last: n-gram → the position after it; before[position]: the place before that one, 0 for none.
    """

    size: int
    tokens: list[int] = field(default_factory=list)
    last: dict[tuple[int, ...], int] = field(default_factory=dict)
    before: list[int] = field(default_factory=lambda: [0])

    def extend(self, tokens: list[int]) -> None:
        """Learn what follows the tokens known so far."""
        known, size = self.tokens, self.size
        for token in tokens:
            known.append(token)
            end = len(known)
            if end < size:
                self.before.append(0)
                continue
            gram = tuple(known[end - size :])
            self.before.append(self.last.get(gram, 0))
            self.last[gram] = end

    def places(self) -> list[int]:
        """Positions after earlier places of the last n-gram, the latest first."""
        found: list[int] = []
        place = self.before[len(self.tokens)]
        while place and len(found) < _CANDIDATES:
            found.append(place)
            place = self.before[place]
        return found

    def overlap(self, place: int, limit: int) -> int:
        """How many tokens before `place` equal the last ones, up to limit; at least `size`."""
        tokens, end, same = self.tokens, len(self.tokens), self.size
        while same < limit and same < place and tokens[place - same - 1] == tokens[end - same - 1]:
            same += 1
        return same

    def continuation(self, place: int, count: int) -> list[int]:
        """`count` tokens from `place` on; a text that repeats itself goes on repeating."""
        found = self.tokens[place : place + count]
        period = len(self.tokens) - place
        while len(found) < count:
            found.append(found[len(found) - period])
        return found


class NgramDrafter:
    """Implements Drafter without a model. Memory: an entry a token, of prompt and output."""

    name = "ngram"
    free = True

    def __init__(self, ngram_min: int = 2, ngram_max: int = 16) -> None:
        self._min, self._max = ngram_min, ngram_max
        self._indexes: dict[str, _Index] = {}

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """What followed the longest earlier match, as most of the longest ones have it."""
        return [self._propose(r, count) for r, count in zip(requests, counts, strict=True)]

    def observe(self, request: Request, num_accepted: int) -> None:
        """Nothing to learn: the text is all there is."""

    def forget(self, request: Request) -> None:
        """Drop the request's index."""
        self._indexes.pop(request.sequence_id, None)

    def seconds(self, num_requests: int) -> float:
        """A few µs, against milliseconds of a step."""
        return 0.0

    def catch_up_seconds(self, request: Request) -> float:
        """A µs a token, against hundreds for the target's prefill."""
        return 0.0

    def _propose(self, request: Request, count: int) -> Draft:
        index = self._indexes.get(request.sequence_id)
        if index is None:
            index = self._indexes[request.sequence_id] = _Index(self._min)
        index.extend(request.token_ids[len(index.tokens) :])
        place, overlap = self._best(index)
        if not place:
            return Draft()
        # A draft counts only if those before it are right, and then the match is longer by them.
        kinds = [min(overlap + i, NUM_KINDS) - 1 for i in range(count)]
        return Draft(index.continuation(place, count), kinds)

    def _best(self, index: _Index) -> tuple[int, int]:
        """The latest of the places whose next token most of the longest matches share, and their
        length; place 0: none.
        """
        places = index.places()
        overlaps = [index.overlap(place, self._max) for place in places]
        longest = max(overlaps, default=0)
        firsts: dict[int, int] = {}
        votes: dict[int, int] = {}
        for place, overlap in zip(places, overlaps, strict=True):
            if overlap == longest:
                token = index.tokens[place]
                firsts.setdefault(token, place)
                votes[token] = votes.get(token, 0) + 1
        return (firsts[max(votes, key=votes.__getitem__)], longest) if votes else (0, 0)
