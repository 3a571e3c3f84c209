"""Nodes of the loop tree, all immutable. A program is a tuple of phases; a phase has a launch, and the launch a body.

    y[i] = Σ x[i, k] over 100 × 70, UPCAST(o0, 16) UNROLL(r0, 4)

    Phase out
      Launch o0 by 16                 7 iterations; the last tile is moved back
        Reduction
          Loop r0 by 4                17 iterations
            Accumulate                16 × 4 positions
          Tail                        a shorter copy of the body, for the last 2 positions
            Accumulate                16 × 2 positions

A body is what one iteration runs: first the stages that are computed there for their readers, then the next loop, reduction or statement.
`Frame` is a stage's loops as they are at a place of the tree: a tail has another frame than the loop that it belongs to.
"""
from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from math import prod
from typing import NamedTuple

from svod.core.kernel.contraction import Window
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.layout import Layout, block_of, is_contiguous, is_exact
from svod.core.kernel.loop_nest import StageNest
from svod.core.kernel.online import Limit
from svod.core.kernel.placement import EmittedLoop
from svod.core.kernel.scheduler import LOOP

NO_POINT = -1           # the point of a loop inside which no stage lives: of a copy, or over parts of sums
UNCHECKED = -1          # the extent against which positions of an axis are checked that are inside anyway


class Ends(Enum):
    """How the tiles of an axis end at its extent. `Frame.ends` alone decides."""

    EXACT = "exact"                 # Tiles divide the extent.
    MOVED_BACK = "moved back"       # The last tile begins earlier, and computes some positions again.
    GUARDED = "guarded"             # Positions beyond the extent are masked.
    PEELED = "peeled"               # The remainder of a sum is a shorter copy of the body.


class StageLoop(NamedTuple):
    """A loop of a stage."""

    axis: int                       # local axis
    piece: EmittedLoop
    point: int                      # the depth inside this loop, in the state's order of the stage, where stages live; or NO_POINT


