"""FP8 checkpoints of transformers and vLLM (`quant_method: "fp8"`): E4M3 weights, formats.md §5.

Blocks (DeepSeek's layout): `weight` [out, in] float8, `weight_scale_inv` float32 [⌈out/rows⌉,
⌈in/columns⌉]; despite its name the weight is multiplied by it. One scale a tensor:
`weight_scale_inv` or AutoFP8's `weight_scale`, of one element. The scales of static activations
are left alone: activations aren't rounded to 8 bits here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.e4m3 import check_scale_shape, pack_layer, require_whole_blocks, unpack_layer
from qdeploy.formats.module_schemes import ModuleSchemes, only_scheme
from qdeploy.formats.weight_format import (
    WEIGHT_FORMATS,
    LocalNames,
    Shape,
    config_names,
    expect_matrix,
    expect_shape,
    parsed_scheme,
    refuse_changed,
)
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme

_SCALES = ("weight_scale_inv", "weight_scale")
#: Keys that change what the bytes mean, and the values that this reader honours.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "activation_scheme": ("dynamic", "static"),
    "fmt": ("e4m3",),
    "scale_fmt": ("float", "ue8m0"),
}


@dataclass(frozen=True)
class Fp8Format:
    """Writes blocks only; a scale for each row is what compressed-tensors holds."""

    name: str = "fp8"

    def local_names(self, scheme: QuantScheme) -> LocalNames:
        """A layer with a scale is packed; all others are dense."""
        optional = (*_SCALES, "activation_scale", "input_scale", "bias")
        return LocalNames(("weight",), optional=optional, markers=_SCALES)

    def check(self, scheme: QuantScheme) -> None:
        """Float8 in blocks."""
        if scheme.number != "e4m3" or scheme.group_size == -1:
            raise UsageError(
                f"format fp8 holds FP8_BLOCK, not {scheme.name}; use --format compressed-tensors",
                param="format",
            )

    def check_shape(self, scheme: QuantScheme, out_features: int, in_features: int) -> None:
        """transformers refuses a last block that is smaller than the others."""
        require_whole_blocks(scheme, out_features, in_features)

    def pack(self, q: QuantizedLinear) -> dict[str, Tensor]:
        """`weight` and `weight_scale_inv`, float32."""
        self.check(q.scheme)
        self.check_shape(q.scheme, *q.shape)
        weight, grid = pack_layer(q)
        tensors = {"weight": weight, "weight_scale_inv": grid.float()}
        return tensors if q.bias is None else tensors | {"bias": q.bias}

    def layout(self, shapes: Mapping[str, Shape], scheme: QuantScheme) -> tuple[int, int]:
        """The weight is stored as it is, with one tensor of scales."""
        size = expect_matrix("weight", shapes["weight"])
        name = _scale_name(shapes)
        check_scale_shape(name, shapes[name], scheme, size)
        if "bias" in shapes:
            expect_shape("bias", shapes["bias"], size[:1])
        return size

    def unpack(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedLinear:
        """Codes are the weight's bytes, scales as stored (E8M0 as float32)."""
        self.layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}, scheme)
        grid = tensors[_scale_name(tensors)]
        return unpack_layer(tensors["weight"], grid, scheme, tensors.get("bias"))

    def quantization_config(
        self, schemes: Mapping[str, QuantScheme], ignore: Sequence[str]
    ) -> dict[str, Any]:
        """The keys of transformers' FineGrainedFP8Config; vLLM reads the same ones."""
        scheme = only_scheme(schemes.values(), self.name)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [scheme.block_rows, scheme.group_size],
            "modules_to_not_convert": list(ignore),
        }

    def parse_config(self, config: Mapping[str, Any]) -> ModuleSchemes:
        """Blocks of any size, or one scale a tensor when `weight_block_size` is null."""
        refuse_changed(config, _ACCEPTED)
        for key in ("modules_to_not_convert", "ignored_layers"):
            config_names(config, key)  # the tensors show what is dense
        rows, columns = block_size(config.get("weight_block_size"), "weight_block_size")
        scheme = parsed_scheme(
            bits=8,
            group_size=columns,
            symmetric=True,
            number="e4m3",
            block_rows=rows,
            activations=config.get("activation_scheme") or "dynamic",
        )
        return ModuleSchemes(default=scheme)


def block_size(value: Any, key: str) -> tuple[int, int]:
    """Rows and columns of a block, from a config; (−1, −1) for null, which is the whole tensor."""
    if value is None:
        return -1, -1
    numbers = isinstance(value, list) and all(type(n) is int and n > 0 for n in value)
    if not numbers or len(value) != 2:
        raise FormatError(f"quantization config: {key}={value!r} is not two positive numbers")
    return value[0], value[1]


def _scale_name(stored: Mapping[str, Any]) -> str:
    names = [name for name in _SCALES if name in stored]
    if len(names) != 1:
        fault = "both are stored" if names else "neither is stored"
        raise FormatError(f"weight_scale_inv or weight_scale: {fault}; fetch the model again")
    return names[0]


WEIGHT_FORMATS.add("fp8", Fp8Format())
