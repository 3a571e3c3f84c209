"""Savings and cost of the search's way of compiling (without loop strength reduction, for aligned buffers alone), of the same without the
fences between levels of shuffles (`svod.compile.llvm.alu`), and of LLVM's passes before code generation, which svod leaves out.

    python experiments/search_compiler.py                                   # 8 sketches of each kernel of the core suite
    python experiments/search_compiler.py --kernels 'gemm_512,softmax*' --states 16

Per kernel the milliseconds to compile a state (median), and the time of the compiled kernel over that of the finalist's code (median over
the states, and the largest), least of interleaved samples. The last line has medians over kernels.
"""
from __future__ import annotations

import argparse
import random
import statistics
import time
from unittest import mock

from heuristics import Machine, kernels_of

# isort: split
from svod.bench.suites.suites import select_cases
from svod.bench.timer import Contestant, calibrate, take_sample
from svod.compile.cpu.host import host_target
from svod.compile.llvm import alu as llvm_alu
from svod.compile.llvm import codegen
from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram
from svod.compile.llvm.render import render
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.cost.sketch import sketches
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target

WAYS = ("search", "without fences", "with passes", "final")


def text_for(way: str, program: Program, target: Target) -> str:
    """The module of a program."""
    with mock.patch.object(llvm_alu, "FENCED_LEVELS", 99 if way == "without fences" else llvm_alu.FENCED_LEVELS):
        return render(program, target, aligned=way not in ("final", "with passes"))


def compile_as(way: str, ir: str, target: Target) -> bytes:
    """The object of a module: as the search compiles, as finalists are compiled, or the same after LLVM's passes."""
    if way != "with passes":
        return compile_object(ir, target, final=way == "final")
    with codegen._module_for(ir, target, final=True) as (module, generator):
        module.optimize(generator)
        return codegen.emit(module, generator, reduction=True)


def compare(kernel: Kernel, target: Target, count: int, rounds: int, rng: random.Random) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Median seconds to compile by way, and per way the kernels' times over the finalists'."""
    states = list(sketches(Scheduler(kernel, target)))
    states = states if len(states) <= count else rng.sample(states, count)
    machine = Machine(kernel, target)
    compiling: dict[str, list[float]] = {w: [] for w in WAYS}
    ratios: dict[str, list[float]] = {w: [] for w in WAYS}
    for state in states:
        program = lower(state)
        contestants: dict[str, Contestant] = {}
        for way in rng.sample(WAYS, len(WAYS)):
            ir = text_for(way, program, target)
            start = time.perf_counter()
            code = compile_as(way, ir, target)
            compiling[way].append(time.perf_counter() - start)
            loaded = LoadedProgram(code, [p.symbol for p in program.spec.phases])
            contestants[way] = Contestant(ExecutionPlan.of_kernel(program.spec, loaded, machine.buffers.arrays, threads=target.threads,
                                                                  constants=machine.constants).repeat)
        calls = {w: calibrate(c) for w, c in contestants.items()}
        samples: dict[str, list[float]] = {w: [] for w in WAYS}
        for _ in range(rounds):
            for way in rng.sample(WAYS, len(WAYS)):
                samples[way].append(take_sample(contestants[way], *calls[way]))
        for way in WAYS:
            ratios[way].append(min(samples[way]) / min(samples["final"]))
    return {w: statistics.median(s) for w, s in compiling.items()}, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="*", metavar="PATTERNS", help="cases of the core suite, joined by commas")
    parser.add_argument("--states", type=int, default=8, help="sketches of each kernel")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved samples of each")
    args = parser.parse_args()
    target, rng = host_target(), random.Random(0)
    print("kernel                  " + "".join(f"{w:>26}" for w in WAYS))
    rows: list[tuple[dict[str, float], dict[str, list[float]]]] = []
    for case in select_cases("core", args.kernels):
        for name, kernel in kernels_of(case):
            compiling, ratios = compare(kernel, target, args.states, args.rounds, rng)
            rows.append((compiling, ratios))
            print(f"{name:24}" + "".join(f"{compiling[w] * 1e3:8.1f} ms {statistics.median(ratios[w]):6.3f}× ≤{max(ratios[w]):5.2f}×"
                                         for w in WAYS), flush=True)
    print(f"{'median':24}" + "".join(f"{statistics.median(c[w] for c, _ in rows) * 1e3:8.1f} ms "
                                     f"{statistics.median(statistics.median(r[w]) for _, r in rows):6.3f}×        " for w in WAYS))


if __name__ == "__main__":
    main()
