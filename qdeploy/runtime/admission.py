"""Checks a request before it enters the engine, and makes its samples."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from qdeploy.errors import CapacityError, UsageError
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.request import Request
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.seeds import request_seed


def resolve_max_model_len(config: EngineConfig, context: int) -> int:
    """The engine's max_model_len, ≤ the model's context; UsageError if the options disagree."""
    length = context if config.max_model_len is None else config.max_model_len
    if not 1 <= length <= context:
        raise UsageError(
            f"max_model_len={length} is not within 1 … {context}, the model's context",
            param="max_model_len",
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < length:
        raise UsageError(
            f"without chunked prefill max_num_batched_tokens={config.max_num_batched_tokens} must "
            f"be at least max_model_len={length}; raise it or enable chunked prefill",
            param="max_num_batched_tokens",
        )
    return length


def make_samples(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    order: int,
    vocab_size: int,
    max_model_len: int,
    engine_seed: int,
) -> list[Request]:
    """The n samples of a request, checked against the model and the context."""
    check_prompt(prompt_token_ids, vocab_size)
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        _check_vocabulary(name, getattr(params, name) or (), vocab_size)
    max_tokens = _resolve_max_tokens(params, len(prompt_token_ids), max_model_len)
    seed = request_seed(params.seed, engine_seed, request_id)
    now, prompt = time.monotonic(), tuple(prompt_token_ids)
    return [
        Request(
            request_id=request_id,
            index=index,
            order=order,
            prompt_token_ids=prompt,
            params=params,
            max_tokens=max_tokens,
            seed=seed,
            arrival_time=now,
            priority=params.priority,
            cache_salt=params.cache_salt or "",
        )
        for index in range(params.n)
    ]


def check_prompt(token_ids: Sequence[int], vocab_size: int) -> None:
    """UsageError for an empty prompt or an id outside the vocabulary."""
    if not token_ids:
        raise UsageError("the prompt has no tokens; give at least one", param="prompt")
    _check_vocabulary("prompt", token_ids, vocab_size)


def _check_vocabulary(param: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"{param} has token id {token}, outside the vocabulary 0 … {vocab_size - 1}",
                param=param,
            )


def _resolve_max_tokens(params: SamplingParams, prompt_len: int, max_model_len: int) -> int:
    room = max_model_len - prompt_len
    if room < 1:
        raise CapacityError(
            f"a prompt of {prompt_len} tokens leaves no room in max_model_len={max_model_len}; "
            "shorten it or raise max_model_len"
        )
    if params.max_tokens is None:
        if params.min_tokens > room:
            raise UsageError(
                f"min_tokens={params.min_tokens} exceeds the {room} tokens left in the context",
                param="min_tokens",
            )
        return room
    if params.max_tokens > room:
        raise UsageError(
            f"max_tokens={params.max_tokens} after a prompt of {prompt_len} tokens exceeds "
            f"max_model_len={max_model_len}; give at most {room}",
            param="max_tokens",
        )
    return params.max_tokens
