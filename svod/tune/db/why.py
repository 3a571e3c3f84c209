"""Explains why the database has a winner for a kernel or has none: by the nearest record, and the first field in which that differs."""
from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from svod.core.kernel.chain_text import NO_ALGORITHM, algorithm_words, chain_words
from svod.core.machine.target import FLOAT32, KEY_FIELDS, parse_key
from svod.tune.db.records import KernelRecord, Measurement, Search, Verdict
from svod.tune.db.schema import LAYER_NAMES
from svod.tune.db.store import TuningDB
from svod.tune.db.winners import Winner, barred_revisions, drawback, is_barred, rejection

MAX_REASONS = 3         # most reasons of failed candidates that are listed
MAX_REASON = 160        # most characters of one reason


class Explanation(NamedTuple):
    """The answer of `explain`. `winner`: the winner of exactly this kernel and target. `field`, `asked`, `stored`: the first field in which
    the nearest record differs from the question, and its values; "" where no field differs, or there is no record. `text`: the explanation
    in a sentence."""

    winner: Winner | None
    field: str
    asked: str
    stored: str
    text: str


def explain(db: TuningDB, kernel: str, target: str, linear: str = "", structure: str = "") -> Explanation:
    """Explain the look-up of (kernel, target). `linear`: today's LINEAR digest of the winner's chain, if known; a record with another
    digest is of another code generator. `structure`: the kernel's key without extents, which finds relatives of an unknown kernel."""
    winner = db.winner(kernel, target)
    if winner is not None:
        at = f"{winner.speedup:.2f}x the heuristic, {LAYER_NAMES[winner.layer]} layer, code generator {winner.codegen}"
        if linear and linear != winner.linear:
            return Explanation(winner, "LINEAR", linear, winner.linear, f"a record fits ({at}), but its chain gives another LINEAR today "
                               f"({linear[:12]} instead of {winner.linear[:12]}): it is only a seed until a search confirms it again")
        if winner.own:
            at += "; it is the heuristic's own chain: nothing that is better for sure was found"
        return Explanation(winner, "", "", "", f"the database has a winner: {at}")
    mine = [m for m, _ in db.select(Measurement, kernel, target, shipped=True)]
    searches = [s for s, _ in db.select(Search, kernel, target)]
    if mine or searches:
        reason = no_winner_reason(mine, [v for v, _ in db.select(Verdict, kernel, target, shipped=True)], searches)
        known = f"{len(mine)} measurement{'s' * (len(mine) != 1)} for this kernel and target, none of which may be used" if mine \
            else "nothing is known for this kernel and target"
        return Explanation(None, "verdict", "a confirmed and verified measurement", reason,
                           "; ".join([known, reason, *describe_searches(searches)]))
    elsewhere = sorted({m.target for m, _ in db.select(Measurement, kernel, shipped=True)})
    if elsewhere:
        nearest = max(elsewhere, key=lambda t: (_common_parts(target, t), t))
        name, asked, stored = first_difference(target, nearest)
        if policies := differing_policies(asked, stored):
            here, there = policies
            return Explanation(None, name, asked, stored, f"the kernel is known, but under numerics={there}, and here it is asked for "
                               f"under numerics={here}; SVOD_NUMERICS={there} asks for what is known")
        return Explanation(None, name, asked, stored, f"the kernel is known, but for another target, {nearest}: its {name} "
                           f"{'are' if name in ('features', 'threads') else 'is'} {stored or 'none'}, here {asked or 'none'}")
    for k in db.family(structure) if structure else ():
        if k.kernel != kernel:
            return Explanation(None, "extents", kernel, k.kernel, f"the kernel is not known; {k.name or k.kernel[:12]} ({k.kernel[:12]}) "
                               "has the same structure with other extents")
    count = len({k.kernel for k, _ in db.select(KernelRecord)})
    if not count:
        return Explanation(None, "kernel", kernel, "", "the database is empty")
    return Explanation(None, "kernel", kernel, "", "the kernel is not known" + (f", and none of the {count} known ones has its structure"
                                                                                if structure else f"; the database knows {count} others"))


def no_winner_reason(measurements: Sequence[Measurement], verdicts: Sequence[Verdict], searches: Sequence[Search]) -> str:
    """Why a kernel that was searched or measured on a target has no winner: nothing was measured, every candidate failed (and why), the
    heuristic stayed best, or the reason against the nearest candidate."""
    if not measurements:
        last = max(searches, key=lambda s: s.ended_at or 0.0)
        if last.ended_at is None:
            return "the search has not ended, or was killed, before anything was measured"
        return f"the search ended before anything was measured ({last.outcome})"
    if all(m.status not in ("ok", "slow") for m in measurements):
        failures = Counter((m.status, m.reason) for m in measurements)
        reasons = [f"{n} {status}" + (f" ({reason[:MAX_REASON]})" if reason else "")
                   for (status, reason), n in failures.most_common(MAX_REASONS)]
        more = f", and {len(failures) - MAX_REASONS} reasons more" if len(failures) > MAX_REASONS else ""
        return f"every candidate failed: {', '.join(reasons)}{more}"
    reason = _nearest_reason(measurements, verdicts)
    ends = [s.result for s in searches if s.ended_at is not None]
    best, heuristic = (ends[-1].get("best"), ends[-1].get("heuristic")) if len(ends) == 1 else (None, None)
    if best is not None and best == heuristic:
        return f"the heuristic stayed best; {reason}"
    return reason


