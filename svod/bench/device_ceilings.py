"""Measures the peak rates of a device with groups of threads. The kernels are scheduled by the device's heuristic and run on its queue:

    fma      STEPS dependent multiply-adds per element; many threads hide their latency
    matrix   the product of two tiles, repeated TURNS times with the type's largest matrix instruction; operands stay in registers or
             shared memory
    read     the sum of SUMMED_ROWS rows; each group sums its own columns
    write    one value, stored to every element
    copy     every element times a scalar in memory

Every launch uses the same working set again, so the curve holds for warm operands, as on the CPU. Times come from the device's own clock
if it has one. A device is measured as a whole: each pair (one core, all threads) of the CPU's figures has the same number twice. The rate
of a type is the best of its multiply-adds and its matrix instructions; float16 and bfloat16 also count the multiply-adds of float32, which
may accumulate them.
"""
from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from svod.bench.ceiling_loops import CurvePoint, MeasuredCeilings, falling
from svod.bench.timer import Contestant, calibrate, time_calls
from svod.compile.backend import Backend, backend_named
from svod.compile.lower.lower import lower
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.graph import graph
from svod.core.graph.buffer import Array, aligned_empty, float32_to_bfloat16_bits
from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.isa import DOTS, Dot
from svod.core.machine.target import Target
from svod.core.schedule.schedule import create_schedule
from svod.errors import UnsupportedError

STEPS = 128                         # dependent multiply-adds per element
SUMMED_ROWS = 16
FMA_ELEMENTS = 1 << 16              # least number of elements of fma; four per thread that the device can hold, if that is more
TILE, UPCAST = (128, 256), (4, 8)   # rows and columns of a group's tile; matrix tiles per subgroup, in registers
PRODUCTS_IN_FLIGHT = 4              # instructions with operands in shared memory that are issued before waiting for their results
GROUPS, TURNS = 8, 1024             # groups per unit of the device; products that each group sums up
SMALLEST_SET_BYTES = 256 << 10      # bytes of the smallest working set of the curve
LARGEST, QUICK = 128 << 20, 32 << 20    # bytes of the largest working set; four times the second cache, if that is more
SKETCHES = 4                        # number of sketches that are timed besides the heuristic's schedule; the fastest counts
SAMPLES, QUICK_SAMPLES = 8, 3
SAMPLE_SECONDS = 5e-3


def measure_figures(target: Target, threads: int, *, quick: bool) -> MeasuredCeilings:
    """Measure the device that `target` describes. `threads`, a number of host threads, is ignored."""
    samples = QUICK_SAMPLES if quick else SAMPLES
    flops: dict[str, tuple[float, float]] = {}
    for dtype in (dtypes.float32,) if quick else (dtypes.float32, dtypes.float16, dtypes.float64):
        with contextlib.suppress(UnsupportedError):     # the device lacks this type
            flops[dtype.name] = _twice(fma_rate(target, dtype, samples))
    for dot in matrix_dots(target):
        name = dot.operands[0].name
        flops[name] = _twice(max(matrix_rate(target, dot, samples), flops.get(name, (0.0,))[0]))
    for name in ("float16", "bfloat16"):
        if name in flops:
            flops[name] = max(flops[name], flops["float32"])
    largest = QUICK if quick else max(LARGEST, 4 * target.l2)
    curve = {size: CurvePoint(size, *(memory_rate(target, kind, size, samples) for kind in ("read", "copy")))
             for size in ([largest] if quick else _doubling(SMALLEST_SET_BYTES, largest))}
    memory = {"read": curve[largest].read, "write": memory_rate(target, "write", largest, samples), "copy": curve[largest].copy}
    return MeasuredCeilings(flops, {"memory": {kind: _twice(rate) for kind, rate in memory.items()}},
                            _twice(launch_seconds(target, samples)), () if quick else falling(curve[size] for size in sorted(curve)))


