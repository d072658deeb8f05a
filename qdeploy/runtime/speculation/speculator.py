"""Between the engine and a drafter: how much to draft, what came of it, what it cost.

Nothing here can change a token, only when it comes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from qdeploy.runtime.outputs import SpeculationStats
from qdeploy.runtime.request import Request
from qdeploy.runtime.speculation.base import NUM_KINDS, Draft, Drafter
from qdeploy.runtime.speculation.controller import Acceptance, best_counts
from qdeploy.runtime.speculation.step_cost import StepCost

log = logging.getLogger("qdeploy")

#: Before anything was verified: the acceptance of a draft, and the tests that this counts for.
_FIRST_RATE, _FIRST_WEIGHT = 0.6, 2.0
#: Tests that the other requests' acceptance counts for in a request's own.
_SHARED_WEIGHT, _SHARED_KEEP = 2.0, 0.98
#: Share of the time for trying again a drafter that costs more than it gives.
_PROBE_SHARE = 0.02
_PROBE_TOKENS = 3
#: Tokens that a request is expected to get at most, when a drafter must first read its prompt.
_HORIZON = 128


def _by_kind() -> list[Acceptance]:
    return [Acceptance() for _ in range(NUM_KINDS)]


@dataclass(slots=True)
class _State:
    """What is known of one request; draft: its last one, also what of it wasn't verified."""

    acceptance: list[Acceptance] = field(default_factory=_by_kind)
    draft: Draft | None = None


