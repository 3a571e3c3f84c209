"""The beam without hardware: the candidates that it keeps, when it widens, and the chains that it finds."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from svod.config import BeamConfig
from svod.core.cost.cost import tiling_family
from svod.core.cost.cpu import cost_of
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.tune.db.winners import LEVEL_FACTOR
from svod.tune.measure.candidate import Candidate, Origin, Status
from svod.tune.measure.measurer import Confirmed, Failure
from svod.tune.search.actions import default_actions
from svod.tune.search.confirmation import finish
from svod.tune.search.kernel_search import HOPELESS, KernelSearch, SearchedKernel
from svod.tune.search.strategies.beam import Beam
from tests.draws import a_half
from tests.tune.replay import BASE, HEURISTIC, ReplayedMeasurer, made_up_seconds, make_search, raced, run
from tests.tune.search_kernels import TARGET, elementwise, gemm


# -- keeping ------------------------------------------------------------------------------------------------------------------
def some_states() -> list[Scheduler]:
    return [apply_opt(BASE, Opt("UPCAST", "o1", n)) for n in (2, 4, 8, 16, 32)]


def test_at_most_half_the_beam_comes_from_one_family() -> None:
    beam = Beam(BASE, BeamConfig(width=4))
    siblings = [raced(s, 1.0 + i, 1) for i, s in enumerate(some_states())]
    tiled = apply_opt(BASE, Opt("TILE", "o1", 16))
    others = [raced(apply_opt(tiled, Opt("UPCAST", "o0", n)), 10.0 + n, 1) for n in (2, 4, 8)]
    assert len({tiling_family(c.state) for c in siblings}) == len({tiling_family(c.state) for c in others}) == 1
    assert tiling_family(siblings[0].state) != tiling_family(others[0].state)
    kept = beam.select([*others, *siblings])
    assert [c.score for c in kept] == [1.0, 2.0, 12.0, 14.0]


def test_a_sketch_family_keeps_one_place_for_two_rounds() -> None:
    beam = Beam(BASE, BeamConfig(width=2))
    sketch = apply_opt(BASE, Opt("TILE", "o1", 16))
    slow = raced(sketch, 99.0, 1)
    slow.origin = Origin.SKETCH
    beam.seed([slow])
    others = [apply_opt(BASE, Opt("UPCAST", "o0", 2)), apply_opt(BASE, Opt("UNROLL", "r0", 2))]
    plain = [raced(s, 1.0 + i, 1) for i, s in enumerate([*some_states(), *others])]
    for number, present in [(1, True), (2, True), (3, False)]:
        beam.round = number
        assert (slow in beam.select([slow, *plain])) is present
        assert beam.select([slow, *plain])[0] is plain[0]


def test_a_sketch_is_raced_though_its_sample_was_unlucky() -> None:
    """The best state of a protected family is raced, and as many more sketches of it as the beam is wide. States that were proposed have no
    such protection."""
    beam = Beam(BASE, BeamConfig(width=2))
    sketches = [Candidate(s, s.applied_opts, Origin.SKETCH, seconds=50.0 + i) for i, s in enumerate(some_states()[:4])]
    derived = Candidate(some_states()[4], (), Origin.ACTION, seconds=50.5)
    proposed = [Candidate(s, s.applied_opts, Origin.ACTION, seconds=10.0 + i) for i, s in enumerate(
        apply_opt(BASE, Opt("UPCAST", "o0", n)) for n in (2, 4, 8, 16, 32))]
    beam.seed(sketches)
    beam.round = 1
    assert tiling_family(derived.state) == tiling_family(sketches[0].state) != tiling_family(proposed[0].state)
    assert beam.racers([*sketches, derived, *proposed]) == [*proposed[:4], *sketches[:3]]
    beam.round = 3
    assert beam.racers([*sketches, derived, *proposed]) == proposed[:4]


def test_sketches_are_at_most_as_many_racers_as_others() -> None:
    """The best sketch of each family comes before a second one of any family."""
    beam = Beam(BASE, BeamConfig(width=1))
    tiled = [apply_opt(BASE, Opt("TILE", *at)) for at in (("o0", 16), ("o1", 16), ("r0", 16))]
    families = [Candidate(s, s.applied_opts, Origin.SKETCH, seconds=90.0 + i) for i, s in enumerate(tiled)]
    same = [Candidate(s, s.applied_opts, Origin.SKETCH, seconds=50.0 + i) for i, s in enumerate(some_states()[:3])]
    proposed = [Candidate(s, s.applied_opts, Origin.ACTION, seconds=10.0 + i) for i, s in enumerate(
        apply_opt(BASE, Opt("UPCAST", "o0", n)) for n in (2, 4))]
    beam.seed([*families, *same])
    beam.round = 1
    assert len({tiling_family(c.state) for c in (*families, *same)}) == 4
    assert beam.racers([*families, *same, *proposed]) == [*proposed, same[0], families[0]]


def test_a_beam_of_one_keeps_the_best() -> None:
    beam = Beam(BASE, BeamConfig(width=1))
    sketch = raced(apply_opt(BASE, Opt("TILE", "o1", 16)), 99.0, 1)
    sketch.origin = Origin.SKETCH
    beam.seed([sketch])
    beam.round = 1
    plain = raced(some_states()[0], 1.0, 1)
    assert beam.select([sketch, plain]) == [plain]


def test_older_states_stay_in_the_beam() -> None:
    beam = Beam(BASE, BeamConfig(width=2))
    old, new = raced(some_states()[0], 1.0, 1), raced(some_states()[1], 2.0, 5)
    beam.round = 5
    assert beam.select([new, old])[0] is old


def test_the_shorter_of_two_chains_to_one_state_is_kept() -> None:
    beam = Beam(BASE, BeamConfig(width=2))
    there_and_back = apply_opt(apply_opt(BASE, Opt("SWAP", "o0", "o1")), Opt("SWAP", "o0", "o1"))
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
    (4.1, 8, 10),      # nearly all are behind: the least number of best predictions, and a fifth at random
    (4.0, 8, 20),      # none is behind: a full round
    (4.1, 7, 20),      # too few candidates were measured to tell which are behind: a full round
])
def test_what_is_clearly_behind_is_not_tried_but_for_a_random_fifth(behind: float, measured: int, taken: int) -> None:
    """Eight measured candidates took 1, 2, … seconds, as predicted: with a beam of width 1 the four fastest define that predictions above 4
    are behind."""
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
    states = [apply_opt(BASE, o) for o in default_actions(BASE, 16) if o.op in ("UPCAST", "TILE")][:20]
    seeds = [Candidate(BASE, (), Origin.UNTOUCHED), *(Candidate(s, s.applied_opts, Origin.SKETCH) for s in states)]
    taken = beam.seed(seeds)
    assert len(taken) == 4 and taken[0] is seeds[0]
    assert beam.queued == len(seeds) - 4
    best = {f: min(c.predicted for c in seeds if tiling_family(c.state) == f) for f in {tiling_family(s) for s in states}}
    assert sorted(c.predicted for c in taken[1:]) == sorted(best.values())[:3]
    assert not {c.digest for c in taken} & set(beam.queue)


def test_an_untouched_kernel_that_is_hopeless_is_not_run_where_there_are_other_seeds() -> None:
    large = gemm(512, 512, 512)
    base = Scheduler(large, TARGET)
    good = apply_opts(base, [Opt("UPCAST", "o1", 32), Opt("UPCAST", "o0", 6)])
    assert cost_of(base).cycles > HOPELESS * cost_of(good).cycles
    for seeds, run_ in (([(apply_opt(base, Opt("UPCAST", "o1", 16)), Origin.SKETCH)], False), ([], True)):
        measurer = ReplayedMeasurer()
        search = KernelSearch(SearchedKernel("key", "gemm", base, good, seeds), BeamConfig(width=2, round_size=8), measurer)
        search.step()
        search.step()
        assert (base.digest.hex() in measurer.done("lower")) is run_


def test_a_round_of_seeds_alone_is_no_round_without_a_gain() -> None:
    seeds = [(apply_opt(BASE, Opt("TILE", "o1", n)), Origin.SKETCH) for n in (2, 4, 8, 16, 32)]
    seeds += [(apply_opt(BASE, Opt("TILE", "o0", n)), Origin.SKETCH) for n in (2, 4, 8)]
    search = run(make_search(ReplayedMeasurer(seconds=lambda c: 1e-3), seeds=seeds))
    assert search.why == "2 rounds without a gain"
    assert len(search.history) == 4


# -- widening -----------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_does_what_a_narrow_one_does_and_then_more(seed: int) -> None:
    """A wide beam begins with the same lowerings, builds, timings, races and verdicts, in the same order, and its result is no worse."""
    seeds = [(apply_opt(BASE, Opt("TILE", "o1", n)), Origin.SKETCH) for n in (2, 4, 8, 16, 32)]
    traces: dict[int, list[Any]] = {}
    best, ends = {}, {}
    for width in (1, 4, 6, 8):
        measurer = ReplayedMeasurer(lambda c: made_up_seconds(c) * len(c.chain) ** -0.2 if c.chain else 2e-3)
        search = run(make_search(measurer, width=width, round_size=6, seed=seed, seeds=seeds), 60)
        assert search.finished and search.widened == max(0, (width - 1).bit_length() - 2)
        traces[width], best[width] = list(measurer.trace), search.lead.best
        ends[width] = finish(search).seconds
    for narrow, wide in ((4, 6), (4, 8)):
        assert traces[wide][:len(traces[narrow])] == traces[narrow] and len(traces[wide]) > len(traces[narrow])
        assert best[wide] <= best[narrow]
        assert ends[wide] <= ends[narrow] * LEVEL_FACTOR, "of level winners the shorter is taken"


@pytest.mark.slow
def test_what_a_wider_beam_takes_in_was_raced_before_and_is_verified() -> None:
    search = make_search(ReplayedMeasurer(), width=8, round_size=6)
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
    search = make_search(ReplayedMeasurer(), width=16, round_size=6)
    run(search, 3)
    beam = search.strategy
    assert isinstance(beam, Beam) and not search.widened
    beam.queue.clear()
    for member in beam.members:
        member.expanded = True
    search.step()
    assert search.widened == 1 and not search.finished and len(beam.members) == 8


@pytest.mark.slow
def test_widening_and_the_bound_and_the_budget() -> None:
    """At the bound a beam does not widen, and a spent budget ends a wide beam as it ends a narrow one."""
    search = run(make_search(ReplayedMeasurer(seconds=lambda c: 1e-3), width=8, bound=0.96e-3))
    assert search.why == "at the roofline bound" and not search.widened
    search = make_search(ReplayedMeasurer(), width=8)
    run(search, 3)
    assert finish(search).confirmed and search.why == "budget spent"


@pytest.mark.parametrize("spent, left, asked", a_half([
    (100.0, 100.0, 3.0), (10.0, 100.0, 2.0), (1.0, 100.0, 1.0), (100.0, 2.0, 1.25), (100.0, 0.0, 0.5)]))
def test_a_confirmation_has_what_building_its_finalists_leaves(spent: float, left: float, asked: float) -> None:
    now = [0.0]
    times: list[float] = []

    class Timed(ReplayedMeasurer):
        def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Confirmed | Failure]:
            times.append(seconds)
            return super().confirm(candidates, seconds)
    measurer = Timed()
    search = run(make_search(measurer), 3)
    search.spent, search.clock = spent, lambda: now[0]
    measurer.clock = lambda seconds: now.__setitem__(0, 0.25)      # all finalists together
    finish(search, 3.0, deadline=left)
    assert times == [asked]


# -- the reference systems' rules ---------------------------------------------------------------------------------------------
def test_strict_reference_stops_after_one_flat_round_and_forgets_older_states() -> None:
    search = run(make_search(ReplayedMeasurer(seconds=lambda c: 1e-3), strict="reference"))
    assert len(search.history) == 2
    beam = Beam(BASE, BeamConfig(width=2, strict="reference"))
    old, new = raced(some_states()[0], 1.0, 1), raced(some_states()[1], 2.0, 5)
    beam.round = 5
    assert beam.select([new, old]) == [new]


def test_strict_reference_is_as_wide_as_asked_for_at_once() -> None:
    search = run(make_search(ReplayedMeasurer(), width=8, strict="reference"))
    assert search.strategy.width == 8 and search.widened == 0


def test_strict_reference_measures_single_actions_and_all_of_them() -> None:
    beam = Beam(BASE, BeamConfig(width=2, strict="reference", round_size=1))
    beam.members = [Candidate(HEURISTIC, HEURISTIC.applied_opts, Origin.HEURISTIC)]
    chosen = beam.propose()
    assert len(chosen) > 2
    assert beam.queued == 0
    assert all(c.origin is Origin.ACTION and len(c.chain) == 2 for c in chosen)


# -- an easy landscape is climbed ---------------------------------------------------------------------------------------------
def test_without_mutations_chains_only_grow() -> None:
    parent = apply_opts(BASE, [Opt("UPCAST", "o1", 8), Opt("UPCAST", "o0", 4)])
    proposed = {}
    for on in (True, False):
        beam = Beam(BASE, BeamConfig(width=2, mutations=on))
        beam.expand(raced(parent, 1.0, 1))
        proposed[on] = {c.chain for c in beam.queue.values()}
        assert all(c.origin is Origin.MUTATION or c.chain[:2] == parent.applied_opts for c in beam.queue.values())
    assert proposed[False] < proposed[True]
    assert all(len(chain) == 3 for chain in proposed[False]) and any(len(chain) < 3 for chain in proposed[True])


def test_the_beam_climbs_where_opts_pay_one_by_one() -> None:
    """States become faster with each of a register tile, a vector axis and threads: the search must find all three."""
    def seconds(c: Candidate) -> float:
        state = c.state
        t = 1e-3 * (0.5 if state.thread else 1.0)
        upcast = {row.name: row.extent for row in state.rows if row.role == "upcast"}
        for size in upcast.values():
            t *= 1.0 / min(size, 8) ** 0.5
        return t
    search = run(make_search(ReplayedMeasurer(seconds=seconds), width=4, round_size=24), rounds=10)
    assert search.lead.incumbent is not None
    ops = [o.op for o in search.lead.incumbent.chain]
    assert "THREAD" in ops
    assert ops.count("UPCAST") >= 2


def test_an_elementwise_kernel_has_enough_to_try() -> None:
    base = Scheduler(elementwise(1000), TARGET)
    heuristic = apply_opt(base, Opt("UPCAST", "o0", 16))
    search = KernelSearch(SearchedKernel("key", "relu", base, heuristic), BeamConfig(width=2), ReplayedMeasurer())
    run(search)
    assert search.counts.timed > 10
