"""wgmma: kernels give right numbers in the emulator, whose layouts are written independently of svod's; ptxas accepts them and generates
HGMMA."""
from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from svod.bench.device_ceilings import matrix_ast, matrix_state
from svod.compile.cuda import ptxas, warpgroup
from svod.compile.cuda import render as cuda_render
from svod.compile.cuda.intrinsics import check_intrinsics
from svod.compile.cuda.ptx import emit_ptx
from svod.compile.cuda.render import render
from svod.compile.cuda.warpgroup import left_under_way, products_together
from svod.compile.lower.emit.addresses import Addresses
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Instruction, Program
from svod.core.cost.groups.group_sketch import group_heuristic
from svod.core.ir.dtype import DType, dtypes
from svod.core.kernel import intrinsics, layout
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.isa import DOTS
from svod.errors import CompileError, KernelOptError
from tests.agreement import Case
from tests.chain_runs import run_chains
from tests.chains import group_state
from tests.compile.cuda import emulator
from tests.compile.cuda.emulator import DeviceFault, matrices, run_program, started
from tests.compile.cuda.running import check, run
from tests.compile.cuda.target import card_target
from tests.compile.lower.test_intrinsics import gemm, windows, with_full_range
from tests.draws import a_half, count
from tests.hand_kernels import Ast

BF16, F16, I8 = dtypes.bfloat16, dtypes.float16, dtypes.int8
TARGET = card_target("sm_90a", group_threads=256)
STAGED = [Opt("TILE", "r0", 2), Opt("STAGE", "s0", "r0"), Opt("STAGE", "s1", "r0"), Opt("PIPELINE", "r0", 2)]
EXTENTS = (2, 13, 64, 70, 101, 128)
MOST_THREADS = 4096
SMALL = gemm(64, 64, 64, BF16, BF16)


def tensorized(kernel: Kernel, name: str, *chain: Opt) -> Scheduler:
    return apply_opts(Scheduler(kernel, TARGET), [Opt("TC", "r0", (name, "o0", "o1")), *chain])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("wgmma_bf16n64", BF16), ("wgmma_f16n128", F16), ("wgmma_bf16n256", BF16),
                                             ("wgmma_s8n64", I8)])
