"""Figures computed from samples, against numbers worked out by hand."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest

from svod.bench.results import CaseResult, ContestantResult, Load, Rates, Searching
from svod.bench.summary import Timed, geometric_mean, group_results, judge_case, neighbour_of, spread_of, suite_results


def judge(foreign: float = 0.0, group: str = "g", name: str = "c", **times: list[float]) -> CaseResult:
    timed = [Timed(ContestantResult(n, "ok"), t) for n, t in times.items()]
    return judge_case(name=name, title="", suite="core", group=group, dtype="float32", shapes="", flops=0.0, bytes_read=0.0,
                      bytes_written=0.0, bound=None, timed=timed, load=Load(0.0, 0.0, foreign, 0, None))


def test_spread_is_half_the_interval_of_the_median() -> None:
    values = [1.0 + 0.01 * i for i in range(15)]
    assert spread_of(values) == pytest.approx(0.5 * math.log(values[-4] / values[3]))    # k = 4 for 15 samples
    assert spread_of([1.0, 2.0]) == pytest.approx(0.5 * math.log(2.0))  # too few samples for an interval: the range is used


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
    # a drift common to both changes no speed-up, however large it is
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
    """The heuristic is 0.5 of tuned in one case and the same code in the other: the mean over both is √0.5."""
    apart = judge(name="a", heuristic=[2.0] * 6, tuned=[1.0] * 6)
    timed = [Timed(ContestantResult("heuristic", "ok"), [3.0] * 6), Timed(ContestantResult("tuned", "ok", same_as="heuristic"), None)]
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
