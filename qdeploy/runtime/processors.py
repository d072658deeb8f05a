"""Changes to a row of logits before the temperature: bias, penalties, bans, grammars.

A request's processors are built once and hold what can be prepared: arrays of ids, counts of the
tokens so far. They learn of new tokens by looking at the request, so a row is processed for the
position where it stands, however many tokens a step took (speculation) and whoever appended them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from qdeploy.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from qdeploy.runtime.request import Request

Row = NDArray[np.float32]

NEVER = float("-inf")


class Processor(Protocol):
    """One change of the scores of a request's next token."""

    def apply(self, scores: Row, request: Request) -> None:
        """Change scores [vocab], float32, in place; −inf bans a token."""


class TokenMask(Protocol):
    """What a grammar lets through: the state of one sample, moved token by token.

    The mask sees every output token once, in order, before `allowed` is asked for the next one.
    """

    def allowed(self) -> NDArray[np.bool_] | NDArray[np.int32]:
        """Which tokens may come next: [vocab] bool, or bits packed as xgrammar and llguidance do,
        [vocab / 32, rounded up] int32, token i in bit i % 32 of word i // 32. Tokens beyond its end
        are banned. Where the grammar is complete it allows the end-of-sequence tokens.
        """

    def advance(self, token_id: int) -> None:
        """Take the token that was sampled."""

    def rollback(self, num_tokens: int) -> None:
        """Forget the last num_tokens tokens, which were withdrawn."""


def make_processors(request: Request) -> tuple[Processor, ...]:
    """The processors of a request in vLLM's order; none when it asks for none."""
    params, found = request.params, list[Processor]()
    if params.allowed_token_ids is not None:
        found.append(AllowedTokens(params.allowed_token_ids))
    if request.token_mask is not None:
        found.append(Grammar(request.token_mask))
    if request.bad_words:
        found.append(BadWords(request.bad_words))
    if params.logit_bias:
        found.append(LogitBias(tuple(params.logit_bias), tuple(params.logit_bias.values())))
    if params.has_penalties:
        found.append(Penalties(params))
    return tuple(found)


class AllowedTokens:
    """Bans all but some tokens."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.array(ids, np.int64)

    def apply(self, scores: Row, request: Request) -> None:
        """Keep the allowed scores."""
        kept = scores[self._ids]
        scores.fill(NEVER)
        scores[self._ids] = kept


class LogitBias:
    """Adds values [n] to the scores of ids [n]."""

    def __init__(self, ids: Sequence[int], values: Sequence[float]) -> None:
        self._ids, self._values = np.array(ids, np.int64), np.array(values, np.float32)

    def apply(self, scores: Row, request: Request) -> None:
        """Add the bias."""
        scores[self._ids] += self._values


class BadWords:
    """Bans the last token of a sequence where the output ends with all the others (as vLLM).

    A tokenizer may know tokens for which the model has no logit: these never come anyway.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        singles = [sequence[0] for sequence in sequences if len(sequence) == 1]
        self._always = np.array(singles, np.int64)
        self._after: dict[int, list[Sequence[int]]] = {}  # by the token before the last
        for sequence in sequences:
            if len(sequence) > 1:
                self._after.setdefault(sequence[-2], []).append(sequence)

    def apply(self, scores: Row, request: Request) -> None:
        """Ban what would complete a sequence."""
        scores[self._always[self._always < scores.size]] = NEVER
        num_output = request.num_output_tokens
        if not self._after or not num_output:
            return
        tokens = request.token_ids
        for sequence in self._after.get(tokens[-1], ()):
            size = len(sequence) - 1
            follows = size <= num_output and tuple(tokens[-size:]) == tuple(sequence[:-1])
            if follows and sequence[-1] < scores.size:
                scores[sequence[-1]] = NEVER


class Grammar:
    """Bans what a TokenMask doesn't allow."""

    def __init__(self, mask: TokenMask) -> None:
        self._mask = mask
        self._output = _Output()

    def apply(self, scores: Row, request: Request) -> None:
        """Show the mask the tokens that it hasn't seen, then apply it."""
        withdrawn, new = self._output.changes(request)
        if withdrawn:
            self._mask.rollback(len(withdrawn))
        for token in new:
            self._mask.advance(token)
        allowed = _unpacked(self._mask.allowed(), scores.size)
        scores[: allowed.size][~allowed] = NEVER
        scores[allowed.size :] = NEVER


def _unpacked(mask: NDArray[np.bool_] | NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    if mask.dtype == np.bool_:
        return mask[:vocab_size].astype(np.bool_, copy=False)
    words = np.ascontiguousarray(mask).astype("<u4", copy=False).view(np.uint8)
    count = min(vocab_size, words.size * 8)
    return np.unpackbits(words, count=count, bitorder="little").view(np.bool_)


class Penalties:
    """repetition (Keskar et al. 2019, as transformers): once per distinct token of prompt and
    output, positive scores divided, others multiplied. frequency and presence (OpenAI): over the
    output, score − count·frequency − presence.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._seen, self._counts = _Counts(), _Counts()
        self._output: _Output | None = None

    def apply(self, scores: Row, request: Request) -> None:
        """Count the new tokens and change the scores of all that were counted."""
        self._count(request)
        if self._repetition != 1:
            ids = self._seen.ids
            old = scores[ids]
            scores[ids] = np.where(old > 0, old / self._repetition, old * self._repetition)
        if self._counts.ids.size and (self._frequency or self._presence):
            scores[self._counts.ids] -= self._counts.values * self._frequency + self._presence

    def _count(self, request: Request) -> None:
        if self._output is None:
            self._output = _Output()
            if self._repetition != 1:
                self._seen.add(request.prompt_token_ids)
        withdrawn, new = self._output.changes(request)
        for counts in (self._seen, self._counts):
            counts.remove(withdrawn)
            counts.add(new)


class _Output:
    """The output tokens that a processor has seen. A drafter withdraws tokens and appends others;
    all that a request's own sampler took stays.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []

    def changes(self, request: Request) -> tuple[list[int], list[int]]:
        """The tokens withdrawn since the last call, and the new ones."""
        seen, now = self._tokens, request.token_ids[request.num_prompt_tokens :]
        same = len(seen)
        if now[:same] != seen:
            pairs = enumerate(zip(seen, now, strict=False))
            same = next((i for i, (old, new) in pairs if old != new), len(now))
        withdrawn, added = seen[same:], now[same:]
        del seen[same:]
        seen += added
        return withdrawn, added


class _Counts:
    """Distinct tokens and how often each came, as arrays that grow in place."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids, self._values = np.empty(64, np.int64), np.empty(64, np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._slots)]

    @property
    def values(self) -> NDArray[np.float32]:
        return self._values[: len(self._slots)]

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            slot = self._slots.get(token)
            if slot is None:
                slot = self._slots[token] = len(self._slots)
                if slot == self._ids.size:
                    self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                    self._values = np.concatenate([self._values, np.empty_like(self._values)])
                self._ids[slot], self._values[slot] = token, 0
            self._values[slot] += 1

    def remove(self, tokens: Iterable[int]) -> None:
        """Take back what `add` counted."""
        for token in tokens:
            slot = self._slots[token]
            self._values[slot] -= 1
            if self._values[slot] == 0:  # the last one takes its place
                last = len(self._slots) - 1
                self._slots[int(self._ids[last])] = slot
                self._ids[slot], self._values[slot] = self._ids[last], self._values[last]
                del self._slots[token]
