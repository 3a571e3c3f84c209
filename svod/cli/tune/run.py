"""The steps of svod-tune: capture, survey, search, check of the whole plan, report.

The budget is the wall time of the command. A script has half of it, and beyond that what it takes to its first plan, which is added to the
budget. Time for the plan check is reserved. The command ends about with its budget, and always within the budget and 15 s: what comes
last, the plan check and the comparison of an ONNX file, is left out where there is no time for it.

    executor   starts while the script still runs, as soon as there is something to search
    Ctrl-C     ends the script first, then the search; the results so far are confirmed, stored and reported

With --address and --target the kernels are tuned for machines of a cluster, one target after the other. Only for this machine's own are
plans checked and ceilings known.
"""
from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any, TextIO

from svod import config
from svod.bench.roofline import Ceilings, cached_ceilings
from svod.cli import EXIT_INTERRUPTED, EXIT_USAGE
from svod.cli.installation import program
from svod.cli.tune.compile_only import compile_kernels, compiled_table
from svod.cli.tune.event_log import EventLog
from svod.cli.tune.next_steps import Ended, after_dry_run, next_steps, why_no_graph
from svod.cli.tune.options import REPORT_FORMAT, TuneOptions
from svod.cli.tune.progress import make_progress
from svod.cli.tune.report import (
    KernelReport,
    dry_table,
    kernel_table,
    outcome_json,
    plan_json,
    plan_lines,
    row_json,
    size_lines,
    work_lines,
)
from svod.cli.tune.script import ScriptEnd, run_script
from svod.cli.tune.survey import (
    Foresight,
    SurveyRow,
    choose_targets,
    compile_heuristics,
    decide,
    pick_target,
    rate_of,
    survey,
)
from svod.cli.tune.waiting import say, waiting
from svod.compile.backend import device_named
from svod.compile.plan.compiler import Compiled, Compiler, compile_all, compiler_for
from svod.compile.plan.unbound_plan import UnboundPlan
from svod.core.machine.target import HOST, Target
from svod.errors import SvodError, TuneError
from svod.system.files import write_text
from svod.system.process.directories import temporary, temporary_folder, working_directory
from svod.system.process.program import python
from svod.system.process.signals import handle, handled
from svod.system.process.streams import columns, was_closed
from svod.system.quantities import count
from svod.tune import capture
from svod.tune.capture import Capture, CapturedPlan
from svod.tune.chains import chain_of, choose, winner_in_use
from svod.tune.db import TuningDB
from svod.tune.db.records import BUDGET_SPENT, INTERRUPTED
from svod.tune.lock import Locked, check_replaceable, write_lock
from svod.tune.plan_check import Gain, PlanCheck, check_plan, check_values
from svod.tune.search.budget import ModelBudget
from svod.tune.search.kernel_search import Finding
from svod.tune.session import KernelTask, SessionResult, TuneSession, bound_at
from svod.tune.settle import BothWays, settle
from svod.tune.unfinished import left_to_search
from svod.tune.workers.executor import Executor
from svod.tune.workers.start import ExecutorStart, check_reachable

# beside EXIT_USAGE and EXIT_INTERRUPTED; docs/tuning.md gives their meanings
EXIT_OK, EXIT_FAILED, EXIT_SCRIPT, EXIT_NOT_STORED, EXIT_NO_KERNEL, EXIT_DAMAGED = 0, 1, 3, 4, 5, 6
GRACE_SECONDS = 15.0        # beyond the budget, within which the command ends
LATE_SECONDS = 10.0         # beyond the budget, after which nothing more is measured
START_SECONDS = 5.0         # beyond the budget, by which workers have to be up
CLOSE_SECONDS = 2.0         # to write what was found
RAY_BUDGET = 20.0           # seconds: smaller budgets use local workers, unless ray:N asks for Ray
CHECK_SECONDS = 4.0         # the longest check of one plan
CHECK_PART = 0.15           # the largest share of the budget for a plan check
CHECK_LEAST = 0.5           # the shortest plan check in seconds, however small the budget
CHECKED_SECONDS = 0.3       # the confirmation of what others found for one kernel
KNOWN_CHECK_SECONDS = 1.5   # the longest check of one plan where nothing was searched
MAX_CHECKS = 3              # only the plans that take most of the time are checked
CHECK_SHARE = 0.05          # plans below this share of the time are not checked
ABOVE_CEILING = 1.05        # no kernel exceeds its ceiling by more than this factor
MAX_PROBLEMS = 3            # faults of a capture that are reported one by one
AT_ONCE = 3                 # presses of Ctrl-C after which nothing is waited for
PIPE_WIDTH = 110            # columns of a table that does not go to a terminal


def tune(options: TuneOptions) -> int:
    """Run the command. Returns the exit status. Raises SvodError for bad input."""
    run = _TuneRun(options)
    handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
        signal.SIGINT: _CtrlC(run), signal.SIGTERM: _terminate, signal.SIGHUP: _terminate}
    with handled(handlers):
        return _run_to_its_end(run)


