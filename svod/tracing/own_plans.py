"""Plans for single sets of sizes beside one plan for all sizes, where real runs show that they are faster.

    one run in EVERY is timed, and its seconds are added up for its sizes
    one set has taken PAYS_BACK times as long as preparing a plan takes     → the background thread prepares a plan for these sizes
    its next runs take turns: TURN runs with the plan for all sizes, TURN with its own, and so on      → the median of each turn
    its own is faster by MARGIN: it is kept; otherwise it is dropped, and these sizes have the plan for all sizes for good

So the preparation, which slows calls beside it, costs a small part of the time that these sizes have taken, and no run is made only to
measure. The log says each decision once. Both plans compute the same function, but may add in another order: there are own plans only
where first forms are allowed (`has_first_forms`), and only for graphs that write nothing but new results, whose memory is that of one run.
"""
from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

from svod.compile.plan.running import background
from svod.system.forksafe import remake_after_fork
from svod.system.optional import reason
from svod.system.quantities import seconds as duration

MOST_OWN = 4            # most own plans beside one plan for all sizes: each has its own intermediates and packed weights
MOST_SIZES = 256        # most sets of sizes that are known at a time
EVERY = 17              # one run in so many is timed: a prime, as sizes may alternate
PAYS_BACK = 20          # least time that a set of sizes has run before a plan for it is prepared, in preparations of the plan for all sizes
LEAST_RUN_SECONDS = 5.0     # least time that a set of sizes has run before a plan for it is prepared, in seconds
LEAST_RUNS = 100        # least number of runs of a set of sizes before a plan for it is prepared
TURN, SETTLING = 8, 2   # runs of a turn, and how many of them come first and do not count: the other plan's data are in the caches
PAIRS, WINS = 15, 12    # pairs of turns, and in how many of them an own plan must be faster; by chance it is in one case of 57
MARGIN = 0.05           # least share of the time that an own plan saves


class SizesPlan(Protocol):
    """A plan of a front end."""

    def complete(self) -> None:
        """Compile the own forms of its kernels."""


R = TypeVar("R")
Own = TypeVar("Own", bound=SizesPlan)
Maker = Callable[[], Own | None]


def verdict(pairs: Sequence[tuple[float, float]]) -> bool | None:
    """Whether an own plan is kept; None: more turns are needed. `pairs`: the medians of two neighbouring turns, in seconds, with the plan
    for all sizes and with the own one. The own one must be faster in WINS of PAIRS, and by MARGIN in the middle one."""
    ratios = [own / common if common < math.inf else math.inf for common, own in pairs]
    if sum(r >= 1 for r in ratios) > PAIRS - WINS:
        return False
    return None if len(ratios) < PAIRS else statistics.median(ratios) <= 1 - MARGIN


class _Candidate(Generic[Own]):
    """A set of sizes. `label`: its names and sizes, for the log. `runs`, `seconds`: estimates of its runs so far, and of their time.
    `is_settled`: its runs are not timed, because its plan is being prepared, or because the decision is made. `plan`: its own plan; None:
    it has none, or none yet. `turns`: the seconds of the runs of each turn, in which the plan for all sizes and the own one alternate."""

    def __init__(self, sizes: Mapping[Any, int], is_settled: bool) -> None:
        self.label, self.is_settled = ", ".join(f"{name} {n}" for name, n in sizes.items()), is_settled
        self.runs, self.seconds = 0, 0.0
        self.plan: Own | None = None
        self.turns: list[list[float]] = []
        self.numbers = count()          # numbers of the runs that take turns

    def take_turns(self, plan: Own) -> None:
        """Let the next runs take turns with `plan`."""
        self.turns, self.plan = [[] for _ in range(2 * PAIRS)], plan
        self.is_settled = False

    def settle(self, plan: Own | None) -> None:
        """Use `plan` from now on; None: the plan for all sizes."""
        self.is_settled, self.plan = True, plan
        self.turns = []


