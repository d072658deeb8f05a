"""Logits to one token. A token is a function of its logits, its parameters and its position.

Order as in vLLM: allowed ids, bias, min_tokens, penalties, temperature, min_p, top_k, top_p, then
argmax(logits / T + Gumbel noise), which samples the softmax exactly (Gumbel-max).

NumPy, one row at a time: a row stays in the core's cache from one pass to the next, and an
operation costs a few µs, less than torch needs to start one. Only tokens near the best one are
looked at one by one; each shortcut checks that no other token could have changed the result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qdeploy.runtime.noise import gumbel, may_exceed, noise_key, token_noise
from qdeploy.runtime.outputs import TokenLogprob
from qdeploy.runtime.request import Request
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.scratch import scratch

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
Scaled = NDArray[np.float64]

_NEVER = float("-inf")
#: How far below the best token, in units of the temperature, to look first, next, and at last.
_REACHES = (8.0, 16.0, math.inf)
_SORTABLE = 1000  # of more tokens, sorting all takes longer than counting


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token and, if asked for, its log-probability; or `error`, one line, and no token."""

    token_id: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None


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
        if scores[best] == _NEVER:
            return Sampled(error="allowed_token_ids and min_tokens leave no token to sample")
    token = best if request.params.greedy else draw(scores, best, request)
    wanted = request.params.logprobs
    return Sampled(token, None if wanted is None else token_logprob(logits, token, wanted))


def process_logits(logits: Row, request: Request, banned: Collection[int]) -> Row:
    """Everything that comes before the temperature: [vocab], `logits` itself if that is nothing."""
    params = request.params
    if not (params.has_penalties or params.logit_bias or params.allowed_token_ids or banned):
        return logits
    scores: Row = logits.copy()
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        scores.fill(_NEVER)
        scores[allowed] = logits[allowed]
    if params.logit_bias:
        scores[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), scores.dtype)
    if banned:
        scores[list(banned)] = _NEVER
    if params.has_penalties:
        apply_penalties(scores, params, request.prompt_token_ids, request.output_counts)
    return scores


def apply_penalties(
    scores: Row, params: SamplingParams, prompt: Iterable[int], counts: Mapping[int, int]
) -> None:
    """Change scores [vocab] in place.

    repetition (Keskar et al. 2019, as transformers): once per distinct token of prompt and output,
    positive scores divided, others multiplied. frequency and presence (OpenAI): over the output,
    score − count·frequency − presence.
    """
    if params.repetition_penalty != 1.0:
        seen = list({*prompt, *counts})
        old, penalty = scores[seen], params.repetition_penalty
        scores[seen] = np.where(old > 0, old / penalty, old * penalty)
    if counts and (params.frequency_penalty or params.presence_penalty):
        times = np.array(list(counts.values()), scores.dtype)
        scores[list(counts)] -= times * params.frequency_penalty + params.presence_penalty


@np.errstate(over="ignore")  # a score far below the best may become -inf
def draw(scores: Row, best: int, request: Request) -> int:
    """Argmax of the noisy, filtered scores [vocab]; scores[best] is their maximum, finite."""
    params = request.params
    key = noise_key(request.seed, request.index, request.num_tokens)
    if params.min_p > 0 or 0 < params.top_k < scores.size or params.top_p < 1:
        ids, scaled = filter_tokens(scores, scores[best], params)
    else:
        ids = _contenders(scores, best, key, params.temperature)
        scaled = _scale(scores[ids], scores[best], params.temperature)
    return int(ids[np.argmax(scaled + gumbel(key, ids))])


def filter_tokens(scores: Row, best: np.float32, params: SamplingParams) -> tuple[Ids, Scaled]:
    """The ids [n] that the filters admit of scores [vocab], and (score − best) / temperature [n].

    best: the maximum of scores. top_p keeps the smallest set of most likely tokens whose
    probability, renormalized after the filters before it, reaches top_p. Tokens that tie with the
    last one kept all stay, so that the result doesn't depend on how a sort orders equals.
    """
    temperature = params.temperature
    limited = params.min_p > 0 or 0 < params.top_k < scores.size
    mass = None if limited or params.top_p == 1 else _mass(scores, best, temperature)
    for reach in _REACHES:
        ids = _near(scores, best, reach * temperature)
        near = scaled = _scale(scores[ids], best, temperature)
        if limited:
            ids, scaled = _at_least(_limit(near, params), ids, near)
        # Once a filter drops a token near the best, the tokens beyond are out, too.
        if params.top_p < 1 and (not limited or len(scaled) < len(near) or reach == math.inf):
            ids, scaled = _at_least(_top_p_threshold(scaled, params.top_p, mass), ids, scaled)
        if len(scaled) < len(near):
            break
    return ids, scaled


