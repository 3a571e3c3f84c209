"""The parts of the report, each a function from data to HTML. A part whose data is missing is None, and `gaps` says why in a word.

In the order of the page: headline, roofline, speed-ups, the table of cases, what to tune next, searches, kernels, machine.
"""
from __future__ import annotations

import re
from collections.abc import Sequence

from svod.bench import charts
from svod.bench import quantities as q
from svod.bench.ceilings import Ceilings
from svod.bench.charts import Bar, Point, Roof
from svod.bench.markup import Cell, Column, Line, Markup, join, table, tag
from svod.bench.report_data import FATES, KINDS, SEVERAL, START, Overview, TunedKernel, Tuning
from svod.bench.results import SVOD, CaseResult, Outcome, Run, Speedup
from svod.bench.summary import ALL, BEST_PEER, geometric_mean, group_results

OPEN_KERNELS = 3            # whose details are open when the page is
FASTER = 1.02               # a gain worth calling one
NEXT = 6                    # kernels in "what to tune next"
NEAR_CEILING = 0.8          # of the ceiling: nothing worth a search is left
PEER_CLASSES = ("peer-a", "peer-b", "peer-c", "peer-d", "peer-e", "peer-f")


def case_id(case: CaseResult) -> str:
    """The name of a case's row in the page."""
    return "case-" + re.sub(r"\W+", "-", case.name)


def peer_names(view: Overview) -> list[str]:
    """Peers that have a time in some case, in order of appearance."""
    return list(dict.fromkeys(o.name for c in view.cases for o in c.peers if o.median is not None))


def _svod(case: CaseResult) -> str:
    return case.svod.name if case.svod is not None else ""


def over_best_peer(case: CaseResult) -> Speedup | None:
    """svod at its best over the fastest peer."""
    return case.svod.speedups.get(case.best_peer) if case.svod is not None and case.best_peer is not None else None


def over_heuristic(case: CaseResult) -> Speedup | None:
    """Tuned over heuristic; one chain for both is the speed-up 1."""
    tuned = case.outcome("tuned")
    if tuned is None or tuned.status != "ok":
        return None
    return Speedup(1.0, 1.0, 1.0) if tuned.same_as == "heuristic" else tuned.speedups.get("heuristic")


# -- headline ---------------------------------------------------------------------------------------

def _tile(figure: str, what: str, detail: str, cls: str = "") -> Markup:
    return tag("div", tag("dt", what), tag("dd", tag("b", figure), tag("span", detail)), class_=f"tile {cls}".strip())


def headline(view: Overview, tuning: Tuning | None) -> Markup:
    """The figures that say most, in at most five tiles."""
    tiles: list[Markup] = []
    gains = [s.median for c in view.cases if (s := over_heuristic(c)) is not None]
    source = "kernel"
    if not gains and tuning is not None:
        gains = [k.gain for k in tuning.kernels if k.gain is not None]
    if gains:
        faster = sum(g >= FASTER for g in gains)
        tiles.append(_tile(q.times(geometric_mean(gains)), "tuned over heuristic", f"geometric mean; {faster} of {_count(len(gains), source)} gained, "
                           f"the most {q.times(max(gains))}", "first"))
    peers = [s.median for c in view.cases if (s := over_best_peer(c)) is not None]
    if peers:
        won = sum(s is not None and s.median > 1 and not s.is_none for s in map(over_best_peer, view.cases))
        lost = sum(s is not None and s.median < 1 and not s.is_none for s in map(over_best_peer, view.cases))
        tiles.append(_tile(q.times(geometric_mean(peers)), "over the best peer", f"the fastest of {_and(peer_names(view))} for each kernel: "
                           f"{won} won, {lost} lost, {len(peers) - won - lost} level"))
    shares = [c.svod.ceiling_share for c in view.cases if c.svod is not None and c.svod.ceiling_share]
    if shares:
        near = sum(s >= NEAR_CEILING for s in shares)
        tiles.append(_tile(q.percent(geometric_mean(shares)), "of the ceiling", f"geometric mean; {near} of {len(shares)} above "
                           f"{q.percent(NEAR_CEILING)}"))
    if view.cases:
        noisy = sum(c.noisy is not None for c in view.cases)
        wrong = sum(o.status == "wrong" for c in view.cases for o in c.contestants if o.name in SVOD)
        tiles.append(_tile(str(len(view.cases)), "kernels measured" if any(c.suite != "models" for c in view.cases) else "models measured",
                           f"each checked against NumPy{f'; {wrong} WRONG' if wrong else ''}; {noisy or 'none'} noisy"))
    if tuning is not None and tuning.courses:
        tried = sum(c.candidates for c in tuning.courses)
        timed = sum(sum(n for f, n in c.fates.items() if f in ("slow", "screened", "raced", "confirmed", "wrong")) for c in tuning.courses)
        tiles.append(_tile(q.seconds(sum(c.spent for c in tuning.courses)), "spent searching",
                           f"{_count(len(tuning.kernels), 'kernel')}, {q.digits(tried) if tried < 1000 else f'{tried:,}'.replace(',', q.NBSP)} "
                           f"candidates, {timed} of them timed"))
    elif view.runs:
        tiles.append(_tile(q.seconds(sum(r.settings.seconds for r in view.runs)), "spent measuring", f"in {_count(len(view.runs), 'run')}"))
    return tag("dl", *tiles, class_="tiles")


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1] if names else "")))


