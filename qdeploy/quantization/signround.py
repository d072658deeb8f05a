"""SignRound: learn rounding and clipping by signed gradients (Cheng et al. 2023, arXiv 2309.05516).

Departures from the paper (docs/adr/0008): training starts at AWQ's clipped ranges, not at min-max;
the layer is fed what quantized earlier layers give and is trained
on what the unquantized model gives (auto-round does, too); errors are relative to each token's
norm; a step is the gradient over its recent root mean square, not its sign; iterates are judged on
fixed sequences in float32, not by the loss of their own minibatch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qdeploy.quantization.awq import NearestRounder
from qdeploy.quantization.block_tuning import BlockTuning, Samples, TuningResult
from qdeploy.quantization.learned_rounding import LearnedRounding
from qdeploy.quantization.method import LayerContext, LayerOutcome, LinearReport
from qdeploy.quantization.numerics import forward_dtype
from qdeploy.quantization.rounding import round_layer

DEFAULT_ITERS = 200
#: What a layer falls back to.
START = "rtn"


@dataclass(frozen=True, kw_only=True)
class SignRound:
    """All linears of a layer trained together on its output.

    iters: steps a layer; lr: the first step's size, in rounding steps, 1 / iters by default: the
    steps then sum up to ½, as far as an offset can go; seed: of the order of the sequences.
    """

    needs_calibration: bool = True
    iters: int = DEFAULT_ITERS
    lr: float = 1 / DEFAULT_ITERS
    seed: int = 0

    def configured(self, iters: int | None, lr: float | None, seed: int) -> SignRound:
        """With options as a recipe has them; None: the default."""
        iters = self.iters if iters is None else iters
        return replace(self, iters=iters, lr=1 / iters if lr is None else lr, seed=seed)

    def check(self, model_type: str) -> None:
        """Any architecture."""

    def quantize_layer(self, context: LayerContext) -> LayerOutcome:
        """`loss` is the squared error of the whole layer's output relative to its square, mean over
        tokens, the same for each linear.

        A layer whose training isn't finite keeps its start, with a warning and `fallback`.
        """
        assert context.forward is not None
        assert context.reference_forward is not None
        start = time.monotonic()
        targets = context.reference_forward()  # before anything changes the layer
        roundings = _start(context)
        result = self._train(context, roundings, targets)
        if not result.finite:
            context.warn(
                f"{context.name}: SignRound's loss is not finite; {START}'s rounding stays"
            )
        outcome = LayerOutcome(linears={})
        for name, rounding in roundings.items():
            q = rounding.result()
            outcome.linears[name] = q
            context.linear(name).weight.data = q.dequantize()
        outcome.reports = _reports(context, result, start)
        if not context.is_last:
            outcome.outputs, outcome.references = context.forward(), targets
        return outcome

    def _train(
        self,
        context: LayerContext,
        roundings: Mapping[str, LearnedRounding],
        targets: Sequence[Tensor],
    ) -> TuningResult:
        samples = Samples(context.batches, targets)
        # Errors of 8 bits are no larger than bfloat16's own.
        dtype = forward_dtype() if context.scheme.bits < 8 else torch.float32
        tuning = BlockTuning(context.layer, roundings, samples, dtype=dtype, seed=self.seed)
        return tuning.run(self.iters, self.lr)


def _start(context: LayerContext) -> dict[str, LearnedRounding]:
    """Nearest codes in clipped ranges, by a few of the tokens, and what is to be learned there."""
    weights = {name: context.linear(name).weight.detach().clone() for name in context.targets}
    few = replace(context, forward=context.search_forward, is_last=True)
    start = round_layer(few, NearestRounder(refit=False))
    return {name: LearnedRounding(weights[name], q) for name, q in start.linears.items()}


def _reports(context: LayerContext, result: TuningResult, start: float) -> list[LinearReport]:
    seconds = (time.monotonic() - start) / len(context.targets)
    loss = result.loss if math.isfinite(result.loss) else None
    fallback = None if result.finite else START
    return [
        LinearReport(name=name, loss=loss, fallback=fallback, seconds=seconds)
        for name in context.targets
    ]
