"""Train the roundings of a decoder layer on the layer's output."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qdeploy.quantization.learned_rounding import LearnedRounding, RoundingState
from qdeploy.quantization.method import LayerBatch, layer_output, one_sequence

#: Tokens of one step's sequences, and of those that judge an iterate (in float32).
STEP_TOKENS = 512
JUDGE_TOKENS = 2048
#: Iterates judged, evenly spread over the second half of the steps: rates are small by then.
JUDGED_ITERATES = 3


class Samples:
    """Single sequences with the outputs [1, tokens, hidden] that the layer ought to give.

    batches and targets are aligned; they are only read when a sequence is asked for.
    """

    def __init__(self, batches: Sequence[LayerBatch], targets: Sequence[Tensor]) -> None:
        self._batches, self._targets = batches, targets
        shapes = [target.shape for target in targets]
        self._rows = [(i, row) for i, shape in enumerate(shapes) for row in range(shape[0])]
        self.lengths = [shapes[i][1] for i, _ in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> tuple[LayerBatch, Tensor]:
        batch, row = self._rows[number]
        return one_sequence(self._batches[batch], row), self._targets[batch][row : row + 1]

    def spread(self, tokens: int) -> list[int]:
        """Numbers of evenly spread sequences of about `tokens` tokens, at least one."""
        total = sum(self.lengths)
        count = max(len(self) * min(tokens, total) // total, 1)
        return [i * len(self) // count for i in range(count)]

    def minibatches(self, tokens: int, rng: random.Random) -> Iterator[list[int]]:
        """Endless minibatches of at least `tokens` tokens, each sequence used equally often.

        Fewer tokens when all sequences together have fewer.
        """
        order: list[int] = []
        while True:
            batch: list[int] = []
            while sum(self.lengths[i] for i in batch) < tokens and len(batch) < len(self):
                order = order or rng.sample(range(len(self)), len(self))
                batch.append(order.pop())
            yield batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """Relative squared errors of the layer's output, means over the judging tokens.

    loss is never above start_loss. finite: False when an error was not; the start then stays.
    """

    start_loss: float
    loss: float
    finite: bool


class BlockTuning:
    """Learns all roundings of one layer together (SignRound, algorithm 1, but for the step's size).

    The layer's other parameters are constants. The rate falls linearly from `rate` to 0; of the
    iterates judged, the start included, the best stays.
    """

    def __init__(
        self,
        layer: nn.Module,
        roundings: Mapping[str, LearnedRounding],
        samples: Samples,
        *,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        """dtype: of the training's matrix products."""
        self._layer, self._roundings = layer, roundings
        self._samples, self._dtype = samples, dtype
        self._minibatches = samples.minibatches(STEP_TOKENS, random.Random(seed))
        layer.requires_grad_(False)

    def run(self, iters: int, rate: float) -> TuningResult:
        """Take `iters` steps; the roundings are then at the best iterate judged."""
        start = best = self._judge()
        first = kept = self._states()
        judged = {iters - iters * k // (2 * JUDGED_ITERATES) for k in range(JUDGED_ITERATES)}
        finite = math.isfinite(start)
        for number in range(iters):
            if not finite:
                break
            finite = self._step(rate * (1 - number / iters))
            if finite and number + 1 in judged:
                loss = self._judge()
                finite = math.isfinite(loss)
                if loss < best:
                    best, kept = loss, self._states()
        if not finite:
            best, kept = start, first
        for name, rounding in self._roundings.items():
            rounding.restore(kept[name])
        return TuningResult(start_loss=start, loss=best, finite=finite)

    @torch.enable_grad()
    def _step(self, rate: float) -> bool:
        """One minibatch; False, and nothing moves, when its error isn't finite."""
        self._install(self._dtype, trained=True)
        total = 0.0
        for number in next(self._minibatches):
            error = self._error(number, self._dtype)
            error.backward()
            total += error.item()
        if not math.isfinite(total):
            return False
        for name, rounding in self._roundings.items():
            gradient = self._linear(name).weight.grad
            assert gradient is not None
            rounding.step(gradient, rate)
        return True

    @torch.no_grad()
    def _judge(self) -> float:
        self._install(torch.float32, trained=False)
        total, count = 0.0, 0
        for number in self._samples.spread(JUDGE_TOKENS):
            total += self._error(number, torch.float32).item()
            count += self._samples.lengths[number]
        return total / count

    def _error(self, number: int, dtype: torch.dtype) -> Tensor:
        """|output − target|² / |target|², summed over the tokens of one sequence.

        Relative, as the next layer's norm sees it: the few tokens with activations a hundred times
        larger would decide a plain mean.
        """
        batch, target = self._samples[number]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = layer_output(self._layer(batch.hidden, **batch.kwargs))
        error = (output.float() - target).square().sum(-1)
        return (error / target.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)).sum()

    def _install(self, dtype: torch.dtype, *, trained: bool) -> None:
        for name, rounding in self._roundings.items():
            weight = nn.Parameter(rounding.dequantized(dtype), requires_grad=trained)
            self._linear(name).weight = weight

    def _linear(self, name: str) -> nn.Linear:
        module = self._layer.get_submodule(name)
        assert isinstance(module, nn.Linear)
        return module

    def _states(self) -> dict[str, RoundingState]:
        return {name: rounding.state() for name, rounding in self._roundings.items()}
