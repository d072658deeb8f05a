"""Threads that suit a process: affinity, hyperthreads, cgroup quotas of both versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from qdeploy.runtime.executors import cpu_threads
from qdeploy.runtime.executors.cpu_threads import default_threads


def machine(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    siblings: Mapping[int, str],
    own: str = "",
    files: Mapping[str, str] = {},
) -> None:
    """A machine with these CPU numbers and files of cgroups."""
    for cpu, text in siblings.items():
        topology = root / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text + "\n")
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (root / "own").write_text(own)
    monkeypatch.setattr(cpu_threads, "_CPUS", root / "cpu")
    monkeypatch.setattr(cpu_threads, "_CGROUPS", root / "cgroup")
    monkeypatch.setattr(cpu_threads, "_OWN_CGROUP", root / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(siblings), raising=False)


EIGHT = {cpu: str(cpu) for cpu in range(8)}
CASES: dict[str, tuple[Mapping[int, str], str, Mapping[str, str], int]] = {
    "plain": (EIGHT, "", {}, 8),
    "hyperthreads": ({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, "", {}, 2),
    "half a core pinned": ({5: "1,5"}, "", {}, 1),
    "v2": (EIGHT, "0::/a/b\n", {"a/b/cpu.max": "350000 100000"}, 3),
    "v2 parent": (EIGHT, "0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "2 1"}, 2),
    "v2 root in a container": (EIGHT, "0::/\n", {"cpu.max": "400000 100000"}, 4),
    "v2 outside of what is seen": (EIGHT, "0::/../x\n", {"cpu.max": "4 1"}, 4),
    "less than one": (EIGHT, "0::/\n", {"cpu.max": "50000 100000"}, 1),
    "v1": (
        EIGHT,
        "5:cpuset:/z\n4:cpu,cpuacct:/a\n",
        {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"},
        2,
    ),
    "v1 without a limit": (
        EIGHT,
        "4:cpu,cpuacct:/a\n",
        {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"},
        8,
    ),
    "more than there are": (EIGHT, "0::/\n", {"cpu.max": "9900000 100000"}, 8),
}


@pytest.mark.parametrize("case", CASES)
def test_default_threads(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    siblings, own, files, expected = CASES[case]
    machine(tmp_path, monkeypatch, siblings=siblings, own=own, files=files)
    assert default_threads() == expected


def test_a_system_without_any_of_these_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path, monkeypatch, siblings={})
    (tmp_path / "own").unlink()
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert default_threads() == 3


def test_this_machine() -> None:
    assert default_threads() >= 1
