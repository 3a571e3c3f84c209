"""Searches of the same kernels with different settings, and their winners timed against each other: what the studies of the search share.

    kernels of the cases → one search per setting, from nothing, with the same budget → the winners' chains
        → in several processes, one after the other: the winners over the same buffers, interleaved, until each ratio to the first
          setting's is known → lines of a table

A winner is better or worse beyond the noise if every process says so. Where code, buffers and scratch happen to lie in one stays for as
long as it lives, and is worth more than the rounds of one process can tell: up to 2 %, for matrix instructions up to 5 %.
"""
from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from heuristics import Machine, kernels_of

# isort: split
from svod.bench.race import Ratio, confirm
from svod.bench.roofline import Ceilings, cached_ceilings
from svod.bench.suites.random_kernels import RANDOM_COUNT
from svod.bench.suites.suites import select_cases
from svod.compile.backend import backend_named
from svod.config import BeamConfig, BenchConfig, data_dir
from svod.core.ir.serialize import ast_to_data, data_to_ast
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import HOST, Target
from svod.errors import SvodError
from svod.tune.db import TuningDB
from svod.tune.measure.candidate import Candidate, Origin
from svod.tune.measure.measurer import Confirmed, Failure, Measurer
from svod.tune.measure.worker_measurer import WorkerMeasurer
from svod.tune.search.budget import ModelBudget
from svod.tune.search.events import RoundFinished, SearchEvent
from svod.tune.session import KernelTask, TuneSession
from svod.tune.workers.executor import Executor
from svod.tune.workers.start import make_executor

T = TypeVar("T")
PROCESSES = 3               # processes that time the winners of one kernel
TIMING_SECONDS = 1.5        # seconds of the interleaved rounds of one process
MET_WITHIN = 1.03           # a winner is no worse when its interval reaches 1 and its median is this close


@dataclass
class CandidateBudget(ModelBudget):
    """A budget that also ends with the round in which `candidates` have been timed; 0: no such end. It has to hear what happens."""

    candidates: int = 0
    timed: int = 0

    def hear(self, event: SearchEvent) -> None:
        """A `Listener` of the search."""
        if isinstance(event, RoundFinished):
            self.timed += event.timed

    def next(self, kernels: Sequence[Any]) -> Any:
        return None if self.candidates and self.timed >= self.candidates else super().next(kernels)


class Finalists:
    """A measurer that remembers the finalists that it confirmed: what the search itself found, whatever the heuristic is worth."""

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer
        self.confirmed: list[tuple[Candidate, Confirmed]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._measurer, name)

    def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Confirmed | Failure]:
        answers = self._measurer.confirm(candidates, seconds)
        self.confirmed = [(c, a) for c, a in zip(candidates, answers, strict=True) if isinstance(a, Confirmed)]
        return answers

    def own(self) -> Candidate | None:
        """The best one that is not the heuristic."""
        found = [(a.ratio, i, c) for i, (c, a) in enumerate(self.confirmed) if c.origin is not Origin.HEURISTIC]
        return min(found)[2] if found else None


@dataclass(frozen=True)
class Found:
    """What one search found for one kernel. `seconds` and `candidates`: that it took; `why`: what ended it; `nothing`: it had to answer
    for itself and measured nothing, so that the heuristic's chain stands in."""

    setting: str
    chain: tuple[Opt, ...]
    seconds: float
    candidates: int
    why: str
    nothing: bool = False


@dataclass(frozen=True)
class Line:
    """One kernel, searched with one seed. `times[i]`: seconds of setting i's winner, the median over processes; `ratios[i]`: per process
    the first setting's time over it, so that above 1 is faster."""

    kernel: str
    seed: int
    found: tuple[Found, ...]
    times: tuple[float, ...]
    ratios: tuple[tuple[Ratio, ...], ...]

    def ratio(self, i: int) -> float:
        """The median over processes."""
        return statistics.median(r.median for r in self.ratios[i])

    def verdict(self, i: int) -> str:
        """worse or better against the first setting where all processes say so, else =."""
        said = {judge(r) for r in self.ratios[i]}
        return said.pop() if len(said) == 1 else "="


