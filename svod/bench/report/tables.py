"""The report's tables: all cases, what to tune next, machine and versions."""

from __future__ import annotations

from collections.abc import Sequence

from svod.bench.report.data import Overview, Tuning
from svod.bench.report.markup import Cell, Column, Line, Markup, join, table, tag
from svod.bench.report.parts import (
    CUT_SHORT,
    NEAR_CEILING,
    case_id,
    chain_of,
    count,
    kernel_title,
    lead,
    over_best_peer,
    peer_names,
    search_seconds,
    section,
)
from svod.bench.results import CaseResult, Outcome, Run
from svod.bench.roofline import Ceilings
from svod.bench.summary import ALL, BEST_PEER, suite_results
from svod.system import quantities as q

NEXT = 6  # kernels in "what to tune next"

# -- tables -----------------------------------------------------------------------------------------


def case_section(view: Overview, tuning: Tuning | None) -> Markup | None:
    """All cases with all figures; then the kernels of plans."""
    if not view.cases:
        return None
    names = peer_names(view)
    searched = any(search_seconds(c) is not None for c in view.cases)
    rated = any(c.neighbour is not None for c in view.cases)
    columns = [
        Column("kernel"),
        Column("heuristic", True, minor=bool(names)),
        Column("tuned", True),
        *(Column(n, True, minor=True) for n in names),
        *([Column("vs best peer", True, help="time of the best peer over svod's: above 1 is good")] if names else []),
        Column("of ceiling", True, help="the least time that the machine's ceilings allow, over the time"),
        *([Column("search", True, minor=True, help="seconds that the search took")] if searched else []),
        *([Column("of neighbour", True, minor=True, help="its rate over that of its round neighbour")] if rated else []),
    ]
    lines = []
    for c in view.cases:
        s = over_best_peer(c)
        flags = [tag("abbr", "noisy", title=c.noisy, class_="flag")] if c.noisy else []
        name = join(c.title, *flags, tag("small", f"{c.shapes} {c.dtype}", class_="under"))
        best = c.svod
        ups = (
            [
                Cell(
                    tag("b", q.times(s.median), class_="level" if s.is_none else "ahead" if s.median > 1 else "behind") if s else q.NOTHING,
                    s.median if s else None,
                )
            ]
            if names
            else []
        )
        lines.append(
            Line(
                [
                    Cell(name, c.title),
                    _time_cell(c.outcome("heuristic")),
                    _time_cell(c.outcome("tuned")),
                    *(_time_cell(c.outcome(n)) for n in names),
                    *ups,
                    Cell(_share(best, c), best.ceiling_share if best is not None else None),
                    *([Cell(q.seconds(search_seconds(c)), search_seconds(c))] if searched else []),
                    *([_neighbour_cell(c)] if rated else []),
                ],
                case_id(c),
            )
        )
    parts: list[object] = [_suite_table(view), table(columns, lines, caption="Medians of one run; ± half the 95 % interval of the median")]
    for c in view.cases:
        plan = c.svod.kernels if c.svod is not None else ()
        if len(plan) > 1:
            rows = [
                Line(
                    [
                        Cell(_origin_link(k.origin or k.name, k.key, tuning)),
                        Cell(k.name),
                        Cell(q.amount(k.flops), k.flops),
                        Cell(chain_of([_opt_words(o) for o in k.chain])),
                        Cell(tag("span", k.source, title=k.why)),
                    ]
                )
                for k in plan
            ]
            parts += [
                tag("h3", c.title, tag("small", f"{len(plan)} kernels of its plan")),
                table(
                    [
                        Column("from"),
                        Column("kernel", minor=True),
                        Column("operations", True),
                        Column("chain", minor=True),
                        Column("source"),
                    ],
                    rows,
                    caption=f"Kernels of {c.title}",
                ),
            ]
    return section("cases", "All figures", *parts)


def _suite_table(view: Overview) -> Markup:
    """One line per suite: geometric means, what the searches took, the least rate over a round neighbour; only the columns that some suite
    has a figure for."""
    suites = suite_results(view.cases)
    columns: list[tuple[Column, list[Cell]]] = [
        (Column("suite"), [Cell(s.name) for s in suites]),
        (Column("kernels", True), [Cell(str(s.cases), s.cases) for s in suites]),
    ]

    def add(column: Column, values: Sequence[tuple[object, float | None]]) -> None:
        if any(value is not None for _, value in values):
            columns.append((column, [Cell(shown, value) for shown, value in values]))

    over = [s.means.speedups.get(f"tuned/{BEST_PEER}", s.means.speedups.get(f"heuristic/{BEST_PEER}")) for s in suites]
    gains = [s.means.speedups.get("heuristic/tuned") for s in suites]
    searching, rates = [s.searching for s in suites], [s.rates for s in suites]
    add(Column("vs best peer", True, help="geometric mean"), [(q.times(v), v) for v in over])
    add(Column("heuristic vs tuned", True, help="geometric mean; 1 where both are the same code"), [(q.times(v), v) for v in gains])
    medians = [s.median if s else None for s in searching]
    add(Column("search", True, help="of a kernel, median"), [(q.seconds(v), v) for v in medians])
    add(Column("longest search", True), [_of_case(q.seconds(s.most), s.longest, s.most) if s else (q.NOTHING, None) for s in searching])
    add(
        Column("least of neighbour", True, help="of an odd kernel's rate, over that of its round neighbour"),
        [_of_case(q.percent(r.least), r.lowest, r.least) if r else (q.NOTHING, None) for r in rates],
    )
    lines = [Line([cells[i] for _, cells in columns]) for i in range(len(suites))]
    return table([c for c, _ in columns], lines, caption="The suites", sortable=False)


