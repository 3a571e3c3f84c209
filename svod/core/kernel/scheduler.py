"""A kernel's state during search: an immutable value.

The axis table is append-only. A row comes from the AST (every axis of every stage) or from a split, keeps its name for ever, and has extent
1 once splits have used it up. Loop order, placement of stages and hints are separate fields. `svod.core.kernel.apply` computes the state
after an opt; `svod.core.cost` predicts a state's time."""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, NamedTuple, TypeVar

from svod.core.kernel.kernel import Kernel
from svod.core.kernel.numerics import canonical_sum
from svod.core.machine.target import SAME, Target
from svod.errors import KernelOptError

# places of a stage
INLINE = "inline"   # recomputed at each read
AUTO = "auto"       # computed at the innermost loop that holds all its readers and does not repeat the work
ROOT = "root"       # computed in its own phase, which stores a temporary
StagePlace = str | int  # one of these, or the id of a loop row: computed inside that loop

LOOP, UPCAST, UNROLL = "loop", "upcast", "unroll"
DOT = "dot"     # the positions that one dot instruction sums up, or a tile covers
LOCAL, GROUP = "local", "group"     # bound to threads of a group: positions of an output; parts of a reduction


class Opt(NamedTuple):
    """One opt: its name, the axis or stage that it changes, and its argument. As JSON: [op, axis, arg]."""

    op: str
    axis: str
    arg: Any = None

    @staticmethod
    def from_json(data: Any) -> Opt:
        """Validate [op, axis, arg]; lists inside become tuples. Raises KernelOptError."""
        if not isinstance(data, (list, tuple)) or len(data) not in (2, 3) or not all(isinstance(x, str) for x in data[:2]):
            raise KernelOptError(f"an opt is [op, axis, arg], found {data!r}")
        arg = data[2] if len(data) == 3 else None
        return Opt(data[0], data[1], tuple(arg) if isinstance(arg, list) else arg)

    def to_json(self) -> list[Any]:
        return [self.op, self.axis, list(self.arg) if isinstance(self.arg, tuple) else self.arg]

    def __str__(self) -> str:
        if self.arg is None:
            return f"{self.op}({self.axis})"
        arg = ",".join(map(str, self.arg)) if isinstance(self.arg, tuple) else self.arg
        return f"{self.op}({self.axis}, {arg})"


class AxisLoop(NamedTuple):
    """A row of the axis table: one loop. The coordinate along an axis is the sum of stride·position over its rows."""

    name: str
    axis: int
    extent: int
    stride: int
    role: str


class IntrinsicChoice(NamedTuple):
    """The instruction that TC chose for a stage: the reduce axis, the instruction's name, and the axes of its tiles' rows and columns (-1
    without tiles). HOLD's choice has axis -1: the instruction computes nothing, but the stage is laid out like its results."""

    axis: int
    name: str
    rows: int = -1
    columns: int = -1

    @property
    def computes(self) -> bool:
        """Whether the instruction computes the stage's sums."""
        return self.axis >= 0


class ParallelLoop(NamedTuple):
    """A loop whose iterations are spread over cores."""

    row: int
    cores: int


class ReductionParts(NamedTuple):
    """A reduction split into parts, each computed by one iteration of a phase."""

    axis: int
    parts: int


class Pipelined(NamedTuple):
    """A loop whose copies into shared memory start iterations before they are read, and so have `buffers` buffers each."""

    row: int
    buffers: int


T = TypeVar("T")


class Derived(Generic[T]):
    """Decorator: a function of a state whose result is cached on the state."""

    def __init__(self, make: Callable[[Scheduler], T]) -> None:
        self._make = make
        update_wrapper(self, make)

    def __call__(self, state: Scheduler, make: Callable[[Scheduler], T] | None = None) -> T:
        """The result for a state, from the cache if it is there. `make`: another function that computes the same result. Raises what the
        function raises."""
        found: T | None = state._derived.get(self)
        if found is None:
            found = state._derived[self] = (make or self._make)(state)
        return found

    def give(self, new: Scheduler, value: T | None) -> None:
        """Store the result for `new`, which must be correct for it. Nothing happens for None."""
        if value is not None:
            new._derived[self] = value

    def known(self, state: Scheduler) -> T | None:
        """The cached result for a state; None if it was not computed yet."""
        found: T | None = state._derived.get(self)
        return found