def judge(ratio: Ratio) -> str:
    """What one timing says: worse or better beyond the noise, where the interval does not reach 1; worse also where the median is further
    below it than MET_WITHIN; else =."""
    if ratio.high < 1.0 or ratio.median < 1.0 / MET_WITHIN:
        return "worse"
    return "better" if ratio.low > 1.0 else "="


def search(kernel: Kernel, name: str, setting: str, config: BeamConfig, *, candidates: int, target: Target, executor: Executor,
           ceilings: Ceilings | None, measurer: Measurer) -> Found:
    """Search a kernel from nothing, for `config.kernel_budget` seconds or `candidates` (0: as many as there is time for).

    A search that starts from sketches may end with the heuristic's chain, which is one of them; without sketches the best that it found by
    itself counts, the heuristic where it found nothing. Raises TuneError when no worker can be started."""
    seconds = config.kernel_budget
    budget, watched = CandidateBudget(seconds, seconds, candidates=candidates), Finalists(measurer)
    with TuningDB.open(":none:") as db:
        started = time.perf_counter()
        result = TuneSession([KernelTask(kernel, name=name)], target, executor=executor, db=db, config=config, ceilings=ceilings,
                             budget=budget, listener=budget.hear, measurer_of=lambda _: watched).run()
    if result.interrupted:
        raise KeyboardInterrupt
    finding = result.findings[kernel.key]
    own = None if config.sketches else watched.own()
    return Found(setting, tuple(finding.chain if own is None else own.chain), time.perf_counter() - started, result.candidates, finding.why,
                 not config.sketches and own is None and finding.source == "heuristic")


def time_winners(kernel: Kernel, found: Sequence[Found], seed: int) -> tuple[tuple[float, ...], tuple[tuple[Ratio, ...], ...]]:
    """The times and ratios of a `Line`. Settings that found the same chain are timed once."""
    chains = [[o.to_json() for o in f.chain] for f in found]
    timed = []
    for i in range(PROCESSES if any(c != chains[0] for c in chains) else 1):
        timed.append(in_a_process(time_chains, ast_to_data(kernel.ast), chains, seed + i))
    return tuple(statistics.median(t) for t in zip(*(t for t, _ in timed), strict=True)), tuple(zip(*(r for _, r in timed), strict=True))


def in_a_process(function: Callable[..., T], *args: Any) -> T:
    """The result of a module's function, called in a new process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(function, *args).result()


def time_chains(ast: Any, chains: Sequence[Sequence[Any]], seed: int) -> tuple[tuple[float, ...], tuple[Ratio, ...]]:
    """Seconds of each chain of a kernel, and the first one's time over it. Chains that end in one state share its samples."""
    kernel, target = Kernel(data_to_ast(ast)), backend_named(HOST).target()
    states = [apply_opts(Scheduler(kernel, target), [Opt.from_json(o) for o in chain]) for chain in chains]
    distinct = list({s.digest: s for s in states}.values())
    machine = Machine(kernel, target)
    result = confirm([machine.contestant(s) for s in distinct], rng=random.Random(seed), budget_seconds=TIMING_SECONDS)
    places = [next(i for i, d in enumerate(distinct) if d.digest == s.digest) for s in states]
    return tuple(result.seconds(p) for p in places), tuple(result.ratio(0, p) for p in places)


def head(settings: Sequence[str]) -> list[str]:
    """The first two lines of the table, as Markdown."""
    columns = ["kernel", "seed", settings[0], *settings[1:], "candidates", "seconds of search"]
    return ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]


def row(line: Line) -> str:
    """A line of the table: the first setting's time, and how many times faster each other winner is, with the least and the most that a
    process says."""
    cells = [line.kernel, str(line.seed), f"{line.times[0] * 1e6:.4g} µs"]
    for i in range(1, len(line.ratios)):
        said = sorted(r.median for r in line.ratios[i])
        same = "nothing" if line.found[i].nothing else "same" if line.found[i].chain == line.found[0].chain else ""
        cells.append(same or f"{line.ratio(i):.3f} ({said[0]:.3f}–{said[-1]:.3f}) {line.verdict(i)}")
    return "| " + " | ".join([*cells, ", ".join(str(f.candidates) for f in line.found),
                              ", ".join(f"{f.seconds:.1f}" for f in line.found)]) + " |"


