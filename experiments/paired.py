"""Searches of the same kernels with different settings, and their winners timed against each other: what the studies of the search share.

    kernels of the cases → one search per setting, from nothing, with the same budget → the winners' chains
        → the winners over the same buffers, interleaved, until each ratio to the first setting's is known → lines of a table

A winner that comes out better or worse beyond the noise is timed once more, compiled anew and over other buffers, and is so only if that
says it too: of two dozen intervals of 95 % one is wrong by chance, and where code and buffers happen to lie is worth up to 2 %.
"""
from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heuristics import Machine, kernels_of

# isort: split
from svod.bench.ceilings import Ceilings, cached_ceilings
from svod.bench.race import Ratio, confirm
from svod.bench.random_suite import RANDOM_COUNT
from svod.bench.suites import select_cases
from svod.compile.host import host_target
from svod.config import BeamConfig, BenchConfig, data_dir
from svod.core.kernel import Kernel
from svod.core.scheduler import Opt, Scheduler
from svod.core.target import Target
from svod.errors import SvodError
from svod.tune.budget import ModelBudget
from svod.tune.candidate import Candidate, Origin
from svod.tune.db import TuningDB
from svod.tune.events import RoundFinished, SearchEvent
from svod.tune.executor import Executor, make_executor
from svod.tune.laboratory import Confirmed, Failure, Laboratory
from svod.tune.session import KernelTask, TuneSession
from svod.tune.worker_laboratory import WorkerLaboratory

TIMING_SECONDS = 3.0        # of the interleaved rounds of one kernel
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
    """A laboratory that remembers the finalists that it confirmed: what the search itself found, whatever the heuristic is worth."""

    def __init__(self, laboratory: Laboratory) -> None:
        self._laboratory = laboratory
        self.confirmed: list[tuple[Candidate, Confirmed]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._laboratory, name)

    def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Confirmed | Failure]:
        answers = self._laboratory.confirm(candidates, seconds)
        self.confirmed = [(c, a) for c, a in zip(candidates, answers, strict=True) if isinstance(a, Confirmed)]
        return answers

    def own(self) -> Candidate | None:
        """The best one that is not the heuristic."""
        found = [(a.ratio, i, c) for i, (c, a) in enumerate(self.confirmed) if c.origin is not Origin.HEURISTIC]
        return min(found)[2] if found else None


@dataclass(frozen=True)
class Found:
    """What one search found for one kernel. `seconds` and `candidates`: that it took; `why`: what ended it."""

    setting: str
    chain: tuple[Opt, ...]
    seconds: float
    candidates: int
    why: str


@dataclass(frozen=True)
class Line:
    """One kernel, searched with one seed. `times[i]`: seconds of setting i's winner; `ratios[i]`: the first setting's time over it, so that
    above 1 is faster; `again[i]`: the same of the second timing, where there was one."""

    kernel: str
    seed: int
    found: tuple[Found, ...]
    times: tuple[float, ...]
    ratios: tuple[Ratio, ...]
    again: tuple[Ratio | None, ...]

    def verdict(self, i: int) -> str:
        """worse, better, or = against the first setting."""
        first, second = judge(self.ratios[i]), self.again[i]
        return first if second is None or judge(second) == first else "="


def judge(ratio: Ratio) -> str:
    """What one timing says: worse or better beyond the noise, where the interval does not reach 1; worse also where the median is further
    below it than MET_WITHIN; else =."""
    if ratio.high < 1.0 or ratio.median < 1.0 / MET_WITHIN:
        return "worse"
    return "better" if ratio.low > 1.0 else "="


def search(kernel: Kernel, name: str, setting: str, config: BeamConfig, *, candidates: int, target: Target, executor: Executor,
           ceilings: Ceilings | None, laboratory: Laboratory) -> Found:
    """Search a kernel from nothing, for `config.kernel_budget` seconds or `candidates` (0: as many as there is time for).

    A search that starts from sketches may end with the heuristic's chain, which is one of them; without sketches the best that it found by
    itself counts, the heuristic where it found nothing. Raises TuneError when no worker can be started."""
    seconds = config.kernel_budget
    budget, watched = CandidateBudget(seconds, seconds, candidates=candidates), Finalists(laboratory)
    with TuningDB.open(":none:") as db:
        started = time.perf_counter()
        result = TuneSession([KernelTask(kernel, name=name)], target, executor=executor, db=db, config=config, ceilings=ceilings,
                             budget=budget, listener=budget.hear, laboratory=lambda _: watched).run()
    if result.interrupted:
        raise KeyboardInterrupt
    finding = result.findings[kernel.key]
    own = None if config.sketches else watched.own()
    return Found(setting, tuple(finding.chain if own is None else own.chain), time.perf_counter() - started, result.candidates, finding.why)


