"""The search without hardware: a replayed laboratory, the real kernel states."""
from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from svod.config import BeamConfig
from svod.core.scheduler import Opt, Scheduler
from svod.tune.actions import default_actions
from svod.tune.beam import Beam
from svod.tune.candidate import Candidate, Origin, Status, chain_text
from svod.tune.db import Verdict, derive_winner
from svod.tune.db.winners import TIE
from svod.tune.events import CandidateDropped, Improved, KernelFinished, RoundFinished, SearchEvent
from svod.tune.laboratory import Confirmed, Failure, Lowered, Race
from svod.tune.search import FIRST_CHUNK, HOPELESS, KernelSearch
from svod.tune.strategy import STRATEGIES
from tests.tune.db.samples import confirmed, verdict
from tests.tune.replay import ReplayedLaboratory, is_failure, made_up_seconds
from tests.tune.search_kernels import TARGET, elementwise, gemm

KERNEL = gemm(48, 64, 40)
BASE = Scheduler(KERNEL, TARGET)
HEURISTIC = BASE.apply_opt(Opt("UPCAST", "o1", 16))


def make_search(lab: Any, *, width: int = 2, seeds: Sequence[tuple[Scheduler, Origin]] = (), known: Sequence[str] = (), bound: float = 0.0,
                heuristic: Scheduler = HEURISTIC, events: list[SearchEvent] | None = None, **options: Any) -> KernelSearch:
    config = BeamConfig(width=width, **{"round_size": 8, **options})
    heard: list[SearchEvent] = [] if events is None else events
    return KernelSearch("key", "gemm", BASE, heuristic, config, lab, seeds=seeds, known=frozenset(known), bound=bound,
                        listener=heard.append)


def run(search: KernelSearch, rounds: int = 20) -> KernelSearch:
    for _ in range(rounds):
        if search.finished:
            break
        search.step()
    return search


# -- the loop -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_ends_with_something_no_slower_than_the_heuristic(strategy: str) -> None:
    lab = ReplayedLaboratory()
    search = KernelSearch("key", "gemm", BASE, HEURISTIC, BeamConfig(width=2, round_size=8), lab, strategy_name=strategy)
    found = run(search).finish()
    assert search.finished
    assert found.verified and found.confirmed
    assert found.seconds <= found.heuristic_seconds
    assert found.seconds == min(made_up_seconds(c) for c, _ in search.confirmed)


def test_the_same_seed_gives_the_same_trace() -> None:
    traces = []
    for seed in (3, 3, 4):
        lab = ReplayedLaboratory()
        run(make_search(lab, seed=seed)).finish()
        traces.append(lab.trace)
    assert traces[0] == traces[1]
    assert traces[0] != traces[2]


def test_the_heuristic_is_timed_and_verified_before_anything_else() -> None:
    lab = ReplayedLaboratory()
    make_search(lab).step()
    digest = HEURISTIC.digest.hex()
    assert lab.trace == [(step, (digest,)) for step in ("lower", "build", "screen", "verify")]


def test_the_first_round_holds_the_untouched_kernel_and_all_seeds() -> None:
    stored = BASE.apply_opt(Opt("UPCAST", "o0", 4))
    sketch = BASE.apply_opt(Opt("TILE", "o1", 32))
    lab = ReplayedLaboratory()
    search = make_search(lab, seeds=[(stored, Origin.DATABASE), (sketch, Origin.SKETCH)])
    search.step()
    search.step()
    assert {BASE.digest.hex(), stored.digest.hex(), sketch.digest.hex()} <= set(lab.done("screen"))


def test_a_round_measures_at_most_its_size_and_queues_the_rest() -> None:
    lab = ReplayedLaboratory()
    events: list[SearchEvent] = []
    search = make_search(lab, width=2, round_size=8, events=events)
    search.step()
    search.step()
    rounds = [e for e in events if isinstance(e, RoundFinished)]
    assert rounds[0].proposed <= 2 * 8 + 1          # and the untouched kernel
    assert rounds[0].queued > 0
    search.step()
    assert len(lab.done("lower")) == len(set(lab.done("lower")))


def test_nothing_is_compiled_twice_even_where_states_differ() -> None:
    """Several states may end in the same LINEAR."""
    lab = ReplayedLaboratory(lowering=lambda c: Lowered(f"{c.digest[0] % 16:x}", 100, 1e6))
    search = run(make_search(lab))
    search.finish()
    assert len(lab.built) == len(set(lab.built)) <= 16
    assert search.counts.duplicate > 0


