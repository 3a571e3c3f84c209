"""HOLD: stages in the layout of a matrix instruction's results, and the conditions under which values stay in registers."""
from __future__ import annotations

import pytest

from svod.core.ir.dtype import dtypes
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.intrinsics import shuffles_of
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.levels import MemorySpace
from svod.core.tree.show import print_nest
from svod.errors import KernelOptError
from tests.compile.cuda.target import card_target
from tests.core.corpus import data, kernel_of
from tests.hand_kernels import Ast, gemm, in_place_accumulate

F16, F32 = dtypes.float16, dtypes.float32
HELD, SHARED = MemorySpace.HELD, MemorySpace.SHARED
TARGET = card_target("sm_80")
ATTENTION = Kernel(kernel_of(data(3, 96, 32, dtype="bfloat16").scaled_dot_product_attention(
    data(3, 128, 32, dtype="bfloat16"), data(3, 128, 40, dtype="bfloat16"))))
ROWS = Kernel(kernel_of(data(37, 29).sum(1)))
NORM = Kernel(kernel_of((data(33, 19) + data(33, 19)).rms_norm(19, data(19))))
PASS = ("ONLINE(s3, 32) TC(s2.r0, mma_bf16,s2.o1,s2.o2) UPCAST(s2.o2, 4) LOCAL(s2.o1, 2) UNROLL(s2.r0, 0) "
        "TC(s8.r0, mma_bf16,s8.o1,s8.o2) UPCAST(s8.o2, 5) LOCAL(s8.o1, 2) UNROLL(s8.r0, 0) TILE(o1, 32) ORDER(out, o0,o1,r0,o1.in,o2) "
        "STAGE(s8, r0) STAGE(s7, r0) STAGE(s6, r0) STAGE(s5, r0) STAGE(s3, r0) STAGE(s2, r0) STAGE(s1, r0) STAGE(s0, o1)")
LAID = {"s3": "HOLD(s3, mma_bf16,s3.o1,s3.r0) UPCAST(s3.r0, 4) LOCAL(s3.o1, 2)",
        "s5": "HOLD(s5, mma_bf16,s5.o1,s5.r0) UPCAST(s5.r0, 2) UNROLL(s5.r0, 0) LOCAL(s5.o1, 2)",
        "out": "HOLD(out, mma_bf16,o1.in,o2) UPCAST(o2, 5) LOCAL(o1.in, 2)"}


def state_of(kernel: Kernel, chain: str) -> Scheduler:
    return apply_opts(Scheduler(kernel, TARGET), parse_chain(chain))


def spaces(chain: str) -> dict[str, MemorySpace]:
    state = state_of(ATTENTION, chain)
    return {state.kernel.stages[s].name: nest.space for s, nest in loop_nest(state).stages.items()}


def laid(**changes: str) -> str:
    return " ".join([PASS, *{**LAID, **changes}.values()])


def test_a_whole_pass_stays_in_registers() -> None:
    found = spaces(laid())
    assert {name for name, space in found.items() if space is HELD} == {"s2", "s3", "s5", "s6", "s8"}
    assert {name for name, space in found.items() if space is SHARED} == {"s0", "s1", "s7"}
    shown = print_nest(state_of(ATTENTION, laid()))
    assert "stage s2[1, 32, 32] in registers:" in shown and "operand s6[1, 32, 1, 32], computed where it is multiplied:" in shown


@pytest.mark.parametrize(("changes", "shared"), [
    ({"s5": ""}, {"s2", "s3"}),                                                             # each thread sums up all by itself
    ({"s5": "HOLD(s5, mma_bf16,s5.o1,s5.r0) LOCAL(s5.o1, 2)"}, {"s2"}),                     # it reads them tile by tile, in a loop
    ({"s3": "HOLD(s3, mma_bf16,s3.o1,s3.r0) UPCAST(s3.r0, 4) UPCAST(s3.o1, 2)"}, {"s2", "s3"}),      # other threads have its rows
    ({"s3": "HOLD(s3, mma_f16,s3.o1,s3.r0) UPCAST(s3.r0, 4) LOCAL(s3.o1, 2)"}, {"s2", "s3", "s6"}),  # tiles of another instruction
    ({"out": "UPCAST(o1.in, 8) LOCAL(o1.in, 4) LOCAL(o2, 16) UPCAST(o2, 3)"}, {"s3", "s5", "s8"}),
    ({"out": "HOLD(out, mma_bf16,o1.in,o2) UPCAST(o2, 5) UPCAST(o1.in, 2)"}, {"s3", "s5", "s8"}),
], ids=lambda v: " ".join(v.values()) if isinstance(v, dict) else "")
def test_what_others_read_lies_in_shared_memory(changes: dict[str, str], shared: set[str]) -> None:
    found = spaces(laid(**changes))
    assert {name for name, space in found.items() if space is SHARED} == {"s0", "s1", "s7"} | shared


