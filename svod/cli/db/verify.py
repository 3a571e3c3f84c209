"""Measures chains from other machines on this one for `svod-db verify`, and prints a table of the results."""
from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from svod import config
from svod.cli.db.listing import SHOWN_KEY, print_with_chains
from svod.cli.tune.waiting import say, waiting
from svod.compile.backend import target_with
from svod.core.ir.serialize import data_to_ast
from svod.core.kernel.chain_text import chain_words
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target
from svod.errors import SvodError
from svod.system.quantities import count, times
from svod.tune.chains import fault, known_chains
from svod.tune.checks import Proposed, to_check
from svod.tune.db import LAYER_NAMES, SHIPPED, KernelRecord, Measurement, TuningDB, Winner, described
from svod.tune.db.records import CHECK
from svod.tune.resolved import Resolved
from svod.tune.search.budget import ModelBudget
from svod.tune.session import KernelTask, TuneSession
from svod.tune.workers.start import make_executor

KERNEL_CONFIRM_SECONDS = 0.5    # seconds of the confirmation of one kernel


class Checked(NamedTuple):
    """A checked kernel. `before`: its winner before the check; `after`: the winner after it, or the reason why there is none."""

    name: str
    before: Winner
    after: Winner | str


def verify(db: TuningDB, kernels: Collection[str], budget: float, *, every: bool) -> list[Checked]:
    """Measure on this machine the chains from other machines, or with `every` those of all winners, for the kernels with the keys `kernels`
    (empty: for all), within `budget` seconds. Raises DatabaseError, and TuneError where no worker starts."""
    checked: list[Checked] = []
    for target, tasks in _tasks_by_target(db, kernels, every).items():
        before = {t.key: db.ranking(t.key, target.key)[0] for t in tasks}
        what = f"checking {count(len(tasks), 'kernel')}"
        with waiting(what, "svod-db"), make_executor("local", device=target.device, say=say) as executor:
            bench = config.BenchConfig.from_env(seconds=KERNEL_CONFIRM_SECONDS)
            TuneSession(tasks, target, executor=executor, db=db, config=config.BeamConfig.from_env(width=4), bench=bench,
                        budget=ModelBudget(budget)).run()
        after = [known_chains(t.kernel, _resolved(target, db)) for t in tasks]
        checked += [Checked(t.name, before[t.key], known.winner or known.why) for t, known in zip(tasks, after, strict=True)]
    return checked


def _tasks_by_target(db: TuningDB, kernels: Collection[str], every: bool) -> dict[Target, list[KernelTask]]:
    """The kernels to measure, by target, for the targets that this machine has."""
    places: dict[str, set[str]] = {}        # target → keys of the kernels with a confirmation there
    expected: dict[str, set[str]] = {}      # `places` without records that ship with svod: these may be for other machines
    for m, layer in db.select(Measurement, shipped=True):
        if m.step == "confirm" and (not kernels or m.kernel in kernels):
            places.setdefault(m.target, set()).add(m.kernel)
            if layer != SHIPPED or kernels:
                expected.setdefault(m.target, set()).add(m.kernel)
    descriptions = described(db, shipped=True)
    tasks: dict[Target, list[KernelTask]] = {}
    for key in sorted(places):
        target = target_with(key)
        if target is None:
            if key in expected:
                say(f"svod-db: {count(len(expected[key]), 'kernel')} of {key} cannot be checked here")
            continue
        resolved = _resolved(target, db)
        for kernel, name in _kernels(sorted(places[key]), descriptions):
            proposed = _winner(kernel, resolved) if every else to_check(kernel, resolved)
            if proposed is not None:
                tasks.setdefault(target, []).append(KernelTask(kernel, name=name, given=proposed.chains, strategy=proposed.strategy))
    return tasks


def _kernels(keys: list[str], descriptions: dict[str, KernelRecord]) -> Iterator[tuple[Kernel, str]]:
    """The kernels with these keys, and their names, from the database's descriptions. A kernel whose description is missing, damaged or
    that of another kernel is reported and left out."""
    for key in keys:
        try:
            kernel = Kernel(data_to_ast(descriptions[key].ast)) if key in descriptions else None
        except SvodError as e:
            say(f"svod-db: {key[:SHOWN_KEY]} cannot be checked, its description is damaged: {e}")
            continue
        if kernel is None or kernel.key != key:
            say(f"svod-db: {key[:SHOWN_KEY]} cannot be checked: " + ("the database lacks its description" if kernel is None else
                                                                   "its description is of another kernel; svod-db rekey mends old keys"))
        else:
            yield kernel, descriptions[key].name


def _resolved(target: Target, db: TuningDB) -> Resolved:
    """The resolved configuration for checking chains on a target. Environment variables for searches, captures and imports are ignored."""
    return Resolved.of(config.PrepareConfig.from_env(beam=None, capture=None, imported="check"), target, db)


def _winner(kernel: Kernel, resolved: Resolved) -> Proposed | None:
    """The best chain of the database that can be used, wherever it was measured, as a chain to measure; None if there is none."""
    for winner in resolved.db.ranking(kernel.key, resolved.target.key):
        if fault(winner, kernel, resolved.compiler) is None:
            return Proposed((winner.opts,), CHECK)
    return None


def print_checked(rows: list[Checked]) -> int:
    """Print the verdicts on the chains. Returns the number of chains that are not used."""
    refused = 0
    lines, chains = [], []
    for row in rows:
        used = not isinstance(row.after, str) and row.after.linear == row.before.linear
        refused += not used
        said = "used" if used else row.after if isinstance(row.after, str) else f"another is faster here: {chain_words(row.after.chain)}"
        now = "" if isinstance(row.after, str) else times(row.after.speedup)
        lines.append((row.before.kernel[:SHOWN_KEY], row.name, LAYER_NAMES[row.before.layer], times(row.before.speedup), now, said))
        chains.append(chain_words(row.before.chain))
    print_with_chains(("kernel", "name", "layer", "recorded", "now", ""), lines, chains, right={"recorded", "now"})
    return refused
