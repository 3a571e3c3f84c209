"""The choice of chains for all kernels of a plan: given chains, known chains, and chains that are measured before the plan is made.

    PrepareConfig.opts → `choose` → chains of other machines or of relatives are checked → with BEAM, unfinished kernels are searched

Checks and searches are optional: an exception that one of them raises is logged in one line, and the plan is made with the known chains.
"""
from __future__ import annotations

import logging
from collections.abc import Mapping

from svod.compile.plan.compiler import Chain, Choice
from svod.compile.plan.unbound_plan import UnboundPlan
from svod.config import BeamConfig
from svod.system.optional import optional
from svod.tune.chains import choose, choose_each
from svod.tune.checks import chains_to_check
from svod.tune.resolved import Resolved
from svod.tune.unfinished import is_to_be_searched

log = logging.getLogger("svod")


def plan_choices(unbound: UnboundPlan, given: Mapping[str, Chain], resolved: Resolved) -> dict[str, Choice]:
    """The chain of every kernel of a plan. `given`: chains of PrepareConfig.opts, by kernel key, which are used as they are."""
    choices = {key: Choice(given[key], "explicit", "given by PrepareConfig.opts") if key in given else choose(kernel, resolved)
               for key, kernel in unbound.kernels.items()}
    choices |= optional(log, "chains of others or of relatives are not looked for", lambda: checked(unbound, choices, resolved),
                        dict[str, Choice]())
    beam = resolved.config.beam
    if beam is not None:
        choices |= optional(log, "kernels are not searched", lambda: searched(unbound, choices, resolved, beam), dict[str, Choice]())
    return choices


def checked(unbound: UnboundPlan, choices: Mapping[str, Choice], resolved: Resolved) -> dict[str, Choice]:
    """Measure chains of other machines and of relatives that may be faster. Returns the new choices for the kernels concerned."""
    proposed = chains_to_check(unbound.kernels, choices, resolved)
    if not proposed:
        return {}
    from svod.tune.at_prepare import check_at_prepare
    check_at_prepare(unbound, proposed, resolved)
    return choose_each({key: unbound.kernels[key] for key in proposed}, resolved)


def searched(unbound: UnboundPlan, choices: Mapping[str, Choice], resolved: Resolved, beam: BeamConfig) -> dict[str, Choice]:
    """Search the unfinished kernels within this process's budget. Returns the choices of all kernels after it; {} if none is unfinished."""
    unknown = {k: v for k, v in unbound.kernels.items() if is_to_be_searched(choices[k], k, resolved, beam)}
    if not unknown:
        return {}
    from svod.tune.at_prepare import search_at_prepare, settle_at_prepare
    found, ran = search_at_prepare(unbound, unknown, resolved, beam)
    chosen = {**choices, **found}
    return settle_at_prepare(unbound, chosen, resolved, beam) if ran else chosen
