"""What the scheduler hands to an executor: one step's tokens and where their K/V lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlice:
    """The tokens of one sequence that this step computes.

    token_ids: the slice's tokens; the first one stands at position `start`
    open_blocks, sealed_blocks: for each KV group, pool ids per logical block of the sequence, −1
        where there is none. All cover every block up to the slice's last token. A block that fills
        inside the slice and needs no open copy afterwards has only a sealed id: its K/V are step
        scratch. A block that lies wholly before the window of the slice's first token isn't read,
        whatever its ids.
    num_logits: how many of the slice's last tokens want logits (0 for a prompt chunk that isn't
        the last, 1 for decoding, all of them for scoring)
    """

    token_ids: Sequence[int]
    start: int
    open_blocks: Sequence[Sequence[int]]
    sealed_blocks: Sequence[Sequence[int]]
    num_logits: int = 1


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy an open block of a KV group, before a sequence writes to what it shares."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockIds:
    """Blocks of one KV group, by pool."""

    open: tuple[int, ...] = ()
    sealed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The slices of one step, in the order in which their logits come back.

    copies: done one after another, before anything else of the step.
    """

    slices: Sequence[SequenceSlice]
    copies: Sequence[BlockCopy] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum(len(s.token_ids) for s in self.slices)

    @property
    def num_logits(self) -> int:
        """Rows of logits that the executor returns."""
        return sum(s.num_logits for s in self.slices)
