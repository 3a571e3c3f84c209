"""Applies hand-written kernels to tensors (`call_kernel`), also in loops (`call_loop`)."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from types import TracebackType

import numpy as np

from svod.core.graph.storage import base_of, content_under, is_kernel_store, storage_of
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.kernel import Kernel
from svod.core.schedule.calls import bindings_of, check_call, kernel_of_call, range_bounds, values_of, written_slots
from svod.core.schedule.thread_indices import over_ranges
from svod.errors import ArgumentError, ScheduleError
from svod.tensor.tensor import Tensor


def call_kernel(ast: UOp, *tensors: Tensor, **variables: int | CallLoop) -> tuple[Tensor, ...]:
    """Apply a hand-written kernel to tensors, one per slot, when they are realised. Returns the tensors that the kernel writes.

    `ast`: a kernel as in docs/ir.md, section 2: a SINK of STOREs over flat, row-major PARAMs. Its loops are RANGEs, or positions of a
    launch (SPECIAL, core_id). A tensor whose slot the kernel stores to is assigned (`Tensor.assign`): it must be a whole array, and
    elements that the kernel does not store keep their values. `variables`: the values of the DEFINE_VARs that the kernel reads, except
    core_id, which the launch sets: an int, or the counter of a `call_loop` around the call.

    Raises ArgumentError for variables that are neither, and for a counter outside its loop; ScheduleError for a kernel that does not fit
    the tensors, that reads a slot it writes at other positions, or that is not provably in bounds with one write per element; CompileError
    for an `ast` that is not a kernel, and for SPECIAL nodes that are no positions of a launch."""
    for t in tensors:
        if not isinstance(t, Tensor):
            raise ArgumentError(f"call_kernel takes a tensor per slot, got {type(t).__name__}; numbers are keywords, as in n=3")
    slots = sorted({s.src[0].src[0].arg.slot for s in ast.src if is_kernel_store(s)}) if ast.op is Ops.SINK else []
    sources = [t.uop for t in tensors]
    for slot in (s for s in slots if s < len(tensors)):
        sources[slot] = _memory(tensors[slot], slot)
    bounds = {u.arg[0]: u for u in over_ranges(ast).walk(Ops.DEFINE_VAR)}
    _check_variables(bounds, variables)
    binds = []
    for name, given in sorted(variables.items()):
        value = given.counter if isinstance(given, CallLoop) else UOp.const(dtypes.index, int(given))
        binds.append(UOp(Ops.BIND, dtypes.index, (bounds[name], value)))
    binds += [loop.bind for loop in _open.get() if all(given is not loop for given in variables.values())]
    call = UOp(Ops.CALL, dtypes.void, (*sources, *binds), ast)
    check_call(call)
    first = [(name, low) for name, value in bindings_of(call).items() for low, _ in [values_of(value)]]
    kernel, _, _ = kernel_of_call(ast, first, {})
    Kernel(kernel)
    written = written_slots(call)
    _leave(call, [base_of(sources[slot]) for slot in written])
    return tuple(tensors[slot] for slot in written)


class CallLoop:
    """A loop of calls with its counter, made by `call_loop`."""

    def __init__(self, times: int, depth: int) -> None:
        self.counter = UOp(Ops.RANGE, dtypes.index, (UOp.const(dtypes.index, times),), depth)
        turn = UOp(Ops.DEFINE_VAR, dtypes.index, (), (f"turn {depth}", 0, times - 1))
        self.bind = UOp(Ops.BIND, dtypes.index, (turn, self.counter))       # marks a call as part of the loop; kernels do not read it
        self.units: list[UOp] = []              # the calls and loops inside it
        self.before: dict[UOp, UOp] = {}        # storage → its content before the loop
        self.latest: dict[UOp, UOp] = {}        # storage → its content after the calls so far

    def __enter__(self) -> CallLoop:
        if self.counter.arg != len(_open.get()) or self.units:
            raise ArgumentError("call_loop: the loop is entered where it is made, once: with svod.call_loop(10) as i")
        _open.set((*_open.get(), self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the loop. After an exception, no call of the loop takes effect: the tensors are unchanged."""
        _open.set(_open.get()[:-1])
        for storage, before in self.before.items():
            Tensor._replace_content(self.latest[storage], before)
        if kind is None and self.units:
            _leave(UOp(Ops.END, dtypes.void, (*self.units, self.counter)), list(self.before.values()))


_open: ContextVar[tuple[CallLoop, ...]] = ContextVar("open", default=())
"""The loops that calls of this thread stand in, from the outermost."""


def call_loop(times: int) -> CallLoop:
    """Repeat calls: calls under `with call_loop(times) as i` run `times` times, in that order, when the tensors are realised.

    The counter i is 0, 1, … in successive iterations: `call_kernel(ast, x, y, i=i)` binds a variable of the kernel to it. Each call sees
    the writes of all calls before it, in this iteration and in earlier ones. Loops nest: calls of the inner loop may use both counters. The
    body of the `with` runs once; only calls of `call_kernel` are repeated, and tensors that they write have their final values after the
    loop. Inside the loop, values that depend on these tensors can only be computed by called kernels. Kernels that differ only in the
    offsets of their arrays are compiled once.

    Raises ArgumentError for `times` that is not an int, ScheduleError for fewer than one."""
    if isinstance(times, bool) or not isinstance(times, (int, np.integer)):
        raise ArgumentError(f"call_loop: the number of turns must be an int, got {times!r} of {type(times).__name__}")
    loop = CallLoop(int(times), len(_open.get()))
    range_bounds(loop.counter)
    return loop


def _leave(done: UOp, contents: list[UOp]) -> None:
    """Set the result of a call or loop as the content of the tensors over `contents`, and add the call or loop to the innermost open
    loop, if there is one."""
    around = _open.get()
    for content in contents:
        new = UOp(Ops.AFTER, content.dtype, (content, done))
        Tensor._replace_content(content, new)
        if around:
            storage = storage_of(content)
            around[-1].before.setdefault(storage, content)
            around[-1].latest[storage] = new
    if around:
        around[-1].units.append(done)


def _check_variables(known: Iterable[str], variables: Mapping[str, int | CallLoop]) -> None:
    for name, given in variables.items():
        if isinstance(given, CallLoop):
            if given not in _open.get():
                raise ArgumentError(f"call_kernel: {name} is the counter of a call_loop that this call does not stand in")
        elif isinstance(given, bool) or not isinstance(given, (int, np.integer)):
            raise ArgumentError(f"call_kernel: {name} must be an int or the counter of a call_loop, got {given!r} of "
                                f"{type(given).__name__}")
    unknown = sorted(set(variables) - set(known))
    if unknown:
        raise ArgumentError(f"call_kernel: the kernel reads no variable {unknown[0]}; it reads {', '.join(sorted(known)) or 'none'}")


def _memory(tensor: Tensor, slot: int) -> UOp:
    """The content of a tensor's memory, which is allocated if the tensor has none."""
    if 0 in tensor.shape or content_under(tensor.uop) not in (None, base_of(tensor.uop)):
        raise ScheduleError(f"slot {slot} of a kernel is written: it takes a whole array with elements, got a part or no elements, of "
                            f"shape {tensor.shape}")
    if not tensor._is_in_memory():
        tensor._take_memory()
    return base_of(tensor.uop)
