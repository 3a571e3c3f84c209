"""The output of svod-bench: a block for each kernel while it runs, and tables at the end, as text for 80 to 140 columns."""
from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click

from svod.bench.blocks.findings import LEVELS
from svod.bench.compare import Comparison
from svod.bench.results import (
    SVOD,
    BlockFinding,
    CaseResult,
    ContestantResult,
    FamilyResult,
    GroupResult,
    Run,
    Shown,
    Speedup,
    SuiteResult,
)
from svod.bench.roofline import Ceilings
from svod.bench.summary import ALL, BEST_PEER, NOISY, half_width
from svod.system.process.streams import columns
from svod.system.quantities import bytes_rate, digits, flops_rate, percent, seconds, spread
from svod.system.quantities import count as counted
from svod.system.tables import print_table

# width from which a table has seconds of search and rates divided by those of the round neighbour (the same kernel with rounded extents);
# used for pipes
SEARCH_TABLE_COLUMNS = 140
PEER_TABLE_COLUMNS = 116      # width from which a table has a column for each peer; narrower tables only show the best peer
MEDIUM = 98         # width from which a table also shows the times of the heuristic and of the best peer
LEAST_SHARE = 0.1           # share of a block's time from which a kernel of a finding is shown
NAME_COLUMNS = 13           # width of a contestant's name
WIDE_INTERVAL = " ~"
MARKS = {WIDE_INTERVAL: f"known to worse than ±{100 * NOISY:.0f} %", " =": "no difference beyond the spread"}


def doubt(half: float | None) -> str:
    """The mark for a number whose confidence interval is wide or unknown, else "". `half`: half the width of the interval."""
    return "" if half is not None and half <= NOISY else WIDE_INTERVAL


def times(value: Speedup, other: str) -> str:
    """Format a speed-up: `1.04× onnxruntime ±0.5 %`, or `= onnxruntime ±0.5 %` for a difference below the spread."""
    if value.low is None or value.high is None:
        return f"{value.median:.3g}× {other}, too few rounds"
    half = spread(half_width(value))
    return f"= {other} {half}" if value.is_none else f"{value.median:.3g}× {other} {half}"


def describe_case(case: CaseResult) -> list[str]:
    """The lines that are printed when a case is done."""
    bound = f", bound {seconds(case.bound.seconds)} ({case.bound.by})" if case.bound is not None else ""
    lines = [f"{case.name}: {case.title}, {case.dtype}{bound}"]
    for o in case.contestants:
        lines.append(f"  {o.name:{NAME_COLUMNS}} {_describe_outcome(case, o)}".rstrip())
        if o.search_seconds is not None:
            lines.append(f"  {'':{NAME_COLUMNS}} {seconds(o.search_seconds):>8}  of search")
    if case.neighbour is not None:
        n = case.neighbour
        text = f"not timed: {n.why}" if n.rate is None else f"{seconds(n.seconds):>8}  this one has {_rate_words(n.rate)} of its rate"
        lines.append(f"  {n.name:{NAME_COLUMNS}} {text}")
    if case.noisy is not None:
        lines.append(f"  {'noisy':{NAME_COLUMNS}} {case.noisy}")
    return lines


def _rate_words(rate: Speedup) -> str:
    half = "" if rate.low is None or rate.high is None else f" {spread(half_width(rate))}"
    return f"{percent(rate.median)}{half}"


def _describe_outcome(case: CaseResult, o: ContestantResult) -> str:
    if o.same_as is not None:
        return f"the same code as {o.same_as}"
    if o.median is None or o.minimum is None:
        return f"{o.status}: {o.why}"
    text = f"{seconds(o.median):>8}  least {seconds(o.minimum):>8}  {spread(o.spread):>7}"
    if o.precision:
        text += f"  in {o.precision}"
    if o.name in SVOD:
        text += f"  {percent(o.ceiling_share):>5} of ceiling" if o.ceiling_share is not None else ""
        if case.best_peer is not None and case.best_peer in o.speedups:
            text += f"  {times(o.speedups[case.best_peer], case.best_peer)}"
    return text


