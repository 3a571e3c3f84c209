"""What the tuning database shows: where candidates went, and each kernel with its searches, its chain and its loops."""

from __future__ import annotations

import re

from svod.bench.report import charts
from svod.bench.report.data import FATES, KINDS, SEVERAL, START, TunedKernel, Tuning
from svod.bench.report.markup import Cell, Column, Line, Markup, join, table, tag
from svod.bench.report.parts import (
    FASTER,
    chain_of,
    count,
    kernel_title,
    lead,
    note,
    section,
    short_name,
)
from svod.system import quantities as q

OPEN_KERNELS = 3        # whose details are open when the page is
DRAWN_KERNELS = 60      # whose searches are drawn: a page of a large database has to stay quick to open

# -- searches ---------------------------------------------------------------------------------------


def search_section(tuning: Tuning | None) -> Markup | None:
    """Where the candidates went."""
    courses = tuning.courses if tuning is not None else ()
    if tuning is None or not courses:
        return None
    total = {name: sum(c.fates[name] for c in courses) for name, _ in FATES}
    legend = [
        tag("span", tag("i", class_=f"box f-{name.replace(' ', '-')}"), f"{name} {total[name]}", class_="key", title=meaning)
        for name, meaning in FATES
        if total[name]
    ]
    shown = [(n, m) for n, m in FATES if total[n]]
    columns = [Column("kernel"), Column("time", True), *(Column(n, True, minor=n not in ("raced", "confirmed"), help=m) for n, m in shown)]
    lines, alone = [], 0
    for k in tuning.kernels:
        fates = {n: sum(c.fates[n] for c in k.courses) for n, _ in shown}
        if sum(fates.values()) <= 1:
            alone += 1
            continue
        lines.append(
            Line(
                [
                    Cell(
                        join(tag("a", short_name(k), href=f"#{k.id}"), tag("small", f"{k.name} {k.shape}", class_="under")), short_name(k)
                    ),
                    Cell(q.seconds(sum(c.spent for c in k.courses)), sum(c.spent for c in k.courses)),
                    *(Cell(str(n) if n else "·", float(n)) for n in fates.values()),
                ]
            )
        )
    return section(
        "searches",
        "Where the candidates went",
        lead(
            f"{sum(total.values())} proposals in {count(len(courses), 'search')}, from dropped unseen to confirmed."
        ),
        charts.stacked(
            [(n, total[n], f"f-{n.replace(' ', '-')}") for n, _ in FATES], "Where the candidates went; the table below has the figures"
        ),
        tag("div", *legend, class_="legend"),
        table(columns, lines, caption="Candidates by what became of them") if lines else None,
        note(f"Of {count(alone, 'more kernel')} nothing but the heuristic was timed: the budget went to those where more time is spent.")
        if alone
        else None,
    )


def kernel_section(tuning: Tuning | None) -> Markup | None:
    """Each kernel: origin, winning chain, loop nest, and the course of its searches."""
    if tuning is None or not tuning.kernels:
        return None
    legend = tag("div", *(tag("span", charts.swatch(k), k, class_="key") for k in (START, *KINDS, SEVERAL)), class_="legend")
    intro = (
        "The course of each search, the winning chain and the loops it makes. Colours and shapes say what a candidate changed against its "
        "nearest predecessor; pale marks were timed alone, full ones raced against the best, which is what counts."
    )
    shown = [_kernel(k, i < OPEN_KERNELS, i < DRAWN_KERNELS) for i, k in enumerate(tuning.kernels)]
    return section("kernels", "Kernels", lead(intro), legend, *shown)


def _kernel(k: TunedKernel, open_: bool, draw: bool) -> Markup:
    gain = "no winner yet" if k.gain is None else q.times(k.gain) if k.gain >= FASTER else "heuristic won"
    cls = "ahead" if (k.gain or 0) >= FASTER else "level"
    head = tag(
        "summary",
        tag("span", short_name(k), class_="origin"),
        tag("span", f"{k.name} {k.shape} {k.dtype}", class_="what"),
        tag(
            "span",
            f"{q.seconds(k.heuristic)} → {q.seconds(k.seconds)}" if k.gain and k.gain >= FASTER else q.seconds(k.seconds),
            class_="from",
        ),
        tag("b", gain, class_=cls),
    )
    parts = [
        tag("dl", *(tag("div", tag("dt", n), tag("dd", v)) for n, v in _facts(k)), class_="facts"),
        tag("div", tag("div", *_winner(k)), tag("div", *_searches(k, draw)), class_="two"),
    ]
    return tag("details", head, tag("div", *parts, class_="inside", id=k.id), open=open_, class_="kernel")


def _facts(k: TunedKernel) -> list[tuple[str, str]]:
    facts = [
        ("from", ", ".join(k.origins) or "unknown"),
        ("key", k.key[:16]),
        ("work", f"{q.amount(k.flops)} operations, {q.amount(k.bytes)}B"),
    ]
    if k.seconds and k.flops:
        facts.append(("rate", f"{q.flops_rate(k.flops / k.seconds)}, {q.bytes_rate(k.bytes / k.seconds)}"))
    if k.speedup:
        facts.append(("confirmed", f"{q.digits(k.speedup[0])}–{q.digits(k.speedup[2])}× the heuristic, 95 % interval"))
    if k.verified:
        facts.append(("verified", k.verified))
    return facts


def _winner(k: TunedKernel) -> list[object]:
    """The winning chain and the loops that it makes."""
    parts: list[object] = [
        tag("h4", "Winning chain"),
        chain_of(k.chain) if k.chain else tag("p", "the kernel as it is, without opts" if k.speedup else "none yet", class_="muted"),
    ]
    if k.nest:
        parts += [tag("h4", "Loop nest"), tag("pre", highlight(k.nest), tabindex="0", aria_label=f"Loop nest of {kernel_title(k)}")]
    elif k.problem:
        parts.append(note(f"No loop nest: {k.problem}"))
    return parts


def _searches(k: TunedKernel, draw: bool) -> list[object]:
    """The course of each search. One in which nothing was tried is told where it is the only one."""
    parts: list[object] = []
    for n, course in [(n, c) for n, c in enumerate(k.courses, 1) if len(c.trials) > 1] or list(enumerate(k.courses, 1))[-1:]:
        title = f"Search {n} of {len(k.courses)}" if len(k.courses) > 1 else "Search"
        parts.append(tag("h4", title, tag("small", f"{course.settings} · {q.seconds(course.spent)} · ended: {course.ended_by}")))
        if not draw:
            parts.append(note(f"Not drawn here: only the {DRAWN_KERNELS} kernels that gained most are."))
            continue
        drawn = charts.course_charts(course) if len(course.trials) > 1 else None
        if drawn is None:
            parts.append(note("Only the heuristic was timed: the budget went to other kernels, or nothing was left to try."))
            continue
        fates = [(name, course.fates[name], f"f-{name.replace(' ', '-')}") for name, _ in FATES]
        parts += [drawn, charts.stacked(fates, "Candidates: " + ", ".join(f"{m} {name}" for name, m in course.fates.items() if m))]
    return parts


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
            lines.append(join(found[1], tag("span", found[2], class_=f"w-{word}"), line[found.end() :]))
    return Markup("\n".join(lines))
