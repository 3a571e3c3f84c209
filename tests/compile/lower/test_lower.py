"""Lowering: the structure of the emitted code, and chains that once gave wrong numbers."""
from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from svod.compile.llvm.codegen import assembly, compile_object
from svod.compile.llvm.loaded import LoadedProgram, call_phase
from svod.compile.llvm.render import render
from svod.compile.lower.emit.axes import Axes
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.cost.sketch import heuristic
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.copy_loops import copy_step
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.layout import lay_out, layouts
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.tree.nodes import Ends
from svod.errors import ProgramTooLong
from tests.agreement import Case, has_native, run_interpreted, run_native
from tests.chains import random_state
from tests.compile.native import AVX2, AVX512, BASELINE, runnable_targets
from tests.core.corpus import data, kernel_of
from tests.draws import a_half, a_quarter
from tests.hand_kernels import HAND, Ast, constants_only, gemm, in_place, lines, padded_window, row_sums, rows_plus, softmax, variance

WIDTHS = {16: replace(BASELINE, threads=4), 32: replace(AVX2, threads=4), 64: replace(AVX512, threads=4)}
NATIVE = {t.vector_bytes: replace(t, threads=4) for t in runnable_targets().values()}
Chain = list[list[Any]]


@cache
def case_of(name: str) -> Case:
    return Case(Kernel(HAND[name]()))


def lowered(kernel: Kernel, chain: Chain, width: int = 64) -> Program:
    program = lower(apply_opts(Scheduler(kernel, WIDTHS[width]), [Opt.from_json(o) for o in chain]))
    validate(program)
    return program


def ops(program: Program, phase: int = 0) -> list[str]:
    return [i[0] for i in program.code[phase]]


# -- what is emitted ----------------------------------------------------------------------------------
def test_last_tile_is_moved_back_without_a_mask() -> None:
    """The example in the docstring of `svod.compile.lower.lower` is emitted as written there."""
    program = lowered(Kernel(lines(100)), [["UPCAST", "o0", 16]])
    phase, = program.spec.phases
    assert phase.extent == 7 and phase.scratch_bytes == 0
    names = ops(program)
    assert "MIN" in names and names.count("LOAD") == names.count("STORE") == 1
    load = next(i for i in program.code[0] if i[0] == "LOAD")
    assert load[2] == 16 and len(load[3]) == 2, "one whole vector, no mask"


@pytest.mark.parametrize("seed", a_half(range(6)))
def test_staged_tiles_that_overlap(seed: int) -> None:
    """Columns that no tile divides are packed in the tiles in which they are read: completely, in part, and by several cores."""
    rng = random.Random(seed)
    m, depth = rng.choice((1, 5, 13, 31)), rng.choice((1, 2, 7, 29))
    tile = rng.choice((5, 16, 24, 32))
    n = tile * rng.randint(2, 4) + rng.randint(1, tile - 1)
    case = Case(Kernel(gemm(m, n, depth)), seed)
    state = apply_opts(Scheduler(case.kernel, NATIVE.get(64, WIDTHS[64])), [Opt("UPCAST", "o1", tile), Opt("STAGE", "s1", "root")])
    states = [state, apply_opt(state, Opt("TILE", "o1", 2)), apply_opt(state, Opt("THREAD", "o1", 2))]
    if m > 1:
        turned = Opt("ORDER", "out", ("o1", "o0"))
        states += [apply_opt(state, turned), apply_opts(state, [Opt("UPCAST", "o0", 2), Opt("INLINE", "s1"), Opt("STAGE", "s1", "o0")])]
    for s in states:
        assert lay_out(s, layouts(s), 1, (depth, n)).overlaps
        program = lower(s)
        validate(program)
        run_interpreted(case, program, 2)
        if 64 in NATIVE:
            run_native(case, program, NATIVE[64], 2)


@pytest.mark.parametrize(("name", "chain"), [
    ("hand_gemm", [["PADTO", "o1", 16], ["UPCAST", "o1", 16], ["STAGE", "s1", "root"]]),
    ("in_place_accumulate", [["UPCAST", "o1", 16], ["STAGE", "s1", "root"]]),
    ("hand_dot", [["UPCAST", "r0", 16], ["STAGE", "s1", "root"]])], ids=["guarded", "in place", "a remainder"])
