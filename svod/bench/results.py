"""The results of a benchmark run as versioned JSON. `svod-bench run` writes them; `compare` and `report` read them.

    {"format": "svod-bench", "version": 1, "settings": …, "machine": …, "versions": …, "load": …, "ceilings": …, "peers": […],
     "cases": [{"name": "gemm_512", "contestants": [{"name": "heuristic", "samples": […], "speedups": {"numpy": …}, …}, …], …}],
     "groups": […], "suites": […]}

The classes below are the schema: a field of a class is a key of the JSON object, and other keys are ignored. Times are seconds, sizes are
bytes, rates are per second, shares are fractions. A `Speedup` tells how many times faster a contestant is than another: above 1 is good.
Numbers are finite; an unknown value is null.
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
MODEL_SUITES = ("models", "onnx", "torch", "blocks")        # suites of models, not kernels
SVOD = ("heuristic", "tuned")       # the contestants that run svod; all others are peers


@dataclass(frozen=True)
class RunSettings:
    """The options of a run. `mode` beam searches kernels that the database lacks. `seed` decides the operands, and the `count` kernels
    of the suite random, or blocks. `started` is in UTC, ISO 8601; `seconds` is the duration of the run."""

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
    """The machine of a run. `target` is the target's key in tuning records. The machine has `cores`; every contestant gets `threads`.
    Sizes are in bytes."""

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
    """The load of the machine during a run. `steal` and `foreign` are the shares of all cores' time that other virtual machines and
    other processes used. `busy` tells why times are doubtful; null if they are not."""

    load_average: float
    steal: float
    foreign: float
    involuntary_switches: int
    busy: str | None


@dataclass(frozen=True)
class PeerInfo:
    """A requested library. If it could not take part, `version` is null and `missing` tells why. `outputs` tells whether outputs are
    preallocated."""

    name: str
    version: str | None
    missing: str | None
    threads: int | None
    outputs: str


@dataclass(frozen=True)
class KernelInfo:
    """One kernel of svod's plan for a case: its key in the tuning database, its chain as plain data, the chain's source, and (`why`) the
    reason for it."""

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
    """The time of another contestant divided by this one's, paired by round: the median, and its 95 % confidence interval, which is null
    without enough rounds."""

    median: float
    low: float | None
    high: float | None

    @property
    def is_none(self) -> bool:
        """Whether the interval contains 1 or is unknown: either contestant may be the faster one."""
        return self.low is None or self.high is None or self.low <= 1.0 <= self.high


@dataclass(frozen=True)
class ContestantResult:
    """One contestant in one case.

    `status`: ok; wrong (the result differs from the reference, so no time counts); failed (an error); unsupported (the library lacks the
    operation). `why` explains, in words, every status but ok. `samples` are seconds per run, in order of the rounds. `spread` is half the
    width of the 95 % interval of the median, relative to it. `error` is the largest difference to the reference divided by the largest
    value. `ceiling_share` is the case's bound divided by the median. `same_as` names a contestant with the same code, whose figures are
    copied here. `remark` is a note for readers. `search_seconds` is the wall time of the kernel search including the start of its workers;
    null without a search. `precision` is the type in which a peer computes models of a more precise type, else empty."""

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
    precision: str = ""


@dataclass(frozen=True)
class Neighbour:
    """The round neighbour of a case, timed in the same rounds. `seconds` is the median of the best svod contestant, `rate` the case's
    work per second divided by the neighbour's. Both are null if the neighbour has no time; `why` tells the reason."""

    name: str
    title: str
    seconds: float | None
    rate: Speedup | None
    why: str = ""


@dataclass(frozen=True)
class CaseResult:
    """The results of one case. `shapes` are the operands' shapes, in words. `best_peer` is the fastest peer with a right result and
    without a lower `precision`. `noisy` tells why the times are doubtful; null if they are not."""

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
        """The result of the contestant called `name`; None if the case has no such contestant."""
        return next((c for c in self.contestants if c.name == name), None)

    @property
    def svod(self) -> ContestantResult | None:
        """The best svod contestant: tuned, else heuristic; None if neither has a time."""
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
    """Geometric means of speed-ups over the cases of a group; the group "all" has every case. The keys of `speedups` are
    "contestant/other", where other is a peer, heuristic, tuned or "best peer". `cases` counts the cases of each mean."""

    name: str
    speedups: Mapping[str, float]
    cases: Mapping[str, int]
    ceiling_share: Mapping[str, float]


