"""Why a kernel has the chain it has, or none: the nearest record and the first field that differs."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from svod.tune.db.records import Kernel, Measurement, Verdict
from svod.tune.db.schema import LAYER_NAMES
from svod.tune.db.winners import Winner, barred_revisions, rejection

if TYPE_CHECKING:
    from svod.tune.db.store import TuningDB

#: The parts of a target key, in its order; the last three carry a prefix.
TARGET_FIELDS = ("architecture", "CPU", "features", "l1 cache", "l2 cache", "l3 cache", "threads")


class Explanation(NamedTuple):
    """`found`: a winner for exactly this kernel and target. `field`, `asked`, `stored`: the first field in which the nearest record differs
    from what was asked (empty where none does, or there is no record). `text` says it in a sentence."""

    found: Winner | None
    field: str
    asked: str
    stored: str
    text: str


def explain(db: TuningDB, kernel: str, target: str, linear: str = "", structure: str = "") -> Explanation:
    """Explain the look-up of (kernel, target). `linear`: today's LINEAR digest of the winner's chain, if known, to find a record made by
    another code generator; `structure`: the kernel's key without extents, to find relatives of an unknown kernel."""
    winner = db.winner(kernel, target)
    if winner is not None:
        at = f"{winner.speedup:.2f}x the heuristic, {LAYER_NAMES[winner.layer]} layer, code generator {winner.codegen}"
        if linear and linear != winner.linear:
            return Explanation(winner, "LINEAR", linear, winner.linear, f"a record fits ({at}), but its chain gives another LINEAR today "
                               f"({linear[:12]} instead of {winner.linear[:12]}): it is only a seed until a search confirms it again")
        return Explanation(winner, "", "", "", f"the database has a winner: {at}")
    mine = [m for m, _ in db.select(Measurement, kernel, target)]
    if mine:
        return _explain_no_winner(mine, [v for v, _ in db.select(Verdict, kernel, target)])
    elsewhere = sorted({m.target for m, _ in db.select(Measurement, kernel)})
    if elsewhere:
        nearest = max(elsewhere, key=lambda t: (_common_parts(target, t), t))
        name, asked, stored = first_difference(target, nearest)
        return Explanation(None, name, asked, stored, f"the kernel is known, but for another target, {nearest}: its {name} "
                           f"{'are' if name in ('features', 'threads') else 'is'} {stored or 'none'}, here {asked or 'none'}")
    kernels = [k for k, _ in db.select(Kernel)]
    for k in kernels:
        if structure and k.structure == structure and k.kernel != kernel:
            return Explanation(None, "extents", kernel, k.kernel, f"the kernel is not known; {k.name or k.kernel[:12]} ({k.kernel[:12]}) "
                               "has the same structure with other extents")
    if not kernels:
        return Explanation(None, "kernel", kernel, "", "the database is empty")
    count = len({k.kernel for k in kernels})
    return Explanation(None, "kernel", kernel, "", "the kernel is not known" + (f", and none of the {count} known ones has its structure"
                                                                                if structure else f"; the database knows {count} others"))


def _explain_no_winner(measurements: list[Measurement], verdicts: list[Verdict]) -> Explanation:
    """The kernel was measured on this target, yet nothing may be used: what stopped the best candidate."""
    barred = barred_revisions(measurements, verdicts)
    verified = {(v.linear, v.codegen) for v in verdicts if v.verdict == "verified"}
    best = min(measurements, key=lambda m: (m.step != "confirm", m.status != "ok", m.ratio if m.ratio is not None else 2.0,
                                            m.time or 1e9, m.id))
    reason = rejection(best)
    if reason is None and best.codegen <= barred.get(best.linear, -1):
        bars = [v for v in verdicts if v.linear == best.linear and v.verdict != "verified"]
        last = max(bars, key=lambda v: (v.codegen, v.taken_at, v.id), default=None)
        reason = "it computed wrong numbers" if last is None else \
            f"it was found {last.verdict}" + (f" by {last.by}" if last.by else "") + (f": {last.reason}" if last.reason else "")
    elif reason is None and (best.linear, best.codegen) not in verified:
        reason = "nobody verified its output"
    return Explanation(None, "verdict", "a confirmed and verified measurement", reason or "", f"{len(measurements)} measurements for this "
                       f"kernel and target, none of which may be used; the nearest, {best.chain_text}: {reason}")


def first_difference(asked: str, stored: str) -> tuple[str, str, str]:
    """The first field in which two target keys differ: its name, what was asked, what was stored. A feature list shows only what the
    other lacks."""
    a, b = asked.split("/"), stored.split("/")
    for name, x, y in zip(TARGET_FIELDS, a, b, strict=False):
        if x == y:
            continue
        if name == "features":
            left, right = set(x.split(",")), set(y.split(","))
            return name, ",".join(sorted(left - right)), ",".join(sorted(right - left))
        return name, x.removeprefix(name[:2] + " ").removeprefix("t"), y.removeprefix(name[:2] + " ").removeprefix("t")
    return "target", asked, stored


def _common_parts(asked: str, stored: str) -> int:
    """How many leading fields two target keys share, threads least of all."""
    return sum(1 << (len(TARGET_FIELDS) - i) for i, (x, y) in enumerate(zip(asked.split("/"), stored.split("/"), strict=False)) if x == y)