def product_and(form: str, m: int, n: int, k: int) -> Kernel:
    """Make a kernel whose stage s2[i, j] is a product of two 16-bit matrices. The output reads of s2 the element at its own position
    (`itself`), also for several positions of another axis (`twice`), the element below (`below`), or a diagonal (`diagonal`); or it is
    another product with half of s2 (`product`), or with s2 times an argument (`loaded`)."""
    a, more = Ast(), {"below": 1, "diagonal": n}.get(form, 0)
    out, x, w, v = a.param(0, 2 * m * n), a.param(1, (m + more) * k, F16), a.param(2, k * n, F16), a.param(3, n * n, F16)
    p, q, r, s, i, j, t = a.axes(m + more, k, k, n, m + more, n, k)
    first, second = a.stage(a.load(x, p * k + q).cast(F32), p, q), a.stage(a.load(w, r * n + s).cast(F32), r, s)
    c = a.stage(a.reduce("ADD", a.read(first, i, t) * a.read(second, t, j), t), i, j)
    if form in ("product", "loaded"):
        e, f, g, h, y, z, u = a.axes(m, n, n, n, m, n, n)
        value = a.read(c, e, f) * (a.load(v, f).cast(F32) if form == "loaded" else 0.5)
        factor, other = a.stage(value.cast(F16).cast(F32), e, f), a.stage(a.load(v, g * n + h).cast(F32), g, h)
        return Kernel(a.sink(a.store(out, y * n + z, a.reduce("ADD", a.read(factor, y, u) * a.read(other, u, z), u), y, z)))
    b, y, z = a.axes(2, m, n)
    if form == "twice":
        return Kernel(a.sink(a.store(out, (b * m + y) * n + z, a.read(c, y, z) + 1.5, b, y, z)))
    row = {"itself": y, "below": y + 1, "diagonal": y + z}[form]
    return Kernel(a.sink(a.store(out, y * n + z, a.read(c, row, z) + 1.5, y, z)))


@pytest.mark.parametrize(("form", "shape", "chain", "space"), [
    ("itself", (32, 16, 7), "UPCAST(s2.o1, 2) STAGE(s2, o0) HOLD(out, mma_f16,o0,o1) UPCAST(o1, 2)", HELD),
    ("below", (32, 16, 7), "UPCAST(s2.o1, 2) STAGE(s2, o0) HOLD(out, mma_f16,o0,o1) UPCAST(o1, 2)", SHARED),
    ("diagonal", (32, 8, 7), "UPCAST(s2.o0, 0) STAGE(s2, o0) HOLD(out, mma_f16,o0,o1)", SHARED),
    ("itself", (64, 24, 7), "LOCAL(s2.o0, 2) UPCAST(s2.o1, 3) STAGE(s2, o0) HOLD(out, mma_f16,o0,o1) LOCAL(o0, 2) UPCAST(o1, 3)", HELD),
    ("itself", (64, 24, 7), "LOCAL(s2.o0, 2) STAGE(s2, o0) HOLD(out, mma_f16,o0,o1) LOCAL(o0, 2) UPCAST(o1, 3)", SHARED),
    ("itself", (48, 24, 7), "UPCAST(s2.o0, 2) LOCAL(s2.o1, 2) STAGE(s2, o1) HOLD(out, mma_f16,o0,o1) LOCAL(o0, 2)", SHARED),
    ("twice", (14, 24, 7), "STAGE(s2, o2) HOLD(out, mma_f16,o1,o2)", HELD),
    ("twice", (14, 24, 7), "STAGE(s2, o2) HOLD(out, mma_f16,o1,o2) LOCAL(o0, 2)", SHARED),
])
def test_who_holds_a_product(form: str, shape: tuple[int, int, int], chain: str, space: MemorySpace) -> None:
    """A product stays in registers if each thread of its reader reads only elements that the thread computed: same rows, same axes, bound
    to threads in the same way."""
    state = state_of(product_and(form, *shape), f"TC(s2.r0, mma_f16,s2.o0,s2.o1) {chain}")
    assert loop_nest(state).stages[state.stage_id("s2")].space is space


