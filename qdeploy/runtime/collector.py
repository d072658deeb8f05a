"""Sampled tokens to outputs: text, stop conditions, log-probabilities."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from qdeploy.errors import UsageError
from qdeploy.runtime.bad_words import ban_sequences
from qdeploy.runtime.detokenizer import Detokenizer
from qdeploy.runtime.logprobs import prompt_logprobs
from qdeploy.runtime.outputs import FinishReason, RequestOutput, TokenLogprob
from qdeploy.runtime.request import Request
from qdeploy.runtime.sampler import Sampled
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.stop import Stop, StopStrings, check_token_stop
from qdeploy.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Text:
    detokenizer: Detokenizer
    stops: StopStrings


class OutputCollector:
    """Holds the text state of every sample. Without a tokenizer all text is ""."""

    def __init__(self, eos_token_ids: Set[int], tokenizer: Tokenizer | None) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._texts: dict[str, _Text] = {}
        self._prompts: dict[str, list[TokenLogprob | None]] = {}
        # the samples of a request ask one after the other
        self._ban_sequences = lru_cache(maxsize=1)(self._find_sequences)

    def check(self, params: SamplingParams) -> None:
        """UsageError when params need text that can't be made; before anything is queued."""
        if self._tokenizer is not None:
            self._ban_sequences(tuple(params.bad_words or ()))
            return
        if params.stop_strings:
            raise UsageError("stop strings need a tokenizer; use stop_token_ids", param="stop")
        if params.bad_words:
            raise UsageError("bad_words need a tokenizer; use logit_bias", param="bad_words")

    def add(self, request: Request) -> None:
        """Begin the text of a sample, and find the tokens of its bad words."""
        if self._tokenizer is None:
            return
        params = request.params
        if params.bad_words:
            request.bad_words = self._ban_sequences(tuple(params.bad_words))
        stream = self._tokenizer.stream(
            request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        stops = StopStrings(params.stop_strings, include_stop=params.include_stop_str_in_output)
        self._texts[request.sequence_id] = _Text(stream, stops)

    def remove(self, request: Request) -> None:
        """Forget a sample."""
        self._texts.pop(request.sequence_id, None)
        self._prompts.pop(request.sequence_id, None)

    def banned(self, request: Request) -> Set[int]:
        """Tokens that may not be sampled now: those that would stop before min_tokens."""
        return banned_tokens(request, self._eos_token_ids)

    def take_prompt(self, request: Request, rows: NDArray[np.float32]) -> None:
        """Raw logits [n, vocab] of the prompt's next n positions, in order, without gaps.

        The last position predicts no token of the prompt, and needn't be given. Raises ValueError
        where a row isn't finite.
        """
        found = self._prompts.setdefault(request.sequence_id, [None])
        targets = request.prompt_token_ids[len(found) : len(found) + len(rows)]
        found += prompt_logprobs(rows[: len(targets)], targets, request.params.prompt_logprobs or 0)

    def collect(self, request: Request, sampled: Sampled) -> RequestOutput:
        """The output of a token that `request` has just taken."""
        stop = check_token_stop(request, self._eos_token_ids)
        text, stop = self._advance(request, sampled.token_id, stop)
        return self._output(
            request,
            token_ids=(sampled.token_id,),
            text=text,
            logprobs=None if sampled.logprob is None else (sampled.logprob,),
            stop=stop,
        )

    def final(self, request: Request, reason: FinishReason) -> RequestOutput:
        """The last output of a sample that ends without a new token."""
        state = self._texts.get(request.sequence_id)
        text = ""
        if state is not None:
            shown, _ = state.stops.push(state.detokenizer.flush(), may_stop=False)
            text = shown
        return self._output(request, text=text, stop=Stop(reason))

    def _find_sequences(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        assert self._tokenizer is not None
        encode = self._tokenizer.encode
        return ban_sequences(words, lambda text: encode(text, add_special_tokens=False))

    def _advance(self, request: Request, token: int, stop: Stop | None) -> tuple[str, Stop | None]:
        """New text, cut at a stop string, which wins over any other reason to stop."""
        state = self._texts.get(request.sequence_id)
        if state is None:
            return "", stop
        # The text of eos and stop tokens is not part of the answer.
        hidden = stop is not None and stop.by_token
        if hidden and not request.params.include_stop_str_in_output:
            text = ""
        else:
            text = state.detokenizer.push(token)
        if stop is not None:
            text += state.detokenizer.flush()
        may_stop = request.num_output_tokens >= request.params.min_tokens
        shown, found = state.stops.push(text, may_stop=may_stop)
        if found is not None:
            return shown, Stop("stop", found)
        return shown + (state.stops.flush() if stop is not None else ""), stop

    def _finished_prompt(self, request: Request) -> tuple[TokenLogprob | None, ...] | None:
        """Log-probabilities of the prompt, once, when they are complete."""
        found = self._prompts.get(request.sequence_id)
        if found is None or len(found) < request.num_prompt_tokens:
            return None
        return tuple(self._prompts.pop(request.sequence_id))

    def _output(
        self,
        request: Request,
        *,
        token_ids: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[TokenLogprob, ...] | None = None,
        stop: Stop | None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            index=request.index,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=self._finished_prompt(request),
            finish_reason=None if stop is None else stop.finish_reason,
            stop_reason=None if stop is None else stop.reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens,
            metrics=request.metrics(),
        )


def banned_tokens(request: Request, eos_token_ids: Set[int]) -> Set[int]:
    """Tokens that may not be sampled now: those that would stop before min_tokens."""
    params = request.params
    if params.min_tokens == 0 or request.num_output_tokens >= params.min_tokens:
        return frozenset()
    return eos_token_ids | set(params.stop_token_ids or ())


def known_tokens(token_ids: Set[int], vocab_size: int) -> frozenset[int]:
    """Those of a model folder's special tokens for which the model has a logit."""
    return frozenset(token for token in token_ids if 0 <= token < vocab_size)
