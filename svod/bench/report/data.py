"""The input of the report: the tuning database as plain data, and several runs combined into one.

The classes have no reference to the database; `svod.tune.report_source` fills them. Times are seconds, sizes bytes.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from svod.bench.race import Ratio
from svod.bench.results import CaseResult, Run
from svod.bench.roofline import Ceilings
from svod.system import quantities as q

OptText = str

# The kinds of steps from one candidate to the next, by the opts that changed: a search's chart has a colour for each.
STEP_KINDS: Mapping[str, frozenset[str]] = {
    "register tile": frozenset({"UPCAST", "UNROLL", "LANES", "TC", "HOLD"}),
    "loops": frozenset({"TILE", "ORDER", "SWAP", "PADTO"}),
    "staging": frozenset({"STAGE", "INLINE", "ONLINE", "FLATTEN", "WINOGRAD", "ROUND", "PIPELINE"}),
    "cores": frozenset({"THREAD", "SPLITK", "LOCAL", "NOLOCALS", "GROUP", "GROUPTOP"}),
    "memory hints": frozenset({"STREAM", "PREFETCH"}),
}
START, SEVERAL = "start", "several at once"
KIND_OF = {op: kind for kind, ops in STEP_KINDS.items() for op in ops}


class Fate(NamedTuple):
    """The end of a candidate in a search, such as "raced", and its meaning."""

    name: str
    meaning: str


# Every fate, from "never built" to the confirmed winner.
FATES = tuple(Fate(name, meaning) for name, meaning in (
    ("over a limit", "needs too many registers, instructions or operations: not built"),
    ("duplicate", "the same code was measured before: not built"),
    ("not built", "proposed, and put back when the time of its round was over"),
    ("timeout", "over the deadline of compiling or running: killed"),
    ("failed", "compiling or running ended with an error, a crash or a lost worker"),
    ("wrong", "its numbers are not the evaluator's: thrown out"),
    ("slow", "cut short: far behind the best"),
    ("screened", "timed alone, not good enough to race"),
    ("raced", "timed against the best in interleaved rounds"),
    ("confirmed", "timed against the heuristic at full size"),
))


@dataclass(frozen=True)
class Trial:
    """One timed candidate. `number` counts the distinct candidates of its search from 1. `at` is seconds since the search began.
    `raced`: whether it was timed against the best one; only such times count."""

    number: int
    at: float
    seconds: float
    kind: str
    raced: bool
    chain: str


@dataclass(frozen=True)
class Course:
    """One search of one kernel. `spent` is the seconds used for this kernel. `fates` has the number of candidates for each name in
    FATES, `timed` the number of candidates with a time."""

    search: str
    started: float
    spent: float
    ended_by: str
    settings: str
    heuristic: float | None
    best: float | None
    fates: Mapping[str, int]
    trials: tuple[Trial, ...]
    timed: int

    @property
    def candidates(self) -> int:
        """The number of all proposed candidates and the heuristic."""
        return sum(self.fates.values())


# beam width of the suggested command that continues the searches of a database
NEXT_WIDTH = 8


@dataclass(frozen=True)
class TimedSize:
    """A kernel at one size: `at` has the values of its variables in words, "" for a kernel without variables. At this size, `seconds` is
    the winner's time, `heuristic` the time of the heuristic's chain, and `flops` and `bytes` are the kernel's work."""

    at: str
    seconds: float
    heuristic: float
    flops: float
    bytes: float