def _of_case(shown: str, case: str, value: float) -> tuple[object, float]:
    return join(shown, tag("small", case, class_="under")), value


def _neighbour_cell(case: CaseResult) -> Cell:
    n = case.neighbour
    if n is None or n.rate is None:
        return Cell(q.NOTHING if n is None else tag("abbr", "none", title=n.why))
    return Cell(join(q.percent(n.rate.median), tag("small", n.title, class_="under")), n.rate.median)


def _opt_words(opt: Sequence[object]) -> str:
    args = (x for x in opt[1:] if x is not None)
    return f"{opt[0]}({', '.join(','.join(map(str, x)) if isinstance(x, (list, tuple)) else str(x) for x in args)})"


def _origin_link(text: str, key: str, tuning: Tuning | None) -> object:
    k = tuning.kernel(key) if tuning is not None else None
    return tag("a", text, href=f"#{k.id}") if k is not None else text


def _share(best: Outcome | None, case: CaseResult) -> object:
    if best is None or best.ceiling_share is None:
        return q.NOTHING
    return join(q.percent(best.ceiling_share), tag("small", case.bound.by if case.bound is not None else "", class_="under"))


def _time_cell(o: Outcome | None) -> Cell:
    if o is None:
        return Cell(q.NOTHING)
    if o.status != "ok":
        return Cell(tag("abbr", o.status, title=o.why or o.status, class_=f"status {o.status}"))
    shown: object = q.seconds(o.median)
    if o.same_as:
        shown = tag("abbr", shown, title=f"the same code as {o.same_as}", class_="same")
    return Cell(join(shown, tag("small", f"±{q.percent(o.spread)}", class_="under") if o.spread is not None else None), o.median)


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
        lines.append(
            Line(
                [
                    Cell(tag("a", c.title, href=f"#{case_id(c)}")),
                    Cell(q.seconds(best.median), best.median),
                    Cell(q.seconds(c.bound.seconds), c.bound.seconds),
                    Cell(q.times(factor), factor),
                    Cell(source),
                    Cell(tag("code", f"svod-bench run --suite {c.suite} --kernels {c.name} --beam 8")),
                ]
            )
        )
    if lines:
        return section(
            "next",
            "What to tune next",
            lead("Furthest below their ceilings. The ceiling is a bound, not a promise; a search says what of it can be had."),
            table(
                [
                    Column("kernel"),
                    Column("now", True),
                    Column("bound", True),
                    Column("room", True),
                    Column("chain from", minor=True),
                    Column("command", minor=True),
                ],
                lines,
                caption="Room below the ceiling",
            ),
        )
    unfinished = [k for k in tuning.kernels if k.courses and k.courses[-1].ended_by in CUT_SHORT] if tuning is not None else []
    if not unfinished:
        return None
    lines = [
        Line(
            [
                Cell(tag("a", kernel_title(k), href=f"#{k.id}")),
                Cell(q.seconds(k.seconds), k.seconds),
                Cell(q.times(k.gain), k.gain),
                Cell(str(sum(len(c.trials) for c in k.courses)), float(sum(len(c.trials) for c in k.courses))),
                Cell(q.seconds(sum(c.spent for c in k.courses)), sum(c.spent for c in k.courses)),
            ]
        )
        for k in sorted(unfinished, key=lambda k: -(k.seconds or 0.0))[:NEXT]
    ]
    return section(
        "next",
        "What to tune next",
        lead(
            "Searches that ended with more to try, the longest kernels first: ",
            tag("code", "svod-tune MODEL.py --beam 8 --budget 300"),
            " goes on where they stopped.",
        ),
        table(
            [
                Column("kernel"),
                Column("now", True),
                Column("gain", True),
                Column("timed", True, help="candidates timed so far"),
                Column("searched", True),
            ],
            lines,
            caption="Searches that were cut short",
        ),
    )


