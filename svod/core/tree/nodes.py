"""Nodes of the loop tree, all immutable. A program is a tuple of phases; a phase has a launch, and the launch a body.

    y[i] = Σ x[i, k] over 100 × 70, UPCAST(o0, 16) UNROLL(r0, 4)

    Phase out
      Launch o0 by 16                 7 iterations; the last tile is moved back
        Reduction
          Loop r0 by 4                17 iterations
            Accumulate                16 × 4 positions
          Tail                        a shorter copy of the body, for the last 2 positions
            Accumulate                16 × 2 positions

A body is what one iteration runs: first the stages that are computed there for their readers, then the next loop, reduction or statement. A
`Frame` describes a stage's loops at one place of the tree: the frame of a tail has smaller loops than that of the loop it belongs to.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from itertools import product
from math import prod
from operator import is_
from typing import NamedTuple

from svod.core.kernel.algorithms.online import Limit
from svod.core.kernel.contraction import Window
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.layout import Layout, block_of, is_contiguous, is_exact
from svod.core.kernel.loop_nest import StageNest
from svod.core.kernel.placement import EmittedLoop
from svod.core.kernel.scheduler import LOOP, UPCAST

NO_POINT = -1           # `StageLoop.point` of a loop inside which no stage is computed: in a copy, or over the parts of sums
UNCHECKED = -1          # `Frame.checked` of an axis whose positions need no check


class Ends(Enum):
    """Ways to end an axis that its tiles may not divide. `Frame.ends` alone chooses one."""

    EXACT = "exact"                 # Tiles divide the extent.
    MOVED_BACK = "moved back"       # The last tile begins earlier, and computes some positions again.
    GUARDED = "guarded"             # Positions beyond the extent are masked.
    PEELED = "peeled"               # The remainder of a sum is a shorter copy of the body.


class Chunk(NamedTuple):
    """One vector of the vector axis. `offset`: position of its first lane; `width`: its lanes; `active`: how many lanes are in use."""

    offset: int
    width: int
    active: int


def chunks_of(extent: int, width: int) -> tuple[Chunk, ...]:
    """Cut a row of `extent` positions into vectors of `width` lanes; the last one is narrower, with some lanes unused if need be."""
    whole = [Chunk(at, width, width) for at in range(0, extent - width + 1, width)]
    rest = extent - len(whole) * width
    return (*whole, Chunk(extent - rest, 1 << (rest - 1).bit_length(), rest)) if rest else tuple(whole)


def has_two_widths(extent: int, width: int) -> bool:
    """Whether the last vector of a row of `extent` positions is narrower than the ones before."""
    return len({chunk.width for chunk in chunks_of(extent, width)}) > 1


class StageLoop(NamedTuple):
    """A loop of a stage."""

    axis: int                       # local axis
    piece: EmittedLoop
    # number of this loop in the loop order of its stage, from 1, by which stages computed inside it refer to it; or NO_POINT
    point: int


class Frame(NamedTuple):
    """The loops of a stage at one place of the tree, as one thread runs them."""

    r: ResolvedStage
    pieces: tuple[tuple[EmittedLoop, ...], ...]     # per local axis, outermost first
    bounds: tuple[int, ...]                         # per local axis: number of positions that the loops span here
    fixed: frozenset[int]                           # local axes that must not compute any position twice
    # per local axis: the extent against which positions are checked, or UNCHECKED; () if no axis is checked
    checked: tuple[int, ...]
    vector_axis: int                                # the local axis whose positions are lanes, or -1
    vector_row: int                                 # the row of the vector axis that is the vector
    vector_stride: int                              # positions from one lane of the vector to the next
    width: int                                      # lanes of a vector
    loops: tuple[StageLoop, ...]                    # outermost first
    # per local axis: positions from the start of the group's first thread to the start of its last thread
    apart: tuple[int, ...]
    is_aligned: bool = False                        # Vectors begin at multiples of their size in the output; no position is beyond the end.
    narrow: frozenset[int] = frozenset()            # local axes whose iterations cover only a part of a tile

    @property
    def num_outs(self) -> int:
        """The number of output axes, which come before the reduce axes."""
        return len(self.r.stage.outs)

    def ends(self, a: int) -> Ends:
        """How the tiles of local axis `a` end."""
        if is_exact(self.pieces[a], self.bounds[a]) or (self.is_aligned and a == self.vector_axis):
            return Ends.EXACT
        if a in self.fixed:
            return Ends.GUARDED
        return Ends.MOVED_BACK if a < self.num_outs else Ends.PEELED

    def reach(self, a: int) -> int:
        """Positions that one iteration of the innermost loop of local axis `a` covers."""
        return block_of(self.pieces[a])

    def num_loops(self, a: int) -> int:
        """The number of loops of local axis `a`."""
        return sum(p.role == LOOP for p in self.pieces[a])

    def is_innermost(self, number: int) -> bool:
        """Whether all other loops of its axis are around loop number `number`."""
        a = self.loops[number].axis
        return [loop.axis for loop in self.loops[:number + 1]].count(a) == self.num_loops(a)

    def number_of(self, loop: StageLoop) -> int:
        """The index of a loop in the `pieces` of its axis."""
        return [p.row for p in self.pieces[loop.axis]].index(loop.piece.row)

    def left(self, a: int, at: int) -> int:
        """Positions that loop number `at` of reduce axis `a` and the loops inside it have to cover."""
        pieces = self.pieces[a]
        return self.bounds[a] if all(p.extent == 1 for p in pieces[:at]) else pieces[at].extent * pieces[at].stride

    def tail_step(self, a: int) -> int:
        """How many positions one iteration covers in the tail of an axis whose extent depends on a variable: a vector on the vector axis,
        half a tile if there are accumulators, else single positions."""
        reach, pieces = self.reach(a), self.pieces[a]
        if not is_contiguous(pieces):
            return reach
        if a == self.vector_axis:
            return self.width if self.vector_stride == 1 and reach % self.width == 0 else reach
        if a >= self.num_outs or not self.r.reductions:
            return 1
        return -(-reach // 2)

    def narrowed(self, a: int, step: int) -> Frame:
        """The frame in which an iteration covers only `step` positions of axis `a`. Its last iteration may go beyond the extent."""
        if step == self.reach(a):
            return self
        return self._cut(a, _fitted(self.pieces[a], step, keeps_loops=True))._replace(narrow=self.narrow | {a})

    def shortened(self, a: int, at: int, rest: int) -> Frame:
        """The frame of the last, shorter iteration of a reduce loop. `at`: the index of the loop in the `pieces` of its axis; the loops
        inside it are cut to `rest` positions."""
        pieces = self.pieces[a]
        shorter = (*(p._replace(extent=1) for p in pieces[:at + 1]), *_fitted(pieces[at + 1:], rest, keeps_loops=False))
        return self._cut(a, shorter)._replace(bounds=(*self.bounds[:a], rest, *self.bounds[a + 1:]))

    def cut_like(self, other: Frame, a: int) -> Frame:
        """The frame with the loops and the bound that axis `a` has in another frame of the stage."""
        if (self.pieces[a], self.bounds[a]) == (other.pieces[a], other.bounds[a]):
            return self
        bounds = (*self.bounds[:a], other.bounds[a], *self.bounds[a + 1:])
        narrow = self.narrow | (other.narrow & {a})
        return self._cut(a, other.pieces[a])._replace(bounds=bounds, narrow=narrow)

    def positions(self, kinds: tuple[str, ...], axes: range) -> list[tuple[tuple[int, ...], dict[int, int]]]:
        """All positions of the loops with these roles on these local axes, except the vector: (index per loop, axis → offset) each."""
        rows = [(a, p) for a in axes for p in self.pieces[a]
                if p.role in kinds and not (a == self.vector_axis and p.row == self.vector_row)]
        out = []
        for index in product(*(range(p.extent) for _, p in rows)):
            offsets: dict[int, int] = {}
            for i, (a, p) in zip(index, rows, strict=True):
                offsets[a] = offsets.get(a, 0) + i * p.stride
            out.append((index, offsets))
        return out

    def _cut(self, a: int, pieces: tuple[EmittedLoop, ...]) -> Frame:
        """The frame with `pieces` as the loops of axis `a`."""
        stride = self.vector_stride
        if a == self.vector_axis:
            stride = next((p.stride for p in pieces if p.row == self.vector_row), 1)
        return self._replace(pieces=(*self.pieces[:a], pieces, *self.pieces[a + 1:]), vector_stride=stride)

    def chunks(self) -> tuple[Chunk, ...]:
        """The vectors of the vector axis."""
        if self.vector_axis < 0:
            return (Chunk(0, 1, 1),)
        return chunks_of(next(p.extent for p in self.pieces[self.vector_axis] if p.row == self.vector_row), self.width)

    def out_positions(self) -> list[tuple[dict[int, int], Chunk]]:
        """The positions of the register tile: (axis → offset, vector) each. A vector along an output axis counts as one position."""
        chunks = self.chunks() if 0 <= self.vector_axis < self.num_outs else (Chunk(0, 1, 1),)
        return [(offsets, c) for _, offsets in self.positions((UPCAST,), range(self.num_outs)) for c in chunks]

    def partial_positions(self) -> list[tuple[tuple[int, ...], dict[int, int], Chunk]]:
        """The partial results of a position of the tile, one for each upcast position or vector along reduce axes: (a key for it, axis →
        offset, vector)."""
        chunks = self.chunks() if self.vector_axis >= self.num_outs else (Chunk(0, 1, 1),)
        positions = self.positions((UPCAST,), range(self.num_outs, len(self.pieces)))
        return [((*index, c.offset), offsets, c) for index, offsets in positions for c in chunks]


def _fitted(pieces: tuple[EmittedLoop, ...], positions: int, keeps_loops: bool) -> tuple[EmittedLoop, ...]:
    """Cut the loops of an axis to `positions` positions. `keeps_loops`: loops keep their numbers of iterations, and only tiles inside
    them are cut."""
    cut: list[EmittedLoop] = []
    stride = 1
    for p in reversed(pieces):
        is_kept = keeps_loops and p.role == LOOP
        extent = p.extent if is_kept else min(p.extent, positions)
        cut.append(EmittedLoop(p.row, p.role, extent, stride))
        stride *= extent
        positions = positions if is_kept else -(-positions // extent)
    return tuple(reversed(cut))


# -- statements -------------------------------------------------------------------------------------

class Store(NamedTuple):
    """Compute the positions of a tile and store them."""

    frame: Frame


class Accumulate(NamedTuple):
    """Add the positions of one iteration to the accumulators. `blocks`: sizes of the blocks of positions that are summed separately
    first, innermost first."""

    frame: Frame
    blocks: tuple[int, ...] = ()


class Update(NamedTuple):
    """Read accumulators from memory, let `inner` add to them, and write them back. `in_block`: `inner` starts from zero instead, and its
    sum is then added to memory."""

    inner: Inner
    in_block: bool = False


class Prefetch(NamedTuple):
    """A prefetch of the data that a load will read some iterations later. `node`: the load; `source`: the argument or stage that it
    reads; `ahead`: the number of iterations; `step`: elements from one iteration to the next."""

    node: int
    source: str
    ahead: int
    step: int


# -- pipelined loops --------------------------------------------------------------------------------

class Fetch(NamedTuple):
    """Prepare the copies for the iteration `ahead` further: compute their addresses, and load the data that threads cannot copy
    asynchronously into registers. In the loop, the present iteration reads its own buffers from here on. `begins`: asynchronous copies
    begin at once. `barrier`: all threads wait before the first of them."""

    ahead: int
    begins: bool
    barrier: bool = False


class Begin(NamedTuple):
    """Begin part number `part` of the asynchronous copies that are prepared. The last part commits them."""

    part: int = 0
    parts: int = 1


class Wait(NamedTuple):
    """Wait until all copies but those of the last `left` commits have arrived."""

    left: int


class Barrier(NamedTuple):
    """Let all threads of a group wait for each other."""


class Counters(NamedTuple):
    """Set up the counters of the rows that arrive in bulk, or release them (`ends`)."""

    ends: bool = False


class Load(NamedTuple):
    """Load the operands of some products of the iteration `ahead` further. `products`: their offsets along the local axes."""

    ahead: int
    products: tuple[tuple[int, ...], ...]


Step = Fetch | Begin | Wait | Barrier | Counters | Load


def barriers_of(steps: Iterable[Step]) -> int:
    """The number of barriers that some steps have."""
    return sum([isinstance(step, Barrier) or (isinstance(step, Fetch) and step.barrier) for step in steps])


class Turns(NamedTuple):
    """The turns in which the threads of a group copy a stage: thread t copies the parts t, t + `threads` and so on, one in each
    turn. A part is a vector, or a whole row. Neighbouring threads take neighbouring parts."""

    order: tuple[int, ...]      # dims, outermost first
    counts: tuple[int, ...]     # parts along each dim of `order`
    threads: int
    is_loop: bool               # Threads loop over the turns; otherwise they are straight-line code.
    steps: Mapping[int, int]    # node → how much its value grows from lane to lane of a part, if evenly

    @property
    def parts(self) -> int:
        """The number of parts."""
        return prod(self.counts)

    @property
    def whole(self) -> int:
        """The number of turns in which every thread has a part."""
        return self.parts // self.threads

    @property
    def rest(self) -> int:
        """The number of threads that have a part in one more turn."""
        return self.parts % self.threads


class AheadCopy(NamedTuple):
    """A copy that starts iterations before the one that reads it."""

    compute: Compute
    is_bulk: bool               # Each row is copied in bulk.
    is_async: bool              # Threads start the copy, and go on without waiting for it.
    is_guarded: bool            # Some threads may have no part to copy, or zeros to store.

    @property
    def turns(self) -> Turns:
        """The turns in which threads copy the stage."""
        assert self.compute.turns is not None, "copies that run ahead are shared by threads"
        return self.compute.turns


class Pipeline(NamedTuple):
    """The copies of a pipelined loop, and its steps: before the loop, at the beginning of an iteration, after given numbers of its
    products, and behind the loop. Data that an iteration has loaded into registers is stored at its end."""

    copies: tuple[AheadCopy, ...]
    ahead: int                  # iterations between the start of a copy and the one that reads it
    under_way: int              # iterations whose products may still run when a later iteration begins
    prologue: tuple[Step, ...]
    body: tuple[Step, ...]
    epilogue: tuple[Step, ...]
    between: tuple[tuple[int, Step], ...] = ()

    @property
    def later(self) -> tuple[Step, ...]:
        """The steps between the products of an iteration."""
        return tuple([step for _, step in self.between])

    @property
    def buffers(self) -> int:
        """The number of buffers of each copy."""
        return self.copies[0].compute.nest.buffers


# -- loops ------------------------------------------------------------------------------------------

class Span(Enum):
    """The iterations of a loop that run."""

    ALL = "all"                     # All iterations; in a split reduction, all iterations of one part.
    ONCE = "once"                   # A single iteration, emitted without a loop.
    NEVER = "never"                 # None: the axis is shorter than one iteration, so the tail computes all of it.
    # Up to the extent that a variable gives. Positions beyond it are guarded, unless an outer loop excludes them.
    TO_LIMIT = "to its limit"
    WHOLE = "whole"                 # The iterations that lie wholly inside the extent that a variable gives; tails compute the rest.
    ALIGNED = "aligned"             # Tiles whose vectors are aligned in the output; the tail computes both ends of the row.


class When(Enum):
    """The number of remaining positions for which a tail is made."""

    ANY = "any"
    FEW = "few"                     # At most `FEW_ROWS` positions are left.
    MANY = "many"                   # More than `FEW_ROWS` are left.


class Tail(NamedTuple):
    """A copy of a loop's body for the positions that its whole iterations leave over. `step`: positions that one iteration of the tail
    covers."""

    when: When
    step: int
    body: Body


class Loop(NamedTuple):
    """A loop of a stage around a body."""

    frame: Frame
    number: int                     # index among the loops of its stage
    body: Body
    span: Span = Span.ALL
    tails: tuple[Tail, ...] = ()
    is_moved_back: bool = False     # The last iteration begins earlier, so that it ends at the extent; decided at run time.
    blocks: tuple[int, ...] = ()    # sizes, in iterations, of the blocks that are summed separately, innermost first
    window: Window | None = None    # Iterations outside this window would add zeros; they are skipped.
    limits: tuple[Limit, ...] = ()  # Masks; iterations that they mask completely are skipped.
    pipeline: Pipeline | None = None    # copies that start iterations before the one that reads them

    def around(self, body: Body, span: Span, tails: tuple[Tail, ...] = ()) -> Loop:
        """The loop around another body; the loop itself if nothing differs."""
        if body is self.body and span is self.span and not tails and not self.tails:
            return self
        return self._replace(body=body, span=span, tails=tails)

    @property
    def loop(self) -> StageLoop:
        """The loop's entry in the frame."""
        return self.frame.loops[self.number]

    @property
    def axis(self) -> int:
        """The local axis of the loop."""
        return self.frame.loops[self.number].axis

    @property
    def is_outermost(self) -> bool:
        """Whether no other loop over the same axis is around this one."""
        return self.frame.number_of(self.loop) == 0

    def division(self) -> tuple[int, int]:
        """For a reduce loop: (number of whole iterations, positions that they leave over)."""
        loop = self.loop
        number = self.frame.number_of(loop)
        return divmod(self.frame.left(loop.axis, number), self.frame.pieces[loop.axis][number].stride)

    @property
    def stride(self) -> int:
        """Positions from one iteration to the next, in this frame."""
        return self.frame.pieces[self.axis][self.frame.number_of(self.loop)].stride

    @property
    def whole(self) -> int:
        """The number of whole iterations of a reduce loop."""
        return self.division()[0]

    @property
    def rest(self) -> int:
        """The positions of a reduce loop that whole iterations leave over."""
        return self.division()[1]


