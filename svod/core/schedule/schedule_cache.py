"""Caches schedules in this process, and those of models on disk. The key is a digest of the graph that leaves out which buffers it has.

    SINK(x@b7 + y@b9, x@b7 * 2)     normalised: #0 + #1, #0 * 2          digest → Schedule over #0, #1 and new buffers
    SINK(u@b31 + v@b40, u@b31 * 2)  the same digest: that Schedule with b31 for #0 and b40 for #1

Normalising numbers BUFFERs (and UNIQUEs) by their first appearance and forgets their ids. The digest covers all that a schedule can depend
on: every node's operation, dtype, argument and sources, the size, device and constness of each buffer, which uses share a buffer, and which
nodes share an origin. Origins are numbered too, so that lines of a script may move, and the script itself. A schedule depends on no target,
option or variable of the environment.

Kernels keep their ASTs, which name arguments by slot. Only the arguments, outputs and origins of a schedule are restored: a numbered buffer
or origin becomes the caller's, a buffer that the schedule made stays its LUNIQUE, from which `prepare` makes new memory for every plan.

On disk a schedule is JSON: its ASTs and the buffers that it made, as one table of nodes, and the calls, which name them by position. One
that calls functions of Python is not written: their numbers identify them in this process alone.
"""
from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple, Protocol

from svod.core.graph.callback import functions_of
from svod.core.ir.dtype import dtypes
from svod.core.ir.origin import origin_of
from svod.core.ir.serialize import ast_to_data, data_to_ast
from svod.core.ir.uop import Ops, UOp, encode
from svod.core.schedule.cut import BY_RULES, Deviations
from svod.core.schedule.schedule import KernelCall, Schedule, create_schedule
from svod.errors import FormatError
from svod.system.forksafe import remake_after_fork

MOST_SCHEDULES = 256    # most schedules kept in memory; the oldest entry goes first
LEAST_BUFFERS = 16      # least number of buffers of a graph whose schedule is kept on disk: that of a model

_Places = tuple[int | UOp, ...]     # per buffer: its number in the graph, or the node itself if the schedule has created it


class NormalForm(NamedTuple):
    """A graph without its identity. `digest`: 16 bytes that are equal for graphs that differ only in their buffers and in the names of
    their origins; `buffers`, `origins`: the BUFFERs and the origins by number."""

    digest: bytes
    buffers: tuple[UOp, ...]
    origins: tuple[str, ...]


class _Known(NamedTuple):
    """A schedule without its buffers and origins, which stand apart: `outputs`, and for each call `arguments` and `origins`. An origin is
    its number in the graph, or "" for a call without one."""

    bare: Schedule
    outputs: _Places
    arguments: tuple[_Places, ...]
    origins: tuple[int | str, ...]


class Keeper(Protocol):
    """Keeps JSON-able data by name for later processes that run the same code of svod."""

    def lacks(self, name: str) -> bool:
        """Whether `keep` would add an entry."""

    def kept(self, name: str) -> Any:
        """Return the data of a name; None if there is none."""

    def keep(self, name: str, data: Any) -> None:
        """Keep the data under a name, if that is possible."""


_schedules: OrderedDict[bytes, _Known] = OrderedDict()      # digest of a graph → its schedule
_lock = Lock()
remake_after_fork(sys.modules[__name__], "_lock", Lock)


def by_rules() -> Deviations:
    """No deviations."""
    return BY_RULES


def schedule_of(sink: UOp, constants: frozenset[UOp] = frozenset(), deviating: str = "", deviations: Callable[[], Deviations] = by_rules, *,
                remember: bool = True, keeper: Keeper | None = None) -> Schedule:
    """Like `create_schedule`, but reuses the schedule of a graph that differs only in its buffers. `deviating` identifies what the schedule
    does otherwise than by the rules, which `deviations` finds if it is not cached. `remember` False: the cache is not used. `keeper`: has
    the schedules of earlier processes.

    Raises ScheduleError as that does; failures are not cached."""
    if not remember:
        return create_schedule(sink, constants, deviations(), remember=False)
    form = normal_form(sink, constants)
    if deviating:
        form = form._replace(digest=hashlib.blake2b(form.digest + deviating.encode(), digest_size=16).digest())
    if len(form.buffers) < LEAST_BUFFERS or (keeper is not None and functions_of(sink)):
        keeper = None
    with _lock:
        known = _schedules.get(form.digest)
    if known is not None:
        if keeper is not None and keeper.lacks(form.digest.hex()):      # it was made for another keeper, or for none
            keeper.keep(form.digest.hex(), _to_data(known))
    else:
        known = _made_or_kept(sink, constants, form, deviations, keeper)
        with _lock:
            _schedules[form.digest] = known
            while len(_schedules) > MOST_SCHEDULES:
                _schedules.popitem(last=False)
    return _restored(known, form)


