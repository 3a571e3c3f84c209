"""Elementwise functions other than operators, and activations, against NumPy."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.errors import DTypeError, ShapeError, UnsupportedError
from svod.tensor import Tensor
from tests.draws import draws
from tests.tensor import checking
from tests.tensor.checking import check
from tests.tensor.strategies import INTS, Array, any_dtype, float_dtype, make, seeds

few = draws(8)


@pytest.fixture(scope="module", autouse=True)
def evaluator() -> Iterator[None]:
    """Evaluate node by node in NumPy, because the functions consist of operations that are tested with all evaluators."""
    checking.active = "reference"
    yield


@few
@given(dtype=any_dtype, seed=seeds)
def test_division_toward_zero(dtype: str, seed: int) -> None:
    """Division that rounds toward zero, as in C: exact for integers, and 0 for a divisor of zero."""
    a, b = make((31,), dtype, seed, special=True), make((31,), dtype, seed + 1, special=True)
    if dtype == "bool":
        a, b = a.astype(np.int8), b.astype(np.int8)
        x, y = Tensor(a).bool(), Tensor(b).bool()
    else:
        x, y = Tensor(a), Tensor(b)
    with np.errstate(all="ignore"):
        if a.dtype.kind == "f":
            wide = np.promote_types(a.dtype, np.float32)        # one rounding, of the result: of 16 bits the quotient has none
            check(x.div(y, rounding_mode="trunc"), np.trunc(a.astype(wide) / b.astype(wide)).astype(a.dtype))
            check(x.fmod(y), np.fmod(a, b))
            return
        exact = [0 if q == 0 else abs(int(p)) // abs(int(q)) * (1 if (p < 0) == (q < 0) else -1) for p, q in zip(a, b, strict=True)]
        rest = [0 if q == 0 else int(p) - w * int(q) for p, q, w in zip(a, b, exact, strict=True)]
    kind = a.dtype
    check(x.div(y, rounding_mode="trunc"), np.array([w & ((1 << 8 * kind.itemsize) - 1) for w in exact], np.uint64).astype(kind))
    if dtype != "bool":
        check(x.fmod(y), np.array(rest, object).astype(kind))
    if dtype in INTS and not dtype.startswith("u"):
        thirds = [-(abs(int(p)) // 3) if p > 0 else abs(int(p)) // 3 for p in a]
        check(x.div(-3, rounding_mode="trunc"), np.array(thirds, object).astype(kind))


Pair = Callable[[Array, Array], Any]
BINARY: dict[str, Pair] = {
    "logaddexp": np.logaddexp, "hypot": np.hypot, "copysign": np.copysign, "atan2": np.arctan2,
    "heaviside": np.heaviside, "xlogy": lambda x, y: np.where((x == 0) & ~np.isnan(y), 0, x * np.log(y))}
UNARY: dict[str, Callable[[Array], Any]] = {
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh,
    "cosh": np.cosh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "frac": lambda x: x - np.trunc(x),
    "deg2rad": np.deg2rad, "rad2deg": np.rad2deg, "softsign": lambda x: x / (1 + abs(x)), "tanhshrink": lambda x: x - np.tanh(x),
    "hardshrink": lambda x: np.where(abs(x) <= 0.5, 0, x), "celu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "selu": lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x)),
    "softshrink": lambda x: np.where(x > 0.5, x - 0.5, np.where(x < -0.5, x + 0.5, x * 0))}
SMALL = np.array([0.0, -0.0, 1e-6, -1e-6, 0.3, -0.7, 1.0, 5.0, -20.0])


@pytest.mark.slow
@few
@given(dtype=float_dtype, seed=seeds)
def test_functions(dtype: str, seed: int) -> None:
    a, b = make((40,), dtype, seed, special=True), make((40,), dtype, seed + 1, special=True)
    a[:9], a[9:11] = SMALL, (-1e4, -6e4)
    with np.errstate(all="ignore"):
        for name, pair in BINARY.items():
            check(getattr(Tensor(a), name)(Tensor(b)), np.asarray(pair(a.astype(np.float64), b.astype(np.float64))).astype(dtype), 4)
        for name, function in UNARY.items():
            check(getattr(Tensor(a), name)(), np.asarray(function(a.astype(np.float64))).astype(dtype), 16)
        for name, facts in {"signbit": np.signbit, "isposinf": np.isposinf, "isneginf": np.isneginf}.items():
            check(getattr(Tensor(a), name)(), facts(a))
        check(Tensor(a).nan_to_num(1.5), np.nan_to_num(a, nan=1.5))
        check(Tensor(a).isclose(Tensor(b), equal_nan=True), np.isclose(a, b, equal_nan=True))
        check(Tensor(a).isclose(Tensor(a * a.dtype.type(1 + 1e-3)), rtol=1e-2), np.isclose(a, a * a.dtype.type(1 + 1e-3), rtol=1e-2))


def test_integers_do_not_widen_16_bit_floats() -> None:
    half, whole = Tensor.zeros(2, dtype="float16"), Tensor([1, 2])
    for name in ("atan2", "hypot", "copysign", "logaddexp", "xlogy"):
        types = [getattr(a, name)(b).dtype.name for a, b in ((half, whole), (whole, half), (whole, whole))]
        assert types == ["float16", "float16", "float32"], name


def test_mixtures_and_gates() -> None:
    a, b, w = (make((4, 6), "float32", k) for k in range(3))
    x, y, z = Tensor(a), Tensor(b), Tensor(w)
    check(x.lerp(y, z), a + w * (b - a), 8)
    check(x.lerp(y, 1.0), b)
    check(x.addcmul(y, z, value=2), a + 2 * b * w, 4)
    check(x.addcdiv(y, z), a + b / w, 4)
    check(x.clamp_min(0.1).clamp_max(y), np.minimum(np.maximum(a, np.float32(0.1)), b))
    sigmoid = 1 / (1 + np.exp(-a.astype(np.float64)))
    check(x.glu(), (a[:, :3] * sigmoid[:, 3:]).astype(np.float32), 4)
    check(x.swiglu(0), (a[:2] * sigmoid[:2] * a[2:]).astype(np.float32), 4)
    check(x.prelu(Tensor([0.5])), np.where(a > 0, a, 0.5 * a).astype(np.float32))
    check(x.prelu(y[0]), np.where(a > 0, a, b[0] * a))
    check(x.threshold(0.1, 7), np.where(a > 0.1, a, np.float32(7)))
    assert x.dropout() is x


@few
@given(n=st.integers(1, 6), before=st.integers(0, 7), after=st.integers(0, 7),
       mode=st.sampled_from(["reflect", "symmetric", "edge", "wrap"]))
def test_padding_from_within(n: int, before: int, after: int, mode: str) -> None:
    a = make((2, n, 3), "int16", n)
    most = {"reflect": n - 1, "edge": 99}.get(mode, n)
    pads = [(1, 0), (before, after), (0, 2)]
    if max(before, after) > most:
        with pytest.raises(ShapeError, match=f"pad of .* mode '{mode}': axis 1 has {n}"):
            Tensor(a).pad(pads, mode)
        return
    check(Tensor(a).pad(pads, mode), np.pad(a, pads, mode=mode))  # type: ignore[call-overload]
    name = {"edge": "replicate", "wrap": "circular"}.get(mode, mode)
    expected = np.pad(a, [(0, 0), (0, 0), (0, 2)], mode=mode)  # type: ignore[call-overload]
    check(Tensor(a).pad((0, 2), name), expected)


def test_errors_of_functions() -> None:
    t = Tensor.zeros(2, 3)
    with pytest.raises(ShapeError, match=r"glu of \(2, 3\)"):
        t.glu()
    with pytest.raises(ShapeError, match=r"prelu of \(2, 3\) with weights of \(2,\)"):
        t.prelu(Tensor.zeros(2))
    with pytest.raises(UnsupportedError, match="dropout"):
        t.dropout(training=True)
    with pytest.raises(DTypeError, match="rounding_mode 'up'"):
        t.div(t, rounding_mode="up")
    with pytest.raises(DTypeError, match="heaviside"):
        t.bool().heaviside(1)
