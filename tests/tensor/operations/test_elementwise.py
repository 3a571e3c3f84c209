"""Arithmetic, comparisons and functions against NumPy."""
from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.core.ir.dtype import BY_NAME, promote
from svod.errors import DTypeError, ShapeError
from svod.tensor import Tensor, where
from tests.draws import a_half, a_quarter, draws
from tests.tensor.checking import check
from tests.tensor.strategies import Array, any_dtype, float_dtype, float_result, int_dtype, make, seeds, shapes, views

few = draws(8)
ARITHMETIC = [operator.add, operator.sub, operator.mul]
COMPARE = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


def common(a: str, b: str) -> np.dtype[Any]:
    return np.dtype(promote(BY_NAME[a], BY_NAME[b]).name)


def quiet(f: Callable[..., Any], *args: Any) -> Any:
    with np.errstate(all="ignore"):
        return f(*args)


@st.composite
def pairs(draw: st.DrawFn, dtype: st.SearchStrategy[str] = any_dtype, special: bool = True) -> tuple[Array, Array]:
    """Two arrays that broadcast."""
    shape = draw(shapes())
    other = [n if draw(st.booleans()) else 1 for n in shape][draw(st.integers(0, len(shape))):]
    a, b = make(shape, draw(dtype), draw(seeds), special), make(tuple(other), draw(dtype), draw(seeds), special)
    return (a, b) if draw(st.booleans()) else (b, a)


@pytest.mark.parametrize("op", ARITHMETIC)
@few
@given(pair=pairs())
def test_arithmetic(op: Callable[[Any, Any], Any], pair: tuple[Array, Array]) -> None:
    a, b = pair
    kind = common(a.dtype.name, b.dtype.name)
    if kind.kind == "b" and op is operator.sub:
        with pytest.raises(DTypeError):
            op(Tensor(a), Tensor(b))
    else:
        check(op(Tensor(a), Tensor(b)), quiet(lambda: op(a.astype(kind), b.astype(kind))))


@pytest.mark.parametrize("op", COMPARE)
@few
@given(pair=pairs())
def test_comparisons(op: Callable[[Any, Any], Any], pair: tuple[Array, Array]) -> None:
    a, b = pair
    kind = common(a.dtype.name, b.dtype.name)
    exact = "f" not in a.dtype.kind + b.dtype.kind       # NumPy compares integers exactly
    check(op(Tensor(a), Tensor(b)), quiet(lambda: op(a, b) if exact else op(a.astype(kind), b.astype(kind))))