def test_what_the_database_knows_is_not_compiled_but_seeds_are() -> None:
    member = HEURISTIC.apply_opt(Opt("UPCAST", "o0", 4)).digest.hex()
    stored = BASE.apply_opt(Opt("UPCAST", "o0", 8))
    lab = ReplayedLaboratory()
    run(make_search(lab, known=[member, stored.digest.hex()], seeds=[(stored, Origin.DATABASE)]))
    assert member in lab.done("lower")
    assert member not in lab.done("build")
    assert stored.digest.hex() in lab.done("build")


# -- filters ------------------------------------------------------------------------------------------------------------------
def statuses(lab: ReplayedLaboratory, **options: Any) -> dict[str, Candidate]:
    """All candidates of the first two steps by digest."""
    seen: dict[str, Candidate] = {}
    search = make_search(lab, **options)
    search.record = lambda candidates: seen.update({c.digest.hex(): c for c in candidates})
    search.step()
    search.step()
    return seen


@pytest.mark.parametrize(("size", "kept"), [(2999, True), (3000, False), (3001, False)])
def test_uops_max_rejects_from_the_limit_on(size: int, kept: bool) -> None:
    lab = ReplayedLaboratory(lowering=lambda c: Lowered(c.digest.hex(), size, 1e6))
    seen = statuses(lab)
    assert seen.pop(HEURISTIC.digest.hex()).status is Status.VERIFIED      # it runs when all else fails
    assert all((c.status is not Status.LIMIT) is kept for c in seen.values())
    assert all(kept or "BEAM_UOPS_MAX" in c.reason for c in seen.values())


def test_uops_max_zero_is_no_limit() -> None:
    lab = ReplayedLaboratory(lowering=lambda c: Lowered(c.digest.hex(), 10**6, 1e6))
    assert all(c.status is not Status.LIMIT for c in statuses(lab, uops_max=0).values())


def test_bloat_is_judged_by_the_whole_round_and_exactly_1000_times_may_stay() -> None:
    """The leanest may come last; unknown work is exempt."""
    order: list[str] = []

    def lower(c: Candidate) -> Lowered:
        if c.digest == HEURISTIC.digest:
            return Lowered(c.digest.hex(), 100, 1.0)
        order.append(c.digest.hex())
        work = {0: 1000.0, 1: 1000.5, 2: None}.get(len(order) % 4, 1.0)
        return Lowered(c.digest.hex(), 100, work)
    seen = statuses(ReplayedLaboratory(lowering=lower))
    for n, digest in enumerate(order, start=1):
        limited = seen[digest].status is Status.LIMIT
        assert limited == (n % 4 == 1), seen[digest].reason


def test_accumulators_are_counted_in_vector_registers() -> None:
    lab = ReplayedLaboratory()
    seen = statuses(lab, upcast_max=1)
    over = [c for c in seen.values() if c.status is Status.LIMIT]
    assert over
    assert all("BEAM_UPCAST_MAX is 1" in c.reason for c in over)
    assert not {c.digest.hex() for c in over} & set(lab.done("lower"))


def test_the_compile_deadline_follows_the_median() -> None:
    lab = ReplayedLaboratory()
    search = make_search(lab, timeout_sec=10.0)
    assert search.compile_deadline == 10.0          # nothing is known yet
    for seconds, deadline in [(0.001, 1.0), (0.2, 4.0), (3.0, 10.0)]:
        search.compile_seconds = [seconds] * 3
        assert search.compile_deadline == pytest.approx(deadline)


# -- failures -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", ["lowering", "building", "running"])
@pytest.mark.parametrize("status", [Status.ERROR, Status.CRASH, Status.TIMEOUT, Status.LOST])
def test_a_candidate_that_fails_costs_itself_only(step: str, status: Status) -> None:
    failing = is_failure(status)
    lab = ReplayedLaboratory(**{step: lambda c: failing(c) if c.digest[0] % 2 and c.digest != HEURISTIC.digest else None})
    seen = statuses(lab)
    failed = [c for c in seen.values() if c.status is status]
    assert failed
    assert all(c.reason for c in failed)
    assert any(c.status in (Status.VERIFIED, Status.SCREENED, Status.RACED) for c in seen.values())


def test_a_kernel_whose_every_candidate_fails_gets_the_heuristic_and_says_so() -> None:
    search = run(make_search(ReplayedLaboratory(building=is_failure(Status.ERROR))))
    found = search.finish()
    assert found.chain == HEURISTIC.applied_opts
    assert found.source == "heuristic"
    assert not found.verified
    assert "every candidate failed" in found.why and "the table says error" in found.why


