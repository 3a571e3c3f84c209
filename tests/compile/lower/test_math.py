"""The vector expansions of functions, executed with NumPy and compared with long double references on every 16-bit float and on a million
float32 per function."""
from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest

from svod.compile.lower.builder import Builder
from svod.compile.lower.linear import validate
from svod.compile.lower.math import MAX_ULP, SIN_DOMAIN, expand, expand_attention_weight
from svod.compile.lower.program import PhaseSpec, Program, ProgramSpec
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.ir.uop import Ops
from svod.core.machine.target import FloatRules, Target
from svod.core.spec.values import Array, apply_alu, bitcast, cast, constant, hold, scaleb, unhold
from svod.errors import UnsupportedError
from tests.compile.native import Code, runnable_targets
from tests.compile.native import run as native_run
from tests.draws import a_half, a_quarter
from tests.interpreted import interpret

F32, F64 = dtypes.float32, dtypes.float64
FLOATS = (dtypes.float16, dtypes.bfloat16, F32, F64)
MANTISSA = {dtypes.float16: 10, dtypes.bfloat16: 7, F32: 23, F64: 52}
MAX_EXPONENT = {dtypes.float16: 15, dtypes.bfloat16: 127, F32: 127, F64: 1023}
UNARY = (Ops.EXP, Ops.EXP2, Ops.LOG, Ops.LOG2, Ops.SIN, Ops.COS, Ops.TANH, Ops.ERF)
# where the reference is no better than float64, it may be off by an ulp of float64 itself
REFERENCE_SLACK = 0.0 if np.finfo(np.longdouble).nmant > 60 else 1.0


class Direct:
    """A Builder that computes each instruction immediately; its instruction numbers stand for arrays in held form."""

    def __init__(self) -> None:
        self.values: list[tuple[Array, DType, int]] = []
        self.ops: list[str] = []

    def put(self, x: Array, dtype: DType, lanes: int) -> int:
        self.values.append((x, dtype, lanes))
        return len(self.values) - 1

    def alu(self, op: str, dtype: DType, lanes: int, *args: int) -> int:
        self.ops.append(op)
        if op == "SCALEB":
            return self.put(scaleb(self.values[args[0]][0], self.values[args[1]][0]), dtype, lanes)
        if op == "POW2":
            power = np.exp2(self.values[args[0]][0].astype(np.float64))
            return self.put(np.where(power < 2.0**-126, 0, power).astype(np.float32), dtype, lanes)
        return self.put(apply_alu(Ops[op], dtype, [self.values[a][0] for a in args]), dtype, lanes)

    def const(self, dtype: DType, lanes: int, value: bool | int | float) -> int:
        if dtype == F32 and not math.isnan(value):
            assert float(np.float32(value)) == value, f"the constant {value!r} is not a float32"
        return self.put(constant(dtype, value), dtype, lanes)

    def cast(self, dtype: DType, v: int) -> int:
        x, of, lanes = self.values[v]
        return v if of == dtype else self.put(cast(x, of, dtype), dtype, lanes)

    def bitcast(self, dtype: DType, v: int) -> int:
        x, of, lanes = self.values[v]
        return self.put(bitcast(x, of, dtype), dtype, lanes)

    def type_of(self, v: int) -> tuple[DType, int]:
        return self.values[v][1:]


STRICT, SCALED = FloatRules(has_slow_subnormals=True), FloatRules(scales=True, has_slow_subnormals=True)
LOOSE, POWERS = FloatRules(is_strict=False), FloatRules(has_pow2=True)


def run(op: Ops, dtype: DType, *args: Array, rules: FloatRules = STRICT) -> Array:
    b = Direct()
    with np.errstate(all="ignore"):
        out = expand(b, op, dtype, args[0].size, *(b.put(x, dtype, x.size) for x in args), rules=rules)
    assert b.values[out][1] == dtype
    return np.broadcast_to(b.values[out][0], args[0].shape)


def long_erf(x: Array) -> Array:
    return np.array([math.erf(float(v)) for v in x], np.longdouble)