@pytest.mark.parametrize(("op", "signed"), a_quarter(itertools.product(COMPARE, ["int8", "int16", "int32", "int64"])))
def test_integers_without_a_common_type_compare_exactly(op: Callable[[Any, Any], Any], signed: str) -> None:
    edges = [0, 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
    info = np.iinfo(signed)
    a = np.array(edges, np.uint64)[:, None]
    b = np.array([v for v in (*edges, *(-v for v in edges), info.min, info.max) if info.min <= v <= info.max], signed)
    check(op(Tensor(a), Tensor(b)), op(a, b))
    check(op(Tensor(b), Tensor(a)), op(b, a))
    for number in (-1, 2**53 + 1, 2**63, 2**64 - 1, 2**64, -2**80):
        check(op(Tensor(a), number), op(a.astype(object), number).astype(bool))
        check(op(Tensor(b), number), op(b.astype(object), number).astype(bool))


@few
@given(pair=pairs(int_dtype))
def test_integer_division(pair: tuple[Array, Array]) -> None:
    a, b = pair
    kind = common(a.dtype.name, b.dtype.name)
    if kind.kind == "f":  # int64 with uint64
        return
    a, b = a.astype(kind), b.astype(kind)
    check(Tensor(a) // Tensor(b), quiet(np.floor_divide, a, b))
    check(Tensor(a) % Tensor(b), quiet(np.remainder, a, b))
    check(Tensor(a) / Tensor(b), quiet(np.true_divide, a.astype(np.float32), b.astype(np.float32)))


@few
@given(x=views(int_dtype, special=True), divisor=st.sampled_from([1, 2, 3, 7, -1, -2, -5, 0]))
def test_integer_division_by_scalar(x: tuple[Tensor, Array], divisor: int) -> None:
    t, a = x
    if divisor < 0 and a.dtype.kind == "u":
        with pytest.raises(DTypeError):
            t // divisor
        return
    check(t // divisor, quiet(np.floor_divide, a, a.dtype.type(divisor)))
    check(t % divisor, quiet(np.remainder, a, a.dtype.type(divisor)))


@pytest.mark.parametrize("dtype", a_half(["float16", "float32", "float64"]))
def test_float_division_that_rounds_down_at_the_ends_of_the_range(dtype: str) -> None:
    """With infinite operands, and quotients that underflow, the results are NumPy's, except for the sign of a zero."""
    tiny, huge = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max
    ends = np.array([0.0, -0.0, 3, -3, 5.5, -5.5, tiny, -tiny, huge, -huge, np.inf, -np.inf, np.nan], dtype)
    a, b = ends[:, None], np.array([0.0, 2, -2, huge, -huge, np.inf, -np.inf, np.nan], dtype)[None]
    for op in (operator.floordiv, operator.mod):
        np.testing.assert_array_equal(op(Tensor(a), Tensor(b)).numpy(), quiet(op, a, b), op.__name__)
    for divisor in (2.0, -4.0, math.inf, -math.inf):
        np.testing.assert_array_equal((Tensor(ends) % divisor).numpy(), quiet(operator.mod, ends, ends.dtype.type(divisor)))
        np.testing.assert_array_equal((Tensor(ends) // divisor).numpy(), quiet(operator.floordiv, ends, ends.dtype.type(divisor)))


@few
@given(pair=pairs(float_dtype, special=False))
def test_float_division(pair: tuple[Array, Array]) -> None:
    a, b = pair
    kind = common(a.dtype.name, b.dtype.name)
    a, b = a.astype(kind), b.astype(kind)
    check(Tensor(a) / Tensor(b), quiet(np.true_divide, a, b))
    check(Tensor(a) // Tensor(b), quiet(operator.floordiv, a, b))
    whole = Tensor(np.array([5.5, -5.5, 5.5, -5.5], kind)) % Tensor(np.array([2, 2, -2, -2], kind))
    check(whole, np.array([1.5, 0.5, -0.5, -1.5], kind))


@few
@given(x=views(any_dtype), value=st.sampled_from([2, -3, 0.5, True]))
def test_scalars_do_not_widen(x: tuple[Tensor, Array], value: float) -> None:
    t, a = x
    kind: np.dtype[Any] = a.dtype
    of_bools = kind.kind == "b"
    if isinstance(value, float) and kind.kind != "f":
        kind = np.dtype(np.float32)
    elif of_bools and not isinstance(value, bool):
        kind = np.dtype(np.int32)
    if kind.kind == "u" and value < 0:
        with pytest.raises(DTypeError, match="does not fit"):
            t + value
        return
    scalar = kind.type(value)
    check(t + value, quiet(np.add, a.astype(kind), scalar))
    check(value * t, quiet(np.multiply, scalar, a.astype(kind)))
    check(t < value, a.astype(kind) < scalar)
    if kind.kind != "b":
        check(value - t, quiet(np.subtract, scalar, a.astype(kind)))


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Array], Array], float]] = {
    "exp": (Tensor.exp, np.exp, 4), "exp2": (Tensor.exp2, np.exp2, 4), "sin": (Tensor.sin, np.sin, 4), "cos": (Tensor.cos, np.cos, 4),
    "tan": (Tensor.tan, np.tan, 40), "tanh": (Tensor.tanh, np.tanh, 4), "expm1": (Tensor.expm1, np.expm1, 8),
    "erf": (Tensor.erf, lambda a: np.vectorize(math.erf, otypes=[np.float64])(a) if a.size else a, 4),
    "sigmoid": (Tensor.sigmoid, lambda a: 1 / (1 + np.exp(-a)), 4), "relu": (Tensor.relu, lambda a: np.maximum(a, 0), 1),
    "silu": (Tensor.silu, lambda a: a / (1 + np.exp(-a)), 8), "square": (Tensor.square, np.square, 1),
    "gelu": (Tensor.gelu, lambda a: 0.5 * a * (1 + (np.vectorize(math.erf, otypes=[float])(a / math.sqrt(2)) if a.size else a)), 8),
    "gelu_tanh": (lambda t: t.gelu("tanh"), lambda a: 0.5 * a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a ** 3))), 8),
    "softplus": (Tensor.softplus, lambda a: np.log1p(np.exp(a)), 8), "elu": (Tensor.elu, lambda a: np.where(a > 0, a, np.expm1(a)), 8),
    "leaky_relu": (Tensor.leaky_relu, lambda a: np.where(a > 0, a, 0.01 * a), 2),
    "hardswish": (Tensor.hardswish, lambda a: a * np.clip(a + 3, 0, 6) / 6, 4), "relu6": (Tensor.relu6, lambda a: np.clip(a, 0, 6), 1),
    "hardsigmoid": (Tensor.hardsigmoid, lambda a: np.clip(a + 3, 0, 6) / 6, 4),
    "hardtanh": (Tensor.hardtanh, lambda a: np.clip(a, -1, 1), 1),
    "logsigmoid": (Tensor.logsigmoid, lambda a: -np.log1p(np.exp(-a)), 8),
    "mish": (Tensor.mish, lambda a: a * np.tanh(np.log1p(np.exp(a))), 16),
}
POSITIVE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Array], Array]]] = {
    "log": (Tensor.log, np.log), "log2": (Tensor.log2, np.log2), "log10": (Tensor.log10, np.log10), "log1p": (Tensor.log1p, np.log1p),
    "sqrt": (Tensor.sqrt, np.sqrt), "rsqrt": (Tensor.rsqrt, lambda a: 1 / np.sqrt(a)), "reciprocal": (Tensor.reciprocal, lambda a: 1 / a),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
@draws(9)
@given(x=views(st.sampled_from(["float16", "float32", "float64", "int8", "int32"])))
def test_functions(name: str, x: tuple[Tensor, Array]) -> None:
    ours, numpy, tolerance = FUNCTIONS[name]
    t, a = x
    if name in ("relu", "square", "relu6") and a.dtype.kind == "i":
        return
    if name == "hardtanh" and a.dtype.kind == "i":
        a = a.astype(np.float32)
    result = float_result(a.dtype.name)
    check(ours(t), quiet(numpy, a.astype(np.float64)).astype(result), tolerance * (1 if result != "float16" else 2))


@pytest.mark.parametrize("name", POSITIVE)
@draws(9)
@given(x=views(float_dtype))
def test_functions_of_positive_numbers(name: str, x: tuple[Tensor, Array]) -> None:
    ours, numpy = POSITIVE[name]
    t, a = x
    check(ours(t.abs() + 0.125), quiet(numpy, (np.abs(a) + a.dtype.type(0.125)).astype(np.float64)).astype(a.dtype), 4)


def test_functions_at_the_edges() -> None:
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -1e-30, 200.0, -200.0], np.float32)
    for name in ("exp", "log", "sqrt", "tanh", "log1p", "expm1", "erf"):
        with np.errstate(all="ignore"):
            expected = (np.vectorize(math.erf)(edges) if name == "erf" else getattr(np, name)(edges)).astype(np.float32)
        check(getattr(Tensor(edges), name)(), expected, 4)
    check(Tensor(edges).relu(), np.maximum(edges, 0))
    check(Tensor(edges).isnan(), np.isnan(edges))
    check(Tensor(edges).isinf(), np.isinf(edges))
    check(Tensor(edges).isfinite(), np.isfinite(edges))
    check(Tensor(np.array([1e-10], np.float32)).log1p(), np.array([1e-10], np.float32))
    check(Tensor([100.0, -100.0]).softplus(), np.array([100, 0], np.float32))


