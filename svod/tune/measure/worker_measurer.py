"""The measurer of a real search: the jobs of `svod.tune.measure.work` on an executor's workers.

A candidate of a kernel with variables is compared with the heuristic at each size. If it takes clearly more than `WORST_RATIO` times the
heuristic's time at any size, it is dropped from a race as too slow, whatever it gains at the other sizes. Below that, the confirmation
decides (`svod.tune.db.winners`).
"""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from svod.bench.race import ANCHOR_SAMPLES, VOID_REPEATS
from svod.bench.timer import deadline as run_deadline
from svod.compile.backend import backend_named
from svod.config import BeamConfig, BenchConfig
from svod.core.ir.serialize import ast_to_data
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target
from svod.tune.db.winners import LEVEL_FACTOR, WORST_RATIO
from svod.tune.measure.candidate import Candidate, Status
from svod.tune.measure.context import Setup
from svod.tune.measure.measurer import Built, Confirmed, Failure, Lowered, MachineChanged, RaceResult, Screened, Verification
from svod.tune.measure.sizes import Size, describe_size, geometric_mean, merged_sizes, sizes_to_verify
from svod.tune.workers.executor import Batch, Executor, Kind
from svod.tune.workers.jobs import WORK_MODULE, Outcome

LOWER_SECONDS = 5.0           # deadline of one lowering
VERIFY_SECONDS = 60.0         # fixed part of the deadline of one verification
VERIFY_TIMES = 100            # multiple of the candidate's time that is added to the deadline of a verification: the reference is slow
VERIFY_RUN_SECONDS = 5.0      # fixed part of the deadline of one run within a verification
VERIFY_RUN_TIMES = 10         # multiple of the candidate's time that is added to the deadline of one run within a verification
FACTS_SECONDS = 10.0          # deadline of one call of `machine_facts`
RACE_SECONDS = 60.0           # fixed part of the deadline of a race, per size
CONFIRM_EXTRA = 30.0          # seconds of a confirmation's deadline beyond its timing
CONFIRM_EXTRA_ALONE = 5.0     # CONFIRM_EXTRA for finalists that are confirmed one by one
RESTLESS_REPEATS = 1          # repetitions of disturbed rounds after a race in which repeating them did not help
LEAST_ROUNDS = 6              # least rounds of a confirmation: from fewer no 95 % interval can be computed
REPEAT_SECONDS = 1.5          # most seconds for repeating disturbed rounds: the end of a budget is planned for races of about equal length
RACE_SLACK = 1.1              # a race has few rounds, so it drops only candidates this factor above WORST_RATIO
GIVEN_UP = Outcome("lost", kind="budget", message="the budget was over before a worker answered")
_STATUS = {"error": Status.ERROR, "crash": Status.CRASH, "timeout": Status.TIMEOUT, "lost": Status.LOST}


def failure_of(outcome: Outcome) -> Failure:
    """The Failure for the outcome of an item that has no result."""
    if outcome is GIVEN_UP:
        return Failure(Status.LATE, GIVEN_UP.message)
    return Failure(_STATUS[outcome.status], outcome.describe())


def _chain(candidate: Candidate) -> list[Any]:
    return [o.to_json() for o in candidate.chain]


