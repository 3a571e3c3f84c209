"""Shapes that depend on variables, end to end: one plan for every value, NumPy's numbers, and chains of opts on such kernels."""
from __future__ import annotations

import ctypes
import mmap
import random
import sys
from typing import Any

import numpy as np
import pytest

import svod
from svod import PrepareConfig, Tensor, Variable
from svod.compile.cpu.host import host_target
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.plan.memory_planner import PlannerMode
from svod.compile.plan.running import values
from svod.core.cost.sketch import heuristic
from svod.core.graph import graph
from svod.core.graph.allocator import HUGE_PAGE, LARGE_ARRAYS
from svod.core.ir.variable import layout_shape, without_binds
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import HOST
from svod.core.schedule.schedule import create_schedule
from svod.core.spec.evaluate import evaluate
from svod.errors import DTypeError, KernelOptError, LaunchError, ScheduleError
from svod.tune.search.actions import default_actions, lanes_of
from tests import draws
from tests.interpreted import interpret

Array = np.ndarray[Any, np.dtype[Any]]
ROWS, COLUMNS, DEPTH = 37, 21, 13
N, M = Variable("n", 1, ROWS), Variable("m", 1, COLUMNS)


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


A, B, C = drawn(ROWS, DEPTH), drawn(DEPTH, COLUMNS, seed=1), drawn(ROWS, COLUMNS, seed=2)


def softmax(a: Array) -> Array:
    e = np.exp(a - a.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


PLANNED = 6     # number of kernels that get a plan; all kernels are lowered


def of_tensors(n: Any, m: Any) -> list[Tensor]:
    a, b, c = Tensor(A)[:n], Tensor(B)[:, :m], Tensor(C)[:n, :m]
    scores = c @ c.T
    causal = a.unsqueeze(0)
    return [(a + 1).relu(), a.var(0, 0), a @ b, causal.scaled_dot_product_attention(causal, causal, is_causal=True),
            Tensor.cat([a, Tensor(A)[:5]], 0) * 2, c.argmax(1),
            a.sum(0), a.mean(), a.T.softmax(-1), scores.softmax(-1) @ c, a.flip(0) * 2, c.mean(1, keepdim=True) + c,
            (a @ b).relu().sum(0), Tensor.arange(n) * 3, c.T.reshape(m, n, 1).permute(1, 0, 2) + 1]


def of_arrays(n: int, m: int) -> list[Array]:
    a, b, c = A[:n], B[:, :m], C[:n, :m]
    masked = np.where(np.tril(np.ones((n, n), bool)), a @ a.T / np.sqrt(DEPTH), -np.inf)
    return [np.maximum(a + 1, 0), a.var(0), a @ b, (softmax(masked) @ a)[None], np.concatenate([a, A[:5]]) * 2, c.argmax(1),
            a.sum(0), a.mean(), softmax(a.T), softmax(c @ c.T) @ c, a[::-1] * 2, c.mean(1, keepdims=True) + c,
            np.maximum(a @ b, 0).sum(0), np.arange(n) * 3, c[:, :, None] + 1]


def assert_close(found: Array, want: Array, what: str) -> None:
    assert found.shape == np.shape(want), what
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5, err_msg=what)


@pytest.mark.parametrize("mode", ["arena", "remap", "disabled"])
def test_one_plan_for_every_size(mode: PlannerMode) -> None:
    tensors = of_tensors(N, M)[:PLANNED]
    plan = Tensor.prepare_batch(tensors, PrepareConfig(memory_planner=mode, threads=2))
    kernels = plan.kernels
    for n, m in ((1, 1), (ROWS, COLUMNS), (7, 16), (16, 7), (33, 2), (2, 20)):
        plan.execute_with_vars({"n": n, "m": m})
        for i, (flat, t, want) in enumerate(zip(plan.outputs, tensors, of_arrays(n, m)[:PLANNED], strict=True)):
            whole = flat.reshape(layout_shape(t.shape))
            assert_close(whole[tuple(slice(0, k) for k in np.shape(want))], want, f"output {i} at n={n}, m={m}")
    assert plan.kernels is kernels


