"""Chat templates render as in transformers, and are kept in their sandbox."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from qdeploy.errors import UsageError
from qdeploy.runtime.chat_template import render
from qdeploy.runtime.tokenizer import Tokenizer
from runtime.tiny_tokenizer import CHATML, save_tokenizer

TALK = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": 'Say "é" \n twice.'},
    {"role": "assistant", "content": "é é", "reasoning": "why not"},
    {"role": "user", "content": "Again."},
]
CALL = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "w", "arguments": {"city": "Köln", "n": 1.5}}}],
    },
    {"role": "tool", "content": "sunny", "name": "w"},
]
TOOLS = [{"type": "function", "function": {"name": "w", "parameters": {"b": 1, "a": [True, None]}}}]

#: Whitespace control, filters, macros, loops, scopes, globals: what templates in use are made of.
TEMPLATES = {
    "chatml": CHATML,
    "special": "{{ bos_token }}{{ eos_token }}{{ unk_token }}|{{ no }}|{{ no is defined }}",
    "blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\n    {{ m.content }}\n"
    "    {% endif %}\n{% endfor %}\n",
    "trim": "{%- for m in messages -%}\n  {{- m.content | trim }}\n\n{%- endfor %}\n\n",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}"
    "{{ messages[1] | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% else %}none"
    "{% endif %}{% for m in messages %}{{ m.tool_calls | default('-') }}{{ 'content' in m }}"
    "{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
    "{% if loop.last %}{% break %}{% endif %}{{ loop.index }}{{ m.role }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, s='') %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% set ns.s = m.content %}{% endfor %}{{ ns.n }}{{ ns.s }}",
    "dict": "{% set d = dict(a=1, **{'b': 2}) %}{{ d.items() | list }}{{ dict.fromkeys('ab', 1) }}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}"
    "{{ m.content }}{{ x }}{% endgeneration %}{% endfor %}{{ x }}",
    "macro": "{% macro show(m) -%}<{{ m.role | upper }}>{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|"
    "{{ m.reasoning }}{% endfor %}",
    "strings": "{{ messages[0].content.split(' ')[0] ~ messages[1]['content'].strip() }}"
    "{{ messages[-1].role.startswith('us') }}{{ '%s-%d' | format('a', 3) }}",
    "slices": "{{ messages[1:] | length }}{{ messages | map(attribute='role') | join(',') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "options": "{{ enable_thinking }}{{ documents }}{{ add_generation_prompt }}{{ bos_token }}",
    "now": "{{ strftime_now('%Y-%m') }}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def both(theirs: Any, template: str, messages: Any, **options: Any) -> tuple[str, str]:
    ours = render(template, messages, theirs.special_tokens_map, **options)
    text = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    return ours, text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (TALK, {}),
        (TALK, {"add_generation_prompt": True, "enable_thinking": False}),
        (TALK, {"bos_token": "given", "documents": [{"title": "t", "text": "x"}]}),
        (CALL + TALK, {"tools": TOOLS}),
        (CALL + TALK, {"tools": []}),
    ],
)
def test_templates_render_as_in_transformers(
    theirs: Any, name: str, messages: Any, options: dict[str, Any]
) -> None:
    template = TEMPLATES[name]
    try:
        expected = theirs.apply_chat_template(
            messages, chat_template=template, tokenize=False, **options
        )
    except TemplateError as error:
        with pytest.raises(type(error)):
            render(template, messages, theirs.special_tokens_map, **options)
        return
    assert render(template, messages, theirs.special_tokens_map, **options) == expected


def test_a_function_becomes_a_tools_schema(theirs: Any) -> None:
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: where
        """
        return city

    ours, text = both(theirs, "{{ tools | tojson }}", TALK, tools=[weather])
    assert ours == text
    assert "where" in ours


@pytest.mark.parametrize("field", [True, "content", "reasoning_content", "reasoning"])
@pytest.mark.parametrize("content", ["  So the ", "So", [{"type": "text", "text": "So "}]])
@pytest.mark.parametrize("strip", ["", " | trim"])
def test_a_final_message_is_continued(theirs: Any, field: Any, content: Any, strip: str) -> None:
    shown = "{{ m.content[0].text if m.content is not string else m.content" + strip + " }}"
    template = (
        "{% for m in messages %}<{{ m.reasoning_content }}>" + shown + "</{{ m.role }}>{% endfor %}"
    )
    last = {"role": "assistant", "content": content, "reasoning": " because "}
    messages = [TALK[1], last]
    ours, text = both(theirs, template, messages, continue_final_message=field)
    assert ours == text
    assert not ours.endswith("</assistant>")
    assert last["content"] == content  # the caller's messages stay as they are


@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        (CHATML, TALK, {"continue_final_message": True, "add_generation_prompt": True}),
        ("{{ messages[0].content }}", TALK, {"continue_final_message": True}),
        (CHATML, [{"role": "user"}], {"continue_final_message": True}),
        (CHATML, TALK, {"continue_final_message": "reasoning"}),
        (CHATML, TALK, {"tools": ["x"]}),
        (CHATML, TALK, {"documents": ["x"]}),
        ("{{ raise_exception('no') }}", TALK, {}),
        ("{% for %}", TALK, {}),
        ("{{ messages[0].content + 1 }}", TALK, {}),
        ("{{ ''.__class__.__mro__ }}", TALK, {}),
        ("{{ messages.append(1) }}", TALK, {}),
        ("{% set n = namespace(_x=1) %}", TALK, {}),
        ("{% set n = namespace() %}{% set n._x = 1 %}", TALK, {}),
        ("{{ dict.__init__.__globals__ }}", TALK, {}),
        ("{{ cycler.__init__.__globals__.os }}", TALK, {}),
    ],
)
def test_what_transformers_refuses_is_refused(
    theirs: Any, template: str, messages: Any, options: dict[str, Any]
) -> None:
    with pytest.raises((TemplateError, TypeError, ValueError)):
        theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    with pytest.raises((TemplateError, TypeError, ValueError)):
        render(template, messages, {}, **options)


def test_an_objects_methods_do_not_reach_a_template(tmp_path: Path) -> None:
    class Mode(str, Enum):
        FAST = "fast"

    class Writer:
        def save(self, name: str) -> None:
            (tmp_path / name).write_text("x")

    template = "{{ mode }}{{ obj }}{{ n + 1 }}"
    text = render(template, TALK, {}, mode=Mode.FAST, obj=Writer(), n=True)
    assert text == "fast<Writer>2"
    with pytest.raises(TemplateError):
        render("{{ obj.save('a') }}", TALK, {}, obj=Writer())
    assert not list(tmp_path.iterdir())


def test_a_message_may_hold_what_the_template_divides_by(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    with pytest.raises(UsageError, match="refuses these messages"):
        tokenizer.render_chat(TALK, chat_template="{{ 1 / 0 }}")


@pytest.mark.model
def test_a_real_template(smollm2_folder: Path) -> None:
    hf, ours = AutoTokenizer.from_pretrained(smollm2_folder), Tokenizer.load(smollm2_folder)
    for messages in ([TALK[1]], TALK[:2], TALK):
        expected = hf.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ours.chat(messages) == list(expected)
