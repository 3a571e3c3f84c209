"""Connects tensors with the compiler: finds the tensors that have to be computed. No other module of svod.tensor calls the compiler.

The pipeline (`PIPELINE`, `GRAPHS`) is in a higher layer, so it is imported at the first realisation. It replaces the node of each computed
tensor by a RESHAPE of a BUFFER (svod/tensor/replacement.py). From then on, every tensor that contains the node reads the buffer.
"""
from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from svod.core.graph import graph
from svod.core.graph.buffer import buffer_of
from svod.core.graph.callback import call_of, is_callback
from svod.core.graph.storage import base_of, history_of, is_made_anew, storage_of
from svod.core.graph.traits import EFFECTS, traits_of
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.calls import arguments_of, open_ranges, written_slots
from svod.errors import ArgumentError, ScheduleError
from svod.system.forksafe import remake_after_fork
from svod.tensor.base import TensorBase, live_tensors, pending_tensors

PIPELINE = "svod.prepare"           # the module that makes plans of tensors
GRAPHS = "svod.tracing.graphs"      # the module that computes tensors, and reuses plans of equal graphs

_here = threading.local()       # `assigned`: this thread's innermost record of `assignments`
_records: dict[int, dict[int, tuple[TensorBase, UOp]]] = {}        # the records of all threads, by id
remake_after_fork(sys.modules[__name__], "_records", dict)      # the other threads do not exist in the child


@contextmanager
def assignments() -> Iterator[dict[int, tuple[TensorBase, UOp]]]:
    """Record the tensors that this thread assigns to inside the block: id → (tensor, its node before)."""
    outer = getattr(_here, "assigned", None)
    record: dict[int, tuple[TensorBase, UOp]] = {}
    _here.assigned = _records[id(record)] = record
    try:
        yield record
    finally:
        _here.assigned = outer
        _records.pop(id(record), None)


def storages_in_assignments() -> set[UOp]:
    """The BUFFERs that any thread has assigned to inside a block of `assignments` that it has not left."""
    tensors = [t for record in list(_records.values()) for t, _ in list(record.values())]
    return {storage_of(base) for t in tensors if (base := base_of(t.uop)).op is Ops.AFTER}


def note_assignment(tensor: TensorBase) -> None:
    """Record that an assignment is about to change the node of `tensor`."""
    assigned = getattr(_here, "assigned", None)
    if assigned is not None:
        assigned.setdefault(id(tensor), (tensor, tensor.uop))


def constant_value(node: UOp) -> UOp | None:
    """The CONST that all elements of `node` are equal to; None if it is not a constant."""
    while node.op in (Ops.RESHAPE, Ops.EXPAND, Ops.PERMUTE, Ops.DETACH):
        node = node.src[0]
    return node if node.op is Ops.CONST else None


def is_realized(tensor: TensorBase) -> bool:
    """Whether the values are in memory: the node is a reshaped buffer, or there is an array instead of a node."""
    return tensor._memory is not None or base_of(tensor.uop).op is Ops.BUFFER


def realize_tensors(tensors: Iterable[TensorBase], config: Any = None) -> None:
    """Compute every tensor that is neither in memory nor a constant, in one schedule and in the given order."""
    pending = _pending(_tensors("realize_batch", tensors))
    if pending:
        import_module(GRAPHS).realize_tensors(pending, config)
    elif config is not None:
        import_module(PIPELINE).complete_config(config)       # raise for an invalid config although nothing is computed


def device_called(name: str) -> str:
    """The name in graphs of the device that a user calls `name`: "cuda" is "CUDA:0". Raises UnsupportedError for a device without a
    backend, and DeviceError for a device that this machine lacks."""
    return str(import_module(PIPELINE).device_called(name))


def space_of(device: str) -> Any:
    """The backend that allocates memory of a device."""
    return import_module(PIPELINE).space_of(device)


def prepare_tensors(tensors: Iterable[TensorBase], config: Any, constants: Iterable[TensorBase]) -> Any:
    """The ExecutionPlan that computes the tensors, which become its outputs. Other tensors that read memory which the plan overwrites
    are computed now."""
    wanted, fixed = _tensors("prepare_batch", tensors), _tensors("constants=", constants)
    mine = {id(t) for t in wanted}
    nodes = [t.uop for t in wanted]
    readers = [t for t in _readers_of_old_content(nodes) if id(t) not in mine]
    calls = calls_under(nodes)
    together = [t for t in readers if calls and not calls.isdisjoint(calls_under([t.uop]))]
    if together:
        raise ScheduleError(f"prepare: another tensor, of shape {together[0].shape}, is written by the same call_kernel or reads its "
                            "result: prepare them in one batch")
    if readers:
        realize_tensors(readers)
    return import_module(PIPELINE).prepare_tensors(wanted, config, fixed)


