"""Computes the shapes of the report's charts: the positions of lines, marks and labels. `templates/charts.html` draws them as inline SVG.

Horizontal positions are fractions of the width and vertical ones are pixels: a chart fills its width, while its text and marks keep their
size. Labels that must not collide are placed twice, for a wide and for a narrow plot; the style sheet shows one of the two. Matplotlib and
Vega-Lite were tried: they draw a picture of one fixed size, do not keep labels apart, and would add 35 and 94 MB.

Every chart has a name for screen readers, and a table repeats its figures. Marks show titles on hover; marks of kernels link to the
kernel's row.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from svod.bench.report.data import SEVERAL, START, Course, Trial
from svod.system import quantities as q

WIDE, NARROW = 860.0, 250.0     # plot widths in pixels for which labels are placed
LETTER = 6.3                    # average width in pixels of a label's characters
ROOF_HEIGHT = 400
COURSE_HEIGHT = 190
MAX_POINTS = 400                # most candidates drawn in a search's chart; the slowest ones beyond it are left out
SLOWEST_SHOWN = 5.0             # multiple of the heuristic's time; slower candidates are drawn at the upper edge

# The symbol of each kind of step, so that kinds differ in shape as well as in colour.
STEP_SYMBOLS: dict[str, str] = {
    START: "start", "register tile": "dot", "loops": "square", "staging": "triangle", "cores": "bar", "memory hints": "cross",
    SEVERAL: "diamond"}


def slug(kind: str) -> str:
    """The CSS class of a kind of step."""
    return "k-" + kind.replace(" ", "-")


# -- shapes: x in parts of the width, y in pixels from the top --------------------------------------

@dataclass(frozen=True, slots=True)
class Line:
    shape: ClassVar[str] = "line"
    x1: float
    y1: float
    x2: float
    y2: float
    cls: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    shape: ClassVar[str] = "text"
    x: float
    y: float
    text: str
    cls: str
    anchor: str = "middle"
    dx: float = 0.0


@dataclass(frozen=True, slots=True)
class Symbol:
    shape: ClassVar[str] = "symbol"
    name: str
    x: float
    y: float
    cls: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Circle:
    shape: ClassVar[str] = "dot"
    x: float
    y: float
    r: float
    cls: str
    title: str = ""
    href: str = ""      # a link, with a larger target around the dot


@dataclass(frozen=True, slots=True)
class Rect:
    shape: ClassVar[str] = "rect"
    x: float
    y: float
    width: float
    height: float
    cls: str
    title: str
    rx: float = 0.0


Shape = Line | Text | Symbol | Circle | Rect


# -- axes -------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Scale:
    """Maps values from `low` … `high` to 0 … 1, logarithmically or linearly."""

    low: float
    high: float
    logarithmic: bool

    def at(self, value: float) -> float:
        """The position of a value from 0 to 1; below or above if it is outside the scale."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def clamped(self, value: float) -> float:
        """The position of a value; 0 or 1 if it is outside the scale."""
        return min(1.0, max(0.0, self.at(value)))

    def ticks(self, most: int) -> list[float]:
        """Return the values of the axis' ticks: round numbers within the scale, about `most` of them or fewer."""
        if not self.logarithmic or self.high < 3 * self.low:
            step = _round_up((self.high - self.low) / most)
            return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
            values = [s * 10.0**d for d in decades for s in steps if self.low * 0.999 <= s * 10.0**d <= self.high * 1.001]
            if len(values) <= most:
                return values
        return values[::-(-len(values) // most)]


def _round_up(x: float) -> float:
    """The next larger value of the form 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(x))
    return next(s * power for s in (1, 2, 5, 10) if s * power >= x * 0.999)


@dataclass(frozen=True)
class Frame:
    """A plot: its axes and the shapes in it. `height` is the height in pixels of the plot area; the captions of x are below it."""

    x: Scale
    y: Scale
    height: float
    y_text: Callable[[float], str]
    x_title: str
    y_title: str
    label: str = ""
    x_ticks: int = 7
    y_ticks: int = 6
    shapes: tuple[Shape, ...] = ()

    def up(self, value: float) -> float:
        """The distance of a value from the top in pixels."""
        return self.height * (1 - self.y.at(value))

    def rows(self) -> list[tuple[float, str]]:
        """The ticks of y: (pixels from the top, caption)."""
        return [(self.up(v), self.y_text(v)) for v in self.y.ticks(self.y_ticks)]

    def columns(self) -> list[tuple[float, str]]:
        """The ticks of x: (part of the width, caption)."""
        return [(self.x.at(v), f"{v:g}") for v in self.x.ticks(self.x_ticks)]


# -- roofline ---------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Roof:
    """A ceiling: `rate` in flops per second (flat line) or bytes per second (slanted line). `is_doubtful`: measured on a busy machine."""

    name: str
    rate: float
    flat: bool
    cls: str
    is_doubtful: bool = False

    @property
    def rate_words(self) -> str:
        return q.flops_rate(self.rate) if self.flat else q.bytes_rate(self.rate)


@dataclass(frozen=True)
class RooflinePoint:
    """A kernel on the roofline: its flops per byte, and the flops per second of svod (`rate`), the heuristic (`before`) and the best
    peer."""

    name: str
    href: str
    intensity: float
    rate: float
    title: str
    before: float | None = None
    peer: float | None = None


def roofline(points: Sequence[RooflinePoint], roofs: Sequence[Roof]) -> Frame:
    """A plot of operations per second over operations per byte, both logarithmic, with the machine's ceilings."""
    rates = [r for p in points for r in (p.rate, p.before, p.peer) if r]
    flat = max((r.rate for r in roofs if r.flat), default=0.0)
    low_x, high_x = min(p.intensity for p in points) / 1.6, max(p.intensity for p in points) * 1.6
    slants = [r for r in roofs if not r.flat]
    if flat and slants:
        high_x = max(high_x, 3 * flat / min(r.rate for r in slants))
    low_y, high_y = min(*rates, *(r.rate for r in roofs if r.flat), math.inf) / 2, max(*rates, flat) * 1.7
    f = Frame(Scale(low_x, high_x, True), Scale(low_y, high_y, True), ROOF_HEIGHT, _short_rate,
              "operations per byte from and to memory", "FLOP/s")
    drawn_roofs = list(_draw_roofs(f, roofs, flat))
    names = [*_place_names(points, roofs, f, WIDE, "wide"), *_place_names(points, roofs, f, NARROW, "narrow")]
    leaders = [s for s in names if isinstance(s, Line)]
    shapes = [*leaders, *drawn_roofs, *_draw_points(f, points), *(s for s in names if isinstance(s, Text))]
    return replace(f, shapes=tuple(shapes), label=f"Roofline with {len(points)} kernels; the same figures stand in the table below")


def _short_rate(value: float) -> str:
    """A rate as the caption of a tick: 300 G."""
    return next((f"{value / size:g} {unit}" for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if value >= size), f"{value:g}")


def _draw_roofs(f: Frame, roofs: Sequence[Roof], flat: float) -> Iterator[Line]:
    """The ceilings as lines. `flat`: the highest rate of arithmetic, or 0."""
    slants = [r for r in roofs if not r.flat]
    for roof in roofs:
        title = f"{roof.name}: {roof.rate_words}"
        if roof.flat:
            start = min((roof.rate / r.rate for r in slants), default=f.x.low)
            y = f.up(roof.rate)
            yield Line(max(0.0, f.x.at(max(start, f.x.low))), y, 1, y, f"roof {roof.cls}", title)
        elif (span := _span(f, roof, flat)) is not None:
            x0, x1 = span
            yield Line(f.x.at(x0), f.up(roof.rate * x0), f.x.at(x1), f.up(roof.rate * x1), f"roof {roof.cls}", title)


def _span(f: Frame, roof: Roof, flat: float) -> tuple[float, float] | None:
    """The range of intensities in which a slanted ceiling is drawn; None if it is outside the plot."""
    x0, x1 = max(f.x.low, f.y.low / roof.rate), min(f.x.high, (flat or f.y.high) / roof.rate)
    return (x0, x1) if x1 > x0 else None


def _draw_points(f: Frame, points: Sequence[RooflinePoint]) -> Iterator[Shape]:
    """The kernels, drawn over the marks of the heuristic and of the best library."""
    ordered = sorted(points, key=lambda p: p.name)
    for p in ordered:
        x = f.x.at(p.intensity)
        if p.before:
            yield Line(x, f.up(p.before), x, f.up(p.rate), "stem")
            yield Circle(x, f.up(p.before), 3, "heuristic hollow")
        if p.peer:
            yield Symbol("diamond", x, f.up(p.peer), "peer hollow")
    for p in ordered:
        yield Circle(f.x.at(p.intensity), f.up(p.rate), 5, "tuned", p.title, p.href)


# Positions of a label relative to its point, best first: (anchor, pixels to the right, pixels down). Far labels get a line to their point.
_NEAR = (("start", 9.0, 4.0), ("end", -9.0, 4.0), ("middle", 0.0, -10.0), ("middle", 0.0, 18.0), ("start", 9.0, 18.0), ("end", -9.0, 18.0),
         ("start", 9.0, -10.0), ("end", -9.0, -10.0))
_FAR = tuple((anchor, 4.0 * (anchor == "end") - 4.0 * (anchor == "start"), down)
             for down in (42.0, -34.0, 60.0, -52.0, 78.0, 96.0, 114.0, 132.0) for anchor in ("middle", "end", "start"))
_NAME_LENGTHS = (1000, 12, 8, 5)     # most characters of a point's name: complete first, then shorter if there is no space
_Box = tuple[float, float, float, float]


def _place_names(points: Sequence[RooflinePoint], roofs: Sequence[Roof], f: Frame, width: float, cls: str) -> Iterator[Shape]:
    """The names of the ceilings, and of as many points as there is space for, without overlaps."""
    taken: list[_Box] = []
    for p in points:
        x = f.x.at(p.intensity) * width
        taken += [(x - 6, f.up(rate) - 6, x + 6, f.up(rate) + 6) for rate in (p.rate, p.before, p.peer) if rate]
    labels: list[_Box] = []
    yield from _place_roof_names(roofs, f, width, cls, taken, labels)
    taken += [(0.0, y - 2, width, y + 2) for y in (f.up(roof.rate) for roof in roofs if roof.flat)]
    yield from _place_point_names(points, f, width, cls, taken, labels)


def _place_roof_names(roofs: Sequence[Roof], f: Frame, width: float, cls: str, marks: Sequence[_Box], labels: list[_Box]) -> Iterator[Text]:
    """The name of each ceiling next to its line: for a flat one at the right end above the line, for a slanted one at the first position
    along it, above or below, that is free of lines, marks and names. Appends the boxes of the names to `labels`."""
    flat = max((r.rate for r in roofs if r.flat), default=0.0)
    lines: list[_Box] = []
    for roof in roofs:
        if roof.flat:
            y, text = f.up(roof.rate), f"{roof.name} {roof.rate_words}"
            lines.append((0.0, y - 1, width, y + 1))
            labels.append((width - LETTER * len(text) - 2, y - 18, width, y - 2))
            yield Text(1, y - 6, text, f"rooftext halo {cls}", "end", -2)
        elif (span := _span(f, roof, flat)) is not None:
            places = [(f.x.at(x) * width, f.up(roof.rate * x)) for x in _along(span, 200)]
            lines += [(x - 2, y - 2, x + 2, y + 2) for x, y in places]
    for roof in roofs:
        span = None if roof.flat else _span(f, roof, flat)
        w = LETTER * len(roof.name)
        for x, above in ((x, above) for x in _along(span, 60) for above in (True, False)) if span is not None else ():
            at, y = f.x.at(x), f.up(roof.rate * x)
            left, base = (at * width - 6 - w, y - 3) if above else (at * width + 8, y + 13)
            box = (left, base - 10, left + w, base + 3)
            if left >= 2 and left + w <= width and box[1] >= 0 and box[3] <= f.height and _is_free(box, [*lines, *marks, *labels]):
                labels.append(box)
                yield Text(at, base, roof.name, f"rooftext halo {cls}", "end" if above else "start", -6 if above else 8)
                break


def _along(span: tuple[float, float], count: int) -> list[float]:
    """Intensities from one end of a slanted ceiling to the other, evenly spaced in the plot."""
    low, high = span
    return [low * (high / low) ** (i / count) for i in range(count + 1)]


def _place_point_names(points: Sequence[RooflinePoint], f: Frame, width: float, cls: str, taken: Sequence[_Box],
                       labels: list[_Box]) -> Iterator[Shape]:
    """The names of as many points as there is space for, fastest points first. Names that fit next to their points are placed first; the
    others are placed further away, with lines to their points, and shortened if there is no space for the whole name."""
    waiting = sorted(points, key=lambda p: -p.rate)
    for most, places in ((most, places) for most in _NAME_LENGTHS for places in (_NEAR, _FAR)):
        left_over = []
        for p in waiting:
            name = p.name if len(p.name) <= most else p.name[:most - 1] + "…"
            at, y, w = f.x.at(p.intensity), f.up(p.rate), LETTER * len(name)
            for anchor, dx, dy in places:
                left = at * width + dx - (0 if anchor == "start" else w if anchor == "end" else w / 2)
                box = (left, y + dy - 10, left + w, y + dy + 3)
                if left < 0 or left + w > width or y + dy < 10 or y + dy + 3 > f.height or not _is_free(box, [*taken, *labels]):
                    continue
                if places is _FAR:
                    end = y + dy + (5 if dy < 0 else -12)
                    leader = (at * width - 3, min(y, end), at * width + 3, max(y, end))
                    if not _is_free(leader, labels):
                        continue
                    labels.append(leader)
                    yield Line(at, y, at, end, f"leader {cls}")
                labels.append(box)
                yield Text(at, y + dy, name, f"label halo {cls}", anchor, dx)
                break
            else:
                left_over.append(p)
        waiting = left_over


def _is_free(box: _Box, taken: Sequence[_Box]) -> bool:
    left, top, right, bottom = box
    return all(right < x0 or left > x1 or bottom < y0 or top > y1 for x0, y0, x1, y1 in taken)


# -- speed-ups --------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Bar:
    """A speed-up with its interval; `cls` is the CSS class of the other contestant."""

    value: float
    low: float | None
    high: float | None
    cls: str
    title: str


def speedup_scale(values: Sequence[float]) -> Scale:
    """A common scale for all rows of a chart that includes 1 and a margin."""
    low, high = min([0.8, *values]), max([1.25, *values])
    return Scale(max(low / 1.08, 1 / 32), min(high * 1.08, 64.0), True)


def speedup_ticks(scale: Scale) -> list[float]:
    """The ticks of a scale: powers of two, or finer steps on a short scale."""
    short = scale.high / scale.low < 3.5
    steps = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0) if short else tuple(2.0**e for e in range(-5, 7))
    return [s for s in steps if scale.low <= s <= scale.high]


def speedup_height(bars: Sequence[Bar]) -> int:
    """The height in pixels of a row with these bars."""
    return 14 * len(bars) + 6


def speedup_row(bars: Sequence[Bar], dots: Sequence[Bar], scale: Scale) -> list[Shape]:
    """The shapes of a row: bars from 1× to each speed-up, with the 95 % interval as a whisker; `dots`, other contestants, are on the
    line of the first bar."""
    height, one = speedup_height(bars), scale.at(1.0)
    shapes: list[Shape] = [Line(scale.at(t), 0, scale.at(t), height, "grid") for t in speedup_ticks(scale)]
    for i, bar in enumerate(bars):
        y, end = 4 + 14 * i, scale.clamped(bar.value)
        shapes.append(Rect(min(one, end), y, max(abs(end - one), 0.002), 10, bar.cls, bar.title, 1.5))
        if bar.low is not None and bar.high is not None:
            shapes.append(Line(scale.clamped(bar.low), y + 5, scale.clamped(bar.high), y + 5, "whisker"))
    for dot in dots:
        if 0 <= scale.at(dot.value) <= 1:
            shapes.append(Circle(scale.at(dot.value), 9, 3.2, f"{dot.cls} dot", dot.title))
        else:
            beyond = "more" if dot.value > 1 else "less"
            shapes.append(Symbol(beyond, scale.clamped(dot.value), 9, f"{dot.cls} dot", f"{dot.title}, beyond the scale"))
    return [*shapes, Line(one, 0, one, height, "one")]


def speedup_axis(scale: Scale) -> list[Shape]:
    """The captions of the ticks, for the top and bottom of a chart."""
    return [Text(scale.at(t), 13, f"{t:g}×" if t > 0.45 else f"1/{round(1 / t)}×", "tick") for t in speedup_ticks(scale)]


# -- the course of a search -------------------------------------------------------------------------

def course_charts(course: Course) -> list[Frame]:
    """Two charts of a search: the best time over the number of candidates, with every candidate, and the best time over seconds. Empty if
    nothing was timed.

    Candidates are recorded when their round ends, so the chart over seconds shows only the best time."""
    trials = list(course.trials)
    if len(trials) > MAX_POINTS:
        limit = sorted(t.seconds for t in trials)[MAX_POINTS]
        trials = [t for t in trials if t.seconds <= limit or t.kind == START]
    if not trials:
        return []
    last = max(2.0, 1.03 * max(t.number for t in trials))
    over_seconds = Scale(0.0, max(0.1, 1.03 * max(t.at for t in trials)), False)
    return [_course(course, trials, lambda t: float(t.number), Scale(0.5, last, False), "candidates timed", trials),
            _course(course, trials, lambda t: t.at, over_seconds, "seconds since the search began", ())]


def _course(course: Course, trials: Sequence[Trial], x_of: Callable[[Trial], float], across: Scale, x_title: str,
            marked: Sequence[Trial]) -> Frame:
    """A chart of the best time over `x_of`. `marked` are the trials to draw; if it is empty, only trials that were the best at their
    time are drawn."""
    times = [t.seconds for t in trials if marked or t.raced] or [t.seconds for t in trials]
    start = next((t.seconds for t in trials if t.kind == START), course.heuristic or max(times))
    top = max(min(max(times), SLOWEST_SHOWN * start), start * 1.15)
    size, unit = next(((n, u) for n, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if top >= n), (1e-9, "ns"))
    f = Frame(across, Scale(min(times) / 1.12, top * 1.08, True), COURSE_HEIGHT, lambda v: f"{v / size:g}", x_title,
              f"time of one run, {unit}", x_ticks=6, y_ticks=5)
    reference = f.up(start)
    shapes: list[Shape] = [Line(0, reference, 1, reference, "reference", f"heuristic: {q.seconds(start)}")]
    steps = best_steps(trials, x_of)
    for i, (x, t) in enumerate(steps):
        until, after = steps[i + 1] if i + 1 < len(steps) else (f.x.high, None)
        shapes.append(Line(f.x.at(x), f.up(t.seconds), f.x.at(until), f.up(t.seconds), f"best {slug(t.kind)}"))
        if after is not None:
            shapes.append(Line(f.x.at(until), f.up(t.seconds), f.x.at(until), f.up(after.seconds), f"best {slug(after.kind)}"))
    improving = {t.number for _, t in steps}
    for t in marked or [t for _, t in steps]:
        told = t.raced or t.number in improving
        title = f"{t.number}: {q.seconds(t.seconds)}, {t.kind}{'' if t.raced else ' (screened)'}: {t.chain}" if told else ""
        shapes.append(Symbol(STEP_SYMBOLS[t.kind], f.x.at(x_of(t)), max(3.0, f.up(t.seconds)), slug(t.kind) + " faint" * (not t.raced),
                             title))
    shapes.append(Text(1, reference + (-6 if reference > 20 else 14), f"heuristic {q.seconds(start)}", "rooftext halo", "end"))
    best = [q.seconds(t.seconds) for _, t in steps]
    gained = f"from {best[0]} to {best[-1]}" if steps else "no candidate was raced"
    return replace(f, shapes=tuple(shapes), label=f"Best time over {x_title}: {gained}")


def best_steps(trials: Sequence[Trial], x_of: Callable[[Trial], float]) -> list[tuple[float, Trial]]:
    """The points at which the best time fell: (x, trial). Only raced times count, because a screened time may be too low by chance."""
    steps: list[tuple[float, Trial]] = []
    furthest, least = -math.inf, math.inf
    for t in trials:
        if t.raced and t.seconds < least:
            furthest, least = max(x_of(t), furthest), t.seconds
            steps.append((furthest, t))
    return steps


# -- fates of candidates ----------------------------------------------------------------------------

def stacked(parts: Sequence[tuple[str, int]]) -> list[Shape]:
    """One bar divided into parts in proportion to the counts of candidates by fate."""
    total = sum(n for _, n in parts) or 1
    shapes: list[Shape] = []
    x = 0.0
    for name, n in parts:
        cls = f"f-{name.replace(' ', '-')}"
        if n:
            shapes.append(Rect(x, 0, n / total, 22, f"fate {cls}", f"{name}: {n} ({100 * n / total:.0f} %)"))
        if n / total > 0.06:
            shapes.append(Text(x + n / total / 2, 15.5, str(n), f"fatetext {cls}-on"))
        x += n / total
    return shapes