class Speculator:
    """Sets `draft_token_ids` of requests before a step and learns from their verification.

    Free drafters are asked for all that may be used, and the best part is kept. Others are asked
    for what pays; while nothing does, a small share of the time goes into trying again.
    """

    def __init__(self, drafter: Drafter, max_drafts: int, vocab_size: int) -> None:
        self.drafter: Drafter | None = drafter
        self._max_drafts, self._vocab_size = max_drafts, vocab_size
        self._states: dict[str, _State] = {}
        self._shared = [Acceptance(keep=_SHARED_KEEP) for _ in range(NUM_KINDS)]
        self._recent = Acceptance(keep=_SHARED_KEEP)
        self._cost = StepCost()
        self._elapsed = self._probed = 0.0
        self._num_drafts = self._num_draft_tokens = 0
        self._per_position = [0] * max_drafts
        self._last_counts = 0.0

    def propose(self, requests: Iterable[Request]) -> None:
        """Give decoding requests the drafts that promise the most tokens per second."""
        if self.drafter is None:
            return
        start = perf_counter()
        wanting = [r for r in requests if r.is_decoding and self._limit(r) > 0]
        try:
            drafts = self._draft(self.drafter, wanting) if wanting else []
        except Exception as error:
            self._give_up(error)
            return
        for request, tokens in zip(wanting, drafts, strict=True):
            request.draft_token_ids = list(tokens)
        if wanting:
            self._last_counts = sum(map(len, drafts)) / len(wanting)
        self._elapsed += perf_counter() - start

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """num_drafts of the request's were verified in a step, and its new tokens are in place.

        Called after every step in which the request decoded, also with num_drafts 0.
        """
        if self.drafter is None:
            return
        if num_drafts:
            self._count(num_drafts, num_accepted)
        state = self._states.get(request.sequence_id)
        if state is not None and state.draft is not None:
            # What wasn't verified still tells something: the next token is there to compare.
            self._learn(state, state.draft, request.token_ids[-1 - num_accepted :])
            state.draft = None
        try:
            self.drafter.observe(request, num_accepted)
        except Exception as error:
            self._give_up(error)

    def note_step(self, num_tokens: int, seconds: float, *, decoding_only: bool) -> None:
        """A step without its drafting took that long; steps with prompt chunks teach nothing."""
        self._elapsed += seconds
        if decoding_only:
            self._cost.note(num_tokens, seconds)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._states.pop(request.sequence_id, None)
        if self.drafter is None:
            return
        try:
            self.drafter.forget(request)
        except Exception as error:
            self._give_up(error)

    def stats(self) -> SpeculationStats:
        """What happened so far."""
        return SpeculationStats(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(self._per_position),
            per_position=tuple(self._per_position),
            acceptance_rate=self._recent.accepted / max(self._recent.tested, 1e-9),
            num_speculative_tokens=self._last_counts,
        )

    def _limit(self, request: Request) -> int:
        """A step gives a token more than its drafts, and no token may come after the last."""
        return min(self._max_drafts, request.max_tokens - request.num_output_tokens - 1)

    def _state(self, request: Request) -> _State:
        state = self._states.get(request.sequence_id)
        if state is None:
            state = self._states[request.sequence_id] = _State()
        return state

    def _rates(self, request: Request, kinds: Sequence[int]) -> list[float]:
        """The chance of each of a request's drafts, if those before it are right."""
        own = self._state(request).acceptance
        return [
            own[kind].rate(self._shared[kind].rate(_FIRST_RATE, _FIRST_WEIGHT), _SHARED_WEIGHT)
            for kind in kinds
        ]

    def _draft(self, drafter: Drafter, requests: Sequence[Request]) -> list[Sequence[int]]:
        limits = [self._limit(r) for r in requests]
        if drafter.free:
            found = self._ask(drafter, requests, limits)
            if not any(draft.token_ids for draft in found):
                return [()] * len(requests)
            counts = self._paying(drafter, requests, [d.kinds for d in found])
        else:
            counts = self._paying(drafter, requests, [[0] * limit for limit in limits])
            if not any(counts):
                counts = self._probe(drafter, requests, limits)
            found = self._ask(drafter, requests, counts)
        for request, draft in zip(requests, found, strict=True):
            if draft.token_ids:
                self._state(request).draft = draft
        return [draft.token_ids[:count] for draft, count in zip(found, counts, strict=True)]

    def _checked(self, draft: Draft, count: int) -> Draft:
        """What may be used of a proposal for `count` tokens, every token with a kind. An id that
        the model hasn't got would end the step of everybody.
        """
        token_ids = draft.token_ids[:count]
        kinds = draft.kinds[:count] if draft.kinds else [0] * len(token_ids)
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"it drafted token {token} of a vocabulary of {self._vocab_size}")
        if len(kinds) != len(token_ids) or not all(0 <= kind < NUM_KINDS for kind in kinds):
            raise ValueError(f"it drafted {len(token_ids)} tokens of the kinds {list(kinds)}")
        return Draft(token_ids, kinds)

    def _ask(
        self, drafter: Drafter, requests: Sequence[Request], counts: Sequence[int]
    ) -> list[Draft]:
        found = [Draft()] * len(requests)
        asked = [i for i, count in enumerate(counts) if count]
        if asked:
            drafts = drafter.propose([requests[i] for i in asked], [counts[i] for i in asked])
            for i, draft in zip(asked, drafts, strict=True):
                found[i] = self._checked(draft, counts[i])
        return found

    def _paying(
        self, drafter: Drafter, requests: Sequence[Request], kinds: Sequence[Sequence[int]]
    ) -> list[int]:
        """Drafts by request, none where the drafter would have to read more than it can save."""
        rates = [self._rates(r, k) for r, k in zip(requests, kinds, strict=True)]
        counts, gain = best_counts(rates, self._cost, drafter.seconds)
        if gain <= 1:
            return counts
        saved_per_token = self._cost(len(requests)) / len(requests) * (1 - 1 / gain)
        for i, request in enumerate(requests):
            left = min(request.max_tokens - request.num_output_tokens, _HORIZON)
            if counts[i] and drafter.catch_up_seconds(request) > left * saved_per_token:
                counts[i] = 0
        return counts

    def _probe(
        self, drafter: Drafter, requests: Sequence[Request], limits: Sequence[int]
    ) -> list[int]:
        """A few drafts for the cheapest request, if the share of time for such attempts allows."""
        counts = [0] * len(requests)
        costs = [drafter.catch_up_seconds(r) for r in requests]
        cheapest = min(range(len(requests)), key=costs.__getitem__)
        tokens = min(_PROBE_TOKENS, limits[cheapest])
        more = self._cost(len(requests) + tokens) - self._cost(len(requests))
        cost = costs[cheapest] + tokens * drafter.seconds(1) + more
        if self._probed + cost <= _PROBE_SHARE * self._elapsed:
            self._probed += cost
            counts[cheapest] = tokens
        return counts

    def _learn(self, state: _State, draft: Draft, new: Sequence[int]) -> None:
        """Compare a draft with the tokens that came, up to the first that differs."""
        for token, guess, kind in zip(new, draft.token_ids, draft.kinds, strict=False):
            state.acceptance[kind].update(token == guess)
            self._shared[kind].update(token == guess)

    def _count(self, num_drafts: int, num_accepted: int) -> None:
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        for position in range(num_accepted):
            self._per_position[position] += 1
            self._recent.update(True)
        if num_accepted < num_drafts:
            self._recent.update(False)

    def _give_up(self, error: Exception) -> None:
        """A drafter that fails must cost nobody a token."""
        name = self.drafter.name if self.drafter is not None else ""
        text = " ".join((str(error) or type(error).__name__).split())
        log.warning("drafter %s failed and is turned off: %s", name, text)
        self.drafter = None
