"""Caches schedules in this process. The key is a digest of the graph that leaves out which buffers it has.

    SINK(x@b7 + y@b9, x@b7 * 2)     normalised: #0 + #1, #0 * 2          digest → Schedule over #0, #1 and new buffers
    SINK(u@b31 + v@b40, u@b31 * 2)  the same digest: that Schedule with b31 for #0 and b40 for #1

Normalising numbers BUFFERs (and UNIQUEs) by their first appearance and forgets their ids. The digest covers all that a schedule can depend
on: every node's operation, dtype, argument and sources, the size, device and constness of each buffer, which uses share a buffer, and the
origins of nodes, as calls name them.

Kernels keep their ASTs, which name arguments by slot. Only the arguments and outputs of a schedule are restored: a numbered buffer becomes
the caller's, a buffer that the schedule made stays its LUNIQUE, from which `prepare` makes new memory for every plan.
"""
from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from dataclasses import replace
from threading import Lock

from svod.core.ir.origin import origin_of
from svod.core.ir.uop import Ops, UOp, encode
from svod.core.schedule.schedule import Schedule, create_schedule
from svod.system.forksafe import remake_after_fork

MOST_SCHEDULES = 256    # most schedules kept; the oldest entry goes first

_Places = tuple[int | UOp, ...]     # per buffer: its number in the graph, or the node itself if the schedule has created it

# digest → (schedule without buffers, outputs, arguments)
_schedules: OrderedDict[bytes, tuple[Schedule, _Places, tuple[_Places, ...]]] = OrderedDict()
_lock = Lock()
remake_after_fork(sys.modules[__name__], "_lock", Lock)


def schedule_of(sink: UOp, constants: frozenset[UOp] = frozenset(), *, remember: bool = True) -> Schedule:
    """Like `create_schedule`, but reuses the schedule of a graph that differs only in its buffers. `remember` False: the cache is not used.

    Raises ScheduleError as that does; failures are not cached."""
    if not remember:
        return create_schedule(sink, constants, remember=False)
    digest, buffers = normal_form(sink, constants)
    with _lock:
        known = _schedules.get(digest)
    if known is None:
        schedule = create_schedule(sink, constants)
        number = {b: i for i, b in enumerate(buffers)}
        outputs = tuple(number.get(b, b) for b in schedule.outputs)
        arguments = tuple(tuple(number.get(b, b) for b in call.args) for call in schedule.calls)
        bare = replace(schedule, calls=tuple(replace(call, args=()) for call in schedule.calls), outputs=())
        with _lock:
            _schedules[digest] = bare, outputs, arguments
            while len(_schedules) > MOST_SCHEDULES:
                _schedules.popitem(last=False)
        return schedule

    def restored(places: _Places) -> tuple[UOp, ...]:
        return tuple(buffers[b] if isinstance(b, int) else b for b in places)
    bare, outputs, arguments = known
    calls = tuple(replace(call, args=restored(args)) for call, args in zip(bare.calls, arguments, strict=True))
    return replace(bare, calls=calls, outputs=restored(outputs))


def normal_form(sink: UOp, constants: frozenset[UOp] = frozenset()) -> tuple[bytes, tuple[UOp, ...]]:
    """(digest of 16 bytes that is equal for graphs that differ only in their buffers, the BUFFERs by number)."""
    h = hashlib.blake2b(digest_size=16)
    position: dict[UOp, int] = {}
    buffers: list[UOp] = []
    for u in sink.toposort():
        position[u] = len(position)
        arg: object = u.arg
        if u.op is Ops.UNIQUE or u.op is Ops.LUNIQUE:
            arg = None      # its position in the order identifies it
        elif u.op is Ops.BUFFER:
            buffers.append(u)
            arg = (u.arg, u in constants)
        h.update(b"%b|%b|%b|%b|%b;" % (u.op.value.encode(), u.dtype.name.encode(), encode(arg), encode(tuple([position[s] for s in u.src])),
                                       encode(origin_of(u))))
    return h.digest(), tuple(buffers)