@pytest.mark.parametrize(("form", "shape", "chain", "space"), [
    ("product", (32, 32, 16), "UPCAST(s2.o1, 4) TC(r0, mma_f16,o0,o1) STAGE(s3, o0) STAGE(s2, o0)", HELD),
    ("loaded", (32, 32, 16), "UPCAST(s2.o1, 4) TC(r0, mma_f16,o0,o1) STAGE(s3, o0) STAGE(s2, o0)", SHARED),
    ("product", (32, 40, 16), "UPCAST(s2.o1, 5) TC(r0, mma_f16,o0,o1) STAGE(s3, o0) STAGE(s2, o0)", SHARED),  # half a tile
    ("product", (32, 32, 7), "LOCAL(s2.o1, 2) TC(r0, mma_f16,o0,o1) LOCAL(o0, 2) STAGE(s3, o1)", SHARED),      # s2 is a phase of its own
])
def test_which_operands_are_computed_where_they_are_multiplied(form: str, shape: tuple[int, int, int], chain: str,
                                                               space: MemorySpace) -> None:
    state = state_of(product_and(form, *shape), f"TC(s2.r0, mma_f16,s2.o0,s2.o1) {chain}")
    assert loop_nest(state).stages[state.stage_id("s3")].space is space


def test_tiles_are_cut_from_the_innermost_loops() -> None:
    state = state_of(ROWS, "TILE(o0, 32) HOLD(out, mma_f16,o0.in,r0) UPCAST(r0, 2) LOCAL(o0.in, 2)")
    table = {name: [(state.rows[r].role, state.rows[r].extent, state.rows[r].stride) for r in state.axis_rows[a]]
             for name, a in ((a.name, a.index) for a in state.kernel.axes[-2:])}
    assert table == {"o0": [("loop", 2, 32), ("loop", 1, 32), ("local", 2, 16), ("dot", 16, 1)],
                     "r0": [("loop", 2, 16), ("upcast", 2, 8), ("dot", 8, 1)]}
    assert state.digest != state_of(ROWS, "TILE(o0, 32) HOLD(out, mma_bf16,o0.in,r0) UPCAST(r0, 2) LOCAL(o0.in, 2)").digest


@pytest.mark.parametrize(("name", "masks"), [("mma_f16", [1, 2]), ("wgmma_f16n64", [1, 2])])
def test_threads_that_share_a_row_differ_in_two_bits(name: str, masks: list[int]) -> None:
    state = apply_opts(Scheduler(ROWS, card_target("sm_90a")), parse_chain(f"HOLD(out, {name},o0,r0)"))
    assert shuffles_of(state, state.kernel.output) == masks
    columns = apply_opts(Scheduler(Kernel(gemm(32, 48, 30)), card_target("sm_90a")), parse_chain(f"HOLD(out, {name},o0,o1)"))
    assert not shuffles_of(columns, columns.kernel.output)


@pytest.mark.parametrize(("kernel", "chain", "why"), [
    (ROWS, "HOLD(s0, mma_f16,s0.o0,s0.o1)", "the loops of a copy follow from where it is read"),
    (ROWS, "HOLD(out, mma_f16,r0,o0)", "r0 is no output axis of the stage"),
    (ATTENTION, "HOLD(s3, mma_f16,s3.o1,s5.r0)", "s5.r0 is no axis of the stage"),
    (ROWS, "HOLD(out, mma_f16,o0)", "takes the axes of its rows and columns"),
    (ROWS, "HOLD(out, amx8,o0,r0)", "no threads of the target hold tiles of amx8"),
    (ROWS, "HOLD(out, wgmma_f16n64,o0,r0)", "no threads of the target hold tiles of wgmma_f16n64"),
    (ROWS, "HOLD(out, mma_f16,o0,r0) HOLD(out, mma_f16,o0,r0)", "has an instruction already"),
    (ROWS, "UPCAST(o0, 4) HOLD(out, mma_f16,o0,r0)", "tiles are cut from the innermost loop of an axis"),
    (ROWS, "PADTO(r0, 8) HOLD(out, mma_f16,o0,r0)", "an axis that is not padded"),
    (ROWS, "NOLOCALS(out) HOLD(out, mma_f16,o0,r0)", "NOLOCALS keeps the groups"),
    (ROWS, "HOLD(out, mma_f16,o0,r0) GROUP(r0, 2)", "cannot share their sums"),
    (Kernel(kernel_of(data(37, 29).sum())), "HOLD(out, mma_f16,r0,r1)", "no output axis"),
    (Kernel(in_place_accumulate(32, 16, 8)), "HOLD(out, mma_f16,o0,o1)", "reads what it writes"),
    (NORM, "HOLD(out, mma_f16,o0,o1) GROUP(s1.r0, 4)", "each at other positions, and cannot share its sums"),
    (NORM, "GROUPTOP(s1.r0, 4) HOLD(out, mma_f16,o1,o0)", "each at other positions, and cannot share its sums"),
])
def test_illegal(kernel: Kernel, chain: str, why: str) -> None:
    with pytest.raises(KernelOptError, match=why):
        state_of(kernel, chain)
