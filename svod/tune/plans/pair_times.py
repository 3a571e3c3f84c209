"""The records that decide between two ways to compute: the forms of a convolution (`FormTimes`), a plan and its alternatives (`PlanTimes`).

    a line of the lock file → records of the tuning database → neither: the prediction of a convolution's form, the rules of a plan

Among records this machine's own go before others, those of a quiet machine before those of a busy one, and newer before older.
A record counts for the code generator that made its kernels, and until it is retracted. Of the database's records that count the first one
decides that is of a quiet machine, or whose interval of the ratio does not include 1; without one, the two ways tie. Ties go to the first.
"""
from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from svod.config import log_once
from svod.core.convolution.by_fourier import Lengths
from svod.system.quantities import count
from svod.system.quantities import seconds as duration
from svod.tune.db import OWN, FormTimes, PairTimes, PlanTimes
from svod.tune.resolved import Resolved

log = logging.getLogger("svod.tune")

C = TypeVar("C", bound=PairTimes)


def deciding_record(kind: type[C], key: str, resolved: Resolved, timed: C | None = None,
                    objection: Callable[[C, bool], str | None] = lambda record, is_own: None) -> C | None:
    """The record that decides about what has a key; None where there is none. `timed`: an own record that was just made, which counts also
    where it could not be stored. `objection`: why a record without a fault does not count, or None; it is given the record, and whether it
    is one of this machine's own. Where none of the lock file's lines counts, one warning says why."""
    config, target, revision = resolved.config, resolved.target.key, resolved.compiler.pair.revision
    locked = locked_records(kind, key, resolved) if config.capture is None else []      # a capture has what is predicted, or by the rules
    pairs = resolved.db.select(kind, key, target, shipped=True) if config.consults_database else []
    if timed is not None:
        pairs = [*(pair for pair in pairs if pair[0].id != timed.id), (timed, OWN)]
    in_order = sorted(pairs, key=lambda pair: (pair[1] != OWN, pair[0].noisy, -pair[0].taken_at))
    stored = [r for r, layer in in_order if layer == OWN or config.imported != "ignore"]
    if not locked and not stored:
        return None
    own, barred = {r.id for r, layer in pairs if layer == OWN}, resolved.db.barred(key, target)

    def reason(r: C) -> str | None:
        return fault(r, revision, barred) or objection(r, r.id in own)
    of_lock = [(r, reason(r)) for r in reversed(locked)]
    if by_lock := [r for r, why in of_lock if why is None]:
        return by_lock[0]
    _say_unused(of_lock, config.lock)
    by_database = [r for r in stored if reason(r) is None]
    return next((r for r in by_database if r.is_decided or not r.noisy), by_database[0] if by_database else None)


def locked_records(kind: type[C], key: str, resolved: Resolved) -> list[C]:
    """The records of the lock file about what has a key."""
    return [x.record for x in resolved.times if isinstance(x.record, kind) and (x.kernel, x.target) == (key, resolved.target.key)]


def _say_unused(records: Sequence[tuple[C, str | None]], path: str | None) -> None:
    """Warn once of each reason for which records of a lock file do not count."""
    for r, reason in records:
        of = "a plan's alternatives" if isinstance(r, PlanTimes) else "a convolution's forms"
        log_once(log, logging.WARNING, f"the lock file {path}: a line with the times of {of} is not used: {reason}")


def fault(r: PairTimes, revision: int, barred: Mapping[str, int]) -> str | None:
    """Why a record does not count; None if it does. `revision`: that of the code generator now; `barred`: those up to which what it
    compares was retracted (`TuningDB.barred`)."""
    if r.codegen != revision:
        return f"it was measured with code generator {r.codegen}, now {revision}"
    return "it was retracted" if revision <= barred.get(r.linear, -1) else None


def form_words(lengths: Lengths | None) -> str:
    """The transformed form of a convolution with these block lengths, in words; None: its direct form."""
    return "directly" if lengths is None else f"by transforms of blocks of {'×'.join(map(str, lengths))}"


def ways(r: PairTimes) -> tuple[str, str]:
    """The two ways of a record, in words."""
    if isinstance(r, FormTimes):
        return form_words(None), form_words(r.lengths)
    assert isinstance(r, PlanTimes)
    return "by the rules", f"with {count(len(r.alternatives), 'alternative')}"


def chosen_words(r: PairTimes) -> str:
    """The faster one of the two ways of a record, in words."""
    return ways(r)[r.is_faster]


def times_words(r: PairTimes) -> str:
    """What the two ways took, in words."""
    first, second = ways(r)
    compared = f"({r.ratio:.2f}×, 95 % interval {r.ratio_low:.2f}–{r.ratio_high:.2f}×{', on a busy machine' * r.noisy})"
    if isinstance(r, FormTimes):
        return f"measured in a plan: {first} {duration(r.direct)}, {second} {duration(r.transformed)} {compared}"
    assert isinstance(r, PlanTimes)
    rest = f"{second} {duration(r.otherwise)} {compared}" if r.alternatives else "and no alternative was faster"
    untried = f"; {r.untried} were not tried, as the budget was spent" if r.untried else ""
    return f"measured: {first} {duration(r.by_rules)}, {rest}{untried}"


def alternative_lines(r: PairTimes) -> list[str]:
    """What a plan does otherwise than by the rules, by the record about it, in words, a line for each kind; [] for a convolution."""
    done = Counter(a.partition(" ")[2] for a in r.alternatives if r.is_faster) if isinstance(r, PlanTimes) else Counter[str]()
    return [f"{words}{f', {n} times' * (n > 1)}" for words, n in sorted(done.items())]
