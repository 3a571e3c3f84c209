"""The report: its content for every combination of data, its form of one file that opens offline, and the sums behind its figures.

There is no browser: well-formedness, links within the page, escaping, and numbers are checked in the text; the look was checked by eye.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import escape

from svod.bench.race import Ratio
from svod.bench.report import charts
from svod.bench.report.data import (
    FATES,
    SEVERAL,
    START,
    STEP_KINDS,
    Course,
    TimedSize,
    Trial,
    TunedKernel,
    Tuning,
    fates_of,
    kind_of_step,
    overview,
)
from svod.bench.report.page import NO_DATA, render_html, render_markdown, write_report
from svod.bench.results import Run, read_run
from svod.core.kernel.opts import OPTS
from svod.errors import ConfigError
from svod.system import quantities as q

DATA = Path(__file__).parents[1] / "data"
NOW = datetime(2026, 1, 16, 8, 30, tzinfo=UTC)
VOID = {"meta", "br", "line", "use", "circle", "rect", "path"}


@pytest.fixture(scope="module")
def run() -> Run:
    return read_run(DATA / "run.json")


@pytest.fixture(scope="module")
def model_run() -> Run:
    return read_run(DATA / "resnet18.json")


def test_every_opt_has_a_kind() -> None:
    assert sorted(op for ops in STEP_KINDS.values() for op in ops) == sorted(OPTS)


def trials() -> tuple[Trial, ...]:
    found = [Trial(1, 0.1, 4e-3, START, True, "UPCAST(o0, 8)")]
    for n, kind in enumerate([*STEP_KINDS, SEVERAL], 2):
        found.append(Trial(n, 1.0 + n // 4, 5e-3 / n, kind, n % 2 == 0, f"UPCAST(o0, {n})"))
    return tuple(found)


def tuning(name: str = "layer1.0.conv1") -> Tuning:
    course = Course(
        "s1",
        1.7e9,
        3.5,
        "budget spent",
        "beam, width 4",
        4e-3,
        1e-3,
        fates_of({"proposed": 40, "limited": 3, "duplicate": 9}, {"slow": 5, "screened": 7, "raced": 4, "confirmed": 2, "wrong": 1}),
        trials(),
        19,
    )
    won = TunedKernel(
        "a" * 32,
        "conv",
        "64×56×56 over 64×3×3",
        "float32",
        (name, "layer1.1.conv1"),
        2.3e8,
        1.7e6,
        ("UPCAST(o0, 32)", "THREAD(o1, 2)"),
        1e-3,
        2e-3,
        Ratio(2.0, 1.9, 2.1),
        "every element, integers",
        "phase 0: out → p0\n  for o0 in 0…64\n    p0[o0] = p1[o0]",
        "",
        (course,),
        (TimedSize("", 1e-3, 2e-3, 2.3e8, 1.7e6),),
    )
    kept = replace(
        won, key="b" * 32, origins=(), speedup=Ratio(1.0, 1.0, 1.0), seconds=2e-3, nest="", problem="it is for another machine", courses=()
    )
    return Tuning("tuning.db", "x86_64/znver5/avx512f/l1 48k/l2 1m/l3 32m/t2", "LLVM 22.1", {"governor": "performance"}, (won, kept))


class Checker(HTMLParser):
    """Checks that every element is closed in its parent and that ids are unique; collects references to other files."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.hrefs: list[str] = []
        self.sources: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if "id" in found:
            self.ids.append(found["id"] or "")
        if "href" in found:
            self.hrefs.append(found["href"] or "")
        if "src" in found or name == "link":
            self.sources.append(str(found))
        if name not in VOID or (name in VOID - {"meta", "br"} and not (self.get_starttag_text() or "").endswith("/>")):
            self.open.append(name)

    def handle_startendtag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(name, attrs)

    def handle_endtag(self, name: str) -> None:
        assert self.open and self.open[-1] == name, f"</{name}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check(page: str) -> Checker:
    parser = Checker()
    parser.feed(page)
    assert not parser.open
    assert len(parser.ids) == len(set(parser.ids))
    inside = {h[1:] for h in parser.hrefs}
    assert all(h.startswith("#") for h in parser.hrefs) and not parser.sources, "the page asks for something outside itself"
    assert inside <= set(parser.ids), f"links lead nowhere: {inside - set(parser.ids)}"
    assert "@import" not in page and "url(" not in page and "http" not in page.replace("http-equiv", "")
    return parser