@few
@given(x=views(any_dtype, special=True))
def test_rounding_and_signs(x: tuple[Tensor, Array]) -> None:
    t, a = x
    if a.dtype.kind != "b":
        check(t.abs(), quiet(np.abs, a))
        check(t.sign(), quiet(np.sign, a))
        check(-t, quiet(np.negative, a))
    halves, expected = (t / 2, a / np.asarray(2, a.dtype)) if a.dtype.kind == "f" else (t, a)
    for name, f in (("floor", np.floor), ("ceil", np.ceil), ("trunc", np.trunc), ("round", np.rint)):
        check(getattr(halves, name)(), f(expected) if a.dtype.kind == "f" else a)


@few
@given(x=views(st.sampled_from(["float32", "float64", "int32", "int8"])), exponent=st.sampled_from([0, 1, 2, 3, 5, 0.5, -1, -2, 1.5]))
def test_power(x: tuple[Tensor, Array], exponent: float) -> None:
    t, a = x
    if a.dtype.kind == "i":
        if isinstance(exponent, int) and exponent >= 0:
            check(t ** exponent, a ** np.asarray(exponent, a.dtype))
        return
    if isinstance(exponent, float):
        t, a = t.abs(), np.abs(a)
    check(t ** exponent, quiet(np.power, a, a.dtype.type(exponent)), 16)
    check(2 ** t, quiet(np.power, a.dtype.type(2), a), 8)


