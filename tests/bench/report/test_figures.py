"""Recomputes every figure of a report from its records, without `svod.bench`, and compares it with the page."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from statistics import geometric_mean, median
from typing import Any

import pytest

from svod import PrepareConfig, Variable
from svod.bench.race import Ratio
from svod.bench.report.data import TunedKernel
from svod.bench.report.page import render_html, render_markdown
from svod.bench.results import read_run
from svod.cli.tune.report import KernelReport, kernel_table, outcome_json
from svod.cli.tune.survey import SurveyRow
from svod.compile.cpu.host import host_target
from svod.core.ir.serialize import ast_to_data
from svod.core.kernel.kernel import Kernel
from svod.prepare import prepare_graph
from svod.tune.db import KernelRecord, Measurement, TuningDB, Verdict
from svod.tune.report_source import read_tuning
from svod.tune.resolved import resolve
from tests.bench.example_run import CEILINGS, DATA
from tests.core.corpus import data, kernel_of

UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "TFLOP/s": 1e12, "GFLOP/s": 1e9, "MFLOP/s": 1e6, "TB/s": 1e12, "GB/s": 1e9,
         "MB/s": 1e6, "%": 0.01, "×": 1.0, "": 1.0, "G": 1e9, "T": 1e12, "M": 1e6, "k": 1e3, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
QUANTITY = re.compile(r"(-?\d[\d \u00a0]*(?:\.\d+)?)[ \u00a0]?([A-Za-zµ%×/]*)")


def agrees(shown: str, exact: float) -> bool:
    """Whether a quantity with its unit equals `exact` rounded to the shown digits."""
    match = QUANTITY.search(shown)
    assert match is not None, shown
    digits, unit = re.sub(r"[ \u00a0]", "", match[1]), match[2]
    step = 10.0 ** -len(digits.partition(".")[2]) if "." in digits else 10.0 ** max(0, len(digits) - 3)
    return abs(float(digits) * UNITS[unit] - exact) <= (0.5 * step * UNITS[unit]) * (1 + 1e-6)


class Page(HTMLParser):
    """The text of a page's elements. `tables` by caption, each a list of rows of cells; `text` is all text."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = source
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._caption = ""
        self._inside: list[str] = []
        self.feed(source)

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside.append(name)
        if name == "caption":
            self._caption = ""
        elif name == "tr":
            self.tables.setdefault(self._caption, []).append([])
        elif name in ("td", "th"):
            self.tables[self._caption][-1].append("")
        elif name == "small" and "td" in self._inside:
            self.tables[self._caption][-1][-1] += "|"

    def handle_startendtag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        """Shapes hold no text."""

    def handle_endtag(self, name: str) -> None:
        while self._inside and self._inside.pop() != name:
            pass

    def handle_data(self, data: str) -> None:
        self.text += data
        if "caption" in self._inside:
            self._caption += data
        elif "td" in self._inside or "th" in self._inside:
            self.tables[self._caption][-1][-1] += data

    def table(self, caption: str) -> list[dict[str, str]]:
        """The rows of the table whose caption begins with `caption`, as dicts by column name."""
        head, *rows = next(t for name, t in self.tables.items() if name.startswith(caption))
        return [dict(zip(head, row, strict=True)) for row in rows]

    def section(self, name: str) -> str:
        return self.source.split(f'<section id="{name}"')[1].split("</section>")[0].replace("\u00a0", " ")

    def tile(self, name: str) -> str:
        return re.findall(rf"<dt>{name}</dt><dd><b>(.*?)</b>", self.source)[0]

    def marks(self) -> dict[str, tuple[float, float]]:
        """Operations per byte and per second of each point of the roofline, from its position between the captions of the axes."""
        plot = self.section("roofline")
        xs = [(float(x), float(v)) for x, v in re.findall(r'<text x="([\d.]+)%" y="417"[^>]*class="tick">([\d.]+)</text>', plot)]
        ys = [(float(y) - 4, float(v) * UNITS[u])
              for y, v, u in re.findall(r'<text x="100%"[^>]*y="([\d.]+)"[^>]*class="tick">([\d.]+) ([GTM])</text>', plot)]
        points = re.findall(r'<a href="#[^"]*" aria-label="([^"]*)"><title>[^<]*</title><circle cx="([\d.]+)%" cy="([\d.]+)"', plot)
        return {name: (_read_off(float(x), xs), _read_off(float(y), ys)) for name, x, y in points}


