"""Operands that are hidden from compilers of WGSL, and results for special values, compared with those of the CPU."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.lower.program import Instruction
from svod.compile.webgpu.hidden import MOST_TERMS, hidden_operands
from svod.config import PrepareConfig
from svod.core.ir.dtype import dtypes
from svod.core.machine.target import Target
from svod.tensor.operations.elementwise import Operand

F32 = dtypes.float32
X, Y, ONE, ZERO = 0, 1, 2, 3
GIVEN = [("CARRY", (), 0), ("CARRY", (), 1), ("CONST", (), 1.0), ("CONST", (), 0.0)]


def hidden(*instructions: tuple[str, tuple[int, ...]]) -> set[tuple[int, int]]:
    """Return the hidden operands of the given instructions, which follow x, y, 1 and 0 and are numbered from 4."""
    code = [Instruction(op, F32, 4, src, arg) for op, src, arg in [*GIVEN, *((op, src, None) for op, src in instructions)]]
    return set(hidden_operands(code))


def test_what_could_cancel_is_hidden() -> None:
    assert hidden(("SUB", (X, X))) == {(4, 0)}
    assert hidden(("ADD", (X, ONE)), ("SUB", (4, ONE))) == {(5, 0)}
    assert hidden(("ADD", (X, Y)), ("SUB", (4, X))) == {(5, 0)}
    assert hidden(("ADD", (X, Y)), ("SUB", (ONE, 4)), ("ADD", (ONE, 5))) == {(6, 1)}
    assert hidden(("MULACC", (X, ONE, Y)), ("MULACC", (X, ONE, 4))) == {(5, 2)}, "an argument that is reduced in two steps"
    assert hidden(("MUL", (X, Y)), ("MULACC", (Y, X, ONE)), ("SUB", (5, 4))) == {(6, 0)}
    assert hidden(("MUL", (X, Y)), ("FDIV", (4, Y)), ("FDIV", (X, X))) == {(5, 0), (6, 0)}


def test_zeros_are_hidden_where_they_could_be_folded() -> None:
    assert hidden(("MUL", (X, ZERO)), ("FDIV", (Y, ZERO)), ("ADD", (X, ZERO)), ("SUB", (ZERO, Y)), ("FDIV", (ONE, ZERO))) == {
        (4, 1), (5, 1), (6, 1), (7, 0), (8, 1)}
    assert not hidden(("MAX", (X, ZERO)), ("MULACC", (X, Y, ZERO)), ("MUL", (X, ONE)))


def test_polynomials_and_sums_of_different_numbers_are_not_hidden() -> None:
    assert not hidden(("MULACC", (ONE, X, ONE)), ("MULACC", (4, X, ONE)), ("MUL", (5, X)), ("ADD", (X, Y)), ("MULACC", (X, Y, X)))


def test_of_long_sums_a_part_is_hidden_now_and_then() -> None:
    """In a long sum an operand is hidden after every MOST_TERMS terms, so that the analysis takes time proportional to the sum's length."""
    n = 20 * MOST_TERMS
    code = [Instruction("CARRY", F32, 1, (), i) for i in range(n)]
    code += [Instruction("ADD", F32, 1, (n + i - 1 if i else 0, i + 1), None) for i in range(n - 1)]
    assert 15 < len(hidden_operands(code)) < 25


EDGES = np.array([1, -1, 0, -0.0, np.inf, -np.inf, np.nan, 2.5, 3e38, -3e38, 1e-30, 5], np.float32)
NUMBERS = (0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 3e38)
OF_NUMBERS: dict[str, Callable[[Tensor, float], Operand]] = {
    "sums": lambda x, c: Tensor.stack([x + c, c + x, x - c, c - x]),
    "products": lambda x, c: Tensor.stack([x * c, x / c, c / x, x * c + 2, x * 2 + c]),
    "extrema": lambda x, c: Tensor.stack([x.maximum(c), x.minimum(c), x.clamp(min=c), x.clamp(max=c)]).abs(),
    "comparisons": lambda x, c: Tensor.stack([x < c, x <= c, x > c, x >= c, x.eq(c), x.ne(c),
                                              (x < c).logical_not(), (x >= c).logical_not()]),
    "choices": lambda x, c: Tensor.stack([(x + 1).where(x > c, c), svod.where(x < c, c, x * 2)])}
