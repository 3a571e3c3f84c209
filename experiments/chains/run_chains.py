"""Hand-written chains for the core suite, against the heuristic, other libraries and the machine's ceilings, interleaved in one run.

    python experiments/chains/run_chains.py                               the whole suite, against all libraries that are installed
    python experiments/chains/run_chains.py --kernels 'gemm_*,attention*' --peers torch
    python experiments/chains/run_chains.py --peers none -o chains.json   figures as JSON beside the table

The chains show what the compiler can do; the search does not know them. What a chain should reach stands in goals.py: where it does not,
the compiler is at fault, where the search does not reach the chain, the search is. Ends with 1 where a goal is
missed, or a chain has no time.
"""
from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import attention
import conv
import elementwise
import gemm
import reduction
import rows
from amounts import Chain, Maker
from goals import GOALS, Goal, credited, credited_share

# isort: split
from svod.bench.ceiling_loops import CeilingLoops
from svod.bench.peers import Peer, load_peers, parse_peers
from svod.bench.results import CaseResult
from svod.bench.roofline import cached_ceilings
from svod.bench.runner import run_case
from svod.bench.suites.cases import Case
from svod.bench.suites.suites import select_cases
from svod.cli.bench.contestants import SvodContestant
from svod.compile.cpu.host import host_target
from svod.config import NONE, BenchConfig, PrepareConfig, data_dir
from svod.core.machine.target import Target
from svod.system.quantities import seconds

CHAINS: dict[str, Maker] = {**gemm.CHAINS, **conv.CHAINS, **rows.CHAINS, **attention.CHAINS, **reduction.CHAINS, **elementwise.CHAINS}
"""By case of the core suite."""


@dataclass(frozen=True)
class Row:
    """Seconds are medians; `peer_ratio` is the best library's time over the chain's, paired; `ceiling` the roofline's time over it."""

    kernel: str
    chain: Chain
    seconds: float | None
    heuristic_seconds: float | None
    best_peer: str | None
    peer_seconds: float | None
    peer_ratio: float | None
    ceiling: float | None
    met: bool | None
    noisy: str | None
    why: str


def contestants_of(case: Case, target: Target) -> list[SvodContestant]:
    """The chain, under the name that benches give to svod at its best, and the heuristic."""
    chain = CHAINS[case.name](case, target)
    return [SvodContestant("tuned", PrepareConfig(opts={"": chain}, db=NONE)), SvodContestant("heuristic", PrepareConfig(db=NONE))]


def row_of(case: Case, result: CaseResult, target: Target) -> Row:
    own, other, best = result.outcome("tuned"), result.outcome("heuristic"), result.outcome(result.best_peer or "")
    assert own is not None
    goal = GOALS.get(case.name, Goal())
    ratio = own.speedups.get(best.name) if best is not None else None
    met = goal.is_met(None if ratio is None else credited(ratio), credited_share(own)) if own.median is not None else None
    return Row(case.name, CHAINS[case.name](case, target), own.median, other.median if other is not None else None, result.best_peer,
               best.median if best is not None else None, None if ratio is None else ratio.median, own.ceiling_share, met, result.noisy,
               own.why)


def table(found: list[Row]) -> str:
    """Markdown."""
    lines = ["| kernel | chain | heuristic | best library | chain against it | of the ceiling | goal |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    for r in found:
        peer = f"{r.best_peer} {seconds(r.peer_seconds)}" if r.best_peer else "–"
        ratio = f"{r.peer_ratio:.2f}×" if r.peer_ratio is not None else "–"
        share = f"{r.ceiling:.0%}" if r.ceiling is not None else "–"
        met = {True: "met", False: "missed", None: "–"}[r.met] + (", noisy" if r.noisy else "")
        time = seconds(r.seconds) if r.seconds is not None else r.why
        lines.append(f"| {r.kernel} | {time} | {seconds(r.heuristic_seconds)} | {peer} | {ratio} | {share} | {met} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kernels", default="*", metavar="PATTERNS", help="cases of the core suite, joined by commas (default: all)")
    parser.add_argument("--peers", default="all", help="libraries joined by commas, all, or none (default: all)")
    parser.add_argument("--seconds", type=float, default=None, help="most time to spend on the rounds of a case")
    parser.add_argument("-o", "--output", type=Path, default=None, help="write the figures here, as JSON")
    args = parser.parse_args(arguments)
    target = host_target()
    config = BenchConfig() if args.seconds is None else BenchConfig(case_seconds=args.seconds)
    peers: list[Peer] = load_peers(parse_peers(args.peers), target.threads)[0]
    ceilings = cached_ceilings(data_dir() / "ceilings.json", target)
    found, loops = [], CeilingLoops(target)
    for case in select_cases("core", args.kernels):
        result = run_case(case, [*contestants_of(case, target), *peers], config, target=target, ceilings=ceilings,
                          arithmetic=partial(loops.best_round, threads=target.threads))
        found.append(row_of(case, result, target))
        print(table(found[-1:]).splitlines()[-1], flush=True)
    print("\n" + table(found))
    if args.output is not None:
        args.output.write_text(json.dumps({"target": target.key, "rows": [asdict(r) for r in found]}, indent=1))
    sys.exit(any(r.met is False or r.seconds is None for r in found))


if __name__ == "__main__":
    main(sys.argv[1:])
