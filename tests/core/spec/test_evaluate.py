"""The evaluator against direct NumPy formulas, on kernel ASTs written by hand as docs/ir.md spells them."""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from svod.core.ir.combiner import COMBINERS, get_combiner
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.ir.param import Param
from svod.core.ir.uop import Ops, UOp
from svod.core.spec.evaluate import evaluate, evaluate_points, from_float, store_addresses, store_extents, to_float
from svod.core.spec.values import OPERATION_VALUES, apply_alu, fma64
from svod.errors import CompileError, LaunchError, UnsupportedError

f32, index = dtypes.float32, dtypes.index
axis_ids = itertools.count()


def rng(n: int | UOp) -> UOp:
    extent = n if isinstance(n, UOp) else UOp.const(index, n)
    return UOp(Ops.RANGE, index, (extent,), next(axis_ids))


def param(slot: int, size: int, dtype: DType = f32) -> UOp:
    return UOp(Ops.PARAM, dtype, (), Param(slot, size))


def at(source: UOp, *exprs: UOp) -> UOp:
    return UOp(Ops.INDEX, source.dtype, (source, *exprs))


def load(p: UOp, flat: UOp, alt: float | None = None, gate: UOp | None = None) -> UOp:
    extra = () if gate is None else (UOp.const(p.dtype, alt or 0), gate)
    return UOp(Ops.LOAD, p.dtype, (at(p, flat), *extra))


def stage(value: UOp, *ranges: UOp) -> UOp:
    return UOp(Ops.STAGE, value.dtype, (value, *ranges))


def reduce(name: str, values: tuple[UOp, ...], *ranges: UOp) -> UOp:
    return UOp(Ops.REDUCE, values[0].dtype, (*values, *ranges), (name, len(values)))


def kernel(*stores: UOp) -> UOp:
    return UOp(Ops.SINK, dtypes.void, stores)


def store(p: UOp, flat: UOp, value: UOp, *ranges: UOp) -> UOp:
    return UOp(Ops.STORE, dtypes.void, (at(p, flat), value, *ranges))


def softmax(rows: int, cols: int) -> UOp:
    y, x = param(0, rows * cols), param(1, rows * cols)
    a, b, c, d, e, f, g, h, i, j = (rng(n) for n in (rows, cols) * 5)
    X = stage(load(x, a * cols + b), a, b)
    M = stage(reduce("MAX", (at(X, c, d),), d), c)
    E = stage((at(X, e, f) - at(M, e)).alu(Ops.EXP), e, f)
    S = stage(reduce("ADD", (at(E, g, h),), h), g)
    return kernel(store(y, i * cols + j, at(E, i, j) * at(S, i).alu(Ops.RECIPROCAL), i, j))


def gemm(m: int, n: int, k: int, dtype: DType = f32) -> UOp:
    c, a, b = param(0, m * n, dtype), param(1, m * k, dtype), param(2, k * n, dtype)
    a0, a1, b0, b1, i, j, r = (rng(e) for e in (m, k, k, n, m, n, k))
    A, B = stage(load(a, a0 * k + a1), a0, a1), stage(load(b, b0 * n + b1), b0, b1)
    return kernel(store(c, i * n + j, reduce("ADD", (at(A, i, r) * at(B, r, j),), r), i, j))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("rows, cols", [(1, 1), (7, 13), (64, 1000)])
