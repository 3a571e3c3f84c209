"""From evidence to a decision: which chain is used for a kernel on a target.

`derive_winner` is a pure function of three sets, so that the order in which records arrived, the machine they came from and the number
of times they were merged do not matter. The rules, first to last:

1. Only *confirmed* measurements count: timed against the heuristic in the same run, status ok, with a ratio and its interval that fit
   each other and the times. An absolute time is never compared with anything.
2. A LINEAR needs a `verified` verdict of the measurement's code generator revision.
3. A `wrong` or `retracted` verdict, or a measurement that ended in `wrong`, beats any time: it bars all measurements of that LINEAR up to
   its own code generator revision. It holds across layers and for ever; only a later revision, verified anew, is free of it.
4. The nearest layer (own, team, shipped), then the newest code generator revision.
5. Several measurements of one LINEAR in one layer and revision count as their upper median, so one lucky (or forged) time among
   honest ones decides nothing. Those that say that it is slower count as well.
6. A ratio whose whole interval is above 1 is slower than the heuristic: not used. Nor is a chain of a kernel with variables that takes
   more than 1.2 times the heuristic's time at one of the sizes it was timed at, however much it gains at the others.
7. The lowest *upper end* of the ratio's interval: the speed-up that is sure, not the one that was seen once.
8. Level with that is what is within 0.3 % of it. Of level chains the heuristic's own is kept, as nothing is sure to be gained; then
   the shortest wins, then the first in text, then the first LINEAR digest.

A search chooses among its finalists by the same function (`best_of`), so that what it reports is what is used later.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from svod.tune.db.records import Chain, Measurement, Verdict

TIE = 1.003         # upper ends this close are level; docs/measuring.md says why no more
MIN_RATIO = 1e-3    # nothing is 1,000 times faster than the heuristic: a smaller ratio is a mistake or a forgery
WORST_RATIO = 1.2   # to the heuristic at any one size of a kernel with variables
SLACK = 2.0         # a paired ratio and the ratio of the representative times may differ by this factor, for drift


class Standing(NamedTuple):
    """What the rules 7 and 8 compare of a chain: the upper end of the interval of its ratio to the heuristic, whether it is the heuristic's
    own, its length, its text as the database stores it, its LINEAR digest."""

    high: float
    own: bool
    length: int
    text: str
    linear: str


def best_of(standings: Sequence[Standing], tie: float = TIE) -> int:
    """The index of the chain that wins by the rules 7 and 8; upper ends within a factor of `tie` are level. Raises ValueError when there is
    no chain."""
    level = min(s.high for s in standings) * tie
    return min((i for i, s in enumerate(standings) if s.high <= level),
               key=lambda i: (not standings[i].own, *standings[i][2:]))


class Winner(NamedTuple):
    """The decision for (kernel, target), and what it rests on.

    `ratio` is tuned ÷ heuristic in the run that confirmed it (below 1: faster), `time` and `baseline` are seconds in that run,
    `baseline_linear` is what the heuristic was then. `layer` is 0 own, 1 team, 2 shipped. The chain is verified for `linear` under
    `codegen`: where today's LINEAR has another digest, it is a seed."""

    kernel: str
    target: str
    chain: Chain
    linear: str
    codegen: int
    compiler: str
    ratio: float
    ratio_low: float
    ratio_high: float
    time: float | None
    baseline: float | None
    layer: int
    measurement: str
    search: str
    baseline_linear: str = ""

    @property
    def speedup(self) -> float:
        return 1.0 / self.ratio

    @property
    def own(self) -> bool:
        """It is the heuristic's own chain: nothing that is better for sure was found."""
        return self.linear == self.baseline_linear


def rejection(m: Measurement) -> str | None:
    """Why a measurement by itself makes no winner, rules 1 and 6; None: it may."""
    return doubt(m) or drawback(m)