def fma_rate(target: Target, dtype: DType, samples: int) -> float:
    """Flops per second of multiply-adds; a multiply-add counts as two."""
    size = max(FMA_ELEMENTS, 4 * target.units * target.unit_threads)
    return 2.0 * STEPS * size / _seconds(target, fma_ast(dtype, size), samples)


def fma_ast(dtype: DType, size: int) -> UOp:
    """The kernel x → x·m + c, applied STEPS times to each of `size` elements. Built by hand: the scheduler would cut such a long chain."""
    x, m, c = (graph.buffer(dtype, n) for n in (size, 1, 1))
    ast = _ast_of(graph.alu(Ops.ADD, graph.alu(Ops.MUL, x, graph.expand(m, (size,))), graph.expand(c, (size,))))
    step = next(iter(ast.walk(Ops.STORE))).src[1]
    element = next(u for u in step.walk(Ops.LOAD) if u.src[0].src[0].arg.size == size)
    value = step
    for _ in range(STEPS - 1):
        value = step.substitute({element: value})
    return ast.substitute({step: value})


def matrix_dots(target: Target) -> list[Dot]:
    """The largest matrix instruction of the target for each operand type."""
    largest: dict[DType, Dot] = {}
    for dot in DOTS.values():
        if dot.is_tile and dot.runs_on(target):
            largest[dot.operands[0]] = max(dot, largest.get(dot.operands[0], dot), key=_products)
    return list(largest.values())


def matrix_rate(target: Target, dot: Dot, samples: int) -> float:
    """Flops per second of a matrix instruction; a multiply-add counts as two."""
    rows, turns = TILE[0] * GROUPS * target.units, TURNS
    state = matrix_state(Kernel(matrix_ast(dot, rows, TILE[1], turns)), target, dot, TILE)
    return 2.0 * rows * TILE[1] * depth_of(dot) * turns / _fastest(state.kernel, [state], samples)


def matrix_ast(dot: Dot, rows: int, columns: int, turns: int) -> UOp:
    """The kernel that sums up a·bᵀ `turns` times, where a and b have `depth_of` columns. Floats are summed in float32 and stored in
    their own type, integers in int32. Built by hand: the scheduler would replace the repeated sum by a multiplication with `turns`."""
    dtype, depth = dot.operands[0], depth_of(dot)
    a, b = (graph.cast(graph.buffer(dtype, n * depth), dot.accumulator) for n in (rows, columns))
    factors = graph.reshape(a, (rows, 1, depth)), graph.reshape(b, (1, columns, depth))
    total = graph.reduce_axis(graph.alu(Ops.MUL, *(graph.expand(f, (rows, columns, depth)) for f in factors)), "ADD", (2,))
    ast = _ast_of(graph.cast(total, dtype) if dtype.is_float else total)
    once = next(iter(ast.walk(Ops.REDUCE)))
    turn = sy.make_range(turns, 1 + max(int(r.arg) for r in ast.walk(Ops.RANGE)))
    return ast.substitute({once: once.replace(src=(once.src[0], turn, *once.src[1:]))})


def depth_of(dot: Dot) -> int:
    """The extent of the reduction axis of one product."""
    return dot.positions * (PRODUCTS_IN_FLIGHT if dot.reads_shared else 1)


def matrix_state(kernel: Kernel, target: Target, dot: Dot, tile: tuple[int, int]) -> Scheduler:
    """The state of a kernel of `matrix_ast` whose innermost loop consists of matrix instructions only: a group computes a tile, with its
    operands in shared memory or registers."""
    chain = [Opt("TC", "r1", (dot.name, "o0", "o1"))]
    upcast = (1, 1) if dot.reads_shared else UPCAST
    for axis, amount in zip(("o0", "o1"), upcast, strict=True):
        chain += [Opt("UPCAST", axis, amount)] if amount > 1 else []
    for axis, extent, own, amount in zip(("o0", "o1"), tile, (dot.rows, dot.columns), upcast, strict=True):
        threads = extent // (own * amount)
        chain += [Opt("LOCAL", axis, threads)] if threads > 1 else []
    chain += [Opt("STAGE", stage.name, "o0") for stage in kernel.stages if not stage.is_output]
    chain += [Opt("UNROLL", "r1", 0)] if dot.reads_shared else []
    return apply_opts(Scheduler(kernel, target), chain)


