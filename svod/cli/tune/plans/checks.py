"""The result of svod-tune for each kernel, and the timing of whole plans with the heuristic's and with tuned chains, and with both forms of
their convolutions."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from svod import config
from svod.cli.tune.options import TuneOptions
from svod.cli.tune.report import KernelReport
from svod.cli.tune.script import failure_of
from svod.cli.tune.setting import Setting, TargetWork
from svod.cli.tune.survey import compile_heuristics
from svod.cli.tune.waiting import say
from svod.compile.plan.compiler import Compiled, compile_all
from svod.compile.plan.unbound_plan import UnboundPlan
from svod.core.machine.target import FAST, SAME
from svod.errors import SvodError
from svod.system.process.directories import temporary_folder
from svod.system.process.program import python
from svod.tune.capture import Capture, CapturedPlan
from svod.tune.chains import choose, known_chains
from svod.tune.db import Rounding, TuningDB
from svod.tune.db.moving import export
from svod.tune.db.records import BUDGET_SPENT, INTERRUPTED
from svod.tune.fast.report import OF_FIRST_RUN, by_plan
from svod.tune.plans.check import Gain, PlanCheck, check_plan, check_values
from svod.tune.plans.form_check import BothForms, TimedForm, time_forms
from svod.tune.plans.forms import decided_form
from svod.tune.plans.settle import BothWays, Settling
from svod.tune.search.confirmation import Finding

PLAN_CHECK_SECONDS = 4.0    # most seconds for the check of one plan
KNOWN_CHECK_SECONDS = 1.5   # most seconds for the check of one plan if nothing was searched
MAX_CHECKS = 3              # most plans that are checked; those that take most of the time are
CHOICE_SECONDS = 60.0       # seconds that the choice of kernels to round may take besides twice the program's own
FORM_SECONDS = 2.0      # most seconds for timing both forms of one convolution
CHECK_SHARE = 0.05          # plans below this share of the time are not checked, except the first


def outcomes_of(work: TargetWork, setting: Setting) -> list[KernelReport]:
    """For each kernel the chain that the next `prepare` uses, with the times by which it was chosen."""
    result = work.result
    findings: Mapping[str, Finding] = result.findings if result is not None else {}
    out = []
    for row in work.of_interest:
        choice = choose(row.kernel, work.resolved)
        finding = findings.get(row.key)
        winner = known_chains(row.kernel, work.resolved).winner if choice.source == "database" else None
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


def check_plans(captured: Capture, work: TargetWork, setting: Setting) -> list[tuple[CapturedPlan, PlanCheck]]:
    """Time the plans that take most of the time, with the heuristic's and with tuned chains, and give up chains that are slower in them."""
    seconds = {o.row.key: o.row.seconds for o in work.outcomes}
    plans = sorted(captured.plans, key=lambda p: -p.runs * _plan_seconds(p, seconds))
    total = sum(p.runs * _plan_seconds(p, seconds) for p in plans) or 1.0
    checks: list[tuple[CapturedPlan, PlanCheck]] = []
    for plan in plans[:MAX_CHECKS]:
        if checks and plan.runs * _plan_seconds(plan, seconds) < CHECK_SHARE * total:
            break
        try:
            settling = Settling(plan.unbound, plan.digest, work.resolved.compiler, setting.db)
            while (now := _time_plan(work, setting, plan)) is not None and settling.gives_up(now):
                pass
            if settling.check is None:
                say("svod-tune: a whole plan was not timed, as the budget is over")
                break
            checks.append((plan, settling.check))
            if settling.check.given_up:
                work.outcomes = outcomes_of(work, setting)
        except KeyboardInterrupt:
            say("svod-tune: Ctrl-C: the whole plan is not timed any further")
            break
        except (SvodError, MemoryError) as e:
            say(f"svod-tune: the whole plan could not be timed: {e}")
    return checks


def _time_plan(work: TargetWork, setting: Setting, plan: CapturedPlan) -> BothWays | None:
    """Time a plan with the heuristic's chains and with the database's chains; None where there is no time left."""
    kernels, compiler = plan.unbound.kernels, work.resolved.compiler
    by_key = {o.row.key: o for o in outcomes_of(work, setting)}
    heuristics: dict[str, Compiled] = {}
    for key, kernel in kernels.items():
        if setting.clock.is_late:
            return None
        heuristics |= compile_heuristics({key: kernel}, compiler)
    choices = {k: choose(v, work.resolved) for k, v in kernels.items()
               if k in by_key and (o := by_key[k]).source == "database" and o.heuristic and o.tuned}
    gains = {k: gain for k in choices if by_key[k].against in ("", heuristics[k].linear)
             and (gain := gain_in(plan.unbound, by_key[k])) is not None}
    tuned = {**heuristics, **compile_all({k: kernels[k] for k in choices}, choices, compiler)}
    if setting.clock.is_late:
        return None
    within = min(setting.clock.check_seconds(PLAN_CHECK_SECONDS if work.wanted else KNOWN_CHECK_SECONDS), setting.clock.left_for_measuring)
    return BothWays(check_plan(plan.unbound, heuristics, tuned, gains, work.target, seconds=within), heuristics, tuned)


