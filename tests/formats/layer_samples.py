"""Random quantized layers and folders for the format tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qdeploy.quantization.scheme import Activations, QuantizedLinear, QuantScheme

CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "checkpoints"
Q_PROJ = "model.layers.0.self_attn.q_proj"


def random_layer(
    scheme: QuantScheme,
    out_features: int = 64,
    in_features: int = 128,
    *,
    seed: int = 0,
    min_zero: int = 0,
    bias: bool = False,
) -> QuantizedLinear:
    """Codes, zero points and float16 scales at random, within what the scheme allows."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, *shape: int) -> Tensor:
        drawn = torch.randint(low, scheme.max_code + 1, shape, generator=generator)
        return drawn.to(torch.uint8)

    groups = scheme.groups(in_features)
    zeros = integers(min_zero, out_features, groups)
    if scheme.symmetric:
        zeros = torch.full_like(zeros, scheme.mid_code)
    g_idx = None
    if scheme.act_order:
        order = torch.randperm(in_features, generator=generator)
        g_idx = (order // (in_features // groups)).to(torch.int32)
    return QuantizedLinear(
        codes=integers(0, out_features, in_features),
        scales=(torch.rand(out_features, groups, generator=generator) + 0.01).half(),
        zero_points=zeros,
        scheme=scheme,
        g_idx=g_idx,
        bias=torch.rand(out_features, generator=generator).half() if bias else None,
    )


def random_fp8_layer(
    out_features: int = 64,
    in_features: int = 128,
    *,
    block_rows: int = 1,
    group_size: int = -1,
    activations: Activations | None = "dynamic",
    seed: int = 0,
    bias: bool = False,
) -> QuantizedLinear:
    """Every float8 but NaN, and float32 scales at random, in blocks as the scheme has them."""
    generator = torch.Generator().manual_seed(seed)
    scheme = QuantScheme(
        bits=8,
        group_size=group_size,
        symmetric=True,
        number="e4m3",
        block_rows=block_rows,
        activations=activations,
    )
    rows, columns = scheme.block(out_features, in_features)
    grid = (-(-out_features // rows), -(-in_features // columns))
    scales = torch.rand(grid, generator=generator) + 0.01
    codes = torch.randint(0, 256, (out_features, in_features), generator=generator)
    codes = torch.where(codes % 128 == 127, 0, codes).to(torch.uint8)
    ragged = in_features % columns != 0
    return QuantizedLinear(
        codes=codes,
        scales=scales.repeat_interleave(rows, 0)[:out_features],
        zero_points=torch.zeros(out_features, grid[1], dtype=torch.uint8),
        scheme=scheme,
        g_idx=(torch.arange(in_features) // columns).int() if ragged else None,
        bias=torch.rand(out_features, generator=generator).half() if bias else None,
    )


def same(left: QuantizedLinear, right: QuantizedLinear) -> bool:
    """Equal in every tensor, bit for bit."""
    pairs = [(getattr(left, name), getattr(right, name)) for name in ("g_idx", "bias")]
    return (
        torch.equal(left.codes, right.codes)
        and torch.equal(left.zero_points, right.zero_points)
        and torch.equal(left.scales, right.scales)
        and all((a is None) == (b is None) for a, b in pairs)
        and all(torch.equal(a, b) for a, b in pairs if a is not None and b is not None)
    )


def copy_checkpoint(
    name: str,
    target: Path,
    *,
    tensors: Callable[[dict[str, Tensor]], Any] | None = None,
    config: Callable[[dict[str, Any]], Any] | None = None,
) -> Path:
    """A copy of a fixture checkpoint, with tensors or config edited in place by the callables."""
    shutil.copytree(CHECKPOINTS / name, target)
    if tensors is not None:
        loaded = load_file(target / "model.safetensors")
        tensors(loaded)
        loaded = {key: value.contiguous() for key, value in loaded.items()}
        save_file(loaded, target / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        path = target / "config.json"
        data = json.loads(path.read_text())
        config(data)
        path.write_text(json.dumps(data))
    return target
