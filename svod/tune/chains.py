"""The choice of a kernel's chain of opts without a search. The first source in this order that has a chain decides:

    SVOD_NOOPT (no opts) → lock file → tuning database → heuristic

A chain that is given for a kernel (PrepareConfig.opts) goes before all of them (`svod.tune.plan_chains`).

A chain from the records of other machines is used only after it was measured on this one (`svod.tune.checks`), or with SVOD_IMPORTED=trust.
Records that ship with svod need no such measurement: it would take longer than the first run of most models. A chain that was not measured
here, from a lock file or from such records, is not used if the cost model predicts that it takes more than SUSPICIOUS times as long as the
heuristic's: such a chain is a mistake or a forgery.
"""
from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from svod.compile.plan.compiler import Chain, Choice, Compiler
from svod.compile.plan.unbound_plan import UnboundPlan
from svod.config import log_once
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target
from svod.errors import ConfigError, KernelOptError
from svod.system.quantities import count
from svod.tune.db import OWN, SHIPPED, Winner
from svod.tune.db.records import TRANSFER
from svod.tune.lock import Locked
from svod.tune.relatives import is_compatible
from svod.tune.resolved import Resolved

log = logging.getLogger("svod.tune")

NOT_CHECKED = "the chain was measured elsewhere and has not been checked here yet; the next prepare, svod-tune or svod-db verify does"
MOST_TARGETS = 2        # most targets of a lock file that a warning names
MOST_LINES_PER_KERNEL = 2       # a lock file with more lines for each kernel of a process may be that of a plan which is still to come
_kernels_beside: dict[str, set[str]] = {}       # lock file → the kernels of this process that it could have lines for
SUSPICIOUS = 4.0        # most predicted time of a chain not measured here, as a multiple of the heuristic's; forged chains reached 1,278


def opts_by_key(opts: Mapping[str, Chain], unbound: UnboundPlan) -> dict[str, Chain]:
    """The chains of `opts` by full kernel key. `opts` maps kernels' names in the plan, or prefixes of kernel keys, to chains. If several
    entries fit a kernel, its name wins over prefixes, and a longer prefix over a shorter one. Raises ConfigError for an entry that fits
    no kernel of the plan."""
    kernels = [(name, c.kernel) for name, c in zip(unbound.names, unbound.calls, strict=True) if c.kernel in unbound.kernels]
    ranked: dict[str, tuple[float, Chain]] = {}
    for asked, chain in opts.items():
        fits = [(float("inf") if asked == name else len(asked), key) for name, key in kernels if asked == name or key.startswith(asked)]
        if not fits:
            raise ConfigError(f"PrepareConfig(opts=…): {asked!r} fits no kernel of the plan; {describe_kernels(kernels)}")
        for rank, key in fits:
            if key not in ranked or rank > ranked[key][0]:
                ranked[key] = rank, chain
    return {key: chain for key, (_, chain) in ranked.items()}


def describe_kernels(kernels: Sequence[tuple[str, str]]) -> str:
    """The names and keys of a plan's kernels, at most 12 of them, as text for an error message."""
    if not kernels:
        return "the plan has none: its tensors are computed already, or need no kernel; build the graph anew from its inputs"
    shown = ", ".join(f"{name} ({key[:12]})" for name, key in kernels[:12])
    return f"its kernels are {shown}" + (f" and {len(kernels) - 12} more" if len(kernels) > 12 else "")