@dataclass(frozen=True)
class TunedKernel:
    """A kernel of the database on one target, and its winner.

    `speedup` is over the heuristic, in the race that confirmed the winner; None without a confirmed winner. `seconds` is the winner's
    median. `heuristic` is `seconds` times the speed-up, because two medians on a noisy machine may contradict the paired ratio. `sizes` are
    the sizes at which the winner was confirmed, one for a kernel without variables; `seconds`, `heuristic`, `flops` and `bytes` are
    geometric means over them. `share` is the fraction of the ceiling, None if that is unknown. `left` tells what a search of width
    `NEXT_WIDTH` would still try; None: nothing. `nest` is the winner's loop nest; if it is "", `problem` tells why. `layer` is the winner's
    source (`svod.tune.db.LAYER_NAMES`)."""

    key: str
    name: str
    shape: str
    dtype: str
    origins: tuple[str, ...]
    flops: float
    bytes: float
    chain: tuple[OptText, ...]
    seconds: float | None
    heuristic: float | None
    speedup: Ratio | None
    verified: str
    nest: str
    problem: str
    courses: tuple[Course, ...]
    sizes: tuple[TimedSize, ...] = ()
    share: float | None = None
    left: str | None = None
    layer: str = ""

    @property
    def id(self) -> str:
        """The HTML id of the kernel's part of the page."""
        return f"kernel-{self.key[:16]}"

    @property
    def gain(self) -> float | None:
        """The speed-up over the heuristic, from the times as shown; None without a confirmed winner."""
        return q.gain(self.heuristic, self.seconds)

    @property
    def saved(self) -> float:
        """Seconds of one call that tuning saved."""
        return self.heuristic - self.seconds if self.heuristic is not None and self.seconds is not None else 0.0


@dataclass(frozen=True)
class Tuning:
    """The content of a tuning database for one target. `other_targets` also have records; `remarks` tell which records were skipped."""

    database: str
    target: str
    compiler: str
    facts: Mapping[str, str]
    kernels: tuple[TunedKernel, ...]
    other_targets: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    ceilings: Ceilings | None = None

    @property
    def courses(self) -> tuple[Course, ...]:
        return tuple(c for k in self.kernels for c in k.courses)

    def kernel(self, key: str) -> TunedKernel | None:
        """The kernel with this key, or with a key that begins with it, if it has 12 characters or more; None if there is none."""
        return next((k for k in self.kernels if k.key == key or (len(key) >= 12 and k.key.startswith(key))), None)


def kind_of_step(chain: Sequence[OptText], earlier: Iterable[Sequence[OptText]]) -> str:
    """The change from the most similar earlier candidate to this one: a name of STEP_KINDS, SEVERAL or START.

    Opts are in words (`UPCAST(o0, 8)`). A changed amount counts as its opt; a sketch or a seed adds several opts."""
    mine = Counter(chain)
    changes = [(mine - theirs, theirs - mine) for theirs in map(Counter, earlier)]
    if not changes:
        return START
    gained, lost = min(changes, key=lambda change: sum(part.total() for part in change))
    changed = list((gained or lost).elements())
    if len(changed) > 1 or lost.total() > 1:
        return SEVERAL
    return KIND_OF.get(changed[0].split("(")[0], SEVERAL) if changed else SEVERAL


def fates_of(counts: Mapping[str, int], ended: Mapping[str, int]) -> dict[str, int]:
    """The numbers of candidates by names of FATES. `counts` has the search's numbers of candidates not built, `ended` the numbers of
    measured candidates."""
    fates = {name: int(ended.get(name, 0)) for name, _ in FATES}
    fates["over a limit"] = int(counts.get("limited", 0))
    fates["duplicate"] = int(counts.get("duplicate", 0))
    known = sum(fates.values())
    fates["not built"] = max(0, int(counts.get("proposed", 0)) + 1 - known)     # plus 1: the heuristic is timed without being proposed
    return fates


@dataclass(frozen=True)
class Overview:
    """Several runs combined: if two runs have the same case, the later one counts."""

    runs: tuple[Run, ...]
    cases: tuple[CaseResult, ...]
    source: Mapping[str, Run] = field(default_factory=dict)     # case name → the run with the result

    @property
    def latest(self) -> Run | None:
        return self.runs[-1] if self.runs else None

    @property
    def ceilings(self) -> Ceilings | None:
        return next((r.ceilings for r in reversed(self.runs) if r.ceilings is not None), None)

    @property
    def targets(self) -> tuple[str, ...]:
        """Keys of the machines that were measured."""
        return tuple(dict.fromkeys(r.machine.target for r in self.runs))


def overview(runs: Sequence[Run]) -> Overview:
    """The runs in order of time, and the latest result of each case."""
    ordered = tuple(sorted(runs, key=lambda r: r.settings.started))
    cases: dict[str, CaseResult] = {}
    source: dict[str, Run] = {}
    for run in ordered:
        for case in run.cases:
            cases[case.name], source[case.name] = case, run
    return Overview(ordered, tuple(cases.values()), source)
