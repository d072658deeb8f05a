"""From a body's prompt or messages to token ids, and from its fields to SamplingParams."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.tokenizer import Tokenizer
from qdeploy.server.errors import bad_request
from qdeploy.server.schema import ChatBody, CompletionBody, Message, SamplingFields

#: Samples (prompts × n) that one request may ask for.
MAX_SAMPLES = 128
ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """text: None when the client sent token ids."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a request: positions of the context, sequences of a step."""

    max_model_len: int
    max_num_seqs: int


async def completion_prompts(body: CompletionBody, tokenizer: Tokenizer) -> list[Prompt]:
    """All prompts of a completion request, tokenized; an empty one is a 400 (R01)."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [await _encode(prompt, tokenizer)]
    if not prompt:
        raise bad_request("prompt is an empty list; give at least one prompt", "prompt")
    if isinstance(prompt[0], int):
        return [_ids(prompt)]
    if len(prompt) > MAX_SAMPLES:
        raise bad_request(f"prompt holds {len(prompt)} prompts; at most {MAX_SAMPLES}", "prompt")
    return [
        await _encode(item, tokenizer) if isinstance(item, str) else _ids(item) for item in prompt
    ]


async def _encode(text: str, tokenizer: Tokenizer) -> Prompt:
    # a long prompt takes a while, and the tokenizer releases the GIL
    ids = await asyncio.to_thread(tokenizer.encode, text)
    if not text or not ids:
        raise bad_request("prompt is empty; give at least one token of text", "prompt")
    return Prompt(token_ids=list(ids), text=text)


def _ids(ids: Sequence[Any]) -> Prompt:
    if not ids:
        raise bad_request("prompt is an empty list of token ids; give at least one", "prompt")
    return Prompt(token_ids=list(ids))


async def chat_prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> Prompt:
    """A chat as token ids, by the model's own template."""
    if not messages:
        raise bad_request("messages is empty; give at least one message", "messages")
    plain = [_plain(index, message) for index, message in enumerate(messages)]
    return Prompt(token_ids=await asyncio.to_thread(tokenizer.chat, plain))


def _plain(index: int, message: Message) -> dict[str, str]:
    param = f"messages.{index}"
    if message.role not in ROLES:
        raise bad_request(
            f"{param}.role {message.role[:40]!r} is not supported; use {', '.join(ROLES)}",
            "messages",
        )
    content = message.content
    text = content if isinstance(content, str) else _join(content, f"{param}.content")
    plain = {"role": message.role, "content": text}
    return plain if message.name is None else {**plain, "name": message.name}


def _join(parts: Sequence[Mapping[str, Any]], where: str) -> str:
    texts = []
    for index, part in enumerate(parts):
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            raise bad_request(
                f"{where}.{index}: parts of type {str(kind)[:40]!r} are not supported; "
                "this model takes text only",
                "messages",
            )
        if not isinstance(text, str):
            raise bad_request(f"{where}.{index}.text must be a string", "messages")
        texts.append(text)
    return "".join(texts)


def check_prompts(prompts: Sequence[Prompt], limits: Limits, param: str) -> None:
    """Prompts fit in the context with one token to spare; the message gives the numbers."""
    for prompt in prompts:
        count = len(prompt.token_ids)
        if count >= limits.max_model_len:
            raise bad_request(
                f"{param} has {count} tokens; the context of {limits.max_model_len} tokens must "
                "hold it and at least one more; shorten it",
                param,
                "context_length_exceeded",
            )


