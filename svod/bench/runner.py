"""Runs a suite kernel by kernel: prepares every contestant, checks its result, times all of them interleaved, and computes the figures.

    operands from the seed → NumPy's result
      each contestant: prepare, run, compare         (a wrong, failed or unsupported one is reported and not timed)
      prepare again with copies of the operands      (at other addresses, which should not affect the comparison)
      rounds:  c  a  b | b' a' c' | …                (a sample of each, in random order; slow ones are dropped after a few rounds)
    → CaseResult

svod's kernel for a round neighbour runs in the same rounds as its case. So does a loop of bare arithmetic if arithmetic limits the kernel:
clock frequencies change, so a ceiling that was measured an hour ago is inaccurate.

Failures stay local: a contestant that fails while it is timed leaves the case, and a case that fails leaves the other cases alone.
docs/measuring.md describes the protocol with its formulas and constants.
"""
from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np

from svod.bench.ceiling_loops import Round
from svod.bench.load import MachineLoad, Watch, watch_machine
from svod.bench.machine import machine_of, versions
from svod.bench.peers import Array, Peer, Prepare, PreparedPeer
from svod.bench.peers.alone import Alone
from svod.bench.placing import Place, placed
from svod.bench.race import interleave, paired_ratio
from svod.bench.results import SVOD, CaseResult, ContestantResult, Load, Neighbour, PeerInfo, Run, RunSettings
from svod.bench.roofline import COMPUTE, Ceilings
from svod.bench.suites.cases import LOWER_TOLERANCE, Case
from svod.bench.suites.reference import Result, difference, reference
from svod.bench.summary import PLACEMENTS, Timed, bound_beside, group_results, judge_case, neighbour_of, suite_results
from svod.bench.timer import SPIN_DOWN_SECONDS, Clock, Contestant, calibrate, warm_up
from svod.config import BenchConfig
from svod.core.ir.dtype import BY_NAME, DType
from svod.core.machine.target import Target
from svod.errors import SvodError, UnsupportedError

WARM_SECONDS = 25e-3  # seconds of untimed runs before a sample: after a pause threads sleep, clocks are low, and caches hold other data
# A contestant that takes more than SLOW_FACTOR times the fastest one's time, and more than SLOW_SECONDS, is dropped after SLOW_ROUNDS.
SLOW_FACTOR = 8.0
SLOW_SECONDS = 10e-3
SLOW_ROUNDS = 7
NEIGHBOUR, ARITHMETIC = BESIDE = ("round neighbour", "bare arithmetic")   # timed in the same rounds, but not competing: they do other work
# A case with a limit takes this many rounds, and no more if its ratio to the fastest peer is clearly on one side of the limit.
LIMIT_ROUNDS = 6                # the fewest rounds that give an interval
LIMIT_SECONDS = 5.0
CLOSE_FACTOR = 1.25             # ratios must be known to all peers whose time is within this factor of the fastest peer's


@dataclass(frozen=True)
class CaseTiming:
    """The samples of a case. `seconds[i]`: the samples of contestant i, by round. `precise`: whether all required ratios are known to
    the requested precision."""

    seconds: tuple[tuple[float, ...], ...]
    precise: bool
    load: MachineLoad


def time_interleaved(contestants: Sequence[Contestant], lead: int, config: BenchConfig, *, beside: Collection[int] = (),
                     elsewhere: Sequence[Sequence[Contestant]] = (), rng: random.Random, clock: Clock = time.perf_counter,
                     watch: Watch = watch_machine, pause: Callable[[], None] = lambda: time.sleep(SPIN_DOWN_SECONDS),
                     place: Place, limit: float | None = None) -> CaseTiming:
    """Time contestants in interleaved rounds until the ratios of `lead` to the fast ones are known, or the time of `config` is used up.
    With a `limit` it is enough to know whether `lead` takes more than `limit` times as long as the fastest other contestant.

    `elsewhere` has the same contestants on operands in other memory; rounds alternate between the placements. Fast contestants are found by
    their medians so far, which one bad sample does not change; slow ones by the minimum of their first samples, because new threads may
    share a core for a while. Contestants in `beside` do other work: they do not compete, but the ratio to them has to be known too. Raises
    ValueError without contestants."""
    if not contestants:
        raise ValueError("nothing to time: there are no contestants")
    placements = [contestants, *elsewhere]
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with place([c for members in placements for c in members], pause):
            return _time_placed(placements, lead, config, beside, rng, clock=clock, watch=watch, pause=pause, limit=limit)
    finally:
        if was_enabled:
            gc.enable()


