"""Compare strategies and cost models on recorded spaces (record.py): measurements and time to within 5 % of the best, regret, against
random search with ten times the measurements.

    python experiments/strategies/compare.py                         # 20 seeds, writes comparison.md and .svg; goes on where it ended
    python experiments/strategies/compare.py --seeds 3 --only gemm --variants beam,random --out /tmp/try

Each search is the real one (replay.py), as wide as svod-tune's, with a patience that never ends it. Its regret is how much longer its
incumbent takes than the best of the space, by the least recorded samples. Two results are equal (=) where the median over seeds of one
lies between the quartiles of the other. The time is what compiling and screening took when they were recorded, on one core, without
proposing. Finished searches are kept in OUT.runs, a file for each kernel, and are not repeated.
"""
from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from replay import Found, Space, inside, replay
from spaces import CASES

# isort: split
from svod.config import BeamConfig
from svod.tune.search.cost_models import Evidence, LearnedCost, evidence_of, make_cost_model
from svod.tune.search.strategies.beam import Beam
from svod.tune.search.strategies.evolve import Evolution
from svod.tune.search.strategies.optuna_study import OptunaStudy
from svod.tune.search.strategies.random_walks import RandomWalks
from svod.tune.search.strategies.strategy import Proposer

NEAR = 0.05
MEASUREMENTS = 200         # least number of candidates of a search
EARLY = 100                # number of candidates at which regret is compared with random search of TENFOLD
TENFOLD = 10 * EARLY
OF_A_KERNEL = 100          # measurements of each other kernel that a learned model begins with


@dataclass(frozen=True)
class Variant:
    """A strategy, its cost model, and whether that begins with the records of the other kernels; without sketches it begins with the
    untouched kernel."""

    strategy: type[Proposer]
    cost_model: str = "analytic"
    evidence: bool = False
    sketches: bool = True
    measurements: int = MEASUREMENTS


VARIANTS: Mapping[str, Variant] = {
    "beam": Variant(Beam),
    "beam, learned": Variant(Beam, "learned"),
    "beam, learned + others": Variant(Beam, "learned", evidence=True),
    "evolve": Variant(Evolution),
    "evolve, learned": Variant(Evolution, "learned"),
    "optuna": Variant(OptunaStudy),
    "random": Variant(RandomWalks, measurements=TENFOLD),
    "beam, no sketches": Variant(Beam, sketches=False),
    "evolve, no sketches": Variant(Evolution, sketches=False),
    "optuna, no sketches": Variant(OptunaStudy, sketches=False),
    "random, no sketches": Variant(RandomWalks, sketches=False, measurements=TENFOLD),
}


@dataclass(frozen=True)
class Run:
    """One search. `proposing`: seconds of wall time that it took beside what the table answers."""

    kernel: str
    variant: str
    seed: int
    found: list[Found]
    proposing: float

    def regret(self, measurements: int) -> float:
        """Of the incumbent after so many measurements."""
        return next((f.regret for f in reversed(self.found) if f.timed <= measurements), math.inf)

    @property
    def near(self) -> Found | None:
        """The first incumbent within NEAR of the best."""
        return next((f for f in self.found if f.regret <= NEAR), None)


def evidence_for(name: str) -> list[Evidence]:
    """A hundred measurements of each kernel but `name`, as the screening of a search has them."""
    rng, found = random.Random(name), list[Evidence]()
    for other in CASES:
        if other != name:
            space = Space(other)
            heuristic = min(space.rows[space.heuristic.digest].seconds)
            rows = [r for r in space.rows.values() if r.seconds]
            for row in rng.sample(rows, OF_A_KERNEL):
                seconds = min(rng.choices(row.seconds, k=3))
                e = evidence_of(space.state_at[bytes.fromhex(row.digest)], space.heuristic, seconds / heuristic)
                found += [e] if e is not None else []
    return found


