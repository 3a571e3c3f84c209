"""Chains that were not measured here, and are to be before they are used: winners of others, and what did well on relatives.

`svod.tune.at_prepare` measures them when they are first needed, `svod-tune` before it searches, `svod-db verify` when it is told to. Each
does it as a search does, with the given chains alone: workers, comparison of numbers, paired times. The outcome is evidence like any other,
in the own layer. Hence a chain is measured once, and a chain that is slower here, or fails, is not used here, whatever others say.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from svod.compile.plan.compiler import Choice, Compiler
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.errors import KernelOptError
from svod.tune.chains import NOT_CHECKED, chain_of, objection
from svod.tune.db.records import CHECK, TRANSFER
from svod.tune.relatives import is_compatible, seeds_of_relatives
from svod.tune.resolved import Resolved

MOST_CHECKED = 3        # chains of others for one kernel that are measured, the best first


class Proposed(NamedTuple):
    """Chains to measure: the states they lead to, and who proposed them (`CHECK`, `TRANSFER`)."""

    states: tuple[Scheduler, ...]
    strategy: str


def chains_to_check(kernels: Mapping[str, Kernel], choices: Mapping[str, Choice], resolved: Resolved) -> dict[str, Proposed]:
    """The chains that are measured before these kernels use them, by kernel: winners of others, and, where nothing is searched, what did
    well on relatives. `choices`: the chains that are known."""
    proposed: dict[str, Proposed] = {}
    for key, choice in choices.items():
        found = to_check(kernels[key], resolved) if choice.source in ("heuristic", "database", "transfer") else None
        if found is None and resolved.config.transfer and resolved.config.beam is None and choice.source == "heuristic":
            found = to_transfer(kernels[key], resolved)
        if found is not None:
            proposed[key] = found
    return proposed


def to_check(kernel: Kernel, resolved: Resolved) -> Proposed | None:
    """The winners of others that rank before every chain that may be used today, and were not measured here; None: there are none, or
    SVOD_IMPORTED asks for no check."""
    base, states = Scheduler(kernel, resolved.target), []
    for winner in resolved.db.ranking(kernel.key, resolved.target.key):
        problem = objection(winner, kernel, resolved)
        if problem is None:
            break
        if problem == NOT_CHECKED:
            states.append(apply_opts(base, chain_of(winner.chain)))
    return Proposed(tuple(states[:MOST_CHECKED]), CHECK) if states else None


def to_transfer(kernel: Kernel, resolved: Resolved) -> Proposed | None:
    """Chains of related kernels, re-derived for a kernel without a winner in the database; None: none that was not measured here yet.
    Relatives are kernels of the user's records: those that ship with svod seed searches, and cost no `prepare` its time."""
    target, db = resolved.target, resolved.db
    if kernel.library_kernel is not None or db.ranking(kernel.key, target.key):
        return None
    alike = is_compatible if resolved.config.similar_targets else None
    seeds = seeds_of_relatives(Scheduler(kernel, target), db, alike, shipped=False)
    if not seeds:
        return None
    tried = db.tried_here(kernel.key, target.key, resolved.compiler.pair.revision)
    states = tuple(_untried(seeds, kernel, resolved.compiler, tried))
    return Proposed(states, TRANSFER) if states else None


def _untried(states: Iterable[Scheduler], kernel: Kernel, compiler: Compiler, tried: set[str]) -> Iterable[Scheduler]:
    for state in states:
        try:
            linear = compiler.linear_of(kernel, state.applied_opts)
        except KernelOptError:
            continue
        if linear not in tried:
            tried.add(linear)
            yield state
