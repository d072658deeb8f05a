"""Logits to one token. A token is a function of its logits, its parameters and its position.

Order as in vLLM: what processors do (allowed ids, grammar, bad words, bias, penalties), then
temperature, min_p, top_k, top_p, then argmax(logits / T + Gumbel noise), which samples the softmax
exactly (Gumbel-max).

NumPy, one row at a time: a row stays in the core's cache from one pass to the next, and an
operation costs a few µs, less than torch needs to start one. Only tokens near the best one are
looked at one by one; each shortcut checks that no other token could have changed the result.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from qdeploy.runtime.filters import filter_tokens, scale
from qdeploy.runtime.logprobs import token_logprob
from qdeploy.runtime.noise import gumbel, noise_key
from qdeploy.runtime.outputs import TokenLogprob
from qdeploy.runtime.processors import NEVER, make_processors
from qdeploy.runtime.request import Request
from qdeploy.runtime.row_passes import Row, row_passes
from qdeploy.runtime.scratch import scratch

_NOTHING_LEFT = "allowed_token_ids, bad_words, min_tokens or a grammar leave no token to sample"


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token and, if asked for, its log-probability; or `error`, one line, and no token.

    unanswerable: whether the error is the request's own.
    """

    token_id: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None
    unanswerable: bool = False


def sample(logits: Row, request: Request, banned: Collection[int] = ()) -> Sampled:
    """Draw the request's next token from logits [vocab], float32 (not modified).

    banned: tokens that may not come now (eos and stop tokens before min_tokens).
    """
    best = int(logits.argmax())  # a NaN, if there is one; the lowest id among equals
    if not (math.isfinite(logits[best]) and math.isfinite(np.minimum.reduce(logits))):
        bad = logits.size - int(np.isfinite(logits).sum())
        return Sampled(
            error=f"the model returned {bad} non-finite logits of {logits.size} at position "
            f"{request.num_tokens}; check the artifact with `qdeploy inspect --verify`"
        )
    scores = process_logits(logits, request, banned)
    if scores is not logits:
        best = int(scores.argmax())
        if not math.isfinite(scores[best]):
            return Sampled(error=_NOTHING_LEFT, unanswerable=True)
    token = best if request.params.greedy else draw(scores, best, request)
    wanted = request.params.logprobs
    return Sampled(token, None if wanted is None else token_logprob(logits, token, wanted))


def process_logits(logits: Row, request: Request, banned: Collection[int]) -> Row:
    """Everything that comes before the temperature: [vocab], `logits` itself if that is nothing.

    The result lies in a scratch buffer and is good until the next call.
    """
    if request.processors is None:
        request.processors = make_processors(request)
    if not (request.processors or banned):
        return logits
    scores: Row = scratch("processed logits", logits.size, np.float32)
    np.copyto(scores, logits)
    if banned:
        scores[list(banned)] = NEVER
    for processor in request.processors:
        processor.apply(scores, request)
    return scores


@np.errstate(over="ignore")  # a score far below the best may become -inf
def draw(scores: Row, best: int, request: Request) -> int:
    """Argmax of the noisy, filtered scores [vocab]; scores[best] is their maximum, finite."""
    params = request.params
    key = noise_key(request.seed, request.index, request.num_tokens)
    if params.min_p > 0 or 0 < params.top_k < scores.size or params.top_p < 1:
        ids, scaled = filter_tokens(scores, scores[best], params)
    else:
        ids = row_passes().contenders(scores, best, key, params.temperature)
        if len(ids) == 1:
            return int(ids[0])
        scaled = scale(scores[ids], scores[best], params.temperature)
    return int(ids[np.argmax(scaled + gumbel(key, ids))])
