"""Compares two runs of the benchmarks: which times changed by more than the noise.

    change = median after / median before
    noise  = max(3 %, spread before + spread after + drift)

on a logarithmic scale. Drift is the change of the peers' times, for peers that took part in both runs in the same version: they run the
same code, so a cause that slowed them down slowed svod as well. A change within the noise does not count. A case that is noisy in either
run is not judged.
"""
from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Literal

from svod.bench.results import SVOD, CaseResult, ContestantResult, Run
from svod.bench.summary import geometric_mean
from svod.errors import FormatError

LEAST_CHANGE = 0.03

Verdict = Literal["faster", "slower", "same", "noisy", "broken", "repaired", "gone", "new"]


@dataclass(frozen=True)
class Change:
    """One contestant in one case. `ratio` is the median after over the median before: below 1 is faster. A change counts if it exceeds
    `noise`, a fraction. Both are None if one run has no time. `why` explains, in words, a verdict that is not based on times."""

    case: str
    contestant: str
    verdict: Verdict
    before: float | None = None
    after: float | None = None
    ratio: float | None = None
    noise: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """All changes, in the order of the cases. `means` has each contestant's geometric mean of ratios, noisy cases included."""

    changes: tuple[Change, ...]
    means: dict[str, float]

    def timed(self, contestant: str) -> list[Change]:
        """The changes of a contestant that have a ratio."""
        return [c for c in self.changes if c.contestant == contestant and c.ratio is not None]

    @property
    def worse(self) -> bool:
        """Whether a contestant became slower beyond the noise, or fails now."""
        return any(c.verdict in ("slower", "broken") for c in self.changes)


def check_comparable(before: Run, after: Run, remedy: str = "measure both on one machine") -> None:
    """Raise FormatError, naming the differences and a remedy, if times of the two runs cannot be compared."""
    facts = [("target", before.machine.target, after.machine.target), ("processor", before.machine.cpu, after.machine.cpu),
             ("threads", before.machine.threads, after.machine.threads),
             ("protocol of measuring", before.versions.get("protocol"), after.versions.get("protocol")),
             ("seed of the operands", before.settings.seed, after.settings.seed)]
    different = [f"{name}: {a} and {b}" for name, a, b in facts if a != b]
    if different:
        raise FormatError(f"the runs cannot be compared, they differ in {'; '.join(different)}; {remedy}")


def compare_runs(before: Run, after: Run) -> Comparison:
    """Compare svod's times in all cases of either run."""
    versions = {p.name: p.version for p in before.peers}
    stable = {p.name for p in after.peers if p.version is not None and versions.get(p.name) == p.version}
    names = list(dict.fromkeys([c.name for c in before.cases] + [c.name for c in after.cases]))
    changes = []
    for name in names:
        a, b = before.case(name), after.case(name)
        for contestant in SVOD:
            x, y = a.outcome(contestant) if a is not None else None, b.outcome(contestant) if b is not None else None
            if x is not None or y is not None:
                changes.append(_change(name, contestant, a, b, x, y, stable))
    ratios = {contestant: [c.ratio for c in changes if c.contestant == contestant and c.ratio is not None] for contestant in SVOD}
    return Comparison(tuple(changes), {contestant: geometric_mean(speedups) for contestant, speedups in ratios.items() if speedups})


def _change(name: str, contestant: str, a: CaseResult | None, b: CaseResult | None, x: ContestantResult | None, y: ContestantResult | None,
            stable: set[str]) -> Change:
    if x is None or a is None:
        return Change(name, contestant, "new", after=y.median if y is not None else None)
    if y is None or b is None:
        return Change(name, contestant, "gone", before=x.median)
    if x.median is None or y.median is None:
        if x.status == y.status:
            return Change(name, contestant, "same", why=y.why)
        return Change(name, contestant, "broken" if x.status == "ok" else "repaired" if y.status == "ok" else "same", x.median, y.median,
                      why=y.why if y.status != "ok" else f"it was {x.status}: {x.why}")
    ratio = y.median / x.median
    noise = max(LEAST_CHANGE, (x.spread or 0.0) + (y.spread or 0.0) + abs(drift_of_peers(a, b, stable)))
    verdict: Verdict = "same" if abs(math.log(ratio)) <= noise else "faster" if ratio < 1.0 else "slower"
    noisy = a.noisy or b.noisy
    return Change(name, contestant, verdict if noisy is None else "noisy", x.median, y.median, ratio, noise, noisy or "")


def drift_of_peers(a: CaseResult, b: CaseResult, stable: set[str]) -> float:
    """The median over common peers of log(time after / time before); 0 without one."""
    moved = []
    for p in a.peers:
        other = b.outcome(p.name)
        if p.name in stable and p.median and other is not None and other.median:
            moved.append(math.log(other.median / p.median))
    return statistics.median(moved) if moved else 0.0
