"""Runs of cases with made-up clocks and contestants, independent of the machine's speed."""
from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from svod.bench.ceiling_loops import Round
from svod.bench.load import MachineLoad
from svod.bench.peers import Array, PreparedPeer
from svod.bench.results import CaseResult, KernelInfo, PeerInfo, Run, RunSettings
from svod.bench.runner import SLOW_ROUNDS, CaseTiming, run_case, run_suite, time_interleaved
from svod.bench.suites import cases as kinds
from svod.bench.suites.cases import Case
from svod.bench.suites.reference import reference
from svod.bench.summary import PLACEMENTS
from svod.bench.timer import Contestant
from svod.compile.cpu.host import host_target
from svod.config import BenchConfig
from svod.core.ir.dtype import DType, dtypes
from svod.errors import ShapeError, UnsupportedError
from tests.bench.example_run import CEILINGS

CASE = kinds.axpy("axpy", "axpy of 100", 100)
SETTINGS = RunSettings("svod-bench run", "core", "*", "db-only", None, False, 0, "2026-01-01T00:00:00Z", 0.0)
CONFIG = BenchConfig(rounds=15, case_seconds=1.0, precision=0.01, min_sample=200.0)


class World:
    """A clock that advances only when a contestant runs, and a record of the runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []
        self.pauses = 0

    def clock(self) -> float:
        return self.now

    def pause(self) -> None:
        self.pauses += 1
        self.now += 1e-3

    def watch(self) -> Callable[[], MachineLoad]:
        return lambda: MachineLoad(1.0, 0.0, 0.0, 0, 0.5)

    def contestant(self, name: str, seconds: Callable[[], float]) -> Contestant:
        def run(times: int) -> None:
            self.ran.append(name)
            self.now += sum(seconds() for _ in range(times))
        return Contestant(run, name)


class FakePeer:
    """A peer that takes a given time, and returns the right result unless told otherwise."""

    version, outputs = "1", "preallocated"

    def __init__(self, world: World, name: str, seconds: float = 1e-3, *, wrong: bool = False, error: Exception | None = None,
                 identity: object = None, kernels: tuple[KernelInfo, ...] = ()) -> None:
        self.world, self.name, self.seconds, self.wrong, self.error = world, name, seconds, wrong, error
        self.identity, self.kernels = identity, kernels

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        if self.error is not None:
            raise self.error
        result = reference(case, operands).astype(case.out_dtype)
        if self.wrong:
            result = result + 1
        contestant = self.world.contestant(self.name, lambda: self.seconds)
        return PreparedPeer(contestant.run, lambda: result, True, identity=self.identity, kernels=self.kernels, prepare_seconds=0.5)


def anywhere(contestants: Sequence[Contestant], pause: Callable[[], None]) -> AbstractContextManager[None]:
    """A placement without effect, because made-up contestants have no threads."""
    return nullcontext()


def run(world: World, *peers: FakePeer, case: Case = CASE, arithmetic: Callable[[DType], Round] | None = None) -> CaseResult:
    return run_case(case, peers, CONFIG, target=host_target(), ceilings=CEILINGS, arithmetic=arithmetic, clock=world.clock,
                    watch=world.watch, pause=world.pause, place=anywhere)


# -- interleaving -------------------------------------------------------------------------------------

def timed(world: World, *contestants: Contestant, config: BenchConfig = CONFIG) -> CaseTiming:
    return time_interleaved(contestants, 0, config, rng=random.Random(0), clock=world.clock, watch=world.watch, pause=world.pause,
                            place=anywhere)


@pytest.mark.parametrize("breaks", [False, True])
def test_all_are_timed_where_they_are_placed(breaks: bool) -> None:
    world, said = World(), list[str]()

    @contextmanager
    def place(contestants: Sequence[Contestant], pause: Callable[[], None]) -> Iterator[None]:
        said.append(" ".join(c.name for c in contestants))
        assert not world.ran
        try:
            yield
        finally:
            said.append("free" if world.ran else "nothing ran")

    def seconds() -> float:
        if breaks and len(world.ran) > 20:
            raise RuntimeError("no")
        return 1e-3
    here, there = ([world.contestant(n, seconds) for n in names] for names in ("ab", "cd"))
    with pytest.raises(RuntimeError, match="no") if breaks else nullcontext():
        time_interleaved(here, 0, CONFIG, elsewhere=[there], rng=random.Random(0), clock=world.clock, watch=world.watch, pause=world.pause,
                         place=place)
    assert said == ["a b c d", "free"]


def test_rounds_are_interleaved_and_paused() -> None:
    world = World()
    contestants = [world.contestant(n, lambda: 1.1e-3) for n in "abc"]
    timing = timed(world, *contestants)
    assert [len(s) for s in timing.seconds] == [15, 15, 15] and timing.precise
    assert all(s == pytest.approx(1.1e-3) for row in timing.seconds for s in row)
    assert world.pauses == 48, "before each calibration and each sample"
    runs = len(world.ran) // world.pauses
    assert runs >= 24 and len(world.ran) == runs * world.pauses, "for 25 ms untimed, then the sample"
    turns = [set(world.ran[i:i + runs]) for i in range(0, len(world.ran), runs)]
    orders = {tuple(name for turn in turns[i:i + 3] for name in turn) for i in range(3, len(turns), 3)}
    assert all(sorted(o) == ["a", "b", "c"] for o in orders) and len(orders) > 1


def test_goes_on_until_the_ratio_is_known_or_time_is_spent() -> None:
    world, rng = World(), random.Random(1)
    contestants = [world.contestant("svod", lambda: 1e-3), world.contestant("peer", lambda: 1e-3 * rng.uniform(0.8, 1.2))]
    timing = timed(world, *contestants, config=BenchConfig(rounds=15, case_seconds=6.0, precision=1e-4))
    assert len(timing.seconds[0]) > 100 and not timing.precise
    assert 6.0 <= world.now < 6.3


def test_slow_contestants_sit_out() -> None:
    world = World()
    contestants = [world.contestant("svod", lambda: 1e-3), world.contestant("fast", lambda: 2e-3), world.contestant("slow", lambda: 0.5)]
    timing = timed(world, *contestants)
    assert [len(s) for s in timing.seconds] == [15, 15, SLOW_ROUNDS]
    # the lead is never dropped, however slow it is
    contestants = [world.contestant("svod", lambda: 0.5), world.contestant("fast", lambda: 1e-3)]
    timing = timed(world, *contestants)
    assert [len(s) for s in timing.seconds] == [15, 15]


def test_slow_is_who_never_was_fast() -> None:
    """First runs may be slow for many reasons, later ones not: only a contestant that was never fast is dropped."""
    world = World()
    start = iter([60e-3] * 8)
    timing = timed(world, world.contestant("svod", lambda: 1e-3), world.contestant("peer", lambda: next(start, 2e-3)))
    assert [len(s) for s in timing.seconds] == [15, 15]


def test_who_is_close_is_told_by_the_medians_so_far() -> None:
    """A peer whose first call was slow is the fastest: rounds continue until the ratio to it is known, not only the ratio to the steady
    one."""
    world, rng = World(), random.Random(2)
    first = iter([30e-3, 30e-3])
    fast = world.contestant("fast", lambda: next(first, 0.5e-3 * rng.uniform(0.7, 1.3)))
    timing = timed(world, world.contestant("svod", lambda: 1e-3), world.contestant("steady", lambda: 1e-3), fast,
                   config=BenchConfig(rounds=15, case_seconds=6.0))
    assert len(timing.seconds[0]) > 50


def test_nothing_to_time_is_an_error() -> None:
    world = World()
    with pytest.raises(ValueError, match="nothing"):
        timed(world)


# -- a case -------------------------------------------------------------------------------------------

def test_figures_of_a_case() -> None:
    world = World()
    result = run(world, FakePeer(world, "heuristic", 2e-3, identity="h"), FakePeer(world, "tuned", 1e-3, identity="t"),
                 FakePeer(world, "numpy", 4e-3), FakePeer(world, "torch", 1.5e-3))
    assert result.best_peer == "torch" and result.noisy is None and result.precise and result.rounds == 15
    tuned, heuristic = result.outcome("tuned"), result.outcome("heuristic")
    assert tuned is not None and heuristic is not None and result.svod is tuned
    assert tuned.median == pytest.approx(1e-3) and tuned.minimum == pytest.approx(1e-3) and tuned.spread == pytest.approx(0, abs=1e-9)
    assert {n: round(s.median, 6) for n, s in tuned.speedups.items()} == {"heuristic": 2.0, "numpy": 4.0, "torch": 1.5}
    assert {n: round(s.median, 6) for n, s in heuristic.speedups.items()} == {"tuned": 0.5, "numpy": 2.0, "torch": 0.75}
    assert result.outcome("numpy").speedups == {}  # type: ignore[union-attr]
    assert result.bound is not None and result.bound.by == "l2"       # 1,200 bytes
    assert tuned.ceiling_share == pytest.approx(result.bound.seconds / 1e-3) and tuned.prepare_seconds == 0.5


def test_what_is_wrong_is_not_timed() -> None:
    world = World()
    result = run(world, FakePeer(world, "heuristic"), FakePeer(world, "numpy", wrong=True))
    numpy = result.outcome("numpy")
    assert numpy is not None and numpy.status == "wrong" and numpy.samples == () and "differs from NumPy" in numpy.why
    assert result.best_peer is None and world.ran.count("numpy") == 1


@pytest.mark.parametrize(("error", "status", "words"), [
    (UnsupportedError("no erf"), "unsupported", "no erf"),
    (ShapeError("it does not fit"), "failed", "it does not fit"),
    (RuntimeError("the library\nbroke"), "failed", "RuntimeError: the library broke"),
])
def test_what_does_not_run_is_said(error: Exception, status: str, words: str) -> None:
    world = World()
    result = run(world, FakePeer(world, "heuristic"), FakePeer(world, "torch", error=error))
    torch = result.outcome("torch")
    assert torch is not None and (torch.status, torch.why) == (status, words)
    assert result.outcome("heuristic").status == "ok"  # type: ignore[union-attr]


def test_all_may_fail() -> None:
    world = World()
    result = run(world, FakePeer(world, "heuristic", error=RuntimeError("no")))
    assert result.svod is None and result.rounds == 0 and result.load is None and result.best_peer is None


def test_the_same_code_is_timed_once() -> None:
    world = World()
    result = run(world, FakePeer(world, "heuristic", identity=("k", ())), FakePeer(world, "tuned", identity=("k", ())),
                 FakePeer(world, "numpy", 3e-3))
    tuned = result.outcome("tuned")
    assert tuned is not None and tuned.same_as == "heuristic" and tuned.median == pytest.approx(1e-3)
    assert set(tuned.speedups) == {"numpy"} and set(result.outcome("heuristic").speedups) == {"numpy"}  # type: ignore[union-attr]
    assert world.ran.count("tuned") == 1          # one run, which checks the result


def test_work_of_a_model_is_that_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    kernels = (KernelInfo("a", "", "", (), "heuristic", "", 1000, 3000), KernelInfo("b", "", "", (), "heuristic", "", 500, 2000))
    case = kinds.model("mlp", "perceptron", "mlp", "Perceptron", (64, 256), (64, 10))
    result = run(world, FakePeer(world, "heuristic", kernels=kernels), case=case)
    assert result.flops == 1500 and result.bytes_read + result.bytes_written == 5000 and result.bytes_written == 64 * 10 * 4


# -- a suite ------------------------------------------------------------------------------------------

def suite_of(world: World, cases: Sequence[Case], *peers: FakePeer, **listeners: Any) -> Run:
    return run_suite(cases, peers, [PeerInfo("numpy", "1", None, 2, "")], SETTINGS, CONFIG, target=host_target(), clock=world.clock,
                     watch=world.watch, place=anywhere, **listeners)


@pytest.mark.slow
def test_a_suite_is_one_run() -> None:
    world = World()
    said: list[str] = []
    cases = [kinds.axpy("a", "", 10), kinds.gelu("b", "", 7)]
    found = suite_of(world, cases, FakePeer(world, "heuristic"), FakePeer(world, "numpy", 2e-3),
                     started=lambda i, c: said.append(f"{i} {c.name}"), finished=lambda r: said.append(f"done {r.cases[-1].name}"))
    assert said == ["0 a", "done a", "1 b", "done b"]
    assert [c.name for c in found.cases] == ["a", "b"] and found.settings.seconds > 0
    mean = found.groups[0]
    assert mean.name == "elementwise" and mean.cases == {"heuristic/numpy": 2, "heuristic/best peer": 2}
    assert mean.speedups["heuristic/numpy"] == pytest.approx(2.0)


def test_an_interrupted_suite_keeps_what_is_done() -> None:
    world = World()

    class Impatient(FakePeer):
        def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
            if case.name == "b":
                raise KeyboardInterrupt
            return super().prepare(case, operands)
    cases = [kinds.axpy("a", "", 10), kinds.gelu("b", "", 7)]
    found = suite_of(world, cases, Impatient(world, "heuristic"))
    assert [c.name for c in found.cases] == ["a"]
    with pytest.raises(KeyboardInterrupt):
        suite_of(world, cases[1:], Impatient(world, "heuristic"))


def test_operands_are_the_same_for_everyone() -> None:
    world = World()
    seen: list[list[Array]] = []

    class Looking(FakePeer):
        def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
            seen.append(list(operands))
            return super().prepare(case, operands)
    run(world, Looking(world, "heuristic"), Looking(world, "numpy"))
    assert len(seen) == 2 * PLACEMENTS
    for own, others in zip(seen[::2], seen[1::2], strict=True):
        assert all(a is b for a, b in zip(own, others, strict=True)) and np.array_equal(own[0], CASE.draw(0)[0])
    first = [operands[0].ctypes.data for operands in seen[::2]]
    assert len(set(first)) == PLACEMENTS, "each placement lies elsewhere"


class Placed(FakePeer):
    """A peer that takes 0.1 ms more in each placement of the cases called `name`, from 1.1 ms on."""

    def __init__(self, world: World, name: str, case: Case) -> None:
        super().__init__(world, name, 1e-3)
        self.case, self.places = case, 0

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        prepared = super().prepare(case, operands)
        self.places += case.name == self.case.name
        taken = self.seconds + 0.1e-3 * (self.places if case.name == self.case.name else 0)
        return replace(prepared, run=self.world.contestant(self.name, lambda: taken).run)


def test_where_operands_lie_is_part_of_the_spread() -> None:
    """All rounds of a placement are equal: without the placements, the interval would have no width."""
    world = World()
    found = run(world, FakePeer(world, "heuristic", 1e-3), Placed(world, "numpy", CASE)).contestants[0].speedups["numpy"]
    assert (found.median, found.low, found.high) == pytest.approx((1.2, 1.1, 1.3))


def test_other_code_elsewhere_is_not_timed() -> None:
    """A second preparation may lead to other code. Then the first preparation is timed everywhere, as also if the second fails."""
    world, prepared = World(), 0

    class Searched(FakePeer):
        def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
            nonlocal prepared
            prepared += 1
            slower = FakePeer(world, self.name, 9e-3, identity="other")
            return replace(super().prepare(case, operands), again=slower.prepare)

    class Once(FakePeer):
        def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
            if self.identity:
                raise UnsupportedError("once only")
            self.identity = "used"
            return replace(super().prepare(case, operands), identity=None)
    result = run(world, Searched(world, "tuned", 1e-3, identity="found"), Once(world, "numpy", 2e-3))
    assert prepared == 1
    own, other = (o.samples for o in result.contestants)
    assert own == pytest.approx([1e-3] * len(own)) and other == pytest.approx([2e-3] * len(other))


# -- neighbours, and what breaks ------------------------------------------------------------------------

ODD = replace(CASE, suite="odd", neighbour=kinds.axpy("round", "axpy of 128", 128))


def test_a_neighbour_is_timed_in_the_same_rounds() -> None:
    """Only svod's best contestant runs the neighbour as well as the case."""
    world = World()
    tuned = FakePeer(world, "tuned", 1e-3, identity="t")
    found = run(world, FakePeer(world, "heuristic", 2e-3, identity="h"), tuned, FakePeer(world, "numpy", 4e-3), case=ODD)
    assert found.neighbour is not None and (found.neighbour.name, found.neighbour.title) == ("round", "axpy of 128")
    assert found.neighbour.rate is not None and found.neighbour.rate.median == pytest.approx(100 / 128)
    assert found.best_peer == "numpy" and [o.name for o in found.contestants] == ["heuristic", "tuned", "numpy"]
    alone = run(world, FakePeer(world, "heuristic", error=RuntimeError("no")), FakePeer(world, "numpy"), case=ODD)
    assert alone.neighbour is not None and alone.neighbour.rate is None and "svod has no time" in alone.neighbour.why


