"""The measurements that `prepare()` makes before it builds a plan, within a budget. The database keeps their results.

Chains of other machines and of related kernels are checked. With BEAM=, kernels that the database does not know, or whose search is
unfinished, are searched. A warning before the work names the kernels, the budget and the way to stop; a warning after it states the result.
Ctrl-C ends the work: its results are kept, and the plan is built with the best known chains. A terminal shows a progress bar. If no worker
starts, the plan is built with the known chains.
"""
from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from svod.bench.roofline import Ceilings, cached_ceilings
from svod.compile.plan.compiler import Choice, Compiled, compile_all
from svod.compile.plan.unbound_plan import Named, UnboundPlan, named_kernels
from svod.config import BeamConfig, BenchConfig, data_dir
from svod.core.cost.op_count import count_operations
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import FLOAT32
from svod.system.forksafe import remake_after_fork
from svod.system.optional import optional, reason
from svod.system.process.streams import is_terminal
from svod.system.quantities import count
from svod.tune.capture import plan_digest
from svod.tune.chains import choose_each
from svod.tune.checks import Proposed, chains_to_check
from svod.tune.db import PlanTimes, TuningDB
from svod.tune.db.records import BUDGET_SPENT, INTERRUPTED
from svod.tune.measure.sizes import merged_sizes, variable_names
from svod.tune.plans.alternatives import PlanGraph, alternatives_of
from svod.tune.plans.check import bytes_touched, check_plan
from svod.tune.plans.form_check import MOST_TIMED, BothForms, time_forms
from svod.tune.plans.forms import ConvolutionForm, decided_form
from svod.tune.plans.pair_times import times_words
from svod.tune.plans.plan_search import ALTERNATIVES_SHARE, PlanOf, PlanSearch, plan_record
from svod.tune.plans.settle import BothWays, Settling
from svod.tune.resolved import Resolved
from svod.tune.search.budget import ModelBudget
from svod.tune.search.events import KernelFinished, SearchEvent, debug_line
from svod.tune.session import KernelTask, SessionResult, TuneSession
from svod.tune.unfinished import is_to_be_searched
from svod.tune.workers.start import make_executor

log = logging.getLogger("svod")

LEAST_SECONDS = 1.0     # With fewer seconds left of a budget no workers are started.
CHAIN_CHECK_SECONDS = 0.3    # seconds within which the checked chains of one kernel are confirmed
PLAN_TIMING_SECONDS = 2.0    # most seconds for timing a whole plan with the heuristic's and with the tuned chains
FORMS_SHARE = 0.33      # largest share of the search budget for the forms of convolutions
SETTLE_SHARE = 0.05     # largest share of the search budget for timing a whole plan
MOST_SETTLED = 1 << 30  # A plan whose buffers have more bytes is not timed as a whole, as that copies its buffers.

_lock = threading.Lock()          # allows one search at a time in a process
remake_after_fork(sys.modules[__name__], "_lock", threading.Lock)
_interrupted = 0                  # number of searches and checks of this process that Ctrl-C ended
remake_after_fork(sys.modules[__name__], "_interrupted", int)


@dataclass
class _Clock:
    """Seconds of wall time that this process has spent on one kind of work, the start of its workers included."""

    spent: float = 0.0
    before: float = 0.0         # seconds of `spent` that are no longer charged to the budget
    told: bool = False          # whether a warning has said that the budget is used up

    def left(self, budget: float) -> float:
        """Seconds left of a budget; 0 where that is too little to start workers and measure anything."""
        left = budget - (self.spent - self.before)
        return left if left > min(LEAST_SECONDS, budget / 2) else 0.0


_searching, _checking, _deviating = _Clock(), _Clock(), _Clock()
# a forked child has budgets of its own
remake_after_fork(sys.modules[__name__], "_searching", _Clock)
remake_after_fork(sys.modules[__name__], "_checking", _Clock)
remake_after_fork(sys.modules[__name__], "_deviating", _Clock)


def seconds_searched() -> float:
    """Seconds of wall time that searches at prepare time have taken in this process, the start of their workers included."""
    return _searching.spent


