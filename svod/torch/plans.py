"""The plan of an FX graph for given sizes and layouts, or for all sizes within bounds, and the run of a call.

    PyTorch tensors → arrays over their memory → one run of the plan → arrays → PyTorch tensors with the strides that PyTorch expects

For tensors on a GPU, svod tensors over their memory replace the arrays, and the plan runs there.
"""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from svod.config import PrepareConfig
from svod.core.graph.allocator import OWN_BLOCK_BYTES
from svod.core.graph.storage import base_of
from svod.core.ir.variable import Dim, is_symbolic
from svod.core.machine.target import HOST
from svod.errors import SharedMemoryError, UnsupportedError
from svod.tensor import Tensor
from svod.torch.fallback import FallbackSeconds
from svod.torch.kept import TensorPlaces
from svod.torch.memory import (
    TORCH_DTYPES,
    gpu_among,
    gpu_of,
    in_order,
    inverse,
    is_shared,
    order_in_memory,
    reader,
    span_of,
    stream_of,
    svod_dtype,
    svod_tensor,
    torch_tensor,
)
from svod.torch.translate import Missing, Translation, translate
from svod.torch.varying.merged import MergedAxes, merged_shape
from svod.torch.varying.sizes import Room, SizeVariables
from svod.torch.weights import constant
from svod.tracing.capture import capture
from svod.tracing.captured import Captured


class AtenProgram(NamedTuple):
    """An FX graph of ATen operations. `attributes`: the tensors in it, by name. `mutations`: number of an output → number of the input
    whose content it replaces."""

    name: str
    graph: Any
    attributes: Mapping[str, Any]
    mutations: Mapping[int, int]


