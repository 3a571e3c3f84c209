"""Comparisons of recorded runs."""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from svod.bench.compare import LEAST_CHANGE, check_comparable, compare_runs, drift_of_peers
from svod.bench.results import CaseResult, ContestantResult, Run, read_run
from svod.errors import FormatError
from tests.bench.example_run import DATA, example_run

BEFORE, SLOWER = read_run(DATA / "run.json"), read_run(DATA / "run_slower.json")


def with_case(run: Run, name: str, change: Any) -> Run:
    return replace(run, cases=tuple(change(c) if c.name == name else c for c in run.cases))


def scaled(case: CaseResult, names: tuple[str, ...], factor: float) -> CaseResult:
    def scale(o: ContestantResult) -> ContestantResult:
        return replace(o, median=o.median * factor) if o.name in names and o.median is not None else o
    return replace(case, contestants=tuple(map(scale, case.contestants)))


def verdicts(a: Run, b: Run) -> dict[tuple[str, str], str]:
    """All verdicts other than "same"."""
    return {(c.case, c.contestant): c.verdict for c in compare_runs(a, b).changes if c.verdict not in ("same", "noisy")}


def test_only_what_changed_is_said_to_have() -> None:
    assert verdicts(BEFORE, BEFORE) == {} and not compare_runs(BEFORE, BEFORE).worse
    assert verdicts(BEFORE, SLOWER) == {("gemm_1024", "heuristic"): "slower", ("gemm_1024", "tuned"): "slower"}
    assert compare_runs(BEFORE, SLOWER).worse
    back = compare_runs(SLOWER, BEFORE)
    assert not back.worse and {c.verdict for c in back.changes} == {"same", "faster", "noisy"}
    assert back.means["tuned"] == pytest.approx(1 / compare_runs(BEFORE, SLOWER).means["tuned"])


def test_a_change_within_the_noise_is_none() -> None:
    case = BEFORE.case("gemm_1024")
    assert case is not None
    for factor, verdict in ((1.0 + 0.5 * LEAST_CHANGE, None), (1.2, "slower"), (0.8, "faster")):
        after = with_case(BEFORE, "gemm_1024", lambda c, f=factor: scaled(c, ("heuristic",), f))
        assert verdicts(BEFORE, after).get(("gemm_1024", "heuristic")) == verdict


def test_what_moves_the_peers_moves_svod() -> None:
    """If everything is 20 % slower, the machine is; a peer in another version tells nothing about the machine."""
    everyone = ("heuristic", "tuned", "numpy", "torch", "onnxruntime", "jax")
    after = with_case(BEFORE, "gemm_1024", lambda c: scaled(c, everyone, 1.2))
    a, b = BEFORE.case("gemm_1024"), after.case("gemm_1024")
    assert a is not None and b is not None
    assert drift_of_peers(a, b, {"numpy", "torch"}) == pytest.approx(math.log(1.2)) and drift_of_peers(a, b, set()) == 0.0
    assert verdicts(BEFORE, after) == {}
    other = replace(after, peers=tuple(replace(p, version="9") if p.version else p for p in after.peers))
    assert verdicts(BEFORE, other)[("gemm_1024", "tuned")] == "slower"


def test_noisy_cases_are_not_judged() -> None:
    after = with_case(SLOWER, "gemm_1024", lambda c: replace(c, noisy="the machine was busy"))
    found = compare_runs(BEFORE, after)
    change = next(c for c in found.changes if c.case == "gemm_1024" and c.contestant == "tuned")
    assert change.verdict == "noisy" and change.why == "the machine was busy" and not found.worse
    unchanged = with_case(BEFORE, "gemm_1024", lambda c: replace(c, noisy="the machine was busy"))
    for a, b in ((BEFORE, unchanged), (unchanged, BEFORE)):     # a peer whose time did not change tells as little
        assert [c.verdict for c in compare_runs(a, b).changes if c.case == "gemm_1024"] == ["noisy", "noisy"]


def test_what_broke_is_worse() -> None:
    def broken(case: CaseResult) -> CaseResult:
        wrong = ContestantResult("tuned", "wrong", "it differs")
        return replace(case, contestants=tuple(wrong if o.name == "tuned" else o for o in case.contestants))
    after = with_case(BEFORE, "gemm_256", broken)
    assert verdicts(BEFORE, after) == {("gemm_256", "tuned"): "broken"} and compare_runs(BEFORE, after).worse
    assert verdicts(after, BEFORE) == {("gemm_256", "tuned"): "repaired"} and not compare_runs(after, BEFORE).worse
    assert verdicts(after, after) == {}


def test_cases_of_one_run_only_are_named() -> None:
    fewer = replace(BEFORE, cases=BEFORE.cases[1:])
    assert verdicts(BEFORE, fewer) == {("gemm_256", "heuristic"): "gone", ("gemm_256", "tuned"): "gone"}
    assert verdicts(fewer, BEFORE) == {("gemm_256", "heuristic"): "new", ("gemm_256", "tuned"): "new"}
    assert not compare_runs(BEFORE, fewer).worse


@pytest.mark.parametrize(("change", "words"), [
    (lambda r: replace(r, machine=replace(r.machine, cpu="another")), "processor: AMD EPYC 9B45 and another"),
    (lambda r: replace(r, machine=replace(r.machine, threads=8)), "threads: 2 and 8"),
    (lambda r: replace(r, versions={**r.versions, "protocol": "2"}), "protocol of measuring: 1 and 2"),
    (lambda r: replace(r, settings=replace(r.settings, seed=5)), "seed"),
])
def test_runs_that_mean_different_things(change: Any, words: str) -> None:
    check_comparable(BEFORE, SLOWER)
    with pytest.raises(FormatError, match=words):
        check_comparable(BEFORE, change(example_run()))