def reference(op: Ops, *args: Array) -> Array:
    functions: dict[Ops, Callable[..., Array]] = {
        Ops.EXP: np.exp, Ops.EXP2: np.exp2, Ops.LOG: np.log, Ops.LOG2: np.log2, Ops.SIN: np.sin, Ops.COS: np.cos, Ops.TANH: np.tanh,
        Ops.ERF: long_erf, Ops.POW: np.power}
    with np.errstate(all="ignore"):
        return functions[op](*(x.astype(np.longdouble) for x in args))


def ulps(got: Array, want: Array, dtype: DType) -> Array:
    """Return the distance in units of the last place of `want` in `dtype`; infinity counts as the number after the largest one."""
    mantissa, top = MANTISSA[dtype], MAX_EXPONENT[dtype]
    with np.errstate(all="ignore"):
        over = np.ldexp(np.longdouble(1), top + 1)
        g, w = np.clip(got.astype(np.longdouble), -over, over), np.clip(want, -over, over)
        exponent = np.clip(np.frexp(w)[1] - 1, 1 - top, top)
        distance = np.abs(g - w) / np.ldexp(np.longdouble(1), exponent - mantissa)
        distance = np.where(np.isnan(got) & np.isnan(want), 0, distance)
    return np.where(np.isnan(distance), np.inf, distance)


def check(op: Ops, dtype: DType, *args: Array) -> None:
    want = reference(op, *args)
    for rules in (STRICT, SCALED, POWERS):
        check_against(want, run(op, dtype, *args, rules=rules), op, dtype, *args)


def check_against(want: Array, got: Array, op: Ops, dtype: DType, *args: Array) -> None:
    error = ulps(got, want, dtype)
    worst = int(np.argmax(error))
    slack = REFERENCE_SLACK if dtype == F64 else 0.0
    at = [x[worst] for x in args]
    assert error[worst] <= MAX_ULP[op][dtype] + slack, f"{op.value}({at}) = {got[worst]}, not {want[worst]}: {error[worst]} ulp"


def domain(op: Ops, dtype: DType, x: Array) -> Array:
    if op not in (Ops.SIN, Ops.COS):
        return x
    return x[~(np.isfinite(x) & (np.abs(x) > SIN_DOMAIN[dtype]))]


def spread(op: Ops, dtype: DType, count: int) -> list[Array]:
    """Draw sample points: over all bit patterns, over the range in which the function varies, and around 0 and 1."""
    draw = np.random.default_rng(7)
    numpy = to_numpy(dtype)
    word = np.uint32 if dtype == F32 else np.uint64
    bits = draw.integers(0, 1 << dtype.bits, count, dtype=word).view(numpy)
    wide = dtype == F64
    limits = {Ops.EXP: (-760, 720) if wide else (-110, 95), Ops.EXP2: (-1080, 1030) if wide else (-153, 130), Ops.TANH: (-20, 20),
              Ops.LOG: (0, 4), Ops.LOG2: (0, 4), Ops.ERF: (-6.5, 6.5)}
    low, high = limits.get(op, (-300, 300))
    near = draw.uniform(-1, 1, count)
    return [domain(op, dtype, bits), draw.uniform(low, high, count).astype(numpy), near.astype(numpy), (1 + near * 1e-3).astype(numpy)]


@pytest.mark.parametrize("dtype", a_half([dtypes.float16, dtypes.bfloat16]), ids=lambda d: d.name)
@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.value)
def test_every_sixteen_bit_float(op: Ops, dtype: DType) -> None:
    memory = np.arange(65536, dtype=np.uint16).view(to_numpy(dtype))
    check(op, dtype, domain(op, dtype, hold(memory, dtype)))


@pytest.mark.slow
@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.value)
def test_a_million_float32(op: Ops) -> None:
    for x in spread(op, F32, 270_000):
        check(op, F32, x)


@pytest.mark.parametrize("op", a_half(UNARY), ids=lambda op: op.value)
def test_float64(op: Ops) -> None:
    for x in spread(op, F64, 20_000):
        check(op, F64, x)


SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 5e-324, -5e-324, 2.2250738585072014e-308, 1e-45, -1e-45, 1.17549435e-38,
           1e308, -1e308, 3.4e38, -3.4e38, 88.72283, 88.722839, 88.7229, -87.33655, -103.97208, -103.9721, -104.0, 709.782712893384,
           709.7827128933841, -744.4400719213812, -745.1332191019411, -745.1332191019412, -746.0, 128.0, 127.99999, -149.0, -150.0, -149.5,
           1024.0, 1023.9999999999999, -1074.0, -1075.0)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.value)
def test_special_values(op: Ops, dtype: DType) -> None:
    x = domain(op, dtype, cast(np.array(SPECIAL), F64, dtype))
    check(op, dtype, x)
    got, want = run(op, dtype, x), reference(op, x)
    same = (want == 0) | np.isinf(want)
    zero_or_inf = same & ((got == 0) | np.isinf(got))
    np.testing.assert_array_equal(np.signbit(got[zero_or_inf]), np.signbit(want[zero_or_inf]))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    # what is exactly 0 or infinite (not merely rounded to it) is so in the result
    exact = np.isinf(x) & same
    np.testing.assert_array_equal(got[exact].astype(np.float64), want[exact].astype(np.float64))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
@pytest.mark.parametrize("op", [Ops.SIN, Ops.COS], ids=lambda op: op.value)
@pytest.mark.parametrize("rules", [STRICT, LOOSE, LOOSE._replace(has_float64=False)])
def test_an_infinity_has_no_sine(op: Ops, dtype: DType, rules: FloatRules) -> None:
    got = run(op, dtype, cast(np.array([math.inf, -math.inf, math.nan, 0.0]), F64, dtype), rules=rules)
    np.testing.assert_array_equal(got.astype(np.float64), [math.nan] * 3 + [float(op is Ops.COS)])


@pytest.mark.parametrize("dtype", [F32, F64], ids=lambda d: d.name)
def test_exact_results(dtype: DType) -> None:
    top, small = MAX_EXPONENT[dtype], 1 - MAX_EXPONENT[dtype] - MANTISSA[dtype]
    numpy = to_numpy(dtype)
    k = np.arange(small, top + 1)
    powers = np.ldexp(numpy.type(1), k)
    np.testing.assert_array_equal(run(Ops.LOG2, dtype, powers), k)
    even = k[k % 2 == 0]
    np.testing.assert_array_equal(run(Ops.EXP2, dtype, even.astype(numpy)), np.ldexp(numpy.type(1), even))
    zero = np.array([0.0, -0.0], numpy)
    for op in (Ops.SIN, Ops.TANH, Ops.ERF):
        np.testing.assert_array_equal(np.signbit(run(op, dtype, zero)), [False, True])
    for op in (Ops.EXP, Ops.EXP2, Ops.COS):
        np.testing.assert_array_equal(run(op, dtype, zero), 1)
    np.testing.assert_array_equal(run(Ops.LOG, dtype, np.ones(1, numpy)), 0)
    x = np.concatenate([np.linspace(-30, 30, 20001), np.linspace(3.5, 4.5, 20001), np.linspace(8, 10, 20001)]).astype(numpy)
    for op in (Ops.TANH, Ops.ERF):
        y = run(op, dtype, x)
        assert np.abs(y).max() == 1
        np.testing.assert_array_equal(run(op, dtype, -x), -y)


@pytest.mark.parametrize("dtype", [F32, F64], ids=lambda d: d.name)
def test_erf_and_tanh_keep_relative_accuracy_near_zero(dtype: DType) -> None:
    low = -44 if dtype == F32 else -300
    x = (10.0 ** np.random.default_rng(2).uniform(low, 0, 20_000)).astype(to_numpy(dtype))
    for op in (Ops.ERF, Ops.TANH):
        check(op, dtype, x)