@pytest.mark.skipif(sys.platform != "linux", reason="the pages in memory are counted by Linux's mincore")
def test_memory_of_larger_sizes_than_a_run_had_takes_no_pages() -> None:
    """Intermediates lie where those of the largest sizes would, of which a plan touches nothing itself."""
    n, most = Variable("n", 1, 1 << 14), 1 << 14
    y = (Tensor(np.ones((most, 256), np.float32))[:n] + 1).contiguous() @ Tensor(np.ones((256, 8), np.float32))
    LARGE_ARRAYS.release()              # freed blocks have pages
    plan = y.prepare(PrepareConfig(db=":none:"))
    shared = plan.parts[HOST].shared
    assert shared is not None and plan.memory.shared >= most << 10
    first, pages = -(-shared.address // mmap.PAGESIZE) * mmap.PAGESIZE, plan.memory.shared // mmap.PAGESIZE
    resident = (ctypes.c_ubyte * pages)()

    def resident_pages() -> int:
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), resident) == 0
        return sum(p & 1 for p in resident)
    assert resident_pages() == 0
    plan.execute(n=3)
    np.testing.assert_array_equal(plan.outputs[0][:24], np.full(24, 512))
    assert 0 < resident_pages() <= 2 * HUGE_PAGE // mmap.PAGESIZE


def test_bound_tensors_are_realised_with_the_kernels_of_the_first() -> None:
    for n, m in ((9, 4), (1, COLUMNS), (ROWS, 1)):
        for i, (t, want) in enumerate(zip(of_tensors(N.bind(n), M.bind(m))[:PLANNED], of_arrays(n, m), strict=False)):
            assert_close(t.numpy(), want, f"tensor {i} at n={n}, m={m}")
    x = Tensor(A)[:N.bind(5)].exp().realize()
    assert_close((x + x).sum(1).numpy(), 2 * np.exp(A[:5]).sum(1), "a realised tensor of a symbolic shape is an input like another")


def test_values_of_a_plan() -> None:
    plan = (Tensor(A)[:N] + 1).prepare()
    with pytest.raises(LaunchError, match="variables n have no value"):
        plan.execute()
    for value in (0, ROWS + 1):
        with pytest.raises(LaunchError, match=rf"variable n={value} is outside bounds \[1, {ROWS}\]"):
            plan.execute(n=value)
    with pytest.raises(LaunchError, match="variables k were given; the plan has n"):
        plan.execute_with_vars({"k": 1})
    plan.execute(n=3)
    plan.execute()
    assert plan.variable_values() == {"n": 3}


