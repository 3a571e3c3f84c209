"""The quality of the heuristic: all sketches of each kernel timed beside their predicted cycles, and the loss by choosing by prediction.

    python experiments/heuristics.py                        # the core suite
    python experiments/heuristics.py --suite models --kernels 'resnet18'
    python experiments/heuristics.py --kernels 'gemm_*,attention*' --show 8      # the first 8 chains of each, by time
    python experiments/heuristics.py --suite random --count 20 --seed 3     # kernels of the same kinds, other extents, drawn from a seed
    python experiments/heuristics.py --capture kernels --kernels 'conv_*'   # of any program: SVOD_CAPTURE=kernels python model.py
    python experiments/heuristics.py --kernels gemm_512 --chain '[["UPCAST","o0",8],["UPCAST","o1",32]]'     # and a chain of one's own

Sketches are timed in interleaved rounds, one sample each; those slower than three times the best leave after three samples. The
loss is the chosen sketch's time over the best sketch's; the rank correlation (Spearman) is over the sketches that were timed. `rate` is of
the direct loop's operations, in GFLOP/s. The last line has geometric means over kernels.
"""
from __future__ import annotations

import argparse
import fnmatch
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from svod.bench.suites.cases import Case
from svod.bench.suites.random_kernels import RANDOM_COUNT
from svod.bench.suites.suites import select_cases
from svod.bench.timer import Contestant, calibrate, take_sample
from svod.compile.backend import backend_named
from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram
from svod.compile.llvm.render import render
from svod.compile.lower.lower import lower
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.cost.cpu import cost_of
from svod.core.cost.op_count import count_operations
from svod.core.cost.sketch import heuristic, sketches
from svod.core.graph import graph
from svod.core.graph.storage import base_of
from svod.core.ir.uop import Ops
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import HOST, Target
from svod.core.schedule.schedule import create_schedule
from svod.errors import SvodError
from svod.tensor import Tensor
from svod.tune.capture import read_capture
from svod.tune.measure.verify import GuardedBuffers, InputSet, make_inputs

INPUTS = InputSet("timing", "reals", 0.5, 1.5, 17)


@dataclass
class Entry:
    """One sketch: its state, the prediction, and the samples in seconds."""

    state: Scheduler
    cycles: float
    contestant: Contestant | None = None
    repeats: int = 1
    call: float = 0.0
    samples: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return min(self.samples, default=math.inf)


@dataclass
class Study:
    """One kernel: its sketches as timed, and the heuristic's choice."""

    name: str
    kernel: Kernel
    entries: list[Entry]
    choice: Scheduler
    seconds_to_choose: float

    @property
    def chosen(self) -> Entry:
        return next(e for e in self.entries if e.state.digest == self.choice.digest)

    @property
    def best(self) -> Entry:
        return min(self.entries, key=lambda e: e.seconds)

    @property
    def loss(self) -> float:
        return self.chosen.seconds / self.best.seconds

    @property
    def correlation(self) -> float:
        """Spearman's, over the entries with samples; 1 for fewer than three."""
        pairs = [(e.cycles, e.seconds) for e in self.entries if e.samples]
        if len(pairs) < 3:
            return 1.0
        a, b = ([sorted(column).index(x) for x in column] for column in zip(*pairs, strict=True))
        return statistics.correlation(a, b) if len(set(a)) > 1 and len(set(b)) > 1 else 1.0


def kernels_of(case: Case) -> Iterator[tuple[str, Kernel]]:
    """The distinct kernels of a case, weights as constants; named by the case, and a number where there are several."""
    operands = [Tensor(a, o.dtype).realize() if o.dtype != "bfloat16" else Tensor(a.astype("float32"), "bfloat16").realize()
                for a, o in zip(case.draw(), case.operands, strict=True)]
    inputs = {base_of(t.uop) for t, o in zip(operands, case.operands, strict=True) if not o.weight}
    result = case.build(*operands).uop
    sink = graph.sink(result)
    constants = frozenset(u for u in sink.toposort() if u.op is Ops.BUFFER and u not in inputs)
    kernels: dict[str, Kernel] = {}
    for call in create_schedule(sink, constants).calls:
        kernel = Kernel(call.ast)
        kernels.setdefault(kernel.key, kernel)
    for i, kernel in enumerate(kernels.values()):
        yield (f"{case.name}.{i}" if len(kernels) > 1 else case.name), kernel


def captured_kernels(directory: str, patterns: str) -> Iterator[tuple[str, Kernel]]:
    """The distinct kernels of a capture whose names match one of the patterns, named as in plans: conv_4 is the fifth kernel that runs."""
    seen: set[str] = set()
    for plan in read_capture(directory).plans:
        for i, call in enumerate(plan.unbound.calls):
            name, kernel = f"{call.name}_{i}", plan.unbound.kernels.get(call.kernel)
            if kernel is not None and call.kernel not in seen and any(fnmatch.fnmatchcase(name, p) for p in patterns.split(",")):
                seen.add(call.kernel)
                yield name, kernel