def kept(path: Path) -> list[Run]:
    """The searches that a file has."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Run(**{**data, "found": [Found(**f) for f in data["found"]]}) for data in map(json.loads, lines)]


def runs_of(name: str, variants: Sequence[str], seeds: Sequence[int], path: Path) -> list[Run]:
    """All searches of one kernel; those that are not in the file are added to it."""
    space, known = Space(name), {(r.variant, r.seed): r for r in kept(path)}
    evidence = evidence_for(name) if any(VARIANTS[v].evidence for v in variants) else []
    features: dict[bytes, tuple[float, ...]] = {}       # seed of all searches: a state has the same time in each
    for label in variants:
        v = VARIANTS[label]
        strategy = inside(space, v.strategy)

        def make(base: Any, config: BeamConfig, v: Variant, strategy: type[Proposer]) -> Proposer:
            model = make_cost_model(config, base, evidence if v.evidence else ())
            if isinstance(model, LearnedCost):
                model.known = features
            return strategy(base, config, model)
        for seed in (s for s in seeds if (label, s) not in known):
            config = BeamConfig(width=8, seed=seed, patience=10**6, sketches=v.sketches, cost_model=v.cost_model)
            started = time.perf_counter()
            found = replay(space, partial(make, v=v, strategy=strategy), config, v.measurements)
            known[label, seed] = Run(name, label, seed, found, time.perf_counter() - started)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(known[label, seed])) + "\n")
        print(f"{name}: {label}, {sum(known[label, s].proposing for s in seeds):.0f} s", flush=True)
    return [known[label, seed] for label in variants for seed in seeds]


# -- the table ----------------------------------------------------------------------------------------------------------------
def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper one; of a single value three times that."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        return low if low == high else low + (place - math.floor(place)) * (high - low)
    return at(0.25), at(0.5), at(0.75)


def verdict(values: Sequence[float], others: Sequence[float]) -> str:
    """better, worse or =, for values of which less is better."""
    (a, m, b), (c, n, d) = quartiles(values), quartiles(others)
    if c <= m <= d or a <= n <= b:
        return "="
    return "better" if m < n else "worse"


def cell(values: Sequence[float], others: Sequence[float] | None, form: str) -> str:
    low, middle, high = quartiles(values)

    def text(v: float) -> str:
        return "never" if v == math.inf else format(v, form)
    said = "" if others is None else f" {verdict(values, others)}"
    return f"{text(middle)} ({text(low)}–{text(high)}){said}"


def table(runs: Sequence[Run], variants: Sequence[str]) -> list[str]:
    """Medians over seeds (quartiles), and the verdict against the first variant with as many sketches; regret early against random's with
    ten times the measurements."""
    lines = [f"| kernel | variant | measurements to {NEAR:.0%} | seconds to {NEAR:.0%} | regret at {EARLY} | random at {TENFOLD} "
             f"| regret at {MEASUREMENTS} |", "| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for kernel in dict.fromkeys(r.kernel for r in runs):
        of = {v: [r for r in runs if (r.kernel, r.variant) == (kernel, v)] for v in variants}
        for v in (v for v in variants if of[v]):
            alike = [o for o in variants if of[o] and VARIANTS[o].sketches == VARIANTS[v].sketches]
            first = of[alike[0]] if alike[0] != v else None
            chance = next((of[o] for o in alike if VARIANTS[o].strategy is RandomWalks), None)

            def compared(what: Any, form: str, rs: list[Run] = of[v], others: list[Run] | None = first) -> str:
                return cell([what(r) for r in rs], None if others is None else [what(r) for r in others], form)
            early = [r.regret(EARLY) for r in of[v]]
            against = "" if chance is None else cell([r.regret(TENFOLD) for r in chance], None, ".1%") + (
                f": {v.split(',')[0]} is {verdict(early, [r.regret(TENFOLD) for r in chance])}" if chance is not of[v] else "")
            lines.append(f"| {kernel} | {v} | " + " | ".join([
                compared(lambda r: r.near.measured if r.near else math.inf, ".0f"),
                compared(lambda r: r.near.seconds if r.near else math.inf, ".1f"),
                compared(lambda r: r.regret(EARLY), ".1%"), against, compared(lambda r: r.regret(MEASUREMENTS), ".1%")]) + " |")
    return lines


def summary(runs: Sequence[Run], variants: Sequence[str]) -> list[str]:
    """Per variant over all kernels: medians of the medians, searches that never come near, verdicts over kernels, proposing."""
    lines = [f"| variant | kernels | measurements to {NEAR:.0%}, geometric mean of medians | never | regret at {EARLY}, mean of medians "
             f"| at {MEASUREMENTS} | regret at {MEASUREMENTS} against the first: better, =, worse | proposing, ms a measurement |",
             "| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |"]
    for v in variants:
        kernels = list(dict.fromkeys(r.kernel for r in runs if r.variant == v))
        first = next(o for o in variants if VARIANTS[o].sketches == VARIANTS[v].sketches)
        of = {k: [r for r in runs if (r.kernel, r.variant) == (k, v)] for k in kernels}
        base = {k: [r for r in runs if (r.kernel, r.variant) == (k, first)] for k in kernels}
        near = [quartiles([r.near.measured if r.near else math.inf for r in of[k]])[1] for k in kernels]
        said = [verdict([r.regret(MEASUREMENTS) for r in of[k]], [r.regret(MEASUREMENTS) for r in base[k]]) for k in kernels]
        never = statistics.fmean(r.near is None for k in kernels for r in of[k])
        mean = [statistics.fmean(quartiles([r.regret(n) for r in of[k]])[1] for k in kernels) for n in (EARLY, MEASUREMENTS)]
        known = [n for n in near if n < math.inf]
        geometric = math.exp(statistics.fmean(map(math.log, known))) if known else math.inf
        less = f" ({len(known)} of {len(near)} kernels)" if len(known) < len(near) else ""
        all_of = [r for k in kernels for r in of[k] if r.found]
        proposing = 1e3 * sum(r.proposing for r in all_of) / sum(r.found[-1].timed for r in all_of)
        lines.append(f"| {v} | {len(kernels)} | {geometric:.0f}{less} | {never:.0%} | {mean[0]:.1%} | {mean[1]:.1%} "
                     f"| {said.count('better')}, {said.count('=')}, {said.count('worse')} | {proposing:.0f} |")
    return lines


def plot(runs: Sequence[Run], variants: Sequence[str], path: Path) -> None:
    """Regret over measurements for each kernel: medians, and the quartiles as bands."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot")
        return
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "strategies"
    from matplotlib import pyplot

    kernels = list(dict.fromkeys(r.kernel for r in runs))
    figure, axes = pyplot.subplots(2, -(-len(kernels) // 2), figsize=(5 * -(-len(kernels) // 2), 7.5), squeeze=False)
    at = list(range(10, MEASUREMENTS + 1, 10))
    for axis, kernel in zip(axes.flat, kernels, strict=False):
        for v in (v for v in variants if VARIANTS[v].sketches):
            of = [r for r in runs if (r.kernel, r.variant) == (kernel, v)]
            if not of:
                continue
            bands = [quartiles([100 * min(r.regret(n), 10.0) for r in of]) for n in at]
            axis.plot(at, [b[1] for b in bands], label=v)
            axis.fill_between(at, [b[0] for b in bands], [b[2] for b in bands], alpha=0.12)
        axis.axhline(100 * NEAR, color="grey", linewidth=0.5)
        axis.set(title=kernel, xlabel="measurements", ylabel="regret, %", yscale="symlog", ylim=(0, None))
    axes.flat[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", default=",".join(CASES), help="kernels, joined by commas")
    parser.add_argument("--variants", default=";".join(VARIANTS), help="joined by semicolons")
    parser.add_argument("--kept", action="store_true", help="search nothing; the tables of what is kept")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("comparison"), help="path of the results, without suffix")
    args = parser.parse_args()
    names, variants = args.only.split(","), args.variants.split(";")
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        folder = args.out.with_suffix(".runs")
        folder.mkdir(exist_ok=True)
        asked = [(n, variants, range(args.seeds), folder / f"{n}.jsonl") for n in names]
        if args.kept:
            runs = [r for *_, path in asked for r in kept(path) if r.variant in variants and r.seed < args.seeds]
        else:
            runs = [r for of in pool.map(runs_of, *zip(*asked, strict=True)) for r in of]
    spaces = [f"{n} {len(Space(n).measured)}" for n in names]
    lines = [f"Measured candidates: {', '.join(spaces)}. {args.seeds} seeds.", "", *summary(runs, variants), "", *table(runs, variants)]
    args.out.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    plot(runs, variants, args.out.with_suffix(".svg"))
    print("\n".join(lines[:len(variants) + 4]))


if __name__ == "__main__":
    main()
