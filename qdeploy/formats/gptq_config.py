"""GPTQ's quantization config, as AutoGPTQ, GPTQModel and transformers write it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from qdeploy.errors import FormatError
from qdeploy.formats.weight_format import config_bool, config_int, parsed_scheme, refuse_changed
from qdeploy.quantization.scheme import QuantScheme

_FORMATS = ("gptq", "gptq_v2")
#: Keys that change what the bytes mean, and the values that this reader honours.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "checkpoint_format": _FORMATS,
    "format": _FORMATS,
    "is_marlin_format": (False,),
    "pack_dtype": ("int32",),
    "lm_head": (False,),
    "rotation": (),
    "adapter": (),
}
_OVERRIDES = ("bits", "group_size", "desc_act", "sym", "format", "pack_dtype")


def parse_gptq_config(config: Mapping[str, Any]) -> QuantScheme:
    """The scheme; a missing `sym` is true, as AutoGPTQ has it (the words decide at load)."""
    refuse_changed(config, _ACCEPTED)
    _check_dynamic(config)
    return parsed_scheme(
        bits=config_int(config, "bits"),
        group_size=config_int(config, "group_size"),
        symmetric=config_bool(config, "sym", True),
        act_order=config_bool(config, "desc_act", False),
    )


def checkpoint_format(config: Mapping[str, Any]) -> str:
    """`gptq` or `gptq_v2`; without a label it is the older one."""
    refuse_changed(config, _ACCEPTED)
    return str(config.get("checkpoint_format") or config.get("format") or "gptq")


def skip_rules(modules: Sequence[str]) -> dict[str, dict[str, Any]]:
    """GPTQModel's `dynamic` entries that leave these modules dense."""
    return {f"-:^{re.escape(name)}$": {} for name in modules}


def _check_dynamic(config: Mapping[str, Any]) -> None:
    """Skip rules need nothing (the tensors show it); other bits per module are not read."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise FormatError(f"quantization config: dynamic={dynamic!r} is not a mapping")
    for rule, overrides in dynamic.items():
        if str(rule).startswith("-:") or overrides is False:
            continue
        if not isinstance(overrides, Mapping):
            raise FormatError(f"quantization config: dynamic rule {rule!r} is not a mapping")
        for key in _OVERRIDES:
            if key in overrides and overrides[key] != config.get(key):
                raise FormatError(
                    f"quantization config: dynamic rule {rule!r} sets {key}={overrides[key]!r}; "
                    "mixed precision in one checkpoint is not read; requantize from the base model"
                )