def choose(kernel: Kernel, resolved: Resolved, heuristic: Callable[[Kernel, str], Choice] | None = None) -> Choice:
    """Choose a kernel's chain without a search, by the order in the module's docstring. `heuristic`: chooses the heuristic's chain for a
    reason; None: the compiler does."""
    config = resolved.config
    if kernel.library_kernel is not None:
        return Choice((), "library", "a library kernel has one form")
    if config.noopt:
        return Choice((), "none", "SVOD_NOOPT: no opts")
    if (chain := _from_lock(kernel, resolved)) is not None:
        return Choice(chain, "lock", f"from {config.lock}")
    winner, why, unchecked = known_chains(kernel, resolved) if config.consults_database else NOT_CONSULTED
    if winner is None:
        return replace((heuristic or resolved.compiler.heuristic_choice)(kernel, why), unchecked=unchecked)
    if winner.strategy != TRANSFER:
        return Choice(winner.opts, "database", f"{winner.speedup:.2f}× the heuristic when it was confirmed", unchecked=unchecked)
    if winner.own:
        why = "no chain of its relatives is faster here"
        best = resolved.compiler.heuristic_choice(kernel, why)
        found = best if best.chain == winner.opts else Choice(winner.opts, "heuristic", why)
        return replace(found, unchecked=unchecked)
    return Choice(winner.opts, "transfer", f"a relative's, {winner.speedup:.2f}× the heuristic when it was checked", unchecked=unchecked)


def choose_each(kernels: Mapping[str, Kernel], resolved: Resolved) -> dict[str, Choice]:
    """The result of `choose` for each of the kernels, by their keys."""
    return {key: choose(kernel, resolved) for key, kernel in kernels.items()}


class Known(NamedTuple):
    """The chains of the database for a kernel and a target. `winner`: the best one that may be used; None: there is none, for the reason
    `why`. `unchecked`: the better ones that were measured on other machines, and not on this one yet."""

    winner: Winner | None
    why: str
    unchecked: tuple[Chain, ...]


NOT_CONSULTED = Known(None, "the tuning database is not consulted", ())


def known_chains(kernel: Kernel, resolved: Resolved) -> Known:
    """The chains that the database has for a kernel."""
    target, unchecked, reasons = resolved.target.key, list[Chain](), list[str]()
    for winner in resolved.db.ranking(kernel.key, target):
        reason = objection(winner, kernel, resolved)
        if reason is None:
            return Known(winner, "", tuple(unchecked))
        if reason == NOT_CHECKED:
            unchecked.append(winner.opts)
        reasons.append(reason)
    why = reasons[0] if reasons else f"the tuning database has no winner for kernel {kernel.key[:12]} on {target}"
    return Known(None, why, tuple(unchecked))


def objection(winner: Winner, kernel: Kernel, resolved: Resolved) -> str | None:
    """Why a chain of the database may not be used; None if it may. NOT_CHECKED if the only reason is that it was not measured here yet."""
    foreign, compiler = winner.layer != OWN, resolved.compiler
    if foreign and resolved.config.imported == "ignore":
        return "the chain was measured elsewhere, and SVOD_IMPORTED=ignore uses none of these"
    reason = fault(winner, kernel, compiler)
    if reason is not None or not foreign or resolved.config.imported == "trust":
        return reason
    if winner.linear in resolved.db.tried_here(kernel.key, compiler.target.key, compiler.pair.revision):
        return "the chain of others was not confirmed when it was checked here"
    return None if winner.layer == SHIPPED else NOT_CHECKED


def fault(winner: Winner, kernel: Kernel, compiler: Compiler) -> str | None:
    """Why a chain of the database cannot be used, wherever it was measured; None if there is no such reason."""
    if winner.slower_here:
        return "the chain of others is slower than the heuristic here"
    try:
        suspicion = _suspicion(kernel, winner.opts, compiler) if winner.layer != OWN else None
        if suspicion is not None:       # returned before lowering, which may take very long for such a chain
            return f"a chain of others {suspicion}; a search measures it here"
        linear = compiler.linear_of(kernel, winner.opts)
    except KernelOptError as e:
        return f"the stored chain does not apply any more: {e}"
    if linear != winner.linear:
        return (f"the stored chain gives other code since it was verified (code generator {winner.codegen}, now {compiler.pair.revision}); "
                "tune again")
    return None


