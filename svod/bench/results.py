"""What a run of the benchmarks found, as versioned JSON: written by `svod-bench run`, read by `compare` and `report`.

    {"format": "svod-bench", "version": 1, "settings": …, "machine": …, "versions": …, "load": …, "ceilings": …, "peers": […],
     "cases": [{"name": "gemm_512", "contestants": [{"name": "heuristic", "samples": […], "speedups": {"numpy": …}, …}, …], …}],
     "groups": […], "suites": […]}

The classes below are the schema: a field of a class is a key of the JSON object; other keys are ignored. Times are seconds, sizes bytes,
rates per second, shares parts of 1. A `Speedup` says how many times faster the contestant is than the one it is compared with: above
1 is good. Numbers are finite; what is not known is null.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from svod.bench.roofline import Bound, Ceilings
from svod.errors import FormatError
from svod.system.checked import checked
from svod.system.files import write_text

FORMAT, VERSION = "svod-bench", 1
SVOD = ("heuristic", "tuned")       # contestants that are svod; all others are peers


@dataclass(frozen=True)
class Settings:
    """What was asked for. `mode`: beam (search what the database lacks), db-only, heuristic. `seed`: of the operands, and of the kernels of
    the suite random, of which there are `count`. `started`: UTC, ISO 8601."""

    command: str
    suite: str
    kernels: str
    mode: Literal["beam", "db-only", "heuristic"]
    beam: int | None
    fresh: bool
    seed: int
    started: str
    seconds: float
    count: int | None = None


@dataclass(frozen=True)
class Machine:
    """`target`: the key that tuned records are stored under. `cores`: of the machine; `threads`: what every contestant was given."""

    host: str
    cpu: str
    system: str
    target: str
    cores: int
    threads: int
    l1: int
    l2: int
    l3: int
    memory: int


@dataclass(frozen=True)
class Load:
    """How busy the machine was: shares of all cores' time that other machines stole and other processes used; `busy`: why times
    are doubtful, null when they are not."""

    load_average: float
    steal: float
    foreign: float
    involuntary_switches: int
    busy: str | None


@dataclass(frozen=True)
class PeerInfo:
    """A library that was asked for. `version` null: it did not take part, `missing` says why. `outputs`: preallocated, or why not."""

    name: str
    version: str | None
    missing: str | None
    threads: int | None
    outputs: str


@dataclass(frozen=True)
class KernelInfo:
    """One kernel of svod's plan for a case: its key in the tuning database, the chain as plain data, where that is from and why."""

    key: str
    name: str
    origin: str
    chain: tuple[Any, ...]
    source: str
    why: str
    flops: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Speedup:
    """Another contestant's time over this one's, paired by round: the median, and the interval that holds the true one with 95 %
    confidence; null without enough rounds."""

    median: float
    low: float | None
    high: float | None

    @property
    def is_none(self) -> bool:
        """The difference is below the spread: nothing is known about who is faster."""
        return self.low is None or self.high is None or self.low <= 1.0 <= self.high


@dataclass(frozen=True)
class ContestantResult:
    """One contestant in one case.

    `status`: ok; wrong (the result is not NumPy's: no time counts); failed (an error); unsupported (the library has no such operation).
    `why`: in words, for all but ok. `samples`: seconds per run, in order of the rounds. `spread`: half the width of the 95 % interval of
    the median, relative to it. `error`: largest difference to NumPy over the largest value. `ceiling_share`: the case's bound over the
    median.
    `same_as`: this contestant's code is that one's, so it was not timed again and has its figures. `remark`: what readers should know.
    `search_seconds`: of wall time that the search of its kernels took, the start of the workers included; null without a search."""

    name: str
    status: Literal["ok", "wrong", "failed", "unsupported"]
    why: str = ""
    samples: tuple[float, ...] = ()
    median: float | None = None
    minimum: float | None = None
    spread: float | None = None
    preallocated: bool = False
    error: float | None = None
    ceiling_share: float | None = None
    same_as: str | None = None
    remark: str = ""
    speedups: Mapping[str, Speedup] = field(default_factory=dict)
    kernels: tuple[KernelInfo, ...] = ()
    prepare_seconds: float | None = None
    search_seconds: float | None = None


