"""The work of a stage, counted on the loop tree, independent of the machine: how often each operation runs, and its memory accesses.

    y[i, j] = Σ a[i, k]·b[k, j], UPCAST(o0, 4) UPCAST(o1, 16), in vectors of 16
        loops         o0/4 × o1/16 × r0: the body runs 16·4·64 times
        positions     4 × 1 × 1 vectors side by side, as many accumulators
        multiply-adds 4 in the body
        accesses      4 loads of a, one of b; 4 stores outside of r0

A value that an inner loop does not change is computed once outside that loop, and counted there. `cpu.py` turns the counts into cycles of a
core, `groups/group_cost.py` into cycles of a device with groups of threads.

The tree says how often loops run, and where blocks of long sums end (`runs.py`). The loop nest, from which the tree is made, says the rest:
the region of a stage, the positions side by side, and memory layouts.
"""
from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import NamedTuple

from svod.core.cost.footprint import touched
from svod.core.cost.runs import StageRuns
from svod.core.ir.uop import TRANSCENDENTAL
from svod.core.kernel.kernel import LinearIndex, Node
from svod.core.kernel.loop_nest import LoopNest, stored_bytes
from svod.core.kernel.scheduler import DOT, GROUP, LOCAL, LOOP, UPCAST, Scheduler
from svod.core.machine.levels import MemorySpace

Coefs = tuple[tuple[int, int], ...]     # (local axis, elements or bytes between neighbours along it)
_TRANSCENDENTAL = frozenset(op.value for op in TRANSCENDENTAL)
_DIVISIONS = ("FDIV", "RECIPROCAL", "SQRT")
_BOUND = (LOOP, DOT, LOCAL, GROUP)      # roles of loops that run positions one after the other, or bind them to instructions and threads


class OperationKind(IntEnum):
    """Kinds of operations with equal prices."""

    PLAIN = 0
    CHOICE = 1              # minimum or maximum
    DIVISION = 2            # division or square root
    TRANSCENDENTAL = 3


def kind_of(n: Node) -> OperationKind:
    """The kind of an operation."""
    if n.op in _TRANSCENDENTAL:
        return OperationKind.TRANSCENDENTAL
    return OperationKind.DIVISION if n.op in _DIVISIONS else OperationKind.CHOICE if n.op in ("MAX", "MIN") else OperationKind.PLAIN


class AccessKind(IntEnum):
    """The kind of a memory access."""

    LOAD = 0                # reads an argument
    READ = 1                # reads a staged value
    STORE = 2               # stores the stage's value


class Tile(NamedTuple):
    """An axis cut into tiles of `positions`; `apart`: bytes from one tile to the next."""

    axis: int
    positions: int
    apart: int


class Access(NamedTuple):
    """A memory access of a stage."""

    kind: AccessKind
    space: MemorySpace
    number: int             # number of the argument, or of the staged stage
    coefs: Coefs            # bytes between neighbours along each local axis
    itemsize: int           # bytes of an element
    elements: int           # contiguous elements that one instruction accesses
    times: float            # instructions in one iteration of the loops around the stage
    depth: int              # number of outermost loops that the access is inside of, loops around the stage included
    limit: int              # bytes of the whole array
    gathered: tuple[int, ...] = ()      # local axes whose positions another load reads from memory
    fixed: int = 0          # number of outermost loops that compute the data anew in each iteration, so they do not move the access
    is_made_inside: bool = False        # the data are computed in the nest, so they do not come from memory
    is_evicted: bool = False    # the data are constants of a plan, whose other kernels use the caches between two runs of this one
    cores: int = 1          # cores that each read all of the data; 1 also where each reads a part of its own
    near: float = 1.0       # share of the data that the core that reads them has stored, and no other core
    tile: Tile | None = None

    @property
    def width(self) -> int:
        """Bytes that one instruction accesses."""
        return self.itemsize * self.elements


