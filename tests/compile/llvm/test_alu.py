"""Machine code of every elementwise instruction, compared with NumPy: all dtypes, several lane counts, and special operands."""
from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from svod.compile.llvm.text import constant
from svod.core.ir.dtype import STORABLE, DType, dtypes, to_numpy
from svod.core.machine.target import Target
from svod.core.spec.values import scaleb
from svod.errors import CompileError
from tests.compile.native import BASELINE, TARGETS, apply, runnable_targets
from tests.draws import a_half, a_quarter

LANES = (1, 3, 8, 16, 32)
FLOATS = [d for d in STORABLE if d.is_float]
INTS = [d for d in STORABLE if d.is_int]
NUMBERS = [d for d in STORABLE if d.kind != "b"]
COUNT = 96  # a multiple of all of LANES


def to_bfloat16(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert float32 to the bits of bfloat16, to nearest even, by exact comparison with the two neighbours."""
    out = np.empty(x.shape, np.uint16)
    for k, v in enumerate(x.astype(np.float32)):
        down = int(np.float32(v).view(np.uint32)) >> 16
        if np.isnan(v):
            out[k] = down | 0x40
            continue
        rest = int(np.float32(v).view(np.uint32)) & 0xFFFF
        out[k] = down + (rest > 0x8000 or (rest == 0x8000 and down & 1))
    return out


def widen(dtype: DType, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == dtypes.bfloat16 else x


def narrow(dtype: DType, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):
        return to_bfloat16(x) if dtype == dtypes.bfloat16 else x.astype(to_numpy(dtype))


def sample(dtype: DType, seed: int, special: bool = True) -> np.ndarray[Any, Any]:
    """Draw COUNT values of `dtype` (bits for bfloat16): random, with zeros, extremes, infinities and NaN among them."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, COUNT).astype(np.bool_)
    if dtype.is_float:
        x = rng.normal(0, 4, COUNT).astype(np.float64 if dtype.bits == 64 else np.float32)
        x[::7] = np.round(x[::7])
        x[1::7] = np.floor(x[1::7]) + 0.5
        if special:
            x[rng.integers(0, COUNT, 12)] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 3e38, 1e-3, 65504.0, np.nan, 0.5]
        return narrow(dtype, x)
    info = np.iinfo(dtype.name)
    x = rng.integers(info.min, info.max, COUNT, dtype=dtype.name, endpoint=True)
    x[::3] = rng.integers(0 if dtype.kind == "u" else -9, 10, len(x[::3])).astype(dtype.name)
    x[rng.integers(0, COUNT, 4)] = [info.min, info.max, 0, 1]
    return x


