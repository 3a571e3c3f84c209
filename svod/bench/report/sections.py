"""The first parts of the report, each a function from data to HTML or None where its data is missing: headline, roofline, speed-ups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from svod.bench.report import charts
from svod.bench.report.charts import Bar, Point, Roof, Scale
from svod.bench.report.data import Overview, TunedKernel, Tuning
from svod.bench.report.markup import Markup, tag
from svod.bench.report.parts import (
    CUT_SHORT,
    FASTER,
    NEAR_CEILING,
    case_id,
    count,
    kernel_title,
    lead,
    listed,
    note,
    over_best_peer,
    over_heuristic,
    peer_names,
    section,
    short_name,
)
from svod.bench.results import SVOD, CaseResult, Speedup
from svod.bench.roofline import Ceilings
from svod.bench.summary import BEST_PEER, geometric_mean, group_results
from svod.system import quantities as q

PEER_CLASSES = ("peer-a", "peer-b", "peer-c", "peer-d", "peer-e", "peer-f")


# -- headline ---------------------------------------------------------------------------------------


def _tile(figure: str, what: str, detail: str, cls: str = "") -> Markup:
    return tag("div", tag("dt", what), tag("dd", tag("b", figure), tag("span", detail)), class_=f"tile {cls}".strip())


def headline(view: Overview, tuning: Tuning | None) -> Markup:
    """The figures that say most, in at most five tiles."""
    tiles = (_gain_tile(view, tuning), _peer_tile(view), _ceiling_tile(view), _kernels_tile(view, tuning), _time_tile(view, tuning))
    return tag("dl", *(t for t in tiles if t is not None), class_="tiles")


def _gain_tile(view: Overview, tuning: Tuning | None) -> Markup | None:
    means = group_results(view.cases)[-1].speedups if view.cases else {}
    gains = [s.median for c in view.cases if (s := over_heuristic(c)) is not None]
    if not gains and tuning is not None:
        gains = [k.gain for k in tuning.kernels if k.gain is not None]
    if not gains:
        return None
    faster = sum(g >= FASTER for g in gains)
    detail = f"geometric mean; {faster} of {count(len(gains), 'kernel')} gained, the most {q.times(max(gains))}"
    return _tile(q.times(means.get("tuned/heuristic", geometric_mean(gains))), "tuned over heuristic", detail, "first")


def _peer_tile(view: Overview) -> Markup | None:
    peers = [s for c in view.cases if (s := over_best_peer(c)) is not None]
    if not peers:
        return None
    won = sum(s.median > 1 and not s.is_none for s in peers)
    lost = sum(s.median < 1 and not s.is_none for s in peers)
    detail = f"the fastest of {listed(peer_names(view))} for each kernel: {won} won, {lost} lost, {len(peers) - won - lost} level"
    return _tile(q.times(geometric_mean([s.median for s in peers])), "over the best peer", detail)


def _ceiling_tile(view: Overview) -> Markup | None:
    shares = [c.svod.ceiling_share for c in view.cases if c.svod is not None and c.svod.ceiling_share]
    if not shares:
        return None
    near = sum(s >= NEAR_CEILING for s in shares)
    detail = f"geometric mean; {near} of {len(shares)} above {q.percent(NEAR_CEILING)}"
    return _tile(q.percent(geometric_mean(shares)), "of the ceiling", detail)


def _kernels_tile(view: Overview, tuning: Tuning | None) -> Markup | None:
    if view.cases:
        noisy = sum(c.noisy is not None for c in view.cases)
        wrong = sum(o.status == "wrong" for c in view.cases for o in c.contestants if o.name in SVOD)
        what = "kernels measured" if any(c.suite != "models" for c in view.cases) else "models measured"
        detail = f"each checked against NumPy{f'; {wrong} WRONG' if wrong else ''}; {noisy or 'none'} noisy"
        return _tile(str(len(view.cases)), what, detail)
    if tuning is None or not tuning.kernels:
        return None
    verified = sum(bool(k.verified) for k in tuning.kernels)
    return _tile(str(len(tuning.kernels)), "kernels known", f"{verified} with a winner whose numbers were verified")


def _time_tile(view: Overview, tuning: Tuning | None) -> Markup | None:
    if tuning is not None and tuning.courses:
        tried = sum(c.candidates for c in tuning.courses)
        timed = sum(sum(n for f, n in c.fates.items() if f in ("slow", "screened", "raced", "confirmed", "wrong")) for c in tuning.courses)
        candidates = q.digits(tried) if tried < 1000 else f"{tried:,}".replace(",", " ")
        detail = f"{count(len(tuning.kernels), 'kernel')}, {candidates} candidates, {timed} of them timed"
        return _tile(q.seconds(sum(c.spent for c in tuning.courses)), "spent searching", detail)
    if not view.runs:
        return None
    return _tile(q.seconds(sum(r.settings.seconds for r in view.runs)), "spent measuring", f"in {count(len(view.runs), 'run')}")


def verdict(view: Overview, tuning: Tuning | None) -> str:
    """The page's first sentence."""
    sentences = []
    best = max(
        (c for c in view.cases if over_heuristic(c) is not None),
        key=lambda c: over_heuristic(c).median,  # type: ignore[union-attr]
        default=None,
    )
    gain = over_heuristic(best) if best is not None else None
    if best is not None and gain is not None and gain.median >= FASTER:
        sentences.append(f"Tuning gained most for {best.title}: {q.times(gain.median)} the heuristic.")
    elif tuning is not None and tuning.kernels and (tuning.kernels[0].gain or 0) >= FASTER:
        k = tuning.kernels[0]
        sentences.append(
            f"The search saved most in {kernel_title(k)}: from {q.seconds(k.heuristic)} to {q.seconds(k.seconds)}, {q.times(k.gain)}."
        )
    open_ = [c for c in view.cases if c.svod is not None and c.svod.ceiling_share is not None and c.svod.ceiling_share < NEAR_CEILING]
    if open_:
        sentences.append(
            f"{count(len(open_), 'kernel')} {'is' if len(open_) == 1 else 'are'} below {q.percent(NEAR_CEILING)} of what the "
            "machine can do."
        )
    elif tuning is not None:
        unfinished = sum(bool(k.courses) and k.courses[-1].ended_by in CUT_SHORT for k in tuning.kernels)
        if unfinished:
            sentences.append(f"{count(unfinished, 'search')} ended with more to try.")
    return " ".join(sentences)


