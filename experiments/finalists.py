"""The cost of the rule that chooses among finalists: each finalist is timed anew in several processes, and the choice of a rule from the
search's own confirmation is compared with the fastest there.

    python experiments/finalists.py --kernels 'gemm_*,bmm_12' --width 8 --seeds 2 --json gemm.json
    python experiments/finalists.py --from gemm.json,others.json        # the table of what was timed before

`costs` is the time of the rule's choice over that of the fastest finalist, the geometric mean over confirmations, and `at worst` the
largest. The fastest of a dozen noisy times is a little too fast, so no rule can cost nothing. The rule that is used is
`svod.tune.db.winners.best_of`.
"""
from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paired import PROCESSES, Finalists, arguments, in_a_process, kernels, search, time_chains

# isort: split
from svod.bench.race import Ratio, paired_ratio
from svod.bench.roofline import cached_ceilings
from svod.compile.backend import backend_named
from svod.config import BeamConfig, BenchConfig, data_dir
from svod.core.ir.serialize import ast_to_data
from svod.core.machine.target import HOST
from svod.tune.db.records import canonical
from svod.tune.db.winners import LEVEL_FACTOR, Standing, best_of
from svod.tune.measure.worker_measurer import WorkerMeasurer
from svod.tune.workers.start import make_executor


@dataclass(frozen=True)
class Finalist:
    """One finalist of a confirmation: its chain, the interval of its ratio to the heuristic there, its seconds per round, and its time over
    the heuristic's in each of the processes that timed it anew."""

    chain: tuple[Any, ...]
    low: float
    ratio: float
    high: float
    samples: tuple[float, ...]
    anew: tuple[float, ...]

    @property
    def time(self) -> float:
        """Over the heuristic's, the median over processes."""
        return statistics.median(self.anew)


@dataclass(frozen=True)
class Confirmation:
    """One confirmation; the first finalist is the heuristic."""

    kernel: str
    seed: int
    finalists: tuple[Finalist, ...]


Rule = Callable[[Sequence[Finalist]], int]


def within(tie: float, own_first: bool = True) -> Rule:
    """The rule of the database with another width of a tie; the heuristic's own chain may be as any other."""
    def choose(field: Sequence[Finalist]) -> int:
        usable = [i for i, f in enumerate(field) if f.low <= 1.0]
        return usable[best_of([Standing(field[i].high, i == 0 and own_first, len(field[i].chain), canonical(field[i].chain), "")
                               for i in usable], tie)]
    return choose


def by_overlap(field: Sequence[Finalist]) -> int:
    """The shortest of those whose paired ratio to the one with the lowest upper end may be 1."""
    best = within(1.0)(field)
    level = [i for i, f in enumerate(field) if f.low <= 1.0 and (i == best or pair(f, field[best]).low <= 1.0)]
    return min(level, key=lambda i: (len(field[i].chain), canonical(field[i].chain)))


def pair(a: Finalist, b: Finalist) -> Ratio:
    """Time of `a` over that of `b`, paired by the rounds that both took part in."""
    rounds = min(len(a.samples), len(b.samples))
    return paired_ratio(a.samples[:rounds], b.samples[:rounds])


def percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f} %"


RULES: Mapping[str, Rule] = {
    "the lowest upper end alone": within(1.0),
    f"within {percent(LEVEL_FACTOR - 1, 1)} of it the heuristic's own, else the shortest": within(LEVEL_FACTOR),
    "within 0.5 %": within(1.005),
    "within 1 %": within(1.01),
    "within 1 %, the heuristic's own has no precedence": within(1.01, own_first=False),
    "what may be as fast as the lowest, by the paired ratio of the two: the shortest": by_overlap,
}


def table(confirmations: Sequence[Confirmation]) -> list[str]:
    """The rules, as Markdown."""
    lines = ["| rule | costs | at worst | opts of the choice |", "| --- | ---: | ---: | ---: |"]
    for name, rule in RULES.items():
        chosen = [(c.finalists[rule(c.finalists)], min(f.time for f in c.finalists)) for c in confirmations]
        costs = [f.time / best for f, best in chosen]
        lines.append(f"| {name} | {percent(math.exp(statistics.fmean(map(math.log, costs))) - 1, 2)} | {percent(max(costs) - 1, 1)} | "
                     f"{statistics.fmean(len(f.chain) for f, _ in chosen):.1f} |")
    return lines


def confirmations(args: argparse.Namespace) -> Iterator[Confirmation]:
    """Search and time each kernel."""
    target = backend_named(HOST).target()
    ceilings = cached_ceilings(Path(data_dir()) / "ceilings.json", target, quick=True)
    with make_executor("local") as executor:
        for name, kernel in kernels(args):
            for seed in range(args.seeds):
                config = BeamConfig(seed=seed, kernel_budget=args.seconds, width=args.width)
                watched = Finalists(WorkerMeasurer(kernel, target, executor, config, BenchConfig()))
                search(kernel, name, "", config, candidates=args.candidates, target=target, executor=executor, ceilings=ceilings,
                       measurer=watched)
                if not watched.confirmed:
                    print(f"{name} (seed {seed}) is left out: nothing was confirmed", flush=True)
                    continue
                chains = [[o.to_json() for o in c.chain] for c, _ in watched.confirmed]
                anew = [in_a_process(time_chains, ast_to_data(kernel.ast), chains, seed + i)[1] for i in range(PROCESSES)]
                yield Confirmation(name, seed, tuple(
                    Finalist(tuple(chain), t.low, t.ratio, t.high, t.samples, tuple(1 / ratios[i].median for ratios in anew))
                    for i, (chain, (_, t)) in enumerate(zip(chains, watched.confirmed, strict=True))))


def stored(paths: str) -> Iterator[Confirmation]:
    for path in paths.split(","):
        for c in json.loads(Path(path).read_text(encoding="utf-8")):
            yield Confirmation(c["kernel"], c["seed"], tuple(
                Finalist(**{k: tuple(v) if isinstance(v, list) else v for k, v in f.items()}) for f in c["finalists"]))


def main() -> None:
    parser = arguments(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    parser.add_argument("--width", type=int, default=8, help="of the beam")
    parser.add_argument("--from", dest="files", default="", help="files that --json wrote, joined by commas: nothing is searched or timed")
    args = parser.parse_args()
    found = []
    for c in stored(args.files) if args.files else confirmations(args):
        found.append(c)
        best = min(range(len(c.finalists)), key=lambda i: c.finalists[i].time)
        choice = within(LEVEL_FACTOR)(c.finalists)
        print(f"{c.kernel} (seed {c.seed}): {len(c.finalists)} finalists, the choice takes "
              f"{c.finalists[choice].time / c.finalists[best].time:.3f} times what the fastest takes, "
              f"{c.finalists[choice].time:.3f} times what the heuristic takes", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n", encoding="utf-8")
    if found:
        print("\n" + "\n".join(table(found)))


if __name__ == "__main__":
    main()