# -- the whole page ---------------------------------------------------------------------------------


def test_all_parts_with_all_data(run: Run) -> None:
    found = check(render_html([run], tuning(), now=NOW))
    assert {"roofline", "speedups", "next", "cases", "searches", "kernels", "machine"} <= set(found.ids)
    text = " ".join(found.text)
    for expected in (
        "AMD EPYC 9B45",
        "GEMM 1024",
        "onnxruntime",
        "layer1.0.conv1",
        "for o0 in 0…64",
        "THREAD(o1, 2)",
        "2026-01-16 08:30 UTC",
        "not installed",
        "it is for another machine",
        "budget spent",
    ):
        assert expected in text or expected in text.replace("for  o0", "for o0"), expected


def test_headline_has_the_means_of_the_run(run: Run) -> None:
    everything = next(g for g in run.groups if g.name == "all")
    page = render_html([run], None, now=NOW)
    assert f"<b>{q.times(everything.speedups['tuned/heuristic'])}</b>" in page
    assert f"<b>{q.times(everything.speedups['tuned/best peer'])}</b>" in page
    assert f"<b>{len(run.cases)}</b>" in page


def test_every_case_with_arithmetic_is_on_the_roofline(run: Run) -> None:
    page = render_html([run], None, now=NOW)
    plot = page[page.index('id="roofline"') : page.index('id="speedups"')]
    for case in run.cases:
        expected = case.flops > 0
        assert (f'aria-label="{escape(case.title)}: ' in plot) is expected, case.title
        assert expected or case.title in plot, "what cannot be drawn is named"


def test_kernels_of_a_model_are_on_the_roofline_with_it(run: Run, model_run: Run) -> None:
    roofline = render_html([model_run], tuning(), now=NOW).split('<section id="roofline"')[1].split("</section>")[0]
    assert "ResNet-18" in roofline and "layer1.0.conv1" in roofline and "Beside the models stand the kernels" in roofline
    other = render_html([run], tuning(), now=NOW).split('<section id="roofline"')[1].split("</section>")[0]
    assert "layer1.0.conv1" not in other and "Beside the models" not in other


def test_a_search_that_tried_nothing_is_told_where_it_is_the_only_one() -> None:
    won = tuning().kernels[0]
    nothing = replace(won.courses[0], trials=won.courses[0].trials[:1])
    both = render_html([], replace(tuning(), kernels=(replace(won, courses=(nothing, won.courses[0])),)), now=NOW)
    assert "Search 2 of 2" in both and "Search 1 of 2" not in both and "Only the heuristic was timed" not in both
    alone = render_html([], replace(tuning(), kernels=(replace(won, courses=(nothing,)),)), now=NOW)
    assert "Only the heuristic was timed" in alone


@pytest.mark.parametrize(("with_run", "with_database"), [(True, False), (False, True)])
def test_missing_parts_are_left_out_and_said(run: Run, with_run: bool, with_database: bool) -> None:
    found = check(render_html([run] if with_run else [], tuning() if with_database else None, now=NOW))
    text = " ".join(found.text)
    assert ("kernels" in found.ids) is with_database and ("cases" in found.ids) is with_run
    assert "Left out:" in text and ("--with-db" in text) is with_run and ("no run was given" in text) is with_database


