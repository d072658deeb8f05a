"""Decoder layers of tiny models with calibration inputs, for tests of methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qdeploy.calibration.capture import find_input_groups, run_layer
from qdeploy.calibration.walk import pick_sequences
from qdeploy.quantization.method import LayerBatch, LayerContext
from qdeploy.quantization.scheme import QuantScheme
from tiny_models import tiny_model


def skewed(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Give some features of every norm a large weight: what AWQ is for."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in name:
            factor = torch.rand(parameter.shape, generator=generator).mul(2.5).exp()
            parameter.data.mul_(factor)
    return model


def layer_context(
    model: PreTrainedModel,
    index: int = 0,
    *,
    scheme: QuantScheme | None = None,
    tokens: int = 256,
    store: torch.dtype = torch.float32,
    warn: Callable[[str], None] = print,
) -> LayerContext:
    """The context of one layer, fed with what the model itself feeds it on random tokens."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, model.config.vocab_size, (4, max(tokens // 4, 1)), generator=generator)
    layer: nn.Module = model.model.layers[index]
    seen: list[LayerBatch] = []

    def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, object]) -> None:
        kept = {name: value for name, value in kwargs.items() if name not in ("cache", "use_cache")}
        seen.append(LayerBatch(hidden=args[0], kwargs=kept))

    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(ids, use_cache=False)
    handle.remove()
    targets = tuple(n for n, m in layer.named_modules() if isinstance(m, nn.Linear))
    search = pick_sequences(seen, tokens)
    return LayerContext(
        layer=layer,
        name=f"model.layers.{index}",
        targets=targets,
        input_groups=find_input_groups(layer, f"model.layers.{index}", seen[0], targets),
        scheme=scheme or QuantScheme(bits=4, group_size=32),
        model_type=model.config.model_type,
        head_dim=model.config.head_dim,
        store_dtypes={name: store for name, _ in layer.named_parameters()},
        forward=partial(run_layer, layer, seen),
        batches=seen,
        reference_forward=partial(run_layer, layer, seen),
        search_batches=search,
        search_forward=partial(run_layer, layer, search),
        warn=warn,
    )


def tiny(arch: str, **overrides: object) -> PreTrainedModel:
    """A tiny model with skewed norms."""
    return skewed(tiny_model(arch, **overrides))