def _read_off(at: float, ticks: list[tuple[float, float]]) -> float:
    (a, low), (b, high) = ticks[0], ticks[-1]
    return math.exp(math.log(low) + (at - a) / (b - a) * math.log(high / low))


# -- a run ------------------------------------------------------------------------------------------


def time_of(case: dict[str, Any], name: str) -> list[float]:
    own = next(o for o in case["contestants"] if o["name"] == name)
    same = own["same_as"]
    return time_of(case, same) if same else own["samples"]


def over(case: dict[str, Any], name: str, other: str) -> float:
    """The speed-up of one contestant over another, paired by round."""
    return median(b / a for a, b in zip(time_of(case, name), time_of(case, other), strict=True))


@pytest.fixture(scope="module")
def records() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DATA / "run.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render_html([read_run(DATA / "run.json")], None))


def timed(case: dict[str, Any]) -> dict[str, float]:
    return {o["name"]: median(time_of(case, o["name"])) for o in case["contestants"] if o["status"] == "ok"}


def best_peer(case: dict[str, Any]) -> str:
    times = timed(case)
    return min((n for n in times if n not in ("heuristic", "tuned")), key=times.__getitem__)


def test_every_time_speedup_and_share_of_a_run(records: dict[str, Any], page: Page) -> None:
    rows = page.table("Medians of one run")
    assert len(rows) == len(records["cases"])
    for case, row in zip(records["cases"], rows, strict=True):
        times = timed(case)
        assert row["kernel"].startswith(case["title"])
        for o in case["contestants"]:
            shown, _, spread = row[o["name"]].partition("|")
            if o["status"] != "ok":
                assert shown == o["status"]
                continue
            assert agrees(shown, times[o["name"]]), (case["name"], o["name"], shown)
            assert agrees(spread.lstrip("±"), o["spread"])
        assert agrees(row["vs best peer"], over(case, "tuned", best_peer(case)))
        share, _, by = row["of ceiling"].partition("|")
        assert agrees(share, case["bound"]["seconds"] / times["tuned"]) and by == case["bound"]["by"]
        searched = [o["search_seconds"] for o in case["contestants"] if o["search_seconds"] is not None]
        assert agrees(row["search"], searched[0]) if searched else row["search"] == "–"
        if case["neighbour"] is not None:
            assert agrees(row["of neighbour"].partition("|")[0], case["neighbour"]["rate"]["median"])


def test_every_mean_of_a_run(records: dict[str, Any], page: Page) -> None:
    cases = records["cases"]
    gains, peers = [over(c, "tuned", "heuristic") for c in cases], [over(c, "tuned", best_peer(c)) for c in cases]
    shares = [c["bound"]["seconds"] / timed(c)["tuned"] for c in cases]
    assert agrees(page.tile("tuned over heuristic"), geometric_mean(gains))
    assert agrees(page.tile("over the best peer"), geometric_mean(peers))
    assert agrees(page.tile("of the ceiling"), geometric_mean(shares)) and page.tile("kernels measured") == str(len(cases))
    assert f"the most {max(gains):.2f}×" in page.text and f"{sum(s >= 0.8 for s in shares)} of {len(shares)} above" in page.text
    for row in page.table("The suites"):
        own = [i for i, c in enumerate(cases) if c["suite"] == row["suite"]]
        assert int(row["kernels"]) == len(own) and agrees(row["vs best peer"], geometric_mean([peers[i] for i in own]))
        assert agrees(row["heuristic vs tuned"], 1 / geometric_mean([gains[i] for i in own]))
        spent = {cases[i]["name"]: o["search_seconds"] for i in own for o in cases[i]["contestants"] if o["search_seconds"] is not None}
        assert agrees(row["search"], median(spent.values())) and agrees(row["longest search"].partition("|")[0], max(spent.values()))
        assert spent[row["longest search"].partition("|")[2]] == max(spent.values())


