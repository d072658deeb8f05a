"""K/V statistics of every layer during calibration, and the KV policy that they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from qdeploy.calibration.attention import observe_attention
from qdeploy.calibration.walk import pick_sequences
from qdeploy.errors import CalibrationError
from qdeploy.kv.auto import KVLayerStats, LayerObserver, candidates, choose, tokens_needed
from qdeploy.kv.config import KVCacheConfig
from qdeploy.quantization.method import LayerBatch
from qdeploy.recipes import KVSection

#: Tokens on which policies are tried: whole sequences, spread over the calibration text.
TRIAL_TOKENS = 2048


class KVCalibration:
    """What a recipe's `kv_cache` section wants to know of each layer."""

    def __init__(self, section: KVSection) -> None:
        self._section, self._base = section, section.config()
        self._tries = candidates(self._base) if section.dtype == "auto" else []

    def check(self, sequences: Sequence[Sequence[int]]) -> None:
        """CalibrationError when no sequence is long enough to try every policy."""
        longest, needed = max(map(len, sequences), default=0), tokens_needed(self._base)
        if self._tries and longest < needed:
            raise CalibrationError(
                f"kv_cache dtype auto needs calibration sequences of {needed} tokens (blocks of "
                f"{self._base.block_size}), the longest has {longest}; raise --calib-seqlen, or "
                "choose a format"
            )

    @torch.no_grad()
    def observe(
        self, index: int, name: str, layer: nn.Module, config: Any, batches: Sequence[LayerBatch]
    ) -> KVLayerStats:
        """Statistics of one layer, as it is now. config: the model's, of transformers.

        CalibrationError, naming the layer, when its attention wasn't observed.
        """
        observer = LayerObserver(index, name)
        observe_attention(layer, name, config, batches, observer)
        if self._tries and index not in self._section.layers:
            needed = tokens_needed(self._base)
            observe_attention(
                layer,
                name,
                config,
                pick_sequences(batches, TRIAL_TOKENS, shortest=needed),
                lambda call: observer.try_policies(call, self._tries),
            )
        return observer.stats()

    def config(self, stats: Sequence[KVLayerStats]) -> KVCacheConfig:
        """The policy of the artifact."""
        auto = self._section.dtype == "auto"
        return self._section.config([choose(s, self._base) for s in stats] if auto else ())


def policy_notes(config: KVCacheConfig, stats: Sequence[KVLayerStats]) -> list[str]:
    """Lines for the user: the policy, and what the model's would do to layers with their own."""
    lines = [f"KV cache: {config.key}"]
    common = replace(config, layers=()).key
    for policy in config.layers:
        found = stats[policy.layer]
        if common in found.errors:
            lines.append(
                f"KV cache of layer {policy.layer}: {policy.dtype}; {config.dtype} changes its "
                f"attention by {found.errors[common]:.1%} (widest key channel: "
                f"{found.k_spread:.0f} times the median)"
            )
    return lines
