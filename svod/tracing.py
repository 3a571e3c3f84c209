"""`svod.jit` captures a function of tensors once per input signature. Each later run is one native call.

    f = svod.jit(model)
    y = f(x)            # first call with this shape and dtype: the graph is captured and prepared
    y = f(x2)           # later calls patch the addresses and run the plan

Tensors that the function closes over are constants of the plan. Values that depend only on constants are computed once, at capture, and
their layouts are packed once. To change a weight, make a new jit. Random numbers are drawn at capture. Every run calls each
`svod.custom_function`. Every call returns new tensors. A bound variable may be an argument, `f(x, n.bind(5))`, or stand in the shape of
an argument, `f(x[:n.bind(5)])`; its value may differ in each call.

A tensor that the function assigns to (`state.assign(…)`) is state: every call reads and writes its memory, also if it is an argument.
Reading the value of an argument during capture (`x.item()`, `if x.sum() > 0`) is an error. A jitted function that is called during the
capture of another becomes a part of the other. A decorated method has separate captures for each object, and they keep the object alive.
"""
from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from svod.compile.plan.execution_plan import ExecutionPlan
from svod.config import PrepareConfig
from svod.core.graph import graph
from svod.core.graph.buffer import aligned_empty, buffer_of
from svod.core.graph.callback import is_callback
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import ELEMENTWISE, MOVEMENT, TRANSCENDENTAL, Ops, UOp
from svod.core.ir.variable import Dim, bound_values, is_symbolic, number_of, rebound, without_binds
from svod.core.machine.target import HOST
from svod.errors import ArgumentError, ConfigError, ScheduleError, SvodError
from svod.prepare import Prepared, buffers_under, complete_config, prepare_graph, refuse_shared_memory, span_of
from svod.tensor import Tensor
from svod.tensor.base import TensorBase, live_tensors
from svod.tensor.realize import assignments, realize_tensors

_FOLDED = ELEMENTWISE | {Ops.REDUCE_AXIS, Ops.GEP, Ops.GATHER, Ops.CAT, Ops.CONTIGUOUS, Ops.COPY}
_DEAR = TRANSCENDENTAL | {Ops.BUFFER, Ops.REDUCE_AXIS, Ops.CONTIGUOUS, Ops.COPY}
_CHEAP = 16      # largest number of elementwise operations on positions that are recomputed instead of stored
_here = threading.local()       # `capturing`: this thread is inside a function that is being captured


class _Captured:
    """The capture of one signature: the plan, the buffers of its inputs and the sources of its results."""

    def __init__(self, prepared: Prepared, inputs: list[UOp], structure: Any, results: list[UOp]):
        self.prepared, self.plan = prepared, prepared.plan
        self.inputs = [prepared.numbers.get(u) for u in inputs]      # None: the function does not read that input
        self.structure = structure
        self.shapes = [graph.shape_of(u) for u in results]
        # per result: the BUFFER that holds it, or the number of the input that is returned
        numbers = iter(prepared.unbound.outputs)
        nodes = [base if (base := graph.base_of(u)).op is Ops.BUFFER else prepared.nodes[next(numbers)] for u in results]
        self.sources: list[UOp | int] = [inputs.index(u) if u in inputs else u for u in nodes]
        # memory that stays from run to run, for a plan that writes any that was there before: what arguments must not share
        bound = {*self.inputs, *self.written}
        self.fixed = {i: span_of(b.array) for i, b in enumerate(self.plan.buffers) if b.array is not None and i not in bound}
        self.state = {i: span for i, span in self.fixed.items() if i in prepared.overwritten}

    def run(self, tensors: list[Tensor], values: Mapping[str, int]) -> Any:
        plan = self.plan
        fresh: dict[UOp, UOp] = {}
        with plan.lock:
            given = {number: buffer_of(graph.base_of(t.uop)).array
                     for number, t in zip(self.inputs, tensors, strict=True) if number is not None}
            if self.prepared.overwritten:
                spans = {number: span_of(array) for number, array in given.items()}
                refuse_shared_memory(spans, self.prepared.overwritten, {**self.fixed, **spans})
                refuse_shared_memory(self.state, self.state, spans)
            for number, array in given.items():
                plan.bind_array(number, array)
            for number in self.written:
                spec = self.prepared.unbound.buffers[number]
                fresh[self.prepared.nodes[number]] = node = graph.buffer(spec.dtype, spec.size)
                array = aligned_empty(spec.size, spec.dtype)
                buffer_of(node).bind(array)
                plan.bind_array(number, array)
            plan.execute(**{name: value for name, value in values.items() if name in plan.variables})
        nodes = [graph.base_of(tensors[s].uop) if isinstance(s, int) else fresh.get(s, s) for s in self.sources]
        results = [Tensor.from_uop(graph.storage_view(u, rebound(shape, values)) if is_symbolic(shape) else graph.reshape(u, shape))
                   for u, shape in zip(nodes, self.shapes, strict=True)]
        return _rebuild(self.structure, iter(results))

    @functools.cached_property
    def written(self) -> frozenset[int]:
        """Outputs that the plan made. Each run gets new memory for them."""
        return frozenset(i for i in self.prepared.unbound.outputs if self.prepared.is_new(i))