def test_tiles_that_are_not_moved_back_lie_in_rows(name: str, chain: Chain) -> None:
    case = case_of(name)
    state = apply_opts(Scheduler(case.kernel, WIDTHS[64]), [Opt.from_json(o) for o in chain])
    extents = tuple(case.kernel.axes[a].extent for a in case.kernel.stages[1].outs)
    assert lay_out(state, layouts(state), 1, extents).tiled < 0
    run_interpreted(case, lower(state), 2)


def test_in_place_kernels_mask_the_last_tile_instead() -> None:
    """If the kernel reads its output, computing an element twice would be wrong, so the last tile is masked and not moved back."""
    program = lowered(Kernel(in_place(1, 53)), [["UPCAST", "o1", 16]])
    assert "MIN" not in ops(program)
    assert all(len(i[3]) == 4 for i in program.code[0] if i[0] == "STORE"), "stores are masked"


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 10, 12, 15, 17, 24, 42, 50])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_short_rows_are_kept_in_whole_vectors(columns: int, dtype: str) -> None:
    """A row in scratch memory has no mask on its stores: a load of the whole vector would wait for them. Lanes that do not count are
    masked by registers that LLVM does not see through, as `vexpandpd` would wait for the row before."""
    x = data(9, columns, dtype=dtype)
    centred = x - x.mean(1, keepdim=True)
    case = Case(Kernel(kernel_of(centred / ((centred * centred).mean(1, keepdim=True) + 1e-3).sqrt())))
    for target in [*WIDTHS.values(), *NATIVE.values()]:
        program = lower(heuristic(Scheduler(case.kernel, replace(target, threads=1))))
        code = program.code[-1]
        assert all(len(i[3]) == 3 for i in code if i[0] == "STORE" and code[i[3][0]][0] == "SCRATCH")
        assert "vexpand" not in assembly(render(program, target), target)
        if target in NATIVE.values():
            run_native(case, program, target, 2)
    run_interpreted(case, lower(heuristic(Scheduler(case.kernel, WIDTHS[64]))), 2)


def test_a_gemm_tile_lives_in_registers() -> None:
    """A GEMM tile of 4 × 32 in 16-lane vectors has 8 accumulators, and per step of the reduction 2 vector loads and 4 scalar loads."""
    program = lowered(Kernel(gemm(32, 64, 24)), [["UPCAST", "o0", 4], ["UPCAST", "o1", 32]])
    code = program.code[0]
    names = ops(program)
    assert names.count("CARRY") == names.count("MULACC") == names.count("RESULT") == 8
    loads = [i[2] for i in code if i[0] == "LOAD"]
    assert sorted(loads) == [1] * 4 + [16] * 2
    assert program.spec.phases[0].extent == 8 * 2 and program.spec.phases[0].scratch_bytes == 0


def test_unrolled_rounds_load_an_element_once() -> None:
    """Unrolled rounds add to the same accumulators. An empty statement between two rounds keeps LLVM from moving loads before the first
    round. Rounds of a window share the elements that both read, unless accumulators leave no registers for them."""
    kernel = Kernel(gemm(32, 64, 24))
    tile: Chain = [["UPCAST", "o0", 4], ["UPCAST", "o1", 32]]
    for rounds in (2, 3, 4):
        program = lowered(kernel, [*tile, ["UNROLL", "r0", rounds]])
        assert render(program, AVX512).count('asm sideeffect ""') == rounds - 1
        assert ops(program).count("LOAD") == rounds * (4 + 2)
    assert "asm" not in render(lowered(kernel, [*tile, ["UPCAST", "r0", 2]]), AVX512), "partial results are no rounds"

    def loads(positions: int) -> int:
        chain: Chain = [["UPCAST", "o0", 16], ["UPCAST", "o1", positions], ["LANES", "o0.in"], ["UNROLL", "r1", 0]]
        return ops(lowered(Kernel(padded_window(64, 64, 3)), chain)).count("LOADS")
    assert all(loads(positions) < positions * 3 for positions in (2, 4, 8, 16))
    assert loads(32) == 32 * 3


def test_operands_are_packed_where_they_are_staged() -> None:
    program = lowered(Kernel(gemm(32, 64, 24)), [["UPCAST", "o0", 4], ["UPCAST", "o1", 32], ["STAGE", "s1", "o1"]])
    phase, = program.spec.phases
    assert phase.scratch_bytes >= 24 * 32 * 4
    assert "SCRATCH" in ops(program)


