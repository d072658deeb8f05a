"""The tokenizer inside a GGUF file → `tokenizer.json`, built with the `tokenizers` library.

Two families: byte-level BPE (`tokenizer.ggml.model` = "gpt2", merges stored, pre-tokenizer named
by `tokenizer.ggml.pre`) and SentencePiece BPE ("llama", merges recovered from the scores).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from qdeploy.errors import FormatError
from qdeploy.formats.gguf_file import GgufFile

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
# SentencePiece never composes these from characters, even when the text spells one out.
ATOMIC = frozenset({UNKNOWN, CONTROL, BYTE})
SPACE = "\u2581"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """What `tokenizer.ggml.pre` stands for."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    return build


_LLAMA3 = PreTokenizer(build=_split(LLAMA3_SPLIT), ignore_merges=True, add_bos=True)
PRE_TOKENIZERS = {
    "default": PreTokenizer(build=_gpt2),
    "gpt-2": PreTokenizer(build=_gpt2),
    "smollm": PreTokenizer(build=_smollm),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": PreTokenizer(build=_split(QWEN2_SPLIT), nfc=True),
}


def build_tokenizer(source: GgufFile) -> Tokenizer:
    """The tokenizer of the file; raises FormatError for a kind that can't be rebuilt exactly."""
    kind = source.require("tokenizer.ggml.model")
    tokens = _tokens(source)
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(source, tokens)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(source, tokens), True
    else:
        raise FormatError(
            f"{source.path}: tokenizer model {kind!r} can't be converted; use safetensors"
        )
    _add_tokens(source, tokenizer, tokens)
    _add_template(source, tokenizer, tokens, add_bos)
    return tokenizer


def tokenizer_config(source: GgufFile) -> dict[str, Any]:
    """`tokenizer_config.json`; the chat template is not in it (see `gguf.py`)."""
    tokens = _tokens(source)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.model_value("context_length"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = _token(source, tokens, key)
        if token is not None:
            config[f"{name}_token"] = token
    return config


def _tokens(source: GgufFile) -> list[str]:
    tokens = list(source.require("tokenizer.ggml.tokens"))
    if len(set(tokens)) != len(tokens):
        raise FormatError(f"{source.path}: tokenizer.ggml.tokens has duplicates; use safetensors")
    kinds = _kinds(source, len(tokens))
    # Rows that pad the embedding ("[PAD151665]") are no tokens of the model's own tokenizer.
    while tokens and kinds[len(tokens) - 1] == UNUSED:
        tokens.pop()
    return tokens


def _kinds(source: GgufFile, count: int) -> list[int]:
    kinds = source.fields.get("tokenizer.ggml.token_type", [1] * count)
    if len(kinds) < count:
        raise FormatError(f"{source.path}: {len(kinds)} token types for {count} tokens")
    return list(kinds)


def _token(source: GgufFile, tokens: list[str], name: str) -> str | None:
    index = source.fields.get(f"tokenizer.ggml.{name}_token_id")
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise FormatError(f"{source.path}: {name} token id {index} of {len(tokens)} tokens")
    return str(tokens[index])


def _byte_level(source: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = source.fields.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise FormatError(
            f"{source.path}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is unknown; "
            f"known are {', '.join(PRE_TOKENIZERS)}; use the safetensors folder"
        )
    kind = PRE_TOKENIZERS[name]
    merges = [_merge(source, merge) for merge in source.require("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    model = BPE(vocab=vocab, merges=merges, ignore_merges=kind.ignore_merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = kind.build()
    tokenizer.decoder = decoders.ByteLevel()
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, kind.add_bos


def _merge(source: GgufFile, merge: str) -> tuple[str, str]:
    parts = merge.split(" ")
    if len(parts) != 2:
        raise FormatError(f"{source.path}: merge {merge!r} isn't a pair; fetch the file again")
    return parts[0], parts[1]


def _sentencepiece(source: GgufFile, tokens: list[str]) -> Tokenizer:
    scores = source.require("tokenizer.ggml.scores")
    if len(scores) < len(tokens):
        raise FormatError(f"{source.path}: {len(scores)} scores for {len(tokens)} tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        BPE(
            vocab=vocab,
            merges=merges_from_scores(vocab, list(scores), _kinds(source, len(tokens))),
            unk_token=_token(source, tokens, "unknown"),
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    prefix = bool(source.fields.get("tokenizer.ggml.add_space_prefix", True))
    to_marker = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_marker])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = to_marker
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_from_scores(
    vocab: dict[str, int], scores: list[float], kinds: list[int]
) -> list[tuple[str, str]]:
    """Merge list that makes BPE join what SentencePiece joins: best-scored result first.

    Every split of a piece into two pieces is a merge; splits of one piece are tried in vocabulary
    order (as transformers' SentencePiece converter does).
    """
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocab.items():
        if len(piece) < 2 or kinds[index] in ATOMIC:
            continue
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], left, right, piece[:cut], piece[cut:]))
    found.sort(key=lambda item: item[:3])
    return [(left, right) for *_, left, right in found]


def _add_tokens(source: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    kinds = _kinds(source, len(tokens))
    added = [
        AddedToken(token, special=kinds[index] == CONTROL, normalized=False)
        for index, token in enumerate(tokens)
        if kinds[index] in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _add_template(source: GgufFile, tokenizer: Tokenizer, tokens: list[str], add_bos: bool) -> None:
    """BOS and EOS as the file's flags say; without them `encode("")` is empty."""
    bos = bool(source.fields.get("tokenizer.ggml.add_bos_token", add_bos))
    eos = bool(source.fields.get("tokenizer.ggml.add_eos_token", False))
    start = _token(source, tokens, "bos") if bos else None
    end = _token(source, tokens, "eos") if eos else None
    used = [token for token in (start, end) if token is not None]
    if not used:
        return
    before = f"{start}:0 " if start else ""
    after = f" {end}:0" if end else ""
    tokenizer.post_processor = TemplateProcessing(
        single=f"{before}$A:0{after}",
        pair=f"{before}$A:0{after} {before}$B:1{after}",
        special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys(used)],
    )
