"""Plans of graphs that were computed before: `(Tensor(x) * 2).numpy()` in a loop schedules and compiles once.

    x * 2 over buffer 7      key: ((BUFFER, 32), (RESHAPE, (4, 8), 0), (MUL, 1, <constant 2>))
    y * 2 over buffer 9      the same key: that plan, over the memory of 9 and a new result
    x[:n=3], x[:n=5]         one key, which has the variable n, and one plan, which runs with n = 3 and n = 5

The key numbers buffers by their first appearance. A part of a graph that reads no buffer is itself in the key: equal parts are one node.
A plan is kept if its memory is small and the graph has no effects but its results. With a search, a capture or a dump configured in the
environment, every graph is prepared again.
"""
from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from sys import getrefcount
from threading import Lock

from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.result_memory import ResultMemory
from svod.config import PrepareConfig
from svod.core.graph import graph
from svod.core.graph.allocator import OWN_BLOCK_BYTES
from svod.core.graph.buffer import Array, buffer_of
from svod.core.graph.shapes import shape_of
from svod.core.graph.storage import base_of
from svod.core.graph.traits import EFFECTS, HAS_BUFFERS, VARIABLES, traits_of
from svod.core.ir.uop import Ops, UOp, intern_arg
from svod.core.ir.variable import is_symbolic, without_binds
from svod.errors import LaunchError
from svod.prepare import Prepared, complete_config, prepare_graph
from svod.system.forksafe import remake_after_fork
from svod.tensor.base import TensorBase, forget_pending
from svod.tensor.replacement import Computing
from svod.tune.resolved import resolve

MOST_PLANS = 64         # most plans that are kept; the least recently used one is dropped first

_plans: OrderedDict[Hashable, _Kept] = OrderedDict()
_lock = Lock()
remake_after_fork(sys.modules[__name__], "_lock", Lock)
remake_after_fork(sys.modules[__name__], "_plans", OrderedDict)     # a plan that ran during the fork cannot be run in the child


def realize_tensors(tensors: Sequence[TensorBase], config: PrepareConfig | None = None) -> None:
    """Compute the tensors now. A reshaped BUFFER replaces each computed node in every live tensor that contains it. All other memory of
    the plan is freed, unless the plan is kept. Raises SvodError."""
    asked, config = config, complete_config(config)
    with Computing(tensors, only_pending=True) as work:
        if work.tensors:
            _realize(work.tensors, work, config, asked is None)


def _realize(tensors: Sequence[TensorBase], work: Computing, config: PrepareConfig, may_keep: bool) -> None:
    roots = work.roots
    unbound, values = _without_binds(roots)
    if values is None or not may_keep or not _may_keep(roots, config):
        prepared = prepare_graph(roots, resolve(config))
        prepared.plan.execute()
        prepared.attach(work)
        return
    key, buffers = key_of(unbound)
    key = id(config), key           # `id(config)` is enough: the environment's configuration is one object, which the plan keeps alive
    with _lock:
        kept = _plans.get(key)
        if kept is not None:
            _plans.move_to_end(key)
    try:
        if kept is not None and kept.run(tensors, work, buffers, values):
            return
    except LaunchError:     # its device may be lost: preparing again finds another device, or reports the cause
        with _lock:
            _plans.pop(key, None)
    resolved = resolve(config)
    prepared = prepare_graph(roots, resolved, inputs=frozenset(buffers))
    if kept is None and _is_small(prepared):
        kept = _Kept(prepared, [shape_of(base_of(r)) for r in roots], buffers, config)
        with _lock:
            _plans[key] = kept
            while len(_plans) > MOST_PLANS:
                _plans.popitem(last=False)
        if kept.run(tensors, work, buffers, values):
            return
        prepared = prepare_graph(roots, resolved, inputs=frozenset(buffers))
    _bind(prepared.plan, [prepared.numbers.get(b) for b in buffers], buffers)
    prepared.plan.execute()
    prepared.attach(work)


def key_of(roots: Sequence[UOp]) -> tuple[Hashable, list[UOp]]:
    """The key that equal graphs over different buffers share, and their BUFFERs in the key's order. Not for graphs with EFFECTS, or with
    bound variables."""
    places: dict[UOp, int | UOp] = {}       # value: position of the node's entry in the key, or the node itself if it reads no buffer
    entries: list[tuple[object, ...]] = []
    buffers: list[UOp] = []
    whole = roots[0] if len(roots) == 1 else graph.sink(*roots)
    for u in whole.toposort(gate=_reads_beyond):
        if u.op is Ops.SINK:
            continue
        if not traits_of(u) & HAS_BUFFERS:
            places[u] = u
            continue
        places[u] = len(entries)
        if u.op is Ops.BUFFER:
            buffers.append(u)
            entries.append((u.dtype.name, u.arg, u.src[1].arg))
        else:
            entries.append((u.op, u.dtype.name, intern_arg(u.arg), *[places[s] for s in u.src]))
    return (tuple(entries), tuple([places[r] for r in roots])), buffers


