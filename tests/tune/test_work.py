"""What bench children conclude from times."""
from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from svod.bench.race import VOID_REPEATS, Ratio
from svod.config import BeamConfig
from svod.core.scheduler import Scheduler
from svod.tune.candidate import Candidate, Origin
from svod.tune.executor import InlineExecutor, Kind
from svod.tune.jobs import Outcome
from svod.tune.laboratory import Race
from svod.tune.work import error_of_median, may_win
from svod.tune.worker_laboratory import RESTLESS_REPEATS, WorkerLaboratory
from tests.tune.search_kernels import TARGET, gemm


def test_only_what_may_still_win_is_timed_further() -> None:
    heuristic, best = Ratio(1.0, 1.0, 1.0), Ratio(0.80, 0.79, 0.81)
    tied, slower, surely_slower = Ratio(0.84, 0.80, 0.88), Ratio(0.95, 0.94, 0.96), Ratio(1.1, 1.05, 1.2)
    assert may_win([heuristic, best, slower, tied, surely_slower], 1.01) == [0, 1, 3]
    assert may_win([heuristic, surely_slower], 1.01) == [0]
    # below six rounds nothing is known, so everything may win
    assert may_win([heuristic, Ratio(0.5, 0.0, float("inf")), Ratio(2.0, 0.0, float("inf"))], 1.01) == [0, 1, 2]


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


def test_a_machine_that_did_not_come_to_rest_is_not_waited_for_again() -> None:
    asked: list[int] = []
    restless = [False, True, True, False, False]

    class Laboratory(WorkerLaboratory):
        def _run(self, job: str, items: Sequence[Any], kind: Kind, deadline: float, module: str = "") -> list[Outcome]:
            asked.append(items[0][3])
            return [Outcome("ok", Race((1.0, 1.0), 1e-3, 0.01, restless[len(asked) - 1]))]
    kernel = gemm(4, 4, 4)
    base = Scheduler(kernel, TARGET)
    lab = Laboratory(kernel, TARGET, InlineExecutor(), BeamConfig())
    field = [Candidate(base, (), Origin.UNTOUCHED, seconds=1e-3), Candidate(base, (), Origin.HEURISTIC, seconds=1e-3)]
    for noisy in restless:
        assert lab.race(field).noisy is noisy
    assert asked == [VOID_REPEATS, VOID_REPEATS, RESTLESS_REPEATS, RESTLESS_REPEATS, VOID_REPEATS]
