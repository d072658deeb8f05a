"""The KV policy of each layer from data: the cheapest one that its attention bears.

One number decides: the root mean square error of a layer's attention outputs, relative to the
outputs, on calibration sequences read through the cache's own codes (`kv.trial`). Reconstruction
errors of K and V don't: a key's error counts by what softmax makes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from qdeploy.errors import CalibrationError
from qdeploy.kv.config import KVCacheConfig, LayerPolicy
from qdeploy.kv.trial import AttentionCall, TrialError, attend, try_policy
from qdeploy.quantization.scheme import E4M3_MAX

#: What a layer's attention outputs may lose. KL grows with the square: SmolLM2's layers lose 0.036
#: each with int4, which is 0.002 nats of the model; a model whose every layer stood at the limit
#: would lose about 0.015.
MAX_ERROR = 0.1
#: Format, and sink and residual blocks on top of the recipe's, cheapest first; bf16 is the last
#: resort. One more residual block nearly halves the error of int4 as well, but cuts prefix-cache
#: hits of the whole model, so that more bits come first. More sinks alone change nothing.
LADDER = (("int4", 0, 0), ("k8v4", 0, 0), ("int8", 0, 0), ("int8", 1, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayerStats:
    """What calibration saw of one layer.

    tokens: whose K and V were seen; k_amax, v_amax: largest magnitude of each KV head
    k_spread: widest range of a key channel over the median one; errors: of the policies tried, by
    KVCacheConfig.key, with `tried` queries that read sealed blocks.
    """

    layer: int
    tokens: int
    k_amax: tuple[float, ...]
    v_amax: tuple[float, ...]
    k_spread: float
    errors: dict[str, float] = field(default_factory=dict)
    tried: int = 0

    @property
    def k_scale(self) -> float:
        """Static float8 scale of all keys: amax / 448."""
        return _scale(self.k_amax)

    @property
    def v_scale(self) -> float:
        """Static float8 scale of all values; never shared with the keys'."""
        return _scale(self.v_amax)


def candidates(base: KVCacheConfig) -> list[KVCacheConfig]:
    """The policies to try in each layer, cheapest first, on top of base's block counts."""
    return [
        replace(
            base,
            dtype=dtype,
            sink_blocks=base.sink_blocks + sinks,
            residual_blocks=base.residual_blocks + residual,
            layers=(),
        )
        for dtype, sinks, residual in LADDER
    ]


def tokens_needed(base: KVCacheConfig) -> int:
    """Tokens of a sequence in which every candidate is read sealed by at least one block."""
    most = max(c.sink_blocks + c.residual_blocks for c in candidates(base))
    return (most + 2) * base.block_size


def choose(stats: KVLayerStats, base: KVCacheConfig) -> LayerPolicy:
    """The first candidate within MAX_ERROR; bf16 if none is."""
    tried = ((c, stats.errors.get(c.key, float("nan"))) for c in candidates(base))
    fits = [c for c, error in tried if error <= MAX_ERROR]
    config = fits[0] if fits else base.with_dtype("bf16")
    return LayerPolicy(
        layer=stats.layer,
        dtype=config.dtype,
        sink_blocks=config.sink_blocks,
        residual_blocks=config.residual_blocks,
    )


class LayerObserver:
    """Gathers a layer's statistics from its attention calls; `trials` are run by `try_policies`."""

    def __init__(self, layer: int, name: str) -> None:
        self._layer, self._name, self._tokens = layer, name, 0
        self._k_low: Tensor | None = None
        self._k_high: Tensor | None = None
        self._v_amax: Tensor | None = None
        self._trials: dict[str, TrialError] = {}

    def __call__(self, call: AttentionCall) -> None:
        """Add the ranges of K per head and channel, and V's magnitude per head."""
        low, high = call.k.amin((0, 2)), call.k.amax((0, 2))
        v_amax = call.v.abs().amax((0, 2, 3))
        first = self._k_low is None or self._k_high is None or self._v_amax is None
        self._k_low = low if first else low.minimum(self._k_low)  # type: ignore[arg-type]
        self._k_high = high if first else high.maximum(self._k_high)  # type: ignore[arg-type]
        self._v_amax = v_amax if first else v_amax.maximum(self._v_amax)  # type: ignore[arg-type]
        self._tokens += call.k.shape[0] * call.k.shape[2]

    def try_policies(self, call: AttentionCall, configs: Sequence[KVCacheConfig]) -> None:
        """Add what each policy does to the call's outputs."""
        exact = attend(call, call.k, call.v, 0, call.q.shape[2])
        for config in configs:
            try_policy(call, exact, config, self._trials.setdefault(config.key, TrialError()))

    def stats(self) -> KVLayerStats:
        """CalibrationError, naming the layer, before the first call and for NaN or infinity."""
        if self._k_low is None or self._k_high is None or self._v_amax is None:
            raise CalibrationError(
                f"{self._name}: its K and V were never observed; choose a --kv-cache-dtype that "
                "needs no calibration (bf16, int8, int4, k8v4)"
            )
        k_amax = self._k_high.maximum(-self._k_low).amax(1)
        if not bool((k_amax.sum() + self._v_amax.sum()).isfinite()):
            raise CalibrationError(
                f"{self._name}: K or V of the calibration text isn't finite; check the model's "
                "weights, or choose --kv-cache-dtype bf16"
            )
        ranges = (self._k_high - self._k_low).flatten()
        return KVLayerStats(
            layer=self._layer,
            tokens=self._tokens,
            k_amax=tuple(k_amax.tolist()),
            v_amax=tuple(self._v_amax.tolist()),
            k_spread=(ranges.max() / ranges.median().clamp(min=1e-9)).item(),
            errors={key: trial.relative for key, trial in self._trials.items()},
            tried=min((trial.queries for trial in self._trials.values()), default=0),
        )


def _scale(amax: tuple[float, ...]) -> float:
    """A layer whose values are all zero gets scale 1: nothing divides by zero."""
    return max(amax) / E4M3_MAX or 1.0
