"""What a request asks of the sampler, with vLLM's names and defaults."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from qdeploy.errors import FormatError, UsageError

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 256  # each is tokenized before the request's first step, and looked for in each
MAX_SALT = 1024
MAX_PRIORITY = 1_000_000
GREEDY_TEMPERATURE = 1e-5  # below this, logits/T only overflows; vLLM's _SAMPLING_EPS


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated on construction; UsageError names the parameter.

    temperature: below 1e-5 is greedy. top_k: 0 or −1 is off. seed: None derives one from the
    engine's seed and the request id. max_tokens: None runs to the end of the context.
    logprobs: number of alternatives (0 … 20) beside the chosen token, None for none.
    prompt_logprobs: the same for the prompt's tokens; max_tokens may then be 0.
    logit_bias: token id → −100 … 100. stop: up to 16 non-empty strings.
    bad_words: up to 256 strings that must not come, in the tokens that the tokenizer makes of them
    (the same text in other tokens passes, as in vLLM).
    priority: smaller runs sooner. cache_salt: prefixes are only shared under the same salt.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_integers()
        if self.stop is not None and not isinstance(cast("object", self.stop), Iterable):
            raise _bad("stop", self.stop, "a string or a list of strings")
        _check_stop(self.stop_strings)
        _check_ids("stop_token_ids", self.stop_token_ids)
        _check_ids("allowed_token_ids", self.allowed_token_ids)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _bad("allowed_token_ids", [], "a non-empty list")
        _check_bias(self.logit_bias)
        _check_bad_words(self.bad_words)
        _check_salt(self.cache_salt)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        added = self.presence_penalty != 0 or self.frequency_penalty != 0
        return added or self.repetition_penalty != 1

    def _check_numbers(self) -> None:
        _check_number("temperature", self.temperature, 0.0, math.inf)
        _check_number("top_p", self.top_p, 0.0, 1.0, exclude_low=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 1e4, exclude_low=True)

    def _check_integers(self) -> None:
        _check_int("n", self.n, 1)
        _check_int("top_k", self.top_k, -1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        _check_int("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0)
            if self.min_tokens > self.max_tokens:
                raise _bad("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """The model's own defaults in generation_config.json, under SamplingParams' names.

    Like vLLM, `do_sample` is not read: a request that wants greedy says temperature=0.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{file.name} is not valid JSON: {error}; repair or delete it") from error
    names = {k: k for k in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    names["max_new_tokens"] = "max_tokens"
    values = {new: found.get(old) for old, new in names.items()}
    return {name: value for name, value in values.items() if value is not None}


def _bad(name: str, value: object, expected: str) -> UsageError:
    return UsageError(f"{name}={value!r} is not allowed; give {expected}", param=name)


def _check_number(
    name: str, value: object, low: float, high: float, *, exclude_low: bool = False
) -> None:
    low_text = f"more than {low:g}" if exclude_low else f"at least {low:g}"
    expected = f"a number of {low_text}" + ("" if high == math.inf else f" and at most {high:g}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _bad(name, value, expected)
    if not low <= value <= high or (exclude_low and value == low):
        raise _bad(name, value, expected)


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    expected = f"an integer of at least {low}" + ("" if high is None else f" and at most {high}")
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(name, value, expected)
    if value < low or (high is not None and value > high):
        raise _bad(name, value, expected)


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise _bad("stop", f"{len(stop)} strings", f"at most {MAX_STOP_STRINGS}")
    for text in stop:
        if not text or not isinstance(cast("object", text), str):
            raise _bad("stop", text, "non-empty strings, or null for none")


def _check_ids(name: str, ids: Sequence[int] | None) -> None:
    if ids is not None and not isinstance(cast("object", ids), Iterable):
        raise _bad(name, ids, "a list of token ids")
    for token in ids or ():
        _check_int(name, token, 0)


def _check_bias(bias: Mapping[int, float] | None) -> None:
    if bias is not None and not isinstance(cast("object", bias), Mapping):
        raise _bad("logit_bias", bias, "a mapping of token ids to numbers")
    for token, value in (bias or {}).items():
        _check_int("logit_bias", token, 0)
        _check_number("logit_bias", value, -100.0, 100.0)


def _check_salt(salt: object) -> None:
    if salt is None:
        return
    if not isinstance(salt, str) or not 0 < len(salt) <= MAX_SALT:
        shown = salt[:40] if isinstance(salt, str) else salt
        raise _bad("cache_salt", shown, f"1 to {MAX_SALT} characters")


def _check_bad_words(words: Sequence[str] | None) -> None:
    if words is None:
        return
    if isinstance(words, str) or not isinstance(cast("object", words), Sequence):
        raise _bad("bad_words", words, "a list of strings")
    if len(words) > MAX_BAD_WORDS:
        raise _bad("bad_words", f"{len(words)} strings", f"at most {MAX_BAD_WORDS}")
    for word in words:
        if not isinstance(cast("object", word), str) or not word.strip():
            raise _bad("bad_words", word, "strings that are not empty")
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise _bad("bad_words", word, "text without lone surrogates")
