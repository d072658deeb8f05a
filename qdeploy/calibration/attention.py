"""Queries, keys and values of a decoder layer as its own attention gets them: after RoPE."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from qdeploy.calibration.capture import StopLayer, run_layer
from qdeploy.errors import CalibrationError
from qdeploy.kv.trial import AttentionCall
from qdeploy.quantization.method import LayerBatch

#: The name under which transformers finds the attention that only looks.
_OBSERVED = "qdeploy_observed"


def observe_attention(
    layer: nn.Module,
    name: str,
    config: Any,
    batches: Sequence[LayerBatch],
    observer: Callable[[AttentionCall], None],
) -> None:
    """Give the observer what the layer's attention is called with, batch by batch.

    Each pass ends there, so nothing else of the layer is computed. config: the model's own, where
    its layers look their attention up. Raises CalibrationError, naming the layer, when a batch
    never got to attention (an architecture that bypasses transformers' attention functions).
    """
    seen = 0

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> None:
        nonlocal seen
        seen += 1
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        call = AttentionCall(q=query, k=key, v=value, mask=attention_mask, scale=scale)
        observer(call)
        raise StopLayer

    with _attention(config, attend):
        run_layer(layer, batches)
    if seen < max(len(batches), 1):
        raise CalibrationError(
            f"{name}: its K and V were observed in {seen} of {len(batches)} calibration batches; "
            "choose a --kv-cache-dtype that needs no calibration (bf16, int8, int4, k8v4)"
        )


@contextmanager
def _attention(config: Any, attend: Callable[..., None]) -> Iterator[None]:
    from transformers import AttentionInterface

    AttentionInterface.register(_OBSERVED, attend)
    before = config._attn_implementation
    config._attn_implementation = _OBSERVED
    try:
        yield
    finally:
        config._attn_implementation = before
