"""Applies opts to states: `apply_opt(state, opt)` returns a new state and leaves the AST and the old state unchanged."""
from __future__ import annotations

from collections.abc import Iterable

from svod.core.kernel.groups import keep_threads
from svod.core.kernel.layout import layouts
from svod.core.kernel.opts import ALGORITHMS, OPTS
from svod.core.kernel.opts.sums import check_sums
from svod.core.kernel.placement import place_stages
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import SAME
from svod.errors import KernelOptError


def apply_opt(state: Scheduler, opt: Opt) -> Scheduler:
    """The state after `opt`. Raises KernelOptError with the reason if the opt does not apply."""
    rule = OPTS.get(opt.op)
    if rule is None:
        raise KernelOptError(f"{opt.op} is not an opt; svod has {', '.join(sorted(OPTS))}")
    new = rule(state, opt.axis, opt.arg)
    if new.target.numerics == SAME and (new.order, new.rows, new.split_reduce, new.pads, new.dots, new.rewrites) != (
            state.order, state.rows, state.split_reduce, state.pads, state.dots, state.rewrites):
        check_sums(new)
    if new.kernel is state.kernel and (new.order, new.place, new.split_reduce) == (state.order, state.place, state.split_reduce):
        # No stage moved, and no loop of several iterations appeared, vanished or moved, so the placement is the same: see `place_stages`.
        place_stages.give(new, place_stages.known(state))
        if new.rows is state.rows and (new.vector_rows, new.dots, new.pads) == (state.vector_rows, state.dots, state.pads):
            layouts.give(new, layouts.known(state))
    elif any(type(p) is int for p in new.place):
        place_stages(new)   # raises if a loop that moved no longer holds the readers of a stage placed in it
    keep_threads(state, new)
    new.applied_opts = (*state.applied_opts, opt)
    return new


def apply_opts(state: Scheduler, opts: Iterable[Opt]) -> Scheduler:
    """The state after all opts of a chain, in order. Raises KernelOptError for the first opt that does not apply."""
    for opt in opts:
        state = apply_opt(state, opt)
    return state


def algorithm_of(chain: Iterable[Opt]) -> tuple[Opt, ...]:
    """The opts of a chain by which the kernel computes with other roundings than its AST."""
    return tuple([opt for opt in chain if opt.op in ALGORITHMS])


def is_rounded(chain: Iterable[Opt]) -> bool:
    """Whether a chain rounds factors of products, which the policy "fast" alone allows."""
    return any(opt.op == "ROUND" for opt in chain)
