"""The search at prepare time never stops a prepare."""
from __future__ import annotations

import logging
import re
from typing import Any, NoReturn

import numpy as np
import pytest

from svod import BeamConfig, PrepareConfig, Tensor, Variable
from svod.bench.race import Ratio
from svod.errors import TuneError
from svod.tune import at_prepare as search
from svod.tune.db import TuningDB
from svod.tune.search.events import CandidateDropped
from svod.tune.search.kernel_search import Finding
from svod.tune.session import SessionResult, TuneSession


@pytest.mark.parametrize(("error", "word"), [(TuneError("no worker starts"), "no worker starts"), (KeyboardInterrupt(), "Ctrl-C")])
def test_a_search_that_cannot_be_run_leaves_the_heuristic(error: BaseException, word: str, monkeypatch: pytest.MonkeyPatch,
                                                         caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise error

    def unmeasured(*args: Any, **kwargs: Any) -> NoReturn:
        raise MemoryError("no room to measure in")
    monkeypatch.setattr(search, "make_executor", refuse)
    monkeypatch.setattr(search, "cached_ceilings", unmeasured)
    config = PrepareConfig(beam=BeamConfig(width=1), db=":none:")
    with caplog.at_level(logging.WARNING, "svod"):
        plan = (Tensor(np.arange(37, dtype=np.float32)) + 4).prepare(config)
    assert [k.opts_source for k in plan.kernels] == ["heuristic"]
    assert word in caplog.text
    plan.execute()
    assert plan.outputs[0].tolist() == list(range(4, 41))


def test_kernels_that_could_not_be_measured_are_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def __init__(self, tasks: Any, *args: Any, **kwargs: Any) -> None:
            self.keys = [t.key for t in tasks]

        def run(self) -> SessionResult:
            why = "every candidate failed (error FormatError: not plain data)"
            found = Finding((), "heuristic", float("inf"), float("inf"), False, False, why, "", Ratio(1.0, 1.0, 1.0), None, None)
            return SessionResult(dict.fromkeys(self.keys, found))
    monkeypatch.setattr(search, "TuneSession", Failing)
    monkeypatch.setattr(search, "cached_ceilings", lambda *args, **kwargs: None)
    monkeypatch.setattr(search, "_searching", search._Clock())
    config = PrepareConfig(beam=BeamConfig(width=1, executor="inline"), db=":none:")
    with caplog.at_level(logging.WARNING, "svod"):
        plan = (Tensor(np.arange(41, dtype=np.float32)) * 3).prepare(config)
    assert "1 was not measured: every candidate failed (error FormatError: not plain data)" in caplog.text
    assert [k.opts_source for k in plan.kernels] == ["heuristic"]


def test_the_budget_of_a_process_is_spent_once_unless_it_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def run(work: Any, db: Any) -> SessionResult:
        given.append(work.seconds)
        return SessionResult()
    monkeypatch.setattr(search._Work, "_run", run)
    monkeypatch.setattr(search, "_searching", search._Clock(spent=7.0))
    plan: Any = None
    config = PrepareConfig(beam=BeamConfig(width=1, budget=6.0), db=":none:")
    with TuningDB.open(":none:") as db:
        assert search.search_at_prepare(plan, {}, plan, config, db) == {} and given == []
        search.begin_budget()
        search.search_at_prepare(plan, {}, plan, config, db)
    assert given == [6.0] and search.seconds_searched() >= 7.0


@pytest.mark.parametrize("debug", [0, 1, 2])
def test_beam_debug_prints_what_a_search_does(debug: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Dropping(TuneSession):
        def run(self) -> SessionResult:
            self.listener(CandidateDropped(self.tasks[0].key, "wrong", "off by 3", "UPCAST(o0, 8)"))
            return super().run()
    monkeypatch.setattr(search, "TuneSession", Dropping)
    monkeypatch.setattr(search, "cached_ceilings", lambda *args, **kwargs: None)
    monkeypatch.setattr(search, "_searching", search._Clock())
    beam = BeamConfig(width=1, executor="inline", debug=debug, uops_max=5, log_surpass_max=debug == 0,
                      ignore_cache=True)
    (Tensor(np.arange(43 + debug, dtype=np.float32)) * 3).prepare(PrepareConfig(beam=beam, db=":none:"))    # not searched by a test before
    printed = capsys.readouterr().err
    assert (" dropped, limit: " in printed) == (debug != 1), printed
    assert (re.search(r"^elementwise: (as it is|[A-Z]+\(.*\)): [\d.]+ [µn]s$", printed, re.M) is not None) == (debug > 1), printed
    assert ("elementwise: round 1: " in printed) == (": ended, " in printed) == (debug > 0), printed
    assert ("elementwise: UPCAST(o0, 8) dropped, wrong: off by 3" in printed) == (debug > 1), printed


def test_kernels_with_variables_are_searched_at_their_hints_and_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def session(tasks: Any, *args: Any, **kwargs: Any) -> NoReturn:
        asked.update((t.key, t.sizes) for t in tasks)
        raise TuneError("enough is known")
    monkeypatch.setattr(search, "TuneSession", session)
    monkeypatch.setattr(search, "cached_ceilings", lambda *args, **kwargs: None)
    monkeypatch.setattr(search, "_searching", search._Clock())
    config = PrepareConfig(beam=BeamConfig(width=1, executor="inline"), db=":none:")
    n = Variable("n", 1, 50, hint=(9, 40), buckets=(20, 30))
    plan = (Tensor(np.arange(50, dtype=np.float32))[:n] + 4).prepare(config)
    assert [asked[k.key] for k in plan.every] == [((9,),), ((21,), (25,), (30,)), ((40,),)]
    plan.execute(n=25)
    assert plan.outputs[0][:25].tolist() == list(range(4, 29))