def test_an_end_before_anything_was_measured_is_no_failure_of_candidates() -> None:
    search = make_search(ReplayedLaboratory())
    search.stop("interrupted")
    found = search.result()
    assert not found.verified and found.why == "interrupted before anything was measured, the heuristic is used unverified"


def test_the_heuristic_may_fail_and_the_search_goes_on() -> None:
    failing = is_failure(Status.CRASH)
    search = run(make_search(ReplayedLaboratory(building=lambda c: failing(c) if c.digest == HEURISTIC.digest else None)))
    found = search.finish()
    assert found.verified
    assert found.source == "beam"


def test_without_sketches_the_heuristic_is_the_baseline_alone() -> None:
    """Nothing starts from it, it may be found again, and it is the answer where nothing faster is found."""
    lab = ReplayedLaboratory(seconds=lambda c: 1e-3 if c.digest == HEURISTIC.digest else 2e-3)
    search = make_search(lab, sketches=False)
    search.step()
    assert search.baseline.status is Status.VERIFIED and search.incumbent is None and not search.strategy.members
    assert search.result().source == "heuristic" and search.result().verified
    lab.built.clear()       # only here the same code may be compiled again
    search.step()
    first = [c for c in search.strategy.seen.values() if c.round <= 1]
    assert BASE.digest in {c.digest for c in first} and search.baseline not in search.pool
    assert search.incumbent is not None and search.incumbent.chain != HEURISTIC.applied_opts
    found = run(search).finish()
    assert found.source == "heuristic" and found.chain == HEURISTIC.applied_opts


def test_a_wrong_candidate_never_enters_the_beam_however_fast() -> None:
    def wrong(c: Candidate) -> bool:
        return c.digest[0] % 3 == 0 and c.digest != HEURISTIC.digest

    lab = ReplayedLaboratory(seconds=lambda c: made_up_seconds(c) * (1e-3 if wrong(c) else 1.0), wrong=wrong)
    events: list[SearchEvent] = []
    search = make_search(lab, events=events)
    wrongs = 0
    while not search.finished:
        search.step()
        wrongs += sum(c.status is Status.WRONG for c in search.strategy.seen.values())   # type: ignore[attr-defined]
        assert not any(wrong(c) for c in search.strategy.members)                        # type: ignore[attr-defined]
        assert search.incumbent is not None and not wrong(search.incumbent)
    found = search.finish()
    assert wrongs
    assert found.winner is not None and not wrong(found.winner)
    assert search.counts.wrong == len([e for e in events if isinstance(e, CandidateDropped) and e.status == "wrong"]) > 0


def test_what_the_passes_make_is_verified_again() -> None:
    lab = ReplayedLaboratory()
    search = run(make_search(lab))
    best = search.incumbent
    assert best is not None and best is not search.baseline
    lab.wrong = lambda c: c is best
    found = search.finish()
    assert found.winner is not best
    assert search.refuted == [best]
    assert found.verified


# -- keeping ------------------------------------------------------------------------------------------------------------------
def raced(beam: Beam, state: Scheduler, score: float, number: int) -> Candidate:
    c = Candidate(state, state.applied_opts, Origin.ACTION, round=number, status=Status.VERIFIED)
    c.seconds = c.score = score
    return c


def some_states() -> list[Scheduler]:
    return [BASE.apply_opt(Opt("UPCAST", "o1", n)) for n in (2, 4, 8, 16, 32)]


def test_at_most_half_the_beam_comes_from_one_family() -> None:
    beam = Beam(BASE, BeamConfig(width=4))
    siblings = [raced(beam, s, 1.0 + i, 1) for i, s in enumerate(some_states())]
    tiled = BASE.apply_opt(Opt("TILE", "o1", 16))
    others = [raced(beam, tiled.apply_opt(Opt("UPCAST", "o0", n)), 10.0 + n, 1) for n in (2, 4, 8)]
    assert len({c.state.family for c in siblings}) == len({c.state.family for c in others}) == 1
    assert siblings[0].state.family != others[0].state.family
    kept = beam.select([*others, *siblings])
    assert [c.score for c in kept] == [1.0, 2.0, 12.0, 14.0]


def test_a_sketch_family_keeps_one_place_for_two_rounds() -> None:
    beam = Beam(BASE, BeamConfig(width=2))
    sketch = BASE.apply_opt(Opt("TILE", "o1", 16))
    slow = raced(beam, sketch, 99.0, 1)
    slow.origin = Origin.SKETCH
    beam.seed([slow])
    others = [BASE.apply_opt(Opt("UPCAST", "o0", 2)), BASE.apply_opt(Opt("UNROLL", "r0", 2))]
    plain = [raced(beam, s, 1.0 + i, 1) for i, s in enumerate([*some_states(), *others])]
    for number, present in [(1, True), (2, True), (3, False)]:
        beam.round = number
        assert (slow in beam.select([slow, *plain])) is present
        assert beam.select([slow, *plain])[0] is plain[0]