class WorkerMeasurer:
    """The `Measurer` of the search of one kernel. It works on an executor, which several measurers may share.

    `sizes`: the sizes at which a kernel with variables is timed; by default they come from its bounds. `shrink`: time slices of long
    kernels while screening and racing. The first candidate that is screened has to be the heuristic's. `end` returns the time, on the
    monotonic clock, at which waiting for missing answers ends, whatever the workers do."""

    module = WORK_MODULE        # import path of the jobs' module
    compile_job = "compile_candidate"

    def __init__(self, kernel: Kernel, target: Target, executor: Executor, config: BeamConfig, bench: BenchConfig | None = None, *,
                 sizes: Sequence[Size] = (), shrink: bool = True, device: str = "", end: Callable[[], float] = lambda: math.inf) -> None:
        self.kernel, self.target, self.executor = kernel, target, executor
        self.config, self.bench = config, bench or BenchConfig()
        self.end = end
        self.load_seconds = backend_named(target.device).load_seconds  # seconds for loading a program, added to the deadline of a screening
        self.sizes = tuple(sizes) or merged_sizes(kernel, ())
        self.shrink = shrink and not kernel.variables
        self.setup = Setup(ast_to_data(kernel.ast), target, self.sizes, device)
        self.parts: dict[str, float] = {}       # LINEAR digest → the part of the kernel it is timed on
        self.lowered_by: dict[bytes, str] = {}  # digest of a candidate → the worker that lowered it
        self.begun: Batch | None = None         # compilations that began before `build` asked for them
        self.expected: dict[str, int] = {}      # LINEAR digest → index of its compilation in `begun`
        self.compiled: dict[int, Outcome] = {}  # index in `begun` → outcome that `build` has not asked for yet
        self.baseline: Built | None = None
        self.races = 0
        self.restless = False       # whether repeating disturbed rounds did not help in the latest race that could repeat them
        self.heuristic: tuple[float, ...] | None = None         # the heuristic's seconds per size
        self.heuristic_linear = ""
        self.timed_on: str | None = None        # the machine that timed the latest candidate; None: none has been timed
        self.timed_by = ""                      # the worker that timed the latest candidate; it gets the next items if it is up
        self.relative: dict[str, tuple[float, ...]] = {}        # LINEAR digest → its times over the heuristic's, per size, by its last race

    def _run(self, job: str, items: Sequence[Any], kind: Kind, deadline: float, homes: Sequence[str] = ()) -> list[Outcome]:
        """Run a job on items. Returns the outcomes in the order of the items. After an interrupt none of the items stays queued. Raises
        MachineChanged where candidates were timed on another machine than earlier ones."""
        outcomes = list(self._outcomes(self._submit(job, items, kind, deadline, homes)))
        if kind == "bench":
            self._check_machine([o for o in outcomes if o.ok])
        return outcomes

    def _submit(self, job: str, items: Sequence[Any], kind: Kind, deadline: float, homes: Sequence[str] = ()) -> Batch:
        if kind == "bench":
            homes = [self.timed_by] * len(items)
        return self.executor.submit(f"{self.module}:{job}", items, kind=kind, deadline=deadline, setup=self.setup, homes=homes,
                                    target=self.target)

    def _outcomes(self, batch: Batch) -> Iterator[Outcome]:
        """Yield the outcomes in the order of the items, each as soon as it is there."""
        found: dict[int, Outcome] = {}
        try:
            for i in range(len(batch)):
                yield self._outcome(batch, i, found)
        finally:        # runs also if the caller does not take all outcomes
            if not batch.finished:
                batch.cancel()

    def _outcome(self, batch: Batch, index: int, found: dict[int, Outcome]) -> Outcome:
        """Wait for the outcome of the item at `index`. Outcomes of other items that arrive earlier are kept in `found`."""
        while index not in found:
            known, outcome = self._next(batch)
            found[known] = outcome
        return found[index]

    def _next(self, batch: Batch) -> tuple[int, Outcome]:
        """Wait for the next outcome of a batch. Returns its item's index and the outcome, which is GIVEN_UP after the time `end()`."""
        while (left := self.end() - time.monotonic()) > 0:
            if (answer := batch.poll(None if left == math.inf else left)) is not None:
                return answer
        index = min(batch.unanswered)
        batch.unanswered.discard(index)
        batch.cancel()
        return index, GIVEN_UP

    def _check_machine(self, outcomes: Sequence[Outcome]) -> None:
        for o in outcomes:
            if self.timed_on not in (None, o.host):
                before, self.timed_on = self.timed_on, None
                raise MachineChanged(f"candidates were timed on {before or 'this machine'}, and now on {o.host or 'this machine'}")
            self.timed_on, self.timed_by = o.host, o.worker

    def machine(self) -> Mapping[str, Any]:
        [outcome] = self._run("machine_facts", [self.target.device], "bench", FACTS_SECONDS)
        return outcome.value if outcome.ok else {}

    def lower(self, candidates: Iterable[Candidate], limit: int) -> Iterator[tuple[Candidate, Lowered | Failure]]:
        asked: list[Candidate] = []
        batch = self._submit("lower_candidate", [], "compile", LOWER_SECONDS)

        def answered(index: int, o: Outcome) -> tuple[Candidate, Lowered | Failure]:
            self.lowered_by[asked[index].digest] = o.worker
            return asked[index], o.value if o.ok else failure_of(o)
        try:
            for c in candidates:
                asked.append(c)
                self.executor.add(batch, [(_chain(c), limit)])
                while (known := batch.poll()) is not None:
                    yield answered(*known)
            while not batch.finished:
                yield answered(*self._next(batch))
        finally:
            batch.cancel()

    def expect(self, candidate: Candidate, deadline: float) -> None:
        if self.begun is None:
            self.begun = self._submit(self.compile_job, [], "compile", deadline)
        self.begun.deadline = deadline
        [self.expected[candidate.linear]] = self.executor.add(self.begun, [self._compile_item(candidate, False)], self._homes([candidate]))

    def build(self, candidates: Sequence[Candidate], *, final: bool, deadline: float) -> list[Built | Failure]:
        begun = {} if final else {i: self.expected.pop(c.linear) for i, c in enumerate(candidates) if c.linear in self.expected}
        rest = [i for i in range(len(candidates)) if i not in begun]
        outcomes: dict[int, Outcome] = {}
        if rest:
            batch = self._submit(self.compile_job, [self._compile_item(candidates[i], final) for i in rest], "compile", deadline,
                                 self._homes([candidates[i] for i in rest]))
            outcomes = dict(zip(rest, self._outcomes(batch), strict=True))
        if self.begun is not None:
            self.begun.deadline = deadline
            for i, index in begun.items():
                outcomes[i] = self._outcome(self.begun, index, self.compiled)
                del self.compiled[index]        # its machine code is kept by the candidate
        return [o.value if o.ok else failure_of(o) for _, o in sorted(outcomes.items(), key=lambda entry: entry[0])]

    def _compile_item(self, candidate: Candidate, final: bool) -> Any:
        """The item of `compile_job` for a candidate."""
        return _chain(candidate), final

    def _homes(self, candidates: Sequence[Candidate]) -> list[str]:
        """For each candidate, the name of the worker that lowered it and may still have its program; "" if none did."""
        return [self.lowered_by.get(c.digest, "") for c in candidates]

    def screen(self, candidates: Sequence[Candidate], incumbent: float | None) -> list[Screened | Failure]:
        limits = self._limits(incumbent)
        limit = sum(run_deadline(t) for t in limits or [None] * len(self.sizes)) + self.load_seconds
        outcomes = self._run("screen_candidate", [(c.built, limits, self.shrink) for c in candidates], "bench", limit)
        screened: list[Screened | Failure] = [o.value[0] if o.ok else failure_of(o) for o in outcomes]
        seconds = {i: o.value[1] for i, o in enumerate(outcomes) if o.ok and o.value[1]}  # index of a candidate → its seconds per size
        for c, s in zip(candidates, screened, strict=True):
            if isinstance(s, Screened):
                self.parts[c.linear] = s.part
        alive = sorted((s.seconds, i) for i, s in enumerate(screened) if isinstance(s, Screened) and not s.cut)
        half = [i for _, i in alive[:(len(alive) + 1) // 2]]
        if self.config.runs > 1 and half:
            items = [(candidates[i].built, self.parts[candidates[i].linear], *outcomes[i].value[1:], self.config.runs) for i in half]
            for i, o in zip(half, self._run("sample_candidate", items, "bench", limit), strict=True):
                screened[i] = o.value[0] if o.ok else failure_of(o)
                if o.ok:
                    seconds[i] = o.value[1]
        if self.heuristic is None and seconds:
            first = min(seconds)
            self.heuristic, self.heuristic_linear = tuple(seconds[first]), candidates[first].linear
        return screened

    def _limits(self, incumbent: float | None) -> tuple[float, ...] | None:
        """The incumbent's seconds at each size, estimated as if its ratio to the heuristic were the same at all sizes. None without an
        incumbent or the heuristic's times."""
        if incumbent is not None and len(self.sizes) == 1:
            return (incumbent,)
        if incumbent is None or self.heuristic is None:
            return None
        share = incumbent / geometric_mean(self.heuristic)
        return tuple(share * t for t in self.heuristic)

    @property
    def size_factor(self) -> float:
        """An estimate of (the sum of a candidate's times of one run at each size) / (its `seconds`, their geometric mean)."""
        return len(self.sizes) if self.heuristic is None else sum(self.heuristic) / geometric_mean(self.heuristic)

    def race_rounds(self, seconds: Sequence[float]) -> tuple[int, int]:
        """The number of rounds of the next race, and the most repetitions of rounds in which the machine is busy. `seconds`: one run of
        each candidate, the anchor first."""
        longest = max(seconds)
        rounds = 4 if longest > 5e-3 else 6 if longest > 1e-3 else 8
        batch = self.size_factor * (rounds * math.fsum(seconds) + 2 * ANCHOR_SAMPLES * seconds[0])
        return rounds, min(RESTLESS_REPEATS if self.restless else VOID_REPEATS, int(REPEAT_SECONDS / batch))

    def race(self, candidates: Sequence[Candidate]) -> RaceResult:
        if self.begun is not None:
            self.begun.cancel()
            self.begun = None
        self.expected.clear()
        self.compiled.clear()
        self.races += 1
        parts = [self.parts.get(c.linear, 1.0) for c in candidates]
        taken = [c.seconds * part for c, part in zip(candidates, parts, strict=True)]
        rounds, repeats = self.race_rounds(taken)
        item = ([(c.built, part) for c, part in zip(candidates, parts, strict=True)], rounds, self.config.seed + self.races, repeats)
        limit = len(self.sizes) * (RACE_SECONDS + 100 * max(taken) * len(candidates))
        outcome = self._run("race_candidates", [item], "bench", limit)[0]
        if not outcome.ok:
            # a candidate failed that had run before: the screening times decide instead, with the noise of single minima
            anchor = candidates[0].seconds
            return RaceResult(tuple(c.seconds / anchor for c in candidates), anchor, 0.05, True)
        result, ratios = outcome.value
        if repeats:
            self.restless = result.noisy
        return self._drop_slow_at_a_size(candidates, result, ratios) if len(self.sizes) > 1 else result

    def _drop_slow_at_a_size(self, candidates: Sequence[Candidate], result: RaceResult, ratios: Sequence[Sequence[float]]) -> RaceResult:
        """The result of a race, with a Failure for each candidate that is too slow, compared with the heuristic, at one of the sizes."""
        yardstick = self._heuristic_in(candidates, ratios)
        judged: list[float | Failure] = list(result.ratios)
        for i, (c, column) in enumerate(zip(candidates, ratios, strict=True)):
            if yardstick is None or c.linear == self.heuristic_linear:
                continue
            relative = tuple(a / b for a, b in zip(column, yardstick, strict=True))
            self.relative[c.linear] = relative
            worst, size = max(zip(relative, self.sizes, strict=True))
            if i and worst > RACE_SLACK * WORST_RATIO:
                judged[i] = Failure(Status.SLOW, f"at {describe_size(self.kernel, size)} it takes {worst:.2f} times the heuristic's time; "
                                                 f"{WORST_RATIO} is allowed")
        return RaceResult(tuple(judged), result.anchor, result.noise, result.noisy)

    def _heuristic_in(self, candidates: Sequence[Candidate], ratios: Sequence[Sequence[float]]) -> tuple[float, ...] | None:
        """The heuristic's time over the first candidate's time in a race, for each size: as timed in the race if the heuristic took
        part, else by the first candidate's last ratios to the heuristic. None if these are unknown."""
        for c, column in zip(candidates, ratios, strict=True):
            if c.linear == self.heuristic_linear:
                return tuple(column)
        relative = self.relative.get(candidates[0].linear)
        return None if relative is None else tuple(1.0 / r for r in relative)

    def verify(self, candidates: Sequence[Candidate]) -> list[Verification]:
        return [self._verification(c, self._verify(c)) for c in candidates]

    def _verify(self, c: Candidate) -> Outcome:
        """Run the verification of a candidate. If a crash, a deadline or a lost worker ends it before numbers were compared, it is run once
        more with twice the time."""
        seconds = self.size_factor * c.seconds if c.seconds < math.inf else 0.0
        limit, run_limit = VERIFY_SECONDS + VERIFY_TIMES * seconds, VERIFY_RUN_SECONDS + VERIFY_RUN_TIMES * seconds
        for times in (1.0, 2.0):
            item = (c.built, self.baseline, sizes_to_verify(c.state), times * run_limit)
            [outcome] = self._run("verify_candidate", [item], "bench", times * limit)
            if outcome.status in ("ok", "error"):
                break
        return outcome

    def _verification(self, c: Candidate, outcome: Outcome) -> Verification:
        """Turn the outcome of a job into a Verification of `c`. The first candidate that is right becomes the baseline of others."""
        if not outcome.ok:
            failure = failure_of(outcome)
            return Verification(None, "run on the inputs of verification", failure.reason, failure.status)
        verification: Verification = outcome.value
        if verification.right and self.baseline is None:
            self.baseline = c.built
        return verification

    def confirm_rounds(self, candidates: Sequence[Candidate], seconds: float) -> int:
        """The least number of rounds of a confirmation within `seconds`: fewer than usual for long kernels, but enough for an interval."""
        fit = seconds / (self.size_factor * math.fsum(c.seconds for c in candidates))
        return max(min(self.bench.rounds, LEAST_ROUNDS), min(self.bench.rounds, int(fit)))

    def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Confirmed | Failure]:
        rounds = self.confirm_rounds(candidates, seconds)
        item = ([c.built for c in candidates], rounds, self.bench.precision, seconds, self.config.seed, LEVEL_FACTOR)
        slowest = max(c.seconds for c in candidates)
        limit = seconds + CONFIRM_EXTRA + 10 * len(self.sizes) * rounds * slowest * len(candidates)
        outcome = self._run("confirm_candidates", [item], "bench", limit)[0]
        return list(outcome.value) if outcome.ok else self._confirm_one_by_one(candidates, seconds, failure_of(outcome))

    def _confirm_one_by_one(self, candidates: Sequence[Candidate], seconds: float, failure: Failure) -> list[Confirmed | Failure]:
        """Confirm each candidate in a race of its own against the first, after one of them has ended the race of all. The first candidate's
        times are taken from the first race that succeeds."""
        answers: list[Confirmed | Failure] = [failure] * len(candidates)
        share = seconds / max(1, len(candidates) - 1)
        for i, c in enumerate(candidates[1:], 1):
            rounds = self.confirm_rounds([candidates[0], c], share)
            item = ([candidates[0].built, c.built], rounds, self.bench.precision, share, self.config.seed, LEVEL_FACTOR)
            limit = share + CONFIRM_EXTRA_ALONE + 10 * len(self.sizes) * rounds * max(candidates[0].seconds, c.seconds)
            [outcome] = self._run("confirm_candidates", [item], "bench", limit)
            answers[i] = outcome.value[1] if outcome.ok else failure_of(outcome)
            if outcome.ok and isinstance(answers[0], Failure):
                answers[0] = outcome.value[0]
        return answers
