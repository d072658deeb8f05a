"""Reads a folder's tokenizer files with the `tokenizers` library.

tokenizer.json is the authority. tokenizer_config.json (and special_tokens_map.json, where it
stands for older folders) names special tokens, may add tokens, and may hold the chat template.
transformers is asked only where there is no tokenizer.json: importing it takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core

from qdeploy.errors import FormatError
from qdeploy.runtime.chat_template import Templates

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """core: without truncation and padding. special_tokens: texts by name (bos_token, …).

    chat_templates: one template, or several by name, or None.
    """

    core: Core
    special_tokens: dict[str, str]
    chat_templates: Templates | None


def read_tokenizer_files(folder: Path, *, trust_remote_code: bool = False) -> TokenizerFiles:
    """Everything that a tokenizer needs; FormatError names what is missing or broken.

    trust_remote_code: where there is no tokenizer.json, code in the folder may make the tokenizer.
    """
    try:
        if not (folder / "tokenizer.json").is_file():
            return _through_transformers(folder, trust_remote_code)
        return _read(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise FormatError(
            f"no usable tokenizer in {folder.name}: {reason}; copy tokenizer.json and "
            "tokenizer_config.json of the base model there"
        ) from error


def _read(folder: Path) -> TokenizerFiles:
    core = _core(folder / "tokenizer.json")
    config = _config(folder)
    named = dict(_named_tokens(config))
    _add_tokens(core, config, named)
    core.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return TokenizerFiles(
        core=_unbounded(core),
        special_tokens={name: str(token) for name, token in named.items()},
        chat_templates=_template_files(folder) or _template_of(config),
    )


def _core(path: Path) -> Core:
    try:
        return Core.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"{path.name}: {error}") from error


def _unbounded(core: Core) -> Core:
    core.no_truncation()
    core.no_padding()
    return core


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return data


def _config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; in folders from before added_tokens_decoder, special_tokens_map.json
    wins.
    """
    config = _json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    return config | _json(folder / "special_tokens_map.json")


def _token(value: object) -> AddedToken | str | None:
    """A token as the files write it: text, or an object with its flags."""
    if isinstance(value, Mapping):
        flags = {key: item for key, item in value.items() if key != "__type"}
        return AddedToken(**flags)
    return value if isinstance(value, str) else None


def _named_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, AddedToken | str]]:
    """The usual names first, then a model's own, e.g. image_token."""
    extra = config.get("extra_special_tokens")
    own = [key for key in config if key.endswith("_token") and key not in _NAMED]
    for source, names in ((config, (*_NAMED, *own)), (extra, extra)):
        if isinstance(source, Mapping):
            for name in names or ():
                token = _token(source.get(name))
                if token is not None:
                    yield name, token


def _add_tokens(core: Core, config: Mapping[str, Any], named: Mapping[str, Any]) -> None:
    """Tokens that tokenizer.json lacks, in transformers' order, which gives the ids."""
    decoder: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    listed = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    wanted = [_token(decoder[key]) for key in sorted(decoder, key=int)]
    wanted += named.values()
    wanted += [] if isinstance(listed, Mapping) else [_token(item) for item in listed]
    special = {str(token) for token in named.values()}
    known = {str(token) for token in core.get_added_tokens_decoder().values()}
    for token in wanted:
        if token is None or str(token) in known:
            continue
        known.add(str(token))
        if isinstance(token, str):
            token = AddedToken(token, special=True)
        elif str(token) in special:
            token.special = True
        core.add_tokens([token])


def _template_files(folder: Path) -> Templates | None:
    """chat_template.jinja, and further ones by name in additional_chat_templates/."""
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    found = {file.stem: file.read_text(encoding="utf-8") for file in files}
    main = folder / "chat_template.jinja"
    if main.is_file():
        found["default"] = main.read_text(encoding="utf-8")
    return found["default"] if set(found) == {"default"} else found or None


def _template_of(config: Mapping[str, Any]) -> Templates | None:
    template = config.get("chat_template")
    if isinstance(template, list):
        return {str(item["name"]): str(item["template"]) for item in template}
    return template if isinstance(template, (str, dict)) else None


def _through_transformers(folder: Path, trust_remote_code: bool) -> TokenizerFiles:
    """Builds the tokenizer from tokenizer.model or vocab.json."""
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=trust_remote_code
    )
    core = getattr(hf, "backend_tokenizer", None)
    if not isinstance(core, Core):
        raise ValueError(f"{type(hf).__name__} is not built on the tokenizers library")
    return TokenizerFiles(
        core=_unbounded(core),
        special_tokens=dict(hf.special_tokens_map),
        chat_templates=getattr(hf, "chat_template", None),
    )