def _time_placed(placements: Sequence[Sequence[Contestant]], lead: int, config: BenchConfig, beside: Collection[int], rng: random.Random, *,
                 clock: Clock, watch: Watch, pause: Callable[[], None], limit: float | None) -> CaseTiming:
    def calibrated_warm(contestant: Contestant) -> tuple[int, float]:
        pause()
        warm_up(contestant, WARM_SECONDS, clock)
        return calibrate(contestant, None, clock, config.min_sample * 1e-6)

    calibrated = [[calibrated_warm(c) for c in members] for members in placements]
    fast = list(range(len(placements[0])))      # indices of the contestants that are still timed
    seconds: list[list[float]] = [[] for _ in fast]
    begin, seen = clock(), watch()
    rounds, precise = 0, False
    while rounds < config.rounds or (not precise and clock() - begin < config.case_seconds):
        turn = rounds % len(placements)
        times = interleave([placements[turn][i] for i in fast], [calibrated[turn][i] for i in fast], rng, clock=clock, pause=pause,
                           warm=WARM_SECONDS)
        for i, t in zip(fast, times, strict=True):
            seconds[i].append(t)
        rounds += 1
        if rounds == SLOW_ROUNDS:
            fast = _without_the_slow(seconds, lead, beside)
        if rounds >= config.rounds:
            peers = [seconds[i] for i in fast if i != lead and i not in beside]
            precise = _is_judged(peers, seconds[lead], limit) if limit is not None else (
                _is_known(peers, seconds[lead], config.precision)
                and all(paired_ratio(seconds[i], seconds[lead]).half_width <= config.precision for i in beside))
    return CaseTiming(tuple(map(tuple, seconds)), precise, seen())


def _without_the_slow(seconds: Sequence[Sequence[float]], lead: int, beside: Collection[int]) -> list[int]:
    """The contestants that are timed further: `lead`, those in `beside`, and those that are not far slower than the fastest."""
    limit = max(SLOW_FACTOR * min((min(t) for i, t in enumerate(seconds) if i not in beside), default=math.inf), SLOW_SECONDS)
    return [i for i, t in enumerate(seconds) if i == lead or i in beside or min(t) <= limit]


def _is_known(peers: Sequence[Sequence[float]], lead: Sequence[float], precision: float) -> bool:
    """Whether the ratios to the fastest peer, and to peers nearly as fast, are known to ±`precision`."""
    medians = [statistics.median(p) for p in peers]
    limit = CLOSE_FACTOR * min(medians, default=0.0)
    return all(paired_ratio(p, lead).half_width <= precision for p, m in zip(peers, medians, strict=True) if m <= limit)


def _is_judged(peers: Sequence[Sequence[float]], lead: Sequence[float], limit: float) -> bool:
    """Whether it is known on which side of `limit` the ratio of `lead` to the fastest peer is."""
    if not peers:
        return True
    ratio = paired_ratio(lead, min(peers, key=statistics.median))
    return ratio.low > limit or ratio.high < limit