def _suspicion(kernel: Kernel, chain: Chain, compiler: Compiler) -> str | None:
    """Why a chain that was not measured here is not trusted: its predicted time. None if it is trusted. Raises KernelOptError where it does
    not apply."""
    times = compiler.predicted_times(kernel, chain)
    if times <= SUSPICIOUS:
        return None
    return f"is predicted to take {times:.3g} times what the heuristic's does"


def _say_other_targets(lines: Iterable[Locked], target: Target, path: str | None) -> None:
    """Warn once if all lines of a lock file are for other targets."""
    targets = Counter(line.target for line in lines)
    if targets and target.key not in targets:
        most = ", ".join(f"{count(n, 'kernel')} for {key}" for key, n in targets.most_common(MOST_TARGETS))
        more = f" and others for {count(len(targets) - MOST_TARGETS, 'more target')}" if len(targets) > MOST_TARGETS else ""
        near = "; those for other threads are checked before they are used" if any(is_compatible(t, target) for t in targets) else ""
        log_once(log, logging.WARNING, f"the lock file {path} has {most}{more}, none for this machine's {target.key}{near}; svod-tune -o "
                                       "adds its lines, and SVOD_THREADS and the cores that a process may use belong to a target")


def say_unused_lock(kernels: Mapping[str, Kernel], resolved: Resolved) -> None:
    """Warn once if a lock file has lines for this machine, and the kernels of this process, as soon as they are many beside its lines,
    have had none. A program may have small plans before that of the model which the file is for."""
    path, target = resolved.config.lock, resolved.target.key
    ours = {key for key, of in resolved.locked if of == target}
    if path is None or not ours:
        return
    seen = _kernels_beside.setdefault(path, set())
    seen.update(key for key, kernel in kernels.items() if kernel.library_kernel is None)
    if not ours & seen and len(ours) <= MOST_LINES_PER_KERNEL * len(seen):
        log_once(log, logging.WARNING, f"the lock file {path} has {count(len(ours), 'kernel')} for this machine, and so far none of this "
                                       "program's: it is for another model, for other sizes or types, or from before a change of svod")


def _from_lock(kernel: Kernel, resolved: Resolved) -> Chain | None:
    """The chain that the lock file has for this kernel and target, or None. A chain that cannot be used is reported once, as a warning."""
    path, target = resolved.config.lock, resolved.target
    locked = resolved.locked.get((kernel.key, target.key))
    if locked is None:
        _say_other_targets(resolved.locked.values(), target, path)
        return None
    problem = foreign_fault(kernel, locked.chain, resolved)
    if problem is None:
        return locked.chain
    log_once(log, logging.WARNING, f"the lock file {path}, kernel {kernel.key[:12]}: its chain {problem}, and is not used")
    return None


def foreign_fault(kernel: Kernel, chain: Chain, resolved: Resolved, linear: str | None = None) -> str | None:
    """Why a kernel's chain that was not measured here may not be used; None if it may. `linear`: the digest of the code that it gave."""
    try:        # the prediction comes first: lowering may take very long for a chain that is refused for it
        return _suspicion(kernel, chain, resolved.compiler) or own_fault(kernel, chain, resolved, linear)
    except KernelOptError as e:
        return f"does not apply: {e}"


def own_fault(kernel: Kernel, chain: Chain, resolved: Resolved, linear: str | None = None) -> str | None:
    """Why a kernel's chain that was measured here may not be used any more; None if it may. `linear`: the digest of the code that it gave.
    Raises KernelOptError where the chain does not apply."""
    compiler, barred = resolved.compiler, resolved.db.barred(kernel.key, resolved.target.key)
    if linear is None and not barred:
        return None
    now = compiler.linear_of(kernel, chain)
    if linear not in (None, now):
        return "gives other code since it was chosen"
    return "was found wrong or was retracted, as the tuning database has it" if compiler.pair.revision <= barred.get(now, -1) else None
