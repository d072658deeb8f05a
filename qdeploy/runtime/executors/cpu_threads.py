"""How many threads suit this process: physical cores, within its affinity and cgroup quota."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def default_threads() -> int:
    """Physical cores that this process may keep busy, at least 1.

    A second thread on a core adds nothing to a step that reads memory as fast as it can.
    """
    cores = len({_siblings(cpu) for cpu in _allowed()})
    quotas = [int(quota) for quota in _quotas()]
    return max(1, min([cores, *quotas]))


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _siblings(cpu: int) -> str:
    """Names the core that a CPU number belongs to."""
    path = _CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    return _read(path) or str(cpu)


def _quotas() -> Iterator[float]:
    """CPUs that each cgroup around this process allows; both versions of cgroups."""
    for line in _read(_OWN_CGROUP).splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:
            for folder in _upwards(_CGROUPS, name):
                quota, _, period = _read(folder / "cpu.max").partition(" ")
                yield from _ratio(quota, period)
        elif "cpu" in controllers.split(","):
            for folder in _upwards(_CGROUPS / "cpu", name):
                quota = _read(folder / "cpu.cfs_quota_us")
                yield from _ratio(quota, _read(folder / "cpu.cfs_period_us"))


def _upwards(root: Path, name: str) -> list[Path]:
    """The cgroup's folder and its parents; a container often sees the root only."""
    folder = root / name.lstrip("/")
    return [p for p in (folder, *folder.parents) if p == root or p.is_relative_to(root)]


def _ratio(quota: str, period: str) -> Iterator[float]:
    """One number, or none where there is no limit (`max`, −1, nothing)."""
    if quota.isdigit() and period.isdigit() and int(quota) and int(period):
        yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
