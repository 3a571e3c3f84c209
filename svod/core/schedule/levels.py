"""Orders calls by their dependencies, and computes the level of each call of a schedule: calls of one level are independent of each other.

    0: a → x    1: b → y    2: x, y → z, deps (0, 1)        levels 0, 0, 1
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from typing import Protocol

from svod.errors import ScheduleError


class DependentCall(Protocol):
    """A call that runs after the calls at the indices `deps`. `name_hint` names it in error messages."""

    @property
    def deps(self) -> tuple[int, ...]: ...
    @property
    def name_hint(self) -> str: ...


def order_of(deps: Sequence[Collection[int]]) -> list[int]:
    """The numbers 0, 1, … in topological order: each comes after the numbers in its entry of `deps`; otherwise small numbers first. Numbers
    in a cycle, or after one, are left out."""
    sequence: list[int] = []
    sorter = TopologicalSorter(dict(enumerate(deps)))
    with suppress(CycleError):      # it still sorts the numbers that are in no cycle
        sorter.prepare()
    ready = sorted(sorter.get_ready())
    while ready:
        sequence.append(heappop(ready))
        sorter.done(sequence[-1])
        for i in sorter.get_ready():
            heappush(ready, i)
    return sequence


def levels_of(calls: Sequence[DependentCall]) -> list[int]:
    """The level of each call: the length of the longest chain of calls that it depends on.

    Raises ScheduleError, which names the call, for a dependency on a missing or later call, and for a cycle."""
    levels: list[int] = []
    for i, call in enumerate(calls):
        level = 0
        for d in call.deps:
            if not 0 <= d < i:
                raise _bad_dependency(calls, i, d)
            if levels[d] >= level:
                level = levels[d] + 1
        levels.append(level)
    return levels


def named(calls: Sequence[DependentCall], i: int) -> str:
    """The name of call `i` in error messages."""
    return f"call {i} ({calls[i].name_hint or 'without a name'})"


def _bad_dependency(calls: Sequence[DependentCall], i: int, d: int) -> ScheduleError:
    if not 0 <= d < len(calls):
        return ScheduleError(f"{named(calls, i)} depends on call {d}, which is unknown; the schedule has {len(calls)}, numbered from 0")
    known = range(len(calls))
    waiting = {k: {e for e in calls[k].deps if e in known} for k in known}
    while free := [k for k, deps in waiting.items() if deps.isdisjoint(waiting)]:
        for k in free:
            del waiting[k]
    if not waiting:
        return ScheduleError(f"{named(calls, i)} depends on {named(calls, d)}, which comes after it; put calls in an order that can run")
    k, path = next(iter(waiting)), [next(iter(waiting))]
    while (k := min(waiting[k] & waiting.keys())) not in path:
        path.append(k)
    return ScheduleError("calls depend on each other in a cycle: " + ", which waits for ".join(named(calls, c)
                                                                                          for c in (*path[path.index(k):], k)))
