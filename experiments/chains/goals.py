"""The goals of svod, and whether a run of the benchmarks reaches them.

    svod-bench run --suite core,odd,models --fresh --beam 4 --json run.json
    svod-bench run --suite random --fresh --beam 4 --json random.json
    python experiments/chains/goals.py run.json random.json

A goal is met when the upper end of the 95 % interval reaches it and the median is within 3 % of it. Of a kernel that stands in several
runs the latest counts. Kernels without a goal of their own (products of narrow types) count in the means of their suite only. Ends with 1
where a goal is missed.
"""
from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from svod.bench.report.data import overview
from svod.bench.results import CaseResult, ContestantResult, Run, Speedup, SuiteResult, read_run
from svod.bench.summary import BEST_PEER, suite_results

WITHIN = 0.97           # share of a goal that the median reaches, where its interval reaches the goal


@dataclass(frozen=True)
class Goal:
    """The least ratio to the best library, and the least share of the ceiling; both, or one of them where `either`."""

    peer: float | None = None
    ceiling: float | None = None
    either: bool = False

    def is_met(self, peer: float | None, ceiling: float | None) -> bool | None:
        """None where what is known does not decide it: nothing was there to compare with."""
        wanted = [(value, least) for value, least in ((peer, self.peer), (ceiling, self.ceiling)) if least is not None]
        found = [None if value is None else value >= least for value, least in wanted]
        if self.either in found:        # one that is met is enough for `either`, one that is missed against both
            return self.either
        return None if None in found or not found else not self.either


GOALS: dict[str, Goal] = {
    "gemm_256": Goal(0.9),
    **dict.fromkeys(("gemm_512", "gemm_1024", "gemm_2048"), Goal(0.95, 0.85)),
    "gemm_bias_gelu": Goal(1.0),
    "bmm_12": Goal(0.95),
    **dict.fromkeys(("gemv_4096", "sum_16m", "row_sum_4096", "column_sum_4096", "axpy_16m"), Goal(1.0, 0.9, either=True)),
    **dict.fromkeys(("softmax_4096x1024", "layer_norm_4096x768", "gelu_4m", "max_pool_64_112", "attention_12x512x64"), Goal(1.0)),
    "transpose_4096": Goal(1.3),
    **dict.fromkeys(("conv3x3_64_56", "conv1x1_256_56", "conv7x7_s2_224", "conv_depthwise_112"), Goal(0.8)),
}


CORE_MEAN = 1.05                                        # ratio to the best peer of each kernel
RANDOM_MEAN = 0.9                                       # geometric mean over core
NEIGHBOUR = 0.8                                         # share of the round neighbour's rate
HEURISTIC_MEAN = 0.65                                   # share of the tuned speed
SEARCH_MEDIAN, SEARCH_MOST = 10.0, 40.0                 # seconds, of a kernel of core
MODELS = ("resnet18", "bert_block", "gpt2_block")       # each at least PyTorch's


@dataclass(frozen=True)
class Judgement:
    """One goal. `met` None: the runs do not tell."""

    what: str
    wanted: str
    found: str
    met: bool | None


def credited(s: Speedup) -> float:
    """The largest goal that a ratio meets: what its interval reaches, if the median is within 3 % of it."""
    return min(s.median if s.high is None else s.high, s.median / WITHIN)


def credited_share(o: ContestantResult) -> float | None:
    """The same of the share of the ceiling."""
    return None if o.ceiling_share is None else min(o.ceiling_share * math.exp(o.spread or 0.0), o.ceiling_share / WITHIN)


def judge(runs: Sequence[Run]) -> Iterator[Judgement]:
    """Every goal, in order."""
    cases = overview(runs).cases
    suites = {s.name: s for s in suite_results(cases)}
    for case in cases:
        if case.name in GOALS:
            yield _judge_kernel(case, GOALS[case.name])
    yield from _judge_means(suites)
    for case in cases:
        if case.suite == "odd":
            rate = case.neighbour.rate if case.neighbour is not None else None
            yield Judgement(f"{case.title}, rate of its neighbour", f"{NEIGHBOUR:.0%}", "–" if rate is None else f"{rate.median:.1%}",
                            None if rate is None else credited(rate) >= NEIGHBOUR)
    for case in cases:
        if case.name in MODELS:
            found = {n: case.svod.speedups.get(n) if case.svod is not None else None for n in ("torch", "onnxruntime")}
            torch = found["torch"]
            words = ", ".join(f"{s.median:.2f}× {n}" for n, s in found.items() if s is not None)
            yield Judgement(case.title, "1.0× torch", words or "–", None if torch is None else credited(torch) >= 1.0)


def _judge_kernel(case: CaseResult, goal: Goal) -> Judgement:
    wanted = [*([f"{goal.peer}× the best peer"] if goal.peer else []), *([f"{goal.ceiling:.0%} of the ceiling"] if goal.ceiling else [])]
    own = case.svod
    ratio = own.speedups.get(case.best_peer) if own is not None and case.best_peer is not None else None
    words = [*([f"{ratio.median:.3f}× {case.best_peer}"] if ratio is not None else []),
             *([f"{own.ceiling_share:.0%}"] if own is not None and own.ceiling_share else [])]
    met = None if own is None else goal.is_met(None if ratio is None else credited(ratio), credited_share(own))
    return Judgement(case.title + (" (noisy)" if case.noisy else ""), (" or " if goal.either else ", ").join(wanted), ", ".join(words), met)


def _judge_means(suites: dict[str, SuiteResult]) -> Iterator[Judgement]:
    core, drawn = suites.get("core"), suites.get("random")
    mean = core.means.speedups.get(f"tuned/{BEST_PEER}") if core is not None else None
    yield _at_least("core, geometric mean over the best peer", CORE_MEAN, mean)
    other = drawn.means.speedups.get(f"tuned/{BEST_PEER}") if drawn is not None else None
    both = mean is not None and other is not None
    yield _at_least("random, of core's mean", RANDOM_MEAN, other / mean if both and mean and other else None)
    yield _at_least("heuristic, geometric mean of tuned", HEURISTIC_MEAN, core.means.speedups.get("heuristic/tuned") if core else None)
    search = core.searching if core is not None else None
    yield _at_most("search of a kernel of core, median", SEARCH_MEDIAN, search.median if search else None)
    yield _at_most("search of a kernel of core, longest", SEARCH_MOST, search.most if search else None)


def _at_least(what: str, goal: float, value: float | None) -> Judgement:
    return Judgement(what, f"{goal}", "–" if value is None else f"{value:.3f}", None if value is None else value >= goal)


def _at_most(what: str, goal: float, seconds: float | None) -> Judgement:
    return Judgement(what, f"{goal:g} s", "–" if seconds is None else f"{seconds:.1f} s", None if seconds is None else seconds <= goal)


def table(found: Sequence[Judgement]) -> str:
    """Markdown."""
    words = {True: "met", False: "**missed**", None: "–"}
    return "\n".join(["| goal | at least | found | |", "| --- | --- | --- | --- |",
                      *(f"| {j.what} | {j.wanted} | {j.found} | {words[j.met]} |" for j in found)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json")
    found = list(judge([read_run(path) for path in parser.parse_args().runs]))
    print(table(found))
    told = [j for j in found if j.met is not None]
    print(f"\n{sum(j.met is True for j in told)} of {len(told)} met")
    sys.exit(any(j.met is False for j in told))


if __name__ == "__main__":
    main()
