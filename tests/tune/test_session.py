"""Sessions: kernels, budget, database, interruption. Replayed measurers, except for the last test, which searches for real."""
from __future__ import annotations

import logging
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from svod.bench.roofline import Bound
from svod.compile.cpu.host import host_target
from svod.config import BeamConfig, BenchConfig
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.errors import TuneError
from svod.tune.db import Measurement, Search, TargetFacts, TuningDB, Verdict
from svod.tune.db.records import BUDGET_SPENT, INTERRUPTED
from svod.tune.measure.candidate import Candidate, Origin, Status
from svod.tune.measure.measurer import Failure, MachineChanged, RaceResult, Verification
from svod.tune.report_source import read_tuning
from svod.tune.search.budget import WARM_UP_ROUNDS, ModelBudget
from svod.tune.search.events import (
    CandidateDropped,
    Improved,
    KernelFinished,
    KernelStarted,
    RoundFinished,
    SearchEvent,
    SessionFinished,
    SessionStarted,
)
from svod.tune.session import OVERRUN, KernelTask, SessionResult, TuneSession
from svod.tune.unfinished import left_to_search, was_cut_short
from svod.tune.workers.executor import Executor, InlineExecutor
from svod.tune.workers.local_executor import LocalExecutor
from tests.draws import a_half
from tests.tune.replay import ReplayedMeasurer, is_failure, made_up_seconds
from tests.tune.search_kernels import TARGET, elementwise, gemm, row_reduce
from tests.tune.sessions import Rounds, replayed_session

GEMM, SUM, RELU = gemm(48, 64, 40), row_reduce(100, 64), elementwise(1000)


@pytest.fixture
def db() -> Iterator[TuningDB]:
    with TuningDB.open(":none:") as found:
        yield found


@pytest.fixture
def executor() -> Iterator[Executor]:
    with InlineExecutor() as found:
        yield found


def test_every_kernel_is_searched_confirmed_and_remembered(db: TuningDB, executor: Executor) -> None:
    events: list[SearchEvent] = []
    result = replayed_session(db, executor, GEMM, SUM, RELU, events=events).run()
    assert set(result.findings) == {GEMM.key, SUM.key, RELU.key}
    for key, found in result.findings.items():
        assert found.verified and found.confirmed
        assert found.seconds <= found.heuristic_seconds
        winner = db.winner(key, TARGET.key)
        assert winner is not None
        assert winner.linear == found.linear
        assert [Opt.from_json(list(o)) for o in winner.chain] == list(found.chain)
        assert winner.ratio == pytest.approx(1 / found.speedup.median)
    assert isinstance(events[0], SessionStarted) and isinstance(events[-1], SessionFinished)
    assert sum(isinstance(e, KernelFinished) for e in events) == 3
    assert result.candidates > 20
    assert not result.interrupted and not result.pending


def test_evidence_is_stored_for_every_candidate_that_was_built(db: TuningDB, executor: Executor) -> None:
    measurers: dict[str, ReplayedMeasurer] = {}
    result = replayed_session(db, executor, GEMM, measurers=measurers).run()
    rows = [m for m, _ in db.select(Measurement, GEMM.key)]
    assert result.rows >= len(rows)
    assert {m.linear for m in rows} == set(measurers[GEMM.key].built)
    assert {m.step for m in rows} == {"screen", "race", "confirm"}
    assert all(m.ratio is not None for m in rows if m.step != "screen" and m.status == "ok")
    verified = {v.linear for v, _ in db.select(Verdict, GEMM.key) if v.verdict == "verified"}
    assert {m.linear for m in rows if m.step == "confirm"} <= verified


def test_what_stays_as_it_is_of_a_machine_is_told_of_its_target_once(db: TuningDB, executor: Executor) -> None:
    class OnMachine(ReplayedMeasurer):
        def machine(self) -> dict[str, Any]:
            [outcome] = executor.run("svod.tune.measure.work:machine_facts", ["CPU"], kind="bench", deadline=5.0)
            return dict(outcome.value)
    replayed_session(db, executor, GEMM, SUM, measurers={GEMM.key: OnMachine(), SUM.key: OnMachine()}, budget=Rounds(3)).run()
    [(facts, _)] = db.select(TargetFacts)
    assert facts.target == TARGET.key and facts.facts["os"] == platform.system() and "load" not in facts.facts
    assert all(m.host["machine"] and "load" in m.host and "about" not in m.host for m, _ in db.select(Measurement))


