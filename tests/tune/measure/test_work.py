"""The decisions that bench children make from times: finalists that may still win, ratios, errors of medians."""
from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from svod.bench.load import MachineLoad
from svod.bench.race import VOID_REPEATS, paired_ratio
from svod.config import BeamConfig, BenchConfig
from svod.core.kernel.scheduler import Scheduler
from svod.tune.measure import work
from svod.tune.measure.candidate import Candidate, Origin
from svod.tune.measure.measurer import RaceResult
from svod.tune.measure.work import against_first, error_of_median, may_win
from svod.tune.measure.worker_measurer import RESTLESS_REPEATS, WorkerMeasurer
from svod.tune.workers.executor import InlineExecutor, Kind
from svod.tune.workers.jobs import Outcome
from tests.tune.search_kernels import TARGET, gemm


def test_only_what_may_still_win_is_timed_further() -> None:
    """The heuristic's times vary by ± 5 %, so that ratios to it do not separate the finalists; these vary by ± 1 %, and their direct ratios
    do."""
    rng = random.Random(0)

    def times(ratio: float, spread: float, rounds: int = 15) -> list[float]:
        return [ratio * (1 + rng.uniform(-spread, spread)) for _ in range(rounds)]
    heuristic, best, slower = times(1.0, 0.05), times(0.8, 0.01), times(0.83, 0.01)
    level, surely_slower = times(0.802, 0.01), times(1.1, 0.01)
    field = [heuristic, best, slower, level, surely_slower]
    assert paired_ratio(slower, heuristic).low < paired_ratio(best, heuristic).high
    assert may_win(field, range(5), 1.003) == [0, 1, 3]
    assert may_win(field, [0, 2], 1.003) == [0, 2], "the others are out of the race"
    assert may_win([heuristic, surely_slower], [0, 1], 1.003) == [0]
    # below six rounds nothing is known, so everything may win
    assert may_win([times(1.0, 0.05, 5), times(0.5, 0.01, 5), times(2.0, 0.01, 5)], range(3), 1.003) == [0, 1, 2]
    # a candidate level with the heuristic stays as long as it may be faster
    assert may_win([times(1.0, 0.01), times(1.0, 0.01)], range(2), 1.003) == [0, 1]


def test_what_left_early_is_not_favoured_by_the_rounds_it_took_part_in() -> None:
    """The heuristic takes 10 % longer in the first 15 rounds. A finalist that takes 2 % longer than the best is left out after these
    rounds, and must not look better for it."""
    rng = random.Random(1)
    heuristic = [(1.1 if r < 15 else 1.0) * rng.uniform(0.99, 1.01) for r in range(100)]
    best = [0.8 * rng.uniform(0.995, 1.005) for _ in range(100)]
    left = [1.02 * t * rng.uniform(0.998, 1.002) for t in best[:15]]
    assert paired_ratio(left, heuristic[:15]).high < paired_ratio(best, heuristic).low
    first, told, of_left = against_first([heuristic, best, left], [0, 1])
    assert (first.low, first.high) == (1.0, 1.0) and told == paired_ratio(best, heuristic)
    assert of_left.median == pytest.approx(1.02 * told.median, rel=0.002) and told.high * 1.015 < of_left.high
    assert against_first([heuristic, left], [0])[1] == paired_ratio(left, heuristic[:15])


@pytest.mark.parametrize("rounds", [8, 15, 60])
def test_the_error_of_a_median_is_that_of_repeated_races(rounds: int) -> None:
    rng = np.random.default_rng(3)
    samples = rng.normal(0.0, 0.02, (2000, rounds))
    medians = np.median(samples, axis=1)
    told = statistics.fmean(error_of_median(list(s - m)) for s, m in zip(samples, medians, strict=True))
    assert told == pytest.approx(float(medians.std()), rel=0.2)
    disturbed = samples.copy()
    disturbed[:, 0] = 1.0           # one sample of each race took e times as long
    medians = np.median(disturbed, axis=1)
    told = statistics.fmean(error_of_median(list(s - m)) for s, m in zip(disturbed, medians, strict=True))
    assert told == pytest.approx(float(medians.std()), rel=0.3)


