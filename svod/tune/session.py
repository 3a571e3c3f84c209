"""The search of a list of kernels within one budget. `svod-tune` runs it, and `prepare()` with BEAM=.

    session = TuneSession(tasks, executor=…, db=…, config=…, budget=ModelBudget(120.0), ceilings=…, listener=…)
    results = session.run()          # kernel key → Finding

Kernels advance in interleaved rounds (budget.py). Steps that would take seconds for many kernels are done only when they are needed, so
that the search of the first kernel begins at once: making sketches, and measuring the machine's ceilings if they are unknown.

The process that runs a session is the only one that writes the database: after each round the measurements of that round, after the
confirmation of a kernel its confirmed times and verdicts. A kernel that another process is searching is skipped, and looked at again at
the end.

Ctrl-C (KeyboardInterrupt) ends the search: the current round is lost, the best chains are confirmed in a few tenths of a second per
kernel, and `run` returns with `interrupted` set. A second Ctrl-C skips the confirmations.
"""
from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

from svod import __version__
from svod.bench.roofline import Bound, Ceilings
from svod.bench.timer import protocol_of
from svod.compile.backend import device_named
from svod.compile.plan.compiler import Chain
from svod.config import BeamConfig, BenchConfig
from svod.core.cost.op_count import count_operations
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import chain_of
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target
from svod.errors import KernelOptError, TuneError
from svod.system.process.program import user_at_host
from svod.tune.db import Measurement, OriginRecord, Search, TargetFacts, TuningDB, Verdict
from svod.tune.db.records import BUDGET_SPENT, FAILED, INTERRUPTED, RecordedStatus, Step
from svod.tune.measure.candidate import Candidate, Origin, Status
from svod.tune.measure.measurer import MachineChanged, Measurer
from svod.tune.measure.sizes import Size, at_size, geometric_mean, merged_sizes
from svod.tune.measure.worker_measurer import WorkerMeasurer
from svod.tune.relatives import is_similar, kernel_record, seeds_of_relatives
from svod.tune.search.budget import WARM_UP_ROUNDS, ModelBudget, expected_gain
from svod.tune.search.confirmation import CONFIRM_SECONDS, Finding, closing_seconds, finish, result
from svod.tune.search.cost_models import Evidence
from svod.tune.search.events import DriverBusy, Listener, SessionEnding, SessionFinished, SessionStarted, nobody
from svod.tune.search.evidence import evidence_from
from svod.tune.search.kernel_search import KernelSearch, SearchedKernel
from svod.tune.search.strategies.registry import make_strategy
from svod.tune.unfinished import left_to_search
from svod.tune.workers.executor import Executor

log = logging.getLogger("svod.tune")

STORED_SEEDS = 4              # a search starts from max(this, the width of its beam) chains of the database, if there are so many
CONFIRMATIONS_SHARE = 0.25    # largest share of a session's budget that is reserved for confirmations
MIN_CONFIRM_SECONDS = 0.2     # least seconds of the confirmation of one kernel
OVERRUN = 6.0                 # seconds past its budget after which a session abandons unanswered candidates (`TuneSession._may_overrun`)
UNFINISHED = frozenset({BUDGET_SPENT, INTERRUPTED})
_RECORDED: dict[Status, RecordedStatus] = {
    Status.SLOW: "slow", Status.SCREENED: "ok", Status.RACED: "ok", Status.VERIFIED: "ok", Status.WRONG: "wrong",
    Status.ERROR: "error", Status.CRASH: "crash", Status.TIMEOUT: "timeout", Status.LOST: "lost"}