def test_a_heuristic_that_nothing_beats_is_a_result_too(db: TuningDB, executor: Executor) -> None:
    result = replayed_session(db, executor, RELU, measurers={RELU.key: ReplayedMeasurer(seconds=lambda c: 1e-3)}).run()
    found = result.findings[RELU.key]
    winner = db.winner(RELU.key, TARGET.key)
    assert winner is not None
    assert winner.ratio == 1.0
    assert found.speedup.median == 1.0


def test_a_wrong_candidate_is_recorded_as_wrong(db: TuningDB, executor: Executor) -> None:
    def wrong(c: Candidate) -> bool:
        return c.digest[0] % 2 == 1 and c.origin is not Origin.HEURISTIC

    measurer = ReplayedMeasurer(seconds=lambda c: made_up_seconds(c) * (1e-3 if wrong(c) else 1.0), wrong=wrong)  # the fast are wrong
    replayed_session(db, executor, GEMM, measurers={GEMM.key: measurer}).run()
    verdicts = [v for v, _ in db.select(Verdict, GEMM.key) if v.verdict == "wrong"]
    assert verdicts
    assert all(v.reason for v in verdicts)
    assert any(m.status == "wrong" for m, _ in db.select(Measurement, GEMM.key))


@pytest.mark.parametrize(("step", "status"), a_half([("building", Status.ERROR), ("building", Status.TIMEOUT), ("running", Status.CRASH)]))
def test_failures_are_recorded_with_their_reason(db: TuningDB, executor: Executor, step: str, status: Status) -> None:
    failing = is_failure(status)

    def some(c: Candidate) -> Failure | None:
        return failing(c) if c.digest[0] % 3 == 1 else None
    replayed_session(db, executor, GEMM, measurers={GEMM.key: ReplayedMeasurer(**{step: some})}).run()
    rows = [m for m, _ in db.select(Measurement, GEMM.key) if m.status == str(status)]
    assert rows
    assert all("the table says" in m.reason for m in rows)


def test_a_second_session_compiles_nothing_that_was_measured(db: TuningDB, executor: Executor) -> None:
    first: dict[str, ReplayedMeasurer] = {}
    found = replayed_session(db, executor, GEMM, measurers=first).run().findings[GEMM.key]
    second: dict[str, ReplayedMeasurer] = {}
    again = replayed_session(db, executor, GEMM, measurers=second, seed=9).run().findings[GEMM.key]
    common = set(first[GEMM.key].built) & set(second[GEMM.key].built)
    assert len(common) < 0.2 * len(first[GEMM.key].built), "seeds are timed anew, nothing else"
    assert again.seconds <= found.seconds


def test_ignore_cache_searches_as_if_nothing_were_known(db: TuningDB, executor: Executor) -> None:
    first: dict[str, ReplayedMeasurer] = {}
    replayed_session(db, executor, GEMM, measurers=first).run()
    second: dict[str, ReplayedMeasurer] = {}
    replayed_session(db, executor, GEMM, measurers=second, ignore_cache=True).run()
    assert first[GEMM.key].trace == second[GEMM.key].trace


@pytest.mark.slow
def test_without_sketches_nothing_but_the_database_seeds_a_search(db: TuningDB, executor: Executor) -> None:
    def origins(**options: Any) -> set[Origin]:
        session = replayed_session(db, executor, GEMM, **options)
        return {origin for _, origin in session._make(session.tasks[0]).subject.seeds}
    assert origins() == {Origin.SKETCH} and origins(sketches=False) == origins(strict="reference") == set()
    replayed_session(db, executor, GEMM).run()
    assert origins(sketches=False) == {Origin.DATABASE}


def test_a_kernel_that_another_process_searches_is_left_to_it(tmp_path: Any, executor: Executor) -> None:
    with TuningDB.open(tmp_path / "tune.db") as mine, TuningDB.open(tmp_path / "tune.db") as theirs:
        claim = theirs.claims.take(GEMM.key, TARGET.key)
        assert claim is not None
        result = replayed_session(mine, executor, GEMM, SUM).run()
        assert result.pending == (GEMM.key,)
        assert set(result.findings) == {SUM.key}
        claim.release()
        assert set(replayed_session(mine, executor, GEMM).run().findings) == {GEMM.key}