class OwnPlans(Generic[Own]):
    """The own plans of sets of sizes beside one plan for all sizes. `name`: of the graph, for `log`. `prepare_seconds`: the time that the
    plan for all sizes took to prepare. Threads may call the methods at the same time."""

    def __init__(self, name: str, log: logging.Logger, prepare_seconds: float) -> None:
        self.name, self.log = name, log
        self._enough_seconds = max(LEAST_RUN_SECONDS, PAYS_BACK * prepare_seconds)
        self._candidates: dict[Hashable, _Candidate[Own]] = {}
        self._places = MOST_OWN         # number of own plans that may still be prepared
        self._calls = count()
        self._has_plans = False         # whether calls have to ask for own plans
        self._lock = threading.Lock()
        remake_after_fork(self, "_lock", threading.Lock)

    @property
    def plans(self) -> list[Own]:
        """The own plans, those that still take turns among them."""
        return [c.plan for c in list(self._candidates.values()) if c.plan is not None]

    def is_due(self) -> bool:
        """Whether the next call is made by `run`, and not by the plan for all sizes alone."""
        return self._has_plans or not next(self._calls) % EVERY

    def run(self, sizes: Mapping[Any, int], layout: Hashable, run: Callable[[Own | None], R], prepare: Callable[[], Maker[Own]]) -> R:
        """Run a call of these sizes. `layout`: what else own plans depend on. `run`: runs an own plan, or for None the plan for all sizes.
        `prepare`: called in the call from which on an own plan is wanted; it returns the function that makes the plan in another thread,
        which returns None if the graph can have none."""
        key = *sizes.values(), layout
        found = self._candidates.get(key) or self._added(key, sizes)
        if found.is_settled:
            return run(found.plan)
        turns, plan, turn = found.turns, None, 0
        if turns:
            number = next(found.numbers)
            turn = number // TURN
            plan = found.plan if turn % 2 else None
        start = time.perf_counter()
        result = run(plan)
        seconds = time.perf_counter() - start
        if not turns:
            weight = 1 if self._has_plans else EVERY
            found.runs += weight
            found.seconds += weight * seconds
            if found.seconds >= self._enough_seconds and found.runs >= LEAST_RUNS:
                self._request(found, prepare)
        elif turn and number % (2 * TURN) == 0:
            self._decide(found, turns[:turn])
        elif number % TURN >= SETTLING and turn < len(turns):
            turns[turn].append(seconds)
        return result

    def take_turns(self, found: _Candidate[Own], plan: Own) -> None:
        """Let the next runs of a set of sizes take turns with its own plan."""
        with self._lock:
            found.take_turns(plan)
            self._has_plans = True

    def give_up(self) -> None:
        """Prepare no more own plans."""
        with self._lock:
            self._places = -MOST_OWN

    def _added(self, key: Hashable, sizes: Mapping[Any, int]) -> _Candidate[Own]:
        with self._lock:
            if self._places > 0 and len(self._candidates) >= MOST_SIZES:        # sets of sizes whose runs are only counted begin anew
                self._candidates = {s: c for s, c in self._candidates.items() if c.is_settled or c.turns}
            if self._places <= 0 or len(self._candidates) >= MOST_SIZES:
                return _Candidate(sizes, is_settled=True)
            return self._candidates.setdefault(key, _Candidate(sizes, is_settled=False))

    def _request(self, found: _Candidate[Own], prepare: Callable[[], Maker[Own]]) -> None:
        with self._lock:
            if found.is_settled or found.turns:     # another thread was first
                return
            found.settle(None)
            if self._places <= 0:
                return
            self._places -= 1
        preparation = _Preparation(self, found, prepare())
        background.register(preparation)
        background.enqueue(preparation)

    def _decide(self, found: _Candidate[Own], turns: list[list[float]]) -> None:
        """Decide by the turns so far, if they are enough."""
        medians = [statistics.median(t or [math.inf]) for t in turns]       # a turn whose runs all failed speaks against a plan
        kept = verdict(list(zip(medians[::2], medians[1::2], strict=True)))
        with self._lock:
            if kept is None or found.is_settled:
                return
            found.settle(found.plan if kept else None)
            self._places += not kept
            self._has_plans = bool(self.plans)
        self.log.info("svod: %s: a plan of its own for %s takes %s, the plan for all sizes %s: it is %s", self.name, found.label,
                      duration(statistics.median(medians[1::2])), duration(statistics.median(medians[::2])), "kept" if kept else "dropped")


class _Preparation(background.BackgroundWork, Generic[Own]):
    """The preparation of an own plan, in two steps: the plan, and the own forms of its kernels. A step that is interrupted is taken again.
    If one fails, no more are prepared, and the plan for all sizes goes on. A forked child drops the preparation, and counts runs anew."""

    def __init__(self, plans: OwnPlans[Own], candidate: _Candidate[Own], make: Maker[Own]) -> None:
        self._plans, self._candidate = plans, candidate
        self._make: Maker[Own] | None = make        # None: the first step is done
        self._made: Own | None = None               # the plan between the first step and the second
        # held during a whole step, so that who wants to finish it waits; `background.step_lock` is taken inside it
        self._lock = threading.RLock()
        remake_after_fork(self, "_lock", threading.RLock)

    def step(self) -> bool:
        with self._lock:
            try:
                self._take_step()
            except Exception as e:      # a border between threads: calls go on
                self._drop()
                self._plans.give_up()
                self._plans.log.info("svod: %s: there is no plan of its own for %s (%s)", self._plans.name, self._candidate.label,
                                     reason(e))
            return self._made is not None

    def finish(self, lock_seconds: float = -1.0) -> None:
        while self.step():
            pass

    def go_on_after_fork(self) -> None:
        self._drop()

    def _take_step(self) -> None:
        if self._make is not None:
            with background.step_lock:
                self._made = self._make()
            self._make = None
            if self._made is None:
                self._plans.give_up()
        elif self._made is not None:
            self._made.complete()
            self._plans.take_turns(self._candidate, self._made)
            self._made = None

    def _drop(self) -> None:
        self._make = self._made = None
