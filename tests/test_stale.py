"""No stale values: if a value that a captured function reads besides its arguments changes, the next call uses it or is refused."""
from __future__ import annotations

import ctypes
import gc
import logging
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor, nn
from svod.core.graph.allocator import OWN_BLOCK_BYTES
from svod.errors import ArgumentError, SvodError
from svod.tracing.jitted import MOST_PLANS, RECAPTURES_SAID
from tests.draws import a_half

Array = np.ndarray[Any, np.dtype[Any]]
SCALE = 2.0
SIZES = [(1, 1), (3, 5), (8, 8), (37, 53), (512, 512)]      # shapes of weights; some are packed, others are read in place


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def agree(result: Tensor, expected: Array) -> None:
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-4, atol=1e-5 * max(1.0, float(np.abs(expected).max(initial=0))))


class Foreign:
    """An array of another library, which has a DLPack interface only."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Interface:
    """An array of another library, which has an array interface only."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = array.__array_interface__
        self.array = array


# -- arguments ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("wrap", [Foreign, Interface])
def test_arrays_of_other_libraries_are_tensors(wrap: Any) -> None:
    f = svod.jit(lambda a: a * 2)
    x = np.ones(5, np.float32)
    given = wrap(x)
    assert f(given).tolist() == [2] * 5
    x[:] = 5
    assert f(given).tolist() == [10] * 5
    for i in range(5):
        assert f(wrap(np.full(5, i, np.float32))).tolist() == [2 * i] * 5
    assert f(x).tolist() == [10] * 5 and len(f.plans) == 1, "one signature, whoever made the array"
    assert svod.jit(nn.Linear(4, 2))(wrap(drawn(3, 4))).shape == (3, 2)


def test_an_array_that_cannot_be_read_is_refused() -> None:
    class Broken:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
            raise RuntimeError("on another device")
    with pytest.raises(SvodError, match="Broken cannot be read as an array: on another device"):
        svod.jit(lambda a: a * 2)(Broken())


