"""Request bodies: OpenAI's fields that we honour, vLLM's extensions, and nothing silently ignored.

A field of OpenAI's or vLLM's schema that we don't honour is accepted at the values that change
nothing, and is a 400 otherwise; a field of neither is a 400 (DESIGN P4).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from qdeploy.server.errors import bad_request

_Model = TypeVar("_Model", bound="Body")

#: Labels for the provider's books; they never change a result.
_LABELS = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
#: Fields that we don't honour → the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1.0, 1),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class Body(BaseModel):
    """Strict types: "5" is no integer, 1 is no boolean."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(Body):
    """include_usage: one more chunk with the usage before [DONE]."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Body):
    """What completions and chat share; None takes the model's default, then vLLM's."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(SamplingFields):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None


class Message(Body):
    """One chat message; `content` is text, or a list of parts."""

    role: str
    content: str | list[dict[str, Any]]
    name: str | None = None
    refusal: None = None


class ChatBody(SamplingFields):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int] = Field(max_length=1_000_000)


async def read_body(request: Request, kind: type[_Model]) -> _Model:
    """Parse and validate a JSON body; a 400 names the field at fault."""
    data = _parse_json(await request.body())
    if not isinstance(data, dict):
        raise bad_request(f"the body must be a JSON object, got {_json_type(data)}")
    for name, value in data.items():
        _check_text(name, value)
    try:
        return kind.model_validate(_drop_neutral(data, kind))
    except ValidationError as error:
        raise _validation_error(error, data) from None


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not valid UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None


def _check_text(name: str, value: Any) -> None:
    """JSON can escape lone surrogates, which no tokenizer and no answer can hold."""
    try:
        json.dumps((name, value), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        shown = _clean(name)
        raise bad_request(f"{shown} holds a lone surrogate, which is not text", shown) from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _drop_neutral(data: Mapping[str, Any], kind: type[Body]) -> dict[str, Any]:
    kept = {}
    for name, value in data.items():
        if name in kind.model_fields:
            kept[name] = value
        elif name in _NEUTRAL:
            _check_neutral(name, value)
        elif name not in _LABELS:
            raise bad_request(
                f"unrecognized request argument {_show(name)}; remove it", _clean(name)
            )
    return kept


def _check_neutral(name: str, value: Any) -> None:
    if value is None or any(_same(value, neutral) for neutral in _NEUTRAL[name]):
        return
    raise bad_request(f"{name} is not supported by this server; remove it", name)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _validation_error(error: ValidationError, data: Mapping[str, Any]) -> Exception:
    first = error.errors(include_url=False)[0]
    field = str(first["loc"][0])
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return bad_request(f"{field} is missing", field)
    if field == "prompt":
        return bad_request(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists "
            f"of token ids, got {_json_type(data.get(field))}",
            field,
        )
    numbers = [str(part) for part in first["loc"] if isinstance(part, int) or _is_field(part)]
    where = ".".join(dict.fromkeys(numbers)) if numbers else field
    return bad_request(f"{where}: {first['msg']}, got {_show(first['input'])}", field)


def _is_field(part: object) -> bool:
    # pydantic adds the names of union members ("list[str]", "str") to the location
    return isinstance(part, str) and part.isidentifier() and part not in ("str", "int", "list")


def _json_type(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list like {_show(value)}"
    return _show(value)


def _show(value: object) -> str:
    text = _clean(json.dumps(value, default=str))
    return text if len(text) <= 80 else text[:77] + "..."


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
