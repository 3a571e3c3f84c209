"""The alternatives of the captured plans, chosen before the plans' kernels are searched."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from svod.cli.tune.setting import Setting
from svod.cli.tune.survey import kernel_seconds
from svod.cli.tune.waiting import say, waiting
from svod.errors import SvodError
from svod.prepare import plan_with
from svod.tune.capture import Capture, CapturedPlan, plan_digest
from svod.tune.plans.alternatives import PlanGraph, alternatives_of, deviations_of
from svod.tune.plans.forms import decided_form
from svod.tune.plans.plan_search import ALTERNATIVES_SHARE, ChosenPlan, PlanSearch, can_be_searched, plan_record
from svod.tune.resolved import Resolved

MOST_SEARCHED_PLANS = 3     # most plans whose alternatives are searched; those that take most of the time are
LEAST_PLAN_SHARE = 0.05     # plans below this share of the time are not searched, except the first


class PlansToTune(NamedTuple):
    """A capture with the plans that are used from now on, and the records that chose them. `untried`: the number of alternatives that no
    search has tried."""

    capture: Capture
    chosen: Sequence[ChosenPlan] = ()
    untried: int = 0


def with_alternatives(captured: Capture, resolved: Resolved, setting: Setting) -> PlansToTune:
    """The capture with the alternatives of its plans that records choose. Those of the plans that take most of the time are searched
    first, as far as they have not been; a dry run searches nothing."""
    times = {p.digest: p.runs * _seconds(p, resolved) for p in captured.plans if p.digest in captured.graphs}
    budgets = _budgets(times, ALTERNATIVES_SHARE * setting.clock.budget) if not setting.options.dry_run else {}
    new, chosen, untried = dict[str, CapturedPlan](), list[ChosenPlan](), 0
    for plan in sorted((p for p in captured.plans if _is_as_used(p, captured, resolved)), key=lambda p: -times[p.digest]):
        graph, found = captured.graphs[plan.digest], None
        by_rules = plan_with(graph, resolved, deviations_of(graph, frozenset()))
        if plan_digest(by_rules, resolved.target.key) != plan.digest or not can_be_searched(by_rules, resolved):
            continue
        try:
            found = plan_record(by_rules, resolved)
            if plan.digest in budgets and not setting.clock.is_late and (found is None or found.untried):
                with waiting("trying the alternatives of a plan"):
                    search = PlanSearch(alternatives_of(graph), partial(plan_with, graph, resolved), resolved, budgets[plan.digest], found)
                    timed = search.run()
                setting.db.record([timed] if timed is not None else [])
                found = plan_record(by_rules, resolved, timed)
                budgets = {} if search.is_interrupted else budgets
        except KeyboardInterrupt:
            budgets = {}
        except (SvodError, MemoryError) as e:
            say(f"svod-tune: the alternatives of a plan could not be searched: {e}")
        untried += len(alternatives_of(graph)) if found is None else found.untried
        if found is not None:
            new[plan.digest] = used = _used(plan, graph, found.chosen if found.is_faster else frozenset(), resolved)
            chosen.append(ChosenPlan(used.digest, found))
    return PlansToTune(captured.with_plans(new), chosen, untried)


def _seconds(plan: CapturedPlan, resolved: Resolved) -> float:
    """Seconds of one run of a captured plan."""
    seconds = kernel_seconds(plan, resolved.target, resolved.compiler)
    return sum(n * seconds[k] for k, n in plan.unbound.counts.items())


def _budgets(times: Mapping[str, float], seconds: float) -> dict[str, float]:
    """The seconds for searching each plan, by its digest, in proportion to the time that it takes."""
    most = sorted(times, key=lambda digest: -times[digest])[:MOST_SEARCHED_PLANS]
    total = sum(times.values()) or 1.0
    return {digest: seconds * times[digest] / total for digest in most if digest == most[0] or times[digest] >= LEAST_PLAN_SHARE * total}


def _is_as_used(plan: CapturedPlan, captured: Capture, resolved: Resolved) -> bool:
    """Whether the next `prepare` makes the captured plan, but for its alternatives: a capture has the predicted forms of convolutions, and
    records may decide otherwise."""
    return plan.digest in captured.graphs and not any(
        decided_form(f.form, resolved).form.is_transformed != f.form.is_transformed for f in captured.forms if f.plan == plan.digest)


def _used(plan: CapturedPlan, graph: PlanGraph, chosen: frozenset[str], resolved: Resolved) -> CapturedPlan:
    """The plan with alternatives, in the place of the captured one."""
    unbound = plan_with(graph, resolved, deviations_of(graph, chosen))
    digest = plan_digest(unbound, resolved.target.key)
    return plan if digest == plan.digest else CapturedPlan(digest, plan.target, unbound, {}, plan.runs)


def choice_lines(chosen: Sequence[ChosenPlan]) -> list[str]:
    """The lines of the report about the alternatives of plans."""
    return ["whole plans by the rules, and with alternatives", *(line for c in chosen for line in c.lines), ""] if chosen else []