class Reduction(NamedTuple):
    """The reductions of a stage: initialize accumulators, let `inner` add to them, and store the results. `in_memory`: numbers of the
    output loops inside the reduce loops; every iteration of these has its own accumulators, in memory. `through_memory`: threads of a group
    that share the sums store their parts to shared memory, and wait for each other; then each reads the parts of its position. `barrier`:
    they also wait before they store."""

    frame: Frame
    in_memory: tuple[int, ...]
    inner: Inner
    through_memory: bool = False
    barrier: bool = False

    def around(self, inner: Inner) -> Reduction:
        """The reduction with other loops; the reduction itself if they are its own."""
        return self if inner is self.inner else self._replace(inner=inner)

    def in_frame(self, frame: Frame) -> Reduction:
        """The reduction in another frame of its stage. Output loops that have a single iteration there need no accumulators in memory."""
        if frame is self.frame:
            return self
        wide = [j for j in self.in_memory if frame.loops[j].piece.extent > 1]
        if not self.in_memory or wide[-1:] == [self.in_memory[-1]]:
            return self._replace(frame=frame)
        end, in_memory = wide[-1] + 1 if wide else -1, tuple([j for j in self.in_memory if wide and j <= wide[-1]])
        return self._replace(frame=frame, in_memory=in_memory, inner=_updated_at(self.inner, end))


