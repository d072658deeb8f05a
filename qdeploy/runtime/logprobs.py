"""Log-probabilities of tokens under raw logits: of what was sampled, and of a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qdeploy.runtime.filters import REACHES, near
from qdeploy.runtime.outputs import TokenLogprob
from qdeploy.runtime.row_passes import Ids, Row, exact_mass


def token_logprob(logits: Row, token: int, num_top: int) -> TokenLogprob:
    """Log-probability and rank of `token` under raw logits [vocab], with the num_top best."""
    highest = logits.max()
    total = float(highest) + math.log(exact_mass(logits, highest, 1.0))
    return TokenLogprob(
        token_id=token,
        logprob=float(logits[token]) - total,
        rank=int(np.count_nonzero(logits > logits[token])) + 1,
        top=tuple((i, float(logits[i]) - total) for i in _best(logits, highest, num_top).tolist()),
    )


def prompt_logprobs(
    rows: NDArray[np.float32], next_tokens: Sequence[int], num_top: int
) -> list[TokenLogprob]:
    """Of next_tokens [n], each under the raw logits of the position before it, rows [n, vocab].

    Raises ValueError where a row isn't finite.
    """
    found = []
    for row, token in zip(rows, next_tokens, strict=True):
        if not np.isfinite(row).all():
            raise ValueError("the model returned non-finite logits for a token of the prompt")
        found.append(token_logprob(row, token, num_top))
    return found


def _best(logits: Row, highest: np.float32, count: int) -> Ids:
    """The ids of the `count` highest logits, best first, the lower id first among equals."""
    if count == 0:
        return np.empty(0, np.int64)
    for reach in REACHES:
        ids = near(logits, highest, reach)
        if len(ids) >= count:
            break
    if len(ids) > 4 * count:  # find the last one that counts instead of sorting all
        values = logits[ids]
        ids = ids[values >= np.partition(values, -count)[-count]]
    return ids[np.argsort(-logits[ids], kind="stable")[:count]]