class ParamsBuilder:
    """Request fields over the model's generation_config over vLLM's defaults.

    Raises UsageError for defaults that no request could be sampled with.
    """

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self._defaults = {k: v for k, v in defaults.items() if k != "max_tokens"}
        SamplingParams(**defaults)
        self._chat_max_tokens: int | None = defaults.get("max_tokens")

    def completion(self, body: CompletionBody) -> SamplingParams:
        """Parameters of /v1/completions; max_tokens defaults to 16, as OpenAI's does."""
        extra: dict[str, Any] = {
            "max_tokens": 16 if body.max_tokens is None else body.max_tokens,
            "logprobs": body.logprobs,
        }
        if body.echo and body.logprobs is not None:
            extra["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
        if body.best_of is not None:
            extra["n"] = _best_of(body, body.best_of)
            extra["logprobs"] = body.logprobs or 0
        return self._build(body, extra)

    def chat(self, body: ChatBody, room: int) -> SamplingParams:
        """Parameters of chat; without max_tokens a reply may run to the end of the context.

        room: tokens that the context has left, which caps the model's own default.
        """
        name = "max_tokens"
        given = body.max_tokens
        if body.max_completion_tokens is not None:
            if given is not None and given != body.max_completion_tokens:
                raise bad_request(
                    f"max_tokens={given} contradicts max_completion_tokens="
                    f"{body.max_completion_tokens}; give one",
                    "max_tokens",
                )
            name, given = "max_completion_tokens", body.max_completion_tokens
        if given is not None and given < 1:
            raise bad_request(f"{name}={given} is not allowed; give at least 1", name)
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
            raise bad_request(
                f"top_logprobs={body.top_logprobs} is not allowed; give 0 to 20", "top_logprobs"
            )
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        default = self._chat_max_tokens and min(self._chat_max_tokens, room)
        max_tokens = default if given is None else given
        return self._build(body, {"max_tokens": max_tokens, "logprobs": logprobs})

    def _build(self, body: SamplingFields, extra: Mapping[str, Any]) -> SamplingParams:
        given = body.model_dump(
            include=set(SamplingFields.model_fields)
            - {"model", "stream", "stream_options", "max_tokens", "logit_bias"},
            exclude_none=True,
        )
        values = {**self._defaults, **given, **extra, "logit_bias": _bias(body.logit_bias)}
        return SamplingParams(**values)


def _best_of(body: CompletionBody, best_of: int) -> int:
    """How many samples to draw, of which body.n are returned."""
    n = 1 if body.n is None else body.n
    if n < 1:
        raise bad_request(f"n={n} is not allowed; give at least 1", "n")
    if best_of < n:
        raise bad_request(f"best_of={best_of} is less than n={n}; give at least n", "best_of")
    if body.stream and best_of > n:
        raise bad_request("best_of can't be streamed; leave out stream", "best_of")
    return best_of


def _bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    found = {}
    for token, value in bias.items():
        try:
            found[int(token)] = value
        except ValueError:
            message = f"logit_bias: {token[:40]!r} is not a token id; give a number"
            raise bad_request(message, "logit_bias") from None
    return found


def check_params(
    params: SamplingParams, prompts: Sequence[Prompt], limits: Limits, n: str = "n"
) -> None:
    """Bounds that need the prompt or the server's configuration (H11). n: its name in the body."""
    if params.n > limits.max_num_seqs:
        raise bad_request(
            f"{n}={params.n} exceeds the {limits.max_num_seqs} sequences of a step "
            f"(--max-num-seqs); lower {n}",
            n,
        )
    if params.n * len(prompts) > MAX_SAMPLES:
        raise bad_request(
            f"{len(prompts)} prompts × {n}={params.n} are more than {MAX_SAMPLES} samples; "
            "send several requests",
            n,
        )
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if params.max_tokens is not None and longest + params.max_tokens > limits.max_model_len:
        raise bad_request(
            f"the prompt's {longest} tokens and max_tokens={params.max_tokens} exceed the context "
            f"of {limits.max_model_len} tokens; max_tokens may be "
            f"{limits.max_model_len - longest} here",
            "max_tokens",
            "context_length_exceeded",
        )


def check_prompt_logprobs(body: SamplingFields) -> bool:
    """Whether prompt_logprobs are asked for; as vLLM, not of a stream."""
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs can't be streamed; leave out stream", "prompt_logprobs")
    return body.prompt_logprobs is not None


def check_stream_options(body: SamplingFields) -> bool:
    """Whether the stream ends with a usage chunk."""
    options = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    for name in ("include_obfuscation", "continuous_usage_stats"):
        if getattr(options, name):
            raise bad_request(f"stream_options.{name} is not supported", "stream_options")
    return bool(options.include_usage)