def run_case(case: Case, contestants: Sequence[Peer], config: BenchConfig, *, target: Target, ceilings: Ceilings | None = None,
             arithmetic: Callable[[DType], Round] | None = None, seed: int = 0, rng: random.Random | None = None,
             clock: Clock = time.perf_counter, watch: Watch = watch_machine,
             pause: Callable[[], None] = lambda: time.sleep(SPIN_DOWN_SECONDS), place: Place = placed,
             refer: Callable[[Case, Sequence[Array]], Result] = reference) -> CaseResult:
    """Run one case. `contestants` are svod's own (named as in `results.SVOD`) and peers. `refer` computes the reference of the results.
    `arithmetic` makes a loop of bare arithmetic on a type, which is timed along with kernels that arithmetic limits; without it their
    bound comes from `ceilings` alone."""
    run = _CaseRun(case, contestants, seed, refer)
    if case.limit is not None:
        config = replace(config, rounds=min(config.rounds, LIMIT_ROUNDS), case_seconds=min(config.case_seconds, LIMIT_SECONDS))
    flops, read, written = _work(case, run.outcomes)
    bound = ceilings.bound(((BY_NAME[case.dtype], flops),), read, written, target) if ceilings is not None else None
    bare = arithmetic(BY_NAME[case.dtype]) if arithmetic is not None and bound is not None and bound.by == COMPUTE else None
    if bare is not None:
        run.add_beside(ARITHMETIC, PreparedPeer(bare.run, lambda: np.empty(0), True))
    timing = run.time(config, rng or random.Random(seed), clock=clock, watch=watch, pause=pause, place=place)
    samples = dict(zip(run.ready, timing.seconds, strict=True)) if timing is not None else {}
    if bound is not None and bare is not None and ARITHMETIC in samples:
        bound = bound_beside(bound, flops, bare.flops / statistics.median(samples[ARITHMETIC]))
    timed = [Timed(o, samples.get(o.name)) for o in run.outcomes]
    result = judge_case(name=case.name, title=case.title, suite=case.suite, group=case.group, dtype=case.dtype, shapes=case.shapes,
                        flops=flops, bytes_read=read, bytes_written=written, bound=bound, timed=timed,
                        load=load_of(timing.load) if timing is not None else None)
    if case.neighbour is not None and NEIGHBOUR in samples:
        return replace(result, neighbour=neighbour_of(result, case.work, case.neighbour.name, case.neighbour.title, case.neighbour.work,
                                                      samples[NEIGHBOUR]))
    return replace(result, neighbour=run.neighbour)


class _CaseRun:
    """The contestants of a case: prepared and checked with several copies (placements) of their operands, then timed.

    `ready` has the contestants to time, by name, in the first placement, `moved` in the others. `outcomes` has the results so far."""

    def __init__(self, case: Case, contestants: Sequence[Peer], seed: int, refer: Callable[[Case, Sequence[Array]], Result]) -> None:
        operands = case.draw(seed)
        wanted = refer(case, operands)
        self.limit = case.limit
        self.ready: dict[str, PreparedPeer] = {}
        self.outcomes: list[ContestantResult] = []
        self.neighbour: Neighbour | None = None
        for peer in contestants:
            prepared, outcome = _prepare(peer, case, operands, wanted)
            identity = None if prepared is None else prepared.identity
            same = next((n for n, p in self.ready.items() if identity is not None and p.identity == identity), None)
            self.outcomes.append(outcome if same is None else replace(outcome, same_as=same))
            if prepared is not None and same is None:
                self.ready[peer.name] = prepared
        self.moved = []
        for _ in range(0 if case.alone else PLACEMENTS - 1):
            again = case.draw(seed)
            self.moved.append({p.name: _elsewhere(p, case, again, wanted, self.ready[p.name]) for p in contestants if p.name in self.ready})
        if case.neighbour is not None:
            places, self.neighbour = _prepare_neighbour(case.neighbour, contestants, self.outcomes, seed)
            for there, prepared in zip((self.ready, *self.moved), places, strict=False):
                there[NEIGHBOUR] = prepared

    def add_beside(self, name: str, prepared: PreparedPeer) -> None:
        """Add work that does not compete, such as the round neighbour's, to the rounds, if any contestant is ready."""
        if self.ready:
            for there in (self.ready, *self.moved):
                there[name] = prepared

    def time(self, config: BenchConfig, rng: random.Random, *, clock: Clock, watch: Watch, pause: Callable[[], None],
             place: Place) -> CaseTiming | None:
        """Time all ready contestants. Returns None if none is left. If one fails, it is dropped and the others start again."""
        while set(self.ready).difference(BESIDE):
            names = list(self.ready)
            lead = next((names.index(n) for n in reversed(SVOD) if n in self.ready), 0)
            placements = [[_contestant(n, there[n]) for n in names] for there in (self.ready, *self.moved)]
            try:
                return time_interleaved(placements[0], lead, config, beside=[i for i, n in enumerate(names) if self._is_beside(n)],
                                        elsewhere=placements[1:], rng=rng, clock=clock, watch=watch, pause=pause, place=place,
                                        limit=self.limit)
            except _BrokeError as e:
                self._drop(e)
        return None

    def _is_beside(self, name: str) -> bool:
        """Whether a contestant is timed along without competing: it does other work, or the same in a lower precision."""
        return name in BESIDE or bool(self.ready[name].precision)

    def _drop(self, e: _BrokeError) -> None:
        del self.ready[e.name]
        if e.name == NEIGHBOUR and self.neighbour is not None:
            self.neighbour = replace(self.neighbour, why=e.why)
        self.outcomes = [ContestantResult(o.name, "failed", e.why, remark=o.remark, kernels=o.kernels, prepare_seconds=o.prepare_seconds,
                                          search_seconds=o.search_seconds) if e.name in (o.name, o.same_as) else o for o in self.outcomes]


