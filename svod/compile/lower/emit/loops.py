"""Loops over the axes of an open stage: whole iterations, iterations that variables end, and rows with aligned vectors."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svod.compile.lower.emit.axes import Axes
from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.state import OpenStage
from svod.compile.lower.emit.values import Values
from svod.core.ir.dtype import dtypes
from svod.core.kernel.layout import is_exact
from svod.core.kernel.placement import EmittedLoop
from svod.core.kernel.required import sum_lins


class LoopEmitter:
    """Opens loops around a body."""

    def __init__(self, ctx: PhaseContext, axes: Axes, values: Values):
        self.b = ctx.b
        self.axes, self.values = axes, values

    def between(self, stage: OpenStage, a: int, stride: int, start: int, stop: int, body: Callable[[], Any], last: int = -1) -> None:
        """A loop over an output or reduce axis from `start` to `stop`; positions beyond `last` are moved back to it."""
        b = self.b
        loop, _ = b.open(start, stop, stride)
        stage.open_row(a, ({loop if last < 0 else b.alu("MIN", dtypes.index, 1, loop, last): 1}, 0))
        body()
        stage.close_row(a)
        b.close(loop)
        stage.memo.clear()

    def single(self, stage: OpenStage, a: int, body: Callable[[], Any]) -> None:
        """A loop of one iteration."""
        stage.open_row(a, ({}, 0))
        body()
        stage.close_row(a)

    def output(self, stage: OpenStage, a: int, piece: EmittedLoop, body: Callable[[], Any]) -> None:
        """One output loop around `body`."""
        b = self.b
        if piece.extent == 1:
            self.single(stage, a, body)
            return
        if self.axes.bound(stage, a) is not None:
            self.to_limit(stage, a, piece, body)
            return
        self.between(stage, a, piece.stride, b.index(0), self._stop(stage, a, piece), body)

    def _stop(self, stage: OpenStage, a: int, piece: EmittedLoop) -> int:
        """Where an output loop ends. Of an axis that its amounts do not divide, an inner loop has no iterations wholly beyond the end."""
        b, stop = self.b, self.b.index(piece.extent * piece.stride)
        terms, const = sum_lins(stage.opened[a])
        if not terms or is_exact(stage.pieces[a], stage.bounds[a]):
            return stop
        left = b.alu("SUB", dtypes.index, 1, b.index(stage.bounds[a] - const), self.axes.ssa((terms, 0)))
        return b.alu("MIN", dtypes.index, 1, stop, left)

    def to_limit(self, stage: OpenStage, a: int, piece: EmittedLoop, body: Callable[[], Any]) -> None:
        """One output loop of an axis whose extent depends on variables."""
        b = self.b
        room = self.axes.room(stage, a)
        stop = b.alu("MIN", dtypes.index, 1, b.index(piece.extent * piece.stride), room)
        reach = stage.reach(a)
        if a in stage.safe or not stage.is_last(a):
            self.between(stage, a, piece.stride, b.index(0), stop, body)
            return
        last = -1
        if self.axes.moves_back(stage, a):
            last = b.alu("SUB", dtypes.index, 1, room, b.index(reach))
            middle = b.alu("WHERE", dtypes.index, 1, b.alu("CMPLE", dtypes.bool, 1, b.index(reach), room), stop, b.index(0))
        else:
            middle = self.axes.whole_end(room, reach, piece.stride, stop) if reach > 1 else stop
        stage.safe.add(a)
        self.between(stage, a, piece.stride, b.index(0), middle, body, last)
        stage.safe.discard(a)
        if reach > 1:
            parts = self.axes.tail_parts(stage, a, b.alu("SUB", dtypes.index, 1, stop, middle))
            for step, condition in parts:
                with stage.narrowed(a, step):
                    end = stop if condition < 0 else b.alu("WHERE", dtypes.index, 1, condition, stop, middle)
                    self.between(stage, a, step, middle, end, body)
            if not parts:
                self.between(stage, a, piece.stride, middle, stop, body)

    def aligned_row(self, stage: OpenStage, a: int, piece: EmittedLoop, body: Callable[[], Any]) -> None:
        """The loop over an aligned row of the output (`aligns_rows`): one vector up to the first multiple of its size, tiles, and
        vectors for the rest, the last of them moved back.

            for j in 0, 64 … n: y[i, j:j+64]   →   s = -(i*n) % 16;  if s: y[i, 0:16];  for j in s, s+64 … n-64: y[i, j:j+64];
                                                   for j in j, j+16 … n: y[i, j:j+16]
        """
        b, store, extent, tile, width = self.b, stage.r.store, stage.bounds[a], piece.stride, stage.width
        assert store is not None
        stage.set_position({}, stage.chunk)
        start, const, _, _ = self.values.address(stage, store)
        past = b.alu("SUB", dtypes.index, 1, b.index(-const % width), start)
        first = b.alu("MOD", dtypes.index, 1, past, b.index(width))
        tiles = b.alu("IDIV", dtypes.index, 1, b.alu("SUB", dtypes.index, 1, b.index(extent), first), b.index(tile))
        rest = b.add(first, b.mul(tiles, tile))

        with stage.narrowed(a, width):
            self.between(stage, a, width, b.index(0), first, body)
        stage.aligned = True
        self.between(stage, a, tile, first, rest, body)
        stage.aligned = False
        with stage.narrowed(a, width):
            self.between(stage, a, width, rest, b.index(extent), body)

    def counted(self, stage: OpenStage, a: int, piece: EmittedLoop, iteration: dict[int, int], number: int,
                body: Callable[[], Any]) -> None:
        """An output loop that counts its iterations by one, for accumulators in scratch."""
        b = self.b
        if piece.extent == 1:
            self.single(stage, a, body)
            return
        inside = False
        if self.axes.bound(stage, a) is not None:
            stop = self.axes.count(stage, a, piece)
            inside = a not in stage.safe and stage.is_last(a) and stage.reach(a) == 1
        else:
            stop = b.alu("IDIV", dtypes.index, 1, b.add(self._stop(stage, a, piece), b.index(piece.stride - 1)), b.index(piece.stride))
        if inside:
            stage.safe.add(a)
        loop, _ = b.open(b.index(0), stop, 1)
        iteration[number] = loop
        stage.open_row(a, ({b.mul(loop, piece.stride): 1}, 0))
        body()
        stage.close_row(a)
        if inside:
            stage.safe.discard(a)
        del iteration[number]
        b.close(loop)
        stage.memo.clear()