@dataclass(frozen=True)
class _RunColumns:
    """The columns of the table of kernels for which a run has figures and the terminal has room."""

    contestants: tuple[str, ...]
    peers: tuple[str, ...]          # libraries with a column of their own
    best: bool                      # whether there is any library to compare with
    wide: bool                      # whether there is room for a column per library
    medium: bool                    # whether there is room for the best library's time beside its name
    searched: bool
    rated: bool

    @staticmethod
    def of(run: Run, tuned: bool) -> _RunColumns:
        peers = tuple(p.name for p in run.peers if p.version is not None)
        width = columns(sys.stdout, SEARCH_TABLE_COLUMNS)
        medium = width >= MEDIUM
        return _RunColumns(("heuristic", "tuned") if tuned and medium else ("svod",) if tuned else ("heuristic",),
                           peers if width >= PEER_TABLE_COLUMNS else (), bool(peers), width >= PEER_TABLE_COLUMNS, medium,
                           width >= SEARCH_TABLE_COLUMNS and any(s.searching is not None for s in run.suites),
                           width >= SEARCH_TABLE_COLUMNS and any(s.rates is not None for s in run.suites))

    @property
    def names(self) -> list[str]:
        compared = [*(self.peers or ("best peer",)), "vs best"] if self.best else []
        return ["kernel", *self.contestants, *compared, "ceiling", *(["search"] if self.searched else []),
                *(["of neighbour"] if self.rated else []), ""]

    def row(self, c: CaseResult) -> list[str]:
        row = [c.name, *(_cell(c, name) for name in self.contestants)]
        if self.best:
            row += [_cell(c, name) for name in self.peers] or [self._best_peer(c)]
            row.append(_against_best(c))
        row.append(percent(c.svod.ceiling_share) if c.svod is not None else "")
        if self.searched:
            row.append(seconds(next((o.search_seconds for o in c.contestants if o.search_seconds is not None), None)))
        if self.rated:
            rate = c.neighbour.rate if c.neighbour is not None else None
            row.append("" if c.neighbour is None else "-" if rate is None else percent(rate.median) + doubt(half_width(rate)))
        return [*row, "noisy" if c.noisy is not None else ""]

    def _best_peer(self, c: CaseResult) -> str:
        if c.best_peer is None:
            return ""
        return f"{_cell(c, c.best_peer)} {c.best_peer}" if self.medium else c.best_peer


def _against_best(c: CaseResult) -> str:
    """The speed-up of svod over the best library, as the text of a cell."""
    s = c.svod.speedups.get(c.best_peer or "") if c.svod is not None else None
    return "" if s is None else f"{s.median:.2f}x{doubt(half_width(s))}{'' if not s.is_none else ' ='}"


def print_run(run: Run) -> None:
    """Print the table of all kernels and the geometric means."""
    tuned = any(c.outcome("tuned") for c in run.cases)
    columns = _RunColumns.of(run, tuned)
    rows = [columns.row(c) for c in run.cases]
    print_table(columns.names, rows, right=frozenset(columns.names[1:-1]))
    marks = [f"{mark.strip()} {meaning}" for mark, meaning in MARKS.items() if any(mark in cell for row in rows for cell in row[1:-1])]
    if marks:
        click.echo("; ".join(marks))
    if len(run.cases) > 1:
        click.echo()
        print_groups(run.groups, columns.peers, tuned)
    if run.suites and (len(run.cases) > 1 or tuned):
        click.echo()
        print_suites(run.suites, tuned, names=columns.wide)
    if run.families:
        click.echo()
        print_families(run.families)


def _cell(c: CaseResult, name: str) -> str:
    """The time of a contestant as the text of a cell; the name "svod" stands for the best svod contestant."""
    o = c.outcome(name) if name != "svod" else c.svod or c.outcome("tuned")
    if o is None:
        return ""
    if o.same_as is not None and name != "svod":
        return "same"
    if o.median is not None:
        return seconds(o.median) + doubt(o.spread)
    return {"unsupported": "-", "wrong": "WRONG", "failed": "FAILED"}.get(o.status, "-")


def print_groups(groups: Sequence[GroupResult], peers: Sequence[str], tuned: bool) -> None:
    """Print the geometric means of svod's speed-ups over the heuristic and the peers."""
    own = "tuned" if tuned else "heuristic"
    others = [*(["heuristic"] if tuned else []), BEST_PEER, *peers]
    others = [o for o in others if any(f"{own}/{o}" in g.speedups for g in groups)]
    rows = []
    for g in groups:
        row = ["geometric mean" if g.name == ALL else g.name]
        for other in others:
            key = f"{own}/{other}"
            row.append(f"{g.speedups[key]:.2f}x of {g.cases[key]}" if key in g.speedups else "")
        rows.append([*row, percent(g.ceiling_share.get(own))])
    print_table([f"{own} vs", *others, "ceiling"], rows, right=frozenset({*others, "ceiling"}))


def print_suites(suites: Sequence[SuiteResult], tuned: bool, *, names: bool) -> None:
    """Print a line for each suite: geometric means, the median and the longest search, and the lowest rate over a round neighbour. `names`:
    also show the names of the cases with the longest search and the lowest rate."""
    own = "tuned" if tuned else "heuristic"
    peers = any(f"{own}/{BEST_PEER}" in s.means.speedups for s in suites)
    searched, rated = any(s.searching is not None for s in suites), any(s.rates is not None for s in suites)
    columns = ["suite", "kernels", *(["heuristic of tuned"] if tuned else []), *([f"{own} of {BEST_PEER}"] if peers else []), "ceiling",
               *(["search", "longest search"] if searched else []), *(["least of neighbour"] if rated else [])]
    rows = []
    for s in suites:
        row = [s.name, str(s.cases)]
        for pair in (*(["heuristic/tuned"] if tuned else []), *([f"{own}/{BEST_PEER}"] if peers else [])):
            row.append(f"{s.means.speedups[pair]:.2f}x" if pair in s.means.speedups else "")
        row.append(percent(s.means.ceiling_share.get(own)))
        if searched:
            row += ["", ""] if s.searching is None else [
                seconds(s.searching.median), seconds(s.searching.most) + (f" {s.searching.longest}" if names else "")]
        if rated:
            row.append("" if s.rates is None else percent(s.rates.least) + (f" {s.rates.lowest}" if names else ""))
        rows.append(row)
    print_table(columns, rows, right=frozenset(columns[1:]), fold=frozenset(columns[1:]))