def test_softmax(rows: int, cols: int) -> None:
    x = random(rows, cols)
    ast = softmax(rows, cols)
    args = [np.empty(rows * cols, np.float32), x.ravel()]
    want = np.exp(x - x.max(1, keepdims=True).astype(np.float64))
    want /= want.sum(1, keepdims=True)
    got = evaluate(ast, args)[0].reshape(rows, cols)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    points = [np.array([0, rows - 1, rows // 2]), np.array([0, cols - 1, cols // 3])]
    np.testing.assert_array_equal(evaluate_points(ast, args, points), got[tuple(points)])
    np.testing.assert_array_equal(store_addresses(ast, points), points[0] * cols + points[1])
    assert store_extents(ast) == (rows, cols)


@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (5, 7, 11), (130, 96, 300), (1, 64, 1000)])
def test_gemm(m: int, n: int, k: int) -> None:
    a, b = random(m, k, seed=1), random(k, n, seed=2)
    ast, args = gemm(m, n, k), [np.empty(m * n, np.float32), a.ravel(), b.ravel()]
    got = evaluate(ast, args)[0].reshape(m, n)
    np.testing.assert_array_equal(got, (a.astype(np.float64) @ b).astype(np.float32))
    np.testing.assert_allclose(evaluate(ast, args, exact=False)[0].reshape(m, n), got, rtol=1e-4, atol=1e-4)
    points = [np.arange(m), np.arange(m) % n]
    # evaluated by points, each product is rounded to float32, as the AST says; a contraction does not round products
    np.testing.assert_allclose(evaluate_points(ast, args, points), got[tuple(points)], rtol=1e-5, atol=1e-5)


def test_integer_gemm_wraps() -> None:
    draw = np.random.default_rng(0).integers
    a, b = draw(-2**31, 2**31, (9, 17), dtype=np.int32), draw(-2**31, 2**31, (17, 6), dtype=np.int32)
    got = evaluate(gemm(9, 6, 17, dtypes.int32), [np.empty(54, np.int32), a.ravel(), b.ravel()])[0]
    exact = a.astype(object) @ b.astype(object)
    np.testing.assert_array_equal(got, [(int(v) + 2**31) % 2**32 - 2**31 for v in exact.ravel()])


def test_contraction_is_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("svod.core.spec.evaluate.MATMUL_BLOCK", 1 << 9)
    monkeypatch.setattr("svod.core.spec.evaluate.BLOCK_ELEMENTS", 1 << 8)
    test_gemm(33, 47, 65)
    test_softmax(9, 700)
    test_convolution(2, 3, 4, 9, 3, 2)


@pytest.mark.parametrize("batch, ic, oc, size, kernel_size, stride", [(1, 1, 1, 3, 1, 1), (2, 3, 5, 11, 3, 2)])
def test_convolution(batch: int, ic: int, oc: int, size: int, kernel_size: int, stride: int) -> None:
    pad, k = kernel_size // 2, kernel_size
    wide = size + 2 * pad
    out = (wide - k) // stride + 1
    y, x, w = param(0, batch * oc * out * out), param(1, batch * ic * size * size), param(2, oc * ic * k * k)
    b0, c0, h0, w0 = (rng(n) for n in (batch, ic, wide, wide))
    zero = UOp.const(index, 0)

    def inside(r: UOp) -> UOp:
        return (UOp.const(index, pad - 1) < r) & (r < UOp.const(index, size + pad))

    flat = ((b0 * ic + c0) * size + (h0 + -pad)) * size + (w0 + -pad)
    image = stage(load(x, flat + zero, 0.0, inside(h0) & inside(w0)), b0, c0, h0, w0)
    o1, c1, kh1, kw1 = (rng(n) for n in (oc, ic, k, k))
    weights = stage(load(w, ((o1 * ic + c1) * k + kh1) * k + kw1), o1, c1, kh1, kw1)
    n, o, i, j, c, kh, kw = (rng(e) for e in (batch, oc, out, out, ic, k, k))
    total = reduce("ADD", (at(image, n, c, i * stride + kh, j * stride + kw) * at(weights, o, c, kh, kw),), c, kh, kw)
    ast = kernel(store(y, ((n * oc + o) * out + i) * out + j, total.alu(Ops.MAX, 0.0), n, o, i, j))
    data, filters = random(batch, ic, size, size), random(oc, ic, k, k, seed=5)
    padded = np.pad(data.astype(np.float64), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (k, k), (2, 3))[:, :, ::stride, ::stride]
    want = np.maximum(np.einsum("nchwij,ocij->nohw", windows, filters), 0)
    args = [np.empty(want.size, np.float32), data.ravel(), filters.ravel()]
    got = evaluate(ast, args)[0].reshape(want.shape)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    points = [np.random.default_rng(1).integers(0, e, 20) for e in want.shape]
    np.testing.assert_allclose(evaluate_points(ast, args, points), want[tuple(points)], rtol=1e-5, atol=1e-5)


def test_attention_by_points() -> None:
    heads, length, dim = 2, 37, 8
    y, q, kk, v = (param(s, heads * length * dim) for s in range(4))
    ranges = [rng(n) for n in (heads, length, dim) * 3]

    def operand(p: UOp, h: UOp, t: UOp, d: UOp) -> UOp:
        return stage(load(p, (h * length + t) * dim + d), h, t, d)

    Q, K, V = (operand(p, *ranges[3 * s:3 * s + 3]) for s, p in enumerate((q, kk, v)))
    h, i, j, d = (rng(n) for n in (heads, length, length, dim))
    scores = stage(reduce("ADD", (at(Q, h, i, d) * at(K, h, j, d),), d), h, i, j)
    h1, i1, j1 = (rng(n) for n in (heads, length, length))
    top = stage(reduce("MAX", (at(scores, h1, i1, j1),), j1), h1, i1)
    h2, i2, j2 = (rng(n) for n in (heads, length, length))
    exps = stage((at(scores, h2, i2, j2) - at(top, h2, i2)).alu(Ops.EXP), h2, i2, j2)
    h3, i3, j3 = (rng(n) for n in (heads, length, length))
    sums = stage(reduce("ADD", (at(exps, h3, i3, j3),), j3), h3, i3)
    h4, i4, d4, j4 = (rng(n) for n in (heads, length, dim, length))
    value = reduce("ADD", (at(exps, h4, i4, j4) * at(V, h4, j4, d4),), j4)
    ast = kernel(store(y, (h4 * length + i4) * dim + d4, value.alu(Ops.FDIV, at(sums, h4, i4)), h4, i4, d4))
    data = [random(heads, length, dim, seed=s) for s in range(3)]
    s = np.einsum("hid,hjd->hij", data[0].astype(np.float64), data[1])
    p = np.exp(s - s.max(-1, keepdims=True))
    want = np.einsum("hij,hjd->hid", p / p.sum(-1, keepdims=True), data[2])
    args = [np.empty(want.size, np.float32), *(x.ravel() for x in data)]
    np.testing.assert_allclose(evaluate(ast, args)[0].reshape(want.shape), want, rtol=3e-6, atol=1e-6)
    points = [np.array([0, 1, 1]), np.array([0, 36, 11]), np.array([0, 7, 3])]
    np.testing.assert_allclose(evaluate_points(ast, args, points), want[tuple(points)], rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("name, function", [("ARGMAX", np.argmax), ("ARGMIN", np.argmin)])
@pytest.mark.parametrize("block", [1 << 18, 2])
def test_argmax_is_the_first_and_nan_wins(name: str, function: object, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("svod.core.spec.evaluate.BLOCK_ELEMENTS", block)
    x = np.array([[1, 3, 3, 2, 1], [np.nan, 9, np.nan, 0, 1], [0, 1, np.nan, 9, -9], [-np.inf] * 5, [np.inf] * 5, [5] * 5], np.float32)
    rows, cols = x.shape
    a, b, i, k = (rng(n) for n in (rows, cols, rows, cols))
    X = stage(load(param(1, x.size), a * cols + b), a, b)
    best = reduce(name, (at(X, i, k), k.cast(dtypes.int32)), k)
    where = UOp(Ops.GEP, dtypes.int32, (best,), 1)
    ast = kernel(store(param(0, rows, dtypes.int32), i, where, i), store(param(2, rows), i, UOp(Ops.GEP, f32, (best,), 0), i))
    indices, values = evaluate(ast, [np.empty(rows, np.int32), x.ravel(), np.empty(rows, np.float32)])
    np.testing.assert_array_equal(indices, function(x, axis=1))  # type: ignore[operator]
    np.testing.assert_array_equal(values, np.take_along_axis(x, function(x, axis=1)[:, None], 1)[:, 0])  # type: ignore[operator]


@pytest.mark.parametrize("name", sorted(COMBINERS))
def test_combiners(name: str) -> None:
    """Combiners have an identity and are associative and commutative on values with ties, infinities and NaN; both forms of ARGMAX
    agree."""
    combiner = get_combiner(name)

    def alu(op: Ops, *args: np.ndarray) -> np.ndarray:
        return np.asarray(OPERATION_VALUES[op](*args))

    dtype = dtypes.int64 if name in ("AND", "OR", "ADD", "MUL") else dtypes.float64
    values = [-3, 0, 5, 5] if dtype.is_int else [-np.inf, -1.0, 2.0, 2.0, np.inf, np.nan]
    rest = (dtypes.int32,) * (combiner.components - 1)
    elements = [(np.array(v, to_numpy(dtype)), np.array(n))[:combiner.components] for n, v in enumerate(values)]
    close: Callable[..., None] = np.testing.assert_equal
    if name == "EXPSUM":    # sums of exp(x - maximum), as rows of such a maximum give them
        sums = [0.0 if v == -np.inf else np.nan if not v < np.inf else 1.0 + n for n, v in enumerate(values)]
        elements = [(np.array(v), np.array(s), np.array(-s)) for v, s in zip(values, sums, strict=True)]
        close = partial(np.testing.assert_allclose, rtol=1e-14)
    neutral = tuple(np.array(v) for v in combiner.identity(dtype, *rest))
    for a, b, c in itertools.product(elements, repeat=3):
        np.testing.assert_equal(combiner.combine(a, neutral, alu), a)
        ab = combiner.combine(a, b, alu)
        np.testing.assert_equal(ab, combiner.combine(b, a, alu))
        close(combiner.combine(ab, c, alu), combiner.combine(a, combiner.combine(b, c, alu), alu))
        if not any(np.isnan(x[0]) for x in (a, b)):
            np.testing.assert_equal(combiner.combine(a, b, alu, nan=False), ab)
    with pytest.raises(UnsupportedError, match="MEDIAN"):
        get_combiner("MEDIAN")


def test_gather_with_gate_and_two_stores() -> None:
    table, rows, cols = random(5, 3), 4, 3
    where = np.array([4, -1, 0, 7], np.int32)
    i, j = rng(rows), rng(cols)
    entry = load(param(3, rows, dtypes.int32), i).cast(index)
    gate = (UOp.const(index, -1) < entry) & (entry < UOp.const(index, 5))
    k = rng(rows)
    ast = kernel(store(param(0, 12), i * cols + j, load(param(2, 15), entry * cols + j, 0.0, gate), i, j),
                 store(param(1, 4), k, UOp.const(f32, 2.5), k))
    taken, filled = evaluate(ast, [np.empty(12, np.float32), np.empty(4, np.float32), table.ravel(), where])
    np.testing.assert_array_equal(taken.reshape(4, 3), [table[4], [0, 0, 0], table[0], [0, 0, 0]])
    np.testing.assert_array_equal(filled, 2.5)


def test_in_place_reads_see_the_old_contents_and_arguments_are_not_written() -> None:
    p, i = param(0, 10), rng(9)
    x = np.arange(10, dtype=np.float32)
    got = evaluate(kernel(store(p, i + 1, load(p, i), i)), [x])[0]
    np.testing.assert_array_equal(got, [0, *range(9)])
    np.testing.assert_array_equal(x, np.arange(10))


def test_variable_extent_and_empty_ranges() -> None:
    n, i = UOp(Ops.DEFINE_VAR, index, (), ("n", 0, 8)), None
    i = rng(n)
    k = rng(0)
    ast = kernel(store(param(0, 8), i, reduce("MAX", (load(param(1, 8), k),), k), i))
    got = evaluate(ast, [np.ones(8, np.float32), np.ones(8, np.float32)], {"n": 5})[0]
    np.testing.assert_array_equal(got, [-np.inf] * 5 + [1] * 3)
    np.testing.assert_array_equal(evaluate(ast, [np.ones(8, np.float32)] * 2, {"n": 0})[0], 1)
    with pytest.raises(LaunchError, match="'n'"):
        evaluate(ast, [np.ones(8, np.float32)] * 2)


def test_out_of_bounds_and_wrong_arguments_are_named() -> None:
    i = rng(5)
    ast = kernel(store(param(0, 5), i, load(param(1, 4), i), i))
    with pytest.raises(CompileError, match="LOAD from PARAM 1: positions 0 … 4 of 4"):
        evaluate(ast, [np.empty(5, np.float32), np.empty(4, np.float32)])
    with pytest.raises(LaunchError, match="PARAM 1 is a flat array of 4 float32"):
        evaluate(ast, [np.empty(5, np.float32), np.empty(4, np.float64)])
    with pytest.raises(CompileError, match="STORE to PARAM 0"):
        evaluate(kernel(store(param(0, 4), i + -1, UOp.const(f32, 0), i)), [np.empty(4, np.float32)])


def test_stage_outside_its_ranges_is_poison_that_where_hides() -> None:
    a, i = rng(3), rng(5)
    inner = stage(load(param(1, 3), a), a)
    gate = (UOp.const(index, 0) < i) & (i < UOp.const(index, 4))
    ast = kernel(store(param(0, 5), i, gate.alu(Ops.WHERE, at(inner, i + -1), 7.0), i))
    args = [np.empty(5, np.float32), np.arange(3, dtype=np.float32)]
    for got in (evaluate(ast, args)[0], evaluate_points(ast, args, [np.arange(5)])):
        np.testing.assert_array_equal(got, [7, 0, 1, 2, 7])
    assert np.isnan(evaluate(kernel(store(param(0, 5), i, at(inner, i), i)), args)[0][4])


def test_integer_division_is_pythons_and_casts_truncate() -> None:
    pairs = np.array([(a, b) for a in (-7, -1, 0, 1, 7) for b in (-3, -1, 1, 3)], np.int32)
    a, b = pairs.T
    np.testing.assert_array_equal(apply_alu(Ops.IDIV, dtypes.int32, [a, b]), [int(x) // int(y) for x, y in pairs])
    np.testing.assert_array_equal(apply_alu(Ops.MOD, dtypes.int32, [a, b]), [int(x) % int(y) for x, y in pairs])
    x = np.array([-2.9, -0.5, 0.5, 2.9, 300.0, np.nan, np.inf], np.float32)
    i = rng(7)
    got = evaluate(kernel(store(param(0, 7, dtypes.int32), i, load(param(1, 7), i).cast(dtypes.int32), i)), [np.empty(7, np.int32), x])[0]
    np.testing.assert_array_equal(got[:5], [-2, 0, 0, 2, 300])
    np.testing.assert_array_equal(
        evaluate(kernel(store(param(0, 7, dtypes.bool), i, load(param(1, 7), i).cast(dtypes.bool), i)), [np.empty(7, bool), x])[0], True)
    five = UOp.const(dtypes.int32, 5).alu(Ops.IDIV, load(param(1, 7, dtypes.int32), i))
    got = evaluate(kernel(store(param(0, 7, dtypes.int32), i, five, i)), [np.empty(7, np.int32), np.arange(7, dtype=np.int32)])[0]
    np.testing.assert_array_equal(got, [0, 5, 2, 1, 1, 1, 0])


def bf16_by_fractions(value: float) -> int:
    """Return the bits of the bfloat16 nearest to a positive float, ties to even, by comparing with the exact values of all bfloat16."""
    if math.isinf(value):
        return 0x7F80
    codes = np.arange(0x7F81, dtype=np.uint32)
    numbers = (codes << 16).view(np.float32).astype(np.float64)
    numbers[-1] = 2.0**128                               # infinity stands where the next number would
    i = int(np.searchsorted(numbers, value))
    if i > 0x7F80:
        return 0x7F80
    if numbers[i] == value:
        return i
    low, high = value - numbers[i - 1], numbers[i] - value
    return i - 1 if low < high or (low == high and i % 2) else i


def test_bfloat16_rounding() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    numbers = to_float(bits, dtypes.bfloat16)
    back = from_float(numbers, dtypes.bfloat16)
    ordinary = ~np.isnan(numbers)
    np.testing.assert_array_equal(back[ordinary], bits[ordinary])
    assert np.isnan(to_float(back[~ordinary], dtypes.bfloat16)).all()
    draw = np.random.default_rng(0)
    values = np.exp2(draw.uniform(-140, 128, 300))
    half = to_float(draw.integers(0, 0x7F00, 100).astype(np.uint16), dtypes.bfloat16).astype(np.float64)
    ties = half * (1 + 2.0**-8)                             # near or on the midpoint, and just beside it
    values = np.concatenate([values, ties, ties * (1 + 2.0**-40), ties * (1 - 2.0**-40), [3.3961775e38, 3.39e38, 1e39, np.inf, 0.0]])
    want = [bf16_by_fractions(float(v)) for v in values]
    np.testing.assert_array_equal(from_float(values, dtypes.bfloat16), want)
    np.testing.assert_array_equal(from_float(-values, dtypes.bfloat16), np.array(want) | 0x8000)
    assert from_float(values[0], dtypes.bfloat16) == want[0] and from_float(np.array(values[0]), dtypes.bfloat16).shape == ()
    with np.errstate(over="ignore"):
        singles = values.astype(np.float32)
    np.testing.assert_array_equal(from_float(singles, dtypes.bfloat16), [bf16_by_fractions(float(v)) for v in singles])


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16])
def test_sixteen_bit_arithmetic_rounds_every_operation(dtype: DType) -> None:
    i = rng(100)
    draw = np.random.default_rng(3)
    a, b, c = (from_float(draw.standard_normal(100), dtype) for _ in range(3))
    x, y, z = (load(param(s, 100, dtype), i) for s in (1, 2, 3))
    got = evaluate(kernel(store(param(0, 100, dtype), i, x * y + z, i)), [np.empty(100, to_numpy(dtype)), a, b, c])[0]
    A, B, C = (to_float(v, dtype).astype(np.float64) for v in (a, b, c))
    np.testing.assert_array_equal(got, from_float(to_float(from_float(A * B, dtype), dtype).astype(np.float64) + C, dtype))


def test_fma_is_fused() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.standard_normal(2000), draw.standard_normal(2000)

    for c in (-(a * b), draw.standard_normal(2000), np.zeros(2000)):
        got = fma64(a, b, c)
        want = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=True)]
        np.testing.assert_array_equal(got, want)


def test_large_kernels_by_points_are_cheap() -> None:
    n = 1024
    a, b = random(n, n), random(n, n, seed=1)
    points = [np.random.default_rng(s).integers(0, n, 200) for s in (0, 1)]
    got = evaluate_points(gemm(n, n, n), [np.empty(n * n, np.float32), a.ravel(), b.ravel()], points)
    want = np.einsum("pk,kp->p", a[points[0]].astype(np.float64), b[:, points[1]])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
