"""AutoAWQ's GEMM layout: 4 bits, zero points, float16 scales (formats.md §2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.module_schemes import ModuleSchemes, only_scheme
from qdeploy.formats.packing import pack_awq, unpack_awq
from qdeploy.formats.weight_format import (
    WEIGHT_FORMATS,
    LocalNames,
    Shape,
    check_scales,
    config_bool,
    config_int,
    dense_modules,
    expect_shape,
    parsed_scheme,
    refuse_changed,
    require_dense_head,
    require_divisible,
    require_plain_integers,
)
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme

_PER_WORD = 8
#: Keys that change what the bytes mean, and the values that this reader honours.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "version": ("gemm", "GEMM"),
    "checkpoint_format": ("gemm",),
    "format": ("gemm",),
    "pack_dtype": ("int32",),
    "desc_act": (False,),
    "lm_head": (False,),
}


@dataclass(frozen=True)
class AwqFormat:
    """`qweight` int32 [in, out/8], `qzeros` int32 [groups, out/8], `scales` f16 [groups, out]."""

    name: str = "awq"

    def local_names(self, scheme: QuantScheme) -> LocalNames:
        """The same for every scheme."""
        return LocalNames(("qweight", "qzeros", "scales"), optional=("bias",))

    def check(self, scheme: QuantScheme) -> None:
        """AWQ has 4-bit codes, and groups in input order."""
        require_plain_integers(scheme, self.name)
        other = "gptq" if scheme.symmetric else "gptq_v2"
        if scheme.bits != 4:
            raise UsageError(
                f"format awq holds 4-bit weights, not {scheme.bits}-bit; use --format {other}",
                param="format",
            )
        if scheme.act_order:
            raise UsageError(
                f"format awq can't hold activation order; use --format {other}", param="format"
            )

    def check_shape(self, scheme: QuantScheme, out_features: int, in_features: int) -> None:
        """AutoAWQ allocates out // 32 · 4 columns, so out must be a multiple of 32."""
        require_divisible("output features", out_features, 32, self.name)
        scheme.groups(in_features)

    def pack(self, q: QuantizedLinear) -> dict[str, Tensor]:
        """Scales must be exact in float16, the only dtype that readers expect."""
        self.check(q.scheme)
        self.check_shape(q.scheme, *q.shape)
        if q.g_idx is not None:
            raise UsageError("format awq can't hold activation order; use --format gptq_v2")
        scales = q.scales.to(torch.float16)
        if not torch.equal(scales.float(), q.scales.float()):
            raise UsageError(
                "format awq stores float16 scales, which would round these; use --format gptq_v2"
            )
        check_scales(scales, q.scheme)
        tensors = {
            "qweight": pack_awq(q.codes.t()),
            "qzeros": pack_awq(q.zero_points.t()),
            "scales": scales.t().contiguous(),
        }
        return tensors if q.bias is None else tensors | {"bias": q.bias}

    def layout(self, shapes: Mapping[str, Shape], scheme: QuantScheme) -> tuple[int, int]:
        """Rows of qweight are in, eight times its columns out."""
        if len(shapes["qweight"]) != 2:
            raise FormatError(f"qweight has shape {list(shapes['qweight'])}, expected 2 dimensions")
        in_features, words = shapes["qweight"]
        out_features = words * _PER_WORD
        group_size = in_features if scheme.group_size == -1 else scheme.group_size
        if not group_size or in_features % group_size:
            raise FormatError(
                f"group_size={group_size} of the quantization config does not divide "
                f"{in_features} input features"
            )
        groups = in_features // group_size
        expect_shape("qzeros", shapes["qzeros"], (groups, words))
        expect_shape("scales", shapes["scales"], (groups, out_features))
        if "bias" in shapes:
            expect_shape("bias", shapes["bias"], (out_features,))
        return out_features, in_features

    def unpack(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedLinear:
        """Codes and zero points as uint8, scales as stored."""
        self.layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}, scheme)
        check_scales(tensors["scales"], scheme)
        return QuantizedLinear(
            codes=unpack_awq(tensors["qweight"]).t().contiguous(),
            scales=tensors["scales"].t().contiguous(),
            zero_points=unpack_awq(tensors["qzeros"]).t().contiguous(),
            scheme=scheme,
            bias=tensors.get("bias"),
        )

    def quantization_config(
        self, schemes: Mapping[str, QuantScheme], ignore: Sequence[str]
    ) -> dict[str, Any]:
        """The keys of transformers' AwqConfig.to_transformers_dict()."""
        scheme = only_scheme(schemes.values(), self.name)
        require_dense_head(schemes, self.name)
        return {
            "quant_method": "awq",
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": dense_modules(ignore) or None,
        }

    def parse_config(self, config: Mapping[str, Any]) -> ModuleSchemes:
        """Reads AwqConfig's keys and AutoAWQ's internal ones (w_bit, q_group_size)."""
        refuse_changed(config, _ACCEPTED)
        bits = config_int(config, "bits", "w_bit")
        if bits != 4:
            raise FormatError(f"quantization config: awq with bits={bits} is not read; accepted: 4")
        # GPTQModel writes zero_point = not sym; the tensors are the same.
        if not config_bool(config, "zero_point", True) and config.get("sym") is not True:
            raise FormatError("quantization config: awq with zero_point=false is not read")
        group_size = config_int(config, "group_size", "q_group_size")
        scheme = parsed_scheme(bits=bits, group_size=group_size, symmetric=False)
        return ModuleSchemes(default=scheme)


WEIGHT_FORMATS.add("awq", AwqFormat())