def test_without_peers_ceilings_or_tuned(run: Run, model_run: Run) -> None:
    text = " ".join(check(render_html([replace(model_run, ceilings=None)], None, now=NOW)).text)
    assert "best peer" not in text.replace("vs best peer", "") and "no roofs are drawn" in text and "peers (none took part" in text
    only = [replace(c, contestants=tuple(o for o in c.contestants if o.name == "heuristic"), best_peer=None) for c in run.cases]
    text = " ".join(check(render_html([replace(run, cases=tuple(only), groups=())], None, now=NOW)).text)
    assert "no tuned contestant" in text


def test_nothing_to_report_says_what_to_run(run: Run, tmp_path: Path) -> None:
    for runs, database in (([], None), ([replace(run, cases=(), groups=())], None), ([], replace(tuning(), kernels=()))):
        with pytest.raises(ConfigError, match="svod-bench run --json"):
            write_report(runs, database, tmp_path / "report.html")
        with pytest.raises(ConfigError, match="svod-tune"):
            render_markdown(runs, database)
    assert not list(tmp_path.iterdir()) and "svod-bench run" in NO_DATA


def test_hostile_names_stay_text(run: Run) -> None:
    evil = '<script>alert("x")</script> & "quoted"'
    cases = (replace(run.cases[0], title=evil, noisy=evil), *run.cases[1:])
    page = render_html([replace(run, cases=cases)], tuning(evil), now=NOW)
    check(page)
    assert "<script>alert" not in page and page.count("<script>") == 1
    assert "&lt;script&gt;" in page
    assert "| a\\|b c |" in render_markdown([replace(run, cases=(replace(run.cases[0], title="a|b\nc"),))])