def begin_budget() -> None:
    """Reset the time that this process has spent of `BeamConfig.budget` and `PrepareConfig.check_budget`."""
    with _lock:
        for clock in (_searching, _checking, _deviating):
            clock.before, clock.told = clock.spent, False


def searches_interrupted() -> int:
    """Number of prepare-time searches that Ctrl-C has ended in this process. Such a search returns what it found and raises nothing."""
    return _interrupted


# -- checking ----------------------------------------------------------------------------------------------------------------
def check_at_prepare(unbound: UnboundPlan, kernels: Mapping[str, Kernel], resolved: Resolved) -> None:
    """Measure the chains that are proposed for kernels of a plan, and store the results in the database. Never raises for a check that
    fails: the log says why."""
    budget = resolved.config.check_budget
    with _lock:
        # another thread may have measured the same chains while this one waited for the lock
        proposed = chains_to_check(kernels, choose_each(kernels, resolved), resolved)
        what = count(len(proposed), "kernel")
        left = _checking.left(budget)
        if not proposed:
            return
        if left <= 0:
            _tell_used_up(_checking, f"the check budget of this process, {budget:g} s, is used up: chains of others or of relatives are "
                                     "not checked any more (SVOD_CHECK_BUDGET)")
            return
        log.warning("checking chains of others or of relatives for %s, once, for at most %.0f s; Ctrl-C goes on without", what, left)
        work = _Work("checked", unbound, {k: kernels[k] for k in proposed}, resolved, BeamConfig(executor="local"), left, proposed)
        result = work.run(_checking)
    if isinstance(result, str):
        log.warning("the chains could not be checked (%s); %s without them", result, f"{what} {'go' if len(proposed) > 1 else 'goes'}")
        return
    used = sum(f.winner is not None and f.confirmed and f.source != "heuristic" for f in result.findings.values())
    unchecked = len(proposed) - len(result.findings)
    log.warning("checked in %.1f s: %s %s faster chain%s", result.seconds, count(used, "kernel"), "have a" if used != 1 else "has a",
                "" if not unchecked else f"; {unchecked} {'is' if unchecked == 1 else 'are'} left for a later process")


# -- searching ---------------------------------------------------------------------------------------------------------------
class Searched(NamedTuple):
    """The result of `search_at_prepare`. `choices`: the chains to use, by kernel key; a kernel that is not in it keeps its known chain.
    `ran`: whether any kernel was searched."""

    choices: dict[str, Choice]
    ran: bool


def search_at_prepare(unbound: UnboundPlan, kernels: Mapping[str, Kernel], resolved: Resolved, beam: BeamConfig) -> Searched:
    """Search each of `kernels` that has no complete search. Never raises for a search that fails: the log says why."""
    with _lock:
        # another thread may have searched the kernels while this one waited for the lock
        now = choose_each(kernels, resolved)
        found = {key: choice for key, choice in now.items() if choice.source == "database"}
        unknown = {key: k for key, k in kernels.items() if is_to_be_searched(now[key], key, resolved, beam)}
        if not unknown:
            return Searched(found, False)
        what = count(len(unknown), "kernel")
        left = _searching.left(beam.budget)
        if left <= 0:
            _tell_used_up(_searching, f"BEAM={beam.width}: the search budget of this process, {beam.budget:g} s, is used up: {what} "
                                      f"{'are' if len(unknown) > 1 else 'is'} not searched, nor are those that follow (BEAM_BUDGET)")
            return Searched(found, False)
        known = len(found.keys() & unknown.keys())
        goes_on = f" ({known} of them known, and with more to try)" if known else ""
        goes_on += "" if (policy := resolved.target.numerics) == FLOAT32 else f" under numerics={policy}"
        log.warning("BEAM=%d: searching %s%s, for at most %.0f s; Ctrl-C stops and keeps what was found", beam.width, what, goes_on, left)
        result = _Work("searched", unbound, unknown, resolved, beam, left).run(_searching)
    if isinstance(result, str):
        log.warning("BEAM=%d: the search could not be run (%s); %s without it", beam.width, result,
                    f"{what} {'go' if len(unknown) > 1 else 'goes'}")
        return Searched(found, False)
    chosen = _choices(result, unknown, resolved)
    log.warning("BEAM=%d: %s", beam.width, _summary(result, chosen, len(unknown), resolved.db))
    return Searched(found | chosen, True)


