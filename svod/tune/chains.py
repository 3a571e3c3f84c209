"""Which chain of opts a kernel gets when nothing is searched.

    explicit chain (PrepareConfig.opts) → SVOD_NOOPT: none → tuning database → heuristic
"""
from __future__ import annotations

from dataclasses import replace

from svod.compile.plan.compiler import Chain, Choice, Compiler
from svod.compile.plan.unbound_plan import UnboundPlan
from svod.config import PrepareConfig
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt
from svod.errors import ConfigError, KernelOptError
from svod.tune.db import TuningDB


def explicit_chain(kernel: Kernel, config: PrepareConfig) -> Chain | None:
    """The chain that PrepareConfig.opts gives for a kernel, by the longest prefix of its key."""
    matches = [k for k in config.opts if kernel.key.startswith(k)]
    if not matches:
        return None
    chain = config.opts[max(matches, key=len)]
    return parse_chain(chain) if isinstance(chain, str) else tuple(Opt.from_json(list(o)) for o in chain)


def opts_by_key(unbound: UnboundPlan, config: PrepareConfig) -> PrepareConfig:
    """The configuration with keys for names in `opts`. Raises ConfigError for a name or key that fits no kernel of the plan."""
    if not config.opts:
        return config
    names = {f"{c.name}_{i}": c.kernel for i, c in enumerate(unbound.calls) if c.kernel in unbound.kernels}
    unfit = [asked for asked in config.opts if asked not in names and not any(k.startswith(asked) for k in unbound.kernels)]
    if unfit:
        listed = ", ".join(f"{name} ({key[:12]})" for name, key in names.items())
        raise ConfigError(f"PrepareConfig(opts=…): {unfit[0]!r} fits no kernel of the plan; its kernels are {listed}")
    return replace(config, opts={names.get(asked, asked): chain for asked, chain in config.opts.items()})


def choose(kernel: Kernel, compiler: Compiler, config: PrepareConfig, db: TuningDB | None) -> Choice:
    """The chain without a search. Raises KernelOptError when an explicit chain does not apply."""
    chain = explicit_chain(kernel, config)
    if chain is not None:
        return Choice(chain, "explicit", "given by PrepareConfig.opts")
    if kernel.library_kernel is not None:
        return Choice((), "library", "a library kernel has one form")
    if config.noopt:
        return Choice((), "none", "SVOD_NOOPT: no opts")
    if db is not None:
        choice = _from_database(kernel, compiler, db)
        if isinstance(choice, Choice):
            return choice
        return Choice(compiler.heuristic(kernel), "heuristic", choice)
    return Choice(compiler.heuristic(kernel), "heuristic", "the tuning database is not consulted")


def _from_database(kernel: Kernel, compiler: Compiler, db: TuningDB) -> Choice | str:
    """The winner the database has for this kernel and target, or why there is none that may be used."""
    winner = db.winner(kernel.key, compiler.target.key)
    if winner is None:
        return f"the tuning database has no winner for kernel {kernel.key[:12]} on {compiler.target.key}"
    try:
        chain = tuple(Opt.from_json(list(o)) for o in winner.chain)
        linear = compiler.linear_of(kernel, chain)
    except KernelOptError as e:
        return f"the stored chain does not apply any more: {e}"
    if linear != winner.linear:
        return (f"the stored chain gives other code since it was verified (code generator {winner.codegen}, now {compiler.pair.revision}); "
                "tune again")
    return Choice(chain, "database", f"{winner.speedup:.2f}× the heuristic when it was confirmed")