def token_logprob(logits: Row, token: int, num_top: int) -> TokenLogprob:
    """Log-probability and rank of `token` under raw logits [vocab], with the num_top best."""
    highest = logits.max()
    total = float(highest) + math.log(_mass(logits, highest, 1.0))
    for reach in _REACHES:
        ids = _near(logits, highest, reach)
        if len(ids) >= num_top:
            break
    top = ids[np.argsort(-logits[ids], kind="stable")[:num_top]].tolist()
    return TokenLogprob(
        token_id=token,
        logprob=float(logits[token]) - total,
        rank=int(np.count_nonzero(logits > logits[token])) + 1,
        top=tuple((i, float(logits[i]) - total) for i in top),
    )


def _contenders(scores: Row, best: int, key: int, temperature: float) -> Ids:
    """Ids of all tokens that could win the noisy argmax, and few others."""
    reach = _REACHES[0]
    lucky = may_exceed(key, scores.size, token_noise(key, best) + reach)
    lucky |= scores >= _floor(scores[best], reach * temperature)
    return np.flatnonzero(lucky)


def _near(scores: Row, best: np.float32, distance: float) -> Ids:
    """Ids of scores [vocab] not further than `distance` below best, and perhaps a few more."""
    return np.flatnonzero(scores >= _floor(best, distance))


def _floor(best: np.float32, distance: float) -> np.float32:
    """best − distance, rounded down."""
    floor: np.float32 = np.nextafter(np.float32(float(best) - distance), np.float32(_NEVER))
    return floor


def _scale(scores: Row, best: np.float32, temperature: float) -> Scaled:
    scaled: Scaled = (scores.astype(np.float64) - float(best)) / temperature
    return scaled


def _at_least(lowest: float, ids: Ids, scaled: Scaled) -> tuple[Ids, Scaled]:
    keep = scaled >= lowest
    return ids[keep], scaled[keep]


def _limit(scaled: Scaled, params: SamplingParams) -> float:
    """The lowest of scaled [n] that min_p and then top_k admit; n ≤ top_k limits nothing."""
    lowest = math.log(params.min_p) if params.min_p > 0 else _NEVER
    if 0 < params.top_k < scaled.size:
        lowest = max(lowest, float(np.partition(scaled, -params.top_k)[-params.top_k]))
    return lowest


def _mass(scores: Row, best: np.float32, temperature: float) -> float:
    """Sum of exp((score − best) / temperature) over scores [vocab], to about 10⁻⁶."""
    scaled = scratch("scaled scores", scores.size, np.float32)
    np.subtract(scores, best, out=scaled)
    if temperature != 1:
        scaled *= np.float32(1 / temperature)
    return float(np.exp(scaled, out=scaled).sum())


def _top_p_threshold(scaled: Scaled, top_p: float, mass: float | None) -> float:
    """The lowest of scaled [n] that top_p keeps; mass: of all tokens, None if these are all."""
    probs = np.exp(scaled)
    reached = float(probs.sum())
    wanted = top_p * (reached if mass is None else mass)
    if reached < wanted:
        return _NEVER
    if scaled.size > _SORTABLE:  # sort only the tokens around the cut
        bins = np.minimum(scaled * -64, 2048).astype(np.int64)
        above = np.bincount(bins, weights=probs).cumsum()
        cut = min(int(np.searchsorted(above, wanted)), above.size - 1)
        wanted -= above[cut - 1] if cut else 0.0
        scaled = scaled[bins == cut]
    ranked = np.sort(scaled)
    probs = np.exp(ranked)[::-1]
    before = probs.cumsum() - probs
    return float(ranked[-np.count_nonzero(before < wanted)])
