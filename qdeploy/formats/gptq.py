"""The GPTQ family: `gptq` (v1, stores z − 1) and `gptq_v2` (stores z); formats.md §3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qdeploy import __version__
from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.gptq_config import parse_gptq_config, skip_rules
from qdeploy.formats.module_schemes import ModuleSchemes, only_scheme
from qdeploy.formats.packing import pack_bits, packed_length, unpack_bits
from qdeploy.formats.weight_format import (
    WEIGHT_FORMATS,
    LocalNames,
    Shape,
    check_scales,
    dense_modules,
    expect_shape,
    require_dense_head,
    require_divisible,
    require_plain_integers,
)
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme


@dataclass(frozen=True)
class GptqFormat:
    """`qweight` int32 [in·b/32, out], `qzeros` int32 [groups, out·b/32], `scales` [groups, out],
    `g_idx` int32 [in]: the group of each input feature, always written.
    """

    name: str
    zero_offset: int  # what is added to a stored zero point to get z

    def local_names(self, scheme: QuantScheme) -> LocalNames:
        """The same for every scheme."""
        return LocalNames(("qweight", "qzeros", "scales"), optional=("g_idx", "bias"))

    def check(self, scheme: QuantScheme) -> None:
        """v1 can't hold z = 0 (AutoGPTQ's words corrupt), which asymmetric groups may need."""
        require_plain_integers(scheme, self.name)
        if self.zero_offset and not scheme.symmetric:
            raise UsageError(
                "format gptq can't hold a zero point of 0, which asymmetric weights may need; "
                "use --format gptq_v2" + (" or awq" if scheme.bits == 4 else ""),
                param="format",
            )

    def check_shape(self, scheme: QuantScheme, out_features: int, in_features: int) -> None:
        """Floor divisions in the readers drop what lies beyond a multiple of 32."""
        require_divisible("output features", out_features, 32, self.name)
        require_divisible("input features", in_features, 32, self.name)
        scheme.groups(in_features)

    def pack(self, q: QuantizedLinear) -> dict[str, Tensor]:
        """Raises UsageError for a zero point that the format can't hold (A04).

        Asymmetric weights fit into v1, too, when no zero point is 0.
        """
        require_plain_integers(q.scheme, self.name)
        self.check_shape(q.scheme, *q.shape)
        if bool((q.zero_points < self.zero_offset).any()):
            raise UsageError("format gptq can't hold a zero point of 0; use --format gptq_v2")
        check_scales(q.scales, q.scheme)
        bits, in_features = q.scheme.bits, q.shape[1]
        group_size = in_features // q.scales.shape[1]
        g_idx = q.g_idx if q.g_idx is not None else torch.arange(in_features) // group_size
        tensors = {
            "qweight": pack_bits(q.codes, bits).t().contiguous(),
            "qzeros": pack_bits(q.zero_points - self.zero_offset, bits, dim=0).t().contiguous(),
            "scales": q.scales.t().contiguous(),
            "g_idx": g_idx.to(torch.int32),
        }
        return tensors if q.bias is None else tensors | {"bias": q.bias}

    def layout(self, shapes: Mapping[str, Shape], scheme: QuantScheme) -> tuple[int, int]:
        """Rows of qweight hold 32 / bits inputs each; a short last group is legal."""
        if len(shapes["qweight"]) != 2:
            raise FormatError(f"qweight has shape {list(shapes['qweight'])}, expected 2 dimensions")
        words, out_features = shapes["qweight"]
        in_features, rest = divmod(words * 32, scheme.bits)
        if rest:
            raise FormatError(f"qweight has {words} rows, which are not {scheme.bits}-bit codes")
        groups = 1 if scheme.group_size == -1 else -(-in_features // scheme.group_size)
        expect_shape("qzeros", shapes["qzeros"], (groups, packed_length(out_features, scheme.bits)))
        expect_shape("scales", shapes["scales"], (groups, out_features))
        for name, length in (("g_idx", in_features), ("bias", out_features)):
            if name in shapes:
                expect_shape(name, shapes[name], (length,))
        return out_features, in_features

    def unpack(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedLinear:
        """Codes and zero points as uint8, scales as stored; g_idx None for groups in order."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        out_features, in_features = self.layout(shapes, scheme)
        check_scales(tensors["scales"], scheme)
        stored = unpack_bits(tensors["qzeros"], scheme.bits, out_features)
        zeros, symmetric = self._zero_points(stored, scheme)
        groups = tensors["scales"].shape[0]
        return QuantizedLinear(
            codes=unpack_bits(tensors["qweight"], scheme.bits, in_features, dim=0).t().contiguous(),
            scales=tensors["scales"].t().contiguous(),
            zero_points=zeros.t().contiguous(),
            scheme=replace(scheme, symmetric=symmetric),
            g_idx=group_index(tensors.get("g_idx"), scheme, in_features, groups),
            bias=tensors.get("bias"),
        )

    def _zero_points(self, stored: Tensor, scheme: QuantScheme) -> tuple[Tensor, bool]:
        """Zero points and whether the layer is symmetric.

        Symmetric checkpoints with the wrong label exist (vllm#38966), but their words give the
        version away: all z − 1 is v1, all z is v2. A `sym` that the words contradict is wrong
        too: AutoGPTQ assumed it when the key was missing.
        """
        for zero in (scheme.mid_code, scheme.mid_code - 1):
            if scheme.symmetric and bool((stored == zero).all()):
                return torch.full_like(stored, scheme.mid_code), True
        return (stored + self.zero_offset) & scheme.max_code, False

    def quantization_config(
        self, schemes: Mapping[str, QuantScheme], ignore: Sequence[str]
    ) -> dict[str, Any]:
        """AutoGPTQ's keys; layers left dense as GPTQModel's `dynamic` skip rules."""
        scheme = only_scheme(schemes.values(), self.name)
        require_dense_head(schemes, self.name)
        config: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "desc_act": scheme.act_order,
            "static_groups": not scheme.act_order,
            "sym": scheme.symmetric,
            "damp_percent": 0.01,
            "true_sequential": True,
            "lm_head": False,
            "checkpoint_format": self.name,
            "meta": {"quantizer": [f"qdeploy:{__version__}"]},
        }
        skipped = dense_modules(ignore)
        return config | {"dynamic": skip_rules(skipped)} if skipped else config

    def parse_config(self, config: Mapping[str, Any]) -> ModuleSchemes:
        """Reads AutoGPTQ's, GPTQModel's and transformers' keys."""
        return parse_gptq_config(config)


