"""Which chain of opts a kernel gets when nothing is searched.

    explicit chain (PrepareConfig.opts) → SVOD_NOOPT: none → lock file → tuning database → heuristic

A chain of others' records is used when it was measured here (`svod.tune.checks`), or where SVOD_IMPORTED=trust says so. One that was not
measured here, of a lock file or of such records, is not used where the cost model predicts that it takes several times what the heuristic's
does: a mistake or a forgery.
"""
from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from svod.compile.plan.compiler import Chain, Choice, Compiler
from svod.config import PrepareConfig, log_once
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.errors import ConfigError, KernelOptError
from svod.system.quantities import count
from svod.tune.db import OWN, TuningDB, Winner
from svod.tune.db.records import TRANSFER
from svod.tune.lock import Locked, locked_lines

log = logging.getLogger("svod.tune")

NOT_CHECKED = "the chain was measured elsewhere and has not been checked here yet; the next prepare, svod-tune or svod-db verify does"
MOST_TARGETS = 2        # most targets of a lock file that are named
SUSPICIOUS = 4.0        # The cost model is within this factor for sensible chains; forged ones were up to 1,278 times slower.


def chain_of(given: Sequence[Any] | str) -> Chain:
    """A chain as `PrepareConfig.opts` takes it: text, or a sequence of [op, axis, argument]. Raises KernelOptError."""
    return parse_chain(given) if isinstance(given, str) else tuple(Opt.from_json(list(o)) for o in given)


def opts_by_key(opts: Mapping[str, Sequence[Any] | str], kernels: Sequence[tuple[str, str]]) -> dict[str, Chain]:
    """The chains of `PrepareConfig.opts` by whole kernel key. `kernels`: the name and the key of each kernel of a plan. A name wins over
    the beginning of a key, a longer beginning over a shorter one.

    Raises ConfigError for chains that fit no kernel of the plan, KernelOptError for what is no chain."""
    ranked: dict[str, tuple[float, Chain]] = {}
    for asked, given in opts.items():
        chain = chain_of(given)
        fits = [(float("inf") if asked == name else len(asked), key) for name, key in kernels if asked == name or key.startswith(asked)]
        if not fits:
            raise ConfigError(f"PrepareConfig(opts=…): {asked!r} fits no kernel of the plan; {describe_kernels(kernels)}")
        for rank, key in fits:
            if key not in ranked or rank > ranked[key][0]:
                ranked[key] = rank, chain
    return {key: chain for key, (_, chain) in ranked.items()}


def describe_kernels(kernels: Sequence[tuple[str, str]]) -> str:
    """For an error: the names and the keys of a plan's kernels, at most 12 of them."""
    if not kernels:
        return "the plan has none: its tensors are computed already, or need no kernel; build the graph anew from its inputs"
    shown = ", ".join(f"{name} ({key[:12]})" for name, key in kernels[:12])
    return f"its kernels are {shown}" + (f" and {len(kernels) - 12} more" if len(kernels) > 12 else "")


def choose(kernel: Kernel, compiler: Compiler, config: PrepareConfig, db: TuningDB | None) -> Choice:
    """The chain without a search; `config.opts` has whole keys here (`opts_by_key`).

    Raises KernelOptError when an explicit chain does not apply."""
    if kernel.key in config.opts:
        return Choice(chain_of(config.opts[kernel.key]), "explicit", "given by PrepareConfig.opts")
    if kernel.library_kernel is not None:
        return Choice((), "library", "a library kernel has one form")
    if config.noopt:
        return Choice((), "none", "SVOD_NOOPT: no opts")
    if config.lock is not None and (chain := _from_lock(kernel, compiler, config.lock, db)) is not None:
        return Choice(chain, "lock", f"from {config.lock}")
    if db is not None:
        winner = usable_winner(kernel, compiler, db, config.imported)
        if isinstance(winner, str):
            return Choice(compiler.heuristic(kernel), "heuristic", winner)
        if winner.strategy == TRANSFER:
            if winner.own:
                return Choice(chain_of(winner.chain), "heuristic", "no chain of its relatives is faster here")
            return Choice(chain_of(winner.chain), "transfer", f"a relative's, {winner.speedup:.2f}× the heuristic when it was checked")
        return Choice(chain_of(winner.chain), "database", f"{winner.speedup:.2f}× the heuristic when it was confirmed")
    return Choice(compiler.heuristic(kernel), "heuristic", "the tuning database is not consulted")


