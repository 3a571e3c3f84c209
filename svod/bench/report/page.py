"""Renders `svod-bench report`: one HTML file that opens offline, and the same figures as Markdown for a pull request.

    runs (svod.bench.results) + tuning database (as svod.bench.report.data.Tuning)
        → overview: the latest result of each case
        → headline, sections and charts: the data to show
        → templates/: one file that contains its style sheet and its few lines of script

The page needs neither a network nor scripts: scripts only make tables sortable and open all details for printing.
"""
from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment
from markupsafe import Markup

from svod.bench.report import charts, headline, sections, words
from svod.bench.report.data import FATES, NEXT_WIDTH, Overview, TimedSize, Tuning, overview
from svod.bench.results import ContestantResult, Run
from svod.bench.roofline import Ceilings
from svod.bench.summary import ALL, BEST_PEER, group_results
from svod.errors import ConfigError
from svod.system import quantities as q
from svod.system.pages import environment, write_page

NO_DATA = ("there is nothing to report: no run was given, and the tuning database knows no search. Measure with `svod-bench run --json "
           "run.json` and report with `svod-bench report run.json`, or tune a model with `svod-tune MODEL.py` first")
# The id of each section and its name in the navigation; `templates/ID.html` renders to "" if its data is missing.
SECTIONS = (("roofline", "Roofline"), ("speedups", "Speed-ups"), ("next", "What to tune next"), ("cases", "All figures"),
            ("searches", "Candidates"), ("kernels", "Kernels"), ("machine", "Machine"))
UNFOLDED_KERNELS = 3    # number of kernels whose details are unfolded when the page opens
DRAWN_KERNELS = 60      # number of kernels whose searches are drawn: the page of a large database has to open quickly
_KINDS = ("read", "write", "write_stream", "copy", "copy_stream")


class PagePart(NamedTuple):
    """A section of the page."""

    id: str
    name: str
    html: Markup


def write_report(runs: Sequence[Run], tuning: Tuning | None, path: Path, *, now: datetime | None = None) -> None:
    """Write the report of `runs` and of a tuning database (`svod.tune.report_source.read_tuning`); either may be missing. Raises FileError,
    and ConfigError if there is nothing to show."""
    write_page(path, render_html(runs, tuning, now=now))


def render_html(runs: Sequence[Run], tuning: Tuning | None, *, now: datetime | None = None) -> str:
    """The HTML page. `now`: the date in its footer; None for the present time. Raises ConfigError if there is nothing to show."""
    context = _context(runs, tuning)
    templates = _templates("html")
    rendered = [PagePart(id_, name, Markup(templates.get_template(f"{id_}.html").render(context).strip())) for id_, name in SECTIONS]
    made = (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")
    return templates.get_template("page.html").render(context, parts=[p for p in rendered if p.html], made=made).strip() + "\n"


def render_markdown(runs: Sequence[Run], tuning: Tuning | None = None) -> str:
    """The headline, the geometric means and the table of cases for a pull request, then the chains of the cases' kernels that the
    database knows; without runs, the chains of all its kernels. Raises ConfigError if there is nothing to show."""
    context = _context(runs, tuning)
    view: Overview = context["view"]
    measured = {k.key for c in view.cases for o in c.contestants for k in o.kernels}
    kernels = [k for k in tuning.kernels if not view.cases or k.key in measured] if tuning is not None else []
    text = _templates("md").get_template("report.md").render(context, kernels=kernels, noisy=[c for c in view.cases if c.noisy],
                                                             groups=group_results(view.cases) if view.cases else ())
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _context(runs: Sequence[Run], tuning: Tuning | None) -> dict[str, Any]:
    if not any(r.cases for r in runs) and (tuning is None or not tuning.kernels):
        raise ConfigError(NO_DATA)
    view = overview(runs)
    return {"view": view, "tuning": tuning, "names": words.peer_names(view), "title": headline.title(view, tuning),
            "subtitle": headline.subtitle(view, tuning)}


# -- the environment of templates -------------------------------------------------------------------

@lru_cache
def _templates(kind: str) -> Environment:
    env = environment("svod.bench.report", escape=kind == "html")
    env.globals.update({name: value for name, value in vars(words).items() if callable(value)},
                       q=q, charts=charts, headline=headline, sections=sections, shapes_of_stack=charts.stacked, FASTER=words.FASTER,
                       FATES=FATES, NEXT_WIDTH=NEXT_WIDTH, ALL=ALL, BEST_PEER=BEST_PEER, OPEN_KERNELS=UNFOLDED_KERNELS,
                       DRAWN_KERNELS=DRAWN_KERNELS, timed_sizes=_timed_sizes, kinds_of=_kinds_of, column=sections.Column)
    env.filters.update(part=lambda x: f"{100 * x:.2f}%", px=lambda y: f"{y:.1f}", opt_words=words.opt_words, in_cell=_in_cell,
                       has_any=lambda values: any(v is not None for v in values), searched=words.search_seconds, fates_words=_fates_words,
                       time_or_status=_time_or_status)
    return env


def _kinds_of(ceilings: Ceilings) -> list[str]:
    """The kinds of bandwidth that were measured at any level."""
    return [k for k in _KINDS if any(k in rates for rates in ceilings.bandwidth.values())]


def _fates_words(fates: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in fates.items() if n)


def _timed_sizes(sizes: Sequence[TimedSize]) -> str:
    """Times by size in words: `v0=1: 3.20 µs, v0=64: 41.0 µs`."""
    return ", ".join(f"{s.at}: {q.seconds(s.seconds)}" for s in sizes)


def _in_cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return html.escape(text).replace("|", "\\|").replace("`", "'").replace("\n", " ")


def _time_or_status(o: ContestantResult | None) -> str:
    return q.NOTHING if o is None else q.seconds(o.median) if o.status == "ok" else o.status