@pytest.mark.parametrize("dtype", [F32, F64], ids=lambda d: d.name)
def test_erf_where_its_polynomials_meet(dtype: DType) -> None:
    """Neighbours of the number at which one polynomial follows the other, and of those from which erf is 1: no value is less than the one
    before by more than a unit in the last place."""
    numpy = to_numpy(dtype)
    word = np.uint32 if dtype == F32 else np.uint64
    for meet in (0.859375, 3.9375, 6.0):
        bits = np.array(meet, numpy).view(word) + np.arange(-3001, 3001).astype(word)
        x = bits.view(numpy)
        check(Ops.ERF, dtype, x)
        assert np.diff(run(Ops.ERF, dtype, x)).min() >= -np.finfo(numpy).epsneg


def decimal_erf(x: float) -> Decimal:
    """Compute erf by the series of positive terms 2x/sqrt(pi) exp(-x²) sum (2x²)^n / (2n+1)!!."""
    with localcontext() as context:
        context.prec = 50
        v = Decimal(x)
        pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
        term = total = v
        n = 0
        while term > total * Decimal("1e-45"):
            n += 1
            term = term * 2 * v * v / (2 * n + 1)
            total += term
        return 2 / pi.sqrt() * (-v * v).exp() * total


def test_erf_of_float64_against_its_series() -> None:
    x = np.random.default_rng(3).uniform(0.01, 5.9, 300)
    got = run(Ops.ERF, F64, x)
    for a, b in zip(x, got, strict=True):
        want = decimal_erf(float(a))
        assert abs(Decimal(float(b)) - want) <= Decimal(MAX_ULP[Ops.ERF][F64]) * Decimal(float(np.spacing(float(want))))


@pytest.mark.parametrize("dtype", [F32, F64], ids=lambda d: d.name)
def test_sine_stays_bounded_beyond_its_domain(dtype: DType) -> None:
    x = (10.0 ** np.linspace(9, 38 if dtype == F32 else 308, 5001)).astype(to_numpy(dtype))
    for op in (Ops.SIN, Ops.COS):
        assert np.abs(run(op, dtype, x)).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_pow(dtype: DType) -> None:
    draw = np.random.default_rng(4)
    held = np.float64 if dtype == F64 else np.float32
    count = 60_000 if dtype == F64 else 200_000
    top = MAX_EXPONENT[dtype] + 1.0
    logs = draw.uniform(-top, top, count)
    x = cast(np.exp2(logs), F64, dtype)
    y = cast(draw.uniform(-1.05, 1.05, count) * top / np.maximum(np.abs(logs), 1e-3), F64, dtype)   # results over all exponents
    near = cast(np.exp2(draw.uniform(-1, 1, count) * 2.0**-MANTISSA[dtype] * 8 ** draw.uniform(0, 4, count)), F64, dtype)
    far = cast(draw.uniform(-1, 1, count) * 0.7 * top / np.abs(np.log2(np.where(near == 1, 2, near)).astype(np.float64)), F64, dtype)
    ordinary = cast(draw.uniform(0, 10, count), F64, dtype), cast(draw.uniform(-5, 5, count), F64, dtype)
    assert x.dtype == held
    for a, b in ((x, y), (near, far), ordinary):
        check(Ops.POW, dtype, a, b)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_pow_cases(dtype: DType) -> None:
    """The special cases of IEEE 754's pow: zeros, ones, infinities, NaN, negative bases with even, odd and fractional exponents."""
    values = [0.0, 1.0, 2.0, 3.0, 0.5, 1.5, 4.0, 7.0, 100.0, 101.0, 1e-40, 1e30, 16777215.0, 2.0**53, math.inf]
    both_signs = [*values, *(-v for v in values), math.nan]
    x, y = (cast(v.ravel(), F64, dtype) for v in np.meshgrid(both_signs, both_signs))
    check(Ops.POW, dtype, x, y)
    got, want = run(Ops.POW, dtype, x, y), reference(Ops.POW, x, y)
    defined = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[defined]), np.signbit(want[defined]))
    simple = defined & ((want == 0) | np.isinf(want) | (want == 1)) & (np.isin(np.abs(x), (0, 1, np.inf)) | np.isin(np.abs(y), (0, np.inf)))
    np.testing.assert_array_equal(got[simple].astype(np.float64), want[simple].astype(np.float64))