def time_winners(kernel: Kernel, found: Sequence[Found], target: Target, rng: random.Random) -> tuple[tuple[float, ...], tuple[Ratio, ...],
                                                                                                     tuple[Ratio | None, ...]]:
    """Seconds of each winner, and the ratios as `Line` has them. Settings that found the same state share its samples."""
    base = Scheduler(kernel, target)
    states = [base.apply_opts(f.chain) for f in found]
    distinct = list({s.digest: s for s in states}.values())
    machines: list[Machine] = []        # all of them at once, as memory that is free is used again

    def measure() -> tuple[list[float], list[Ratio]]:
        machines.append(Machine(kernel, target))
        result = confirm([machines[-1].contestant(s) for s in distinct], rng=rng, budget_seconds=TIMING_SECONDS)
        return [result.seconds(i) for i in range(len(distinct))], [result.ratio(0, i) for i in range(len(distinct))]
    places = [next(i for i, d in enumerate(distinct) if d.digest == s.digest) for s in states]
    times, ratios = measure()
    second = measure()[1] if any(judge(r) != "=" for r in ratios) else None
    again = tuple(None if second is None or judge(ratios[p]) == "=" else second[p] for p in places)
    return tuple(times[p] for p in places), tuple(ratios[p] for p in places), again


def head(settings: Sequence[str]) -> list[str]:
    """The first two lines of the table, as Markdown."""
    columns = ["kernel", "seed", settings[0], *settings[1:], "candidates", "seconds of search"]
    return ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]


def row(line: Line) -> str:
    """A line of the table: the first setting's time, and how many times faster each other winner is, with half its interval."""
    cells = [line.kernel, str(line.seed), f"{line.times[0] * 1e6:.4g} µs"]
    for i, ratio in list(enumerate(line.ratios))[1:]:
        same = line.found[i].chain == line.found[0].chain
        cells.append("same" if same else f"{ratio.median:.3f} ±{100 * ratio.half_width:.1f} % {line.verdict(i)}")
    return "| " + " | ".join([*cells, ", ".join(str(f.candidates) for f in line.found),
                              ", ".join(f"{f.seconds:.1f}" for f in line.found)]) + " |"


def summary(lines: Sequence[Line], settings: Sequence[str]) -> list[str]:
    """Per setting the geometric mean of its ratios, and what was worse."""
    out = []
    for i, name in list(enumerate(settings))[1:]:
        mean = math.exp(statistics.fmean(math.log(line.ratios[i].median) for line in lines))
        verdicts = [line.verdict(i) for line in lines]
        worse = [f"{line.kernel} (seed {line.seed})" for line in lines if line.verdict(i) == "worse"]
        out.append(f"{name} over {settings[0]}: {mean:.3f}x (geometric mean of {len(lines)}), {verdicts.count('better')} better, "
                   f"{len(worse)} worse beyond noise{': ' + ', '.join(worse) if worse else ''}")
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


def study(args: argparse.Namespace, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Search every kernel with every setting (fields of BeamConfig), print the table as it grows, and the summary."""
    target, names, lines = host_target(), list(settings), list[Line]()
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
                            laboratory = WorkerLaboratory(kernel, target, executor, config, BenchConfig())
                            found.append(search(kernel, name, setting, config, candidates=args.candidates, target=target, executor=executor,
                                                ceilings=ceilings, laboratory=laboratory))
                        line = Line(name, seed, tuple(found), *time_winners(kernel, found, target, random.Random(seed)))
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
    def ratio(r: Ratio | None) -> list[float] | None:
        return None if r is None or not math.isfinite(r.high) else [r.low, r.median, r.high]
    found = [asdict(f) | {"chain": [o.to_json() for o in f.chain]} for f in line.found]
    return {"kernel": line.kernel, "seed": line.seed, "found": found, "times": line.times, "ratios": [ratio(r) for r in line.ratios],
            "again": [ratio(r) for r in line.again], "verdicts": [line.verdict(i) for i in range(len(line.found))]}