def usable_winner(kernel: Kernel, compiler: Compiler, db: TuningDB, imported: str) -> Winner | str:
    """The best chain that the database has for this kernel and target and that may be used today, or why there is none."""
    reasons = []
    for winner in db.ranking(kernel.key, compiler.target.key):
        reason = objection(winner, kernel, compiler, db, imported)
        if reason is None:
            return winner
        reasons.append(reason)
    return reasons[0] if reasons else f"the tuning database has no winner for kernel {kernel.key[:12]} on {compiler.target.key}"


def winner_in_use(kernel: Kernel, compiler: Compiler, db: TuningDB, imported: str) -> Winner | None:
    """The winner whose chain `choose` takes from the database, or None."""
    winner = usable_winner(kernel, compiler, db, imported)
    return None if isinstance(winner, str) else winner


def objection(winner: Winner, kernel: Kernel, compiler: Compiler, db: TuningDB, imported: str) -> str | None:
    """Why a chain of the database may not be used today; None: it may. `imported`: as in PrepareConfig. `NOT_CHECKED`: nothing else speaks
    against it."""
    foreign = winner.layer != OWN
    if foreign and imported == "ignore":
        return "the chain was measured elsewhere, and SVOD_IMPORTED=ignore uses none of these"
    if winner.slower_here:
        return "the chain of others is slower than the heuristic here"
    try:
        chain = chain_of(winner.chain)
        suspicion = _suspicion(kernel, chain, compiler) if foreign else None
        if suspicion is not None:       # before it is lowered, which may take as long as it likes
            return f"a chain of others {suspicion}; a search measures it here"
        linear = compiler.linear_of(kernel, chain)
    except KernelOptError as e:
        return f"the stored chain does not apply any more: {e}"
    if linear != winner.linear:
        return (f"the stored chain gives other code since it was verified (code generator {winner.codegen}, now {compiler.pair.revision}); "
                "tune again")
    if not foreign or imported == "trust":
        return None
    if linear in db.tried_here(kernel.key, compiler.target.key, compiler.pair.revision):
        return "the chain of others was not confirmed when it was checked here"
    return NOT_CHECKED


def _suspicion(kernel: Kernel, chain: Chain, compiler: Compiler) -> str | None:
    """Why a chain that was not measured here is not trusted; None: it is. Raises KernelOptError where it does not apply."""
    base = Scheduler(kernel, compiler.target)
    cost = compiler.backend.cost
    times = cost(apply_opts(base, chain)).cycles / cost(apply_opts(base, compiler.heuristic(kernel))).cycles
    if times <= SUSPICIOUS:
        return None
    return f"is predicted to take {times:.3g} times what the heuristic's does"


def _say_other_targets(lines: Iterable[Locked], target: Target, path: str) -> None:
    """Say once that a lock file has lines, but for other targets alone."""
    targets = Counter(line.target for line in lines)
    if targets and target.key not in targets:
        most = ", ".join(f"{count(n, 'kernel')} for {key}" for key, n in targets.most_common(MOST_TARGETS))
        more = f" and others for {count(len(targets) - MOST_TARGETS, 'more target')}" if len(targets) > MOST_TARGETS else ""
        log_once(log, logging.WARNING, f"the lock file {path} has {most}{more}, none for this machine's {target.key}; svod-tune -o "
                                       "adds its lines, and SVOD_THREADS and the cores that a process may use belong to a target")


def _from_lock(kernel: Kernel, compiler: Compiler, path: str, db: TuningDB | None) -> Chain | None:
    """The chain that a lock file has for this kernel and target, or None. One that cannot be used is said once."""
    lines = locked_lines(path)
    locked = lines.get((kernel.key, compiler.target.key))
    if locked is None:
        _say_other_targets(lines.values(), compiler.target, path)
        return None
    chain = locked.chain
    try:
        problem = _suspicion(kernel, chain, compiler)
        if problem is None and db is not None and _is_barred(kernel, chain, compiler, db):
            problem = "was found wrong or was retracted, as the tuning database has it"
    except KernelOptError as e:
        problem = f"does not apply: {e}"
    if problem is None:
        return chain
    log_once(log, logging.WARNING, f"the lock file {path}, kernel {kernel.key[:12]}: its chain {problem}, and is not used")
    return None


def _is_barred(kernel: Kernel, chain: Chain, compiler: Compiler, db: TuningDB) -> bool:
    """Whether what the database knows forbids the code that a chain gives today. Raises KernelOptError where the chain does not apply."""
    barred = db.barred(kernel.key, compiler.target.key)
    return bool(barred) and compiler.pair.revision <= barred.get(compiler.linear_of(kernel, chain), -1)
