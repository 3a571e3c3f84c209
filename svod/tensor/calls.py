"""Kernels written by hand, applied to tensors: `call_kernel`."""
from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from svod.core.graph import graph
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.kernel import Kernel
from svod.core.schedule.calls import bindings_of, check_call, kernel_of_call, values_of, written_slots
from svod.core.schedule.thread_indices import over_ranges
from svod.errors import ArgumentError, ScheduleError
from svod.tensor.tensor import Tensor


def call_kernel(ast: UOp, *tensors: Tensor, loop: tuple[str, int] | None = None, **variables: int) -> tuple[Tensor, ...]:
    """Apply a kernel written by hand to tensors, one per slot, when they are realised. Returns the tensors that the kernel writes.

    `ast`: a kernel as in docs/ir.md, section 2: a SINK of STOREs over flat, row-major PARAMs. Its loops are RANGEs, or positions of a
    launch (SPECIAL, core_id). A tensor whose slot the kernel stores to is assigned (`Tensor.assign`): it must be a whole array, and keeps
    the elements that the kernel does not store. `variables`: the values of the DEFINE_VARs that the kernel reads, except core_id, which the
    launch counts. `loop`: (name, times). The kernel runs for the values 0, 1, … times-1 of that variable in order; each run sees what the
    run before has written. Kernels that differ only in where a run begins in its arrays are compiled once.

    Raises ArgumentError for numbers that are not ints; ScheduleError for a kernel that does not fit the tensors, that reads a slot
    it writes at other positions, or that is not provably in bounds with one write per element; CompileError for an `ast` that is not a
    kernel, and for positions that no launch has."""
    for t in tensors:
        if not isinstance(t, Tensor):
            raise ArgumentError(f"call_kernel takes a tensor per slot, got {type(t).__name__}; numbers are keywords, as in n=3")
    slots = sorted({s.src[0].src[0].arg.slot for s in ast.src if graph.is_kernel_store(s)}) if ast.op is Ops.SINK else []
    sources = [t.uop for t in tensors]
    for slot in (s for s in slots if s < len(tensors)):
        sources[slot] = _memory(tensors[slot], slot)
    bounds = {u.arg[0]: u for u in over_ranges(ast).walk(Ops.DEFINE_VAR)}
    _check_numbers(bounds, variables, loop)
    values = {name: UOp.const(dtypes.index, int(value)) for name, value in variables.items()}
    counted, count = loop or ("", 0)
    turns = UOp(Ops.RANGE, dtypes.index, (UOp.const(dtypes.index, int(count)),), 0) if loop else None
    if turns is not None and counted in bounds:
        values[counted] = turns
    binds = [UOp(Ops.BIND, dtypes.index, (bounds[name], value)) for name, value in sorted(values.items())]
    call = UOp(Ops.CALL, dtypes.void, (*sources, *binds), ast)
    check_call(call)
    first = [(name, low) for name, value in bindings_of(call).items() for low, _ in [values_of(value)]]
    kernel, _, _ = kernel_of_call(ast, first, {})
    Kernel(kernel)
    done = call if turns is None else UOp(Ops.END, dtypes.void, (call, turns))
    written = []
    for slot in written_slots(call):
        content = graph.base_of(sources[slot])
        tensors[slot]._replace_content(content, UOp(Ops.AFTER, content.dtype, (content, done)))
        written.append(tensors[slot])
    return tuple(written)


def _check_numbers(known: Iterable[str], variables: Mapping[str, int], loop: tuple[str, int] | None) -> None:
    if loop is not None and (not isinstance(loop, tuple) or len(loop) != 2):
        raise ArgumentError(f'call_kernel: loop={loop!r} must be a name and a count, as in ("i", 10)')
    for name, number in (*variables.items(), *([loop] if loop is not None else ())):
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise ArgumentError(f"call_kernel: {name} must be an int, got {number!r} of {type(number).__name__}")
    unknown = sorted(set(variables) - set(known))
    if unknown:
        raise ArgumentError(f"call_kernel: the kernel reads no variable {unknown[0]}; it reads {', '.join(sorted(known)) or 'none'}")
    counted, _ = loop or ("", 0)
    if counted in variables:
        raise ArgumentError(f"call_kernel: {counted} is counted by the loop and cannot be given as well")


def _memory(tensor: Tensor, slot: int) -> UOp:
    """The content of the memory of a tensor, which is allocated if the tensor has none."""
    if 0 in tensor.shape or graph.content_under(tensor.uop) not in (None, graph.base_of(tensor.uop)):
        raise ScheduleError(f"slot {slot} of a kernel is written: it takes a whole array with elements, got a part or no elements, of "
                            f"shape {tensor.shape}")
    if not tensor._is_in_memory():
        tensor._take_memory()
    return graph.base_of(tensor.uop)
