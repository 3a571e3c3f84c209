"""Float functions keep their relative precision over the whole range of numbers: compared with the C library, and NumPy in long double."""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops
from svod.tensor import Tensor
from tests.draws import a_half, an_eighth
from tests.graph_reference import evaluate_graph
from tests.tensor.checking import evaluate
from tests.tensor.strategies import Array

BOUND = 6       # largest error in units in the last place
BOUNDS = {"erf": 1}     # bounds of functions whose values users subtract, in ulp


def each(function: Callable[[float], float]) -> Callable[[Array], Array]:
    return lambda x: np.array([function(float(v)) for v in x], np.longdouble)


def softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-abs(x)))


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p, "expm1": np.expm1,
    "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "asin": np.arcsin,
    "acos": np.arccos, "atan": np.arctan, "erf": each(math.erf), "erfc": each(math.erfc), "rsqrt": lambda x: 1 / np.sqrt(x),
    "softsign": lambda x: x / (1 + abs(x)),
    "logsigmoid": lambda x: -softplus(-x), "softplus": lambda x: np.where(x > 20, x, softplus(x)),
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "selu": lambda x: np.longdouble(1.0507009873554805) * np.where(x > 0, x, np.longdouble(1.6732632423543772) * np.expm1(x))}


def numbers(dtype: str) -> Array:
    """Numbers of all magnitudes and both signs, numbers around 0 and ±1, infinities and NaN."""
    draw = np.random.default_rng(3)
    kind = np.dtype(dtype).type
    word = np.uint32 if dtype == "float32" else np.uint64
    whole = draw.integers(0, 1 << 8 * np.dtype(dtype).itemsize, 4000, dtype=word).view(dtype)
    sizes = 2.0 ** draw.uniform(-30, 11, 4000) * draw.choice([-1, 1], 4000)
    near = 2.0 ** -draw.integers(1, np.finfo(kind).nmant, 400) * draw.choice([-1, 1], 400)
    info = np.finfo(kind)
    edges = [0.0, -0.0, math.inf, -math.inf, math.nan, info.max, -info.max, info.tiny, info.smallest_subnormal, -info.smallest_subnormal]
    return np.concatenate([whole, *(v.astype(dtype) for v in (sizes, 1 + near, -1 + near, np.array(edges)))])


def errors(got: Array, want: Array) -> Array:
    """Errors in units in the last place of the result; infinities, NaNs and signs of infinities have to be equal."""
    info = np.finfo(got.dtype)
    largest = np.longdouble(info.max)
    over = abs(want) > largest * (1 + np.longdouble(2.0) ** -(info.nmant + 2))
    exponent = np.clip(np.frexp(np.where(np.isfinite(want), want, 0))[1] - 1, info.minexp, info.maxexp)
    with np.errstate(invalid="ignore"):
        distance = abs(got.astype(np.longdouble) - want) / np.ldexp(np.longdouble(1), exponent - info.nmant)
    same = np.where(over, np.isinf(got) & (np.sign(got) == np.sign(want)), np.isnan(got) & np.isnan(want))
    return np.where(same, 0, np.where(np.isnan(distance), np.inf, distance))


@pytest.mark.parametrize(("name", "dtype"), an_eighth(itertools.product(FUNCTIONS, ["float32", "float64"])))
def test_relative_errors(name: str, dtype: str, request: pytest.FixtureRequest) -> None:
    x = numbers(dtype)
    if request.config.getoption("--device"):        # devices may treat denormal numbers as zeros
        x = x[~(abs(x) < 2 * np.finfo(x.dtype).tiny) | (x == 0)]
    with np.errstate(all="ignore"):
        want = FUNCTIONS[name](x.astype(np.longdouble))
    error = errors(evaluate(getattr(Tensor(x), name)()), want)
    if request.config.getoption("--device"):
        error = np.where(abs(want) < 2 * np.finfo(x.dtype).tiny, 0, error)
    worst = int(np.argmax(error))
    slack = float(dtype == "float64")       # the reference may be off by a unit of float64
    bound = BOUND if request.config.getoption("--device") else BOUNDS.get(name, BOUND) + slack
    assert error[worst] <= bound, (x[worst], want[worst], error[worst])


@pytest.mark.parametrize("name", ["log1p", "atan", "softplus", "logsigmoid", "silu", "sigmoid", "mish"])
def test_series_of_small_numbers_make_no_subnormal_numbers(name: str) -> None:
    small = 10.0 ** -np.linspace(0, 18, 401)
    x = np.concatenate([small, -small, np.linspace(-80, 80, 401)]).astype(np.float32)
    for u in getattr(Tensor(x), name)().uop.toposort():
        if u.dtype == dtypes.float32 and u.op is not Ops.BUFFER:
            assert not ((value := abs(evaluate_graph(u))) < np.finfo(np.float32).tiny)[value > 0].any(), u