def attributes_of(module: Any) -> dict[str, Any]:
    """The tensors that a graph module's graph reads as attributes."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers()), **vars(module)}
    read = {n.target for n in module.graph.nodes if n.op == "get_attr"}
    return {name: held[name] for name in read if isinstance(held.get(name), torch.Tensor)}


class ArgumentSource(NamedTuple):
    """An argument that the plan reads. `argument`: its number. `order`: its axes from the outermost in memory to the innermost; (): in
    natural order; None: the tensor has gaps or sizes that vary, and a copy is read. `read`: the function from a tensor to the memory that
    a run reads."""

    argument: int
    order: tuple[int, ...] | None
    read: Callable[[Any], Any]
    nbytes: int
    gpu: str                        # the GPU of the plan; "" for the CPU


class Result(NamedTuple):
    """An output of the graph. `run`: its number among the results of the plan's run. With `run` -1, the output is `value`: an int
    (PyTorch's expression, if it depends on sizes), None, or, with `is_argument`, the number of an argument that is returned."""

    run: int
    value: Any = None
    is_argument: bool = False
    dtype: Any = None
    order: tuple[int, ...] = ()     # axis i of the output is axis order[i] of the run's array; (): no permutation
    shape: tuple[int, ...] | None = None        # the final shape, if axes of extent 1 are expanded
    parts: tuple[int, ...] | None = None        # each axis of the output merges this number of consecutive axes of the run's array
    strides: tuple[Any, ...] | None = None      # strides, in elements, of an output with gaps, which is filled by a copy
    is_copied: bool = False         # the run's array is a constant, or has gaps that the output does not have
    device: Any = None  # device of the output, if the run makes it elsewhere: a constant of a graph on a GPU, or a copy to the CPU
    base: int | None = None         # number of the output whose memory this one is a view of, with `shape`, `strides` and `offset`
    offset: int = 0


class PlansBeside(Protocol):
    """The plans for single sets of sizes beside a plan for all sizes (`svod.torch.varying.own`)."""

    is_due: Callable[[], bool]      # whether `run` makes the next call

    @property
    def plans(self) -> list[Plan]:
        """The plans so far."""

    def run(self, plan: Plan, weights: Any, given: Sequence[Any], values: Mapping[Any, int]) -> list[Any]:
        """Run a call with `plan`, the plan for all sizes, or with that for its sizes. `weights`: those of the plan."""


class Plan:
    """A graph prepared for arguments of given sizes and layouts, or, with `sizes`, for all sizes within the bounds of these variables.
    `written`: the numbers of the arguments that it writes; `copied`: pairs (number of such an argument, number of the output that is
    copied into it). `kept`: the numbers of arguments located by `TensorPlaces`. `weights`: the tensors that are constants of the plan,
    by number. `missing`: the operations that PyTorch runs. `own`: the plans for single sets of sizes beside this one,
    if there may be any."""

    def __init__(self, sources: Sequence[ArgumentSource], captured: Captured | None, results: Sequence[Result], written: Collection[int],
                 copied: Sequence[tuple[int, int]], kept: Collection[int], weights: Mapping[int, Any],
                 missing: Sequence[Missing], clock: FallbackSeconds, sizes: SizeVariables | None) -> None:
        self.sizes = sizes
        self.own: PlansBeside | None = None
        self._names = _names_of(sizes)      # the names of the variables by symbol
        self.sources, self.captured, self.results, self.copied = list(sources), captured, list(results), list(copied)
        self.missing, self.clock = list(missing), clock
        # pairs of arguments that must not share memory; checked here if the run reads copies of them, because it then cannot detect that
        copies = {s.argument for s in sources if s.order is None} | {argument for argument, _ in copied}
        self._apart = [(a, b) for a in written for b in {s.argument for s in sources}.union(written)
                       if a != b and not copies.isdisjoint((a, b))]
        # written arguments must not share memory with weights either: only weights whose address ranges overlap are tested exactly
        has_gaps = any(order_in_memory(w.shape, w.stride()) is None for w in weights.values())
        self._apart_from_weights = sorted(written if has_gaps else copies.intersection(written)) if weights else []
        self.weights, self._spans = list(weights), np.array([span_of(w) for w in weights.values()], np.int64).reshape(-1, 2)
        self._forget_memory()
        self._on_gpu = next((s.argument for s in sources if s.gpu), None)      # number of an argument on a GPU; None if there is none
        self._stream = 0                # PyTorch's stream on that GPU in the last run
        kept = [k for k, s in enumerate(sources) if s.argument in kept and s.order is not None]
        self._loose = [(k, s) for k, s in enumerate(sources) if k not in kept]
        self._has_run = False           # whether it has run since the last `let_go`
        made = 0
        if captured is not None:
            captured.hold(kept)
            made = captured.result_bytes
        # whether arguments and results, without kept tensors, reach OWN_BLOCK_BYTES bytes
        self.is_large = made + sum(s.nbytes for _, s in self._loose) >= OWN_BLOCK_BYTES
        self._parts = [(i, r.base, r) for i, r in enumerate(self.results) if r.base is not None]
        self.runs = 0
        self.last = 0                   # number of the function's last call that used this plan
        self.seconds = math.inf         # seconds of the fastest run

    def _forget_memory(self) -> None:
        # (tensor, address, memory that is read) for each source
        self._seen: list[tuple[Any, int, Any]] = [(None, 0, None)] * len(self.sources)
        self._held: tuple[TensorPlaces | None, list[Any] | None] = None, None    # addresses of kept arguments, and their memory

    def run(self, given: Sequence[Any], places: TensorPlaces | None = None, values: Mapping[Any, int] | None = None) -> list[Any]:
        """Run the plan for arguments of its sizes and layouts; returns the outputs. `places`: the addresses of kept arguments. `values`:
        the sizes that vary, by symbol. Raises SharedMemoryError for arguments that share memory with an argument that the plan writes."""
        made: Any = ()
        start = time.perf_counter()
        self._has_run = True
        if self._apart or self._apart_from_weights:
            self._check_apart(given)
        if self.captured is not None:
            with self.captured.plan.lock:       # the plan may copy arguments to memory of its own
                memory, held = self._read(given, places if places is not None and places.can_stay else None)
                made = self.captured.run(memory, {self._names[s]: n for s, n in values.items()} if values else {}, held, sized=True)
        self.runs += 1
        outputs = [_output(r, made, given, values or {}) for r in self.results]
        for i, number, r in self._parts:
            base = outputs[number]
            outputs[i] = base.as_strided(r.shape, r.strides, base.storage_offset() + r.offset)
        for argument, number in self.copied:
            given[argument].copy_(outputs[number])
        self.seconds = min(self.seconds, time.perf_counter() - start)
        return outputs[:len(outputs) - len(self.copied)] if self.copied else outputs

    def holds(self, values: Mapping[Any, int]) -> bool:
        """Whether the plan runs for these sizes, given by symbol."""
        return self.sizes is None or self.sizes.holds(values)

    @property
    def is_spent(self) -> bool:
        """Whether the plan cannot run any more, because a run stopped half-way."""
        return self.captured is not None and self.captured.plan.failure is not None

    @property
    def is_pure(self) -> bool:
        """Whether a run does nothing but make new results."""
        return self.captured is not None and self.captured.is_pure and not self.copied and not self.missing

    def complete(self) -> None:
        """Compile the own forms of the kernels."""
        if self.captured is not None:
            self.captured.complete()

    def let_go(self) -> None:
        """Drop references to the memory of the last run's arguments and results. Must not be called during a run."""
        if self._has_run:
            self._has_run = False
            self._forget_memory()
            if self.captured is not None:
                self.captured.let_go()

    def _check_apart(self, given: Sequence[Any]) -> None:
        near = [(a, self.weights[k]) for a in self._apart_from_weights for begin, end in [span_of(given[a])]
                for k in np.flatnonzero((self._spans[:, 0] < end) & (begin < self._spans[:, 1]))]
        for a, b in (*self._apart, *near):
            if is_shared(given[a], given[b]):
                raise SharedMemoryError(f"arguments {a} and {b} share memory, and one of them is written: pass a copy of the other")

    def _read(self, given: Sequence[Any], places: TensorPlaces | None) -> tuple[list[Any], list[Any] | None]:
        """(the memory of all arguments, a list with the memory of kept arguments only). If `places` is the same object as in the last
        run, so is the list, which tells the capture that kept arguments have not changed; None stands for arguments that may have
        changed. A tensor at the address of the last run keeps its array, as long as PyTorch's stream on the GPU is the same."""
        if self._on_gpu is not None and (stream := stream_of(given[self._on_gpu])) != self._stream:
            self._stream = stream
            self._forget_memory()
        before, held = self._held
        stay = held is not None and before is places
        memory: list[Any] = list(held or ()) if stay else [None] * len(self.sources)
        for k, (i, order, read, *_) in self._loose if stay else enumerate(self.sources):
            t = given[i]
            known, address, array = self._seen[k]
            if t is not known or t.data_ptr() != address:
                array = read(t)
                if order is not None and t.grad_fn is None:  # remembered, unless it is a copy or would keep the graph of a gradient alive
                    self._seen[k] = t, t.data_ptr(), array
            memory[k] = array
        if not stay:
            held = None
            if places is not None and places.is_unchanged():        # no other thread has replaced their memory before it was read
                held = list(memory)
                for k, _ in self._loose:
                    held[k] = None
            self._held = places, held
        return memory, held


def _names_of(sizes: SizeVariables | None) -> dict[Any, str]:
    return {} if sizes is None else {s: str(s) for s in sizes.dims}


def _output(r: Result, made: Sequence[Tensor], given: Sequence[Any], values: Mapping[Any, int]) -> Any:
    if r.run < 0:
        return given[r.value] if r.is_argument else concrete(r.value, values)
    of_its_own = made[r.run]._memory is not None        # memory that no other run has
    t = torch_tensor(made[r.run], r.dtype, copied=r.is_copied and not of_its_own)
    if r.device is not None:
        t = t.to(r.device)
    if r.parts is not None:
        t = t.reshape(merged_shape(t.shape, r.parts))
    if r.order:
        t = t.permute(r.order)
    if r.shape is not None:
        t = t.expand(r.shape)
    if r.strides is None:
        return t
    return torch.empty_strided(t.shape, [concrete(s, values) for s in r.strides], dtype=t.dtype, device=t.device).copy_(t)


def make_plan(program: AtenProgram, given: Sequence[Any], constants: Mapping[int, Tensor], kept: Collection[int],
              config: PrepareConfig | None, variables: SizeVariables | None = None, apart: bool = False) -> Plan:
    """Make the plan of a program for arguments like `given`. `constants`: the weights among them, by number. `kept`: as in Plan.
    `variables`: the sizes that vary, for one plan for all of them. `apart`: as in `capture`.

    Raises SvodError for a graph that svod cannot run."""
    examples = [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"]
    rooms = {} if variables is None else {i: Room(variables.shape(e), given[i]) for i, e in enumerate(examples)
                                          if isinstance(e, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in e.shape)}
    sources, stand_ins = _sources(given, constants, rooms)
    found: list[tuple[Translation, list[Result], list[tuple[int, int]]]] = []
    clock = FallbackSeconds()
    sizes = symbols(program.graph, given)
    device = gpu_among([*given, *program.attributes.values()]) or HOST
    attributes = {name: constant(t).to(device) for name, t in program.attributes.items()}
    constants = {i: t.to(device) for i, t in constants.items()}

    def traced(*leaves: Tensor) -> list[Tensor]:
        placed = dict(zip([s.argument for s in sources], [leaf.to(device) for leaf in leaves], strict=True))
        inputs = [constants[i] if i in constants else _in_shape(placed[i], s) if (s := stand_ins.get(i)) is not None else
                  _value(a) if variables is None else variables.extent(examples[i]) if isinstance(examples[i], torch.SymInt) else
                  _value(a) for i, a in enumerate(given)]
        translation = translate(program.graph, inputs, attributes, clock, variables)
        _refuse_rebuilt(program, mutated_by(program, translation).keys())
        results, values, copied = _results(program, translation, sizes)
        if variables is not None:
            results = _of_any_size(results)
        in_place = bool(values)
        mutated = mutated_by(program, translation)
        # a result that is an argument's memory is copied by a kernel to memory of its own; a new content that is a written argument's
        # memory is copied first, as the assignments below would change it
        arguments = {i: base_of(leaf.uop) for i, leaf in placed.items()}
        values = [v.clone() if base_of(v.uop) in arguments.values() else v for v in values]
        written = {arguments[i] for i in mutated if i in arguments}
        new = [v.clone() if base_of(v.uop) in written else v for v in mutated.values()]
        for place, value in zip(mutated, new, strict=True):
            source = stand_ins.get(place)
            if in_place and source is not None and source.order is not None:
                placed[place].assign(value.permute(source.order) if source.order else value)
            else:
                copied.append((place, len(results)))
                results.append(Result(len(values), dtype=TORCH_DTYPES[value.dtype]))
                values.append(value.contiguous())
        found.append((translation, results, copied))
        return [*values, *translation.effects]
    tensors = [rooms[s.argument].tensor if s.argument in rooms else svod_tensor(in_order(given[s.argument], s.order), shared=True)
               for s in sources]
    captured = _captured(traced, program.name, tensors, config, apart)
    translation, results, copied = found[0]
    if captured is not None:
        results = [r._replace(is_copied=r.is_copied or (r.run >= 0 and captured.results[r.run].made is None)) for r in results]
    if device == HOST:
        results = [r._replace(device=None) for r in results]
    weights = {i: given[i] for i in constants}
    return Plan(sources, captured, results, mutated_by(program, translation).keys(), copied, kept, weights, translation.missing, clock,
                variables)


class _Nothing(Exception):
    """Raised for a graph without anything to compute."""


def _captured(traced: Any, name: str, tensors: list[Tensor], config: PrepareConfig | None, apart: bool) -> Captured | None:
    """The capture of a function of tensors; None if it returns none."""
    function = _Traced(traced, name)
    try:
        return capture(function, name, tuple(tensors), {}, tensors, config, False, apart)
    except _Nothing:
        return None


class _Traced:
    """A function that capture does not watch for changes, because it reads constants and arguments only."""

    def __init__(self, function: Any, name: str) -> None:
        self._function, self.__name__ = function, name

    def __call__(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        values = tuple(self._function(*leaves))
        if not values:
            raise _Nothing
        return values


def _sources(given: Sequence[Any], constants: Mapping[int, Tensor],
             rooms: Mapping[int, Room]) -> tuple[list[ArgumentSource], dict[int, ArgumentSource]]:
    """The arguments that the plan reads, as a list and by number. Tensors without elements are constants."""
    sources = []
    for i, t in enumerate(given):
        if i in rooms:
            sources.append(ArgumentSource(i, None, rooms[i].read, t.numel() * t.element_size(), gpu_of(t)))
        elif i not in constants and isinstance(t, torch.Tensor) and t.numel():
            svod_dtype(t.dtype)
            order = order_in_memory(t.shape, t.stride())
            order = () if order == tuple(range(t.ndim)) else order
            sources.append(ArgumentSource(i, order, reader(t, order), t.numel() * t.element_size(), gpu_of(t)))
    return sources, {s.argument: s for s in sources}


def _in_shape(leaf: Tensor, source: ArgumentSource) -> Tensor:
    """An argument, permuted to PyTorch's order of axes."""
    return leaf.permute(inverse(source.order)) if source.order else leaf


def _value(argument: Any) -> Any:
    return Tensor.zeros(tuple(argument.shape), dtype=svod_dtype(argument.dtype)) if isinstance(argument, torch.Tensor) else argument


def mutated_by(program: AtenProgram, translation: Translation) -> dict[int, Tensor]:
    """The tensors that replace the content of inputs, by the number of the input."""
    by_output = {place: translation.outputs[i] for i, place in program.mutations.items()}
    return {**translation.mutated, **{p: v for p, v in by_output.items() if isinstance(v, Tensor)}}


def _results(program: AtenProgram, translation: Translation, sizes: Mapping[Any, int]) -> tuple[list[Result], list[Tensor],
                                                                                          list[tuple[int, int]]]:
    """The outputs, the tensors that the run makes for them, each contiguous in memory order, and the pairs `copied` of Plan."""
    nodes = next(n for n in program.graph.nodes if n.op == "output").args[0]
    places = {n: i for i, n in enumerate(n for n in program.graph.nodes if n.op == "placeholder")}
    parts = _parts([n if isinstance(v, Tensor) and i not in program.mutations else None
                    for i, (n, v) in enumerate(zip(nodes, translation.outputs, strict=True))], sizes)
    results: list[Result] = []
    values: list[Tensor] = []
    for i, (node, value) in enumerate(zip(nodes, translation.outputs, strict=True)):
        if i in program.mutations:
            continue
        if isinstance(value, torch.fx.Node):
            results.append(Result(-1, places[value], True))
        elif isinstance(value, MergedAxes):
            results.append(Result(len(values), dtype=TORCH_DTYPES[value.tensor.dtype], parts=value.parts, device=_device_of(node)))
            values.append(value.tensor.contiguous())
        elif not isinstance(value, Tensor):
            results.append(Result(-1, node.meta["val"] if isinstance(value, Dim) else value))
        elif i in parts:
            base = parts[i].base
            assert base is not None
            results.append(parts[i]._replace(base=base - sum(m < base for m in program.mutations)))
        else:
            kept, result = _laid_out(value, node, sizes)
            results.append(result._replace(run=len(values), device=_device_of(node)))
            values.append(kept)
    return results, values, []


def _of_any_size(results: Sequence[Result]) -> list[Result]:
    """Mark results of a plan for all sizes: the run writes them in the layout of the largest sizes, and each call copies them to tensors
    of its own sizes. Raises UnsupportedError for an output with repeated elements, and for one that is a part of another."""
    if any(r.shape is not None for r in results):
        raise UnsupportedError("an output with repeated elements, or a part of another output")
    return [r._replace(is_copied=r.strides is None) for r in results]


def _refuse_rebuilt(program: AtenProgram, written: Collection[int]) -> None:
    """Raise UnsupportedError if PyTorch may rebuild an output as a view of memory that arguments share: it uses the output's storage
    offset, but svod's outputs have memory of their own, at offset 0. Such graphs cut the arguments, by as_strided, out of one argument
    that covers all of them."""
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    if any(user.target is torch.ops.aten.as_strided.default for i in written for user in placeholders[i].users):
        outputs = next(n for n in program.graph.nodes if n.op == "output").args[0]
        examples = [n.meta.get("val") for i, n in enumerate(outputs) if isinstance(n, torch.fx.Node) and i not in program.mutations]
        if any(isinstance(e, torch.Tensor) and e.storage_offset() != 0 for e in examples):
            raise UnsupportedError("arguments that share memory, one of which is written, and outputs that may be parts of it")


def _parts(nodes: Sequence[Any], sizes: Mapping[Any, int]) -> dict[int, Result]:
    """Outputs that are views of another output's memory in PyTorch, by number: a write to one changes the other. The largest dense
    output of a group is its base. `nodes`: the node of each output that the run makes, None for the other outputs."""
    sharing: dict[Any, list[tuple[int, Any]]] = {}
    for i, n in enumerate(nodes):
        if isinstance(n, torch.fx.Node) and isinstance(example := n.meta.get("val"), torch.Tensor):
            sharing.setdefault((StorageWeakRef(example.untyped_storage()).cdata, example.dtype), []).append((i, example))
    parts: dict[int, Result] = {}
    for together in (group for group in sharing.values() if len(group) > 1):
        shapes = {i: (tuple([concrete(n, sizes) for n in e.shape]), tuple([concrete(n, sizes) for n in e.stride()]),
                      concrete(e.storage_offset(), sizes)) for i, e in together}
        whole = max(shapes, key=lambda i: (order_in_memory(*shapes[i][:2]) is not None, math.prod(shapes[i][0])))
        if order_in_memory(*shapes[whole][:2]) is None or 0 in shapes[whole][0]:
            continue
        for i, (shape, strides, offset) in shapes.items():
            first = offset - shapes[whole][2]
            last = first + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            if i != whole and 0 not in shape and first >= 0 and last < math.prod(shapes[whole][0]):
                parts[i] = Result(-1, shape=shape, strides=strides, base=whole, offset=first)
    return parts


def _device_of(node: Any) -> Any:
    """The device of an output in PyTorch; None for an output without an example."""
    example = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return example.device if isinstance(example, torch.Tensor) else None


def _laid_out(value: Tensor, node: Any, sizes: Mapping[Any, int]) -> tuple[Tensor, Result]:
    """(the tensor that the run makes for an output, the Result that turns it into the tensor with PyTorch's strides)."""
    dtype = TORCH_DTYPES[value.dtype]
    example = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    shape = value.shape
    if not isinstance(example, torch.Tensor) or 0 in shape:
        return value.contiguous(), Result(0, dtype=dtype)
    strides = tuple([concrete(s, sizes) for s in example.stride()])
    repeated = [i for i, (n, s) in enumerate(zip(shape, strides, strict=True)) if s == 0 and n > 1]
    for axis in repeated:
        value = value.narrow(axis, 0, 1)
    order = order_in_memory([1 if i in repeated else concrete(n, sizes) for i, n in enumerate(example.shape)], strides)
    if order is None:
        gaps = None if repeated else tuple(example.stride()) if is_symbolic(shape) else strides
        return value.contiguous(), Result(0, dtype=dtype, strides=gaps, shape=shape if repeated else None)
    expanded = shape if repeated else None
    if order == tuple(range(len(shape))):
        return value.contiguous(), Result(0, dtype=dtype, shape=expanded)
    return value.permute(order).contiguous(), Result(0, dtype=dtype, order=inverse(order), shape=expanded)


# -- sizes --------------------------------------------------------------------------------------------

def symbols(graph: Any, given: Sequence[Any]) -> dict[Any, int]:
    """The value of each symbol in a graph's sizes, taken from its arguments."""
    values: dict[Any, int] = {}
    for node, argument in zip([n for n in graph.nodes if n.op == "placeholder"], given, strict=True):
        example = node.meta.get("val")
        if isinstance(example, torch.SymInt):
            _note(example, argument, values)
        elif isinstance(example, torch.Tensor) and isinstance(argument, torch.Tensor):
            for s, n in zip((*example.shape, *example.stride()), (*argument.shape, *argument.stride()), strict=True):
                if isinstance(s, torch.SymInt):
                    _note(s, n, values)
    return values


def _note(size: Any, n: int, values: dict[Any, int]) -> None:
    if size.node.expr.is_Symbol:
        values[size.node.expr] = n


def concrete(size: Any, sizes: Mapping[Any, int]) -> int:
    """A size as an int, with `sizes` for its symbols. Other values stay as they are."""
    return int(size.node.expr.subs(sizes)) if isinstance(size, torch.SymInt) else size


def bytes_of(tensors: Sequence[Any]) -> int:
    """The bytes of PyTorch tensors."""
    return sum(math.prod(t.shape) * t.element_size() for t in tensors)
