"""Tails: the code for positions that are left over after the whole iterations of a loop.

    Loop r0 by 4, of 70             Loop r0 by 4 (17)
      Accumulate 4          →         Accumulate 4
                                    Tail of 2
                                      Accumulate 2

    reduce loop of 70 by 4          Loop r0 (17), Tail of 2: a shorter copy of the body                     peeled
    n positions by 64, n variable   Loop o0 while 64 are left, Tail by 16: vectors, the last under a mask   whole, then narrow
    rows of 99 floats, stored past  Tail of a vector up to the first aligned one, Loop o1, Tail by vectors  aligned
      the caches

Output axes whose tiles do not divide a known extent need no tail: `Frame.ends` says whether the last tile is moved back or guarded. The
span and the tails that a pass before has given a loop stay."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from svod.core.kernel.layout import is_contiguous
from svod.core.kernel.loop_nest import Cuts
from svod.core.kernel.non_temporal import aligns_rows
from svod.core.machine.target import SAME
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
    Store,
    Tail,
    Update,
    When,
)

FEW_ROWS = 2                    # rows; if a larger tile leaves over at most so many at run time, they are computed one by one


def tails(maker: TreeMaker, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Give the loops of all phases their tails."""
    return tuple([p._replace(launch=_Tails(maker, p.kind, p.split).launch(p.launch)) for p in phases])


class Place(NamedTuple):
    """Facts about the stages whose loops are open at one point of the tree."""

    nests: Nests
    safe: dict[int, frozenset[int]]             # open stage → local axes all of whose positions are inside their extents
    cuts: Cuts                                  # loops that are shorter here than the state says

    def knowing(self, s: int, *axes: int) -> Place:
        """Add the fact that all positions of these axes of stage `s` are inside their extents."""
        return self._replace(safe={**self.safe, s: self.safe[s].union(axes)}) if axes else self


Inside = Callable[[Body, Frame, Place], Body]       # gives the loops of a body their tails


