"""The interface between a search and its measurer: requests to lower, build, time and verify, and the answers.

The search (`svod.tune.search`) makes the decisions. A `Measurer` does the work: it lowers, builds, times and verifies, in worker processes
(`svod.tune.measure.worker_measurer.WorkerMeasurer`) or from a table of recorded measurements (the tests). Every answer is a record.
A candidate that fails gives a `Failure`, never an exception. Answers are in the order of the candidates, except the answers of `lower`.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from svod.compile.lower.program import ProgramSpec
from svod.errors import TuneError
from svod.tune.measure.candidate import Candidate, Status


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer for a candidate that failed: the status ERROR, CRASH, TIMEOUT, LOST, LATE or LIMIT, and the reason in words."""

    status: Status
    reason: str


@dataclass(frozen=True, slots=True)
class Lowered:
    """The result of lowering a candidate."""

    digest: str            # hex digest of the normalised LINEAR
    size: int              # len(LINEAR)
    work: float | None     # operations it executes; None: not known


@dataclass(frozen=True, slots=True)
class Built:
    """Machine code of one candidate."""

    object: bytes
    symbols: tuple[str, ...]
    spec: ProgramSpec
    digest: str
    seconds: float         # seconds that the compilation took
    final: bool           # whether it is final code, as plans run it: compiled with more effort than during a search
    algorithm: tuple[Any, ...] = ()     # the opts of its chain, as JSON, that make it compute with other roundings
    packed: tuple[int, ...] = ()        # the temporaries that its phases fill which run once


@dataclass(frozen=True, slots=True)
class Screened:
    """Times of one execution, in seconds, scaled to the whole kernel where a slice was timed."""

    samples: tuple[float, ...]
    cut: bool              # whether timing stopped after the first run or the first sample, as it was too slow
    part: float = 1.0      # the fraction of the kernel that was timed

    @property
    def seconds(self) -> float:
        return min(self.samples)


@dataclass(frozen=True, slots=True)
class RaceResult:
    """The result of a race of interleaved rounds. `ratios[i]`: the time of candidate i over that of candidate 0, median over the rounds, or
    its Failure."""

    ratios: tuple[float | Failure, ...]
    anchor: float          # seconds of candidate 0
    noise: float           # the relative difference, up or down, that two equal candidates may show
    noisy: bool = False    # the machine stayed too busy for steady times, although rounds were repeated


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether an output is right: True, False, or None where verification itself failed; `how` says what was compared."""

    right: bool | None
    how: str
    reason: str = ""
    status: Status = Status.ERROR       # the way in which verification failed, used only if `right` is None


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The confirmed time of a finalist at full size: `seconds`, and `ratio`, its time over that of the first finalist, with the 95 %
    interval `low` … `high`.

    For a kernel with variables these are geometric means over `sizes`. Each entry of `sizes` has the values, in the order of the kernel's
    variables, the seconds, and the ratio to the first finalist."""

    seconds: float
    low: float
    ratio: float
    high: float
    samples: tuple[float, ...] = ()
    sizes: tuple[tuple[tuple[int, ...], float, float], ...] = ()
    noisy: bool = False         # whether the machine was busy: the ratio is valid, and the seconds may be too large

    @property
    def worst(self) -> float:
        """The largest ratio at any size of the kernel; 0 for a kernel without variables."""
        return max((ratio for _, _, ratio in self.sizes), default=0.0)


class MachineChanged(TuneError):
    """The machine that times has changed during the search, so that new times cannot be compared with earlier ones."""


class Measurer(Protocol):
    """Lowers, builds, times and verifies candidates. Methods may raise KeyboardInterrupt, TuneError (no worker left) and MachineChanged,
    nothing else."""

    def machine(self) -> Mapping[str, Any]:
        """The present state of the machine that times: name, target, load, stolen time, cores. Raises TuneError where that machine cannot
        time the target of the search."""

    def lower(self, candidates: Iterable[Candidate], limit: int) -> Iterable[tuple[Candidate, Lowered | Failure]]:
        """Lower candidates and yield each with its answer as soon as that is known, in any order: the first may be lowered before the last
        is proposed. The lowering of a candidate that has `limit` instructions or more is abandoned with the status LIMIT; 0: no limit."""

    def expect(self, candidate: Candidate, deadline: float) -> None:
        """Announce that `build` will be called for this candidate, without `final`, so that its compilation may begin. A compilation
        that has not ended when the next race begins is abandoned."""

    def build(self, candidates: Sequence[Candidate], *, final: bool, deadline: float) -> list[Built | Failure]:
        """Compile the candidates; each has `deadline` seconds."""

    def screen(self, candidates: Sequence[Candidate], incumbent: float | None) -> list[Screened | Failure]:
        """Time each built candidate by itself: one run under a deadline, then one sample, then more samples of the faster half.
        `incumbent`: seconds of the best candidate so far, or None."""

    def race(self, candidates: Sequence[Candidate]) -> RaceResult:
        """Time built candidates interleaved; the first one is the incumbent and the anchor."""

    def verify(self, candidates: Sequence[Candidate]) -> list[Verification]:
        """Compare the outputs of built candidates with the reference's."""

    def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Confirmed | Failure]:
        """Time built finalists at full size until their order is certain or about `seconds` are spent; the first is the baseline."""
