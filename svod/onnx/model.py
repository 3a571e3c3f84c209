"""A loaded model: a callable from arrays to arrays, with a plan for each signature of its inputs."""
from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import onnx

from svod.compile.plan.execution_plan import ExecutionPlan
from svod.config import PrepareConfig
from svod.core.ir.dtype import BY_NAME
from svod.core.ir.variable import Variable
from svod.errors import SvodError, UnsupportedError
from svod.onnx.fallback import RuntimeTail, check_runtime
from svod.onnx.reader import SUPPORTED_TYPES, Arrays, OnnxError, Source, opsets, overridable, read_model, type_name
from svod.onnx.values import Undecided, Value, array_of, dtype_of, tensor_of
from svod.onnx.walk import Walk
from svod.prepare import complete_config
from svod.system.forksafe import remake_after_fork
from svod.tensor import Tensor
from svod.tensor.dlpack import is_shareable
from svod.tracing.arguments import in_own_layout
from svod.tracing.captured import Captured
from svod.tracing.jitted import Jit
from svod.tracing.lengths import FEW, bound_for
from svod.tracing.own_plans import Maker, OwnPlans
from svod.tune.first_forms import has_first_forms

log = logging.getLogger("svod.onnx")

Size = int | str | None
_NUMBER_KINDS = "buif"     # kinds of elements in NumPy's letters; a Python number of one kind converts to each later kind


class Input(NamedTuple):
    """An input or output of a model. A size is a number, the name of a free dimension, or None."""

    name: str
    dtype: str
    shape: tuple[Size, ...] | None


class _Condition(NamedTuple):
    """The result of a plan that computes the condition of a branch instead of the model's outputs."""

    branch: int
    value: Any


class Outputs(tuple[Any, ...]):
    """Several outputs, by position and by name: `out[0]`, `out["logits"]`."""

    names: tuple[str, ...]

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, str) and at not in self.names:
            raise OnnxError(f"there is no output {at!r}; there are {', '.join(self.names)}")
        return tuple.__getitem__(self, self.names.index(at) if isinstance(at, str) else at)

    def keys(self) -> tuple[str, ...]:
        return self.names


def load(source: Source, *, dims: Mapping[str, int | Variable] | None = None, outputs: Sequence[str] | None = None,
         fallback: str | None = None, config: PrepareConfig | None = None, device: str | None = None) -> Model:
    """Load a model as a function of arrays. `source`: a path, bytes, a file or a ModelProto.

    `dims` gives sizes to free dimensions: a number, or a Variable, for which one plan serves all its values. A free dimension without an
    entry has one plan for each size that occurs. `outputs`: the values to compute, which may be any in the graph; by default the model's
    outputs. Nodes and inputs that they do not depend on are left out. `fallback`: "onnxruntime" or "reference" runs the nodes that svod
    lacks, and all nodes that depend on them, on the host (`svod.onnx.fallback`). `device`: the device of the kernels, such as "WEBGPU"; by
    default the device of `config`, else SVOD_DEVICE.

    Raises OnnxError for a file that is no valid model, UnsupportedError, which lists the operators that svod lacks, and FileError."""
    proto, arrays = read_model(source)
    check_runtime(fallback)
    if device is not None:
        config = replace(config or PrepareConfig.from_env(), device=device)
    name = str(source) if isinstance(source, (str, os.PathLike)) else proto.graph.name or "the model"
    return Model(proto, arrays, dims or {}, outputs, config, fallback, name)