def _tell_used_up(clock: _Clock, text: str) -> None:
    """Warn once that a budget is used up."""
    if not clock.told:
        clock.told = True
        log.warning("%s", text)


def settle_at_prepare(unbound: UnboundPlan, choices: Mapping[str, Choice], resolved: Resolved, beam: BeamConfig,
                      decided: Mapping[str, Compiled] = {}) -> dict[str, Choice]:
    """The chains to use for a plan whose kernels were searched, after giving up chains that are slower inside the plan than the
    heuristic's. `decided`: the code of kernels that are not chosen here. Never raises for a plan that cannot be timed: the log says why."""
    found, kernels, compiler = dict(choices), unbound.kernels, resolved.compiler
    tuned = {k: kernels[k] for k, c in choices.items() if c.source in ("beam", "database")}
    if not tuned or bytes_touched(unbound) > MOST_SETTLED or unbound.functions or unbound.copies:
        return found
    started, seconds = time.monotonic(), min(PLAN_TIMING_SECONDS, SETTLE_SHARE * beam.budget)
    settling, goes_on = Settling(unbound, plan_digest(unbound, compiler.target.key), compiler, resolved.db), True
    stored = choose_each(tuned, resolved)
    try:
        with optional(log, "what was found could not be timed inside the plan", logging.INFO):
            others = {k: v for k, v in kernels.items() if k not in decided}
            heuristics = compile_all(others, {k: compiler.heuristic_choice(v) for k, v in others.items()}, compiler) | dict(decided)
            while goes_on:
                for k, now in choose_each(tuned, resolved).items():
                    if now.chain != stored[k].chain:
                        found[k] = stored[k] = now
                code = {**heuristics, **{k: compiler.compile(kernels[k], found[k]) for k in tuned}}
                check = check_plan(unbound, heuristics, code, {}, compiler.target, seconds=seconds)
                goes_on = settling.gives_up(BothWays(check, heuristics, code))
        for line in settling.check.given_up if settling.check is not None else ():
            log.warning("a chain is given up, as it is slower in this plan: %s", line)
    except KeyboardInterrupt:
        log.warning("Ctrl-C: what was found is not timed inside the plan")
    finally:
        _searching.spent += time.monotonic() - started
    return found


def forms_at_prepare(forms: Sequence[ConvolutionForm], plan_in: Callable[[str], UnboundPlan], resolved: Resolved, beam: BeamConfig) -> bool:
    """Search the kernels of both forms of convolutions, time both inside their plan, and store the times. `plan_in`: the plan with the
    other form of the convolution with a key; "": with no other form. Returns whether any kernel was searched: the chains are not settled,
    as of two plans that are compared one does not run. Never raises for forms that cannot be timed: the log says why."""
    has_searched, interrupted, exact = False, _interrupted, resolved.exact
    beam = replace(beam, budget=FORMS_SHARE * beam.budget)
    if _searching.left(beam.budget) <= 0:
        return False
    plan = plan_in("")
    if bytes_touched(plan) > MOST_TIMED:
        return False
    for form in forms:
        if _searching.left(beam.budget) <= 0:
            break
        both = BothForms.of(form, plan, plan_in(form.key))
        if not both.can_be_timed:
            continue
        in_order = (both.transformed, both.direct) if form.is_transformed else (both.direct, both.transformed)
        for unbound in in_order:        # first the form that is predicted to be faster
            if _searching.left(beam.budget) <= 0:
                break
            has_searched |= search_at_prepare(unbound, unbound.kernels, exact, beam).ran
            if _interrupted > interrupted:
                return has_searched
        with _lock:
            # another thread may have timed the forms while this one waited for the lock
            if decided_form(form, resolved).times is None and not _record_times(both, resolved, beam):
                break
    return has_searched


