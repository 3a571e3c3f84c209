"""Dot instructions: narrow contractions with TC give the AST's results, as interpreted LINEAR for all targets and as machine code if the
host has the instructions; and planted errors are found."""
from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from svod.compile.cpu.host import host_target, make_target
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Instruction, Program
from svod.core.cost.cpu import cost_of
from svod.core.cost.sketch import sketches
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.intrinsics import applicable
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.isa import DOTS
from svod.core.machine.target import Target
from svod.core.spec.evaluate import evaluate
from svod.core.spec.values import dot, from_float, tile_dot, to_float
from svod.errors import CompileError, KernelOptError
from svod.tune.measure.verify import GuardedBuffers, Reference, verify
from tests.agreement import TOLERANCE, Case, run_interpreted, run_native, steps
from tests.chains import random_state
from tests.draws import a_half
from tests.hand_kernels import Ast, number
from tests.interpreted import interpret

I8, U8, I16, BF16, I32, F32 = dtypes.int8, dtypes.uint8, dtypes.int16, dtypes.bfloat16, dtypes.int32, dtypes.float32
FEATURES = ("amx", "avx2", "avx512f", "bf16", "f16c", "fma", "sse4", "vnni")
TARGET = make_target("x86_64", "znver5", FEATURES, (48 << 10, 1 << 20, 32 << 20), 4)
NO_TILES = replace(TARGET, features=tuple(f for f in FEATURES if f != "amx"))    # as most processors with dot instructions
EXTENTS = (1, 2, 3, 5, 7, 8, 11, 16, 17, 23, 31, 33, 40)
KINDS = [(I8, I8, "vnni8"), (U8, U8, "vnni8"), (U8, I8, "vnni8"), (I8, U8, "vnni8"), (I8, U8, "vnni16"), (I16, I8, "vnni16"),
         (BF16, BF16, "bf16")]
TILED = [(I8, I8, "amx8"), (U8, U8, "amx8uu"), (U8, I8, "amx8us"), (I8, U8, "amx8su"), (BF16, BF16, "amxbf16")]


def missing(target: Target) -> list[str]:
    """Return the features of `target` that the host lacks."""
    host = host_target()
    return sorted(set(target.features) - set(host.features)) if host.arch == target.arch else [target.arch]


def gemm(m: int, n: int, k: int, left: DType, right: DType, *, transposed: bool = False, offset: int = 0,
         out: DType | None = None) -> Kernel:
    """Make the kernel c[i, j] = Σ a[i, t]·b[t, j] in 32 bits. `transposed`: b is stored as [j, t]; `offset`: added to a before a is
    widened."""
    ast = Ast()
    wide = F32 if left.is_float else I32
    c, a, b = ast.param(0, m * n, out or wide), ast.param(1, m * k, left), ast.param(2, k * n, right)
    p, q, r, s, i, j, t = ast.axes(m, k, k, n, m, n, k)
    first = ast.load(a, p * k + q)
    x = ast.stage((first + offset if offset else first).cast(wide), p, q)
    y = ast.stage(ast.load(b, s * k + r if transposed else r * n + s).cast(wide), r, s)
    total = ast.reduce("ADD", ast.read(x, i, t) * ast.read(y, t, j), t)
    return Kernel(ast.sink(ast.store(c, i * n + j, total.cast(out) if out else total, i, j)))


def windows(channels: int, outputs: int, size: int, width: int, left: DType, right: DType) -> Kernel:
    """Make the kernel y[o, i] = Σ w[o, c, t]·x[c, i + t - 1], with 0 outside x."""
    ast = Ast()
    wide = F32 if left.is_float else I32
    y, w, x = ast.param(0, outputs * size, wide), ast.param(1, outputs * channels * width, left), ast.param(2, channels * size, right)
    a, b, d, e, f, o, i, c, t = ast.axes(outputs, channels, width, channels, size + width, outputs, size, channels, width)
    weights = ast.stage(ast.load(w, (a * channels + b) * width + d).cast(wide), a, b, d)
    inside = number(1).alu(Ops.CMPLE, f) & (f < size + 1)
    padded = ast.stage(ast.load(x, e * size + f - 1, inside).cast(wide), e, f)
    value = ast.read(weights, o, c, t) * ast.read(padded, c, i + t)
    reduce = UOp(Ops.REDUCE, wide, (value, c, t), ("ADD", 1))
    return Kernel(ast.sink(ast.store(y, o * size + i, reduce, o, i)))