@dataclass(frozen=True)
class Searching:
    """Wall time of a suite's searches in seconds: median and maximum over the cases, the name of the longest case, and the total."""

    cases: int
    median: float
    most: float
    longest: str
    total: float


@dataclass(frozen=True)
class Rates:
    """The rates of a suite's cases divided by the rates of their round neighbours: the geometric mean, and the lowest with its case."""

    cases: int
    mean: float
    least: float
    lowest: str


@dataclass(frozen=True)
class SuiteResult:
    """One suite of a run. `means`: geometric means over all cases of the suite."""

    name: str
    cases: int
    means: GroupResult
    searching: Searching | None
    rates: Rates | None


@dataclass(frozen=True)
class KernelShare:
    """A kernel of a block, timed alone: its seconds, and their share of the seconds of all kernels of the block. `why`: the reason for
    the chain. `bound`: the least seconds that the ceilings allow; `cycles`: predicted by the cost model, whose terms `cost` has in
    words. Both are null if unknown."""

    name: str
    chain: str
    why: str
    seconds: float
    share: float
    bound: float | None
    cycles: float | None
    cost: str
    nest: str


@dataclass(frozen=True)
class Shown:
    """A block with a fault, as it was found or made smaller. `ratio`: svod's time over eager's time, null without one. `kernels`: in
    the order of their times."""

    block: str
    ratio: float | None
    kernels: tuple[KernelShare, ...]


@dataclass(frozen=True)
class BlockFinding:
    """A block that is slower than eager by more than the limit, or on which svod is wrong or fails, and the smallest block found with
    the same fault. `case`: its name in the suite. `judged`: the number of blocks that were tried on the way."""

    case: str
    kind: Literal["slow", "wrong", "failed"]
    why: str
    found: Shown
    smallest: Shown
    judged: int


@dataclass(frozen=True)
class FamilyResult:
    """The figures of a family's blocks. `slower`: for each of `findings.LEVELS` the number of blocks that take more than this multiple
    of eager's time. `left_out`: blocks that eager does not run, or only inexactly. `mean`: the geometric mean of the speed-ups over
    eager; `worst` is the least, of `worst_block`."""

    name: str
    blocks: int
    slower: tuple[int, ...]
    wrong: int
    failed: int
    left_out: int
    mean: float | None
    worst: float | None
    worst_block: str


@dataclass(frozen=True)
class Run:
    """All results of one `svod-bench run`. `families` and `findings`: of the suite blocks."""

    settings: RunSettings
    machine: Machine
    versions: Mapping[str, str]
    load: Load
    ceilings: Ceilings | None
    peers: tuple[PeerInfo, ...]
    cases: tuple[CaseResult, ...]
    groups: tuple[GroupResult, ...]
    suites: tuple[SuiteResult, ...] = ()
    families: tuple[FamilyResult, ...] = ()
    findings: tuple[BlockFinding, ...] = ()

    def case(self, name: str) -> CaseResult | None:
        """The result of the case called `name`; None if the run has no such case."""
        return next((c for c in self.cases if c.name == name), None)


# -- writing and reading ------------------------------------------------------------------------------

def run_to_json(run: Run) -> dict[str, Any]:
    """The JSON object of a run."""
    return {"format": FORMAT, "version": VERSION, **asdict(run)}


def write_run(path: Path, run: Run) -> None:
    """Write a run to a file atomically: a reader sees the old file or the complete new one. Raises OSError."""
    text = json.dumps(run_to_json(run), indent=1, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def read_run(path: Path) -> Run:
    """The run in a file. Raises OSError, and FormatError for a file that `write_run` of this version did not write."""
    try:
        data = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as e:
        raise FormatError(f"{path} is not JSON ({e}); give a file that `svod-bench run --json` wrote") from None
    return run_from_json(data, str(path))


def run_from_json(data: Any, where: str = "the run") -> Run:
    """The run in a JSON object. Raises FormatError, which gives the position in the object."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(f"{where} is not a result of svod-bench; give a file that `svod-bench run --json` wrote")
    if data.get("version") != VERSION:
        raise FormatError(f"{where} has version {data.get('version')!r:.20} of the format, but this svod reads version {VERSION}; measure "
                          "again, or use the svod that wrote it")
    run: Run = checked(data, Run, FormatError, where)
    return run