@dataclass(frozen=True)
class Neighbour:
    """The round neighbour of a case, timed in the same rounds. `seconds`: median of svod, at its best; `rate`: the case's work per second
    over the neighbour's; both null where the neighbour has no time, and `why` says so."""

    name: str
    title: str
    seconds: float | None
    rate: Speedup | None
    why: str = ""


@dataclass(frozen=True)
class CaseResult:
    """One kernel of a suite. `shapes`: of the operands, in words. `best_peer`: the fastest peer that computed the right result.
    `noisy`: why this case's times are doubtful."""

    name: str
    title: str
    suite: str
    group: str
    dtype: str
    shapes: str
    flops: float
    bytes_read: float
    bytes_written: float
    bound: Bound | None
    contestants: tuple[ContestantResult, ...]
    best_peer: str | None
    rounds: int
    precise: bool
    noisy: str | None
    load: Load | None
    neighbour: Neighbour | None = None

    def outcome(self, name: str) -> ContestantResult | None:
        """The contestant of that name."""
        return next((c for c in self.contestants if c.name == name), None)

    @property
    def svod(self) -> ContestantResult | None:
        """svod at its best: tuned, else heuristic; None where neither has a time."""
        for name in reversed(SVOD):
            outcome = self.outcome(name)
            if outcome is not None and outcome.status == "ok":
                return outcome
        return None

    @property
    def peers(self) -> tuple[ContestantResult, ...]:
        """All contestants that are not svod."""
        return tuple(c for c in self.contestants if c.name not in SVOD)


@dataclass(frozen=True)
class GroupResult:
    """Geometric means of speed-ups over the cases of a group; the group "all" is every case. `speedups`: by "contestant/other", other a
    peer, heuristic, tuned or "best peer". `cases`: how many went into each."""

    name: str
    speedups: Mapping[str, float]
    cases: Mapping[str, int]
    ceiling_share: Mapping[str, float]


@dataclass(frozen=True)
class Searching:
    """What the searches of a suite took, in seconds of wall time: of one case the median and the most, with its name, and in total."""

    cases: int
    median: float
    most: float
    longest: str
    total: float


@dataclass(frozen=True)
class Rates:
    """The rates of a suite's cases over those of their round neighbours: the geometric mean, and the least with its case."""

    cases: int
    mean: float
    least: float
    lowest: str


@dataclass(frozen=True)
class SuiteResult:
    """One suite of a run, by name. `means`: as of a group, over all of its cases."""

    name: str
    cases: int
    means: GroupResult
    searching: Searching | None
    rates: Rates | None


@dataclass(frozen=True)
class Run:
    """Everything one `svod-bench run` found."""

    settings: Settings
    machine: Machine
    versions: Mapping[str, str]
    load: Load
    ceilings: Ceilings | None
    peers: tuple[PeerInfo, ...]
    cases: tuple[CaseResult, ...]
    groups: tuple[GroupResult, ...]
    suites: tuple[SuiteResult, ...] = ()

    def case(self, name: str) -> CaseResult | None:
        """The case of that name."""
        return next((c for c in self.cases if c.name == name), None)


# -- writing and reading ------------------------------------------------------------------------------

def run_to_json(run: Run) -> dict[str, Any]:
    """The JSON object of a run."""
    return {"format": FORMAT, "version": VERSION, **asdict(run)}


def write_run(path: Path, run: Run) -> None:
    """Write a run; a reader sees the old file or the whole new one. Raises OSError."""
    text = json.dumps(run_to_json(run), indent=1, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def read_run(path: Path) -> Run:
    """The run in a file. Raises FormatError for anything that `write_run` of this version does not write, OSError."""
    try:
        data = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as e:
        raise FormatError(f"{path} is not JSON ({e}); give a file that `svod-bench run --json` wrote") from None
    return run_from_json(data, str(path))


def run_from_json(data: Any, where: str = "the run") -> Run:
    """The run in a JSON object. Raises FormatError, which names the place in the object."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(f"{where} is not a result of svod-bench; give a file that `svod-bench run --json` wrote")
    if data.get("version") != VERSION:
        raise FormatError(f"{where} has version {data.get('version')!r:.20} of the format, this svod reads version {VERSION}; measure "
                          "again, or use the svod that wrote it")
    run: Run = checked(data, Run, FormatError, where)
    return run