def test_a_beam_of_one_keeps_the_best() -> None:
    beam = Beam(BASE, BeamConfig(width=1))
    sketch = raced(beam, BASE.apply_opt(Opt("TILE", "o1", 16)), 99.0, 1)
    sketch.origin = Origin.SKETCH
    beam.seed([sketch])
    beam.round = 1
    plain = raced(beam, some_states()[0], 1.0, 1)
    assert beam.select([sketch, plain]) == [plain]


def test_older_states_stay_in_the_beam() -> None:
    beam = Beam(BASE, BeamConfig(width=2))
    old, new = raced(beam, some_states()[0], 1.0, 1), raced(beam, some_states()[1], 2.0, 5)
    beam.round = 5
    assert beam.select([new, old])[0] is old


def test_the_shorter_of_two_chains_to_one_state_is_kept() -> None:
    beam = Beam(BASE, BeamConfig(width=2))
    there_and_back = BASE.apply_opt(Opt("SWAP", "o0", "o1")).apply_opt(Opt("SWAP", "o0", "o1"))
    assert there_and_back.digest == BASE.digest
    first = beam.offer(there_and_back, Origin.ACTION)
    assert first is not None
    assert beam.offer(BASE, Origin.ACTION) is None
    assert first.chain == ()


def test_a_fifth_of_a_round_is_random() -> None:
    chosen = []
    for seed in (1, 2):
        beam = Beam(BASE, BeamConfig(width=2, round_size=10, seed=seed))
        beam.members = [Candidate(BASE, (), Origin.UNTOUCHED)]
        chosen.append({c.digest for c in beam.propose()})
        assert len(chosen[-1]) == 20
    assert 16 <= len(chosen[0] & chosen[1]) < 20


@pytest.mark.parametrize(("behind", "measured", "taken"), [
    (4.1, 8, 10),      # few are not behind: the least that a round takes, and a fifth of the round at random
    (4.0, 8, 20),      # none is behind: a whole round
    (4.1, 7, 20),      # too few were measured to say
])
def test_what_is_clearly_behind_is_not_tried_but_for_a_random_fifth(behind: float, measured: int, taken: int) -> None:
    """Eight that took 1, 2, … as predicted: with a beam of one the four fastest say that more than 4 is behind."""
    beam = Beam(BASE, BeamConfig(width=1, round_size=20))
    for i in range(measured):
        beam.seen[bytes([i])] = Candidate(BASE, (), Origin.ACTION, predicted=1.0 + i, seconds=1.0 + i, samples=(1.0 + i,))
    beam.expand(Candidate(BASE, (), Origin.UNTOUCHED))
    assert len(beam.queue) > 30
    for i, c in enumerate(beam.queue.values()):
        c.predicted = 4.0 if i < 3 else behind
    chosen = beam.propose()
    assert len(chosen) == taken
    assert sum(c.predicted == 4.0 for c in chosen) >= 3


def test_sketches_that_the_first_round_has_no_room_for_are_queued_and_each_family_comes_first() -> None:
    beam = Beam(BASE, BeamConfig(width=2, round_size=2))
    states = [BASE.apply_opt(o) for o in default_actions(BASE, 16) if o.op in ("UPCAST", "TILE")][:20]
    seeds = [Candidate(BASE, (), Origin.UNTOUCHED), *(Candidate(s, s.applied_opts, Origin.SKETCH) for s in states)]
    taken = beam.seed(seeds)
    assert len(taken) == 4 and taken[0] is seeds[0]
    assert beam.queued == len(seeds) - 4
    best = {f: min(c.predicted for c in seeds if c.state.family == f) for f in {s.family for s in states}}
    assert sorted(c.predicted for c in taken[1:]) == sorted(best.values())[:3]
    assert not {c.digest for c in taken} & set(beam.queue)


def test_an_untouched_kernel_that_is_hopeless_is_not_run_where_there_are_other_seeds() -> None:
    large = gemm(512, 512, 512)
    base = Scheduler(large, TARGET)
    good = base.apply_opts([Opt("UPCAST", "o1", 32), Opt("UPCAST", "o0", 6)])
    assert base.features().cycles > HOPELESS * good.features().cycles
    for seeds, run_ in (([(base.apply_opt(Opt("UPCAST", "o1", 16)), Origin.SKETCH)], False), ([], True)):
        lab = ReplayedLaboratory()
        search = KernelSearch("key", "gemm", base, good, BeamConfig(width=2, round_size=8), lab, seeds=seeds)
        search.step()
        search.step()
        assert (base.digest.hex() in lab.done("lower")) is run_