def verdict(view: Overview, tuning: Tuning | None) -> str:
    """The page's first sentence."""
    sentences = []
    best = max((c for c in view.cases if over_heuristic(c) is not None), key=lambda c: over_heuristic(c).median,  # type: ignore[union-attr]
               default=None)
    gain = over_heuristic(best) if best is not None else None
    if best is not None and gain is not None and gain.median >= FASTER:
        sentences.append(f"Tuning gained most for {best.title}: {q.times(gain.median)} the heuristic.")
    elif tuning is not None and tuning.kernels and (tuning.kernels[0].gain or 0) >= FASTER:
        k = tuning.kernels[0]
        sentences.append(f"The search saved most in {_kernel_title(k)}: from {q.seconds(k.heuristic)} to {q.seconds(k.seconds)}, {q.times(k.gain)}.")
    open_ = [c for c in view.cases if c.svod is not None and c.svod.ceiling_share is not None and c.svod.ceiling_share < NEAR_CEILING]
    if open_:
        sentences.append(f"{_count(len(open_), 'kernel')} {'is' if len(open_) == 1 else 'are'} below {q.percent(NEAR_CEILING)} of what the "
                         "machine can do.")
    elif tuning is not None:
        unfinished = sum(bool(k.courses) and k.courses[-1].ended_by in ("budget spent", "interrupted") for k in tuning.kernels)
        if unfinished:
            sentences.append(f"{_count(unfinished, 'search')[:-1] + 'es' if unfinished != 1 else '1 search'} ended with more to try.")
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
    points, without = [], []
    for case in view.cases:
        best = case.svod
        moved = case.bytes_read + case.bytes_written
        if best is None or not best.median:
            continue
        if not case.flops or not moved:
            without.append(case.title)
            continue
        heuristic, peer = case.outcome("heuristic"), case.outcome(case.best_peer or "")
        rate = case.flops / best.median
        share = f", {q.percent(best.ceiling_share)} of its ceiling" if best.ceiling_share else ""
        points.append(Point(case.title, f"#{case_id(case)}", case.flops / moved, rate,
                            f"{case.title}: {q.flops_rate(rate)}, {q.seconds(best.median)}{share}",
                            case.flops / heuristic.median if heuristic is not None and heuristic.median and best.name != "heuristic" else None,
                            case.flops / peer.median if peer is not None and peer.median else None))
    from_database = not points
    if from_database and tuning is not None:
        for k in tuning.kernels:
            if k.seconds and k.flops and k.bytes:
                points.append(Point(_short(k), f"#{k.id}", k.flops / k.bytes, k.flops / k.seconds,
                                    f"{_kernel_title(k)}: {q.flops_rate(k.flops / k.seconds)}, {q.seconds(k.seconds)}",
                                    k.flops / k.heuristic if k.heuristic and (k.gain or 1) > FASTER else None))
    if not points:
        return None
    ceilings = view.ceilings or (tuning.ceilings if tuning is not None else None)
    roofs = roofs_of(ceilings, [c.dtype for c in view.cases]) if ceilings is not None else []
    legend = [_key("tuned", "svod"), _key("heuristic hollow", "with the heuristic")]
    if any(p.peer for p in points):
        legend.append(tag("span", Markup('<svg class="swatch peer hollow" width="12" height="12" viewBox="-6 -6 12 12" aria-hidden="true">'
                                         '<use href="#m-diamond"/></svg>'), "best peer", class_="key"))
    legend += [tag("span", Markup(f'<svg class="swatch" width="22" height="8" aria-hidden="true"><line x1="0" y1="4" x2="22" y2="4" '
                                  f'class="roof {r.cls}"/></svg>'), f"{r.name} {q.flops_rate(r.rate) if r.flat else q.bytes_rate(r.rate)}", class_="key")
               for r in roofs]
    notes = []
    if not roofs:
        notes.append("The machine's ceilings are not known here, so no roofs are drawn: `svod-bench ceilings` measures them.")
    if without:
        notes.append(f"Without arithmetic, and so not on this plot: {_and(without)}.")
    notes.append("A point on a roof cannot get faster. Traffic is what a kernel has to read and write at least; operands that stay in a cache between "
                 "two runs may go above the memory roof.")
    return section("roofline", "Roofline", _lead("How near each kernel is to what the machine can do."), tag("div", *legend, class_="legend"),
                   charts.roofline(points, roofs), *(_note(n) for n in notes))


