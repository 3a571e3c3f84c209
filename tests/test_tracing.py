"""`svod.jit`: captured functions, bound arguments, results, assignments, and refused functions."""
from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.config import PrepareConfig
from svod.errors import DeviceError, LaunchError, ScheduleError, SvodError
from tests.patience import NEVER

X = np.arange(4, dtype=np.float32)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_one_plan_per_signature_and_fresh_outputs() -> None:
    f = svod.jit(lambda x, scale: x * scale + 1)
    first, second = f(X, 2.0), f(Tensor(X + 1), 2.0)
    assert first.tolist() == [1, 3, 5, 7] and second.tolist() == [3, 5, 7, 9]
    assert len(f.plans) == 1
    f(X, 3.0)
    f(X[:2], 2.0)
    f(X.astype(np.float64), 2.0)
    assert len(f.plans) == 4
    assert first.tolist() == [1, 3, 5, 7], "a later run wrote into an earlier result"


def test_a_number_is_itself_in_a_signature() -> None:
    """-0.0 equals 0.0 but has another key; nan has the same key each time but equals nothing."""
    f = svod.jit(lambda x, k: x * k)
    for kind in (float, np.float32):
        assert [np.signbit(f(np.ones(2, np.float32), kind(k)).numpy()).all() for k in (0.0, -0.0)] == [False, True]
    before = len(f.plans)
    for _ in range(3):
        assert np.isnan(f(X, float("nan")).numpy()).all()
    assert len(f.plans) == before + 1


def test_a_method_is_captured_for_each_object() -> None:
    class Counter:
        def __init__(self, step: float) -> None:
            self.step, self.total = step, Tensor(np.zeros(3, np.float32))

        @svod.jit
        def add(self, x: Tensor) -> Tensor:
            self.total.assign(self.total + x * self.step)
            return self.total * 1

    one, ten = Counter(1), Counter(10)
    x = np.ones(3, np.float32)
    assert [one.add(x).tolist(), ten.add(x).tolist(), one.add(x).tolist()] == [[1] * 3, [10] * 3, [2] * 3]
    assert one.total.tolist() == [2] * 3 and ten.total.tolist() == [10] * 3
    assert len(Counter.add.plans) == len(one.add.plans) == 2


@pytest.mark.parametrize(("given", "config", "said"), [
    (3, None, "takes a function of tensors, got int"), (Tensor(X), None, "got Tensor; to compute a tensor, call its realize()"),
    (lambda x: x, {"beam": 4}, r"takes a PrepareConfig, got dict; .* PrepareConfig\(beam=BeamConfig\(width=4\)\)"),
])
def test_what_cannot_be_captured_is_refused_at_once(given: Any, config: Any, said: str) -> None:
    with pytest.raises(SvodError, match=said):
        svod.jit(given, config=config)
    with pytest.raises((TypeError, ValueError)):
        svod.jit(config=config)(given)


def test_structures_of_arguments_and_results() -> None:
    f = svod.jit(lambda p, named: {"sum": [p.first + named["b"]], "pair": Pair(p.second, "text")})
    result = f(Pair(X, X * 2), {"b": X * 10})
    assert result["sum"][0].tolist() == [0, 11, 22, 33]
    assert isinstance(result["pair"], Pair) and result["pair"].first.tolist() == [0, 2, 4, 6] and result["pair"].second == "text"


def test_results_that_nothing_computes() -> None:
    """Arguments, closed-over tensors and constants are returned unchanged."""
    weight = Tensor(X * 3)
    given = Tensor(X)
    same, held, ones, computed = svod.jit(lambda x: (x, weight, Tensor.ones(3), x + 1))(given)
    assert same.tolist() == X.tolist() and held.tolist() == [0, 3, 6, 9]
    assert ones.tolist() == [1, 1, 1] and computed.tolist() == [1, 2, 3, 4]
    f = svod.jit(lambda x: x)
    assert f(X).tolist() == X.tolist() and f(X + 1).tolist() == [1, 2, 3, 4]


def test_arguments_without_memory_of_their_own() -> None:
    f = svod.jit(lambda x: x + 1)
    assert f(Tensor.ones(3)).tolist() == [2, 2, 2]
    assert f(Tensor(X) * 2).tolist() == [1, 3, 5, 7]
    assert f(Tensor(X.reshape(2, 2)).permute(1, 0)).tolist() == [[1, 3], [2, 4]]
    assert f(np.zeros((0, 3), np.float32)).shape == (0, 3)
    frozen = X.copy()
    frozen.flags.writeable = False
    assert f(frozen).tolist() == [1, 2, 3, 4]


def test_a_jitted_function_inside_another() -> None:
    inner = svod.jit(lambda x: x * 2)
    outer = svod.jit(lambda x: inner(x) + 1)
    assert outer(X).tolist() == [1, 3, 5, 7] and outer(X * 10).tolist() == [1, 21, 41, 61]
    assert not inner.plans


