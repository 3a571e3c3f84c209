"""Figures made of samples, against numbers worked out by hand."""
from __future__ import annotations

import math

import pytest

from svod.bench.results import CaseResult, Outcome
from svod.bench.summary import Timed, bound_of, drift_of, geometric_mean, group_results, judge_case, spread_of
from tests.bench.example_run import CACHES, CEILINGS


def judge(noisy: str | None = None, group: str = "g", name: str = "c", **times: list[float]) -> CaseResult:
    timed = [Timed(Outcome(n, "ok"), t) for n, t in times.items()]
    return judge_case(name=name, title="", suite="core", group=group, dtype="float32", shapes="", flops=0.0, bytes_read=0.0,
                      bytes_written=0.0, bound=None, timed=timed, noisy=noisy, load=None)


def test_bound_is_the_roofline_at_the_level_of_the_operands() -> None:
    compute = bound_of(512e9, 1e6, 0, "float32", CEILINGS, CACHES)
    assert compute.by == "compute" and compute.seconds == pytest.approx(1.0) and compute.intensity == pytest.approx(512e3)
    assert bound_of(0, 0.5e6, 0, "float32", CEILINGS, CACHES).by == "l2"              # two cores, half of each
    assert bound_of(0, 4e6, 0, "float32", CEILINGS, CACHES).by == "l3"
    memory = bound_of(0, 52e6, 0, "float32", CEILINGS, CACHES)
    assert memory.by == "memory" and memory.seconds == pytest.approx(1e-3)
    copy = bound_of(0, 26e6, 26e6, "float32", CEILINGS, CACHES)                        # the better of the read and the copy ceiling
    assert copy.bytes_per_second == 52e9
    assert bound_of(256e9, 1e3, 0, "float64", CEILINGS, CACHES).seconds == pytest.approx(1.0)
    assert bound_of(0, 0, 0, "float32", CEILINGS, CACHES).intensity == 0.0


def test_spread_is_half_the_interval_of_the_median() -> None:
    values = [1.0 + 0.01 * i for i in range(15)]
    assert spread_of(values) == pytest.approx(0.5 * math.log(values[-4] / values[3]))    # k = 4 for 15 samples
    assert spread_of([1.0, 2.0]) == pytest.approx(0.5 * math.log(2.0))                   # too few for an interval: the range


def test_drift_compares_the_halves() -> None:
    assert drift_of([1.0] * 5 + [1.2] * 5) == pytest.approx(math.log(1.2))
    assert drift_of([1.0, 2.0]) == 0.0


def test_speedups_are_paired_by_round() -> None:
    """Rounds differ by 10, contestants by 2: the ratio is exact."""
    slow = [10.0 ** (i % 2) for i in range(16)]
    case = judge(heuristic=slow, numpy=[2 * t for t in slow])
    s = case.contestants[0].speedups["numpy"]
    assert (s.median, s.low, s.high) == (2.0, 2.0, 2.0)
    assert case.precise and case.best_peer == "numpy"


def test_speedups_over_one_that_sat_out_use_the_rounds_of_both() -> None:
    case = judge(heuristic=[1.0] * 7 + [5.0] * 8, numpy=[3.0] * 7)
    assert case.contestants[0].speedups["numpy"].median == 3.0
    few = judge(heuristic=[1.0] * 15, numpy=[3.0] * 5).contestants[0].speedups["numpy"]
    assert few.median == 3.0 and few.low is None and few.high is None


def test_noise_is_found_in_the_samples() -> None:
    steady = [1.0 + 1e-4 * (i % 3) for i in range(15)]
    assert judge(heuristic=steady, numpy=steady).noisy is None
    assert judge("busy", heuristic=steady).noisy == "busy"
    wild = [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0]
    assert "heuristic is known to ±" in str(judge(heuristic=wild, numpy=steady).noisy)
    assert judge(heuristic=steady, numpy=steady, torch=[2 * t for t in wild]).noisy is None       # not the best peer
    drifting = [1.0] * 7 + [1.12] * 8
    assert "known to" in str(judge(heuristic=drifting).noisy) or "drifted" in str(judge(heuristic=drifting).noisy)


def test_geometric_means() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    cases = [judge(name="a", group="x", heuristic=[1.0] * 6, numpy=[2.0] * 6, torch=[4.0] * 6),
             judge(name="b", group="y", heuristic=[1.0] * 6, numpy=[8.0] * 6), judge(name="c", group="y", heuristic=[1.0] * 6)]
    x, y, every = group_results(cases)
    assert [g.name for g in (x, y, every)] == ["x", "y", "all"]
    assert every.speedups["heuristic/best peer"] == pytest.approx(4.0) and every.cases["heuristic/best peer"] == 2
    assert every.cases["heuristic/torch"] == 1 and y.speedups["heuristic/numpy"] == pytest.approx(8.0)
    assert [g.name for g in group_results(cases[:1])] == ["x"] and group_results([]) == ()
