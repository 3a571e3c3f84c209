"""Addresses of elements: (pointer, index at its loop level, constant).

    y[o0] = x[2*o0 + 3] at o0 = i + 16   →   LOAD x, MUL(i, 2) [35]
"""
from __future__ import annotations

from svod.compile.lower.emit.axes import Axes
from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.state import OpenStage, Staged
from svod.core.ir.dtype import dtypes
from svod.core.kernel.kernel import LinearIndex
from svod.core.kernel.layout import Layout
from svod.core.kernel.required import Lin, add_lins

Base = tuple[int, int]          # an index value and a constant to add to it


class Addresses:
    """Elements of arguments and of staged values, over the axes of an open stage."""

    def __init__(self, ctx: PhaseContext, axes: Axes):
        self.b = ctx.b
        self.axes = axes

    def relative(self, stage: OpenStage, staged: Staged, dims: tuple[LinearIndex, ...]) -> tuple[LinearIndex, Base]:
        """The element number of coordinates in a staged value, over local axes, and where the first position stands."""
        layout = staged.layout
        assert layout is not None
        coefs: dict[int, int] = {}
        atoms: dict[int, int] = {}
        start: Lin = ({}, 0)
        for i, lin in enumerate(dims):
            stride = layout.strides[i]
            here: Lin = ({}, lin.const)
            for a, c in lin.coefs:
                here = add_lins(here, self.axes.start(stage, a), c)
                coefs[a] = coefs.get(a, 0) + c * stride
            here = add_lins(here, staged.base[i], -1)
            if i == layout.tiled and any(a in stage.narrow for a, _ in lin.coefs):
                start = add_lins(start, self.in_tiles(layout, here), 1)
            elif i == layout.tiled and layout.overlaps:
                start = add_lins(start, self.tile_at(layout, here), 1)
            elif i == layout.tiled:
                # whole tiles: every coefficient is a multiple of the tile, expanded positions lie inside one
                terms, const = here
                start = add_lins(start, ({v: c * layout.outer // layout.tile for v, c in terms.items()},
                                         const // layout.tile * layout.outer + const % layout.tile * stride), 1)
            else:
                start = add_lins(start, here, stride)
            for n, c in lin.atoms:
                atoms[n] = atoms.get(n, 0) + c * stride
        if staged.buffer >= 0:
            start = add_lins(start, ({staged.buffer: 1}, 0), 1)
        linear = LinearIndex(tuple(sorted((a, c) for a, c in coefs.items() if c)), 0, tuple(sorted((n, c) for n, c in atoms.items() if c)))
        return linear, self.axes.apart(start)

    def in_tiles(self, layout: Layout, at: Lin) -> Lin:
        """The address of a position of the tiled dim that need not be the first of a tile."""
        b = self.b
        value, tile = self.axes.ssa(at), b.index(layout.tile)
        whole, rest = (b.alu(op, dtypes.index, 1, value, tile) for op in ("IDIV", "MOD"))
        return {whole: layout.outer, rest: layout.strides[layout.tiled]}, 0

    def tile_at(self, layout: Layout, first: Lin) -> Lin:
        """The address of the tile whose first position is given. The last tile is moved back; its number is that of the next multiple."""
        b, tile = self.b, layout.tile
        number = b.alu("IDIV", dtypes.index, 1, b.add(self.axes.ssa(first), b.index(tile - 1)), b.index(tile))
        return {number: layout.outer}, 0

    def base_of(self, stage: OpenStage, linear: LinearIndex) -> Base:
        """The address of a flat index under the loops opened so far."""
        start = stage.linear.get(linear)
        if start is None:
            lin: Lin = ({}, 0)
            for a, c in linear.coefs:
                lin = add_lins(lin, self.axes.start(stage, a), c)
            start = stage.linear[linear] = self.axes.apart(lin)
        base: Base = start
        return base

    def in_layout(self, stage: OpenStage, pointer: int, layout: Layout, base: list[Lin]) -> tuple[int, int, int]:
        """(index value, constant, elements between lanes) of the current position in the stage's own area."""
        place = stage.linear.get(("store", pointer))
        if place is None:
            lin: Lin = ({}, 0)
            in_tile = lane = 0
            for i, stride in enumerate(layout.strides):
                terms, c = add_lins(self.axes.start(stage, i), base[i], -1)
                if i == layout.tiled and i in stage.narrow:
                    lin = add_lins(lin, self.in_tiles(layout, (terms, c)), 1)
                elif i == layout.tiled and layout.overlaps:
                    lin = add_lins(lin, self.tile_at(layout, (terms, c)), 1)
                elif i == layout.tiled and any(self.b.multiple_of(v) * k % layout.tile for v, k in terms.items()):
                    lin = add_lins(lin, self.in_tiles(layout, (terms, c)), 1)
                elif i == layout.tiled:
                    lin = add_lins(lin, ({v: k * layout.outer // layout.tile for v, k in terms.items()}, 0), 1)
                    in_tile = c
                else:
                    lin = add_lins(lin, (terms, c), stride)
                if i == stage.vector_axis:
                    lane = stride * stage.vector_stride
            place = stage.linear["store", pointer] = (*self.axes.apart(lin), in_tile, lane)
        start, const, in_tile, lane = place
        for i, stride in enumerate(layout.strides):
            if i == layout.tiled:
                position = in_tile + stage.offsets[i]
                const += position // layout.tile * layout.outer + position % layout.tile
            else:
                const += stride * stage.offsets[i]
        return start, const, lane
