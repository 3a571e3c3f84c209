"""`call_kernel`: hand-written kernels on tensors, lazy like assignments, against the same steps in NumPy."""
from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.errors import ArgumentError, CompileError, LaunchError, ScheduleError
from tests.call_trees import do, interpret, random_arrays, random_tree
from tests.draws import a_half
from tests.hand_kernels import Ast, gemm, two_outputs


def step(width: int, steps: int) -> UOp:
    """The step h = h·0.5 + x[i] for a row x[i] of `steps`."""
    k = Ast()
    i = UOp(Ops.DEFINE_VAR, dtypes.index, (), ("i", 0, steps - 1))
    h, x = k.param(0, width), k.param(1, steps * width)
    r, = k.axes(width)
    return k.sink(k.store(h, r, k.load(h, r) * 0.5 + k.load(x, i * width + r), r))


def rows(shape: tuple[int, ...], seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("width", "steps"), [(1, 1), (7, 5), (33, 2), (16, 9)])
def test_a_loop_of_calls(width: int, steps: int) -> None:
    start, x = rows((width,)), rows((steps, width), 2)
    state, before = Tensor(start.copy()), Tensor(start)
    later = state * 3
    with svod.call_loop(steps) as i:
        returned, = svod.call_kernel(step(width, steps), state, Tensor(x) + 1, i=i)
    want = start
    for row in x:
        want = want * np.float32(0.5) + (row + 1)
    assert returned is state
    np.testing.assert_allclose((state + before).numpy(), want + start, rtol=1e-6)
    np.testing.assert_array_equal(later.numpy(), start * 3)        # made before the call


def test_a_plan_runs_a_loop_again_and_compiles_its_kernel_once() -> None:
    x = rows((6, 8))
    state = Tensor(np.zeros(8, np.float32))
    with svod.call_loop(6) as i:
        svod.call_kernel(step(8, 6), state, Tensor(x), i=i)
    plan = state.prepare()
    assert len(plan.kernels) == 6 and len({k.key for k in plan.kernels}) == 1
    want = np.zeros(8, np.float32)
    for _ in range(2):
        plan.execute()
        for row in x:
            want = want * np.float32(0.5) + row
    np.testing.assert_allclose(state.numpy(), want, rtol=1e-6)
    with pytest.raises(LaunchError, match="variables i were given; the plan has none"):     # a loop's counter cannot be given as a variable
        plan.execute(i=2)


def test_a_variable_given() -> None:
    x, state = rows((6, 8)), Tensor(np.zeros(8, np.float32))
    svod.call_kernel(step(8, 6), state, Tensor(x), i=4)
    np.testing.assert_array_equal(state.numpy(), x[4])


def test_a_gemm_into_memory_that_is_made_for_it() -> None:
    a, b = rows((17, 23)), rows((23, 19), 2)
    c, = svod.call_kernel(gemm(17, 19, 23), Tensor.zeros(17, 19), Tensor(a), Tensor(b))
    np.testing.assert_allclose(c.relu().numpy(), np.maximum(a @ b, 0), rtol=1e-4, atol=1e-5)


def test_what_one_call_writes_is_computed_together_and_once() -> None:
    """Realising one of two outputs runs the kernel; the other is in memory afterwards, and the kernel does not run again for it."""
    a, b = rows((65,)), rows((65,), 2)
    p, q = Tensor(np.zeros(65, np.float32)), Tensor(np.ones(65, np.float32))
    old = q + 1
    svod.call_kernel(two_outputs(5, 13), p, q, Tensor(a), Tensor(b))
    with pytest.raises(ScheduleError, match="prepare them in one batch"):
        p.prepare()
    p.realize()
    assert "realized" in repr(q)
    np.testing.assert_allclose(p.numpy(), a + b, rtol=1e-6)
    np.testing.assert_allclose(q.numpy(), (a * b).reshape(5, 13).T.reshape(-1), rtol=1e-6)
    np.testing.assert_array_equal(old.numpy(), np.full(65, 2, np.float32))