def _key(cls: str, text: str) -> Markup:
    return tag("span", Markup(f'<svg class="swatch" width="12" height="12" viewBox="-6 -6 12 12" aria-hidden="true"><circle r="4.2" '
                              f'class="{cls}"/></svg>'), text, class_="key")


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
        svod = case.svod
        assert svod is not None, "cases without a time of svod were left out"
        bars, dots, texts = [], [], []
        if peer is not None:
            cls = "level" if peer.is_none else "ahead" if peer.median > 1 else "behind"
            bars.append(Bar(peer.median, peer.low, peer.high, cls, f"{q.times(peer.median)} {case.best_peer}{_interval(peer)}"))
            texts.append(tag("span", tag("b", q.times(peer.median), class_=cls), " ", case.best_peer or ""))
        for o in case.peers:
            s = svod.speedups.get(o.name)
            if s is not None and o.name != case.best_peer:
                dots.append(Bar(s.median, None, None, classes.get(o.name, PEER_CLASSES[0]), f"{q.times(s.median)} {o.name}{_interval(s)}"))
        if heuristic is not None:
            bars.append(Bar(heuristic.median, heuristic.low, heuristic.high, "gain", f"{q.times(heuristic.median)} heuristic{_interval(heuristic)}"))
            same = case.outcome("tuned") is not None and case.outcome("tuned").same_as == "heuristic"  # type: ignore[union-attr]
            texts.append(tag("span", tag("b", q.times(heuristic.median)), " same code" if same else " heuristic"))
        noisy = tag("abbr", "noisy", title=case.noisy, class_="flag") if case.noisy else None
        name = tag("div", tag("a", case.title, href=f"#{case_id(case)}"), noisy, class_="rowname")
        label = f"{case.title}: " + ", ".join(b.title for b in bars)
        groups.setdefault(case.group, []).append(tag("div", name, charts.speedup_row(bars, dots, scale, label),
                                                     tag("div", *texts, class_="rowvalue"), class_="uprow"))
    legend = [tag("span", tag("i", class_="box ahead"), "faster than the best peer", class_="key"),
              tag("span", tag("i", class_="box behind"), "slower", class_="key"), tag("span", tag("i", class_="box level"), "no difference", class_="key"),
              tag("span", tag("i", class_="box gain"), "over the heuristic", class_="key"),
              *(tag("span", tag("i", class_=f"box round {classes[n]}"), f"over {n}, where not the best", class_="key") for n in names)]
    if not names:
        legend = [legend[3]]
    axis = tag("div", tag("div"), charts.speedup_axis(scale), tag("div"), class_="uprow axisrow")
    means = {g.name: g for g in group_results(view.cases)}
    body = []
    for group, members in groups.items():
        body += [tag("h3", group, tag("small", _means(means[group].speedups) if group in means else "")), axis, *members]
    return section("speedups", "Speed-ups", _lead("How many times faster svod is: to the right of the line it wins. Whiskers are 95 % intervals of paired "
                                                 "rounds."), tag("div", *legend, class_="legend"), tag("div", *body, class_="ups"))


