"""Rows of the JSON from timings: medians, ratios to the best peer, facts of our decode steps.

A row's name is "model | figure | engine"; benchmarks/table.py reads it so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from cpu_cases import Workload
from figures import Row, row
from peers.contestant import Timing

#: Contestants' repeats, by name; ours by (head bits, KV format).
Peers = Mapping[str, Sequence[Timing]]
Ours = Mapping[tuple[int, str], Sequence[Timing]]


def our_name(head: int, kv: str) -> str:
    """How rows call one of ours."""
    return f"qdeploy W4 head {head}-bit KV {kv}"


def workload_rows(workload: Workload, ours: Ours, peers: Peers) -> Iterator[Row]:
    """All rows of a workload: rates, then KV formats compared, then facts of decode steps."""
    for title, attribute in workload.rates.items():
        yield from _rate_rows(workload.model, title, attribute, ours, peers)
        for kv, base in workload.compare_kvs:
            yield from _kv_rows(workload.model, title, attribute, ours, (kv, base))
    if workload.step_facts:
        for key, timings in ours.items():
            yield from _step_rows(workload, our_name(*key), timings)


def _rate_rows(model: str, title: str, attribute: str, ours: Ours, peers: Peers) -> Iterator[Row]:
    theirs = {name: _median(timings, attribute) for name, timings in peers.items()}
    best = max(theirs, key=lambda name: theirs[name], default=None)
    for key, timings in ours.items():
        value = _median(timings, attribute)
        ratio = None if best is None else value / theirs[best]
        name = f"{model} | {title} | {our_name(*key)}"
        yield row(name, value, "tok/s", len(timings), ratio, best)
    for name, value in theirs.items():
        yield row(f"{model} | {title} | {name}", value, "tok/s", len(peers[name]))


def _kv_rows(
    model: str, title: str, attribute: str, ours: Ours, pair: tuple[str, str]
) -> Iterator[Row]:
    """Speed under one KV format over that under another: median of the ratios of the repeats."""
    kv, base = pair
    for head in sorted({head for head, _ in ours}):
        pairs = list(zip(ours[head, kv], ours[head, base], strict=True))
        ratio = statistics.median(getattr(a, attribute) / getattr(b, attribute) for a, b in pairs)
        name = f"{model} | {title}, KV {kv} over {base} | qdeploy W4 head {head}-bit"
        yield row(name, ratio, "ratio", len(pairs), ratio, f"KV {base}")


def _step_rows(workload: Workload, engine: str, timings: Sequence[Timing]) -> Iterator[Row]:
    """Decode steps against the raw C++ call and, for one stream, the bandwidth bound."""
    if not all("raw_step_s" in timing.extras for timing in timings):
        return  # another backend than cpu
    title, model, n = next(iter(workload.rates)), workload.model, len(timings)

    def median(figure: Callable[[Mapping[str, float]], float]) -> float:
        return statistics.median(figure(timing.extras) for timing in timings)

    over = median(lambda told: told["step_s"] / told["raw_step_s"])
    raw_ms = 1e3 * median(lambda told: told["raw_step_s"])
    name = f"{model} | {title}, engine over raw step | {engine}"
    yield row(name, over, "ratio", n, over, f"C++ step of {raw_ms:.3g} ms")
    if workload.load.batch > 1:
        return
    bound = statistics.median(timing.decode_rate * timing.extras["read_s"] for timing in timings)
    megabytes = median(lambda told: told["step_bytes"]) / 1e6
    read_ms = 1e3 * median(lambda told: told["read_s"])
    name = f"{model} | {title}, of the bandwidth bound | {engine}"
    against = f"streaming read of {megabytes:.1f} MB in {read_ms:.3g} ms"
    yield row(name, bound, "ratio", n, bound, against)


def long_prefill_rows(rows: Sequence[Row]) -> list[Row]:
    """Prefill at 4,096 tokens over that at 512, per engine that ran both."""
    rates = {row["name"]: row for row in rows}
    found = []
    for name, short in rates.items():
        long = rates.get(name.replace("| prefill 512 |", "| prefill 4096 |"))
        if long is None or long is short:
            continue
        ratio = long["value"] / short["value"]
        title = name.replace("| prefill 512 |", "| prefill 4096, of prefill 512 |")
        found.append(row(title, ratio, "ratio", short["n"], ratio, "prefill 512"))
    return found


def _median(timings: Sequence[Timing], attribute: str) -> float:
    return statistics.median(getattr(timing, attribute) for timing in timings)
