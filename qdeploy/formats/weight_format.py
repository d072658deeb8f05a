"""The seam of weight formats: what a format must do, which ones exist, which one is default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from qdeploy.errors import FormatError, UsageError
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme
from qdeploy.registry import Registry

Shape = tuple[int, ...]


class WeightFormat(Protocol):
    """How one quantized linear layer lies in a checkpoint. Local names: `qweight`, `scales`, …"""

    @property
    def name(self) -> str:
        """The name users give to --format."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Local names that every packed layer must have; the first marks a packed layer."""

    @property
    def optional_tensors(self) -> tuple[str, ...]:
        """Local names that a packed layer may have."""

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

    def quantization_config(self, scheme: QuantScheme, ignore: Sequence[str]) -> dict[str, Any]:
        """config.json's `quantization_config`; `ignore`: full names of linears left dense."""

    def parse_config(self, config: Mapping[str, Any]) -> QuantScheme:
        """The scheme in a `quantization_config`; FormatError for what can't be honoured."""


WEIGHT_FORMATS: Registry[WeightFormat] = Registry("weight format")


def default_format(method: str, scheme: QuantScheme) -> str:
    """The format that `quantize` writes unless told otherwise (CONTRACT §1).

    Raises UsageError when no delivered format holds the scheme.
    """
    if scheme.symmetric:
        name = "gptq"
    elif method != "gptq" and scheme.bits == 4 and not scheme.act_order:
        name = "awq"
    else:
        name = "gptq_v2"
    WEIGHT_FORMATS.get(name).check(scheme)
    return name


def require_divisible(what: str, value: int, by: int, format_name: str) -> None:
    """Raise UsageError unless `value` is a multiple of `by`."""
    if value % by:
        raise UsageError(
            f"format {format_name} needs {what} to be a multiple of {by}, this layer has {value}; "
            "keep it dense with --ignore"
        )


def expect_shape(name: str, shape: Shape, expected: Shape) -> None:
    """Raise FormatError unless a stored tensor has the documented shape (A12)."""
    if shape != expected:
        raise FormatError(
            f"{name} has shape {list(shape)}, expected {list(expected)}; does the quantization "
            "config belong to these weights?"
        )


def check_scales(scales: Tensor) -> None:
    """Raise FormatError for scales that are not finite floats."""
    if not scales.is_floating_point():
        raise FormatError(f"scales have dtype {scales.dtype}, expected a floating-point one")
    if not bool(scales.isfinite().all()):
        raise FormatError("scales hold NaN or infinity; quantize again or fetch the file again")


def config_int(config: Mapping[str, Any], *keys: str) -> int:
    """The integer under the first of `keys` that is present; FormatError otherwise."""
    for key in keys:
        value = config.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise FormatError(f"quantization config: {key}={value!r} is not an integer")
            return value
    raise FormatError(f"quantization config: {keys[0]!r} is missing; add it as quantized")


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
    """`ignore` without the output head, which these formats never quantize."""
    return [name for name in ignore if name != "lm_head"]