def test_every_point_and_roof_of_a_run(records: dict[str, Any], page: Page) -> None:
    marks = page.marks()
    drawn = [c for c in records["cases"] if c["flops"]]
    assert len(marks) == len(drawn)
    for case in drawn:
        name, (intensity, rate) = next((n, at) for n, at in marks.items() if n.startswith(f"{case['title']}: "))
        seconds = timed(case)["tuned"]
        assert intensity == pytest.approx(case["flops"] / (case["bytes_read"] + case["bytes_written"]), rel=0.02)
        assert rate == pytest.approx(case["flops"] / seconds, rel=0.02)
        shown = re.split(r", |: ", name.replace(f"{case['title']}: ", ""))
        for text, exact in zip(shown, (case["flops"] / seconds, seconds, case["bound"]["seconds"] / seconds), strict=True):
            assert agrees(text, exact), (name, exact)
    legend = page.section("roofline").split('class="figure"')[0]
    assert agrees(re.findall(r"f32 FMA ([^<]*)<", legend)[0], CEILINGS.flops["float32"][1])
    for level, name in (("l2", "L2"), ("l3", "L3"), ("memory", "memory")):
        assert agrees(re.findall(rf">{name} ([^<]*)<", legend)[0], max(many for _, many in CEILINGS.bandwidth[level].values()))


def test_every_bar_room_and_bandwidth_of_a_run(records: dict[str, Any], page: Page) -> None:
    bars = re.findall(r'<a href="#case-([^"]*)">.*?class="rowvalue">(.*?)</div>', page.section("speedups"), re.S)
    assert len(bars) == len(records["cases"])
    by_name = {c["name"]: c for c in records["cases"]}
    for name, values in bars:
        for shown, other in re.findall(r"<b[^>]*>(.*?)</b> (.*?)</span>", values):
            case = by_name[name]
            assert agrees(shown, over(case, "tuned", "heuristic" if other in ("heuristic", "same code") else other)), (name, other)
    for row in page.table("Room below the ceiling"):
        case = next(c for c in records["cases"] if row["kernel"].startswith(c["title"] + "svod-bench"))
        now, bound = timed(case)["tuned"], case["bound"]["seconds"]
        assert agrees(row["now"], now) and agrees(row["bound"], bound) and agrees(row["room"], now / bound)
    for row in page.table("Bandwidth of all cores"):
        rates = CEILINGS.bandwidth[row["data in"].lower()]
        for kind, (one, many) in rates.items():
            shown, _, alone = row[kind.replace("_stream", ", streamed")].partition("|")
            assert agrees(shown, many) and agrees(alone.replace("one core ", ""), one)


def test_markdown_has_the_figures_of_the_page(records: dict[str, Any]) -> None:
    text = render_markdown([read_run(DATA / "run.json")])
    for case in records["cases"]:
        cells = [c.strip(" *") for c in next(line for line in text.splitlines() if line.startswith(f"| {case['title']} |")).split("|")[2:]]
        exact = (timed(case)["heuristic"], timed(case)["tuned"], timed(case)[best_peer(case)], over(case, "tuned", best_peer(case)),
                 over(case, "tuned", "heuristic"), case["bound"]["seconds"] / timed(case)["tuned"])
        assert all(agrees(shown, value) for shown, value in zip(cells, exact, strict=False)), (cells, exact)


def test_commands_ask_for_more_than_was_searched(page: Page) -> None:
    """If the run searched a case, its command doubles the width; if the run searched nothing, its command searches from scratch."""
    for row in page.table("Room below the ceiling"):
        words = shlex.split(row["kernel"][row["kernel"].index("svod-bench"):])
        assert words[:2] == ["svod-bench", "run"] and words[-2:] == ["--beam", "8"]
    run = read_run(DATA / "run.json")
    asked = replace(run, settings=replace(run.settings, command="svod-bench run --device CUDA --db='a b.db' --peers none --json run.json"))
    for row in Page(render_html([asked], None)).table("Room below the ceiling"):
        assert shlex.split(row["kernel"])[-8:] == ["--device", "CUDA", "--peers", "none", "--db", "a b.db", "--beam", "8"]
    known = [replace(c, contestants=tuple(replace(o, search_seconds=None) for o in c.contestants)) for c in run.cases]
    again = Page(render_html([replace(run, cases=tuple(known))], None))
    assert all(row["kernel"].endswith("--beam 4 --fresh") for row in again.table("Room below the ceiling"))