def gain_in(unbound: UnboundPlan, o: KernelReport) -> Gain | None:
    """The gain that a kernel's own times promise inside a plan: the mean times of its calls with the heuristic's and with the tuned
    chain, each call at the values of variables that the plan check uses. None if the kernel was not timed at the values of a call."""
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


def _plan_seconds(plan: CapturedPlan, seconds: Mapping[str, float]) -> float:
    return sum(n * seconds.get(k, plan.seconds.get(k, 0.0)) for k, n in plan.unbound.counts.items())


def _finite(seconds: float) -> float | None:
    return seconds if seconds < float("inf") else None


def check_forms(captured: Capture, work: TargetWork, setting: Setting) -> Sequence[TimedForm]:
    """Time both forms of each convolution that is worth it, with the chains that the database has now, and store the times. A convolution
    of several plans is timed in the plan that is run most. Under the policy "same" there are no forms. The times of a lock file
    do not count: svod-tune makes them anew."""
    if work.target.numerics == SAME:
        return ()
    plans = {p.digest: p for p in captured.plans}
    resolved, done, is_ended = replace(work.resolved, times=()), dict[str, TimedForm](), False
    for found in sorted((f for f in captured.forms if f.plan in plans), key=lambda f: -plans[f.plan].runs):
        if found.form.key in done:
            continue
        times = None
        try:
            both = None if found.other is None else BothForms.of(found.form, plans[found.plan].unbound, found.other.unbound)
            if both is not None and both.can_be_timed and not (is_ended or setting.clock.is_late):
                times = time_forms(both, resolved, setting.clock.check_seconds(FORM_SECONDS))
                setting.db.record([times] if times is not None else [])
        except KeyboardInterrupt:
            say("svod-tune: Ctrl-C: no more forms of convolutions are timed")
            is_ended = True
        except (SvodError, MemoryError) as e:
            say(f"svod-tune: the forms of a {found.form.described} could not be timed: {e}")
        done[found.form.key] = TimedForm(found.form, found.plan, decided_form(found.form, resolved, times))
    return tuple(done.values())


class ChosenRoundings(NamedTuple):
    """The records of each choice of kernels to round. `failure`: how the run that made them failed, in words; "": it did not."""

    records: Sequence[Sequence[Rounding]] = ()
    failure: str = ""


def choose_roundings(captured: Capture, setting: Setting, script_seconds: float) -> ChosenRoundings:
    """Run the program once more, under the policy "fast" and the limit of --max-error, so that its plans choose the kernels to round by
    their own weights and inputs. Returns and stores the records of each choice. The program may take twice as long as it took
    before, `script_seconds`, and `CHOICE_SECONDS`; what it has chosen by then counts, also if it fails or Ctrl-C ends it."""
    options, seconds, failure = setting.options, 2.0 * script_seconds + CHOICE_SECONDS, ""
    with temporary_folder("svod-fast-") as directory:
        known, found = directory / "known.jsonl", directory / "chosen.db"
        export(setting.db, known, captured.kernels, roundings=False)
        given = {} if options.device is None else {"SVOD_DEVICE": options.device}
        environment = config.environment_with_svod(
            SVOD_NUMERICS=FAST, SVOD_MAX_ERROR=repr(options.max_error), SVOD_TUNE_DB=os.pathsep.join([str(found), str(known)]),
            SVOD_IMPORTED="trust", SVOD_LOCK=None, SVOD_CAPTURE=None, BEAM=None, **given)
        try:
            status = subprocess.run([python(), *options.started], env=environment, stdout=sys.stderr if options.json_path == "-" else None,
                                    check=False, timeout=seconds).returncode
            failure = failure_of(status) if status else ""
        except subprocess.TimeoutExpired:
            failure = f"was ended after {seconds:.0f} s"
        except KeyboardInterrupt:
            failure = "was ended by Ctrl-C"
        with TuningDB.open(str(found), read_only=True) as db:
            records = [replace(r, samples=_samples(options)) for r, _ in db.select(Rounding)]
    setting.db.record(records)
    return ChosenRoundings(tuple(by_plan(records)), failure and f"{options.subject} {failure} in the run that chooses the kernels to round")


def _samples(options: TuneOptions) -> str:
    """The sample inputs of a program in words."""
    if not options.is_onnx:
        return OF_FIRST_RUN
    how = f"which are in {options.inputs}" if options.inputs else f"which are made up, of the types that {options.subject} declares"
    return f"{OF_FIRST_RUN}, {how}"