def _tensors(name: str, given: Iterable[TensorBase] | TensorBase) -> list[TensorBase]:
    """The given tensors as a list. Raises ArgumentError, which names `name`, for a value that is not a tensor."""
    tensors: list[TensorBase] = [given] if isinstance(given, TensorBase) or not isinstance(given, Iterable) else list(given)
    for t in tensors:
        if not isinstance(t, TensorBase):
            raise ArgumentError(f"{name} takes tensors in a list, got {type(t).__name__}")
    return tensors


def _pending(tensors: Iterable[TensorBase]) -> list[TensorBase]:
    """The tensors to compute, each once, including further results of the Python functions that are called for them, and tensors that
    read content which an ASSIGN among them overwrites."""
    pending: dict[int, TensorBase] = {}
    for t in tensors:
        if not is_realized(t) and constant_value(t.uop) is None:
            pending.setdefault(id(t), t)
    if not any(traits_of(t.uop) & EFFECTS for t in pending.values()):
        return list(pending.values())
    for t in _results_of_calls([t.uop for t in pending.values()]):
        pending.setdefault(id(t), t)
    before = -1
    while len(pending) > before:      # repeated, because a tensor computed for its old content may contain an ASSIGN itself
        before = len(pending)
        for t in _readers_of_old_content([t.uop for t in pending.values()]):
            pending.setdefault(id(t), t)
    return list(pending.values())


def last_contents(nodes: Iterable[UOp]) -> dict[UOp, UOp]:
    """For each existing buffer that computing `nodes` assigns to: the AFTER of its last assignment, and its BUFFER."""
    contents = list(graph.sink(*nodes).walk(Ops.AFTER))
    inner = {c.src[0] for c in contents}
    return {c: storage_of(c) for c in contents if c not in inner and not is_made_anew(storage_of(c))}


def _readers_of_old_content(nodes: list[UOp]) -> list[TensorBase]:
    """Live lazy tensors that have to be computed together with `nodes`: readers of the old content of a buffer that `nodes` assign to, and
    further results of a CALL among `nodes`.

    A reader of old content was made before the assignment. It is computed in the same schedule, which orders its reads before the write.
    Further results of a CALL are computed at once, because the CALL must not run twice."""
    last = last_contents(nodes)
    calls = calls_under(nodes)
    if not last and not calls:
        return []
    overwritten = set(last.values())
    for call in calls:
        written = (storage_of(arguments_of(call)[slot]) for slot in written_slots(call))
        overwritten.update(s for s in written if not is_made_anew(s))
    readers = []
    for t in pending_tensors():
        reached = t.uop.toposort(gate=lambda n: n not in last)
        in_a_loop = calls and open_ranges(t.uop.toposort())[t.uop]  # it depends on a loop's counter, so it has no value outside of the loop
        if t.uop not in last and any(n in overwritten or n in calls for n in reached) and not in_a_loop:
            readers.append(t)
    return readers


def _results_of_calls(nodes: list[UOp]) -> list[TensorBase]:
    """Live tensors that are results of the Python functions that computing `nodes` calls."""
    calls = {call_of(u) for u in graph.sink(*nodes).walk(Ops.CUSTOM_FUNCTION) if is_callback(u)}
    if not calls:
        return []
    return [t for t in pending_tensors() if is_callback(base := base_of(t.uop)) and call_of(base) in calls]


def calls_under(nodes: Iterable[UOp]) -> set[UOp]:
    """The CALLs that are run to compute `nodes`."""
    return set(graph.sink(*nodes).walk(Ops.CALL))


def is_writable(content: UOp) -> bool:
    """Whether the memory under a BUFFER or AFTER may be written."""
    storage = storage_of(content)
    return is_made_anew(storage) or not buffer_of(storage).read_only


def latest_content(content: UOp) -> UOp:
    """The content of the same storage after its last assignment so far, found among live tensors over this storage."""
    storage, latest = history_of(content)
    for t in live_tensors():
        base = base_of(t.uop)
        if base.op in (Ops.BUFFER, Ops.AFTER) and storage_of(base) is storage:
            _, version = history_of(base)
            if version > latest:
                content, latest = base, version
    return content
