"""The capture of one signature, and the steps of a call: bind the arguments, bind memory for the results, run the plan.

    arrays → addresses of inputs | free memory → addresses of outputs | one native call → tensors over that memory

No graph is built. A result is a tensor over an array; its graph node is made when it is first used in a computation.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from svod.compile.plan.plan_parts import address_of
from svod.compile.plan.result_memory import ResultMemory
from svod.core.graph import graph
from svod.core.graph.buffer import Array, aligned_empty, buffer_of
from svod.core.graph.shapes import shape_of
from svod.core.graph.storage import base_of
from svod.core.graph.written import WrittenMemory, span_of
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.launch import evaluate_extent
from svod.core.ir.uop import Ops, UOp
from svod.core.ir.variable import Dim, is_symbolic, layout_shape, number_of, rebound, value_of, without_binds
from svod.core.machine.target import HOST
from svod.errors import LaunchError
from svod.prepare import Prepared
from svod.tensor import Tensor
from svod.tracing.arguments import Leaf, as_tensor, buffer_under, mapped, memory_of, rebuild


class _Result(NamedTuple):
    """The memory of a result of the function. `made`: its buffer number, if each run allocates it. `given`: the number of the argument,
    if that is returned. Otherwise `node`: a BUFFER that existed before the capture."""

    shape: tuple[int, ...]
    made: int | None
    given: int | None
    node: UOp | None


class _SizedResult:
    """A result of a symbolic shape, whose sizes are those of a run."""

    def __init__(self, shape: tuple[Any, ...], dtype: DType) -> None:
        self.dtype, self._layout = dtype, layout_shape(shape)
        # `_bound`: the values that the function bound itself; arguments' sizes have those of the run instead
        whole, self._bound, _ = without_binds(graph.sink(*(number_of(n, dtypes.int64) for n in shape)))
        self._extents = [u.src[0] if u.op is Ops.CAST else u for u in whole.src]

    def tensor(self, array: Array, values: Mapping[str, int]) -> Tensor:
        """Copy the result to a tensor of its shape. `values`: those of the arguments' variables. `array`: the memory of the run."""
        values = {**self._bound, **values}
        shape = tuple([values[e.arg[0]] if e.op is Ops.DEFINE_VAR else evaluate_extent(e, values) for e in self._extents])
        made = aligned_empty(math.prod(shape), self.dtype).reshape(shape)
        made[...] = array.reshape(self._layout)[tuple([slice(n) for n in shape])]
        return Tensor._over(made, self.dtype, False)