def test_an_interrupt_keeps_what_was_found_and_confirms_it(db: TuningDB, executor: Executor) -> None:
    measurer = ReplayedMeasurer()
    calls = 0

    def interrupt_later(c: Candidate) -> Failure | None:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise KeyboardInterrupt
        return None
    measurer.running = interrupt_later
    result = replayed_session(db, executor, GEMM, SUM, measurers={GEMM.key: measurer}).run()
    assert result.interrupted
    assert set(result.findings) == {GEMM.key, SUM.key}
    assert result.findings[GEMM.key].verified
    assert db.claims.take(GEMM.key, TARGET.key) is not None, "claims are given back"


def test_an_interrupt_and_the_loss_of_all_workers_keep_what_was_found(db: TuningDB, executor: Executor) -> None:
    class Lost(ReplayedMeasurer):
        """A measurer that is interrupted by Ctrl-C in its third race, and has no worker left for the confirmation."""

        def race(self, candidates: Sequence[Candidate]) -> RaceResult:
            if sum(step == "race" for step, _ in self.trace) == 2:
                raise KeyboardInterrupt
            return super().race(candidates)

        def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Any]:
            raise TuneError("no worker is left that can bench")
    lost = Lost()
    result = replayed_session(db, executor, GEMM, SUM, measurers={GEMM.key: lost}).run()
    assert result.interrupted and set(result.findings) == {GEMM.key, SUM.key}
    assert result.findings[GEMM.key].verified and not result.findings[GEMM.key].confirmed


