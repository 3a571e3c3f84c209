"""Tensor cores: kernels with mma.sync and ldmatrix give right numbers in the emulator, whose layouts are written independently of svod's
tables; and ptxas accepts them."""
from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest

from svod.compile.cuda import matrix, ptxas
from svod.compile.cuda.ptx import emit_ptx
from svod.compile.cuda.render import render, without_assumptions
from svod.compile.lower.emit.addresses import Addresses
from svod.compile.lower.emit.threads.lines import Lines
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Instruction, PhaseSpec, Program, ProgramSpec
from svod.core.cost.groups.group_sketch import group_heuristic
from svod.core.graph import graph
from svod.core.ir.dtype import DType, dtypes
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.isa import DOTS, MATRIX_LINE_BYTES
from svod.core.machine.levels import MemorySpace
from svod.core.machine.target import Target
from svod.core.schedule.schedule import create_schedule
from svod.tensor import Tensor
from tests.agreement import Case
from tests.chain_runs import run_chains
from tests.chains import group_state, try_opts
from tests.compile.cuda.emulator import DeviceFault, matrices, run_program, started
from tests.compile.cuda.running import check, run
from tests.compile.cuda.target import card_target
from tests.compile.lower.test_intrinsics import gemm, windows, with_full_range
from tests.draws import a_half, count

BF16, F16, I8, F32 = dtypes.bfloat16, dtypes.float16, dtypes.int8, dtypes.float32
INSTRUCTIONS = [("mma_bf16", "sm_80", BF16), ("mma_f16", "sm_90", F16), ("mma_f16k8", "sm_75", F16), ("mma_s8", "sm_80", I8),
                ("mma_s8k16", "sm_75", I8), ("mma_tf32", "sm_80", F32), ("mma_tf32k4", "sm_90", F32)]
EXTENTS = (2, 3, 7, 8, 16, 17, 29, 32, 40)
STAGED = [Opt("STAGE", "s0", "r0"), Opt("STAGE", "s1", "r0"), Opt("PIPELINE", "r0", 2)]
TILES = [Opt("UPCAST", "o0", 2), Opt("UPCAST", "o1", 2), Opt("LOCAL", "o0", 2), Opt("LOCAL", "o1", 2)]


def rounding(arch: str) -> Target:
    """Return a target with small groups that may round factors of float32."""
    return card_target(arch, group_threads=128).allowing(True, True, True)


def tensorized(kernel: Kernel, name: str, arch: str, *chain: Opt) -> Scheduler:
    return apply_opts(Scheduler(kernel, rounding(arch)), [Opt("TC", "r0", (name, "o0", "o1")), *chain])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch", "dtype"), INSTRUCTIONS, ids=lambda v: v if isinstance(v, str) else v.name)
def test_random_shapes_and_chains(name: str, arch: str, dtype: DType) -> None:
    def draw(rng: random.Random, kind: str) -> tuple[Case, Scheduler]:
        m, n, k = rng.choice(EXTENTS), rng.choice(EXTENTS), rng.choice((1, *EXTENTS))
        kernel = windows(k, m, n, 3, dtype, dtype) if kind == "windows" and k > 1 else \
            gemm(m, n, k, dtype, dtype, transposed=rng.random() < 0.5, out=dtype if dtype.is_float and rng.random() < 0.5 else None)
        seed = rng.randrange(100)
        state = try_opts(Scheduler(kernel, rounding(arch)), Opt("TC", "r0", (name, "o0", "o1")), *(STAGED if rng.random() < 0.7 else ()))
        return with_full_range(Case(kernel, seed), seed), group_state(rng, state, len(state.applied_opts) + rng.randint(0, 4))

    run_chains(f"cuda {name}", ("products", "windows"), count(2), draw, run, {"MMA": 0.5})


