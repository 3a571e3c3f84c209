"""The data that the steps of svod-tune share: options and configuration, the budget's clock, and the state of each target's kernels."""
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from svod.bench.roofline import Ceilings
from svod.cli.tune.options import TuneOptions
from svod.cli.tune.report import KernelReport
from svod.cli.tune.survey import SurveyRow
from svod.config import BeamConfig, OptimizerConfig, PrepareConfig
from svod.core.machine.target import Target
from svod.tune.capture import Capture, CapturedPlan
from svod.tune.db import PairTimes, TuningDB
from svod.tune.plans.check import PlanCheck
from svod.tune.plans.form_check import TimedForm
from svod.tune.plans.plan_search import ChosenPlan
from svod.tune.resolved import Resolved
from svod.tune.session import SessionResult
from svod.tune.unfinished import left_to_search

# exit statuses besides EXIT_USAGE and EXIT_INTERRUPTED; docs/tuning.md gives their meanings
EXIT_OK, EXIT_FAILED, EXIT_SCRIPT, EXIT_NOT_STORED, EXIT_NO_KERNEL, EXIT_DAMAGED = 0, 1, 3, 4, 5, 6
GRACE_SECONDS = 15.0        # seconds beyond the budget within which the command has to end
LATE_SECONDS = 10.0         # seconds beyond the budget after which nothing more is measured
START_SECONDS = 5.0         # seconds beyond the budget by which workers have to be up
WRITE_SECONDS = 2.0         # seconds that are reserved for writing the results
CHECK_PART = 0.15           # the largest share of the budget for a plan check
CHECK_LEAST = 0.5           # the shortest plan check in seconds, however small the budget
BEFORE_SEARCH = {"capture": "the capture", "alternatives": "the alternatives of plans", "survey": "looking at the kernels",
                 "workers": "waiting for the workers"}      # the phases before the search, in their order, in words


class CommandClock:
    """The budget of a command in seconds. `left`: the seconds until its end, negative after it. `phases`: seconds from the start of the
    command to the end of each phase."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.phases: dict[str, float] = {}
        self._started = time.monotonic()
        self._ends = self._started + budget

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @property
    def left(self) -> float:
        return self._ends - time.monotonic()

    @property
    def left_for_measuring(self) -> float:
        """Seconds from now after which no more measurements begin."""
        return self.left + LATE_SECONDS

    @property
    def is_late(self) -> bool:
        """Whether the time left is too short for a plan check."""
        return self.left_for_measuring < CHECK_LEAST

    @property
    def left_for_starting(self) -> float:
        """Seconds that workers may still take to start."""
        return max(1.0, self.left + START_SECONDS)

    @property
    def left_for_ending(self) -> float:
        """Seconds that the last steps of the command may take."""
        return max(0.0, self.left + GRACE_SECONDS - WRITE_SECONDS)

    @property
    def seconds_before_search(self) -> float:
        """Seconds that the phases before the search have taken."""
        return max((self.phases[name] for name in BEFORE_SEARCH if name in self.phases), default=0.0)

    @property
    def words_before_search(self) -> str:
        """What used up the budget before the search began, by the ends of the phases before it."""
        ends = {name: self.phases[name] for name in BEFORE_SEARCH if name in self.phases}
        begins = [0.0, *ends.values()]
        taken = [f"{BEFORE_SEARCH[name]} took {end - begin:.1f} s" for begin, (name, end) in zip(begins, ends.items(), strict=False)
                 if end - begin >= self.budget / 100]
        return f"the budget of {self.budget:g} s was over before the first search ({', '.join(taken)})"

    def leave_half(self) -> None:
        """Extend the end, if necessary, so that at least half of the budget is left from now on."""
        self._ends = max(self._ends, time.monotonic() + self.budget / 2)

    def end_phase(self, name: str) -> None:
        self.phases[name] = self.elapsed

    def check_seconds(self, most: float) -> float:
        """The seconds that one plan check may take, at most `most`."""
        return min(most, max(CHECK_LEAST, CHECK_PART * self.budget))


@dataclass(frozen=True)
class Setting:
    """The settings of a command: its options, the configuration from them and from the environment, its database and clock."""

    options: TuneOptions
    config: PrepareConfig
    beam: BeamConfig
    db: TuningDB
    clock: CommandClock

    @property
    def allowed(self) -> tuple[bool, bool, bool, str]:
        """The arguments of `Target.allowing` for the targets of the command."""
        return replace(self.config, optimizer=OptimizerConfig.from_env()).allowed

    @classmethod
    def of(cls, options: TuneOptions) -> Setting:
        clock = CommandClock(options.budget)
        given = {name: value for name in ("db", "device", "numerics") if (value := getattr(options, name)) is not None}
        config = PrepareConfig.from_env(beam=None, optimizer=OptimizerConfig(), capture=None, **given)
        chosen = {name: value for name in ("actions", "strategy", "optuna_storage") if (value := getattr(options, name)) is not None}
        beam = BeamConfig.from_env(width=options.beam, budget=options.budget, **chosen)
        db = TuningDB.open(config.db, fresh=options.fresh, read_only=options.dry_run or options.compile_only)
        return cls(options, config, beam, db, clock)


@dataclass
class TargetWork:
    """The kernels to tune for one target, with their results. `here`: the target is this machine's, so that whole plans can be timed.
    `label`: the beginning of a line about the target if there are several, else "". `plans`: the records that chose alternatives of the
    plans, which `by_rules` has without any."""

    resolved: Resolved
    here: bool
    label: str
    rows: list[SurveyRow]
    result: SessionResult | None = None         # None where nothing was left to search
    outcomes: Sequence[KernelReport] = ()
    checks: Sequence[tuple[CapturedPlan, PlanCheck]] = ()
    ceilings: Ceilings | None = None
    forms: Sequence[TimedForm] = ()
    plans: Sequence[ChosenPlan] = ()
    by_rules: Capture = field(default_factory=Capture)

    @property
    def target(self) -> Target:
        return self.resolved.target

    @property
    def failure(self) -> str:
        """The failure of the heuristic's chain, if no candidate of any kernel could be measured; "" otherwise."""
        return self.result.failure if self.result is not None else ""

    @property
    def wanted(self) -> list[SurveyRow]:
        return [r for r in self.rows if r.decision == "search"]

    @property
    def of_interest(self) -> list[SurveyRow]:
        return [r for r in self.rows if r.decision in ("search", "check", "known")]

    @property
    def pair_times(self) -> list[PairTimes]:
        """The records that decide about the forms of convolutions and of whole plans."""
        return [*(f.times for f in self.forms if f.times is not None), *(p.times for p in self.plans)]

    @property
    def compared_keys(self) -> set[str]:
        """The keys of the convolutions whose forms were considered, and of the plans."""
        return {*(f.form.key for f in self.forms), *(p.digest for p in self.by_rules.plans)}

    @property
    def title(self) -> list[str]:
        return [f"target {self.target.key}"] if self.label else []


def has_wider(setting: Setting, works: Sequence[TargetWork]) -> bool:
    """Whether a beam of twice the width has something left to search."""
    twice = replace(setting.beam, width=2 * setting.beam.width)
    return any(left_to_search(setting.db, r.key, w.target.key, twice) is not None for w in works for r in w.of_interest)