def _updated_at(node: Inner, end: int) -> Inner:
    """The loops of a reduction in which memory is updated just outside of loop number `end`; -1: nowhere."""
    if isinstance(node, Update):
        return _updated_at(node.inner, end)
    if not isinstance(node, Loop):
        return node
    inside = node._replace(body=node.body._replace(inner=_updated_at(node.body.inner, end)))
    return Update(inside) if node.number == end else inside


class Compute(NamedTuple):
    """Compute a stage for its readers.

    `body`: its loops. `turns`: the threads of a group take parts of the copy that `body` stores in turn. `before`: the stages that a copy
    reads, computed before its loops. `layout`: of the value in memory, if it is stored there. `in_place`: nothing is stored, each element
    is computed where it is multiplied, so there is no body. `is_read_beyond`: readers may ask for positions outside the region.
    `barrier_first`: all threads of a group wait before anything is computed. `barrier_to_store`: they wait once the stages of `before` are
    computed."""

    nest: StageNest
    body: Body | None = None
    before: tuple[Compute, ...] = ()
    layout: Layout | None = None
    turns: Turns | None = None
    in_place: bool = False
    is_read_beyond: bool = False
    barrier_first: bool = False
    barrier_to_store: bool = False

    @property
    def stage(self) -> int:
        """The number of the stage."""
        return self.nest.r.stage.index


