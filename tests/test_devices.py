"""Tensors on devices with separate memory: which copies are made and when, plans over several devices, and refused operations.

The devices are two toys. Their kernels reach only their own memory, and each copy is counted."""
from __future__ import annotations

import copy
import pickle
import random
import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor, Variable, nn
from svod.compile.backend import BACKENDS
from svod.config import PrepareConfig
from svod.core.graph import graph
from svod.core.graph.buffer import Array, buffer_of
from svod.core.graph.storage import base_of
from svod.core.ir.uop import Ops, UOp
from svod.core.machine.target import Target
from svod.errors import DeviceError, LaunchError, ScheduleError, ShapeError, UnsupportedError
from svod.tracing import graphs
from tests.draws import a_quarter
from tests.toy_backend.backend import Toy
from tests.toy_backend.target import TOY

RNG = np.random.default_rng(0)
X, W, V = (RNG.standard_normal(shape).astype(np.float32) for shape in ((11, 18), (18, 13), (13, 7)))


class Counting(Toy):
    """A toy device that counts copies."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.copies: list[tuple[str, int]] = []

    def target(self, threads: int | None = None) -> Target:
        return replace(TOY, device=self.name)

    def copy_in(self, device: int, host: int, nbytes: int) -> None:
        self.copies.append(("in", nbytes))
        super().copy_in(device, host, nbytes)

    def copy_out(self, host: int, device: int, nbytes: int) -> None:
        self.copies.append(("out", nbytes))
        super().copy_out(host, device, nbytes)

    def taken(self) -> list[tuple[str, int]]:
        """The copies since the last call."""
        copies, self.copies = self.copies, []
        return copies


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Counting, Counting]]:
    made = Counting("TOY"), Counting("TOY2")
    for toy in made:
        module = types.ModuleType(f"svod_{toy.name}")
        module.BACKEND = toy        # type: ignore[attr-defined]
        monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
        monkeypatch.setitem(BACKENDS, toy.name, module.__name__)
    monkeypatch.setenv("SVOD_OBJECT_CACHE", ":none:")
    monkeypatch.setattr("svod.compile.plan.compiler._compilers", {})
    monkeypatch.setattr(graphs, "_plans", OrderedDict())        # kept plans belong to the toys of other tests
    yield made


def close(got: Array, wanted: Array) -> None:
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


# -- where values are, and what is copied ---------------------------------------------------------------------
def test_a_tensor_is_copied_to_a_device_and_back(toys: tuple[Counting, Counting]) -> None:
    x = Tensor(X)
    there = x.to("toy")
    assert (x.device, there.device, (there + 1).device) == ("CPU", "TOY", "TOY") and not there.is_realized
    assert there.to("TOY") is there and x.to("cpu") is x and x.cpu() is x
    there.realize()
    assert toys[0].taken() == [("in", X.nbytes)] and "realized on TOY" in repr(there)
    np.testing.assert_array_equal(there.numpy(), X)
    np.testing.assert_array_equal(there.cpu().numpy(), X)
    assert there.cpu().device == "CPU" and there.dtype == x.dtype


def test_results_stay_on_the_device(toys: tuple[Counting, Counting]) -> None:
    x, w = Tensor(X).to("TOY").realize(), Tensor(W).to("TOY").realize()
    toys[0].taken()
    y = (x @ w).realize()
    z = y.relu().realize()
    s = z.sum().realize()
    assert toys[0].taken() == [] and not buffer_of(base_of(y.uop)).host
    close(s.numpy(), np.maximum(X @ W, 0).sum())
    assert toys[0].taken() == [("out", 4)]


def test_weights_are_copied_once(toys: tuple[Counting, Counting]) -> None:
    w = Tensor(W).to("TOY")
    f = svod.jit(lambda x: (x.to("TOY") @ w).relu().to("CPU"))
    for i in range(3):
        got = f(X + i)
        assert got.device == "CPU"
        close(got.numpy(), np.maximum((X + i) @ W, 0))
        moved = toys[0].taken()
        assert moved.count(("in", W.nbytes)) == (i == 0) and ("in", X.nbytes) in moved


def test_a_jitted_function_takes_and_returns_tensors_of_a_device(toys: tuple[Counting, Counting]) -> None:
    f = svod.jit(lambda x, w: ((x @ w).relu(), x))
    x, w = Tensor(X).to("TOY").realize(), Tensor(W).to("TOY").realize()
    f(x, w)
    toys[0].taken()
    y, same = f(x, w)
    assert toys[0].taken() == [] and (y.device, same.device) == ("TOY", "TOY")
    close(y.numpy(), np.maximum(X @ W, 0))
    close(f(Tensor(X), Tensor(W))[0].numpy(), np.maximum(X @ W, 0))     # the CPU has a signature of its own
    assert len(f.plans) == 2 and {p.device for p in f.plans} == {"CPU", "TOY"}
    with pytest.raises(DeviceError, match=r"MUL of values on TOY and on CPU.*\.to\('TOY'\)"):
        f(x, Tensor(W))


def test_state_stays_on_the_device(toys: tuple[Counting, Counting]) -> None:
    state = Tensor(np.zeros(18, np.float32)).to("TOY").realize()
    step = svod.jit(lambda row: state.assign(state * 2 + row))
    expected = np.zeros(18, np.float32)
    for row in X[:4]:
        step(Tensor(row.copy()).to("TOY").realize())
        expected = expected * 2 + row
    toys[0].taken()
    step(Tensor(X[4].copy()).to("TOY").realize())
    assert {kind for kind, _ in toys[0].taken()} == {"in"}
    close(state.numpy(), expected * 2 + X[4])


def test_an_argument_that_is_written_on_the_device(toys: tuple[Counting, Counting]) -> None:
    f = svod.jit(lambda s, x: s.assign(s + x))
    s, other = (Tensor(np.full((11, 18), v, np.float32)).to("TOY").realize() for v in (1, 5))
    for _ in range(2):
        f(s, Tensor(X).to("TOY"))
    f(other, Tensor(X).to("TOY"))
    close(s.numpy(), 1 + 2 * X)
    close(other.numpy(), 5 + X)


def test_assignment_to_tensors_and_parts_of_them(toys: tuple[Counting, Counting]) -> None:
    t = Tensor(X.copy()).to("TOY").realize()
    t[2:4] = Tensor(X[:2] * 3).to("TOY")
    t[0, 5] = 7.0
    expected = X.copy()
    expected[2:4], expected[0, 5] = X[:2] * 3, 7
    close(t.numpy(), expected)
    with pytest.raises(DeviceError, match=r"ASSIGN of values on TOY and on CPU"):
        t[0] = Tensor(X[1].copy())


def test_arrays_and_lists_go_where_they_are_needed(toys: tuple[Counting, Counting]) -> None:
    x = Tensor(X).to("TOY")
    close((x + X * 2).numpy(), X * 3)
    close(x[[3, 1, 1]].numpy(), X[[3, 1, 1]])
    close((X[0] * x).numpy(), X[0] * X)
    close(x[:, X[0] > 0].numpy(), X[:, X[0] > 0])


def test_constants_and_random_numbers_are_on_every_device(toys: tuple[Counting, Counting]) -> None:
    ones = Tensor.ones(11, 18)
    assert ones.to("TOY") is ones
    close((Tensor(X).to("TOY") + ones + Tensor.arange(18)).numpy(), X + 1 + np.arange(18))
    Tensor.manual_seed(3)
    wanted = Tensor.rand(5, 4).numpy()
    Tensor.manual_seed(3)
    toys[0].taken()
    there = Tensor.rand(5, 4).to("TOY").realize()
    assert toys[0].taken() == [], "they are computed on the device"
    np.testing.assert_allclose(there.numpy(), wanted, atol=1e-6)


def test_fresh_random_numbers_beside_a_tensor(toys: tuple[Counting, Counting]) -> None:
    x = Tensor(X).to("TOY").realize()
    f = svod.jit(lambda t: t + t.rand_like(), random="fresh")
    first, second = f(x).numpy() - X, f(x).numpy() - X
    assert f(x).device == "TOY" and (first >= -1e-6).all() and (first <= 1).all() and not np.allclose(first, second)


def test_copies_pickles_and_clones(toys: tuple[Counting, Counting]) -> None:
    x = Tensor(X).to("TOY").realize()
    for made in (x.clone(), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert made.device == "TOY"
        np.testing.assert_array_equal(made.numpy(), X)
    half = Tensor(X).bfloat16()
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(half.to("TOY"))).numpy(), half.numpy())


@pytest.mark.slow
def test_a_module_on_a_device(toys: tuple[Counting, Counting]) -> None:
    model = nn.Sequential(nn.Linear(18, 13), nn.ReLU(), nn.Linear(13, 7))
    Tensor.realize_batch(model.parameters())
    wanted = model(Tensor(X)).numpy()
    model.to("TOY")
    assert {t.device for t in model.state_dict().values()} == {"TOY"}
    assert sum(n for _, n in toys[0].taken()) == 4 * (18 * 13 + 13 + 13 * 7 + 7)
    close(model(Tensor(X).to("TOY")).numpy(), wanted)
    assert toys[0].taken() == [("in", X.nbytes), ("out", wanted.nbytes)]
    f = svod.jit(lambda x: model(x.to("TOY")))
    f(X)
    toys[0].taken()
    close(f(X).numpy(), wanted)
    assert toys[0].taken() == [("in", X.nbytes), ("out", wanted.nbytes)]


# -- tensors of the CPU that a configuration computes elsewhere -----------------------------------------------
def test_results_of_a_configured_device_stay_there_until_the_host_asks(toys: tuple[Counting, Counting]) -> None:
    config = PrepareConfig(device="TOY")
    y = (Tensor(X) @ Tensor(W)).realize(config)
    assert y.device == "CPU" and toys[0].taken() == [("in", X.nbytes), ("in", W.nbytes)]
    z = y.relu().realize(config)
    assert toys[0].taken() == []
    close((z + 1).numpy(), np.maximum(X @ W, 0) + 1)        # on the CPU: now it is copied
    assert toys[0].taken() == [("out", z.nbytes)]


def test_what_others_can_write_is_copied_each_time(toys: tuple[Counting, Counting]) -> None:
    array = X.copy()
    x = Tensor(array)
    plan = (x * 2).prepare(PrepareConfig(device="TOY"))
    for value in (1.0, 2.0):
        array[:] = value
        plan.execute()
        np.testing.assert_array_equal(plan.outputs[0], np.full(X.size, 2 * value))


def test_an_array_that_somebody_has_is_written_by_each_run(toys: tuple[Counting, Counting]) -> None:
    x = Tensor(X.copy()).realize()
    y = x * 2
    plan = y.prepare(PrepareConfig(device="TOY"))
    with pytest.raises(DeviceError, match=r"call plan\.execute\(\) first"):
        y.numpy()
    plan.execute()
    held = plan.outputs[0]
    np.asarray(x, copy=False)[...] = 5
    plan.execute()
    assert plan.outputs[0] is held and (held == 10).all()


# -- plans over several devices -------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_plan_over_three_devices(toys: tuple[Counting, Counting]) -> None:
    x = Tensor(X.copy())
    first = (x * 2).relu()
    second = first.to("TOY") @ Tensor(W).to("TOY")
    third = (second.to("TOY2") + 1).sum(1)
    y = third.to("CPU") * 3 + first.sum(1)
    plan = y.prepare()
    assert plan.device == "CPU" and set(plan.parts) == {"CPU", "TOY", "TOY2"}
    for scale in (1, -2):
        np.asarray(x, copy=False)[...] = X * scale
        plan.execute()
        a = np.maximum(X * scale * 2, 0)
        close(plan.outputs[0], (a @ W + 1).sum(1) * 3 + a.sum(1))
    with pytest.raises(LaunchError, match="a copy between devices; it has no loop nest"):
        next(k for k in plan.kernels if k.is_host_item).nest()
    assert len(plan.profile(1)) == len(plan.kernels) and len(svod.profile(plan, seconds=0.01).kernels) == len(plan.kernels)
    assert plan.analyze().kernels and svod.explain(plan)
    released = plan.release_intermediate_buffers()
    assert released == plan.memory.shared > 0
    other = plan.replicate()
    for p in (plan, other):
        p.execute()
        close(p.outputs[0], (a @ W + 1).sum(1) * 3 + a.sum(1))


def random_expression(rng: random.Random, devices: list[str]) -> tuple[Tensor, Array]:
    """An expression over several devices, and its value."""
    shape = rng.choice([(1, 7), (5, 3), (4, 1), (6,)])
    pool: list[tuple[Tensor, Array]] = []
    for _ in range(3):
        a = RNG.standard_normal(shape).astype(np.float32)
        pool.append((Tensor(a.copy()).to(rng.choice(devices)), a))
    for _ in range(rng.randint(4, 10)):
        (t, a), (u, b) = rng.choice(pool), rng.choice(pool)
        kind = rng.randrange(6)
        if kind == 0:
            pool.append((t.to(rng.choice(devices)), a))
        elif kind == 1:
            pool.append((t.flip(0).contiguous(), np.flip(a, 0)))
        elif kind == 2:
            axis = rng.randrange(a.ndim)
            pool.append((t - t.mean(axis, keepdim=True), a - a.mean(axis, keepdims=True)))
        elif kind == 3:
            pool.append((t.sort(-1)[0], np.sort(a, -1)))
        elif kind == 4:
            pool.append((t.transpose(0, -1).to(rng.choice(devices)).transpose(0, -1), a))
        else:
            pool.append((t * 0.5 + u.to(t.device), a * np.float32(0.5) + b))
    t, a = pool[-1]
    u, b = rng.choice(pool)
    return t.to("CPU") + u.to("CPU").relu(), a + np.maximum(b, 0)


@pytest.mark.parametrize("seed", a_quarter(range(12)))
def test_random_expressions_over_devices(toys: tuple[Counting, Counting], seed: int) -> None:
    rng = random.Random(seed)
    t, wanted = random_expression(rng, ["CPU", "TOY", "TOY2"])
    plan = t.prepare()
    for _ in range(2):
        plan.execute()
        close(plan.outputs[0].reshape(wanted.shape), wanted)


def test_lengths_that_vary(toys: tuple[Counting, Counting]) -> None:
    n = Variable("n", 1, 11)
    f = svod.jit(lambda x: (x.to("TOY") * 2).sum(1).to("TOY2").to("CPU") + 1)
    for rows in (11, 1, 4):
        close(f(Tensor(X)[:n.bind(rows)]).numpy(), X[:rows].sum(1) * 2 + 1)
    assert len(f.plans) == 1


def test_functions_of_python_and_library_kernels_on_a_device(toys: tuple[Counting, Counting]) -> None:
    x = Tensor(X).to("TOY") * 1
    half = svod.custom_function(lambda m: m / 2, x, shape=X.shape, dtype="float32")
    assert half.device == "TOY"
    close((half.sort(-1)[0] + 1).numpy(), np.sort(X / 2, -1) + 1)
    close(Tensor.cat([x, half]).numpy(), np.concatenate([X, X / 2]))
    with pytest.raises(DeviceError, match="CAT of values on TOY and on CPU"):
        Tensor.cat([x, Tensor(X)])


def test_a_copy_of_what_is_assigned_to_is_of_the_old_or_the_new_content(toys: tuple[Counting, Counting]) -> None:
    x = Tensor(X.copy()).realize()
    old = x.to("TOY") + 0
    x.assign(Tensor(X) * 2)
    new = x.to("TOY") + 0
    Tensor.realize_batch([new, old])
    close(old.numpy(), X)
    close(new.numpy(), 2 * X)


def stack(*parts: Tensor) -> Tensor:
    return Tensor.from_uop(UOp(Ops.MSTACK, parts[0].dtype, tuple(p.uop for p in parts)))


def part(t: Tensor, number: int) -> Tensor:
    return Tensor.from_uop(UOp(Ops.MSELECT, t.dtype, (t.uop,), number))


def test_values_of_several_devices(toys: tuple[Counting, Counting]) -> None:
    """Half of the rows and all of the weights on each of two devices."""
    rows = stack(Tensor(X[:5].copy()).to("TOY"), Tensor(X[5:10].copy()).to("TOY2"))
    w = stack(*[Tensor(W).to(device) for device in ("TOY", "TOY2")])
    y = ((rows @ w).relu() * 2 + Tensor.arange(13)).sum(1)
    assert y.shape == (5,) and [part(y, i).device for i in range(2)] == ["TOY", "TOY2"]
    assert rows.device == y.device == "TOY, TOY2" and stack(Tensor(X), Tensor(X).to("TOY")).device == "CPU, TOY"
    whole = Tensor.cat([part(y, i).to("CPU") for i in range(2)])
    plan = whole.prepare()
    plan.execute()
    close(plan.outputs[0], (np.maximum(X[:10] @ W, 0) * 2 + np.arange(13)).sum(1))
    assert {k.device or plan.device for k in plan.kernels if not k.is_host_item} == {"CPU", "TOY", "TOY2"}


def test_values_of_several_devices_that_are_refused(toys: tuple[Counting, Counting]) -> None:
    a, b = Tensor(X).to("TOY"), Tensor(X).to("TOY2")
    both = stack(a, b)
    with pytest.raises(DeviceError, match="ADD of values on TOY2 and on TOY"):
        part(both + a, 1).realize()
    with pytest.raises(ScheduleError, match="a value of 2 devices is computed part by part: choose one with MSELECT"):
        (both * 2).realize()
    with pytest.raises(ScheduleError, match="values of 1 and 2 devices"):
        part(both + stack(a), 0).realize()
    with pytest.raises(ShapeError, match="2 of 2 is none"):
        part(both, 2).realize()
    with pytest.raises(ShapeError, match="parts of one shape and one dtype"):
        stack(a, b.sum(1)).realize()


# -- what is refused ------------------------------------------------------------------------------------------
def test_an_operation_on_two_devices_names_both(toys: tuple[Counting, Counting]) -> None:
    x, y = Tensor(X).to("TOY"), Tensor(X).to("TOY2")
    for make in (lambda: x + y, lambda: x @ Tensor(W), lambda: svod.where(x > 0, x, y), lambda: x.gather(0, Tensor([[1]]))):
        with pytest.raises(DeviceError, match=r"of values on (TOY2?) and on (TOY2|CPU): .*\.to\('TOY2?'\) or \.to\('(TOY2|CPU)'\)"):
            make()


def test_a_device_that_is_not_there(toys: tuple[Counting, Counting]) -> None:
    with pytest.raises(UnsupportedError, match="no device 'nowhere'"):
        Tensor(X).to("nowhere")


def test_memory_that_a_plan_writes_is_not_under_another_buffer(toys: tuple[Counting, Counting]) -> None:
    array = X.copy()
    x, same = Tensor(array).realize(), Tensor(array)
    x[0] = same[1] * 2
    with pytest.raises(ScheduleError, match=r"share .* bytes of memory"):
        x.realize(PrepareConfig(device="TOY"))


# -- files ----------------------------------------------------------------------------------------------------
@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, Array]:
    """A file with float32 values after 6 other bytes, and these values."""
    values = RNG.standard_normal((7, 5, 3)).astype(np.float32)
    path = tmp_path / "values.bin"
    path.write_bytes(b"header" + values.tobytes())
    return path, values


def test_a_file_is_a_tensor_that_is_copied_from(toys: tuple[Counting, Counting], file: tuple[Path, Array],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("svod.compile.plan.part.PIECE", 128)
    path, values = file
    t = Tensor.from_file(path, "float32", values.shape, 6)
    assert t.device == f"DISK:{path}" and t.is_realized and "realized on DISK" in repr(t)
    for device in ("CPU", "TOY"):
        np.testing.assert_array_equal((t.to(device) + 1).numpy(), values + 1)
    assert [n for kind, n in toys[0].taken() if kind == "in"] == [128] * 3 + [36], "in pieces"
    np.testing.assert_array_equal(t.numpy(), values)
    assert pickle.loads(pickle.dumps(t)).device == "CPU"
    raw = Tensor.from_file(path)
    assert raw.shape == (path.stat().st_size,) and bytes(raw[:6].numpy()) == b"header"


def test_a_file_is_not_assigned_to(file: tuple[Path, Array]) -> None:
    path, values = file
    t = Tensor.from_file(path, "float32", values.shape, 6)
    whole = path.read_bytes()

    def put(index: Any, value: Any) -> None:
        t[index] = value
    for write in (lambda: t.assign(values), lambda: t[1:].assign(0.0), lambda: t.reshape(-1).assign(1.0), lambda: put(0, 1.0),
                  lambda: put(Tensor([0, 1]), 1.0), lambda: put(t.to("CPU") > 0, 1.0)):
        with pytest.raises(DeviceError, match=r"on DISK:.*: files are read only; write to a copy"):
            write()
    assert t.device == f"DISK:{path}" and path.read_bytes() == whole
    copy = t.to("CPU").contiguous().realize()
    copy[0] = 1.0
    assert (copy.numpy()[0] == 1).all()
    np.testing.assert_array_equal(t.numpy(), values)


def test_contiguous_parts_are_copied_without_a_kernel(toys: tuple[Counting, Counting], file: tuple[Path, Array]) -> None:
    path, values = file
    on_disk = Tensor.from_file(path, "float32", values.shape, 6)
    for t in (on_disk, Tensor(values), Tensor(values).to("TOY2").realize()):
        for view, wanted in ((t[2:4], values[2:4]), (t[3, 1:4], values[3, 1:4]), (t[6, 4, 1:2], values[6, 4, 1:2]),
                             (t.reshape(35, 3)[7:9].reshape(6)[1:5], values.reshape(35, 3)[7:9].reshape(6)[1:5])):
            there = view.to("TOY")
            plan = there.prepare()
            plan.execute()
            assert [k.opts_source for k in plan.kernels] == ["copy"]
            np.testing.assert_array_equal(there.numpy(), wanted)
            assert [n for kind, n in toys[0].taken() if kind == "in"] == [wanted.nbytes]
    for part in (Tensor(values)[:, 1:3], Tensor(values).transpose(0, 1), Tensor(values)[::2]):      # others by way of a kernel
        np.testing.assert_array_equal(part.to("TOY").numpy(), part.numpy())


@pytest.mark.parametrize("seed", range(40))
def test_which_parts_are_contiguous(seed: int) -> None:
    """A view is contiguous where NumPy says so, and begins where NumPy's does."""
    rng = random.Random(seed)
    shape = tuple(rng.choice([1, 2, 3, 5]) for _ in range(rng.randint(1, 4)))
    memory = np.arange(np.prod(shape), dtype=np.int32)
    array, node = memory.reshape(shape), graph.reshape(graph.buffer(Tensor(memory).dtype, memory.size), shape)
    for _ in range(rng.randint(1, 3)):
        bounds = [sorted(rng.sample(range(n + 1), 2)) for n in array.shape]
        array, node = array[tuple(slice(*b) for b in bounds)], graph.shrink(node, [(b, e) for b, e in bounds])
    part = graph.part_of_memory(node)
    assert (part is not None) == array.flags.c_contiguous
    if part is not None:
        assert part[1] == array.flat[0]