def test_a_neighbour_lies_in_as_many_places_as_the_case() -> None:
    assert ODD.neighbour is not None
    world = World()
    svod = Placed(world, "tuned", ODD.neighbour)
    found = run(world, svod, case=ODD).neighbour
    assert svod.places == PLACEMENTS and found is not None and found.rate is not None
    assert (found.rate.median, found.rate.low, found.rate.high) == pytest.approx(tuple(100 / 128 * x for x in (1.2, 1.1, 1.3)))


def test_a_neighbour_is_no_competitor() -> None:
    """The neighbour is far faster than all contestants. Peers are still compared with each other, and the ratio to it has to be known as
    well."""
    world, rng = World(), random.Random(3)
    contestants = [world.contestant("svod", lambda: 0.2), world.contestant("peer", lambda: 0.2),
                   world.contestant("beside", lambda: 1e-3 * rng.uniform(0.7, 1.3))]
    timing = time_interleaved(contestants, 0, BenchConfig(rounds=15, case_seconds=20.0), beside=[2], rng=random.Random(0),
                              clock=world.clock, watch=world.watch, pause=world.pause, place=anywhere)
    assert len(timing.seconds[1]) == len(timing.seconds[2]) > 20


@pytest.mark.slow
def test_arithmetic_takes_part_in_the_rounds_of_what_it_limits() -> None:
    """If a machine becomes half as fast after its ceilings were measured, arithmetic slows down as well, and the share stays the same.
    If the arithmetic cannot be run, only it is dropped; kernels limited by memory are compared with their traffic."""
    gemm = kinds.matmul("gemm", "GEMM 64", (64, 64), (64, 64))
    bound = run(world := World(), FakePeer(world, "tuned"), case=gemm).bound
    assert bound is not None and bound.by == "compute"
    for slower in (1.0, 2.0):
        world, asked = World(), list[DType]()

        def arithmetic(dtype: DType, world: World = world, slower: float = slower, asked: list[DType] = asked) -> Round:
            asked.append(dtype)
            return Round(world.contestant("bare", lambda: slower * 1e-4).run, 1e-4 * bound.flops_per_second)
        found = run(world, FakePeer(world, "tuned", slower * 2 * bound.seconds), FakePeer(world, "numpy", 9 * bound.seconds), case=gemm,
                    arithmetic=arithmetic)
        assert asked == [dtypes.float32] and world.ran.count("bare") >= CONFIG.rounds and found.svod is not None
        assert found.svod.ceiling_share == pytest.approx(0.5) and found.bound is not None
        assert found.bound.flops_per_second == pytest.approx(bound.flops_per_second / slower)
        assert [o.name for o in found.contestants] == ["tuned", "numpy"] and found.best_peer == "numpy"
        run(world, FakePeer(world, "tuned"), arithmetic=arithmetic)
        assert len(asked) == 1

    def broken(times: int) -> None:
        raise OSError("no")
    world = World()
    found = run(world, FakePeer(world, "tuned", 2 * bound.seconds), case=gemm, arithmetic=lambda dtype: Round(broken, 1.0))
    assert found.svod is not None and found.svod.ceiling_share == pytest.approx(0.5)


