"""realize and prepare: every kind of tensor, alone and in a batch, and the effects on other tensors."""
from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svod import Tensor
from svod.compile.plan import execution_plan as plan_module
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.config import OptimizerConfig, PrepareConfig
from svod.core.graph.buffer import buffer_of
from svod.core.graph.storage import base_of
from svod.core.ir.dtype import dtypes
from svod.errors import ConfigError, ScheduleError
from svod.tensor import realize

Array = np.ndarray[Any, np.dtype[Any]]
X = np.arange(12, dtype=np.float32).reshape(3, 4)

# name: (function of x, wanted values, number of kernels)
KINDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Array], Array], int]] = {
    "computed": (lambda x: x * 2 + 1, lambda a: a * 2 + 1, 1),
    "in memory": (lambda x: x, lambda a: a, 0),
    "in memory, reshaped": (lambda x: x.reshape(2, 6), lambda a: a.reshape(2, 6), 0),
    "a view": (lambda x: x.permute(1, 0)[1:], lambda a: a.T[1:], 1),
    "a copy": (lambda x: x.contiguous(), lambda a: a, 0),
    "a constant": (lambda x: Tensor.full((2, 3), 7.0), lambda a: np.full((2, 3), 7, np.float32), 1),
    "a constant, copied": (lambda x: Tensor.full((2, 3), 7.0).contiguous(), lambda a: np.full((2, 3), 7, np.float32), 1),
    "a computed constant": (lambda x: Tensor.full((2, 3), 3.0) + 4, lambda a: np.full((2, 3), 7, np.float32), 1),
    "no elements": (lambda x: x[1:1] + 1, lambda a: a[1:1] + 1, 0),
    "no elements, from memory": (lambda x: x[:, 4:], lambda a: a[:, 4:], 0),
    "a sum of no elements": (lambda x: x[:, 4:].sum(1), lambda a: a[:, 4:].sum(1), 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_realize_of(kind: str) -> None:
    build, wanted, _ = KINDS[kind]
    t = build(Tensor(X.copy()))
    assert t.realize() is t
    np.testing.assert_array_equal(t.numpy(), wanted(X))
    again = t.uop
    assert t.realize().uop is again, "what is computed is not computed again"


@pytest.mark.parametrize("kind", KINDS)
def test_prepare_of(kind: str) -> None:
    build, wanted, kernels = KINDS[kind]
    memory = X.copy()
    t = build(Tensor(memory))
    plan = t.prepare()
    assert len(plan.kernels) <= kernels
    for scale in (1, 3):
        memory[:] = scale * X
        plan.execute()
        np.testing.assert_array_equal(plan.output_buffer().reshape(t.shape), wanted(scale * X))
        np.testing.assert_array_equal(t.numpy(), wanted(scale * X))


def test_a_batch_of_every_kind_keeps_their_order() -> None:
    x = Tensor(X.copy())
    tensors = [build(x) for build, _, _ in KINDS.values()]
    plan = Tensor.prepare_batch(tensors)
    plan.execute()
    Tensor.realize_batch(batch := [build(x) for build, _, _ in KINDS.values()])
    for out, t, r, (_, wanted, _) in zip(plan.outputs, tensors, batch, KINDS.values(), strict=True):
        for found in (out.reshape(t.shape), t.numpy(), r.numpy()):
            np.testing.assert_array_equal(found, wanted(X))


def test_an_empty_batch_is_nothing_to_realize_and_an_error_to_prepare() -> None:
    Tensor.realize_batch([])
    with pytest.raises(ScheduleError, match="prepare needs at least one tensor"):
        Tensor.prepare_batch([])


def test_a_shared_part_is_computed_once_and_outputs_are_in_order() -> None:
    x = Tensor(X.copy())
    shared = (x * 3).sum(1)
    a, b = shared + 1, shared.reshape(3, 1) * x
    plan = Tensor.prepare_batch([b, a, shared, a])
    assert [k.name for k in plan.kernels].count("reduce_0") == 1
    plan.execute()
    s = (X * 3).sum(1)
    for out, want in zip(plan.outputs, (s[:, None] * X, s + 1, s, s + 1), strict=True):
        np.testing.assert_array_equal(out.reshape(want.shape), want)
    assert plan.outputs[1] is plan.outputs[3]


def test_every_live_tensor_reads_what_was_computed() -> None:
    x = Tensor(X.copy())
    y = x.exp()
    after, twin = y.sum(), y.reshape(12)
    y.realize()
    buffer = base_of(y.uop)
    assert base_of(twin.uop) is buffer and buffer in after.uop.toposort()
    assert [len(p.kernels) for p in (after.prepare(), (twin + 1).prepare())] == [1, 1]


@pytest.mark.slow
def test_realize_leaves_no_memory_but_the_results() -> None:
    x = Tensor(np.ones((64, 64), np.float32))
    y = ((x @ x).softmax(0) @ x).realize()
    gc.collect()
    result = buffer_of(base_of(y.uop)).array
    held = [a for p in plan_module._plans for a in (*p.bindings.arrays.values(), *(b.array for b in p.buffers)) if a is not None]
    assert not any(np.shares_memory(a, result) for a in held), "a plan lives on that holds the result"
    np.testing.assert_allclose(y.numpy(), np.ones((64, 64)), rtol=1e-5)


def test_realize_and_prepare_take_a_configuration() -> None:
    x = Tensor(X.copy())
    noopt = PrepareConfig(optimizer=OptimizerConfig(noopt=True))
    seen: list[ExecutionPlan] = []
    original = ExecutionPlan.execute

    def execute(self: ExecutionPlan, **variables: int) -> None:
        seen.append(self)
        original(self, **variables)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExecutionPlan, "execute", execute)
        (x + 1).realize(noopt)
        Tensor.realize_batch([x + 2, x + 3], noopt)
        (x + 4).realize()
    assert [{k.opts_source for k in p.kernels} for p in seen] == [{"none"}, {"none"}, {"heuristic"}]
    for ask in ((x + 5).realize, x.realize, (x + 6).prepare, lambda c: Tensor.realize_batch([x + 7], c)):
        with pytest.raises(ConfigError, match="a PrepareConfig is needed, got int"):
            ask(4)


@pytest.mark.slow
def test_outputs_are_the_memory_of_their_tensors_run_after_run() -> None:
    x = Tensor(X.copy())
    y = x + 1
    plan = y.prepare()
    view = y.reshape(2, 6)
    for scale in (1, 2):
        np.asarray(x, copy=False)[:] = scale * X
        plan.execute()
        assert np.shares_memory(np.asarray(view, copy=False), plan.output_buffer())
        np.testing.assert_array_equal(view.numpy(), scale * X.reshape(2, 6) + 1)
    del plan, y
    gc.collect()
    np.testing.assert_array_equal(view.numpy(), 2 * X.reshape(2, 6) + 1)


def test_the_same_layer_twice_is_two_calls_of_one_program() -> None:
    w = [Tensor(np.random.default_rng(i).standard_normal((8, 8), dtype=np.float32)) for i in range(3)]
    x = Tensor(np.ones((8, 8), np.float32))
    y = x
    for layer in w:
        y = (y @ layer).relu()
    plan = y.prepare()
    assert len(plan.kernels) == 3 and len({k.key for k in plan.kernels}) == 1 and len({id(k.loaded) for k in plan.kernels}) == 1
    assert len({k.buffers for k in plan.kernels}) == 3
    plan.execute()
    want = np.ones((8, 8), np.float64)
    for layer in w:
        want = np.maximum(want @ layer.numpy(), 0)
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-4, atol=1e-5)


def test_integers_of_every_width_and_bools_come_back() -> None:
    for dtype in (dtypes.bool, dtypes.int8, dtypes.uint16, dtypes.int64, dtypes.float64):
        y = Tensor(np.arange(4)).cast(dtype)
        plan = y.prepare()
        plan.execute()
        assert y.dtype == dtype and y.tolist() == ([False, True, True, True] if dtype == dtypes.bool else [0, 1, 2, 3])


def test_a_module_is_whole_before_a_thread_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thread of a process imports the modules that compute tensors, while other threads may start to use them."""
    (tmp_path / "svod_slow.py").write_text("import threading\nwait = threading.Event()\nwait.wait(60)\nwhole = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(realize.import_module, "svod_slow")  # type: ignore[attr-defined]
        while not hasattr(sys.modules.get("svod_slow"), "wait"):
            time.sleep(0.001)
        second = pool.submit(lambda: realize.import_module("svod_slow").whole)  # type: ignore[attr-defined]
        time.sleep(0.01)
        sys.modules["svod_slow"].wait.set()
        assert first.result().whole and second.result()
    del sys.modules["svod_slow"]
