"""Memory layouts of staged values: every element has an offset, readers of complete tiles get tiled layouts, and the cost analysis knows
them."""
from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from svod.core.cost.caches import caches_of, traffic
from svod.core.cost.cpu import cost_of
from svod.core.cost.work import Access, AccessKind, Tile
from svod.core.graph import graph
from svod.core.graph.storage import base_of
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.group_memory import banks
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.layout import SET_STRIDE, Layout, Swizzle, lay_out, layouts, left_out
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.levels import CACHE_LINE_BYTES, MemorySpace
from svod.core.schedule.schedule import create_schedule
from svod.tensor import Tensor
from tests.compile.native import AVX512
from tests.hand_kernels import gemm

SERVER = replace(AVX512, l1=48 << 10, l2=2 << 20, l3=480 << 20, threads=2)


def staged(m: int, n: int, depth: int, rows: int, columns: int) -> tuple[Layout, Layout]:
    """Return the state of a product with both operands staged at the root, computed in tiles of rows and columns."""
    state = Scheduler(Kernel(gemm(m, n, depth)), SERVER)
    for opt in (Opt("UPCAST", "o0", rows), Opt("UPCAST", "o1", columns), Opt("STAGE", "s0", "root"), Opt("STAGE", "s1", "root")):
        state = apply_opt(state, opt) if opt.arg != 1 else state
    found = layouts(state)
    return lay_out(state, found, 0, (m, depth)), lay_out(state, found, 1, (depth, n))


def places(layout: Layout) -> list[list[int]]:
    """Map each element to its offsets: two offsets if the last tile, which is moved back, contains it again."""
    out = []
    for position in itertools.product(*map(range, layout.extents)):
        at = sum(p * s for i, (p, s) in enumerate(zip(position, layout.strides, strict=True)) if i != layout.tiled)
        if layout.tiled >= 0:
            extent, tile, p = layout.extents[layout.tiled], layout.tile, position[layout.tiled]
            firsts = [min(first, extent - tile) for first in range(0, extent, tile)]
            inside = [(number, p - first) for number, first in enumerate(firsts) if 0 <= p - first < tile]
            out.append([at + number * layout.outer + k * layout.strides[layout.tiled] for number, k in inside])
        else:
            out.append([at])
    return out


def test_every_element_has_a_place() -> None:
    rng = random.Random(11)
    for _ in range(40):
        m, n, depth = (rng.choice((1, 2, 7, 16, 31, 48, 64)) for _ in range(3))
        for layout in staged(m, n, depth, rng.randint(1, m), rng.randint(1, n)):
            found = [at for element in places(layout) for at in element]
            assert len(set(found)) == len(found) and min(found) == 0 and max(found) < layout.size, (m, n, depth, layout)
            assert len(found) == np.prod(layout.extents) or layout.overlaps


