"""What the report shows beside runs: the tuning database as plain data, and the one view of several runs.

The classes hold no reference to the database; `svod.tune.report_source` fills them in. Times are seconds, sizes bytes.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from svod.bench.results import CaseResult, Run
from svod.bench.roofline import Ceilings

OptText = str

#: What the last step to a candidate changed, by opt: the colours of a search's course.
KINDS: Mapping[str, frozenset[str]] = {
    "register tile": frozenset({"UPCAST", "UNROLL", "LANES", "TC"}),
    "loops": frozenset({"TILE", "ORDER", "SWAP", "PADTO"}),
    "staging": frozenset({"STAGE", "INLINE", "ONLINE", "PIPELINE"}),
    "cores": frozenset({"THREAD", "SPLITK", "LOCAL", "NOLOCALS", "GROUP", "GROUPTOP"}),
    "memory hints": frozenset({"STREAM", "PREFETCH"}),
}
START, SEVERAL = "start", "several at once"
KIND_OF = {op: kind for kind, ops in KINDS.items() for op in ops}

#: Where a proposal may end, from nowhere to the winner: (name, what it means).
FATES: tuple[tuple[str, str], ...] = (
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
)


@dataclass(frozen=True)
class Trial:
    """One timed candidate. `number`: among the distinct ones of its search, from 1; `at`: seconds since the search began; `raced`: its time
    was taken against the best, which is what counts."""

    number: int
    at: float
    seconds: float
    kind: str
    raced: bool
    chain: str


@dataclass(frozen=True)
class Course:
    """One search of one kernel. `spent`: seconds given to this kernel; `ended_by`: in words; `fates`: candidates by name of FATES."""

    search: str
    started: float
    spent: float
    ended_by: str
    settings: str
    heuristic: float | None
    best: float | None
    fates: Mapping[str, int]
    trials: tuple[Trial, ...]

    @property
    def candidates(self) -> int:
        """Everything that was proposed."""
        return sum(self.fates.values())

    @property
    def timed(self) -> int:
        """Candidates that were timed."""
        return len(self.trials)


@dataclass(frozen=True)
class TunedKernel:
    """A kernel of the database on one target, and its winner. `speedup`: (lower end, middle, upper end) over the heuristic in the run that
    confirmed it, None where nothing is confirmed; `seconds`: of the winner, median, `heuristic`: as much longer as the paired ratio says,
    which two medians of a noisy machine may not; `nest`: the winner's loop nest, or "" and `problem` says why."""

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
    speedup: tuple[float, float, float] | None
    verified: str
    nest: str
    problem: str
    courses: tuple[Course, ...]

    @property
    def id(self) -> str:
        """The name of its place in the page."""
        return f"kernel-{self.key[:16]}"

    @property
    def gain(self) -> float | None:
        """How many times faster than the heuristic."""
        return self.speedup[1] if self.speedup else None

    @property
    def saved(self) -> float:
        """Seconds of one call that tuning took away."""
        return self.heuristic - self.seconds if self.heuristic is not None and self.seconds is not None else 0.0


@dataclass(frozen=True)
class Tuning:
    """What a tuning database knows about one target. `other_targets`: of which it knows something as well; `remarks`: what was skipped."""

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
        """The kernel with that key, or the key's beginning."""
        return next((k for k in self.kernels if k.key == key or (len(key) >= 12 and k.key.startswith(key))), None)


def kind_of_step(chain: Sequence[OptText], earlier: Iterable[Sequence[OptText]]) -> str:
    """What a candidate changed against the nearest of those that were timed before it: a name of KINDS, SEVERAL or START.

    Opts are in words (`UPCAST(o0, 8)`). A changed amount counts as its opt; more than one opt gained is a sketch or a seed."""
    mine = Counter(chain)
    nearest: tuple[int, Counter[str], Counter[str]] | None = None
    for other in earlier:
        theirs = Counter(other)
        gained, lost = mine - theirs, theirs - mine
        distance = gained.total() + lost.total()
        if nearest is None or distance < nearest[0]:
            nearest = distance, gained, lost
    if nearest is None:
        return START
    _, gained, lost = nearest
    changed = list((gained or lost).elements())
    if len(changed) > 1 or lost.total() > 1:
        return SEVERAL
    return KIND_OF.get(changed[0].split("(")[0], SEVERAL) if changed else SEVERAL


def fates_of(counts: Mapping[str, int], ended: Mapping[str, int]) -> dict[str, int]:
    """Candidates by name of FATES. `counts`: totals the search kept of what was never built; `ended`: distinct measured ones by fate."""
    fates = {name: int(ended.get(name, 0)) for name, _ in FATES}
    fates["over a limit"] = int(counts.get("limited", 0))
    fates["duplicate"] = int(counts.get("duplicate", 0))
    known = sum(fates.values())
    fates["not built"] = max(0, int(counts.get("proposed", 0)) + 1 - known)     # the heuristic is timed without being proposed
    return fates


@dataclass(frozen=True)
class Overview:
    """Several runs as one: of a case that stands in more than one the latest counts."""

    runs: tuple[Run, ...]
    cases: tuple[CaseResult, ...]
    source: Mapping[str, Run] = field(default_factory=dict)     # case name → the run that has it

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
    """The runs in order of time, and each case as it was measured last, in the order in which suites list them."""
    ordered = tuple(sorted(runs, key=lambda r: r.settings.started))
    cases: dict[str, CaseResult] = {}
    source: dict[str, Run] = {}
    for run in ordered:
        for case in run.cases:
            cases[case.name], source[case.name] = case, run
    return Overview(ordered, tuple(cases.values()), source)