def _run_to_its_end(run: _TuneRun) -> int:
    """Run the command; what ends it is said. Returns the exit status."""
    try:
        return run.run()
    except TuneError as e:
        say(f"svod-tune: {e}" + (f"; {run.kept()}" if run.result is not None else ""))
        return EXIT_FAILED
    except KeyboardInterrupt:
        run.captured = True
        say(f"svod-tune: ended by Ctrl-C; {run.kept()}")
        return EXIT_INTERRUPTED
    except _Terminated as e:
        kept = run.kept()
        with suppress(OSError):     # the terminal may be gone
            say(f"svod-tune: ended by {e.name}; {kept}")
        raise
    finally:
        run.close()


class _CtrlC:
    """Handles SIGINT. A press raises KeyboardInterrupt; the third one, and any while only the end of the workers is waited for, ends the
    command at once: the operating system ends the workers with it, and the database has all finished rounds. The script is ended in order
    first, however often it is pressed."""

    def __init__(self, run: _TuneRun) -> None:
        self.run, self.presses = run, 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.presses += 1
        if self.run.captured and (self.presses >= AT_ONCE or self.run.closing):
            os.write(2, b"\nsvod-tune: ended at once; the database has what was found in finished rounds\n")
            os._exit(EXIT_INTERRUPTED)
        raise KeyboardInterrupt


class _Terminated(SystemExit):
    """A signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


def _terminate(number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM, and SIGHUP from a closed terminal: the command ends its script and its workers and closes the database."""
    raise _Terminated(number)


@dataclass
class _Part:
    """The kernels for one target. `here`: it is this machine's, so that whole plans can be timed."""

    target: Target
    compiler: Compiler
    here: bool
    rows: list[SurveyRow]
    result: SessionResult | None = None         # None where nothing was left to search
    outcomes: Sequence[KernelReport] = ()
    checks: Sequence[tuple[CapturedPlan, PlanCheck]] = ()
    ceilings: Ceilings | None = None

    @property
    def failure(self) -> str:
        """How all candidates failed, where none of any kernel could be measured."""
        return self.result.failure if self.result is not None else ""

    @property
    def wanted(self) -> list[SurveyRow]:
        return [r for r in self.rows if r.decision == "search"]

    @property
    def of_interest(self) -> list[SurveyRow]:
        return [r for r in self.rows if r.decision in ("search", "check", "known")]


