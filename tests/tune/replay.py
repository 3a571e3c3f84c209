"""A measurer without hardware, whose times, failures and wrong outputs come from a table over the states' digests, and the search that
tests run with it.

A state that is not in the table gets a time computed from its digest, so that a whole search can be replayed: the same seed gives the same
trace. All requests are recorded, and requesting something twice that must be done only once is an error."""
from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from svod.config import BeamConfig
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.tune.measure.candidate import Candidate, Origin, Status
from svod.tune.measure.measurer import Built, Confirmed, Failure, Lowered, RaceResult, Screened, Verification
from svod.tune.search.budget import ModelBudget, S
from svod.tune.search.events import SearchEvent
from svod.tune.search.kernel_search import KernelSearch, SearchedKernel
from tests.tune.search_kernels import TARGET, gemm

KERNEL = gemm(48, 64, 40)
BASE = Scheduler(KERNEL, TARGET)
HEURISTIC = apply_opt(BASE, Opt("UPCAST", "o1", 16))


def made_up_seconds(c: Candidate) -> float:
    """A time between 0.2 and 2 ms that is computed from the state's digest."""
    return 1e-3 * random.Random(c.digest).uniform(0.2, 2.0)


def within_limit(answer: Lowered | Failure, limit: int) -> Lowered | Failure:
    """The failure of a program with more than `limit` instructions; 0: no limit."""
    too_long = limit and isinstance(answer, Lowered) and answer.size >= limit
    return Failure(Status.LIMIT, f"BEAM_UOPS_MAX is {limit}") if too_long else answer


class Until(ModelBudget):
    """A budget that ends after the first round for which a condition is true, however long that takes."""

    def __init__(self, is_enough: Callable[[], bool]) -> None:
        super().__init__(float("inf"), float("inf"))
        self.is_enough = is_enough

    def next(self, kernels: Sequence[S]) -> S | None:
        return None if self.is_enough() else super().next(kernels)


@dataclass
class ReplayedMeasurer:
    """The measurer. `seconds(c)` is a candidate's true time. The other tables are functions of a candidate, too, and return None for
    "nothing special"."""

    seconds: Callable[[Candidate], float] = made_up_seconds
    lowering: Callable[[Candidate], Failure | Lowered | None] = lambda c: None
    building: Callable[[Candidate], Failure | None] = lambda c: None
    running: Callable[[Candidate], Failure | None] = lambda c: None
    wrong: Callable[[Candidate], bool] = lambda c: False
    clock: Callable[[float], None] = lambda seconds: None        # told how long each build and each timing takes
    noise: float = 0.0
    width: float = 0.001                                         # relative half-width of confirmed intervals
    built: list[str] = field(default_factory=list)
    trace: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)

    def note(self, what: str, candidates: Sequence[Candidate]) -> None:
        self.trace.append((what, tuple(c.digest.hex() for c in candidates)))

    def machine(self) -> dict[str, Any]:
        return {"machine": "a table"}

    def lower(self, candidates: Iterable[Candidate], limit: int) -> list[tuple[Candidate, Lowered | Failure]]:
        candidates = list(candidates)
        self.note("lower", candidates)
        return [(c, within_limit(self.lowering(c) or Lowered(c.digest.hex(), 100, 1e6), limit)) for c in candidates]

    def expect(self, candidate: Candidate, deadline: float) -> None:
        """There is nothing to prepare."""

    def build(self, candidates: Sequence[Candidate], *, final: bool, deadline: float) -> list[Built | Failure]:
        self.note("build", candidates)
        self.deadlines.append(deadline)
        found: list[Built | Failure] = []
        for c in candidates:
            if not final:
                assert c.linear not in self.built, f"{c.chain} is compiled a second time"
                self.built.append(c.linear)
            self.clock(0.05)
            found.append(self.building(c) or Built(b"", (), None, c.linear, 0.05, final))
        return found

    def screen(self, candidates: Sequence[Candidate], incumbent: float | None) -> list[Screened | Failure]:
        self.note("screen", candidates)
        found: list[Screened | Failure] = []
        for c in candidates:
            t = self.seconds(c)
            cut = incumbent is not None and t > 1.5 * incumbent
            found.append(self.running(c) or Screened((t,), cut))
        return found

    def race(self, candidates: Sequence[Candidate]) -> RaceResult:
        self.note("race", candidates)
        first = self.seconds(candidates[0])
        return RaceResult(tuple(self.seconds(c) / first for c in candidates), first, self.noise)

    def verify(self, candidates: Sequence[Candidate]) -> list[Verification]:
        self.note("verify", candidates)
        return [Verification(not self.wrong(c), "the table", "the table says so" if self.wrong(c) else "") for c in candidates]

    def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Confirmed | Failure]:
        self.note("confirm", candidates)
        first = self.seconds(candidates[0])
        found: list[Confirmed | Failure] = []
        for c in candidates:
            ratio, width = self.seconds(c) / first, self.width if found else 0.0       # the first is the measure of all
            found.append(Confirmed(self.seconds(c), ratio * (1 - width), ratio, ratio * (1 + width)))
        return found

    def done(self, what: str) -> list[str]:
        """The digests of all candidates for which a step was requested, in order."""
        return [d for step, digests in self.trace for d in digests if step == what]


def is_failure(status: Status) -> Callable[[Any], Failure]:
    return lambda c: Failure(status, f"the table says {status}")


def make_search(measurer: Any, *, width: int = 2, seeds: Sequence[tuple[Scheduler, Origin]] = (), known: Sequence[str] = (),
                bound: float = 0.0, heuristic: Scheduler = HEURISTIC, events: list[SearchEvent] | None = None,
                **options: Any) -> KernelSearch:
    config = BeamConfig(width=width, **{"round_size": 8, **options})
    heard: list[SearchEvent] = [] if events is None else events
    return KernelSearch(SearchedKernel("key", "gemm", BASE, heuristic, seeds, frozenset(known)), config, measurer, bound=bound,
                        listener=heard.append)


def run(search: KernelSearch, rounds: int = 20) -> KernelSearch:
    for _ in range(rounds):
        if search.finished:
            break
        search.step()
    return search


def raced(state: Scheduler, score: float, number: int) -> Candidate:
    c = Candidate(state, state.applied_opts, Origin.ACTION, round=number, status=Status.VERIFIED)
    c.seconds = c.score = score
    return c