class Jit:
    """The result of `svod.jit`. Call it like the function."""

    def __init__(self, fn: Callable[..., Any], config: PrepareConfig | None = None):
        if not callable(fn):
            hint = "; to compute a tensor, call its realize()" if isinstance(fn, Tensor) else ""
            raise ArgumentError(f"svod.jit takes a function of tensors, got {type(fn).__name__}{hint}")
        if config is not None and not isinstance(config, PrepareConfig):
            raise ConfigError(f"svod.jit(config=…) takes a PrepareConfig, got {type(config).__name__}; for a search: "
                              "PrepareConfig(beam=BeamConfig(width=4))")
        self.fn, self.config = fn, config
        self._captured: dict[Hashable, _Captured] = {}
        self._lock = threading.Lock()
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []
        values: dict[str, int] = {}
        signature = (_signature(args, tensors, values), _signature(kwargs, tensors, values))
        if getattr(_here, "capturing", False):
            given = iter(tensors)
            return self.fn(*_substitute(args, given), **_substitute(kwargs, given))
        tensors = [_in_memory(t) for t in tensors]
        captured = self._captured.get(signature)
        if captured is None:
            with self._lock:
                captured = self._captured.get(signature)
                if captured is None:
                    captured = self._captured[signature] = self._capture(args, kwargs, tensors)
        return captured.run(tensors, values)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind a method: the object is the first argument, a part of the signature, and lives as long as the captures."""
        return self if instance is None else types.MethodType(self, instance)

    @property
    def plans(self) -> tuple[ExecutionPlan, ...]:
        """The plans captured so far, one per input signature."""
        return tuple(c.plan for c in self._captured.values())

    def _capture(self, args: Any, kwargs: Any, tensors: list[Tensor]) -> _Captured:
        stand_ins = [Tensor.from_uop(graph.storage_view(graph.buffer(t.dtype, graph.storage_size(t.uop)), t.shape) if is_symbolic(t.shape)
                                     else graph.reshape(graph.buffer(t.dtype, t.numel()), t.shape)) for t in tensors]
        inputs = [graph.base_of(t.uop) for t in stand_ins]
        name = getattr(self.fn, "__name__", "the function")
        for u in filter(_has_memory, inputs):
            buffer_of(u).closed = (f"svod.jit: {name} reads the values of an argument while it is captured; compute with tensors only, and "
                                   "pass what decides on the computation as a Python value")
        # the function must not repeat assignments that were made before
        realize_tensors([t for t in live_tensors() if isinstance(t, Tensor) and graph.base_of(t.uop).op is Ops.AFTER])
        assigned: dict[int, tuple[TensorBase, UOp]] = {}
        _here.capturing = True
        try:
            swap = iter(stand_ins)
            with assignments() as assigned:
                result = self.fn(*_substitute(args, swap), **_substitute(kwargs, swap))
            effects = [Tensor.from_uop(t.uop) for t, u in assigned.values() if _is_effect(t, u)]
            outputs: list[Tensor] = []
            structure = _structure(result, outputs)
            # views of inputs, with the strides of another largest shape than their own
            outputs = [Tensor.from_uop(graph.copy(t.uop, HOST)) if is_symbolic(t.shape) and graph.base_of(t.uop).op is Ops.BUFFER
                       and not graph.is_padding_view(t.uop) else t for t in outputs]
            if not outputs:
                raise SvodError(f"svod.jit: {name} returned no Tensor, but {type(result).__name__}; "
                                "return the tensors that should be computed")
            return self._prepare(tensors, inputs, structure, outputs, effects)
        finally:
            _here.capturing = False
            for t, u in assigned.values():
                if _is_effect(t, u):
                    t.uop = u       # the plan writes that memory; the tensor goes on holding it

    def _prepare(self, tensors: list[Tensor], inputs: list[UOp], structure: Any, outputs: list[Tensor], effects: list[Tensor]) -> _Captured:
        """The plan that computes the returned tensors and the assignments of the function."""
        config = complete_config(self.config)
        roots = [*outputs, *effects]
        assigned = frozenset(graph.storage_of(a) for t in roots for a in t.uop.walk(Ops.AFTER))
        changing = assigned.union(inputs)
        _fold_constants(roots, changing, config)
        results = [t.uop for t in outputs]
        computed = [t.uop for t in roots if graph.base_of(t.uop).op is not Ops.BUFFER]
        constants = frozenset() if config.constants == "none" else frozenset(buffers_under(computed)) - changing
        bound = set(inputs)
        for u, t in zip(inputs, tensors, strict=True):
            # outputs of a plan have memory from the start, and kernels that are captured are timed on theirs
            if _has_memory(u) and (u in assigned or config.capture is not None):
                buffer_of(u).bind(buffer_of(graph.base_of(t.uop)).array)
                bound.discard(u)
        prepared = prepare_graph(computed, config, constants, frozenset(bound))
        return _Captured(prepared, inputs, structure, results)


def jit(fn: Callable[..., Any] | None = None, *, config: PrepareConfig | None = None) -> Any:
    """Capture a function of tensors: `f = svod.jit(model)`, or as a decorator, `@svod.jit` or `@svod.jit(config=…)`.

    Arguments may be tensors, NumPy arrays, and tuples, lists and dicts of them; everything else must be hashable and is part of the
    signature. Raises ArgumentError unless `fn` is a function. A call raises SvodError if the function returns no tensor."""
    if fn is None:
        return lambda f: Jit(f, config)
    return Jit(fn, config)


def _fold_constants(outputs: list[Tensor], changing: frozenset[UOp], config: PrepareConfig) -> None:
    """Compute now what does not depend on the BUFFERs `changing`, once, so that no run computes it again (batch norm's scale, transposed
    weights, weights that are random numbers). A few operations on positions, such as a mask, stay where they are read."""
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
            while node.op in MOVEMENT or node.op is Ops.DETACH:
                node = node.src[0]
            if node not in varies and node.op in _FOLDED and (node in dear or sum(n.op in ELEMENTWISE for n in node.toposort()) > _CHEAP):
                folded[node] = None
    if folded:
        tensors = [Tensor.from_uop(u) for u in folded]
        # this runs once, so it is not worth a search, and a capture should not show it as a part of the model
        prepared = prepare_graph([t.uop for t in tensors], replace(config, beam=None, capture=None))
        prepared.plan.execute()
        prepared.attach(tensors)


def _depends_on_variables(u: UOp) -> bool:
    """Whether the value of a node, or its number of elements, depends on a variable."""
    if u.op in (Ops.DEFINE_VAR, Ops.BIND):
        return True
    return (u.op in _FOLDED or u.op in MOVEMENT or u.op is Ops.IOTA) and is_symbolic(graph.shape_of(u))


def _is_effect(tensor: TensorBase, before: UOp) -> bool:
    """Whether the tensor, whose node was `before`, has a pending assignment to existing memory."""
    return graph.base_of(before).op is Ops.BUFFER and graph.base_of(tensor.uop).op is Ops.AFTER


def _has_memory(u: UOp) -> bool:
    """Whether a node is storage. A tensor without elements is a constant and has no storage."""
    return u.op is Ops.BUFFER


# -- nested arguments -------------------------------------------------------------------------------

def _signature(value: Any, tensors: list[Tensor], values: dict[str, int]) -> Hashable:
    """The key of the captured plan for a call. Collects tensors in order, and the values of bound variables, which are not part of it."""
    if isinstance(value, np.ndarray):
        value = Tensor(value)
    if isinstance(value, Dim):
        return "variable", _unbound(value, values)
    if isinstance(value, Tensor):
        shape = tuple([_unbound(n, values) if isinstance(n, Dim) else n for n in value.shape])
        tensors.append(value)
        return "tensor", shape, value.dtype
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(_signature(v, tensors, values) for v in value)
    if isinstance(value, dict):
        return "dict", tuple((k, _signature(v, tensors, values)) for k, v in value.items())
    if isinstance(value, (float, np.floating)):      # 0.0 equals -0.0, and nan not itself
        return type(value).__name__, np.asarray(value).tobytes()
    try:
        hash(value)
    except TypeError:
        raise SvodError(f"svod.jit: an argument of type {type(value).__name__} is neither a tensor nor hashable; pass tensors, arrays, "
                        "numbers, strings, or tuples, lists and dicts of them") from None
    return type(value).__name__, value


def _unbound(n: Dim, values: dict[str, int]) -> UOp:
    """A Dim without the values of its variables. Collects the values."""
    for name, bound in bound_values(n).items():
        if values.setdefault(name, bound) != bound:
            raise ScheduleError(f"bind mismatch on {name}, {values[name]} != {bound} (arguments of one call)")
    number, _, _ = without_binds(number_of(n, dtypes.int64))
    return number


def _in_memory(t: Tensor) -> Tensor:
    """The tensor with its values in a buffer, in the layout of its shape. A constant gets memory here."""
    if not t.realize().is_realized:
        return t.contiguous().realize()
    own = graph.is_padding_view(t.uop) or not is_symbolic(t.shape)
    return t if own else Tensor.from_uop(graph.copy(t.uop, HOST)).realize()


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """`value` with `leaf` of all that is neither a tuple, list nor dict."""
    if isinstance(value, (tuple, list)):
        items = [_mapped(v, leaf) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {k: _mapped(v, leaf) for k, v in value.items()}
    return leaf(value)


def _substitute(value: Any, stand_ins: Iterator[Any]) -> Any:
    return _mapped(value, lambda v: next(stand_ins) if isinstance(v, (Tensor, np.ndarray)) else v)


def _structure(value: Any, outputs: list[Tensor]) -> Any:
    def leaf(v: Any) -> Any:
        if not isinstance(v, Tensor):
            return v
        outputs.append(v)
        return Tensor
    return _mapped(value, leaf)


def _rebuild(structure: Any, results: Iterator[Tensor]) -> Any:
    return _mapped(structure, lambda v: next(results) if v is Tensor else v)
