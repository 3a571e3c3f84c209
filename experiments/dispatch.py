"""The cost of starting a kernel: from Python, inside a plan, on one core and on all, hot and after idle periods.

    python experiments/dispatch.py [--threads N]

Kernels do next to nothing (eight increments, a cache line each), so all time is dispatch. "Forced" launches have work for
about 12 µs on one core, so that the workers take part. Prints microseconds: least, median, 99th percentile.
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

import svod
from svod.compile.cpu.host import host_target
from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram
from svod.compile.lower.program import PhaseSpec, ProgramSpec
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.plan_parts import PlanBuffer, PreparedKernel
from svod.core.ir.dtype import dtypes

# Each iteration turns `vars[0]` times and counts itself.
KERNEL = """
define void @work(ptr %args, ptr %vars, ptr %scratch, i64 %begin, i64 %end) {
entry:
  %x = load ptr, ptr %args
  %turns = load i64, ptr %vars
  br label %head
head:
  %i = phi i64 [ %begin, %entry ], [ %next, %after ]
  %go = icmp slt i64 %i, %end
  br i1 %go, label %turn, label %done
turn:
  %t = phi i64 [ 0, %head ], [ %t.next, %turn ]
  %line = shl i64 %i, 3
  %p = getelementptr i64, ptr %x, i64 %line
  %v = load volatile i64, ptr %p
  %w = add i64 %v, 1
  store volatile i64 %w, ptr %p
  %t.next = add i64 %t, 1
  %more = icmp slt i64 %t.next, %turns
  br i1 %more, label %turn, label %after
after:
  %next = add i64 %i, 1
  br label %head
done:
  ret void
}
"""


def make_plan(loaded: LoadedProgram, threads: int, kernels: int) -> ExecutionPlan:
    extent = 8
    spec = ProgramSpec("work", ((dtypes.int64, 8 * extent),), (0,), (), (PhaseSpec("work", extent, threads, 0),), ("turns",))
    buffer = PlanBuffer(64 * extent, "output", np.zeros(8 * extent, np.int64))
    plan = ExecutionPlan([PreparedKernel(spec, loaded, (0,))] * kernels, [buffer], [0], threads=threads)
    plan.set_variables({"turns": 1})
    return plan


def quantiles(run: Callable[[], None], n: int, idle: float = 0.0) -> tuple[float, float, float]:
    """Least, median and 99th percentile of `n` calls in microseconds, each after `idle` seconds of sleep."""
    times = []
    for _ in range(n):
        if idle:
            time.sleep(idle)
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
    times.sort()
    return times[0], times[n // 2], times[n * 99 // 100]


def show(label: str, times: tuple[float, float, float], per: int = 1) -> None:
    print(f"{label:58}" + "".join(f"{t / per:9.2f}" for t in times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=host_target().threads)
    threads = parser.parse_args().threads
    loaded = LoadedProgram(compile_object(KERNEL, host_target(), True), ("work",))
    print(f"{'µs':58}{'least':>9}{'median':>9}{'99 %':>9}")
    for n in sorted({1, threads}):
        one, hundred = make_plan(loaded, n, 1), make_plan(loaded, n, 100)
        show(f"plan of one kernel from Python, {n} threads", quantiles(one.execute, 5000))
        show(f"kernel inside a plan of 100, {n} threads", quantiles(hundred.execute, 300), 100)
    plan = make_plan(loaded, threads, 1)
    plan.set_variables({"turns": 5000})
    alone = make_plan(loaded, 1, 1)
    alone.set_variables({"turns": 5000})
    work = quantiles(alone.execute, 300)
    show("work of the forced launches on one core", work)
    for idle in (0.0, 1e-4, 1e-3, 1e-2):
        show(f"forced launch, {threads} threads, after {1e3 * idle:g} ms idle", quantiles(plan.execute, 100 if idle else 1000, idle))
    buffer = np.zeros(64, np.int64)
    address = int(buffer.__array_interface__["data"][0])
    show("bind one address", quantiles(lambda: alone.bind(0, address), 5000))
    x = svod.Tensor(np.arange(8.0)).realize()
    called = svod.custom_function(lambda a: a, x + 1, shape=(8,), dtype="float64") * 2
    config = svod.PrepareConfig(db=":none:", threads=1)
    show("two kernels, a function of Python between them", quantiles(called.prepare(config).execute, 5000))
    show("two kernels", quantiles(((x + 1).contiguous() * 2).prepare(config).execute, 5000))


if __name__ == "__main__":
    main()
