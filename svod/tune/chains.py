"""Which chain of opts a kernel gets when nothing is searched.

    explicit chain (PrepareConfig.opts) → SVOD_NOOPT: none → tuning database → heuristic
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from svod.compile.plan.compiler import Chain, Choice, Compiler
from svod.config import PrepareConfig
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt
from svod.errors import ConfigError, KernelOptError
from svod.tune.db import TuningDB


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
