"""Tokenizer folders read directly give the ids that transformers' AutoTokenizer gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import SentencePieceUnigramTokenizer
from transformers import AutoTokenizer

from qdeploy.errors import FormatError
from qdeploy.runtime.tokenizer import Tokenizer
from runtime.tiny_tokenizer import save_tokenizer, write_json
from tiny_models import edit_json

TEXTS = (
    "",
    "Hello world",
    "  leading, trailing  ",
    "line\n\nline\ttab 3.14159 and 2026",
    "naïve café 日本語 🎉👩‍👩‍👧 \u200b e\u0301",
    "<s>a</s><|im_start|>b <|im_end|> <extra> <plain> <named> <image>",
    "def f(x):\n    return x**2  # comment",
)


def check_same(folder: Path) -> None:
    """Ids, texts and sizes of both, of TEXTS."""
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.bos_token_id == theirs.bos_token_id
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
        literal = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours._encode_literally(text) == literal


def added(content: str, **flags: bool) -> dict[str, Any]:
    base = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, "special": False} | base | flags


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bos_token": None, "eos_token": None},
        {"unk_token": "<unk>", "pad_token": {"__type": "AddedToken", **added("<pad>")}},
        {"extra_special_tokens": ["<extra>"]},
        {"additional_special_tokens": ["<extra>"], "extra_special_tokens": None},
        {"extra_special_tokens": {"image_token": "<image>"}},
        {"image_token": "<image>", "add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"split_special_tokens": True},
        {"clean_up_tokenization_spaces": True},
        {
            "added_tokens_decoder": {
                "262": added("<plain>"),
                "261": added("<named>", special=True, lstrip=True),
                "257": added("<s>", special=True),
            },
            "cls_token": "<plain>",
        },
    ],
)
def test_every_way_to_name_and_add_tokens(tmp_path: Path, changes: dict[str, Any]) -> None:
    save_tokenizer(tmp_path, add_bos=True)
    edit_json(tmp_path / "tokenizer_config.json", **changes)
    check_same(tmp_path)


def test_the_map_of_older_folders(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", eos_token=None, added_tokens_decoder=None)
    names = {"eos_token": added("<|im_end|>"), "additional_special_tokens": ["<extra>"]}
    write_json(tmp_path, "special_tokens_map.json", names)
    check_same(tmp_path)
    assert Tokenizer.load(tmp_path).special_tokens["eos_token"] == "<|im_end|>"


def test_truncation_and_padding_in_the_file_never_apply(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    whole = Tokenizer.load(tmp_path).encode("a long enough text")
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    data["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    }
    write_json(tmp_path, "tokenizer.json", data)
    assert Tokenizer.load(tmp_path).encode("a long enough text") == whole


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": 3}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", '{"bos_token": {"content": 3}}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}'),
    ],
)
def test_broken_files_are_one_line(tmp_path: Path, name: str, content: str) -> None:
    save_tokenizer(tmp_path, template=None)
    (tmp_path / name).write_text(content)
    with pytest.raises(FormatError, match="no usable tokenizer") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_tokenizer_json_is_read_by_transformers(tmp_path: Path) -> None:
    """GPT-2's two files."""
    save_tokenizer(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    write_json(tmp_path, "vocab.json", model["vocab"])
    merges = [" ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    write_json(tmp_path, "config.json", {"model_type": "gpt2"})
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("the cat") == theirs.encode("the cat")
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.chat([{"role": "user", "content": "Hi"}])


def test_named_templates_are_found(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template="default of {{ messages[0].role }}")
    messages = [{"role": "user", "content": "x"}]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.render_chat(messages) == "default of user"
    assert tokenizer.render_chat(messages, tools=[]) == "tools"
    assert tokenizer.render_chat(messages, chat_template="tool_use") == "tools"
    assert tokenizer.render_chat(messages, chat_template="as given") == "as given"


@pytest.mark.parametrize("form", ["text", "list"])
def test_a_template_in_the_config(tmp_path: Path, form: str) -> None:
    save_tokenizer(tmp_path, template=None)
    several = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    template = "D" if form == "text" else several
    edit_json(tmp_path / "tokenizer_config.json", chat_template=template)
    tokenizer = Tokenizer.load(tmp_path)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(messages) == "D"
    assert tokenizer.render_chat(messages, tools=[]) == ("D" if form == "text" else "T")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(tmp_path).render_chat(messages) == "file"


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_like_tokenizers(tmp_path: Path, prefix: bool) -> None:
    core = SentencePieceUnigramTokenizer(add_prefix_space=prefix)
    words = ["hello", "world", "naïve café", "line", "return", "trailing"]
    specials = ["<unk>", "<s>", "</s>"]
    core.train_from_iterator(
        words * 20, vocab_size=90, special_tokens=specials, unk_token="<unk>", show_progress=False
    )
    core.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(
        tmp_path, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    )
    check_same(tmp_path)


@pytest.mark.model
def test_real_models(smollm2_folder: Path, gemma3_folder: Path) -> None:
    for folder in (smollm2_folder, gemma3_folder):
        check_same(folder)


@pytest.mark.model
def test_any_text_on_a_real_model(smollm2_folder: Path) -> None:
    ours, theirs = Tokenizer.load(smollm2_folder), AutoTokenizer.from_pretrained(smollm2_folder)

    @settings(max_examples=200, deadline=None)
    @given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=80))
    def check(text: str) -> None:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)

    check()
