"""Calibration text that the model writes itself: no data needed, and its own control tokens.

Sampled at temperature 1 from the unquantized model, as LLM-QAT does (Liu et al. 2023, arXiv
2305.17888, §2.1). A model with a chat template is first given the beginning of a user's turn and
writes the question, too (Magpie, Xu et al. 2024, arXiv 2406.08464, §2.1). When a turn ends, the
template's own words lead to the next one, so that every sequence is full and none is padded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from qdeploy.calibration.windows import CalibrationTokenizer, text_prefix
from qdeploy.errors import UsageError

#: Rounds after which a sequence is taken as it is: a model may end every turn at once.
MAX_TURNS = 64
#: Letters that no template changes, in places of text.
_MARKS = ("Qzaxq", "Qzbxq", "Qzcxq")


class SelfTokenizer(CalibrationTokenizer, Protocol):
    """What sampling needs of a tokenizer."""

    def ordinary_ids(self) -> Sequence[int]:
        """Ids of the vocabulary that are no control tokens."""


#: (prompts, longest continuations in tokens, seed) → continuations, with the end token if any.
Generate = Callable[[Sequence[list[int]], Sequence[int], int], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Script:
    """What is put before the model's own words: at first, then in turns between them.

    starts: with no ids at all to begin with, a text is begun with a random token.
    """

    opening: list[int]
    between: tuple[list[int], ...]
    starts: Sequence[int] = ()


def make_script(tokenizer: SelfTokenizer, end_ids: Collection[int]) -> Script:
    """The chat template's frame of turns; without a template BOS, or a random token."""
    turns = _chat_turns(tokenizer)
    if turns is not None:
        return turns
    opening = text_prefix(tokenizer)
    ordinary = [] if opening else [id for id in tokenizer.ordinary_ids() if id not in end_ids]
    return Script(opening, (opening,), ordinary)


def sample_sequences(
    script: Script,
    generate: Generate,
    end_ids: Collection[int],
    *,
    samples: int,
    seqlen: int,
    seed: int,
) -> list[list[int]]:
    """`samples` sequences of seqlen ids; the same for the same seed and generator."""
    if len(script.opening) >= seqlen:
        raise UsageError(
            f"calibration of {seqlen} tokens a sample doesn't hold the chat template's "
            f"{len(script.opening)}; raise --calib-seqlen",
            param="calib_seqlen",
        )
    chosen = random.Random(seed)
    sequences = [_begun(script.opening, script, chosen) for _ in range(samples)]
    for turn in range(MAX_TURNS):
        unfinished = [ids for ids in sequences if len(ids) < seqlen]
        if not unfinished:
            break
        rooms = [seqlen - len(ids) for ids in unfinished]
        # The next turn's seeds: those of no other turn, whatever is still unfinished.
        continuations = generate(unfinished, rooms, seed * MAX_TURNS + turn)
        for ids, continuation in zip(unfinished, continuations, strict=True):
            ids += continuation
            between = script.between[turn % len(script.between)]
            ids += _begun(_without_end(between, continuation, end_ids), script, chosen)
    return [ids[:seqlen] for ids in sequences]


def _begun(ids: list[int], script: Script, chosen: random.Random) -> list[int]:
    return [*ids, chosen.choice(script.starts)] if script.starts else list(ids)


def _without_end(between: list[int], written: list[int], end_ids: Collection[int]) -> list[int]:
    """The template ends a turn itself; where the model has just done so, that isn't repeated."""
    ended = written and between and written[-1] in end_ids and between[0] == written[-1]
    return between[1:] if ended else between


def _chat_turns(tokenizer: CalibrationTokenizer) -> Script | None:
    """Frame of a conversation of two questions, cut at its texts; None without a template."""
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
    try:
        text = tokenizer.render_chat(messages, add_generation_prompt=True)
    except UsageError:
        return None
    frame = []
    for mark in _MARKS:
        before, found, text = text.partition(mark)
        if not found:
            return None  # a template that drops or rewrites turns
        frame.append(before)
    opening, answer, question = (tokenizer.encode(part, False) for part in frame)
    return Script(opening, (answer, question))