@pytest.mark.parametrize("chosen", [("gemm_256",), ("gemm_256", "sum_16m")])
def test_a_title_says_how_much_of_a_suite_was_run(chosen: tuple[str, ...]) -> None:
    run = read_run(DATA / "run.json")
    part = replace(run, cases=tuple(c for c in run.cases if c.name in chosen))
    assert f"<h1>{len(chosen)} of 24 kernels of core on AMD EPYC 9B45</h1>" in render_html([part], None).replace("\u00a0", " ")


def test_ceilings_of_a_busy_machine_are_marked() -> None:
    run = read_run(DATA / "run.json")
    busy = Page(render_html([replace(run, ceilings=replace(CEILINGS, busy="other processes used 40 % of the machine"))], None))
    roofs = re.findall(r'class="roof ([^"]*)"><title>', busy.section("roofline"))
    assert len(roofs) == 4 and all(cls.endswith(" doubtful") for cls in roofs)
    assert busy.section("roofline").count("(busy machine: too low)") == 4 and "they are too low, and shares of them too high" in busy.text
    assert "doubtful" not in Page(render_html([run], None)).section("roofline")


# -- a database -------------------------------------------------------------------------------------

N = Variable("n", 1, 512)
SIZES = {1: (3.1e-6, 0.9), 64: (41.3e-6, 0.61), 512: (287.7e-6, 0.77)}      # n: (seconds, ratio to the heuristic's)
PLAIN = (64.6e-6, 0.96)


def confirmed(kernel: Kernel, seconds: float, ratio: float, **host: object) -> list[Any]:
    target = host_target().key

    def of(linear: str, time: float, by: float, **more: Any) -> Measurement:
        return Measurement(kernel.key, target, (), linear, "ok", 1, "LLVM", 1, step="confirm", time=time, baseline=1.03 * seconds / ratio,
                           baseline_linear="h", ratio=by, ratio_low=0.99 * by, ratio_high=1.01 * by, taken_at=1.0, **more)
    return [KernelRecord(kernel.key, name="gemm", ast=ast_to_data(kernel.ast)), of("w", seconds, ratio, host=dict(host)),
            Verdict(kernel.key, target, "w", "verified", 1, method="every element")]


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    sized = prepare_graph([data(512, 96)[:N].linear(data(80, 96)).uop], resolve(PrepareConfig(db=":none:", object_cache=":none:")))
    return {"plain": Kernel(kernel_of(data(32, 48).linear(data(64, 48)))), "sized": next(iter(sized.unbound.kernels.values()))}


@pytest.fixture(scope="module")
def tuned(kernels: dict[str, Kernel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TunedKernel]]:
    name, = kernels["sized"].variables
    sizes = [{"at": {name: n}, "seconds": s, "ratio": r} for n, (s, r) in SIZES.items()]
    means = [geometric_mean(values) for values in zip(*SIZES.values(), strict=True)]
    with TuningDB.open(tmp_path_factory.mktemp("db") / "t.db") as db:
        db.record([*confirmed(kernels["plain"], *PLAIN), *confirmed(kernels["sized"], means[0], means[1], sizes=sizes)])
        found = read_tuning(db, ceilings=replace(CEILINGS, target=host_target().key))
        assert found is not None
        yield {"tuning": found, **{k: found.kernel(kernels[k].key) for k in kernels}}        # type: ignore[dict-item]


def work(n: int) -> tuple[int, int]:
    """Operations and bytes of the kernel with a variable at a size."""
    return 2 * n * 80 * 96, 4 * (n * 96 + 80 * 96 + n * 80)


def test_kernels_with_variables_stand_where_they_were_timed(tuned: dict[str, Any]) -> None:
    page = Page(render_html([], tuned["tuning"]))
    sized = {name: at for name, at in page.marks().items() if " at " in name}
    assert len(sized) == len(SIZES) and len(page.marks()) == len(SIZES) + 1
    for n, (seconds, _) in SIZES.items():
        name, (intensity, rate) = next((name, at) for name, at in sized.items() if f"={n}: " in name)
        flops, moved = work(n)
        assert intensity == pytest.approx(flops / moved, rel=0.02) and rate == pytest.approx(flops / seconds, rel=0.02)
        shown = name.split(": ")[1].split(", ")
        assert agrees(shown[0], flops / seconds) and agrees(shown[1], seconds)


