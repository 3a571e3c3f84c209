"""The steps of svod-tune: capture, survey, search, check of the whole plan, report.

    take_capture → Captured → survey → TargetWork per target → Searches → check_plans → Report

The budget is the wall time of the command. A script may take half of it, and longer until it has its first plan; this extra time is added
to the budget. Time for the plan check is reserved. The command ends at about the end of its budget, and at most 15 s later: the last
steps, the plan check and the comparison of an ONNX file, are left out if there is no time for them.

    executor   starts while the script still runs, as soon as there is something to search
    Ctrl-C     ends the script first, then the search; the results so far are confirmed, stored and reported

With --address and --target the kernels are tuned for machines of a cluster, one target after the other. Plans are checked and ceilings are
known only for this machine's own target.
"""
from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from svod import config
from svod.cli import EXIT_INTERRUPTED, EXIT_USAGE
from svod.cli.tune.capturing import CapturedPlans, take_capture
from svod.cli.tune.ceilings import MachineCeilings
from svod.cli.tune.compile_only import compile_kernels, compiled_table
from svod.cli.tune.ending import CommandReport, ReportOutput, ResultsPlace, end_dry_run, keep_lock
from svod.cli.tune.options import TuneOptions
from svod.cli.tune.plans.alternatives import PlansToTune, with_alternatives
from svod.cli.tune.plans.checks import ChosenRoundings, check_forms, check_plans, choose_roundings, outcomes_of
from svod.cli.tune.report import work_lines
from svod.cli.tune.searching import Searches, decide_for
from svod.cli.tune.setting import EXIT_FAILED, EXIT_NOT_STORED, EXIT_OK, EXIT_SCRIPT, Setting, TargetWork
from svod.cli.tune.survey import choose_targets, pick_target, survey
from svod.cli.tune.waiting import say, waiting
from svod.cli.tune.workers import Workers
from svod.compile.backend import device_named
from svod.compile.plan.compiler import compiler_for
from svod.core.machine.target import HOST, Target
from svod.errors import TuneError
from svod.system.process.program import python
from svod.system.process.signals import handled
from svod.system.quantities import count
from svod.tune.capture import Capture
from svod.tune.lock import check_replaceable
from svod.tune.plans.plan_search import ChosenPlan
from svod.tune.resolved import Resolved
from svod.tune.workers.start import check_reachable

PRESSES_TO_EXIT = 3         # the number of Ctrl-C presses that ends the command at once, without waiting


def tune(options: TuneOptions) -> int:
    """Run the command. Returns the exit status. Raises SvodError for bad input."""
    run = _TuneRun(options)
    handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
        signal.SIGINT: _CtrlC(run), signal.SIGTERM: _terminate, signal.SIGHUP: _terminate}
    with handled(handlers):
        return _run_to_its_end(run)


def _run_to_its_end(run: _TuneRun) -> int:
    """Run the command, and say on stderr if an error or a signal ended it. Returns the exit status."""
    try:
        return run.run()
    except TuneError as e:
        say(f"svod-tune: {e}" + (f"; {run.kept_words()}" if run.searches.result is not None else ""))
        return EXIT_FAILED
    except KeyboardInterrupt:
        run.is_captured = True
        say(f"svod-tune: ended by Ctrl-C; {run.kept_words()}")
        return EXIT_INTERRUPTED
    except _Terminated as e:
        kept = run.kept_words()
        with suppress(OSError):     # the terminal may be gone
            say(f"svod-tune: ended by {e.name}; {kept}")
        raise
    finally:
        run.close()


class _CtrlC:
    """Handles SIGINT. A press of Ctrl-C raises KeyboardInterrupt. The third press, or any press while the command only waits for its
    workers to end, ends the command at once: the operating system ends the workers with it, and the database has all finished rounds. While
    the script runs, it is ended in order, however often Ctrl-C is pressed."""

    def __init__(self, run: _TuneRun) -> None:
        self.run, self.presses = run, 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.presses += 1
        if self.run.is_captured and (self.presses >= PRESSES_TO_EXIT or self.run.is_closing):
            os.write(2, b"\nsvod-tune: ended at once; the database has what was found in finished rounds\n")
            os._exit(EXIT_INTERRUPTED)
        raise KeyboardInterrupt


class _Terminated(SystemExit):
    """The exit of a command that a signal asked to end."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


def _terminate(number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM, and SIGHUP from a closed terminal: the command ends its script and its workers and closes the database."""
    raise _Terminated(number)