class Model:
    """A model as a function. Call it with arrays or tensors, in the order of `inputs` or by their names."""

    def __init__(self, proto: onnx.ModelProto, arrays: Arrays, dims: Mapping[str, int | Variable], outputs: Sequence[str] | None,
                 config: PrepareConfig | None, fallback: str | None = None, name: str = "the model") -> None:
        self.proto, self.dims, self.config, self._name = proto, dict(dims), config, name
        graph = proto.graph
        given = {t.name for t in (*graph.initializer, *(s.values for s in graph.sparse_initializer))}
        changeable = overridable(proto)
        self.outputs = _outputs(graph, outputs)
        wanted = [o.name for o in self.outputs]
        self.walk = Walk(proto, opsets(proto), arrays, None if outputs is None else wanted)
        needed = {i.name for i in graph.input} if outputs is None else self.walk.needed_inputs(wanted)
        self.inputs = tuple(_described(i) for i in graph.input if i.name not in given and i.name in needed)
        # Initializers that are inputs as well: a call may replace their values by name.
        self.overridable = tuple(_described(i) for i in graph.input if i.name in changeable)
        self._unread = {i.name for i in graph.input} - needed
        self.fallback = fallback
        self._check_inputs()
        self._lacking = [] if fallback is None else self.walk.lacking()
        if fallback is None:
            self.walk.check(name)
        self.tail = self._make_tail()
        self.deciding = self.walk.deciding_inputs()
        # the axes of each input whose sizes are variables
        self._varying = {i.name: {axis: v for axis, n in enumerate(i.shape or ())
                                  if isinstance(n, str) and isinstance(v := self.dims.get(n), Variable)}
                         for i in (*self.inputs, *self.overridable)}
        self._capture_anew()
        remake_after_fork(self, "_own", lambda: None)       # a forked child counts runs anew
        remake_after_fork(self, "_knows_own", lambda: False)
        self._runs = itertools.count() if self.walk.has_seeds else None
        self._names = tuple(i.name for i in self.inputs)
        self._seen: list[dict[str, int]] = []       # sets of sizes of free dimensions that calls have had, up to `FEW`
        # signatures of arrays that earlier calls have checked → the names of those that the plan takes, in its order
        self._plain: dict[Any, tuple[str, ...]] = {}

    def _capture_anew(self) -> None:
        """Make the translation of the graph a jitted function: one plan for each signature; each run draws new random numbers. `_own`: the
        plans for single sets of sizes, from the second run with variables on, if there may be any. `_knows_own`: whether that is known."""
        self._jit: Any = Jit(self._trace, self.config, "fresh", "never", sized=True)
        self._own: OwnPlans[Captured] | None = None
        self._knows_own = False

    def __repr__(self) -> str:
        def words(values: Sequence[Input]) -> str:
            return ", ".join(f"{v.name} {v.dtype}[{', '.join('?' if n is None else str(n) for n in v.shape or ())}]" for v in values)
        return f"<Model {words(self.inputs)} → {words(self.outputs)}>"

    def _check_inputs(self) -> None:
        """Raise UnsupportedError for types that svod does not compute with, OnnxError for dimensions that the model does not have."""
        for words, values in (("inputs", self.inputs), ("outputs", self.outputs)):
            narrow = [f"{i.name}: {i.dtype}" for i in values if i.dtype not in (*BY_NAME, "sequence", "optional", "", "undefined")]
            if narrow and (words == "inputs" or self.fallback is None):
                raise UnsupportedError(f"the {words} {', '.join(narrow)}: {SUPPORTED_TYPES}")
        free = {s for i in self.inputs for s in i.shape or () if isinstance(s, str)}
        if unknown := sorted(set(self.dims) - free):
            raise OnnxError(f"the model has no free dimension {', '.join(unknown)}; it has {', '.join(sorted(free)) or 'none'}")
        for name, size in self.dims.items():
            if not isinstance(size, Variable) and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
                raise OnnxError(f"dims={{{name!r}: {size!r}}}: give a size, such as 128, or a range, Variable({name!r}, 1, 512)")
            if isinstance(size, Variable) and size.expr.arg[1] < 1:
                raise OnnxError(f"dims={{{name!r}: {size!r}}}: an axis with a plan for all sizes has at least one element, as in "
                                f"Variable({name!r}, 1, {size.expr.arg[2]}); without dims, size 0 has a plan of its own")

    # -- running ---------------------------------------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Returns the value of a single output, or `Outputs` for several. If all inputs are arrays, outputs are arrays; if
        svod tensors are among them, outputs are tensors.

        Raises OnnxError, which names all inputs that are missing, unknown, or of another type or shape."""
        given = self._named(args, kwargs)
        signature = tuple([(name, v.shape, v.dtype) if type(v) is np.ndarray else None for name, v in given.items()])
        names = self._plain.get(signature)
        if names is not None:        # an earlier call checked arrays of this signature
            made = [array_of(r) for r in self._results({name: given[name] for name in names}, ())]
            return made[0] if len(made) == 1 else self._named_outputs(made)
        checked = self.checked(given)
        results = self._with_tail(checked)
        if self._is_plain(signature, results):
            self._plain[signature] = tuple(checked)
        if not any(isinstance(v, Tensor) for v in given.values()):
            results = [[array_of(v) for v in r] if isinstance(r, list) else array_of(r) for r in results]
        return results[0] if len(results) == 1 else self._named_outputs(results)

    def _named_outputs(self, results: Sequence[Any]) -> Outputs:
        out = Outputs(results)
        out.names = tuple(o.name for o in self.outputs)
        return out

    def _is_plain(self, signature: Sequence[Any], results: Sequence[Any]) -> bool:
        """Whether further calls with arrays of these names, shapes and types may skip the checks and `run`."""
        return (None not in signature and self.fallback is None and not self.deciding
                and not any(isinstance(d, Variable) for d in self.dims.values()) and not any(isinstance(r, list) for r in results))

    def _make_tail(self) -> RuntimeTail | None:
        """The part of the model that another runtime computes; None if svod computes all of it."""
        if not self._lacking:
            return None
        assert self.fallback is not None
        tail = RuntimeTail(self.proto, self.walk.arrays, self._lacking, [o.name for o in self.outputs], self.fallback)
        log.warning("%s runs %s and what stands behind: %.0f %% of the model's nodes", self.fallback, ", ".join(tail.operators),
                    100 * tail.share)
        return tail

    def _with_tail(self, feed: Mapping[str, Any]) -> list[Any]:
        """The model's outputs, some of which another runtime may compute."""
        while True:
            try:
                computed = self.run(feed)
                break
            except UnsupportedError as e:
                if self.fallback is None or not e.node or e.node in self._lacking:
                    raise
                self._lacking.append(e.node)
                self.tail = self._make_tail()
                self._capture_anew()        # the plan now computes other values
        if self.tail is None:
            return computed
        values = {name: v if isinstance(v, np.ndarray) else array_of(v) for name, v in zip(self.computed, computed, strict=True)}
        values |= {name: np.asarray(v) for name, v in feed.items() if name in self.tail.cut}
        values |= self.tail.run(values)
        return [tensor_of(values[o.name]) for o in self.outputs]

    @property
    def computed(self) -> list[str]:
        """The names of the values that the plan computes."""
        wanted = [o.name for o in self.outputs]
        if self.tail is None:
            return wanted
        inputs = {i.name for i in self.inputs}
        return list(dict.fromkeys([*(n for n in wanted if n not in self.tail.results), *(n for n in self.tail.cut if n not in inputs)]))

    def run(self, feed: Mapping[str, Any]) -> list[Any]:
        """The outputs as tensors, or lists of them, for inputs by name, which are not checked."""
        if not self.computed:       # another runtime computes all outputs
            return []
        given, fixed = self._split(feed)
        sizes = self._sizes(given)
        if not sizes:
            return self._results(given, fixed)
        own = self._own
        if own is not None and own.is_due() and all(type(v) is np.ndarray for v in given.values()):
            return self._run_own(own, sizes, given, fixed)
        start = time.perf_counter()
        results = self._results(self._with_variables(given), fixed)
        if not self._knows_own:
            allowed = self._runs is None and has_first_forms(complete_config(self.config))
            self._own = OwnPlans(self._name, log, time.perf_counter() - start) if allowed else None
            self._knows_own = True
        return results

    def _run_own(self, own: OwnPlans[Captured], sizes: Mapping[str, int], given: Mapping[str, Any], fixed: Any) -> list[Any]:
        """Run the plan for all sizes, or the own plan of the sizes of this call."""
        def run(one: Captured | None) -> list[Any]:
            if one is None or one.changed():
                return self._results(self._with_variables(given), fixed)
            return list(one.run(list(given.values()), {}, sized=True))

        def prepare() -> Maker[Captured]:
            like = {name: np.zeros(v.shape, v.dtype) for name, v in given.items()}

            def make() -> Captured | None:
                made: Captured = self._jit.capture_apart(like, fixed, (), None)
                return made if made.is_pure and type(made.structure) is tuple else None
            return make
        return own.run(sizes, (fixed, *[(name, v.shape, v.dtype) for name, v in given.items()]), run, prepare)

    def _results(self, given: Mapping[str, Any], fixed: Any) -> list[Any]:
        """The outputs for operands of the plan, and for inputs whose values are part of its key."""
        number = None if self._runs is None else np.array([next(self._runs) & 0xFFFFFFFF], np.uint32)
        chosen: tuple[tuple[int, bool], ...] = ()
        while isinstance(results := self._jit(given, fixed, chosen, number), _Condition):
            value = array_of(results.value)
            if value.size != 1:
                raise OnnxError(f"the condition of an If has {value.size} elements; it needs one")
            chosen = (*chosen, (results.branch, bool(value.reshape(-1)[0])))
        return list(results)

    def _sizes(self, given: Mapping[str, Any]) -> dict[str, int]:
        """The values of the variables in a call, by name."""
        return {v.name: _checked(v, int(given[name].shape[axis]), name)
                for name, axes in self._varying.items() if name in given for axis, v in axes.items()}

    def _with_variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Bind the variables to the sizes of the operands, which are copied to the layout of the largest sizes."""
        bound = dict(given)
        for name, axes in self._varying.items():
            if axes and name in given:
                value = given[name]
                tensor = value if isinstance(value, Tensor) else Tensor(value)
                shape = [axes[axis].bind(int(n)) if axis in axes else n for axis, n in enumerate(value.shape)]
                bound[name] = in_own_layout(tensor._values(), tensor.dtype, shape)
        return bound

    def prepare(self, *args: Any, **kwargs: Any) -> ExecutionPlan:
        """The plan for inputs of given shapes, which are passed as arrays or tuples of extents."""
        feed = {name: self._sample(name, v) for name, v in self._named(args, kwargs).items()}
        before = set(map(id, self._jit.plans))
        self.run(self.checked(feed))
        new = [p for p in self._jit.plans if id(p) not in before]
        plan: ExecutionPlan = (new or list(self._jit.plans))[-1]
        return plan

    @property
    def plans(self) -> tuple[ExecutionPlan, ...]:
        """The plans so far: one for each signature, and those of single sets of sizes."""
        own = () if self._own is None else self._own.plans
        return (*self._jit.plans, *[one.plan for one in own])

    def _sample(self, name: str, given: Any) -> Any:
        if not isinstance(given, tuple):
            return given
        if not all(isinstance(n, int) and n >= 0 for n in given):
            raise OnnxError(f"{name}={given}: give an array, or the extents of one, such as {name}=(1, 128)")
        kind = next((i.dtype for i in (*self.inputs, *self.overridable) if i.name == name), "float32")
        return np.zeros(given, np.dtype(kind if kind != "bfloat16" else "float32"))

    def _trace(self, given: dict[str, Tensor], fixed: tuple[tuple[str, str, tuple[int, ...], bytes], ...],
               chosen: tuple[tuple[int, bool], ...], number: Tensor | None) -> tuple[Any, ...]:
        """Translate the graph: returns the outputs, or the condition of a branch that must be chosen before the translation can
        continue."""
        values: dict[str, Value] = dict(given)
        for name, kind, shape, data in fixed:
            values[name] = np.frombuffer(data, np.dtype(kind)).reshape(shape)
        config = self.config or PrepareConfig.from_env()
        try:
            results = self.walk.run(values, self.computed, dict(chosen), number, config.capture_device or config.device)
        except Undecided as e:
            return _Condition(e.branch, e.condition)
        declared = {o.name: BY_NAME.get(o.dtype) for o in self.outputs}
        for name, r in zip(self.computed, results, strict=True):
            if r is None:
                raise UnsupportedError(f"the output {name!r} is an optional that is absent")
            wanted = declared.get(name)
            if wanted is not None and not isinstance(r, list) and dtype_of(r) is not wanted:
                raise OnnxError(f"the output {name!r} is declared as {wanted.name}, and its nodes make {dtype_of(r).name}")
        return tuple([tensor_of(v) for v in r] if isinstance(r, list) else tensor_of(r) for r in results)

    def _split(self, feed: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """(inputs that are operands of the plan, inputs whose values are part of its key)."""
        given, fixed = {}, []
        for name, v in feed.items():
            if name in self.deciding:
                a = np.asarray(array_of(v) if isinstance(v, Tensor) else v)
                fixed.append((name, a.dtype.name, a.shape, a.tobytes()))
            else:
                given[name] = v
        return given, tuple(fixed)

    # -- the feed --------------------------------------------------------------------------------------------------------
    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
            return dict(args[0])
        if len(args) > len(self._names):
            raise OnnxError(f"{len(args)} inputs were given; the model has {len(self._names)}: {', '.join(self._names)}")
        named = dict(zip(self._names, args, strict=False))
        if not kwargs:
            return named
        if twice := sorted(named.keys() & kwargs.keys()):
            raise OnnxError(f"given by position and by name: {', '.join(twice)}")
        return {**named, **kwargs}

    def checked(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the inputs to arrays and tensors. Raises OnnxError, which lists all inputs that do not fit."""
        problems: list[str] = []
        names = {i.name for i in (*self.inputs, *self.overridable)} | self._unread
        problems += [f"missing: {i.name}, {_words(i)}" for i in self.inputs if i.name not in feed]
        problems += [f"unknown: {name}; the inputs are {', '.join(i.name for i in self.inputs)}" for name in feed if name not in names]
        sizes: dict[str, int] = {}
        out: dict[str, Any] = {}
        for i in (*self.inputs, *self.overridable):
            if i.name in feed:
                out[i.name] = self._one(i, feed[i.name], sizes, problems)
        if problems:
            raise OnnxError("the inputs do not fit the model:\n  " + "\n  ".join(problems))
        self._note_sizes({name: n for name, n in sizes.items() if name not in self.dims})
        return out

    def _note_sizes(self, sizes: dict[str, int]) -> None:
        """Warn, once, that free dimensions have had several sizes, each with a plan of its own."""
        if len(self._seen) >= FEW or sizes in self._seen:
            return
        self._seen.append(sizes)
        if len(self._seen) < FEW:
            return
        varying = {name: values for name in sizes if len(values := {seen[name] for seen in self._seen if name in seen}) > 1}
        had = ", ".join(f"{name!r} {min(values)} to {max(values)}" for name, values in varying.items())
        wanted = ", ".join(f'{name!r}: svod.Variable("{name if name.isidentifier() else f"d{i}"}", 1, {bound_for([*values])})'
                           for i, (name, values) in enumerate(varying.items()))
        log.warning("svod: %s has had %d sets of sizes (%s), each with a plan of its own; if no operator needs them as numbers, "
                    "load(…, dims={%s}) makes one plan for all up to these bounds", self._name, FEW, had, wanted)

    def _one(self, i: Input, given: Any, sizes: dict[str, int], problems: list[str]) -> Any:
        if i.dtype in ("sequence", "optional"):
            return None if given is None else [np.asarray(v) for v in given] if isinstance(given, (list, tuple)) else np.asarray(given)
        try:
            value = _taken(given, i.dtype)
        except (SvodError, ValueError, TypeError, OverflowError, BufferError) as e:     # raised by NumPy, or by the library of the tensor
            problems.append(f"{i.name}: {e}; the model wants {_words(i)}")
            return given
        kind = value.dtype.name
        if kind != i.dtype:
            problems.append(f"{i.name}: got {kind}, the model wants {i.dtype}; convert it: x.astype({i.dtype!r})")
        shape = tuple(value.shape)
        if i.shape is None:
            return value
        if len(shape) != len(i.shape):
            problems.append(f"{i.name}: got {shape}, {len(shape)} axes; the model wants {_words(i)}")
            return value
        for axis, (n, wanted) in enumerate(zip(shape, i.shape, strict=True)):
            fixed = self.dims.get(wanted, wanted) if isinstance(wanted, str) else wanted
            if isinstance(fixed, int) and n != fixed:
                problems.append(f"{i.name}: got {n} on axis {axis}, expected {fixed}; the model wants {_words(i)}")
            elif isinstance(wanted, str) and sizes.setdefault(wanted, n) != n:
                problems.append(f"{i.name}: got {n} on axis {axis}, and {sizes[wanted]} before for the dimension {wanted}")
        return value


