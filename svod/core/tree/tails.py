"""Tails: what becomes of positions that whole iterations leave.

    Loop r0 by 4, of 70             Loop r0 by 4 (17)
      Accumulate 4          →         Accumulate 4
                                    Tail of 2
                                      Accumulate 2

    reduce loop of 70 by 4          Loop r0 (17), Tail of 2: a shorter copy of the body                     peeled
    n positions by 64, n variable   Loop o0 while 64 are left, Tail by 16: vectors, the last under a mask   whole, then narrow
    rows of 99 floats, stored past  Tail of a vector up to the first aligned one, Loop o1, Tail by vectors  aligned
      the caches

Output axes whose tiles do not divide a known extent need no tail: `Frame.ends` says whether the last tile is moved back or guarded."""
from __future__ import annotations

from typing import NamedTuple

from svod.core.kernel.layout import is_contiguous
from svod.core.kernel.loop_nest import Cuts
from svod.core.kernel.non_temporal import aligns_rows
from svod.core.tree.build import Nests, TreeMaker
from svod.core.tree.inside import is_read_beyond, safe_axes
from svod.core.tree.nodes import (
    NO_POINT,
    Accumulate,
    Body,
    Compute,
    Frame,
    Inner,
    Launch,
    Loop,
    Part,
    Phase,
    PhaseKind,
    Reduction,
    Span,
    Split,
    Tail,
    Update,
    When,
)

FEW_ROWS = 2                    # Rows of a tile that are computed one by one, where the tile is larger and the number known at run time.