class _TuneRun:
    """The state of one command."""

    def __init__(self, options: TuneOptions) -> None:
        self.options = options
        self.unwritten = False                      # a file that was asked for could not be written
        self.started = time.monotonic()
        self.ends = self.started + options.budget   # of the budget
        given = {name: value for name in ("db", "device") if (value := getattr(options, name)) is not None}
        self.config = config.PrepareConfig.from_env(beam=None, optimizer=config.OptimizerConfig(), capture=None, **given)
        chosen = {name: value for name in ("actions", "strategy", "optuna_storage") if (value := getattr(options, name)) is not None}
        self.beam = config.BeamConfig.from_env(width=options.beam, budget=options.budget, **chosen)
        self.db = TuningDB.open(self.config.db, fresh=options.fresh, read_only=options.dry_run or options.compile_only)
        self.executor: ExecutorStart | None = None
        self.script: ScriptEnd | None = None
        self.parts: list[_Part] = []
        self.checks: list[SessionResult] = []       # checks of chains that others found
        self.failed = False                         # one of several targets could not be searched
        self.executor_name = ""
        self.ceilings: Ceilings | None = None
        self.measured = False
        self.captured = False                       # the script is gone
        self.closing = False                        # nothing is left to do but to end the workers
        self.incomplete = EXIT_OK                   # EXIT_SCRIPT or EXIT_DAMAGED where the capture is incomplete
        self.saved: Path | None = None              # the file with results that the database could not take
        self.seconds: dict[str, float] = {}         # seconds from the start of the command to the end of each phase

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def left(self) -> float:
        """Seconds that are left of the budget; negative after it."""
        return self.ends - time.monotonic()

    @property
    def result(self) -> SessionResult | None:
        """The sums over all targets, without findings; None where nothing was searched."""
        results = [p.result for p in self.parts if p.result is not None]
        if not results:
            return None
        results += self.checks
        return SessionResult({}, tuple(k for r in results for k in r.pending), tuple(k for r in results for k in r.unbegun),
                             any(r.interrupted for r in results), sum(r.candidates for r in results), sum(r.timed for r in results),
                             sum(r.searches for r in results), sum(r.seconds for r in results), sum(r.rows for r in results),
                             sum(r.expected_gain for r in results))

    def close(self) -> None:
        self.closing = True
        self._end_workers()
        self.db.close()

    def _end_workers(self) -> None:
        if self.executor is not None:
            with waiting("ending the workers"):
                self.executor.close()
            self.executor = None

    def kept(self) -> str:
        """What an early end leaves behind, in words."""
        rows = self.result.rows if self.result is not None else 0
        self._save()
        if self.saved is not None:
            return f"what was found is kept in {self.saved}, as the database could not be written: {self.db.problem}"
        if self.db.path is None:
            return "nothing was stored" + (f": {self.db.problem}" if self.db.problem else "")
        return f"{count(rows, 'measurement')} kept in {self.db.path}" if rows else f"nothing was added to {self.db.path}"

    # -- the phases ---------------------------------------------------------------------------------------------------------
    def run(self) -> int:
        self._say_database()
        self._check_needs()
        captured = self.capture()
        self.captured = True
        if self.script is not None:
            self.ends = max(self.ends, time.monotonic() + self.options.budget / 2)
            self.incomplete = EXIT_SCRIPT if self.script.failure else EXIT_OK
        else:
            self.incomplete = EXIT_DAMAGED if captured.problems else EXIT_OK
        self.seconds["capture"] = self.elapsed
        self._say_problems(captured)
        if not captured.plans and self._was_misused():
            return EXIT_USAGE
        if not captured.plans:
            say(f"svod-tune: {self.options.subject} {self._nothing_captured()}")
            return EXIT_INTERRUPTED if self.script is not None and self.script.why == "interrupted" else EXIT_NO_KERNEL
        if self.options.capture_to is not None:
            self._keep_capture(captured, self.options.capture_to)
        if self.script is not None and self.script.failure:
            say(f"svod-tune: {self.options.subject} {self.script.failure}; "
                f"tuning the {count(len(captured.kernels), 'kernel')} it had prepared by then")

        if self.options.compile_only:
            return self._compile_only(captured)
        self._survey(captured)
        rows = [r for p in self.parts for r in p.rows]
        if self.options.only and not any(p.of_interest for p in self.parts):
            say(f"svod-tune: no kernel's key, name or origin fits --only {' '.join(self.options.only)}; "
                f"--dry-run lists the {count(len(rows), 'kernel')} there are")
            return EXIT_USAGE
        self.seconds["survey"] = self.elapsed
        for p in self.parts:
            for line in work_lines(p.rows, self.options.beam):
                say(f"svod-tune: {self._of_target(p)}{line}")
        if self.options.dry_run:
            return self._dry_run()
        self._check_others()
        self._search_all()
        with waiting("measuring what this machine can do"):
            for p in self.parts:
                self._take_outcomes(p)
        with waiting("timing the whole plan with the heuristic's and with the tuned chains"):
            for p in self.parts:
                if p.here:
                    p.checks = self._check_plans(captured, p)
        self.seconds["check"] = self.elapsed
        self._save()
        self._write_lock()
        status = self._status()
        self._report()
        self._say_failures()
        self._compare(status)
        return self._write_json(status)

    def _check_needs(self) -> None:
        """Raise what would end the command after the script, which may take long. Raises ConfigError, DeviceError, TuneError."""
        if self.options.address is None:
            backend = device_named(self.config.device or HOST).backend
            backend.target()
            if not self.options.compile_only:
                backend.check_runs()
        if self.options.lock_path is not None:
            check_replaceable(Path(self.options.lock_path))
        if self.options.address is not None and (self.options.target or not self.options.dry_run):
            check_reachable(self.options.address)

    def _say_problems(self, captured: Capture) -> None:
        for problem in captured.problems[:MAX_PROBLEMS]:
            say(f"svod-tune: skipped in the capture: {problem}")
        if len(captured.problems) > MAX_PROBLEMS:
            say(f"svod-tune: skipped in the capture: {len(captured.problems) - MAX_PROBLEMS} more lines")
        if self.script is None and captured.problems and captured.plans:
            say("svod-tune: the capture is damaged; tuning what can be read of it")

    def _compare(self, status: int) -> None:
        """Of an ONNX file: run the tuned model once more, and print how far it is from onnxruntime."""
        if not self.options.is_onnx or status != EXIT_OK:
            return
        given = {variable: value for variable, value in (("SVOD_TUNE_DB", self.options.db), ("SVOD_DEVICE", self.options.device))
                 if value is not None}
        try:
            subprocess.run([python(), *self.options.program, "--check"], env=config.child_environment(BEAM=None, **given),
                           stdout=self._stream, check=False, timeout=max(0.0, self.left + GRACE_SECONDS - CLOSE_SECONDS))
        except subprocess.TimeoutExpired:
            say("svod-tune: the comparison with onnxruntime was left out, as the budget is over")

    def _survey(self, captured: Capture) -> None:
        """Decide per target what is searched. The kernels are weighed by their times on this machine."""
        own = pick_target(captured, self.config.device)
        targets = self._targets(own)
        with waiting("looking at the kernels"):
            rows = survey(captured, own, compiler_for(own, self.config))
            for target in targets:
                compiler = compiler_for(target, self.config)
                part = _Part(target, compiler, target.key == own.key, [replace(r) for r in rows])
                self._decide(part)
                self.parts.append(part)

    def _targets(self, own: Target) -> list[Target]:
        """The targets to tune for. Those of a cluster are asked for where they matter."""
        options = self.options
        if options.address is None:
            return choose_targets(options.target, [own], own)
        if options.dry_run and not options.target:
            return [own]
        with waiting(f"asking the cluster at {options.address} what it times"):
            present = self._up_executor().targets()
        allowed = config.OptimizerConfig.from_env().allowed
        return choose_targets(options.target, [t.allowing(*allowed) for t in present], own)

    def _of_target(self, part: _Part) -> str:
        """The beginning of a line about a target, where there are several."""
        return f"{part.target.key}: " if len(self.parts) > 1 else ""

    def capture(self) -> Capture:
        """Run the script, or read the file."""
        options = self.options
        if options.source is not None:
            return capture.read_capture(options.source)
        allowed = config.OptimizerConfig.from_env().allowed
        target = device_named(HOST if options.compile_only else self.config.device or HOST).backend.target(self.config.threads)
        foresight = Foresight(self.db, target.allowing(*allowed), self.beam)

        def meet(news: capture.News) -> None:
            if self.executor is None and not options.dry_run and not options.compile_only and foresight.needs_search(news):
                self._start_executor()
        with temporary_folder("svod-capture-") as directory:
            self.script = run_script([*options.launched, *options.asked], directory, capture_for=options.capture_for,
                                     first=options.budget / 2, share=options.budget / 2, on_news=meet,
                                     device=HOST if options.compile_only else options.device,
                                     kernels_of=(options.device or self.config.device) if options.compile_only else None,
                                     stdout=sys.stderr if options.json_path == "-" else None)
            for line in self.script.words(options.subject):
                say(f"svod-tune: {line}")
            return capture.read_capture(str(directory))

    def _start_executor(self) -> ExecutorStart:
        if self.executor is None:
            self.executor = ExecutorStart(self._workers(), self.options.address, device=self.config.device or HOST,
                                          say=lambda text: say(f"svod-tune: {text}"))
        return self.executor

    def _workers(self) -> str:
        """The workers to start: a Ray of our own takes seconds to start and to stop, too long for a small budget."""
        options = self.options
        return "local" if options.workers == "ray" and options.address is None and options.budget < RAY_BUDGET else options.workers

    def _decide(self, part: _Part) -> None:
        decide(part.rows, part.target, part.compiler, self.db, self.config, self.beam, top=self.options.top, only=self.options.only,
               resume=self.options.resume)

    def _check_others(self) -> None:
        """Measure the chains that others found, and decide anew what is searched. Raises TuneError where no worker starts,
        KeyboardInterrupt."""
        for part in self.parts:
            tasks = [replace(_task(r), given=r.proposed.states, strategy=r.proposed.strategy) for r in part.rows if r.proposed is not None]
            if not tasks:
                continue
            executor = self._ready_executor()
            say(f"svod-tune: {self._of_target(part)}checking what others found for {count(len(tasks), 'kernel')}")
            session = TuneSession(tasks, part.target, executor=executor, db=self.db, config=self.beam,
                                  bench=config.BenchConfig.from_env(seconds=CHECKED_SECONDS),
                                  budget=ModelBudget(min(self.options.budget / 4, self.left)), device=part.compiler.device)
            result = session.run()
            self.checks.append(result)
            used = sum(f.confirmed and f.source != "heuristic" for f in result.findings.values())
            say(f"svod-tune: {used} of {count(len(tasks), 'kernel')} {'run' if used != 1 else 'runs'} faster with it here "
                f"({result.seconds:.1f} s)")
            if result.interrupted:
                raise KeyboardInterrupt
            self._decide(part)

    def _search_all(self) -> None:
        """Search what is left, target after target: each gets its part of what is left of the budget. Raises TuneError where no worker
        starts, or none is left that times the only target."""
        wanted = [p for p in self.parts if p.wanted]
        for number, part in enumerate(wanted):
            try:
                self._search(part, len(wanted) - number)
            except TuneError as e:
                if len(wanted) == 1:
                    raise
                say(f"svod-tune: {self._of_target(part)}{e}")
                self.failed = True
            if part.result is not None and part.result.interrupted:
                break
        self._end_workers()
        self.seconds["closing"] = self.elapsed

    def _ready_executor(self) -> Executor:
        """The workers, up. Raises TuneError where none starts."""
        with waiting(f"starting the workers ({self._workers()})"):
            executor = self._up_executor()
            executor.wait_until_ready(self._patience)
        return executor

    @property
    def _patience(self) -> float:
        """Seconds that workers may still take to start."""
        return max(1.0, self.left + START_SECONDS)

    def _up_executor(self) -> Executor:
        """The workers, some of which may still be starting. Raises TuneError."""
        executor = self._start_executor().result(self._patience)
        handle(signal.SIGTERM, _terminate)      # replaces Ray's handler, which prints a stack
        return executor

    def _search(self, part: _Part, shares: int) -> None:
        """Search a target's kernels within its share of the rest of the budget."""
        tasks, executor = [_task(r) for r in part.wanted], self._ready_executor()
        self.seconds.setdefault("workers", self.elapsed)
        check = self._check_seconds(CHECK_SECONDS) if any(p.here for p in self.parts) else 0.0
        seconds = max(0.0, (self.left - check) / shares)
        say(f"svod-tune: {self._of_target(part)}searching {count(len(tasks), 'kernel')} with beam {self.options.beam} for at most "
            f"{seconds:.0f} s on {executor.description} (Ctrl-C ends the search and keeps what it found)")
        told = replace(self.beam, debug=max(self.beam.debug, 2 * self.options.verbose))
        log = EventLog(self.options.log_json) if self.options.log_json is not None else None
        progress = make_progress(part.wanted, sys.stderr, told, executor.activity, log)
        session = TuneSession(tasks, part.target, executor=executor, db=self.db, config=self.beam, bench=config.BenchConfig.from_env(),
                              budget=ModelBudget(seconds, self.beam.kernel_budget),
                              ceilings=(lambda: self._ceilings(part.target)) if part.here else None, listener=progress,
                              device=part.compiler.device)
        part.result, self.executor_name = session.result, executor.description
        with progress:
            part.result = session.run()
        self.seconds["search"] = self.elapsed

    def _check_seconds(self, most: float) -> float:
        """The seconds that one plan check may take."""
        return min(most, max(CHECK_LEAST, CHECK_PART * self.options.budget))

    def _ceilings(self, target: Target, *, refresh: bool = False) -> Ceilings | None:
        """The machine's ceilings from the cache, or measured quickly once; None where they cannot be measured."""
        if (refresh or not self.measured) and self.left > -LATE_SECONDS:
            self.measured = True
            try:
                self.ceilings = cached_ceilings(config.data_dir() / "ceilings.json", target, quick=True, refresh=refresh)
            except (SvodError, OSError, MemoryError) as e:
                say(f"svod-tune: what this machine can do at best was not measured: {e}")
        return self.ceilings

    def _corrected(self, ceilings: Ceilings | None, outcomes: Sequence[KernelReport], target: Target) -> Ceilings | None:
        """The ceilings. Where the machine was busy, or a kernel exceeds quick ones, they are measured again."""
        shares = [rate_of(o.row, o.tuned, target, ceilings).share for o in outcomes if o.tuned]
        exceeded = max((s for s in shares if s is not None), default=0.0) > ABOVE_CEILING
        if ceilings is None or (ceilings.busy is None and not (ceilings.quick and exceeded)):
            return ceilings
        return self._ceilings(target, refresh=True)

    def _take_outcomes(self, part: _Part) -> None:
        """Set what came out for a target, and the ceilings it is held against."""
        part.outcomes = self._outcomes(part)
        if part.here:
            part.ceilings = self._corrected(self._ceilings(part.target), part.outcomes, part.target)

    def _outcomes(self, part: _Part) -> list[KernelReport]:
        """For each kernel the chain that the next `prepare` uses, and the times that it was chosen by."""
        result, compiler = part.result, part.compiler
        findings: Mapping[str, Finding] = result.findings if result is not None else {}
        out = []
        for row in part.of_interest:
            choice = choose(row.kernel, compiler, self.config, self.db)
            finding = findings.get(row.key)
            winner = winner_in_use(row.kernel, compiler, self.db, self.config.imported) if choice.source == "database" else None
            chain = tuple(o.to_json() for o in choice.chain)
            if winner is not None:
                out.append(KernelReport(row, chain, choice.source, winner.heuristic_seconds, winner.time, True, True, winner.interval,
                                        winner.linear, choice.why if finding is None else finding.why, winner.baseline_linear,
                                        winner.sizes, winner.noisy))
            elif finding is not None:
                heuristic = _finite(finding.heuristic_seconds)
                why = finding.why if finding.winner is None else f"{choice.why} ({finding.why})"
                out.append(KernelReport(row, chain, choice.source, heuristic or row.seconds, heuristic, finding.verified, finding.confirmed,
                                        None, finding.linear, why))
            else:
                pending = result is not None and row.key in result.pending
                late = result is not None and row.key in result.unbegun
                ended = INTERRUPTED if result is not None and result.interrupted else BUDGET_SPENT
                why = "another process is searching it" if pending else f"{ended} before its turn" if late else choice.why
                out.append(KernelReport(row, chain, "pending" if pending else choice.source, row.seconds, None, False, False, None, "",
                                        why))
        return out

    def _check_plans(self, captured: Capture, part: _Part) -> list[tuple[CapturedPlan, PlanCheck]]:
        """Time the plans that take most of the time, with heuristic and with tuned chains, and give up the chains that lose in them."""
        seconds = {o.row.key: o.row.seconds for o in part.outcomes}
        plans = sorted(captured.plans, key=lambda p: -p.runs * _plan_seconds(p, seconds))
        total = sum(p.runs * _plan_seconds(p, seconds) for p in plans) or 1.0
        checks: list[tuple[CapturedPlan, PlanCheck]] = []
        for plan in plans[:MAX_CHECKS]:
            if checks and plan.runs * _plan_seconds(plan, seconds) < CHECK_SHARE * total:
                break
            try:
                check = settle(plan.unbound, plan.digest, partial(self._time_plan, part, plan), part.compiler, self.db)
                if check is None:
                    say("svod-tune: a whole plan was not timed, as the budget is over")
                    break
                checks.append((plan, check))
                if check.given_up:
                    part.outcomes = self._outcomes(part)
            except KeyboardInterrupt:
                say("svod-tune: Ctrl-C: the whole plan is not timed any further")
                break
            except (SvodError, MemoryError) as e:
                say(f"svod-tune: the whole plan could not be timed: {e}")
        return checks

    def _time_plan(self, part: _Part, plan: CapturedPlan) -> BothWays | None:
        """Time a plan with the heuristic's chains and with those of the database; None where there is no time left."""
        kernels, compiler = plan.unbound.kernels, part.compiler
        by_key = {o.row.key: o for o in self._outcomes(part)}
        heuristics: dict[str, Compiled] = {}
        for key, kernel in kernels.items():
            if self._is_late():
                return None
            heuristics |= compile_heuristics({key: kernel}, compiler)
        choices = {k: choose(v, compiler, self.config, self.db) for k, v in kernels.items()
                   if k in by_key and (o := by_key[k]).source == "database" and o.heuristic and o.tuned}
        gains = {k: gain for k in choices if by_key[k].against in ("", heuristics[k].linear)
                 and (gain := gain_in(plan.unbound, by_key[k])) is not None}
        tuned = {**heuristics, **compile_all({k: kernels[k] for k in choices}, choices, compiler)}
        if self._is_late():
            return None
        within = min(self._check_seconds(CHECK_SECONDS if part.wanted else KNOWN_CHECK_SECONDS), self.left + LATE_SECONDS)
        return BothWays(check_plan(plan.unbound, heuristics, tuned, gains, part.target, seconds=within), heuristics, tuned)

    def _is_late(self) -> bool:
        """Whether there is no time left to measure anything."""
        return self.left + LATE_SECONDS < CHECK_LEAST

    def _status(self) -> int:
        if self.result is not None and self.result.interrupted:
            return EXIT_INTERRUPTED
        if self.unwritten or self._is_not_stored():
            return EXIT_NOT_STORED
        return EXIT_FAILED if self.failed or any(p.failure for p in self.parts) else self.incomplete

    def _is_not_stored(self) -> bool:
        """Whether the database could not take what was found."""
        return self.result is not None and self.config.db != config.NONE and self.db.path is None

    def _save(self) -> None:
        """Write results that the database could not take to a file for `svod-db import`: in the current directory, else in the temporary
        one."""
        has_results = self.result is not None and self.result.rows > 0 and self.config.db != config.NONE
        if not has_results or self.db.path is not None or self.db.store_again():
            return
        name = time.strftime("svod-tuned-%Y%m%d-%H%M%S.jsonl")
        for folder in (working_directory, temporary):
            try:
                directory = folder() or Path()
                self.db.export_unstored(directory / name)
            except OSError as e:
                say(f"svod-tune: {name} cannot be written: {e.strerror or e}")
            else:
                self.saved = directory / name
                return

    def _write_lock(self) -> None:
        """Write the chains that the next `prepare` uses to a lock file."""
        if self.options.lock_path is None:
            return
        lines = [Locked(o.row.key, p.target.key, chain_of(o.chain), o.row.name, next(iter(o.row.origins), ""),
                        o.heuristic / o.tuned if o.heuristic and o.tuned else None) for p in self.parts for o in p.outcomes]
        try:
            count = write_lock(Path(self.options.lock_path), lines, {p.target.key: {r.key for r in p.rows} for p in self.parts})
        except OSError as e:
            say(f"svod-tune: {self.options.lock_path} cannot be written: {e.strerror or e}")
            self.unwritten = True
        else:
            say(f"svod-tune: the chains of {count} kernels are in {self.options.lock_path}; SVOD_LOCK={self.options.lock_path} uses them")

    # -- words --------------------------------------------------------------------------------------------------------------
    def _say_database(self) -> None:
        """Report, before the work, that results cannot be stored, or that a new database will be made."""
        if self.options.dry_run or self.options.compile_only or self.config.db == config.NONE:
            return
        obstacle, path = self.db.obstacle(), self.db.plan.write
        if obstacle is not None:
            known = "the database cannot be written" if self.db.problem is not None else obstacle     # a problem was logged
            say(f"svod-tune: warning: {known}; tuning goes on, and what cannot be stored there goes to a file that svod-db import reads")
        elif self.config.db is not None and path is not None and not path.exists():
            say(f"svod-tune: the results go to {path}, a new database")

    def _say_failures(self) -> None:
        """Say last, where no candidate of a target could be measured, that this is no result of a search."""
        for p in self.parts:
            if p.failure:
                say(f"svod-tune: {self._of_target(p)}nothing could be measured: every candidate of {count(len(p.wanted), 'kernel')} failed "
                    f"({p.failure}). That is an error of svod's own or of its installation, and not of the program")

    def _was_misused(self) -> bool:
        """Whether an ONNX file, or an option for it, could not be used, which `svod.onnx.run` has said then."""
        return self.options.is_onnx and self.script is not None and self.script.why == "failed" and self.script.status == EXIT_USAGE

    def _nothing_captured(self) -> str:
        if self.script is None:
            return f"holds no plan{' that can be used' * bool(self.incomplete)}; capture a script that prepares or realizes a Tensor"
        if self.script.failure:
            return f"{self.script.failure} before it prepared a kernel; there is nothing to tune"
        if self.script.why != "finished":
            return "had prepared no kernel by then; there is nothing to tune"
        if self.options.runs_torch or self.options.imports_torch:
            return f"prepared no kernel; there is nothing to tune ({why_no_graph(self.options)})"
        return "prepared no kernel; there is nothing to tune (kernels are captured when a svod Tensor is realized or prepared)"

    def _keep_capture(self, captured: Capture, path: str) -> None:
        try:
            capture.write_capture(path, captured)
            say(f"svod-tune: the capture is kept in {path}; tune it with {program('svod-tune')} --from {shlex.quote(path)}")
        except OSError as e:
            say(f"svod-tune: the capture cannot be written to {path}: {e.strerror or e}")
            self.unwritten = True

    def _print(self, lines: Sequence[str]) -> None:
        """Print the report."""
        print("\n".join(lines), file=self._stream, flush=True)

    @property
    def _stream(self) -> TextIO:
        """Where the report goes: stdout, or stderr where the program or the JSON has stdout."""
        return sys.stderr if self.options.program or self.options.json_path == "-" else sys.stdout

    def _width(self) -> int:
        return columns(self._stream, PIPE_WIDTH)

    def _compile_only(self, captured: Capture) -> int:
        """Compile what a search of the chosen device would start from. Raises DeviceError for a device that is not there."""
        device = device_named(self.config.device or HOST)
        target = device.backend.target(self.config.threads).allowing(*config.OptimizerConfig.from_env().allowed)
        with waiting(f"compiling for {target.key}"):
            compiled = compile_kernels(captured, device, target, self.options.only)
        self._print(["", f"target {target.key}", *compiled_table(compiled, target, self._width())])
        failed = sum(state.error is not None for kernel in compiled for state in kernel.states)
        return self._dump(EXIT_FAILED if failed else self._status(),
                          {"target": target.key, "compiler": device.pair.key, "kernels": [kernel.to_data() for kernel in compiled]})

    def _dry_run(self) -> int:
        lines, kernels = [], []
        for p in self.parts:
            ceilings = None
            if p.here:
                with waiting("measuring what this machine can do"):
                    ceilings = self._ceilings(p.target)
            roofs = {r.key: bound_at(r.kernel, r.sizes, p.target, ceilings) for r in p.rows}
            bounds = {key: b.seconds for key, b in roofs.items() if b is not None and b.is_measured and b.seconds}
            lines += ["", *self._title(p), *dry_table(p.rows, bounds, self._width())]
            kernels += [{**row_json(r), "target": p.target.key, "bound_seconds": bounds.get(r.key)} for r in p.rows]
        rows = [r for p in self.parts for r in p.rows]
        self._print([*lines, "", after_dry_run(self.options, rows, self._wider())])
        return self._dump(self._status(), {"target": self.parts[0].target.key, "kernels": kernels})

    def _title(self, part: _Part) -> list[str]:
        return [f"target {part.target.key}"] if len(self.parts) > 1 else []

    def _report(self) -> None:
        lines = []
        for p in self.parts:
            lines += ["", *self._title(p), *kernel_table(p.outcomes, p.target, p.ceilings, self._width()), *size_lines(p.outcomes), ""]
            for number, (plan, check) in enumerate(p.checks, 1):
                name = f" {number} of {len(p.checks)}" if len(p.checks) > 1 else ""
                lines += plan_lines(check, name, len(plan.unbound.calls))
        self._print([*lines, "", self._summary(), *self._stored(), *self._next()])

    def _summary(self) -> str:
        r = self.result
        if r is None:
            return f"nothing was left to search with beam {self.options.beam} ({self.elapsed:.1f} s)"
        rate = f", {r.timed / r.seconds:.0f} per second" if r.seconds > 0 else ""
        text = f"{count(r.timed, 'candidate')} timed in {r.seconds:.0f} s{rate}, on {self.executor_name}; {self.elapsed:.0f} s in all"
        return text + (", ended early by Ctrl-C" if r.interrupted else "")

    def _stored(self) -> list[str]:
        if self.result is None:
            return []
        if self.db.path is not None:
            return [f"{count(self.result.rows, 'measurement')} stored in {self.db.path}"]
        if self._is_not_stored() or self.db.problem:
            where = f"they are in {self.saved}" if self.saved is not None else "they are lost"
            return [f"the results could not be stored: {self.db.problem or 'the database cannot be written'}", where]
        return ["the results are not stored: the database is :none:"]

    def _next(self) -> list[str]:
        interrupted = self.result is not None and self.result.interrupted
        here = any(p.here for p in self.parts)
        fell_short = any(c.fell_short for p in self.parts for _, c in p.checks)
        ended = Ended(interrupted, self._is_not_stored(), self.saved, self.db.plan.write is not None, here, self._wider(), fell_short)
        return next_steps(self.options, [o for p in self.parts for o in p.outcomes], ended)

    def _wider(self) -> bool:
        """Whether a beam of twice the width has something left to search."""
        twice = replace(self.beam, width=2 * self.beam.width)
        return any(left_to_search(self.db, r.key, p.target.key, twice) is not None for p in self.parts for r in p.of_interest)

    # -- JSON ---------------------------------------------------------------------------------------------------------------
    def _write_json(self, status: int) -> int:
        r = self.result
        ceilings = next((p.ceilings for p in self.parts if p.here), None)
        return self._dump(status, {
            "target": self.parts[0].target.key, "options": asdict(self.options), "elapsed_seconds": self.elapsed,
            "phases_end_seconds": self.seconds,
            "script": None if self.script is None else asdict(self.script),
            "kernels": [{"target": p.target.key, **kernel} for p in self.parts for kernel in self._kernels_json(p)],
            "plans": [plan_json(check, plan.digest, plan.unbound) for p in self.parts for plan, check in p.checks],
            "search": None if r is None else {"executor": self.executor_name, "proposed": r.candidates, "timed": r.timed,
                                              "searches": r.searches, "seconds": r.seconds,
                                              "measurements": r.rows, "pending": list(r.pending), "interrupted": r.interrupted},
            "database": {"path": None if self.db.path is None else str(self.db.path), "problem": self.db.problem,
                         "saved": None if self.saved is None else str(self.saved)},
            "ceilings": None if ceilings is None else asdict(ceilings)})

    def _kernels_json(self, part: _Part) -> list[dict[str, Any]]:
        done = {o.row.key for o in part.outcomes}
        return [outcome_json(o, part.target, part.ceilings) for o in part.outcomes] + [row_json(x) for x in part.rows if x.key not in done]

    def _dump(self, status: int, content: dict[str, Any]) -> int:
        """Write the file of --json. Returns `status`, or EXIT_NOT_STORED where that fails."""
        path = self.options.json_path
        if path is None:
            return status
        text = json.dumps({"format": REPORT_FORMAT, "version": 1, "status": status, **content}, indent=1, default=str)
        try:
            if path == "-":
                if was_closed(sys.stdout):
                    raise OSError(errno.EBADF, "it is closed")
                print(text, flush=True)
            else:
                write_text(Path(path), text + "\n")
        except BrokenPipeError:
            raise
        except OSError as e:
            say(f"svod-tune: {'the standard output' if path == '-' else path} cannot be written: {e.strerror or e}")
            return EXIT_NOT_STORED
        return status