def test_layouts_of_arguments() -> None:
    """Arrays that kernels cannot read in place are copied. An array that is assigned to is refused, because the copy would be written."""
    f = svod.jit(lambda a: a * 2)
    base = drawn(6, 8)
    for a in (base.T, base[::2], base[:, 1:], base.astype(">f4"), np.asfortranarray(base)):
        agree(f(a), np.asarray(a, np.float32) * 2)
    raw = np.zeros(base.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(np.float32).reshape(base.shape)
    unaligned[:] = base
    agree(f(unaligned), base * 2)
    g = svod.jit(lambda a: a.assign(a + 1))
    g(base.copy())
    with pytest.raises(SvodError, match="not a C-contiguous"):
        g(np.asfortranarray(base))


# -- weights --------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("shape",), a_half((shape,) for shape in SIZES))
def test_a_numpy_array_that_a_function_reads_cannot_be_written(shape: tuple[int, int]) -> None:
    w, x = drawn(*shape), drawn(4, shape[0], seed=1)
    f = svod.jit(lambda a: a @ w)
    agree(f(x), x @ w)
    with pytest.raises(ValueError, match="read-only"):
        w *= 3
    agree(f(x), x @ w)
    del f
    gc.collect()
    w *= 3                      # no capture depends on it any more
    g = svod.jit(lambda a: a @ w)
    agree(g(x), x @ w)


@pytest.mark.parametrize("shape", SIZES)
def test_memory_of_other_libraries_is_read_in_place(shape: tuple[int, int]) -> None:
    memory = (ctypes.c_float * (shape[0] * shape[1]))()     # NumPy does not own it, and cannot guard it
    w = np.frombuffer(memory, np.float32).reshape(shape)
    w[:] = drawn(*shape)
    weight, x = Tensor(w), drawn(4, shape[0], seed=1)
    f = svod.jit(lambda a: a @ (weight * 2))
    for scale in (1, -3, 2):
        w *= scale
        agree(f(x), x @ (w * 2))
    assert len(f.plans) == 1


@pytest.mark.parametrize("shape", SIZES)
def test_weights_that_svod_writes(shape: tuple[int, int]) -> None:
    w, x = Tensor(drawn(*shape)).clone().realize(), drawn(4, shape[0], seed=1)
    f = svod.jit(lambda a: a @ (w * 2))
    agree(f(x), x @ w.numpy() * 2)
    w.assign(w * 3).realize()
    agree(f(x), x @ w.numpy() * 2)
    w.assign(w + 1)             # still to be computed
    agree(f(x), x @ w.numpy() * 2)
    w[0] = 7.0
    agree(f(x), x @ w.numpy() * 2)
    step = svod.jit(lambda a: w.assign(w + a.sum()))
    for _ in range(6):
        step(x)
        agree(f(x), x @ w.numpy() * 2)


def test_what_often_changes_is_read_in_place() -> None:
    """A tensor that another captured function writes in every call causes a few captures, and then none."""
    w, x = Tensor(drawn(8, 8)).clone().realize(), drawn(4, 8, seed=1)
    f, step = svod.jit(lambda a: a @ w), svod.jit(lambda a: w.assign(w + a))
    plans = []
    for _ in range(12):
        step(np.ones((8, 8), np.float32))
        agree(f(x), x @ w.numpy())
        plans += f.plans
    assert len({id(p) for p in plans}) < 8 and plans[-1] is plans[-2]


def test_memory_that_was_lent_to_others() -> None:
    """A view of a tensor's memory lets its owner write there, whether it was made before the capture or after it."""
    x = drawn(4, 8, seed=1)
    for early in (False, True):
        w = Tensor(drawn(8, 8)).clone().realize()
        f = svod.jit(lambda a, w=w: a @ (w * 2))
        f(x) if not early else None
        view = np.from_dlpack(w)
        view = np.asarray(w, copy=False) if not view.flags.writeable else view
        agree(f(x), x @ view * 2)
        view[:] = drawn(8, 8, seed=5)
        agree(f(x), x @ view * 2)


class Model(nn.Module):
    def __init__(self, n: int) -> None:
        self.first, self.second, self.scale = nn.Linear(n, n), nn.Linear(n, 3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()) * self.scale


def reference(model: Model, x: Array) -> Array:
    hidden = np.maximum(x @ model.first.weight.numpy().T + model.first.bias.numpy(), 0)
    return (hidden @ model.second.weight.numpy().T + model.second.bias.numpy()) * model.scale


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 7, 64])
def test_modules(n: int) -> None:
    model, x = Model(n), drawn(5, n)
    calls = svod.jit(model), svod.jit(lambda a: model(a) * 1), svod.jit(model.forward)

    def check() -> None:
        for f in calls:
            agree(f(x), reference(model, x))
    check()
    model.load_state_dict({name: drawn(*t.shape, seed=i) for i, (name, t) in enumerate(model.state_dict().items())})
    check()
    model.first.weight = Tensor(drawn(n, n, seed=9))
    check()
    model.second.bias = drawn(3, seed=4)
    check()
    model.scale = 3.0
    check()
    model.second = nn.Linear(n, 3)
    check()
    model.first.weight.assign(model.first.weight * 2).realize()
    check()
    assert all(len(f.plans) == 1 for f in calls)


def test_packed_copies_are_made_once_for_a_change() -> None:
    model, x = Model(64), drawn(5, 64)
    f = svod.jit(model)
    f(x)
    model.first.weight = Tensor(drawn(64, 64, seed=3))
    f(x)
    (plan,) = f.plans
    for _ in range(3):
        agree(f(x), reference(model, x))
    assert f.plans == (plan,)


# -- names and objects ----------------------------------------------------------------------------------

def helper(x: Tensor) -> Tensor:
    return x * SCALE


class Settings:
    def __init__(self) -> None:
        self.scale, self.steps, self.unread = 2.0, [1.0, 2.0], 0


def test_names() -> None:
    global SCALE
    bias, names = 1.0, {"shift": 4.0}
    settings = Settings()
    f = svod.jit(lambda x, s: helper(x) + bias + names["shift"] + s.scale + sum(s.steps))
    x = drawn(3)

    def check() -> None:
        agree(f(x, settings), x * SCALE + bias + names["shift"] + settings.scale + sum(settings.steps))
    check()
    bias = 5.0
    check()
    names["shift"] = -1.0
    check()
    settings.scale = 7
    check()
    settings.steps.append(3.0)
    check()
    settings.steps[0] = -9.0
    check()
    try:
        SCALE = -3.0
        check()
    finally:
        SCALE = 2.0
    check()
    (plan,) = f.plans
    settings.unread += 1        # no code of the function names it
    check()
    assert f.plans == (plan,)


def test_a_rebound_tensor() -> None:
    w, x = Tensor(drawn(3)), drawn(3, seed=1)
    f = svod.jit(lambda a: a * w)
    agree(f(x), x * w.numpy())
    w = Tensor(drawn(3, seed=2))
    agree(f(x), x * w.numpy())


def test_equal_values_are_no_change() -> None:
    scale, x = float("nan"), drawn(3)
    f = svod.jit(lambda a: a * 0 if scale != scale else a * scale)
    f(x)
    (plan,) = f.plans
    scale = float("nan")
    f(x)
    assert f.plans == (plan,)
    scale = 2.0
    agree(f(x), x * 2)