def test_sizes_that_were_met_lately_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size unused for longest goes first; values of variables on which no number of iterations depends, as m and k, make no more."""
    monkeypatch.setattr(values, "MOST_FITS", 3)
    large, k = np.random.default_rng(0).random((257, 31), np.float32), Variable("k", 0, 9)
    n, m = Variable("n", 1, 257), Variable("m", 1, 31)
    plan = Tensor.prepare_batch([((Tensor(large)[:n, :m].exp() @ Tensor(np.ones((31, 7), np.float32))[:m]).contiguous() * 2 + k)],
                                PrepareConfig(db=":none:"))
    sizes = [(3, 7), (257, 31), (3, 7), (1, 1), (3, 7), (64, 16), (3, 7), (257, 31), (3, 7)]
    fits = plan._values._fits
    for at, (rows, columns) in enumerate(sizes):
        kept = fits.get((rows,))
        plan.execute(n=rows, m=columns, k=at)
        want = np.exp(large[:rows, :columns]).sum(1)
        assert_close(plan.outputs[0][:7 * rows].reshape(rows, 7), np.repeat(want[:, None] * 2 + at, 7, 1), f"{rows} × {columns}")
        assert kept is None or fits[rows,] is kept
        assert list(fits) == list(dict.fromkeys((rows,) for rows, _ in reversed(sizes[:at + 1])))[2::-1]
        plan.execute(k=at + 1)
        assert_close(plan.outputs[0][:1], [want[0] * 2 + at + 1], "another value")


def test_jit_takes_another_value_in_each_call() -> None:
    calls = []

    @svod.jit
    def step(cache: Tensor, row: Tensor, at: Any) -> Tensor:
        calls.append(at)
        cache[at:at + 1].assign(row.reshape(1, DEPTH))
        seen = cache[:at + 1]
        return (seen @ row).softmax(-1) @ seen

    position = Variable("at", 0, ROWS - 1)
    cache, held = Tensor(np.zeros((ROWS, DEPTH), np.float32)).realize(), np.zeros((ROWS, DEPTH), np.float32)
    for k in (0, 1, 2, 20, ROWS - 1):
        held[k] = A[k]
        want = softmax(held[:k + 1] @ A[k]) @ held[:k + 1]
        assert_close(step(cache, Tensor(A[k]), position.bind(k)).numpy(), want, f"step {k}")
    assert len(calls) == 1 and len(step.plans) == 1
    scaled = svod.jit(lambda x, n: x[:n] * 2)
    assert [scaled(Tensor(A), N.bind(k)).numpy().shape for k in (4, 9)] == [(4, DEPTH), (9, DEPTH)]
    with pytest.raises(ScheduleError, match=r"bind mismatch on n, 4 != 5"):
        svod.jit(lambda x, n, m: x[:n])(Tensor(A), N.bind(4), N.bind(5))


def kernels() -> list[Kernel]:
    found = {}
    for t in of_tensors(N, M):
        for call in create_schedule(without_binds(graph.sink(t.uop))[0]).calls:
            found[call.ast] = Kernel(call.ast)
    return list(found.values())


@pytest.mark.slow
def test_random_chains_agree_with_the_evaluator() -> None:
    rng, numbers = random.Random(3), np.random.default_rng(3)
    target = host_target(2)
    for kernel in kernels():
        start = Scheduler(kernel, target)
        state = start
        for _ in range(rng.randint(1, 4)):
            for opt in rng.sample(options := list(default_actions(state, lanes_of(kernel, target))), min(len(options), 8)):
                try:
                    state = apply_opt(state, opt)
                    break
                except KernelOptError:
                    continue
        args = [numbers.standard_normal(p.arg.size).astype(np.float32) if p.dtype.is_float else np.zeros(p.arg.size, np.int64)
                for p in kernel.params]
        args = [a.astype(np.int32) if p.dtype.name == "int32" else a for a, p in zip(args, kernel.params, strict=True)]
        for chosen in (heuristic(start), state):
            try:
                program = lower(chosen)
            except KernelOptError:
                assert chosen is state, "the heuristic's chain can be lowered"
                continue
            validate(program)
            values = {v: rng.randint(low, high) for v, (low, high) in kernel.variables.items()}
            want = evaluate(kernel.ast, args, values)
            got = [a.copy() for a in args]
            interpret(program, got, values, slices=rng.choice([None, 3]))
            for slot, w in zip(kernel.outs, want, strict=True):
                np.testing.assert_allclose(got[slot], w, rtol=1e-4, atol=1e-4, err_msg=f"{kernel} {values} {chosen}")


def test_jit_takes_arguments_of_symbolic_shapes() -> None:
    """Views, realised tensors and computed ones of a bound shape: one plan, results of the shape of the call; an input given back."""
    f = svod.jit(lambda x, y: (x.softmax(-1) @ y, x, x.reshape(x.shape[0] * DEPTH), y.T))
    other = drawn(ROWS, ROWS, seed=5)
    for i, k in enumerate((5, 1, ROWS, 17)):
        n = N.bind(k)
        x = (Tensor(A)[:n], (Tensor(A)[:n] * 1).realize(), Tensor(A)[:n] + 0, Tensor(other[:, :DEPTH].copy())[:n] * 0 + Tensor(A)[:n])[i]
        y = Tensor(B)[:, :M.bind(i + 2)]
        found = f(x, y)
        for got, want in zip(found, (softmax(A[:k]) @ B[:, :i + 2], A[:k], A[:k].ravel(), B[:, :i + 2].T), strict=True):
            assert_close(got.numpy(), want, f"n={k}")
        assert_close((found[0] + 1).sum(0).numpy(), (softmax(A[:k]) @ B[:, :i + 2] + 1).sum(0), f"computed from a result, n={k}")
    assert len(f.plans) == 1
    f(Tensor(A)[:5], Tensor(B))
    assert len(f.plans) == 2
    with pytest.raises(ScheduleError, match=r"bind mismatch on n, 4 != 5"):
        f(Tensor(A)[:N.bind(4)], Tensor(drawn(ROWS, 3))[:N.bind(5)])


@pytest.mark.parametrize("make", [
    lambda n: Tensor(A)[:n], lambda n: (Tensor(A)[:n] * 1).realize(), lambda n: Tensor(A.T.copy())[:, :n].T.contiguous(),
    lambda n: Tensor(A.T.copy())[:, :n].realize().T], ids=["view", "realized", "contiguous", "turned"])
def test_tensors_of_symbolic_shapes_are_assigned_to(make: Any) -> None:
    def step(x: Tensor) -> Tensor:
        x.assign(x * 2 + 1)
        return x.sum()
    for k in (3, ROWS):
        want = A[:k] * 2 + 1
        t = make(N.bind(k))
        assert_close(step(t).numpy(), want.sum(), f"n={k}")
        assert_close(t.numpy(), want, f"n={k}")
        t[0:1] = 9
        assert_close(t.numpy(), np.concatenate([np.full((1, DEPTH), 9, np.float32), want[1:]]), f"a part, n={k}")
    f = svod.jit(step)
    for k in (5, 1):
        t, want = make(N.bind(k)), A[:k]
        for _ in range(2):
            want = want * 2 + 1
            assert_close(f(t).numpy(), want.sum(), f"jit, n={k}")
            assert_close(t.numpy(), want, f"jit, n={k}")
    t = Tensor.full((N.bind(4),), 2.0)
    t[0:1] = 9
    assert t.tolist() == [9, 2, 2, 2]


@pytest.mark.parametrize("seed", range(draws.count(2)))
def test_what_whole_tiles_leave_agrees_with_the_evaluator(seed: int) -> None:
    """Tiles of symbolic axes, of rows and of vectors, at the sizes around them: remainders are computed in smaller steps."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    n, m = Variable("n", 1, 41), Variable("m", 1, 70)
    a, b = Tensor.zeros(41, 19).contiguous()[:n], Tensor.zeros(70, 19).contiguous()[:m]
    target = host_target(1)
    for t in (a @ b.T, (b.T @ (b * 2)), a.unsqueeze(0).scaled_dot_product_attention(b.unsqueeze(0), b.unsqueeze(0)), b.T + 1,
              b.T.softmax(-1)):
        call = create_schedule(without_binds(graph.sink(t.uop))[0]).calls[-1]
        kernel = Kernel(call.ast)
        state = heuristic(Scheduler(kernel, target))
        if seed:
            state = Scheduler(kernel, target)
            for name in rng.sample(sorted(r.name for r in state.rows), len(state.rows)):
                try:
                    state = apply_opt(state, Opt("UPCAST", name, rng.choice([2, 3, 6, 16, 32, 64])))
                except KernelOptError:
                    continue
        try:
            program = lower(state)
        except KernelOptError:
            assert seed, "the heuristic's chain can be lowered"
            continue
        validate(program)
        args = [numbers.standard_normal(p.arg.size).astype(np.float32) for p in kernel.params]
        for value in (1, 2, 5, 6, 7, 16, 17, 31, 33, 41, 63, 65, 70):
            values = {v: min(high, value if v == "v0" else rng.choice([1, 6, 17, value])) for v, (_, high) in kernel.variables.items()}
            want = evaluate(kernel.ast, args, values)
            got = [x.copy() for x in args]
            interpret(program, got, values)
            for slot, w in zip(kernel.outs, want, strict=True):
                np.testing.assert_allclose(got[slot], w, rtol=1e-4, atol=1e-4, err_msg=f"{kernel} {values} {state}")


