"""The measurer of a kernel with variables: the jobs of `svod.tune.measure.sized_work` on an executor's workers.

Every candidate is held against the heuristic at each size: one that takes clearly more than `WORST_RATIO` of its time at any of them is
dropped from a race as too slow, whatever it gains at the others. The confirmation decides (`svod.tune.db.winners`).
"""
from __future__ import annotations

from collections.abc import Sequence

from svod.bench.timer import deadline as run_deadline
from svod.config import BeamConfig, BenchConfig
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target
from svod.tune.db.winners import WORST_RATIO
from svod.tune.measure.candidate import Candidate, Status
from svod.tune.measure.measurer import Confirmed, Failure, Race, Screened, Verdict
from svod.tune.measure.sizes import Size, describe_size, geometric_mean, sizes_to_verify
from svod.tune.measure.worker_measurer import CONFIRM_EXTRA, LOAD_SECONDS, RACE_SECONDS, VERIFY_SECONDS, WorkerMeasurer, failure_of
from svod.tune.workers.executor import Executor

SIZED = "svod.tune.measure.sized_work:"
RACE_SLACK = 1.1              # a race of few rounds drops what is this much beyond the worst ratio that is allowed


class SizedMeasurer(WorkerMeasurer):
    """Does what a search of one kernel decides, at `sizes`. The first candidate that is screened is the heuristic's."""

    def __init__(self, kernel: Kernel, sizes: Sequence[Size], target: Target, executor: Executor, config: BeamConfig,
                 bench: BenchConfig | None = None) -> None:
        super().__init__(kernel, target, executor, config, bench, shrink=False)
        self.kernel, self.sizes = kernel, tuple(sizes)
        self.heuristic: tuple[float, ...] | None = None         # seconds per size
        self.heuristic_linear = ""
        self.relative: dict[str, tuple[float, ...]] = {}        # LINEAR digest → its times over the heuristic's, per size, by its last race

    def screen(self, candidates: Sequence[Candidate], incumbent: float | None) -> list[Screened | Failure]:
        limits = self._limits(incumbent)
        limit = sum(run_deadline(t) for t in limits or [None] * len(self.sizes)) + LOAD_SECONDS
        outcomes = self._run("screen_sizes", [(c.built, limits, self.sizes) for c in candidates], "bench", limit, SIZED)
        found: list[Screened | Failure] = [o.value[0] if o.ok else failure_of(o) for o in outcomes]
        alive = sorted((f.seconds, i) for i, f in enumerate(found) if isinstance(f, Screened) and not f.cut)
        half = [i for _, i in alive[:(len(alive) + 1) // 2]]
        times = {i: o.value[1] for i, o in enumerate(outcomes) if o.ok and o.value[1]}
        if self.config.runs > 1 and half:
            items = [(candidates[i].built, *outcomes[i].value[1:], self.config.runs, self.sizes) for i in half]
            more = self._run("sample_sizes", items, "bench", limit, SIZED)
            for i, o in zip(half, more, strict=True):
                found[i] = o.value[0] if o.ok else failure_of(o)
                if o.ok:
                    times[i] = o.value[1]
        if self.heuristic is None and times:
            first = min(times)
            self.heuristic = tuple(times[first])
            self.heuristic_linear = candidates[first].linear
        return found

    @property
    def size_factor(self) -> float:
        """How many times a candidate's seconds, the mean over sizes, a run at each of them takes, about."""
        return len(self.sizes) if self.heuristic is None else sum(self.heuristic) / geometric_mean(self.heuristic)

    def _limits(self, incumbent: float | None) -> tuple[float, ...] | None:
        """The incumbent's seconds per size, as if it gained the same everywhere."""
        if incumbent is None or self.heuristic is None:
            return None
        share = incumbent / geometric_mean(self.heuristic)
        return tuple(share * t for t in self.heuristic)

    def race(self, candidates: Sequence[Candidate]) -> Race:
        self.races += 1
        taken = [c.seconds for c in candidates]
        rounds, repeats = self.race_rounds(taken, self.size_factor)
        item = ([c.built for c in candidates], rounds, self.config.seed + self.races, self.sizes, repeats)
        limit = len(self.sizes) * (RACE_SECONDS + 100 * max(taken) * len(candidates))
        outcome = self._run("race_sizes", [item], "bench", limit, SIZED)[0]
        if not outcome.ok:
            # one of them died although it ran before: their screening times decide, with the noise of single minima
            anchor = candidates[0].seconds
            return Race(tuple(c.seconds / anchor for c in candidates), anchor, 0.05, True)
        race, ratios = outcome.value
        self._judge_rest(race, repeats)
        yardstick = self._heuristic_in(candidates, ratios)
        judged: list[float | Failure] = list(race.ratios)
        for i, (c, column) in enumerate(zip(candidates, ratios, strict=True)):
            if yardstick is None or c.linear == self.heuristic_linear:
                continue
            relative = tuple(a / b for a, b in zip(column, yardstick, strict=True))
            self.relative[c.linear] = relative
            worst, size = max(zip(relative, self.sizes, strict=True))
            if i and worst > RACE_SLACK * WORST_RATIO:
                judged[i] = Failure(Status.SLOW, f"at {describe_size(self.kernel, size)} it takes {worst:.2f} times the heuristic's time; "
                                                 f"{WORST_RATIO} is allowed")
        return Race(tuple(judged), race.anchor, race.noise, race.noisy)

    def _heuristic_in(self, candidates: Sequence[Candidate], ratios: Sequence[Sequence[float]]) -> tuple[float, ...] | None:
        """Per size the heuristic's time over that of the first of a race: as timed in it, else by what is known of the first."""
        for c, column in zip(candidates, ratios, strict=True):
            if c.linear == self.heuristic_linear:
                return tuple(column)
        known = self.relative.get(candidates[0].linear)
        return None if known is None else tuple(1.0 / r for r in known)

    def verify(self, candidates: Sequence[Candidate]) -> list[Verdict]:
        found = []
        for c in candidates:
            item = (c.built, self.baseline, sizes_to_verify(c.state))
            found.append(self._verdict(c, self._run("verify_sizes", [item], "bench", VERIFY_SECONDS, SIZED)[0]))
        return found

    def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Confirmed | Failure]:
        rounds = self.confirm_rounds(candidates, seconds, self.size_factor)
        item = ([c.built for c in candidates], rounds, self.bench.precision, seconds, self.config.seed, self.sizes)
        slowest = max(c.seconds for c in candidates)
        limit = seconds + CONFIRM_EXTRA + 10 * len(self.sizes) * rounds * slowest * len(candidates)
        outcome = self._run("confirm_sizes", [item], "bench", limit, SIZED)[0]
        return list(outcome.value) if outcome.ok else [failure_of(outcome)] * len(candidates)