def run_suite(cases: Sequence[Case], contestants: Sequence[Peer], peers: Sequence[PeerInfo], settings: RunSettings, config: BenchConfig, *,
              target: Target, ceilings: Ceilings | None = None, arithmetic: Callable[[DType], Round] | None = None,
              started: Callable[[int, Case], None] = lambda i, case: None,
              finished: Callable[[Run], None] = lambda so_far: None, clock: Clock = time.perf_counter,
              watch: Watch = watch_machine, place: Place = placed, alone: Alone | None = None, known: Sequence[CaseResult] = ()) -> Run:
    """Run cases one after the other. `started` is called before each case, `finished` with the run so far after each. `alone` makes the
    contestants that run in separate processes. `known` are earlier results, which are kept, except that new results
    of `cases` replace them. If a case cannot run at all, every contestant counts as failed. Ctrl-C ends the suite; the run then has the
    finished cases. Raises KeyboardInterrupt if there are none."""
    begin, seen = clock(), watch()
    measured: dict[str, CaseResult] = {c.name: c for c in known}

    def so_far() -> Run:
        results = list(measured.values())
        return Run(replace(settings, seconds=clock() - begin), machine_of(target), versions(target.device), load_of(seen()), ceilings,
                   tuple(peers), tuple(results), group_results(results), suite_results(results))
    try:
        for i, case in enumerate(cases):
            started(i, case)
            entrants = contestants
            try:
                if case.alone:
                    assert alone is not None, "whole models run in processes of their own"
                    with alone.entered(case) as entrants:
                        result = run_case(case, entrants, config, target=target, ceilings=ceilings, seed=settings.seed,
                                          watch=alone.watch, pause=alone.pause, place=alone.place, refer=alone.reference)
                else:
                    children: AbstractContextManager[list[Peer]] = nullcontext([]) if alone is None else alone.entered(case)
                    with children as apart:
                        entrants = [*contestants, *apart]
                        result = run_case(case, entrants, config, target=target, ceilings=ceilings, arithmetic=arithmetic,
                                          seed=settings.seed, clock=clock, watch=alone.watch if alone is not None and apart else watch,
                                          place=place)
            except Exception as e:      # no operands, no reference, or not enough memory: the other cases must not be lost
                result = _failed_case(case, entrants, _words(e))
            measured.pop(case.name, None)       # removed first, so that the newest result is the last one
            measured[case.name] = result
            finished(so_far())
    except KeyboardInterrupt:
        if not measured:
            raise
    return so_far()


def load_of(load: MachineLoad) -> Load:
    """Convert a MachineLoad to a Load, the class of the results."""
    return Load(load.load_average, load.steal, load.foreign, load.involuntary_switches, load.busy)