@pytest.mark.parametrize("transposed", [False, True])
def test_random_shapes_and_chains(name: str, dtype: DType, transposed: bool) -> None:
    """8-bit operands need rows along the summed axis; an operand stored the other way round is transposed by its copy."""
    def draw(rng: random.Random, kind: str) -> tuple[Case, Scheduler]:
        m, n, k = rng.choice(EXTENTS), rng.choice(EXTENTS), rng.choice((65, 80, 100, 160))
        kernel = windows(k, m, n, 3, dtype, dtype) if kind == "windows" else \
            gemm(m, n, k, dtype, dtype, transposed=transposed, out=dtype if dtype.is_float and rng.random() < 0.5 else None)
        seed, steps = rng.randrange(100), -(-k // DOTS[name].depth)
        block = rng.choice([n for n in (2, 3, 4, 8) if n < steps])      # rows of 2, 4 and 8 lines, and several of them
        ahead = [Opt("PIPELINE", "r0", n)] if (n := rng.choice((0, 2, 4, 5))) else []
        state = tensorized(kernel, name, Opt("TILE", "r0", block), *STAGED[1:3], *ahead)
        return with_full_range(Case(kernel, seed), seed), group_state(rng, state, len(state.applied_opts) + rng.randint(0, 3))

    def run_small(case: Case, state: Scheduler, program: Program, rng: random.Random) -> dict[str, bool]:
        return run(case, state, program, rng) if sum(p.extent * p.block for p in program.spec.phases) <= MOST_THREADS else {}

    run_chains(f"cuda {name}, {transposed=}", ("products", "windows"), count(2), draw, run_small, {"MMASHARED": 0.6})


def test_tiles_side_by_side_and_two_warpgroups() -> None:
    kernel = gemm(256, 128, 128, BF16, BF16, out=BF16)
    program = check(Case(kernel, 1), tensorized(kernel, "wgmma_bf16n64", Opt("UPCAST", "o0", 2), Opt("LOCAL", "o0", 2), *STAGED,
                                                Opt("UNROLL", "r0.in2", 0)))
    assert program.spec.phases[0].block == 256
    together = products_together(program.code[0])
    assert [len(members) for members in together.values()] == [4], "two tiles, two instructions along the sum"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wgmma_bf16n64", "mma_bf16"])
def test_parts_of_a_sum(name: str) -> None:
    """Seven blocks are split into three parts, the last of which has one block; each group copies the blocks of its part ahead."""
    kernel = gemm(70, 65, 7 * 32 - 5, BF16, BF16)
    program = check(Case(kernel, 1), tensorized(kernel, name, *[Opt("UPCAST", "o0", 4)][:name == "mma_bf16"], *STAGED,
                                                Opt("SPLITK", "r0", 3)))
    partial, combining = program.spec.phases
    assert partial.extent == 3 * 2 * (2 if name.startswith("wgmma") else 9) and partial.shared_bytes and not combining.shared_bytes


@pytest.mark.parametrize("planted", a_half(["fragment", "distance", "turned", "swizzle", "place", "start", "fence"]))
def test_another_layout_gives_wrong_numbers(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = DOTS["wgmma_bf16n64"]
    assert right.fragments is not None
    check(Case(SMALL, 1), tensorized(SMALL, "wgmma_bf16n64", *STAGED))
    if planted == "fragment":
        own, = right.fragments
        monkeypatch.setitem(DOTS, "wgmma_bf16n64", replace(right, fragments=(replace(own, threads=(*own.threads[1:], own.threads[0])),)))
    elif planted == "distance":
        written_distances = warpgroup._distances
        monkeypatch.setattr(warpgroup, "_distances", lambda apart, lines, along: [2 * n for n in written_distances(apart, lines, along)])
    elif planted == "swizzle":
        monkeypatch.setattr(warpgroup, "SWIZZLES", dict.fromkeys(warpgroup.SWIZZLES, 0))
    elif planted == "place":
        monkeypatch.setattr(Addresses, "_swizzled", lambda self, swizzle, element, width: element)
    elif planted == "fence":
        monkeypatch.setattr(cuda_render, "FENCE", "")
    elif planted == "start":
        monkeypatch.setattr(cuda_render, "SWIZZLED", 128)
    else:
        written = warpgroup._instruction
        monkeypatch.setattr(warpgroup, "_instruction", lambda dot, registers, a, b, across: written(dot, registers, a, b, across[::-1]))
    with pytest.raises((AssertionError, DeviceFault)), np.errstate(all="ignore"):
        check(Case(SMALL, 1), tensorized(SMALL, "wgmma_bf16n64", *STAGED))


def turns() -> tuple[int, int, int, int]:
    """Count bank accesses of the last block, for eight lines of 16 bytes at a time: (accesses of copies to their busiest bank, number of
    eights copied, accesses of products to their busiest bank, number of eights read)."""
    of_thread: dict[int, list[int]] = {}
    for thread, to, nbytes in started:
        assert nbytes == 16
        of_thread.setdefault(thread, []).append(to)
    threads = sorted(of_thread)
    copies = [at_once for k in range(0, len(threads), 8) for at_once in zip(*[of_thread[t] for t in threads[k:k + 8]], strict=True)]
    most = [[Counter(at // 16 % 8 for at in at_once).most_common(1)[0][1] for at_once in each] for each in (copies, matrices)]
    return sum(most[0]), len(copies), sum(most[1]), len(matrices)


@pytest.mark.slow
@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block", [1, 2, 4, 8])
def test_neither_copies_nor_products_meet_in_a_bank(block: int, transposed: bool, swizzled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their addresses, copies and products have no bank conflicts for any number of lines in a row. Copies into rows of one line would
    have some without the padding."""
    kernel = gemm(64, 64, 256, BF16, BF16, transposed=transposed)
    chain = [*[Opt("TILE", "r0", block)][:block - 1], *STAGED[1:]]

    def measured() -> tuple[int, int, int, int]:
        check(Case(kernel, 1), tensorized(kernel, "wgmma_bf16n64", *chain))
        return turns()
    if not swizzled:
        of_tiles = intrinsics._whole_tiles
        monkeypatch.setattr(intrinsics, "_whole_tiles", lambda *args: of_tiles(*args)._replace(whole_tiles=False))
    of_copies, copies, of_products, reads = measured()
    assert of_copies == copies > 0 and of_products == reads > 0
    monkeypatch.setattr(layout, "left_out", lambda lines, parts: 0)
    of_copies, copies, of_products, reads = measured()
    assert (of_copies > copies) != swizzled and of_products == reads


def test_what_threads_stored_is_fenced_before_each_barrier() -> None:
    lines = render(lower(tensorized(SMALL, "wgmma_bf16n64", *STAGED)), TARGET).splitlines()
    barriers = [i for i, line in enumerate(lines) if "call void @llvm.nvvm.barrier.cta" in line]
    assert barriers and all("fence.proxy.async.shared::cta;" in lines[i - 1] for i in barriers)
    plain = render(lower(apply_opts(Scheduler(SMALL, TARGET), [Opt("TC", "r0", ("mma_bf16", "o0", "o1")), *STAGED])), TARGET)
    assert "barrier.cta" in plain and "fence.proxy" not in plain


def instructions(*codes: tuple[str, tuple[int, ...]]) -> tuple[Instruction, ...]:
    return tuple(Instruction(op, dtypes.float32, 1, src, None) for op, src in codes)


@pytest.mark.parametrize(("middle", "want"), [
    ((), {2: (1, 2)}), ((("ADD", (0, 0)),), {3: (1, 3)}), ((("BARRIER", ()),), {1: (1,), 3: (3,)}),
    ((("NEG", (1,)),), {1: (1,), 3: (3,)}), ((("STORE", (0, 0, 0)),), {1: (1,), 3: (3,)})],
    ids=["behind", "index", "barrier", "use", "store"])
def test_what_is_under_way_together(middle: tuple[tuple[str, tuple[int, ...]], ...], want: dict[int, tuple[int, ...]]) -> None:
    code = instructions(("CONST", ()), ("MMASHARED", (0, 0, 0, 0, 0)), *middle, ("MMASHARED", (1, 0, 0, 0, 0)))
    assert products_together(code) == want


def test_a_result_that_others_use_too_ends_what_is_under_way() -> None:
    code = instructions(("CONST", ()), ("MMASHARED", (0, 0, 0, 0, 0)), ("MMASHARED", (1, 0, 0, 0, 0)), ("ADD", (1, 2)))
    assert products_together(code) == {1: (1,), 2: (2,)}


def test_tiles_that_a_threads_registers_do_not_hold_are_refused() -> None:
    """Each thread holds 128 numbers of a tile of 64 rows and 256 columns, so two such tiles exceed its 255 registers."""
    state = apply_opts(Scheduler(gemm(512, 512, 64, BF16, BF16), TARGET), [Opt("TC", "r0", ("wgmma_bf16n256", "o0", "o1"))])
    with pytest.raises(KernelOptError, match="a thread has 256 numbers of tiles, and 255 registers"):
        apply_opts(state, [Opt("UPCAST", "o0", 2)])


@pytest.mark.parametrize(("user", "left"), [([], {1}), ([("ADD", (1, 2))], set())])
def test_a_result_that_is_used_at_once_is_waited_for(user: list[tuple[str, tuple[int, ...]]], left: set[int]) -> None:
    """A result that is used at once is waited for there, also if another use waits for it later."""
    code = instructions(("CONST", ()), ("MMASHARED", (0, 0, 0, 0, 0)), ("MMAWAIT", (1,)), *user)
    assert left_under_way(code, products_together(code)) == left


@pytest.mark.slow
@pytest.mark.parametrize("chain", [[], [Opt("UPCAST", "o0", 2)], [Opt("UNROLL", "r0.in2", 0)], [Opt("SPLITK", "r0", 2)]],
                         ids=["block", "tiles", "unrolled", "parts"])
@pytest.mark.parametrize("buffers", [4, 5])
def test_products_are_under_way_while_the_next_block_begins(buffers: int, chain: list[Opt]) -> None:
    """With four or more buffers, the products of a block may continue after the next barrier; with three, all are waited for before it."""
    kernel = gemm(130, 70, 230, BF16, BF16)
    tiles, further = [o for o in chain if o.op == "UPCAST"], [o for o in chain if o.op != "UPCAST"]

    def code(buffers: int) -> Program:
        return check(Case(kernel, 1), tensorized(kernel, "wgmma_bf16n64", *tiles, *STAGED[:3], Opt("PIPELINE", "r0", buffers), *further))
    waits = [i.arg for i in code(buffers).code[0] if i.op == "MMAWAIT"]
    count = 1 + len(tiles)
    assert waits == [1] * count + [0] * count
    assert not any(i.op == "MMAWAIT" for i in code(3).code[0])


@pytest.mark.slow
def test_products_of_what_has_one_buffer_are_waited_for() -> None:
    """A factor that the loop computes from a copy has one buffer: it is written for the next block only after all products of this
    block."""
    a = Ast()
    out, x, w = a.param(0, 64 * 64), a.param(1, 64 * 200, BF16), a.param(2, 200 * 64, BF16)
    p, q, e, f, r, s, i, j, t = a.axes(64, 200, 64, 200, 200, 64, 64, 64, 200)
    first = a.stage(a.load(x, p * 200 + q).cast(dtypes.float32), p, q)
    second = a.stage(a.load(w, r * 64 + s).cast(dtypes.float32), r, s)
    doubled = a.stage((a.read(first, e, f) * 2.0).cast(BF16).cast(dtypes.float32), e, f)
    summed = a.reduce("ADD", a.read(doubled, i, t) * a.read(second, t, j), t)
    kernel = Kernel(a.sink(a.store(out, i * 64 + j, summed, i, j)))
    copies = [Opt("STAGE", "s1", "r0"), Opt("STAGE", "s0", "r0"), Opt("STAGE", "s2", "r0"), Opt("PIPELINE", "r0", 4)]
    made = [check(Case(kernel, 1), tensorized(kernel, "wgmma_bf16n64", Opt("TILE", "r0", 2), *chain))
            for chain in (copies, [copies[0], *copies[2:]])]
    waits = [sum(x.op == "MMAWAIT" for x in program.code[0]) for program in made]
    assert waits == [0, 2], "without the copy between, both factors have four buffers"


@pytest.mark.parametrize(("planted", "said"), a_half([
    (("wait_group.sync.aligned 0", "wait_group.sync.aligned 1"), "while its products are under way"),
    (("wait_group.sync.aligned 1", "wait_group.sync.aligned 2"), "changes that a product under way reads")]), ids=["stored", "copied over"])
def test_products_that_nobody_waits_for_are_found(planted: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator finds a tile that is stored before its products are done, and a copy that overwrites operands of unfinished products."""
    kernel = gemm(64, 64, 320, BF16, BF16)
    state = tensorized(kernel, "wgmma_bf16n64", *STAGED[:3], Opt("UNROLL", "r0.in2", 0), Opt("PIPELINE", "r0", 4))
    check(Case(kernel, 1), state)
    monkeypatch.setattr(emulator, "render", lambda program, target: render(program, target).replace(*planted))
    with pytest.raises(DeviceFault, match=said):
        check(Case(kernel, 1), state)


def test_tiles_that_no_registers_hold_are_refused() -> None:
    kernel = gemm(257, 511, 96, BF16, BF16)
    assert lower(tensorized(kernel, "wgmma_bf16n128", Opt("UPCAST", "o0", 2), *STAGED))
    with pytest.raises(KernelOptError, match="a thread has 256 numbers of tiles, and 255 registers"):
        tensorized(kernel, "wgmma_bf16n256", Opt("UPCAST", "o0", 2))


def test_loops_of_wgmma_stay_rolled() -> None:
    """ptxas takes ten seconds to unroll the loop of `device_ceilings` that repeats a product of fixed operands, and 0.05 s without
    unrolling."""
    dot = DOTS["wgmma_bf16n256"]
    state = matrix_state(Kernel(matrix_ast(dot, 256, 256, 64)), TARGET, dot, (128, 256))
    text = emit_ptx(render(lower(state), TARGET), "sm_90a")
    again = re.search(r"bra\s+(\$\w+);", text[text.index("wgmma.mma_async"):])
    assert again is not None
    header = text[:text.index("wgmma.mma_async")].rindex(f"{again[1]}:")
    assert '.pragma "nounroll";' in text[header:text.index("wgmma.mma_async")]
    other = emit_ptx(render(lower(Scheduler(gemm(64, 64, 640, BF16, BF16), TARGET)), TARGET), "sm_90a")
    assert re.search(r"@%p\d+ bra", other) and "nounroll" not in other        # ptxas decides for other loops


def test_assembly_is_of_listed_statements() -> None:
    ir = render(lower(tensorized(SMALL, "wgmma_bf16n64", *STAGED)), TARGET)
    check_intrinsics(ir, "sm_90a")
    for arch, changed in (("sm_90", ir), ("sm_90a", ir.replace("fence.proxy.async.shared::cta", "fence.proxy.async.global")),
                          ("sm_90a", ir.replace("wait_group.sync.aligned 0", "wait_group.sync.aligned 0x1"))):
        with pytest.raises(CompileError, match="has the assembly"):
            check_intrinsics(changed, arch)
    with pytest.raises(KernelOptError, match="the target has no wgmma"):
        apply_opts(Scheduler(SMALL, card_target("sm_90")), [Opt("TC", "r0", ("wgmma_bf16n64", "o0", "o1"))])


@pytest.mark.parametrize(("dtype", "transposed", "product"), a_half([
    (BF16, False, r"HGMMA\.64x256x16\.F32\.BF16"), (F16, True, r"HGMMA\.64x256x16\.F32"), (I8, True, r"IGMMA\.64x256x32\.S8\.S8")]))
def test_the_machine_code_of_the_heuristics_matmul(dtype: DType, transposed: bool, product: str) -> None:
    """Products follow each other without waits, operands are copied at the same time, and nothing is spilled."""
    target, size = card_target("sm_90a"), 4096
    kernel = gemm(size, size, size, dtype, dtype, transposed=transposed, out=dtype if dtype.is_float else None)
    state = group_heuristic(Scheduler(kernel, target))
    chosen = state.dots[state.kernel.output]
    assert chosen is not None and chosen.name.startswith("wgmma") and state.pipeline is not None
    if ptxas.ptxas_version() is None or ptxas.tool("nvdisasm") is None:
        pytest.skip("there is no ptxas or no nvdisasm: the CUDA toolkit has both, the package nvidia-cuda-nvdisasm the latter")
    cubin, (report,) = ptxas.assemble(emit_ptx(render(lower(state), target), "sm_90a"), "sm_90a")
    text = ptxas.disassemble(cubin)
    assert not report.spill_stores and not report.spill_loads and not re.search(r"\b(LDL|STL)\b", text)
    assert len(re.findall(product, text)) >= 2 * text.count("WARPGROUP.ARRIVE") > 0 and "LDGSTS" in text


def test_numbers_of_a_bfloat16_product() -> None:
    """The product equals NumPy's for factors that use all bits of bfloat16."""
    m, n, k = 70, 100, 96
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0x3F00, 0x4000, size).astype(np.uint16) for size in (m * k, k * n))     # 0.5 to 2
    out = np.full(m * n, np.nan, np.float32)
    run_program(lower(tensorized(gemm(m, n, k, BF16, BF16), "wgmma_bf16n128", *STAGED)), TARGET, [out, a, b])
    left, right = ((x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in (a, b))
    np.testing.assert_allclose(out.reshape(m, n), left.reshape(m, k) @ right.reshape(k, n), rtol=1e-6)