@pytest.mark.parametrize("source", [np.random.default_rng(0), iter([1.0, 2.0])])
def test_what_gives_another_value_each_time_is_refused(source: Any) -> None:
    with pytest.raises(SvodError, match="which is asked once, at capture; draw numbers with"):
        svod.jit(lambda x: x * (source.random() if hasattr(source, "random") else next(source)))(drawn(3))


def test_who_changes_something_in_every_call_is_told(caplog: pytest.LogCaptureFixture) -> None:
    settings, x = Settings(), drawn(3)
    f = svod.jit(lambda a: a * settings.scale)
    with caplog.at_level(logging.WARNING, "svod.jit"):
        for i in range(RECAPTURES_SAID + 4):
            settings.scale = float(i)
            agree(f(x), x * i)
    assert len(caplog.records) == 1 and "because of scale" in caplog.text


def test_a_module_of_pytorch_is_refused() -> None:
    kind = type("Linear", (), {"__module__": "torch.nn.modules.linear", "__call__": lambda self, x: x})
    with pytest.raises(ArgumentError, match="the PyTorch module Linear; write it"):
        svod.jit(kind())


# -- random numbers and plans ---------------------------------------------------------------------------

@pytest.mark.parametrize("shape", [(1,), (7,), (5, 13)])
def test_random_numbers(shape: tuple[int, ...]) -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + Tensor.rand(*shape) * 2 + Tensor.randn(*shape)
    x = drawn(*shape)
    captured, fresh = svod.jit(noisy), svod.jit(noisy, random="fresh")
    assert np.array_equal(captured(x).numpy(), captured(x).numpy())
    Tensor.manual_seed(7)
    found = [fresh(x).numpy() for _ in range(3)]
    Tensor.manual_seed(7)
    for each in found:
        np.testing.assert_allclose(each, noisy(Tensor(x)).numpy(), rtol=1e-5, atol=1e-5)
    assert not np.array_equal(found[0], found[1]) and len(fresh.plans) == 1
    with pytest.raises(ArgumentError, match="random='often'"):
        svod.jit(noisy, random="often")


@pytest.mark.slow
def test_plans_are_dropped() -> None:
    f = svod.jit(lambda x, k: x * k)
    for k in range(MOST_PLANS + 3):
        assert f(np.ones(2, np.float32), k).tolist() == [k, k]
    assert len(f.plans) == MOST_PLANS


@pytest.mark.parametrize("size", [5, OWN_BLOCK_BYTES // 4 + 3])
def test_results_keep_their_values_while_somebody_holds_them(size: int) -> None:
    """The memory of a result is reused only after all holders are gone: the tensor, views, and arrays of other libraries over it."""
    f = svod.jit(lambda x: x * 2)
    kept, views = [], []
    for i in range(12):
        y = f(np.full(size, i, np.float32))
        if i % 3 == 0:
            kept.append((i, y))
        elif i % 3 == 1:
            views.append((i, np.from_dlpack(y)[1:]))
    for i, y in kept:
        assert (y.numpy() == 2 * i).all()
    for i, v in views:
        assert v.shape == (size - 1,) and (v == 2 * i).all()


@pytest.mark.parametrize("size", [5, OWN_BLOCK_BYTES // 4 + 3])
def test_memory_of_a_result_that_nobody_holds_is_used_in_the_next_run(size: int) -> None:
    f = svod.jit(lambda x: x * 2)
    x = np.full(size, 3, np.float32)
    for _ in range(3):
        f(x)                                # the first runs bind the memory
    dropped = {np.from_dlpack(f(x)).ctypes.data for _ in range(4)}
    held = [np.from_dlpack(f(x)) for _ in range(4)]
    assert len(dropped) == 1
    assert len({y.ctypes.data for y in held}) == 4


@pytest.mark.parametrize("size", [6, OWN_BLOCK_BYTES // 4 + 6])
def test_an_array_that_was_changed_by_who_had_it_is_no_result_again(size: int) -> None:
    f = svod.jit(lambda x: x * 2)
    for change in (lambda a: a.setflags(write=False), lambda a: setattr(a, "shape", (2, -1)), lambda a: setattr(a, "dtype", np.int32)):
        for _ in range(4):
            y = f(np.full(size, 3, np.float32))
            assert (y.shape, y.dtype.name) == ((size,), "float32") and (y.numpy() == 6).all()
            array = np.asarray(y, copy=False)
            del y
            change(array)
            del array