@pytest.mark.parametrize(("seconds", "sizes", "rounds"), [(1e-3, 1, 15), (0.1, 1, 15), (0.15, 1, 10), (0.15, 2, 6), (5.0, 1, 6)])
def test_a_confirmation_of_what_takes_long_has_fewer_rounds(seconds: float, sizes: int, rounds: int) -> None:
    kernel = gemm(4, 4, 4)
    base = Scheduler(kernel, TARGET)
    measurer = WorkerMeasurer(kernel, TARGET, InlineExecutor(), BeamConfig(), sizes=[()] * sizes)
    field = [Candidate(base, (), Origin.HEURISTIC, seconds=seconds), Candidate(base, (), Origin.UNTOUCHED, seconds=seconds)]
    assert measurer.confirm_rounds(field, 3.0) == rounds
    short = WorkerMeasurer(kernel, TARGET, InlineExecutor(), BeamConfig(), BenchConfig(rounds=3))
    assert short.confirm_rounds(field, 3.0) == 3, "fewer are what was asked for"


def test_a_machine_that_did_not_come_to_rest_is_not_waited_for_again() -> None:
    asked: list[int] = []
    restless = [False, True, True, False, False]

    class Measurer(WorkerMeasurer):
        def _run(self, job: str, items: Sequence[Any], kind: Kind, deadline: float, homes: Sequence[str] = ()) -> list[Outcome]:
            asked.append(items[0][3])
            return [Outcome("ok", (RaceResult((1.0, 1.0), 1e-3, 0.01, restless[len(asked) - 1]), [[1.0], [1.0]]))]
    kernel = gemm(4, 4, 4)
    base = Scheduler(kernel, TARGET)
    measurer = Measurer(kernel, TARGET, InlineExecutor(), BeamConfig())
    field = [Candidate(base, (), Origin.UNTOUCHED, seconds=1e-3), Candidate(base, (), Origin.HEURISTIC, seconds=1e-3)]
    for noisy in restless:
        assert measurer.race(field).noisy is noisy
    assert asked == [VOID_REPEATS, VOID_REPEATS, RESTLESS_REPEATS, RESTLESS_REPEATS, VOID_REPEATS]
    restless += [True, False, False]
    for seconds, part, repeats in ((0.2, 1.0, 0), (0.2, 0.2, 2), (1e-3, 1.0, VOID_REPEATS)):
        for c in field:             # a batch takes (2 · 4 + 6) · 0.2 s, or that of a part of the kernel
            c.seconds, c.linear = seconds, "known"
        measurer.parts["known"] = part
        measurer.race(field)
        assert asked[-1] == repeats
    restless += [True, True, False]
    for seconds, repeats in ((1e-3, VOID_REPEATS), (0.2, 0), (1e-3, RESTLESS_REPEATS)):     # a race that is not repeated tells nothing
        for c in field:
            c.seconds, c.linear = seconds, ""
        measurer.race(field)
        assert asked[-1] == repeats
    assert measurer.race_rounds([1e-3] * 2) == (8, VOID_REPEATS)
    measurer.sizes = ((),) * 40
    assert measurer.race_rounds([1e-3] * 2) == (8, 1), "at sizes that take 40 times as long together"


def test_the_load_is_that_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call reports the load since the last one, and only the first call pauses."""
    clock, pauses = [0.0], []

    def watched() -> Callable[[], MachineLoad]:
        begun = clock[0]
        return lambda: MachineLoad(steal=clock[0] - begun)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += seconds
    monkeypatch.setattr(work, "watch_machine", watched)
    monkeypatch.setattr(work, "time", SimpleNamespace(sleep=pause))       # threads of other tests may be waiting
    monkeypatch.setattr(work, "_load_since_last_look", None)
    steals = []
    for seconds in (0.0, 0.25, 0.5):
        clock[0] += seconds
        steals.append(work.machine_facts("CPU", None)["steal"])
    assert pauses == [work.LOAD_WATCH_SECONDS]
    assert steals == [work.LOAD_WATCH_SECONDS, 0.25, 0.5]