def test_what_files_refuse(toys: tuple[Counting, Counting], file: tuple[Path, Array]) -> None:
    path, values = file
    t = Tensor.from_file(path, "float32", values.shape, 6)
    for computed in (t + 1, t.transpose(0, 1).to("CPU"), t[:, 1:3].to("TOY")):
        with pytest.raises(DeviceError, match=r"a file holds values and computes none; .*\.to\('CPU'\)"):
            computed.realize()
    for other, advice in ((Tensor(values).to("TOY"), r"\.to\('TOY'\)"), (Tensor(values), r"\.to\('CPU'\)")):
        with pytest.raises(DeviceError, match=f"copy what lies in a file, {advice}$"):
            t + other
    with pytest.raises(DeviceError, match="files are read only"):
        Tensor(X).to(f"DISK:{path}")
    with pytest.raises(ShapeError, match="no whole number of float32"):
        Tensor.from_file(path, "float32")
    with pytest.raises(DeviceError, match="end at byte"):
        Tensor.from_file(path, "float32", (200, 3))
    with pytest.raises(DeviceError, match="cannot be mapped"):
        Tensor.from_file(path / "nothing")
    assert Tensor.from_file(path, "float32", (0, 3)).shape == (0, 3)


# -- the memory itself ----------------------------------------------------------------------------------------
def test_who_has_the_newest_content(toys: tuple[Counting, Counting]) -> None:
    toy, other = toys
    buffer = buffer_of(base_of(Tensor(X.copy()).uop))
    buffer.shared = False
    memory = buffer.memory_on(toy)
    assert buffer.memory_on(toy) is memory and toy.taken() == [("in", X.nbytes)]
    new = X * 3
    toy.copy_in(memory.address, new.ctypes.data, new.nbytes)
    buffer.written_on(toy, copy=False)
    assert buffer.is_away
    close(buffer.memory_on(other) and buffer.array, new.ravel())        # copied through the host
    assert not buffer.is_away and other.taken() == [("in", X.nbytes)]
    with pytest.raises(DeviceError, match="where it does not lie"):
        buffer.written_on(toy)


def test_memory_of_another_library_is_read_anew(toys: tuple[Counting, Counting]) -> None:
    toy = toys[0]
    memory = toy.allocate(X.nbytes)
    node = graph.buffer(Tensor(X).dtype, X.size, "TOY")
    buffer_of(node).place(toy, memory, None)
    t: Any = Tensor.from_uop(graph.reshape(node, X.shape))
    for scale in (1, 2):
        theirs = X * scale
        toy.copy_in(memory.address, theirs.ctypes.data, theirs.nbytes)
        np.testing.assert_array_equal(t.numpy(), theirs)
        close((t + 1).numpy(), theirs + 1)