def test_a_round_of_seeds_alone_is_no_round_without_a_gain() -> None:
    seeds = [(BASE.apply_opt(Opt("TILE", "o1", n)), Origin.SKETCH) for n in (2, 4, 8, 16, 32)]
    seeds += [(BASE.apply_opt(Opt("TILE", "o0", n)), Origin.SKETCH) for n in (2, 4, 8)]
    search = run(make_search(ReplayedLaboratory(seconds=lambda c: 1e-3), seeds=seeds))
    assert search.why == "2 rounds without a gain"
    assert len(search.history) == 4


# -- what races tell ----------------------------------------------------------------------------------------------------------
class NoisyLaboratory(ReplayedLaboratory):
    """Each race sees each candidate about 1 % too fast or too slow."""

    def race(self, candidates: Sequence[Candidate]) -> Race:
        true = super().race(candidates)
        rng = random.Random(len(self.trace))
        seen = [self.seconds(c) * math.exp(rng.gauss(0.0, 0.01)) for c in candidates]
        return Race(tuple(t / seen[0] for t in seen), true.anchor, 0.01)


@pytest.mark.parametrize("seed", range(6))
def test_luck_is_no_gain(seed: int) -> None:
    """All candidates are equal, and races are noisy: nothing that a search believes to have found keeps it going for long."""
    lab = NoisyLaboratory(lambda c: 1e-3)
    search = run(make_search(lab, width=4, round_size=6, seed=seed), 30)
    assert search.finished and len(search.history) <= 10