def test_root_stages_are_phases_and_constants_run_once() -> None:
    program = lowered(Kernel(gemm(6, 32, 12, constant=True)), [["STAGE", "s1", "root"], ["STAGE", "s0", "root"]])
    assert [p.once for p in program.spec.phases] == [True, False, False]
    assert len(program.spec.temps) == 2 and program.spec.temps[0] >= 12 * 32 * 4


def test_a_constant_contraction_and_what_it_reads_run_once_in_order() -> None:
    program = lowered(Kernel(constants_only(6, 14, 9)), [["STAGE", "s3", "root"], ["STAGE", "s1", "root"], ["STAGE", "s0", "root"]])
    assert [p.once for p in program.spec.phases] == [True, True, False, False]


def test_what_a_variable_changes_does_not_run_once() -> None:
    """In y[i, j] = x[i, j]·Σ_u v[j, u]·(Σ_k<n w[j, k]) both sums depend on weights only, but the inner one, in the nest of the outer one,
    has n terms, a variable, so no phase of them runs only once."""
    k = Ast()
    size = UOp(Ops.DEFINE_VAR, dtypes.index, (), ("v0", 1, 9))
    y, x, w, v = k.param(0, 15), k.param(1, 15), k.param(2, 45, constant=True), k.param(3, 20, constant=True)
    a, b, c, d, e, f, i, j = k.axes(5, 9, 5, 5, 4, 5, 3, 5)
    t = UOp(Ops.RANGE, dtypes.index, (size,), k.ranges)
    inner = k.stage(k.reduce("ADD", k.read(k.stage(k.load(w, a * 9 + b), a, b), c, t), t), c)
    outer = k.stage(k.reduce("ADD", k.load(v, d * 4 + e) * k.read(inner, d), e), d)
    ast = k.sink(k.store(y, i * 5 + j, k.load(x, i * 5 + j) * k.read(k.stage(k.read(outer, f), f), j), i, j))
    kernel = Kernel(ast)
    name = next(s.name for s in kernel.stages if s.node is outer)
    program = lowered(kernel, [["STAGE", name, "root"]])
    assert len(program.spec.phases) == 2 and not any(p.once for p in program.spec.phases)


def test_split_reductions_are_partials_and_a_combining_phase() -> None:
    program = lowered(Kernel(row_sums(3, 1000)), [["THREAD", "r0", 4]])
    partial, combine = program.spec.phases
    assert (partial.extent, partial.threads, combine.threads) == (4, 4, 1)
    assert program.spec.temps[0] >= 3 * 4 * 4


@pytest.mark.parametrize("chain", [[], [["UPCAST", "o1", 16]], [["STAGE", "s2", "o0"]], [["UPCAST", "s1.r0", 16], ["UPCAST", "s3.r0", 16]]])
def test_softmax_is_one_phase(chain: Chain) -> None:
    program = lowered(Kernel(softmax(5, 37)), chain)
    assert len(program.spec.phases) == 1 and program.spec.phases[0].extent >= 5 and not program.spec.temps


def test_exponentials_use_what_the_target_scales_with() -> None:
    """Exponentials use the target's scaling instruction, in an elementwise stage and in the running sums of ONLINE."""
    for chain in ([], [["ONLINE", "s1", 16]]):
        assert [[op in ops(lowered(Kernel(softmax(5, 37)), chain, width)) for op in ("SCALEB", "SHL")] for width in (64, 32)] == [
            [True, False], [False, True]]


def test_streaming_needs_multiples_of_the_vector() -> None:
    """If the last tile, which is moved back, does not start at a multiple of the vector, no store of the phase is streaming."""
    streamed = [i[4][1] for i in lowered(Kernel(lines(128)), [["UPCAST", "o0", 32], ["STREAM", "out"]]).code[0] if i[0] == "STORE"]
    assert streamed == [True, True]
    # half a vector stored past the caches next to a complete one stored through them: cache lines would be written twice
    streamed = [i[4][1] for i in lowered(Kernel(lines(96)), [["UPCAST", "o0", 24], ["STREAM", "out"]]).code[0] if i[0] == "STORE"]
    assert streamed == [False, False]
    assert not any(i[4][1] for i in lowered(Kernel(lines(100)), [["UPCAST", "o0", 32], ["STREAM", "out"]]).code[0] if i[0] == "STORE")


