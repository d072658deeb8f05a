"""The seam of quantization methods: what one is given for a decoder layer, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme

#: Receives the input rows of a linear layer, [tokens, in_features], a batch at a time.
Observer = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBatch:
    """Inputs of one decoder layer: hidden [batch, tokens, hidden] and the keywords it takes."""

    hidden: Tensor
    kwargs: Mapping[str, Any]


def one_sequence(batch: LayerBatch, row: int) -> LayerBatch:
    """One sequence of a batch, as a batch; views of the same memory."""
    size = batch.hidden.shape[0]

    def narrow(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(narrow(item) for item in value)
        if isinstance(value, Tensor) and size > 1 and value.dim() and value.shape[0] == size:
            return value[row : row + 1]
        return value

    kwargs = {name: narrow(value) for name, value in batch.kwargs.items()}
    return LayerBatch(hidden=batch.hidden[row : row + 1], kwargs=kwargs)


class Forward(Protocol):
    """Runs the layer on the calibration tokens; made by `calibration.walk`."""

    def __call__(
        self, observers: Mapping[str, Observer] | None = None, stop_after: str | None = None
    ) -> Sequence[Tensor]:
        """Outputs of all batches, perhaps on disk; none when stopped after `stop_after`'s input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """One decoder layer, float32 and in memory, with the calibration tokens that reach it.

    layer: the module; a method may change its weights
    name: full name, e.g. model.layers.0; targets: names of linears below it, to be quantized
    input_groups: targets that share an input, in order of execution
    model_type: of the config, decides the smoothing groups
    head_dim: of attention heads; store_dtypes: dtype on disk of each of the layer's parameters
    search_batches: some of the sequences, for searches that run blocks many times
    search_forward: as `forward`, on these; batches: what `forward` feeds
    reference_forward: as `forward`, fed with what the unquantized model has there: for methods
        that train
    is_last: whether outputs are of no use
    """

    layer: nn.Module
    name: str
    targets: tuple[str, ...]
    input_groups: tuple[tuple[str, ...], ...] = ()
    scheme: QuantScheme
    model_type: str
    head_dim: int
    store_dtypes: Mapping[str, Any]
    forward: Forward | None = None
    search_batches: Sequence[LayerBatch] = ()
    search_forward: Forward | None = None
    batches: Sequence[LayerBatch] = ()
    reference_forward: Forward | None = None
    is_last: bool = False
    warn: Callable[[str], None] = print

    def linear(self, name: str) -> nn.Linear:
        """The linear layer `name` (relative to the decoder layer)."""
        module = self.layer.get_submodule(name)
        assert isinstance(module, nn.Linear)
        return module


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearReport:
    """How one linear layer went; `loss` in the method's own measure."""

    name: str
    loss: float | None = None
    dampening: float | None = None
    fallback: str | None = None
    seconds: float | None = None


@dataclass(slots=True, kw_only=True)
class LayerOutcome:
    """A quantized decoder layer; all names are relative to it.

    linears: quantized layers; dense: other parameters that changed (norms, biases), as stored
    outputs: the next layer's inputs, one tensor a batch, as `forward` gave them
    references: the same as `reference_forward` gave them, from methods that train
    """

    linears: dict[str, QuantizedLinear]
    dense: dict[str, Tensor] = field(default_factory=dict)
    reports: list[LinearReport] = field(default_factory=list)
    outputs: Sequence[Tensor] = ()
    references: Sequence[Tensor] = ()


class QuantMethod(Protocol):
    """Quantizes one decoder layer after the other."""

    @property
    def needs_calibration(self) -> bool:
        """Whether `forward` and `input_groups` must be given."""

    def check(self, model_type: str) -> None:
        """Raise UsageError for an architecture that the method can't do."""

    def quantize_layer(self, context: LayerContext) -> LayerOutcome:
        """Quantize every target; deterministic."""


def layer_output(value: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Some layers return a tuple, some the tensor itself: `[0]` on that would index the batch."""
    return value if isinstance(value, Tensor) else value[0]