def check_all_ways(case: Case, state: Scheduler, slices: int) -> None:
    program = lower(state)
    validate(program)
    if steps(program) <= 25_000:
        run_interpreted(case, program, slices)
    if not missing(state.target):
        run_native(case, program, state.target, slices)


def with_full_range(case: Case, seed: int) -> Case:
    """Return the case with integer inputs over the whole range of their types."""
    rng = np.random.default_rng(seed)
    for slot, p in enumerate(case.kernel.params):
        if p.dtype.is_int and slot not in case.kernel.outs:
            case.args[slot] = rng.integers(p.dtype.min, int(p.dtype.max) + 1, p.arg.size).astype(case.args[slot].dtype)
    case.want = evaluate(case.kernel.ast, case.args)
    return case


@pytest.mark.parametrize(("left", "right", "name"), KINDS, ids=lambda v: v if isinstance(v, str) else v.name)
def test_random_shapes_and_chains(left: DType, right: DType, name: str) -> None:
    """Chains have TC first or after other opts, then any opts; extents include 1, primes, and sums that no group divides."""
    assert check_random_chains(left, right, name, 4, NO_TILES) >= 2


@pytest.mark.parametrize(("left", "right", "name"), TILED, ids=lambda v: v if isinstance(v, str) else v.name)
def test_random_shapes_and_chains_with_tiles(left: DType, right: DType, name: str) -> None:
    assert check_random_chains(left, right, (name, "o0", "o1"), 5, TARGET) >= 2


def check_random_chains(left: DType, right: DType, arg: str | tuple[str, ...], count: int, target: Target) -> int:
    """Check `count` random chains; returns the number of those whose code has the instruction."""
    used = 0
    for seed in range(count):
        rng = random.Random(f"{left}{right}{arg}{seed}")
        m, n, k = (rng.choice(EXTENTS if isinstance(arg, str) else EXTENTS[1:]) for _ in range(3))    # a tile has two rows at least
        kernel = gemm(m, n, k, left, right, transposed=rng.random() < 0.4, offset=rng.choice((0, 3)) if not left.is_float else 0,
                      out=BF16 if left.is_float and rng.random() < 0.5 else None)
        if rng.random() < 0.25:
            kernel = windows(k, m, n, 3, left, right)
        case = with_full_range(Case(kernel, seed), seed)
        state = random_state(rng, Scheduler(kernel, target), rng.choice((0, 0, 0, 1, 2)))
        try:
            state = apply_opt(state, Opt("TC", "r0", arg))
            used += 1
        except KernelOptError:
            pass    # an axis was split, padded or cut before
        state = random_state(rng, state, len(state.applied_opts) + rng.randint(0, 6))
        try:
            check_all_ways(case, state, rng.randint(1, 3))
        except KernelOptError as e:
            assert "PADTO" in str(e) and any(o.op == "PADTO" for o in state.applied_opts), e
            used -= 1
        except Exception as e:
            raise AssertionError(f"{kernel}, seed {seed}: {[o.to_json() for o in state.applied_opts]}: {e}") from e
    return used


@pytest.mark.parametrize(("left", "target"), a_half(itertools.product([I8, BF16], [NO_TILES, TARGET])),
                         ids=lambda v: v.name if isinstance(v, DType) else "tiles" if v is TARGET else "vectors")
def test_sketches_agree(left: DType, target: Target) -> None:
    """All sketches, with and without dot instructions, give right results for a shape that no tile divides."""
    case = with_full_range(Case(gemm(29, 83, 37, left, left)), 1)
    states = [s for s in sketches(Scheduler(case.kernel, target)) if any(s.dots)]
    chosen = {s.dots[-1].name for s in states}
    assert chosen == {d.name for d in DOTS.values() if d.runs_on(target) and left in d.sources
                      and (not d.is_tile or d.operands == (left, left))}
    for state in [random.Random(3).choice([s for s in states if s.dots[-1].name == name]) for name in sorted(chosen)]:
        check_all_ways(case, state, 2)


@pytest.mark.parametrize(("target", "chain"), [(NO_TILES, [Opt("TC", "r0", "bf16"), Opt("UPCAST", "o1", 32)]),
                                               (TARGET, [Opt("TC", "r0", ("amxbf16", "o0", "o1"))])], ids=["vectors", "tiles"])
