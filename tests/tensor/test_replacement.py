"""Computed values replace nodes in live tensors, while other threads replace nodes of the same graph."""
from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from svod import prepare
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.graph.storage import base_of
from svod.core.ir.uop import Ops
from svod.tensor import Tensor
from svod.tensor.realize import is_realized
from svod.tensor.replacement import Computing
from tests.patience import NEVER

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], None]:
    """A function that makes another thread compute a tensor while the next plan runs in this one."""
    execute = ExecutionPlan.execute
    waiting: list[Tensor] = []

    def with_another(plan: ExecutionPlan, *sizes: object, **named: int) -> object:
        others, waiting[:] = waiting[:], []
        with ThreadPoolExecutor(1) as pool:
            for done in [pool.submit(t.realize) for t in others]:
                done.result()
        return execute(plan, *sizes, **named)
    monkeypatch.setattr(ExecutionPlan, "execute", with_another)
    return waiting.append


@pytest.mark.parametrize("round_", [0, 1])      # the second round runs the plan that the first one kept
@pytest.mark.parametrize("wanted", [1, 2])
def test_another_thread_computes_a_part(meanwhile: Callable[[Tensor], None], round_: int, wanted: int) -> None:
    x = Tensor(X.copy())
    part = (x * 3).contiguous()
    tensors = [(part + k).sum(1) for k in range(wanted)]
    reader = tensors[0] * 2
    meanwhile(part)
    Tensor.realize_batch(tensors)
    assert is_realized(part) and all(map(is_realized, tensors))
    assert base_of(reader.uop).op is Ops.MUL and reader.uop.src[0] is tensors[0].uop, "what contains the tensor reads its memory"
    for k, t in enumerate(tensors):
        np.testing.assert_array_equal(t.numpy(), (X * 3 + k).sum(1))
    np.testing.assert_array_equal(reader.numpy(), (X * 3).sum(1) * 2)


def test_another_thread_computes_the_value_of_an_assignment(meanwhile: Callable[[Tensor], None]) -> None:
    x = Tensor(X.copy())
    part = (Tensor(X) * 3).contiguous()
    x.assign(x + part)
    meanwhile(part)
    x.realize()
    x.realize()
    np.testing.assert_array_equal(x.numpy(), X + X * 3, err_msg="the assignment ran once")


def test_an_assignment_that_two_threads_need_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    execute, begun, others = ExecutionPlan.execute, threading.Event(), list[Future[Any]]()
    x = Tensor(X.copy())
    x.assign(x + 1)
    reader = x * 10

    def read() -> Any:
        begun.set()
        return reader.numpy()

    with ThreadPoolExecutor(1) as pool:
        def with_another(plan: ExecutionPlan, *sizes: object, **named: int) -> object:
            if not others:
                others.append(pool.submit(read))
                begun.wait()
                with pytest.raises(TimeoutError):       # it waits for this thread
                    others[0].result(0.05)
            return execute(plan, *sizes, **named)
        monkeypatch.setattr(ExecutionPlan, "execute", with_another)
        x.realize()
        np.testing.assert_array_equal(others[0].result(NEVER), (X + 1) * 10)
    np.testing.assert_array_equal(x.numpy(), X + 1)


@pytest.mark.parametrize("wanted", [("reader", "x"), ("reader", "reader", "x"), ("reader", "x", "x")], ids=len)
def test_threads_compute_an_assignment_and_its_readers(wanted: tuple[str, ...]) -> None:
    """A reader of the old content is computed together with them."""
    for _ in range(10):
        x = Tensor(X.copy())
        old = x * 10
        x.assign(x * 2)
        tensors = {"reader": x - 1, "x": x}
        together = threading.Barrier(len(wanted))

        def read(t: Tensor, together: threading.Barrier = together) -> Any:
            together.wait()
            return t.numpy()
        with ThreadPoolExecutor(len(wanted)) as pool:
            for name, found in [(name, pool.submit(read, tensors[name])) for name in wanted]:
                np.testing.assert_array_equal(found.result(NEVER), X * 2 - (name == "reader"))
        np.testing.assert_array_equal(old.numpy(), X * 10)


def test_threads_assign_to_a_tensor_and_read_it() -> None:
    x, lock, together = Tensor(np.zeros(8, np.float32)), threading.Lock(), threading.Barrier(3)

    def add() -> None:
        together.wait()
        for _ in range(5):
            with lock:
                x.assign(x + 1)
            x.numpy()
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(add) for _ in range(3)]:
            done.result(NEVER)
    np.testing.assert_array_equal(x.numpy(), 15)


def test_another_thread_computes_the_same_value(meanwhile: Callable[[Tensor], None]) -> None:
    x = Tensor(X.copy())
    one, two = x * 3, x * 3
    meanwhile(one)
    two.realize()
    assert one.uop is two.uop
    np.testing.assert_array_equal(two.numpy(), X * 3)


@pytest.mark.parametrize("whole", [False, True], ids=["a part of it", "it"])
def test_a_prepared_tensor_is_the_output_of_its_plan(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """Another thread computes the tensor, or a part of it, while its plan is made."""
    make = prepare.prepare_graph
    x = Tensor(X.copy())
    memory = np.asarray(x, copy=False)
    part = (x * 3).contiguous()
    total = part.sum(1)

    def with_another(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(prepare, "prepare_graph", make)
        made = make(*args, **kwargs)
        with ThreadPoolExecutor(1) as pool:
            pool.submit((total if whole else part).realize).result()
        return made
    monkeypatch.setattr(prepare, "prepare_graph", with_another)
    plan = total.prepare()
    for scale in (1, 2):
        memory[:] = X * scale
        plan.execute()
        np.testing.assert_array_equal(total.numpy(), (X * scale * 3).sum(1))


def test_a_tensor_that_is_assigned_to_meanwhile_keeps_its_new_node() -> None:
    x = Tensor(X.copy())
    total = x.sum(1)
    with Computing([total]) as work:
        total.assign(Tensor(np.float32([1, 2])))
        work.replace({base_of(work.roots[0]): Tensor(np.float32([7, 8])).uop})
    np.testing.assert_array_equal(total.numpy(), [1, 2])