@dataclass(frozen=True)
class KernelTask:
    """A kernel to tune. `calls`: its calls in one run of the model; `share`: its share of the model's time, 0 if unknown, by which the
    warm-up is ordered. `sizes`: the sizes that a kernel with variables is timed at (`svod.tune.measure.sizes`); (): sizes from the bounds
    of the variables. `variables`: the kernel's names of its variables → the user's. `given`: chains to measure; if there are any, nothing
    else is proposed. `strategy`: the source of these chains, CHECK or TRANSFER."""

    kernel: Kernel
    calls: float = 1.0
    name: str = ""
    origins: tuple[str, ...] = ()
    share: float = 0.0
    sizes: tuple[Size, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    given: tuple[Chain, ...] = ()
    strategy: str = ""

    @property
    def key(self) -> str:
        return self.kernel.key

    @property
    def timed_at(self) -> tuple[Size, ...]:
        """The sizes that the kernel is timed at; a kernel without variables has the one size ()."""
        return self.sizes or merged_sizes(self.kernel, ())


@dataclass
class SessionResult:
    """The results of a session. `pending`: keys of kernels that another process searches. `unbegun`: keys of kernels whose search has not
    begun."""

    findings: dict[str, Finding] = field(default_factory=dict)
    pending: tuple[str, ...] = ()
    unbegun: tuple[str, ...] = ()
    interrupted: bool = False
    candidates: int = 0           # number of proposed candidates, the heuristic's of each kernel included
    timed: int = 0                # number of candidates with a new LINEAR that compiled, ran and have a sample
    searches: int = 0             # number of searches that have ended
    seconds: float = 0.0
    rows: int = 0                 # number of stored measurements
    expected_gain: float = 0.0    # seconds of model time that more search may still save

    @property
    def failure(self) -> str:
        """The failure of the heuristic's chain, if every candidate of every kernel failed; "" if any could be measured."""
        failures = [f.failure for f in self.findings.values()]
        return failures[0] if failures and all(failures) else ""


def bound_at(kernel: Kernel, sizes: Sequence[Size], target: Target, ceilings: Ceilings | None) -> Bound | None:
    """The roofline bound of a kernel, None without ceilings. For several sizes it is the bound at the last one, the largest, with the
    geometric mean of the seconds at all sizes."""
    if ceilings is None:
        return None
    works = [count_operations(at_size(kernel, size).ast if size else kernel.ast) for size in sizes]
    bounds = [ceilings.bound(w.arithmetic, w.bytes_read, w.bytes_written, target) for w in works]
    return replace(bounds[-1], seconds=geometric_mean([b.seconds for b in bounds]) if all(b.seconds for b in bounds) else 0.0)


@dataclass
class _Planned:
    """A kernel whose search has not begun, with the fields that the budget reads (`Budgeted`)."""

    task: KernelTask
    history: Sequence[float] = ()
    bound: float = 0.0
    spent: float = 0.0
    widened: int = 0
    finished: bool = False
    round_end: float = 0.0

    @property
    def key(self) -> str:
        return self.task.key

    @property
    def calls(self) -> float:
        return self.task.calls


class TuneSession:
    """The search of many kernels within one budget. `ceilings`: the machine's ceilings, or a function that returns them; it is called at
    most once, after the warm-up rounds of the first kernel, when the workers are idle.

    `measurer_of`: a function that makes the measurer of a kernel; by default one that uses the executor's workers. `device`: the name
    of the device whose compiler builds the kernels; by default `target.device`."""

    def __init__(self, tasks: Sequence[KernelTask], target: Target, *, executor: Executor, db: TuningDB, config: BeamConfig,
                 bench: BenchConfig | None = None, budget: ModelBudget | None = None,
                 ceilings: Ceilings | Callable[[], Ceilings | None] | None = None,
                 listener: Listener = nobody, shrink: bool = True,
                 measurer_of: Callable[[Kernel], Measurer] | None = None, device: str = "") -> None:
        self.tasks = sorted({t.key: t for t in tasks}.values(), key=lambda t: (-t.share, t.key))
        self.target, self.executor, self.db, self.config = target, executor, db, config
        self.device = device or target.device
        self.backend, self.pair = device_named(self.device)
        self.bench = bench or BenchConfig()
        self.budget = budget or ModelBudget(per_kernel=config.kernel_budget)
        self.ceilings: Ceilings | None = None if callable(ceilings) else ceilings
        self._tell_ceilings = ceilings if callable(ceilings) else None
        self.listener = listener
        self.measurer_of = measurer_of or (lambda kernel: self._worker_measurer(kernel, shrink))
        self.result = SessionResult()
        self._claims: dict[str, Any] = {}
        self._searches: dict[str, str] = {}     # kernel key → id in the database
        self._machines: dict[str, Mapping[str, Any]] = {}      # kernel key → facts about the machine that timed its latest round
        self._confirming = False
        self._begun_of: dict[str, KernelSearch] = {}    # kernel key → its search, once that has begun
        self._about: Mapping[str, str] = {}     # facts about the target's machines that were last recorded
        self._tasks_by_key = {t.key: t for t in self.tasks}

    def _worker_measurer(self, kernel: Kernel, shrink: bool) -> Measurer:
        return WorkerMeasurer(kernel, self.target, self.executor, self.config, self.bench,
                              sizes=self._tasks_by_key[kernel.key].timed_at, shrink=shrink, device=self.device,
                              end=lambda: time.monotonic() + self.budget.until_end + OVERRUN * self._may_overrun)

    @property
    def _may_overrun(self) -> bool:
        """Whether to wait for workers' answers beyond the end of the budget: during confirmations, and while no search has found a better
        chain that could be confirmed."""
        return self._confirming or not any(s.lead.improved for s in self._begun_of.values())

    def _bound(self, task: KernelTask) -> float:
        bound = bound_at(task.kernel, task.timed_at, self.target, self.ceilings)
        return 0.0 if bound is None else bound.seconds

    # -- running ----------------------------------------------------------------------------------------------------------
    def run(self) -> SessionResult:
        """Search all kernels until their searches end or the budget is spent. Raises TuneError when no worker can be started."""
        started = time.monotonic()
        self.listener(SessionStarted("", len(self.tasks), self.budget.total, self.executor.description, self.target.key))
        searches: list[KernelSearch | _Planned] = []
        late: list[KernelSearch | _Planned] = []
        waiting: dict[str, KernelTask] = {}
        try:
            searches += map(_Planned, self.tasks)
            self._search(searches, waiting)
            late += [_Planned(task) for task in waiting.values() if not self._is_done(task)]
            waiting = {s.key: s.task for s in late if isinstance(s, _Planned)}
            self._search(late, waiting)
        except KeyboardInterrupt:
            self.result.interrupted = True
            self._wind_up([s for s in [*searches, *late] if isinstance(s, KernelSearch) and s.key not in self.result.findings])
            for planned in (searches, late):
                self._record_unbegun(planned, waiting, INTERRUPTED)
        finally:
            for task in self.tasks:
                self.db.claims.release_all(task.key, self.target.key)
            for search in self._searches.values():      # searches that ended before they had anything to store
                self.db.end_search(search, INTERRUPTED if self.result.interrupted else FAILED)
        self.result.pending = tuple(waiting)
        self.result.unbegun = tuple(t.key for t in self.tasks if t.key not in waiting and t.key not in self.result.findings)
        self.result.seconds = time.monotonic() - started
        self.listener(SessionFinished("", len(self.result.findings), self.result.timed, self.result.seconds, self.result.interrupted))
        return self.result

    def _is_done(self, task: KernelTask) -> bool:
        """Whether a kernel needs no more search, as another process has searched it meanwhile."""
        if self.config.ignore_cache or not any(s.ended_at is not None for s, _ in self.db.select(Search, task.key, self.target.key)):
            return False
        return left_to_search(self.db, task.key, self.target.key, self.config) is None

    def _search(self, searches: list[KernelSearch | _Planned], waiting: dict[str, KernelTask]) -> None:
        """Search all kernels. Each entry of `searches` begins as a `_Planned`, and is replaced by a KernelSearch when its kernel's search
        begins and the kernel is claimed. A kernel that another process is searching is moved from `searches` to `waiting`."""
        total = self.budget.total
        while True:
            open_ = [s for s in searches if not s.finished]
            # a share of the budget is reserved for the confirmations that are still to come
            ends = sum(CONFIRM_SECONDS + (closing_seconds(s) if isinstance(s, KernelSearch) else 0.0)
                       for s in searches if s.key not in self.result.findings)
            left = self.budget.left - min(CONFIRMATIONS_SHARE * total, ends)
            chosen = self.budget.next([s for s in searches if s.round_end < left])
            if chosen is None:
                break
            begun = any(isinstance(s, KernelSearch) for s in searches)
            if len(chosen.history) >= WARM_UP_ROUNDS or (isinstance(chosen, _Planned) and begun):
                self._learn_ceilings(searches)
            search = self._begun(chosen, searches, waiting)
            if search is None:
                continue
            if self._claims[search.key].lost:
                search.stop("another process has taken over the search")
            try:
                if search.key not in self._machines:
                    self._look_at_machine(search)
                search.step(min(self.budget.deadline(search, open_), self.budget.clock() + left - search.round_end))
            except MachineChanged as e:
                search = self._begin_again(search, searches, e)
            if search.finished:
                self._finish(search, searches)
        self._record_unbegun(searches, waiting, BUDGET_SPENT)
        ending = [s for s in searches if isinstance(s, KernelSearch) and s.key not in self.result.findings]
        for s in sorted(ending, key=lambda s: -s.calls * s.lead.seconds):      # largest total time first, in case time runs out
            self._finish(s, searches)

    def _record_unbegun(self, searches: list[KernelSearch | _Planned], waiting: dict[str, KernelTask], why: str) -> None:
        """Store an ended search with the outcome `why` for each kernel whose search has not begun, so that `--resume` searches it."""
        for s in list(searches):
            if isinstance(s, _Planned) and (s.key in self._claims or self._claim(s, searches, waiting)):
                if s.key not in self._searches and not self._is_done(s.task):
                    self.db.end_search(self._begin_record(s.task), why)
                self._claims.pop(s.key).release()

    def _begun(self, entry: KernelSearch | _Planned, searches: list[KernelSearch | _Planned],
               waiting: dict[str, KernelTask]) -> KernelSearch | None:
        """The search of an entry. The search of a `_Planned` is created now and replaces it in `searches`. None where another process has
        claimed the kernel."""
        if isinstance(entry, KernelSearch):
            return entry
        if not self._claim(entry, searches, waiting):
            return None
        made = self._make(entry.task)
        searches[searches.index(entry)] = made
        return made

    def _claim(self, entry: _Planned, searches: list[KernelSearch | _Planned], waiting: dict[str, KernelTask]) -> bool:
        """Claim a kernel. Returns False if another process has claimed it; the kernel is then moved from `searches` to `waiting`."""
        claim = self.db.claims.take(entry.key, self.target.key)
        if claim is None:
            waiting[entry.key] = entry.task
            searches.remove(entry)
            return False
        self._claims[entry.key] = claim
        waiting.pop(entry.key, None)
        return True

    def _begin_again(self, search: KernelSearch, searches: list[KernelSearch | _Planned], why: MachineChanged) -> KernelSearch:
        """Replace a search whose timing machine has changed by a new one, as times of two machines are not compared. The new search starts
        from the chains that the old one has stored."""
        log.warning("%s: %s; its search starts anew there", search.name, why)
        self.db.end_search(self._searches.pop(search.key), f"the machine changed: {why}")
        self._machines.pop(search.key, None)
        made = self._make(self._tasks_by_key[search.key])
        made.spent = search.spent
        searches[searches.index(search)] = made
        return made

    def _learn_ceilings(self, searches: Sequence[KernelSearch | _Planned]) -> None:
        """Get the machine's ceilings, if they are still unknown, and give the searches that began without them their bounds."""
        if self._tell_ceilings is None:
            return
        self.listener(DriverBusy("", "measuring what this machine can do"))
        self.ceilings, self._tell_ceilings = self._tell_ceilings(), None
        for s in searches:
            if isinstance(s, KernelSearch):
                s.progress.bound = self._bound(self._tasks_by_key[s.key])

    def _finish(self, search: KernelSearch, searches: Sequence[KernelSearch | _Planned]) -> None:
        open_ = max(1, len([s for s in searches if s.key not in self.result.findings]))
        seconds = max(MIN_CONFIRM_SECONDS, min(CONFIRM_SECONDS, self.bench.seconds, self.budget.left / open_))
        self._confirming = True
        try:
            finding = finish(search, seconds, self.budget.clock() + self.budget.left)
        except MachineChanged as e:
            log.warning("%s: %s; what it found is not confirmed", search.name, e)
            finding = result(search)
        finally:
            self._confirming = False
        if finding.unconfirmed and search.lead.improved and not finding.confirmed:
            log.warning("%s led by %.2f× and could not be confirmed: %s", search.name, finding.speedup.median, finding.unconfirmed)
        self._store(search, finding, search.why)

    def _wind_up(self, searches: Sequence[KernelSearch]) -> None:
        """After Ctrl-C: briefly confirm the best chain of each search that has found a better one, and store the results. After a second
        Ctrl-C, or if the workers are lost, the remaining results are stored unconfirmed."""
        quick = self._confirming = True
        self.listener(SessionEnding("", sum(s.lead.improved for s in searches)))
        for s in searches:
            s.stop(INTERRUPTED)
            try:
                finding = finish(s, MIN_CONFIRM_SECONDS) if quick and s.lead.improved else result(s)
            except (KeyboardInterrupt, TuneError) as e:
                log.info("%s: what it found is not confirmed: %s", s.name, e or "Ctrl-C")
                quick, finding = False, result(s)
            self._store(s, finding, INTERRUPTED)

    # -- one kernel -------------------------------------------------------------------------------------------------------
    def _make(self, task: KernelTask) -> KernelSearch:
        kernel, base = task.kernel, Scheduler(task.kernel, self.target)
        known: Mapping[str, Measurement] = {}
        seeds: list[tuple[Scheduler, Origin]] = []
        if task.given:
            seeds = [(apply_opts(base, chain), Origin.DATABASE) for chain in task.given]
        elif not self.config.ignore_cache:
            known = self.db.known_digests(task.key, self.target.key, self.pair.revision, self.pair.key, protocol_of(self.target))
            seeds = self._stored_seeds(base, known)
            stored = {s.digest for s, _ in seeds}
            seeds += [(s, Origin.RELATIVE) for s in seeds_of_relatives(base, self.db, self.backend, is_similar) if s.digest not in stored]
        if not task.given and self.config.sketches and self.config.strict != "reference":
            seeds += [(s, Origin.SKETCH) for s in self.backend.sketches(base)]
        self._searches[task.key] = self._begin_record(task)
        subject = SearchedKernel(task.key, task.name or task.key[:12], base, self.backend.heuristic(base), seeds, frozenset(known),
                                 task.calls, grows=not task.given)
        search = KernelSearch(subject, self.config, self.measurer_of(kernel), bound=self._bound(task), listener=self.listener,
                              clock=self.budget.clock, strategy_of=partial(make_strategy, evidence=self._evidence))
        search.record = lambda candidates: self._record_round(search, candidates)
        self._begun_of[task.key] = search
        return search

    def _begin_record(self, task: KernelTask) -> str:
        """Store a kernel and the start of its search. Returns the search's id."""
        self.db.record([kernel_record(task.kernel, task.name), *(OriginRecord(task.key, o) for o in task.origins)])
        return self.db.begin_search(task.key, self.target.key, strategy=task.strategy or self.config.strategy,
                                    executor=self.executor.description, config=dataclasses.asdict(self.config), svod=__version__)

    @cached_property
    def _evidence(self) -> list[Evidence]:
        """The training samples from the database for a learned cost model, read once; [] for another cost model."""
        learns = self.config.cost_model == "learned" and not self.config.ignore_cache
        return evidence_from(self.db, self.target, self.backend) if learns else []

    def _stored_seeds(self, base: Scheduler, known: Mapping[str, Measurement]) -> list[tuple[Scheduler, Origin]]:
        """Seeds from the database: first the chains that may win, then the fastest of the chains that were only raced."""
        chains = [w.chain for w in self.db.ranking(base.kernel.key, self.target.key)]
        raced = [m for m in known.values() if m.status == "ok" and m.step == "race" and m.ratio is not None]
        chains += [m.chain for m in sorted(raced, key=lambda m: (m.ratio or 0.0, m.chain_key))]
        states: dict[bytes, Scheduler] = {}
        for chain in chains:
            if len(states) >= max(STORED_SEEDS, self.config.width):
                break
            try:
                state = apply_opts(base, chain_of(chain))
            except KernelOptError as e:
                log.info("a stored chain of %s does not apply any more and is skipped: %s", base.kernel.key[:12], e)
                continue
            states.setdefault(state.digest, state)
        return [(s, Origin.DATABASE) for s in states.values()]

    # -- the database -----------------------------------------------------------------------------------------------------
    def _measurement(self, search: KernelSearch, c: Candidate, step: Step, host: Mapping[str, Any] = MappingProxyType({}),
                     **more: Any) -> Measurement:
        baseline = search.lead.baseline
        return Measurement(
            kernel=search.key, target=self.target.key, chain=tuple(tuple(o.to_json()) for o in c.chain), linear=c.linear,
            status=_RECORDED[c.status], codegen=self.pair.revision, compiler=self.pair.key, protocol=protocol_of(self.target), step=step,
            reason=c.reason[:2000], strategy=self._tasks_by_key[search.key].strategy,
            baseline_linear=baseline.linear, search=self._searches[search.key], taken_at=time.time(),
            host={"executor": self.executor.description, **self._machines.get(search.key, {}), **host}, **more)

    def _look_at_machine(self, search: KernelSearch) -> None:
        """Ask the machine that times a kernel for its state. The facts that do not change (`about`) are stored as facts of the target."""
        facts = dict(search.measurer.machine())
        about = facts.pop("about", self._about)
        if about != self._about:
            self.db.record([TargetFacts(self.target.key, about)])
        self._machines[search.key], self._about = facts, about

    def _record_round(self, search: KernelSearch, candidates: Sequence[Candidate]) -> None:
        self._look_at_machine(search)
        records: list[Any] = []
        base = search.lead.baseline.score if search.lead.verified_baseline else None
        for c in candidates:
            if c.status not in _RECORDED:
                continue
            raced = c.status in (Status.RACED, Status.VERIFIED) and c.score < float("inf")
            seconds = c.score if raced else c.seconds if c.samples else None
            ratio = c.score / base if raced and base else None
            records.append(self._measurement(search, c, "race" if raced else "screen", time=seconds, samples=c.samples,
                                             anchor=search.lead.best if search.lead.incumbent else None, baseline=base, ratio=ratio,
                                             noisy=c.noisy))
            if c.linear and c.status in (Status.VERIFIED, Status.WRONG):
                records.append(self._verdict(search, c))
        self.result.rows += self.db.record(records)

    def _verdict(self, search: KernelSearch, c: Candidate) -> Verdict:
        wrong = c.status is Status.WRONG
        return Verdict(search.key, self.target.key, c.linear, "wrong" if wrong else "verified", self.pair.revision, compiler=self.pair.key,
                       by=user_at_host(), method=c.known.get("how", ""), reason=c.reason[:2000], search=self._searches[search.key],
                       taken_at=time.time())

    def _store(self, search: KernelSearch, finding: Finding, outcome: str) -> None:
        """Store the end of one kernel's search: confirmed times with their ratios to the heuristic's, and verdicts; release the kernel."""
        records: list[Any] = []
        for c, t in finding.finalists:
            against = search.lead.baseline.known.get("confirmed")
            if against is None:
                continue
            names, given = search.subject.base.kernel.variables, dict(self._tasks_by_key[search.key].variables)
            sizes = [{"at": dict(zip(names, at, strict=True)), "seconds": s, "ratio": r} for at, s, r in t.sizes]
            records.append(self._measurement(search, c, "confirm", {"sizes": sizes, "variables": given} if sizes else {}, time=t.seconds,
                                             samples=t.samples, anchor=against.seconds, baseline=against.seconds, ratio=t.ratio,
                                             ratio_low=t.low, ratio_high=t.high, noisy=t.noisy))
            records.append(self._verdict(search, c))
        # a candidate that was right in the search and wrong with final code is recorded by its own status
        records += [self._verdict(search, c) for c in finding.refuted]
        self.result.rows += self.db.record(records)
        if search.why in UNFINISHED and search.lead.best < float("inf"):
            self.result.expected_gain += expected_gain(search)
        counts = dataclasses.asdict(search.counts)
        self.result.findings[search.key] = finding
        self.db.end_search(self._searches[search.key], outcome or finding.why, {
            **counts, "calls": float(search.calls), "rounds": len(search.history), "seconds": search.spent,
            "best": _finite(finding.seconds), "heuristic": _finite(finding.heuristic_seconds), "confirmed": finding.confirmed})
        self._searches.pop(search.key)
        self.result.candidates += search.counts.proposed + 1
        self.result.timed += search.counts.timed
        self.result.searches += 1
        claim = self._claims.pop(search.key, None)
        if claim is not None:
            claim.release()


def _finite(seconds: float) -> float | None:
    return seconds if seconds < float("inf") else None
