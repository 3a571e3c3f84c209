"""The data of the report's sections. Each function returns None or an empty list where its data is missing."""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from svod.bench.report import charts
from svod.bench.report.charts import Bar, Frame, Point, Roof, Shape
from svod.bench.report.data import FATES, Course, Fate, Overview, TunedKernel, Tuning
from svod.bench.report.words import (
    CUT_SHORT,
    FASTER,
    NEAR_CEILING,
    case_id,
    kernel_title,
    listed,
    over_best_peer,
    over_heuristic,
    peer_names,
    short_name,
    side_of,
)
from svod.bench.results import CaseResult, ContestantResult, Run, Speedup
from svod.bench.roofline import Ceilings
from svod.bench.summary import ALL, BEST_PEER, group_results, suite_results
from svod.system import quantities as q

PEER_CLASSES = ("peer-a", "peer-b", "peer-c", "peer-d", "peer-e", "peer-f")
NEXT = 6                # kernels in "what to tune next"


class Column(NamedTuple):
    """A column of a table. The class `num` aligns numbers; `minor` leaves the column out on narrow screens. `help` is shown on hover."""

    title: str
    cls: str = ""
    help: str = ""


def minor_columns(names: Sequence[str]) -> list[Column]:
    """Columns of numbers, one for each peer library."""
    return [Column(name, "num minor") for name in names]


def is_minor_fate(name: str) -> bool:
    """Whether narrow screens leave out the column of a fate."""
    return name not in ("raced", "confirmed")


def fate_columns(fates: Sequence[Fate]) -> list[Column]:
    """Columns that count candidates by fate."""
    return [Column(name, "num minor" if is_minor_fate(name) else "num", meaning) for name, meaning in fates]


def is_minor_kind(kind: str) -> bool:
    """Whether narrow screens leave out the column of a kind of traffic."""
    return kind.endswith("stream") or kind == "write"


def kind_columns(kinds: Sequence[str]) -> list[Column]:
    """Columns of bandwidths, one for each kind of traffic."""
    return [Column(k.replace("_stream", ", streamed"), "num minor" if is_minor_kind(k) else "num") for k in kinds]


# -- roofline ---------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Roofline:
    """The plot, the machine's ceilings, and remarks that stand below the plot."""

    plot: Frame
    roofs: Sequence[Roof]
    has_peers: bool
    notes: Sequence[str]


def roofline(view: Overview, tuning: Tuning | None) -> Roofline | None:
    """Every kernel that computes, under the machine's ceilings."""
    timed = [(c, c.svod) for c in view.cases if c.svod is not None and c.svod.median]
    drawn = [(c, best) for c, best in timed if _has_intensity(c)]
    points = [_case_point(c, best) for c, best in drawn]
    if all(c.suite == "models" for c in view.cases) and tuning is not None:
        points += [_kernel_point(k, k.seconds) for k in tuning.kernels if k.seconds and k.flops and k.bytes]
    if not points:
        return None
    ceilings = view.ceilings or (tuning.ceilings if tuning is not None else None)
    roofs = roofs_of(ceilings, [c.dtype for c in view.cases]) if ceilings is not None else []
    notes = []
    if not roofs:
        notes.append("The machine's ceilings are not known here, so no roofs are drawn: `svod-bench ceilings` measures them.")
    if len(points) > len(drawn) > 0:
        notes.append("Beside the models stand the kernels that the tuning database knows, as they were confirmed.")
    if len(drawn) < len(timed):
        notes.append(f"Not on this plot, because they do no arithmetic: {listed([c.title for c, _ in timed if not _has_intensity(c)])}.")
    return Roofline(charts.roofline(points, roofs), roofs, any(p.peer for p in points), notes)


def roofs_of(ceilings: Ceilings, dtypes: Sequence[str]) -> list[Roof]:
    """The ceilings of all cores as lines: multiply-adds of the dtypes that occur, and the bandwidth of each level below L1."""
    peaks = {dtype: many for dtype, (_, many) in ceilings.flops.items()}
    roofs = [Roof("f32 FMA", peaks["float32"], True, "flat")] if "float32" in peaks else []
    if "float64" in dtypes and "float64" in peaks:
        roofs.append(Roof("f64 FMA", peaks["float64"], True, "flat second"))
    for level, name in (("l2", "L2"), ("l3", "L3"), ("memory", "memory")):
        kinds = ceilings.bandwidth.get(level, {})
        if kinds:
            roofs.append(Roof(name, max(many for kind, (_, many) in kinds.items() if not kind.startswith("write")), False, level))
    return roofs


def _has_intensity(case: CaseResult) -> bool:
    return bool(case.flops and case.bytes_read + case.bytes_written)