class _TuneRun:
    """The steps of one command. `is_captured`: the script has ended. `is_closing`: only the workers are still to be ended."""

    def __init__(self, options: TuneOptions) -> None:
        self.is_captured = self.is_closing = False
        self.setting = Setting.of(options)
        self._kept = ResultsPlace(self.setting)
        self._works: list[TargetWork] = []
        self._workers = Workers(self.setting, _terminate)
        self._ceilings = MachineCeilings(self.setting.clock)
        self.searches = Searches(self.setting, self._works, self._workers, self._ceilings)
        self._output = ReportOutput(options)
        self._roundings = ChosenRoundings()
        self._is_unwritten = False                  # whether a file that the user asked for could not be written

    def close(self) -> None:
        self.is_closing = True
        self._workers.close()
        self.setting.db.close()

    def kept_words(self) -> str:
        """Save the results after an early end, and say in words where they are."""
        return self._kept.after_early_end(self.searches.result)

    def run(self) -> int:
        """Carry out the steps of the command. Returns the exit status."""
        options, clock = self.setting.options, self.setting.clock
        self._say_database()
        self._check_needs()
        captured = take_capture(self.setting, self._workers)
        self.is_captured = True
        if captured.script is not None:
            clock.leave_half()
        clock.end_phase("capture")
        captured.say_problems()
        if not captured.content.plans:
            return captured.end_without_plans(options)
        if options.capture_to is not None:
            self._is_unwritten |= not captured.keep(options.capture_to)
        captured.say_failure(options)
        if options.compile_only:
            return self._compile_only(captured)

        own = self._own_target(captured.content)
        by_rules = captured.content
        plans = self._with_alternatives(by_rules, own)
        captured = replace(captured, content=plans.capture)
        clock.end_phase("alternatives")
        self._survey(captured.content, own, by_rules, plans.chosen)
        if options.only and not any(w.of_interest for w in self._works):
            say(f"svod-tune: no kernel's key, name or origin fits --only {' '.join(options.only)}; "
                f"--dry-run lists the {count(sum(len(w.rows) for w in self._works), 'kernel')} there are")
            return EXIT_USAGE
        clock.end_phase("survey")
        for w in self._works:
            for line in work_lines(w.rows, options.beam):
                say(f"svod-tune: {w.label}{line}")
        if options.dry_run:
            return end_dry_run(self.setting, self._works, plans.untried, self._ceilings, self._output, self._status(captured))
        self.searches.check_others()
        self.searches.search_all()
        self._judge(captured.content)
        if options.max_error is not None:
            with waiting("choosing the kernels to round"):
                seconds = captured.script.seconds if captured.script is not None else 0.0
                self._roundings = choose_roundings(captured.content, self.setting, seconds)
            if self._roundings.failure:
                say(f"svod-tune: {self._roundings.failure}")
        return self._end(captured)

    # -- before the search --------------------------------------------------------------------------------------------------
    def _say_database(self) -> None:
        """Report, before the work, that results cannot be stored, or that a new database will be made."""
        options, db = self.setting.options, self.setting.db
        if options.dry_run or options.compile_only or self.setting.config.db == config.NONE:
            return
        obstacle, path = db.storage.obstacle(), db.plan.write
        if obstacle is not None:
            known = "the database cannot be written" if db.problem is not None else obstacle     # the problem has been logged
            say(f"svod-tune: warning: {known}; tuning goes on, and what cannot be stored there goes to a file that svod-db import reads")
        elif self.setting.config.db is not None and path is not None and not path.exists():
            say(f"svod-tune: the results go to {path}, a new database")

    def _check_needs(self) -> None:
        """Check before the script, which may take long, for errors that would end the command after it. Raises ConfigError, DeviceError,
        TuneError."""
        options = self.setting.options
        if options.address is None:
            backend = device_named(self.setting.config.device or HOST).backend
            backend.target()
            if not options.compile_only:
                backend.check_runs()
        if options.lock_path is not None:
            check_replaceable(Path(options.lock_path))
        if options.address is not None and (options.target or not options.dry_run):
            check_reachable(options.address)

    def _own_target(self, captured: Capture) -> Target:
        """This machine's target, or that of the capture."""
        own = pick_target(captured, self.setting.config.device)
        if self.setting.config.numerics is None:
            return own
        return replace(own, numerics=self.setting.config.numerics)      # a capture may have been made under another policy

    def _with_alternatives(self, captured: Capture, own: Target) -> PlansToTune:
        """Choose the alternatives of the plans, if this machine can time them."""
        if self.setting.options.address is not None or any(p.target != own.key for p in captured.plans):
            return PlansToTune(captured)
        return with_alternatives(captured, Resolved.of(self.setting.config, own, self.setting.db), self.setting)

    def _survey(self, captured: Capture, own: Target, by_rules: Capture, plans: Sequence[ChosenPlan]) -> None:
        """Decide for each target which kernels are searched. Their shares of the time are those on this machine, for all targets. `plans`:
        the records that chose the alternatives of this machine's plans, which `by_rules` has without any."""
        setting = self.setting
        targets = self._targets(own)
        with waiting("looking at the kernels"):
            rows = survey(captured, own, compiler_for(own, setting.config))
            for target in targets:
                work = TargetWork(Resolved.of(setting.config, target, setting.db), target.key == own.key,
                                  f"{target.key}: " if len(targets) > 1 else "", [replace(r) for r in rows])
                work.plans, work.by_rules = (plans, by_rules) if work.here else ((), by_rules)
                decide_for(work, setting)
                self._works.append(work)

    def _targets(self, own: Target) -> list[Target]:
        """The targets to tune for. A cluster is asked for its targets, except in a dry run without --target."""
        options = self.setting.options
        if options.address is None:
            return choose_targets(options.target, [own], own)
        if options.dry_run and not options.target:
            return [own]
        with waiting(f"asking the cluster at {options.address} what it times"):
            present = self._workers.up().targets()
        allowed = config.OptimizerConfig.from_env().allowed
        return choose_targets(options.target, [t.allowing(*allowed, own.numerics) for t in present], own)

    def _compile_only(self, captured: CapturedPlans) -> int:
        """Compile the states that a search on the chosen device would start from. Raises DeviceError for a device that is not there."""
        device = device_named(self.setting.config.device or HOST)
        target = device.backend.target(self.setting.config.threads).allowing(*self.setting.allowed)
        with waiting(f"compiling for {target.key}"):
            compiled = compile_kernels(captured.content, device, target, self.setting.options.only)
        self._output.print(["", f"target {target.key}", *compiled_table(compiled, target, self._output.width)])
        failed = sum(state.error is not None for kernel in compiled for state in kernel.states)
        return self._output.dump(EXIT_FAILED if failed else self._status(captured),
                                 {"target": target.key, "compiler": device.pair.key, "kernels": [kernel.to_data() for kernel in compiled]})

    # -- after the search --------------------------------------------------------------------------------------------------
    def _judge(self, captured: Capture) -> None:
        """Set the results for each target's kernels, and time whole plans."""
        with waiting("measuring what this machine can do"):
            for w in self._works:
                w.outcomes = outcomes_of(w, self.setting)
                if w.here:
                    w.ceilings = self._ceilings.over(w.outcomes, w.target)
        with waiting("timing convolutions directly and by transforms"):
            for w in self._works:
                if w.here:
                    w.forms = check_forms(w.by_rules, w, self.setting)
        with waiting("timing the whole plan with the heuristic's and with the tuned chains"):
            for w in self._works:
                if w.here:
                    changed = {f.form.key for f in w.forms if f.times is not None and f.times.is_faster != f.form.is_transformed}
                    w.checks = check_plans(captured.with_other_forms(changed), w, self.setting)
        self.setting.clock.end_phase("check")

    def _end(self, captured: CapturedPlans) -> int:
        """Store and print the results, and write the files. Returns the exit status."""
        self._kept.save(self.searches.result)
        if self.setting.options.lock_path is not None:
            self._is_unwritten |= not keep_lock(self.setting.options.lock_path, self._works, self._roundings.records)
        status = self._status(captured)
        report = CommandReport(self.setting, captured, self._works, self.searches, self._kept, self._workers.description,
                               self._roundings)
        report.print(self._output)
        report.say_failures()
        self._compare(status)
        return self._output.dump(status, report.to_data())

    def _status(self, captured: CapturedPlans) -> int:
        result = self.searches.result
        if result is not None and result.interrupted:
            return EXIT_INTERRUPTED
        if self._is_unwritten or self._kept.is_missing(result):
            return EXIT_NOT_STORED
        if self.searches.has_failed or self.searches.had_no_time or any(w.failure for w in self._works):
            return EXIT_FAILED
        return EXIT_SCRIPT if self._roundings.failure else captured.status

    def _compare(self, status: int) -> None:
        """For an ONNX file: run the tuned model once more, and print how far its outputs are from onnxruntime's."""
        options = self.setting.options
        if not options.is_onnx or status != EXIT_OK:
            return
        wanted = {"SVOD_TUNE_DB": options.db, "SVOD_DEVICE": options.device, "SVOD_NUMERICS": options.numerics}
        given = {variable: value for variable, value in wanted.items() if value is not None}
        try:
            subprocess.run([python(), *options.started, "--check"], env=config.environment_with_svod(BEAM=None, **given),
                           stdout=self._output.stream, check=False, timeout=self.setting.clock.left_for_ending)
        except subprocess.TimeoutExpired:
            say("svod-tune: the comparison with onnxruntime was left out, as the budget is over")
