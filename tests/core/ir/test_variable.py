"""Variables: the operations that extents support, the ones that they refuse, and the kernels over such extents."""
from __future__ import annotations

import numpy as np
import pytest

from svod import Tensor, Variable
from svod.core.graph import graph
from svod.core.ir import symbolic as sy
from svod.core.ir.variable import Dim, bound_values, layout_shape, shape_at, widened, without_binds
from svod.core.kernel.kernel import Kernel
from svod.core.schedule.kernel_variables import specialize
from svod.core.schedule.schedule import KernelCall, create_schedule
from svod.core.spec.evaluate import evaluate
from svod.errors import ArgumentError, ScheduleError, ShapeError, TensorIndexError

N = Variable("n", 1, 500)


def calls_of(*tensors: Tensor) -> tuple[KernelCall, ...]:
    return create_schedule(without_binds(graph.sink(*(t.uop for t in tensors)))[0]).calls


@pytest.mark.slow
def test_a_deep_expression_is_shown() -> None:
    n: Dim = N
    for _ in range(1200):
        n = (n + 3) // 2 + 1
    assert str(n).count("//2") > 1100


def test_what_is_the_same_for_every_value_is_answered() -> None:
    assert N + 1 == 1 + N and N - N == 0 and 2 * N == N * 2 and (4 * N) // 4 == N and (4 * N) % 4 == 0
    assert N <= 500 and N > 0 and N < N + 1 and not N > 500
    m, k = Variable("m", 1, 9), Variable("k", 1, 9)
    assert 64 * ((4 * N) * m) == 256 * (m * N) and (N * m) * k == N * (k * m) and (2 * N * m) // 2 == m * N and N * m != N * k
    assert N != 5 and N != N + 1 and N.bind(5) != N.bind(6) and N.bind(5) == N.bind(5)
    assert repr(N) == "n" and repr(N.bind(5) * 2 + 1) == "2*n=5+1"
    assert shape_at((N.bind(5), 3)) == (5, 3) and shape_at((N + 1,), {"n": 9}) == (10,)


@pytest.mark.parametrize("ask", [lambda: N < 5, lambda: bool(N - 1), lambda: range(N), lambda: int(N), lambda: float(N)])
def test_what_depends_on_the_value_is_refused(ask: object) -> None:
    with pytest.raises(ShapeError, match=r"depends on the value|known only when a plan runs"):
        ask()   # type: ignore[operator]


def test_what_to_do_is_said_where_an_answer_depends_on_the_value() -> None:
    with pytest.raises(ShapeError, match=r"n=50 <= 16 .* declare n with bounds .* \('n', 1, 16\) or \('n', 17, 500\)"):
        assert N.bind(50) <= 16
    with pytest.raises(ShapeError, match=r"\(\(n\+1\)//2\) < 9 .* declare n with bounds for which the answer is always the same, or"):
        assert (N + 1) // 2 < 9


def test_bad_variables_and_values_are_named() -> None:
    for bad in (("1n", 1, 2), ("n", 2, 2), ("n", -1, 2), ("n", 1, 2.5)):
        with pytest.raises(ArgumentError, match=r"Variable\("):
            Variable(*bad)      # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="hint"):
        Variable("n", 1, 5, hint=9)
    with pytest.raises(ArgumentError, match=r"variable n=501 is outside bounds \[1, 500\]"):
        N.bind(501)
    with pytest.raises(ShapeError, match="has no value; bind its variables"):
        shape_at((N,))


def test_shapes_go_through_views() -> None:
    x = Tensor.zeros(500, 4, 6)[:N]
    assert x.permute(1, 0, 2).shape == (4, N, 6) and x.reshape(N, 24).shape == (N, 24) and x.reshape(N, -1).shape == (N, 24)
    assert x.reshape(N * 4, 6).shape == (4 * N, 6) and x[2 - 2:].shape == (N, 4, 6) and x[:, 1:3].shape == (N, 2, 6)
    assert Tensor.cat([x, x], 0).shape == (2 * N, 4, 6) and x.flip(0).shape == (N, 4, 6) and x.pad((0, 0, 0, 0, 1, 0)).shape[0] == N + 1
    with pytest.raises(ShapeError, match="depends on a variable"):
        x.permute(1, 0, 2).reshape(4 * N, 6)
    with pytest.raises((ShapeError, TensorIndexError)):
        x[:5]
    with pytest.raises(ShapeError, match="has extents n=5 and n=6"):
        Tensor.zeros(500)[:N.bind(5)] + Tensor.zeros(500)[:N.bind(6)]
    with pytest.raises(ShapeError, match="at least 1"):
        Tensor.zeros(9)[:Variable("m", 0, 9)]
    with pytest.raises(ShapeError, match="a library kernel takes constant extents only"):
        graph.library_kernel("SCAN", ("ADD",), x.dtype, x.uop)


def test_two_values_of_a_variable_in_one_schedule_are_refused() -> None:
    x = Tensor(np.zeros(500, np.float32))
    outputs = [x[:N.bind(k)] + 1 for k in (5, 6)]
    with pytest.raises(ScheduleError, match=r"bind mismatch on n, 5 != 6"):
        Tensor.realize_batch(outputs)
    with pytest.raises(ScheduleError, match="two variables are called n"):
        Tensor.realize_batch([x[:N.bind(5)] + 1, x[:Variable("n", 1, 400).bind(5)] + 1])


def test_bounds_are_widened_in_the_key() -> None:
    assert [widened(n) for n in (1, 15, 16, 17, 500, 512, 1025)] == [1, 15, 16, 18, 512, 512, 1152]
    assert layout_shape((N, 7)) == (512, 7)

    def key(n: Variable, rows: int) -> str:
        x, w = Tensor(np.zeros((rows, 8), np.float32))[:n], Tensor(np.zeros((8, 16), np.float32))
        call, = calls_of((x @ w).relu())
        assert [v.arg[0] for v in call.variables] == [n.name]
        return Kernel(call.ast).key
    assert key(N, 500) == key(Variable("rows", 1, 512), 512)
    assert key(N, 500) != key(Variable("n", 1, 600), 600)


def test_a_kernel_means_what_it_means_with_its_values_written_in() -> None:
    m = Variable("m", 1, 9)
    x = Tensor(np.zeros((9, 9), np.float32))[:m, :m]
    call, = calls_of((x + 1).softmax(-1))
    kernel = Kernel(call.ast)
    assert kernel.variables == {"v0": (1, 9)} and "?×?" in repr(kernel)
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(p.arg.size).astype(np.float32) for p in kernel.params]
    for value in (1, 4, 9):
        fixed = specialize(call.ast, {"v0": value})
        assert not any(sy.is_symbolic(a.node) for a in Kernel(fixed).axes)
        np.testing.assert_array_equal(evaluate(call.ast, args, {"v0": value})[0], evaluate(fixed, args)[0])


def test_a_dim_has_a_text_and_a_hash() -> None:
    assert isinstance(N + 1, Dim) and hash(N + 1) == hash(1 + N) and f"{N + 1:>5}" == "  n+1"


def test_what_an_extent_is_not_compared_with_and_has_no_value_for() -> None:
    with pytest.raises(ShapeError, match="is compared with float; extents are compared with ints"):
        _ = N < 2.5
    with pytest.raises(ScheduleError, match=r"variable n has no value here; bind it: n.bind"):
        bound_values(N + 1)
    with pytest.raises(ArgumentError, match=r"variable n is bound to an int, got 2\.5"):
        N.bind(2.5)  # type: ignore[arg-type]
