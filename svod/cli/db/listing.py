"""The listing of svod-db: a row for each kernel on each target with the chain in use; its filters, orders and tables."""
from __future__ import annotations

import json
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeVar

from svod.core.kernel.chain_text import chain_words
from svod.system.process.streams import is_terminal
from svod.system.quantities import gain, seconds, times
from svod.system.tables import print_table, printable, text_table
from svod.tune.db import LAYER_NAMES, Measurement, Search, TuningDB, Verdict, described, origins_of
from svod.tune.db.why import no_winner_reason

SHOWN_KEY = 12          # characters of a key that tables show
MOST_NAME_CHARACTERS = 20    # most characters of a name that a terminal shows
DETAIL_INDENT = "    "

Order = Literal["time", "gain", "saved", "name", "latest"]


class WinnerRow(NamedTuple):
    """A kernel on a target, as `list` and `show` print it. `heuristic` and `time`: seconds of one call with the heuristic's and with the
    used chain; `calls`: calls in a run of the tuned program, 1 if unknown; `latest`: the time when the last search began, in seconds since
    1970."""

    kernel: str
    name: str
    origins: tuple[str, ...]
    target: str
    chain: list[Any] | None
    speedup: float | None
    heuristic: float | None
    time: float | None
    calls: float
    layer: str
    measurements: int
    searches: int
    why: str            # the reason why the kernel has no winner; "" if it has one
    measurement: str    # the measurement that confirmed the winner
    sizes: tuple[str, ...]      # the values of its variables in that measurement
    latest: float

    @property
    def cost(self) -> float:
        """Seconds of a run of the program with the heuristic's chain; 0 where that is not known."""
        return self.calls * (self.heuristic or 0.0)

    @property
    def saved(self) -> float:
        """Seconds of a run that the chain in use saves."""
        return self.calls * ((self.heuristic or 0.0) - (self.time or 0.0))

    @property
    def origin(self) -> str:
        more = len(self.origins) - 1
        return (self.origins[0].rsplit("/", 1)[-1] if self.origins else "") + (f" +{more}" if more > 0 else "")


P = TypeVar("P", Measurement, Verdict, Search)


def _by_place(records: Iterable[P]) -> defaultdict[tuple[str, str], list[P]]:
    """(kernel, target) → its records."""
    places: defaultdict[tuple[str, str], list[P]] = defaultdict(list)
    for r in records:
        places[r.kernel, r.target].append(r)
    return places


def winner_rows(db: TuningDB, kernel: str | None = None) -> list[WinnerRow]:
    """A row for every kernel on every target of the user's records, with the chain in use, wherever it comes from. `kernel`: only rows of
    the kernel with this key, also from records that ship with svod."""
    shipped = kernel is not None
    names = {key: k.name for key, k in described(db, kernel, shipped=shipped).items()}
    origins = origins_of(db, kernel)
    rankings = db.all_rankings() if kernel is None else {(kernel, t): db.ranking(kernel, t) for t in db.targets_of(kernel)}
    measured = db.tally(Measurement, "kernel", "target") if kernel is None else \
        Counter((m.kernel, m.target) for m, _ in db.select(Measurement, kernel, shipped=True))
    searches = _by_place(s for s, _ in db.select(Search, kernel))
    rows = []
    for at in {*measured, *searches}:
        key, target = at
        w = next(iter(rankings.get(at, ())), None)
        reason = ""
        if w is None:
            found = [m for m, _ in db.select(Measurement, key, target, shipped=shipped)]
            if not found and not searches[at]:
                continue        # the counted records are invalid; they have been reported
            reason = no_winner_reason(found, [v for v, _ in db.select(Verdict, key, target, shipped=shipped)], searches[at])
        newest = max(searches[at], key=lambda s: s.started_at, default=None)
        rows.append(WinnerRow(key, names.get(key, ""), tuple(origins[key]), target,
                              None if w is None else json.loads(json.dumps(w.chain)), None if w is None else w.speedup,
                              None if w is None else w.heuristic_seconds, None if w is None else w.time, _calls(searches[at]),
                              "" if w is None else LAYER_NAMES[w.layer], measured.get(at, 0), len({s.search for s in searches[at]}),
                              reason, "" if w is None else w.measurement,
                              () if w is None else tuple(map(str, w.sizes)),
                              0.0 if newest is None else newest.started_at))
    return in_order(rows, "time")