FUNCTIONS: dict[str, Callable[[Tensor], Operand]] = {
    "differences": lambda x: Tensor.stack([x - x, (x + x) - x, (x + 1) - 1, (x - np.inf) - x, (x * 3 - 3) + 3, x * x - x * x]),
    "quotients": lambda x: Tensor.stack([x / x, x * x / x, 1 / (x * -0.0), 1 / (x + 0.0), 1 / -x, 1 / x.abs(), x.reciprocal()]),
    "facts": lambda x: Tensor.stack([x.isnan(), x.isinf(), x.isfinite(), x.eq(x), x.ne(x), x < x, x <= x, x.signbit()]),
    "signs": lambda x: Tensor.stack([x.sign(), x.relu(), x.abs(), -x, x.floor(), x.nan_to_num(), svod.where(x.isnan(), 0.0, x)]),
    "variances": lambda x: Tensor.stack([x.reshape(-1, 1).var(1), x.reshape(-1, 1).std(1)]),
    "reductions": lambda x: Tensor.stack([x.max(), x.min(), x.sum(), x[:6].logsumexp(0), x.prod()]),
    "rows": lambda x: Tensor.stack([x.softmax(0), x.sort()[0], x.cumsum(0)]),
    "positions": lambda x: Tensor.stack([x.argmax(), x.argmin(), x[:6].argmax()]),
    "roots": lambda x: Tensor.stack([x.sqrt(), x.rsqrt(), x.exp(), x.log(), x.tanh(), x.erf(), x.log1p(), x.expm1()])}


def agree(function: Callable[[Tensor], Operand]) -> None:
    """Assert equal values on both devices, with infinities, NaNs and the signs of zeros."""
    results = []
    for device in ("CPU", "WEBGPU"):
        plan = function(Tensor(EDGES.copy())).prepare(PrepareConfig(device=device, db=":none:"))
        plan.execute()
        results.append(plan.outputs[0].copy())
    want, got = results
    np.testing.assert_allclose(got, want, rtol=5e-7)
    if want.dtype == np.float32:
        zeros = want == 0
        np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(want[zeros]))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_arithmetic_with_numbers_at_the_edges(webgpu: Target, name: str, number: float) -> None:
    agree(lambda x: OF_NUMBERS[name](x, number))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_at_the_edges(webgpu: Target, name: str) -> None:
    agree(FUNCTIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_have_the_type_of_16_bit_operands(webgpu: Target, dtype: str) -> None:
    """Constants are rounded to the type of 16-bit operands: 30000 to 29952 in bfloat16, 1000.3 to 1000.5 and 1e9 to infinity in float16."""
    x = Tensor(np.array([30000, -29952, 1000.5, 1, 0], np.float32)).cast(dtype).realize()
    for number in (30000.0, 1000.3, 1e9, 1e-9, 0.1):
        results = []
        for device in ("CPU", "WEBGPU"):
            made = Tensor.stack([f.cast("float32") for f in (x + number, x - number, x < number, x.eq(number), x.maximum(number),
                                                                x * number)])
            plan = made.prepare(PrepareConfig(device=device, db=":none:"))
            plan.execute()
            results.append(plan.outputs[0].copy())
        np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_halves_are_rounded_to_even(webgpu: Target, dtype: str) -> None:
    x = np.array([37.5, 0.5, 1.5, 2.5, -0.5, -2.5, -37.5, 0.49, 0.51, -0.2, 0, -0.0, 7, 1e3, 511.5, np.inf, -np.inf, np.nan]).astype(dtype)
    plan = Tensor.stack([Tensor(x).round(), Tensor(x).trunc(), Tensor(x).floor(), Tensor(x).ceil()]).prepare(PrepareConfig(
        device="WEBGPU", db=":none:"))
    plan.execute()
    want = np.concatenate([np.round(x), np.trunc(x), np.floor(x), np.ceil(x)])
    np.testing.assert_array_equal(plan.outputs[0], want)
    np.testing.assert_array_equal(np.signbit(plan.outputs[0]), np.signbit(want))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_both_zeros_are_equal_to_an_order_and_all_nans_are_last(webgpu: Target, dtype: str) -> None:
    tiny = 0.0 if dtype == "float16" else 1e-40         # the difference of two numbers of the order that is denormal
    x = np.array([0.0, -0.0, 1, np.nan, -0.0, -np.nan, 0.0, -1, np.inf, tiny, -np.inf])
    t = Tensor(x).cast(dtype)
    for descending in (False, True):
        key = np.where(np.isnan(x), np.inf, x)
        order = np.lexsort((np.isnan(x), key))
        if descending:
            order = np.array(sorted(range(len(x)), key=lambda i: (not np.isnan(x[i]), -key[i])))
        for result in (t.argsort(descending=descending), t.topk(len(x), largest=descending)[1]):
            plan = result.prepare(PrepareConfig(device="WEBGPU", db=":none:"))
            plan.execute()
            np.testing.assert_array_equal(plan.outputs[0], order)
