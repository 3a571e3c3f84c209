"""A measurement of the time of dot instructions on this machine, in units of vector multiply-adds. It differs by a factor of four between
processors with the same instruction set.

    a_0, a_1, … += x · y        40,000 iterations, once with multiply-adds, once with the instruction

Both loops are LINEAR and go through the code generator of kernels. Each takes at least a hundred microseconds; the overhead of a call, two
microseconds, is small against that. The result is stored for each machine beside the tuning database, because the cost model ranks
schedules by it and all processes must choose the same schedules."""
from __future__ import annotations

import ctypes
import math
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from svod.compile.cpu.host import host_target
from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram, call_phase
from svod.compile.llvm.render import render
from svod.compile.lower.builder import Builder
from svod.compile.lower.program import PhaseSpec, Program, ProgramSpec
from svod.config import data_dir
from svod.core.ir.dtype import DType, dtypes
from svod.core.machine.isa import DOTS, Dot
from svod.core.machine.target import Target
from svod.system.machine_records import add_record, read_records

ACCUMULATORS = 16       # enough to hide a latency of eight cycles at two instructions per cycle
TURNS = 40_000
SAMPLES = 9
DOT_COSTS = tuple(2.0 ** n for n in range(-1, 5))
RATES_REVISION = 1            # version of the loops and of the figures that are derived from their times


@lru_cache(maxsize=16)
def measured_cost(name: str) -> float:
    """Return the number of float32 vector multiply-adds that this machine executes in the time of one instruction `name` of DOTS, rounded
    to one of DOT_COSTS. The first call takes 30 ms."""
    return kept_cost(data_dir() / "dot_rates.json", name)


def kept_cost(path: Path, name: str, measure: Callable[[str], tuple[float, float]] | None = None) -> float:
    """Return the cost of an instruction from the records at `path`; otherwise measure it with `measure` (default: `measure_times`) and
    record it."""
    target = host_target()      # it is not enough as a key: LLVM may report the name of a related processor
    key = f"{platform.node()}/{replace(target, threads=1).key}/{name}/revision {RATES_REVISION}"

    def known() -> float | None:
        cost = read_records(path).get(key)
        return cost if isinstance(cost, float) and cost in DOT_COSTS else None

    cost = known()
    if cost is None:
        measured = cost_of(*(measure or measure_times)(name))
        cost = known()      # another process may have recorded the cost meanwhile
        if cost is None:
            cost = measured
            add_record(path, key, cost)
    return cost


def cost_of(multiply_adds: float, dots: float) -> float:
    """Return the element of DOT_COSTS nearest to the ratio of the instructions' time to the time of equally many multiply-adds."""
    return 2.0 ** min(4, max(-1, round(math.log2(dots / multiply_adds))))


def measure_times(name: str) -> tuple[float, float]:
    """Measure the loops of multiply-adds and of instruction `name`; returns the minimum seconds of several runs for each."""
    target, dot = host_target(), DOTS[name]
    first, _ = dot.operands
    programs = turns(target, dtypes.float32, None), turns(target, first, dot)
    times: list[float] = []
    area = ctypes.create_string_buffer(64 + target.vector_bytes)
    address = -(-ctypes.addressof(area) // 64) * 64
    loaded = []
    for program in programs:
        loaded.append(LoadedProgram(compile_object(render(program, target), target), ("svod_p0",)))
        times.append(math.inf)
    for _ in range(SAMPLES):        # alternately, so that a change of the clock rate affects both
        for i, code in enumerate(loaded):
            start = time.perf_counter()
            call_phase(code.addresses[0], (address,), (), 0, 0, TURNS)
            times[i] = min(times[i], time.perf_counter() - start)
    for code in loaded:
        code.close()
    multiply_adds, dots = times
    return multiply_adds, dots


def turns(target: Target, dtype: DType, dot: Dot | None, count: int = TURNS) -> Program:
    """Make a program whose loop adds one product to each accumulator in each of `count` iterations; accumulator n starts at n. The product
    is that of the argument with itself, by a multiply-add or by `dot`. The program stores the sum of all accumulators."""
    b = Builder()
    begin, end = b.pure("BEGIN", dtypes.index, 1, ()), b.pure("END_", dtypes.index, 1, ())
    lanes = target.vector_bytes // 4
    total = dot.accumulator if dot is not None else dtype
    group = dot.group if dot is not None else 1
    pointer = b.pure("ARG", dtype, 1, (), 0)
    x = b.load("LOAD", dtype, lanes * group, (pointer, b.index(0)), 0)
    _, second = dot.operands if dot is not None else (dtype, dtype)
    y = x if second == dtype else b.bitcast(second, x)
    loop, sums = b.open(begin, end, 1, tuple(b.const(total, lanes, n) for n in range(ACCUMULATORS)))
    sums = b.close(loop, tuple(b.alu("MULACC", total, lanes, x, y, s) if dot is None else b.pure("DOT", total, lanes, (s, x, y), group)
                               for s in sums))
    value = sums[0]
    for s in sums[1:]:
        value = b.alu("ADD", total, lanes, value, s)
    b.store("STORE", dtype, lanes * group, (pointer, b.index(0), b.bitcast(dtype, value) if group > 1 else value), (0, False))
    spec = ProgramSpec("turns", ((dtype, lanes * group),), (0,), (), (PhaseSpec("svod_p0", count, 1, 0),))
    return Program(spec, (b.finish(),))