def _calls(searches: Sequence[Search]) -> float:
    """The number of calls of a kernel in a run of its program, as the latest search that knows it has recorded it; 1 if none has."""
    said = [s for s in searches if isinstance(s.result.get("calls"), (int, float))]
    return float(max(said, key=lambda s: s.started_at).result["calls"]) if said else 1.0


def in_order(rows: Sequence[WinnerRow], order: Order) -> list[WinnerRow]:
    """Sort rows by target and then by `order`: most time of the program, largest gain, most time saved, or latest search first, or by
    name."""
    def first(r: WinnerRow) -> float:
        return {"time": -r.cost, "gain": -(r.speedup or 0.0), "saved": -r.saved, "name": 0.0, "latest": -r.latest}[order]
    return sorted(rows, key=lambda r: (r.target, first(r), r.name, r.kernel))


def chosen(rows: Iterable[WinnerRow], *, names: Sequence[str], origin: str | None, target: str | None,
           least: float | None) -> list[WinnerRow]:
    """The rows that fit all filters: one of the patterns `names` (*, ? and […]) matches the name, an origin contains `origin`, the target's
    key contains `target`, and the chain is at least `least` times as fast as the heuristic's. A filter that is None or empty fits all."""
    return [r for r in rows if (not names or any(fnmatchcase(r.name, n) for n in names))
            and (origin is None or any(origin in o for o in r.origins)) and (target is None or target in r.target)
            and (least is None or (r.speedup or 0.0) >= least)]


def print_rows(rows: Sequence[WinnerRow]) -> None:
    """Print the listing of `list`. On a terminal each target is named once, above its kernels; in a pipe every line has all columns."""
    if not is_terminal(sys.stdout):
        print_table(("kernel", "name", "from", "target", "heuristic", "tuned", "gain", "layer", "records", "opts"),
                    [(r.kernel[:SHOWN_KEY], r.name, r.origin, r.target, seconds(r.heuristic), _time(r), _gain(r), r.layer,
                      str(r.measurements), _chain(r)) for r in rows])
        return
    for target in dict.fromkeys(r.target for r in rows):
        of_target = [r for r in rows if r.target == target]
        print(f"{printable(target)}\n")
        print_with_chains(("kernel", "from", "heuristic", "tuned", "gain", "layer"),
                          [(_named(r), r.origin, seconds(r.heuristic), seconds(r.time), _gain(r), r.layer) for r in of_target],
                          [_chain(r) for r in of_target], right={"heuristic", "tuned", "gain"}, shrink=("from",))
        print()


def print_with_chains(header: Sequence[str], rows: Sequence[Sequence[str]], chains: Sequence[str], *, right: set[str],
                      shrink: Sequence[str] = ()) -> None:
    """Print a table with the chain of each row in a line of its own below it, cut to the terminal; in a pipe it is the last column."""
    if not is_terminal(sys.stdout):
        print_table((*header, "opts"), [(*r, c) for r, c in zip(rows, chains, strict=True)])
        return
    width = shutil.get_terminal_size().columns
    lines = text_table(header, rows, right=right, shrink=shrink, width=width)
    print("\n".join(lines[:2]))
    room = width - len(DETAIL_INDENT)
    for line, chain in zip(lines[2:], map(printable, chains), strict=True):
        print(f"{line}\n{DETAIL_INDENT}{chain if len(chain) <= room else chain[:room - 1] + '…'}")


def _named(r: WinnerRow) -> str:
    name = r.name if len(r.name) <= MOST_NAME_CHARACTERS else f"{r.name[:MOST_NAME_CHARACTERS - 1]}…"
    return f"{name} {r.kernel[:SHOWN_KEY - 4]}".strip()


def _gain(r: WinnerRow) -> str:
    return "" if r.speedup is None else times(gain(r.heuristic, r.time))


def _time(r: WinnerRow) -> str:
    return seconds(r.time) + f" over {len(r.sizes)} sizes" * bool(r.sizes)


def _chain(r: WinnerRow) -> str:
    return f"no winner: {r.why}" if r.chain is None else chain_words(r.chain)
