"""How groups copy into shared memory: the order of the threads, vectors, and rows apart so that banks do not conflict."""
from __future__ import annotations

from dataclasses import replace

import pytest

from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.layout import Layout
from svod.core.kernel.loop_nest import StageNest, loop_nest
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.kernel.shared.banks import Access, conflicts, with_row_pad
from svod.core.machine.levels import MemorySpace
from tests.hand_kernels import gemm
from tests.toy_backend.target import TOY

GPU = replace(TOY, group_threads=1024, shared_bytes=48 << 10, subgroup=32)
TILED = [["UPCAST", "o0", 4], ["UPCAST", "o1", 4], ["LOCAL", "o0", 16], ["LOCAL", "o1", 16], ["TILE", "r0", 16], ["STAGE", "s0", "r0"],
         ["STAGE", "s1", "r0"]]


def stages(m: int, n: int, k: int) -> tuple[StageNest, StageNest]:
    state = apply_opts(Scheduler(Kernel(gemm(m, n, k)), GPU), [Opt.from_json(o) for o in TILED])
    nest = loop_nest(state)
    return nest.stages[0], nest.stages[1]


def test_the_tiled_product() -> None:
    a, b = stages(128, 256, 64)
    assert a.space is b.space is MemorySpace.SHARED
    assert a.region == (64, 16) and b.region == (16, 64)
    assert a.copy == ((0, 1), 1, 4) and b.copy == ((0, 1), 1, 4), "both are read along their rows, four at a time"
    assert a.layout is not None and b.layout is not None
    assert a.layout.order == (1, 0), "the left operand lies with the rows of the tile side by side"
    assert a.layout.row_pad > 0, "its columns are stored 64 apart: without padding all threads of a column meet in one bank"
    assert b.layout.row_pad == 0


@pytest.mark.parametrize(("n", "k", "widths"), [
    (256, 64, (4, 4)), (254, 64, (4, 2)), (253, 64, (4, 1)), (256, 62, (2, 4)), (256, 61, (1, 4))])
def test_vectors_are_as_wide_as_rows_are_aligned(n: int, k: int, widths: tuple[int, int]) -> None:
    found = stages(128, n, k)
    assert tuple(s.copy.width for s in found if s.copy is not None) == widths


@pytest.mark.parametrize(("elements", "width", "times"), [
    (range(32), 1, 1), ([0] * 32, 1, 1), (range(0, 64, 2), 1, 2), (range(0, 32 * 32, 32), 1, 32), (range(0, 32 * 33, 33), 1, 1),
    (range(0, 128, 4), 4, 4), (range(0, 32 * 64, 64), 4, 32), (range(0, 64, 2), 2, 2)])
def test_conflicts(elements: range | list[int], width: int, times: int) -> None:
    """Threads that each take 16 bytes are served eight at a time."""
    assert conflicts(Access(tuple(elements), width, 1.0), 4) == times


def test_padded_rows_keep_their_order() -> None:
    padded = with_row_pad(Layout((3, 8, 16), (128, 16, 1), (0, 1, 2), -1, 1, 0, 384), 4)
    assert padded.strides == (160, 20, 1) and padded.size == 480 and padded.row_pad == 4