def test_every_figure_of_a_winner(tuned: dict[str, Any], kernels: dict[str, Kernel]) -> None:
    page = Page(render_html([], tuned["tuning"]))
    markdown = render_markdown([], tuned["tuning"])
    means = [geometric_mean(values) for values in zip(*SIZES.values(), strict=True)]
    counts = {"plain": ((2 * 32 * 64 * 48, 4 * (32 * 48 + 64 * 48 + 32 * 64)), PLAIN),
              "sized": (tuple(geometric_mean(v) for v in zip(*map(work, SIZES), strict=True)), means)}
    for which, ((flops, moved), (seconds, ratio)) in counts.items():
        own = page.section("kernels").split(f'id="kernel-{kernels[which].key[:16]}"')
        before, after, gain = re.findall(r'class="from">(.*?) → (.*?)</span>\s*<b[^>]*>(.*?)</b>', own[0])[-1]
        assert agrees(before, seconds / ratio) and agrees(after, seconds)
        assert gain == f"{_number(before) / _number(after):.2f}×"
        facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", own[1].split("</details>")[0]))
        rate, traffic = facts["rate"].split(", ")
        assert agrees(rate, flops / seconds) and agrees(traffic, moved / seconds)
        operations, size = facts["work"].split(", ")
        assert agrees(operations.replace(" operations", ""), flops) and agrees(size, moved)
        low, high = facts["confirmed"].split("× ")[0].split("–")
        assert agrees(low, 1 / (1.01 * ratio)) and agrees(high, 1 / (0.99 * ratio))
        assert f"<b>{gain}</b> {before} → {after}" in page.section("speedups")
        assert f"| {before} | {after} | {gain} |" in markdown.replace("\u00a0", " ")
        terminal, = kernel_table([_outcome(kernels[which], tuned[which])], host_target(), None, 200)[-1:]
        assert all(words in terminal for words in (before, after, gain))
        told = outcome_json(_outcome(kernels[which], tuned[which]), host_target(), None)
        assert f"{told['gain']:.2f}×" == gain and agrees(before, told["heuristic_seconds"]) and agrees(after, told["tuned_seconds"])


def _number(shown: str) -> float:
    value, unit = shown.split(" ")
    return float(value) * UNITS[unit]


def _outcome(kernel: Kernel, k: TunedKernel) -> KernelReport:
    """The winner as svod-tune reports it."""
    row = SurveyRow(kernel, k.name, (), 1.0, 1e-3, 1.0, "", k.flops, k.bytes)
    return KernelReport(row, (), "database", k.heuristic, k.seconds, True, True, Ratio(1.0, 1.0, 1.0), "w", "")


def test_a_share_of_the_ceiling_is_the_bound_over_the_time(tuned: dict[str, Any]) -> None:
    """Arithmetic bounds both kernels: their operands stay in a cache."""
    assert tuned["plain"].share == pytest.approx(2 * 32 * 64 * 48 / CEILINGS.flops["float32"][1] / PLAIN[0])
    page = Page(render_html([], tuned["tuning"]))
    shares = [tuned[which].share for which in ("plain", "sized")]
    assert agrees(page.tile("of the ceiling"), geometric_mean(shares))
    assert sorted(re.findall(r"<dt>of ceiling</dt><dd>(.*?)</dd>", page.section("kernels"))) == sorted(
        f"{100 * s:.0f} %" if s >= 0.0995 else f"{100 * s:.2g} %" for s in shares)


def test_a_report_of_a_run_and_a_database_says_which_measured_what(tuned: dict[str, Any]) -> None:
    page = Page(render_html([read_run(DATA / "run.json")], tuned["tuning"]))
    alone = Page(render_html([read_run(DATA / "run.json")], None))
    assert page.section("speedups") == alone.section("speedups") and page.section("cases") == alone.section("cases")
    for name in ("tuned over heuristic", "over the best peer", "of the ceiling", "kernels measured", "spent measuring"):
        assert page.tile(name) == alone.tile(name)
    assert "Gains are those of the searches that confirmed the winners" in page.section("kernels")


def test_figures_agree_to_the_digits_that_are_shown() -> None:
    assert agrees("1 230 s", 1234.0) and agrees("67.3 µs", 67.29e-6) and not agrees("67.3 µs", 67.36e-6) and not agrees("1.04×", 1.046)
