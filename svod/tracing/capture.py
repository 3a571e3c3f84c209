"""Makes a plan of a function and the arguments of one call: traces it over stand-ins, folds constants, prepares the remaining graph.

    f, (x, w)  →  f(stand-in x, stand-in w) = graph  →  constants folded  →  Captured
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from svod.config import PrepareConfig
from svod.core.graph import graph
from svod.core.graph.buffer import Buffer, buffer_of
from svod.core.graph.callback import is_callback
from svod.core.graph.shapes import shape_of, storage_size
from svod.core.graph.storage import base_of, is_padding_view, storage_of
from svod.core.ir.uop import ELEMENTWISE, MOVEMENT, TRANSCENDENTAL, Ops, UOp, widens
from svod.core.ir.variable import is_symbolic
from svod.core.machine.target import HOST
from svod.errors import SvodError
from svod.prepare import buffers_under, complete_config, computed_now, prepare_graph
from svod.system.process.collector import rare_collections
from svod.tensor import Tensor
from svod.tensor.base import TensorBase, live_tensors
from svod.tensor.operations.random import random_keys
from svod.tensor.realize import assignments, realize_tensors, storages_in_assignments
from svod.tensor.replacement import replace_nodes
from svod.tracing.arguments import is_leaf, mapped, names_of_leaves, structure_of, substitute
from svod.tracing.captured import Captured
from svod.tracing.watch import ReadValues
from svod.tune.resolved import Resolved, resolve

_FOLDED = ELEMENTWISE | {Ops.REDUCE_AXIS, Ops.GEP, Ops.GATHER, Ops.CAT, Ops.CONTIGUOUS, Ops.COPY}
_DEAR = TRANSCENDENTAL | {Ops.BUFFER, Ops.REDUCE_AXIS, Ops.CONTIGUOUS, Ops.COPY}
_CHEAP = 16      # most elementwise operations on positions that are recomputed in each run instead of folded into memory
_OFTEN = 4       # writes to a constant's memory after which it is an input of the plan, no longer folded or packed at capture
_here = threading.local()       # `capturing`: this thread runs a function that is being captured


def is_capturing() -> bool:
    """Whether this thread is inside a function that is being captured."""
    return getattr(_here, "capturing", False)


@contextmanager
def _capturing() -> Iterator[None]:
    _here.capturing = True
    try:
        yield
    finally:
        _here.capturing = False


@rare_collections()
def capture(fn: Callable[..., Any], name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor], config: PrepareConfig | None,
            fresh_numbers: bool, apart: bool = False) -> Captured:
    """Capture a call. `tensors`: the tensors among its arguments, in memory, in order. `fresh_numbers`: random numbers are drawn anew in
    each run. `apart`: no pending assignment is computed, as that of another thread's tensor would be computed twice.

    Raises SvodError for a function that returns no tensor, reads an argument's values, or reads an object that cannot be watched; with
    `apart`, for one that assigns to a tensor or reads a pending assignment."""
    watch = ReadValues(name)
    stand_ins = [_stand_in(t) for t in tensors]
    inputs = [base_of(t.uop) for t in stand_ins]
    for u in inputs:
        if _has_memory(u):
            buffer_of(u).closed = (f"svod.jit: {name} reads the values of an argument while it is captured; compute with tensors only, and "
                                   "pass what decides on the computation as a Python value")
    if not apart:       # compute pending assignments first: the captured graph must not repeat them in each run
        realize_tensors(_assigned_outside_of_captures())
    assigned: dict[int, tuple[TensorBase, UOp]] = {}
    try:
        with _capturing(), random_keys(fresh_numbers) as keys:
            swap = iter(stand_ins)
            with assignments() as assigned:
                result = fn(*substitute(args, swap), **substitute(kwargs, swap))
            effects = [Tensor.from_uop(t.uop) for t, u in assigned.values() if _is_effect(t, u)]
            outputs: list[Tensor] = []
            structure = structure_of(result, outputs)
            if not outputs:
                raise SvodError(f"svod.jit: {name} returned no Tensor, but {type(result).__name__}; "
                                "return the tensors that should be computed")
            if apart and any(graph.sink(*[t.uop for t in (*outputs, *effects)]).walk(Ops.AFTER)):
                raise SvodError(f"svod.jit: {name} assigns to a tensor, or reads one with a pending assignment")
            outputs = [_in_own_layout(t) for t in outputs]
            if keys.node is not None:
                inputs.append(keys.node)
            captured = _prepare(tensors, inputs, structure, outputs, effects, resolve(complete_config(config)), watch, keys.drawn)
    finally:
        for t, u in assigned.values():
            if _is_effect(t, u):
                t.uop = u       # the plan writes that memory in each run; the tensor stays a view of it
    # start to watch after tracing: changes that the function itself makes while it is captured do not count
    watch.follow(fn)
    mapped([*args, *kwargs.values()], lambda v: None if is_leaf(v) else watch.follow(v))
    watch.close()
    captured.changed = watch.changed
    names = names_of_leaves(fn, args, kwargs)
    captured.plan.names = {number: names[i] for i, number in captured.reads if i < len(names)}
    return captured


def _assigned_outside_of_captures() -> list[Tensor]:
    """The live tensors with a pending assignment, without those that functions which other threads capture now have assigned to."""
    captured = storages_in_assignments()
    return [t for t in live_tensors()
            if isinstance(t, Tensor) and (base := base_of(t.uop)).op is Ops.AFTER and storage_of(base) not in captured]


def _stand_in(t: Tensor) -> Tensor:
    """A tensor of the same shape and dtype over a buffer without memory."""
    shape = t.shape
    if is_symbolic(shape):
        return Tensor.from_uop(graph.storage_view(graph.buffer(t.dtype, storage_size(t.uop), t.device), shape))
    return Tensor.from_uop(graph.reshape(graph.buffer(t.dtype, t.numel(), t.device), shape))


def _in_own_layout(t: Tensor) -> Tensor:
    """Copy a result to the dense layout of its own shape if it is a view of an input with variable lengths, which may have the strides
    of other upper bounds."""
    view = is_symbolic(t.shape) and _is_stored(t) and not is_padding_view(t.uop)
    return Tensor.from_uop(graph.copy(t.uop, t.device)) if view else t


def _prepare(tensors: Sequence[Tensor], inputs: list[UOp], structure: Any, outputs: list[Tensor], effects: list[Tensor],
             resolved: Resolved, watch: ReadValues, draws: int) -> Captured:
    """The plan that computes the returned tensors and the assignments of the function."""
    roots = [*outputs, *effects]
    assigned = frozenset(storage_of(a) for t in roots for a in t.uop.walk(Ops.AFTER))
    read = buffers_under([t.uop for t in roots]) - assigned.union(inputs)
    constants = {u for u in read if _stays(buffer_of(u), watch)}
    changing = assigned.union(inputs, read - constants)
    watch.hold([buffer_of(u) for u in constants])
    stored = [_is_stored(t) for t in outputs]
    _fold_constants(roots, changing, resolved)
    # copy folded results: the caller may write to what it gets, and other tensors share the folded memory
    outputs = [t if before or not _is_stored(t) else Tensor.from_uop(graph.copy(t.uop, t.device))
               for t, before in zip(outputs, stored, strict=True)]
    results = [t.uop for t in outputs]
    computed = [t.uop for t in (*outputs, *effects) if not _is_stored(t)]
    fixed = frozenset() if resolved.config.constants == "none" else frozenset(buffers_under(computed)) - changing
    bound = set(inputs)
    for u, t in zip(inputs, tensors, strict=False):     # not strict: `inputs` may have one more, the key of random numbers
        # an assigned argument is an output, and outputs have memory from the start; captured kernels are timed on the call's arguments
        if _has_memory(u) and (u in assigned or resolved.config.capture is not None):
            own = buffer_of(base_of(t.uop))
            if t.device == HOST:
                buffer_of(u).bind(own.array)
            else:
                u.remarks["buffer"] = own
            bound.discard(u)
    captured = Captured(prepare_graph(computed, resolved, fixed, frozenset(bound)), inputs, structure, results, draws)
    if resolved.config.capture is None:
        captured.release_example()
    return captured


def _is_stored(t: Tensor) -> bool:
    return base_of(t.uop).op is Ops.BUFFER


def _stays(buffer: Buffer, watch: ReadValues) -> bool:
    """Whether the content of a buffer may be read once, at capture: writes to it are detected or refused, and have been rare so far."""
    if buffer.version >= _OFTEN:
        return False
    return not buffer.shared or (buffer.given is not None and watch.freeze(buffer.given))


def _fold_constants(outputs: list[Tensor], changing: frozenset[UOp], resolved: Resolved) -> None:
    """Compute now all values that do not depend on the BUFFERs `changing`, so that runs do not compute them again: batch norm's scale,
    transposed weights, random weights. Not folded are a few operations on positions, such as a mask, which are cheap to recompute, and
    conversions to a wider type: memory keeps the narrow one."""
    sink = graph.sink(*[t.uop for t in outputs])
    varies: set[UOp] = set(changing)
    dear: set[UOp] = set()
    for u in sink.toposort():
        if u.op in _DEAR or any(s in dear for s in u.src):
            dear.add(u)
        if any(s in varies for s in u.src) or _depends_on_variables(u) or is_callback(u):
            varies.add(u)
    folded: dict[UOp, None] = {}
    for u in sink.toposort():
        for s in u.src if u in varies or u.op is Ops.SINK else ():
            node = s
            while node.op in MOVEMENT or node.op is Ops.DETACH or widens(node):
                node = node.src[0]
            if node not in varies and node.op in _FOLDED and (node in dear or _is_long(node)):
                folded[node] = None
    replace_nodes({node: graph.storage_view(storage, shape_of(node)) for node, storage in computed_now(folded, resolved).items()})


def _is_long(node: UOp) -> bool:
    return sum(n.op in ELEMENTWISE for n in node.toposort()) > _CHEAP


def _depends_on_variables(u: UOp) -> bool:
    """Whether the value of a node, or its number of elements, depends on a variable."""
    if u.op in (Ops.DEFINE_VAR, Ops.BIND):
        return True
    return (u.op in _FOLDED or u.op in MOVEMENT or u.op is Ops.IOTA) and is_symbolic(shape_of(u))


def _is_effect(tensor: TensorBase, before: UOp) -> bool:
    """Whether the tensor, whose node was `before`, has a pending assignment to existing memory."""
    return base_of(before).op is Ops.BUFFER and base_of(tensor.uop).op is Ops.AFTER


def _has_memory(u: UOp) -> bool:
    """Whether a node is a BUFFER. A tensor without elements is a constant and has no BUFFER."""
    return u.op is Ops.BUFFER
