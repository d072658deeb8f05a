"""The seam of weight formats: what a format must do, which ones exist, which one is default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.module_schemes import ModuleSchemes, distinct
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme
from qdeploy.registry import Registry

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LocalNames:
    """Local names of a packed layer's tensors: `qweight`, `scales`, …

    required: every packed layer has them; optional: it may have them
    markers: any of these means that the layer is packed; the required ones unless given
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Every name that a packed layer may have."""
        return (*self.required, *self.optional)

    def mark(self, name: str) -> bool:
        """Whether a tensor of this local name means that its layer is packed."""
        return name in (self.markers or self.required)


class WeightFormat(Protocol):
    """How one quantized linear layer lies in a checkpoint."""

    @property
    def name(self) -> str:
        """The name users give to --format."""

    def local_names(self, scheme: QuantScheme) -> LocalNames:
        """The tensors of a packed layer."""

    def check(self, scheme: QuantScheme) -> None:
        """Raise UsageError, naming a format that can, when the scheme can't be held."""

    def check_shape(self, scheme: QuantScheme, out_features: int, in_features: int) -> None:
        """Raise UsageError when a layer [out_features, in_features] can't be held."""

    def pack(self, q: QuantizedLinear) -> dict[str, Tensor]:
        """Tensors of the layer by local name."""

    def layout(self, shapes: Mapping[str, Shape], scheme: QuantScheme) -> tuple[int, int]:
        """(out_features, in_features) from stored shapes; FormatError when they disagree."""

    def unpack(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedLinear:
        """The layer from its tensors by local name; FormatError when they are broken."""

    def quantization_config(
        self, schemes: Mapping[str, QuantScheme], ignore: Sequence[str]
    ) -> dict[str, Any]:
        """config.json's `quantization_config`.

        schemes: of every packed linear by full name, at least one; ignore: full names of linears
        left dense. UsageError, naming a format that can, when their mix can't be held.
        """

    def parse_config(self, config: Mapping[str, Any]) -> ModuleSchemes:
        """The schemes in a `quantization_config`; FormatError for what can't be honoured."""


WEIGHT_FORMATS: Registry[WeightFormat] = Registry("weight format")


def activations_note(schemes: Iterable[QuantScheme]) -> str | None:
    """Who rounds the activations of such weights, and who doesn't; None where nobody does."""
    notes = (_activations_note(scheme) for scheme in distinct(schemes) if scheme.activations)
    return "; ".join(dict.fromkeys(notes)) or None


def _activations_note(scheme: QuantScheme) -> str:
    how = "per token" if scheme.activations == "dynamic" else "by a stored scale"
    if scheme.activations == "dynamic" and scheme.group_size != -1:
        how = f"per token and {scheme.group_size} inputs"
    kind = "FP8" if scheme.number == "e4m3" else "int8"
    ours = "bfloat16, or float32 with --act fp32" if scheme.number == "e4m3" else "its --act"
    return (
        f"{scheme.name}: qdeploy measures and serves these weights with activations in {ours}; "
        f"engines such as vLLM also round activations to {kind}, {how}, and lose more"
    )


def default_format(method: str, *schemes: QuantScheme) -> str:
    """The format that `quantize` writes unless told otherwise (CONTRACT §1).

    Raises UsageError when no delivered format holds the schemes.
    """
    scheme, *others = distinct(schemes)
    if others:
        name = "compressed-tensors"
    elif scheme.number == "e4m3":
        name = default_fp8_format(scheme)
    elif scheme.activations is not None:
        name = "compressed-tensors"
    elif _is_awqs_own(method, scheme):
        name = "awq"
    elif method in ("gptq", "awq+gptq") or scheme.act_order:
        name = "gptq" if scheme.symmetric else "gptq_v2"
    else:
        name = "compressed-tensors"
    for each in schemes:
        WEIGHT_FORMATS.get(name).check(each)
    return name


def _is_awqs_own(method: str, scheme: QuantScheme) -> bool:
    plain = not (scheme.symmetric or scheme.act_order)
    return method in ("awq", "awq+gptq") and scheme.bits == 4 and plain


def default_fp8_format(scheme: QuantScheme) -> str:
    """Blocks have a format of their own; a scale for each row is llm-compressor's."""
    return "compressed-tensors" if scheme.group_size == -1 else "fp8"


def require_plain_integers(scheme: QuantScheme, format_name: str) -> None:
    """Raise UsageError for float8, and for 8-bit activations, in a format of integer weights."""
    if scheme.number != "int" or scheme.activations is not None:
        other = default_fp8_format(scheme) if scheme.number != "int" else "compressed-tensors"
        raise UsageError(
            f"format {format_name} holds integer weights alone, not {scheme.name}; "
            f"use --format {other}",
            param="format",
        )


def require_dense_head(schemes: Mapping[str, QuantScheme], format_name: str) -> None:
    """Raise UsageError for a packed head in a format whose readers expect a dense one."""
    if "lm_head" in schemes:
        raise UsageError(
            f"lm_head: format {format_name} can't hold a packed head; "
            "use --format compressed-tensors",
            param="format",
        )


def require_divisible(what: str, value: int, by: int, format_name: str) -> None:
    """Raise UsageError unless `value` is a multiple of `by`."""
    if value % by:
        raise UsageError(
            f"format {format_name} needs {what} to be a multiple of {by}, this layer has {value}; "
            "keep it dense with --ignore"
        )


def expect_matrix(name: str, shape: Shape) -> tuple[int, int]:
    """The two sizes of a matrix with at least one element; FormatError for another shape."""
    if len(shape) != 2 or 0 in shape:
        raise FormatError(f"{name} has shape {list(shape)}, expected [out_features, in_features]")
    return shape[0], shape[1]


def expect_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raise FormatError unless a stored tensor has one of the dtypes."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(tensor.dtype).removeprefix("torch.")
        raise FormatError(
            f"{name} has dtype {found}, expected {expected}; does the quantization config belong "
            "to these weights?"
        )


def expect_shape(name: str, shape: Shape, expected: Shape) -> None:
    """Raise FormatError unless a stored tensor has the documented shape (A12)."""
    if shape != expected:
        raise FormatError(
            f"{name} has shape {list(shape)}, expected {list(expected)}; does the quantization "
            "config belong to these weights?"
        )


def check_scales(scales: Tensor, scheme: QuantScheme) -> None:
    """Raise FormatError for scales that are not floats or don't give finite weights."""
    if not scales.is_floating_point():
        raise FormatError(f"scales have dtype {scales.dtype}, expected a floating-point one")
    if not bool((scales.float() * scheme.max_value).isfinite().all()):
        raise FormatError(
            "scales hold NaN or infinity, or make a weight infinite; quantize again or fetch the "
            "file again"
        )


def config_int(config: Mapping[str, Any], *keys: str) -> int:
    """The integer under the first of `keys` that is present; FormatError otherwise."""
    for key in keys:
        value = config.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise FormatError(f"quantization config: {key}={value!r} is not an integer")
            return value
    raise FormatError(f"quantization config: {keys[0]!r} is missing; add it as quantized")


def config_names(config: Mapping[str, Any], key: str) -> list[str]:
    """The list of names under `key`, empty when absent or null; FormatError for another type."""
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise FormatError(f"quantization config: {key}={value!r} is not a list of names")
    return value


def config_bool(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """The boolean under `key`, `default` when absent or null; FormatError for another type."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise FormatError(f"quantization config: {key}={value!r} is not true or false")
    return value


def parsed_scheme(**fields: Any) -> QuantScheme:
    """A QuantScheme from a file: what is unsupported there is the file's fault."""
    try:
        return QuantScheme(**fields)
    except UsageError as error:
        raise FormatError(f"quantization config: {error}") from None


def refuse_changed(config: Mapping[str, Any], accepted: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise FormatError for a key that changes the bytes' meaning in a way not read here."""
    for key, values in accepted.items():
        value = config.get(key)
        if value is not None and value not in values:
            raise FormatError(
                f"quantization config: {key}={value!r} is not read; accepted: "
                f"{', '.join(map(repr, values))}; requantize from the base model"
            )


def dense_modules(ignore: Sequence[str]) -> list[str]:
    """`ignore` without the output head, which AWQ and GPTQ never quantize."""
    return [name for name in ignore if name != "lm_head"]