def test_opts_that_need_whole_numbers_are_refused() -> None:
    call, = create_schedule(graph.sink((Tensor(A)[:N] + 1).uop)).calls
    state = Scheduler(Kernel(call.ast), host_target(1))
    with pytest.raises(KernelOptError, match="depends on a variable; its loops end where they do"):
        apply_opt(state, Opt("PADTO", "o0", 16))


def test_a_mean_in_float64_divides_by_the_exact_count() -> None:
    """2**24 + 1 is no float32."""
    n = Variable("many", 1, 1 << 25).bind((1 << 24) + 1)
    assert Tensor.ones(n, dtype="float64").mean().item() == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int64", "float32", "float16", "bfloat16"])
def test_a_variable_is_an_operand(dtype: str) -> None:
    """Its number in the run, which widens no tensor; on both sides of operators, in masks, of comparisons the reflected ones too."""
    n = Variable("n", 1, 9)
    x = Tensor(np.array([-3, 2, 5, 7])).cast(dtype).realize()

    def f(t: Tensor, k: Any) -> tuple[Tensor, ...]:
        return t + k, 2 * k - t, t * (k + 1), t < k, k <= t, k == t, t != k, t.where(t > k, k), t.maximum(k)
    jitted = svod.jit(f)
    for k in (1, 5, 9):
        expected = f(x, k)
        for got in (f(x, n.bind(k)), jitted(x, n.bind(k))):
            assert [(g.dtype, g.float().tolist()) for g in got] == [(e.dtype, e.float().tolist()) for e in expected]
        assert Tensor(n.bind(k)).item() == k and Tensor(n.bind(k) * 3, "float32").tolist() == 3 * k
    assert len(jitted.plans) == 1
    positions = svod.jit(lambda k: Tensor.arange(9) + k < 10)
    for k in (4, 9):
        assert positions(n.bind(k)).tolist() == [i + k < 10 for i in range(9)]
    with pytest.raises(DTypeError, match="does not fit int8"):
        Tensor(np.ones(2, np.int8)) + n * 100