def _interval(s: Speedup) -> str:
    return f" ({q.digits(s.low)}–{q.digits(s.high)}×)" if s.low is not None and s.high is not None else ""


def _means(speedups: object) -> str:
    assert isinstance(speedups, dict)
    parts = []
    for key, other in ((BEST_PEER, "the best peer"), ("heuristic", "the heuristic")):
        value = speedups.get(f"tuned/{key}", speedups.get(f"heuristic/{key}") if key == BEST_PEER else None)
        if value is not None:
            parts.append(f"{q.times(value)} {other}")
    return f"geometric mean {_and(parts)}" if parts else ""


def _database_speedups(tuning: Tuning | None) -> Markup | None:
    kernels = [k for k in tuning.kernels if k.speedup is not None] if tuning is not None else []
    if not kernels:
        return None
    scale = charts.speedup_scale([v for k in kernels for v in (k.speedup or ())])
    rows = []
    for k in sorted(kernels, key=lambda k: -(k.gain or 0.0)):
        assert k.speedup is not None, "kernels without a winner were left out"
        low, middle, high = k.speedup
        bar = Bar(middle, low, high, "ahead" if low > 1 else "level", f"{q.times(middle)} heuristic ({q.digits(low)}–{q.digits(high)}×)")
        name = tag("div", tag("a", _short(k), href=f"#{k.id}"), tag("small", k.shape), class_="rowname")
        rows.append(tag("div", name, charts.speedup_row([bar], [], scale, f"{_kernel_title(k)}: {bar.title}"),
                        tag("div", tag("span", tag("b", q.times(middle)), f" {q.seconds(k.heuristic)} → {q.seconds(k.seconds)}"), class_="rowvalue"),
                        class_="uprow"))
    axis = tag("div", tag("div"), charts.speedup_axis(scale), tag("div"), class_="uprow axisrow")
    lead = "The winner over the heuristic, as it was confirmed in the same interleaved rounds. 1× means that the heuristic's own chain won."
    return section("speedups", "Speed-ups", _lead(lead), tag("div", axis, *rows, class_="ups"))


# -- tables -----------------------------------------------------------------------------------------

def case_section(view: Overview, tuning: Tuning | None) -> Markup | None:
    """All cases with all figures; then the kernels of plans."""
    if not view.cases:
        return None
    names = peer_names(view)
    columns = [Column("kernel"), Column("shapes", minor=True), Column("type", minor=True), Column("heuristic", True), Column("tuned", True),
               *(Column(n, True, minor=True) for n in names),
               *([Column("vs best peer", True, help="time of the best peer over svod's: above 1 is good")] if names else []),
               Column("ceiling", True, help="the least time that the machine's ceilings allow, over the time"), Column("spread", True, minor=True)]
    lines = []
    for c in view.cases:
        s = over_best_peer(c)
        flags = [tag("abbr", "noisy", title=c.noisy, class_="flag")] if c.noisy else []
        best = c.svod
        ups = [Cell(tag("b", q.times(s.median), class_="level" if s.is_none else "ahead" if s.median > 1 else "behind") if s else q.NOTHING,
                    s.median if s else None)] if names else []
        lines.append(Line([Cell(join(c.title, *flags), c.title), Cell(c.shapes), Cell(c.dtype), _time_cell(c.outcome("heuristic")),
                           _time_cell(c.outcome("tuned")), *(_time_cell(c.outcome(n)) for n in names), *ups,
                           Cell(_share(best, c), best.ceiling_share if best is not None else None),
                           Cell(f"±{q.percent(best.spread)}" if best is not None and best.spread is not None else q.NOTHING,
                                best.spread if best is not None else None)], case_id(c)))
    parts: list[object] = [table(columns, lines, caption="Medians of one run")]
    for c in view.cases:
        plan = c.svod.kernels if c.svod is not None else ()
        if len(plan) > 1:
            rows = [Line([Cell(_origin_link(k.origin or k.name, k.key, tuning)), Cell(k.name), Cell(q.amount(k.flops), k.flops),
                          Cell(_chain(k.chain_words)), Cell(tag("span", k.source, title=k.why))]) for k in map(_PlanKernel, plan)]
            parts += [tag("h3", c.title, tag("small", f"{len(plan)} kernels of its plan")),
                      table([Column("from"), Column("kernel", minor=True), Column("operations", True), Column("chain", minor=True), Column("source")],
                            rows, caption=f"Kernels of {c.title}")]
    return section("cases", "All figures", *parts)


