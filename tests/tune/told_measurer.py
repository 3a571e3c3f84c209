"""A measurer with real workers, and times from a table. Some candidates fail, by real faults in the workers or only by the table.

A search with the same seed requests the same candidates in the same order, whatever happens to its workers. `trace` has its requests.
"""
from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from svod.config import BeamConfig, BenchConfig
from svod.core.cost.cpu import cost_of
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target
from svod.tune.measure.candidate import Candidate, Origin, Status
from svod.tune.measure.measurer import Built, Confirmed, Failure, Lowered, RaceResult, Screened, Verification
from svod.tune.measure.worker_measurer import WorkerMeasurer, failure_of
from svod.tune.workers.executor import Batch, Executor, Kind
from svod.tune.workers.jobs import Outcome
from tests.patience import NEVER

HANG, SEGFAULT, MEMORY = "spin native", "segfault", "memory"
SHARES = ((HANG, 0.05), (SEGFAULT, 0.05), (MEMORY, 0.02))       # shares of failing candidates, half in the compiler, half in the first run
STATUS = {HANG: Status.TIMEOUT, SEGFAULT: Status.CRASH, MEMORY: Status.ERROR}
SPREAD = 0.25           # standard deviation of log(time / predicted time)
HANG_SECONDS = 1.0      # deadline of a compilation that hangs; other compilations have as long as a busy machine needs


def drawn(purpose: str, of: bytes) -> random.Random:
    """A random generator that gives the same numbers in every process."""
    return random.Random(blake2b(purpose.encode() + of, digest_size=8).digest())


def told_seconds(candidate: Candidate) -> float:
    """A candidate's time from the table: the cost model's prediction with a random spread."""
    return cost_of(candidate.state).cycles / 3e9 * drawn("seconds", candidate.digest).lognormvariate(0.0, SPREAD)


def planted(candidate: Candidate) -> tuple[str, str]:
    """(where, fault) of a candidate that fails, while compiling or in its first run; ("", "") for one that does not. This depends only on
    its LINEAR, as candidates with the same LINEAR are compiled once, whichever of them was lowered first."""
    if candidate.origin is Origin.HEURISTIC:
        return "", ""
    at = drawn("fault", candidate.linear.encode()).random()
    for fault, share in SHARES:
        if at < share:
            return ("compile" if at < share / 2 else "run"), fault
        at -= share
    return "", ""