def _nearest_reason(measurements: Sequence[Measurement], verdicts: Sequence[Verdict]) -> str:
    """The reason why the best candidate is no winner."""
    barred = barred_revisions(measurements, verdicts)
    verified = {(v.linear, v.codegen) for v in verdicts if v.verdict == "verified"}
    best = min(measurements, key=lambda m: (m.step != "confirm", m.status != "ok", m.ratio if m.ratio is not None else 2.0,
                                            m.time or 1e9, m.id))
    reason = rejection(best)
    if reason is None and is_barred(best, barred):
        bars = [v for v in verdicts if v.linear == best.linear and v.verdict != "verified"]
        last = max(bars, key=lambda v: (v.codegen, v.taken_at, v.id), default=None)
        reason = "it computed wrong numbers" if last is None else \
            f"it was found {last.verdict}" + (f" by {last.by}" if last.by else "") + (f": {last.reason}" if last.reason else "")
    elif reason is None and (best.linear, best.codegen) not in verified:
        reason = "nobody verified its output"
    elif reason is None:
        again = [drawback(m) for m in measurements if (m.linear, m.codegen) == (best.linear, best.codegen) and m.step == "confirm"]
        reason = next(filter(None, again), "its other measurements speak against it")
    return f"the nearest, {chain_words(best.chain)}: {reason}"


def measured_algorithms(measurements: Sequence[Measurement]) -> str:
    """What the fastest chain of each algorithm took, as a share of the heuristic's time, fastest first; "" where all chains compute
    alike."""
    ratios: dict[str, float] = {}
    for m in measurements:
        if m.status == "ok" and m.ratio is not None:
            name = algorithm_words(m.chain)
            ratios[name] = min(ratios.get(name, m.ratio), m.ratio)
    if set(ratios) <= {NO_ALGORITHM}:
        return ""
    return "measured: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(ratios.items(), key=lambda item: item[1])) \
        + " of the heuristic's time"


def describe_searches(searches: Sequence[Search]) -> list[str]:
    """A line for each search, oldest first, with its date, user, strategy and executor, the number of timed candidates, and its end."""
    latest: dict[str, Search] = {}
    for s in sorted(searches, key=lambda s: s.ended_at or 0.0):     # a search has a row at its start and one at its end
        latest[s.search] = s
    out = []
    for s in sorted(latest.values(), key=lambda s: s.started_at):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(s.started_at))
        with_what = ", ".join(filter(None, (s.strategy, s.executor)))
        if s.ended_at is None:
            out.append(f"searched {when} by {s.by or 'unknown'} ({with_what}), without an end")
            continue
        tried = [f"{s.result[name]} {name}" for name in ("timed", "wrong", "failed") if isinstance(s.result.get(name), int)]
        out.append(f"searched {when} by {s.by or 'unknown'} ({with_what}) for {s.ended_at - s.started_at:.0f} s: "
                   f"{'candidates: ' + ', '.join(tried) + '; ' if tried else ''}{s.outcome}")
    return out


def first_difference(asked: str, stored: str) -> tuple[str, str, str]:
    """The first field in which two target keys differ, and its values; of a list of features only those that the other key lacks."""
    a, b = parse_key(asked), parse_key(stored)
    for name, x, y in ((name, a[name], b[name]) for name in a if name in b):
        if x == y:
            continue
        if name == "features":
            left, right = set(x.split(",")), set(y.split(","))
            return name, ",".join(sorted(left - right)), ",".join(sorted(right - left))
        return name, x, y
    return "target", asked, stored


def differing_policies(asked: str, stored: str) -> tuple[str, str] | None:
    """The policies of numerics of two targets whose lists of features, as `first_difference` has them, differ in nothing else."""
    policies = []
    for features in (asked, stored):
        name, _, policy = features.partition("=")
        if features and (name != "numerics" or "," in policy):
            return None
        policies.append(policy or FLOAT32)
    return None if policies[0] == policies[1] else (policies[0], policies[1])


def _common_parts(asked: str, stored: str) -> int:
    """Score the agreement of two target keys; one equal field outweighs all fields after it."""
    a, b = parse_key(asked), parse_key(stored)
    return sum(1 << (len(KEY_FIELDS) - i) for i, name in enumerate(KEY_FIELDS) if name in a and a[name] == b.get(name))
