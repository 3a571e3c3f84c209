"""What the captured plans do otherwise than by the rules of the cut, chosen before their kernels are searched."""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from svod.cli.tune.setting import Setting
from svod.cli.tune.waiting import say, waiting
from svod.errors import SvodError
from svod.prepare import plan_with
from svod.tune.capture import Capture, CapturedPlan, plan_digest
from svod.tune.plans.alternatives import Alternative, PlanGraph, alternatives_of, together
from svod.tune.plans.plan_search import (
    ALTERNATIVES_SHARE,
    ChosenPlan,
    PlanSearch,
    can_be_searched,
    chosen_alternatives,
    plan_record,
)
from svod.tune.resolved import Resolved

MOST_CHOSEN_PLANS = 3          # most plans whose alternatives are searched; those that take most of the time are
LEAST_PLAN_SHARE = 0.05       # plans below this share of the time are not searched, except the first


class PlanChoices(NamedTuple):
    """A capture with the plans that are used from now on, and the choices that made them."""

    capture: Capture
    chosen: Sequence[ChosenPlan] = ()


def choose_plans(captured: Capture, resolved: Resolved, setting: Setting) -> PlanChoices:
    """Search the alternatives of the plans that take most of the time, as far as no record decides about them, and take the plans that
    were chosen in place of the captured ones. A dry run searches nothing."""
    times = {p.digest: p.runs * sum(n * p.seconds.get(k, 0.0) for k, n in p.unbound.counts.items()) for p in captured.plans}
    total, rest = sum(times.values()) or 1.0, ALTERNATIVES_SHARE * setting.clock.budget
    new, chosen = dict[str, CapturedPlan](), list[ChosenPlan]()
    for number, plan in enumerate(sorted(captured.plans, key=lambda p: -times[p.digest])[:MOST_CHOSEN_PLANS]):
        graph = captured.graphs.get(plan.digest)
        if graph is None or (number and times[plan.digest] < LEAST_PLAN_SHARE * total):
            continue
        seconds = 0.0 if setting.options.dry_run else rest * times[plan.digest] / total
        try:
            with waiting("choosing what the plan stores, and in which order"):
                found = _choose(graph, plan, resolved, setting, seconds)
        except KeyboardInterrupt:
            say("svod-tune: Ctrl-C: the alternatives of plans are not searched any further")
            break
        except (SvodError, MemoryError) as e:
            say(f"svod-tune: the alternatives of a plan could not be searched: {e}")
            continue
        if found is not None:
            new[plan.digest] = found[0]
            chosen.append(found[1])
    return PlanChoices(captured.with_plans(new), chosen)


def _choose(graph: PlanGraph, plan: CapturedPlan, resolved: Resolved, setting: Setting,
            seconds: float) -> tuple[CapturedPlan, ChosenPlan] | None:
    """The plan of a graph that is used from now on; None if nothing is known about its alternatives. `seconds`: for searching them, if no
    record decides."""
    plan_of, alternatives = partial(plan_with, graph, resolved), dict[str, Alternative]()
    by_rules = plan_of(together([]))
    if not can_be_searched(by_rules, resolved):
        return None
    record = plan_record(by_rules, resolved)
    if record is None or record.is_faster or record.untried:
        alternatives = alternatives_of(graph)
    if (record is None or record.untried) and alternatives and seconds > 0:
        timed = PlanSearch(alternatives, plan_of, resolved, seconds, record).run()
        setting.db.record([timed] if timed is not None else [])
        record = plan_record(by_rules, resolved, timed)
    if record is None:
        return None
    unbound = plan_of(together(chosen_alternatives(record, alternatives)))
    digest = plan_digest(unbound, resolved.target.key)
    used = plan if digest == plan.digest else CapturedPlan(digest, plan.target, unbound, {}, plan.runs)
    return used, ChosenPlan(digest, record)


def choice_lines(chosen: Sequence[ChosenPlan]) -> list[str]:
    """The lines of the report about the alternatives of plans."""
    return ["whole plans by the rules, and with alternatives", *(line for c in chosen for line in c.lines)] if chosen else []
