"""Chat templates: Jinja in a sandbox, with the environment that transformers gives them.

Templates come with a model, so they are untrusted: nothing but plain data reaches them. tests
compare with transformers' apply_chat_template, which isn't used because importing it takes longer
than all the rest of a server's start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from qdeploy.runtime.chat_continuation import cut_continued, mark_continued

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

#: One template, or several by name.
Templates = str | Mapping[str, str]


def choose_template(templates: Templates | None, given: str | None, tools: object) -> str | None:
    """The template to render: `given` (a name or a template), else tool_use with tools, else the
    default one. None when there is none; ValueError when the named ones hold no default.
    """
    if not isinstance(templates, Mapping):
        return given if given is not None else templates or None
    if given is not None:
        return templates.get(given, given)
    name = "tool_use" if tools is not None and "tool_use" in templates else "default"
    if name not in templates:
        raise ValueError(f"no default among the templates {', '.join(sorted(templates))}")
    return templates[name]


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool | str = False,
    **variables: Any,
) -> str:
    """The text of a conversation, as transformers' apply_chat_template renders it.

    special_tokens: variables by name (bos_token, …); `variables` of the same name win. tools: JSON
    schemas, or functions to make them of. continue_final_message: end within the last message's
    text (or that of the field named). Raises jinja2.TemplateError, TypeError, ValueError.
    """
    compiled = _compile(template)
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")
    if not all(isinstance(document, Mapping) for document in documents or ()):
        raise TypeError("documents must be objects with title and text")
    chat = [_alias_reasoning(_plain(_without_none(message))) for message in messages]
    field = continue_final_message if isinstance(continue_final_message, str) else "content"
    final = mark_continued(chat, field, template) if continue_final_message else ""
    text = compiled.render(
        messages=chat,
        tools=None if tools is None else _plain([_schema(tool) for tool in tools]),
        documents=_plain(documents),
        add_generation_prompt=add_generation_prompt,
        **{**special_tokens, **_plain(variables)},
    )
    return cut_continued(text, final) if continue_final_message else text


def _without_none(value: Any) -> dict[str, Any]:
    """A missing key is what templates test for; None they print."""
    return {key: item for key, item in value.items() if item is not None}


def _alias_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning is passed under several names; templates read `reasoning_content` or `thinking`."""
    found = (message[key] for key in _REASONING_FIELDS if message.get(key) is not None)
    reasoning = next(found, None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _schema(tool: Any) -> Any:
    if not callable(tool):
        if not isinstance(tool, Mapping):
            raise ValueError("a tool must be a JSON schema or a function with type hints")
        return tool
    from transformers.utils.chat_template_utils import get_json_schema

    return get_json_schema(tool)


def _plain(value: Any) -> Any:
    """JSON's types only: an object's methods would be the template's to call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # an enum, say
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return f"<{type(value).__name__}>"


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own way

    def parse(self, parser: Parser) -> nodes.Node:
        """A block with its own scope, as a call block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Macro) -> str:
        return caller()


class _TemplateDict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """dict.fromkeys."""
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """`namespace` that refuses names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], args[1:]  # so that namespace(self=…) works
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can't hold {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, leaves <, > and & as they are."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


@lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    environment.filters["tojson"] = _tojson
    environment.globals.update(functions)
    return environment.from_string(template)
