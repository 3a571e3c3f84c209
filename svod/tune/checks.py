"""Chains that have to be measured on this machine before they are used: winners of other machines, and chains of related kernels.

`svod.tune.at_prepare` measures them when they are first needed, `svod-tune` before it searches, `svod-db verify` on request. Each runs a
search that has only these chains as candidates, with workers, a comparison of outputs and paired times. The results are recorded like any
other measurement of this machine. So a chain is measured once, and a chain that fails or is slower here is not used here, whatever its
records from elsewhere say.
"""
from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from svod.compile.plan.compiler import Chain, Choice
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.errors import KernelOptError
from svod.tune.chains import known_chains
from svod.tune.db.records import CHECK, TRANSFER
from svod.tune.relatives import is_compatible, seeds_of_relatives
from svod.tune.resolved import Resolved

MOST_CHECKED = 3        # most winners of other machines that are measured for one kernel, the best first


class Proposed(NamedTuple):
    """Chains to measure, and their source, CHECK (winners of other machines) or TRANSFER (relatives)."""

    chains: tuple[Chain, ...]
    strategy: str


def chains_to_check(kernels: Mapping[str, Kernel], choices: Mapping[str, Choice], resolved: Resolved) -> dict[str, Proposed]:
    """Kernel key → the chains to measure before the kernel uses them: winners of other machines, and, where nothing is searched, chains of
    relatives. `choices`: the chains that the kernels would use without measuring."""
    proposed: dict[str, Proposed] = {}
    for key, kernel in kernels.items():
        found = _first(choices[key].unchecked)
        if found is None and resolved.config.transfer and resolved.config.beam is None and choices[key].source == "heuristic":
            found = to_transfer(kernel, resolved)
        if found is not None:
            proposed[key] = found
    return proposed


def to_check(kernel: Kernel, resolved: Resolved) -> Proposed | None:
    """The winners of other machines that were not measured here and rank before the first chain that may be used; None if there are none,
    or if SVOD_IMPORTED asks for no check."""
    return _first(known_chains(kernel, resolved).unchecked)


def _first(unchecked: tuple[Chain, ...]) -> Proposed | None:
    return Proposed(unchecked[:MOST_CHECKED], CHECK) if unchecked else None


def to_transfer(kernel: Kernel, resolved: Resolved) -> Proposed | None:
    """Chains of related kernels, and of the kernel itself in the lock file for another number of threads, adapted to a kernel that has no
    winner in the database. None if the kernel has a winner, or if no chain is left that was not measured here. Relatives are taken from the
    user's records only; records that ship with svod seed searches, but would make every `prepare` slower."""
    target, db, compiler = resolved.target, resolved.db, resolved.compiler
    if kernel.library_kernel is not None or db.ranking(kernel.key, target.key):
        return None
    alike = is_compatible if resolved.config.similar_targets else None
    locked = [line for line in resolved.locked.values() if line.kernel == kernel.key and is_compatible(line.target, target)]
    seeds = seeds_of_relatives(Scheduler(kernel, target), db, compiler.backend, alike, shipped=False, locked=locked)
    tried = db.tried_here(kernel.key, target.key, compiler.pair.revision) if seeds else set[str]()
    chains: list[Chain] = []
    for state in seeds:
        with suppress(KernelOptError):
            linear = compiler.linear_of(kernel, state.applied_opts)
            if linear not in tried:
                tried.add(linear)
                chains.append(state.applied_opts)
    return Proposed(tuple(chains), TRANSFER) if chains else None