class _PlanKernel:
    """A KernelInfo with its chain in words."""

    def __init__(self, k: object) -> None:
        from svod.bench.results import KernelInfo
        assert isinstance(k, KernelInfo)
        self.key, self.name, self.origin, self.flops, self.source, self.why = k.key, k.name, k.origin, k.flops, k.source, k.why
        self.chain_words = tuple(_opt_words(o) for o in k.chain)


def _opt_words(opt: Sequence[object]) -> str:
    args = (x for x in opt[1:] if x is not None)
    return f"{opt[0]}({', '.join(','.join(map(str, x)) if isinstance(x, (list, tuple)) else str(x) for x in args)})"


def _origin_link(text: str, key: str, tuning: Tuning | None) -> object:
    k = tuning.kernel(key) if tuning is not None else None
    return tag("a", text, href=f"#{k.id}") if k is not None else text


def _share(best: Outcome | None, case: CaseResult) -> object:
    if best is None or best.ceiling_share is None:
        return q.NOTHING
    by = f" {case.bound.by}" if case.bound is not None else ""
    return join(q.percent(best.ceiling_share), tag("small", by, class_="minor"))


def _time_cell(o: Outcome | None) -> Cell:
    if o is None:
        return Cell(q.NOTHING)
    if o.status != "ok":
        return Cell(tag("abbr", o.status, title=o.why or o.status, class_=f"status {o.status}"))
    shown: object = q.seconds(o.median)
    if o.same_as:
        shown = tag("abbr", shown, title=f"the same code as {o.same_as}", class_="same")
    return Cell(shown, o.median)


def next_section(view: Overview, tuning: Tuning | None) -> Markup | None:
    """Where time is left: far below the ceiling first, by the seconds that the ceiling leaves."""
    rows = []
    for c in view.cases:
        best = c.svod
        if best is None or not best.median or c.bound is None or best.ceiling_share is None or best.ceiling_share >= NEAR_CEILING:
            continue
        rows.append((1 / best.ceiling_share, c, best))
    lines = []
    for factor, c, best in sorted(rows, key=lambda r: -r[0])[:NEXT]:
        assert c.bound is not None, "cases without a bound were left out"
        source = best.kernels[0].source if best.kernels else best.name
        lines.append(Line([Cell(tag("a", c.title, href=f"#{case_id(c)}")), Cell(q.seconds(best.median), best.median),
                           Cell(q.seconds(c.bound.seconds), c.bound.seconds), Cell(q.times(factor), factor), Cell(source),
                           Cell(tag("code", f"svod-bench run --suite {c.suite} --kernels {c.name} --beam 8"))]))
    if lines:
        return section("next", "What to tune next", _lead("Furthest below their ceilings. The ceiling is a bound, not a promise; a search says what of it "
                                                         "can be had."),
                       table([Column("kernel"), Column("now", True), Column("bound", True), Column("room", True), Column("chain from", minor=True),
                              Column("command", minor=True)], lines, caption="Room below the ceiling"))
    unfinished = [k for k in tuning.kernels if k.courses and k.courses[-1].ended_by in ("budget spent", "interrupted")] if tuning is not None else []
    if not unfinished:
        return None
    lines = [Line([Cell(tag("a", _kernel_title(k), href=f"#{k.id}")), Cell(q.seconds(k.seconds), k.seconds), Cell(q.times(k.gain), k.gain),
                   Cell(str(sum(len(c.trials) for c in k.courses)), float(sum(len(c.trials) for c in k.courses))),
                   Cell(q.seconds(sum(c.spent for c in k.courses)), sum(c.spent for c in k.courses))])
             for k in sorted(unfinished, key=lambda k: -(k.seconds or 0.0))[:NEXT]]
    return section("next", "What to tune next", _lead("Searches that ended with more to try, the longest kernels first: ",
                                                     tag("code", "svod-tune MODEL.py --beam 8 --budget 300"), " goes on where they stopped."),
                   table([Column("kernel"), Column("now", True), Column("gain", True), Column("timed", True, help="candidates timed so far"),
                          Column("searched", True)], lines, caption="Searches that were cut short"))