class TraceFile:
    """The requests of a search in a file, one line of JSON each. The file outlives the process."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "a", encoding="utf-8")     # noqa: SIM115 - open as long as the search

    def __call__(self, what: str, digests: Sequence[str]) -> None:
        self.file.write(json.dumps([what, *digests]) + "\n")
        self.file.flush()

    def again(self, items: int) -> None:
        """Note that a number of items were given to another worker."""


class FaultyMeasurer(WorkerMeasurer):
    """A measurer with real times, in which planted candidates fail."""

    module = "tests.tune.told_jobs"
    compile_job = "compile_or_fail"

    def __init__(self, kernel: Kernel, target: Target, executor: Executor, config: BeamConfig, bench: BenchConfig,
                 trace: TraceFile) -> None:
        super().__init__(kernel, target, executor, config, bench)
        self.trace = trace

    def note(self, what: str, candidates: Sequence[Candidate]) -> None:
        self.trace(what, [c.digest.hex() for c in candidates])

    def _next(self, batch: Batch) -> tuple[int, Outcome]:
        index, outcome = super()._next(batch)
        if outcome.attempts > 1:
            self.trace.again(outcome.attempts - 1)
        return index, outcome

    def lower(self, candidates: Iterable[Candidate], limit: int) -> Iterator[tuple[Candidate, Lowered | Failure]]:
        asked: list[Candidate] = []

        def noted() -> Iterator[Candidate]:
            for c in candidates:
                asked.append(c)
                yield c
        yield from super().lower(noted(), limit)
        self.note("lower", asked)

    def _submit(self, job: str, items: Sequence[Any], kind: Kind, deadline: float, homes: Sequence[str] = ()) -> Batch:
        return super()._submit(job, items, kind, NEVER if kind == "compile" and deadline != HANG_SECONDS else deadline, homes)

    def build(self, candidates: Sequence[Candidate], *, final: bool, deadline: float) -> list[Built | Failure]:
        """Build the candidates; those that hang are built separately, with a short deadline."""
        self.note("build", candidates)
        hang = [c for c in candidates if not final and planted(c) == ("compile", HANG)]
        outcomes = self._run(self.compile_job, [self._compile_item(c, final) for c in hang], "compile", HANG_SECONDS)
        others = iter(super().build([c for c in candidates if c not in hang], final=final, deadline=NEVER))
        failures = iter(outcomes)
        return [failure_of(next(failures)) if c in hang else next(others) for c in candidates]

    def expect(self, candidate: Candidate, deadline: float) -> None:
        if planted(candidate) != ("compile", HANG):
            super().expect(candidate, NEVER)

    def _compile_item(self, candidate: Candidate, final: bool) -> Any:
        where, fault = planted(candidate)
        return (fault if where == "compile" and not final else "", *super()._compile_item(candidate, final))

    def screen(self, candidates: Sequence[Candidate], incumbent: float | None) -> list[Screened | Failure]:
        """Screen the candidates in batches; each candidate whose first run fails is screened alone."""
        answers: dict[int, Screened | Failure] = {}
        for i, c in enumerate(candidates):
            where, fault = planted(c)
            if where == "run" and c.samples == ():
                [o] = self._run("screen_or_fail", [(fault, (c.built, None, False))], "bench", NEVER)
                answers[i] = failure_of(o)
        rest = [i for i in range(len(candidates)) if i not in answers]
        answers |= dict(zip(rest, super().screen([candidates[i] for i in rest], incumbent), strict=True))
        return [answers[i] for i in range(len(candidates))]


class ToldMeasurer(FaultyMeasurer):
    """A measurer with times from a table, `seconds_of`. `faults`: whether planted candidates fail by real faults in the workers, or only by
    the table, with the same answers."""

    def __init__(self, *args: Any, faults: bool = True, seconds_of: Callable[[Candidate], float] = told_seconds) -> None:
        super().__init__(*args)
        self.faults, self.seconds_of = faults, seconds_of

    def expect(self, candidate: Candidate, deadline: float) -> None:
        if self.faults:
            super().expect(candidate, deadline)

    def _tell(self, values: Sequence[Any], faults: Sequence[str] = ()) -> list[Outcome]:
        """Let the bench worker answer with the given values."""
        items = list(zip(faults or [""] * len(values), values, strict=True))
        return self._run("told", items, "bench", NEVER)

    def build(self, candidates: Sequence[Candidate], *, final: bool, deadline: float) -> list[Built | Failure]:
        if self.faults:
            return super().build(candidates, final=final, deadline=deadline)
        self.note("build", candidates)
        return [Failure(STATUS[fault], "the table says so") if where == "compile" and not final
                else Built(b"", (), None, c.linear, 0.05, final) for c in candidates for where, fault in [planted(c)]]

    def screen(self, candidates: Sequence[Candidate], incumbent: float | None) -> list[Screened | Failure]:
        self.note("screen", candidates)
        fails = [fault if where == "run" and c.samples == () else "" for c in candidates for where, fault in [planted(c)]]
        if not self.faults:
            return [Failure(STATUS[f], "the table says so") if f else self._screened(self.seconds_of(c), incumbent)
                    for c, f in zip(candidates, fails, strict=True)]
        outcomes = self._tell([0.0 if f else self.seconds_of(c) for c, f in zip(candidates, fails, strict=True)], fails)
        return [self._screened(o.value, incumbent) if o.ok else failure_of(o) for o in outcomes]

    def _screened(self, seconds: float, incumbent: float | None) -> Screened:
        return Screened((seconds,), incumbent is not None and seconds > 1.5 * incumbent)

    def race(self, candidates: Sequence[Candidate]) -> RaceResult:
        self.note("race", candidates)
        seconds = [self.seconds_of(c) for c in candidates]
        if self.faults:
            [o] = self._tell([seconds])
            seconds = o.value
        return RaceResult(tuple(s / seconds[0] for s in seconds), seconds[0], 0.0)

    def verify(self, candidates: Sequence[Candidate]) -> list[Verification]:
        self.note("verify", candidates)
        right = [o.value for o in self._tell([True] * len(candidates))] if self.faults else [True] * len(candidates)
        return [Verification(r, "the table") for r in right]

    def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Confirmed | Failure]:
        self.note("confirm", candidates)
        first = self.seconds_of(candidates[0])
        return [Confirmed(self.seconds_of(c), r, r, r) for c in candidates for r in [self.seconds_of(c) / first]]