class _BrokeError(Exception):
    """A contestant failed while it was timed."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name, self.why = name, why


def _named(name: str, run: Callable[[int], object]) -> Callable[[int], None]:
    """Wrap `run`, so that its errors name the contestant."""
    def guarded(times: int) -> None:
        try:
            run(times)
        except Exception as e:      # other libraries raise errors of any type: each becomes a result
            raise _BrokeError(name, f"while it was timed: {_words(e)}") from e
    return guarded


def _contestant(name: str, prepared: PreparedPeer) -> Contestant:
    """The contestant to time. An error that it raises names it."""
    if prepared.contestant is None:
        return Contestant(_named(name, prepared.run), name)
    return _Guarded(prepared.contestant, name)


class _Guarded(Contestant):
    """A contestant that takes its own samples, wrapped so that its errors name it."""

    inner: Contestant

    def __init__(self, inner: Contestant, name: str) -> None:
        super().__init__(_named(name, inner.run), name, inner.unit)
        object.__setattr__(self, "inner", inner)

    def sample(self, repeats: int, warm: float | None, clock: Clock) -> float:
        """Take a sample with the wrapped contestant."""
        seconds: list[float] = []
        _named(self.name, lambda times: seconds.append(self.inner.sample(times, warm, clock)))(repeats)
        return seconds[0]


def _words(e: Exception) -> str:
    return str(e) if isinstance(e, SvodError) else f"{type(e).__name__}: {' '.join(str(e).split()):.200}"


def _prepare_neighbour(case: Case, contestants: Sequence[Peer], outcomes: Sequence[ContestantResult],
                       seed: int) -> tuple[list[PreparedPeer], Neighbour]:
    """Prepare the best svod contestant on `case`, a round neighbour, in each placement. If it cannot be timed, for example because svod
    failed on the case itself, the list is empty and the Neighbour tells why."""
    working = [c for c in contestants if any(o.name == c.name and o.status == "ok" for o in outcomes)]
    svod = next((c for n in reversed(SVOD) for c in working if c.name == n), None)
    if svod is None:
        return [], Neighbour(case.name, case.title, None, None, "svod has no time to compare")
    operands = case.draw(seed)
    wanted = reference(case, operands)
    first, outcome = _prepare(svod, case, operands, wanted)
    places = [] if first is None else [first, *(_elsewhere(svod, case, case.draw(seed), wanted, first) for _ in range(PLACEMENTS - 1))]
    return places, Neighbour(case.name, case.title, None, None, outcome.why)


def _elsewhere(peer: Peer, case: Case, operands: Sequence[Array], wanted: Result, first: PreparedPeer) -> PreparedPeer:
    """Prepare the contestant of `first` on other operands. Returns `first` itself if that fails or results in other code."""
    again, _ = _prepare(peer, case, operands, wanted, first.again or peer.prepare)
    return again if again is not None and again.identity == first.identity else first


def _failed_case(case: Case, contestants: Sequence[Peer], why: str) -> CaseResult:
    timed = [Timed(ContestantResult(c.name, "failed", why), None) for c in contestants]
    return judge_case(name=case.name, title=case.title, suite=case.suite, group=case.group, dtype=case.dtype, shapes=case.shapes,
                      flops=case.flops, bytes_read=case.bytes_read, bytes_written=case.bytes_written, bound=None, timed=timed, load=None)


def _prepare(peer: Peer, case: Case, operands: Sequence[Array], wanted: Result,
             prepare: Prepare | None = None) -> tuple[PreparedPeer | None, ContestantResult]:
    """The prepared contestant, or None if it must not be timed, and its outcome so far. `prepare` replaces the peer's own function."""
    try:
        prepared = (prepare or peer.prepare)(case, operands)
        prepared.run(1)
        error = difference(prepared.output(), wanted, case.out_dtype)
    except UnsupportedError as e:
        return None, ContestantResult(peer.name, "unsupported", str(e))
    except Exception as e:      # other libraries raise errors of any type: each becomes a result
        return None, ContestantResult(peer.name, "failed", _words(e))
    outcome = ContestantResult(peer.name, "ok", preallocated=prepared.preallocated, error=error if error < float("inf") else None,
                               remark=prepared.remark, kernels=prepared.kernels, prepare_seconds=prepared.prepare_seconds,
                               search_seconds=prepared.search_seconds, precision=prepared.precision)
    tolerance = max(case.tolerance, LOWER_TOLERANCE) if prepared.precision else case.tolerance
    if error <= tolerance:
        return prepared, outcome
    other = "the reference" if case.alone else "NumPy"
    why = f"the result differs from {other}'s by {error:.1e} of the largest value; {tolerance:g} is allowed"
    return None, replace(outcome, status="wrong", why=why)


def _work(case: Case, outcomes: Sequence[ContestantResult]) -> tuple[float, float, float]:
    """Flops, bytes read and bytes written of a direct loop nest; for a model, the sums over the kernels of svod's plan."""
    if case.flops or not (case.alone or case.op == "model"):
        return case.flops, case.bytes_read, case.bytes_written
    kernels = next((o.kernels for o in outcomes if o.kernels), ())
    moved = sum(k.bytes or 0 for k in kernels)
    return float(sum(k.flops or 0 for k in kernels)), max(0.0, moved - case.bytes_written), case.bytes_written
