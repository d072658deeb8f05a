"""Tiny checkpoints with every kind of weight that tiles can hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qdeploy.formats.artifact import ArtifactWriter
from qdeploy.formats.hf import open_folder
from qdeploy.formats.manifest import BaseModelRecord, EmbeddingsRecord, Manifest
from qdeploy.formats.weight_format import WEIGHT_FORMATS
from qdeploy.quantization.fp8 import fp8_quantize
from qdeploy.quantization.rtn import rtn_quantize
from qdeploy.quantization.scheme import Bits, QuantizedLinear, QuantScheme
from tiny_models import tiny_checkpoint


@dataclass(frozen=True, kw_only=True)
class WeightKind:
    """A file format and a scheme.

    embeddings: bits of token tables, rounded at load; dense: the linear that stays dense
    block_rows: of float8, whose groups are a block's columns; None for integers
    """

    format: str
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    act_order: bool = False
    embeddings: int | None = None
    dense: str = "lm_head"
    block_rows: int | None = None

    @property
    def act(self) -> str | None:
        """The mode in which activations are rounded most: float8 weights know no int8."""
        return "int8" if self.block_rows is None else None

    def scheme(self) -> QuantScheme:
        return QuantScheme(
            bits=cast("Bits", self.bits),
            group_size=self.group,
            symmetric=self.symmetric,
            act_order=self.act_order,
            number="int" if self.block_rows is None else "e4m3",
            block_rows=self.block_rows or 1,
            activations=None if self.block_rows is None else "dynamic",
        )


def _float8(**more: Any) -> WeightKind:
    return WeightKind(format="compressed-tensors", bits=8, symmetric=True, **more)


KINDS = {
    "awq": WeightKind(format="awq"),
    "gptq symmetric": WeightKind(format="gptq", symmetric=True),
    "gptq asymmetric": WeightKind(format="gptq_v2", group=16),
    "act-order": WeightKind(format="gptq_v2", act_order=True),
    "2 bits": WeightKind(format="gptq_v2", bits=2),
    "3 bits symmetric": WeightKind(format="gptq", bits=3, symmetric=True),
    "8 bits": WeightKind(format="gptq_v2", bits=8),
    "8 bits symmetric rows": WeightKind(format="gptq", bits=8, symmetric=True, group=-1),
    "4-bit tables": WeightKind(format="gptq", symmetric=True, embeddings=4),
    "8-bit tables": WeightKind(format="awq", embeddings=8),
    "float8 rows": _float8(block_rows=1, group=-1),
    "float8 tensors": _float8(block_rows=-1, group=-1),
    "float8 blocks": _float8(block_rows=16, group=32),
    "float8 beside a dense part": _float8(block_rows=1, group=-1, dense="k_proj"),
    "packed words": WeightKind(format="compressed-tensors"),
    "a dense part": WeightKind(format="awq", dense="k_proj"),
}


def quantized_checkpoint(arch: str, folder: Path, kind: WeightKind, **overrides: object) -> Path:
    """A tiny model whose linears are rounded to the nearest codes; returns its folder."""
    return rounded_checkpoint(
        tiny_checkpoint(arch, folder / "base", **overrides), folder / "out", kind
    )


def rounded_checkpoint(source: Path, out: Path, kind: WeightKind) -> Path:
    """An artifact of a dense model whose linears are rounded to the nearest codes."""
    base = open_folder(source)
    scheme = kind.scheme()
    tables = None
    if kind.embeddings is not None:
        tables = EmbeddingsRecord(bits=kind.embeddings, group_size=64, symmetric=True)
    with ArtifactWriter(out, base, overwrite=False) as writer:
        for name in sorted(base.names()):
            if not name.endswith("_proj.weight") or kind.dense in name.split("."):
                if not name.endswith("_proj.bias") or kind.dense in name.split("."):
                    writer.add(name, base.tensor(name))
                continue
            module = name.removesuffix(".weight")
            has_bias = f"{module}.bias" in base.names()
            bias = base.tensor(f"{module}.bias") if has_bias else None
            rounded = replace(_rounded(base.tensor(name), scheme), bias=bias)
            writer.add_linear(module, rounded, kind.format)
        manifest = Manifest(base_model=BaseModelRecord(name="tiny"), recipe={}, embeddings=tables)
        config = WEIGHT_FORMATS.get(kind.format).quantization_config({"m": scheme}, [kind.dense])
        return writer.finish(manifest, config)


def bfloat16_checkpoint(arch: str, folder: Path) -> Path:
    """A tiny model stored in bfloat16."""
    path = tiny_checkpoint(arch, folder)
    tensors = load_file(path / "model.safetensors")
    short = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(short, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _rounded(weight: Tensor, scheme: QuantScheme) -> QuantizedLinear:
    """Linears of the same input share their order of columns, as GPTQ's do."""
    if scheme.number == "e4m3":
        return fp8_quantize(weight, scheme)
    if not scheme.act_order:
        return rtn_quantize(weight, scheme)
    columns = weight.shape[1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    q = rtn_quantize(weight[:, order], scheme)
    codes, g_idx = torch.empty_like(q.codes), torch.empty(columns, dtype=torch.int32)
    codes[:, order] = q.codes
    g_idx[order] = torch.arange(columns, dtype=torch.int32) // scheme.group_size
    return replace(q, codes=codes, g_idx=g_idx)
