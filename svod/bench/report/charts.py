"""The report's charts as inline SVG, written here, without a library and without scripts.

Horizontal positions are percentages and vertical ones pixels, so that a chart fills whatever width it has while its text and its marks
keep their size. Where labels must not collide, they are placed twice: for a wide plot and for a narrow one; the style
sheet shows one of the two.

Every chart is an image with a name for screen readers; what it shows stands in a table as well. Marks have titles (hover), and those of
kernels are links to the kernel's row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from svod.bench.report.data import SEVERAL, START, Course, Trial
from svod.bench.report.markup import Markup, join, tag
from svod.system import quantities as q

WIDE, NARROW = 860.0, 250.0  # pixels of a plot that labels are placed for
LETTER = 6.3  # pixels of one character of a label, on average
ROOF_HEIGHT = 400
COURSE_HEIGHT = 190
MAX_POINTS = 400  # of one course: the slowest are left out beyond
SLOWEST_SHOWN = 5.0  # times the heuristic; slower ones are drawn at the upper edge

#: Symbols by kind of step: shape as well as colour tells them apart.
SYMBOLS: dict[str, str] = {
    START: "start",
    "register tile": "dot",
    "loops": "square",
    "staging": "triangle",
    "cores": "bar",
    "memory hints": "cross",
    SEVERAL: "diamond",
}
_SHAPES = {
    "more": '<path d="M-4-4.4 4.4 0-4 4.4z"/>',
    "less": '<path d="M4-4.4-4.4 0 4 4.4z"/>',
    "start": '<circle r="3.5" fill="none" stroke="currentColor" stroke-width="2"/>',
    "dot": '<circle r="3.2"/>',
    "square": '<rect x="-3" y="-3" width="6" height="6"/>',
    "triangle": '<path d="M0-4 4 3.2h-8z"/>',
    "bar": '<rect x="-1.6" y="-4.2" width="3.2" height="8.4"/>',
    "cross": '<path d="M-3.4-2-2-3.4 0-1.4 2-3.4 3.4-2 1.4 0 3.4 2 2 3.4 0 1.4-2 3.4-3.4 2-1.4 0z"/>',
    "diamond": '<path d="M0-4.4 4.4 0 0 4.4-4.4 0z"/>',
}


def symbols() -> Markup:
    """The definitions of the marks; once per page."""
    shapes = "".join(f'<symbol id="m-{name}" overflow="visible">{shape}</symbol>' for name, shape in _SHAPES.items())
    return Markup(f'<svg width="0" height="0" class="defs" aria-hidden="true"><defs>{shapes}</defs></svg>')


def slug(kind: str) -> str:
    """The class of a kind of step."""
    return "k-" + kind.replace(" ", "-")


def swatch(kind: str) -> Markup:
    """A mark as it stands in legends."""
    return Markup(
        f'<svg class="swatch {slug(kind)}" width="12" height="12" viewBox="-6 -6 12 12" aria-hidden="true">'
        f'<use href="#m-{SYMBOLS[kind]}"/></svg>'
    )


# -- axes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Values to 0 … 1, logarithmic or linear."""

    low: float
    high: float
    logarithmic: bool

    def at(self, value: float) -> float:
        """Where a value lies; below 0 or above 1 outside."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        """Round values inside, at most about so many."""
        if not self.logarithmic or self.high < 3 * self.low:
            step = _round_up((self.high - self.low) / most)
            return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
            found = [s * 10.0**d for d in decades for s in steps if self.low * 0.999 <= s * 10.0**d <= self.high * 1.001]
            if len(found) <= most:
                return found
        skip = -(-len(found) // most)
        return found[::skip]


def _round_up(x: float) -> float:
    """The next of 1, 2, 5 × a power of ten."""
    power = 10.0 ** math.floor(math.log10(x))
    return next(s * power for s in (1, 2, 5, 10) if s * power >= x * 0.999)


def _pc(x: float) -> str:
    return f"{100 * x:.2f}%"


def _line(x1: float, y1: float, x2: float, y2: float, cls: str, title: str = "") -> Markup:
    end = f"><title>{_escape(title)}</title></line>" if title else "/>"
    return Markup(f'<line x1="{_pc(x1)}" y1="{y1:.1f}" x2="{_pc(x2)}" y2="{y2:.1f}" class="{cls}"{end}')


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _text(x: float, y: float, text: str, cls: str, anchor: str = "middle", dx: float = 0.0) -> Markup:
    shift = f' dx="{dx:g}"' if dx else ""
    return Markup(f'<text x="{_pc(x)}" y="{y:.1f}"{shift} text-anchor="{anchor}" class="{cls}">{_escape(text)}</text>')


def _mark(symbol: str, x: float, y: float, cls: str, title: str) -> Markup:
    inner = f"><title>{_escape(title)}</title></use>" if title else "/>"
    return Markup(f'<use href="#m-{symbol}" x="{_pc(x)}" y="{y:.1f}" class="{cls}"{inner}')


@dataclass(frozen=True)
class Frame:
    """A plot's axes. `height`: of the plot area; the captions of x stand below it."""

    x: Scale
    y: Scale
    height: float
    x_text: Callable[[float], str]
    y_text: Callable[[float], str]
    x_title: str
    y_title: str

    def up(self, value: float) -> float:
        """Pixels from the top."""
        return self.height * (1 - self.y.at(value))

    def draw(self, *content: object, label: str, x_ticks: int = 7, y_ticks: int = 6) -> Markup:
        """The chart: the captions of y in a column of their own, then the plot."""
        rows = [(v, self.up(v)) for v in self.y.ticks(y_ticks)]
        columns = [(v, self.x.at(v)) for v in self.x.ticks(x_ticks)]
        total = self.height + 40
        left = join(
            *(
                Markup(f'<text x="100%" dx="-8" y="{y + 4:.1f}" text-anchor="end" class="tick">{_escape(self.y_text(v))}</text>')
                for v, y in rows
            )
        )
        grid = join(*(_line(0, y, 1, y, "grid") for _, y in rows), *(_line(x, 0, x, self.height, "grid") for _, x in columns))
        below = join(
            *(
                _text(x, self.height + 17, self.x_text(v), "tick", "start" if x < 0.02 else "end" if x > 0.98 else "middle")
                for v, x in columns
            )
        )
        title = _text(0.5, self.height + 36, self.x_title, "axis")
        plot = tag(
            "svg",
            grid,
            _line(0, self.height, 1, self.height, "base"),
            join(*content),
            below,
            title,
            class_="plot",
            width="100%",
            height=f"{total:g}",
            role="img",
            aria_label=label,
        )
        axis = tag("svg", left, class_="yaxis", width="64", height=f"{total:g}", aria_hidden="true")
        return tag("div", tag("div", self.y_title, class_="ytitle"), tag("div", axis, plot, class_="chart"), class_="figure")


