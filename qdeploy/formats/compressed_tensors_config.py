"""compressed-tensors' quantization config, as llm-compressor and we write it: formats.md §4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qdeploy.errors import FormatError
from qdeploy.formats.fp8 import block_size
from qdeploy.formats.module_schemes import ModuleSchemes, compiled, distinct
from qdeploy.formats.weight_format import (
    config_bool,
    config_int,
    config_names,
    parsed_scheme,
    refuse_changed,
)
from qdeploy.quantization.scheme import FP8_BLOCK, QuantScheme

#: Keys that change what the bytes mean, and the values that this reader honours.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "quantization_status": ("compressed",),
    "sparsity_config": ({},),
    "transform_config": ({},),
    "moe_sparsity_config": ({},),
}
_WEIGHTS_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "type": ("int", "float"),
    "strategy": ("tensor", "channel", "group", "block"),
    "dynamic": (False,),
    "actorder": ("group", "weight", "static"),
}
_INPUTS_ACCEPTED: dict[str, tuple[Any, ...]] = {"num_bits": (8,), "dynamic": (True, False)}
#: What older versions called the same bytes.
_PLAIN = "naive-quantized"
#: The label of a config whose groups are stored in several ways.
_MIXED = "mixed-precision"
#: The target that is a class of modules, not a name.
_EVERY_LINEAR = "Linear"


def format_of(scheme: QuantScheme) -> str:
    """compressed-tensors' own name of how such layers are stored."""
    if scheme.number == "e4m3":
        return "float-quantized"
    return "int-quantized" if scheme.activations else "pack-quantized"


def parse_compressed_tensors(config: Mapping[str, Any]) -> ModuleSchemes:
    """The scheme of every module by the groups' targets; FormatError for what can't be honoured.

    Names come before patterns, and patterns before `Linear`, as in compressed-tensors; `ignore` is
    only checked for sense: the tensors show which layers are packed.
    """
    refuse_changed(config, _ACCEPTED)
    config_names(config, "ignore")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise FormatError(f"quantization config: config_groups={groups!r} is not a mapping")
    by_target: dict[str, QuantScheme] = {}
    for name, group in groups.items():
        scheme = _group_scheme(str(name), group)
        _check_label(group.get("format"), scheme)
        if config.get("format") != _MIXED:
            _check_label(config.get("format"), scheme)
        by_target |= dict.fromkeys(config_names(group, "targets") or [_EVERY_LINEAR], scheme)
    patterns = sorted(target for target in by_target if target.startswith("re:"))
    return ModuleSchemes(
        default=by_target.get(_EVERY_LINEAR),
        names={target: scheme for target, scheme in by_target.items() if target not in patterns},
        patterns=tuple((compiled(target[3:], "targets"), by_target[target]) for target in patterns),
    )


def _check_label(label: Any, scheme: QuantScheme) -> None:
    plain = label == _PLAIN and format_of(scheme) != "pack-quantized"
    if label is not None and label != format_of(scheme) and not plain:
        raise FormatError(
            f"quantization config: format={label!r} is not read for {scheme.name}; "
            f"accepted: {format_of(scheme)!r}; requantize from the base model"
        )


def compressed_tensors_config(
    schemes: Mapping[str, QuantScheme], ignore: Sequence[str]
) -> dict[str, Any]:
    """The keys of compressed-tensors 0.20.

    The most frequent scheme is for all linears but `ignore`, any other for layers by name.
    """
    first, *others = distinct(schemes.values())
    groups = [_group(first, [_EVERY_LINEAR])]
    for other in others:
        groups.append(_group(other, [name for name, each in schemes.items() if each == other]))
    formats = list(dict.fromkeys(group["format"] for group in groups))
    return {
        "quant_method": "compressed-tensors",
        "format": _MIXED if len(formats) > 1 else formats[0],
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
    }


def _group(scheme: QuantScheme, targets: list[str]) -> dict[str, Any]:
    return {
        "targets": targets,
        "weights": _weights(scheme),
        "input_activations": _inputs(scheme),
        "output_activations": None,
        "format": format_of(scheme),
    }


def _weights(scheme: QuantScheme) -> dict[str, Any]:
    grouped, block = scheme.group_size != -1, scheme.block_rows > 1
    row = "tensor" if scheme.block_rows == -1 else "channel"
    args = {
        "num_bits": scheme.bits,
        "type": "float" if scheme.number == "e4m3" else "int",
        "symmetric": scheme.symmetric,
        "strategy": "block" if block else "group" if grouped else row,
        "group_size": scheme.group_size if grouped and not block else None,
        "dynamic": False,
    }
    return args | {"block_structure": [scheme.block_rows, scheme.group_size]} if block else args


def _inputs(scheme: QuantScheme) -> dict[str, Any] | None:
    """As llm-compressor's presets have it: per token, or per 128 inputs of a token for blocks."""
    if scheme.activations is None:
        return None
    static, block = scheme.activations == "static", scheme.block_rows > 1
    return {
        "num_bits": 8,
        "type": "float" if scheme.number == "e4m3" else "int",
        "symmetric": True,
        "strategy": "tensor" if static else "group" if block else "token",
        "group_size": FP8_BLOCK if block and not static else None,
        "dynamic": not static,
    }


def _group_scheme(name: str, group: Any) -> QuantScheme:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise FormatError(f"quantization config: {name} of config_groups has no weights")
    weights: Mapping[str, Any] = group["weights"]
    refuse_changed(weights, _WEIGHTS_ACCEPTED)
    bits = config_int(weights, "num_bits")
    number = "e4m3" if weights.get("type") == "float" else "int"
    if number == "e4m3" and bits != 8:
        raise FormatError(f"quantization config: {bits}-bit floats are not read; accepted: 8")
    rows, columns = _scale_block(weights, number)
    return parsed_scheme(
        bits=bits,
        group_size=columns,
        symmetric=config_bool(weights, "symmetric", True),
        act_order=weights.get("actorder") == "group",
        number=number,
        block_rows=rows,
        activations=_activations(group, weights),
    )


def _scale_block(weights: Mapping[str, Any], number: str) -> tuple[int, int]:
    """(block_rows, group_size) of a scheme. Integers of one scale a tensor are given one a row."""
    strategy = weights.get("strategy") or _strategy_of_old(weights)
    if strategy == "group":
        return 1, config_int(weights, "group_size")
    if strategy == "block":
        if number == "int":
            raise FormatError("quantization config: integers in blocks are not read")
        value = weights.get("block_structure")
        if isinstance(value, str):  # "128x128" of older versions
            value = [int(n) if n.isdigit() else 0 for n in value.split("x")]
        if value is None:
            raise FormatError("quantization config: 'block_structure' is missing; add it")
        return block_size(value, "block_structure")
    return -1 if strategy == "tensor" and number == "e4m3" else 1, -1


def _strategy_of_old(weights: Mapping[str, Any]) -> str:
    """What a missing strategy means to compressed-tensors."""
    size = weights.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _activations(group: Mapping[str, Any], weights: Mapping[str, Any]) -> str | None:
    inputs = group.get("input_activations")
    if inputs is None:
        return None
    if not isinstance(inputs, Mapping):
        raise FormatError(f"quantization config: input_activations={inputs!r} is not a mapping")
    refuse_changed(inputs, _INPUTS_ACCEPTED)
    if inputs.get("type", "int") != weights.get("type", "int"):
        raise FormatError(
            f"quantization config: inputs of type {inputs.get('type')!r} to weights of type "
            f"{weights.get('type')!r} are not read; requantize from the base model"
        )
    return "dynamic" if config_bool(inputs, "dynamic", False) else "static"