def search_plan_at_prepare(by_rules: UnboundPlan, graph: PlanGraph, plan_of: PlanOf, resolved: Resolved,
                           beam: BeamConfig) -> PlanTimes | None:
    """Search the alternatives of a graph's plan, and store what they took. Returns the record that decides about them; None where there is
    none. Never raises for a plan that cannot be timed: the log says why."""
    global _interrupted
    with _lock:
        known = plan_record(by_rules, resolved)     # another thread may have searched the plan while this one waited for the lock
        seconds = min(_deviating.left(ALTERNATIVES_SHARE * beam.budget), _searching.left(beam.budget))
        if (known is not None and not known.untried) or seconds <= 0 or not (alternatives := alternatives_of(graph)):
            return known
        log.warning("BEAM=%d: trying %s of a plan, for at most %.0f s; Ctrl-C stops and keeps what was found", beam.width,
                    count(len(alternatives), "alternative"), seconds)
        started, times = time.monotonic(), None
        try:
            with optional(log, "the alternatives of a plan could not be timed", logging.INFO):
                search = PlanSearch(alternatives, plan_of, resolved, seconds, known)
                times = search.run()
                _interrupted += search.is_interrupted
                if times is not None:
                    resolved.db.record([times])
                    log.warning("BEAM=%d: %s: %s", beam.width, times.described, times_words(times))
        except KeyboardInterrupt:
            _interrupted += 1
            log.warning("Ctrl-C: the alternatives of a plan are not searched")
        finally:
            spent = time.monotonic() - started
            _searching.spent += spent
            _deviating.spent += spent
        return plan_record(by_rules, resolved, times)


def _record_times(both: BothForms, resolved: Resolved, beam: BeamConfig) -> bool:
    """Time both forms of a convolution and store the times. Returns whether Ctrl-C left it alone."""
    started = time.monotonic()
    try:
        with optional(log, "the forms of a convolution could not be timed", logging.INFO):
            times = time_forms(both, resolved, min(PLAN_TIMING_SECONDS, SETTLE_SHARE * beam.budget))
            if times is not None:
                resolved.db.record([times])
                log.warning("BEAM=%d: %s: %s", beam.width, both.form.described, times_words(times))
    except KeyboardInterrupt:
        log.warning("Ctrl-C: the forms of a convolution are not timed")
        return False
    finally:
        _searching.spent += time.monotonic() - started
    return True


def _choices(result: SessionResult, unknown: Mapping[str, Kernel], resolved: Resolved) -> dict[str, Choice]:
    """The chains to use for the kernels of a search after its end, by kernel key."""
    chosen: dict[str, Choice] = {}
    without = dict.fromkeys(result.pending, ("pending", "another process is searching this kernel"))
    without.update({key: ("heuristic", f"{_end_of(result)} before its turn") for key in result.unbegun})
    for key, finding in result.findings.items():
        if finding.source == "heuristic" or finding.winner is None:
            without[key] = "heuristic", f"no faster chain was found: {finding.why}"
        else:
            chosen[key] = Choice(finding.chain, "beam", f"{finding.speedup.median:.2f}× the heuristic, {finding.why}")
    for key, stored in choose_each({key: unknown[key] for key in without}, resolved).items():
        source, why = without[key]
        chosen[key] = stored if stored.source == "database" else replace(stored, source=source, why=why)
    return chosen


def _end_of(result: SessionResult) -> str:
    """Why a search that had more to try ended, in words."""
    return INTERRUPTED if result.interrupted else BUDGET_SPENT


def _summary(result: SessionResult, chosen: Mapping[str, Choice], asked: int, db: TuningDB) -> str:
    better = sum(c.source == "beam" for c in chosen.values())
    where = f"{'kept in' if result.rows else 'nothing was added to'} {db.path}" if db.path is not None else "the database is in memory only"
    text = (f"{'interrupted after' if result.interrupted else 'searched'} {result.seconds:.1f} s, "
            f"{count(result.timed, 'candidate')} timed: {better} of {count(asked, 'kernel')} found a faster chain; {where}")
    if result.failure:
        return (f"{result.seconds:.1f} s, and nothing could be measured: every candidate of {count(len(result.findings), 'kernel')} failed "
                f"({result.failure}). That is an error of svod's own or of its installation; the heuristic's chains are used")
    unmeasured = [f.why for f in result.findings.values() if f.winner is None]
    unmeasured += [f"{_end_of(result)} before their turn"] * len(result.unbegun)
    if unmeasured:
        text += f"; {len(unmeasured)} {'were' if len(unmeasured) > 1 else 'was'} not measured: {unmeasured[0]}"
    return text