class StageWork:
    """The work of a stage in one iteration of the loops around it.

    `at`: how often its loops run. `loops`: (local axis, iterations) of those of its own loops that are counted, outermost first.
    `outside`: number of loops around the stage. `lanes`: positions of the vector loop that one operation computes; 1 for a thread. `held`:
    per local axis, the elements of a tile that a thread has. `known`: nodes whose values an earlier stage has computed."""

    def __init__(self, state: Scheduler, nest: LoopNest, at: StageRuns, loops: Sequence[tuple[int, float]], outside: int, lanes: int = 1,
                 held: Sequence[int] = (), known: Collection[int] = ()) -> None:
        stage = at.nest
        self.state, self.nest, self.at, self.stage, self.r = state, nest, at, stage, stage.r
        self.loops, self.outside, self.lanes, self.outs = loops, outside, lanes, len(stage.r.stage.outs)
        self.vector = stage.vector
        self.runs_of_loop = [1.0]               # how often the body of the outermost k loops runs
        for _, iterations in loops:
            self.runs_of_loop.append(self.runs_of_loop[-1] * iterations)
        self.body = self.runs_of_loop[-1]
        self.inside = {a: k + 1 for k, (a, _) in enumerate(loops)}      # axis → number of loops down to the innermost one over it
        self.held = list(held) or [1] * len(stage.axes)
        # per axis: positions side by side, as vectors on the vector axis
        self.positions = [self.side_by_side(a) * self.held[a] for a in range(len(stage.axes))]
        self.tile = math.prod(self.positions)
        # nodes of `ResolvedStage.values` without a cost
        choices = [(i, n.src[0]) for i, n in enumerate(self.r.nodes) if n.op == "WHERE" and self._is_known(n.src[0])]
        self.skipped = set(known).union(*choices)

    def side_by_side(self, a: int, role: str = "") -> int:
        """Positions of a local axis that are computed side by side. `role`: count only loops of this role; "": all that are side by
        side."""
        positions, vector_loop = 1, self.stage.vector_loop
        for p in self.stage.axes[a]:
            if p.role == role if role else p.role not in _BOUND:
                positions *= -(-p.extent // self.lanes) if p is vector_loop else p.extent
        return positions

    @property
    def accumulators(self) -> int:
        """Positions side by side that have separate accumulators."""
        return math.prod([self.side_by_side(a, UPCAST) for a in range(len(self.stage.axes))])

    @property
    def rows(self) -> int:
        """Results computed side by side; positions of reduce axes do not count."""
        return math.prod(self.positions[:self.outs])

    def depth(self, deps: Collection[int]) -> int:
        """The number of own loops, from the outermost, that a value is inside of if it depends on these axes."""
        return max([self.inside.get(a, 0) for a in deps], default=0)

    def runs(self, deps: Collection[int]) -> float:
        """How often a value that depends on these axes is computed."""
        times = self.runs_of_loop[self.depth(deps)]
        for a in deps:
            times *= self.positions[a]
        return times

    def runs_of(self, number: int) -> float:
        """How often a node is computed: once for neighbouring positions with equal values."""
        return self.runs(self.r.nodes[number].deps) * self.share_of(number)

    def share_of(self, number: int) -> float:
        """The share of the positions side by side at which a node is computed, as neighbouring ones may have equal values."""
        return math.prod([math.ceil(self.positions[a] / same) / self.positions[a] for a, same in self.r.coarse.get(number, ())])

    def _is_known(self, condition: int) -> bool:
        """Whether a condition is a constant at each position side by side: it compares an axis, or its remainder, with a number, and no
        loop changes that."""
        n = self.r.nodes[condition]
        if n.op != "CMPEQ" or self.r.nodes[n.src[1]].kind != "const":
            return False
        of, by = self.r.nodes[n.src[0]], 0
        if of.op == "MOD" and self.r.nodes[of.src[1]].kind == "const":
            of, by = self.r.nodes[of.src[0]], self.r.nodes[of.src[1]].arg
        return of.kind == "axis" and of.arg != self.stage.vector and all(
            p.role not in _BOUND or p.extent == 1 or (by > 0 and p.stride % by == 0) for p in self.stage.axes[of.arg])

    @property
    def multiply_adds(self) -> float:
        """Multiply-adds and other combinations in reductions, in vectors."""
        return self.body * self.tile * len(self.r.reductions)

    def summed(self) -> float:
        """Serial iterations of the loops over reduce axes."""
        return math.prod([n for a, n in self.loops if a >= self.outs])

    def values(self) -> list[tuple[int, Node, bool]]:
        """The nodes that are computed or loaded: (number of the node, node, whether it is a load or the read of a staged value)."""
        return [value for value in self.r.values if value[0] not in self.skipped]

    def distinct(self, deps: Collection[int], coefs: Coefs) -> float:
        """The share of distinct elements among all that an access touches over the positions side by side, since neighbouring windows
        overlap: three taps of eight results read ten elements, not 24."""
        steps = [(c * (self.lanes if a == self.vector else 1), n) for a, c in coefs if c and a in deps and (n := self.positions[a]) > 1]
        return touched(steps, 1, 1).granules(1) / math.prod([count for _, count in steps]) if len(steps) > 1 else 1.0

    # -- accesses -------------------------------------------------------------------------------------------
    def load(self, n: Node, linear: LinearIndex, times: float = 1.0, elements: int = 1) -> Access:
        """The load of an argument as an access: `times` instructions of `elements` elements each."""
        size = n.dtype.itemsize
        return Access(AccessKind.LOAD, MemorySpace.GLOBAL, n.arg, _in_bytes(linear.coefs, size), size, elements, times,
                      self.outside + self.depth(n.deps), self.state.kernel.params[n.arg].arg.size * size, self.gathered(linear),
                      is_evicted=self.state.kernel.params[n.arg].arg.constant)

    def gathered(self, linear: LinearIndex) -> tuple[int, ...]:
        """The local axes whose positions another load looks up."""
        return tuple(dict.fromkeys([a for atom, _ in linear.atoms for a in self.r.nodes[atom].deps])) if linear.atoms else ()

    def read(self, n: Node, times: float = 1.0, elements: int = 1) -> Access:
        """The read of a staged value as an access."""
        source, size = self.nest.stages[n.arg], stored_bytes(self.state, self.nest.layouts, n.arg)
        assert source.layout is not None
        return Access(AccessKind.READ, source.space, n.arg, _in_bytes(self.staged_coefs(n), size), size, elements, times,
                      self.outside + self.depth(n.deps), source.layout.size * size)

    def staged_coefs(self, n: Node) -> Coefs:
        """Elements between neighbours along each local axis, for the read of a staged value."""
        layout, coefs = self.nest.stages[n.arg].layout, dict[int, int]()
        assert layout is not None
        for lin, stride in zip(n.dims, layout.strides, strict=True):
            for a, c in lin.coefs:
                coefs[a] = coefs.get(a, 0) + c * stride
            for atom, c in lin.atoms:
                for a, same in self.r.coarse.get(atom, ()):
                    coefs[a] = coefs.get(a, 0) + c * stride // same
        return tuple(sorted(coefs.items()))

    @property
    def place(self) -> LinearIndex:
        """The index at which the stage's value is stored: in an argument, or in its layout."""
        if self.r.store is not None:
            return self.r.store
        assert self.stage.layout is not None
        return LinearIndex(tuple(enumerate(self.stage.layout.strides)), 0, ())

    def store(self, itemsize: int, place: LinearIndex, times: float = 1.0, elements: int = 1) -> Access:
        """The store of the stage's value as an access."""
        r, layout = self.r, self.stage.layout
        if r.store is not None:
            number, size = r.store_slot, self.state.kernel.params[r.store_slot].arg.size
        else:
            assert layout is not None
            number, size = r.stage.index, layout.size
        return Access(AccessKind.STORE, self.stage.space, number, _in_bytes(place.coefs, itemsize), itemsize, elements, times,
                      self.outside + self.depth(range(self.outs)), size * itemsize, self.gathered(place))


def _in_bytes(coefs: Coefs, itemsize: int) -> Coefs:
    return tuple([(a, c * itemsize) for a, c in coefs])


def is_aligned(coefs: Coefs, const: int, axis: int, lanes: int) -> bool:
    """Whether each vector of `lanes` lanes along a local axis begins at a multiple of its size."""
    return not const % lanes and not any(c % lanes for a, c in coefs if a != axis)


def has_constant_lanes(work: StageWork, gate: int) -> bool:
    """Whether the part of a mask that differs between lanes is the same in every iteration, and so a constant."""
    r, stage, moved = work.r, work.stage, {a for loop in (*work.at.own, *work.at.around) for a, _ in loop.moves}
    todo, seen = [gate], False
    while todo:
        n = r.nodes[todo.pop()]
        if n.kind == "alu" and n.op == "AND":
            todo += n.src
        elif stage.vector in n.deps:
            seen = True
            if not moved.isdisjoint(n.deps):
                return False
    return seen
