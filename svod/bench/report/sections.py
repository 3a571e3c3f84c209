"""The data of the report's sections. Each function returns None or an empty list if its data is missing."""
from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from svod.bench.report import charts
from svod.bench.report.charts import Bar, Frame, Roof, RooflinePoint, Shape
from svod.bench.report.data import FATES, NEXT_WIDTH, Course, Fate, Overview, TimedSize, TunedKernel, Tuning
from svod.bench.report.headline import ceilings_of
from svod.bench.report.words import (
    FASTER,
    NEAR_CEILING,
    case_id,
    kernel_title,
    listed,
    over_best_peer,
    over_heuristic,
    peer_names,
    search_seconds,
    short_name,
    side_of,
)
from svod.bench.results import MODEL_SUITES, CaseResult, ContestantResult, Run, Speedup
from svod.bench.roofline import Ceilings
from svod.bench.suites.suites import SUITES
from svod.bench.summary import ALL, BEST_PEER, group_results, suite_results
from svod.system import quantities as q

PEER_CLASSES = ("peer-a", "peer-b", "peer-c", "peer-d", "peer-e", "peer-f")
NEXT = 6                # number of kernels in "what to tune next"
COPIED_OPTIONS = ("--device", "--db", "--budget", "--peers")    # options of a run that are copied to the suggested search command


class Column(NamedTuple):
    """A column of a table. `cls`: CSS classes; `num` aligns numbers, `minor` hides the column on narrow screens. `help` is shown on
    hover."""

    title: str
    cls: str = ""
    help: str = ""


def minor_columns(names: Sequence[str]) -> list[Column]:
    """Columns of numbers, one for each peer library, hidden on narrow screens."""
    return [Column(name, "num minor") for name in names]


def is_minor_fate(name: str) -> bool:
    """Whether narrow screens hide the column of a fate."""
    return name not in ("raced", "confirmed")


def fate_columns(fates: Sequence[Fate]) -> list[Column]:
    """Columns that count candidates by fate."""
    return [Column(name, "num minor" if is_minor_fate(name) else "num", meaning) for name, meaning in fates]


def is_minor_kind(kind: str) -> bool:
    """Whether narrow screens hide the column of a kind of traffic."""
    return kind.endswith("stream") or kind == "write"


def kind_columns(kinds: Sequence[str]) -> list[Column]:
    """Columns of bandwidths, one for each kind of traffic."""
    return [Column(k.replace("_stream", ", streamed"), "num minor" if is_minor_kind(k) else "num") for k in kinds]


# -- roofline ---------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Roofline:
    """The plot, the machine's ceilings, and notes shown below the plot."""

    plot: Frame
    roofs: Sequence[Roof]
    has_peers: bool
    notes: Sequence[str]


def roofline(view: Overview, tuning: Tuning | None) -> Roofline | None:
    """Plot every kernel with arithmetic under the machine's ceilings."""
    timed = [(c, c.svod) for c in view.cases if c.svod is not None and c.svod.median]
    drawn = [(c, best) for c, best in timed if _has_intensity(c)]
    points = [_case_point(c, best) for c, best in drawn]
    if all(c.suite in MODEL_SUITES for c in view.cases) and tuning is not None:
        points += [_kernel_point(k, s) for k in tuning.kernels for s in k.sizes if s.flops and s.bytes]
    if not points:
        return None
    ceilings = ceilings_of(view, tuning)
    roofs = roofs_of(ceilings, [c.dtype for c in view.cases]) if ceilings is not None else []
    notes = [*_notes_on_roofs(ceilings), *_notes_on_points(tuning if len(points) > len(drawn) else None, bool(drawn))]
    if len(drawn) < len(timed):
        notes.append(f"Not on this plot, because they do no arithmetic: {listed([c.title for c, _ in timed if not _has_intensity(c)])}.")
    return Roofline(charts.roofline(points, roofs), roofs, any(p.peer for p in points), notes)


def _notes_on_roofs(ceilings: Ceilings | None) -> Iterator[str]:
    if ceilings is None:
        yield "The machine's ceilings are not known here, so no roofs are drawn: `svod-bench ceilings` measures them."
    elif ceilings.busy:
        yield ("The roofs are drawn pale: the machine was busy while they were measured, so they are too low. `svod-bench ceilings` on a "
               "quiet machine measures them again.")


