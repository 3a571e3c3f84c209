"""The pass that splits operations on values of several devices into one operation for each device.

    ADD(MSTACK(a on D0, b on D1), MSTACK(c on D0, d on D1))   →   MSTACK(ADD(a, c) on D0, ADD(b, d) on D1)
    MSELECT(MSTACK(x, y), 1)                                  →   y

An operation on MSTACKs is computed part by part, each part on its device. The other operands of such an operation read no memory
(constants, positions), so every device can compute them. The pass comes first in `normalize`: later passes see an MSTACK only as an
argument of a CALL.
"""
from __future__ import annotations

from svod.core.graph.devices import device_of
from svod.core.graph.shapes import shape_of
from svod.core.ir.origin import inherit_origin
from svod.core.ir.uop import Ops, UOp
from svod.errors import ScheduleError

_AS_ARGUMENTS = frozenset({Ops.CALL, Ops.END, Ops.MSTACK})      # operations that take a stack as an argument


def take_stacks_apart(sink: UOp) -> UOp:
    """Return `sink` without MSELECTs and without operations on MSTACKs.

    Raises ScheduleError for an output that is an MSTACK and for MSTACKs with different numbers of parts, ShapeError for an MSELECT of a
    part that does not exist, and DeviceError if an operation has an MSTACK and an operand on another device than one of its parts."""
    order = sink.toposort()
    if not any(u.op is Ops.MSTACK for u in order):
        return sink
    done: dict[UOp, UOp] = {}
    for u in order:
        src = tuple([done[s] for s in u.src])
        stacks = [s for s in src if s.op is Ops.MSTACK]
        if u.op is Ops.MSELECT and stacks:
            shape_of(u)     # raises if the MSTACK has no such part
            done[u] = stacks[0].src[u.arg]
            continue
        if not stacks or u.op in _AS_ARGUMENTS:
            done[u] = u if src == u.src else u.replace(src=src)
        elif u.op is Ops.SINK:
            shape_of(stacks[0])     # raises for an MSTACK whose parts have no common shape
            raise ScheduleError(f"a value of {len(stacks[0].src)} devices is computed part by part: choose one with MSELECT")
        else:
            done[u] = UOp(Ops.MSTACK, u.dtype, tuple([_part(u, src, i) for i in range(_count(u, stacks))]))
        inherit_origin(done[u], u)
    return done[sink]


def _count(u: UOp, stacks: list[UOp]) -> int:
    counts = {len(s.src) for s in stacks}
    if len(counts) > 1:
        raise ScheduleError(f"{u.op.value} of values of {' and '.join(map(str, sorted(counts)))} devices: they need as many parts")
    return counts.pop()


def _part(u: UOp, src: tuple[UOp, ...], i: int) -> UOp:
    part = u.replace(src=tuple([s.src[i] if s.op is Ops.MSTACK else s for s in src]))
    device_of(part)
    inherit_origin(part, u)
    return part