# -- roofline ---------------------------------------------------------------------------------------


def roofs_of(ceilings: Ceilings, dtypes: Sequence[str]) -> list[Roof]:
    """The ceilings of all cores as lines: multiply-adds of the types that occur, bandwidth of what was measured below l1."""
    roofs = [Roof("f32 FMA", ceilings.flops["float32"][1], True, "flat")] if "float32" in ceilings.flops else []
    if "float64" in dtypes and "float64" in ceilings.flops:
        roofs.append(Roof("f64 FMA", ceilings.flops["float64"][1], True, "flat second"))
    for level, name in (("l2", "L2"), ("l3", "L3"), ("memory", "memory")):
        kinds = ceilings.bandwidth.get(level, {})
        if kinds:
            roofs.append(Roof(name, max(many for kind, (_, many) in kinds.items() if not kind.startswith("write")), False, level))
    return roofs


def roofline_section(view: Overview, tuning: Tuning | None) -> Markup | None:
    """Every kernel with arithmetic under the machine's ceilings."""
    timed = [c for c in view.cases if c.svod is not None and c.svod.median]
    without = [c.title for c in timed if not _has_intensity(c)]
    points = [_case_point(c) for c in timed if _has_intensity(c)]
    whole = all(c.suite == "models" for c in view.cases)        # none, or models: their kernels say more
    if whole and tuning is not None:
        points += [_kernel_point(k, k.seconds) for k in tuning.kernels if k.seconds and k.flops and k.bytes]
    if not points:
        return None
    ceilings = view.ceilings or (tuning.ceilings if tuning is not None else None)
    roofs = roofs_of(ceilings, [c.dtype for c in view.cases]) if ceilings is not None else []
    notes = _roofline_notes(bool(roofs), whole and bool(view.cases) and len(points) > len(view.cases), without)
    return section(
        "roofline",
        "Roofline",
        lead("How near each kernel is to what the machine can do."),
        tag("div", *_roofline_legend(points, roofs), class_="legend"),
        charts.roofline(points, roofs),
        *(note(n) for n in notes),
    )


def _roofline_notes(has_roofs: bool, has_kernels: bool, without: Sequence[str]) -> list[str]:
    """What is to be known of the plot. `has_kernels`: kernels of the database stand beside models; `without`: cases that are not on it."""
    notes = []
    if not has_roofs:
        notes.append("The machine's ceilings are not known here, so no roofs are drawn: `svod-bench ceilings` measures them.")
    if has_kernels:
        notes.append("Beside the models stand the kernels that the tuning database knows, as they were confirmed.")
    if without:
        notes.append(f"Without arithmetic, and so not on this plot: {listed(without)}.")
    return [
        *notes,
        "A point on a roof cannot get faster. Traffic is what a kernel has to read and write at least; operands that stay in a cache "
        "between two runs may go above the memory roof.",
    ]