class Scheduler:
    """A state. Fields are read-only; equal states have equal digests."""

    __slots__ = (
        "_derived",
        "_digest",
        "applied_opts",
        "axis_rows",
        "dots",
        "kernel",
        "order",
        "pads",
        "pipeline",
        "place",
        "prefetch",
        "rewrites",
        "rows",
        "split_reduce",
        "stream",
        "target",
        "thread",
        "vector_rows",
    )

    kernel: Kernel
    target: Target
    rows: tuple[AxisLoop, ...]
    axis_rows: tuple[tuple[int, ...], ...]   # per axis: its rows, outermost first
    order: tuple[tuple[int, ...], ...]       # per stage: its loop rows of several iterations, outermost first
    place: tuple[StagePlace, ...]             # per stage
    vector_rows: tuple[int, ...]                   # per stage: the vector row that LANES chose, or -1
    pads: tuple[int, ...]                    # per axis: its extent with padding, or 0 without
    thread: ParallelLoop | None              # the loop of the output stage that THREAD spreads over cores
    split_reduce: ReductionParts | None      # the reduction that THREAD or SPLITK splits into parts; a second phase combines them
    stream: bool                             # whether the output is stored non-temporally, past the caches
    prefetch: tuple[tuple[str, int], ...]    # per PREFETCH: (name of an argument, "p0", or of a stage at the root, "s0"; iterations ahead)
    pipeline: Pipelined | None
    dots: tuple[IntrinsicChoice | None, ...]          # per stage: the instruction that TC or HOLD chose
    rewrites: tuple[Opt, ...]       # the ONLINE, FLATTEN, WINOGRAD and ROUND that `kernel` was rewritten by
    applied_opts: tuple[Opt, ...]
    _digest: bytes | None
    _derived: dict[Derived[Any], Any]

    def __init__(self, kernel: Kernel, target: Target):
        self.kernel, self.target = kernel, target
        self.rows = tuple(AxisLoop(a.name, a.index, a.extent, 1, LOOP) for a in kernel.axes)
        self.axis_rows = tuple((a.index,) for a in kernel.axes)
        self.order = tuple(tuple([a for a in s.outs + s.reds if kernel.axes[a].extent > 1]) for s in kernel.stages)
        self.place = tuple(ROOT if s.is_output else AUTO if s.has_reduce else INLINE for s in kernel.stages)
        self.vector_rows = (-1,) * len(kernel.stages)
        self.pads = (0,) * len(kernel.axes)
        self.thread = self.split_reduce = None
        self.stream = False
        self.prefetch = ()
        self.pipeline = None
        self.dots = (None,) * len(kernel.stages)
        self.rewrites = ()
        self.applied_opts = ()
        self._digest, self._derived = None, {}
        if target.numerics == SAME:
            self._begin_in_order()

    def _begin_in_order(self) -> None:
        """Give each sum the accumulators of its canonical order: they are not the choice of a chain."""
        for s in self.kernel.stages:
            canonical = canonical_sum(self.kernel, s.index)
            if canonical is None or canonical.lanes == 1:
                continue
            if canonical.parts > 1:
                self.split_reduce = ReductionParts(s.reds[-1], canonical.parts)
            row, new, (name, axis, extent, _, _) = s.reds[-1], len(self.rows), self.rows[s.reds[-1]]
            loop = AxisLoop(name, axis, -(-extent // canonical.lanes), canonical.lanes, LOOP)
            lanes = AxisLoop(f"{name}.in", axis, canonical.lanes, 1, UPCAST)
            self.rows = (*self.rows[:row], loop, *self.rows[row + 1:], lanes)
            self.axis_rows = (*self.axis_rows[:axis], (row, new), *self.axis_rows[axis + 1:])
            if loop.extent == 1:
                kept = tuple([x for x in self.order[s.index] if x != row])
                self.order = (*self.order[:s.index], kept, *self.order[s.index + 1:])

    def copy(self, **changes: Any) -> Scheduler:
        """A copy of this state with some fields replaced."""
        new = object.__new__(Scheduler)
        new.kernel, new.target, new.rows, new.axis_rows, new.order = self.kernel, self.target, self.rows, self.axis_rows, self.order
        new.place, new.vector_rows, new.pads = self.place, self.vector_rows, self.pads
        new.thread, new.split_reduce = self.thread, self.split_reduce
        new.stream, new.prefetch, new.dots, new.rewrites = self.stream, self.prefetch, self.dots, self.rewrites
        new.pipeline = self.pipeline
        new.applied_opts = self.applied_opts
        for name, value in changes.items():
            setattr(new, name, value)
        new._digest, new._derived = None, {}
        return new

    # -- looking up -----------------------------------------------------------------------------
    def row_id(self, name: str) -> int:
        """The number of the row called `name`. Raises KernelOptError if there is none."""
        for i, r in enumerate(self.rows):
            if r.name == name:
                return i
        raise KernelOptError(f"no axis {name!r} in this state; axes are {', '.join(r.name for r in self.rows)}")

    def stage_id(self, name: str) -> int:
        """The number of the stage called `name` ("out", "s0", …). Raises KernelOptError if there is none."""
        return self.kernel.stage_named(name).index

    def stage_of_row(self, row: int) -> int:
        return self.kernel.axes[self.rows[row].axis].stage

    def axis_extent(self, axis: int) -> int:
        """The axis' extent, with its padding."""
        return self.pads[axis] or self.kernel.axes[axis].extent

    @property
    def inlined(self) -> frozenset[int]:
        return frozenset(i for i, p in enumerate(self.place) if p == INLINE)

    # -- identity -------------------------------------------------------------------------------
    @property
    def digest(self) -> bytes:
        """Identity of the state (16 bytes): axis table, orders, placements and hints, but neither names nor the chain's text."""
        if self._digest is None:
            rows = self.rows

            def ident(row: int) -> tuple[int, int]:
                return rows[row].axis, rows[row].stride
            # The table is a flat list, because a search computes the digest of every proposal. The rows of an axis and the loops of a
            # stage each end in -1, which no stride and no axis equals. One place and one vector per stage follow.
            table: list[object] = []
            for ids in self.axis_rows:
                for r in ids:
                    _, _, extent, stride, role = rows[r]
                    if extent > 1:
                        table += (stride, extent, role)
                table.append(-1)
            for ids in self.order:
                for r in ids:
                    table += ident(r)
                table.append(-1)
            table += [ident(p) if isinstance(p, int) else p for p in self.place]
            table += [ident(r) if r >= 0 else None for r in self.vector_rows]
            thread = (ident(self.thread.row), self.thread.cores) if self.thread else None
            content: tuple[object, ...] = (table, self.pads, thread, self.split_reduce and tuple(self.split_reduce), self.stream)
            if any(self.dots):
                content = (*content, tuple(d and tuple(d) for d in self.dots))
            if self.rewrites:
                content = (*content, tuple([(opt.axis, opt.arg or 0) for opt in self.rewrites]))
            if self.pipeline:
                content = (*content, "pipeline", ident(self.pipeline.row), self.pipeline.buffers)
            if self.prefetch:
                content = (*content, "prefetch", self.prefetch)
            self._digest = hashlib.blake2b(repr(content).encode(), digest_size=16).digest()
        return self._digest

    def __repr__(self) -> str:
        return f"<Scheduler {self.kernel.key[:12]} [{' '.join(map(str, self.applied_opts))}]>"


def cores_of(state: Scheduler) -> int:
    """The number of cores that share a state's work: the cores of THREAD, or the parts of a split reduction; else 1."""
    parts = state.split_reduce.parts if state.split_reduce else 1
    return state.thread.cores if state.thread else min(parts, state.target.threads) if state.target.numerics == SAME else parts


def cut_of(state: Scheduler, s: int) -> ReductionParts | None:
    """The parts into which THREAD or SPLITK splits the reduction of stage `s`."""
    split = state.split_reduce
    return split if split is not None and state.kernel.axes[split.axis].stage == s else None