def test_integer_power_with_tensor_exponents() -> None:
    base, exponent = np.array([2, 3, -2, 0, 7, -1, 1, 5], np.int32), np.array([10, 5, 3, 0, 40, 7, 9, 1], np.int32)
    check(Tensor(base) ** Tensor(exponent), quiet(np.power, base, exponent))
    check(Tensor([2, 1, -1, -1]) ** Tensor([-1, -3, -2, -3]), np.array([0, 1, 1, -1], np.int32))


@pytest.mark.slow
@few
@given(pair=pairs(st.sampled_from(["bool", "int8", "uint16", "int32", "uint64"])))
def test_bits_and_logic(pair: tuple[Array, Array]) -> None:
    a, b = pair
    kind = common(a.dtype.name, b.dtype.name)
    x, y = Tensor(a), Tensor(b)
    check(x.logical_and(y), np.logical_and(a, b))
    check(x.logical_or(y), np.logical_or(a, b))
    check(x.logical_xor(y), np.logical_xor(a, b))
    check(x.logical_not(), np.logical_not(a))
    if kind.kind == "f":
        with pytest.raises(DTypeError, match="bitwise_and"):
            x & y
        return
    for op in (operator.and_, operator.or_, operator.xor):
        check(op(x, y), op(a.astype(kind), b.astype(kind)))
    check(~x, ~a)


@few
@given(a=views(int_dtype, special=True), amount=st.sampled_from([0, 1, 3, 7, 8, 40, 64]))
def test_shifts(a: tuple[Tensor, Array], amount: int) -> None:
    t, x = a
    for t_amount in (amount, Tensor(np.full(x.shape, amount, x.dtype))):
        check(t << t_amount, np.left_shift(x, np.asarray(amount, x.dtype)))
        check(t >> t_amount, np.right_shift(x, np.asarray(amount, x.dtype)))


@few
@given(pair=pairs(), seed=seeds)
def test_choices(pair: tuple[Array, Array], seed: int) -> None:
    a, b = pair
    kind = common(a.dtype.name, b.dtype.name)
    x, y = a.astype(kind), b.astype(kind)
    check(Tensor(a).maximum(Tensor(b)), np.maximum(x, y))
    check(Tensor(a).minimum(Tensor(b)), np.minimum(x, y))
    mask = make(a.shape, "bool", seed)
    check(Tensor(a).where(Tensor(mask), Tensor(b)), np.where(mask, x, y))
    check(where(Tensor(mask), Tensor(a), Tensor(b)), np.where(mask, x, y))
    check(Tensor(a).masked_fill(Tensor(mask), 1), np.where(mask, np.asarray(1, a.dtype), a))


@few
@given(x=views(st.sampled_from(["float32", "int16"]), special=True))
def test_clamp(x: tuple[Tensor, Array]) -> None:
    t, a = x
    check(t.clamp(-1, 1), np.clip(a, -1, 1).astype(a.dtype))
    check(t.clip(max=0), np.minimum(a, np.asarray(0, a.dtype)))
    check(t.clamp(min=2), np.maximum(a, np.asarray(2, a.dtype)))


@few
@given(x=views(any_dtype), target=any_dtype)
def test_casts(x: tuple[Tensor, Array], target: str) -> None:
    t, a = x
    if target.startswith("u") and a.dtype.kind in "f":
        t, a = t.abs(), np.abs(a)  # a negative float has no unsigned value
    check(t.cast(target), quiet(a.astype, target))


def test_bfloat16_rounds_to_nearest_even_and_computes_in_float32() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, 3.1415926, np.inf, 65504, 1e-40], np.float32)
    rounded = np.array([1.0, 1.0, 1.015625, -2.5, 3.140625, np.inf, 65536, 1.000e-40], np.float32)
    t = Tensor(values, dtype="bfloat16")
    check(t, rounded, dtype="bfloat16")
    check(Tensor(values).bfloat16(), rounded, dtype="bfloat16")
    check(t.float(), rounded, 1000)
    x = make((5, 7), "float32", 3)
    check(Tensor(x).bfloat16().sigmoid(), 1 / (1 + np.exp(-x)), dtype="bfloat16")
    check(Tensor(x).bfloat16() + Tensor(x).half(), x + x, 1e4)