def test_machine_code_of_bf16_equals_the_interpreter_bit_for_bit(target: Target, chain: list[Opt], monkeypatch: pytest.MonkeyPatch) -> None:
    """For products over a wide range, which includes denormals, the interpreter rounds and flushes in the order of the processor."""
    if missing(target):
        pytest.skip(f"the host has no {', '.join(missing(target))}")
    for low in (-4, -63, -66):
        kernel = gemm(7, 37, 66, BF16, BF16)
        case = Case(kernel)
        rng = np.random.default_rng(-low)
        for slot in (1, 2):
            size = case.args[slot].size
            values = rng.standard_normal(size) * 2.0 ** rng.integers(low - 8, low + 5, size).astype(float)
            values[::7] *= 2.0**-66
            case.args[slot] = from_float(values, BF16)
        program = lower(apply_opts(Scheduler(kernel, target), chain))
        args = case.fresh()
        interpret(program, args)
        want = args[0].copy()
        case.want = [want]
        monkeypatch.setitem(TOLERANCE, "float32", 0.0)
        run_native(case, program, target, 1)


def test_sums_of_bf16_round_once_per_product_and_flush() -> None:
    one, tiny, big = np.float32(1), np.float32(2.0**-130), np.float32(2.0**24)
    acc = np.array([big, 0, 2.0**-126], np.float32)
    x = np.array([one, one, tiny, one, -2.0**-64, 0], np.float32)
    y = np.array([one, one, one, tiny, 2.0**-63, 0], np.float32)
    # 2^24 + 1 rounds to even twice; denormal operands are zeros; 2^-126 - 2^-127 is denormal, hence zero
    assert dot(acc, x, y, 2).tolist() == [2.0**24, 0.0, 0.0]
    # a tile first sums all products, a group in two parts: 2^24 + (1 + 1), 2^-126 + (-2^-127 as 0)
    assert tile_dot(acc[:1], x[:2], y[:2], 1, 1, 2).tolist() == [2.0**24 + 2]
    assert tile_dot(acc[2:], x[4:], y[4:], 1, 1, 2).tolist() == [2.0**-126]


def test_integers_wrap_as_the_ast_says() -> None:
    kernel = gemm(2, 16, 66000, I16, I16)
    case = Case(kernel)
    for slot in (1, 2):
        case.args[slot][:] = -32768
    case.want = evaluate(kernel.ast, case.args)
    check_all_ways(case, apply_opts(Scheduler(kernel, NO_TILES), [Opt("TC", "r0", "vnni16"), Opt("UPCAST", "o1", 16)]), 1)


# -- where it does not apply --------------------------------------------------------------------------------------------------
GEMM = gemm(8, 32, 20, I8, I8)
REFUSED: list[tuple[str, Kernel, list[Opt], str]] = [
    ("unknown", GEMM, [Opt("TC", "r0", "mma")], "one of vnni8"),
    ("no name", GEMM, [Opt("TC", "r0", 4)], "needs the name"),
    ("output axis", GEMM, [Opt("TC", "o0", "vnni8")], "name a reduce axis"),
    ("other types", GEMM, [Opt("TC", "r0", "bf16")], "sums up bfloat16 in float32"),
    ("twice", GEMM, [Opt("TC", "r0", "vnni8"), Opt("TC", "r0", "vnni16")], "has an instruction already"),
    ("after a split", GEMM, [Opt("UNROLL", "r0", 2), Opt("TC", "r0", "vnni8")], "before its axes are split"),
    ("after a pad", GEMM, [Opt("PADTO", "r0", 8), Opt("TC", "r0", "vnni8")], "before its axes are split or padded"),
    ("no axes", GEMM, [Opt("TC", "r0", "amx8")], "takes the axes of its rows"),
    ("axes", GEMM, [Opt("TC", "r0", ("vnni8", "o0", "o1"))], "takes no axes"),
    ("a row of the sum", GEMM, [Opt("TC", "r0", ("amx8", "o0", "r0"))], "no output axis"),
    ("other signs", GEMM, [Opt("TC", "r0", ("amx8us", "o0", "o1"))], "sums up uint8, int8 in int32|multiplies uint8 in rows"),
    ("one column", gemm(8, 1, 20, I8, I8), [Opt("TC", "r0", ("amx8", "o0", "o1"))], "has one position"),
    ("nine tiles", gemm(64, 64, 20, I8, I8), [Opt("TC", "r0", ("amx8", "o0", "o1")), Opt("UPCAST", "o0", 3), Opt("UPCAST", "o1", 3)],
     "9 tiles"),
    ("lanes of tiles", gemm(64, 64, 20, I8, I8), [Opt("TC", "r0", ("amx8", "o0", "o1")), Opt("UPCAST", "o0", 2), Opt("LANES", "o0.in2")],
     "a row of the stage's tiles"),
    ("inlined", GEMM, [Opt("TC", "r0", "vnni8"), Opt("INLINE", "s0")], "reads it in groups"),
    ("a window", windows(4, 4, 9, 3, I8, I8), [Opt("TC", "r1", "vnni8")], "is not read along r1 alone"),
    ("already wide", gemm(4, 4, 8, F32, F32), [Opt("TC", "r0", "bf16")], "made wide"),
]


