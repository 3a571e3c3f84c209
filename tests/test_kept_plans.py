"""Plans of graphs that were computed before run again on other buffers: the results equal those of new plans."""
from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from svod import PrepareConfig, Tensor, Variable
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.graph.allocator import OWN_BLOCK_BYTES
from svod.errors import SvodError
from svod.tracing import graphs
from tests.draws import a_half

Array = np.ndarray[Any, np.dtype[Any]]


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture(autouse=True)
def no_plans() -> None:
    graphs._plans.clear()


PROGRAMS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a * 2, lambda a, b: a + b, lambda a, b: a * a + b * b, lambda a, b: b - a, lambda a, b: (a * b).sum(0),
    lambda a, b: (a + 1) * 0.5 + (a + 1) * -0.5 + 0.0 * b, lambda a, b: abs(a).sum(1) + b.sum(1)]


@pytest.mark.parametrize(("rows", "columns"), a_half([(13, 17), (1, 7), (5, 1), (1, 1), (31, 64)]))
def test_random_graphs(rows: int, columns: int) -> None:
    """Also with one array as two inputs: the key distinguishes one buffer from two."""
    for repeat in range(3):
        for program in PROGRAMS:
            a, b = drawn(rows, columns, seed=repeat), drawn(rows, columns, seed=repeat + 9)
            np.testing.assert_allclose(program(Tensor(a), Tensor(b)).numpy(), program(a, b), rtol=1e-5, atol=1e-5)
            t = Tensor(a)
            np.testing.assert_allclose(program(t, t).numpy(), program(a, a), rtol=1e-5, atol=1e-5)


def plans_made(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of plans that are made while `run` runs."""
    made: list[ExecutionPlan] = []
    original = ExecutionPlan.__init__

    def counting(self: ExecutionPlan, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        original(self, *args, **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(ExecutionPlan, "__init__", counting)
        run()
    return len(made)


def test_a_graph_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(4, 8)
    (Tensor(x) * 2).numpy()
    assert plans_made(lambda: [(Tensor(x + i) * 2).numpy() for i in range(5)], monkeypatch) == 0
    for other in (lambda: Tensor(x) * 3, lambda: Tensor(x) * 2.5, lambda: Tensor(x[:2]) * 2, lambda: Tensor(x.astype("f8")) * 2,
                  lambda: Tensor(x) * -0.0, lambda: Tensor(x) * 0.0, lambda: Tensor(x) + Tensor(x)):
        assert plans_made(lambda other=other: other().numpy(), monkeypatch) == 1
    assert np.signbit((Tensor(np.ones(3, np.float32)) * -0.0).numpy()).all()
    assert not np.signbit((Tensor(np.ones(3, np.float32)) * 0.0).numpy()).any()


@pytest.mark.parametrize("most", [13, 37])
def test_one_plan_for_all_values_of_a_variable(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of memory, which are copied if it has not the layout of the variable's largest shape, and computations from them."""
    n, m = Variable("n", 1, most), Variable("m", 1, 7)
    x, y = drawn(most, 7), drawn(most, 7, seed=1)

    def check(k: int, j: int) -> None:
        part = Tensor(x)[:n.bind(k), :m.bind(j)]
        np.testing.assert_array_equal(part.numpy(), x[:k, :j])
        np.testing.assert_array_equal((part + 1).numpy(), x[:k, :j] + 1)
        first, second = Tensor(x)[:n.bind(k)] * 2, Tensor(y)[:n.bind(k)] + Tensor(x)[:n.bind(k)]
        Tensor.realize_batch([first, second])
        np.testing.assert_array_equal(first.numpy(), x[:k] * 2)
        np.testing.assert_allclose(second.numpy(), y[:k] + x[:k], rtol=1e-6)
        np.testing.assert_allclose((first + second).sum().numpy(), (3 * x[:k] + y[:k]).sum(), rtol=1e-4, atol=1e-4)
    check(3, 2)
    assert plans_made(lambda: [check(k, j) for k, j in ((1, 1), (most, 7), (11, 5))], monkeypatch) == 0
    with pytest.raises(SvodError, match="n"):
        (Tensor(x)[:n] * 2).numpy()


def test_results_are_apart() -> None:
    x = drawn(5)
    kept = [(Tensor(x + i) * 2).realize() for i in range(6)]
    views = [np.from_dlpack((Tensor(x - i) * 2).realize()) for i in range(6)]
    for _ in range(8):
        (Tensor(x) * 2).realize()
    for i in range(6):
        np.testing.assert_array_equal(kept[i].numpy(), (x + i) * 2)
        np.testing.assert_array_equal(views[i], (x - i) * 2)


def test_other_tensors_see_the_values() -> None:
    for _ in range(3):
        x = Tensor(drawn(5))
        y = x * 2
        z, view = y + 1, y.reshape(5, 1)
        y.realize()
        assert view.is_realized
        y.assign(y * 0).realize()
        np.testing.assert_array_equal(view.numpy(), np.zeros((5, 1)))
        np.testing.assert_allclose(z.numpy(), drawn(5) * 2 + 1, rtol=1e-6)


def test_a_kept_plan_holds_no_array() -> None:
    x = drawn(6, 7)
    gone = weakref.ref(x)
    y = (Tensor(x) * 2).realize()
    del x, y
    gc.collect()
    assert gone() is None, "the argument"
    (kept,) = graphs._plans.values()
    assert not kept.plan.bindings.arrays and all(b.array is None for b in kept.plan.buffers)


def test_what_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(4)
    state = Tensor(x.copy())
    for make in (lambda: Tensor(np.ones(OWN_BLOCK_BYTES // 4, np.float32)) * 2, lambda: state.assign(state + 1)):
        make().realize()
        assert not graphs._plans
    (Tensor(x) * 2).realize(PrepareConfig())
    assert not graphs._plans, "a configuration of its own"
    monkeypatch.setenv("SVOD_DISABLE_SCHEDULE_CACHE", "1")
    (Tensor(x) * 2).realize()
    assert not graphs._plans


def test_another_environment_is_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(4)
    (Tensor(x) * 2).realize()
    monkeypatch.setenv("SVOD_NOOPT", "1")
    assert plans_made((Tensor(x) * 2).realize, monkeypatch) == 1


def test_threads() -> None:
    x = [drawn(9, seed=i) for i in range(4)]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(200):
            if not np.array_equal((Tensor(x[i]) * 2 + 1).numpy(), x[i] * 2 + 1):
                wrong.append(i)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.slow
def test_the_oldest_goes_first() -> None:
    for i in range(graphs.MOST_PLANS + 5):
        assert (Tensor(np.ones(2, np.float32)) * (i + 1)).tolist() == [i + 1] * 2
    assert len(graphs._plans) == graphs.MOST_PLANS