def _outputs(graph: onnx.GraphProto, wanted: Sequence[str] | None) -> tuple[Input, ...]:
    """Descriptions of the values to compute. Raises OnnxError for a name that no node computes."""
    if isinstance(wanted, str):
        raise OnnxError(f"outputs={wanted!r}: give a list of names, outputs=[{wanted!r}]")
    every = {v.name: v for v in (*graph.value_info, *graph.output)}
    names = [o.name for o in graph.output] if wanted is None else list(wanted)
    made = {o for n in graph.node for o in n.output} | {i.name for i in (*graph.input, *graph.initializer)}
    if unknown := [n for n in names if n not in made]:
        have = ", ".join(o.name for o in graph.output)
        raise OnnxError(f"the model has no value {', '.join(map(repr, unknown))}; its outputs are {have}")
    return tuple(_described(every[n]) if n in every else Input(n, "", None) for n in names)


def _checked(variable: Variable, n: int, name: str) -> int:
    low, high = variable.expr.arg[1], variable.expr.arg[2]
    if not low <= n <= high:
        raise OnnxError(f"{name}: the dimension {variable.name} is {n}; {low} to {high} were declared")
    return n


def _taken(given: Any, wanted: str) -> Any:
    """Convert an input to an array or a tensor. Python numbers, and lists of them, get the model's type if it can hold them: an int
    becomes a float, but a float never an int. Raises the errors of NumPy and other libraries for values that are no arrays."""
    if isinstance(given, (np.ndarray, Tensor)):
        return given
    if _is_foreign(given):
        return Tensor.from_dlpack(given)
    if given is None:
        raise TypeError("got None")
    value = np.asarray(given)
    if (isinstance(given, (bool, int, float, list, tuple))
            and value.dtype.kind in _NUMBER_KINDS[:_NUMBER_KINDS.index(BY_NAME[wanted].kind) + 1]):
        return np.asarray(given, np.dtype(wanted))
    return value


def _is_foreign(x: Any) -> bool:
    return not isinstance(x, np.ndarray) and is_shareable(x)


def _words(i: Input) -> str:
    shape = "any shape" if i.shape is None else "[" + ", ".join("?" if n is None else str(n) for n in i.shape) + "]"
    return f"{i.dtype or 'any type'} {shape}"


def _described(info: onnx.ValueInfoProto) -> Input:
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        return Input(info.name, (kind or "").removesuffix("_type"), None)
    tensor = info.type.tensor_type
    shape = tuple(_size(d) for d in tensor.shape.dim) if tensor.HasField("shape") else None
    return Input(info.name, type_name(tensor.elem_type), shape)


def _size(d: Any) -> Size:
    """A size, the name of a free dimension, or None. Some programs write -1 or a question mark for a free dimension without a name."""
    if d.HasField("dim_value"):
        return int(d.dim_value) if d.dim_value >= 0 else None
    return str(d.dim_param) if d.HasField("dim_param") and d.dim_param not in ("", "?", "-1", "None") else None