@pytest.mark.parametrize("count", [1, 3, 61, 1009, 20_011])
def test_differences_of_near_values_of_erf(count: int) -> None:
    """Half a difference has an error of at most one unit in the last place of the values, and of a quarter more on devices that do not
    fuse multiplications and additions."""
    draw = np.random.default_rng(count)
    x = draw.uniform(-2, 2, count).astype(np.float32)
    y = (x * (1 + 10 ** draw.uniform(-6, -1, count))).astype(np.float32)
    got = evaluate((Tensor(x).erf() - Tensor(y).erf()) * 0.5)
    want = [(math.erf(a) - math.erf(b)) / 2 for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(got, want, rtol=0, atol=1.25 * 2.0**-24)


def test_prices_of_options_that_are_worth_little() -> None:
    """Prices by Black and Scholes, each a difference of two products of a normal distribution's values, have errors of a few roundings."""
    def prices(spot: Any, log: Callable[[Any], Any], erf: Callable[[Any], Any]) -> Any:
        a = (log(spot) + 0.0325) / 0.2121320343559643
        b = a - 0.2121320343559643
        normal = [(erf(v * math.sqrt(0.5)) + 1) * 0.5 for v in (a, b)]
        return spot * normal[0] - normal[1] * math.exp(-0.01)

    spot = (0.5 + np.random.default_rng(1).uniform(0, 1e-4, 4099)).astype(np.float32)
    got = evaluate(prices(Tensor(spot), Tensor.log, Tensor.erf))
    np.testing.assert_allclose(got, prices(spot.astype(np.float64), np.log, np.vectorize(math.erf)), rtol=0, atol=1.25 * 2.0**-24)


def test_the_tail_of_erfc() -> None:
    x = np.array([2, 3, 4, 5, 9, 10, -1, -5, 0, math.inf, -math.inf])
    for dtype, bound in (("float32", 1e-6), ("float64", 2e-15)):
        got = evaluate(Tensor(x.astype(dtype)).erfc())
        np.testing.assert_allclose(got, [math.erfc(v) for v in x], rtol=bound, atol=np.finfo(dtype).tiny)
    assert np.isnan(evaluate(Tensor([math.nan]).erfc()))


def gelu(x: Array) -> Array:
    return x / 2 * np.array([math.erfc(-v / math.sqrt(2)) for v in x])


def gelu_tanh(x: Array) -> Array:
    return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


TAILS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Array], Array]]] = {
    "gelu": (Tensor.gelu, gelu), "gelu_tanh": (lambda t: t.gelu("tanh"), gelu_tanh), "silu": (Tensor.silu, lambda x: x / (1 + np.exp(-x))),
    "sigmoid": (Tensor.sigmoid, lambda x: 1 / (1 + np.exp(-x))), "softplus": (Tensor.softplus, lambda x: np.log1p(np.exp(x))),
    "logsigmoid": (Tensor.logsigmoid, lambda x: -softplus(-x)), "mish": (Tensor.mish, lambda x: x * np.tanh(np.log1p(np.exp(x))))}


@pytest.mark.parametrize("name", a_half(TAILS))
def test_activations_that_vanish(name: str) -> None:
    """16-bit results are rounded once. In float32 and float64, GELU loses digits by cancellation, as in other libraries: its absolute
    error is small."""
    ours, exact = TAILS[name]
    for low, high, bound in ((-1, 10, 2e-6), (-3, -1, 3e-6), (-5, -3, 1e-5), (-8, -5, 1e-4)):
        x = np.linspace(low, high, 4099).astype(np.float32)
        least = 1e-6 if "gelu" in name else 1e-38
        np.testing.assert_allclose(evaluate(ours(Tensor(x))), exact(x.astype(np.float64)), rtol=bound, atol=least)
        for kind, unit, least in (("float16", 2.0 ** -11, 2.0 ** -24), ("bfloat16", 2.0 ** -8, 1e-38)):
            halves = evaluate(Tensor(x).cast(kind).cast("float32")).astype(np.float64)
            np.testing.assert_allclose(evaluate(ours(Tensor(x).cast(kind)).cast("float32")), exact(halves), rtol=1.1 * unit, atol=least)


def test_the_ends_of_gelu() -> None:
    for kind in ("float32", "float64", "float16", "bfloat16"):
        got = evaluate(Tensor([0.0, -200.0, 200.0, -30000.0, 30000.0, math.inf, math.nan], dtype=kind).gelu().cast("float32"))
        np.testing.assert_array_equal(got, np.array([0, 0, 200, 0, 30000 if kind != "bfloat16" else 29952, math.inf, math.nan], np.float32))
