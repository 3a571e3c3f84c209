"""Figures made of samples, against numbers worked out by hand."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest

from svod.bench.ceiling_loops import CurvePoint
from svod.bench.results import CaseResult, Load, Outcome, Rates, Searching
from svod.bench.summary import Timed, bound_of, geometric_mean, group_results, judge_case, neighbour_of, spread_of, suite_results
from tests.bench.example_run import CACHES, CEILINGS


def judge(foreign: float = 0.0, group: str = "g", name: str = "c", **times: list[float]) -> CaseResult:
    timed = [Timed(Outcome(n, "ok"), t) for n, t in times.items()]
    return judge_case(name=name, title="", suite="core", group=group, dtype="float32", shapes="", flops=0.0, bytes_read=0.0,
                      bytes_written=0.0, bound=None, timed=timed, load=Load(0.0, 0.0, foreign, 0, None))


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


def test_operands_are_held_against_the_rate_of_their_size() -> None:
    """A last-level cache of 480 MB, of which this machine has a part: 64 MB come at 50 GB/s, 256 MB at memory's 20."""
    measured = ((1, 400.0), (4, 200.0), (64, 50.0), (256, 20.0), (1024, 20.0))
    curve = tuple(CurvePoint(size << 20, rate * 1e9, rate * 1e9) for size, rate in measured)
    ceilings, caches = replace(CEILINGS, curve=curve), {"l2": 2 << 20, "l3": 480 << 20}
    here = bound_of(0, 64 << 20, 0, "float32", ceilings, caches)
    assert here.by == "l3" and here.bytes_per_second == pytest.approx(50e9)
    assert bound_of(0, 32 << 20, 32 << 20, "float32", ceilings, caches).seconds == pytest.approx((64 << 20) / 50e9)
    beyond = bound_of(0, 230 << 20, 0, "float32", ceilings, caches)
    assert beyond.by == "memory" and 20e9 < beyond.bytes_per_second < 22e9
    assert bound_of(0, 1 << 10, 0, "float32", ceilings, caches).bytes_per_second == pytest.approx(283e9, rel=0.01)      # half the cores' l2


def test_spread_is_half_the_interval_of_the_median() -> None:
    values = [1.0 + 0.01 * i for i in range(15)]
    assert spread_of(values) == pytest.approx(0.5 * math.log(values[-4] / values[3]))    # k = 4 for 15 samples
    assert spread_of([1.0, 2.0]) == pytest.approx(0.5 * math.log(2.0))                   # too few for an interval: the range


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


STEADY = [1.0 + 1e-4 * (i % 3) for i in range(16)]


def test_noise_is_what_the_speed_up_over_the_best_peer_shows() -> None:
    assert judge(heuristic=STEADY, numpy=STEADY).noisy is None
    two_modes = [1.0, 2.0] * 8
    assert judge(heuristic=two_modes, numpy=STEADY).noisy == "the speed-up of heuristic over numpy is known to ±35 % only"
    assert judge(heuristic=STEADY, numpy=STEADY, torch=[2 * t for t in two_modes]).noisy is None       # not the best peer
    assert judge(heuristic=two_modes, tuned=STEADY, numpy=STEADY).noisy is None                         # not svod at its best
    # what moves both alike moves no speed-up, however far
    drifting = [1.0] * 8 + [1.5] * 8
    assert judge(heuristic=drifting, numpy=[2 * t for t in drifting]).noisy is None
    assert judge(heuristic=[1.0] * 16, numpy=drifting).noisy is not None
    assert "±35 %" in str(judge(heuristic=two_modes).noisy) and judge(heuristic=STEADY).noisy is None   # without a peer: the median
    assert "too few rounds" in str(judge(heuristic=[1.0] * 4, numpy=[1.0] * 4).noisy)


def test_noise_of_a_busy_machine() -> None:
    assert judge(0.05, heuristic=STEADY, numpy=STEADY).noisy is None
    assert judge(0.2, heuristic=STEADY, numpy=STEADY).noisy == "others used 20 % of the machine"


def test_geometric_means() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    cases = [judge(name="a", group="x", heuristic=[1.0] * 6, numpy=[2.0] * 6, torch=[4.0] * 6),
             judge(name="b", group="y", heuristic=[1.0] * 6, numpy=[8.0] * 6), judge(name="c", group="y", heuristic=[1.0] * 6)]
    x, y, every = group_results(cases)
    assert [g.name for g in (x, y, every)] == ["x", "y", "all"]
    assert every.speedups["heuristic/best peer"] == pytest.approx(4.0) and every.cases["heuristic/best peer"] == 2
    assert every.cases["heuristic/torch"] == 1 and y.speedups["heuristic/numpy"] == pytest.approx(8.0)
    assert [g.name for g in group_results(cases[:1])] == ["x"] and group_results([]) == ()


def test_the_same_code_counts_as_one_in_means() -> None:
    """The heuristic is 0.5 of tuned in one case and the same code in the other: √0.5 of it over both."""
    apart = judge(name="a", heuristic=[2.0] * 6, tuned=[1.0] * 6)
    timed = [Timed(Outcome("heuristic", "ok"), [3.0] * 6), Timed(Outcome("tuned", "ok", same_as="heuristic"), None)]
    same = judge_case(name="b", title="", suite="core", group="g", dtype="float32", shapes="", flops=0.0, bytes_read=0.0, bytes_written=0.0,
                      bound=None, timed=timed, load=None)
    (means,) = group_results([apart, same])
    assert means.speedups["heuristic/tuned"] == pytest.approx(math.sqrt(0.5)) and means.cases["heuristic/tuned"] == 2
    assert means.speedups["tuned/heuristic"] == pytest.approx(math.sqrt(2.0))


def test_a_rate_over_the_round_neighbour_is_paired_by_round() -> None:
    """A tenth less work in four fifths of the time is 9/8 of the rate, however the machine drifts."""
    drift = [1.0, 3.0] * 8
    case = judge(heuristic=[9.0 * d for d in drift], tuned=[0.8 * d for d in drift])
    found = neighbour_of(case, 90.0, "round", "a round one", 100.0, drift)
    assert found.rate is not None and (found.rate.median, found.rate.low, found.rate.high) == pytest.approx((9 / 8,) * 3)
    assert found.seconds == 2.0 and found.name == "round"
    without = neighbour_of(judge(numpy=[1.0] * 6), 90.0, "round", "", 100.0, drift)
    assert without.rate is None and "no time" in without.why


def test_what_a_suite_shows() -> None:
    def case(name: str, suite: str, searched: float | None, rate: float | None) -> CaseResult:
        found = judge(name=name, heuristic=[2.0] * 6, tuned=[1.0] * 6, numpy=[1.5] * 6)
        outcomes = tuple(replace(o, search_seconds=searched) if o.name == "tuned" else o for o in found.contestants)
        beside = None if rate is None else neighbour_of(found, rate, "n", "", 1.0, [1.0] * 6)
        return replace(found, suite=suite, contestants=outcomes, neighbour=beside)
    core, odd = suite_results([case("a", "core", 9.0, None), case("b", "odd", None, 0.9), case("c", "core", 41.0, None),
                               case("d", "odd", None, 0.4), case("e", "core", 5.0, None)])
    assert (core.name, core.cases, core.rates) == ("core", 3, None) and odd.searching is None
    assert core.searching == Searching(3, 9.0, 41.0, "c", 55.0)
    assert odd.rates == Rates(2, pytest.approx(0.6), 0.4, "d")
    assert core.means.speedups["tuned/best peer"] == pytest.approx(1.5) and core.means.cases["heuristic/tuned"] == 3
    assert suite_results([]) == ()
