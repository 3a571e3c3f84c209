"""Addresses of elements: (pointer, index at its loop level, constant).

    y[o0] = x[2*o0 + 3] at o0 = i + 16   →   LOAD x, MUL(i, 2) [35]
"""
from __future__ import annotations

from typing import NamedTuple

from svod.compile.lower.emit.axes import Axes
from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.state import OpenStage, Staged
from svod.core.ir.dtype import dtypes
from svod.core.kernel.kernel import LinearIndex
from svod.core.kernel.layout import Layout, Swizzle
from svod.core.kernel.required import Lin, add_lins

Base = tuple[int, int]          # (an index value, a constant to add to it)


class Address(NamedTuple):
    """The elements of an access at the current position. Lane i accesses element start + const + lane·i, or start + const + vector[i]."""

    start: int                      # an index value
    const: int
    lane: int                       # elements from one lane to the next; 0: all lanes read the same
    vector: int                     # a vector of indices, one per lane; -1: none


class Addresses:
    """Builds addresses of elements of arguments and of staged values, over the axes of an open stage."""

    def __init__(self, ctx: PhaseContext, axes: Axes):
        self.b = ctx.b
        self.axes = axes

    def relative(self, stage: OpenStage, staged: Staged, dims: tuple[LinearIndex, ...]) -> tuple[LinearIndex, Base]:
        """Return the element number that a read of a staged value addresses: an index over the stage's axes, and the base that it has
        inside the loops opened so far. `dims`: the coordinates read."""
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
            if i == layout.tiled and any(a in stage.frame.narrow for a, _ in lin.coefs):
                start = add_lins(start, self.in_tiles(layout, here), 1)
            elif i == layout.tiled and layout.overlaps:
                start = add_lins(start, self.tile_at(layout, here), 1)
            elif i == layout.tiled:
                # Coefficients are multiples of the tile, and all expanded positions lie inside one tile.
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
        """Compute the address of position `at` of the tiled dim, at any offset inside a tile."""
        b = self.b
        value, tile = self.axes.ssa(at), b.index(layout.tile)
        whole, rest = (b.alu(op, dtypes.index, 1, value, tile) for op in ("IDIV", "MOD"))
        return {whole: layout.outer, rest: layout.strides[layout.tiled]}, 0

    def tile_at(self, layout: Layout, first: Lin) -> Lin:
        """Compute the address of the tile that starts at position `first`. The last tile is moved back so that it ends with the dim;
        therefore the quotient `first` / tile is rounded up."""
        b, tile = self.b, layout.tile
        number = b.alu("IDIV", dtypes.index, 1, b.add(self.axes.ssa(first), b.index(tile - 1)), b.index(tile))
        return {number: layout.outer}, 0

    def base_of(self, stage: OpenStage, linear: LinearIndex) -> Base:
        """Compute the base of a flat index inside the loops opened so far."""
        start = stage.linear.get(linear)
        if start is None:
            lin: Lin = ({}, 0)
            for a, c in linear.coefs:
                lin = add_lins(lin, self.axes.start(stage, a), c)
            start = stage.linear[linear] = self.axes.apart(lin)
        base: Base = start
        return base

    def along(self, stage: OpenStage, staged: Staged, dim: int, lin: LinearIndex) -> Base:
        """Compute the offset that the coordinate `lin` along dim `dim` adds to the address of a staged value, before the layout's
        swizzle."""
        layout = staged.layout
        assert layout is not None and not lin.atoms
        here: Lin = ({}, lin.const)
        for a, c in lin.coefs:
            here = add_lins(add_lins(here, self.axes.start(stage, a), c), ({}, c * stage.offsets[a]), 1)
        terms, const = here = add_lins(here, staged.base[dim], -1)
        tile, outer, stride = layout.tile, layout.outer, layout.strides[dim]
        if dim != layout.tiled:
            here = {v: c * stride for v, c in terms.items()}, const * stride
        elif any(self.b.multiple_of(v) * c % tile for v, c in terms.items()):
            here = self.in_tiles(layout, here)
        else:
            here = {v: c * outer // tile for v, c in terms.items()}, const // tile * outer + const % tile * stride
        return self.axes.apart(here)

    def swizzled(self, layout: Layout, start: int, const: int, lane: int, width: int) -> Address:
        """Apply a layout's swizzle to an address; without one, return the address unchanged."""
        b, swizzle = self.b, layout.swizzle
        if swizzle is None:
            return Address(start, const, lane, -1)
        rest = const % swizzle.period
        whole = const - rest
        if lane not in (0, 1) and width > 1:
            lanes = b.vconst(dtypes.index, tuple(rest + i * lane for i in range(width)))
            return Address(b.index(0), whole, 0, self._swizzled(swizzle, b.alu("ADD", dtypes.index, width, start, lanes), width))
        if b.multiple_of(start) % swizzle.period == 0:
            return Address(start, whole + swizzle.place(rest), lane, -1)
        return Address(self._swizzled(swizzle, b.add(start, b.index(rest)), 1), whole, lane, -1)

    def _swizzled(self, swizzle: Swizzle, element: int, width: int) -> int:
        b, row = self.b, element
        for op, n in (("IDIV", swizzle.together), ("MOD", swizzle.lines), ("MUL", swizzle.line)):
            row = b.alu(op, dtypes.index, width, row, b.const(dtypes.index, width, n))
        return b.alu("XOR", dtypes.index, width, element, row)

    def in_layout(self, stage: OpenStage, pointer: int, layout: Layout, base: list[Lin]) -> Address:
        """Compute the address at which the stage stores its value for the current position. `base`: the start of each dim of the memory."""
        place = stage.linear.get(("store", pointer))
        if place is None:
            lin: Lin = ({}, 0)
            in_tile = lane = 0
            for i, stride in enumerate(layout.strides):
                terms, c = add_lins(self.axes.start(stage, i), base[i], -1)
                if i == layout.tiled and i in stage.frame.narrow:
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
                if i == stage.frame.vector_axis:
                    lane = stride * stage.frame.vector_stride
            place = stage.linear["store", pointer] = (*self.axes.apart(lin), in_tile, lane)
        start, const, in_tile, lane = place
        for i, stride in enumerate(layout.strides):
            if i == layout.tiled:
                position = in_tile + stage.offsets[i]
                const += position // layout.tile * layout.outer + position % layout.tile
            else:
                const += stride * stage.offsets[i]
        return self.swizzled(layout, start, const, lane, stage.chunk.width)
