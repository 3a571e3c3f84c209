"""Emits output loops of an open stage: with constant extents, with extents that depend on variables, and over rows with aligned vectors."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svod.compile.lower.emit.axes import Axes
from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.state import OpenStage
from svod.compile.lower.emit.values import Values
from svod.core.ir.dtype import dtypes
from svod.core.kernel.required import sum_lins
from svod.core.tree.nodes import Body, Ends, Loop, Span

Inside = Callable[[Body], Any]          # emits a body inside the open loops


class LoopEmitter:
    """Emits output loops around their bodies."""

    def __init__(self, ctx: PhaseContext, axes: Axes, values: Values):
        self.b = ctx.b
        self.axes, self.values = axes, values

    def output(self, stage: OpenStage, node: Loop, inside: Inside) -> None:
        """Emit an output loop and its tails."""
        b, a, piece = self.b, node.axis, node.loop.piece
        if node.span is Span.ALIGNED:
            self._aligned_row(stage, node, inside)
        elif node.span is Span.ONCE:
            self._single(stage, a, lambda: inside(node.body))
        elif node.span is Span.ALL:
            self._between(stage, a, piece.stride, b.index(0), self._stop(stage, node), lambda: inside(node.body))
        else:
            self._to_limit(stage, node, inside)

    def _between(self, stage: OpenStage, a: int, stride: int, start: int, stop: int, body: Callable[[], Any], last: int = -1) -> None:
        """Emit a loop over an axis from `start` to `stop`. `last`: index value of the largest start; iterations that would start later
        are moved back to it. -1: none are moved."""
        b = self.b
        loop, _ = b.open(start, stop, stride)
        stage.open_row(a, ({loop if last < 0 else b.alu("MIN", dtypes.index, 1, loop, last): 1}, 0))
        body()
        stage.close_row(a)
        b.close(loop)
        stage.memo.clear()

    def _single(self, stage: OpenStage, a: int, body: Callable[[], Any]) -> None:
        """Emit the body of a loop that has one iteration."""
        stage.open_row(a, ({}, 0))
        body()
        stage.close_row(a)

    def _stop(self, stage: OpenStage, node: Loop) -> int:
        """Emit the end of an output loop. If the splits of an axis do not divide it, its inner loop ends before iterations that are
        entirely beyond the extent."""
        b, a, piece = self.b, node.axis, node.loop.piece
        stop = b.index(piece.extent * piece.stride)
        terms, const = sum_lins(stage.opened[a])
        if not terms or stage.frame.ends(a) is Ends.EXACT:
            return stop
        left = b.alu("SUB", dtypes.index, 1, b.index(stage.frame.bounds[a] - const), self.axes.ssa((terms, 0)))
        return b.alu("MIN", dtypes.index, 1, stop, left)

    def _to_limit(self, stage: OpenStage, node: Loop, inside: Inside) -> None:
        """Emit an output loop over an axis whose extent depends on variables."""
        b, a, piece, reach = self.b, node.axis, node.loop.piece, node.frame.reach(node.axis)
        room = self.axes.room(stage, a)
        stop = b.alu("MIN", dtypes.index, 1, b.index(piece.extent * piece.stride), room)
        if node.span is Span.TO_LIMIT:
            self._between(stage, a, piece.stride, b.index(0), stop, lambda: inside(node.body))
            return
        last, middle = -1, stop
        if node.is_moved_back:
            last = b.alu("SUB", dtypes.index, 1, room, b.index(reach))
            middle = b.alu("WHERE", dtypes.index, 1, b.alu("CMPLE", dtypes.bool, 1, b.index(reach), room), stop, b.index(0))
        elif reach > 1:
            middle = self.axes.whole_end(room, reach, piece.stride, stop)
        self._between(stage, a, piece.stride, b.index(0), middle, lambda: inside(node.body), last)
        if node.tails:
            rest = b.alu("SUB", dtypes.index, 1, stop, middle)
            conditions = [self.axes.for_tail(tail.when, rest) for tail in node.tails]
            for tail, condition in zip(node.tails, conditions, strict=True):
                end = stop if condition < 0 else b.alu("WHERE", dtypes.index, 1, condition, stop, middle)
                step = tail.step if tail.step < reach else piece.stride
                self._between(stage, a, step, middle, end, lambda body=tail.body: inside(body))     # type: ignore[misc]

    def _aligned_row(self, stage: OpenStage, node: Loop, inside: Inside) -> None:
        """Emit the loop over an aligned row of the output (`aligns_rows`): one vector up to the first aligned address, then tiles, then
        vectors for the rest, the last of which is moved back.

            for j in 0, 64 … n: y[i, j:j+64]   →   s = -(i*n) % 16;  if s: y[i, 0:16];  for j in s, s+64 … n-64: y[i, j:j+64];
                                                   for j in j, j+16 … n: y[i, j:j+16]
        """
        b, a, store, tile, width, tail = self.b, node.axis, stage.r.store, node.loop.piece.stride, stage.frame.width, node.tails[0]
        extent = stage.frame.bounds[a]
        assert store is not None
        stage.set_position({}, stage.chunk)
        start, const, _, _ = self.values.address(stage, store)
        past = b.alu("SUB", dtypes.index, 1, b.index(-const % width), start)
        first = b.alu("MOD", dtypes.index, 1, past, b.index(width))
        tiles = b.alu("IDIV", dtypes.index, 1, b.alu("SUB", dtypes.index, 1, b.index(extent), first), b.index(tile))
        rest = b.add(first, b.mul(tiles, tile))

        self._between(stage, a, width, b.index(0), first, lambda: inside(tail.body))
        self._between(stage, a, tile, first, rest, lambda: inside(node.body))
        self._between(stage, a, width, rest, b.index(extent), lambda: inside(tail.body))

    def counted(self, stage: OpenStage, node: Loop, iteration: dict[int, int], number: int, body: Callable[[], Any]) -> None:
        """Emit an output loop that counts iterations by one, because accumulators in scratch memory are numbered by iteration."""
        b, a, piece = self.b, node.axis, node.loop.piece
        if node.span is Span.ONCE:
            self._single(stage, a, body)
            return
        if node.span is Span.ALL:
            stop = b.alu("IDIV", dtypes.index, 1, b.add(self._stop(stage, node), b.index(piece.stride - 1)), b.index(piece.stride))
        else:
            stop = self.axes.count(stage, a, piece)
        loop, _ = b.open(b.index(0), stop, 1)
        iteration[number] = loop
        stage.open_row(a, ({b.mul(loop, piece.stride): 1}, 0))
        body()
        stage.close_row(a)
        del iteration[number]
        b.close(loop)
        stage.memo.clear()