def tails(maker: TreeMaker, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Give all loops of all phases their tails."""
    return tuple([p._replace(launch=_Tails(maker, p.kind, p.split).launch(p.launch)) for p in phases])


class Place(NamedTuple):
    """Where a body stands: the stages around it, and what is known of them there."""

    nests: Nests
    opened: dict[int, dict[int, int]]           # by open stage, and local axis, how many loops are open
    safe: dict[int, frozenset[int]]             # by open stage the local axes all of whose positions are inside
    cuts: Cuts                                  # what is shorter than the state says

    def opening(self, s: int, a: int) -> Place:
        """Inside of one more loop."""
        of_stage = self.opened[s]
        return self._replace(opened={**self.opened, s: {**of_stage, a: of_stage.get(a, 0) + 1}})

    def knowing(self, s: int, axes: frozenset[int]) -> Place:
        """Where the positions of these axes are inside."""
        return self._replace(safe={**self.safe, s: self.safe[s] | axes})


class _Tails:
    """Gives the loops of one phase their tails."""

    def __init__(self, maker: TreeMaker, kind: PhaseKind, split: Split | None) -> None:
        self.maker, self.kind, self.split = maker, kind, split
        self.on_grid = maker.state.target.has_groups

    # -- the launch -------------------------------------------------------------------------------------
    def launch(self, launch: Launch) -> Launch:
        """A launch, whose iterations lie inside, partly inside, or outside of what variables say."""
        frame, s = launch.frame, launch.frame.r.stage.index
        opened: dict[int, int] = {}
        for loop in launch.loops:
            opened[loop.axis] = opened.get(loop.axis, 0) + 1
        place = Place(self.maker.nest.stages, {s: opened}, {s: frozenset()}, {})
        ended = frozenset([a for a in opened if self.is_ended(frame, a) and opened[a] == frame.num_loops(a)])
        moved = frozenset([a for a in ended if self.is_moved_back(frame, a)])
        done = launch._replace(body=self.body(launch.body, place.knowing(s, ended)), ended=ended, moved_back=moved)
        if launch.last is not None:
            done = done._replace(last=self.body(launch.last, place))
        cut = [a for a in opened if a in ended and frame.reach(a) > 1]
        if not cut:
            return done
        narrow = [a for a in cut if frame.tail_step(a) < frame.reach(a)]
        return done._replace(partly=self._parts(frame, launch.num_loops, narrow, place.knowing(s, ended.difference(cut))))

    def _parts(self, frame: Frame, count: int, axes: list[int], place: Place) -> tuple[Part, ...] | Body:
        """What is left of an iteration, in smaller steps along `axes`."""
        s = frame.r.stage.index
        if not axes:
            return self.body(self.maker.body(frame, count, place.nests), place)
        parts, a = [], axes[0]
        for when, step in self.steps(frame, a):
            cut = frame.narrowed(a, step)
            inside = place.knowing(s, frozenset([a])) if step == 1 else place
            inside = self.cut(inside, cut, a, 0)
            parts.append(Part(a, when, step, cut, self._parts(cut, count, axes[1:], inside)))
        return tuple(parts)

    # -- loops ------------------------------------------------------------------------------------------
    def body(self, body: Body, place: Place) -> Body:
        """A body whose loops have their tails."""
        return Body(tuple([self.compute(c, place) for c in body.stages]), self.inner(body.inner, place))

    def compute(self, node: Compute, place: Place) -> Compute:
        """A stage inside of loops of others."""
        s = node.stage
        safe = safe_axes(self.maker, place.nests, place.safe, s)
        beyond = any(is_read_beyond(self.maker, place.nests, place.safe, s, dim) for dim in range(len(node.nest.region)))
        inside = place._replace(opened={**place.opened, s: {}}, safe={**place.safe, s: safe})
        before = tuple([self.compute(c, inside) for c in node.before]) if node.before else ()
        body = None if node.body is None else self.body(node.body, inside)
        return node._replace(safe=safe, is_read_beyond=beyond, before=before, body=body)

    def inner(self, node: Inner, place: Place) -> Inner:
        """What comes after the stages of a body."""
        if isinstance(node, Loop):
            return self.output_loop(node, place)
        if isinstance(node, Reduction):
            return node._replace(inner=self.reducing(node.inner, place, node.in_memory != ()))
        return node

    def output_loop(self, node: Loop, place: Place) -> Loop:
        """An output loop outside of reduce loops."""
        loop, frame, s = node.loop, node.frame, node.frame.r.stage.index
        a, inside = loop.axis, place.opening(s, loop.axis)
        if self._is_aligned(node):
            return self._aligned(node, place)
        if loop.piece.extent == 1:
            return node._replace(body=self.body(node.body, inside), span=Span.ONCE)
        if not self.is_ended(frame, a):
            return node._replace(body=self.body(node.body, inside))
        if a in place.safe[s] or inside.opened[s][a] < frame.num_loops(a):
            return node._replace(body=self.body(node.body, inside), span=Span.TO_LIMIT)
        body = self.body(node.body, inside.knowing(s, frozenset([a])))
        found = node._replace(body=body, span=Span.WHOLE, is_moved_back=self.is_moved_back(frame, a))
        if frame.reach(a) == 1:
            return found
        narrow = tuple([self._tail(node, a, when, step, inside) for when, step in self.steps(frame, a)])
        return found._replace(tails=narrow or (self._tail(node, a, When.ANY, frame.reach(a), inside),))

    def _tail(self, node: Loop, a: int, when: When, step: int, inside: Place) -> Tail:
        """The loop's body over the remainder of an axis, in steps, of which the last may be outside."""
        s, cut = node.frame.r.stage.index, node.frame.narrowed(a, step)
        place = inside.knowing(s, frozenset([a])) if step == 1 < node.frame.reach(a) else inside
        if cut is not node.frame:
            place = self.cut(place, cut, a, node.loop.point)
        return Tail(when, step, cut, self.body(self.maker.body(cut, node.number + 1, place.nests), place))

    def _is_aligned(self, node: Loop) -> bool:
        """Whether the rows of the output are stored at multiples of the vector, and this loop runs over their tiles."""
        frame, loop = node.frame, node.loop
        if self.on_grid or self.kind is not PhaseKind.OUTPUT or not frame.r.stage.is_output:
            return False
        return loop.axis == frame.vector_axis and loop.piece.extent > 1 and \
            aligns_rows(self.maker.state, frame.r, frame.pieces, frame.vector_axis, frame.vector_row)

    def _aligned(self, node: Loop, place: Place) -> Loop:
        """Tiles at multiples of the vector, and single vectors at both ends of the row."""
        frame, a, k = node.frame, node.loop.axis, node.number + 1
        inside = place.opening(frame.r.stage.index, a)
        aligned, cut = frame._replace(is_aligned=True), frame.narrowed(a, frame.width)
        ends = Tail(When.ANY, frame.width, cut, self.body(self.maker.body(cut, k, place.nests), inside))
        return Loop(aligned, node.number, self.body(self.maker.body(aligned, k, place.nests), inside), Span.ALIGNED, (ends,))

    # -- reduce loops -----------------------------------------------------------------------------------
    def reducing(self, node: Inner, place: Place, in_memory: bool) -> Inner:
        """The loops of a reduction. `in_memory`: no accumulators are carried here."""
        if isinstance(node, Accumulate):
            return node
        if isinstance(node, Update):
            return node._replace(inner=self.reducing(node.inner, place, False))
        assert isinstance(node, Loop), "the loops of a reduction end in a sum"
        if node.axis < node.frame.num_outs:
            return self._output_inside(node, place, in_memory)
        return self._reduce_loop(node, place, in_memory)

    def _output_inside(self, node: Loop, place: Place, in_memory: bool) -> Loop:
        """An output loop inside of reduce loops: its iterations have accumulators of their own."""
        frame, a, s = node.frame, node.axis, node.frame.r.stage.index
        inside = place.opening(s, a)
        if not in_memory or node.loop.piece.extent == 1:
            return self._with_body(node, inside, in_memory)._replace(span=Span.ONCE)
        if not self.is_ended(frame, a):
            return self._with_body(node, inside, in_memory)
        if a not in place.safe[s] and inside.opened[s][a] == frame.num_loops(a) and frame.reach(a) == 1:
            return self._with_body(node, inside.knowing(s, frozenset([a])), in_memory)._replace(span=Span.WHOLE)
        return self._with_body(node, inside, in_memory)._replace(span=Span.TO_LIMIT)

    def _with_body(self, node: Loop, inside: Place, in_memory: bool) -> Loop:
        """A loop of a reduction around what its body becomes."""
        stages = tuple([self.compute(c, inside) for c in node.body.stages])
        return node._replace(body=Body(stages, self.reducing(node.body.inner, inside, in_memory)))

    def _reduce_loop(self, node: Loop, place: Place, in_memory: bool) -> Loop:
        """Whole iterations of a reduce loop, and a tail."""
        frame, a, s = node.frame, node.axis, node.frame.r.stage.index
        inside = place.opening(s, a)
        if self.is_ended(frame, a):
            return self._ended_loop(node, inside, in_memory)
        found = self._with_body(node, inside, in_memory)
        if not is_split(self.split, node):
            if node.whole == 1 and not in_memory:       # where nothing is carried, one iteration is a loop as well
                found = found._replace(span=Span.ONCE)
            elif node.whole == 0:
                found = found._replace(span=Span.NEVER)
        if not node.rest:
            return found
        cut = frame.shortened(a, frame.number_of(node.loop), node.rest)
        inside = self.cut(inside, cut, a, node.loop.point)
        return found._replace(tails=(self._reduce_tail(node, When.ANY, node.rest, cut, inside, in_memory),))

    def _ended_loop(self, node: Loop, inside: Place, in_memory: bool) -> Loop:
        """A reduce loop over an axis that a variable ends."""
        frame, a, s = node.frame, node.axis, node.frame.r.stage.index
        if inside.opened[s][a] < frame.num_loops(a):
            return self._with_body(node, inside, in_memory)._replace(span=Span.TO_LIMIT)
        found = self._with_body(node, inside.knowing(s, frozenset([a])), in_memory)._replace(span=Span.WHOLE)
        if frame.reach(a) == 1:
            return found
        step = frame.tail_step(a)
        cut = frame.narrowed(a, step)
        place = inside.knowing(s, frozenset([a])) if step == 1 else inside
        if cut is not frame:
            place = self.cut(place, cut, a, node.loop.point)
        return found._replace(tails=(self._reduce_tail(node, When.ANY, step, cut, place, in_memory),))

    def _reduce_tail(self, node: Loop, when: When, step: int, cut: Frame, place: Place, in_memory: bool) -> Tail:
        """A copy of a reduce loop's body with smaller loops."""
        end = _end_of(node)
        whole = self.maker.inside_reduction(cut, node.number, end, place.nests)
        assert isinstance(whole, Loop)
        return Tail(when, step, cut, self._with_body(whole, place, in_memory).body)

    # -- smaller bodies ---------------------------------------------------------------------------------
    def cut(self, place: Place, frame: Frame, a: int, point: int) -> Place:
        """Where a stage has the loops of `frame` over a local axis, inside the loop at `point`."""
        s = frame.r.stage.index
        if point == NO_POINT or not self.maker.has_stages(s, point):
            return place
        cuts = {**place.cuts, s: {**place.cuts.get(s, {}), a: self.maker.cut(frame, a)}}
        return place._replace(cuts=cuts, nests=self.maker.cut_nests(s, cuts))

    # -- questions --------------------------------------------------------------------------------------
    def is_ended(self, frame: Frame, a: int) -> bool:
        """Whether a variable ends an axis, and so its loops. On a grid loops run over the most positions, and guards alone use it."""
        axis = frame.r.axes[a]
        return not self.on_grid and axis >= 0 and self.maker.kernel.axes[axis].bound is not None

    def is_moved_back(self, frame: Frame, a: int) -> bool:
        """Whether the last tile of an axis that a variable ends may begin earlier and compute some positions again, where there are
        enough of them."""
        is_tile = a != frame.vector_axis and a < frame.num_outs and bool(frame.r.reductions) and frame.reach(a) > 1
        in_place = frame.r.stage.is_output and bool(self.maker.kernel.written)
        return is_tile and not in_place and is_contiguous(frame.pieces[a]) and frame.num_loops(a) == 1

    def steps(self, frame: Frame, a: int) -> list[tuple[When, int]]:
        """The steps for the remainder of an output axis, one of which is taken; none where they are no smaller. A few rows of a tile of
        accumulators go one by one, as batches of one are common."""
        step, reach = frame.tail_step(a), frame.reach(a)
        if a == frame.vector_axis or not frame.r.reductions or not is_contiguous(frame.pieces[a]) or step <= FEW_ROWS:
            return [(When.ANY, step)] if step < reach else []
        return [(When.FEW, 1), (When.MANY, step)]


def is_split(split: Split | None, node: Loop) -> bool:
    """Whether cores or groups share a reduce loop: the outermost of the axis of a split reduction."""
    return split is not None and node.frame.r.stage.is_output and split.axis == node.axis and node.is_outermost


def _end_of(node: Loop) -> int:
    """The number of the loop inside which accumulators are read from memory; -1 where they are carried."""
    inner: Inner = node
    while isinstance(inner, Loop):
        if isinstance(inner.body.inner, Update):
            return inner.number + 1
        inner = inner.body.inner
    return -1