@pytest.mark.parametrize(("kernel", "chain", "why"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_refused_with_the_reason(kernel: Kernel, chain: list[Opt], why: str) -> None:
    state = apply_opts(Scheduler(kernel, TARGET), chain[:-1])
    with pytest.raises(KernelOptError, match=why):
        apply_opt(state, chain[-1])


def test_a_target_without_them_is_left_alone() -> None:
    plain = replace(TARGET, features=("avx2", "avx512f", "f16c", "fma", "sse4"))
    state = Scheduler(GEMM, plain)
    assert not applicable(GEMM, plain, GEMM.output) and not any(any(s.dots) for s in sketches(state))
    with pytest.raises(KernelOptError, match="target has no avx512f and vnni"):
        apply_opt(state, Opt("TC", "r0", "vnni8"))
    assert [name for _, name in applicable(GEMM, TARGET, GEMM.output)] == [
        "vnni8", "vnni16", ("amx8", "o0", "o1"), ("amx8", "o1", "o0")]


def test_the_identity_is_that_of_the_instruction() -> None:
    base = Scheduler(GEMM, TARGET)
    one, other = (apply_opt(base, Opt("TC", "r0", name)) for name in ("vnni8", "vnni16"))
    assert len({base.digest, one.digest, other.digest}) == 3
    tile = Opt("UPCAST", "o1", 16)
    assert apply_opt(one, tile).digest == apply_opts(base, [tile, Opt("TC", "r0", "vnni8")]).digest


def test_the_analysis_counts_groups() -> None:
    """Dot instructions reduce the number of instructions to a quarter. If they are slow, converting to a wider type once is predicted
    faster."""
    kernel = gemm(64, 256, 256, I8, I8)
    tile = [Opt("UPCAST", "o0", 8), Opt("UPCAST", "o1", 32)]
    plain, dots = (cost_of(apply_opts(Scheduler(kernel, TARGET), [*c, *tile])) for c in ([], [Opt("TC", "r0", "vnni8")]))
    assert dots.flops == plain.flops and dots.cycles < plain.cycles / 2
    brain = gemm(64, 256, 256, BF16, BF16)
    quick, slow = (cost_of(apply_opts(Scheduler(brain, replace(TARGET, dot_cost=cost)), [Opt("TC", "r0", "bf16"), *tile])).cycles
                   for cost in (None, {"bf16": 4.0}.__getitem__))
    assert slow > 2 * quick


# -- miscompiles --------------------------------------------------------------------------------------------------------------
Edit = Callable[[Instruction], Instruction]


def edited(program: Program, phase: int, op: str, edit: Edit, number: int | None = 0, dtype: DType | None = None) -> Program:
    """Return the program with one instruction changed, or all instructions of one operation."""
    code = list(program.code[phase])
    places = [i for i, instr in enumerate(code) if instr[0] == op and dtype in (None, instr[1])]
    for at in places if number is None else [places[number]]:
        code[at] = edit(code[at])
    codes = list(program.code)
    codes[phase] = tuple(Instruction(*i) for i in code)
    return Program(program.spec, tuple(codes))


def dropped(program: Program, number: int, op: str = "DOT") -> Program:
    """Replace a DOT or TILEDOT by its accumulator."""
    phase = len(program.code) - 1
    code = program.code[phase]
    at = [i for i, instr in enumerate(code) if instr[0] == op][number]
    moved = [(o, d, n, tuple(code[at][3][0] if s == at and i > at else s for s in src), arg) for i, (o, d, n, src, arg) in enumerate(code)]
    return Program(program.spec, (*program.code[:phase], tuple(Instruction(*i) for i in moved)))


def mutants(left: DType) -> dict[str, tuple[Program, Program]]:
    """Yield for each planted fault the right program and the program with the fault."""
    name = "vnni8" if left is I8 else "bf16"
    chain = [Opt("TC", "r0", name), Opt("UPCAST", "o0", 2), Opt("UPCAST", "o1", 16), Opt("UNROLL", "r0", 2)]
    program = lower(apply_opts(Scheduler(gemm(6, 37, 21, left, left), TARGET), chain))
    last = len(program.code) - 1
    def tail(i: Instruction) -> Instruction: return (*i[:4], 1 if left is I8 else 1.0)

    wrong = {
        "a group dropped": dropped(program, 0),
        "the last group dropped": dropped(program, -1),
        "one operand twice": edited(program, last, "DOT", lambda i: (*i[:3], (i[3][0], i[3][1], i[3][1]), i[4])),
        "groups interleaved in another order": edited(program, 1, "SHUFFLE", lambda i: (*i[:4], tuple(sorted(i[4])))),
        "operand read a word late": edited(program, last, "LOAD", lambda i: (*i[:4], i[4] + 4), -1),
        "read beyond the end of the sum": edited(program, 0, "LOAD", lambda i: (*i[:3], i[3][:2], i[4])),
        "the tails are not zero": edited(edited(program, 0, "CONST", tail, None, left), 1, "CONST", tail, None, left),
        "copied row off by one": edited(program, 1, "LOAD", lambda i: (*i[:4], i[4] + 1)),
    }
    if left is I8:
        wrong["the sign bit is not flipped"] = edited(program, 0, "XOR", lambda i: ("AND", *i[1:3], (i[3][0], i[3][0]), None))
        wrong["flipped bits are added"] = edited(program, last, "SUB", lambda i: ("ADD", *i[1:]), dtype=I32)
    return {why: (program, mutant) for why, mutant in wrong.items()}


def rejected(reference: Reference, program: Program) -> str:
    try:
        validate(program)
        result = verify(reference, lambda arrays: interpret(program, arrays), GuardedBuffers(reference.kernel))
    except CompileError as e:
        return str(e)
    return "" if result.right else result.reason


@pytest.mark.parametrize("left", [I8, BF16], ids=lambda d: d.name)
def test_planted_miscompiles_are_rejected(left: DType) -> None:
    reference, planted = Reference(gemm(6, 37, 21, left, left)), mutants(left)
    assert len(planted) >= 7
    for why, (right, wrong) in planted.items():
        assert wrong.digest != right.digest, why
        assert rejected(reference, wrong), why
    assert not rejected(reference, right)


@pytest.mark.parametrize("left", [I8, BF16], ids=lambda d: d.name)
def test_planted_miscompiles_of_tiles_are_rejected(left: DType) -> None:
    kernel = gemm(20, 37, 140, left, left)
    chain = [Opt("TC", "r0", ("amx8" if left is I8 else "amxbf16", "o0", "o1")), Opt("UPCAST", "o1", 2)]
    program, reference = lower(apply_opts(Scheduler(kernel, TARGET), chain)), Reference(kernel)
    assert not rejected(reference, program)
    last = len(program.code) - 1
    for why, wrong in {
        "a tile of products dropped": dropped(program, 1, "TILEDOT"),
        "rows too far apart": edited(program, last, "TILELOAD", lambda i: (*i[:4], (i[4][0], i[4][1], i[4][2] + 4))),
        "another tile of columns": edited(program, last, "TILELOAD", lambda i: (*i[:4], (i[4][0] + 4, *i[4][1:])), -1),
        "the first row twice": edited(program, last, "LOAD", lambda i: (*i[:4], 0), 1),
        "results of the other tile": edited(program, last, "TILESTORE", lambda i: (*i[:4], (i[4][0] + 16, *i[4][1:])), 1),
    }.items():
        assert wrong.digest != program.digest and rejected(reference, wrong), why


def test_swapped_operands_are_no_instruction() -> None:
    program = mutants(I8)["a group dropped"][0]
    swapped = edited(program, len(program.code) - 1, "DOT", lambda i: (*i[:3], (i[3][0], i[3][2], i[3][1]), i[4]))
    with pytest.raises(CompileError, match="is no dot instruction"):
        validate(swapped)


def test_bf16_is_within_its_rounding_error_of_float64() -> None:
    kernel = gemm(5, 33, 200, BF16, BF16)
    rng = np.random.default_rng(7)
    case = Case(kernel)
    a, b = (from_float(rng.standard_normal(n), BF16) for n in (5 * 200, 200 * 33))
    case.args[1], case.args[2] = a, b
    args = case.fresh()
    interpret(lower(apply_opts(Scheduler(kernel, TARGET), [Opt("TC", "r0", "bf16"), Opt("UPCAST", "o1", 16)])), args)
    x, y = (to_float(v, BF16).astype(np.float64) for v in (a, b))
    x, y = x.reshape(5, 200), y.reshape(200, 33)
    # n-1 sums of unit roundoff 2^-24, whatever the order
    assert np.all(np.abs(args[0].reshape(5, 33) - x @ y) <= 200 * 2.0**-24 * (np.abs(x) @ np.abs(y)))
