"""Measures the load of the machine during measurements.

`watch_machine()` reads the machine's counters before and after a batch of measurements. The difference is a `MachineLoad`: it is stored
with the batch and tells whether the batch can be trusted.
"""
from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from svod.system.process.cores import machine_cores

STEAL_LIMIT = 0.02              # largest acceptable share of the machine's time taken by other virtual machines
FOREIGN_LIMIT = 0.02            # largest acceptable share of the machine's time used by other processes
SWITCHES_PER_SECOND = 50.0      # acceptable rate of involuntary context switches of this process
TICKS_SEEN = 3                  # /proc/stat counts ticks of 10 ms: a difference of fewer ticks counts as 0


@dataclass(frozen=True)
class MachineLoad:
    """The load during `seconds` of wall time. `steal` and `foreign` are fractions of the time of all cores: time taken by other virtual
    machines, and time used by other processes."""

    seconds: float = 0.0
    steal: float = 0.0
    foreign: float = 0.0
    involuntary_switches: int = 0
    load_average: float = 0.0

    @property
    def busy(self) -> str | None:
        """The reason why times from this period cannot be trusted; None if they can."""
        if self.steal > STEAL_LIMIT:
            return f"{100 * self.steal:.0f} % of the machine's time was stolen by other virtual machines"
        if self.foreign > FOREIGN_LIMIT:
            return f"other processes used {100 * self.foreign:.0f} % of the machine"
        if self.involuntary_switches > 5 + SWITCHES_PER_SECOND * self.seconds:
            return f"the process lost its core {self.involuntary_switches} times in {self.seconds:.2f} s"
        return None


@dataclass(frozen=True)
class MachineState:
    """One reading of the counters, in seconds from an arbitrary start."""

    wall: float
    steal: float                # sum over all cores
    used: float                 # sum over all cores and processes
    own: float                  # processor seconds of this process and its ended children
    involuntary_switches: int
    load_average: float
    cores: int
    tick: float                 # resolution of steal and used, seconds

    def since(self, before: MachineState) -> MachineLoad:
        """The load between `before` and this reading."""
        wall = self.wall - before.wall
        capacity = max(wall * self.cores, 1e-9)
        least = TICKS_SEEN * self.tick
        steal, foreign = self.steal - before.steal, self.used - before.used - (self.own - before.own)
        return MachineLoad(wall, steal / capacity if steal >= least else 0.0, foreign / capacity if foreign >= least else 0.0,
                           self.involuntary_switches - before.involuntary_switches, self.load_average)


Watch = Callable[[], Callable[[], MachineLoad]]
"""It is called when a batch begins; the function it returns is called when the batch ends."""


def read_machine(stat: Path = Path("/proc/stat"), processes: Sequence[int] = ()) -> MachineState:
    """Read the counters now. The time of `processes`, children that work for this process, counts as this process's own. Without
    /proc/stat, stolen time and the time of other processes count as 0."""
    tick = 1.0 / os.sysconf("SC_CLK_TCK")
    usage, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    own = usage.ru_utime + usage.ru_stime + ended.ru_utime + ended.ru_stime + sum(_used_by(p, tick) for p in processes)
    try:
        # fields: cpu user nice system idle iowait irq softirq steal …; see proc(5)
        fields = [int(f) * tick for f in stat.read_text().split("\n", 1)[0].split()[1:9]]
        used, steal = sum(fields[:3]) + sum(fields[5:7]), fields[7]
    except (OSError, ValueError, IndexError):
        used, steal = own, 0.0
    load, _, _ = os.getloadavg()
    return MachineState(time.perf_counter(), steal, used, own, usage.ru_nivcsw, load, machine_cores(), tick)


def _used_by(process: int, tick: float) -> float:
    """Seconds of processor time of a process and its ended children; 0 if it has ended."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()    # fields after the process's name; see proc(5)
        return sum(int(f) for f in fields[11:15]) * tick
    return 0.0


def watch_machine(processes: Sequence[int] = ()) -> Callable[[], MachineLoad]:
    """Read the counters now; the returned function reads them again and returns the load in between. The time of `processes` counts as
    this one's."""
    before = read_machine(processes=processes)
    return lambda: read_machine(processes=processes).since(before)
