"""What a user may say about speculation."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from qdeploy.errors import UsageError

METHODS = ("none", "ngram", "draft_model", "self")
#: Upper bounds of k by method: a guess that costs nothing may be longer.
_DEFAULT_TOKENS = {"none": 0, "ngram": 15, "draft_model": 5, "self": 5}
_MAX_TOKENS = 64
NGRAM_MIN, NGRAM_MAX = 2, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted; the output is the same whatever stands here.

    method: none, ngram (prompt lookup), draft_model, or self (the model's own lower-bit copy).
    model: the draft model, a local folder or any other reference that LLM takes.
    num_speculative_tokens: upper bound of the adapted number of drafts, None for the method's own.
    ngram_min, ngram_max: tokens of text that must, and that may, agree for a prompt lookup.
    """

    method: str = "none"
    model: str | os.PathLike[str] | None = None
    num_speculative_tokens: int | None = None
    ngram_min: int = NGRAM_MIN
    ngram_max: int = NGRAM_MAX

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(
                f"speculative_method {self.method!r} is unknown; choose one of "
                f"{', '.join(METHODS)}",
                param="speculative_method",
            )
        self._check_types()
        self._check_model()
        tokens = self.num_speculative_tokens
        if tokens is not None and self.method == "none":
            raise UsageError(
                f"num_speculative_tokens={tokens} does nothing without a speculative_method; "
                "choose one",
                param="num_speculative_tokens",
            )
        if tokens is not None and not 1 <= tokens <= _MAX_TOKENS:
            raise UsageError(
                f"num_speculative_tokens={tokens} is not within 1 … {_MAX_TOKENS}",
                param="num_speculative_tokens",
            )
        self._check_ngram()

    def _check_ngram(self) -> None:
        for name, default in (("ngram_min", NGRAM_MIN), ("ngram_max", NGRAM_MAX)):
            if self.method != "ngram" and getattr(self, name) != default:
                raise UsageError(
                    f"{name}={getattr(self, name)} does nothing with speculative_method "
                    f"{self.method}; use ngram",
                    param=name,
                )
        if not 1 <= self.ngram_min <= self.ngram_max:
            raise UsageError(
                f"ngram_min={self.ngram_min} and ngram_max={self.ngram_max} must be "
                "1 ≤ ngram_min ≤ ngram_max",
                param="ngram_min",
            )

    def _check_types(self) -> None:
        for name in ("num_speculative_tokens", "ngram_min", "ngram_max"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise UsageError(f"{name}={value!r} must be a whole number", param=name)
        if self.model is not None and not isinstance(cast("object", self.model), str | os.PathLike):
            raise UsageError(
                f"speculative_model={self.model!r} is no folder; give its path",
                param="speculative_model",
            )

    def _check_model(self) -> None:
        if self.method == "draft_model" and not self.model:
            raise UsageError(
                "speculative_method draft_model needs speculative_model, the draft's folder",
                param="speculative_model",
            )
        if self.model is not None and self.method != "draft_model":
            raise UsageError(
                f"speculative_model does nothing with speculative_method {self.method}; "
                "use draft_model",
                param="speculative_model",
            )

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> SpeculativeConfig:
        """From a dict of fields; an unknown one is an error."""
        if not isinstance(cast("object", fields), Mapping):
            raise UsageError(
                f"speculative_config={fields!r} must be a dict, as {{'method': 'ngram'}}",
                param="speculative_config",
            )
        unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            known = ", ".join(field.name for field in dataclasses.fields(cls))
            raise UsageError(
                f"speculative_config has the unknown field {unknown[0]!r}; there are {known}",
                param="speculative_config",
            )
        return cls(**fields)

    @property
    def enabled(self) -> bool:
        """Whether anything is drafted."""
        return self.method != "none"

    @property
    def max_drafts(self) -> int:
        """The most tokens to draft for a request in a step."""
        default = _DEFAULT_TOKENS[self.method]
        return default if self.num_speculative_tokens is None else self.num_speculative_tokens


NO_SPECULATION = SpeculativeConfig()