def _products(dot: Dot) -> int:
    return dot.rows * dot.columns * dot.positions


def memory_rate(target: Target, kind: str, size: int, samples: int) -> float:
    """Bytes per second of `kind` (read, write or copy) over a working set of `size` bytes; bytes read and bytes written both count."""
    return size / _seconds(target, memory_ast(kind, size // dtypes.float32.itemsize), samples)


def memory_ast(kind: str, elements: int) -> UOp:
    """The kernel of `kind` that reads and writes `elements` float32 elements in total."""
    if kind == "read":
        count = elements // (SUMMED_ROWS + 1)
        rows = graph.reshape(graph.buffer(dtypes.float32, SUMMED_ROWS * count), (SUMMED_ROWS, count))
        return _ast_of(graph.reduce_axis(rows, "ADD", (0,)))
    count = elements // (2 if kind == "copy" else 1)
    one = graph.expand(graph.buffer(dtypes.float32, 1), (count,))
    return _ast_of(graph.alu(Ops.MUL, graph.buffer(dtypes.float32, count), one) if kind == "copy" else graph.contiguous(one))


def launch_seconds(target: Target, samples: int) -> float:
    """Seconds of one launch of a kernel with one element."""
    one = graph.buffer(dtypes.float32, 1)
    return _seconds(target, _ast_of(graph.alu(Ops.ADD, one, one)), samples)


def _ast_of(value: UOp) -> UOp:
    """The AST of the only kernel that computes `value`."""
    call, = create_schedule(graph.sink(value)).calls
    return call.ast


def _seconds(target: Target, ast: UOp, samples: int) -> float:
    """Seconds of one run of a kernel with the fastest schedule: the heuristic's or a sketch."""
    backend, base = backend_named(target.device), Scheduler(Kernel(ast), target)
    return _fastest(base.kernel, [backend.heuristic(base), *backend.sketches(base)[:SKETCHES]], samples)


def _fastest(kernel: Kernel, states: Sequence[Scheduler], samples: int) -> float:
    """Seconds of one run of a kernel: the lower quartile of the samples of its fastest state."""
    backend, best = backend_named(states[0].target.device), math.inf
    arrays = [_numbers(p.dtype, p.arg.size) for p in kernel.params]
    for state in states:
        run = Contestant(_runner(backend, state, arrays))
        repeats, first = calibrate(run, None, time.perf_counter, SAMPLE_SECONDS)
        if first / repeats < 2.0 * best:
            times = sorted(time_calls(run, repeats) / repeats for _ in range(samples))
            best = min(best, times[samples // 4])
    return best


def _numbers(dtype: DType, size: int) -> Array:
    """Values whose sums and products stay finite: ¼ to ¾, or integers from 4 to 12."""
    array, values = aligned_empty(size, dtype), np.linspace(0.25, 0.75, 16, dtype=np.float32) * (1 if dtype.is_float else 16)
    array[:] = np.resize(float32_to_bfloat16_bits(values) if dtype == dtypes.bfloat16 else values, size)
    return array


def _runner(backend: Backend, state: Scheduler, arrays: Sequence[Array]) -> Callable[[int], float | None]:
    """A function that runs a kernel n times and returns the seconds by the device's clock, if it has one."""
    program, pair = lower(state), backend.compilers[0]
    plan = ExecutionPlan.of_kernel(program.spec, pair.load(pair.binary_of(program, state.target), program.spec), arrays,
                                   device=state.target.device)
    plan.load_inputs()
    return plan.repeat_timed


def _doubling(least: int, most: int) -> list[int]:
    sizes = [most]
    while sizes[-1] // 2 >= least:
        sizes.append(sizes[-1] // 2)
    return sizes


def _twice(rate: float) -> tuple[float, float]:
    return rate, rate
