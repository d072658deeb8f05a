"""The tokenizer of a model folder: text, chat templates, end-of-sequence tokens.

Text inside a chat message never becomes a control token: where a message contains the text of a
special token, that text is tokenized as ordinary characters, so that a user can't forge a turn.
Messages without such text give exactly the ids of transformers' apply_chat_template.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from qdeploy.errors import FormatError, UsageError
from qdeploy.runtime.chat_content import Placeholders, flatten_messages
from qdeploy.runtime.detokenizer import Detokenizer


class Tokenizer:
    """Wraps a transformers fast tokenizer; load one with `Tokenizer.load(folder)`."""

    def __init__(self, hf: Any, eos_token_ids: frozenset[int]) -> None:
        self.hf = hf
        self.eos_token_ids = eos_token_ids
        self._special_texts = tuple(
            token.content for token in hf.added_tokens_decoder.values() if token.special
        )
        self._literal: Any = None
        self._literal_lock = threading.Lock()

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Read tokenizer files of a local folder; no code from it runs, nothing is fetched."""
        from transformers import AutoTokenizer

        folder = Path(folder)
        try:
            hf = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error).strip().split("\n")[0]
            raise FormatError(
                f"no usable tokenizer in {folder.name}: {reason}; copy tokenizer.json and "
                "tokenizer_config.json of the base model there"
            ) from error
        return cls(hf, read_eos_token_ids(folder) | _as_ids(hf.eos_token_id))

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self.hf)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids; special tokens in the text are recognized, as for a raw prompt."""
        # verbose: transformers would warn of a text longer than the context, which evaluation cuts
        ids = self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return cast("list[int]", ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to text, without clean-up of spaces."""
        text = self.hf.decode(
            list(ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return cast(str, text)

    def stream(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """An incremental detokenizer of the tokens that follow the prompt."""

        def decode(ids: Sequence[int]) -> str:
            return self.decode(ids, skip_special_tokens=skip_special_tokens)

        return Detokenizer(decode, prompt_token_ids)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The chat template's text. UsageError when there is none or it refuses the messages."""
        if not getattr(self.hf, "chat_template", None):
            raise UsageError(
                "this model has no chat template; use completions, or add chat_template.jinja",
                param="messages",
            )
        options.setdefault("add_generation_prompt", True)
        from jinja2 import TemplateError

        try:
            text = self.hf.apply_chat_template(list(messages), tokenize=False, **options)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(
                f"the chat template refuses these messages: {reason}", param="messages"
            ) from error
        return cast(str, text)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Messages to ids, ready for the assistant's turn.

        Content may be text or a list of text parts (joined). The template writes BOS itself where
        it wants one, so none is added. options go to the template (tools, enable_thinking, …).
        """
        placeholders = Placeholders(self._special_texts)
        hidden = placeholders.hide(flatten_messages(messages))
        text = self.render_chat(hidden, **options)
        ids: list[int] = []
        for piece, is_literal in placeholders.split(text):
            if is_literal:
                ids += self._encode_literally(piece)
            else:
                ids += self.encode(piece, add_special_tokens=False)
        return ids

    def _encode_literally(self, text: str) -> list[int]:
        """Text to ids with special tokens read as ordinary characters.

        transformers keeps split_special_tokens as state of the tokenizer, so a copy does it:
        another thread's `encode` would read its control tokens as text, and this text as control.
        """
        with self._literal_lock:
            if self._literal is None:
                self._literal = copy.deepcopy(self.hf)
            found = self._literal(text, add_special_tokens=False, split_special_tokens=True)
        return cast("list[int]", found["input_ids"])


def read_eos_token_ids(folder: Path) -> frozenset[int]:
    """Union of eos_token_id in config.json (also its text_config) and generation_config.json."""
    ids: frozenset[int] = frozenset()
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise FormatError(f"{name} is not valid JSON: {error}; copy it again") from error
        ids |= _as_ids(config.get("eos_token_id"))
        ids |= _as_ids((config.get("text_config") or {}).get("eos_token_id"))
    return ids


def _as_ids(value: object) -> frozenset[int]:
    """An id, a list of ids or None."""
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool))