def test_an_interrupt_while_searches_are_made_leaves_no_claim_and_no_open_search(tmp_path: Any, executor: Executor,
                                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> float:
        raise KeyboardInterrupt
    with TuningDB.open(tmp_path / "tune.db") as db:
        monkeypatch.setattr("svod.tune.session.bound_at", interrupted)
        result = replayed_session(db, executor, GEMM, SUM).run()
        assert result.interrupted and not result.findings and not result.pending
        assert not [k for k in (GEMM, SUM) if db.claims.holder(k.key, TARGET.key)]
        ended = {s.search: s.outcome for s, _ in db.select(Search) if s.ended_at is not None}
        assert {s.search for s, _ in db.select(Search)} == set(ended) and list(ended.values()) == [INTERRUPTED] * 2
        assert all(was_cut_short(db, k.key, TARGET.key) for k in (GEMM, SUM)), "--resume goes on with both"


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_found_for_a_kernel_that_another_process_gave_back(tmp_path: Any, executor: Executor) -> None:
    with TuningDB.open(tmp_path / "tune.db") as mine, TuningDB.open(tmp_path / "tune.db") as theirs:
        claim = theirs.claims.take(GEMM.key, TARGET.key)
        assert claim is not None
        calls = 0

        def give_back(c: Candidate) -> None:
            claim.release()

        def interrupt_later(c: Candidate) -> Failure | None:
            nonlocal calls
            calls += 1
            if calls == 30:
                raise KeyboardInterrupt
            return None
        measurers = {SUM.key: ReplayedMeasurer(), GEMM.key: ReplayedMeasurer()}
        measurers[SUM.key].running, measurers[GEMM.key].running = give_back, interrupt_later
        result = replayed_session(mine, executor, GEMM, SUM, measurers=measurers).run()
        assert result.interrupted and not result.pending
        assert result.findings[GEMM.key].verified


def test_the_budget_is_kept_and_every_kernel_has_an_answer(db: TuningDB, executor: Executor) -> None:
    now = [0.0]
    measurers: dict[str, ReplayedMeasurer] = {}
    for k in (GEMM, SUM, RELU):
        measurers[k.key] = ReplayedMeasurer(clock=lambda seconds: now.__setitem__(0, now[0] + seconds))
    budget = ModelBudget(8.0, 40.0, lambda: now[0])
    result = replayed_session(db, executor, GEMM, SUM, RELU, measurers=measurers, budget=budget).run()
    assert set(result.findings) == {GEMM.key, SUM.key, RELU.key}
    assert all(f.verified for f in result.findings.values())
    assert now[0] <= 8.0 + 3 * 4 * 0.05 + 0.1


def test_a_kernel_whose_turn_does_not_come_costs_nothing_and_is_left_to_search(tmp_path: Any, executor: Executor) -> None:
    now = [0.0]
    slow = ReplayedMeasurer(clock=lambda seconds: now.__setitem__(0, now[0] + 1e3))
    measurers = {k.key: slow for k in (GEMM, SUM, RELU)}
    made: list[str] = []
    with TuningDB.open(tmp_path / "tune.db") as mine, TuningDB.open(tmp_path / "tune.db") as theirs:
        session = replayed_session(mine, executor, GEMM, SUM, RELU, measurers=measurers, budget=ModelBudget(8.0, 40.0, lambda: now[0]))
        make = session._make
        session._make = lambda task: [made.append(task.key), make(task)][1]     # type: ignore[method-assign, assignment]
        first, second, last = [t.key for t in session.tasks]
        assert theirs.claims.take(last, TARGET.key) is not None
        result = session.run()
        assert made == [first] and set(result.findings) == {first}
        assert result.unbegun == (second,) and result.pending == (last,)
        [end] = [s for s, _ in mine.select(Search, second) if s.ended_at is not None]
        assert end.outcome == BUDGET_SPENT and left_to_search(mine, second, TARGET.key, session.config)
        assert not mine.select(Search, last), "another process searches it"
        assert not mine.claims.holder(first, TARGET.key) and not mine.claims.holder(second, TARGET.key)


def test_a_kernel_that_another_process_has_searched_to_its_end_meanwhile_is_not_left_to_resume(tmp_path: Any, executor: Executor) -> None:
    with TuningDB.open(tmp_path / "tune.db") as mine, TuningDB.open(tmp_path / "tune.db") as theirs:
        first = replayed_session(theirs, executor, RELU)
        first.run()
        assert left_to_search(theirs, RELU.key, TARGET.key, first.config) is None, "its search is complete"
        result = replayed_session(mine, executor, RELU, budget=ModelBudget(0.0)).run()
        assert result.unbegun == (RELU.key,) and not was_cut_short(mine, RELU.key, TARGET.key)


def test_a_kernel_whose_rounds_end_slowly_keeps_within_the_budget(db: TuningDB, executor: Executor) -> None:
    """The race and the verification at the end of a round, and the verification of the finalists, begin early enough to end in time."""
    now = [0.0]
    times: dict[bytes, float] = {}      # each candidate is faster than those before, so nothing but the budget ends the search
    measurer = ReplayedMeasurer(seconds=lambda c: times.setdefault(c.digest, 2e-3 * 0.97 ** len(times)),
                             clock=lambda seconds: now.__setitem__(0, now[0] + seconds))
    race, verify = measurer.race, measurer.verify

    def slow_race(candidates: Sequence[Candidate]) -> Any:
        now[0] += 6.0
        return race(candidates)

    def slow_verify(candidates: Sequence[Candidate]) -> Any:
        now[0] += 1.0 * len(candidates)
        return verify(candidates)
    measurer.race, measurer.verify = slow_race, slow_verify   # type: ignore[method-assign]
    result = replayed_session(db, executor, GEMM, measurers={GEMM.key: measurer}, budget=ModelBudget(40.0, 40.0, lambda: now[0])).run()
    assert result.findings[GEMM.key].confirmed
    assert result.findings[GEMM.key].why == BUDGET_SPENT and now[0] <= 40.0


class Late(ReplayedMeasurer):
    """A measurer that abandons answers which are missing at `end`, as if workers did not answer."""

    end: Callable[[], float] = staticmethod(lambda: float("inf"))
    screened = 0
    stall: Callable[[], None] = staticmethod(lambda: None)      # called while the third chunk is timed

    def _late(self, candidates: Sequence[Candidate]) -> list[Any] | None:
        return [Failure(Status.LATE, "the budget was over") for _ in candidates] if self.end() <= time.monotonic() else None

    def build(self, candidates: Sequence[Candidate], *, final: bool, deadline: float) -> list[Any]:
        return self._late(candidates) or super().build(candidates, final=final, deadline=deadline)

    def screen(self, candidates: Sequence[Candidate], incumbent: float | None) -> list[Any]:
        self.screened += 1
        if self.screened == 3:
            self.stall()
        return self._late(candidates) or super().screen(candidates, incumbent)

    def verify(self, candidates: Sequence[Candidate]) -> list[Any]:
        late = self._late(candidates)
        return [Verification(None, "", f.reason, f.status) for f in late] if late else super().verify(candidates)

    def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Any]:
        return self._late(candidates) or super().confirm(candidates, seconds)


