"""The decision whether a kernel that the tuning database knows is searched further.

A search is complete if it ended by itself: rounds gained nothing, nothing was left to try, or the best chain was at the roofline bound. A
kernel is searched further if its search was ended by its budget, Ctrl-C or an error. It is also searched further if the search now asked
for is wider or uses another strategy, unless the old one ended at the roofline bound. Measurements are kept: the stored winners are the
seeds, and no candidate that the database has is built again.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from svod.compile.plan.compiler import Choice
from svod.config import BeamConfig
from svod.system.quantities import seconds
from svod.tune.db import Search, TuningDB
from svod.tune.db.records import AT_BOUND, BUDGET_SPENT, CHECK, FAILED, INTERRUPTED, TRANSFER
from svod.tune.resolved import Resolved

CUT_SHORT = {BUDGET_SPENT: "its search ended with its budget", INTERRUPTED: "Ctrl-C ended its search", FAILED: "an error ended its search"}
#: Numeric fields of BeamConfig: with a larger value a search tries more candidates.
AMOUNTS = ("width", "patience", "round_size")
#: Fields of BeamConfig that limit the kinds of proposals, each with the value that limits nothing.
MOST = {"sketches": True, "mutations": True, "actions": "default", "strict": ""}


def what_is_left(searches: Sequence[Search], asked: BeamConfig) -> str | None:
    """The reason to search a kernel further with the settings `asked`, given its searches on one target. None if nothing is left to search,
    or if the kernel was never searched here because its winner came from elsewhere. A search whose end is not recorded was killed, or runs
    in another process, which then holds a claim."""
    searches = [s for s in searches if s.strategy not in (CHECK, TRANSFER)]
    ended = sorted((s for s in searches if s.ended_at is not None), key=lambda s: s.ended_at or 0.0)
    killed = {s.search for s in searches} - {s.search for s in ended}
    reasons = ["its search was killed"] * bool(killed) + [_left_by(s, asked) for s in ended]
    return None if None in reasons or not reasons else reasons[-1]


def was_cut_short(db: TuningDB, kernel: str, target: str) -> bool:
    """Whether the latest search of a kernel on a target was ended before it was complete, so that `svod-tune --resume` continues it."""
    searches = [s for s, _ in db.select(Search, kernel, target) if s.strategy not in (CHECK, TRANSFER)]
    if not searches:
        return False
    latest = max(searches, key=lambda s: (s.started_at, s.search)).search
    end = next((s for s in searches if s.search == latest and s.ended_at is not None), None)
    return end is None or end.outcome in CUT_SHORT


def left_to_search(db: TuningDB, kernel: str, target: str, asked: BeamConfig) -> str | None:
    """The reason to search a kernel further, as `what_is_left` finds it from the searches in `db`. The kernel and the target are given
    by their keys."""
    return what_is_left([s for s, _ in db.select(Search, kernel, target)], asked)


def is_to_be_searched(choice: Choice, key: str, resolved: Resolved, beam: BeamConfig) -> bool:
    """Whether a search at prepare time has something to try for a kernel with this chain."""
    if choice.source != "database":
        return choice.source in ("heuristic", "transfer")
    return beam.ignore_cache or left_to_search(resolved.db, key, resolved.target.key, beam) is not None


def _left_by(search: Search, asked: BeamConfig) -> str | None:
    if search.outcome in CUT_SHORT:
        took = search.result.get("seconds")
        return CUT_SHORT[search.outcome] + (f" after {seconds(took)}" if isinstance(took, (int, float)) and took > 0 else "")
    if search.outcome == AT_BOUND:
        return None
    if search.strategy not in ("", asked.strategy):
        return f"it was searched by the strategy {search.strategy}, {asked.strategy} is asked for"
    return _narrower(search.config, asked)


def _narrower(before: Any, asked: BeamConfig) -> str | None:
    """The setting, in words, because of which a recorded search tried less than a search with the settings `asked` would; None if there
    is none. `before`: the settings of the recorded search. A setting that the record lacks counts as equal."""
    for name in AMOUNTS:
        value, wanted = before.get(name), getattr(asked, name)
        if isinstance(value, int) and value < wanted:
            return f"it was searched with a {name.replace('_', ' ')} of {value}, {wanted} is asked for"
    for name, most in MOST.items():
        if name in before and before[name] != most and getattr(asked, name) == most:
            return f"it was searched with {name} = {before[name]}"
    return None