# -- roofline ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roof:
    """A ceiling: `rate` in flops per second (flat) or bytes per second (slanted)."""

    name: str
    rate: float
    flat: bool
    cls: str


@dataclass(frozen=True)
class Point:
    """A kernel on the roofline: flops per byte, and flops per second; `before`: with the heuristic, `peer`: of the best peer."""

    name: str
    href: str
    intensity: float
    rate: float
    title: str
    before: float | None = None
    peer: float | None = None
    cls: str = "tuned"


def roofline(points: Sequence[Point], roofs: Sequence[Roof]) -> Markup:
    """Operations per second over operations per byte, both logarithmic, under the machine's ceilings."""
    rates = [r for p in points for r in (p.rate, p.before, p.peer) if r]
    flat = max((r.rate for r in roofs if r.flat), default=0.0)
    low_x, high_x = min(p.intensity for p in points) / 1.6, max(p.intensity for p in points) * 1.6
    slants = [r for r in roofs if not r.flat]
    if flat and slants:
        high_x = max(high_x, 3 * flat / min(r.rate for r in slants))
    low_y, high_y = min(*rates, *(r.rate for r in roofs if r.flat), math.inf) / 2, max(*rates, flat) * 1.7
    f = Frame(
        Scale(low_x, high_x, True),
        Scale(low_y, high_y, True),
        ROOF_HEIGHT,
        lambda v: f"{v:g}",
        lambda v: _short_rate(v),
        "operations per byte from and to memory",
        "FLOP/s",
    )
    lines, texts = _draw_roofs(f, roofs, (low_x, high_x), low_y, high_y, flat)
    marks = _draw_points(f, points)
    labels = [*_place(points, roofs, f, WIDE, "wide"), *_place(points, roofs, f, NARROW, "narrow")]
    leaders = [x for x in labels if "leader" in x]
    labels = [x for x in labels if "leader" not in x]
    return f.draw(
        *leaders, *lines, *marks, *texts, *labels, x_ticks=7,
        label=f"Roofline with {len(points)} kernels; the same figures stand in the table below",
    )