@pytest.mark.parametrize("op", a_quarter([*UNARY, Ops.POW]), ids=lambda op: op.value)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
@pytest.mark.parametrize("rules", [STRICT, SCALED, LOOSE, LOOSE._replace(has_float64=False)])
def test_expansions_are_valid_linear(op: Ops, dtype: DType, rules: FloatRules) -> None:
    """The expansions built by lowering's builder are well-formed LINEAR and compute the same bits."""
    operands = 2 if op is Ops.POW else 1
    b = Builder()
    out, *ins = (b.pure("ARG", dtype, 1, (), s) for s in range(operands + 1))
    result = expand(b, op, dtype, 8, *(b.load("LOAD", dtype, 8, (p, b.index(0)), 0) for p in ins), rules=rules)
    b.store("STORE", dtype, 8, (out, b.index(0), result), (0, False))
    spec = ProgramSpec("f", ((dtype, 8),) * (operands + 1), (0,), (), (PhaseSpec("f", 1, 1, 0),))
    program = Program(spec, (b.finish(),))
    validate(program)
    x = cast(np.array([0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 0.125, 7.0]), F64, dtype)
    memory = np.asarray(x.astype(to_numpy(dtype)) if dtype != dtypes.bfloat16 else (x.view(np.uint32) >> 16).astype(np.uint16))
    y = np.zeros(8, to_numpy(dtype))
    interpret(program, [y, *[memory] * operands])
    np.testing.assert_array_equal(hold(y, dtype), run(op, dtype, *[x] * operands, rules=rules))


@pytest.mark.parametrize("op", [Ops.EXP, Ops.EXP2, Ops.POW], ids=lambda op: op.value)
@pytest.mark.parametrize("dtype", [F32, F64], ids=lambda d: d.name)
def test_one_instruction_scales_by_powers_of_two(op: Ops, dtype: DType) -> None:
    """On a target with a scaling instruction, the expansion uses only that for powers of two, and is shorter."""
    made: list[list[str]] = []
    for scales in (False, True):
        b = Direct()
        expand(b, op, dtype, 1, *[b.put(np.ones(1, to_numpy(dtype)), dtype, 1)] * (2 if op is Ops.POW else 1), rules=FloatRules(scales))
        assert ("SCALEB" in b.ops) is scales
        made.append(b.ops)
    assert len(made[1]) < len(made[0])


def test_integers_are_refused() -> None:
    b = Direct()
    with pytest.raises(UnsupportedError, match="EXP of int32"):
        expand(b, Ops.EXP, dtypes.int32, 1, b.put(np.ones(1, np.int32), dtypes.int32, 1), rules=STRICT)


@pytest.mark.parametrize("rules", [STRICT, SCALED, STRICT._replace(has_slow_subnormals=False)])
@pytest.mark.parametrize("op, dtype, least", [
    (Ops.EXP, F32, -104.0), (Ops.EXP, F64, -746.0), (Ops.EXP2, F32, -151.0), (Ops.EXP2, F64, -1076.0)])
def test_powers_that_are_zero_come_without_subnormal_numbers(op: Ops, dtype: DType, least: float, rules: FloatRules) -> None:
    """NumPy raises an error where an instruction of the expansion rounds a number to zero or to a subnormal one."""
    x = np.array([least * 1.0001, 2 * least, -1e30, -np.inf, 0, 1, 80, least * 0.8], to_numpy(dtype))
    b = Direct()
    with np.errstate(all="ignore", under="raise"):
        if not rules.has_slow_subnormals:
            with pytest.raises(FloatingPointError, match="underflow"):
                expand(b, op, dtype, x.size, b.put(x, dtype, x.size), rules=rules)
            return
        got = b.values[expand(b, op, dtype, x.size, b.put(x, dtype, x.size), rules=rules)][0]
    np.testing.assert_array_equal(got[:4], 0)
    assert (got[4:] > 0).all()