Inner = Loop | Reduction | Store | Accumulate | Update


class Body(NamedTuple):
    """The content of one iteration of a loop, or of the launch: stages that are computed for their readers, then the next loop or
    statement. `safe`: local axes all of whose positions are inside extents that depend on variables. `barrier`: all threads of a group wait
    once the stages are computed. `prefetches`: for loads of the stage; prefetches of the bodies around this one hold here too."""

    stages: tuple[Compute, ...]
    inner: Inner
    safe: frozenset[int] = frozenset()
    barrier: bool = False
    prefetches: tuple[Prefetch, ...] = ()

    def holding(self, stages: tuple[Compute, ...], inner: Inner) -> Body:
        """The body with as many other stages, and another end; the body itself if they are its own."""
        return self if inner is self.inner and all(map(is_, stages, self.stages)) else self._replace(stages=stages, inner=inner)

    @property
    def frame(self) -> Frame:
        """The loops of the stage at this place."""
        inner = self.inner
        while isinstance(inner, Update):
            inner = inner.inner
        return inner.frame


# -- phases -----------------------------------------------------------------------------------------

class Part(NamedTuple):
    """A loop along one axis, in an iteration of the launch that lies only partly inside the extents. `inside`: loops along the next axis
    for which that is so, or the body."""

    axis: int
    when: When
    step: int
    frame: Frame
    inside: tuple[Part, ...] | Body