def same(dtype: DType, got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> None:
    """Assert that two arrays are equal bit for bit, except the payload and the sign of NaNs."""
    if dtype.is_float:
        a, b = widen(dtype, got), widen(dtype, want)
        assert (np.isnan(a) == np.isnan(b)).all()
        got, want = got[~np.isnan(a)], want[~np.isnan(b)]
    np.testing.assert_array_equal(got, want)


def reference(dtype: DType, compute: Any, *x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Apply `compute`; for 16-bit floats in float32, with a rounded result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dtype.is_float and dtype.bits == 16:
            wide = compute(*(widen(dtype, v).astype(np.float32) for v in x))
            return wide if wide.dtype == np.bool_ else narrow(dtype, wide)
        out: np.ndarray[Any, Any] = compute(*x)
        return out


@pytest.mark.parametrize("dtype", a_half(NUMBERS), ids=str)
@pytest.mark.parametrize("op, compute", [("ADD", np.add), ("SUB", np.subtract), ("MUL", np.multiply)])
def test_arithmetic(op: str, compute: Any, dtype: DType) -> None:
    a, b = sample(dtype, 1), sample(dtype, 2)
    for lanes in LANES if dtype in (dtypes.float32, dtypes.bfloat16) else (1, 16):
        same(dtype, apply(op, dtype, [a, b], lanes), reference(dtype, compute, a, b))


@pytest.mark.parametrize("dtype", a_half(STORABLE), ids=str)
@pytest.mark.parametrize("op, compute", [("MAX", np.maximum), ("MIN", np.minimum)])
def test_extrema_propagate_nan(op: str, compute: Any, dtype: DType) -> None:
    a, b = sample(dtype, 3), sample(dtype, 4)
    if dtype.is_float:  # either zero may win
        a, b = (np.where(widen(dtype, v) == 0, narrow(dtype, np.float32([1.0]))[0], v) for v in (a, b))
    for lanes in (1, 8, 32):
        same(dtype, apply(op, dtype, [a, b], lanes), reference(dtype, compute, a, b))
    if dtype.is_float:
        half = np.full(COUNT, narrow(dtype, np.float32([0.25]))[0])
        for constants, operands in (({1: 0.25}, [a, half]), ({0: 0.25}, [half, a])):
            same(dtype, apply(op, dtype, operands, 16, constants=constants), reference(dtype, compute, *operands))
        got = apply(op, dtype, [a, b], 8, constants={1: float("nan")})
        assert np.isnan(widen(dtype, got)).all()


@pytest.mark.parametrize("dtype", a_half(STORABLE), ids=str)
@pytest.mark.parametrize("op, compute", [("CMPLT", np.less), ("CMPLE", np.less_equal), ("CMPEQ", np.equal), ("CMPNE", np.not_equal)])
def test_comparisons(op: str, compute: Any, dtype: DType) -> None:
    a, b = sample(dtype, 5), sample(dtype, 6)
    b[::2] = a[::2]
    for lanes in (1, 16):
        got = apply(op, dtypes.bool, [a, b], lanes, of=[dtype, dtype])
        np.testing.assert_array_equal(got, reference(dtype, compute, a, b))


@pytest.mark.parametrize("dtype", a_half(FLOATS), ids=str)
@pytest.mark.parametrize("op, compute", [
    ("NEG", np.negative), ("ABS", np.abs), ("SQRT", np.sqrt), ("FLOOR", np.floor), ("CEIL", np.ceil), ("TRUNC", np.trunc),
    ("ROUND", np.round), ("RECIPROCAL", lambda x: (x.dtype.type(1) / x).astype(x.dtype))])
def test_float_functions(op: str, compute: Any, dtype: DType) -> None:
    a = sample(dtype, 7)
    for lanes in (1, 16):
        same(dtype, apply(op, dtype, [a], lanes), reference(dtype, compute, a))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_true_division(dtype: DType) -> None:
    a, b = sample(dtype, 8), sample(dtype, 9)
    same(dtype, apply("FDIV", dtype, [a, b], 16), reference(dtype, np.divide, a, b))


@pytest.mark.parametrize("dtype", a_half(INTS), ids=str)
def test_integer_functions(dtype: DType) -> None:
    a, b = sample(dtype, 10), sample(dtype, 11)
    for op, compute in (("AND", np.bitwise_and), ("OR", np.bitwise_or), ("XOR", np.bitwise_xor)):
        same(dtype, apply(op, dtype, [a, b], 8), compute(a, b))
    for op, compute in (("NOT", np.invert), ("NEG", np.negative), ("ABS", np.abs)):
        same(dtype, apply(op, dtype, [a], 16), compute(a))
    for op in ("FLOOR", "CEIL", "TRUNC", "ROUND"):
        same(dtype, apply(op, dtype, [a], 16), a)


def test_boolean_functions() -> None:
    a, b, d = sample(dtypes.bool, 12), sample(dtypes.bool, 13), dtypes.bool
    for op, compute in (("AND", np.logical_and), ("OR", np.logical_or), ("XOR", np.logical_xor), ("ADD", np.logical_or),
                        ("MUL", np.logical_and)):
        for lanes in (1, 16):
            same(d, apply(op, d, [a, b], lanes), compute(a, b))
    same(d, apply("NOT", d, [a], 8), ~a)


@pytest.mark.parametrize("dtype", a_half(INTS), ids=str)
def test_integer_division_is_floor_and_never_traps(dtype: DType) -> None:
    a, b = sample(dtype, 14), sample(dtype, 15)
    if dtype.kind == "i":
        a[:3], b[:3] = dtype.min, [-1, 0, 1]
    for op, compute in (("IDIV", np.floor_divide), ("MOD", np.mod)):
        for lanes in (1, 8):
            same(dtype, apply(op, dtype, [a, b], lanes), reference(dtype, compute, a, b))
        for divisor in [1, 2, 3, 7, 8, 64, 0] + ([-1, -3, -8] if dtype.kind == "i" else []):
            full = np.full(COUNT, divisor, dtype.name)
            same(dtype, apply(op, dtype, [a, full], 16, constants={1: divisor}), reference(dtype, compute, a, full))


@pytest.mark.parametrize("dtype", a_half(INTS), ids=str)
def test_shifts_beyond_the_width(dtype: DType) -> None:
    a = sample(dtype, 16)
    amount = (np.arange(COUNT) % (dtype.bits + 9)).astype(dtype.name)
    left = [(int(x) << int(n)) & ((1 << dtype.bits) - 1) for x, n in zip(a, amount, strict=True)]
    want_left = np.array(left, np.uint64).astype(f"uint{dtype.bits}").view(dtype.name)
    want_right = np.array([int(x) >> int(n) for x, n in zip(a, amount, strict=True)], dtype.name)
    for lanes in (1, 16):
        same(dtype, apply("SHL", dtype, [a, amount], lanes), want_left)
        same(dtype, apply("SHR", dtype, [a, amount], lanes), want_right)
    for n in (0, 3, dtype.bits - 1, dtype.bits, dtype.bits + 5):
        full = np.full(COUNT, n, dtype.name)
        want = np.array([int(x) >> n for x in a], dtype.name)
        same(dtype, apply("SHR", dtype, [a, full], 8, constants={1: n}), want)


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_mulacc(dtype: DType) -> None:
    a, b, c = (sample(dtype, seed, special=False) for seed in (17, 18, 19))
    got = apply("MULACC", dtype, [a, b, c], 16)
    if dtype.is_int:
        same(dtype, got, a * b + c)
    elif dtype.bits == 64:
        np.testing.assert_allclose(got, a * b + c, rtol=0, atol=1e-14)
    else:  # rounded once: the product of two float32 is exact in float64
        wide = [widen(dtype, x).astype(np.float64) for x in (a, b, c)]
        same(dtype, got, narrow(dtype, (wide[0] * wide[1] + wide[2]).astype(np.float32)))


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float64], ids=str)
@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 33, 48])
def test_scaling_by_powers_of_two(dtype: DType, lanes: int) -> None:
    """Scaling is exact, or rounded once if the result is denormal; it overflows to infinity and underflows to zero, for vectors of every
    register size and of several registers."""
    targets = [t for t in runnable_targets().values() if t.has_scaleb]
    if not targets:
        pytest.skip("needs a processor with AVX-512")
    rng = np.random.default_rng(lanes)
    count = 8 * lanes
    x = rng.normal(0, 1, count).astype(dtype.name)
    reach = 160 if dtype.bits == 32 else 1100
    n = rng.integers(-reach, reach, count).astype(dtype.name)
    x[:7], n[3], n[6] = (0.0, -0.0, np.inf, np.nan, -np.inf, np.finfo(dtype.name).tiny / 4, 1.0), np.nan, np.nan
    with np.errstate(all="ignore"):
        want = np.where(np.isnan(n), np.nan, np.ldexp(x.astype(np.longdouble), np.nan_to_num(n).astype(int)).astype(dtype.name))
        same(dtype, scaleb(x, n), want.astype(dtype.name))
    for target in targets:
        same(dtype, apply("SCALEB", dtype, [x, n], lanes, target=target), want.astype(dtype.name))