# -- machine ----------------------------------------------------------------------------------------


def machine_section(view: Overview, tuning: Tuning | None) -> Markup:
    """What was measured where, with what."""
    facts = _facts_of_run(view.latest) if view.latest is not None else []
    if tuning is not None:
        if view.latest is None:
            facts += [("target", tuning.target), ("compiler", tuning.compiler or "unknown")]
        facts += [("database", tuning.database), *tuning.facts.items()]
    parts: list[object] = [tag("dl", *(tag("div", tag("dt", n), tag("dd", v)) for n, v in facts), class_="facts")]
    ceilings = view.ceilings or (tuning.ceilings if tuning is not None else None)
    if ceilings is not None:
        parts.append(_ceiling_tables(ceilings))
    if view.latest is not None and view.latest.peers:
        parts += [tag("h3", "Peers"), _peers_table(view.latest)]
    if view.runs:
        parts += [tag("h3", "Runs in this report"), _runs_table(view.runs)]
    return section("machine", "Machine and versions", *parts)


def _facts_of_run(run: Run) -> list[tuple[str, str]]:
    m, load = run.machine, run.load
    return [
        ("processor", m.cpu),
        ("cores", f"{m.cores}, {m.threads} used by every contestant"),
        ("caches", f"L1 {q.size(m.l1)}, L2 {q.size(m.l2)} per core, L3 {q.size(m.l3)}"),
        ("memory", q.size(m.memory)),
        ("system", m.system),
        ("host", m.host),
        ("target", m.target),
        *run.versions.items(),
        ("load", f"average {q.digits(load.load_average, 2)}, {q.percent(load.foreign)} used by other processes, "
                 f"{q.percent(load.steal)} stolen" + (f"; {load.busy}" if load.busy else "")),
    ]


def _peers_table(run: Run) -> Markup:
    lines = [
        Line(
            [
                Cell(p.name),
                Cell(p.version or tag("span", p.missing or "missing", class_="muted")),
                Cell(q.NOTHING if p.threads is None else str(p.threads), p.threads),
                Cell(p.outputs),
            ]
        )
        for p in run.peers
    ]
    columns = [Column("library"), Column("version"), Column("threads", True), Column("outputs", minor=True)]
    return table(columns, lines, caption="Libraries measured in the same rounds")


def _runs_table(runs: Sequence[Run]) -> Markup:
    lines = [
        Line(
            [
                Cell(tag("code", r.settings.command)),
                Cell(r.settings.started.replace("T", " ").rstrip("Z")),
                Cell(q.seconds(r.settings.seconds), r.settings.seconds),
                Cell(str(len(r.cases)), len(r.cases)),
                Cell(*_mean_of(r, "tuned/heuristic")),
                Cell(*_mean_of(r, f"tuned/{BEST_PEER}")),
                Cell(r.machine.host),
            ]
        )
        for r in runs
    ]
    columns = [
        Column("command"),
        Column("started (UTC)", minor=True),
        Column("took", True, minor=True),
        Column("cases", True),
        Column("vs heuristic", True),
        Column("vs best peer", True),
        Column("host", minor=True),
    ]
    return table(columns, lines, caption="Runs; of a case measured twice the later counts")


def _mean_of(run: Run, key: str) -> tuple[str, float | None]:
    group = next((g for g in run.groups if g.name == ALL), run.groups[0] if len(run.groups) == 1 else None)
    value = group.speedups.get(key) if group is not None else None
    return q.times(value), value


def _ceiling_tables(c: Ceilings) -> Markup:
    kinds = [k for k in ("read", "write", "write_stream", "copy", "copy_stream") if any(k in v for v in c.bandwidth.values())]
    lines = []
    for level, values in c.bandwidth.items():
        lines.append(
            Line(
                [
                    Cell(level.upper() if level != "memory" else level),
                    *(
                        Cell(
                            join(q.bytes_rate(values[k][1]), tag("small", f"one core {q.bytes_rate(values[k][0])}", class_="under minor")),
                            values[k][1],
                        )
                        if k in values
                        else Cell(q.NOTHING)
                        for k in kinds
                    ),
                ]
            )
        )
    columns = [
        Column("data in"),
        *(Column(k.replace("_stream", ", streamed"), True, minor=k.endswith("stream") or k == "write") for k in kinds),
    ]
    flops = ", ".join(f"{name} {q.flops_rate(many)} (one core {q.flops_rate(one)})" for name, (one, many) in c.flops.items())
    return join(
        tag("h3", "Ceilings", tag("small", f"{count(c.threads, 'thread')}, measured by svod's own kernels")),
        tag("p", f"Multiply-adds: {flops}. A launch inside a plan: {q.seconds(c.dispatch[1])}."),
        table(columns, lines, caption="Bandwidth of all cores", sortable=False),
    )
