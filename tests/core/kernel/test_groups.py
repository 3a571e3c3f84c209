"""Opts for targets with groups of threads: their effect on the loops, and the target limits that make them illegal."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.groups import ThreadGroup, covered_extent, grid_rows, group_of, level_of, space_of
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.placement import place_stages
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.levels import Level, MemorySpace
from svod.core.machine.target import Target
from svod.core.tree.show import print_nest
from svod.errors import KernelOptError
from tests.hand_kernels import gemm, softmax
from tests.toy_backend.target import TOY

GEMM = Kernel(gemm(24, 48, 30))
PRIME = Kernel(gemm(17, 19, 23))
SOFTMAX = Kernel(softmax(12, 40))
Chain = list[list[Any]]


def apply(kernel: Kernel, chain: Chain, target: Target = TOY) -> Scheduler:
    return apply_opts(Scheduler(kernel, target), [Opt.from_json(o) for o in chain])


def table(state: Scheduler, axis: str) -> str:
    rows = [state.rows[r] for r in state.axis_rows[state.kernel.axis_by_name[axis].index]]
    return ", ".join(f"{r.name} {r.role} {r.extent}×{r.stride}" for r in rows)


@pytest.mark.parametrize(("kernel", "chain", "axis", "rows", "group"), [
    (GEMM, [["LOCAL", "o0", 8]], "o0", "o0 loop 3×8, o0.in local 8×1", (8, 1)),
    (PRIME, [["LOCAL", "o0", 8]], "o0", "o0 loop 3×8, o0.in local 8×1", (8, 1)),
    (GEMM, [["LOCAL", "o0", 8], ["UPCAST", "o0", 3], ["LOCAL", "o1", 4]], "o0",
     "o0 loop 1×24, o0.in2 upcast 3×8, o0.in local 8×1", (32, 1)),
    (GEMM, [["GROUP", "r0", 4]], "r0", "r0 loop 8×4, r0.in group 4×1", (1, 4)),
    (GEMM, [["GROUPTOP", "r0", 4]], "r0", "r0.top group 4×8, r0 loop 8×1", (1, 4)),
    (GEMM, [["GROUPTOP", "r0", 0]], "r0", "r0 loop 1×30, r0.in group 30×1", (1, 30)),
    (GEMM, [["LOCAL", "o1", 16], ["GROUPTOP", "r0", 3], ["UNROLL", "r0", 2]], "r0",
     "r0.top group 3×10, r0 loop 5×2, r0.in unroll 2×1", (16, 3)),
    (SOFTMAX, [["GROUP", "s1.r0", 8], ["GROUP", "s3.r0", 4]], "s1.r0", "s1.r0 loop 5×8, s1.r0.in group 8×1", (1, 1, 8)),
    # the threads of a row share its maximum and its sum, if both are reduced by the same number of threads
    (SOFTMAX, [["GROUP", "s1.r0", 8], ["GROUP", "s3.r0", 8], ["LOCAL", "o1", 8], ["LOCAL", "o0", 4]], "o0",
     "o0 loop 3×4, o0.in local 4×1", (32, 1)),
    (SOFTMAX, [["GROUP", "s1.r0", 4], ["GROUP", "s3.r0", 4], ["LOCAL", "o1", 2], ["LOCAL", "o0", 4]], "o0",
     "o0 loop 3×4, o0.in local 4×1", (8, 4)),
    (SOFTMAX, [["GROUP", "s1.r0", 4], ["GROUP", "s3.r0", 2], ["LOCAL", "o1", 4], ["LOCAL", "o0", 4]], "o0",
     "o0 loop 3×4, o0.in local 4×1", (16, 4)),
    (SOFTMAX, [["NOLOCALS", "out"]], "o0", "o0 loop 12×1", (1, 1)),
])
def test_legal(kernel: Kernel, chain: Chain, axis: str, rows: str, group: tuple[int, ...]) -> None:
    state = apply(kernel, chain)
    assert table(state, axis) == rows
    found = group_of(state, place_stages(state), kernel.output)
    assert found[:2] == group[:2] and found.threads == ThreadGroup(*group).threads


def test_splitk_cuts_a_reduction_as_cores_do() -> None:
    assert apply(GEMM, [["SPLITK", "r0", 5]]).split_reduce == (GEMM.axis_by_name["r0"].index, 5)


@pytest.mark.parametrize(("kernel", "chain", "target", "why"), [
    (GEMM, [["LOCAL", "o0", 8]], replace(TOY, group_threads=0), "the target toy has no groups of threads"),
    (GEMM, [["GROUP", "r0", 8]], replace(TOY, shared_bytes=0), "the target toy has no shared memory"),
    (GEMM, [["LOCAL", "o0", 8]], replace(TOY, group_threads=4), "a group has at most 4 threads"),
    (GEMM, [["LOCAL", "o0", 8], ["LOCAL", "o1", 16]], TOY, "a group would have 128 threads; the target allows 64"),
    (GEMM, [["LOCAL", "o0", 8], ["GROUP", "r0", 10]], TOY, "a group would have 80 threads; the target allows 64"),
    (GEMM, [["UPCAST", "o1", 16], ["LOCAL", "o0", 8], ["GROUP", "r0", 2]], replace(TOY, shared_bytes=512),
     "take 1024 bytes of shared memory; the target has 512"),
    (GEMM, [["LOCAL", "r0", 2]], TOY, "use GROUP or GROUPTOP"),
    (GEMM, [["GROUP", "o0", 2]], TOY, "use LOCAL"),
    (GEMM, [["GROUPTOP", "o0", 2]], TOY, "use LOCAL"),
    (GEMM, [["SPLITK", "r0", 5], ["GROUP", "r0", 2]], TOY, "GROUP comes before SPLITK"),
    (GEMM, [["SPLITK", "r0", 5], ["SPLITK", "r0", 5]], TOY, "cut into parts already"),
    (GEMM, [["SPLITK", "o0", 2]], TOY, "only a reduce axis of the output"),
    (GEMM, [["SPLITK", "r0", 5]], replace(TOY, global_limits=(4, 1, 1)), "a grid has at most 4 groups"),
    (GEMM, [["THREAD", "o0", 2]], replace(TOY, threads=4), "launches a grid of groups"),
    (GEMM, [["STREAM", "out"]], TOY, "has no stores that go past the caches"),
    (GEMM, [["NOLOCALS", "out"], ["LOCAL", "o0", 8]], TOY, "NOLOCALS keeps the groups"),
    (GEMM, [["NOLOCALS", "out"], ["NOLOCALS", "out"]], TOY, "applied already"),
    (GEMM, [["LOCAL", "o0", 8], ["NOLOCALS", "out"]], TOY, "bound to the threads of a group already"),
    (GEMM, [["PIPELINE", "r0", 2]], TOY, "nothing is staged in the loop"),
    (GEMM, [["STAGE", "s1", "r0"], ["PIPELINE", "r0", 1]], TOY, "needs the number of buffers"),
    (GEMM, [["STAGE", "s1", "o1"], ["PIPELINE", "o1", 2]], TOY, "only the iterations of a reduce loop"),
    (GEMM, [["STAGE", "s1", "r0"], ["PIPELINE", "r0", 2], ["PIPELINE", "r0", 3]], TOY, "pipelined already"),
    (GEMM, [["STAGE", "s1", "r0"], ["PIPELINE", "r0", 2]], replace(TOY, shared_bytes=0), "has no memory that the threads of a group share"),
])
def test_illegal(kernel: Kernel, chain: Chain, target: Target, why: str) -> None:
    before = apply(kernel, chain[:-1], target)
    with pytest.raises(KernelOptError, match=why):
        apply_opt(before, Opt.from_json(chain[-1]))


def test_levels_of_loops() -> None:
    state = apply(GEMM, [["LOCAL", "o0", 8], ["UPCAST", "o1", 16], ["LANES", "o1.in"], ["GROUP", "r0", 5], ["UNROLL", "r0", 2]])
    assert [state.rows[r].name for r in grid_rows(state, place_stages(state), GEMM.output)] == ["o0", "o1"]
    levels = {row.name: level_of(state, i) for i, row in enumerate(state.rows)}
    assert (levels["o0"], levels["o0.in"], levels["r0"], levels["r0.in"]) == (Level.GRID, Level.BLOCK, Level.SERIAL, Level.BLOCK)
    assert (levels["o1.in"], levels["r0.in2"]) == (Level.VECTOR, Level.UNROLL)
    threaded = apply(GEMM, [["THREAD", "o0", 2]], replace(TOY, group_threads=0, threads=2))
    assert level_of(threaded, threaded.row_id("o0")) is Level.CORE


def replace_target(state: Scheduler, **changes: Any) -> Scheduler:
    return state.copy(target=replace(state.target, **changes))


def test_spaces_of_stages() -> None:
    state = apply(GEMM, [["STAGE", "s0", "root"], ["STAGE", "s1", "o1"]])
    found = place_stages(state)
    assert space_of(state, found, 0, 24 * 30, 24 * 30, 1) is MemorySpace.GLOBAL
    assert [space_of(state, found, 1, own, whole, 4) for own, whole in ((1, 4), (30, 120), (30, 30), (30, 100))] == [
        MemorySpace.REGISTER, MemorySpace.SCRATCH, MemorySpace.SHARED, MemorySpace.SHARED]
    assert space_of(replace_target(state, shared_bytes=0), found, 1, 30, 30, 4) is MemorySpace.SCRATCH
    assert [state.rows[r].name for r in grid_rows(state, found, GEMM.output)] == ["o0", "o1"]
    outer = apply(GEMM, [["STAGE", "s1", "o0"]])
    assert [outer.rows[r].name for r in grid_rows(outer, place_stages(outer), GEMM.output)] == ["o0"]


def test_loop_nests_with_threads() -> None:
    assert print_nest(apply(GEMM, [["LOCAL", "o0", 8], ["GROUP", "r0", 4], ["UPCAST", "o1", 4]])).splitlines() == [
        "phase 0: out → p0, in groups of 32 threads",
        "  grid o0 in 0…24 by 8",
        "    grid o1 in 0…48 by 4",
        "      threads o0 8 × r0 4",
        "      tile o1 4 (vector)",
        "      acc = 0",
        "      reduce r0 in 0…30 by 4",
        "        acc += p1[30·o0 + r0] · p2[48·r0 + o1]",
        "      p0[48·o0 + o1] = max(acc, -1)",
    ]
    rows = print_nest(apply(SOFTMAX, [["LOCAL", "o0", 2], ["GROUPTOP", "s3.r0", 4]]))
    assert "    stage s3 in a register:" in rows, "each thread has its own row"


def test_loops_that_threads_share_cover_whole_tiles() -> None:
    state = apply(PRIME, [["LOCAL", "o0", 8], ["UPCAST", "o0", 2]])
    assert covered_extent(state, PRIME.axis_by_name["o0"].index) == 32