@pytest.mark.parametrize(("dtype", "width"), a_quarter(itertools.product(
    [dtypes.float32, dtypes.float64, dtypes.float16, dtypes.bfloat16, dtypes.int8], [16, 32, 64])))
def test_long_rows_are_stored_at_multiples_of_the_vector(dtype: DType, width: int) -> None:
    """For any row length, all stores except those at the ends of a row are at multiples of the vector, also streaming ones, and every
    element is stored."""
    rng = np.random.default_rng([dtype.itemsize, width])
    lanes = width // dtype.itemsize
    tile, long = lanes * int(rng.choice([1, 2, 4])), 128 * lanes + int(rng.integers(1, lanes))
    for rows, columns, aligned, past in ((5, long, True, True), (4, 128 * lanes + 1, True, True), (4, 64 * lanes + 1, True, False),
                                         (1, long, False, True), (4, 2 * tile + 1, False, False), (4, 1, False, False)):
        case = Case(Kernel(rows_plus(rows, columns, dtype)))
        chain = [Opt("UPCAST", "o1", tile), Opt("STREAM", "out")] if columns > 1 else []
        program = lower(apply_opts(Scheduler(case.kernel, replace(WIDTHS[width], l2=512)), chain))
        validate(program)
        assert ("MOD" in ops(program)) == aligned
        streamed = {i[4][1] for i in program.code[0] if i[0] == "STORE"}
        assert streamed == ({False, True} if past else {False})
        run_interpreted(case, program, 2)
        if width in NATIVE and has_native(case, NATIVE[width]):
            for state in (chain, chain[:-1]):
                run_native(case, lower(apply_opts(Scheduler(case.kernel, replace(NATIVE[width], l2=512)), state)), NATIVE[width], 2)


@pytest.mark.parametrize("width", a_half([16, 32, 64]))
@pytest.mark.parametrize("lanes_over", [1, 3, 0])
def test_the_last_tile_of_a_long_row_has_a_loop_of_its_own(lanes_over: int, width: int) -> None:
    """All stores of a row are streaming, except those of the tile that is moved back. Launches over any part of the rows store every
    element."""
    rng = np.random.default_rng([lanes_over, width])
    lanes = width // 4
    for tiles, vectors in ((40, 4), (129, 1), (67, 2)):
        tile = vectors * lanes
        case = Case(Kernel(lines(tiles * tile + int(rng.integers(0, vectors)) * lanes + min(lanes_over, lanes - 1))))
        chain = [Opt("UPCAST", "o0", tile), Opt("THREAD", "o0", 2), Opt("STREAM", "out")]
        program = lower(apply_opts(Scheduler(case.kernel, WIDTHS[width]), chain))
        validate(program)
        streamed = [i[4][1] for i in program.code[0] if i[0] == "STORE"]
        long = tiles * vectors >= 128
        assert streamed == [lanes_over == 0 or long] * vectors + ([False] * vectors if long and lanes_over else [])
        for slices in (1, 2, 7):
            run_interpreted(case, program, slices)
        if width in NATIVE and has_native(case, NATIVE[width]):
            for state in (chain, chain[:1]):
                run_native(case, lower(apply_opts(Scheduler(case.kernel, NATIVE[width]), state)), NATIVE[width], 3)


@pytest.mark.parametrize(("columns", "step"), [(1, 1), (3, 3), (7, 4), (8, 8), (15, 4), (17, 4), (31, 16), (32, 16), (33, 4), (997, 16)])
def test_copies_of_rows_take_several_vectors_at_once(columns: int, step: int) -> None:
    """Copies use vectors if these divide a row, or if the last vector copies only a small part of it again."""
    assert copy_step(columns, 4) == step
    case = Case(Kernel(softmax(4, columns)))
    run_interpreted(case, lowered(case.kernel, [["STAGE", "s2", "o0"]], 16), 2)