def summary(lines: Sequence[Line], settings: Sequence[str]) -> list[str]:
    """Per setting the geometric mean of its ratios, and what was worse."""
    out = []
    for i, name in list(enumerate(settings))[1:]:
        found = [line for line in lines if not line.found[i].nothing]
        mean = math.exp(statistics.fmean(math.log(line.ratio(i)) for line in found)) if found else math.nan
        verdicts = [line.verdict(i) for line in found]
        worse = [f"{line.kernel} (seed {line.seed})" for line in found if line.verdict(i) == "worse"]
        out.append(f"{name} over {settings[0]}: {mean:.3f}x (geometric mean of {len(found)}), {verdicts.count('better')} better, "
                   f"{len(worse)} worse beyond noise{': ' + ', '.join(worse) if worse else ''}"
                   + (f"; nothing found for {len(lines) - len(found)}" if len(found) < len(lines) else ""))
    for i, name in enumerate(settings):
        spent = [line.found[i] for line in lines]
        out.append(f"{name}: {statistics.median(f.seconds for f in spent):.1f} s and {statistics.median(f.candidates for f in spent):.0f} "
                   f"candidates a kernel (medians), {max(f.seconds for f in spent):.1f} s at most")
    return out


def arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The options that the studies share."""
    parser.add_argument("--suite", default="core", help="suites, joined by commas (default: core)")
    parser.add_argument("--kernels", default="*", help="patterns of case names, joined by commas")
    parser.add_argument("--count", type=int, default=RANDOM_COUNT, help="kernels of the suite random")
    parser.add_argument("--random-seed", type=int, default=0, help="of the suite random")
    parser.add_argument("--seeds", type=int, default=1, help="searches of each kernel with each setting, of seeds 0, 1, …")
    parser.add_argument("--seconds", type=float, default=BeamConfig().kernel_budget, help="of one search, at most")
    parser.add_argument("--candidates", type=int, default=0, help="of one search, about (a round is finished); 0: no limit")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    return parser


def study(args: argparse.Namespace, settings: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Search every kernel with every setting (fields of BeamConfig), print the table as it grows, and the summary; return its lines."""
    target, names, lines = backend_named(HOST).target(), list(settings), list[Line]()
    ceilings = cached_ceilings(Path(data_dir()) / "ceilings.json", target, quick=True)
    print("\n".join(head(names)), flush=True)
    try:
        with make_executor("local") as executor:
            for name, kernel in kernels(args):
                for seed in range(args.seeds):
                    try:
                        found = []
                        for setting in names:
                            config = BeamConfig(**{"seed": seed, "kernel_budget": args.seconds, **settings[setting]})
                            measurer = WorkerMeasurer(kernel, target, executor, config, BenchConfig())
                            found.append(search(kernel, name, setting, config, candidates=args.candidates, target=target, executor=executor,
                                                ceilings=ceilings, measurer=measurer))
                        line = Line(name, seed, tuple(found), *time_winners(kernel, found, seed))
                    except SvodError as e:
                        print(f"{name} (seed {seed}) is left out: {e}", flush=True)
                        continue
                    lines.append(line)
                    print(row(line), flush=True)
                    if args.json is not None:
                        args.json.write_text(json.dumps([as_data(each) for each in lines], indent=1) + "\n", encoding="utf-8")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    if lines:
        print("\n" + "\n".join(summary(lines, names)))
    return lines


def kernels(args: argparse.Namespace) -> Iterable[tuple[str, Kernel]]:
    """The kernels of the cases that were asked for; one that stands in several cases once."""
    seen: set[str] = set()
    for case in select_cases(args.suite, args.kernels, seed=args.random_seed, count=args.count):
        for name, kernel in kernels_of(case):
            if kernel.key not in seen:
                seen.add(kernel.key)
                yield name, kernel


def as_data(line: Line) -> dict[str, Any]:
    """A line as JSON has it; an interval without enough rounds is null."""
    def ratio(r: Ratio) -> list[float] | None:
        return [r.low, r.median, r.high] if math.isfinite(r.high) else None
    found = [asdict(f) | {"chain": [o.to_json() for o in f.chain]} for f in line.found]
    return {"kernel": line.kernel, "seed": line.seed, "found": found, "times": line.times,
            "ratios": [[ratio(r) for r in each] for each in line.ratios], "verdicts": [line.verdict(i) for i in range(len(line.found))]}