def _draw_roofs(f: Frame, roofs: Sequence[Roof], x_range: tuple[float, float], low_y: float, high_y: float,
                flat: float) -> tuple[list[object], list[object]]:
    """The ceilings as lines, and their names. `flat`: the highest arithmetic, or 0."""
    low_x, high_x = x_range
    slants = [r for r in roofs if not r.flat]
    lines: list[object] = []
    texts: list[object] = []
    for roof in roofs:
        if roof.flat:
            start = min((roof.rate / r.rate for r in slants), default=low_x)
            y = f.up(roof.rate)
            lines.append(_line(max(0.0, f.x.at(max(start, low_x))), y, 1, y, f"roof {roof.cls}", f"{roof.name}: {q.flops_rate(roof.rate)}"))
            texts.append(_text(1, y - 6, f"{roof.name} {q.flops_rate(roof.rate)}", "rooftext halo", "end", -2))
            continue
        x0 = max(low_x, low_y / roof.rate)
        x1 = min(high_x, flat / roof.rate if flat else high_y / roof.rate)
        if x1 > x0:
            y0, left = f.up(roof.rate * x0), f.x.at(x0)
            lines.append(_line(left, y0, f.x.at(x1), f.up(roof.rate * x1), f"roof {roof.cls}", f"{roof.name}: {q.bytes_rate(roof.rate)}"))
            texts.append(_text(left, y0 - 7 if left < 0.01 else y0 - 14, roof.name, "rooftext halo", "start", 5))
    return lines, texts


def _draw_points(f: Frame, points: Sequence[Point]) -> list[object]:
    """The kernels, over what they were before and what the best library reaches."""
    marks: list[object] = []
    ordered = sorted(points, key=lambda p: p.name)
    for p in ordered:
        x, y = f.x.at(p.intensity), f.up(p.rate)
        if p.before:
            marks.append(_line(x, f.up(p.before), x, y, "stem"))
            marks.append(Markup(f'<circle cx="{_pc(x)}" cy="{f.up(p.before):.1f}" r="3" class="heuristic hollow"/>'))
        if p.peer:
            marks.append(_mark("diamond", x, f.up(p.peer), "peer hollow", ""))
    for p in ordered:
        x, y = f.x.at(p.intensity), f.up(p.rate)
        dot = Markup(
            f'<circle cx="{_pc(x)}" cy="{y:.1f}" r="11" class="target"/><circle cx="{_pc(x)}" cy="{y:.1f}" r="5" class="{p.cls}"/>'
        )
        marks.append(tag("a", tag("title", p.title), dot, href=p.href, aria_label=p.title))
    return marks


def _short_rate(value: float) -> str:
    """A rate at a tick: 300 G."""
    return next((f"{value / size:g} {unit}" for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if value >= size), f"{value:g}")


#: Where a label may stand from its point, best first: (anchor, right, down) in pixels; far ones get a line to their point.
_NEAR = (("start", 9.0, 4.0), ("end", -9.0, 4.0), ("middle", 0.0, -10.0), ("middle", 0.0, 18.0), ("start", 9.0, 18.0), ("end", -9.0, 18.0),
         ("start", 9.0, -10.0), ("end", -9.0, -10.0))
_FAR = tuple((anchor, 4.0 * (anchor == "end") - 4.0 * (anchor == "start"), down)
             for down in (42.0, -34.0, 60.0, -52.0, 78.0, 96.0, 114.0, 132.0) for anchor in ("middle", "end", "start"))
_Box = tuple[float, float, float, float]


def _place(points: Sequence[Point], roofs: Sequence[Roof], f: Frame, width: float, cls: str) -> list[Markup]:
    """Names of points, as many as have room: first those that fit beside their point, the fastest first, then the others further off, with
    lines, which come first in the result so that everything else is drawn over them."""
    taken: list[_Box] = []
    for roof in roofs:
        if roof.flat:
            y = f.up(roof.rate)
            taken += [(0.0, y - 2, width, y + 2), (width - LETTER * 26, y - 20, width, y)]
    for p in points:
        for rate in (p.rate, p.before, p.peer):
            if rate:
                x, y = f.x.at(p.intensity) * width, f.up(rate)
                taken.append((x - 6, y - 6, x + 6, y + 6))
    labels: list[_Box] = []
    lines: list[Markup] = []
    texts: list[Markup] = []
    ordered = sorted(points, key=lambda p: -p.rate)
    left_over = []
    for places in (_NEAR, _FAR):
        for p in ordered:
            x, y, w = f.x.at(p.intensity) * width, f.up(p.rate), LETTER * len(p.name)
            for anchor, dx, dy in places:
                left = x + dx - (0 if anchor == "start" else w if anchor == "end" else w / 2)
                box = (left, y + dy - 10, left + w, y + dy + 3)
                if box[0] < 0 or box[2] > width or box[1] < 0 or box[3] > f.height or not _free(box, taken + labels):
                    continue
                if places is _FAR:
                    end = y + dy + (5 if dy < 0 else -12)
                    line = (x - 3, min(y, end), x + 3, max(y, end))
                    if not _free(line, labels):
                        continue
                    labels.append(line)
                    lines.append(_line(f.x.at(p.intensity), y, f.x.at(p.intensity), end, f"leader {cls}"))
                labels.append(box)
                texts.append(_text(f.x.at(p.intensity), y + dy, p.name, f"label halo {cls}", anchor, dx))
                break
            else:
                left_over.append(p)
        ordered, left_over = left_over, []
    return lines + texts