def doubt(m: Measurement) -> str | None:
    """Why a measurement says nothing, rule 1; None: it is evidence."""
    if m.status != "ok":
        return f"status {m.status}" + (f": {m.reason}" if m.reason else "")
    if m.step != "confirm":
        return f"not confirmed, only timed in the {m.step}"
    if m.ratio is None or m.ratio_low is None or m.ratio_high is None or not m.linear:
        return "confirmed without a ratio to the heuristic"
    if not 0.0 < m.ratio_low <= m.ratio <= m.ratio_high:
        return "its ratio lies outside of its own interval"
    if m.ratio < MIN_RATIO:
        return f"a ratio of {m.ratio:.3g} to the heuristic is not plausible"
    if m.time is None or m.baseline is None or m.time <= 0.0 or m.baseline <= 0.0:
        return "confirmed without its time or the heuristic's"
    if not m.ratio / SLACK <= m.time / m.baseline <= m.ratio * SLACK:
        return f"its ratio {m.ratio:.3g} does not fit its times, {m.time:.3g} s and {m.baseline:.3g} s"
    return None


def drawback(m: Measurement) -> str | None:
    """Why what a measurement says speaks against the chain, rule 6; None: it does not. It is evidence, so that it has an interval."""
    if m.ratio_low is not None and m.ratio_low > 1.0:
        return "slower than the heuristic"
    worst = max(m.sizes, key=lambda s: s.ratio, default=None)
    if worst is not None and worst.ratio > WORST_RATIO:
        return f"at {worst} it takes {worst.ratio:.2f} times the heuristic's time; {WORST_RATIO} is allowed"
    return None


def barred_revisions(measurements: Iterable[Measurement], verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Per LINEAR digest the last code generator revision under which it may not be used, rule 3."""
    barred: dict[str, int] = {}
    for v in verdicts:
        if v.verdict != "verified" and v.codegen > barred.get(v.linear, -1):
            barred[v.linear] = v.codegen
    for m in measurements:
        if m.status == "wrong" and m.linear and m.codegen > barred.get(m.linear, -1):
            barred[m.linear] = m.codegen
    return barred


def rank_winners(measurements: Iterable[Measurement], verdicts: Iterable[Verdict], layer_ranks: Mapping[str, int]) -> list[Winner]:
    """All chains that may be used for one (kernel, target), best first: `derive_winner` is the first. The others are seeds.

    `layer_ranks` gives the layer of each measurement by its id; one that is not in it counts as shipped."""
    measurements, verdicts = list(measurements), list(verdicts)
    barred = barred_revisions(measurements, verdicts)
    verified = {(v.linear, v.codegen) for v in verdicts if v.verdict == "verified"}
    groups: dict[tuple[int, int, str], dict[str, Measurement]] = {}
    for m in measurements:
        if (m.linear, m.codegen) in verified and m.codegen > barred.get(m.linear, -1) and doubt(m) is None:
            groups.setdefault((layer_ranks.get(m.id, 2), -m.codegen, m.linear), {})[m.id] = m

    pools: dict[tuple[int, int], list[tuple[Standing, Winner]]] = {}
    for (layer, age, linear), group in groups.items():
        ranked = sorted(group.values(), key=lambda m: (m.ratio_high, m.id))
        middle = ranked[len(ranked) // 2]
        if drawback(middle) is not None:
            continue
        shown = min(ranked, key=lambda m: (len(m.chain), m.chain_text))
        assert middle.ratio is not None and middle.ratio_low is not None and middle.ratio_high is not None, "doubt() saw to it"
        winner = Winner(middle.kernel, middle.target, shown.chain, linear, middle.codegen, middle.compiler, middle.ratio, middle.ratio_low,
                        middle.ratio_high, middle.time, middle.baseline, layer, middle.id, middle.search, middle.baseline_linear)
        standing = Standing(middle.ratio_high, winner.own, len(shown.chain), shown.chain_text, linear)
        pools.setdefault((layer, age), []).append((standing, winner))

    order: list[Winner] = []
    for _, pool in sorted(pools.items()):
        while pool:
            order.append(pool.pop(best_of([s for s, _ in pool]))[1])
    return order


def derive_winner(measurements: Iterable[Measurement], verdicts: Iterable[Verdict], layer_ranks: Mapping[str, int]) -> Winner | None:
    """The chain to use for one (kernel, target), or None: use the heuristic. The rules are in the module's docstring."""
    order = rank_winners(measurements, verdicts, layer_ranks)
    return order[0] if order else None
