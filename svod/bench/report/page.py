"""`svod-bench report`: one HTML file that opens offline, and the same figures as Markdown for a pull request.

    runs (svod.bench.results) + tuning database (as svod.bench.report.data.Tuning)
        → overview: each case as measured last
        → sections (svod.bench.report.sections), charts (svod.bench.report.charts)
        → one file with its style sheet and its few lines of script inside

The page needs no network and no script: scripts only make tables sortable and open all details for printing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from svod.bench.report import kernels as report_kernels
from svod.bench.report import sections as report_sections
from svod.bench.report import tables as report_tables
from svod.bench.report.charts import symbols
from svod.bench.report.data import Overview, Tuning, overview
from svod.bench.report.markup import Markup, join, tag
from svod.bench.report.parts import kernel_title, over_best_peer, over_heuristic, peer_names, search_seconds
from svod.bench.results import CaseResult, Run
from svod.bench.summary import ALL, BEST_PEER, group_results, suite_results
from svod.core.machine.target import threads_of
from svod.errors import ConfigError
from svod.system import quantities as q
from svod.system.files import write_text

NO_DATA = (
    "there is nothing to report: no run was given, and the tuning database knows no search. Measure with `svod-bench run --json run.json` "
    "and report with `svod-bench report run.json`, or tune a model with `svod-tune MODEL.py` first"
)


def write_report(runs: Sequence[Run], tuning: Tuning | None, path: Path, *, now: datetime | None = None) -> None:
    """Write the report of `runs` and of what a tuning database knows (`svod.tune.report_source.read_tuning`), either of which may be
    missing; a reader sees the old file or the whole new one. Raises ConfigError when there is nothing to show, OSError."""
    text = render_html(runs, tuning, now=now)
    write_text(path, text)


def has_data(runs: Sequence[Run], tuning: Tuning | None) -> bool:
    """Whether there is anything to show."""
    return any(r.cases for r in runs) or (tuning is not None and bool(tuning.kernels))


def render_html(runs: Sequence[Run], tuning: Tuning | None, *, now: datetime | None = None) -> str:
    """The page. `now`: when it was made, as its foot says. Raises ConfigError when there is nothing to show."""
    if not has_data(runs, tuning):
        raise ConfigError(NO_DATA)
    view = overview(runs)
    parts = [
        ("Roofline", report_sections.roofline_section(view, tuning)),
        ("Speed-ups", report_sections.speedup_section(view, tuning)),
        ("What to tune next", report_tables.next_section(view, tuning)),
        ("All figures", report_tables.case_section(view, tuning)),
        ("Candidates", report_kernels.search_section(tuning)),
        ("Kernels", report_kernels.kernel_section(tuning)),
        ("Machine", report_tables.machine_section(view, tuning)),
    ]
    shown = [(name, part) for name, part in parts if part is not None]
    title = _title(view, tuning)
    made = (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")
    links = tag("nav", tag("ul", *(tag("li", tag("a", name, href=f"#{_id_of(part)}")) for name, part in shown)), aria_label="Sections")
    head = tag(
        "header",
        tag("p", "svod", class_="brand"),
        tag("h1", title),
        tag("p", _subtitle(view, tuning), class_="sub"),
        *_warnings(view),
        report_sections.headline(view, tuning),
        _verdict(view, tuning),
    )
    missing = gaps(view, tuning)
    foot = tag(
        "footer",
        tag("p", f"Made {made} by svod-bench report."),
        *([tag("p", "Left out: " + " ".join(missing))] if missing else []),
        *([tag("p", "Records that were skipped: " + "; ".join(tuning.remarks))] if tuning is not None and tuning.remarks else []),
    )
    body = tag(
        "body",
        tag("a", "Skip to the figures", href="#main", class_="skip"),
        symbols(),
        head,
        links,
        tag("main", *(part for _, part in shown), id="main"),
        foot,
        tag("script", _resource("report.js")),
    )
    page_head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · svod"),
        tag("style", _resource("report.css")),
    )
    return "<!doctype html>\n" + tag("html", page_head, body, lang="en") + "\n"


def _id_of(part: Markup) -> str:
    return part.split('id="', 2)[-1].split('"')[0] if not part.startswith("<section id=") else part.split('"')[1]


def _resource(name: str) -> Markup:
    return Markup(files("svod.bench.report").joinpath(name).read_text(encoding="utf-8"))


def _verdict(view: Overview, tuning: Tuning | None) -> Markup | None:
    text = report_sections.verdict(view, tuning)
    if not text:
        return None
    return tag(
        "p",
        text,
        " ",
        tag("a", "What to tune next", href="#next") if report_tables.next_section(view, tuning) is not None else None,
        class_="verdict",
    )


def _title(view: Overview, tuning: Tuning | None) -> str:
    if view.latest is not None:
        suites = list(dict.fromkeys(c.suite for c in view.cases))
        cpu = view.latest.machine.cpu
        return f"{', '.join(suites).capitalize()} on {cpu}"
    assert tuning is not None, "there is something to show"
    return f"Tuned kernels on {tuning.target.split('/')[1] if '/' in tuning.target else tuning.target}"


def _subtitle(view: Overview, tuning: Tuning | None) -> str:
    run = view.latest
    if run is not None:
        parts = [
            f"{run.machine.threads} thread{'s' * (run.machine.threads != 1)}",
            run.settings.started.split("T")[0],
            f"svod {run.versions.get('svod', '')}".strip(),
            run.settings.command,
        ]
    else:
        assert tuning is not None, "there is something to show"
        when = max((c.started for c in tuning.courses), default=0.0)
        threads = threads_of(tuning.target)
        parts = [
            f"{threads} thread{'s' * (threads != 1)}" if threads is not None else "",
            datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d") if when else "",
            tuning.compiler,
            tuning.database,
        ]
    return " · ".join(p for p in parts if p)


def _warnings(view: Overview) -> list[Markup]:
    found = []
    if len(view.targets) > 1:
        found.append(
            f"These runs are from {len(view.targets)} kinds of machine: ratios can be compared, times cannot. "
            "The ceilings shown are the latest run's."
        )
    busy = list(dict.fromkeys(r.load.busy for r in view.runs if r.load.busy))
    if busy:
        found.append(f"The machine was busy: {'; '.join(busy)}. Take small differences with care.")
    wrong = [
        f"{c.title} ({o.name}): {o.why}"
        for c in view.cases
        for o in c.contestants
        if o.status == "wrong" and o.name in ("heuristic", "tuned")
    ]
    if wrong:
        found.append(f"Wrong results of svod: {'; '.join(wrong)}")
    return [tag("p", w, class_="warning", role="note") for w in found]


def gaps(view: Overview, tuning: Tuning | None) -> list[str]:
    """What is not in the report, and what would bring it."""
    found = []
    if not view.cases:
        found.append("comparisons with peers and shares of ceilings (no run was given: svod-bench run --json run.json).")
    else:
        if not peer_names(view):
            found.append("peers (none took part: svod-bench run --peers numpy,torch,onnxruntime,jax).")
        if view.ceilings is None and (tuning is None or tuning.ceilings is None):
            found.append("ceilings (the run has none: svod-bench ceilings).")
        if not any(over_heuristic(c) is not None for c in view.cases):
            found.append("gains of tuning in these runs (they hold no tuned contestant: svod-bench run --beam 8).")
    if tuning is None or not tuning.kernels:
        found.append("searches and winning chains (no tuning database with searches was given: --db PATH).")
    elif tuning.other_targets:
        found.append(
            f"records of {len(tuning.other_targets)} other kind{'s' * (len(tuning.other_targets) != 1)} of machine in the database."
        )
    return found


# -- Markdown ---------------------------------------------------------------------------------------


def render_markdown(runs: Sequence[Run], tuning: Tuning | None = None) -> str:
    """The headline, the geometric means and the table of cases for a pull request, with the chains of those of their kernels
    that the database knows; without runs, all kernels of the database. Raises ConfigError when there is nothing to show."""
    if not has_data(runs, tuning):
        raise ConfigError(NO_DATA)
    view = overview(runs)
    out = [f"### {_title(view, tuning)}", "", _subtitle(view, tuning), ""]
    names = peer_names(view)
    if view.cases:
        out += _markdown_groups(view, bool(names))
        out += _markdown_suites(view)
        searched, rated = any(search_seconds(c) is not None for c in view.cases), any(c.neighbour is not None for c in view.cases)
        columns = ["kernel", "heuristic", "tuned", *(["best peer", "vs best peer"] if names else []), "vs heuristic", "ceiling",
                   *(["search"] if searched else []), *(["of neighbour"] if rated else []), ""]
        out += ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 2) + " --- |"]
        out += [_markdown_case(c, bool(names), searched, rated) for c in view.cases]
    measured = {k.key for c in view.cases for o in c.contestants for k in o.kernels}
    kernels = [k for k in tuning.kernels if not view.cases or k.key in measured] if tuning is not None else []
    if kernels:
        out += ["", "| kernel | heuristic | tuned | gain | chain |", "| --- | ---: | ---: | ---: | --- |"]
        for k in kernels:
            chain = " ".join(k.chain) or "as it is"
            out.append(
                f"| {_cell(kernel_title(k))} | {q.seconds(k.heuristic)} | {q.seconds(k.seconds)} | {q.times(k.gain)} | `{_cell(chain)}` |"
            )
    noisy = [c for c in view.cases if c.noisy]
    if noisy:
        out += ["", "Noisy: " + "; ".join(f"{_cell(c.title)} ({_cell(c.noisy or '')})" for c in noisy) + "."]
    return "\n".join(out) + "\n"


def _markdown_groups(view: Overview, peers: bool) -> list[str]:
    columns = ["geometric mean", "cases", *(["vs best peer"] if peers else []), "vs heuristic", "ceiling"]
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    for g in group_results(view.cases):
        share = g.ceiling_share.get("tuned", g.ceiling_share.get("heuristic"))
        count = len(view.cases) if g.name == ALL else sum(c.group == g.name for c in view.cases)
        over = q.times(g.speedups.get(f"tuned/{BEST_PEER}", g.speedups.get(f"heuristic/{BEST_PEER}")))
        cells = [
            f"**{g.name}**" if g.name == ALL else g.name,
            str(count),
            *([over] if peers else []),
            q.times(g.speedups.get("tuned/heuristic")),
            q.percent(share),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _markdown_suites(view: Overview) -> list[str]:
    """One line per suite; columns for which no suite has a figure are left out."""
    columns = ["suite", "kernels", "vs best peer", "heuristic vs tuned", "search, median", "longest search", "least of neighbour"]
    rows = []
    for s in suite_results(view.cases):
        over = s.means.speedups.get(f"tuned/{BEST_PEER}", s.means.speedups.get(f"heuristic/{BEST_PEER}"))
        search = [q.seconds(s.searching.median), f"{q.seconds(s.searching.most)} {s.searching.longest}"] if s.searching else [q.NOTHING] * 2
        least = f"{q.percent(s.rates.least)} {s.rates.lowest}" if s.rates else q.NOTHING
        rows.append([s.name, str(s.cases), q.times(over), q.times(s.means.speedups.get("heuristic/tuned")), *search, least])
    kept = [i for i in range(len(columns)) if any(r[i] != q.NOTHING for r in rows)]
    lines = [[columns[i] for i in kept], ["---", *["---:"] * (len(kept) - 1)], *([r[i] for i in kept] for r in rows)]
    return [*("| " + " | ".join(cells) + " |" for cells in lines), ""]


def _markdown_case(c: CaseResult, peers: bool, searched: bool, rated: bool) -> str:
    times = []
    for name in ("heuristic", "tuned"):
        o = c.outcome(name)
        times.append(q.NOTHING if o is None else q.seconds(o.median) if o.status == "ok" else o.status)
    best = c.outcome(c.best_peer) if c.best_peer else None
    over, gain = over_best_peer(c), over_heuristic(c)
    share = c.svod.ceiling_share if c.svod is not None else None
    middle = (
        [
            f"{q.seconds(best.median)} {best.name}" if best is not None else q.NOTHING,
            (f"**{q.times(over.median)}**" if over.median > 1 and not over.is_none else q.times(over.median)) if over else q.NOTHING,
        ]
        if peers
        else []
    )
    return (
        "| "
        + " | ".join(
            [_cell(c.title), *times, *middle, q.times(gain.median if gain else None), q.percent(share),
             *([q.seconds(search_seconds(c))] if searched else []),
             *([q.percent(c.neighbour.rate.median if c.neighbour and c.neighbour.rate else None)] if rated else []),
             "noisy" if c.noisy else ""]
        )
        + " |"
    )


def _cell(text: str) -> str:
    return join(text).replace("|", "\\|").replace("`", "'").replace("\n", " ")