class _Tails:
    """Gives the loops of one phase their tails. A tail repeats the body of its loop in another frame: the argument `frame` of the
    methods replaces the frame of the body's nodes."""

    def __init__(self, maker: TreeMaker, kind: PhaseKind, split: Split | None) -> None:
        self.maker, self.kind, self.split = maker, kind, split
        self.on_grid = maker.state.target.has_groups

    # -- the launch -------------------------------------------------------------------------------------
    def launch(self, launch: Launch) -> Launch:
        """Give a launch its bodies. With extents that depend on variables, an iteration lies wholly inside, partly inside, or outside of
        them; iterations partly inside have a body of their own."""
        frame, place = launch.frame, Place(self.maker.nest.stages, {launch.frame.r.stage.index: frozenset()}, {})
        s, last = frame.r.stage.index, {loop.axis: number for number, loop in enumerate(launch.loops)}
        ended = frozenset([a for a, number in last.items() if self.is_ended(frame, a) and frame.is_innermost(number)])
        moved = frozenset([a for a in ended if self.is_moved_back(frame, a)])
        first = frame if launch.last is None else frame._replace(is_aligned=True)
        done = launch._replace(body=self.body(launch.body, first, place.knowing(s, *ended)), ended=ended, moved_back=moved,
                               last=None if launch.last is None else self.body(launch.last, frame, place))
        cut = [a for a in last if a in ended and frame.reach(a) > 1]
        if not cut:
            return done
        narrow = [a for a in cut if frame.tail_step(a) < frame.reach(a)]
        return done._replace(partly=self._parts(launch.body, frame, narrow, place.knowing(s, *ended.difference(cut))))

    def _parts(self, body: Body, frame: Frame, axes: list[int], place: Place) -> tuple[Part, ...] | Body:
        """Bodies for an iteration that is only partly inside: loops with smaller steps along `axes`, outermost first."""
        if not axes:
            return self.body(body, frame, place)
        parts, a = [], axes[0]
        for when, step in self.steps(frame, a):
            cut = frame.narrowed(a, step)
            inside = place.knowing(frame.r.stage.index, a) if step == 1 else place
            parts.append(Part(a, when, step, cut, self._parts(body, cut, axes[1:], self.cut(inside, cut, a, 0))))
        return tuple(parts)

    # -- loops ------------------------------------------------------------------------------------------
    def body(self, body: Body, frame: Frame, place: Place) -> Body:
        """Give all loops of a body their tails."""
        return self.around(body, self.inner(body.inner, frame, place), frame, place)

    def around(self, body: Body, inner: Inner, frame: Frame, place: Place) -> Body:
        """Replace the end of a body by `inner`, and give its stages their tails."""
        stages = tuple([self.compute(c, place) for c in body.stages]) if body.stages else ()
        safe = place.safe[frame.r.stage.index]
        return body._replace(stages=stages, inner=inner, safe=safe) if safe else body.holding(stages, inner)

    def compute(self, node: Compute, place: Place) -> Compute:
        """Give the loops of a stage, computed inside loops of other stages, their tails."""
        s, safe, beyond, frame = node.stage, frozenset[int](), False, None if node.body is None else node.body.frame
        if place.cuts and place.nests[s] != node.nest:
            node, frame = self.maker.recomputed(node, place.nests[s])
        if self.maker.checks.unsafe:
            safe = safe_axes(self.maker, place.nests, place.safe, s)
            beyond = any(is_read_beyond(self.maker, place.nests, place.safe, s, dim) for dim in range(len(node.nest.region)))
        inside = Place(place.nests, {**place.safe, s: safe}, place.cuts)
        before = tuple([self.compute(c, inside) for c in node.before])
        body = None if node.body is None or frame is None else self.body(node.body, frame, inside)
        if body is node.body and not before and not beyond:
            return node
        return node._replace(is_read_beyond=beyond, before=before, body=body)

    def inner(self, node: Inner, frame: Frame, place: Place) -> Inner:
        """Give the loop or reduction at the end of a body its tails."""
        if isinstance(node, Reduction):
            node = node.in_frame(frame)
            return node.around(self.reducing(node.inner, frame, place, node.in_memory != ()))
        assert isinstance(node, (Loop, Store)), "sums are inside of reductions"
        node = node if node.frame is frame else node._replace(frame=frame)
        return self.output_loop(node, place) if isinstance(node, Loop) else node

    def output_loop(self, node: Loop, place: Place) -> Loop:
        """Give an output loop that is outside of all reduce loops its tails."""
        frame, a, s = node.frame, node.axis, node.frame.r.stage.index
        if is_given(node):
            return self._given(node, place, self.body)
        if self._is_aligned(node):
            return self._aligned(node, place)
        if node.loop.piece.extent == 1:
            return node.around(self.body(node.body, frame, place), Span.ONCE)
        if not self.is_ended(frame, a):
            return node.around(self.body(node.body, frame, place), Span.ALL)
        if a in place.safe[s] or not frame.is_innermost(node.number):
            return node.around(self.body(node.body, frame, place), Span.TO_LIMIT)
        reach, body = frame.reach(a), self.body(node.body, frame, place.knowing(s, a))
        steps = (self.steps(frame, a) or [(When.ANY, reach)]) if reach > 1 else []
        return node._replace(body=body, span=Span.WHOLE, is_moved_back=self.is_moved_back(frame, a),
                             tails=tuple([self._tail(node, a, when, step, place) for when, step in steps]))

    def _tail(self, node: Loop, a: int, when: When, step: int, place: Place) -> Tail:
        """The tail of an output loop: its body over the remainder of axis `a` in steps of `step` positions, the last of which may go beyond
        the end."""
        cut = node.frame.narrowed(a, step)
        if cut is not node.frame:
            place = self.cut(place.knowing(cut.r.stage.index, a) if step == 1 else place, cut, a, node.loop.point)
        return Tail(when, step, self.body(node.body, cut, place))

    def _is_aligned(self, node: Loop) -> bool:
        """Whether the output's rows are stored at addresses that are multiples of the vector, and this loop runs over the tiles of a
        row."""
        frame, loop = node.frame, node.loop
        if self.on_grid or self.kind is not PhaseKind.OUTPUT or not frame.r.stage.is_output:
            return False
        return loop.axis == frame.vector_axis and loop.piece.extent > 1 and \
            aligns_rows(self.maker.state, frame.r, frame.pieces, frame.vector_axis, frame.vector_row)

    def _aligned(self, node: Loop, place: Place) -> Loop:
        """The loop over the tiles of an aligned row. Its tail has single vectors, which run at both ends of the row."""
        frame, width = node.frame, node.frame.width
        aligned, cut = frame._replace(is_aligned=True), frame.narrowed(node.axis, width)
        ends = Tail(When.ANY, width, self.body(node.body, cut, place))
        return node._replace(frame=aligned, body=self.body(node.body, aligned, place), span=Span.ALIGNED, tails=(ends,))

    # -- reduce loops -----------------------------------------------------------------------------------
    def reducing(self, node: Inner, frame: Frame, place: Place, in_memory: bool) -> Inner:
        """Give the loops of a reduction their tails. `in_memory`: accumulators are in memory here, so no loop carries them."""
        if isinstance(node, Update):
            return node._replace(inner=self.reducing(node.inner, frame, place, False))
        assert isinstance(node, (Loop, Accumulate)), "the loops of a reduction end in a sum"
        node = node if node.frame is frame else node._replace(frame=frame)
        if isinstance(node, Accumulate):
            return node
        if is_given(node):
            return self._given(node, place, lambda body, own, at: self._inside(body, own, at, in_memory))
        return self._output_inside(node, place, in_memory) if node.axis < frame.num_outs else self._reduce_loop(node, place, in_memory)

    def _inside(self, body: Body, frame: Frame, place: Place, in_memory: bool) -> Body:
        """The body of a loop of a reduction, in `frame`, with the stages and loops in it processed."""
        return self.around(body, self.reducing(body.inner, frame, place, in_memory), frame, place)

    def _output_inside(self, node: Loop, place: Place, in_memory: bool) -> Loop:
        """Give the loops inside an output loop that stands inside reduce loops their tails. Each of its iterations has its own
        accumulators, in memory."""
        frame, a, s, span = node.frame, node.axis, node.frame.r.stage.index, Span.ALL
        if not in_memory or node.loop.piece.extent == 1:
            span = Span.ONCE
        elif self.is_ended(frame, a):
            span = Span.TO_LIMIT
            if a not in place.safe[s] and frame.is_innermost(node.number) and frame.reach(a) == 1:
                span, place = Span.WHOLE, place.knowing(s, a)
        return node.around(self._inside(node.body, frame, place, in_memory), span)

    def _reduce_loop(self, node: Loop, place: Place, in_memory: bool) -> Loop:
        """Give a reduce loop the tail for the positions that its whole iterations leave over."""
        frame, a = node.frame, node.axis
        if self.is_ended(frame, a):
            return self._ended_loop(node, place, in_memory)
        (whole, rest), span, tails = node.division(), Span.ALL, tuple[Tail, ...]()
        if not is_split(self.split, node):
            if whole == 1 and not in_memory:       # a single iteration over accumulators in memory is still emitted as a loop
                span = Span.ONCE
            elif whole == 0:
                span = Span.NEVER
        body = self._inside(node.body, frame, place, in_memory)
        if rest:
            cut = frame.shortened(a, frame.number_of(node.loop), rest)
            inside = self._inside(node.body, cut, self.cut(place, cut, a, node.loop.point), in_memory)
            tails = (Tail(When.ANY, rest, inside),)
        return node.around(body, span, tails)

    def _ended_loop(self, node: Loop, place: Place, in_memory: bool) -> Loop:
        """Give a reduce loop over an axis whose extent depends on a variable its tail."""
        frame, a, s = node.frame, node.axis, node.frame.r.stage.index
        if not frame.is_innermost(node.number):
            return node.around(self._inside(node.body, frame, place, in_memory), Span.TO_LIMIT)
        known, tails = place.knowing(s, a), tuple[Tail, ...]()
        if frame.reach(a) > 1:
            step = frame.reach(a) if self.maker.state.target.numerics == SAME else frame.tail_step(a)
            cut, inside = frame.narrowed(a, step), known if step == 1 else place
            if cut is not frame:
                inside = self.cut(inside, cut, a, node.loop.point)
            tails = (Tail(When.ANY, step, self._inside(node.body, cut, inside, in_memory)),)
        return node.around(self._inside(node.body, frame, known, in_memory), Span.WHOLE, tails)

    # -- smaller bodies ---------------------------------------------------------------------------------
    def _given(self, node: Loop, place: Place, inside: Inside) -> Loop:
        """Keep the span and the tails that a pass before has set, and give the loops in the bodies theirs."""
        frame, a, tails = node.frame, node.axis, list[Tail]()
        known = place.knowing(frame.r.stage.index, a) if self.is_ended(frame, a) else place
        for tail in node.tails:
            cut, at = frame.cut_like(tail.body.frame, a), known if tail.step == 1 else place
            tails.append(tail._replace(body=inside(tail.body, cut, at if cut is frame else self.cut(at, cut, a, node.loop.point))))
        return node.around(inside(node.body, frame, known if node.span is Span.WHOLE else place), node.span, tuple(tails))

    def cut(self, place: Place, frame: Frame, a: int, point: int) -> Place:
        """Add the fact that a stage has the shorter loops of `frame` over local axis `a`. Stages inside the loop at depth `point`
        then have smaller regions."""
        s = frame.r.stage.index
        if point == NO_POINT or not self.maker.has_stages(s, point):
            return place
        cuts = {**place.cuts, s: {**place.cuts.get(s, {}), a: self.maker.cut(frame, a)}}
        return place._replace(cuts=cuts, nests=self.maker.cut_nests(s, cuts))

    # -- questions --------------------------------------------------------------------------------------
    def is_ended(self, frame: Frame, a: int) -> bool:
        """Whether the extent of an axis depends on a variable, so that its loops end at run time. Always false on a grid: loops run to the
        largest extent there, and guards check the real one."""
        axis = frame.r.axes[a]
        return not self.on_grid and axis >= 0 and self.maker.kernel.axes[axis].bound is not None

    def is_moved_back(self, frame: Frame, a: int) -> bool:
        """Whether the last tile of an axis may begin earlier at run time and compute some positions twice. That takes an extent of at least
        one tile, which is checked at run time."""
        is_tile = a != frame.vector_axis and a < frame.num_outs and bool(frame.r.reductions) and frame.reach(a) > 1
        in_place = frame.r.stage.is_output and bool(self.maker.kernel.written)
        return is_tile and not in_place and is_contiguous(frame.pieces[a]) and frame.num_loops(a) == 1

    def steps(self, frame: Frame, a: int) -> list[tuple[When, int]]:
        """The step sizes for the remainder of an output axis; one of them is chosen at run time by how much is left. [] if no smaller step
        than the tile helps. A remainder of few rows is computed row by row, as batches of one are common."""
        step, reach = frame.tail_step(a), frame.reach(a)
        if a == frame.vector_axis or not frame.r.reductions or not is_contiguous(frame.pieces[a]) or step <= FEW_ROWS:
            return [(When.ANY, step)] if step < reach else []
        return [(When.FEW, 1), (When.MANY, step)]


def is_given(node: Loop) -> bool:
    """Whether a pass has said which iterations of a loop run, or has given it tails."""
    return node.span is not Span.ALL or bool(node.tails)


def is_split(split: Split | None, node: Loop) -> bool:
    """Whether cores or groups share this loop: the outermost one over the axis of a split reduction."""
    return split is not None and node.frame.r.stage.is_output and split.axis == node.axis and node.is_outermost