def gain_in(unbound: UnboundPlan, o: KernelReport) -> Gain | None:
    """The promised gain of one call of a kernel in a plan: the mean over its calls, each at the values of the plan check. None where a call
    was not timed at its values."""
    calls = unbound.variables_of(o.row.key)
    if not calls:
        return None if o.gain is None or not o.heuristic else Gain(o.heuristic, o.heuristic / o.gain)
    values, timed = check_values(unbound), [s for s in o.sizes if s.ratio > 0.0]
    of_calls = []
    for variables in calls:
        at = {f"v{i}": values[v.name] for i, v in enumerate(variables)}
        of_calls += [s for s in timed if s.at == at][:1]
    if len(of_calls) < len(calls):
        return None
    return Gain(fmean(s.seconds / s.ratio for s in of_calls), fmean(s.seconds for s in of_calls))


def _task(row: SurveyRow) -> KernelTask:
    return KernelTask(row.kernel, row.calls, row.name, row.origins, row.share, row.sizes, row.variables)


def _plan_seconds(plan: CapturedPlan, seconds: Mapping[str, float]) -> float:
    return sum(n * seconds.get(k, plan.seconds.get(k, 0.0)) for k, n in plan.unbound.counts.items())


def _finite(seconds: float) -> float | None:
    return seconds if seconds < float("inf") else None
