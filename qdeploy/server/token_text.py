"""Single tokens as text and bytes, for log-probabilities."""

from __future__ import annotations

import functools
import re

from qdeploy.runtime.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; U+FFFD where it holds part of a character."""
    piece = tokenizer.id_to_token(token_id)
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    # sentencepiece decoders drop the space of a first word
    return f" {text}" if piece and piece.startswith("▁") and not text.startswith(" ") else text


def token_bytes(tokenizer: Tokenizer, token_id: int, text: str) -> list[int] | None:
    """The token's bytes, also of a part of a character; None when the vocabulary hides them."""
    if "\ufffd" not in text:
        return list(text.encode("utf-8"))
    piece = tokenizer.id_to_token(token_id) or ""
    match = _BYTE_TOKEN.fullmatch(piece)
    if match is not None:
        return [int(match.group(1), 16)]
    table = _byte_level_table()
    return [table[c] for c in piece] if all(c in table for c in piece) else None


@functools.lru_cache(maxsize=1)
def _byte_level_table() -> dict[str, int]:
    """GPT-2's visible characters → bytes (Radford et al. 2019, bytes_to_unicode)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in visible}
    hidden = [byte for byte in range(256) if byte not in table.values()]
    return table | {chr(256 + i): byte for i, byte in enumerate(hidden)}