def test_bitcast() -> None:
    x = make((3, 5), "float32", 1)
    check(Tensor(x).bitcast("int32"), x.view(np.int32))
    check(Tensor(x).bitcast("int32").bitcast("float32"), x)
    with pytest.raises(DTypeError, match="BITCAST"):
        Tensor(x).bitcast("int16")


def test_numpy_operands_on_the_left() -> None:
    x = make((2, 3), "float32", 0)
    left: Any = x  # NumPy's stubs do not know that an array defers to the tensor
    check(left + Tensor(x), x + x)
    check(left @ Tensor(x.T.copy()), x @ x.T, 10)


def test_scalars_of_numpy_are_as_weak_as_those_of_python() -> None:
    x = make((2, 3), "float32", 0)
    t, whole = Tensor(x), Tensor([1, 2], dtype="int8")
    check(t / np.sqrt(64), x / np.float32(8))
    check(np.float64(2) * t, 2 * x)
    check(t.maximum(np.float64(0.5)), np.maximum(x, np.float32(0.5)))
    check(t.fmod(np.float64(0.25)), np.fmod(x, np.float32(0.25)))
    check(t.where(t > np.int64(0), np.float64(-1)), np.where(x > 0, x, np.float32(-1)))
    check(whole + np.int64(3), np.array([4, 5], np.int8))
    check(whole * np.float64(0.5), np.array([0.5, 1.0], np.float32))
    check(t + np.array(1.0), x + np.array([1.0]))       # an array without axes has a dtype that the caller chose
    with pytest.raises(DTypeError, match="300 does not fit int8"):
        whole + np.int64(300)


def test_integers_have_no_negative_powers() -> None:
    for t in (Tensor([1, 2]), Tensor([1, 2], dtype="uint8"), Tensor([True])):
        for negative in (-1, np.int64(-2)):
            with pytest.raises(DTypeError, match="pow"):
                t ** negative
    check(Tensor([1, 2, -4]) ** -1.0, np.array([1, 0.5, -0.25], np.float32))
    check(Tensor([1, 2, -1]) ** Tensor([-3, -1, -1]), np.array([1, 0, -1], np.int32))


def test_what_is_chosen_stands_before_the_condition() -> None:
    x = Tensor([1.5, 0.0])
    with pytest.raises(DTypeError, match=r"condition of float32: give bools.*svod\.where\(condition, x, y\)"):
        Tensor([True, False]).where(x, 2.0)
    check(x.where([True, False], 2.0), np.array([1.5, 2], np.float32))
    check(where(x, x, 2.0), np.array([1.5, 2], np.float32))


def test_round_to_decimals() -> None:
    values = np.array([1.25, -3.4567, 15.0, 25.0, 0.375, np.inf, np.nan], np.float64)
    for decimals in (0, 1, 2, -1):
        check(Tensor(values).round(decimals), np.round(values, decimals), 1)
    whole = np.array([15, 25, -14, 4], np.int32)
    for decimals in (0, 2, -1, -2):
        check(Tensor(whole).round(decimals=decimals), np.round(whole, decimals))


def test_shape_errors_name_the_operation_and_the_shapes() -> None:
    a, b = Tensor.zeros(2, 3), Tensor.zeros(4, 3)
    with pytest.raises(ShapeError, match=r"add of shapes \(2, 3\) and \(4, 3\)"):
        a + b
    with pytest.raises(ShapeError, match=r"where of shapes"):
        a.where(b > 0, 1.0)
    with pytest.raises(DTypeError, match="300 does not fit uint8"):
        Tensor.zeros(2, dtype="uint8") + 300
    with pytest.raises(DTypeError, match="complex"):
        Tensor(np.zeros(2, complex))


def test_multiples_of_numbers_keep_the_dtype() -> None:
    for dtype in ("float16", "float64", "int8"):
        a = np.arange(4).astype(dtype)
        check(Tensor(a).add(3, alpha=2), a + a.dtype.type(6))
        if a.dtype.kind == "f":
            check(Tensor(a).sub(0.1, alpha=3), a - a.dtype.type(0.1 * 3))
