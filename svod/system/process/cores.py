"""The cores that this process may use: its affinity, and the quotas of its control groups. Both may change while it runs."""
from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from svod.system.process.system_files import SYSTEM_ROOT, control_groups, read

QUOTA_SECONDS = 1.0     # seconds after which the quota is read again: reading it takes longer than preparing a small kernel


def parse_cpu_list(text: str) -> list[int]:
    """The CPUs of a kernel list such as `0-3,8`; [] for an empty or malformed one."""
    cpus: list[int] = []
    try:
        for part in filter(None, text.split(",")):
            low, _, high = part.partition("-")
            cpus.extend(range(int(low), int(high or low) + 1))
    except ValueError:
        return []
    return cpus


def machine_cores() -> int:
    """The number of cores of this machine, including cores that this process may not use."""
    return os.cpu_count() or 1


def affinity(thread: int = 0) -> tuple[int, ...]:
    """The CPUs that a thread (0: the calling one) may run on, ascending; all CPUs if the system does not tell. Raises ProcessLookupError
    for a thread that has ended."""
    if hasattr(os, "sched_getaffinity"):
        with suppress(PermissionError):         # a sandbox refuses the call
            return tuple(sorted(os.sched_getaffinity(thread)))
    return tuple(range(machine_cores()))


def cpu_quota(root: Path = SYSTEM_ROOT) -> float | None:
    """CPUs that the tightest quota of this process's control groups (v1 or v2) grants, e.g. 1.5; None without a limit."""
    limits: list[float] = []
    for directory, version in control_groups("cpu", root):
        if version == 2:
            quota, _, period = read(directory / "cpu.max").partition(" ")
        else:
            quota, period = read(directory / "cpu.cfs_quota_us"), read(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


class Quota:
    """The CPU quota of this process, cached for QUOTA_SECONDS."""

    def __init__(self, root: Path = SYSTEM_ROOT, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._read_at = -float("inf")
        self._cpus: float | None = None

    def cpus(self) -> float | None:
        """The value of `cpu_quota`, at most QUOTA_SECONDS old."""
        now = self._clock()
        if now - self._read_at >= QUOTA_SECONDS:
            self._cpus, self._read_at = cpu_quota(self._root), now
        return self._cpus


_QUOTA = Quota()


def usable_cores(cpus: int | None = None, quota: Quota = _QUOTA) -> int:
    """The number of cores that this process may keep busy: min(affinity, quota), at least 1. A quota is rounded down, because the system
    suspends threads beyond it for whole periods. `cpus` replaces the number of CPUs of the affinity."""
    count, granted = len(affinity()) if cpus is None else cpus, quota.cpus()
    if granted is not None:
        count = min(count, int(granted))
    return max(1, count)


def physical_core(core: int, root: Path = SYSTEM_ROOT) -> str:
    """Return a text that identifies the physical core of a logical core: it is the same for all hardware threads of one physical core."""
    return read(root / "sys/devices/system/cpu" / f"cpu{core}" / "topology/thread_siblings_list") or str(core)