class Machine:
    """Compiles and times states of one kernel over one set of buffers."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.kernel, self.target = kernel, target
        self.buffers = GuardedBuffers(kernel)
        self.buffers.fill(make_inputs(kernel, INPUTS))
        self.constants = [p.arg.slot for p in kernel.params if p.arg.constant]

    def contestant(self, state: Scheduler) -> Contestant:
        program = lower(state)
        code = LoadedProgram(compile_object(render(program, self.target), self.target, final=True),
                             [p.symbol for p in program.spec.phases])
        plan = ExecutionPlan.of_kernel(program.spec, code, self.buffers.arrays, threads=self.target.threads, constants=self.constants)
        return Contestant(plan.repeat)


def study(name: str, kernel: Kernel, target: Target, rounds: int, extra: Sequence[Sequence[Opt]] = ()) -> Study:
    """Compile and time every sketch of a kernel, and the chains in `extra`."""
    base = Scheduler(kernel, target)
    start = time.perf_counter()
    choice = heuristic(base)
    chosen = time.perf_counter() - start
    entries = [Entry(s, cost_of(s).cycles) for s in sketches(base)]
    for chain in extra:
        state = apply_opts(base, chain)
        if all(e.state.digest != state.digest for e in entries):
            entries.append(Entry(state, cost_of(state).cycles))
    machine = Machine(kernel, target)
    for e in entries:
        e.contestant = machine.contestant(e.state)
    time_entries(entries, rounds)
    return Study(name, kernel, entries, choice, chosen)


def time_entries(entries: Sequence[Entry], rounds: int, slow: float = 3.0) -> None:
    """Interleaved rounds of one sample each, in the order of prediction at first, then at random."""
    best = math.inf
    for e in sorted(entries, key=lambda e: e.cycles):
        assert e.contestant is not None
        e.contestant.run(1)
        e.repeats, e.call = calibrate(e.contestant)
        # one sample of a shared machine can be anything: three before an entry may be called slow
        e.samples.extend(take_sample(e.contestant, e.repeats, e.call) for _ in range(3 if e.call < 3 * best else 1))
        best = min(best, e.seconds)
    rng = random.Random(0)
    for _ in range(rounds - 1):
        alive = [e for e in entries if e.seconds <= slow * best]
        for e in rng.sample(alive, len(alive)):
            assert e.contestant is not None
            e.samples.append(take_sample(e.contestant, e.repeats, e.call))
        best = min(e.seconds for e in entries)


def report(s: Study, show: int) -> str:
    """One line per kernel, and the chains asked for."""
    flops = count_operations(s.kernel.ast).flops
    lines = [f"{s.name:22} {len(s.entries):3} sketches  best {s.best.seconds * 1e6:9.1f} µs {flops / s.best.seconds / 1e9:6.1f} GF/s  "
             f"chosen {s.chosen.seconds * 1e6:9.1f} µs  loss {s.loss:5.2f}  rank {s.correlation:5.2f}  "
             f"found in {s.seconds_to_choose * 1e3:5.1f} ms"]
    for e in sorted(s.entries, key=lambda e: e.seconds)[:show]:
        mark = "*" if e is s.chosen else " "
        lines.append(f"  {mark} {e.seconds * 1e6:9.1f} µs  {e.cycles / 1e3:9.1f} kcycles  {e.cycles / e.seconds / 1e9:5.2f} GHz  "
                     f"{' '.join(map(str, e.state.applied_opts))}")
    return "\n".join(lines)


def summary(studies: Sequence[Study]) -> str:
    """Geometric mean of the losses, the worst, and the mean rank correlation."""
    mean = math.exp(statistics.fmean(math.log(s.loss) for s in studies))
    worst = max(studies, key=lambda s: s.loss)
    return (f"{len(studies)} kernels: loss {mean:.3f} (geometric mean), worst {worst.loss:.2f} ({worst.name}), "
            f"mean rank correlation {statistics.fmean(s.correlation for s in studies):.2f}, "
            f"{sum(s.seconds_to_choose for s in studies):.2f} s to choose")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="core")
    parser.add_argument("--kernels", default="*", help="patterns of case names, joined by commas")
    parser.add_argument("--capture", metavar="DIRECTORY", help="the kernels of a capture, instead of a suite's")
    parser.add_argument("--count", type=int, default=RANDOM_COUNT, help="kernels of the suite random")
    parser.add_argument("--seed", type=int, default=0, help="of the suite random")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--show", type=int, default=0, metavar="N", help="chains to show per kernel")
    parser.add_argument("--chain", action="append", default=[], help="a chain, as JSON, to time beside the sketches")
    args = parser.parse_args()
    target = backend_named(HOST).target()
    if args.capture:
        named = captured_kernels(args.capture, args.kernels)
    else:
        cases = select_cases(args.suite, args.kernels, seed=args.seed, count=args.count)
        named = (found for case in cases for found in kernels_of(case))
    extra = [[Opt.from_json(o) for o in json.loads(c)] for c in args.chain]
    studies = []
    for name, kernel in named:
        try:
            studies.append(study(name, kernel, target, args.rounds, extra))
        except SvodError as e:
            raise SystemExit(f"{name}: {e}") from e
        print(report(studies[-1], args.show), flush=True)
    print(summary(studies))


if __name__ == "__main__":
    main()