def _free(box: _Box, taken: Sequence[_Box]) -> bool:
    return all(box[2] < t[0] or box[0] > t[2] or box[3] < t[1] or box[1] > t[3] for t in taken)


# -- speed-ups --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A speed-up with its interval; `cls` tells whom it is over."""

    value: float
    low: float | None
    high: float | None
    cls: str
    title: str


def speedup_scale(values: Sequence[float]) -> Scale:
    """One scale for all rows of a chart, with 1 inside and room beside it."""
    low, high = min([0.8, *values]), max([1.25, *values])
    return Scale(max(low / 1.08, 1 / 32), min(high * 1.08, 64.0), True)


def speedup_ticks(scale: Scale) -> list[float]:
    """Powers of two; finer steps where the scale is short."""
    short = scale.high / scale.low < 3.5
    steps = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0) if short else tuple(2.0**e for e in range(-5, 7))
    return [s for s in steps if scale.low <= s <= scale.high]


def _clamped(scale: Scale, value: float) -> float:
    return min(1.0, max(0.0, scale.at(value)))


def speedup_row(bars: Sequence[Bar], dots: Sequence[Bar], scale: Scale, label: str) -> Markup:
    """Bars from 1× to the speed-up, with the 95 % interval as a whisker; `dots` are other contestants on the first bar's line."""
    height = 14 * len(bars) + 6
    one = scale.at(1.0)
    parts: list[object] = [_line(scale.at(t), 0, scale.at(t), height, "grid") for t in speedup_ticks(scale)]
    for i, bar in enumerate(bars):
        y = 4 + 14 * i
        end = _clamped(scale, bar.value)
        x, w = min(one, end), abs(end - one)
        parts.append(
            Markup(
                f'<rect x="{_pc(x)}" y="{y}" width="{_pc(max(w, 0.002))}" height="10" rx="1.5" class="{bar.cls}">'
                f"<title>{_escape(bar.title)}</title></rect>"
            )
        )
        if bar.low is not None and bar.high is not None:
            parts.append(_line(_clamped(scale, bar.low), y + 5, _clamped(scale, bar.high), y + 5, "whisker"))
    for dot in dots:
        if not 0 <= scale.at(dot.value) <= 1:
            parts.append(
                _mark(
                    "more" if dot.value > 1 else "less", _clamped(scale, dot.value), 9, f"{dot.cls} dot", f"{dot.title}, beyond the scale"
                )
            )
            continue
        parts.append(
            Markup(
                f'<circle cx="{_pc(_clamped(scale, dot.value))}" cy="9" r="3.2" class="{dot.cls} dot">'
                f"<title>{_escape(dot.title)}</title></circle>"
            )
        )
    parts.append(_line(one, 0, one, height, "one"))
    return tag("svg", *parts, class_="bars", width="100%", height=str(height), role="img", aria_label=label)


def speedup_axis(scale: Scale) -> Markup:
    """The captions of the ticks, for the head and foot of a chart of rows."""
    ticks = join(*(_text(scale.at(t), 13, f"{t:g}×" if t >= 1 or t > 0.45 else f"1/{round(1 / t)}×", "tick") for t in speedup_ticks(scale)))
    return tag("svg", ticks, class_="bars", width="100%", height="18", aria_hidden="true")


# -- the course of a search -------------------------------------------------------------------------