def test_scaling_is_refused_where_it_is_no_instruction() -> None:
    x = np.ones(COUNT, np.float32)
    with pytest.raises(CompileError, match="SCALEB"):
        apply("SCALEB", dtypes.float32, [x, x], 8, target=BASELINE)


def test_mulacc_is_fused_only_where_the_target_fuses() -> None:
    x = np.float32([1 + 2.0 ** -12] * COUNT)
    c = np.float32([-(1 + 2.0 ** -11)] * COUNT)
    for target in runnable_targets().values():
        want = np.float32(2.0 ** -24) if target.has_fma else 0
        assert (apply("MULACC", dtypes.float32, [x, x, c], 8, target=target) == want).all()

    def apart(code: Any, v: list[int]) -> int:
        return int(code.alu("ADD", code.alu("MUL", v[0], v[1]), v[2]))
    assert (apply("", dtypes.float32, [x, x, c], 8, put=apart) == 0).all(), "a product and a sum must stay two roundings"


@pytest.mark.parametrize("dtype", a_half(STORABLE), ids=str)
def test_where_with_lane_and_scalar_conditions(dtype: DType) -> None:
    cond, a, b = sample(dtypes.bool, 20), sample(dtype, 21), sample(dtype, 22)
    for lanes in (1, 16):
        got = apply("WHERE", dtype, [cond, a, b], lanes, of=[dtypes.bool, dtype, dtype])
        same(dtype, got, np.where(cond, a, b))

    def scalar(code: Any, v: list[int]) -> int:
        return int(code.put("WHERE", dtype, 8, (code.put("EXTRACT", dtypes.bool, 1, (v[0],), 2), v[1], v[2])))
    got = apply("", dtype, [cond, a, b], 8, of=[dtypes.bool, dtype, dtype], put=scalar)
    same(dtype, got, np.where(np.repeat(cond[2::8], 8), a, b))


@pytest.mark.parametrize("of", a_quarter(STORABLE), ids=str)
def test_casts(of: DType) -> None:
    for to in STORABLE:
        check_cast(of, to)


