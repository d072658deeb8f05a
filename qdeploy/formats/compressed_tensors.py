"""compressed-tensors, the format of llm-compressor: formats.md §4.

float-quantized  `weight` float8 [out, in], `weight_scale` [out, 1], [1], or a grid of blocks
int-quantized    `weight` int8 [out, in], signed; `weight_scale` [out, groups]
pack-quantized   `weight_packed` int32 [out, ⌈in·bits/32⌉], `weight_scale` [out, groups],
                 `weight_shape` int64 [2]
Both of integers: `weight_zero_point` unless symmetric, int8 [out, groups], or packed along out.
The scales of static activations are left alone: activations aren't rounded to 8 bits here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.compressed_tensors_config import (
    compressed_tensors_config,
    format_of,
    parse_compressed_tensors,
)
from qdeploy.formats.e4m3 import check_scale_shape, pack_layer, require_whole_blocks, unpack_layer
from qdeploy.formats.gptq import group_index
from qdeploy.formats.module_schemes import ModuleSchemes
from qdeploy.formats.packing import pack_bits, packed_length, unpack_bits
from qdeploy.formats.weight_format import (
    WEIGHT_FORMATS,
    LocalNames,
    Shape,
    check_scales,
    expect_dtype,
    expect_matrix,
    expect_shape,
)
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme

_OPTIONAL = ("input_scale", "bias")


class _Codec(Protocol):
    """One of the three ways; each has the members of WeightFormat that depend on it."""

    names: LocalNames

    def check_shape(self, scheme: QuantScheme, out_features: int, in_features: int) -> None: ...

    def pack(self, q: QuantizedLinear) -> dict[str, Tensor]: ...

    def layout(self, shapes: Mapping[str, Shape], scheme: QuantScheme) -> tuple[int, int]: ...

    def unpack(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedLinear: ...


class _FloatQuantized:
    names = LocalNames(("weight", "weight_scale"), _OPTIONAL, markers=("weight_scale",))

    def check_shape(self, scheme: QuantScheme, out_features: int, in_features: int) -> None:
        require_whole_blocks(scheme, out_features, in_features)

    def pack(self, q: QuantizedLinear) -> dict[str, Tensor]:
        weight, grid = pack_layer(q)
        single = q.scheme.block_rows == -1
        tensors = {"weight": weight, "weight_scale": grid.reshape(1) if single else grid}
        return tensors if q.input_scale is None else tensors | {"input_scale": q.input_scale}

    def layout(self, shapes: Mapping[str, Shape], scheme: QuantScheme) -> tuple[int, int]:
        size = expect_matrix("weight", shapes["weight"])
        check_scale_shape("weight_scale", shapes["weight_scale"], scheme, size)
        return size

    def unpack(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedLinear:
        return unpack_layer(tensors["weight"], tensors["weight_scale"], scheme, None)


class _IntQuantized:
    names = LocalNames(
        ("weight", "weight_scale"), ("weight_zero_point", *_OPTIONAL), markers=("weight_scale",)
    )

    def check_shape(self, scheme: QuantScheme, out_features: int, in_features: int) -> None:
        scheme.groups(in_features)

    def pack(self, q: QuantizedLinear) -> dict[str, Tensor]:
        tensors = {"weight": _signed(q.codes, q.scheme), "weight_scale": q.scales.contiguous()}
        if not q.scheme.symmetric:
            tensors["weight_zero_point"] = _signed(q.zero_points, q.scheme)
        return tensors

    def layout(self, shapes: Mapping[str, Shape], scheme: QuantScheme) -> tuple[int, int]:
        size = expect_matrix("weight", shapes["weight"])
        groups = _groups(scheme, size[1])
        if shapes["weight_scale"] != (1,) or groups != 1:
            expect_shape("weight_scale", shapes["weight_scale"], (size[0], groups))
        if "weight_zero_point" in shapes:
            expected = shapes["weight_scale"]
            expect_shape("weight_zero_point", shapes["weight_zero_point"], expected)
        return size

    def unpack(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedLinear:
        weight, scales = tensors["weight"], tensors["weight_scale"]
        expect_dtype("weight", weight, torch.int8)
        zeros = _zero_points(tensors, scheme)
        if zeros is None:
            zeros = torch.zeros(scales.shape, dtype=torch.int8)
        expect_dtype("weight_zero_point", zeros, torch.int8)
        if scales.dim() == 1:  # one scale a tensor
            scales, zeros = scales.expand(len(weight), 1), zeros.expand(len(weight), 1)
        return QuantizedLinear(
            codes=_unsigned("weight", weight, scheme),
            scales=scales.contiguous(),
            zero_points=_unsigned("weight_zero_point", zeros, scheme),
            scheme=scheme,
        )


class _PackQuantized:
    names = LocalNames(
        ("weight_packed", "weight_scale", "weight_shape"),
        ("weight_zero_point", "weight_g_idx", *_OPTIONAL),
    )

    def check_shape(self, scheme: QuantScheme, out_features: int, in_features: int) -> None:
        scheme.groups(in_features)

    def pack(self, q: QuantizedLinear) -> dict[str, Tensor]:
        tensors = {
            "weight_packed": pack_bits(q.codes, q.scheme.bits),
            "weight_scale": q.scales.contiguous(),
            "weight_shape": torch.tensor(q.shape, dtype=torch.int64),
        }
        if not q.scheme.symmetric:
            tensors["weight_zero_point"] = pack_bits(q.zero_points, q.scheme.bits, dim=0)
        return tensors

    def layout(self, shapes: Mapping[str, Shape], scheme: QuantScheme) -> tuple[int, int]:
        """Words of the last columns may be padded, so the groups say how many columns there are;
        whole rows are read only where they fill their words.
        """
        out_features, words = expect_matrix("weight_packed", shapes["weight_packed"])
        _, groups = expect_matrix("weight_scale", shapes["weight_scale"])
        whole = scheme.group_size == -1
        in_features = words * 32 // scheme.bits if whole else groups * scheme.group_size
        expect_shape("weight_scale", shapes["weight_scale"], (out_features, 1 if whole else groups))
        expect_shape("weight_shape", shapes["weight_shape"], (2,))
        if words not in (packed_length(in_features, scheme.bits), _old_length(in_features, scheme)):
            raise FormatError(
                f"weight_packed has {words} words a row, expected "
                f"{packed_length(in_features, scheme.bits)} for {in_features} columns of "
                f"{scheme.bits} bits; does the quantization config belong to these weights?"
            )
        if "weight_zero_point" in shapes:
            packed = (packed_length(out_features, scheme.bits), groups)
            expect_shape("weight_zero_point", shapes["weight_zero_point"], packed)
        if "weight_g_idx" in shapes:
            expect_shape("weight_g_idx", shapes["weight_g_idx"], (in_features,))
        return out_features, in_features

    def unpack(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedLinear:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        out_features, in_features = self.layout(shapes, scheme)
        words, stated = tensors["weight_packed"], tensors["weight_shape"].tolist()
        expect_dtype("weight_packed", words, torch.int32)
        if stated != [out_features, in_features]:
            raise FormatError(
                f"weight_shape says {stated}, but weight_packed and weight_scale are of "
                f"[{out_features}, {in_features}]; fetch the model again"
            )
        scales = tensors["weight_scale"]
        packed = _zero_points(tensors, scheme)
        if packed is None:
            zeros = torch.full(scales.shape, scheme.mid_code, dtype=torch.uint8)
        else:
            expect_dtype("weight_zero_point", packed, torch.int32)
            zeros = unpack_bits(packed, scheme.bits, out_features, dim=0)
        g_idx = tensors.get("weight_g_idx")
        return QuantizedLinear(
            codes=_unpacked(words, scheme, in_features),
            scales=scales,
            zero_points=zeros,
            scheme=scheme,
            g_idx=group_index(g_idx, scheme, in_features, scales.shape[1]),
        )


_CODECS: dict[str, _Codec] = {
    "float-quantized": _FloatQuantized(),
    "int-quantized": _IntQuantized(),
    "pack-quantized": _PackQuantized(),
}


@dataclass(frozen=True)
class CompressedTensorsFormat:
    """The scheme decides which of the three ways it is."""

    name: str = "compressed-tensors"

    def local_names(self, scheme: QuantScheme) -> LocalNames:
        """A layer with scales is packed; all others are dense."""
        return _codec(scheme).names

    def check(self, scheme: QuantScheme) -> None:
        """Activation order was removed from the format in 2026."""
        if scheme.act_order:
            raise UsageError(
                "format compressed-tensors can't hold activation order; use --format gptq_v2",
                param="format",
            )

    def check_shape(self, scheme: QuantScheme, out_features: int, in_features: int) -> None:
        """Groups and blocks must be whole."""
        _codec(scheme).check_shape(scheme, out_features, in_features)

    def pack(self, q: QuantizedLinear) -> dict[str, Tensor]:
        """Scales keep their dtype."""
        self.check(q.scheme)
        if q.g_idx is not None:
            raise UsageError("format compressed-tensors needs whole groups in order; use gptq_v2")
        self.check_shape(q.scheme, *q.shape)
        check_scales(q.scales, q.scheme)
        tensors = _codec(q.scheme).pack(q)
        return tensors if q.bias is None else tensors | {"bias": q.bias}

    def layout(self, shapes: Mapping[str, Shape], scheme: QuantScheme) -> tuple[int, int]:
        """As the scheme has it."""
        size = _codec(scheme).layout(shapes, scheme)
        if "bias" in shapes:
            expect_shape("bias", shapes["bias"], size[:1])
        return size

    def unpack(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedLinear:
        """Codes and zero points as uint8, scales as stored."""
        self.layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}, scheme)
        check_scales(tensors["weight_scale"], scheme)
        q = _codec(scheme).unpack(tensors, scheme)
        middle = 0 if scheme.number == "e4m3" else scheme.mid_code
        if scheme.symmetric and bool((q.zero_points != middle).any()):
            raise FormatError("the config says symmetric, but weight_zero_point isn't all zero")
        q.bias, q.input_scale = tensors.get("bias"), tensors.get("input_scale")
        return q

    def quantization_config(
        self, schemes: Mapping[str, QuantScheme], ignore: Sequence[str]
    ) -> dict[str, Any]:
        """A group for each scheme."""
        return compressed_tensors_config(schemes, ignore)

    def parse_config(self, config: Mapping[str, Any]) -> ModuleSchemes:
        """Reads llm-compressor's configs, mixed precision and all."""
        return parse_compressed_tensors(config)