def group_index(
    g_idx: Tensor | None, scheme: QuantScheme, in_features: int, groups: int
) -> Tensor | None:
    """Validated g_idx; None when it is index // group_size and the groups are all full."""
    group_size = in_features if scheme.group_size == -1 else scheme.group_size
    sequential = (torch.arange(in_features) // group_size).to(torch.int32)
    short_last_group = in_features % group_size != 0
    if g_idx is None:
        if scheme.act_order and groups > 1:
            raise FormatError("desc_act is true but g_idx is missing; fetch the checkpoint again")
        return sequential if short_last_group else None
    if g_idx.is_floating_point() or int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
        raise FormatError(f"g_idx has values outside 0 … {groups - 1}; the file is broken")
    if groups > 1 and not bool(g_idx.any()):
        # Written as zeros by tools that don't use it (exllama#44).
        if scheme.act_order:
            raise FormatError("desc_act is true but g_idx is all zero; the file is broken")
        g_idx = sequential
    g_idx = g_idx.to(torch.int32)
    return None if torch.equal(g_idx, sequential) and not short_last_group else g_idx


WEIGHT_FORMATS.add("gptq", GptqFormat("gptq", zero_offset=1))
WEIGHT_FORMATS.add("gptq_v2", GptqFormat("gptq_v2", zero_offset=0))
