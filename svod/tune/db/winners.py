"""The rules by which the records of the database decide which chain is used for a kernel on a target.

`derive_winner` is a pure function of the measurements, the verdicts and the layers: the order in which records arrived, the machine that
they came from, and the number of times they were merged do not matter. The rules, in order:

1. Only *confirmed* measurements count: timed against the heuristic in the same run, with status ok and a ratio that lies in its interval
   and agrees with the times. Absolute times are never compared.
2. A LINEAR needs a `verified` verdict under the measurement's code generator revision.
3. A `wrong` or `retracted` verdict, or a measurement with status `wrong`, outweighs any time: it bars all measurements of that LINEAR up
   to its own code generator revision, wherever it comes from, until a `restored` verdict names it. A later revision needs a new
   verification.
4. The newest code generator revision wins. The origin of a record does not matter: a colleague's measurement on the same target counts
   like one of this machine, and two databases that were merged in either direction agree.
5. Several measurements of one LINEAR under one revision count as their upper median, so that one lucky or forged time among honest ones
   decides nothing. Measurements in which the chain was slower count as well. Copies of one measurement count once, also a copy without
   names (`anonymised`).
6. A chain whose whole interval is above 1 is slower than the heuristic and is not used. Nor is a chain that took more than 1.2 times the
   heuristic's time, for a kernel with variables at any measured size. Measurements inside a plan (`Measurement.inside`) are judged by
   themselves: they can only rule a chain out that is slower there, however fast it is alone.
7. The lowest *upper end* of the ratio's interval wins, as it is the speed-up that is certain.
8. Upper ends within 0.3 % of the lowest count as equal to it. Among equal chains the heuristic's own wins, as no gain is certain; then
   the shortest, then the first in text, then the first LINEAR digest.

A search chooses among its finalists by the same function (`best_of`), so that its result is the chain that is used later.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from svod.core.kernel.chain_text import chain_of
from svod.core.kernel.scheduler import Opt
from svod.tune.db.records import Chain, Measurement, SizeTime, Verdict
from svod.tune.db.schema import OWN, SHIPPED

if TYPE_CHECKING:
    from svod.bench.race import Ratio

LEVEL_FACTOR = 1.003         # Upper ends within this factor count as equal (rule 8); docs/measuring.md gives the reason for the number.
MIN_RATIO = 1e-3    # No chain is 1,000 times faster than the heuristic: a smaller ratio is a mistake or a forgery.
WORST_RATIO = 1.2   # A chain with a larger ratio to the heuristic, in total or at one size of its variables, is not used (rule 6).
DRIFT_FACTOR = 2.0         # The machine may drift: a paired ratio and the ratio of the representative times may differ by this factor.


class Standing(NamedTuple):
    """The values by which rules 7 and 8 compare chains. `high`: the upper end of the ratio's interval; `own`: whether the chain is the
    heuristic's; `length`: its number of opts; `text`: the chain as the database stores it; `linear`: its LINEAR digest."""

    high: float
    own: bool
    length: int
    text: str
    linear: str


def best_of(standings: Sequence[Standing], tie: float = LEVEL_FACTOR) -> int:
    """The index of the chain that wins by rules 7 and 8; upper ends within a factor of `tie` count as equal. Raises ValueError for no
    chains."""
    level = min(s.high for s in standings) * tie
    return min((i for i, s in enumerate(standings) if s.high <= level),
               key=lambda i: (not standings[i].own, standings[i].length, standings[i].text, standings[i].linear))


class Winner(NamedTuple):
    """The decision for (kernel, target), and the evidence for it.

    `ratio` is tuned ÷ heuristic in the run that confirmed the chain (below 1: faster). `time` and `baseline` are seconds in that run,
    `baseline_linear` is the heuristic's LINEAR digest then. `layer` is the nearest layer that has evidence for it: OWN, TEAM or SHIPPED.
    `slower_here`: by the measurements of this machine alone, rule 6 excludes the chain. The chain is verified for `linear` under `codegen`:
    if its LINEAR has another digest today, it is only a seed. `strategy`: as in its measurement. `sizes`: the times of a kernel with
    variables at each size, with the user's names. `noisy`: the machine was busy in that run, so that `time` may be too long."""

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
    strategy: str = ""
    slower_here: bool = False
    sizes: tuple[SizeTime, ...] = ()
    noisy: bool = False

    @property
    def opts(self) -> tuple[Opt, ...]:
        """The chain's opts. Raises KernelOptError for one that this svod does not know."""
        return chain_of(self.chain)

    @property
    def speedup(self) -> float:
        return 1.0 / self.ratio

    @property
    def interval(self) -> Ratio:
        """The speed-up over the heuristic with its 95 % interval."""
        from svod.bench.race import Ratio  # imported late: plans are made without it
        return Ratio(1.0 / self.ratio, 1.0 / self.ratio_high, 1.0 / self.ratio_low)

    @property
    def heuristic_seconds(self) -> float | None:
        """Seconds of one call with the heuristic's chain, as every table and report shows them: `time` × `speedup`.

        `baseline` is the median of the heuristic's own samples, which differs a little from what the paired ratio says."""
        return None if self.time is None else self.time * self.speedup

    @property
    def own(self) -> bool:
        """Whether the winner is the heuristic's own chain, because no other chain is certainly better."""
        return self.linear == self.baseline_linear


def rejection(m: Measurement) -> str | None:
    """Why a measurement cannot make its chain a winner, by rules 1 and 6; None if it can."""
    return doubt(m) or drawback(m)


