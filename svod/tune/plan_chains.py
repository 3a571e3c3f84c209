"""The chains of all kernels of a plan: the given ones, those that are known, and what is measured before the plan is made.

    PrepareConfig.opts → `choose` → chains of others or of relatives are checked → with BEAM, unfinished kernels are searched

The second half is optional: whatever it raises becomes one line, and the plan is made with what is known.
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
    """The chain of every kernel of a plan. `given`: chains that are not asked about, by kernel."""
    choices = {key: Choice(given[key], "explicit", "given by PrepareConfig.opts") if key in given else choose(kernel, resolved)
               for key, kernel in unbound.kernels.items()}
    choices |= optional(log, "chains of others or of relatives are not looked for", lambda: checked(unbound, choices, resolved),
                        dict[str, Choice]())
    beam = resolved.config.beam
    if beam is not None:
        choices |= optional(log, "kernels are not searched", lambda: searched(unbound, choices, resolved, beam), dict[str, Choice]())
    return choices


def checked(unbound: UnboundPlan, choices: Mapping[str, Choice], resolved: Resolved) -> dict[str, Choice]:
    """The chains of kernels whose proposals were measured now."""
    proposed = chains_to_check(unbound.kernels, choices, resolved)
    if not proposed:
        return {}
    from svod.tune.at_prepare import check_at_prepare
    check_at_prepare(unbound, proposed, resolved)
    return choose_each({key: unbound.kernels[key] for key in proposed}, resolved)


def searched(unbound: UnboundPlan, choices: Mapping[str, Choice], resolved: Resolved, beam: BeamConfig) -> dict[str, Choice]:
    """The chains of all kernels, after a search of the unfinished ones within this process's budget."""
    unknown = {k: v for k, v in unbound.kernels.items() if is_to_be_searched(choices[k], k, resolved, beam)}
    if not unknown:
        return {}
    from svod.tune.at_prepare import search_at_prepare, settle_at_prepare
    found, ran = search_at_prepare(unbound, unknown, resolved, beam)
    chosen = {**choices, **found}
    return settle_at_prepare(unbound, chosen, resolved, beam) if ran else chosen
