"""Checks a schedule before it is used: it is plain data, which may have been written or changed by hand.

    0: a → x    1: x → y, deps (0,)                 in order
    0: x → y, deps (1,)    1: a → x                 refused: call 0 waits for call 1, which comes after it
    0: a → x, deps (1,)    1: x → y, deps (0,)      refused: a cycle
    0: a → x    1: x → y                            refused: call 1 reads the buffer that call 0 writes, and does not wait for it

The check goes over the calls in order. Calls run level by level, so of two calls that depend on each other, the later one must not be on
an earlier level; only where a call is on a level no higher than one before it that uses the same buffer, are the parts of the buffer that
both use compared. Whether two calls of one level write the same part of a buffer is checked by the plan.
"""
from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.levels import levels_of, named
from svod.core.schedule.regions import Region, are_disjoint, regions_of
from svod.core.schedule.schedule import KernelCall, Schedule
from svod.errors import ScheduleError


@dataclass
class _Accesses:
    """The calls so far that read a buffer, or write it: (call, slot), and the highest of their levels."""

    slots: list[tuple[int, int]]
    highest: int = -1

    def conflict(self, calls: Sequence[KernelCall], levels: Sequence[int], least: int, i: int, slot: int) -> int | None:
        """A call on level `least` or above that accesses elements that call `i` accesses through `slot`; None if there is none."""
        if self.highest < least:
            return None
        mine = _region(calls[i], slot)
        return next((other for other, at in self.slots if other != i and levels[other] >= least
                     and not are_disjoint(_region(calls[other], at), mine)), None)


def check_schedule(schedule: Schedule) -> list[int]:
    """Check a schedule; returns the level of each call.

    Raises ScheduleError, which names the call, as `levels_of` does; if arguments are not one buffer per slot; for a buffer that is read, or
    is an output, but never written; and for two calls without a dependency of which one reads or overwrites a result of the other."""
    calls = schedule.calls
    levels = levels_of(calls)
    written: dict[UOp, _Accesses] = {}
    read: dict[UOp, _Accesses] = {}
    for i, call in enumerate(calls):
        outs, slots = call.ast.cached("slots of a call", _slots)
        if len(call.args) != slots or len(call.offsets) != slots:
            raise ScheduleError(f"{named(calls, i)} has {len(call.args)} arguments and {len(call.offsets)} offsets; its kernel takes "
                                f"{slots}: give one of each per slot")
        for slot, buffer in enumerate(call.args):
            if buffer.op is not Ops.BUFFER:
                raise ScheduleError(f"slot {slot} of {named(calls, i)} is {buffer.op.value}; arguments of calls are BUFFERs")
            if slot in outs:        # separate parts of a buffer may be read and written in any order
                other = read[buffer].conflict(calls, levels, levels[i], i, slot) if buffer in read else None
                if other is not None:
                    raise _unordered(calls, i, "writes", other, "reads")
                other = written[buffer].conflict(calls, levels, levels[i] + 1, i, slot) if buffer in written else None
                if other is not None:
                    raise _unordered(calls, i, "writes", other, "writes")
            elif buffer in written:
                other = written[buffer].conflict(calls, levels, levels[i], i, slot)
                if other is not None:
                    raise _unordered(calls, i, "reads", other, "writes")
            elif buffer.src[0].op is Ops.LUNIQUE:
                raise ScheduleError(f"a buffer is not found: {named(calls, i)} reads number {buffer.src[0].arg} of the schedule's own "
                                    "buffers, which no call before it writes")
        for slot, buffer in enumerate(call.args):
            accesses = (written if slot in outs else read).setdefault(buffer, _Accesses([]))
            accesses.slots.append((i, slot))
            accesses.highest = max(accesses.highest, levels[i])
    _check_outputs(schedule, written)
    return levels


def _check_outputs(schedule: Schedule, written: Container[UOp]) -> None:
    """Raise ScheduleError for an output that is not a BUFFER, or is a buffer of the schedule that no call writes."""
    for place, buffer in enumerate(schedule.outputs):
        if buffer.op is not Ops.BUFFER:
            raise ScheduleError(f"output {place} of a schedule is {buffer.op.value}; outputs are BUFFERs")
        if buffer.src[0].op is Ops.LUNIQUE and buffer.arg and buffer not in written:
            raise ScheduleError(f"a buffer is not found: output {place} of a schedule is number {buffer.src[0].arg} of its own buffers, "
                                "which no call writes")


def _slots(ast: UOp) -> tuple[frozenset[int], int]:
    """(slots that a kernel stores to, number of slots)."""
    if ast.op is not Ops.SINK or not ast.src or any(s.op is not Ops.STORE for s in ast.src):
        raise ScheduleError("the kernel of a call of a schedule is a SINK of STOREs, as in docs/ir.md, section 2")
    return frozenset(s.src[0].src[0].arg.slot for s in ast.src), 1 + max(p.arg.slot for p in ast.walk(Ops.PARAM))


def _region(call: KernelCall, slot: int) -> Region:
    """The region of its argument's buffer that a call accesses through a slot."""
    region: Region = regions_of(call.ast)[slot]
    return region.moved(call.offsets[slot])


def _unordered(calls: Sequence[KernelCall], i: int, does: str, other: int, did: str) -> ScheduleError:
    return ScheduleError(f"{named(calls, i)} {does} a buffer that {named(calls, other)}, before it, {did}, and does not wait for it: put "
                         f"{other} among its deps")
