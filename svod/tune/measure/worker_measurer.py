"""The measurer of a real search: the jobs of `svod.tune.measure.work` on an executor's workers."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from svod.bench.race import ANCHOR_SAMPLES, VOID_REPEATS
from svod.bench.timer import deadline as run_deadline
from svod.config import BeamConfig, BenchConfig
from svod.core.ir.serialize import ast_to_data
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target
from svod.tune.db.winners import TIE
from svod.tune.measure.candidate import Candidate, Status
from svod.tune.measure.measurer import Built, Confirmed, Failure, Lowered, Race, Screened, Verdict
from svod.tune.measure.work import Setup
from svod.tune.workers.executor import Executor, Kind
from svod.tune.workers.jobs import Outcome

JOB = "svod.tune.measure.work:"
LOWER_SECONDS = 5.0           # one lowering
LOAD_SECONDS = 5.0            # allowed on top of a timed run: linking, inputs, samples; the run itself has its own limit inside
VERIFY_SECONDS = 60.0
RACE_SECONDS = 60.0
CONFIRM_EXTRA = 30.0
RESTLESS_REPEATS = 1          # of void rounds, after a race in which repeating them did not help
LEAST_ROUNDS = 6              # of a confirmation: with fewer there is no interval of 95 %
REPEAT_SECONDS = 1.5          # and for so long at most: the end of a budget counts on a race as long as those before it
_STATUS = {"error": Status.ERROR, "crash": Status.CRASH, "timeout": Status.TIMEOUT, "lost": Status.LOST}


def failure_of(outcome: Outcome) -> Failure:
    """The answer about an item that has no result."""
    return Failure(_STATUS[outcome.status], outcome.describe())


def _chain(candidate: Candidate) -> list[Any]:
    return [o.to_json() for o in candidate.chain]


class WorkerMeasurer:
    """Does what a search of one kernel decides (`svod.tune.measure.measurer.Measurer`), on an executor that others may share.

    `shrink`: time slices of long kernels while screening and racing."""

    def __init__(self, kernel: Kernel, target: Target, executor: Executor, config: BeamConfig, bench: BenchConfig | None = None, *,
                 shrink: bool = True) -> None:
        self.executor, self.config, self.bench, self.shrink = executor, config, bench or BenchConfig(), shrink
        self.setup = Setup(ast_to_data(kernel.ast), target)
        self.parts: dict[str, float] = {}       # LINEAR digest → the part of the kernel it is timed on
        self.lowered_by: dict[bytes, str] = {}  # digest of a candidate → the worker that lowered it
        self.baseline: Built | None = None
        self.races = 0
        self.restless = False       # the machine did not come to rest in the latest race that could be repeated

    def _run(self, job: str, items: Sequence[Any], kind: Kind, deadline: float, module: str = JOB,
             homes: Sequence[str] = ()) -> list[Outcome]:
        """The outcomes in the order of the items. An interrupt leaves nothing queued behind."""
        batch = self.executor.submit(module + job, items, kind=kind, deadline=deadline, setup=self.setup, homes=homes)
        found: dict[int, Outcome] = {}
        try:
            for index, outcome in batch:
                found[index] = outcome
        except BaseException:
            batch.cancel()
            raise
        return [found[i] for i in range(len(items))]

    def lower(self, candidates: Sequence[Candidate]) -> list[Lowered | Failure]:
        items = [_chain(c) for c in candidates]
        outcomes = self._run("lower_candidate", items, "compile", LOWER_SECONDS)
        self.lowered_by.update((c.digest, o.worker) for c, o in zip(candidates, outcomes, strict=True))
        return [o.value if o.ok else failure_of(o) for o in outcomes]

    def build(self, candidates: Sequence[Candidate], *, passes: bool, deadline: float) -> list[Built | Failure]:
        items = [(_chain(c), passes) for c in candidates]
        homes = [self.lowered_by.get(c.digest, "") for c in candidates]     # that child has the program
        outcomes = self._run("compile_candidate", items, "compile", deadline, homes=homes)
        return [o.value if o.ok else failure_of(o) for o in outcomes]

    def screen(self, candidates: Sequence[Candidate], incumbent: float | None) -> list[Screened | Failure]:
        items = [(c.built, incumbent, self.shrink) for c in candidates]
        limit = run_deadline(incumbent) + LOAD_SECONDS
        outcomes = self._run("screen_candidate", items, "bench", limit)
        found: list[Screened | Failure] = [o.value[0] if o.ok else failure_of(o) for o in outcomes]
        repeats = [o.value[1] if o.ok else 0 for o in outcomes]
        for c, f in zip(candidates, found, strict=True):
            if isinstance(f, Screened):
                self.parts[c.linear] = f.part
        alive = sorted((f.seconds, i) for i, f in enumerate(found) if isinstance(f, Screened) and not f.cut)
        half = [i for _, i in alive[:(len(alive) + 1) // 2]]
        if self.config.runs > 1 and half:
            items_ = [(candidates[i].built, found[i], repeats[i], self.config.runs) for i in half]
            more = self._run("sample_candidate", items_, "bench", limit)
            for i, o in zip(half, more, strict=True):
                found[i] = o.value if o.ok else failure_of(o)
        return found

    def race_rounds(self, seconds: Sequence[float], size_factor: float = 1.0) -> tuple[int, int]:
        """Rounds of the next race, and how often they are repeated where they are void. `seconds`: of one run of each that takes part, the
        anchor first; `size_factor`: how many times as long a run at every size takes."""
        longest = max(seconds)
        rounds = 4 if longest > 5e-3 else 6 if longest > 1e-3 else 8
        batch = size_factor * (rounds * math.fsum(seconds) + 2 * ANCHOR_SAMPLES * seconds[0])
        return rounds, min(RESTLESS_REPEATS if self.restless else VOID_REPEATS, int(REPEAT_SECONDS / batch))

    def _judge_rest(self, race: Race, repeats: int) -> None:
        if repeats:
            self.restless = race.noisy

    def race(self, candidates: Sequence[Candidate]) -> Race:
        self.races += 1
        parts = [self.parts.get(c.linear, 1.0) for c in candidates]
        taken = [c.seconds * part for c, part in zip(candidates, parts, strict=True)]
        rounds, repeats = self.race_rounds(taken)
        item = ([(c.built, part) for c, part in zip(candidates, parts, strict=True)], rounds, self.config.seed + self.races, repeats)
        limit = RACE_SECONDS + 100 * max(taken) * len(candidates)
        outcome = self._run("race_candidates", [item], "bench", limit)[0]
        if outcome.ok:
            race: Race = outcome.value
            self._judge_rest(race, repeats)
            return race
        # one of them died although it ran before: their screening times decide, with the noise of single minima
        anchor = candidates[0].seconds
        return Race(tuple(c.seconds / anchor for c in candidates), anchor, 0.05, True)

    def verify(self, candidates: Sequence[Candidate]) -> list[Verdict]:
        found = []
        for c in candidates:
            item = (c.built, self.baseline, self.baseline is None)
            found.append(self._verdict(c, self._run("verify_candidate", [item], "bench", VERIFY_SECONDS)[0]))
        return found

    def _verdict(self, c: Candidate, outcome: Outcome) -> Verdict:
        """What the outcome of a verification says about `c`; the first that is right is the baseline of others."""
        if not outcome.ok:
            # it ran while screening, so a crash or an endless run on other inputs is its own doing
            wrong = outcome.status in ("crash", "timeout")
            return Verdict(False if wrong else None, "run on the inputs of verification", outcome.describe())
        verdict: Verdict = outcome.value
        if verdict.right and self.baseline is None:
            self.baseline = c.built
        return verdict

    def confirm_rounds(self, candidates: Sequence[Candidate], seconds: float, size_factor: float = 1.0) -> int:
        """The least rounds of a confirmation: fewer than usual of what takes long, yet enough for an interval."""
        fit = seconds / (size_factor * math.fsum(c.seconds for c in candidates))
        return max(min(self.bench.rounds, LEAST_ROUNDS), min(self.bench.rounds, int(fit)))

    def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Confirmed | Failure]:
        rounds = self.confirm_rounds(candidates, seconds)
        item = ([c.built for c in candidates], rounds, self.bench.precision, seconds, self.config.seed, TIE)
        slowest = max(c.seconds for c in candidates)
        limit = seconds + CONFIRM_EXTRA + 10 * rounds * slowest * len(candidates)
        outcome = self._run("confirm_candidates", [item], "bench", limit)[0]
        return list(outcome.value) if outcome.ok else [failure_of(outcome)] * len(candidates)
