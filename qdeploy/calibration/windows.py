"""Token ids of texts cut, packed and drawn into sequences of at most seqlen ids, never padded."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

ENCODE_CHARS = 8192


class CalibrationTokenizer(Protocol):
    """What calibration needs of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids."""

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> list[int]:
        """Messages to ids by the model's template, which writes BOS itself; UsageError: none."""

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        """The same as text."""


def encode_long(tokenizer: CalibrationTokenizer, text: str) -> list[int]:
    """Ids of a long text, cut at blank lines: tokenizers are slow, and warn, on a whole book."""
    ids: list[int] = []
    part: list[str] = []
    size = 0
    for paragraph in text.split("\n\n"):
        part.append(paragraph)
        size += len(paragraph)
        if size >= ENCODE_CHARS:
            ids += tokenizer.encode("\n\n".join([*part, ""]), False)
            part, size = [], 0
    return ids + (tokenizer.encode("\n\n".join(part), False) if part else [])


def text_prefix(tokenizer: CalibrationTokenizer) -> list[int]:
    """Ids that the tokenizer puts before a text (BOS), which every window of it then begins with.

    Without BOS, models trained with one (Gemma) have statistics they never show in use.
    """
    plain, full = tokenizer.encode("a", False), tokenizer.encode("a", True)
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []


def windows(ids: list[int], seqlen: int, prefix: list[int]) -> list[list[int]]:
    """Cut into windows of seqlen ids, the last one shorter; each begins with `prefix`, once.

    A text that spells BOS out, or a chat template that writes it, doesn't get a second one.
    """
    while prefix and ids[: len(prefix)] == prefix:
        ids = ids[len(prefix) :]
    step = max(seqlen - len(prefix), 1)
    return [prefix + ids[start : start + step] for start in range(0, len(ids), step)]


def draw(pieces: list[list[int]], count: int, seqlen: int, seed: int) -> list[list[int]]:
    """Up to `count` sequences in seeded random order, full ones before shorter remainders.

    With more pieces than that, whole pieces share a sequence as long as they fit: more of them are
    used, none is cut.
    """
    order = list(pieces)
    random.Random(seed).shuffle(order)
    if len(order) > count:
        order = _pack(order, seqlen)
    longest = max(map(len, order), default=0)
    order.sort(key=lambda piece: len(piece) < longest // 2)
    return order[:count]


def _pack(pieces: list[list[int]], seqlen: int) -> list[list[int]]:
    packed: list[list[int]] = []
    for piece in pieces:
        if packed and len(packed[-1]) + len(piece) <= seqlen:
            packed[-1] = packed[-1] + piece
        else:
            packed.append(piece)
    return packed