def doubt(m: Measurement) -> str | None:
    """Why a measurement does not count, by rule 1; None if it counts."""
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
    if not fits_its_times(m.ratio, m.time, m.baseline):
        return f"its ratio {m.ratio:.3g} does not fit its times, {m.time:.3g} s and {m.baseline:.3g} s"
    return None


def fits_its_times(ratio: float, time: float, baseline: float) -> bool:
    """Whether a paired ratio agrees, within a factor of DRIFT_FACTOR, with the ratio of the seconds of a chain and of the heuristic."""
    return ratio / DRIFT_FACTOR <= time / baseline <= ratio * DRIFT_FACTOR


def is_slower(low: float, ratio: float) -> bool:
    """Whether a chain with this ratio to the heuristic, and this lower end of its interval, is slower, by rule 6."""
    return low > 1.0 or ratio > WORST_RATIO


def drawback(m: Measurement) -> str | None:
    """Why a measurement that counts excludes its chain, by rule 6; None if it does not."""
    if m.ratio_low is not None and m.ratio is not None and is_slower(m.ratio_low, m.ratio):
        return "slower than the heuristic"
    worst = max(m.sizes, key=lambda s: s.ratio, default=None)
    if worst is not None and worst.ratio > WORST_RATIO:
        return f"at {worst} it takes {worst.ratio:.2f} times the heuristic's time; {WORST_RATIO} is allowed"
    return None


def standing_bars(measurements: Iterable[Measurement], verdicts: Iterable[Verdict]) -> list[Verdict | Measurement]:
    """The records that bar a LINEAR, by rule 3, except those that a `restored` verdict revokes."""
    verdicts = list(verdicts)
    lifted = {i for v in verdicts if v.verdict == "restored" for i in v.lifts}
    bars: list[Verdict | Measurement] = [v for v in verdicts if v.verdict in ("wrong", "retracted")]
    bars += [m for m in measurements if m.status == "wrong" and m.linear]
    return [b for b in bars if b.id not in lifted]


def barred_revisions(measurements: Iterable[Measurement], verdicts: Iterable[Verdict]) -> dict[str, int]:
    """LINEAR digest → the last code generator revision under which it may not be used, by rule 3."""
    barred: dict[str, int] = {}
    for record in standing_bars(measurements, verdicts):
        barred[record.linear] = max(record.codegen, barred.get(record.linear, 0))
    return barred


def is_barred(m: Measurement, barred: Mapping[str, int]) -> bool:
    """Whether a measurement is barred, given the result of `barred_revisions`."""
    return m.linear in barred and m.codegen <= barred[m.linear]


def rank_winners(measurements: Iterable[Measurement], verdicts: Iterable[Verdict], layer_ranks: Mapping[str, int]) -> list[Winner]:
    """All chains that may be used for one (kernel, target), best first. The first is the winner, the others are seeds.

    `layer_ranks`: id of a measurement → its layer; a measurement that is not in it counts as shipped."""
    measurements, verdicts = list(measurements), list(verdicts)
    barred = barred_revisions(measurements, verdicts)
    verified = {(v.linear, v.codegen) for v in verdicts if v.verdict == "verified"}
    groups: dict[tuple[int, str], dict[tuple[Any, ...], Measurement]] = {}
    layers: dict[tuple[int, str], int] = {}
    for m in sorted(measurements, key=lambda m: m.id):
        if (m.linear, m.codegen) in verified and not is_barred(m, barred) and doubt(m) is None:
            at = (-m.codegen, m.linear)
            groups.setdefault(at, {}).setdefault((m.chain, m.ratio, m.ratio_low, m.ratio_high, m.time, m.baseline, m.taken_at), m)
            layers[at] = min(layers.get(at, SHIPPED), layer_ranks.get(m.id, SHIPPED))

    pools: dict[int, list[tuple[Standing, Winner]]] = {}
    for (age, linear), group in groups.items():
        layer = layers[age, linear]
        alone, inside = ([m for m in group.values() if bool(m.inside) is within] for within in (False, True))
        if not alone or (inside and drawback(_upper_median(inside)) is not None):
            continue
        middle = _upper_median(alone)
        if drawback(middle) is not None:
            continue
        here = [m for m in alone if layer_ranks.get(m.id) == OWN]
        shown = min(alone, key=lambda m: (len(m.chain), m.chain_key))
        assert middle.ratio is not None and middle.ratio_low is not None and middle.ratio_high is not None, "doubt() saw to it"
        slower = bool(here) and drawback(_upper_median(here)) is not None
        winner = Winner(middle.kernel, middle.target, shown.chain, linear, middle.codegen, middle.compiler, middle.ratio,
                        middle.ratio_low, middle.ratio_high, middle.time, middle.baseline, layer, middle.id,
                         middle.search, middle.baseline_linear, middle.strategy, slower,
                        tuple(s.named(middle.variables) for s in middle.sizes), middle.noisy)
        standing = Standing(middle.ratio_high, winner.own, len(shown.chain), shown.chain_key, linear)
        pools.setdefault(age, []).append((standing, winner))

    order: list[Winner] = []
    for _, pool in sorted(pools.items()):
        while pool:
            _, winner = pool.pop(best_of([s for s, _ in pool]))
            order.append(winner)
    return order


def _upper_median(measurements: Sequence[Measurement]) -> Measurement:
    """The measurement that counts among several of one chain, by rule 5: their upper median."""
    return sorted(measurements, key=lambda m: (m.ratio_high, m.id))[len(measurements) // 2]


def derive_winner(measurements: Iterable[Measurement], verdicts: Iterable[Verdict], layer_ranks: Mapping[str, int]) -> Winner | None:
    """The chain to use for one (kernel, target), by the rules in the module's docstring; None: use the heuristic."""
    return next(iter(rank_winners(measurements, verdicts, layer_ranks)), None)