@pytest.mark.parametrize(("late", "confirmed"), a_half([(0.5, True), (OVERRUN - 0.5, True), (OVERRUN + 0.5, False)]))
def test_a_chunk_that_overruns_the_budget_does_not_cost_the_confirmations(late: float, confirmed: bool, db: TuningDB, executor: Executor,
                                                                          caplog: pytest.LogCaptureFixture) -> None:
    """The answer to the last chunk comes after the budget's end. The best chains of all kernels are still confirmed if there is time for
    that; else a line names each chain that led and could not be confirmed."""
    now, budget = [0.0], 20.0
    events: list[SearchEvent] = []
    measurers = {k.key: Late() for k in (GEMM, SUM, RELU)}
    session = replayed_session(db, executor, GEMM, SUM, RELU, measurers=dict(measurers), events=events,
                               budget=ModelBudget(budget, 40.0, lambda: now[0]))
    for key, m in measurers.items():
        m.end = session._worker_measurer(session._tasks_by_key[key].kernel, True).end
    last = measurers[session.tasks[-1].key]
    last.stall = lambda: now.__setitem__(0, budget + late)
    with caplog.at_level(logging.WARNING, "svod"):
        result = session.run()
    assert now[0] == budget + late and set(result.findings) == set(measurers)
    improved = [f for f in result.findings.values() if f.source == "beam"]
    assert len(improved) > 1 and all(f.confirmed is confirmed for f in result.findings.values())
    assert all((db.winner(key, TARGET.key) is not None) is confirmed for key in measurers)
    said = [r.getMessage() for r in caplog.records if "could not be confirmed" in r.getMessage()]
    assert len(said) == (0 if confirmed else len(improved))
    assert all(re.fullmatch(r"kernel \d led by \d+\.\d\d× and could not be confirmed: the budget was over", line) for line in said)
    statuses = {e.status for e in events if isinstance(e, CandidateDropped)}
    assert "late" in statuses and "lost" not in statuses, "no worker was lost"
    assert not any(m.status == "lost" for m, _ in db.select(Measurement)), "nothing is known of what was not answered"


def test_where_nothing_leads_the_last_answer_is_waited_for_as_well(db: TuningDB, executor: Executor) -> None:
    """The heuristic's time is waited for beyond the budget's end: it is a result, and there is no confirmation that it would delay."""
    now = [0.0]
    measurer = Late()
    measurer.screened = 2
    session = replayed_session(db, executor, GEMM, measurers={GEMM.key: measurer}, budget=ModelBudget(2.0, 40.0, lambda: now[0]))
    measurer.end = session._worker_measurer(GEMM, True).end
    measurer.stall = lambda: now.__setitem__(0, 2.0 + OVERRUN / 2)
    found = session.run().findings[GEMM.key]
    assert found.verified and found.confirmed and found.source == "heuristic"


@pytest.mark.slow
def test_a_report_counts_what_the_command_counted(db: TuningDB, executor: Executor) -> None:
    """The numbers of kernels, searches, candidates and timed candidates are the same in the report and in the command's result."""
    failing = is_failure(Status.CRASH)
    measurers = {SUM.key: ReplayedMeasurer(running=lambda c: failing(c) if c.digest[0] % 3 == 0 else None)}
    result = replayed_session(db, executor, GEMM, SUM, RELU, measurers=measurers).run()
    found = read_tuning(db, TARGET.key)
    assert found is not None
    courses = [c for k in found.kernels for c in k.courses]
    assert len(found.kernels) == len(result.findings) == 3 and len(courses) == result.searches == 3
    assert sum(c.candidates for c in courses) == result.candidates > result.timed == sum(c.timed for c in courses) > 0


def test_times_of_a_busy_machine_are_known_as_such(db: TuningDB, executor: Executor) -> None:
    class Busy(ReplayedMeasurer):
        def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Any]:
            return [replace(c, noisy=True) for c in super().confirm(candidates, seconds)]
    replayed_session(db, executor, GEMM, SUM, measurers={GEMM.key: Busy()}).run()
    noisy = {key: w.noisy for key in (GEMM.key, SUM.key) if (w := db.winner(key, TARGET.key)) is not None}
    assert noisy == {GEMM.key: True, SUM.key: False}


