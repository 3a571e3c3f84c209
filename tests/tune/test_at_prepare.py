"""The search at prepare time: a `prepare` never fails because of it."""
from __future__ import annotations

import logging
import re
import threading
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from svod import BeamConfig, PrepareConfig, Tensor, Variable
from svod.bench.race import Ratio
from svod.compile.cpu.host import host_target
from svod.compile.plan.compiler import Choice, Compiler
from svod.compile.plan.object_cache import ObjectCache
from svod.errors import TuneError
from svod.tune import at_prepare as search
from svod.tune.db import TuningDB
from svod.tune.resolved import Resolved
from svod.tune.search.confirmation import Finding
from svod.tune.search.events import CandidateDropped
from svod.tune.session import SessionResult, TuneSession
from tests.draws import a_half
from tests.system.test_fork import in_child

COMPILER = Compiler(host_target(), ObjectCache(), 16)


@pytest.mark.parametrize(("error", "word"), [
    (TuneError("no worker starts"), "no worker starts"), (KeyboardInterrupt(), "Ctrl-C"), (RuntimeError("can't start new thread"),
                                                                                           "RuntimeError: can't start new thread"),
    (FileNotFoundError(2, "No usable temporary directory"), "No usable temporary directory"), (AssertionError(), "AssertionError")])
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


@pytest.mark.parametrize(("failure", "said"), [
    ("", "1 was not measured: every candidate failed (error FormatError: not plain data)"),
    ("error FormatError: not plain data",
     "nothing could be measured: every candidate of 1 kernel failed (error FormatError: not plain data). That is an error of svod's own")])