class Launch(NamedTuple):
    """The outermost `num_loops` loops of a phase. Cores or groups of threads claim their iterations."""

    frame: Frame
    num_loops: int
    body: Body                              # for iterations all of whose positions are inside
    ended: frozenset[int] = frozenset()     # local axes whose extent depends on a variable, with all their loops in the launch
    moved_back: frozenset[int] = frozenset()            # axes of `ended` whose last tile begins earlier, at run time
    partly: tuple[Part, ...] | Body | None = None       # for iterations only some of whose positions are inside
    # local axes whose last iterations run first, because a mask leaves them the most work
    longest_first: frozenset[int] = frozenset()
    last: Body | None = None                # for the last iteration, if its vectors are the only ones that are not aligned
    is_non_temporal: bool = False           # The output is stored past the caches.

    @property
    def loops(self) -> tuple[StageLoop, ...]:
        """The loops that make the launch, outermost first."""
        return self.frame.loops[:self.num_loops]

    @property
    def iterations(self) -> int:
        """The number of iterations of the launch; if it runs a split reduction, the iterations of one part."""
        return prod(loop.piece.extent for loop in self.loops)


class PhaseKind(Enum):
    """The result of a phase."""

    OUTPUT = "output"
    TEMPORARY = "temporary"
    PARTIAL = "partial results"
    COMBINE = "combined results"


