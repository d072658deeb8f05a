"""GPTQ's quantization config, as AutoGPTQ, GPTQModel and transformers write it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from qdeploy.errors import FormatError
from qdeploy.formats.module_schemes import ModuleSchemes, compiled
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
#: What a rule of `dynamic` may change, and what it may repeat but not change.
_OVERRIDES = ("bits", "group_size", "desc_act", "sym")
_REPEATED = ("format", "checkpoint_format", "pack_dtype")


def parse_gptq_config(config: Mapping[str, Any]) -> ModuleSchemes:
    """The schemes; a missing `sym` is true, as AutoGPTQ has it (the words decide at load)."""
    refuse_changed(config, _ACCEPTED)
    return ModuleSchemes(default=_scheme(config), patterns=_dynamic_patterns(config))


def _scheme(config: Mapping[str, Any]) -> QuantScheme:
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


def _dynamic_patterns(
    config: Mapping[str, Any],
) -> tuple[tuple[re.Pattern[str], QuantScheme], ...]:
    """GPTQModel's rules by module; skip rules need nothing, the tensors show what is dense."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise FormatError(f"quantization config: dynamic={dynamic!r} is not a mapping")
    patterns = []
    for rule, overrides in dynamic.items():
        if str(rule).startswith("-:") or overrides is False:
            continue
        if not isinstance(overrides, Mapping):
            raise FormatError(f"quantization config: dynamic rule {rule!r} is not a mapping")
        for key in _REPEATED:
            if key in overrides and overrides[key] != config.get(key):
                raise FormatError(
                    f"quantization config: dynamic rule {rule!r} sets {key}={overrides[key]!r}, "
                    "which is not read for single layers; requantize from the base model"
                )
        changed = {key: overrides[key] for key in _OVERRIDES if key in overrides}
        scheme = _scheme({**config, **changed})
        patterns.append((compiled(str(rule).removeprefix("+:"), "dynamic"), scheme))
    return tuple(patterns)