def test_kernels_that_could_not_be_measured_are_said(failure: str, said: str, monkeypatch: pytest.MonkeyPatch,
                                                     caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def __init__(self, tasks: Any, *args: Any, **kwargs: Any) -> None:
            self.keys = [t.key for t in tasks]

        def run(self) -> SessionResult:
            why = "every candidate failed (error FormatError: not plain data)"
            found = Finding((), "heuristic", float("inf"), float("inf"), False, False, why, "", Ratio(1.0, 1.0, 1.0), None, None,
                            failure)
            return SessionResult(dict.fromkeys(self.keys, found))
    monkeypatch.setattr(search, "TuneSession", Failing)
    monkeypatch.setattr(search, "cached_ceilings", lambda *args, **kwargs: None)
    monkeypatch.setattr(search, "_searching", search._Clock())
    config = PrepareConfig(beam=BeamConfig(width=1, executor="inline"), db=":none:")
    with caplog.at_level(logging.WARNING, "svod"):
        plan = (Tensor(np.arange(41, dtype=np.float32)) * 3).prepare(config)
    assert caplog.text.count(said) == 1
    assert [k.opts_source for k in plan.kernels] == ["heuristic"]


def test_the_budget_of_a_process_is_spent_once_unless_it_begins_anew(monkeypatch: pytest.MonkeyPatch,
                                                                     caplog: pytest.LogCaptureFixture) -> None:
    given: list[float] = []

    def run(work: Any) -> SessionResult:
        given.append(work.seconds)
        return SessionResult()
    monkeypatch.setattr(search._Work, "_run", run)
    monkeypatch.setattr(search, "_searching", search._Clock(spent=7.0))
    plan: Any = None
    beam = BeamConfig(width=1, budget=6.0)
    unknown: Any = {"k": None}
    monkeypatch.setattr(search, "choose_each", lambda kernels, _: dict.fromkeys(kernels, Choice((), "heuristic", "")))
    with TuningDB.open(":none:") as db, caplog.at_level(logging.WARNING, "svod"):
        resolved = Resolved(PrepareConfig(), COMPILER, db, {})
        for _ in range(2):
            assert search.search_at_prepare(plan, unknown, resolved, beam) == ({}, False) and given == []
        assert len(caplog.records) == 1 and "6 s, is used up: 1 kernel is not searched" in caplog.text, "it is said once"
        search.begin_budget()
        assert search.search_at_prepare(plan, unknown, resolved, beam).ran
    assert given == [6.0] and search.seconds_searched() >= 7.0


@pytest.mark.parametrize(("budget", "spent", "left"), [(60.0, 0.0, 60.0), (60.0, 59.5, 0.0), (60.0, 58.5, 1.5), (0.6, 0.0, 0.6),
                                                       (0.6, 0.4, 0.0), (0.0, 0.0, 0.0), (4.0, 9.0, 0.0)])
def test_a_budget_that_starts_no_worker_is_used_up(budget: float, spent: float, left: float) -> None:
    assert search._Clock(spent).left(budget) == pytest.approx(left)


def test_a_forked_child_has_a_budget_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_searching", search._Clock(spent=7.0, told=True))
    monkeypatch.setattr(search, "_checking", search._Clock(spent=7.0))
    monkeypatch.setattr(search, "_interrupted", 3)
    in_child(lambda: search._searching.left(6.0) == 6.0 and not search._searching.told and search._checking.left(6.0) == 6.0
             and search.searches_interrupted() == 0)
    assert search._searching.left(6.0) == 0.0


def test_who_has_waited_for_another_threads_search_uses_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has waited for another thread's search, which used up the budget, takes the chain that it has found."""
    found, begun = Choice((), "database", "by the first thread"), threading.Event()
    known: list[Choice] = []
    monkeypatch.setattr(search, "choose_each",
                        lambda kernels, _: dict.fromkeys(kernels, known[0] if known else Choice((), "heuristic", "")))
    monkeypatch.setattr(search, "is_to_be_searched", lambda choice, *_: True)

    def run(work: Any) -> SessionResult:
        begun.set()
        while not waiting.is_alive():
            pass
        known.append(found)
        search._searching.spent += 100.0
        return SessionResult()
    monkeypatch.setattr(search._Work, "_run", run)
    monkeypatch.setattr(search, "_searching", search._Clock())
    beam, got = BeamConfig(width=1, budget=6.0), list[Any]()
    nothing: Any = None
    unknown: Any = {"k": None}
    with TuningDB.open(":none:") as db:
        resolved = Resolved(PrepareConfig(), COMPILER, db, {})

        def wait() -> None:
            begun.wait()
            got.append(search.search_at_prepare(nothing, unknown, resolved, beam))
        waiting = threading.Thread(target=wait)
        first = threading.Thread(target=search.search_at_prepare, args=(nothing, unknown, resolved, beam))
        first.start()
        waiting.start()
        first.join()
        waiting.join()
    assert got == [({"k": found}, False)]


@pytest.mark.parametrize(("interrupted", "why"), [(True, "interrupted"), (False, "budget spent")])
def test_kernels_that_had_no_turn_say_what_ended_the_search(interrupted: bool, why: str, monkeypatch: pytest.MonkeyPatch,
                                                            caplog: pytest.LogCaptureFixture) -> None:
    class Ended(TuneSession):
        def run(self) -> SessionResult:
            return SessionResult(unbegun=tuple(t.key for t in self.tasks), interrupted=interrupted)
    monkeypatch.setattr(search, "TuneSession", Ended)
    monkeypatch.setattr(search, "cached_ceilings", lambda *args, **kwargs: None)
    monkeypatch.setattr(search, "_searching", search._Clock())
    monkeypatch.setattr(search, "_interrupted", 0)
    config = PrepareConfig(beam=BeamConfig(width=1, executor="inline", ignore_cache=True), db=":none:")
    with caplog.at_level(logging.WARNING, "svod"):
        plan = (Tensor(np.arange(47, dtype=np.float32)) * 3).prepare(config)
    assert [k.why.split("; ")[0] for k in plan.kernels] == [f"{why} before its turn"]     # then the template of the heuristic
    assert f"1 was not measured: {why} before their turn" in caplog.text


@pytest.mark.parametrize("step", ["chains_to_check", "is_to_be_searched"])
def test_no_optional_step_ends_a_prepare(step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*args: Any) -> NoReturn:
        raise RuntimeError("of a library")
    monkeypatch.setattr(f"svod.tune.plan_chains.{step}", fail)
    with caplog.at_level(logging.WARNING, "svod"):
        plan = (Tensor(np.arange(53, dtype=np.float32)) + 4).prepare(PrepareConfig(beam=BeamConfig(width=1), db=":none:")
                                                                     if step == "is_to_be_searched" else PrepareConfig(db=":none:"))
    assert [r.message for r in caplog.records if "RuntimeError: of a library" in r.message]
    plan.execute()
    assert plan.outputs[0].tolist() == list(range(4, 57))


def test_a_database_that_was_named_and_is_not_there_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    absent = tmp_path / "elsewhere" / "tune.db"
    with caplog.at_level(logging.WARNING, "svod"):
        (Tensor(np.arange(59, dtype=np.float32)) + 4).prepare(PrepareConfig(db=str(absent), transfer=False, imported="ignore"))
    assert f"there is no tuning database {absent}" in caplog.text and not absent.exists()


@pytest.mark.parametrize("debug", a_half([0, 1, 2]))
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