# -- sessions: the common part of searches and checks ------------------------------------------------------------------------
@dataclass
class _Work:
    """A tuning session (`TuneSession`) over kernels of a plan. `verb`: "searched" or "checked", for messages. `given`: the chains to
    measure for each kernel if chains are checked; empty if kernels are searched."""

    verb: str
    unbound: UnboundPlan
    kernels: Mapping[str, Kernel]
    resolved: Resolved
    beam: BeamConfig
    seconds: float
    given: Mapping[str, Proposed] = field(default_factory=dict)

    def run(self, clock: _Clock) -> SessionResult | str:
        """Run the session. Returns its result, or the reason why there is none."""
        global _interrupted
        started = time.monotonic()
        try:
            result = self._run()
        except KeyboardInterrupt:       # Ctrl-C came while the workers started; during the search the session itself handles it
            _interrupted += 1
            return "Ctrl-C"
        except Exception as e:          # the step is optional: any error becomes the reason why it has no result
            log.debug("no kernels are %s", self.verb, exc_info=True)
            return reason(e)
        finally:
            clock.spent += time.monotonic() - started
        _interrupted += result.interrupted
        return result

    def _run(self) -> SessionResult:
        started, beam, compiler = time.monotonic(), self.beam, self.resolved.compiler
        self.resolved.db.storage.foresee()
        named = named_kernels(self.unbound.calls)
        tasks = self._tasks(named)
        ceilings = None if self.given else self._ceilings()
        bench = BenchConfig(seconds=CHAIN_CHECK_SECONDS) if self.given else BenchConfig.from_env()
        workers = "inline" if beam.executor == "inline" else f"{beam.executor}:{beam.workers}" if beam.workers else beam.executor
        with make_executor(workers, device=compiler.target.device, say=log.warning) as executor, Progress(
                TextColumn(f"kernels {self.verb}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True),
                transient=True, disable=not is_terminal(sys.stderr)) as progress:
            bar = progress.add_task("", total=len(tasks))

            def listen(event: SearchEvent) -> None:
                progress.advance(bar, isinstance(event, KernelFinished))
                if line := debug_line(event, beam):
                    name = named[event.kernel].name if event.kernel in named else ""
                    progress.console.print(f"{name}: {line}", highlight=False, markup=False, soft_wrap=True)

            budget = ModelBudget(max(0.0, self.seconds - (time.monotonic() - started)), per_kernel=beam.kernel_budget)
            return TuneSession(tasks, compiler.target, executor=executor, db=self.resolved.db, config=beam, bench=bench, budget=budget,
                               ceilings=ceilings, listener=listen, device=compiler.device).run()

    def _tasks(self, named: Mapping[str, Named]) -> list[KernelTask]:
        counts = self.unbound.counts
        tasks = []
        for key, k in self.kernels.items():
            variables, proposed = self.unbound.variables_of(key), self.given.get(key, Proposed((), ""))
            share = counts[key] * float(count_operations(k.ast).flops) if self.given else 0.0      # kernels with more operations come first
            tasks.append(KernelTask(k, calls=counts[key], name=named[key].name, origins=named[key].origins, share=share,
                                    sizes=merged_sizes(k, variables), variables=variable_names(k, variables), given=proposed.chains,
                                    strategy=proposed.strategy))
        return tasks

    def _ceilings(self) -> Ceilings | None:
        target = self.resolved.target
        with optional(log, "what this machine can do at best was not measured", logging.INFO):
            return cached_ceilings(Path(data_dir()) / "ceilings.json", target, target.threads, quick=True)
        return None

