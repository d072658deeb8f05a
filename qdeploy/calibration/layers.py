"""One decoder layer after the other: loaded, calibrated, quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from qdeploy.calibration.capture import Keep, find_input_groups, run_layer
from qdeploy.calibration.kv_policy import KVCalibration
from qdeploy.calibration.plan import QuantPlan
from qdeploy.calibration.walk import DecoderWalk, pick_sequences
from qdeploy.kv.auto import KVLayerStats
from qdeploy.quantization.method import LayerBatch, LayerContext, LayerOutcome
from qdeploy.quantization.mixed import quantize_layer
from qdeploy.quantization.numerics import forward_dtype

#: Tokens on which AWQ tries its scales: enough to rank them, few enough for minutes on a CPU.
SEARCH_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRunner:
    """Quantizes the layers of a walk by a plan.

    kv: observes K and V, None when the policy needs no statistics; keep: takes the outputs of all
    batches, see run_layer
    """

    walk: DecoderWalk
    plan: QuantPlan
    kv: KVCalibration | None
    keep: Keep
    warn: Callable[[str], None]

    def run(
        self, index: int, hidden: Sequence[Tensor], references: Sequence[Tensor] = ()
    ) -> tuple[LayerOutcome, KVLayerStats | None]:
        """One layer quantized, and what calibration saw of its K and V before that.

        hidden: its inputs, one tensor a batch; none without calibration
        references: those of the unquantized model, when the layer before had a use for them
        """
        walk, stats = self.walk, None
        with walk.layer(index) as layer:
            batches = walk.batches(index, hidden) if len(hidden) else ()
            if self.kv is not None:
                name = walk.layer_name(index)
                stats = self.kv.observe(index, name, layer, walk.config, batches)
            method = self.plan.method
            if method is not None and method.needs_calibration:
                unquantized = walk.batches(index, references) if len(references) else batches
                return self._quantize(index, layer, batches, unquantized), stats
            outcome = self._quantize(index, layer, (), ())
            if index + 1 < len(walk.layers):  # the next layer's statistics alone want inputs
                outcome.outputs = run_layer(layer, batches, dtype=forward_dtype(), keep=self.keep)
            return outcome, stats

    def _quantize(
        self,
        index: int,
        layer: nn.Module,
        batches: Sequence[LayerBatch],
        unquantized: Sequence[LayerBatch],
    ) -> LayerOutcome:
        method = self.plan.method
        if method is None:
            return LayerOutcome(linears={})
        walk, targets = self.walk, self.plan.targets[index]
        name = walk.layer_name(index)

        run = partial(run_layer, layer, dtype=forward_dtype())
        search = pick_sequences(batches, SEARCH_TOKENS) if batches else []
        context = LayerContext(
            layer=layer,
            name=name,
            targets=targets,
            input_groups=find_input_groups(layer, name, search[0], targets) if search else (),
            scheme=self.plan.scheme,
            model_type=walk.model_type,
            head_dim=walk.head_dim,
            store_dtypes={
                local: walk.folder.dtype(f"{name}.{local}") for local, _ in layer.named_parameters()
            },
            forward=partial(run, batches, keep=self.keep) if batches else None,
            search_batches=search,
            search_forward=partial(run, search) if batches else None,
            batches=batches,
            reference_forward=partial(run, unquantized, keep=self.keep) if batches else None,
            is_last=index == len(walk.layers) - 1,
            warn=self.warn,
        )
        return quantize_layer(method, context, self.plan.local_schemes(name))