@pytest.mark.parametrize(("transposed", "want"), a_half([(False, (2, 1)), (True, (3, 0))]))
def test_operands_in_shared_memory_are_read_by_ldmatrix(transposed: bool, want: tuple[int, int]) -> None:
    """Both operands are staged in their memory order without padding. The right operand is read transposed if its rows are contiguous, and
    directly if its columns are. Two of its tiles are read by one instruction."""
    kernel = gemm(64, 32, 64, BF16, BF16, transposed=transposed)
    state = tensorized(kernel, "mma_bf16", "sm_80", *TILES, Opt("TILE", "r0", 2), *STAGED)
    ptx = emit_ptx(render(check(Case(kernel, 1), state), state.target), "sm_80")
    lines, turned = len(re.findall(r"ldmatrix\.sync\.aligned\.m8n8\.x\d\.shared", ptx)), len(re.findall(r"ldmatrix\S*\.trans", ptx))
    assert (lines, turned) == want and ptx.count("mma.sync") == 4 and "cvta" not in ptx


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block", [2, 4, 8])
def test_neither_copies_nor_loads_meet_in_a_bank(block: int, transposed: bool) -> None:
    """By their addresses, any eight lines of swizzled rows that are accessed at once are in different banks, and rows begin at sectors."""
    kernel = gemm(64, 64, 256, BF16, BF16, transposed=transposed)
    state = tensorized(kernel, "mma_bf16", "sm_80", *TILES, Opt("TILE", "r0", block), *STAGED)
    check(Case(kernel, 1), state)
    assert matrices and all(len({int(at) // MATRIX_LINE_BYTES % 8 for at in eight}) == 8 for eight in matrices)
    of_thread: dict[int, list[int]] = {}
    for thread, to, _ in started:
        of_thread.setdefault(thread, []).append(to)
    threads = sorted(of_thread)
    for k in range(0, len(threads), 8):
        for at_once in zip(*[of_thread[t] for t in threads[k:k + 8]], strict=True):
            assert len({at // MATRIX_LINE_BYTES % 8 for at in at_once}) == 8
    layouts = [stage.layout for stage in loop_nest(state).stages.values() if stage.space is MemorySpace.SHARED]
    assert len(layouts) == 2 and all(layout is not None and layout.swizzle is not None and not layout.row_pad for layout in layouts)


@pytest.mark.parametrize("planted", a_half(["place", "lines"]))
def test_lines_that_change_places_otherwise_give_wrong_numbers(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = gemm(64, 64, 64, BF16, BF16)

    def checked() -> None:
        check(Case(kernel, 1), tensorized(kernel, "mma_bf16", "sm_80", *TILES, Opt("TILE", "r0", 2), *STAGED))
    checked()
    if planted == "place":
        monkeypatch.setattr(Addresses, "_swizzled", lambda self, swizzle, element, width: element)
    else:
        monkeypatch.setattr(matrix, "LINES_TOGETHER", 4)
    with pytest.raises((AssertionError, DeviceFault)), np.errstate(all="ignore"):
        checked()


@pytest.mark.slow
@pytest.mark.parametrize(("further", "between"), [([Opt("UNROLL", "r0.in2", 0)], True), ([], False)], ids=["unrolled", "loop"])
def test_copies_begin_between_products(further: list[Opt], between: bool) -> None:
    """Copies begin in two parts if the block is straight-line code, the first part after the loads of the first products. If the block has
    a loop, copies begin before it."""
    kernel = gemm(64, 64, 256, BF16, BF16)
    state = tensorized(kernel, "mma_bf16", "sm_80", *TILES, Opt("TILE", "r0", 4), *STAGED, *further)
    code = check(Case(kernel, 1), state).code[0]
    begin = max(i for i, x in enumerate(code) if x.op == "LOOP" and any(y.op == "COPY_ASYNC" for y in code[i:]))
    ops = [x.op for x in code[begin:] if x.op in ("MMA", "COPY_ASYNC", "COMMIT", "ENDLOOP")]
    ops = ops[:ops.index("ENDLOOP")]
    places = [ops[:k].count("MMA") for k, op in enumerate(ops) if op == "COPY_ASYNC"]
    assert (places[0] > 0 and len(set(places)) == 2 and max(places) < ops.count("MMA")) if between else not any(places)
    assert ops.index("COMMIT") > max(k for k, op in enumerate(ops) if op == "COPY_ASYNC")


@pytest.mark.slow
@pytest.mark.parametrize(("m", "n", "k", "buffers", "parts"), [
    (64, 32, 256, 2, 1), (50, 40, 290, 3, 1), (33, 32, 96, 4, 3), (64, 40, 65, 3, 3), (50, 40, 290, 2, 3), (64, 32, 160, 4, 1)])
def test_the_next_operands_are_loaded_before_the_last_products(m: int, n: int, k: int, buffers: int, parts: int) -> None:
    """Operands of the next block are loaded early, also with a shorter last block, with parts of a sum of which the last has fewer blocks,
    and with few blocks; but not if copies are not asynchronous."""
    kernel = gemm(m, n, k, BF16, BF16)
    chain = [Opt("UPCAST", "o1", 2), Opt("LOCAL", "o0", 2), Opt("TILE", "r0", 2), *STAGED[:2], Opt("PIPELINE", "r0", buffers),
             *[Opt("SPLITK", "r0", parts)][:parts - 1]]
    state = tensorized(kernel, "mma_bf16", "sm_80", *chain)
    check(Case(kernel, 1), state, seed=buffers)
    unrolled = apply_opts(state, [Opt("UNROLL", "r0.in2", 0)])
    code = check(Case(kernel, 2), unrolled, seed=buffers).code[0]
    carried = [i for i in code if i.op == "CARRY" and i.dtype == BF16]
    if k % 2:       # copies pass through registers
        assert not carried
        return
    assert len(carried) == 3, "one tile of rows and two of columns"
    ops = [i.op for i in code]
    begin = max(i for i, x in enumerate(code) if x.op == "LOOP" and any(y.op == "CARRY" and y.dtype == BF16 for y in code[i:]))
    body = [op for op in ops[begin:begin + ops[begin:].index("ENDLOOP")] if op in ("MMA", "BARRIER", "WAIT", "LOADMATRIX", "COMMIT")]
    assert max(body.index("MMA"), body.index("COMMIT")) < body.index("WAIT") < body.index("BARRIER")
    assert body[body.index("BARRIER"):] == ["BARRIER", *["LOADMATRIX"] * 3, *["MMA"] * 2]


@pytest.mark.slow
def test_operands_loaded_before_the_barrier_are_found() -> None:
    """The emulator finds operands that are loaded before the barrier of the loop, which makes the copies visible."""
    kernel = gemm(64, 64, 256, BF16, BF16)
    state = tensorized(kernel, "mma_bf16", "sm_80", *TILES, Opt("TILE", "r0", 2), *STAGED, Opt("UNROLL", "r0.in2", 0))
    program, args = check(Case(kernel, 1), state), Case(kernel, 1).fresh()
    ops = [i.op for i in program.code[0]]
    at = len(ops) - 1 - ops[::-1].index("BARRIER")
    code = (*program.code[0][:at], Instruction("COMMIT", dtypes.void, 1, (), None), *program.code[0][at + 1:])
    run_program(Program(program.spec, (code,)), state.target, args)
    with pytest.raises(AssertionError), np.errstate(all="ignore"):
        Case(kernel, 1).check(args, "without the barrier of the loop")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch", "further"), [
    ("mma_bf16", "sm_80", [Opt("UPCAST", "o1", 4), Opt("LOCAL", "o1", 2)]),
    ("mma_bf16", "sm_80", [Opt("LOCAL", "o1", 2), Opt("UPCAST", "o1", 4)]),
    ("wgmma_bf16n64", "sm_90a", [*STAGED[:2], Opt("LOCAL", "o0", 2)])], ids=["beside", "apart", "warpgroup"])
@pytest.mark.parametrize(("rows", "columns"), [(70, 72), (65, 136), (73, 70), (128, 64)])
def test_threads_of_a_row_exchange_results_that_they_store(name: str, arch: str, further: list[Opt], rows: int, columns: int) -> None:
    """Results are stored in lines of 16 bytes if rows are multiples of a line and the tiles of a thread are adjacent; otherwise in
    words."""
    kernel = gemm(rows, columns, 48, BF16, BF16, out=BF16)
    state = apply_opts(Scheduler(kernel, card_target(arch, group_threads=256)), [Opt("TC", "r0", (name, "o0", "o1")), *further])
    code = check(Case(kernel, 1), state).code[-1]
    stored = [i.lanes for i in code if i.op == "STORE" and code[i.src[0]].op == "ARG"]
    lines = columns % 8 == 0 and further[0].op != "LOCAL"
    assert set(stored) == {8 if lines else 2}
    assert sum(i.op == "SHFL_XOR" for i in code) == (4 * len(stored) if lines else 0)


def test_what_is_computed_of_sums_is_exchanged_behind_it() -> None:
    """A bias and another matrix are added word by word in the layout of the sums, before the exchange; half of the rows are beyond the
    end."""
    m, n, k = 40, 64, 32
    x, w, bias, more = (Tensor(np.random.default_rng(i).standard_normal(s, dtype=np.float32)).cast("bfloat16")
                        for i, s in enumerate(((m, k), (k, n), (n,), (m, n))))
    kernel = Kernel(create_schedule(graph.sink(((x @ w) * 0.5 + bias + more).relu().uop)).calls[-1].ast)
    state = apply_opts(Scheduler(kernel, card_target("sm_80", group_threads=128)), [
        Opt("TC", "r0", ("mma_bf16", "o0", "o1")), Opt("UPCAST", "o1", 4), Opt("LOCAL", "o0", 2)])
    code = check(Case(kernel, 1), state).code[-1]
    assert {i.lanes for i in code if i.op == "STORE" and i.dtype == BF16} == {8}


@pytest.mark.slow
def test_words_exchanged_with_another_thread_give_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = gemm(32, 32, 16, BF16, BF16, out=BF16)
    chain = [Opt("UPCAST", "o1", 4)]
    check(Case(kernel, 1), tensorized(kernel, "mma_bf16", "sm_80", *chain))
    exchange = Lines._exchange
    monkeypatch.setattr(Lines, "_exchange", lambda self, own, other, bit: exchange(self, own, other, 3 - bit))
    with pytest.raises(AssertionError):
        check(Case(kernel, 1), tensorized(kernel, "mma_bf16", "sm_80", *chain))


@pytest.mark.parametrize("number", range(3))
def test_another_layout_gives_wrong_numbers(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed table of layouts gives wrong numbers in the emulator, also if only the loads of single threads follow the table."""
    kernel, right = gemm(16, 8, 16, BF16, BF16), DOTS["mma_bf16"]
    assert right.fragments is not None
    check(Case(kernel, 1), tensorized(kernel, "mma_bf16", "sm_80"))
    own = right.fragments[number]
    turned = replace(own, elements=(own.elements[1], own.elements[0], *own.elements[2:])) if number < 2 else \
        replace(own, threads=own.threads[::-1])
    monkeypatch.setitem(DOTS, "mma_bf16", replace(right, fragments=(*right.fragments[:number], turned, *right.fragments[number + 1:])))
    with pytest.raises(AssertionError):
        check(Case(kernel, 1), tensorized(kernel, "mma_bf16", "sm_80"))


@pytest.mark.parametrize(("further", "loaded"), [(16, 1), (512, 1), (4, 0)])
def test_two_tiles_are_one_ldmatrix_where_both_begin_lines(further: int, loaded: int) -> None:
    """Two tiles are loaded by one ldmatrix only if both begin at lines of 16 bytes: four 2-byte numbers are no line, and a GPU would
    fault."""
    tiles = [("LOADMATRIX", BF16, 4, (1, 4), (offset, "mma_bf16", 1, 1, 64, 1)) for offset in (0, further)]
    code = [("ARG", BF16, 1, (), 0), ("SHARED", BF16, 1, (), 0), ("BEGIN", dtypes.index, 1, (), None), ("END_", dtypes.index, 1, (), None),
            ("CONST", dtypes.index, 1, (), 0), ("LOOP", dtypes.index, 1, (2, 3), 1), *tiles,
            ("STORE", BF16, 4, (0, 4, 6), (0, False)), ("STORE", BF16, 4, (0, 4, 7), (4, False)), ("ENDLOOP", dtypes.void, 1, (5,), None)]
    phase = PhaseSpec("svod_p0", 1, 1, 0, block=32, shared_bytes=1 << 14, subgroup=32)
    program = Program(ProgramSpec("tiles", ((BF16, 64),), (0,), (), (phase,)), (tuple(Instruction(*c) for c in code),))
    validate(program)
    assert len(re.findall(r"call .*ldmatrix\S*x4", render(program, card_target("sm_80")))) == loaded


@pytest.mark.parametrize(("length", "bits"), [(1 << 20, 32), (1 << 28, 64), (1 << 33, 64)])
def test_rows_that_lie_gigabytes_apart(length: int, bits: int) -> None:
    """The offsets of fifteen rows of 2^28 numbers do not fit signed 32-bit integers."""
    state = tensorized(gemm(16, 8, length, BF16, BF16, transposed=True), "mma_bf16", "sm_80")
    product = lower(state).code[-1]
    rows = {x.arg[3] for x in product if x.op == "LOADMATRIX" and x.arg[2] == 0}
    text = render(lower(state), state.target).rsplit("define", 1)[1]
    assert rows and all(row >= length for row in rows)
    assert all(re.search(rf" = mul i{bits} %\w+, {row}\n", text) for row in rows)
    assert all(abs(int(n)) < 1 << 31 for n in re.findall(r" (?:add|mul) i32 %\w+, (-?\d+)", text))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch", "dtype"), [("mma_f16k8", "sm_75", F16), ("mma_s8k16", "sm_75", I8), ("mma_s8", "sm_80", I8), *[
    (name, arch, dtype) for name, dtype in (("mma_bf16", BF16), ("mma_f16", F16)) for arch in ("sm_80", "sm_90")]])
def test_ptxas_accepts_a_matmul(name: str, arch: str, dtype: DType) -> None:
    """The heuristic uses the matrix instruction with tiles of many registers, and ptxas spills nothing."""
    state = group_heuristic(Scheduler(gemm(1024, 1024, 1024, dtype, dtype, out=dtype if dtype.is_float else None), card_target(arch)))
    chosen = state.dots[state.kernel.output]
    assert chosen is not None and chosen.name == name
    if ptxas.ptxas_version() is None:
        pytest.skip("there is no ptxas on PATH: the CUDA toolkit has it")
    source = render(lower(state), state.target)
    for ir in (source, without_assumptions(source)):
        report, = ptxas.assemble(emit_ptx(ir, arch), arch)[1]
        assert 96 < report.registers <= 255 and not report.spill_stores and not report.spill_loads


@pytest.mark.parametrize(("arch", "dtype", "product", "operations"), [
    ("sm_75", F16, "HMMA.1688.F32", {"LDSM", "STS"}), ("sm_80", BF16, "HMMA.16816.F32.BF16", {"LDSM", "LDGSTS"}),
    ("sm_90", F16, "HMMA.16816.F32", {"LDSM", "LDGSTS"}), ("sm_80", I8, "IMMA.16832.S8.S8", {"LDSM", "LDGSTS"}),
    ("sm_75", I8, "IMMA.8816.S8.S8", {"LDSM", "STS"})])
def test_the_machine_code_of_the_heuristics_matmul(arch: str, dtype: DType, product: str, operations: set[str]) -> None:
    """The machine code has instructions of tensor cores, and uses no local memory."""
    if ptxas.ptxas_version() is None or ptxas.tool("nvdisasm") is None:
        pytest.skip("there is no ptxas or no nvdisasm: the CUDA toolkit has both, the package nvidia-cuda-nvdisasm the latter")
    target = card_target(arch)
    state = group_heuristic(Scheduler(gemm(512, 512, 512, dtype, dtype, transposed=dtype.is_int), target))
    text = ptxas.disassemble(ptxas.assemble(emit_ptx(render(lower(state), target), arch), arch)[0])
    found = set(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)(?:\.[\w.]+)?", text))
    assert f" {product} " in text and operations <= found and not found & {"LDL", "STL", "LDS"}


# -- copies ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("m", "n", "sizes"), a_half(
    [(32, 32, {16}), (32, 36, {8, 16}), (32, 34, {4, 16}), (32, 33, {16}), (29, 32, {16})]))
def test_copies_are_as_wide_as_their_alignment_allows(m: int, n: int, sizes: set[int]) -> None:
    """Rows of 36 bfloat16 are aligned to 8 bytes. Rows of 33 have no alignment that cp.async accepts, so their copies pass through
    registers. Nothing is read of rows beyond the end."""
    kernel = gemm(m, n, 64, BF16, BF16)
    state = tensorized(kernel, "mma_bf16", "sm_80", Opt("LOCAL", "o0", 2), Opt("TILE", "r0", 2), *STAGED)
    ir = render(check(Case(kernel, 1), state), state.target)
    copies = re.findall(r"call void @llvm\.nvvm\.cp\.async\.c[ag]\.shared\.global\.(\d+)(\.s)?\(", ir)
    assert {int(size) for size, _ in copies} == sizes
    assert any(given for _, given in copies) == (m != 32 or n in (34, 36))


def test_three_buffers() -> None:
    kernel = gemm(32, 16, 200, F16, F16)
    state = tensorized(kernel, "mma_f16", "sm_80", Opt("LOCAL", "o0", 2), Opt("TILE", "r0", 2), *STAGED[:2], Opt("PIPELINE", "r0", 3))
    ptx = emit_ptx(render(check(Case(kernel, 1), state), state.target), "sm_80")
    assert re.search(r"cp\.async\.wait_group\s+1;", ptx) and "cp.async.commit_group" in ptx and "cp.async.cg.shared.global" in ptx


def test_a_program_that_does_not_wait_is_found() -> None:
    """The emulator finds a thread that ends before its copies, and one that overwrites data which another warp still reads."""
    kernel = gemm(32, 16, 64, F16, F16)
    state = tensorized(kernel, "mma_f16", "sm_80", Opt("TILE", "r0", 2), *STAGED)
    program, case = lower(state), Case(kernel, 1)
    for keep, error in ((lambda i: i.arg != 0 or i.op != "WAIT", DeviceFault), (lambda i: i.op != "COMMIT", DeviceFault)):
        code = tuple(i if keep(i) else Instruction("CONST", dtypes.index, 1, (), 0) for i in program.code[0])
        with pytest.raises(error, match="under way"):
            run_program(Program(program.spec, (code,)), state.target, case.fresh())
    state = tensorized(kernel, "mma_f16", "sm_80", Opt("LOCAL", "o0", 2), Opt("TILE", "r0", 2), *STAGED)
    program, args = check(case, state), case.fresh()
    ops = [i.op for i in program.code[0]]
    at = ops.index("BARRIER", ops.index("WAIT"))
    code = (*program.code[0][:at], Instruction("WAIT", dtypes.void, 1, (), 0), *program.code[0][at + 1:])
    run_program(Program(program.spec, (code,)), state.target, args)
    with pytest.raises(AssertionError), np.errstate(all="ignore"):
        case.check(args, "without the barrier of the loop")


def test_without_assumptions_no_copy_needs_alignment() -> None:
    """Each argument is a view that begins two bytes after a multiple of 16."""
    kernel = gemm(32, 16, 64, F16, F16)
    state, case = tensorized(kernel, "mma_f16", "sm_80", Opt("TILE", "r0", 2), *STAGED), Case(kernel, 1)
    args = []
    for array in case.fresh():
        raw = np.zeros(array.nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 16 + array.itemsize
        args.append(raw[start:start + array.nbytes].view(array.dtype))
        args[-1][:] = array
    run_program(lower(state), state.target, args)
    case.check(args, "arguments that are not aligned")
    assert "cp.async.cg" not in without_assumptions(render(lower(state), state.target)).replace("declare void @llvm.nvvm.cp.async.cg", "")


@pytest.mark.slow
def test_copies_of_many_turns() -> None:
    """A group of one subgroup copies the operands of its products in a loop."""
    kernel = gemm(64, 32, 96, BF16, BF16, transposed=True)
    state = tensorized(kernel, "mma_bf16", "sm_80", Opt("UPCAST", "o0", 4), Opt("UPCAST", "o1", 4), Opt("TILE", "r0", 3), *STAGED)
    program = check(Case(kernel, 1), state)
    ops = [i.op for i in program.code[0]]
    assert ops.count("LOOP") > 2 and "COPY_ASYNC" in ops