def test_a_gain_that_lasts_starts_patience_anew() -> None:
    """Every second round's proposals are 4 % faster than what was known before."""
    rounds: dict[str, int] = {}
    lab = NoisyLaboratory(lambda c: 1e-3 * 0.96 ** (rounds.setdefault(c.digest.hex(), c.round) // 2))
    assert len(run(make_search(lab, width=4, round_size=6), 14).history) == 14


def test_the_luck_of_races_does_not_add_up() -> None:
    """Sixteen rounds, each won by the luckiest of its race: the score stays within the luck of one."""
    errors = []
    for seed in range(2):
        lab = NoisyLaboratory(lambda c: 1e-3 * random.Random(c.digest).uniform(1.0, 1.1))
        search = run(make_search(lab, width=4, round_size=6, seed=seed, patience=100), 16)
        assert search.incumbent is not None
        errors.append(math.log(search.best / lab.seconds(search.incumbent)))
    assert min(errors) > -0.05 and -0.04 < statistics.fmean(errors) < 0.01


# -- widening -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_does_what_a_narrow_one_does_and_then_more(seed: int) -> None:
    """The same lowerings, builds, timings, races and verdicts, in the same order; nothing found is worse."""
    seeds = [(BASE.apply_opt(Opt("TILE", "o1", n)), Origin.SKETCH) for n in (2, 4, 8, 16, 32)]
    traces: dict[int, list[Any]] = {}
    best, ends = {}, {}
    for width in (1, 4, 6, 8):
        lab = ReplayedLaboratory(lambda c: made_up_seconds(c) * len(c.chain) ** -0.2 if c.chain else 2e-3)
        search = run(make_search(lab, width=width, round_size=6, seed=seed, seeds=seeds), 60)
        assert search.finished and search.widened == max(0, (width - 1).bit_length() - 2)
        traces[width], best[width] = list(lab.trace), search.best
        ends[width] = search.finish().seconds
    for narrow, wide in ((4, 6), (4, 8)):
        assert traces[wide][:len(traces[narrow])] == traces[narrow] and len(traces[wide]) > len(traces[narrow])
        assert best[wide] <= best[narrow]
        assert ends[wide] <= ends[narrow] * TIE, "of level winners the shorter is taken"


def test_what_a_wider_beam_takes_in_was_raced_before_and_is_verified() -> None:
    search = make_search(ReplayedLaboratory(), width=8, round_size=6)
    while not search.widened:
        search.step()
    beam = search.strategy
    assert isinstance(beam, Beam) and beam.width == 8 and len(beam.members) == 4
    before = set(beam.members)
    search.step()
    fresh = [c for c in beam.seen.values() if c.round == beam.round]
    assert len(beam.members) == 8 and before & set(beam.members)
    assert all(c.status is Status.VERIFIED for c in beam.members)
    assert len(fresh) > 4 * 6, "the round is as long as the beam is wide"


def test_a_beam_that_has_nothing_left_to_propose_widens() -> None:
    search = make_search(ReplayedLaboratory(), width=16, round_size=6)
    run(search, 3)
    beam = search.strategy
    assert isinstance(beam, Beam) and not search.widened
    beam.queue.clear()
    for member in beam.members:
        member.expanded = True
    search.step()
    assert search.widened == 1 and not search.finished and len(beam.members) == 8


def test_widening_and_the_bound_and_the_budget() -> None:
    """At the bound there is nothing to gain, and a spent budget ends a wide beam as it ends a narrow one."""
    search = run(make_search(ReplayedLaboratory(seconds=lambda c: 1e-3), width=8, bound=0.96e-3))
    assert search.why == "at the roofline bound" and not search.widened
    search = make_search(ReplayedLaboratory(), width=8)
    run(search, 3)
    assert search.finish().confirmed and search.why == "budget spent"


@pytest.mark.parametrize("left, asked", [(100.0, 3.0), (2.0, 1.5), (0.0, 0.5)])
def test_a_confirmation_has_what_building_its_finalists_leaves(left: float, asked: float) -> None:
    now = [0.0]
    times: list[float] = []

    class Timed(ReplayedLaboratory):
        def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Confirmed | Failure]:
            times.append(seconds)
            return super().confirm(candidates, seconds)
    lab = Timed()
    search = run(make_search(lab), 3)
    search.spent, search.clock = 100.0, lambda: now[0]
    lab.clock = lambda seconds: now.__setitem__(0, 0.25)      # all finalists together
    search.finish(3.0, deadline=left)
    assert times == [asked]


# -- ends ---------------------------------------------------------------------------------------------------------------------
def test_two_rounds_without_a_gain_end_the_search() -> None:
    search = run(make_search(ReplayedLaboratory(seconds=lambda c: 1e-3)))
    assert search.why == "2 rounds without a gain"
    assert len(search.history) == 3


def test_gains_below_the_noise_are_none() -> None:
    """Each round is half a percent faster than the one before, and the races are noisy by 2 %. Gains that add up to more are gains."""
    rounds: dict[str, int] = {}

    def seconds(c: Candidate) -> float:
        return 1e-3 * 0.995 ** rounds.setdefault(c.digest.hex(), c.round)
    assert len(run(make_search(ReplayedLaboratory(seconds=seconds, noise=0.02))).history) == 3
    rounds.clear()
    assert len(run(make_search(ReplayedLaboratory(seconds=seconds, noise=0.007)), rounds=6).history) == 6


def test_the_roofline_ends_the_search() -> None:
    search = run(make_search(ReplayedLaboratory(seconds=lambda c: 1e-3), bound=0.96e-3))
    assert search.why == "at the roofline bound"
    assert len(search.history) == 2


def test_a_spent_budget_returns_what_was_not_built_to_the_queue() -> None:
    now = [0.0]
    lab = ReplayedLaboratory()
    lab.clock = lambda seconds: now.__setitem__(0, now[0] + seconds)
    search = make_search(lab, width=4, round_size=24)
    search.clock = lambda: now[0]
    search.step()
    before = len(lab.built)
    search.step(deadline=now[0] + 0.5)
    assert FIRST_CHUNK < len(lab.built) - before <= 11, "0.05 s each: about ten fit"
    left = search.strategy.queued
    assert left > 0
    search.step()
    assert len(lab.built) == len(set(lab.built)) > before + 11


def test_an_interrupt_loses_the_round_in_flight_and_nothing_else() -> None:
    lab = ReplayedLaboratory()
    search = make_search(lab)
    search.step()
    search.step()
    best = search.best

    def interrupted(c: Candidate) -> Failure | None:
        raise KeyboardInterrupt
    lab.running = interrupted
    with pytest.raises(KeyboardInterrupt):
        search.step()
    found = search.result()
    assert found.verified and not found.confirmed
    assert found.seconds == best < found.heuristic_seconds


def test_level_finalists_are_decided_by_the_shorter_chain() -> None:
    """Longer chains are faster by 0.01 % an opt: that is within 0.3 %."""
    lab = ReplayedLaboratory()
    search = run(make_search(lab))
    lab.seconds = lambda c: 1e-3 * (1.0 if c is search.baseline else 0.5 - 0.00005 * len(c.chain))
    found = search.finish()
    lengths = [len(c.chain) for c, _ in search.confirmed if c is not search.baseline]
    assert found.winner is not None
    assert len(found.winner.chain) == min(lengths)


@pytest.mark.parametrize("gain, kept", [(0.0, True), (0.0035, True), (0.0045, False)])
def test_the_heuristic_is_kept_where_no_gain_is_sure(gain: float, kept: bool) -> None:
    """Intervals are ± 0.1 %: of a gain of 0.35 % 0.25 % are sure, which is level. The others have shorter chains."""
    lab = ReplayedLaboratory(lambda c: 1e-3 * (1 + 0.1 * len(c.chain)))
    search = run(make_search(lab, heuristic=BASE.apply_opts([Opt("TILE", "o1", 16), Opt("UPCAST", "o0", 4), Opt("UPCAST", "o1", 2)])))
    lab.seconds = lambda c: 1e-3 if c is search.baseline else (1 - gain) * 1e-3
    found = search.finish()
    assert min(len(c.chain) for c, _ in search.confirmed) < len(search.baseline.chain)
    assert (found.winner is search.baseline) is (found.source == "heuristic") is kept


@pytest.mark.parametrize("seed", range(6))
def test_what_a_search_finds_is_what_the_database_says(seed: int) -> None:
    lab = ReplayedLaboratory(width=0.002)
    search = run(make_search(lab, width=6))
    lab.seconds = lambda c: 1e-3 if c is search.baseline else 1e-3 * random.Random(f"{seed} {c.linear}").gauss(1 - 0.001 * seed, 0.002)
    found = search.finish()
    records = [confirmed(t.ratio, c.linear, chain=[o.to_json() for o in c.chain], ratio_low=t.low,
                         ratio_high=t.high, baseline_linear=search.baseline.linear) for c, t in search.confirmed]
    verdicts: list[Verdict] = [verdict(linear=m.linear) for m in records]
    won = derive_winner(random.Random(seed).sample(records, len(records)), verdicts, {})
    assert won is not None and won.linear == found.linear and won.own is (found.source == "heuristic")


def test_the_best_are_raced_side_by_side_before_the_finalists_are_chosen() -> None:
    """The best of thirteen had no luck in its races, and all others did; another one dies when it is run again."""
    lab = ReplayedLaboratory()
    search = run(make_search(lab, width=8))
    verified = sorted((c for c in search.pool if c.status is Status.VERIFIED and c is not search.baseline), key=lambda c: c.order)
    assert len(verified) >= 12
    best, dies = verified[9], verified[1]
    for i, c in enumerate(verified):
        c.score = 1e-3 * (1 + 1e-4 * i)
    lab.seconds = lambda c: 0.98e-3 if c is best else 1.05e-3
    race = lab.race

    def with_a_death(candidates: Sequence[Candidate]) -> Race:
        ratios = zip(candidates, race(candidates).ratios, strict=True)
        return Race(tuple(Failure(Status.CRASH, "died") if c is dies else r for c, r in ratios), 1e-3, 0.0)
    lab.race = with_a_death  # type: ignore[method-assign]
    found = search.finish()
    assert found.winner is best and dies.status is Status.CRASH
    assert dies not in search.pool and dies not in [c for c, _ in search.confirmed]


def test_other_families_have_finalists_as_passes_bring_some_code_more() -> None:
    """A family that is 20 % behind without passes is ahead with them; one that is 30 % behind is not looked at."""
    states = [BASE.apply_opt(Opt("UPCAST", "o1", n)) for n in (2, 4, 8, 16)]
    others = [BASE.apply_opts([Opt("TILE", "o1", 16), Opt("UPCAST", "o0", n)]) for n in (2, 4)]
    far = BASE.apply_opts([Opt("TILE", "o0", 8), Opt("UPCAST", "o1", 8)])
    lab = ReplayedLaboratory()
    search = make_search(lab)
    search.step()
    search.pool = [c for s, score in [*((s, 1e-3) for s in states), *((s, 1.2e-3) for s in others), (far, 1.3e-3)]
                   for c in [raced(Beam(BASE, BeamConfig()), s, score, 1)]]
    search.incumbent = search.pool[0]
    ahead = others[1].digest
    lab.race = lambda candidates: Race(tuple(c.score / candidates[0].score for c in candidates), 1e-3, 0.0)  # type: ignore[method-assign]
    search.pool[5].score = 1.19e-3
    lab.seconds = lambda c: 0.9e-3 if c.digest == ahead else 1e-3
    found = search.finish()
    assert found.winner is not None and found.winner.digest == ahead
    confirmed = [c.digest for c, _ in search.confirmed if c is not search.baseline]
    assert len(confirmed) == 4 and far.digest not in confirmed


def test_a_long_kernel_has_no_time_for_another_race_of_the_best() -> None:
    lab = ReplayedLaboratory(seconds=lambda c: 10 * made_up_seconds(c))
    search = run(make_search(lab, width=8))
    races = len([what for what, _ in lab.trace if what == "race"])
    search.finish(0.1)
    assert len([what for what, _ in lab.trace if what == "race"]) == races


def test_the_result_is_the_heuristic_where_nothing_beats_it_in_confirmation() -> None:
    lab = ReplayedLaboratory()
    search = run(make_search(lab))
    assert search.improved
    lab.seconds = lambda c: 1e-3 if c is search.baseline else 1.1e-3
    found = search.finish()
    assert found.source == "heuristic"
    assert found.chain == HEURISTIC.applied_opts
    assert found.speedup[1] == 1.0


def test_events_tell_the_story() -> None:
    events: list[SearchEvent] = []
    search = run(make_search(ReplayedLaboratory(), events=events))
    found = search.finish()
    assert [type(e).__name__ for e in events[:2]] == ["KernelStarted", "BaselineTimed"]
    gains = [e for e in events if isinstance(e, Improved)]
    assert all(e.seconds < e.before for e in gains)
    assert isinstance(events[-1], KernelFinished)
    assert events[-1].chain == chain_text(found.chain)
    assert sum(isinstance(e, RoundFinished) for e in events) == len(search.history) - 1


# -- the reference systems' rules ---------------------------------------------------------------------------------------------
def test_strict_reference_stops_after_one_flat_round_and_forgets_older_states() -> None:
    search = run(make_search(ReplayedLaboratory(seconds=lambda c: 1e-3), strict="reference"))
    assert len(search.history) == 2
    beam = Beam(BASE, BeamConfig(width=2, strict="reference"))
    old, new = raced(beam, some_states()[0], 1.0, 1), raced(beam, some_states()[1], 2.0, 5)
    beam.round = 5
    assert beam.select([new, old]) == [new]


def test_strict_reference_is_as_wide_as_asked_for_at_once() -> None:
    search = run(make_search(ReplayedLaboratory(), width=8, strict="reference"))
    assert isinstance(search.strategy, Beam) and search.strategy.width == 8 and search.widened == 0


def test_strict_reference_measures_single_actions_and_all_of_them() -> None:
    beam = Beam(BASE, BeamConfig(width=2, strict="reference", round_size=1))
    beam.members = [Candidate(HEURISTIC, HEURISTIC.applied_opts, Origin.HEURISTIC)]
    chosen = beam.propose()
    assert len(chosen) > 2
    assert beam.queued == 0
    assert all(c.origin is Origin.ACTION and len(c.chain) == 2 for c in chosen)


# -- an easy landscape is climbed ---------------------------------------------------------------------------------------------
def test_without_mutations_chains_only_grow() -> None:
    parent = BASE.apply_opts([Opt("UPCAST", "o1", 8), Opt("UPCAST", "o0", 4)])
    proposed = {}
    for on in (True, False):
        beam = Beam(BASE, BeamConfig(width=2, mutations=on))
        beam.expand(raced(beam, parent, 1.0, 1))
        proposed[on] = {c.chain for c in beam.queue.values()}
        assert all(c.origin is Origin.MUTATION or c.chain[:2] == parent.applied_opts for c in beam.queue.values())
    assert proposed[False] < proposed[True]
    assert all(len(chain) == 3 for chain in proposed[False]) and any(len(chain) < 3 for chain in proposed[True])


def test_the_beam_climbs_where_opts_pay_one_by_one() -> None:
    """Faster with every register tile, vector and thread: the search must find all three."""
    def seconds(c: Candidate) -> float:
        state = c.state
        t = 1e-3 * (0.5 if state.thread else 1.0)
        upcast = {row.name: row.extent for row in state.rows if row.role == "upcast"}
        for size in upcast.values():
            t *= 1.0 / min(size, 8) ** 0.5
        return t
    search = run(make_search(ReplayedLaboratory(seconds=seconds), width=4, round_size=24), rounds=10)
    assert search.incumbent is not None
    ops = [o.op for o in search.incumbent.chain]
    assert "THREAD" in ops
    assert ops.count("UPCAST") >= 2


def test_an_elementwise_kernel_has_enough_to_try() -> None:
    base = Scheduler(elementwise(1000), TARGET)
    heuristic = base.apply_opt(Opt("UPCAST", "o0", 16))
    search = KernelSearch("key", "relu", base, heuristic, BeamConfig(width=2), ReplayedLaboratory())
    run(search)
    assert search.counts.timed > 10
