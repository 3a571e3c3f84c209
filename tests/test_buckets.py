"""Variables with buckets: a kernel for each part of the range; a run uses the kernels for the part that contains the value."""
from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import svod
from svod import PrepareConfig, Tensor, Variable
from svod.compile.plan.memory_planner import PlannerMode
from svod.errors import ArgumentError, ScheduleError
from svod.prepare import prepare_graph
from svod.tune.measure.plan_sizes import plan_sizes, profile_at_sizes
from svod.tune.resolved import resolve
from tests.bench.test_analyze import LIMITS
from tests.draws import a_half

ROWS, COLUMNS, DEPTH = 37, 29, 13
NONE = PrepareConfig(db=":none:")


def drawn(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


A, B = drawn(ROWS, DEPTH), drawn(DEPTH, COLUMNS, seed=1)


def tensors(n: Any, m: Any) -> list[Tensor]:
    return [(Tensor(A)[:n] @ Tensor(B)[:, :m]).relu().sum(0), Tensor(A)[:n].exp().sum()]


def arrays(n: int, m: int) -> list[Any]:
    return [np.maximum(A[:n] @ B[:, :m], 0).sum(0), np.exp(A[:n]).sum()]


@pytest.mark.parametrize(("ends", "mode"), a_half([((8,), "arena"), ((1, 37), "disabled")]))
def test_every_value_is_computed_by_the_kernels_of_its_bucket(ends: tuple[int, ...], mode: PlannerMode) -> None:
    n, m = Variable("n", 1, ROWS, buckets=ends), Variable("m", 1, COLUMNS, buckets=(16,))
    plan = Tensor.prepare_batch(tensors(n, m), PrepareConfig(db=":none:", memory_planner=mode, threads=2))
    made, rng, seen = plan.every, random.Random(1), set()
    edges = [(e + d, rng.randint(1, COLUMNS)) for e in ends for d in (0, 1) if e + d <= ROWS]
    for i, j in [*edges, (1, 1), (ROWS, COLUMNS), (7, 16), (7, 17), (1, COLUMNS)]:
        plan.execute(n=i, m=j)
        for flat, want in zip(plan.outputs, arrays(i, j), strict=True):
            np.testing.assert_allclose(flat[:np.size(want)].reshape(np.shape(want)), want, rtol=1e-4, atol=1e-4, err_msg=f"n={i}, m={j}")
        assert all(v.bounds[0] <= {"n": i, "m": j}[v.name] <= v.bounds[1] for k in plan.kernels for v in k.variables)
        seen.add(plan.running)
    count = len(ends) + (ends[-1] < ROWS)
    assert plan.every is made, "nothing is compiled when a value is given"
    assert 2 * count == len(plan._runs._variants) and len(seen) > count
    assert sorted({i for v in plan._runs._variants for i in v.kernels}) == list(range(len(made)))
    again = plan.replicate()
    again.execute(n=3, m=2)
    np.testing.assert_allclose(again.outputs[1][:1], [np.exp(A[:3]).sum()], rtol=1e-4)
    assert plan.variable_values() == {"n": 1, "m": COLUMNS}


def test_each_bucket_is_a_kernel_of_its_own_with_a_chain_of_its_own() -> None:
    n = Variable("n", 1, 100, buckets=(32, 64), hint=(20, 70, 90))
    y = (Tensor(drawn(100, 8))[:n] * 2).prepare(NONE)
    assert len({k.key for k in y.every}) == 3 and len(y.kernels) == 1
    assert [k.variables[0].points for k in y.every] == [(20,), (33, 48, 64), (70, 90)], "hints of a bucket, else its ends and its middle"
    chosen = PrepareConfig(db=":none:", opts={y.every[1].key: [["UPCAST", "o1", 2]]})
    plan = (Tensor(drawn(100, 8))[:n] * 2).prepare(chosen)
    assert [k.opts_source for k in plan.every] == ["heuristic", "explicit", "heuristic"]
    for value, source in ((32, "heuristic"), (33, "explicit"), (64, "explicit"), (65, "heuristic")):
        plan.execute(n=value)
        assert [k.opts_source for k in plan.kernels] == [source]
        assert np.array_equal(plan.outputs[0].reshape(-1, 8)[:value], 2 * drawn(100, 8)[:value])
        assert len(plan.profile(1)) == len(plan.analyze(LIMITS).kernels) == 1
        assert len(svod.profile(plan, seconds=0.0, ceilings=LIMITS).kernels) == 1
    with plan.at({"n": 5}):
        assert plan.running == (0,)
    assert plan.running == (2,), "as before"
    assert all(s > 0 for s in profile_at_sizes(plan, 1)) and plan.variable_values() == {"n": 65}


def test_sizes_of_a_plan_reach_every_kernel() -> None:
    n, m = Variable("n", 1, 90, buckets=(30, 60)), Variable("m", 1, 40, buckets=(20,))
    plan = prepare_graph([(Tensor(drawn(90, 40))[:n, :m] * 2).uop], resolve(NONE)).plan
    calls = [k.variables for k in plan.every]
    sizes = plan_sizes(calls)
    assert len(calls) == 6
    assert all(any(all(v.bounds[0] <= s[v.name] <= v.bounds[1] for v in c) for s in sizes) for c in calls)
    assert plan_sizes([()]) == [{}]


def test_one_jitted_plan_for_all_buckets() -> None:
    n = Variable("n", 1, ROWS, buckets=(1, 16))
    f = svod.jit(lambda x, n: (x[:n] + 1).sum(0))
    for value in (1, 2, 16, 17, ROWS, 1):
        np.testing.assert_allclose(f(Tensor(A), n.bind(value)).numpy(), (A[:value] + 1).sum(0), rtol=1e-4)
    assert len(f.plans) == 1
    assert "n" not in {v for k in f.plans[0].kernels for v in k.spec.variables}, "a bucket of one value is a kernel of a constant shape"


@pytest.mark.parametrize("buckets", [(0, 5), (5, 5), (6, 4), (5, 11), (2.5,), "8", 7.0, (True,)])
def test_bad_buckets_are_named(buckets: Any) -> None:
    with pytest.raises(ArgumentError, match=r"buckets .* must be ints within the bounds, in increasing order"):
        Variable("n", 1, 10, buckets=buckets)


def test_too_many_buckets_are_refused() -> None:
    n, m = Variable("n", 1, 100, buckets=range(1, 10)), Variable("m", 1, 100, buckets=range(1, 10))
    with pytest.raises(ScheduleError, match="would make 100 kernels of one; 64 are allowed: give fewer buckets"):
        (Tensor(drawn(100, 100))[:n, :m] * 2).prepare(NONE)
    three = [Tensor(drawn(100))[:Variable(name, 1, 100, buckets=range(1, 7))] * 2 for name in "abc"]
    with pytest.raises(ScheduleError, match="the variables a, b, c have 343 combinations; a plan may have 256: give fewer buckets"):
        Tensor.prepare_batch(three, NONE)