def _made_or_kept(sink: UOp, constants: frozenset[UOp], form: NormalForm, deviations: Callable[[], Deviations],
                  keeper: Keeper | None) -> _Known:
    """The schedule that `keeper` has, or a new one, which it then keeps."""
    name = form.digest.hex()
    if keeper is not None and (data := keeper.kept(name)) is not None:
        try:
            known = _from_data(data)
            _restored(known, form)
        except (FormatError, LookupError, TypeError, ValueError):
            pass        # the data of an entry that another program wrote: the schedule is made, and the entry is replaced
        else:
            return known
    known = _taken_apart(create_schedule(sink, constants, deviations()), form)
    if keeper is not None:
        keeper.keep(name, _to_data(known))
    return known


def _taken_apart(schedule: Schedule, form: NormalForm) -> _Known:
    buffer, origin = {b: i for i, b in enumerate(form.buffers)}, {o: i for i, o in enumerate(form.origins)}
    calls = schedule.calls
    return _Known(replace(schedule, calls=tuple(replace(c, args=(), origin="") for c in calls), outputs=()),
                  tuple(buffer.get(b, b) for b in schedule.outputs), tuple(tuple(buffer.get(b, b) for b in c.args) for c in calls),
                  tuple(origin.get(c.origin, c.origin) for c in calls))


def _restored(known: _Known, form: NormalForm) -> Schedule:
    """The schedule with the buffers and origins of a graph. Raises LookupError if it has a number that the graph lacks."""
    def buffers(places: _Places) -> tuple[UOp, ...]:
        return tuple(form.buffers[b] if isinstance(b, int) else b for b in places)
    calls = tuple(replace(call, args=buffers(args), origin=form.origins[origin] if isinstance(origin, int) else origin)
                  for call, args, origin in zip(known.bare.calls, known.arguments, known.origins, strict=True))
    return replace(known.bare, calls=calls, outputs=buffers(known.outputs))


def _to_data(known: _Known) -> dict[str, Any]:
    """JSON-able data, from which `_from_data` makes an equal schedule. A buffer of the graph is a number there, one that the schedule made
    a list with its position in the table of nodes."""
    calls = known.bare.calls
    made = [b for places in (known.outputs, *known.arguments) for b in places if not isinstance(b, int)]
    nodes = list(dict.fromkeys([*(c.ast for c in calls), *(v for c in calls for v in c.variables), *made]))
    position = {u: i for i, u in enumerate(nodes)}

    def data_of(places: _Places) -> list[Any]:
        return [b if isinstance(b, int) else [position[b]] for b in places]
    return {"nodes": ast_to_data(UOp(Ops.SINK, dtypes.void, tuple(nodes))), "outputs": data_of(known.outputs),
            "calls": [[position[c.ast], data_of(args), c.offsets, c.name_hint, origin, c.deps, c.why, [position[v] for v in c.variables]]
                      for c, args, origin in zip(calls, known.arguments, known.origins, strict=True)]}


def _from_data(data: Any) -> _Known:
    """Make the schedule of `_to_data`. Raises FormatError, LookupError, TypeError or ValueError for other data."""
    nodes = data_to_ast(data["nodes"]).src

    def places_of(places: list[Any]) -> _Places:
        return tuple([nodes[b[0]] if isinstance(b, list) else int(b) for b in places])
    calls, arguments, origins = list[KernelCall](), list[_Places](), list[int | str]()
    for ast, args, offsets, name, origin, deps, why, variables in data["calls"]:
        calls.append(KernelCall(nodes[ast], (), tuple(map(int, offsets)), str(name), "", tuple(map(int, deps)), str(why),
                                tuple([nodes[v] for v in variables])))
        arguments.append(places_of(args))
        origins.append(origin if isinstance(origin, int) else str(origin))
    return _Known(Schedule(tuple(calls), ()), places_of(data["outputs"]), tuple(arguments), tuple(origins))


def normal_form(sink: UOp, constants: frozenset[UOp] = frozenset()) -> NormalForm:
    h = hashlib.blake2b(digest_size=16)
    position: dict[UOp, int] = {}
    buffers: list[UOp] = []
    origins: dict[str, int] = {}
    for u in sink.toposort():
        position[u] = len(position)
        arg: object = u.arg
        if u.op is Ops.UNIQUE or u.op is Ops.LUNIQUE:
            arg = None      # its position in the order identifies it
        elif u.op is Ops.BUFFER:
            buffers.append(u)
            arg = (u.arg, u in constants)
        origin = origin_of(u)
        h.update(b"%b|%b|%b|%b|%b;" % (u.op.value.encode(), u.dtype.name.encode(), encode(arg), encode(tuple([position[s] for s in u.src])),
                                       encode(None if origin is None else origins.setdefault(origin, len(origins)))))
    return NormalForm(h.digest(), tuple(buffers), tuple(origins))