def test_where_everything_fails_the_result_says_how(db: TuningDB, executor: Executor) -> None:
    failing = ReplayedMeasurer(building=is_failure(Status.ERROR))
    some = replayed_session(db, executor, GEMM, SUM, measurers={GEMM.key: failing}).run()
    assert some.findings[GEMM.key].failure == "the table says error" and some.failure == ""
    all_ = replayed_session(db, executor, GEMM, measurers={GEMM.key: ReplayedMeasurer(building=is_failure(Status.ERROR))}).run()
    assert all_.failure == "the table says error"
    late = replayed_session(db, executor, RELU, measurers={RELU.key: ReplayedMeasurer(building=is_failure(Status.LATE))}).run()
    assert late.failure == "" and "before anything was measured" in late.findings[RELU.key].why


@pytest.mark.slow
def test_the_first_kernel_is_searched_before_the_ceilings_are_asked_for(db: TuningDB, executor: Executor,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[SearchEvent] = []
    asked: list[int] = []

    def tell() -> Any:
        asked.append(len(events))
        return object()
    monkeypatch.setattr("svod.tune.session.bound_at", lambda *given: None if given[-1] is None else Bound(1e-9, "compute", 1.0, 1.0, 1.0))
    session = replayed_session(db, executor, GEMM, SUM, events=events, ceilings=tell)
    session.run()
    first = session.tasks[0].key
    began = [e for e in events if isinstance(e, KernelStarted)]
    rounds = [i for i, e in enumerate(events) if isinstance(e, RoundFinished) and e.kernel == first]
    assert [e.bound for e in began] == [0.0, 1e-9] and len(asked) == 1
    assert rounds[0] < asked[0] <= rounds[1], "after its first proposals"



# -- for real -----------------------------------------------------------------------------------------------------------------
def search_for_real(executor: Executor, kernel: Kernel) -> tuple[SessionResult, list[SearchEvent]]:
    events: list[SearchEvent] = []
    config = BeamConfig(width=2, round_size=4, timeout_sec=100.0)
    with executor, TuningDB.open(":none:") as db:
        session = TuneSession([KernelTask(kernel)], host_target(), executor=executor, db=db, config=config,
                              bench=BenchConfig(seconds=0.3), budget=Rounds(WARM_UP_ROUNDS + 1), listener=events.append)
        result = session.run()
        found = result.findings[kernel.key]
        winner = db.winner(kernel.key, host_target().key)
        assert winner is None or winner.linear == found.linear
    return result, events


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [gemm(61, 67, 33), row_reduce(50, 300)], ids=["gemm", "sum"])
def test_a_search_with_local_workers(kernel: Kernel) -> None:
    result, events = search_for_real(LocalExecutor(1), kernel)
    found = result.findings[kernel.key]
    assert found.verified
    assert result.candidates > 5
    apply_opts(Scheduler(kernel, host_target()), found.chain)
    assert all(e.seconds <= e.before for e in events if isinstance(e, Improved))


class Moving(ReplayedMeasurer):
    """A measurer whose third race runs on another machine."""

    races = 0

    def race(self, candidates: Sequence[Candidate]) -> RaceResult:
        self.races += 1
        if self.races == 3:
            raise MachineChanged("candidates were timed on alpha, and now on beta")
        return super().race(candidates)


@pytest.mark.slow
def test_a_search_whose_machine_changes_starts_anew_from_what_is_stored(caplog: pytest.LogCaptureFixture) -> None:
    made: list[ReplayedMeasurer] = []

    def measurer_of(kernel: Kernel) -> ReplayedMeasurer:
        made.append(Moving() if not made else ReplayedMeasurer())
        return made[-1]
    with TuningDB.open(":none:") as db, InlineExecutor() as executor:
        session = replayed_session(db, executor, GEMM, budget=Rounds(8))
        session.measurer_of = measurer_of
        result = session.run()
        searches = [s for s, _ in db.select(Search) if s.ended_at is not None]
        assert sorted(s.outcome.startswith("the machine changed") for s in searches) == [False, True]
        confirmed = [m for m, _ in db.select(Measurement) if m.step == "confirm"]
    assert len(made) == 2 and result.findings[GEMM.key].confirmed and "starts anew" in caplog.text
    assert made[0].done("screen")[0] == made[1].done("screen")[0], "the heuristic is timed on the new machine as well"
    assert {m.search for m in confirmed} == {max(searches, key=lambda s: s.started_at).search}
    assert all(m.host["machine"] == "a table" for m in confirmed)


