"""Hooks on a decoder layer: run it, observe inputs of its linears, find which share an input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from qdeploy.errors import CalibrationError
from qdeploy.quantization.method import LayerBatch, Observer, layer_output

#: Takes outputs as they come, one a batch, and holds them in memory or elsewhere.
Keep = Callable[[Iterable[Tensor]], Sequence[Tensor]]


class StopLayer(Exception):
    """Ends a forward pass early."""


@torch.no_grad()
def run_layer(
    layer: nn.Module,
    batches: Iterable[LayerBatch],
    observers: Mapping[str, Observer] | None = None,
    stop_after: str | None = None,
    dtype: torch.dtype = torch.float32,
    keep: Keep = list,
) -> Sequence[Tensor]:
    """Outputs [batch, tokens, hidden] of every batch; observers get rows [tokens, in_features].

    With `stop_after`, a pass ends at the input of that module and there are no outputs. dtype: of
    products; the residual stream and so the outputs are float32.
    """
    with ExitStack() as stack:
        if dtype != torch.float32:
            stack.enter_context(torch.autocast("cpu", dtype))
        for name, observer in (observers or {}).items():
            handle = layer.get_submodule(name).register_forward_pre_hook(_observing(observer))
            stack.callback(handle.remove)
        if stop_after is None:
            return keep(_outputs(layer, batches))
        handle = layer.get_submodule(stop_after).register_forward_pre_hook(_stop)
        stack.callback(handle.remove)
        for batch in batches:
            with suppress(StopLayer):
                layer(batch.hidden, **batch.kwargs)
    return []


def _outputs(layer: nn.Module, batches: Iterable[LayerBatch]) -> Iterator[Tensor]:
    for batch in batches:
        with suppress(StopLayer):  # of a module within
            yield layer_output(layer(batch.hidden, **batch.kwargs))


def find_input_groups(
    layer: nn.Module, layer_name: str, batch: LayerBatch, targets: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Targets that are fed the very same tensor, in order of execution.

    Raises CalibrationError that names every target which no token reached (a fused path that
    bypasses the module, an expert that was not chosen): its statistics would be made up.
    """
    seen: dict[str, Tensor] = {}  # holds the tensors, so that no address is used twice
    with ExitStack() as stack:
        for name in targets:
            hook = _remember(seen, name)
            handle = layer.get_submodule(name).register_forward_pre_hook(hook)
            stack.callback(handle.remove)
        run_layer(layer, [batch])
    missing = [name for name in targets if name not in seen or not seen[name].numel()]
    if missing:
        names = ", ".join(f"{layer_name}.{name}" for name in missing)
        raise CalibrationError(
            f"calibration reached 0 rows of {names}; keep them dense with --ignore, "
            "or use --method rtn"
        )
    groups: dict[int, list[str]] = {}
    for name, tensor in seen.items():
        groups.setdefault(id(tensor), []).append(name)
    return tuple(tuple(names) for names in groups.values())


def _observing(observer: Observer) -> Any:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        observer(inputs[0].reshape(-1, inputs[0].shape[-1]))

    return hook


def _remember(seen: dict[str, Tensor], name: str) -> Any:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[name] = inputs[0]

    return hook


def _stop(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    raise StopLayer