# -- searches ---------------------------------------------------------------------------------------

def search_section(tuning: Tuning | None) -> Markup | None:
    """Where the candidates went."""
    courses = tuning.courses if tuning is not None else ()
    if tuning is None or not courses:
        return None
    total = {name: sum(c.fates[name] for c in courses) for name, _ in FATES}
    legend = [tag("span", tag("i", class_=f"box f-{name.replace(' ', '-')}"), f"{name} {total[name]}", class_="key", title=meaning)
              for name, meaning in FATES if total[name]]
    shown = [(n, m) for n, m in FATES if total[n]]
    columns = [Column("kernel"), Column("time", True), *(Column(n, True, minor=n not in ("duplicate", "raced", "confirmed"), help=m) for n, m in shown)]
    lines = []
    for k in tuning.kernels:
        fates = {n: sum(c.fates[n] for c in k.courses) for n, _ in shown}
        if not k.courses:
            continue
        lines.append(Line([Cell(tag("a", _short(k), href=f"#{k.id}")), Cell(q.seconds(sum(c.spent for c in k.courses)), sum(c.spent for c in k.courses)),
                           *(Cell(str(n) if n else "·", float(n)) for n in fates.values())]))
    return section("searches", "Where the candidates went", _lead(f"{sum(total.values())} proposals in {_count(len(courses), 'search')[:-1]}"
                                                                 f"{'es' if len(courses) != 1 else 'h'}, from dropped unseen to confirmed."),
                   charts.stacked([(n, total[n], f"f-{n.replace(' ', '-')}") for n, _ in FATES], "Where the candidates went; the table below has the figures"),
                   tag("div", *legend, class_="legend"),
                   table(columns, lines, caption="Candidates by what became of them"))


def kernel_section(tuning: Tuning | None) -> Markup | None:
    """Each kernel: origin, winning chain, loop nest, and the course of its searches."""
    if tuning is None or not tuning.kernels:
        return None
    legend = tag("div", *(tag("span", charts.swatch(k), k, class_="key") for k in (START, *KINDS, SEVERAL)), class_="legend")
    lead = "The course of each search, the winning chain and the loops it makes. Colours and shapes say what a candidate changed against its " \
           "nearest predecessor; pale marks were timed alone, full ones raced against the best, which is what counts."
    return section("kernels", "Kernels", _lead(lead), legend, *(_kernel(k, i < OPEN_KERNELS) for i, k in enumerate(tuning.kernels)))


