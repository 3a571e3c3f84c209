"""The code of all kernels of a plan, under given chains, known chains, and chains that are measured before the plan is made.

    PrepareConfig.opts → `choose` → chains of other machines or of relatives are checked → with BEAM, unfinished kernels are searched

Checks and searches are optional: an exception that one of them raises is logged in one line, and the plan is made with the known chains.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from svod.compile.plan.compiler import Chain, Choice, Compilation, Compiled, compile_all
from svod.compile.plan.unbound_plan import UnboundPlan
from svod.config import BeamConfig
from svod.core.kernel.apply import is_rounded
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import FAST
from svod.system.optional import optional
from svod.tune.chains import choose, choose_each, say_unused_lock
from svod.tune.checks import chains_to_check
from svod.tune.first_forms import FirstForms, is_large
from svod.tune.plans.transformed import within_limit
from svod.tune.resolved import Resolved
from svod.tune.unfinished import is_to_be_searched

log = logging.getLogger("svod")


def compile_unbound_plan(unbound: UnboundPlan, given: Mapping[str, Chain], resolved: Resolved, may_be_first: bool = False,
                         rounded: Mapping[str, Choice] | None = None) -> dict[str, Compiled]:
    """Choose a chain and compile code for every kernel. `given`: chains by kernel that are used without consulting the database.
    `may_be_first`: whether kernels may have first forms, if the plan is large. `rounded`: under the policy "fast", the chains of the
    kernels with rounded factors; all others are chosen and compiled as under "float32"."""
    if not unbound.calls:
        return {}
    if resolved.target.numerics == FAST:
        explicit = {k: Choice(c, "explicit", "given by PrepareConfig.opts") for k, c in given.items() if is_rounded(c)}
        apart = {k: c for k, c in {**(rounded or {}), **explicit}.items() if k in unbound.kernels and (k in explicit or k not in given)}
        decided = compile_all({k: unbound.kernels[k] for k in apart}, apart, resolved.compiler)
        others = {k: c for k, c in given.items() if k not in apart}
        return {**decided, **_compile_others(unbound, others, resolved.exact, may_be_first, decided)}
    return _compile_others(unbound, given, resolved, may_be_first, {})


def _compile_others(unbound: UnboundPlan, given: Mapping[str, Chain], resolved: Resolved, may_be_first: bool,
                    decided: Mapping[str, Compiled]) -> dict[str, Compiled]:
    """`compile_unbound_plan` for the kernels of a plan whose code is not `decided` yet."""
    compiler = resolved.compiler
    with Compilation(compiler) as compilation:
        compilation.start()
        may_be_first = may_be_first and resolved.config.transformed_mb is None      # own forms are chosen one by one
        forms = FirstForms(resolved) if may_be_first and compiler.pair.has_first_forms and is_large(unbound) else None
        choices = plan_choices(unbound, given, resolved, compilation.begin, forms, decided)
        return compile_all({k: unbound.kernels[k] for k in choices}, within_limit(unbound, choices, resolved), compiler)


def plan_choices(unbound: UnboundPlan, given: Mapping[str, Chain], resolved: Resolved, begin: Callable[[Kernel, Choice], None],
                 forms: FirstForms | None = None, decided: Mapping[str, Compiled] = {}) -> dict[str, Choice]:
    """The chain of every kernel of a plan. `given`: chains of PrepareConfig.opts, by kernel key, which are used as they are. `begin` is
    called as soon as a choice is made that no measurement is going to change. `forms`: chooses the form that each kernel begins with; None:
    its own. `decided`: the code of kernels that are left out, and run with it where the whole plan is timed."""
    choices = {key: Choice(given[key], "explicit", "given by PrepareConfig.opts") for key in unbound.kernels if key in given}
    kernels = {key: kernel for key, kernel in unbound.kernels.items() if key not in given and key not in decided}
    for key, kernel in unbound.kernels.items():
        if key in decided:
            continue
        if key not in given:
            choices[key] = choose(kernel, resolved) if forms is None else forms.choose(kernel)
        if key in given or (resolved.config.beam is None and not choices[key].unchecked):
            begin(kernel, choices[key])
    say_unused_lock(unbound.kernels, resolved)
    with optional(log, "chains of others or of relatives are not looked for"):
        choices |= checked(unbound, kernels, choices, resolved)
    if resolved.config.beam is not None:
        with optional(log, "kernels are not searched"):
            choices |= searched(unbound, kernels, choices, resolved, resolved.config.beam, decided)
    return choices


def checked(unbound: UnboundPlan, kernels: Mapping[str, Kernel], choices: Mapping[str, Choice], resolved: Resolved) -> dict[str, Choice]:
    """Measure chains of other machines and of relatives that may be faster. Returns the choices of the kernels that have such chains."""
    concerned = {key: kernels[key] for key in chains_to_check(kernels, choices, resolved)}
    if not concerned:
        return {}
    from svod.tune.at_prepare import check_at_prepare
    check_at_prepare(unbound, concerned, resolved)
    return choose_each(concerned, resolved)


def searched(unbound: UnboundPlan, kernels: Mapping[str, Kernel], choices: Mapping[str, Choice], resolved: Resolved,
             beam: BeamConfig, decided: Mapping[str, Compiled] = {}) -> dict[str, Choice]:
    """Search the unfinished kernels within this process's budget. Returns the choices of all kernels after it; {} if none is unfinished.
    `decided`: the code of the plan's kernels that are not chosen here."""
    unknown = {k: v for k, v in kernels.items() if is_to_be_searched(choices[k], k, resolved, beam)}
    if not unknown:
        return {}
    from svod.tune.at_prepare import search_at_prepare, settle_at_prepare
    found, ran = search_at_prepare(unbound, unknown, resolved, beam)
    chosen = {**choices, **found}
    return settle_at_prepare(unbound, chosen, resolved, beam, decided) if ran else chosen
