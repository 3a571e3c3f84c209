"""Tails: the code for positions that are left over after the whole iterations of a loop.

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

FEW_ROWS = 2                    # rows of a larger tile: at most so many left over at run time are computed one by one


def tails(maker: TreeMaker, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Give the loops of all phases their tails."""
    return tuple([p._replace(launch=_Tails(maker, p.kind, p.split).launch(p.launch)) for p in phases])


class Place(NamedTuple):
    """What is known at the point of the tree where a body stands, of the stages whose loops are open around it."""

    nests: Nests
    opened: dict[int, dict[int, int]]           # open stage → local axis → number of its loops that are open
    safe: dict[int, frozenset[int]]             # open stage → local axes all of whose positions are inside their extents
    cuts: Cuts                                  # loops that are shorter here than the state says

    def opening(self, s: int, a: int) -> Place:
        """The place inside one more loop of stage `s` over local axis `a`."""
        of_stage = self.opened[s]
        return self._replace(opened={**self.opened, s: {**of_stage, a: of_stage.get(a, 0) + 1}})

    def knowing(self, s: int, axes: frozenset[int]) -> Place:
        """The same place, where all positions of these axes of stage `s` are known to be inside their extents."""
        return self._replace(safe={**self.safe, s: self.safe[s] | axes})


class _Tails:
    """Gives the loops of one phase their tails."""

    def __init__(self, maker: TreeMaker, kind: PhaseKind, split: Split | None) -> None:
        self.maker, self.kind, self.split = maker, kind, split
        self.on_grid = maker.state.target.has_groups

    # -- the launch -------------------------------------------------------------------------------------
    def launch(self, launch: Launch) -> Launch:
        """Give a launch its bodies. With extents that depend on variables, an iteration lies wholly inside, partly inside, or outside of
        them; partly inside ones get their own body."""
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
        """Bodies for an iteration that is only partly inside: loops with smaller steps along `axes`, outermost first."""
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
        """Give all loops of a body their tails."""
        safe = place.safe[body.frame.r.stage.index]
        return Body(tuple([self.compute(c, place) for c in body.stages]), self.inner(body.inner, place), safe)

    def compute(self, node: Compute, place: Place) -> Compute:
        """Give the loops of a stage, computed inside loops of other stages, their tails."""
        s = node.stage
        safe = safe_axes(self.maker, place.nests, place.safe, s)
        beyond = any(is_read_beyond(self.maker, place.nests, place.safe, s, dim) for dim in range(len(node.nest.region)))
        inside = place._replace(opened={**place.opened, s: {}}, safe={**place.safe, s: safe})
        before = tuple([self.compute(c, inside) for c in node.before]) if node.before else ()
        body = None if node.body is None else self.body(node.body, inside)
        return node._replace(is_read_beyond=beyond, before=before, body=body)

    def inner(self, node: Inner, place: Place) -> Inner:
        """Give the loop or reduction at the end of a body its tails."""
        if isinstance(node, Loop):
            return self.output_loop(node, place)
        if isinstance(node, Reduction):
            return node._replace(inner=self.reducing(node.inner, place, node.in_memory != ()))
        return node

    def output_loop(self, node: Loop, place: Place) -> Loop:
        """Give an output loop that is outside of all reduce loops its tails."""
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
        """The tail of an output loop: its body over the remainder of axis `a` in steps of `step` positions, the last of which may go beyond
        the end."""
        s, cut = node.frame.r.stage.index, node.frame.narrowed(a, step)
        place = inside.knowing(s, frozenset([a])) if step == 1 < node.frame.reach(a) else inside
        if cut is not node.frame:
            place = self.cut(place, cut, a, node.loop.point)
        return Tail(when, step, cut, self.body(self.maker.body(cut, node.number + 1, place.nests), place))

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
        frame, a, k = node.frame, node.loop.axis, node.number + 1
        inside = place.opening(frame.r.stage.index, a)
        aligned, cut = frame._replace(is_aligned=True), frame.narrowed(a, frame.width)
        ends = Tail(When.ANY, frame.width, cut, self.body(self.maker.body(cut, k, place.nests), inside))
        return Loop(aligned, node.number, self.body(self.maker.body(aligned, k, place.nests), inside), Span.ALIGNED, (ends,))

    # -- reduce loops -----------------------------------------------------------------------------------
    def reducing(self, node: Inner, place: Place, in_memory: bool) -> Inner:
        """Give the loops of a reduction their tails. `in_memory`: accumulators are in memory here, so none are carried."""
        if isinstance(node, Accumulate):
            return node
        if isinstance(node, Update):
            return node._replace(inner=self.reducing(node.inner, place, False))
        assert isinstance(node, Loop), "the loops of a reduction end in a sum"
        if node.axis < node.frame.num_outs:
            return self._output_inside(node, place, in_memory)
        return self._reduce_loop(node, place, in_memory)

    def _output_inside(self, node: Loop, place: Place, in_memory: bool) -> Loop:
        """An output loop inside reduce loops: each of its iterations has its own accumulators, in memory."""
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
        """A loop of a reduction with the stages and loops in its body processed."""
        stages = tuple([self.compute(c, inside) for c in node.body.stages])
        return node._replace(body=Body(stages, self.reducing(node.body.inner, inside, in_memory), inside.safe[node.frame.r.stage.index]))

    def _reduce_loop(self, node: Loop, place: Place, in_memory: bool) -> Loop:
        """A reduce loop: its whole iterations, and one tail for the remainder."""
        frame, a, s = node.frame, node.axis, node.frame.r.stage.index
        inside = place.opening(s, a)
        if self.is_ended(frame, a):
            return self._ended_loop(node, inside, in_memory)
        found = self._with_body(node, inside, in_memory)
        whole, rest = node.division()
        if not is_split(self.split, node):
            if whole == 1 and not in_memory:       # a single iteration over accumulators in memory is still emitted as a loop
                found = found._replace(span=Span.ONCE)
            elif whole == 0:
                found = found._replace(span=Span.NEVER)
        if not rest:
            return found
        cut = frame.shortened(a, frame.number_of(node.loop), rest)
        inside = self.cut(inside, cut, a, node.loop.point)
        return found._replace(tails=(self._reduce_tail(node, When.ANY, rest, cut, inside, in_memory),))

    def _ended_loop(self, node: Loop, inside: Place, in_memory: bool) -> Loop:
        """A reduce loop over an axis whose extent depends on a variable."""
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
        """The tail of a reduce loop: a copy of its body in which the loops of `cut` are smaller."""
        end = _end_of(node)
        whole = self.maker.inside_reduction(cut, node.number, end, place.nests)
        assert isinstance(whole, Loop)
        return Tail(when, step, cut, self._with_body(whole, place, in_memory).body)

    # -- smaller bodies ---------------------------------------------------------------------------------
    def cut(self, place: Place, frame: Frame, a: int, point: int) -> Place:
        """The place where a stage has the shorter loops of `frame` over local axis `a`. Stages inside the loop at depth `point` then have
        smaller regions."""
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


def is_split(split: Split | None, node: Loop) -> bool:
    """Whether cores or groups share this loop: the outermost one over the axis of a split reduction."""
    return split is not None and node.frame.r.stage.is_output and split.axis == node.axis and node.is_outermost


def _end_of(node: Loop) -> int:
    """The number of the loop just outside of which accumulators in memory are read and written; -1 if they are carried in registers."""
    inner: Inner = node
    while isinstance(inner, Loop):
        if isinstance(inner.body.inner, Update):
            return inner.number + 1
        inner = inner.body.inner
    return -1