def _notes_on_points(tuning: Tuning | None, beside_models: bool) -> Iterator[str]:
    """Notes about the database's kernels on the plot."""
    if tuning is None:
        return
    if beside_models:
        yield "Beside the models stand the kernels that the tuning database knows, as they were confirmed."
    if any(s.at for k in tuning.kernels for s in k.sizes):
        yield "A kernel with variables has one point for each size that it was timed at."


def roofs_of(ceilings: Ceilings, dtypes: Sequence[str]) -> list[Roof]:
    """The ceilings of all cores as lines: multiply-adds of the given dtypes, and the bandwidth of each level below L1."""
    peaks = {dtype: many for dtype, (_, many) in ceilings.flops.items()}
    busy = ceilings.busy is not None
    doubt = " doubtful" if busy else ""
    roofs = [Roof("f32 FMA", peaks["float32"], True, f"flat{doubt}", busy)] if "float32" in peaks else []
    if "float64" in dtypes and "float64" in peaks:
        roofs.append(Roof("f64 FMA", peaks["float64"], True, f"flat second{doubt}", busy))
    for level, name in (("l2", "L2"), ("l3", "L3"), ("memory", "memory")):
        kinds = ceilings.bandwidth.get(level, {})
        if kinds:
            rate = max(many for kind, (_, many) in kinds.items() if not kind.startswith("write"))
            roofs.append(Roof(name, rate, False, level + doubt, busy))
    return roofs


def _has_intensity(case: CaseResult) -> bool:
    return bool(case.flops and case.bytes_read + case.bytes_written)


def _case_point(case: CaseResult, best: ContestantResult) -> RooflinePoint:
    heuristic, peer = case.outcome("heuristic"), case.outcome(case.best_peer or "")
    assert best.median, "cases without a time of svod were left out"
    rate = case.flops / best.median
    share = f", {q.percent(best.ceiling_share)} of its ceiling" if best.ceiling_share else ""
    before = case.flops / heuristic.median if heuristic is not None and heuristic.median and best.name != "heuristic" else None
    return RooflinePoint(case.title, f"#{case_id(case)}", case.flops / (case.bytes_read + case.bytes_written), rate,
                 f"{case.title}: {q.flops_rate(rate)}, {q.seconds(best.median)}{share}", before,
                 case.flops / peer.median if peer is not None and peer.median else None)


def _kernel_point(k: TunedKernel, size: TimedSize) -> RooflinePoint:
    rate, at = size.flops / size.seconds, f" at {size.at}" if size.at else ""
    return RooflinePoint(f"{short_name(k)}{at}", f"#{k.id}", size.flops / size.bytes, rate,
                 f"{kernel_title(k)}{at}: {q.flops_rate(rate)}, {q.seconds(size.seconds)}",
                 size.flops / size.heuristic if (k.gain or 1) > FASTER else None)


# -- speed-ups --------------------------------------------------------------------------------------

class Figure(NamedTuple):
    """A speed-up in words, its CSS class, and the name of the contestant that svod is compared with."""

    speedup: str
    cls: str
    over: str


@dataclass(frozen=True)
class SpeedupRow:
    """A kernel's bars. `under` is shown in small print below the name."""

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
    """Rows by group. `peers` maps each library to the CSS class of its dots; `left_out` is the number of kernels that gained nothing."""

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
    """The bars and figures of one case. `classes` maps each library to the CSS class of its dot."""
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
    kernels = sorted(tuning.kernels, key=lambda k: -(k.gain or 0.0)) if tuning is not None else []
    won = [(k, gain, k.speedup) for k in kernels if (gain := k.gain) is not None and k.speedup is not None]
    if not won:
        return None
    scale = charts.speedup_scale([v for _, gain, s in won for v in (s.low, gain, s.high)])
    gained = [w for w in won if abs(w[1] - 1.0) >= FASTER - 1.0] or won
    rows = []
    for k, gain, s in gained:
        bar = Bar(gain, s.low, s.high, "ahead" if s.low > 1 else "level", f"{q.times(gain)} heuristic{_interval(s.low, s.high)}")
        rows.append(SpeedupRow(short_name(k), f"#{k.id}", k.shape, "", f"{kernel_title(k)}: {bar.title}", charts.speedup_height([bar]),
                               charts.speedup_row([bar], [], scale),
                               [Figure(q.times(gain), "", f"{q.seconds(k.heuristic)} → {q.seconds(k.seconds)}")]))
    return Speedups(charts.speedup_axis(scale), [SpeedupGroup("", "", rows)], left_out=len(won) - len(gained))