@pytest.mark.parametrize("rounds", a_half([1, 2, 4]))
def test_a_killed_search_goes_on_and_measures_nothing_again(rounds: int, tmp_path: Any, executor: Executor) -> None:
    """The first process stores its rounds and is killed; the second process continues from their measurements."""
    def session(db: TuningDB, measurer: ReplayedMeasurer, budget: ModelBudget) -> TuneSession:
        return replayed_session(db, executor, GEMM, measurers={GEMM.key: measurer}, budget=budget)
    first, second, clean = ReplayedMeasurer(), ReplayedMeasurer(), ReplayedMeasurer()
    with TuningDB.open(tmp_path / "clean.db") as db:
        whole = session(db, clean, Rounds(12)).run().findings[GEMM.key]
    with TuningDB.open(tmp_path / "t.db") as db:
        killed = session(db, first, Rounds(rounds))
        killed._finish = lambda search, searches: (_ for _ in ()).throw(SystemExit)  # type: ignore[method-assign, misc, assignment]
        killed.db.end_search = lambda *args: None  # type: ignore[method-assign]
        with pytest.raises(SystemExit):
            killed.run()
    with TuningDB.open(tmp_path / "t.db") as db:
        assert left_to_search(db, GEMM.key, TARGET.key, BeamConfig(width=2)) == "its search was killed"
        found = session(db, second, Rounds(12)).run().findings[GEMM.key]
        digests = [m.linear for m, _ in db.select(Measurement, GEMM.key) if m.step != "confirm" and m.status != "lost"]
    again = set(first.done("build")) & set(second.done("build"))
    kept = 1 + max(4, 2)        # the heuristic, and the beam
    assert len(again) <= kept and found.confirmed
    assert found.seconds <= 1.1 * whole.seconds, (found.seconds, whole.seconds)
    assert len(digests) >= len(set(digests)) > len(set(first.done("screen")))


def test_a_kernel_is_claimed_when_its_search_begins_and_left_where_another_has_finished_it(tmp_path: Any, executor: Executor) -> None:
    with TuningDB.open(tmp_path / "t.db") as db, TuningDB.open(tmp_path / "t.db") as theirs:
        claim = theirs.claims.take(GEMM.key, TARGET.key)
        assert claim is not None
        session = replayed_session(db, executor, GEMM, SUM)

        class Finishing(ReplayedMeasurer):
            def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Any]:
                """Confirm SUM; meanwhile the other session ends its search of GEMM."""
                assert db.claims.holder(RELU.key, TARGET.key) is None
                if claim is not None:
                    search = theirs.begin_search(GEMM.key, TARGET.key, config={"width": 8})
                    theirs.end_search(search, "nothing left to try")
                    claim.release()
                return super().confirm(candidates, seconds)
        gemm_measurer = ReplayedMeasurer()
        session.measurer_of = lambda kernel: Finishing() if kernel is SUM else gemm_measurer
        result = session.run()
        assert set(result.findings) == {SUM.key} and result.pending == () and not gemm_measurer.trace
        assert db.claims.take(SUM.key, TARGET.key) is not None and db.claims.take(GEMM.key, TARGET.key) is not None, "claims are given back"


def test_a_search_whose_claim_is_lost_ends(tmp_path: Any, executor: Executor) -> None:
    with TuningDB.open(tmp_path / "t.db") as db:
        session = replayed_session(db, executor, GEMM)

        class Losing(ReplayedMeasurer):
            def screen(self, candidates: Sequence[Candidate], incumbent: float | None) -> list[Any]:
                session._claims[GEMM.key].lost = True
                return super().screen(candidates, incumbent)
        session.measurer_of = lambda kernel: Losing()
        finding = session.run().findings[GEMM.key]
    assert finding.why == "another process has taken over the search" and finding.source == "heuristic"