def test_what_is_refused() -> None:
    x, state = Tensor(rows((6, 8))), Tensor(np.zeros(8, np.float32))
    ast = step(8, 6)
    with svod.call_loop(2) as over:
        svod.call_kernel(ast, Tensor(np.zeros(8, np.float32)), x, i=over)
    k = Ast()
    y, z, (r,) = k.param(0, 8), k.param(1, 8), k.axes(8)
    shared = k.sink(k.store(y, r, k.load(y, r), r), k.store(z, r, k.load(z, r), r))
    for error, said, given in (
            (ArgumentError, "a tensor per slot, got ndarray", lambda: svod.call_kernel(ast, state, x.numpy(), i=1)),
            (ArgumentError, "reads no variable j; it reads i", lambda: svod.call_kernel(ast, state, x, j=1)),
            (ArgumentError, "i is the counter of a call_loop that this call", lambda: svod.call_kernel(ast, state, x, i=over)),
            (ArgumentError, "turns must be an int, got 2.5 of float", lambda: svod.call_loop(2.5)),     # type: ignore[arg-type]
            (ScheduleError, "invalid bounds of the RANGE of a loop of calls: first 0, last -1", lambda: svod.call_loop(0)),
            (ArgumentError, "i must be an int or the counter .*, got '3' of str", lambda: svod.call_kernel(ast, state, x, i="3")),
            (ArgumentError, "i must be an int .*, got 2.7 of float", lambda: svod.call_kernel(ast, state, x, i=2.7)),
            (ArgumentError, "entered where it is made, once", over.__enter__),
            (ScheduleError, "takes a whole array", lambda: svod.call_kernel(ast, Tensor(rows((2, 8)))[1], x, i=1)),
            (ScheduleError, "outside bounds", lambda: svod.call_kernel(ast, state, x, i=6)),
            (ScheduleError, "slot 1 .* takes 48 elements of float32; given are 40", lambda: svod.call_kernel(ast, state, x[1:], i=1)),
            (CompileError, "belongs to two stages", lambda: svod.call_kernel(shared, state, Tensor(np.ones(8, np.float32)))),
            (ScheduleError, "the body of a CALL is a kernel", lambda: svod.call_kernel(UOp(Ops.SINK, dtypes.void), state))):
        with pytest.raises(error, match=said):
            given()
    assert "realized" in repr(state)     # nothing was assigned


@pytest.mark.parametrize("seed", a_half(range(100, 108)))
def test_loops_in_loops_do_what_a_plain_interpreter_does(seed: int) -> None:
    rng = random.Random(seed)
    tree, start = random_tree(rng), random_arrays(rng)
    state = [Tensor(a.copy()) for a in start]
    old = [t + 1 for t in state]
    do(tree, state)
    wanted = [a.copy() for a in start]
    interpret(tree, wanted)
    for found, want in zip((*state, *old), (*wanted, *(a + 1 for a in start)), strict=True):
        np.testing.assert_array_equal(found.numpy(), want, str(tree))


def test_a_loop_calls_what_does_not_take_its_counter_and_computes_values_before_it() -> None:
    x = rows((6, 8))
    state, other = Tensor(np.zeros(8, np.float32)), Tensor(np.zeros(8, np.float32))
    with svod.call_loop(2):
        svod.call_kernel(step(8, 6), state, Tensor(x) * 2, i=1)
        with svod.call_loop(3) as j:
            svod.call_kernel(step(8, 6), other, Tensor(x), i=j)
    want = [np.zeros(8, np.float32), np.zeros(8, np.float32)]
    for _ in range(2):
        want[0] = want[0] * np.float32(0.5) + x[1] * 2
        for row in x[:3]:
            want[1] = want[1] * np.float32(0.5) + row
    np.testing.assert_allclose(state.numpy(), want[0], rtol=1e-6)
    np.testing.assert_allclose(other.numpy(), want[1], rtol=1e-6)


def test_what_a_loop_leaves_is_not_read_inside_it() -> None:
    x, state = Tensor(rows((6, 8))), Tensor(np.zeros(8, np.float32))
    with svod.call_loop(3):
        svod.call_kernel(step(8, 6), state, x, i=2)
        with pytest.raises(ScheduleError, match="of a call_loop, what its calls leave is read after its `with`"):
            (state + 1).numpy()
        early = state * 2
    with pytest.raises(ScheduleError, match="by MUL, of what a call leaves inside a loop of calls"):
        early.numpy()
    np.testing.assert_allclose(state.numpy(), x.numpy()[2] * 1.75, rtol=1e-6)


def test_a_loop_that_ends_in_an_error_calls_nothing() -> None:
    x, state, other = Tensor(rows((6, 8))), Tensor(np.zeros(8, np.float32)), Tensor(np.ones(8, np.float32))
    with svod.call_loop(2) as i:
        with pytest.raises(KeyError), svod.call_loop(3) as j:
            svod.call_kernel(step(8, 6), state, x, i=j)
            raise KeyError
        svod.call_kernel(step(8, 6), other, x, i=i)
    assert "realized" in repr(state)
    np.testing.assert_array_equal(state.numpy(), np.zeros(8, np.float32))
    np.testing.assert_allclose(other.numpy(), 0.25 + x.numpy()[0] * 0.5 + x.numpy()[1], rtol=1e-6)


def test_a_captured_function_runs_its_loops_each_time() -> None:
    x = rows((6, 8))

    @svod.jit
    def total(start: Tensor, given: Tensor) -> Tensor:
        state = start.clone()
        with svod.call_loop(2), svod.call_loop(6) as i:
            svod.call_kernel(step(8, 6), state, given, i=i)
        return state + 1

    for n in range(3):
        want = np.full(8, n, np.float32)
        for row in (*x, *x):
            want = want * np.float32(0.5) + row
        np.testing.assert_allclose(total(Tensor(np.full(8, n, np.float32)), Tensor(x)).numpy(), want + 1, rtol=1e-5)