@pytest.mark.parametrize("rules", [STRICT, SCALED, STRICT._replace(has_slow_subnormals=False)])
@pytest.mark.parametrize("op", UNARY)
def test_small_arguments_come_without_subnormal_numbers(op: Ops, rules: FloatRules) -> None:
    """Functions whose polynomials are of squares make no subnormal numbers of them."""
    x, dtype = np.concatenate([sign * 10.0**-np.linspace(0, 36, 1009) for sign in (1, -1)]).astype(np.float32), F32
    b = Direct()
    with np.errstate(all="ignore", under="raise"):
        if op in (Ops.SIN, Ops.COS, Ops.TANH, Ops.ERF) and not rules.has_slow_subnormals:
            with pytest.raises(FloatingPointError, match="underflow"):
                expand(b, op, dtype, x.size, b.put(x, dtype, x.size), rules=rules)
        else:
            expand(b, op, dtype, x.size, b.put(x, dtype, x.size), rules=rules)


@pytest.mark.parametrize("rules", [STRICT, SCALED])
@pytest.mark.parametrize("dtype, least", [(F32, -100 * math.log(2)), (F64, -996 * math.log(2))])
def test_attention_weights_are_exponentials_or_zero(dtype: DType, least: float, rules: FloatRules) -> None:
    type_ = to_numpy(dtype).type
    far = np.array([least * 1.0001, 2 * least, -1e30, -np.inf], type_)
    near = np.concatenate([np.linspace(least * 0.9999, 0, 1001), [0, -1e-30, -0.0]]).astype(type_)
    b = Direct()
    x = np.concatenate([far, near, [np.nan]]).astype(type_)
    with np.errstate(all="ignore", under="raise"):
        got = b.values[expand_attention_weight(b, dtype, x.size, b.put(x, dtype, x.size), rules)][0]
        assert (got[far.size:-1] * type_(2.0**-26) > 0).all()
    np.testing.assert_array_equal(got[:far.size], 0)
    np.testing.assert_array_equal(got[far.size:-1], run(Ops.EXP, dtype, near, rules=rules))
    assert np.isnan(got[-1])


@pytest.mark.parametrize("target", [pytest.param(t, id=n) for n, t in runnable_targets().items() if t.has_fma])
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_machine_code_computes_the_same_bits(dtype: DType, target: Target) -> None:
    """All functions in one phase give the same bits as machine code, for all targets that this machine can run; all NaNs count as equal."""
    ops, count, lanes = (*UNARY, Ops.POW), 512, 8
    draw = np.random.default_rng(5)
    x = np.concatenate([cast(draw.standard_normal(count - 40) * 20, F64, dtype), cast(np.array([*SPECIAL, 2.5, 0.1])[:40], F64, dtype)])
    y = cast(draw.standard_normal(x.size) * 3, F64, dtype)
    x, y = x[:x.size - x.size % lanes], y[:x.size - x.size % lanes]
    b = Builder()
    pointers = [b.pure("ARG", dtype, 1, (), s) for s in range(len(ops) + 2)]
    loop, _ = b.open(b.pure("BEGIN", dtypes.index, 1, ()), b.pure("END_", dtypes.index, 1, ()), lanes)
    operands = [b.load("LOAD", dtype, lanes, (p, loop), 0) for p in pointers[-2:]]
    for op, pointer in zip(ops, pointers, strict=False):
        result = expand(b, op, dtype, lanes, *operands[:2 if op is Ops.POW else 1], rules=target.float_rules)
        b.store("STORE", dtype, lanes, (pointer, loop, result), (0, False))
    b.close(loop)
    code = Code()
    code.instructions = list(b.finish())
    outs = [np.zeros(x.size, to_numpy(dtype)) for _ in ops]
    native_run(code, [*outs, unhold(x, dtype), unhold(y, dtype)], 0, x.size, target=target)
    for op, out in zip(ops, outs, strict=True):
        want = run(op, dtype, *((x, y) if op is Ops.POW else (x,)), rules=target.float_rules)
        np.testing.assert_array_equal(hold(out, dtype), want, err_msg=op.value)