class Split(NamedTuple):
    """A reduction that is split into parts; every part is an iteration of the phase's launch."""

    axis: int               # local axis
    chunk: int              # positions of one part
    parts: int


class Phase(NamedTuple):
    """One launch of a program. `is_once`: it reads nothing but constants, so it runs once, at prepare. `split`: how its reduction is split
    into parts, or None."""

    stage: int
    kind: PhaseKind
    is_once: bool
    launch: Launch
    split: Split | None = None


def with_loops(change: Callable[[Loop], Loop], body: Body) -> Body:
    """Replace every loop of a body, and of the stages in it, by `change(loop)`; inner loops come first."""
    return body.holding(tuple([_with_loops_of_stage(change, c) for c in body.stages]), _with_loops(change, body.inner))


def _with_loops_of_stage(change: Callable[[Loop], Loop], node: Compute) -> Compute:
    before = tuple([_with_loops_of_stage(change, c) for c in node.before]) if node.before else ()
    if node.body is None and not before:
        return node
    return node._replace(body=None if node.body is None else with_loops(change, node.body), before=before)


def _with_loops(change: Callable[[Loop], Loop], node: Inner) -> Inner:
    if isinstance(node, Loop):
        tails = tuple([t._replace(body=with_loops(change, t.body)) for t in node.tails])
        return change(node.around(with_loops(change, node.body), node.span, tails))
    if isinstance(node, Reduction):
        return node.around(_with_loops(change, node.inner))
    if isinstance(node, Update):
        return node._replace(inner=_with_loops(change, node.inner))
    return node


def with_bodies(change: Callable[[Body], Body], launch: Launch) -> Launch:
    """Replace every body of a launch by `change(body)`."""
    return launch._replace(body=change(launch.body), last=None if launch.last is None else change(launch.last),
                           partly=None if launch.partly is None else _with_parts(change, launch.partly))


def _with_parts(change: Callable[[Body], Body], parts: tuple[Part, ...] | Body) -> tuple[Part, ...] | Body:
    if isinstance(parts, Body):
        return change(parts)
    return tuple([p._replace(inside=_with_parts(change, p.inside)) for p in parts])