def test_whole_tiles_are_tiles() -> None:
    _, b = staged(64, 96, 40, 6, 32)
    assert (b.tiled, b.tile, b.outer, b.strides) == (1, 32, 32 * 40, (32, 1)), "96 columns are three tiles of 32"
    _, b = staged(64, 96, 40, 6, 40)
    assert (b.tiled, b.tile, b.strides, b.size) == (1, 40, (40, 1), 3 * 40 * 40), "columns 0, 40 and 56: 24 of them lie twice"
    apart = SET_STRIDE // 4
    a, _ = staged(64, 96, apart, 6, 32)
    assert a.strides == (apart + CACHE_LINE_BYTES // 4, 1), "rows that share sets get a line more"


def test_tiles_are_counted_as_they_lie() -> None:
    """A panel of 512 KB that is read eight times stays in L2 if it is stored in tiles, as a plain array does. As a part of rows of 2 KB its
    lines would share cache sets."""
    n, depth, tile = 512, 4096, 32
    loops, body = [(0, n // tile), (2, 8), (1, depth)], [float(tile), 1.0, 1.0]
    limit = 4 * n * depth
    def scratch(coefs: tuple[tuple[int, int], ...], tiles: Tile | None = None) -> Access:
        return Access(AccessKind.READ, MemorySpace.SCRATCH, 0, coefs, 4, 1, 1.0, 0, limit, is_made_inside=True, tile=tiles)

    rows = scratch(((0, 4), (1, 4 * n)))
    tiles = scratch(((0, 4), (1, 4 * tile)), Tile(0, tile, 4 * tile * depth))
    plain = scratch(((0, 4 * tile * depth), (1, 4)))
    by_rows, by_tiles = (sum(traffic(caches_of(SERVER), loops, 0, body, [a], [False]).cycles) for a in (rows, tiles))
    array = sum(traffic(caches_of(SERVER), [*loops[:2], (1, depth * tile)], 0, [1.0, 1.0, 1.0], [plain], [False]).cycles)
    assert by_tiles == pytest.approx(array, rel=0.01) and by_rows > 2 * by_tiles


@pytest.mark.parametrize("channels", [128, 512])
def test_packed_weights_are_read_in_whole_tiles(channels: int) -> None:
    """Of two tiles with the same number of registers the heuristic takes the one that divides the channels, because the other one reads
    rows that are far apart in memory."""
    x, w = Tensor(np.zeros((1, 64, 7, 7), np.float32)), Tensor(np.zeros((channels, 64, 3, 3), np.float32)).realize()
    sink = graph.sink(x.realize().conv2d(w, padding=1).uop)
    kernel = Kernel(create_schedule(sink, frozenset({base_of(w.uop)})).calls[0].ast)
    common = [Opt("LANES", "o0.in"), Opt("STAGE", "s0", "root"), Opt("STAGE", "s1", "root"), Opt("UNROLL", "r2", 0)]
    whole, cut = (cost_of(apply_opts(Scheduler(kernel, SERVER), [Opt("UPCAST", "o2", 7), Opt("UPCAST", "o0", n), *common])).cycles
                  for n in (32, 48))
    assert whole < cut


@pytest.mark.parametrize("lines", [2, 4, 8])
@pytest.mark.parametrize("itemsize", [1, 2])
def test_swizzled_rows_lie_in_all_banks(lines: int, itemsize: int) -> None:
    """Eight lines that are accessed at once are in different banks, both consecutive lines and the same line of eight rows."""
    line = 16 // itemsize
    row, swizzle = lines * line, Swizzle(line, lines)
    layout = Layout((24, 3 * row), (row, 1), (0, 1), 1, row, 24 * row, 72 * row, swizzle=swizzle)
    found = [layout.place((r, c)) for r in range(24) for c in range(3 * row)]
    assert sorted(found) == list(range(72 * row)), "every element has a place of its own"
    assert all(layout.place((r, c)) == layout.place((r, c - c % line)) + c % line for r in range(24) for c in range(3 * row))

    def turns(swizzle: Swizzle | None, positions: list[tuple[int, int]]) -> float:
        there = layout._replace(swizzle=swizzle)
        return banks.conflicts(banks.SharedAccess(tuple([there.place(p) for p in positions]), line, 1.0), itemsize)
    for first in range(0, 24, 8):
        for c in range(0, 3 * row, line):
            column = [(first + k, c) for k in range(8)]
            assert turns(swizzle, column) == 1 and turns(None, column) == lines
        for at in range(0, 8 * lines, 8):
            assert turns(swizzle, [(first + k // lines, k % lines * line) for k in range(at, at + 8)]) == 1


@pytest.mark.parametrize("parts", [2, 4, 8, 16, 24])
def test_lines_are_left_out_so_that_copies_meet_in_no_bank(parts: int) -> None:
    """Threads copy the parts of a row, then those of the next row; the padding puts any eight lines copied at once in different banks."""
    for rows in range(1, 70):
        apart = rows + left_out(rows, parts)
        assert rows <= apart < rows + 8
        for first in range(0, parts * rows - parts * rows % 8, 8):
            lines = [(first + k) % parts * apart + (first + k) // parts for k in range(8)]
            assert len({line % 8 for line in lines}) == 8, (rows, parts)