def _kernel(k: TunedKernel, open_: bool) -> Markup:
    gain = "no winner yet" if k.gain is None else q.times(k.gain) if k.gain >= FASTER else "heuristic won"
    cls = "ahead" if (k.gain or 0) >= FASTER else "level"
    head = tag("summary", tag("span", _origin(k), class_="origin"), tag("span", f"{k.name} {k.shape} {k.dtype}", class_="what"),
               tag("span", f"{q.seconds(k.heuristic)} → {q.seconds(k.seconds)}" if k.gain and k.gain >= FASTER else q.seconds(k.seconds), class_="from"),
               tag("b", gain, class_=cls))
    facts = [("from", ", ".join(k.origins) or "unknown"), ("key", k.key[:16]), ("work", f"{q.amount(k.flops)} operations, {q.amount(k.bytes)}B")]
    if k.seconds and k.flops:
        facts.append(("rate", f"{q.flops_rate(k.flops / k.seconds)}, {q.bytes_rate(k.bytes / k.seconds)}"))
    if k.speedup:
        facts.append(("confirmed", f"{q.digits(k.speedup[0])}–{q.digits(k.speedup[2])}× the heuristic, 95 % interval"))
    if k.verified:
        facts.append(("verified", k.verified))
    parts: list[object] = [tag("dl", *(tag("div", tag("dt", n), tag("dd", v)) for n, v in facts), class_="facts")]
    parts.append(tag("h4", "Winning chain" if k.chain or k.speedup else "Chain"))
    parts.append(_chain(k.chain) if k.chain else tag("p", "the kernel as it is, without opts" if k.speedup else "none yet", class_="muted"))
    if k.nest:
        parts += [tag("h4", "Loop nest"), tag("pre", highlight(k.nest), tabindex="0", aria_label=f"Loop nest of {_kernel_title(k)}")]
    elif k.problem:
        parts.append(_note(f"No loop nest: {k.problem}"))
    for n, course in enumerate(k.courses, 1):
        title = f"Search {n} of {len(k.courses)}" if len(k.courses) > 1 else "Search"
        parts.append(tag("h4", title, tag("small", f"{course.settings} · {q.seconds(course.spent)} · ended: {course.ended_by}")))
        drawn = charts.course_charts(course, k.seconds if n == len(k.courses) else None) if len(course.trials) > 1 else None
        parts.append(drawn if drawn is not None else _note("Only the heuristic was timed: the budget went to other kernels, or nothing was left to try."))
        if drawn is not None:
            parts.append(charts.stacked([(name, course.fates[name], f"f-{name.replace(' ', '-')}") for name, _ in FATES],
                                        "Candidates: " + ", ".join(f"{m} {name}" for name, m in course.fates.items() if m)))
    return tag("details", head, tag("div", *parts, class_="inside", id=k.id), open=open_, class_="kernel")


def _origin(k: TunedKernel) -> str:
    return (k.origins[0] + (f" +{len(k.origins) - 1}" if len(k.origins) > 1 else "")) if k.origins else k.name


def _short(k: TunedKernel) -> str:
    return _origin(k).rsplit("/", 1)[-1]


def _kernel_title(k: TunedKernel) -> str:
    return f"{_short(k)} ({k.name} {k.shape})" if k.shape else _short(k)


def _chain(words: Sequence[str]) -> Markup:
    return tag("span", *(tag("code", w) for w in words), class_="chain") if words else tag("span", "as it is", class_="muted")


_KEYWORDS = re.compile(r"^(\s*)(phase \d+|parallel|for all|for|reduce|tile|unroll|copy|stage)\b")


def highlight(nest: str) -> Markup:
    """A loop nest with its first words marked by role."""
    lines = []
    for line in nest.split("\n"):
        found = _KEYWORDS.match(line)
        if found is None:
            lines.append(join(line))
        else:
            word = found[2].split()[0]
            lines.append(join(found[1], tag("span", found[2], class_=f"w-{word}"), line[found.end():]))
    return Markup("\n".join(lines))


# -- machine ----------------------------------------------------------------------------------------