@pytest.mark.parametrize("read", [lambda x: x.sum().item(), lambda x: x.numpy(), lambda x: bool(x[0] > 0), np.asarray])
def test_values_of_arguments_cannot_be_read_while_capturing(read: Any) -> None:
    def chooses(x: Tensor) -> Tensor:
        read(x)
        return x + 1
    with pytest.raises(DeviceError, match="chooses reads the values of an argument"):
        svod.jit(chooses)(X)


def test_state_advances_once_a_call() -> None:
    state = Tensor(np.ones(4, np.float32))
    state.assign(state + 1)     # pending: not a part of the captured graph

    def step(x: Tensor) -> Tensor:
        y = x + state * 2
        state.assign(state + 1)
        return y
    f = svod.jit(step)
    for k in (2, 3, 4):
        assert f(X).tolist() == (X + 2 * k).tolist()
        assert state.tolist() == [k + 1] * 4


def test_parts_of_state_and_of_arguments_are_written() -> None:
    state = Tensor(np.zeros((3, 4), np.float32))

    def step(x: Tensor, row: int) -> Tensor:
        state[row] = x
        state[:, 1:] = state[:, :-1]
        x[0] += 1
        return state.sum()
    f = svod.jit(step)
    expected, a = np.zeros((3, 4), np.float32), X.copy()
    argument = a.copy()
    for row in (0, 2, 0):
        expected[row] = argument
        expected[:, 1:] = expected[:, :-1].copy()
        argument[0] += 1
        assert f(a, row).item() == expected.sum()
        assert state.tolist() == expected.tolist() and a.tolist() == argument.tolist()
    assert len(f.plans) == 2


def test_what_is_computed_and_written_in_parts_is_new_at_every_call() -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        y[1:3] = x[:2]
        return y
    g = svod.jit(f)
    results = [g(X), g(X * 10), g(X)]
    assert [r.tolist() for r in results] == [[0, 0, 1, 6], [0, 0, 10, 60], [0, 0, 1, 6]]


def test_an_argument_that_is_assigned_to_changes_in_place() -> None:
    f = svod.jit(lambda x: x.assign(x + 1))
    a, b = X.copy(), X * 10
    results = f(a), f(b), f(a)
    assert a.tolist() == [2, 3, 4, 5] and b.tolist() == [1, 11, 21, 31]
    assert [r.tolist() for r in results] == [a.tolist(), b.tolist(), a.tolist()]
    frozen = X.copy()
    frozen.flags.writeable = False
    with pytest.raises(LaunchError, match="read-only"):
        f(frozen)
    assert frozen.tolist() == X.tolist()


def test_what_other_threads_assign_meanwhile_is_not_captured() -> None:
    state = Tensor(np.zeros(4, np.float32))
    inside, assigned = threading.Event(), threading.Event()

    def assign() -> None:
        inside.wait(NEVER)
        state.assign(state + 1)
        assigned.set()

    def double(x: Tensor) -> Tensor:
        inside.set()
        assigned.wait(NEVER)
        return x * 2
    other = threading.Thread(target=assign)
    other.start()
    f = svod.jit(double)
    for _ in range(3):
        assert f(X).tolist() == (X * 2).tolist()
    other.join()
    assert state.tolist() == [1] * 4


def test_who_writes_to_a_result_that_was_folded_changes_no_constant() -> None:
    weight = Tensor(np.arange(4, dtype=np.float32)).realize()

    def turned() -> Tensor:
        return (weight * 2 + 1).reshape(2, 2).transpose(0, 1).contiguous()
    f, g = svod.jit(lambda x: (x + 1, turned())), svod.jit(lambda x: x.reshape(2, 2) @ turned())
    result = f(X)[1]
    assert result.tolist() == [[1, 5], [3, 7]]
    result.assign(result * 0).realize()
    assert f(X)[1].tolist() == [[1, 5], [3, 7]]
    assert g(X).tolist() == (X.reshape(2, 2) @ np.array([[1, 5], [3, 7]])).tolist()


def test_a_function_that_raises_leaves_its_state_alone() -> None:
    state = Tensor(np.ones(4, np.float32))

    def breaks(x: Tensor) -> Tensor:
        state.assign(state + x)
        raise ValueError("no")
    with pytest.raises(ValueError, match="no"):
        svod.jit(breaks)(X)
    assert state.tolist() == [1, 1, 1, 1]


def test_what_cannot_be_captured() -> None:
    with pytest.raises(SvodError, match="returned no Tensor, but int"):
        svod.jit(lambda x: 3)(X)
    with pytest.raises(SvodError, match="set is neither a tensor nor hashable"):
        svod.jit(lambda x: x)({1, 2})


