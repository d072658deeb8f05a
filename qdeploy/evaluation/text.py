"""Held-out text, cut into windows of tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from qdeploy._resources import resource_dir
from qdeploy.errors import UsageError
from qdeploy.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalText:
    """Windows of token ids that evaluation scores.

    windows: each of at most `ctx_len` tokens, the BOS included where the tokenizer adds one
    stride: tokens of text from one window's start to the next one's
    """

    windows: list[list[int]]
    sha256: str
    source: str
    ctx_len: int
    stride: int
    bos: bool

    @property
    def num_tokens(self) -> int:
        """Positions scored."""
        return sum(map(len, self.windows))


def default_text() -> Path:
    """The evaluation text that ships with qdeploy, disjoint from its calibration text."""
    return resource_dir("calib_data") / "eval.txt"


def load_text(
    path: Path, tokenizer: Tokenizer, *, ctx_len: int, max_windows: int | None, stride: int = 0
) -> EvalText:
    """Tokenize a text whole, without special tokens, and cut it into windows.

    stride: 0 leaves no gap; more than a window's tokens of text leaves text out between windows.
    Each window starts with BOS if the tokenizer adds one by itself (Gemma is off without it).
    """
    if ctx_len < 2:
        raise UsageError(f"ctx-len {ctx_len} is too short; give at least 2", param="ctx_len")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"evaluation text {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"evaluation text {path} is not UTF-8; convert it first") from None
    prefix = [id for id in tokenizer.encode("")[:1] if id == tokenizer.bos_token_id]
    ids = tokenizer.encode(text, add_special_tokens=False)
    body = ctx_len - len(prefix)
    step = stride or body
    starts = range(0, len(ids) - body + 1, step)
    windows = [prefix + ids[start : start + body] for start in starts][:max_windows]
    if not windows:
        raise UsageError(
            f"evaluation text {path} has {len(ids)} tokens, fewer than --ctx-len {ctx_len}; "
            "give a longer text or a smaller --ctx-len"
        )
    return EvalText(
        windows=windows,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        source=path.name,
        ctx_len=ctx_len,
        stride=step,
        bos=bool(prefix),
    )
