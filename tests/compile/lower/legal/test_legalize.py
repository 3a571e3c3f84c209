"""Legalised LINEAR computes what LINEAR does: every operation and conversion on every type, in the interpreter, for each renderer."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from svod.compile.cuda.render import instructions as cuda_instructions
from svod.compile.llvm.alu import instructions as llvm_instructions
from svod.compile.lower.legal.instructions import Instructions
from svod.compile.lower.legal.legalize import legalize
from svod.compile.lower.linear import ARITY, COMPARES, FLOAT_ONLY, LEGAL_INTEGER, validate
from svod.compile.lower.program import PhaseSpec, Program, ProgramSpec
from svod.compile.webgpu.alu import WGSL_INSTRUCTIONS as WEBGPU_INSTRUCTIONS
from svod.core.ir.dtype import BY_NAME, STORABLE, DType, dtypes, to_numpy
from svod.core.spec.values import from_float, hold
from svod.errors import CompileError
from tests.compile.cuda.target import card_target
from tests.compile.native import AVX2, BASELINE, BOOL, INDEX, Code
from tests.draws import a_half, a_quarter
from tests.interpreted import interpret

NOTHING = Instructions()
SETS = {"nothing": NOTHING, "processor": llvm_instructions(AVX2), "old processor": llvm_instructions(BASELINE),
        "hopper": cuda_instructions(card_target("sm_90")), "webgpu": WEBGPU_INSTRUCTIONS}     # Turing's are those of the processor
EACH = pytest.mark.parametrize("renderer", SETS)
COUNT, LANES = 240, 48
INTEGERS = [d for d in STORABLE if d.is_int]
FLOATS = [d for d in STORABLE if d.is_float]
ARITHMETIC = sorted(set(ARITY) - LEGAL_INTEGER - {"WHERE", "SCALEB", "POW2"})
ON_INTEGERS = [op for op in ARITHMETIC if op not in FLOAT_ONLY]
ON_BOOLS = ("ADD", "MUL", "MAX", "MIN", "AND", "OR", "XOR", "NOT", *sorted(COMPARES))
ON_FLOATS = [op for op in ARITHMETIC if op not in ("AND", "OR", "XOR", "NOT", "SHL", "SHR", "IDIV", "MOD")]
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, 65504.0, 65519.0, 65520.0, -65536.0, 3.3895314e38, 3.4e38,
           2.0**-14, 2.0**-24, 2.0**-25, 3 * 2.0**-26, 2.0**-126, 2.0**-133, 2.0**-149, 1e300, -1e-300, 0.1)


def numbers(dtype: DType, seed: int) -> np.ndarray[Any, Any]:
    """COUNT values in memory form: random bits, small numbers, and the awkward ones."""
    rng = np.random.default_rng(seed)
    if dtype is BOOL:
        return rng.integers(0, 2, COUNT).astype(np.bool_)
    of = to_numpy(dtype)
    values = np.frombuffer(rng.bytes(COUNT * of.itemsize), of).copy()
    if dtype.is_float:
        plain = np.concatenate([rng.normal(0, 4, COUNT // 3), np.round(rng.normal(0, 9, COUNT // 6)) + 0.5, SPECIAL])
        with np.errstate(all="ignore"):
            values[:len(plain)] = from_float(plain, dtype)
    else:
        few = [0, 1, 2, 3, 7, 31, 32, 63, 64, 65, dtype.max, dtype.min, *([-1, -2, -31, dtype.min + 1] if dtype.kind == "i" else [])]
        drawn = [few[k] if few[k] <= dtype.max else 1 for k in rng.integers(0, len(few), COUNT // 2)]
        values[:COUNT // 2] = np.array(drawn, object).astype(of)
    rng.shuffle(values)
    return values


def computed(code: Code, out: DType, arrays: Sequence[np.ndarray[Any, Any]], of: Sequence[DType], renderer: Instructions,
             count: int = COUNT) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The results of a program as it is and as the renderer gets it, which the spec allows and a second pass does not change."""
    params = ((out, count), *((d, len(a)) for d, a in zip(of, arrays, strict=True)))
    spec = ProgramSpec("legal", params, (0,), (), (PhaseSpec("p", COUNT // LANES, 1, 0),))
    program = Program(spec, (tuple(code.instructions),))
    legal = legalize(program, renderer)
    validate(program)
    validate(legal)
    assert legalize(legal, renderer) == legal
    results = []
    for p in (program, legal):
        results.append(np.zeros(count, to_numpy(out)))
        interpret(p, [results[-1], *arrays])
    return results[0], results[1]


def element_wise(op: str, dtype: DType, of: Sequence[DType], constants: Sequence[Any] = ()) -> Code:
    """out[i] = op(x[i], …), the last operands constants; of an index all operands are converted to it, and the result from it."""
    code = Code()
    types = list(of)
    pointers = [code.arg(k, dtypes.int64 if d is INDEX else d) for k, d in enumerate((dtype, *types))]
    loop = code.loop(code.put("BEGIN", INDEX, 1), code.put("END_", INDEX, 1), 1)
    at = code.put("MUL", INDEX, 1, (loop, code.index(LANES)))
    values = [code.load(p, at, LANES) for p in pointers[1:]]
    values = [code.put("CAST", INDEX, LANES, (v,)) if d is INDEX else v for v, d in zip(values, types, strict=True)]
    values += [code.const(types[-1], c, LANES) for c in constants]
    result = code.put(op, dtype, LANES, tuple(values))
    code.store(pointers[0], at, code.put("CAST", dtypes.int64, LANES, (result,)) if dtype is INDEX else result)
    code.end(loop)
    return code


def agree(op: str, dtype: DType, of: Sequence[DType], arrays: Sequence[np.ndarray[Any, Any]], renderer: Instructions,
          constants: Sequence[Any] = ()) -> None:
    def stored(d: DType) -> DType:
        return dtypes.int64 if d is INDEX else d
    want, got = computed(element_wise(op, dtype, of, constants), stored(dtype), arrays, [stored(d) for d in of], renderer)
    if dtype.is_float:
        want, got = (hold(a, dtype) for a in (want, got))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want), f"{op} of {dtype.name} {constants}")
        kept = ~np.isnan(want) & ~((want == 0) & (got == 0) & (op in ("MAX", "MIN")))       # either zero may be chosen
        want, got = (np.ascontiguousarray(a[kept]).view(f"u{a.itemsize}") for a in (want, got))
    np.testing.assert_array_equal(got, want, f"{op} of {dtype.name} {constants}")


@pytest.mark.parametrize(("dtype", "renderer"), a_quarter(product([*STORABLE, INDEX], SETS)), ids=str)
def test_operations(dtype: DType, renderer: str) -> None:
    """Also of a number with itself, and of extreme constants: divisors that are 0, -1 and the least number, amounts beyond the width."""
    ops = ON_BOOLS if dtype is BOOL else ON_FLOATS if dtype.is_float else ON_INTEGERS
    given = [numbers(dtypes.int64 if dtype is INDEX else dtype, 10 + k) for k in range(3)]
    bits, least = dtype.bits, int(dtype.min) if dtype.is_int else 0
    if dtype is INDEX and SETS[renderer].index_bits == 32:
        given, bits, least = [x % (1 << 31) - (1 << 30) for x in given], 32, -1 << 31
        ops = [op for op in ops if op != "SHL"]     # SHL overflows
    known: Sequence[Any] = (True, False) if dtype is BOOL else (0.0, 1.5, float("nan"), float("inf")) if dtype.is_float else (
        0, 1, 2, 7, bits - 1, bits, *((-1, -3, least) if dtype.kind == "i" else (int(dtype.max),)))
    for op in ops:
        arity, result = ARITY[op], BOOL if op in COMPARES else dtype
        agree(op, result, [dtype] * arity, given[:arity], SETS[renderer])
        if arity == 2:
            agree(op, result, [dtype] * 2, [given[0], given[0]], SETS[renderer])
            for constant in known:
                agree(op, result, [dtype], given[:1], SETS[renderer], (constant,))


@EACH
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_float_compared_with_itself(dtype: DType, renderer: str) -> None:
    for op in ("CMPNE", "CMPEQ"):
        code = element_wise("NEG", dtype, [dtype])
        at = next(i for i, x in enumerate(code.instructions) if x.op == "NEG")
        code.instructions[at] = code.instructions[at]._replace(op=op, dtype=BOOL, src=code.instructions[at].src * 2)
        code.instructions[0] = code.instructions[0]._replace(dtype=BOOL)
        code.instructions[at + 1] = code.instructions[at + 1]._replace(dtype=BOOL)
        want, got = computed(code, BOOL, [x := numbers(dtype, 5)], [dtype], SETS[renderer])
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(got, np.isnan(hold(x, dtype)) == (op == "CMPNE"))


@pytest.mark.parametrize(("of", "renderer"), a_quarter(product(STORABLE, SETS)), ids=str)
def test_conversions(of: DType, renderer: str) -> None:
    """A float that an integer type does not hold becomes some value: such are left out."""
    for to in STORABLE:
        given = numbers(of, 40)
        if of.is_float and to.is_int:
            with np.errstate(all="ignore"):
                x = hold(given, of)
                fits = np.isfinite(x) & (x > to.min) & (x < to.max / 2) & ((x > -1) | (to.kind == "i"))
                given = np.where(fits, given, given.dtype.type(0))
        agree("CAST", to, [of], [given], SETS[renderer])


@pytest.mark.parametrize("renderer", a_half(SETS))
def test_conversions_of_constants(renderer: str) -> None:
    for of in STORABLE:
        for to in STORABLE:
            value = True if of is BOOL else 2.5 if of.is_float else 100
            code = element_wise("CAST", to, [of], [value])
            at = next(i for i, x in enumerate(code.instructions) if x.op == "CAST")
            code.instructions[at] = code.instructions[at]._replace(src=(at - 1,))
            want, got = computed(code, to, [numbers(of, 1)], [of], SETS[renderer])
            np.testing.assert_array_equal(got, want, f"{of.name} to {to.name}")


@pytest.mark.parametrize("renderer", ["nothing", "old processor"])
def test_every_16_bit_float_and_its_neighbours(renderer: str) -> None:
    """Widened; and rounded from float32 beside each of them, and half-way to the next."""
    for dtype in (dtypes.float16, dtypes.bfloat16):
        bits = np.arange(1 << 16, dtype=np.uint16)
        memory = bits.view(np.float16) if dtype == dtypes.float16 else bits
        wide = hold(memory, dtype).astype(np.float32)
        with np.errstate(all="ignore"):
            half = (wide.astype(np.float64) + np.roll(wide, 1)) / 2
            singles = np.concatenate([wide, half.astype(np.float32), np.nextafter(half.astype(np.float32), np.float32(0))])
        for of, to, given in ((dtype, dtypes.float32, memory), (dtypes.float32, dtype, singles)):
            given = np.resize(given, -(-len(given) // COUNT) * COUNT)
            for begin in range(0, len(given), COUNT * 64):
                part = np.resize(given[begin:begin + COUNT * 64], COUNT * 64)
                code = Code()
                out, x = code.arg(0, to), code.arg(1, of)
                loop = code.loop(code.put("BEGIN", INDEX, 1), code.put("END_", INDEX, 1), 1)
                at = code.put("MUL", INDEX, 1, (loop, code.index(LANES * 64)))
                code.store(out, at, code.put("CAST", to, LANES * 64, (code.load(x, at, LANES * 64),)))
                code.end(loop)
                want, got = (hold(a, to) for a in computed(code, to, [part], [of], SETS[renderer], len(part)))
                np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
                kept = ~np.isnan(want)
                np.testing.assert_array_equal(got[kept].view(np.uint32), want[kept].view(np.uint32))


@pytest.mark.parametrize(("of", "renderer"), a_quarter(product([d for d in STORABLE if d is not BOOL], SETS)), ids=str)
def test_bits(of: DType, renderer: str) -> None:
    """As elements of the same width, of narrower and of wider ones, of several lanes and one."""
    for to in STORABLE:
        ratio = max(of.itemsize, to.itemsize) // min(of.itemsize, to.itemsize)
        if to is BOOL:
            continue
        for wide in (1, 2, 4):
            lanes, width = (wide * ratio, wide) if of.itemsize > to.itemsize else (wide, wide * ratio)
            code = Code()
            out, x = code.arg(0, to), code.arg(1, of)
            loop = code.loop(code.index(0), code.index(2), 1)
            given = code.load(x, code.put("MUL", INDEX, 1, (loop, code.index(width))), width)
            bits = code.put("BITCAST", to, lanes, (given,))
            code.store(out, code.put("MUL", INDEX, 1, (loop, code.index(lanes))), bits)
            code.end(loop)
            want, got = computed(code, to, [numbers(of, 3)], [of], SETS[renderer])
            same = got.view(np.uint8) == want.view(np.uint8)
            assert same.all() or (to.is_float and to.bits == 16 and np.isnan(hold(want, to)).any())     # NaNs of 16 bits keep no payload
            np.testing.assert_array_equal(np.nan_to_num(hold(got, to)), np.nan_to_num(hold(want, to)))


def test_a_division_of_indices_that_are_not_negative_is_unsigned() -> None:
    code = Code()
    out = code.arg(0, dtypes.int64)
    loop = code.loop(code.index(0), code.index(COUNT), 1)
    below = code.alu("SUB", loop, code.index(9))
    for value in (loop, below):
        for op in ("IDIV", "MOD"):
            quotient = code.alu(op, value, code.index(7))
            code.store(out, loop, code.put("CAST", dtypes.int64, 1, (quotient,)))
    code.end(loop)
    for renderer in SETS.values():
        want, got = computed(code, dtypes.int64, [], [], renderer)
        np.testing.assert_array_equal(got, want)
        legal = legalize(Program(ProgramSpec("", ((dtypes.int64, COUNT),), (0,), (), (PhaseSpec("p", 1, 1, 0),)),
                                 (tuple(code.instructions),)), renderer).code[0]
        kinds = [x.dtype for x in legal if x.op in ("QUOTIENT", "REMAINDER")]
        assert kinds == [BY_NAME[f"uint{renderer.index_bits}"]] * 2 + [INDEX] * 2 and [x.op for x in legal].count("WHERE") == 0


def test_what_a_rule_adds_is_made_once_in_a_loop() -> None:
    code = element_wise("ADD", dtypes.bfloat16, [dtypes.bfloat16] * 2)
    add = next(i for i, x in enumerate(code.instructions) if x.op == "ADD")
    code.instructions[add] = code.instructions[add]._replace(src=code.instructions[add].src[:1] * 2)
    spec = ProgramSpec("", ((dtypes.bfloat16, COUNT),) * 3, (0,), (), (PhaseSpec("p", 1, 1, 0),))
    legal = legalize(Program(spec, (tuple(code.instructions),)), NOTHING).code[0]
    assert [x.op for x in legal].count("SHL") == 1


def test_divisions_that_machines_trap_at_are_reported() -> None:
    for x, y in ((1, 0), (dtypes.int32.min, -1)):
        code = element_wise("QUOTIENT", dtypes.int32, [dtypes.int32] * 2)
        arrays = [np.full(COUNT, v, np.int32) for v in (x, y)]
        with pytest.raises(CompileError, match=r"QUOTIENT.*divides by 0, or the least number by -1"):
            computed(code, dtypes.int32, arrays, [dtypes.int32] * 2, NOTHING)


def test_renderers_differ() -> None:
    """So that the tests above have something to do: each instruction set leaves other code."""
    def left(renderer: Instructions) -> tuple[Program, ...]:
        casts = [program_of("CAST", to, [of]) for to in FLOATS for of in FLOATS]
        return tuple([legalize(p, renderer) for p in (*casts, *[program_of("ADD", d, [d] * 2) for d in STORABLE])])
    code = {name: left(renderer) for name, renderer in SETS.items()}
    assert not [(a, b) for a, b in combinations(code, 2) if code[a] == code[b]]


def program_of(op: str, dtype: DType, of: Sequence[DType]) -> Program:
    spec = ProgramSpec("", tuple((d, COUNT) for d in (dtype, *of)), (0,), (), (PhaseSpec("p", 1, 1, 0),))
    return Program(spec, (tuple(element_wise(op, dtype, of).instructions),))