def machine_section(view: Overview, tuning: Tuning | None) -> Markup:
    """What was measured where, with what."""
    parts: list[object] = []
    run = view.latest
    facts: list[tuple[str, str]] = []
    if run is not None:
        m = run.machine
        facts += [("processor", m.cpu), ("cores", f"{m.cores}, {m.threads} used by every contestant"),
                  ("caches", f"L1 {q.size(m.l1)}, L2 {q.size(m.l2)} per core, L3 {q.size(m.l3)}"), ("memory", q.size(m.memory)), ("system", m.system),
                  ("host", m.host), ("target", m.target)]
        facts += [(name, value) for name, value in run.versions.items()]
        facts += [("load", f"average {q.digits(run.load.load_average, 2)}, {q.percent(run.load.foreign)} used by other processes, "
                           f"{q.percent(run.load.steal)} stolen" + (f"; {run.load.busy}" if run.load.busy else ""))]
    if tuning is not None:
        if run is None:
            facts += [("target", tuning.target), ("compiler", tuning.compiler or "unknown")]
        facts += [("database", tuning.database)]
        facts += [(n, v) for n, v in tuning.facts.items()]
    parts.append(tag("dl", *(tag("div", tag("dt", n), tag("dd", v)) for n, v in facts), class_="facts"))
    ceilings = view.ceilings or (tuning.ceilings if tuning is not None else None)
    if ceilings is not None:
        parts.append(_ceiling_tables(ceilings))
    if run is not None and run.peers:
        lines = [Line([Cell(p.name), Cell(p.version or tag("span", p.missing or "missing", class_="muted")),
                       Cell(q.NOTHING if p.threads is None else str(p.threads), p.threads), Cell(p.outputs)]) for p in run.peers]
        parts += [tag("h3", "Peers"), table([Column("library"), Column("version"), Column("threads", True), Column("outputs", minor=True)], lines,
                                            caption="Libraries measured in the same rounds")]
    if view.runs:
        lines = [Line([Cell(tag("code", r.settings.command)), Cell(r.settings.started.replace("T", " ").rstrip("Z")),
                       Cell(q.seconds(r.settings.seconds), r.settings.seconds), Cell(str(len(r.cases)), len(r.cases)),
                       Cell(*_mean_of(r, "tuned/heuristic")), Cell(*_mean_of(r, f"tuned/{BEST_PEER}")), Cell(r.machine.host)]) for r in view.runs]
        parts += [tag("h3", "Runs in this report"), table([Column("command"), Column("started (UTC)", minor=True), Column("took", True, minor=True),
                                                           Column("cases", True), Column("vs heuristic", True), Column("vs best peer", True),
                                                           Column("host", minor=True)], lines, caption="Runs; of a case measured twice the later counts")]
    return section("machine", "Machine and versions", *parts)


def _mean_of(run: Run, key: str) -> tuple[str, float | None]:
    group = next((g for g in run.groups if g.name == ALL), run.groups[0] if len(run.groups) == 1 else None)
    value = group.speedups.get(key) if group is not None else None
    return q.times(value), value


def _ceiling_tables(c: Ceilings) -> Markup:
    kinds = [k for k in ("read", "write", "write_stream", "copy", "copy_stream") if any(k in v for v in c.bandwidth.values())]
    lines = []
    for level, values in c.bandwidth.items():
        lines.append(Line([Cell(level.upper() if level != "memory" else level), *(
            Cell(join(q.bytes_rate(values[k][1]), tag("small", f"one core {q.bytes_rate(values[k][0])}", class_="under")), values[k][1])
            if k in values else Cell(q.NOTHING) for k in kinds)]))
    columns = [Column("data in"), *(Column(k.replace("_stream", ", streamed"), True, minor=k.endswith("stream") or k == "write") for k in kinds)]
    flops = ", ".join(f"{name} {q.flops_rate(many)} (one core {q.flops_rate(one)})" for name, (one, many) in c.flops.items())
    return join(tag("h3", "Ceilings", tag("small", f"{_count(c.threads, 'thread')}, measured by svod's own kernels")),
                tag("p", f"Multiply-adds: {flops}. A launch inside a plan: {q.seconds(c.dispatch[1])}."),
                table(columns, lines, caption="Bandwidth of all cores", sortable=False))


# -- frame ------------------------------------------------------------------------------------------

def section(id_: str, title: str, *content: object) -> Markup:
    return tag("section", tag("h2", title, id=f"{id_}-title"), *content, id=id_, aria_labelledby=f"{id_}-title")


def _lead(*content: object) -> Markup:
    return tag("p", *content, class_="lead")


def _note(text: str) -> Markup:
    """A remark; `words` between backquotes are code."""
    parts = text.split("`")
    return tag("p", *(tag("code", p) if i % 2 else p for i, p in enumerate(parts)), class_="note")