def _codec(scheme: QuantScheme) -> _Codec:
    return _CODECS[format_of(scheme)]


def _groups(scheme: QuantScheme, in_features: int) -> int:
    if scheme.group_size == -1:
        return 1
    if in_features % scheme.group_size:
        raise FormatError(
            f"group_size={scheme.group_size} of the quantization config does not divide "
            f"{in_features} input features"
        )
    return in_features // scheme.group_size


def _signed(codes: Tensor, scheme: QuantScheme) -> Tensor:
    return (codes.to(torch.int16) - scheme.mid_code).to(torch.int8).contiguous()


def _unsigned(name: str, signed: Tensor, scheme: QuantScheme) -> Tensor:
    """uint8 codes of signed ones; FormatError for one that has too many bits."""
    codes = signed.to(torch.int16) + scheme.mid_code
    if int(codes.min()) < 0 or int(codes.max()) > scheme.max_code:
        raise FormatError(f"{name} holds numbers that {scheme.bits} bits can't; fetch it again")
    return codes.to(torch.uint8)


def _zero_points(tensors: Mapping[str, Tensor], scheme: QuantScheme) -> Tensor | None:
    """As stored; a symmetric layer may have none."""
    zeros = tensors.get("weight_zero_point")
    if zeros is None and not scheme.symmetric:
        raise FormatError("weight_zero_point is missing; fetch the model again")
    return zeros


def _old_length(in_features: int, scheme: QuantScheme) -> int:
    """Words a row as versions up to 2025 packed: no code straddles two of them."""
    return -(-in_features // (32 // scheme.bits))


def _unpacked(words: Tensor, scheme: QuantScheme, in_features: int) -> Tensor:
    bits = scheme.bits
    if words.shape[1] == packed_length(in_features, bits):
        return unpack_bits(words, bits, in_features)
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    codes = (words.unsqueeze(-1) >> shifts) & scheme.max_code
    return codes.flatten(1)[:, :in_features].to(torch.uint8).contiguous()


WEIGHT_FORMATS.add("compressed-tensors", CompressedTensorsFormat())