def course_charts(course: Course) -> Markup | None:
    """The best time over candidates, with every candidate, and over seconds, side by side; None where nothing was timed.

    Candidates are recorded when their round ends, so over seconds only the best is drawn."""
    trials = _shown(course.trials)
    if not trials:
        return None
    candidates = max(t.number for t in trials)
    over_candidates = _course(
        course, trials, lambda t: float(t.number), Scale(0.5, max(2.0, candidates * 1.03), False), "candidates timed", trials
    )
    seconds = Scale(0.0, max(0.1, 1.03 * max(t.at for t in trials)), False)
    over_seconds = _course(course, trials, lambda t: t.at, seconds, "seconds since the search began", ())
    return tag("div", over_candidates, over_seconds, class_="pair")


def _shown(trials: Sequence[Trial]) -> list[Trial]:
    if len(trials) <= MAX_POINTS:
        return list(trials)
    limit = sorted(t.seconds for t in trials)[MAX_POINTS]
    return [t for t in trials if t.seconds <= limit or t.kind == START]


def _course(
    course: Course, trials: Sequence[Trial], x_of: Callable[[Trial], float], across: Scale, x_title: str, marked: Sequence[Trial]
) -> Markup:
    times = [t.seconds for t in trials if marked or t.raced] or [t.seconds for t in trials]
    start = next((t.seconds for t in trials if t.kind == START), course.heuristic or max(times))
    top = max(min(max(times), SLOWEST_SHOWN * start), start * 1.15)
    size, unit = next((s for s in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if top >= s[0]), (1e-9, "ns"))
    f = Frame(
        across,
        Scale(min(times) / 1.12, top * 1.08, True),
        COURSE_HEIGHT,
        lambda v: f"{v:g}",
        lambda v: f"{v / size:g}",
        x_title,
        f"time of one run, {unit}",
    )
    y = f.up(start)
    content: list[object] = [_line(0, y, 1, y, "reference", f"heuristic: {q.seconds(start)}")]
    steps = _best_steps(trials, x_of)
    for i, (x, y, kind, _) in enumerate(steps):
        until = steps[i + 1][0] if i + 1 < len(steps) else f.x.high
        content.append(_line(f.x.at(x), f.up(y), f.x.at(until), f.up(y), f"best {slug(kind)}"))
        if i + 1 < len(steps):
            content.append(_line(f.x.at(until), f.up(y), f.x.at(until), f.up(steps[i + 1][1]), f"best {slug(steps[i + 1][2])}"))
    improving = {id(t) for *_, t in steps}
    for t in marked or [t for *_, t in steps]:
        told = t.raced or id(t) in improving
        title = f"{t.number}: {q.seconds(t.seconds)}, {t.kind}{'' if t.raced else ' (screened)'}: {t.chain}" if told else ""
        content.append(
            _mark(SYMBOLS[t.kind], f.x.at(x_of(t)), max(3.0, f.up(t.seconds)), f"{slug(t.kind)}{'' if t.raced else ' faint'}", title)
        )
    above = f.up(start) > 20
    content.append(_text(1, f.up(start) + (-6 if above else 14), f"heuristic {q.seconds(start)}", "rooftext halo", "end"))
    label = f"Best time over {x_title}: from {q.seconds(steps[0][1])} to {q.seconds(steps[-1][1])}" if steps else f"Times over {x_title}"
    return f.draw(*content, label=label, x_ticks=6, y_ticks=5)


def _best_steps(trials: Sequence[Trial], x_of: Callable[[Trial], float]) -> list[tuple[float, float, str, Trial]]:
    """Where the best time fell: (x, seconds, kind, trial). Times count once they were raced: a screened time is one run's luck."""
    steps: list[tuple[float, float, str, Trial]] = []
    for t in trials:
        if t.raced and (not steps or t.seconds < steps[-1][1]):
            x = max(x_of(t), steps[-1][0]) if steps else x_of(t)
            steps.append((x, t.seconds, t.kind, t))
    return steps


# -- where candidates went --------------------------------------------------------------------------


def stacked(parts: Sequence[tuple[str, int, str]], label: str) -> Markup:
    """One bar of (name, count, class) parts, in proportion."""
    total = sum(n for _, n, _ in parts) or 1
    x = 0.0
    rects = []
    for name, n, cls in parts:
        if n:
            rects.append(
                Markup(
                    f'<rect x="{_pc(x)}" y="0" width="{_pc(n / total)}" height="22" class="fate {cls}">'
                    f"<title>{_escape(name)}: {n} ({100 * n / total:.0f} %)</title></rect>"
                )
            )
            if n / total > 0.06:
                rects.append(_text(x + n / total / 2, 15.5, str(n), f"fatetext {cls}-on"))
        x += n / total
    return tag("svg", *rects, class_="stack", width="100%", height="22", role="img", aria_label=label)