def _case_point(case: CaseResult, best: ContestantResult) -> Point:
    heuristic, peer = case.outcome("heuristic"), case.outcome(case.best_peer or "")
    assert best.median, "cases without a time of svod were left out"
    rate = case.flops / best.median
    share = f", {q.percent(best.ceiling_share)} of its ceiling" if best.ceiling_share else ""
    before = case.flops / heuristic.median if heuristic is not None and heuristic.median and best.name != "heuristic" else None
    return Point(case.title, f"#{case_id(case)}", case.flops / (case.bytes_read + case.bytes_written), rate,
                 f"{case.title}: {q.flops_rate(rate)}, {q.seconds(best.median)}{share}", before,
                 case.flops / peer.median if peer is not None and peer.median else None)


def _kernel_point(k: TunedKernel, seconds: float) -> Point:
    return Point(short_name(k), f"#{k.id}", k.flops / k.bytes, k.flops / seconds,
                 f"{kernel_title(k)}: {q.flops_rate(k.flops / seconds)}, {q.seconds(seconds)}",
                 k.flops / k.heuristic if k.heuristic and (k.gain or 1) > FASTER else None)


# -- speed-ups --------------------------------------------------------------------------------------

class Figure(NamedTuple):
    """A speed-up in words, its class, and what it is over."""

    speedup: str
    cls: str
    over: str


@dataclass(frozen=True)
class SpeedupRow:
    """A kernel's bars. `under` stands in small print below the name."""

    name: str
    href: str
    under: str
    noisy: str
    label: str
    height: int
    shapes: Sequence[Shape]
    figures: Sequence[Figure]


class SpeedupGroup(NamedTuple):
    """A group of kernels, with its geometric means in words."""

    name: str
    means: str
    rows: Sequence[SpeedupRow]


@dataclass(frozen=True)
class Speedups:
    """Rows by group. `peers` maps each library to the class of its dots; `left_out` counts the kernels that gained nothing."""

    axis: Sequence[Shape]
    groups: Sequence[SpeedupGroup]
    peers: Mapping[str, str] = field(default_factory=dict)
    left_out: int = 0


