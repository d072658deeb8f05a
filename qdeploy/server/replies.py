"""OpenAI's answer objects, whole and in chunks, from the engine's outputs. Pure functions of them.

A stream's chunks share id, created and model; each choice ends with one chunk that has no text
and the finish reason (user reports H04, H05).
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from qdeploy.runtime.outputs import CompletionOutput, GenerationOutput, RequestOutput, TokenLogprob
from qdeploy.runtime.tokenizer import Tokenizer
from qdeploy.server.context import public_id
from qdeploy.server.token_text import token_text

Json = dict[str, Any]

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
#: Stands for a chunk's text; no other string of a chunk holds NUL.
_TEXT = "\0"


def event(chunk: Json) -> str:
    """One server-sent event."""
    return f"data: {_ENCODER.encode(chunk)}\n\n"


class Reply(Protocol):
    """One API's shape of the answer to one HTTP request."""

    def whole(self, results: Sequence[GenerationOutput]) -> Json: ...

    def opening(self) -> list[Json]: ...

    def chunks(self, prompt: int, output: RequestOutput) -> list[Json]: ...

    def text_event(self, prompt: int, output: RequestOutput) -> str | None: ...

    def usage_chunk(self, usage: Json) -> Json: ...


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> Json:
    """OpenAI's usage object. cached_tokens: of the prompts, read from the prefix cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def usage_of(results: Sequence[GenerationOutput]) -> Json:
    """Usage of finished results; a prompt counts once, whatever n."""
    return usage(
        sum(len(result.prompt_token_ids) for result in results),
        sum(len(sample.token_ids) for result in results for sample in result.outputs),
        sum(result.num_cached_tokens for result in results),
    )


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else -9999.0  # JSON has no infinity; as vLLM


def ending(sample: CompletionOutput | RequestOutput) -> Json:
    """Why a choice ended."""
    return {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}


def prompt_entries(
    logprobs: Sequence[TokenLogprob | None], tokenizer: Tokenizer
) -> list[Json | None]:
    """vLLM's prompt_logprobs: for each token of a prompt its own entry and those of the likeliest,
    by token id; null for the first one.
    """

    def entry(token_id: int, logprob: float, rank: int) -> Json:
        text = token_text(tokenizer, token_id)
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    def entries(token: TokenLogprob) -> Json:
        found = {
            str(token_id): entry(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(token.top, 1)
        }
        own = entry(token.token_id, token.logprob, token.rank)
        return {str(token.token_id): own, **found}

    return [None if token is None else entries(token) for token in logprobs]


class ReplyBase(ABC):
    """Fields that every object and chunk of one answer share."""

    def __init__(self, kind: str, prefix: str, model: str, include_usage: bool) -> None:
        self.id = public_id(prefix)
        self._kind = kind
        self._created = int(time.time())
        self._model = model
        self._include_usage = include_usage
        self._halves: dict[int, tuple[str, str]] = {}

    @abstractmethod
    def _text_choice(self, index: int, text: str) -> Json:
        """A chunk's choice that holds text only."""

    def _text_event(self, index: int, output: RequestOutput) -> str | None:
        """`chunks` as events, for output that is text only: all else of a choice's events is the
        same in each, and a server writes one for every token.
        """
        if output.finished or output.logprobs or output.prompt_logprobs:
            return None
        if not output.text:
            return ""
        halves = self._halves.get(index)
        if halves is None:
            whole = event(self._chunk(self._text_choice(index, _TEXT)))
            before, after = whole.split(_ENCODER.encode(_TEXT))
            halves = self._halves[index] = (before, after)
        return f"{halves[0]}{_ENCODER.encode(output.text)}{halves[1]}"

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _chunk(self, choice: Json) -> Json:
        chunk = self._object(self._kind, [choice])
        return {**chunk, "usage": None} if self._include_usage else chunk

    def usage_chunk(self, usage: Json) -> Json:
        """The chunk before [DONE] that include_usage asks for."""
        return {**self._object(self._kind, []), "usage": usage}
