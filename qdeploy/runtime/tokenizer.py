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
from typing import Any

from tokenizers import Tokenizer as Core

from qdeploy.errors import FormatError, UsageError
from qdeploy.runtime.chat_content import Placeholders, flatten_messages
from qdeploy.runtime.detokenizer import Detokenizer
from qdeploy.runtime.tokenizer_files import TokenizerFiles, read_tokenizer_files


class Tokenizer:
    """Text to ids and back; load one with `Tokenizer.load(folder)`.

    core: the tokenizer of the `tokenizers` library; its state is never changed. special_tokens:
    texts by name (bos_token, …), the chat template's variables. chat_templates: one template, or
    several by name, or None.
    """

    def __init__(self, files: TokenizerFiles, eos_token_ids: frozenset[int]) -> None:
        self.core = files.core
        self.special_tokens = files.special_tokens
        self.chat_templates = files.chat_templates
        self.eos_token_ids = eos_token_ids
        added = self.core.get_added_tokens_decoder().values()
        self._special_texts = tuple(token.content for token in added if token.special)
        self._literal: Core | None = None
        self._literal_lock = threading.Lock()

    @classmethod
    def load(cls, folder: Path | str, *, trust_remote_code: bool = False) -> Tokenizer:
        """Read tokenizer files of a local folder; nothing is fetched, and no code from it runs
        unless it is trusted and there is no tokenizer.json.
        """
        folder = Path(folder)
        files = read_tokenizer_files(folder, trust_remote_code=trust_remote_code)
        eos = files.core.token_to_id(files.special_tokens.get("eos_token", ""))
        return cls(files, read_eos_token_ids(folder) | _as_ids(eos))

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self.core.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The id of the beginning of a text, None when the model names none."""
        return self.token_to_id(self.special_tokens.get("bos_token", ""))

    def ordinary_ids(self) -> list[int]:
        """Ids of the vocabulary that were not added to it (control tokens are), sorted."""
        added = self.core.get_added_tokens_decoder()
        return sorted(set(self.core.get_vocab(with_added_tokens=False).values()) - set(added))

    def token_to_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary, as it is written there."""
        return self.core.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it, None for an id that isn't used."""
        return self.core.id_to_token(token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids; special tokens in the text are recognized, as for a raw prompt."""
        return self.core.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to text, without clean-up of spaces."""
        return self.core.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """An incremental detokenizer of the tokens that follow the prompt."""

        def decode(ids: Sequence[int]) -> str:
            return self.decode(ids, skip_special_tokens=skip_special_tokens)

        return Detokenizer(decode, prompt_token_ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        **options: Any,
    ) -> str:
        """The chat template's text. UsageError when there is none or it refuses the messages.

        chat_template: a template, or the name of one. add_generation_prompt: by default, unless
        options hold continue_final_message.
        """
        # jinja2 isn't needed before the first chat
        from jinja2 import TemplateError

        from qdeploy.runtime.chat_template import choose_template, render

        if add_generation_prompt is None:
            add_generation_prompt = not options.get("continue_final_message")
        try:
            template = choose_template(self.chat_templates, chat_template, options.get("tools"))
            if template is not None:
                return render(
                    template,
                    messages,
                    self.special_tokens,
                    add_generation_prompt=add_generation_prompt,
                    **options,
                )
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(
                f"the chat template refuses these messages: {reason}", param="messages"
            ) from error
        raise UsageError(
            "this model has no chat template; use completions, or add chat_template.jinja",
            param="messages",
        )

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

        encode_special_tokens is state of the tokenizer, so a copy does it: another thread's
        `encode` would read its control tokens as text, and this text as control.
        """
        with self._literal_lock:
            if self._literal is None:
                self._literal = copy.deepcopy(self.core)
                self._literal.encode_special_tokens = True
        return self._literal.encode(text, add_special_tokens=False).ids


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
