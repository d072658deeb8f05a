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
from qdeploy.server.token_text import token_bytes, token_text

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


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def usage_of(results: Sequence[GenerationOutput]) -> Json:
    """Usage of finished results; a prompt counts once, whatever n."""
    return usage(
        sum(len(result.prompt_token_ids) for result in results),
        sum(len(sample.token_ids) for result in results for sample in result.outputs),
    )


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else -9999.0  # JSON has no infinity; as vLLM


class _Base(ABC):
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
        if output.finished or output.logprobs:
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


class ChatReply(_Base):
    """chat.completion and chat.completion.chunk."""

    def __init__(
        self, model: str, tokenizer: Tokenizer, *, n: int, logprobs: bool, include_usage: bool
    ) -> None:
        super().__init__("chat.completion.chunk", "chatcmpl", model, include_usage)
        self._tokenizer = tokenizer
        self._n = n
        self._logprobs = logprobs

    def whole(self, results: Sequence[GenerationOutput]) -> Json:
        """The answer without streaming."""
        choices = [self._whole_choice(sample) for sample in results[0].outputs]
        return {**self._object("chat.completion", choices), "usage": usage_of(results)}

    def _whole_choice(self, sample: CompletionOutput) -> Json:
        return {
            "index": sample.index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": self._chat_logprobs(sample.logprobs),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }

    def opening(self) -> list[Json]:
        """The role, once per choice."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(self._choice(index, delta)) for index in range(self._n)]

    def chunks(self, prompt: int, output: RequestOutput) -> list[Json]:
        """Text of one step, then the end of the choice if it ended."""
        chunks = []
        logprobs = self._chat_logprobs(output.logprobs) if output.logprobs else None
        if output.text or logprobs:
            choice = self._text_choice(output.index, output.text)
            chunks.append(self._chunk({**choice, "logprobs": logprobs}))
        if output.finished:
            last = self._choice(output.index, {})
            end = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
            chunks.append(self._chunk({**last, **end}))
        return chunks

    def text_event(self, prompt: int, output: RequestOutput) -> str | None:
        """The event of an output that is text only, "" for none; None: take `chunks`."""
        return self._text_event(output.index, output)

    def _text_choice(self, index: int, text: str) -> Json:
        return self._choice(index, {"content": text})

    @staticmethod
    def _choice(index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chat_logprobs(self, tokens: Sequence[TokenLogprob] | None) -> Json | None:
        if not self._logprobs:
            return None
        content = [
            {
                **self._entry(token.token_id, token.logprob),
                "top_logprobs": [self._entry(i, logprob) for i, logprob in token.top],
            }
            for token in tokens or ()
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        text = token_text(self._tokenizer, token_id)
        data = token_bytes(self._tokenizer, token_id, text)
        return {"token": text, "logprob": _finite(logprob), "bytes": data}


class CompletionReply(_Base):
    """text_completion, whole and streamed. echoes: a prompt's text each, or "" without echo."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        *,
        n: int,
        echoes: Sequence[str],
        logprobs: bool,
        include_usage: bool,
    ) -> None:
        super().__init__("text_completion", "cmpl", model, include_usage)
        self._tokenizer = tokenizer
        self._n = n
        self._echoes = echoes
        self._logprobs = logprobs
        self._offsets: dict[int, int] = {}

    def whole(self, results: Sequence[GenerationOutput]) -> Json:
        """The answer without streaming; choices go prompt by prompt."""
        choices = []
        for prompt, result in enumerate(results):
            for sample in result.outputs:
                index = prompt * self._n + sample.index
                choice = self._choice(index, self._echoes[prompt] + sample.text)
                choice["logprobs"] = self._completion_logprobs(prompt, index, sample.logprobs)
                choices.append({**choice, **_end(sample)})
        return {**self._object("text_completion", choices), "usage": usage_of(results)}

    def opening(self) -> list[Json]:
        """The echoed prompts."""
        return [
            self._chunk(self._choice(prompt * self._n + sample, echo))
            for prompt, echo in enumerate(self._echoes)
            for sample in range(self._n)
            if echo
        ]

    def chunks(self, prompt: int, output: RequestOutput) -> list[Json]:
        """Text of one step, then the end of the choice if it ended."""
        index = prompt * self._n + output.index
        chunks = []
        if output.text or output.logprobs:
            choice = self._choice(index, output.text)
            if output.logprobs:
                choice["logprobs"] = self._completion_logprobs(prompt, index, output.logprobs)
            chunks.append(self._chunk(choice))
        if output.finished:
            chunks.append(self._chunk({**self._choice(index, ""), **_end(output)}))
        return chunks

    def text_event(self, prompt: int, output: RequestOutput) -> str | None:
        """The event of an output that is text only, "" for none; None: take `chunks`."""
        return self._text_event(prompt * self._n + output.index, output)

    def _text_choice(self, index: int, text: str) -> Json:
        return self._choice(index, text)

    def end_chunk(self, index: int, reason: str) -> Json:
        """The chunk that ends a choice for which nothing was generated."""
        return self._chunk({**self._choice(index, ""), "finish_reason": reason})

    @staticmethod
    def _choice(index: int, text: str) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _completion_logprobs(
        self, prompt: int, index: int, tokens: Sequence[TokenLogprob] | None
    ) -> Json | None:
        if not self._logprobs:
            return None
        texts = [token_text(self._tokenizer, token.token_id) for token in tokens or ()]
        offset = self._offsets.get(index, len(self._echoes[prompt]))
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens or ()],
            "top_logprobs": [self._top(token) for token in tokens or ()],
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        return {token_text(self._tokenizer, i): _finite(logprob) for i, logprob in token.top}


def _end(sample: CompletionOutput | RequestOutput) -> Json:
    return {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