class Captured:
    """The plan of one signature, the buffers of its inputs and the memory of its results."""

    def __init__(self, prepared: Prepared, inputs: Sequence[UOp], structure: Any, results: Sequence[UOp], draws: int = 0) -> None:
        self.prepared, self.plan, self.structure = prepared, prepared.plan, structure
        self.draws = draws              # number of random keys that a run consumes
        self.changed: Callable[[], str] = lambda: ""    # the name of a watched value that has changed since the capture; "" if none
        numbers = [prepared.numbers.get(u) for u in inputs]      # buffer number of each input; None if the function does not read it
        self.reads = [(i, n) for i, n in enumerate(numbers) if n is not None]
        made = {prepared.nodes[i]: i for i in prepared.unbound.outputs if prepared.is_new(i)}
        outputs = iter(prepared.unbound.outputs)
        self.results = []
        for u in results:
            base = base_of(u)
            node = base if base.op is Ops.BUFFER else prepared.nodes[next(outputs)]
            given = inputs.index(node) if node in inputs else None
            self.results.append(_Result(shape_of(u), made.get(node), given, node))
        self.made = {number: self._memory_for(number) for number in dict.fromkeys(made.values())}
        # memory of the plan that stays the same from run to run, unlike that of arguments and results
        bound = {number for _, number in self.reads} | self.made.keys()
        self._fixed = {i: span_of(array) for i, b in enumerate(self.plan.buffers) if i not in bound
                       and (array := b.storage.host if b.storage is not None else b.array) is not None}
        self._written = [i for i, number in self.reads if number in prepared.overwritten]       # the numbers of arguments that a run writes
        self._loose, self._loose_written = self.reads, self._written        # `reads` and `_written` without the arguments of `hold`
        self._is_released = False       # whether the plan has dropped the arguments and results of the capture's own call
        self._held: tuple[object, int] = (None, -1)     # `held` of the last run, and the count of the plan's bindings after it
        self._memory = WrittenMemory(self._fixed, prepared.overwritten) if prepared.overwritten else None
        # each result has fresh memory of its own: tensors over the arrays suffice, without graph nodes
        numbers = [r.made for r in self.results]
        leaves: list[Any] = []
        mapped(structure, leaves.append)
        self._has_extents = any(isinstance(leaf, Dim) for leaf in leaves)
        self._is_tuple = type(structure) is tuple and all(part is Tensor for part in structure)
        self._is_apart = None not in numbers and len({*numbers}) == len(numbers)
        self._sized = self._sized_results()
        self._is_plain = self._is_apart and not any(is_symbolic(r.shape) for r in self.results)

    def _sized_results(self) -> list[_SizedResult | None]:
        """The results whose sizes vary; None in place of each result of a constant shape."""
        return [_SizedResult(r.shape, self.made[r.made].dtype) if r.made is not None and is_symbolic(r.shape) else None
                for r in self.results]

    def _of_their_sizes(self, results: Mapping[int, Array], values: Mapping[str, int]) -> Any:
        """The function's results as tensors of the sizes that they have in this run."""
        made = [Tensor._over(results[r.made], self.made[r.made].dtype, False) if one is None      # type: ignore[index]
                else one.tensor(results[r.made], values) for r, one in zip(self.results, self._sized, strict=True)]  # type: ignore[index]
        return tuple(made) if self._is_tuple else self._rebuilt(made, values, True)

    def _rebuilt(self, made: Iterable[Tensor], values: Mapping[str, int], sized: bool) -> Any:
        """The function's result with `made` as its tensors. Extents that it returns have their values in this run: as integers if `sized`,
        else as Dims in which the variables are bound to them."""
        def of_this_run(value: Any) -> Any:
            if not isinstance(value, Dim):
                return value
            (now,) = rebound((value,), values)
            return value_of(now, values) if sized else now
        return rebuild(mapped(self.structure, of_this_run) if self._has_extents else self.structure, iter(made))

    def _memory_for(self, number: int) -> ResultMemory:
        """The memory of an output, in the shape of its result if exactly one result uses it, else flat. `let_go` releases it together with
        the plan's bindings."""
        spec = self.prepared.unbound.buffers[number]
        shapes = [r.shape for r in self.results if r.made == number]
        plain = len(shapes) == 1 and not is_symbolic(shapes[0])
        return ResultMemory(shapes[0] if plain else (spec.size,), spec.dtype, keeps_large=True)

    def hold(self, arguments: Iterable[int]) -> None:
        """Declare arguments, by number, as unchanging: `run` does not read them again while its argument `held` is the same object."""
        held = frozenset(arguments)
        self._loose = [(i, number) for i, number in self.reads if i not in held]
        self._loose_written = [i for i in self._written if i not in held]

    def run(self, given: Sequence[Leaf], values: Mapping[str, int], held: object = None, sized: bool = False) -> Any:
        """Run the plan over the arguments and return the function's results. `held`: an object that identifies the arguments declared by
        `hold`; None: these may differ from the last run's. `sized`: results of symbolic shapes may be tensors of the sizes that they have
        in this run, in memory of their own, and extents are integers. Raises LaunchError and ScheduleError."""
        plan, results = self.plan, {}
        if not plan.is_local:
            return self._run_on_devices(given, values, sized)
        with plan.lock:
            bound = plan.bindings.arrays
            stay = held is not None and self._held[0] is held and self._held[1] == plan.bindings.count
            moved = []
            for i, number in self._loose if stay else self.reads:
                array = memory_of(given[i])
                if bound.get(number) is not array:
                    moved.append((number, array, address_of(array)))
            if self._memory is not None:
                spans = {number: (address, address + array.nbytes) for number, array, address in moved}
                earlier = self._memory.move(spans) if spans else spans
                try:
                    self._check_written(given, self._loose_written if stay else self._written)
                except LaunchError:         # take back the move: the plan stays bound to the memory of the call before
                    self._memory.move(earlier)
                    raise
            for number, array, address in moved:        # dtypes and sizes need no check: they are part of the signature's key
                plan.bindings.bind_new(number, array, address)
            for number, kept in self.made.items():
                memory = kept.take(bound, number)
                if memory.array is not bound.get(number):
                    plan.bindings.bind_new(number, memory.array, memory.address)
                results[number] = memory.array
            self._held = held, plan.bindings.count
            if values:
                known = plan.variables
                plan.set_variables(values if values.keys() <= known.keys() else {n: v for n, v in values.items() if n in known})
            plan.execute()
        if self._is_plain:
            if self.structure is Tensor:
                (array,) = results.values()
                return Tensor._over(array, kept.dtype, False)
            made = [Tensor._over(results[r.made], self.made[r.made].dtype, False) for r in self.results]     # type: ignore[index]
            return tuple(made) if self._is_tuple else self._rebuilt(made, values, sized)
        if sized and self._is_apart:
            return self._of_their_sizes(results, values)
        return self._rebuilt(self._tensors(results, given, values), values, sized)

    def release_example(self) -> None:
        """Release the arguments and results of the call that was captured, whose memory the plan used: each run binds its own."""
        if self.plan.is_local:
            numbers = {*(n for _, n in self.reads), *self.made}
            for number in numbers:
                buffer = buffer_of(self.prepared.nodes[number])
                if buffer.device == HOST and buffer.host is not None:
                    buffer.close(buffer.closed or "a captured plan has the memory of its last run; use what that returned")
            self.plan.bindings.release(numbers)
            self._is_released = True

    @property
    def is_pure(self) -> bool:
        """Whether a run, on the host, does nothing but make new results, each in memory of its own."""
        return self._is_apart and self._memory is None and not self.draws and self.plan.is_local

    def complete(self) -> None:
        """Compile the own forms of the plan's kernels."""
        self.plan.complete()

    @property
    def result_bytes(self) -> int:
        """The bytes of a run's results."""
        return sum(memory.nbytes for memory in self.made.values())

    def let_go(self) -> None:
        """Release the arguments and results of the last run. Does nothing while the plan runs, or if the plan still keeps the arguments
        of its capture."""
        if self._is_released and self.plan.lock.acquire(blocking=False):
            try:
                if not self.plan.is_running:        # it is running if a function that the plan calls back called this
                    self.plan.bindings.release()
                    for memory in self.made.values():
                        memory.let_go()
                    self._held = None, -1
            finally:
                self.plan.lock.release()

    def _run_on_devices(self, given: Sequence[Leaf], values: Mapping[str, int], sized: bool) -> Any:
        """`run` on devices other than the host: binds the arguments' buffers, and leaves the results in the memory of their device."""
        plan = self.plan
        with plan.lock:
            buffers = {number: buffer_under(given[i]) for i, number in self.reads}
            if self._memory is not None:
                self._check_written(given, self._written)
                WrittenMemory({**self._fixed, **{n: span_of(b.host) for n, b in buffers.items() if b.host is not None}},
                              self.prepared.overwritten)        # raises if written memory overlaps other memory
            nodes = {number: self.prepared.new_buffer(number) for number in self.made}
            for number, buffer in (*buffers.items(), *((number, buffer_of(node)) for number, node in nodes.items())):
                plan.bindings.bind_buffer(number, buffer)
            plan.set_variables({n: v for n, v in values.items() if n in plan.variables})
            try:
                plan.execute()
            except LaunchError:     # its device may be lost: let the next call capture again, possibly for another device
                self.changed = lambda: "a run that failed"
                raise
        return self._rebuilt(self._tensors(nodes, given, values), values, sized)

    def _tensors(self, made: Mapping[int, Array | UOp], given: Sequence[Leaf], values: Mapping[str, int]) -> list[Tensor]:
        """The results as tensors with graph nodes; results over the same memory share a node."""
        nodes: dict[int, UOp] = {}
        for number, memory in made.items():
            if isinstance(memory, UOp):
                nodes[number] = memory
            else:
                nodes[number] = self.prepared.new_buffer(number)
                buffer_of(nodes[number]).bind(memory.reshape(-1))
        tensors = []
        for r in self.results:
            node = nodes[r.made] if r.made is not None else base_of(as_tensor(given[r.given]).uop) if r.given is not None else r.node
            assert node is not None
            view = graph.storage_view(node, rebound(r.shape, values)) if is_symbolic(r.shape) else graph.reshape(node, r.shape)
            tensors.append(Tensor.from_uop(view))
        return tensors

    def _check_written(self, given: Sequence[Leaf], written: Iterable[int]) -> None:
        """Raise LaunchError for an argument that the plan writes if it is read-only or is not a contiguous, aligned array of a native
        type."""
        for i in written:
            leaf = given[i]
            if isinstance(leaf, Tensor) and leaf.device != HOST:
                continue
            array = memory_of(leaf)
            if array is not leaf and isinstance(leaf, np.ndarray):
                raise LaunchError(f"argument {i} is assigned to, and it is not a C-contiguous, aligned array of a native type; pass a copy")
            if not array.flags.writeable:
                raise LaunchError(f"argument {i} is assigned to, and its memory is read-only; pass a copy")
