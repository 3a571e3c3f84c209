"""Tuning of kernels with variables: the sizes at which they are verified and timed, rejected candidates, and stored results."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from svod import BeamConfig, BenchConfig, PrepareConfig, Tensor, Variable
from svod.bench.race import VOID_REPEATS
from svod.bench.roofline import Ceilings
from svod.cli.db.commands import cli
from svod.compile.cpu.host import host_target
from svod.compile.plan.plan_parts import VariableSpec
from svod.core.ir.serialize import ast_to_data
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.prepare import prepare_graph
from svod.tune.db import Measurement, TuningDB
from svod.tune.db.winners import rejection
from svod.tune.measure import work
from svod.tune.measure.candidate import Candidate, Origin, Status
from svod.tune.measure.context import KernelContext, Setup
from svod.tune.measure.measurer import Confirmed, Failure, RaceResult
from svod.tune.measure.sizes import at_size, geometric_mean, merged_sizes, sizes_of_variables, sizes_to_verify
from svod.tune.measure.worker_measurer import RESTLESS_REPEATS, WorkerMeasurer
from svod.tune.resolved import resolve
from svod.tune.session import KernelTask, TuneSession, bound_at
from svod.tune.workers.executor import InlineExecutor
from svod.tune.workers.jobs import Outcome
from tests.tune.db.samples import confirmed
from tests.tune.replay import ReplayedMeasurer
from tests.tune.sessions import Rounds, replayed_session

TARGET = host_target(2)
NONE = PrepareConfig(db=":none:", object_cache=":none:")
N, M = Variable("n", 1, 40), Variable("m", 1, 24)


def kernel_of(t: Tensor) -> Kernel:
    [kernel] = prepare_graph([t.uop], resolve(NONE)).unbound.kernels.values()
    return kernel


def doubled(n: Any = N, rows: int = 40) -> Kernel:
    return kernel_of(Tensor(np.ones((rows, 24), np.float32))[:n] * 2)


KERNEL = doubled()
TWO = kernel_of(Tensor(np.ones((40, 24), np.float32))[:N, :M] * 2)


def test_sizes_are_hints_or_the_ends_and_the_middle() -> None:
    assert sizes_of_variables([VariableSpec("n", 1, 512)]) == ((1,), (256,), (512,))
    assert sizes_of_variables([VariableSpec("n", 1, 512, (7, 64))]) == ((7,), (64,))
    assert sizes_of_variables([VariableSpec("n", 3, 4), VariableSpec("m", 1, 9)]) == ((3, 1), (4, 5), (3, 9))
    assert merged_sizes(KERNEL, []) == ((1,), (20,), (40,)), "of its own bounds where nobody says"
    calls = [[VariableSpec("a", 1, 40, (5,))], [VariableSpec("b", 1, 37, (9, 5))], [VariableSpec("c", 1, 40)]]
    assert merged_sizes(KERNEL, calls) == ((1,), (5,), (20,), (40,)), "at most four, the least and the largest among them"
    assert merged_sizes(at_size(KERNEL, (7,)), calls) == ((),)


def test_what_is_verified_stands_beside_the_amounts() -> None:
    base = Scheduler(KERNEL, TARGET)
    assert sizes_to_verify(base) == ((1,), (40,))
    tiled = apply_opts(base, [Opt("UPCAST", "o0", 4), Opt("TILE", "o0", 4)])
    assert {s for (s,) in sizes_to_verify(tiled)} == {1, 40, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17}, "half tiles, too"
    assert {s for (s,) in sizes_to_verify(apply_opt(base, Opt("UPCAST", "o1", 8)))} == {1, 40}, "of an axis of 24 nothing depends on n"
    both = apply_opts(Scheduler(TWO, TARGET), [Opt("UPCAST", "o0", 5), Opt("UPCAST", "o1", 8)])
    sizes = sizes_to_verify(both)
    assert [set(column) for column in zip(*sizes, strict=True)] == [{1, 40, 2, 3, 4, 5, 6}, {1, 24, 3, 4, 5, 7, 8, 9}]
    assert sizes[:2] == ((1, 1), (40, 24))


def test_a_program_that_is_right_at_one_size_only_is_wrong() -> None:
    context = work.verify_candidate_setup(Setup(ast_to_data(KERNEL.ast), TARGET))
    built = work.compile_candidate(([["UPCAST", "o0", 4]], False), context)
    sizes = sizes_to_verify(apply_opt(Scheduler(KERNEL, TARGET), Opt("UPCAST", "o0", 4)))
    verdict = work.verify_candidate((built, None, sizes, 10.0), context)
    assert verdict.right and verdict.how.endswith("at v0 = 1 40 2 4 3 5")
    # a program for the largest size writes too much at every other size
    whole = work.compile_candidate(([], False), KernelContext(Setup(ast_to_data(at_size(KERNEL, (40,)).ast), TARGET)))
    whole = replace(whole, spec=replace(whole.spec, variables=("v0",)), digest="whole")
    assert work.verify_candidate((whole, built, [(40,)], 10.0), context).right
    verdict = work.verify_candidate((whole, built, [(40,), (39,)], 10.0), context)
    assert verdict.right is False
    assert verdict.reason == "at v0=39: output 0 was changed between the parts that the kernel writes (integers)"


def test_times_are_geometric_means_over_the_sizes() -> None:
    context = work.race_candidates_setup(Setup(ast_to_data(KERNEL.ast), TARGET, ((1,), (40,))))
    built = [work.compile_candidate((chain, False), context) for chain in ([], [["UPCAST", "o1", 8]])]
    screened, seconds, repeats = work.screen_candidate((built[0], None, False), context)
    assert screened.samples == (pytest.approx(geometric_mean(seconds)),) and len(repeats) == 2
    more, least = work.sample_candidate((built[0], 1.0, seconds, repeats, 3), context)
    assert len(more.samples) == 3 and all(a <= b for a, b in zip(least, seconds, strict=True))
    race, ratios = work.race_candidates(([(b, 1.0) for b in built], 4, 0, 0), context)
    assert ratios[0] == [1.0, 1.0] and race.ratios == pytest.approx([1.0, geometric_mean(ratios[1])])
    first, second = work.confirm_candidates((built, 6, 1.0, 0.0, 0, 1.0), context)
    assert [s[0] for s in second.sizes] == [(1,), (40,)] and first.worst == 1.0 and second.worst == max(r for _, _, r in second.sizes)
    assert len(second.samples) >= 6 and first.ratio == 1.0


def test_a_finalist_that_cannot_win_leaves_a_race_at_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    context = work.confirm_candidates_setup(Setup(ast_to_data(KERNEL.ast), TARGET, ((1,), (40,))))
    built = [work.compile_candidate((chain, False), context) for chain in ([], [["UPCAST", "o1", 8]], [["UPCAST", "o1", 4]])]
    raced: list[int] = []

    def confirm(contestants: Sequence[Any], *, min_rounds: int, **_: Any) -> Any:
        """Rounds in which the second finalist is alternately 1 % faster and slower than the first, and the third takes 2 times as long as
        the first at one size and 8 times at the other."""
        raced.append(len(contestants))
        slow = 2.0 if len(raced) % 2 else 8.0
        extra = 0 if min_rounds > 1 else 2 + len(raced) % 2         # the sizes get different numbers of rounds
        rounds = [(1.0, 0.99 + 0.02 * (r % 2), slow)[:len(contestants)] for r in range(min_rounds + extra)]
        return SimpleNamespace(rounds=rounds, noisy=None)
    monkeypatch.setattr(work, "confirm", confirm)
    first, second, third = work.confirm_candidates((built, 6, 1e-9, 0.05, 0, 1.05), context)
    assert raced[:4] == [3, 3, 2, 2] and set(raced[2:]) == {2}
    assert len(third.samples) == 6 < len(first.samples) == len(second.samples) == 6 + 3 * (len(raced) // 2 - 1)
    assert third.ratio == pytest.approx(4.0, rel=0.02) and [r for _, _, r in third.sizes] == pytest.approx([2.0, 8.0], rel=0.02)


def slow_at(ratio: float) -> list[dict[str, Any]]:
    return [{"at": {"v0": 1}, "seconds": 1e-6, "ratio": ratio}, {"at": {"v0": 40}, "seconds": 1e-5, "ratio": 0.3}]


class Sized(ReplayedMeasurer):
    """A measurer whose confirmations show all candidates but the heuristic as slow at one size."""

    worst = 1.5

    def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Confirmed | Failure]:
        found = super().confirm(candidates, seconds)
        return [replace(t, sizes=(((1,), 1e-6, 1.0 if c.origin is Origin.HEURISTIC else self.worst), ((40,), 1e-5, t.ratio)))
                for c, t in zip(candidates, found, strict=True) if isinstance(t, Confirmed)]


@pytest.mark.parametrize("worst", [1.15, 1.25])
def test_a_chain_that_is_slow_at_one_size_is_refused(worst: float) -> None:
    assert (rejection(confirmed(0.5, host={"sizes": slow_at(worst)})) is None) == (worst <= 1.2)
    if worst > 1.2:
        reason = rejection(confirmed(0.5, host={"sizes": slow_at(worst)}))
        assert reason == "at v0=1 it takes 1.25 times the heuristic's time; 1.2 is allowed"
    measurer = Sized(seconds=lambda c: 1e-3 if c.origin is Origin.HEURISTIC else 0.5e-3)
    measurer.worst = worst
    with InlineExecutor() as executor, TuningDB.open(":none:") as db:
        result = replayed_session(db, executor, KERNEL, measurers={KERNEL.key: measurer}, target=TARGET, round_size=4).run()
        winner = db.winner(KERNEL.key, TARGET.key)
        assert winner is not None and (winner.ratio == 1.0) == (worst > 1.2), "the heuristic stays"
        assert (result.findings[KERNEL.key].source == "heuristic") == (worst > 1.2)
        assert all([s.at for s in m.sizes] == [{"v0": 1}, {"v0": 40}] for m, _ in db.select(Measurement) if m.step == "confirm")


@pytest.mark.parametrize("relative", [1.3, 1.4])
def test_a_race_drops_what_is_slow_at_one_size(relative: float) -> None:
    class Answering(WorkerMeasurer):
        def _run(self, job: str, items: Any, *args: Any) -> list[Outcome]:
            # the first takes 0.9 of the heuristic at both sizes, so at the first one the last takes `relative` of it
            asked.append(items[0][3])
            return [Outcome("ok", (RaceResult((1.0, 0.5), 1e-5, 0.0, noisy=True), [[1.0, 1.0], [relative / 0.9, 0.2]]))]
    asked: list[int] = []
    with InlineExecutor() as executor:
        measurer = Answering(KERNEL, TARGET, executor, BeamConfig(), sizes=((1,), (40,)))
    measurer.heuristic_linear, measurer.relative = "h", {"a": (0.9, 0.9)}
    state = Scheduler(KERNEL, TARGET)
    racers = [Candidate(state, (), Origin.SKETCH, linear=linear, seconds=1e-5) for linear in ("a", "b")]
    first, second = measurer.race(racers).ratios
    assert first == 1.0
    if relative > 1.32:
        assert isinstance(second, Failure) and second.status is Status.SLOW
        assert second.reason == "at v0=1 it takes 1.40 times the heuristic's time; 1.2 is allowed"
    else:
        assert second == 0.5
    measurer.race(racers)
    assert asked == [VOID_REPEATS, RESTLESS_REPEATS], "a machine that did not come to rest is not waited for again"


def test_what_takes_long_at_one_size_is_repeated_less_and_confirmed_in_fewer_rounds() -> None:
    class Listening(WorkerMeasurer):
        def _run(self, job: str, items: Any, *args: Any) -> list[Outcome]:
            asked[job] = items[0]
            return [Outcome("ok", (RaceResult((1.0, 1.0), 1e-2, 0.0), [[1.0, 1.0], [1.0, 1.0]]) if job == "race_candidates" else ())]
    asked: dict[str, Any] = {}
    racers = [Candidate(Scheduler(KERNEL, TARGET), (), Origin.SKETCH, linear=linear, seconds=1e-2) for linear in ("h", "a")]
    for heuristic, repeats, rounds in (((1e-2, 1e-2), VOID_REPEATS, 15), ((1e-3, 0.1), 1, 14)):
        with InlineExecutor() as executor:
            measurer = Listening(KERNEL, TARGET, executor, BeamConfig(), sizes=((1,), (40,)))
        measurer.heuristic_linear, measurer.heuristic = "h", heuristic
        measurer.race(racers)
        measurer.confirm(racers, 3.0)
        assert asked["race_candidates"][3] == repeats and asked["confirm_candidates"][1] == rounds


def test_the_bound_is_that_of_the_sizes() -> None:
    machine = replace(TARGET, l1=1, l2=1, l3=1)
    ceilings = Ceilings("t", 1, True, {"float32": (1e12, 1e12)}, {"memory": {"read": (1e9, 1e9), "copy": (1e9, 1e9)}}, (0.0, 0.0))
    bound = bound_at(KERNEL, ((1,), (4,)), machine, ceilings)
    assert bound is not None and bound.by == "memory"
    assert bound.seconds == pytest.approx(2 * 2 * 24 * 4 / 1e9), "bytes of two rows, the geometric mean of one and four"
    assert bound_at(KERNEL, ((1,), (4,)), machine, None) is None


def test_one_search_serves_every_length(tmp_path: Path) -> None:
    kernel = doubled(Variable("n", 1, 250), 250)
    db, target = tmp_path / "t.db", host_target()
    with InlineExecutor() as executor, TuningDB.open(str(db)) as opened:
        task = KernelTask(kernel, name="doubled", sizes=((3,), (200,)))
        result = TuneSession([task], target, executor=executor, db=opened, config=BeamConfig(width=1, round_size=1, runs=1, sketches=False,
                             timeout_sec=100.0), bench=BenchConfig(seconds=0.05), budget=Rounds(2)).run()
        assert result.findings[kernel.key].confirmed
        stored = [m for m, _ in opened.select(Measurement, kernel.key) if m.step == "confirm"]
        assert stored and all([s.at for s in m.sizes] == [{"v0": 3}, {"v0": 200}] for m in stored)
    x = np.arange(256 * 24, dtype=np.float32).reshape(256, 24)
    for most in (250, 256, 241):        # bounds that are widened alike
        plan = (Tensor(x[:most].copy())[:Variable("rows", 1, most)] * 2).prepare(PrepareConfig(db=str(db), object_cache=":none:"))
        assert [k.opts_source for k in plan.kernels] == ["database"]
        for n in (1, 31, 32, 33, most):
            plan.execute(rows=n)
            assert np.array_equal(plan.outputs[0].reshape(-1, 24)[:n], 2 * x[:n])
    assert "over 2 sizes" in CliRunner().invoke(cli, ["--db", str(db), "list"]).output
    shown = CliRunner().invoke(cli, ["--db", str(db), "show", "doubled"]).output
    assert "at        v0=3: " in shown and "at        v0=200: " in shown
