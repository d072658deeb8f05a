"""Prometheus metrics under vLLM's stems and the prefix `qdeploy:` (CONTRACT §4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from qdeploy.runtime.async_engine import AsyncEngine
from qdeploy.runtime.outputs import EngineStats, RequestOutput, SpeculationStats

PREFIX = "qdeploy:"
_COUNTERS = (
    "num_preemptions_total",
    "num_swaps_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
)
FINISHED_REASONS = ("stop", "length", "abort", "error")

# bucket bounds as vLLM's, so that its dashboards read the same
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2)
_E2E_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SEQS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class ServerMetrics:
    """One server's metrics: histograms fed after every step, the rest read at the scrape."""

    def __init__(self, engine: AsyncEngine) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        self._ttft = self._histogram("time_to_first_token_seconds", _TTFT_S)
        self._itl = self._histogram("inter_token_latency_seconds", _ITL_S)
        self._tpot = self._histogram("request_time_per_output_token_seconds", _ITL_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", _E2E_S)
        self._queue = self._histogram("request_queue_time_seconds", _E2E_S)
        self._prompt = self._histogram("request_prompt_tokens", _TOKENS)
        self._generation = self._histogram("request_generation_tokens", _TOKENS)
        self._step_tokens = self._histogram("iteration_tokens_total", _TOKENS)
        self._step_seqs = self._histogram("iteration_num_seqs", _SEQS)
        self._last_token: dict[tuple[str, int], float] = {}
        self._num_steps = engine.stats.num_steps

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        text = name.replace("_", " ")
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)

    def on_step(self, outputs: Sequence[RequestOutput], stats: EngineStats) -> None:
        """Called on the engine's thread after each step."""
        if stats.num_steps > self._num_steps:
            self._num_steps = stats.num_steps
            self._step_tokens.observe(stats.last_step_tokens)
            self._step_seqs.observe(stats.last_step_seqs)
        for output in outputs:
            if output.token_ids:
                self._on_tokens(output)
            if output.finished:
                self._on_finished(output)

    def _on_tokens(self, output: RequestOutput) -> None:
        times, key = output.metrics, (output.request_id, output.index)
        now = times.last_token_time
        if now is None:
            return
        before = self._last_token.get(key)
        self._last_token[key] = now
        if before is not None:
            self._itl.observe((now - before) / len(output.token_ids))
            return
        if times.first_token_time is not None:
            self._ttft.observe(times.first_token_time - times.arrival_time)
        if times.first_scheduled_time is not None:
            self._queue.observe(times.first_scheduled_time - times.arrival_time)

    def _on_finished(self, output: RequestOutput) -> None:
        self._last_token.pop((output.request_id, output.index), None)
        times, count = output.metrics, output.num_output_tokens
        self._prompt.observe(output.num_prompt_tokens)
        self._generation.observe(count)
        if times.last_token_time is None or times.first_token_time is None:
            return
        self._e2e.observe(times.last_token_time - times.arrival_time)
        if count > 1:
            self._tpot.observe((times.last_token_time - times.first_token_time) / (count - 1))


class _EngineCollector(Collector):
    """Gauges and counters of the engine's latest snapshot."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Read the snapshot once, so that a scrape is consistent."""
        stats = self._engine.stats
        yield from _gauges(stats)
        yield _gauge(
            "engine_last_step_age_seconds",
            "age of the step that runs or ran last while there is work; 0 while idle",
            self._engine.last_step_age,
        )
        yield _kv_blocks(stats)
        yield from _speculation(stats.speculation)
        for name in _COUNTERS:
            yield CounterMetricFamily(
                PREFIX + name, name.replace("_", " "), value=getattr(stats, name)
            )
        finished = CounterMetricFamily(
            PREFIX + "request_success_total",
            "sequences that ended, by reason; abort is a closed connection or a shutdown",
            labels=["finished_reason"],
        )
        for reason in FINISHED_REASONS:
            finished.add_metric([reason], stats.finished.get(reason, 0))
        yield finished


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    entries: dict[str, Callable[[EngineStats], float]] = {
        "num_requests_running": lambda s: s.num_requests_running,
        "num_requests_waiting": lambda s: s.num_requests_waiting,
        "kv_cache_usage_perc": lambda s: s.kv_cache_usage,
        "swap_space_used_bytes": lambda s: s.swap_space_used_bytes,
    }
    for name, read in entries.items():
        yield _gauge(name, name.replace("_", " "), read(stats))


def _speculation(stats: SpeculationStats) -> Iterator[Metric]:
    counters = {
        "num_drafts_total": stats.num_drafts,
        "num_draft_tokens_total": stats.num_draft_tokens,
        "num_accepted_tokens_total": stats.num_accepted_tokens,
    }
    for name, value in counters.items():
        full = "spec_decode_" + name
        yield CounterMetricFamily(PREFIX + full, full.replace("_", " "), value=value)
    by_place = CounterMetricFamily(
        PREFIX + "spec_decode_num_accepted_tokens_per_pos_total",
        "accepted drafts by their place in a proposal",
        labels=["position"],
    )
    for position, count in enumerate(stats.per_position):
        by_place.add_metric([str(position)], count)
    yield by_place
    yield _gauge(
        "spec_decode_acceptance_rate",
        "recent share of drafts that were right, of those compared",
        stats.acceptance_rate,
    )
    yield _gauge(
        "spec_decode_num_speculative_tokens",
        "drafts per decoding sequence in the last step",
        stats.num_speculative_tokens,
    )


def _kv_blocks(stats: EngineStats) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        PREFIX + "kv_blocks", "KV cache blocks by pool and state", labels=["state", "pool"]
    )
    for pool in ("open", "sealed"):
        total = getattr(stats, f"num_{pool}_blocks")
        used = getattr(stats, f"num_{pool}_blocks_used")
        cached = getattr(stats, f"num_{pool}_blocks_cached")
        family.add_metric(["live", pool], used)
        family.add_metric(["cached", pool], cached)
        family.add_metric(["free", pool], total - used - cached)
    return family