def _reads_beyond(u: UOp) -> bool:
    return u.op is Ops.SINK or (u.op is not Ops.BUFFER and bool(traits_of(u) & HAS_BUFFERS))


def _may_keep(roots: Sequence[UOp], config: PrepareConfig) -> bool:
    """Whether a kept plan may be run for an equal graph: no search, capture, debug output or dump, and no effects."""
    alone = config.beam is None and config.capture is None and not config.debug and config.dump_after is None
    return alone and not config.disable_schedule_cache and not any(traits_of(r) & EFFECTS for r in roots)


def _without_binds(roots: Sequence[UOp]) -> tuple[Sequence[UOp], dict[str, int] | None]:
    """The roots with variables in place of bound ones, and the values of these by name; None if a variable has no value."""
    if not any(traits_of(r) & VARIABLES for r in roots):
        return roots, {}
    whole, values, declared = without_binds(graph.sink(*roots))
    return whole.src, values if values.keys() == declared.keys() else None


def _is_small(prepared: Prepared) -> bool:
    """Whether the plan's memory is small and all outputs are new. For large graphs, preparing takes little time compared to the
    computation."""
    plan = prepared.plan
    made = sum(b.nbytes for b in plan.buffers if b.has_memory)
    return made + plan.memory.shared + plan.memory.kept < OWN_BLOCK_BYTES and all(map(prepared.is_new, prepared.unbound.outputs))


def _bind(plan: ExecutionPlan, numbers: Sequence[int | None], buffers: Sequence[UOp]) -> None:
    for number, node in zip(numbers, buffers, strict=True):
        if number is not None:
            plan.bindings.bind_buffer(number, buffer_of(node))


class _Kept:
    """A plan that is run again over other buffers, with new memory for its results."""

    def __init__(self, prepared: Prepared, shapes: Sequence[tuple[int, ...]], buffers: Sequence[UOp], config: PrepareConfig) -> None:
        self.plan, self.config = prepared.plan, config
        self.inputs = [prepared.numbers.get(b) for b in buffers]
        self.outputs = prepared.unbound.outputs
        self.memory = {}
        for i, shape in dict(zip(self.outputs, shapes, strict=True)).items():
            spec = prepared.unbound.buffers[i]
            self.memory[i] = ResultMemory((spec.size,) if is_symbolic(shape) else shape, spec.dtype)
        self.made = {i: (prepared.unbound.buffers[i].dtype, prepared.unbound.buffers[i].size, prepared.device_of(i)) for i in self.memory}
        self.plan.keep, self.plan.writes = None, ()
        self.plan.bindings.release(self.outputs)

    def run(self, tensors: Sequence[TensorBase], work: Computing, buffers: Sequence[UOp], values: Mapping[str, int]) -> bool:
        """Compute the tensors, with the values of variables by name. Returns False without computing if another thread is running the
        plan."""
        plan = self.plan
        if not plan.lock.acquire(blocking=False):
            return False
        try:
            _bind(plan, self.inputs, buffers)
            arrays: dict[int, Array] = {}
            made: dict[int, UOp] = {}
            for number, memory in self.memory.items():
                if not plan.is_local:
                    made[number] = graph.buffer(*self.made[number])
                    plan.bindings.bind_buffer(number, buffer_of(made[number]))
                    continue
                arrays[number], _, address = memory.take({}, number)
                plan.bindings.bind_new(number, arrays[number], address)
            if plan.variables:
                plan.set_variables({name: n for name, n in values.items() if name in plan.variables})
            plan.execute()
            plan.bindings.release()
        finally:
            plan.lock.release()
        roots = work.roots
        if arrays and len(tensors) == 1 and not is_symbolic(shape_of(roots[0])) and _holds_alone(tensors[0], roots):
            tensors[0]._become_memory(arrays[self.outputs[0]], roots[0].dtype, shared=False)
            forget_pending(tensors[0])
            return True
        for number, array in arrays.items():
            made[number] = graph.buffer(*self.made[number])
            buffer_of(made[number]).bind(array.reshape(-1))
        bases = [base_of(r) for r in roots]
        work.replace({b: graph.storage_view(made[i], shape_of(b)) for b, i in zip(bases, self.outputs, strict=True)})
        return True


# references to a node with one tensor: by the tensor, the list of roots, key and value of `Computing`, the variable `node`, and
# getrefcount's argument
_HOLDERS = 6


def _holds_alone(tensor: TensorBase, roots: Sequence[UOp]) -> bool:
    """Whether the only root is referenced by this tensor alone; then no other tensor has to be updated with the computed node."""
    node = roots[0]
    return getrefcount(node) == _HOLDERS and tensor._node is node and base_of(node) is node