# -- what to tune next, suites, machine -------------------------------------------------------------

class BelowCeiling(NamedTuple):
    """A case below its ceiling: svod's best contestant, the speed-up that the ceiling allows, and the command of a wider search."""

    case: CaseResult
    best: ContestantResult
    factor: float
    command: str


def furthest_below(view: Overview) -> list[BelowCeiling]:
    """The cases furthest below their ceilings, at most `NEXT`."""
    rooms = [BelowCeiling(c, c.svod, 1 / c.svod.ceiling_share, _search_command(c, view.source[c.name])) for c in view.cases
             if c.svod is not None and c.svod.median and c.bound is not None and c.svod.ceiling_share is not None
             and c.svod.ceiling_share < NEAR_CEILING]
    return sorted(rooms, key=lambda r: -r.factor)[:NEXT]


def _search_command(case: CaseResult, run: Run) -> str:
    """The command of a wider search for a case than its run made. If the run searched the case, the command doubles the width. Otherwise
    the database may have a result of a wider search already, so the command uses --fresh."""
    settings = run.settings
    drawn = f" --seed {settings.seed} --count {settings.count}" if settings.count is not None and case.suite not in SUITES else ""
    given = "".join(f" {name} {shlex.quote(value)}" for name, value in _options(settings.command) if name in COPIED_OPTIONS)
    how = f"{2 * settings.beam}" if settings.beam is not None and search_seconds(case) else f"{settings.beam or NEXT_WIDTH} --fresh"
    return f"svod-bench run --suite {case.suite} --kernels {case.name}{drawn}{given} --beam {how}"


def _options(command: str) -> list[tuple[str, str]]:
    """The options of a command and their values, written as two words or as one: --db t.db, --db=t.db."""
    words = shlex.split(command)
    apart = [word.partition("=") for word in words if word.startswith("--") and "=" in word]
    return [*itertools.pairwise(words), *((name, value) for name, _, value in apart)]


def cut_short(tuning: Tuning | None) -> list[TunedKernel]:
    """The kernels with the longest times among those for which a search of width `NEXT_WIDTH` has more candidates to try."""
    unfinished = [k for k in tuning.kernels if k.left is not None] if tuning is not None else []
    return sorted(unfinished, key=lambda k: -(k.seconds or 0.0))[:NEXT]


def takes_part(view: Overview, contestant: str) -> bool:
    """Whether this contestant occurs in any case."""
    return any(c.outcome(contestant) is not None for c in view.cases)


class SuiteRow(NamedTuple):
    """A suite. `over_peer` and `heuristic` (heuristic over tuned) are geometric means; `search` and `longest` are seconds; `least` is
    the lowest rate divided by the round neighbour's."""

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
    """The geometric mean named `key` over all cases of a run."""
    group = next((g for g in run.groups if g.name == ALL), run.groups[0] if len(run.groups) == 1 else None)
    return group.speedups.get(key) if group is not None else None


# -- searches ---------------------------------------------------------------------------------------

def total_fates(courses: Sequence[Course]) -> dict[str, int]:
    """The candidates of several searches by fate."""
    return {name: sum(c.fates[name] for c in courses) for name, _ in FATES}


def fates_shown(total: Mapping[str, int]) -> list[Fate]:
    """The fates that at least one candidate had."""
    return [fate for fate in FATES if total[fate.name]]


def searched_kernels(tuning: Tuning) -> list[TunedKernel]:
    """The kernels with candidates besides the heuristic."""
    return [k for k in tuning.kernels if sum(c.candidates for c in k.courses) > 1]


def courses_told(k: TunedKernel) -> list[tuple[int, Course]]:
    """The searches of a kernel with their numbers, without searches that timed only the heuristic; the last search if all are such."""
    numbered = list(enumerate(k.courses, 1))
    return [(n, c) for n, c in numbered if len(c.trials) > 1] or numbered[-1:]


_KEYWORDS = re.compile(r"^(\s*)(phase \d+|parallel|for all|for|reduce|tile|unroll|copy|stage)\b")


def nest_lines(nest: str) -> Iterator[tuple[str, str, str, str]]:
    """Each line of a loop nest as (indent, CSS class, first words, rest)."""
    for line in nest.split("\n"):
        match = _KEYWORDS.match(line)
        yield (match[1], "w-" + match[2].split()[0], match[2], line[match.end():]) if match is not None else ("", "", "", line)