def test_timing_captured_kernels_does_not_run_assignments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVOD_CAPTURE", str(tmp_path))
    state = Tensor(X.copy())
    assert state.assign(state + 1).tolist() == [1, 2, 3, 4]
    f = svod.jit(lambda x: x.assign(x + 1), config=PrepareConfig())
    a = X.copy()
    f(a)
    assert a.tolist() == [1, 2, 3, 4]


def test_memory_that_is_assigned_to_is_passed_once() -> None:
    f = svod.jit(lambda x, y: x.assign(y.flip(0)))
    a, b = X.copy(), X * 10
    assert f(a, b).tolist() == [30, 20, 10, 0]
    for x, y in ((a, a), (b, b)):
        with pytest.raises(ScheduleError, match="share 16 bytes"):
            f(x, y)
    assert a.tolist() == [30, 20, 10, 0] and b.tolist() == [0, 10, 20, 30]
    with pytest.raises(ScheduleError, match="share 16 bytes"):
        svod.jit(lambda x, y: x.assign(y.flip(0)))(a, a)        # while it is captured
    whole = np.arange(6, dtype=np.float32)
    with pytest.raises(ScheduleError, match="share 8 bytes"):
        f(whole[:4], whole[2:])
    assert svod.jit(lambda x, y: x + y)(a, a).tolist() == [60, 40, 20, 0]


def test_an_argument_shares_no_memory_with_state_or_with_weights_it_overwrites() -> None:
    held = X.copy()
    state = Tensor(held)

    def step(x: Tensor) -> Tensor:
        state.assign(state + x.flip(0))
        return x * 2
    f = svod.jit(step)
    assert f(X).tolist() == [0, 2, 4, 6] and held.tolist() == [3, 3, 3, 3]
    with pytest.raises(ScheduleError, match="share 16 bytes"):
        f(held)
    weights = X.copy()
    constant = Tensor(weights)
    g = svod.jit(lambda x: x.assign(x + constant.flip(0)))
    assert g(np.zeros(4, np.float32)).tolist() == [3, 2, 1, 0]
    with pytest.raises(ScheduleError, match="share 16 bytes"):
        g(weights)
    assert weights.tolist() == X.tolist()


def test_a_call_that_was_refused_leaves_the_memory_of_the_call_before() -> None:
    f = svod.jit(lambda y, x: y.assign(y + x.flip(0)))
    memory = np.arange(12, dtype=np.float32)
    y, apart, beside, sharing = memory[:4], X.copy(), X.copy(), memory[2:6]
    f(y, apart)
    beside.flags.writeable = False
    with pytest.raises(LaunchError, match="read-only"):
        f(beside, apart)
    with pytest.raises(ScheduleError, match="share 8 bytes"):
        f(y, sharing)
    assert y.tolist() == [3, 3, 3, 3]


def test_weights_that_nothing_varies_are_computed_once() -> None:
    """Random numbers and values that depend on them only, without reading memory, are computed once; a mask of positions is recomputed."""
    w = Tensor.rand(4, 4)
    with svod.scope("unused"):
        table = Tensor.arange(4).float().cos()

    def model(x: Tensor) -> Tensor:
        with svod.scope("layer"):
            return (x @ w + table).tril()
    f = svod.jit(model)
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    expected = np.tril(x @ w.numpy() + np.cos(np.arange(4, dtype=np.float32)))
    for _ in range(2):
        assert np.allclose(f(x).numpy(), expected, rtol=1e-5)
    (kernel,) = f.plans[0].kernels
    assert kernel.origin == "layer" and len(kernel.buffers) == 4, "reads x, w and the table"


def test_what_depends_on_a_variable_is_computed_anew() -> None:
    n, w = svod.Variable("n", 1, 8), Tensor(np.arange(8, dtype=np.float32))
    f = svod.jit(lambda x, k: x[:k].sum() + (w[:k] * 2).sum() + (Tensor.arange(k).float().exp() * 0 + 1).sum())
    for k in (3, 7, 1):
        assert f(w, n.bind(k)).item() == 3 * sum(range(k)) + k
    assert len(f.plans) == 1


def test_origins_survive_views_of_views() -> None:
    x = Tensor(np.ones((2, 6), np.float32))
    with svod.scope("inner"):
        y = x.reshape(3, 4).reshape(12) + 1
    assert [k.origin for k in y.prepare().kernels] == ["inner"]


@pytest.mark.slow
def test_rows_of_one_array_are_writable_again_when_nothing_reads_them() -> None:
    table = np.ones((2, 4), np.float32)
    rows = [table[0], table[1]]
    first = svod.jit(lambda x: x * Tensor(rows[0]) + Tensor(rows[1]))
    second = svod.jit(lambda x: x - Tensor(rows[1]))
    x = Tensor(np.ones(4, np.float32))
    first(x).realize()
    second(x).realize()
    assert not table.flags.writeable
    del first
    gc.collect()
    assert not table.flags.writeable
    del second
    gc.collect()
    assert table.flags.writeable and all(r.flags.writeable for r in rows)
