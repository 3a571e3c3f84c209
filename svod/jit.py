"""`svod.jit`: a function of tensors, captured once per input signature, then one native call per run.

    f = svod.jit(model)
    y = f(x)            # first call with this shape and dtype: the graph is captured and prepared
    y = f(x2)           # from then on: addresses are patched, the plan runs

Tensors that the function closes over are constants of the plan: what depends on nothing but them is computed once, at capture, and layouts
are packed once. Change a weight by making a new jit. Outputs are new tensors at every call.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from svod.compile.plan import ExecutionPlan
from svod.config import PrepareConfig
from svod.core import graph
from svod.core.buffer import aligned_empty, buffer_of
from svod.core.uop import ELEMENTWISE, MOVEMENT, Ops, UOp
from svod.errors import SvodError
from svod.prepare import Prepared, prepare_graph
from svod.tensor import Tensor

_FOLDED = ELEMENTWISE | {Ops.REDUCE_AXIS, Ops.GEP, Ops.GATHER, Ops.CONTIGUOUS}


class _Captured:
    """One signature: its plan, where inputs are bound and outputs come from."""

    def __init__(self, prepared: Prepared, inputs: list[UOp], structure: Any, outputs: list[Tensor]):
        self.prepared, self.plan = prepared, prepared.plan
        self.inputs = [prepared.numbers.get(u) for u in inputs]      # None: the function does not read that input
        self.structure = structure
        self.shapes = [t.shape for t in outputs]
        self.outputs = prepared.outline.outputs
        self.passed = [inputs.index(u) if (u := graph.base_of(t.uop)) in inputs else None for t in outputs]

    def run(self, tensors: list[Tensor]) -> Any:
        plan = self.plan
        results = []
        with plan.lock:
            for number, t in zip(self.inputs, tensors, strict=True):
                if number is not None:
                    plan.bind_array(number, buffer_of(graph.base_of(t.uop)).array)
            fresh: dict[int, UOp] = {}
            for number in self.outputs:
                if number not in fresh and self.prepared.numbers:
                    spec = self.prepared.outline.buffers[number]
                    node = graph.buffer(spec.dtype, spec.size)
                    if spec.kind == "output" and number in self.written:
                        array = aligned_empty(spec.size, spec.dtype)
                        buffer_of(node).bind(array)
                        plan.bind_array(number, array)
                    else:
                        node = self.prepared.nodes[number]
                    fresh[number] = node
            plan.execute()
        for number, shape, passed in zip(self.outputs, self.shapes, self.passed, strict=True):
            node = graph.base_of(tensors[passed].uop) if passed is not None else fresh[number]
            results.append(Tensor.from_uop(graph.reshape(node, shape)))
        return _rebuild(self.structure, iter(results))

    @functools.cached_property
    def written(self) -> frozenset[int]:
        outline = self.prepared.outline
        made = {c.args[s] for c in outline.calls for s in outline.kernels[c.kernel].outs}
        return frozenset(i for i in made if self.prepared.nodes[i] not in self.prepared.numbers)


class Jit:
    """What `svod.jit` returns: call it like the function."""

    def __init__(self, fn: Callable[..., Any], config: PrepareConfig | None = None):
        self.fn, self.config = fn, config
        self._captured: dict[Hashable, _Captured] = {}
        self._lock = threading.Lock()
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []
        signature = (_signature(args, tensors), _signature(kwargs, tensors))
        for t in tensors:
            t.realize()
        found = self._captured.get(signature)
        if found is None:
            with self._lock:
                found = self._captured.get(signature)
                if found is None:
                    found = self._captured[signature] = self._capture(args, kwargs, tensors)
        return found.run(tensors)

    @property
    def plans(self) -> tuple[ExecutionPlan, ...]:
        """The plans captured so far, one per input signature."""
        return tuple(c.plan for c in self._captured.values())

    def _capture(self, args: Any, kwargs: Any, tensors: list[Tensor]) -> _Captured:
        stand_ins = [Tensor.from_uop(graph.reshape(graph.buffer(t.dtype, t.numel()), t.shape)) for t in tensors]
        swap = iter(stand_ins)
        result = self.fn(*_substitute(args, swap), **_substitute(kwargs, swap))
        outputs: list[Tensor] = []
        structure = _structure(result, outputs)
        if not outputs:
            raise SvodError(f"svod.jit: {getattr(self.fn, '__name__', 'the function')} returned no Tensor, but {type(result).__name__}; "
                            "return the tensors that should be computed")
        inputs = [graph.base_of(t.uop) for t in stand_ins]
        config = self.config.in_environment() if self.config else PrepareConfig.from_env()
        _fold_constants(outputs, frozenset(inputs), config)
        under = {u for t in outputs for u in t.uop.toposort() if u.op is Ops.BUFFER}
        assigned = {graph.base_of(a.src[0]) for t in outputs for a in t.uop.walk(Ops.ASSIGN)}
        constants = frozenset() if config.constants == "none" else frozenset(under - set(inputs) - assigned)
        if config.capture is not None:
            for u, t in zip(inputs, tensors, strict=True):
                buffer_of(u).bind(buffer_of(graph.base_of(t.uop)).array)   # so that the captured kernels can be timed
            bound: frozenset[UOp] = frozenset()
        else:
            bound = frozenset(inputs)
        prepared = prepare_graph([t.uop for t in outputs], config, constants, bound)
        return _Captured(prepared, inputs, structure, outputs)


def jit(fn: Callable[..., Any] | None = None, *, config: PrepareConfig | None = None) -> Any:
    """Capture a function of tensors: `f = svod.jit(model)`, or as a decorator, `@svod.jit` or `@svod.jit(config=…)`.

    Arguments may be tensors, NumPy arrays, and tuples, lists and dicts of them; everything else must be hashable and is part of the
    signature. Raises SvodError when the function returns no tensor."""
    if fn is None:
        return lambda f: Jit(f, config)
    return Jit(fn, config)


def _fold_constants(outputs: list[Tensor], inputs: frozenset[UOp], config: PrepareConfig) -> None:
    """Compute now what does not depend on the inputs, once, so that no run computes it again (batch norm's scale, transposed weights)."""
    sink = graph.sink(*[t.uop for t in outputs])
    varies: set[UOp] = set(inputs)
    buffers: set[UOp] = set()
    for u in sink.toposort():
        if u.op is Ops.BUFFER:
            buffers.add(u)
        if any(s in varies for s in u.src):
            varies.add(u)
        if any(s in buffers for s in u.src):
            buffers.add(u)
    found: dict[UOp, None] = {}
    for u in sink.toposort():
        for s in u.src if u in varies or u.op is Ops.SINK else ():
            node = s
            while node.op in MOVEMENT or node.op is Ops.DETACH:
                node = node.src[0]
            if node not in varies and node in buffers and node.op in _FOLDED:
                found[node] = None
    if found:
        tensors = [Tensor.from_uop(u) for u in found]
        # run once: not worth a search, and not a part of the model that a capture should show
        prepared = prepare_graph([t.uop for t in tensors], replace(config, beam=None, capture=None))
        prepared.plan.execute()
        prepared.attach(tensors)


# -- nested arguments -------------------------------------------------------------------------------

def _signature(value: Any, tensors: list[Tensor]) -> Hashable:
    """What decides whether a captured plan fits a call; tensors are collected in order."""
    if isinstance(value, np.ndarray):
        value = Tensor(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", value.shape, value.dtype
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(_signature(v, tensors) for v in value)
    if isinstance(value, dict):
        return "dict", tuple((k, _signature(v, tensors)) for k, v in value.items())
    try:
        hash(value)
    except TypeError:
        raise SvodError(f"svod.jit: an argument of type {type(value).__name__} is neither a tensor nor hashable; pass tensors, arrays, "
                        "numbers, strings, or tuples, lists and dicts of them") from None
    return type(value).__name__, value


def _substitute(value: Any, stand_ins: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return next(stand_ins)
    if isinstance(value, (tuple, list)):
        return type(value)(_substitute(v, stand_ins) for v in value)
    if isinstance(value, dict):
        return {k: _substitute(v, stand_ins) for k, v in value.items()}
    return value


def _structure(value: Any, outputs: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        outputs.append(value)
        return Tensor
    if isinstance(value, (tuple, list)):
        return type(value)(_structure(v, outputs) for v in value)
    if isinstance(value, dict):
        return {k: _structure(v, outputs) for k, v in value.items()}
    return value


def _rebuild(structure: Any, results: Any) -> Any:
    if structure is Tensor:
        return next(results)
    if isinstance(structure, (tuple, list)):
        return type(structure)(_rebuild(v, results) for v in structure)
    if isinstance(structure, dict):
        return {k: _rebuild(v, results) for k, v in structure.items()}
    return structure