def describe_finding(finding: BlockFinding, seed: int) -> list[str]:
    """The lines about a block that svod is slow or wrong on: its kernels, the smallest block that shows the same, and how to run it with
    the operands of the seed."""
    lines = [f"{finding.case} is {finding.kind}: {finding.why}", f"  {finding.found.block}", *_describe_kernels(finding.found)]
    if finding.smallest.block != finding.found.block:
        ratio = "" if finding.smallest.ratio is None else f", {finding.smallest.ratio:.2f} times eager's time"
        lines += [f"  smallest of {counted(finding.judged, 'block')} that shows it{ratio}:", f"  {finding.smallest.block}",
                  *_describe_kernels(finding.smallest)]
    return [*lines, f"  svod-bench run --suite blocks --seed {seed} --kernels {shlex.quote(finding.smallest.block)}"]


def _describe_kernels(shown: Shown) -> list[str]:
    """The kernels that take much of a block's time: their shares, times, predicted times, and loops."""
    lines = []
    for k in shown.kernels:
        if k.share >= LEAST_SHARE:
            predicted = "" if k.cycles is None else f", predicted {digits(k.cycles)} cycles"
            bound = "" if k.bound is None else f", bound {seconds(k.bound)}"
            lines += [f"    {k.name}: {percent(k.share)} of the kernels' time, {seconds(k.seconds)}{predicted}{bound}",
                      *(f"      {line}" for line in (k.why, k.chain, *k.cost.splitlines(), *k.nest.splitlines()))]
    return lines


def print_families(families: Sequence[FamilyResult]) -> None:
    """Print a line for each family of blocks: how many are slower than eager, wrong or failed, and the speed-ups over eager."""
    levels = [f"slower than {level:g}x" for level in LEVELS]
    numbers = ["blocks", *levels, "wrong", "failed", "left out", "mean of eager", "worst"]
    rows = [(f.name, str(f.blocks), *map(str, f.slower), str(f.wrong), str(f.failed), str(f.left_out),
             "" if f.mean is None else f"{f.mean:.2f}x", "" if f.worst is None else f"{f.worst:.2f}x", f.worst_block) for f in families]
    print_table(["family", *numbers, "worst block"], rows, right=frozenset(numbers), fold=frozenset({"worst block"}))


def print_ceilings(c: Ceilings, is_device: bool) -> None:
    """Print a line for each ceiling, with the rates of one core and of all threads, or the rate of a device."""
    many = f"{c.threads} threads" if c.threads > 1 else "1 thread"
    rows = [(f"multiply-add {dtype}", flops_rate(one), flops_rate(all_)) for dtype, (one, all_) in c.flops.items()]
    for level, kinds in c.bandwidth.items():
        for kind, (one, all_) in kinds.items():
            rows.append((f"{level} {kind.replace('_stream', ', streaming stores')}", bytes_rate(one), bytes_rate(all_)))
    one, all_ = c.dispatch
    rows.append(("launch inside a plan", seconds(one), seconds(all_)))
    columns = ("", "device") if is_device else ("", "one core", many)
    print_table(columns, [row[:len(columns)] for row in rows], right=frozenset(columns[1:]))


def print_comparison(comparison: Comparison) -> None:
    """Print every change beyond the noise, and the number of cases with each verdict."""
    shown = [c for c in comparison.changes if c.verdict != "same"]
    rows = [(c.case, c.contestant, c.verdict, seconds(c.before), seconds(c.after), "" if c.ratio is None else f"{c.ratio:.3f}",
             spread(c.noise), c.why) for c in shown]
    if rows:
        print_table(("kernel", "contestant", "", "before", "after", "ratio", "noise", "why"), rows,
                    right=frozenset({"before", "after", "ratio", "noise"}), fold=frozenset({"why"}))
    counts = {v: sum(c.verdict == v for c in comparison.changes) for v in dict.fromkeys(c.verdict for c in comparison.changes)}
    click.echo(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    for name, mean in comparison.means.items():
        noisy = [c.verdict for c in comparison.timed(name)].count("noisy")
        click.echo(f"{name}: geometric mean of time after / time before {mean:.3f}" + (f", {noisy} noisy" if noisy else ""))