def test_a_program_is_given_up_where_it_has_more_instructions_than_it_may() -> None:
    """The limit holds for programs of one or several phases, and counts transposed squares, which are added last."""
    phases: set[int] = set()
    for name in HAND:
        rng = random.Random(name)
        state = random_state(rng, Scheduler(case_of(name).kernel, rng.choice(list(WIDTHS.values()))), 5)
        program = lower(state)
        phases.add(len(program.code))
        assert lower(state, program.size) == program
        for most in (program.size - 1, program.size // 2):
            with pytest.raises(ProgramTooLong):
                lower(state, most)
    assert phases >= {1, 2}


def test_equal_loads_are_one() -> None:
    """x is read by the mean, and twice by the squared difference; each position is loaded once in each reduction."""
    program = lowered(Kernel(variance(8, 40)), [])
    assert ops(program).count("LOAD") == 2


# -- chains that were wrong once, and their neighbours ---------------------------------------------------
HARD_CHAINS: dict[str, tuple[str, int, Chain]] = {
    "TILE twice keeps the nesting of an axis": ("hand_gemm_tn", 16, [["TILE", "r0", 3], ["STAGE", "s1", "r0.in"], ["TILE", "r0", 2]]),
    "output tiles too": ("hand_gemm", 64, [["TILE", "o0", 6], ["TILE", "o0", 2], ["STAGE", "s1", "o0.in"]]),
    "a staged part is written again for the remainder": ("hand_dot", 64, [["UPCAST", "r0", 64], ["STAGE", "s1", "r0"]]),
    "combs of a reduction that do not divide": ("hand_column_sums", 64, [["TILE", "r0", 16], ["UPCAST", "r0", 3], ["STAGE", "s0", "root"]]),
    "combs of a split reduction": ("hand_dot", 32, [["TILE", "r0", 5], ["UPCAST", "r0", 2], ["THREAD", "r0", 3]]),
    "combs of an output": ("hand_row_sums", 32, [["TILE", "o0", 5], ["UPCAST", "o0", 2], ["STAGE", "s0", "o0.in"]]),
    "a partial vector with a stride": (
        "hand_long_dot", 16, [["TILE", "r0", 5], ["UNROLL", "r0", 9], ["UPCAST", "r0", 7], ["STAGE", "s0", "r0.in"]]),
    "two stages read alike, placed differently": (
        "hand_dot", 16, [["STAGE", "s1", "r0"], ["PADTO", "r0", 7], ["UPCAST", "r0", 21], ["STAGE", "s0", "root"]]),
    "tiles in memory, read by another stage one at a time": ("chained_rows", 32, [["STAGE", "s2", "root"], ["UPCAST", "o0", 2]]),
    "maxima at the root, read in vectors and one at a time": ("hand_softmax_down", 32, [["STAGE", "s1", "root"], ["UPCAST", "o0", 2]]),
    "the cut of a split reduction is not that of other stages": ("variance", 16, [["THREAD", "r0", 2]]),
    "a split reduction outside output loops": ("hand_gemm", 64, [["SWAP", "o0", "r0"], ["THREAD", "r0", 3]]),
    "and with a remainder": ("hand_gemm", 32, [["UNROLL", "r0", 4], ["ORDER", "out", ["r0", "o1", "o0"]], ["THREAD", "r0", 2]]),
    "rows of a padded copy do not overlap": ("hand_gemm", 32, [["PADTO", "o1", 2], ["STAGE", "s1", "o0"]]),
    "padded and read backwards": ("mirrored_gemm", 64, [["STAGE", "s0", "o1"], ["PADTO", "o0", 8], ["STAGE", "s1", "o0"]]),
    "padded, and a box that is all of the axis": (
        "hand_softmax", 32, [["PADTO", "o1", 12], ["STAGE", "s3", "o1"], ["STAGE", "s2", "o1"]]),
    "combining in place does nothing twice": ("in_place_accumulate", 32, [["THREAD", "r0", 3]]),
    "stages of a loop that the first pass over accumulators does not run": ("variance", 64, [["ORDER", "out", ["r0", "o0"]],
                                                                                          ["STAGE", "s0", "r0"]]),
    "what is read in and after a reduction": ("variance_again", 64, [["ORDER", "out", ["r0", "o0"]], ["UPCAST", "o0", 2]]),
    "and of contractions": ("constants_only", 64, [["ORDER", "out", ["r0", "o1", "o0"]], ["STAGE", "s2", "r0"]]),
    "one lane of a converted vector": ("sums_int8", 64, [["UPCAST", "o0", 4], ["UPCAST", "o0", 2], ["STAGE", "s0", "r0"]]),
    "streams of unaligned tiles": ("hand_gemm", 64, [["TILE", "o1", 12], ["STREAM", "out"], ["UPCAST", "o1.in", 4]]),
    "streams of a split reduction": ("hand_gemm_constant", 64, [["THREAD", "r0", 3], ["STREAM", "out"]]),
    "what is read after a cut reduction is another phase": ("variance_again", 64, [["UPCAST", "r0", 8], ["THREAD", "r0", 4]]),
}


@pytest.mark.parametrize("why", a_half(HARD_CHAINS))
def test_hard_chains(why: str) -> None:
    name, width, chain = HARD_CHAINS[why]
    case = case_of(name)
    program = lowered(case.kernel, chain, width)
    for slices in (1, 2, 3):
        run_interpreted(case, program, slices)
    target = NATIVE.get(width)
    if target is not None and has_native(case, target):
        run_native(case, program, target, 2)


# -- amounts equal to the extent, extents of 1, primes -------------------------------------------------
@pytest.mark.parametrize(("amount", "extent"), a_quarter(itertools.product([0, 2, 5, 8, 16, 24], [1, 2, 3, 7, 15, 16, 17, 31, 64, 101])))
def test_any_amount_of_any_extent(extent: int, amount: int) -> None:
    """Results are right for UPCAST on an output axis, and UPCAST and UNROLL on a reduction axis, with every remainder."""
    if amount > extent or extent == 1:
        chains: list[Chain] = [[]]
    else:
        chains = [[["UPCAST", "o0", amount]], [["UPCAST", "r0", amount]], [["UNROLL", "r0", amount]] if amount or extent <= 32 else []]
    case = Case(Kernel(row_sums(extent, extent)))
    for chain in chains:
        run_interpreted(case, lowered(case.kernel, chain, 32), 2)


@pytest.mark.parametrize("dtype", [dtypes.bool, dtypes.int8, dtypes.uint16, dtypes.int64, dtypes.float16, dtypes.bfloat16, dtypes.float64],
                         ids=lambda d: d.name)
@pytest.mark.parametrize("amount", [5, 32, 48, 64])
def test_vectors_of_every_width(dtype: Any, amount: int) -> None:
    """Vectors of narrow types have up to 64 or 32 lanes; partial vectors are included."""
    case = Case(Kernel(lines(131, dtype)))
    program = lowered(case.kernel, [["UPCAST", "o0", amount]])
    run_interpreted(case, program, 3)


@pytest.mark.parametrize("shift", [0, 1, 3, 16])
def test_streams_into_memory_that_is_not_aligned(shift: int) -> None:
    """For an unaligned array of a user, ordinary stores replace the non-temporal ones, which would fault."""
    target = next(iter(NATIVE.values()))
    program = lower(apply_opts(Scheduler(Kernel(lines(256)), target), [Opt("UPCAST", "o0", 32), Opt("STREAM", "out")]))
    assert any(i[0] == "STORE" and i[4][1] for i in program.code[0])
    x, room = np.arange(256, dtype=np.float32), np.zeros(300, np.float32)
    start = (-room.ctypes.data % 64) // 4 + shift
    symbols = tuple(p.symbol for p in program.spec.phases)
    with LoadedProgram(compile_object(render(program, target), target), symbols) as loaded:
        call_phase(loaded.addresses[0], [room[start:].ctypes.data, x.ctypes.data], (), 0, 0, program.spec.phases[0].extent)
    assert np.array_equal(room[start:start + 256], x + 1) and not room[:start].any() and not room[start + 256:].any()


@pytest.mark.parametrize(("extent", "tile", "at", "start"), [(100, 16, 96, 84), (100, 16, 48, 48), (8, 16, 0, 0), (96, 16, 80, 80)])
def test_a_tile_at_a_constant_position_is_moved_back_as_in_a_loop(extent: int, tile: int, at: int, start: int) -> None:
    """A tile at a constant position, as after a pass that peels the last iteration of a loop, is moved back as a tile in a loop is,
    although its address has no loop variable."""
    stage: Any = SimpleNamespace(linear={}, opened={0: [({}, at)]}, base={0: ({}, 0)}, span=lambda a: tile,
                                 frame=SimpleNamespace(ends=lambda a: Ends.MOVED_BACK, bounds=[extent]))
    context: Any = SimpleNamespace(b=None, facts=None, kernel=None)
    assert Axes(context).start(stage, 0) == ({}, start)
