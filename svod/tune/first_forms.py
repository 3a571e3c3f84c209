"""First forms of the kernels of large plans: they answer until the kernels' own forms are compiled in the background.

    own form      the chain that `svod.tune.chains.choose` finds, and the compiler's full effort
    first form    the same chain, or where the heuristic would have to find it that of a quick choice, or the adapted chain of a relative;
                  the effort of a search

A quick choice prices a few sketches, which pack no constants if there are such. A chain of a relative, a kernel of the plan with the same
structure and other extents, is adapted in a small part of the time that a choice takes. It is not used if it makes much more code than the
relative has. Kernels whose own form is kept in the object cache need no first form. `svod.compile.plan.running.exchange` compiles the own
forms, and lets the plan change to them.

A small plan has no first forms (`is_large`): all cores compile its own forms in less than a second and pack its constants, and the
background thread would need longer, beside runs that are several times slower until then.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from svod.compile.plan.compiler import Chain, Choice
from svod.compile.plan.unbound_plan import UnboundPlan
from svod.config import PrepareConfig
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import LOOP, Scheduler
from svod.core.schedule.family import family_key
from svod.tune.chains import choose
from svod.tune.relatives import derived
from svod.tune.resolved import Resolved

LEAST_KERNELS = 24      # distinct kernels of a large plan
LEAST_CONSTANT_BYTES = 1 << 27  # bytes of constants from which on a plan is large: packing them takes as long as compiling a small plan
MOST_CODE = 2.0         # most positions computed side by side, as a multiple of the relative's
_OF_CHAINS = "heuristic", "database", "transfer", "lock"        # sources of chains that may have a first form


def has_first_forms(config: PrepareConfig) -> bool:
    """Whether a configuration allows that runs of a plan change to other code, as with first forms: not if they are switched off, or if the
    plan is searched or observed."""
    observed = config.debug, config.profile, config.trace, config.dump_after, config.perf_map, config.capture
    return config.first_forms is not False and config.beam is None and not any(observed)


def is_large(unbound: UnboundPlan) -> bool:
    """Whether a plan is so large that its kernels begin with first forms: it has many kernels, or sums over large constants, which are
    packed with the own forms."""
    if len(unbound.kernels) >= LEAST_KERNELS:
        return True
    summing = {key for key, kernel in unbound.kernels.items() if any(s.has_reduce for s in kernel.stages)}
    read = {number for c in unbound.calls if c.kernel in summing for number in c.args}
    return sum(unbound.buffers[i].nbytes for i in read if unbound.buffers[i].kind == "constant") >= LEAST_CONSTANT_BYTES


class FirstForms:
    """Chooses the forms that the kernels of one plan begin with."""

    def __init__(self, resolved: Resolved) -> None:
        self._resolved, self._compiler = resolved, resolved.compiler
        self._relatives: dict[str, Scheduler] = {}      # family → the state of its first kernel under its chain

    def choose(self, kernel: Kernel) -> Choice:
        """Choose the first form of a kernel, or its own form if that needs no compilation."""
        choice = choose(kernel, self._resolved, self.heuristic_choice)
        if choice.own is not None or choice.source not in _OF_CHAINS or self._compiler.has(kernel, choice):
            return choice
        return _first(choice, lambda: choice)

    def heuristic_choice(self, kernel: Kernel, why: str) -> Choice:
        """Return the choice of the heuristic's chain if it is known, otherwise one that is made sooner."""
        own: Callable[[], Choice] = partial(self._compiler.heuristic_choice, kernel, why)
        if self._compiler.knows_heuristic(kernel):
            return own()
        if (chain := self._kept_chain(kernel)) is not None:
            return _first(Choice(chain, "heuristic", why), own)
        state, family = Scheduler(kernel, self._compiler.target), family_key(kernel.ast)
        relative = self._relatives.get(family)
        found = None if relative is None else next(derived(state, tuple([tuple(o.to_json()) for o in relative.applied_opts])))
        if relative is None or found is None or _positions(found) > MOST_CODE * _positions(relative):
            found = self._compiler.backend.quick_choice(state)
            self._relatives.setdefault(family, found)
        return _first(Choice(found.applied_opts, "heuristic", why), own)

    def _kept_chain(self, kernel: Kernel) -> Chain | None:
        """The chain of the first form that is kept, unless its code was found wrong."""
        kept = self._compiler.first_chain(kernel)
        if kept is None:
            return None
        chain, linear = kept
        barred = self._resolved.db.barred(kernel.key, self._compiler.target.key)
        return None if self._compiler.pair.revision <= barred.get(linear, -1) else chain


def _first(choice: Choice, own: Callable[[], Choice]) -> Choice:
    return replace(choice, why=f"until the kernel's own form is compiled; {choice.why}", own=own)


def _positions(state: Scheduler) -> int:
    """The number of positions that the innermost code of a state computes side by side, for all stages together."""
    return math.prod(row.extent for row in state.rows if row.role != LOOP)