class Breaking(FakePeer):
    """A peer that runs twice, for the check and the warm-up, and then always fails."""

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        prepared, left = super().prepare(case, operands), [2]

        def run(times: int) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("it fell over")
            prepared.run(times)
        return replace(prepared, run=run)


@pytest.mark.slow
def test_what_breaks_while_it_is_timed_leaves_the_others() -> None:
    world = World()
    found = run(world, FakePeer(world, "heuristic", identity="h"), Breaking(world, "torch"), FakePeer(world, "numpy", 2e-3))
    torch = found.outcome("torch")
    assert torch is not None and torch.status == "failed" and torch.why == "while it was timed: RuntimeError: it fell over"
    assert not torch.samples and found.best_peer == "numpy" and found.rounds == 15
    copied = run(world, Breaking(world, "heuristic", identity="h"), FakePeer(world, "tuned", identity="h"), FakePeer(world, "numpy"))
    assert {o.name: o.status for o in copied.contestants} == {"heuristic": "failed", "tuned": "failed", "numpy": "ok"}
    assert run(world, Breaking(world, "heuristic")).svod is None


def test_a_case_that_cannot_be_run_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(kinds, "MODELS_DIR", kinds.MODELS_DIR / "none")
    monkeypatch.setattr(kinds, "_models", {})
    cases = [kinds.model("mlp", "perceptron", "mlp", "Perceptron", (64, 256), (64, 10)), kinds.gelu("b", "", 7)]
    found = suite_of(world, cases, FakePeer(world, "heuristic"), FakePeer(world, "numpy", 2e-3))
    assert [{o.status for o in c.contestants} for c in found.cases] == [{"failed"}, {"ok"}]
    assert "from a checkout" in found.cases[0].contestants[0].why and found.cases[0].svod is None
    assert [(s.name, s.cases) for s in found.suites] == [("models", 1), ("core", 1)]