def speedups(view: Overview) -> Speedups | None:
    """A row for each case, with bars against the best peer and the heuristic."""
    rows = [(c, over_best_peer(c), over_heuristic(c)) for c in view.cases if c.svod is not None]
    rows = [(c, peer, own) for c, peer, own in rows if peer is not None or own is not None]
    if not rows:
        return None
    names = peer_names(view)
    classes = dict(zip(names, PEER_CLASSES * (1 + len(names) // len(PEER_CLASSES)), strict=False))
    scale = charts.speedup_scale([v for _, a, b in rows for s in (a, b) if s is not None for v in (s.median, s.low, s.high) if v])
    groups: dict[str, list[SpeedupRow]] = {}
    for case, peer, heuristic in rows:
        groups.setdefault(case.group, []).append(_speedup_row(case, peer, heuristic, classes, scale))
    means = {g.name: _means(g.speedups) for g in group_results(view.cases)}
    return Speedups(charts.speedup_axis(scale), [SpeedupGroup(g, means.get(g, ""), members) for g, members in groups.items()], classes)


def _speedup_row(case: CaseResult, peer: Speedup | None, heuristic: Speedup | None, classes: Mapping[str, str],
                 scale: charts.Scale) -> SpeedupRow:
    """The bars and figures of one case. `classes` maps each library to the class of its dot."""
    assert case.svod is not None, "cases without a time of svod were left out"
    bars, figures = [], []
    if peer is not None:
        cls, best = side_of(peer), case.best_peer or ""
        bars.append(Bar(peer.median, peer.low, peer.high, cls, f"{q.times(peer.median)} {best}{_interval(peer.low, peer.high)}"))
        figures.append(Figure(q.times(peer.median), cls, best))
    if heuristic is not None:
        tuned, interval = case.outcome("tuned"), _interval(heuristic.low, heuristic.high)
        bars.append(Bar(heuristic.median, heuristic.low, heuristic.high, "gain", f"{q.times(heuristic.median)} heuristic{interval}"))
        same = tuned is not None and tuned.same_as == "heuristic"
        figures.append(Figure(q.times(heuristic.median), "", "same code" if same else "heuristic"))
    others = {o.name: s for o in case.peers if (s := case.svod.speedups.get(o.name)) is not None and o.name != case.best_peer}
    dots = [Bar(s.median, None, None, classes[n], f"{q.times(s.median)} {n}{_interval(s.low, s.high)}")
            for n, s in others.items()]
    return SpeedupRow(case.title, f"#{case_id(case)}", "", case.noisy or "", f"{case.title}: " + ", ".join(b.title for b in bars),
                      charts.speedup_height(bars), charts.speedup_row(bars, dots, scale), figures)


def _interval(low: float | None, high: float | None) -> str:
    return f" ({q.digits(low)}–{q.digits(high)}×)" if low is not None and high is not None else ""


def _means(speedups: Mapping[str, float]) -> str:
    """The geometric means of a group in words."""
    peer = speedups.get(f"tuned/{BEST_PEER}", speedups.get(f"heuristic/{BEST_PEER}"))
    named = ((peer, "the best peer"), (speedups.get("tuned/heuristic"), "the heuristic"))
    parts = [f"{q.times(value)} {other}" for value, other in named if value is not None]
    return f"geometric mean {listed(parts)}" if parts else ""


def database_speedups(tuning: Tuning | None) -> Speedups | None:
    """The winners of a database over the heuristic, largest gain first. Kernels that gained nothing are shown only if no kernel gained."""
    kernels = sorted(tuning.kernels, key=lambda k: -k.speedup.median if k.speedup is not None else 0.0) if tuning is not None else []
    won = [(k, s) for k in kernels if (s := k.speedup) is not None]
    if not won:
        return None
    scale = charts.speedup_scale([v for _, s in won for v in (s.low, s.median, s.high)])
    gained = [(k, s) for k, s in won if abs((k.gain or 1.0) - 1.0) >= FASTER - 1.0] or won
    rows = []
    for k, s in gained:
        bar = Bar(s.median, s.low, s.high, "ahead" if s.low > 1 else "level", f"{q.times(s.median)} heuristic{_interval(s.low, s.high)}")
        rows.append(SpeedupRow(short_name(k), f"#{k.id}", k.shape, "", f"{kernel_title(k)}: {bar.title}", charts.speedup_height([bar]),
                               charts.speedup_row([bar], [], scale),
                               [Figure(q.times(s.median), "", f"{q.seconds(k.heuristic)} → {q.seconds(k.seconds)}")]))
    return Speedups(charts.speedup_axis(scale), [SpeedupGroup("", "", rows)], left_out=len(won) - len(gained))


# -- what to tune next, suites, machine -------------------------------------------------------------

class Room(NamedTuple):
    """A case below its ceiling: svod's best, and how many times faster the ceiling is."""

    case: CaseResult
    best: ContestantResult
    factor: float


def furthest_below(view: Overview) -> list[Room]:
    """The cases furthest below their ceilings."""
    rooms = [Room(c, c.svod, 1 / c.svod.ceiling_share) for c in view.cases
             if c.svod is not None and c.svod.median and c.bound is not None and c.svod.ceiling_share is not None
             and c.svod.ceiling_share < NEAR_CEILING]
    return sorted(rooms, key=lambda r: -r.factor)[:NEXT]


def cut_short(tuning: Tuning | None) -> list[TunedKernel]:
    """The longest kernels whose latest search had more to try."""
    unfinished = [k for k in tuning.kernels if k.courses and k.courses[-1].ended_by in CUT_SHORT] if tuning is not None else []
    return sorted(unfinished, key=lambda k: -(k.seconds or 0.0))[:NEXT]


class SuiteRow(NamedTuple):
    """A suite. `over_peer` and `heuristic` (over tuned) are geometric means; `search` and `longest` are seconds; `least` is a rate over
    that of the round neighbour."""

    name: str
    cases: int
    over_peer: float | None
    heuristic: float | None
    search: float | None
    longest: float | None
    longest_case: str
    least: float | None
    least_case: str


def suite_rows(view: Overview) -> list[SuiteRow]:
    """One line per suite."""
    rows = []
    for s in suite_results(view.cases):
        means, search, rates = s.means.speedups, s.searching, s.rates
        rows.append(SuiteRow(s.name, s.cases, means.get(f"tuned/{BEST_PEER}", means.get(f"heuristic/{BEST_PEER}")),
                             means.get("heuristic/tuned"), search.median if search else None, search.most if search else None,
                             search.longest if search else "", rates.least if rates else None, rates.lowest if rates else ""))
    return rows


def mean_of(run: Run, key: str) -> float | None:
    """A geometric mean over all cases of a run."""
    group = next((g for g in run.groups if g.name == ALL), run.groups[0] if len(run.groups) == 1 else None)
    return group.speedups.get(key) if group is not None else None


# -- searches ---------------------------------------------------------------------------------------

def total_fates(courses: Sequence[Course]) -> dict[str, int]:
    """The candidates of several searches by fate."""
    return {name: sum(c.fates[name] for c in courses) for name, _ in FATES}


def fates_shown(total: Mapping[str, int]) -> list[Fate]:
    """The fates that some candidate met."""
    return [fate for fate in FATES if total[fate.name]]


def searched_kernels(tuning: Tuning) -> list[TunedKernel]:
    """The kernels for which more than the heuristic was tried."""
    return [k for k in tuning.kernels if sum(c.candidates for c in k.courses) > 1]


def courses_told(k: TunedKernel) -> list[tuple[int, Course]]:
    """The searches of a kernel with their numbers, without those that timed only the heuristic; the last search if all are such."""
    numbered = list(enumerate(k.courses, 1))
    return [(n, c) for n, c in numbered if len(c.trials) > 1] or numbered[-1:]


_KEYWORDS = re.compile(r"^(\s*)(phase \d+|parallel|for all|for|reduce|tile|unroll|copy|stage)\b")


def nest_lines(nest: str) -> Iterator[tuple[str, str, str, str]]:
    """Each line of a loop nest as (indent, class, first words, rest)."""
    for line in nest.split("\n"):
        match = _KEYWORDS.match(line)
        yield (match[1], "w-" + match[2].split()[0], match[2], line[match.end():]) if match is not None else ("", "", "", line)