def _has_intensity(case: CaseResult) -> bool:
    return bool(case.flops and case.bytes_read + case.bytes_written)


def _case_point(case: CaseResult) -> Point:
    best = case.svod
    assert best is not None and best.median, "cases without a time of svod were left out"
    heuristic, peer = case.outcome("heuristic"), case.outcome(case.best_peer or "")
    rate = case.flops / best.median
    share = f", {q.percent(best.ceiling_share)} of its ceiling" if best.ceiling_share else ""
    return Point(
        case.title,
        f"#{case_id(case)}",
        case.flops / (case.bytes_read + case.bytes_written),
        rate,
        f"{case.title}: {q.flops_rate(rate)}, {q.seconds(best.median)}{share}",
        case.flops / heuristic.median if heuristic is not None and heuristic.median and best.name != "heuristic" else None,
        case.flops / peer.median if peer is not None and peer.median else None,
    )


def _kernel_point(k: TunedKernel, seconds: float) -> Point:
    return Point(
        short_name(k),
        f"#{k.id}",
        k.flops / k.bytes,
        k.flops / seconds,
        f"{kernel_title(k)}: {q.flops_rate(k.flops / seconds)}, {q.seconds(seconds)}",
        k.flops / k.heuristic if k.heuristic and (k.gain or 1) > FASTER else None,
    )


def _roofline_legend(points: Sequence[Point], roofs: Sequence[Roof]) -> list[Markup]:
    legend = [_key("tuned", "svod"), _key("heuristic hollow", "with the heuristic")]
    if any(p.peer for p in points):
        swatch = Markup(
            '<svg class="swatch peer hollow" width="12" height="12" viewBox="-6 -6 12 12" aria-hidden="true">'
            '<use href="#m-diamond"/></svg>'
        )
        legend.append(tag("span", swatch, "best peer", class_="key"))
    for r in roofs:
        line = Markup(
            f'<svg class="swatch" width="22" height="8" aria-hidden="true"><line x1="0" y1="4" x2="22" y2="4" '
            f'class="roof {r.cls}"/></svg>'
        )
        legend.append(tag("span", line, f"{r.name} {q.flops_rate(r.rate) if r.flat else q.bytes_rate(r.rate)}", class_="key"))
    return legend


def _key(cls: str, text: str) -> Markup:
    return tag(
        "span",
        Markup(
            f'<svg class="swatch" width="12" height="12" viewBox="-6 -6 12 12" aria-hidden="true"><circle r="4.2" class="{cls}"/></svg>'
        ),
        text,
        class_="key",
    )


# -- speed-ups --------------------------------------------------------------------------------------