def check_cast(of: DType, to: DType) -> None:
    x = sample(of, 23)
    if of.is_float and not to.is_float:  # outside the target type the value is unspecified
        wide = widen(of, x).astype(np.float64)
        low, high = (0, 250) if to.kind == "u" else (-120, 120)
        wide = np.where(np.isfinite(wide), np.clip(wide, low, high), np.nan if to.kind == "b" else 0)
        x = narrow(of, wide.astype(np.float64 if of.bits == 64 else np.float32))
    wide = widen(of, x)
    with np.errstate(all="ignore"):
        want = to_bfloat16(wide.astype(np.float32)) if to == dtypes.bfloat16 else wide.astype(to_numpy(to))
    if of == dtypes.float64 and to == dtypes.bfloat16:
        want = np.array([nearest_bfloat16(v) for v in wide], np.uint16)
    for lanes in (1, 16):
        same(to, apply("CAST", to, [x], lanes, of=[of]), want)


def nearest_bfloat16(v: float) -> int:
    """Convert float64 to bfloat16 with one rounding, by comparing the neighbours of the float32 result."""
    if not np.isfinite(np.float32(v)) or np.isnan(v):
        return int(to_bfloat16(np.float32([v]))[0])
    guess = int(to_bfloat16(np.float32([v]))[0])
    near = [g for g in (guess - 1, guess, guess + 1) if 0 <= g < 1 << 16 and (g ^ guess) & 0x8000 == 0]
    value = {g: float(np.uint32([g << 16]).view(np.float32)[0]) for g in near}
    return min(near, key=lambda g: (abs(value[g] - v), g & 1))


@TARGETS
def test_float64_is_rounded_once_to_16_bits(target: Target) -> None:
    # just beside the midpoint of two 16-bit floats, by less than float32 can see
    base = np.float64([1.0, -1.0, 3.0, 100.0, 2.0 ** -20, 60000.0] * 16)
    step16 = np.float64([2.0 ** -11, 2.0 ** -11, 2.0 ** -10, 2.0 ** -5, 2.0 ** -25, 16.0] * 16)
    tiny = np.where(np.arange(COUNT) % 2 == 0, 1, -1) * np.abs(base) * 2.0 ** -40
    x = base + np.sign(base) * step16 + tiny
    got = apply("CAST", dtypes.float16, [x], 8, of=[dtypes.float64], target=target)
    np.testing.assert_array_equal(got.view(np.uint16), x.astype(np.float16).view(np.uint16))
    y = base * (1 + 2.0 ** -8) + tiny
    want = np.array([nearest_bfloat16(v) for v in y], np.uint16)
    np.testing.assert_array_equal(apply("CAST", dtypes.bfloat16, [y], 8, of=[dtypes.float64], target=target), want)


@TARGETS
def test_every_kind_of_bfloat16_rounding(target: Target) -> None:
    """The conversion to bfloat16 is right for all exponents, subnormals included, and all bits around the rounding point."""
    high = np.arange(0x0000, 0x7F80, 53, dtype=np.uint32) << 16
    bits = np.concatenate([h | np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]) for h in high])
    x = np.resize(bits, -(-len(bits) // 16) * 16).view(np.float32)
    same(dtypes.bfloat16, apply("CAST", dtypes.bfloat16, [x], 16, of=[dtypes.float32], target=target), to_bfloat16(x))


@pytest.mark.parametrize("of, to", [("float32", "int32"), ("int32", "float32"), ("float64", "uint64"), ("float16", "int16"),
                                    ("uint16", "bfloat16"), ("int8", "uint8"), ("bool", "uint8")])
def test_bitcast_keeps_the_bits(of: str, to: str) -> None:
    a, b = (getattr(dtypes, name) for name in (of, to))
    x = sample(a, 24)
    got = apply("BITCAST", b, [x], 16, of=[a])
    np.testing.assert_array_equal(got.view(np.uint8), x.view(np.uint8))


def test_constants_are_rounded_or_wrapped() -> None:
    assert constant(dtypes.float32, 0.1) == constant(dtypes.float32, float(np.float32(0.1)))
    assert constant(dtypes.float32, -0.0) != constant(dtypes.float32, 0.0)
    assert constant(dtypes.float32, 1e300) == constant(dtypes.float32, float("inf"))
    assert constant(dtypes.int8, 255) == "-1" and constant(dtypes.uint8, -1) == "255"
    assert constant(dtypes.bool, True) == "true" and constant(dtypes.bool, 0) == "false"
    assert constant(dtypes.float16, 1e9) == str(0x7C00) and constant(dtypes.float16, 1.0) == str(0x3C00)
    assert constant(dtypes.int64, 1 << 62) == str(1 << 62)
    assert constant(dtypes.float32, 3) == constant(dtypes.float32, 3.0)
    for v in (0.1, -2.5, 3.3895314e38, float("inf"), 1e-40):
        assert int(constant(dtypes.bfloat16, v)) == int(to_bfloat16(np.float32([v]))[0])
