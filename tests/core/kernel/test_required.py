"""Required regions: the part of a stage that one iteration of the loops around it needs, compared with the positions that its readers
access."""
from __future__ import annotations

import pytest

from svod.core.cost.runs import LoopRuns, stage_runs
from svod.core.ir.uop import UOp
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import StageNest, loop_nest
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.tree.passes import loop_tree
from tests.compile.native import AVX512
from tests.hand_kernels import differences, mirrored_gemm, symmetric_part


def staged(ast: UOp, name: str, *opts: Opt) -> tuple[StageNest, tuple[LoopRuns, ...]]:
    """The nest of a stage, and the loops around it."""
    state = apply_opts(Scheduler(Kernel(ast), AVX512), opts)
    found = stage_runs(state.kernel, loop_nest(state).stages, loop_tree(state))[state.stage_id(name)]
    return found.nest, found.around


@pytest.mark.parametrize(("tile", "apart"), [(1, 1), (4, 3), (5, 7), (8, 2)])
def test_reads_at_two_offsets_are_one_region(tile: int, apart: int) -> None:
    rows = 60
    chain = (Opt("TILE", "o0", tile), Opt("STAGE", "s0", "o0")) if tile > 1 else (Opt("STAGE", "s0", "o0"),)
    nest, (around,) = staged(differences(rows + apart, 11, apart), "s0", *chain)
    touched = {o + shift for o in range(tile) for shift in (0, apart)}      # in the first iteration
    assert nest.region == (max(touched) - min(touched) + 1,)
    (start, const), = nest.starts
    assert start == {around.row: tile} and const == min(touched)
    assert around.axis == 0 and around.times == -(-rows // tile)


def test_reads_from_both_ends_need_the_whole_stage() -> None:
    nest, around = staged(symmetric_part(24, 13), "s0", Opt("TILE", "o0", 4), Opt("STAGE", "s0", "o0"))
    assert nest.region == (24,)
    assert nest.starts == (({}, 0),)
    assert [(loop.axis, loop.times) for loop in around] == [(-1, 6)]


def test_a_read_backwards_starts_at_its_last_position() -> None:
    nest, (around,) = staged(mirrored_gemm(12, 18, 7), "s0", Opt("TILE", "o0", 4), Opt("STAGE", "s0", "o0"))
    (start, const), summed = nest.starts
    assert nest.region == (4, 7)
    assert start == {around.row: -4} and const == 12 - 1 - (4 - 1)
    assert summed == ({}, 0)


def test_a_stage_under_two_loops_moves_with_both() -> None:
    """The reader of s0 is itself staged inside a loop: its region moves with that loop."""
    nest, around = staged(differences(63, 11, 3), "s0", Opt("TILE", "o0", 20), Opt("TILE", "o0.in", 5), Opt("STAGE", "s0", "o0.in"))
    (start, _), = nest.starts
    assert [start.get(loop.row) for loop in around] == [20, 5]
    assert nest.region == (5 + 3,)
