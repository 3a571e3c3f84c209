"""Required regions: the part of a stage that one iteration of the loops around it needs, compared with the positions that its readers
access."""
from __future__ import annotations

import pytest

from svod.core.ir.uop import UOp
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import StageNest, loop_nest
from svod.core.kernel.scheduler import Opt, Scheduler
from tests.compile.native import AVX512
from tests.hand_kernels import differences, mirrored_gemm, symmetric_part


def staged(ast: UOp, name: str, *opts: Opt) -> StageNest:
    kernel = Kernel(ast)
    nest = loop_nest(apply_opts(Scheduler(kernel, AVX512), opts))
    return nest.stages[next(s.index for s in kernel.stages if s.name == name)]


@pytest.mark.parametrize(("tile", "apart"), [(1, 1), (4, 3), (5, 7), (8, 2)])
def test_reads_at_two_offsets_are_one_region(tile: int, apart: int) -> None:
    rows = 60
    chain = (Opt("TILE", "o0", tile), Opt("STAGE", "s0", "o0")) if tile > 1 else (Opt("STAGE", "s0", "o0"),)
    nest = staged(differences(rows + apart, 11, apart), "s0", *chain)
    touched = {o + shift for o in range(tile) for shift in (0, apart)}      # in the first iteration
    assert nest.region == (max(touched) - min(touched) + 1,)
    (start, const), = nest.starts
    around, = nest.around
    assert start == {around.row: tile} and const == min(touched)
    assert around.moves == 0 and around.iterations == -(-rows // tile)


def test_reads_from_both_ends_need_the_whole_stage() -> None:
    nest = staged(symmetric_part(24, 13), "s0", Opt("TILE", "o0", 4), Opt("STAGE", "s0", "o0"))
    assert nest.region == (24,)
    assert nest.starts == (({}, 0),)
    assert [(loop.moves, loop.iterations) for loop in nest.around] == [(-1, 6)]


def test_a_read_backwards_starts_at_its_last_position() -> None:
    nest = staged(mirrored_gemm(12, 18, 7), "s0", Opt("TILE", "o0", 4), Opt("STAGE", "s0", "o0"))
    (start, const), summed = nest.starts
    assert nest.region == (4, 7)
    assert start == {nest.around[0].row: -4} and const == 12 - 1 - (4 - 1)
    assert summed == ({}, 0)


def test_a_stage_under_two_loops_moves_with_both() -> None:
    """The reader of s0 is itself staged inside a loop: its region moves with that loop."""
    nest = staged(differences(63, 11, 3), "s0", Opt("TILE", "o0", 20), Opt("TILE", "o0.in", 5), Opt("STAGE", "s0", "o0.in"))
    (start, _), = nest.starts
    assert [start.get(loop.row) for loop in nest.around] == [20, 5]
    assert nest.region == (5 + 3,)
