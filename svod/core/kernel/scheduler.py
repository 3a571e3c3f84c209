"""A kernel's state during search: an immutable value.

The axis table is append-only: a row comes from the AST (every axis of every stage) or from a split, keeps its name for ever, and has extent
1 when it is used up. Loop order, placement of stages and hints are fields of their own. `svod.core.kernel.apply` makes the state after an
opt; `svod.core.cost` prices a state."""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, NamedTuple, TypeVar

from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target
from svod.errors import KernelOptError

# places of a stage
INLINE = "inline"   # recomputed by its readers
AUTO = "auto"       # at the innermost loop that holds all its readers and does not repeat it
ROOT = "root"       # a phase of its own, its result a temporary
StagePlace = str | int  # one of these, or a row id: inside that loop

LOOP, UPCAST, UNROLL = "loop", "upcast", "unroll"
DOT = "dot"     # the positions that one dot instruction sums up
LOCAL, GROUP = "local", "group"     # the threads of a group: positions of an output, parts of a reduction


class Opt(NamedTuple):
    """One opt: what, on which named axis or stage, how much. As JSON: [op, axis, arg]."""

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


class Loop(NamedTuple):
    """A row of the axis table. The axis' coordinate is the sum of stride·position over its rows."""

    name: str
    axis: int
    extent: int
    stride: int
    role: str


class IntrinsicChoice(NamedTuple):
    """TC's choice: the reduce axis, the instruction's name, and the axes of the rows and columns of its tiles (-1 without tiles). Or
    HOLD's: the axis is -1, as the instruction computes nothing of the stage. Its positions lie as those of results do."""

    axis: int
    name: str
    rows: int = -1
    columns: int = -1

    @property
    def computes(self) -> bool:
        """Whether the instruction sums up the stage."""
        return self.axis >= 0


class ParallelLoop(NamedTuple):
    """A loop whose iterations cores claim."""

    row: int
    cores: int


class ReductionParts(NamedTuple):
    """A reduction that is cut into parts, one iteration of a phase each."""

    axis: int
    parts: int


class Pipelined(NamedTuple):
    """A loop whose copies into shared memory run ahead of what reads them: they have `buffers` of them."""

    row: int
    buffers: int


T = TypeVar("T")


class Derived(Generic[T]):
    """A function of a state whose result is remembered on the state; used as a decorator."""

    def __init__(self, make: Callable[[Scheduler], T]) -> None:
        self._make = make
        update_wrapper(self, make)

    def __call__(self, state: Scheduler, make: Callable[[Scheduler], T] | None = None) -> T:
        """The result for a state. `make`: another way to the same result. Raises as the function does."""
        found: T | None = state._derived.get(self)
        if found is None:
            found = state._derived[self] = (make or self._make)(state)
        return found

    def give(self, new: Scheduler, value: T | None) -> None:
        """Let `new` remember a value that is known to be its own. Nothing happens for None."""
        if value is not None:
            new._derived[self] = value

    def known(self, state: Scheduler) -> T | None:
        """The value that a state remembers; None where it was not asked for."""
        found: T | None = state._derived.get(self)
        return found


class Scheduler:
    """A state. Fields are read-only; equal states have equal `digest`."""

    __slots__ = (
        "_derived",
        "_digest",
        "applied_opts",
        "axis_rows",
        "dots",
        "kernel",
        "online",
        "order",
        "pads",
        "pipeline",
        "place",
        "prefetch",
        "rows",
        "split_reduce",
        "stream",
        "target",
        "thread",
        "vector_rows",
    )

    kernel: Kernel
    target: Target
    rows: tuple[Loop, ...]
    axis_rows: tuple[tuple[int, ...], ...]   # per axis: its rows, outermost first
    order: tuple[tuple[int, ...], ...]       # per stage: its loop rows of more than one iteration, outermost first
    place: tuple[StagePlace, ...]             # per stage
    vector_rows: tuple[int, ...]                   # per stage: the row that LANES chose, or -1
    pads: tuple[int, ...]                    # per axis: padded extent, or 0
    thread: ParallelLoop | None              # the parallel loop of the output stage
    split_reduce: ReductionParts | None      # partial results per core and a combining phase
    stream: bool                             # the output is stored past the caches
    prefetch: tuple[tuple[str, int], ...]    # (argument p0, p1, … or stage at the root, iterations ahead) of what is prefetched
    pipeline: Pipelined | None
    dots: tuple[IntrinsicChoice | None, ...]          # per stage: the instruction that TC chose
    online: tuple[tuple[str, int], ...]      # (stage, block) of each ONLINE, (stage, 0) of FLATTEN; `kernel` is what they made
    applied_opts: tuple[Opt, ...]
    _digest: bytes | None
    _derived: dict[Derived[Any], Any]

    def __init__(self, kernel: Kernel, target: Target):
        self.kernel, self.target = kernel, target
        self.rows = tuple(Loop(a.name, a.index, a.extent, 1, LOOP) for a in kernel.axes)
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
        self.online = ()
        self.applied_opts = ()
        self._digest, self._derived = None, {}

    def copy(self, **changes: Any) -> Scheduler:
        """This state with some fields replaced."""
        new = object.__new__(Scheduler)
        new.kernel, new.target, new.rows, new.axis_rows, new.order = self.kernel, self.target, self.rows, self.axis_rows, self.order
        new.place, new.vector_rows, new.pads = self.place, self.vector_rows, self.pads
        new.thread, new.split_reduce = self.thread, self.split_reduce
        new.stream, new.prefetch, new.dots, new.online = self.stream, self.prefetch, self.dots, self.online
        new.pipeline = self.pipeline
        new.applied_opts = self.applied_opts
        for name, value in changes.items():
            setattr(new, name, value)
        new._digest, new._derived = None, {}
        return new

    # -- looking up -----------------------------------------------------------------------------
    def row_id(self, name: str) -> int:
        """The row called `name`. Raises KernelOptError."""
        for i, r in enumerate(self.rows):
            if r.name == name:
                return i
        raise KernelOptError(f"no axis {name!r} in this state; axes are {', '.join(r.name for r in self.rows)}")

    def stage_id(self, name: str) -> int:
        """The stage called `name` ("out", "s0", …). Raises KernelOptError."""
        return self.kernel.stage_named(name).index

    def stage_of_row(self, row: int) -> int:
        return self.kernel.axes[self.rows[row].axis].stage

    def axis_extent(self, axis: int) -> int:
        """The axis' extent, padding included."""
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
            # flat, as every proposal of a search is asked for it: the rows of an axis, and the loops of a stage, end in -1, which is no
            # stride and no axis; then one place and one vector per stage
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
            if self.online:
                content = (*content, self.online)
            if self.pipeline:
                content = (*content, "pipeline", ident(self.pipeline.row), self.pipeline.buffers)
            if self.prefetch:
                content = (*content, "prefetch", self.prefetch)
            self._digest = hashlib.blake2b(repr(content).encode(), digest_size=16).digest()
        return self._digest

    def __repr__(self) -> str:
        return f"<Scheduler {self.kernel.key[:12]} [{' '.join(map(str, self.applied_opts))}]>"


def cores_of(state: Scheduler) -> int:
    """The number of cores that share a state's work: THREAD's, or the parts of a reduction cut over cores."""
    return state.thread.cores if state.thread else state.split_reduce.parts if state.split_reduce else 1
