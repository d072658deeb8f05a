"""Logits to one token. A token is a function of its logits, its parameters and its position.

Order as in vLLM: allowed ids, bias, min_tokens, penalties, temperature, min_p, top_k, top_p, then
argmax(logits / T + Gumbel noise), which samples the softmax exactly (Gumbel-max).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qdeploy.runtime.noise import MAX_GUMBEL, MIN_GUMBEL, gumbel, noise_key
from qdeploy.runtime.outputs import TokenLogprob
from qdeploy.runtime.request import Request
from qdeploy.runtime.sampling_params import SamplingParams

_NEVER = float("-inf")
_NOISE_RANGE = MAX_GUMBEL - MIN_GUMBEL + 1  # with room for the rounding of a float32 compare


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token and, if asked for, its log-probability; or `error`, one line, and no token."""

    token_id: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None


def sample(logits: Tensor, request: Request, banned: Iterable[int] = ()) -> Sampled:
    """Draw the request's next token from logits [vocab], float32 (not modified).

    banned: tokens that may not come now (eos and stop tokens before min_tokens).
    """
    if not all(bool(extreme.isfinite()) for extreme in torch.aminmax(logits)):  # NaN propagates
        bad = int((~torch.isfinite(logits)).sum())
        return Sampled(
            error=f"the model returned {bad} non-finite logits of {logits.numel()} at position "
            f"{request.num_tokens}; check the artifact with `qdeploy inspect --verify`"
        )
    scores = process_logits(logits, request, banned)
    token = choose(scores, request)
    if token is None:
        return Sampled(error="allowed_token_ids and min_tokens leave no token to sample")
    wanted = request.params.logprobs
    return Sampled(token, None if wanted is None else token_logprob(logits, token, wanted))


def process_logits(logits: Tensor, request: Request, banned: Iterable[int]) -> Tensor:
    """Everything that comes before the temperature. Returns [vocab], float32."""
    params, banned = request.params, list(banned)
    if not (params.has_penalties or params.logit_bias or params.allowed_token_ids or banned):
        return logits
    scores = logits.clone()
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(list(params.allowed_token_ids))
        scores = torch.full_like(scores, _NEVER).index_copy(0, allowed, logits[allowed])
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias))
        scores[ids] += torch.tensor(list(params.logit_bias.values()), dtype=scores.dtype)
    if banned:
        scores[torch.tensor(banned)] = _NEVER
    if params.has_penalties:
        apply_penalties(scores, params, request.prompt_token_ids, request.output_counts)
    return scores


def apply_penalties(
    scores: Tensor, params: SamplingParams, prompt: Iterable[int], counts: Mapping[int, int]
) -> None:
    """Change scores [vocab] in place.

    repetition (Keskar et al. 2019, as transformers): once per distinct token of prompt and output,
    positive scores divided, others multiplied. frequency and presence (OpenAI): over the output,
    score − count·frequency − presence.
    """
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *counts}), dtype=torch.int64)
        old, penalty = scores[seen], params.repetition_penalty
        scores[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if counts and (params.frequency_penalty or params.presence_penalty):
        ids = torch.tensor(list(counts), dtype=torch.int64)
        times = torch.tensor(list(counts.values()), dtype=scores.dtype)
        scores[ids] -= times * params.frequency_penalty + params.presence_penalty


def choose(scores: Tensor, request: Request) -> int | None:
    """Argmax of the noisy, filtered scores [vocab]; None when every token is ruled out."""
    params = request.params
    greedy = int(scores.argmax())  # the lowest id among equals
    best = float(scores[greedy])
    if best == _NEVER:
        return None
    if params.greedy:
        return greedy
    # A token further below the best than the noise's range can't win: an exact prune.
    ids = torch.nonzero(scores >= best - _NOISE_RANGE * params.temperature).squeeze(1)
    scaled = (scores[ids].double() - best) / params.temperature
    ids, scaled = filter_tokens(ids, scaled, params)
    key = noise_key(request.seed, request.index, request.num_tokens)
    return int(ids[torch.argmax(scaled + gumbel(key, ids))])


def filter_tokens(ids: Tensor, scaled: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Keep of ids [n], scaled [n] (scores over temperature, the best is 0) what the filters admit.

    top_p keeps the smallest set of most likely tokens whose probability, renormalized after the
    filters before it, reaches top_p. Tokens that tie with the last one kept all stay, so that the
    result doesn't depend on how a sort orders equals.
    """
    if params.min_p > 0:
        ids, scaled = _at_least(math.log(params.min_p), ids, scaled)
    if 0 < params.top_k < ids.numel():
        ids, scaled = _at_least(scaled.topk(params.top_k).values[-1], ids, scaled)
    if params.top_p < 1:
        # The mass that the prune dropped is < e⁻⁴⁰ · vocab: no float64 sum can tell.
        ids, scaled = _at_least(_top_p_threshold(scaled, params.top_p), ids, scaled)
    return ids, scaled


def _at_least(lowest: Tensor | float, ids: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
    keep = scaled >= lowest
    return ids[keep], scaled[keep]


def _top_p_threshold(scores: Tensor, top_p: float) -> Tensor:
    """The lowest of scores [n] that top_p keeps. Sorts only as many as it needs."""
    mass = top_p * scores.exp().sum()
    for size in (256, 4096, scores.numel()):
        best = scores.topk(min(size, scores.numel())).values
        probs = best.exp()
        keep = probs.cumsum(0) - probs < mass
        if not bool(keep[-1]):
            break
    return best[keep][-1]


def token_logprob(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Log-probability and rank of `token` under raw logits [vocab], with the num_top best."""
    logprobs = torch.log_softmax(logits.float(), 0)
    values, ids = logprobs.topk(min(num_top, logprobs.numel()))
    return TokenLogprob(
        token_id=token,
        logprob=float(logprobs[token]),
        rank=int((logprobs > logprobs[token]).sum()) + 1,
        top=tuple(zip(ids.tolist(), values.tolist(), strict=True)),
    )