class Frame(NamedTuple):
    """The loops of a stage at a place of the tree, as one thread runs them."""

    r: ResolvedStage
    pieces: tuple[tuple[EmittedLoop, ...], ...]     # per local axis, outermost first
    bounds: tuple[int, ...]                         # per local axis: positions that it spans here
    fixed: frozenset[int]                           # local axes of which no position may be computed twice
    checked: tuple[int, ...]                        # per local axis: the extent that positions are checked against; (): none of them is
    vector_axis: int                                # the local axis whose positions are lanes, or -1
    vector_row: int                                 # the row of it that is the vector
    width: int                                      # lanes of a vector
    loops: tuple[StageLoop, ...]                    # outermost first
    apart: tuple[int, ...]                          # per local axis: positions by which the last thread of a group starts later
    is_aligned: bool = False                        # Tiles are inside, and their vectors begin at multiples of their size in the output.

    @property
    def num_outs(self) -> int:
        """The number of output axes, which come before the reduce axes."""
        return len(self.r.stage.outs)

    def ends(self, a: int) -> Ends:
        """How the tiles of an axis end."""
        if is_exact(self.pieces[a], self.bounds[a]) or (self.is_aligned and a == self.vector_axis):
            return Ends.EXACT
        if a in self.fixed:
            return Ends.GUARDED
        return Ends.MOVED_BACK if a < self.num_outs else Ends.PEELED

    def reach(self, a: int) -> int:
        """Positions that one iteration of the innermost loop of an axis covers."""
        return block_of(self.pieces[a])

    def num_loops(self, a: int) -> int:
        """The number of loops of an axis."""
        return sum(p.role == LOOP for p in self.pieces[a])

    def number_of(self, loop: StageLoop) -> int:
        """The number of a loop among the rows of its axis, as the axis is cut here."""
        return next(i for i, p in enumerate(self.pieces[loop.axis]) if p.row == loop.piece.row)

    def left(self, a: int, at: int) -> int:
        """Positions of a reduce axis that its rows from number `at` on must cover."""
        pieces = self.pieces[a]
        return self.bounds[a] if all(p.extent == 1 for p in pieces[:at]) else pieces[at].extent * pieces[at].stride

    def vector_stride(self) -> int:
        """Positions from lane to lane."""
        if self.vector_axis < 0:
            return 1
        return next((p.stride for p in self.pieces[self.vector_axis] if p.row == self.vector_row), 1)

    def tail_step(self, a: int) -> int:
        """Positions per iteration for the remainder of the innermost loop of an axis that a variable ends: single positions where grouping
        does not make them cheaper, a vector where the axis is the vector, half of a tile of accumulators."""
        reach, pieces = self.reach(a), self.pieces[a]
        if not is_contiguous(pieces):
            return reach
        if a == self.vector_axis:
            return self.width if self.vector_stride() == 1 and reach % self.width == 0 else reach
        if a >= self.num_outs or not self.r.reductions:
            return 1
        return -(-reach // 2)

    def narrowed(self, a: int, step: int) -> Frame:
        """The frame of iterations of `step` positions of an axis, the last of which may be outside."""
        if step == self.reach(a):
            return self
        cut: list[EmittedLoop] = []
        left, stride = step, 1
        for p in reversed(self.pieces[a]):
            e = p.extent if p.role == LOOP else min(p.extent, left)
            cut.append(EmittedLoop(p.row, p.role, e, stride))
            stride *= e
            left = left if p.role == LOOP else -(-left // e)
        return self._replace(pieces=self._with(a, tuple(reversed(cut))))

    def shortened(self, a: int, at: int, rest: int) -> Frame:
        """The frame of the last, shorter iteration of a reduce loop, number `at` of its axis: inner rows are cut to `rest` positions."""
        cut = []
        left, stride = rest, 1
        pieces = self.pieces[a]
        for p in reversed(pieces[at + 1:]):
            e = min(p.extent, left)
            cut.append(EmittedLoop(p.row, p.role, e, stride))
            stride *= e
            left = -(-left // e)
        cut.reverse()
        shorter = (*(p._replace(extent=1) for p in pieces[:at + 1]), *cut)
        return self._replace(pieces=self._with(a, shorter), bounds=(*self.bounds[:a], rest, *self.bounds[a + 1:]))

    def _with(self, a: int, pieces: tuple[EmittedLoop, ...]) -> tuple[tuple[EmittedLoop, ...], ...]:
        return (*self.pieces[:a], pieces, *self.pieces[a + 1:])


# -- statements -------------------------------------------------------------------------------------

class Store(NamedTuple):
    """The positions of a tile are computed and stored."""

    frame: Frame


class Accumulate(NamedTuple):
    """The positions of one iteration are added to the accumulators. `blocks`: sizes of blocks of positions that have accumulators of
    their own, innermost first."""

    frame: Frame
    blocks: tuple[int, ...] = ()


class Update(NamedTuple):
    """Accumulators in memory are read, `inner` adds to them, and they are written back. `in_block`: `inner` begins with new ones, whose sum
    is added to memory."""

    inner: Inner
    in_block: bool = False


# -- loops ------------------------------------------------------------------------------------------

class Span(Enum):
    """The iterations of a loop."""

    ALL = "all"                     # All, or those of a part of a cut reduction.
    ONCE = "once"                   # A single one: no loop.
    NEVER = "never"                 # None: the axis is shorter than an iteration, and its tail has it all.
    TO_LIMIT = "to its limit"       # Up to where a variable says; positions beyond are guarded, or a loop around makes sure there are none.
    WHOLE = "whole"                 # Those that lie inside of what a variable says; tails have the rest.
    ALIGNED = "aligned"             # Tiles whose vectors begin at multiples of their size; tails have the ends of the row.


class When(Enum):
    """The remainder that a tail is for."""

    ANY = "any"
    FEW = "few"                     # At most `FEW_ROWS` positions are left.
    MANY = "many"                   # More are.


class Tail(NamedTuple):
    """A copy of a loop's body for positions that its iterations leave. `step`: positions of an iteration."""

    when: When
    step: int
    frame: Frame
    body: Body


class Loop(NamedTuple):
    """A loop of a stage around a body."""

    frame: Frame
    number: int                     # among the loops of its stage
    body: Body
    span: Span = Span.ALL
    tails: tuple[Tail, ...] = ()
    is_moved_back: bool = False     # The last iteration begins earlier, at run time, where there are positions enough for it.
    blocks: tuple[int, ...] = ()    # iterations of blocks with accumulators of their own, innermost first
    window: Window | None = None    # The iterations outside of it add zeros, and are skipped.
    limits: tuple[Limit, ...] = ()  # Masks that leave nothing of some iterations, which are skipped.
    ahead: tuple[Compute, ...] = ()     # copies that run ahead of the iteration that reads them

    @property
    def loop(self) -> StageLoop:
        """The loop as the frame has it."""
        return self.frame.loops[self.number]

    @property
    def axis(self) -> int:
        """The local axis of the loop."""
        return self.loop.axis

    @property
    def is_outermost(self) -> bool:
        """Whether no other row of the axis is around the loop."""
        return self.frame.number_of(self.loop) == 0

    @property
    def stride(self) -> int:
        """Positions from one iteration to the next, as the axis is cut here."""
        return self.frame.pieces[self.axis][self.frame.number_of(self.loop)].stride

    @property
    def whole(self) -> int:
        """Whole iterations of a reduce loop."""
        return self.frame.left(self.axis, self.frame.number_of(self.loop)) // self.stride

    @property
    def rest(self) -> int:
        """Positions of a reduce loop that whole iterations leave."""
        return self.frame.left(self.axis, self.frame.number_of(self.loop)) % self.stride


class Reduction(NamedTuple):
    """The reductions of a stage: accumulators begin, `inner` adds to them, and results are stored. `in_memory`: numbers of the output loops
    inside the reduce loops; each of their iterations has accumulators of its own, in memory."""

    frame: Frame
    in_memory: tuple[int, ...]
    inner: Inner


class Compute(NamedTuple):
    """A stage is computed for its readers. `frame` and `body`: its loops, which are rows of the state, or, for a copy, follow from its
    layout; None where all threads of a group take parts of a copy in turn. `before`: stages that a copy reads, computed before its loops.
    `layout`: how it lies in memory, if it does. `in_place`: its elements are computed where they are multiplied, and nothing is stored.
    `safe`: local axes all of whose positions are inside of extents that variables end. `is_read_beyond`: readers may ask for positions
    outside of its region."""

    nest: StageNest
    frame: Frame | None = None
    body: Body | None = None
    before: tuple[Compute, ...] = ()
    layout: Layout | None = None
    in_place: bool = False
    safe: frozenset[int] = frozenset()
    is_read_beyond: bool = False

    @property
    def stage(self) -> int:
        """The number of the stage."""
        return self.nest.r.stage.index


Inner = Loop | Reduction | Store | Accumulate | Update


class Body(NamedTuple):
    """What one iteration runs."""

    stages: tuple[Compute, ...]
    inner: Inner


# -- phases -----------------------------------------------------------------------------------------

class Part(NamedTuple):
    """A loop over what is left of an iteration of a launch along an axis, in steps; `inside`: the same along the next axis, or a body."""

    axis: int
    when: When
    step: int
    frame: Frame
    inside: tuple[Part, ...] | Body


class Launch(NamedTuple):
    """The outermost loops of a phase, whose iterations cores or groups of threads claim: the first `num_loops` ones of the frame."""

    frame: Frame
    num_loops: int
    body: Body                              # of an iteration all of whose positions are inside
    ended: frozenset[int] = frozenset()     # local axes that a variable ends, and all of whose loops are in the launch
    moved_back: frozenset[int] = frozenset()            # those of them whose last tile begins earlier, at run time
    partly: tuple[Part, ...] | Body | None = None       # of an iteration only some of whose positions are inside
    longest_first: frozenset[int] = frozenset()         # local axes whose last iterations run first, as a mask leaves them most
    last: Body | None = None                # of the last iteration, where its vectors alone are not aligned

    @property
    def loops(self) -> tuple[StageLoop, ...]:
        """The loops that make the launch, outermost first."""
        return self.frame.loops[:self.num_loops]

    @property
    def iterations(self) -> int:
        """The number of iterations, of a whole reduction."""
        return prod(loop.piece.extent for loop in self.loops)


class PhaseKind(Enum):
    """The result of a phase."""

    OUTPUT = "output"
    TEMPORARY = "temporary"
    PARTIAL = "partial results"
    COMBINE = "combined results"


class Split(NamedTuple):
    """A reduction cut into parts, one iteration of its phase each."""

    axis: int               # local axis
    chunk: int              # positions of a part
    parts: int


class Phase(NamedTuple):
    """One launch of a program. `is_once`: it reads constants alone, and runs at prepare. `split`: how its reduction is cut."""

    stage: int
    kind: PhaseKind
    is_once: bool
    launch: Launch
    split: Split | None = None


def with_loops(change: Callable[[Loop], Loop], body: Body) -> Body:
    """A body all of whose loops, those of the stages in it among them, are what `change` makes of them, innermost ones first."""
    return Body(tuple([_with_loops_of_stage(change, c) for c in body.stages]), _with_loops(change, body.inner))


def _with_loops_of_stage(change: Callable[[Loop], Loop], node: Compute) -> Compute:
    before = tuple([_with_loops_of_stage(change, c) for c in node.before]) if node.before else ()
    if node.body is None and not before:
        return node
    return node._replace(body=None if node.body is None else with_loops(change, node.body), before=before)


def _with_loops(change: Callable[[Loop], Loop], node: Inner) -> Inner:
    if isinstance(node, Loop):
        tails = tuple([t._replace(body=with_loops(change, t.body)) for t in node.tails])
        return change(node._replace(body=with_loops(change, node.body), tails=tails))
    if isinstance(node, (Reduction, Update)):
        return node._replace(inner=_with_loops(change, node.inner))
    return node


def with_bodies(change: Callable[[Body], Body], launch: Launch) -> Launch:
    """A launch all of whose bodies are what `change` makes of them."""
    return launch._replace(body=change(launch.body), last=None if launch.last is None else change(launch.last),
                           partly=None if launch.partly is None else _with_parts(change, launch.partly))


def _with_parts(change: Callable[[Body], Body], parts: tuple[Part, ...] | Body) -> tuple[Part, ...] | Body:
    if isinstance(parts, Body):
        return change(parts)
    return tuple([p._replace(inside=_with_parts(change, p.inside)) for p in parts])
