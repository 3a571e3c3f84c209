"""The searches of svod-tune: first chains from other machines are measured, then each target's kernels are searched.

The remaining budget is divided among the targets, less the time for the plan check."""
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from svod.cli.tune.ceilings import MachineCeilings
from svod.cli.tune.event_log import EventLog
from svod.cli.tune.plans.checks import PLAN_CHECK_SECONDS
from svod.cli.tune.progress import make_progress
from svod.cli.tune.setting import Setting, TargetWork
from svod.cli.tune.survey import SurveyRow, decide
from svod.cli.tune.waiting import say
from svod.cli.tune.workers import Workers
from svod.config import BenchConfig
from svod.errors import TuneError
from svod.system.quantities import count
from svod.tune.search.budget import ModelBudget
from svod.tune.session import KernelTask, SessionResult, TuneSession

CHECKED_SECONDS = 0.3       # seconds of the confirmation of one kernel's chains from other machines


class Searches:
    """The searches of a command and their results. `has_failed`: whether one of several targets could not be searched."""

    def __init__(self, setting: Setting, works: Sequence[TargetWork], workers: Workers, ceilings: MachineCeilings) -> None:
        self.has_failed = False
        self._setting, self._works, self._workers, self._ceilings = setting, works, workers, ceilings
        self._checks: list[SessionResult] = []       # the results of measuring chains from other machines

    @property
    def result(self) -> SessionResult | None:
        """The sums of the results of all targets, without their findings; None where nothing was searched."""
        results = [w.result for w in self._works if w.result is not None]
        if not results:
            return None
        results += self._checks
        return SessionResult({}, tuple(k for r in results for k in r.pending), tuple(k for r in results for k in r.unbegun),
                             any(r.interrupted for r in results), sum(r.candidates for r in results), sum(r.timed for r in results),
                             sum(r.searches for r in results), sum(r.seconds for r in results), sum(r.rows for r in results),
                             sum(r.expected_gain for r in results))

    @property
    def had_no_time(self) -> bool:
        """Whether the budget was over before any kernel's search began."""
        results = [w.result for w in self._works if w.result is not None]
        return bool(results) and all(r.unbegun and not r.timed and not r.interrupted for r in results)

    def check_others(self) -> None:
        """Measure chains from other machines, and decide again which kernels are searched. Raises TuneError where no worker starts,
        KeyboardInterrupt."""
        setting = self._setting
        for work in self._works:
            tasks = [replace(_task(r), given=r.proposed.chains, strategy=r.proposed.strategy) for r in work.rows if r.proposed is not None]
            if not tasks:
                continue
            executor = self._workers.ready()
            say(f"svod-tune: {work.label}checking what others found for {count(len(tasks), 'kernel')}")
            session = TuneSession(tasks, work.target, executor=executor, db=setting.db, config=setting.beam,
                                  bench=BenchConfig.from_env(seconds=CHECKED_SECONDS),
                                  budget=ModelBudget(min(setting.options.budget / 4, setting.clock.left)),
                                  device=work.resolved.compiler.device)
            result = session.run()
            self._checks.append(result)
            used = sum(f.confirmed and f.source != "heuristic" for f in result.findings.values())
            say(f"svod-tune: {used} of {count(len(tasks), 'kernel')} {'run' if used != 1 else 'runs'} faster with it here "
                f"({result.seconds:.1f} s)")
            if result.interrupted:
                raise KeyboardInterrupt
            decide_for(work, setting)

    def search_all(self) -> None:
        """Search the chosen kernels, target after target. If there is only one target, raises TuneError where no worker starts, or where no
        worker is left that times it."""
        wanted = [w for w in self._works if w.wanted]
        for number, work in enumerate(wanted):
            try:
                self._search(work, len(wanted) - number)
            except TuneError as e:
                if len(wanted) == 1:
                    raise
                say(f"svod-tune: {work.label}{e}")
                self.has_failed = True
            if work.result is not None and work.result.interrupted:
                break
        self._workers.close()
        self._setting.clock.end_phase("closing")

    def _search(self, work: TargetWork, shares: int) -> None:
        """Search a target's kernels within 1/`shares` of the remaining budget."""
        setting, clock = self._setting, self._setting.clock
        tasks, executor = [_task(r) for r in work.wanted], self._workers.ready()
        if "workers" not in clock.phases:
            clock.end_phase("workers")
        check = clock.check_seconds(PLAN_CHECK_SECONDS) if any(w.here for w in self._works) else 0.0
        seconds = max(0.0, (clock.left - check) / shares)
        say(f"svod-tune: {work.label}searching {count(len(tasks), 'kernel')} with beam {setting.options.beam} for at most "
            f"{seconds:.0f} s on {executor.description} (Ctrl-C ends the search and keeps what it found)")
        told = replace(setting.beam, debug=max(setting.beam.debug, 2 * setting.options.verbose))
        log = EventLog(setting.options.log_json) if setting.options.log_json is not None else None
        progress = make_progress(work.wanted, sys.stderr, told, executor.activity, log)
        session = TuneSession(tasks, work.target, executor=executor, db=setting.db, config=setting.beam, bench=BenchConfig.from_env(),
                              budget=ModelBudget(seconds, setting.beam.kernel_budget),
                              ceilings=(lambda: self._ceilings.of(work.target)) if work.here else None, listener=progress,
                              device=work.resolved.compiler.device)
        work.result = session.result
        with progress:
            work.result = session.run()
        clock.end_phase("search")


def decide_for(work: TargetWork, setting: Setting) -> None:
    """Decide which of a target's kernels are searched, by the present records of the database."""
    options = setting.options
    decide(work.rows, work.resolved, setting.beam, top=options.top, only=options.only, resume=options.resume)


def _task(row: SurveyRow) -> KernelTask:
    return KernelTask(row.kernel, row.calls, row.name, row.origins, row.share, row.sizes, row.variables)