def speedup_section(view: Overview, tuning: Tuning | None) -> Markup | None:
    """Bars against the best peer and the heuristic, one row per case, by group; without runs, the database's gains."""
    rows = [(c, over_best_peer(c), over_heuristic(c)) for c in view.cases if c.svod is not None]
    rows = [r for r in rows if r[1] is not None or r[2] is not None]
    if not rows:
        return _database_speedups(tuning)
    names = peer_names(view)
    classes = dict(zip(names, PEER_CLASSES * (1 + len(names) // len(PEER_CLASSES)), strict=False))
    values = [v for _, a, b in rows for s in (a, b) if s is not None for v in (s.median, s.low, s.high) if v]
    scale = charts.speedup_scale(values)
    groups: dict[str, list[Markup]] = {}
    for case, peer, heuristic in rows:
        groups.setdefault(case.group, []).append(_speedup_row(case, peer, heuristic, classes, scale))
    legend = [
        tag("span", tag("i", class_="box ahead"), "faster than the best peer", class_="key"),
        tag("span", tag("i", class_="box behind"), "slower", class_="key"),
        tag("span", tag("i", class_="box level"), "no difference", class_="key"),
        tag("span", tag("i", class_="box gain"), "over the heuristic", class_="key"),
        *(tag("span", tag("i", class_=f"box round {classes[n]}"), f"over {n}, where not the best", class_="key") for n in names),
    ]
    if not names:
        legend = [legend[3]]
    axis = tag("div", tag("div"), charts.speedup_axis(scale), tag("div"), class_="uprow axisrow")
    means = {g.name: g for g in group_results(view.cases)}
    body = []
    for group, members in groups.items():
        body += [tag("h3", group, tag("small", _means(means[group].speedups) if group in means else "")), *members]
    return section(
        "speedups",
        "Speed-ups",
        lead("How many times faster svod is: to the right of the line it wins. Whiskers are 95 % intervals of paired rounds."),
        tag("div", *legend, class_="legend"),
        tag("div", axis, *body, axis, class_="ups"),
    )


def _speedup_row(case: CaseResult, peer: Speedup | None, heuristic: Speedup | None, classes: Mapping[str, str], scale: Scale) -> Markup:
    """The bars of one case, and its figures. `classes`: of the dots of libraries."""
    svod = case.svod
    assert svod is not None, "cases without a time of svod were left out"
    bars, texts = [], []
    if peer is not None:
        cls = "level" if peer.is_none else "ahead" if peer.median > 1 else "behind"
        bars.append(Bar(peer.median, peer.low, peer.high, cls, f"{q.times(peer.median)} {case.best_peer}{_interval(peer)}"))
        texts.append(tag("span", tag("b", q.times(peer.median), class_=cls), " ", case.best_peer or ""))
    others = [(o.name, s) for o in case.peers if (s := svod.speedups.get(o.name)) is not None and o.name != case.best_peer]
    dots = [Bar(s.median, None, None, classes.get(n, PEER_CLASSES[0]), f"{q.times(s.median)} {n}{_interval(s)}") for n, s in others]
    if heuristic is not None:
        title = f"{q.times(heuristic.median)} heuristic{_interval(heuristic)}"
        bars.append(Bar(heuristic.median, heuristic.low, heuristic.high, "gain", title))
        tuned = case.outcome("tuned")
        same = tuned is not None and tuned.same_as == "heuristic"
        texts.append(tag("span", tag("b", q.times(heuristic.median)), " same code" if same else " heuristic"))
    noisy = tag("abbr", "noisy", title=case.noisy, class_="flag") if case.noisy else None
    name = tag("div", tag("a", case.title, href=f"#{case_id(case)}"), noisy, class_="rowname")
    label = f"{case.title}: " + ", ".join(b.title for b in bars)
    return tag("div", name, charts.speedup_row(bars, dots, scale, label), tag("div", *texts, class_="rowvalue"), class_="uprow")


def _interval(s: Speedup) -> str:
    return f" ({q.digits(s.low)}–{q.digits(s.high)}×)" if s.low is not None and s.high is not None else ""


def _means(speedups: object) -> str:
    assert isinstance(speedups, dict)
    parts = []
    for key, other in ((BEST_PEER, "the best peer"), ("heuristic", "the heuristic")):
        value = speedups.get(f"tuned/{key}", speedups.get(f"heuristic/{key}") if key == BEST_PEER else None)
        if value is not None:
            parts.append(f"{q.times(value)} {other}")
    return f"geometric mean {listed(parts)}" if parts else ""


def _database_speedups(tuning: Tuning | None) -> Markup | None:
    kernels = [k for k in tuning.kernels if k.speedup is not None] if tuning is not None else []
    if not kernels:
        return None
    scale = charts.speedup_scale([v for k in kernels for v in (k.speedup or ())])
    rows = []
    level = [k for k in kernels if abs((k.gain or 1.0) - 1.0) < FASTER - 1.0]
    for k in sorted(kernels, key=lambda k: -(k.gain or 0.0)):
        if k in level and len(level) < len(kernels):
            continue
        assert k.speedup is not None, "kernels without a winner were left out"
        low, middle, high = k.speedup
        bar = Bar(middle, low, high, "ahead" if low > 1 else "level", f"{q.times(middle)} heuristic ({q.digits(low)}–{q.digits(high)}×)")
        name = tag("div", tag("a", short_name(k), href=f"#{k.id}"), tag("small", k.shape), class_="rowname")
        rows.append(
            tag(
                "div",
                name,
                charts.speedup_row([bar], [], scale, f"{kernel_title(k)}: {bar.title}"),
                tag(
                    "div", tag("span", tag("b", q.times(middle)), f" {q.seconds(k.heuristic)} → {q.seconds(k.seconds)}"), class_="rowvalue"
                ),
                class_="uprow",
            )
        )
    axis = tag("div", tag("div"), charts.speedup_axis(scale), tag("div"), class_="uprow axisrow")
    intro = (
        "The winner over the heuristic, as it was confirmed in the same interleaved rounds. 1× means that the heuristic's own chain won."
    )
    return section(
        "speedups",
        "Speed-ups",
        lead(intro),
        tag("div", axis, *rows, class_="ups"),
        note(
            f"For {count(len(level), 'more kernel')} nothing better than the heuristic's chain was found, or nothing more than "
            f"{100 * (FASTER - 1):.0f} % better."
        )
        if 0 < len(level) < len(kernels)
        else None,
    )