def test_file_is_written_whole_and_readable(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report([run], None, path, now=NOW)
    assert path.read_text(encoding="utf-8") == render_html([run], None, now=NOW)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"] and path.stat().st_mode & 0o044 == 0o044


def test_of_a_case_in_two_runs_the_later_counts(run: Run) -> None:
    later = replace(read_run(DATA / "run_slower.json"), settings=replace(run.settings, started="2026-02-01T00:00:00Z"))
    for runs in ([run, later], [later, run]):
        view = overview(runs)
        assert view.cases == later.cases and view.latest is later
    page = render_html([run, later], None, now=NOW)
    assert page.count("<td") > 0 and page.count(escape(run.settings.command)) >= 2


def test_machines_that_differ_and_load_are_said(run: Run) -> None:
    other = replace(run, machine=replace(run.machine, target="aarch64/other/t8"), load=replace(run.load, busy="other processes used 9 %"))
    text = " ".join(check(render_html([run, other], None, now=NOW)).text).replace("\u00a0", " ")
    assert "2 kinds of machine" in text and "other processes used 9 %" in text


def test_markdown_has_one_line_per_case(run: Run, model_run: Run) -> None:
    text = render_markdown([run])
    for case in run.cases:
        assert sum(line.startswith(f"| {case.title} |") for line in text.splitlines()) == 1
    for block in text.split("\n\n"):
        lines = block.strip().splitlines()
        if lines[0].startswith("|"):
            assert len({line.count("|") for line in lines}) == 1, "a table's rows have as many cells as its head"
    assert "peer" not in render_markdown([model_run])
    assert "`UPCAST(o0, 32) THREAD(o1, 2)`" in render_markdown([], tuning())


def test_suites_searches_and_neighbours_are_told(run: Run, model_run: Run) -> None:
    text = render_markdown([run]).replace("\u00a0", " ")
    assert "| core | 9 | 1.21× | 0.87× | 7.66 s | 10.6 s gemm_1024_bf16 | – |" in text
    assert "| odd | 1 | 1.05× | 0.76× | 10.5 s | 10.5 s gemm_1000 | 92 % gemm_1000 |" in text
    assert "| GEMM 1000 |" in text and "| 10.5 s | 92 % |" in text
    page = " ".join(check(render_html([run], None, now=NOW)).text).replace("\u00a0", " ")
    assert "longest search" in page and "10.6 s gemm_1024_bf16" in page and "92 % GEMM 1024" in page
    without = " ".join(check(render_html([model_run], None, now=NOW)).text)
    assert "longest search" not in without and "of neighbour" not in without


@pytest.mark.slow
def test_a_large_database_stays_readable(run: Run) -> None:
    one = tuning().kernels[0]
    many = replace(tuning(), kernels=tuple(replace(one, key=f"{i:032x}"[::-1], origins=(f"layer{i}",)) for i in range(90)))
    page = render_html([], many, now=NOW)
    check(page)
    assert page.count("Not drawn here") == 30 and len(page) < 2_000_000
    assert "layer7" not in render_markdown([run], many), "with runs only their own kernels are listed"
    assert "layer7" in render_markdown([], many)


# -- what the figures are made of -------------------------------------------------------------------


def test_steps_are_named_after_what_they_changed() -> None:
    base = ("UPCAST(o0, 8)", "THREAD(o1, 2)")
    assert kind_of_step(base, []) == START
    assert kind_of_step(("UPCAST(o0, 16)", "THREAD(o1, 2)"), [base]) == "register tile"
    assert kind_of_step((*base, "STAGE(s0, root)"), [base]) == "staging"
    assert kind_of_step(("UPCAST(o0, 8)",), [base]) == "cores"
    assert kind_of_step((*base, "TILE(o0, 4)", "STAGE(s0, o1)"), [base]) == SEVERAL
    assert kind_of_step((*base, "TILE(o0, 4)", "STAGE(s0, o1)"), [base, (*base, "TILE(o0, 4)")]) == "staging", "the nearest counts"


def test_fates_add_up_to_what_was_proposed() -> None:
    fates = fates_of({"proposed": 49, "limited": 2, "duplicate": 3}, {"slow": 20, "screened": 5, "confirmed": 4})
    assert sum(fates.values()) == 49 + 1 and fates["not built"] == 50 - 34 and list(fates) == [name for name, _ in FATES]
    assert fates_of({"proposed": 1}, {"raced": 5})["not built"] == 0, "what was put back is proposed again: never below none"


def test_course_draws_the_best_that_was_raced() -> None:
    course = tuning().kernels[0].courses[0]
    over_candidates, over_seconds = charts.course_charts(course)
    raced = [t.seconds for t in course.trials if t.raced]
    assert all(f.label.endswith(f"to {q.seconds(min(raced))}") for f in (over_candidates, over_seconds))
    marks = [s for s in over_candidates.shapes if isinstance(s, charts.Symbol)]
    assert len(marks) == len(course.trials) > len([s for s in over_seconds.shapes if isinstance(s, charts.Symbol)])
    assert charts.course_charts(replace(course, trials=())) == []
    many = tuple(Trial(n, n / 10, 1e-3 + n * 1e-6, "loops", True, "") for n in range(1, 2001))
    kernel = replace(tuning().kernels[0], courses=(replace(course, trials=many),))
    assert len(render_html([], replace(tuning(), kernels=(kernel,)), now=NOW)) < 250_000


def test_scales_and_ticks() -> None:
    scale = charts.Scale(0.1, 1000.0, True)
    assert scale.at(0.1) == 0 and scale.at(1000.0) == pytest.approx(1) and scale.at(10.0) == pytest.approx(0.5)
    for low, high, logarithmic in ((0.1, 1e3, True), (40.0, 90.0, True), (0.0, 60.0, False), (0.5, 2.0, False), (1e-9, 2e9, True)):
        found = charts.Scale(low, high, logarithmic).ticks(6)
        assert 1 <= len(found) <= 9 and all(low * 0.99 <= t <= high * 1.01 for t in found)
    assert 1.0 in charts.speedup_ticks(charts.speedup_scale([0.5, 8.0]))


def test_roofs_below_all_kernels_stay_in_the_plot() -> None:
    """The ceilings may be from a busy machine, or from another one."""
    points = [charts.RooflinePoint("a", "#a", 30.0, 300e9, ""), charts.RooflinePoint("b", "#b", 40.0, 200e9, "")]
    plot = charts.roofline(points, [charts.Roof("f32", 12e9, True, "flat"), charts.Roof("memory", 15e9, False, "memory")])
    roofs = [s for s in plot.shapes if isinstance(s, charts.Line) and s.cls.startswith("roof ")]
    assert roofs and all(0 <= y <= charts.ROOF_HEIGHT for s in roofs for y in (s.y1, s.y2))


def test_names_are_shortened_where_there_is_no_room() -> None:
    """Names are shortened so that a narrow plot names each of a dozen points, as a wide one does."""
    points = [charts.RooflinePoint(f"{i:02d} decoder convolution", f"#{i}", 30 * 1.5 ** (i % 4), 1e10 * 1.15 ** i, "") for i in range(12)]
    plot = charts.roofline(points, [charts.Roof("f32", 4e11, True, "flat"), charts.Roof("memory", 2e10, False, "memory")])
    for cls in ("wide", "narrow"):
        names = [s.text.removesuffix("…") for s in plot.shapes if isinstance(s, charts.Text) and s.cls == f"label halo {cls}"]
        assert len(names) == len(points) and all(any(p.name.startswith(n) for n in names) for p in points), (cls, names)


def test_labels_do_not_collide() -> None:
    points = [charts.RooflinePoint(f"kernel number {i}", "#x", 10 ** (i % 5 / 3), 1e9 * (1 + i // 5), "") for i in range(25)]
    plot = charts.roofline(points, [charts.Roof("f32", 2e10, True, "flat"), charts.Roof("memory", 5e9, False, "memory")])
    for cls, width in (("wide", charts.WIDE), ("narrow", charts.NARROW)):
        boxes = []
        for label in (s for s in plot.shapes if isinstance(s, charts.Text) and s.cls == f"label halo {cls}"):
            w = charts.LETTER * len(label.text)
            left = label.x * width + label.dx - {"start": 0, "middle": w / 2, "end": w}[label.anchor]
            boxes.append((left, label.y - 10, left + w, label.y + 3))
        assert boxes or cls == "narrow"
        for i, a in enumerate(boxes):
            assert all(a[2] < b[0] + 0.1 or b[2] < a[0] + 0.1 or a[3] < b[1] + 0.1 or b[3] < a[1] + 0.1 for b in boxes[i + 1 :])


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (q.seconds(1.234e-3), "1.23 ms"),
        (q.seconds(9.996e-4), "1.00 ms"),
        (q.seconds(3e-10), "0.300 ns"),
        (q.seconds(212.4), "3 min 32 s"),
        (q.seconds(7261.0), "2 h 1 min"),
        (q.seconds(None), "–"),
        (q.seconds(0.0), "0 s"),
        (q.seconds(float("inf")), "–"),
        (q.times(1.2345), "1.23×"),
        (q.times(0.0123), "0.012×"),
        (q.times(12.34), "12.3×"),
        (q.times(9.996), "10.0×"),
        (q.percent(0.853), "85 %"),
        (q.percent(0.0044), "0.44 %"),
        (q.percent(0.0), "0 %"),
        (q.percent(1.02), "102 %"),
        (q.flops_rate(5.12e11), "512 GFLOP/s"),
        (q.flops_rate(1.5e12), "1.50 TFLOP/s"),
        (q.flops_rate(0.0), "–"),
        (q.bytes_rate(5.2e10), "52.0 GB/s"),
        (q.size(48 << 10), "48 KiB"),
        (q.size(1 << 20), "1 MiB"),
        (q.size(16 << 30), "16 GiB"),
        (q.size(100), "100 B"),
        (q.size(0), "–"),
        (q.amount(2.31e8), "231 M"),
        (q.amount(0), "0"),
        (q.amount(None), "–"),
        (q.amount(7), "7"),
        (q.digits(1234567.0), "1 230 000"),
        (q.digits(0.0), "0"),
        (q.digits(9.996), "10.0"),
        (q.digits(float("inf")), "∞"),
    ],
)
def test_quantities(shown: str, expected: str) -> None:
    assert shown.replace("\u00a0", " ") == expected
