"""Converts kernels that are written over the positions of a launch, as for devices that start a function once per position, to kernels over
RANGEs.

    STORE(y[g0*4 + l0], x[g0*4 + l0] + 1)     SPECIALs g0 of n groups, l0 of 4 positions in a group
        →   STORE(y[i*4 + j], x[i*4 + j] + 1; i:n, j:4)     i is a RANGE that says that it is g0, j one that says l0

    SPECIAL(extent), arg = name     g0, g1, … groups of the launch; l0, l1, … positions in a group; i0, i1, … positions without groups.
                                    A name is its first letter and its last digits: gidx0 is g0
    DEFINE_VAR core_id in [0, n-1]  one position per core: dimension 0 of the launch

Positions run in parallel and in no order, like the RANGEs of a STORE, so they become such RANGEs: scheduling, opts, verification and the
kernel key see only RANGEs. Every STORE gets a RANGE for each position, the ones with larger steps outside. A STAGE gets a RANGE for each
position that it, or a stage that it reads, depends on; its readers pass their positions as coordinates. The second source of such a RANGE
is a SPECIAL that names its launch position, from which a program's launch dimensions follow (`launch_of`). In a kernel that is called, g0
and l0 are merged if every access uses them as one number: the merged RANGE has a SPECIAL, with its extent, for each.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import dtypes
from svod.core.ir.launch import CASTS, ONCE, ONE, LaunchDims, fit_dimensions
from svod.core.ir.uop import Ops, UOp
from svod.core.machine.target import NO_LIMIT
from svod.errors import CompileError

CORE = "core_id"
NO_LIMITS = (NO_LIMIT,) * 3
_NAME = re.compile(r"([gli])(?:\w*\D)?(\d+)")
_LEAVES = frozenset({Ops.CONST, Ops.DEFINE_VAR})


@dataclass(frozen=True)
class Position:
    """A launch position that a node of a kernel stands for. `kind`: g, l, i or core_id; `axis`: the number of its dimension, which may
    be above 2."""

    node: UOp
    kind: str
    axis: int
    extent: UOp

    @property
    def name(self) -> str:
        """The name of the position, the same for every way of writing it."""
        return CORE if self.kind == CORE else f"{self.kind}{self.axis}"


def read_name(name: object) -> tuple[str, int] | None:
    """(kind, axis) of a position by its name; None if the name is not that of a position."""
    if name == CORE:
        return CORE, 0
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    return (match[1], int(match[2])) if match else None


def positions_of(ast: UOp) -> tuple[Position, ...]:
    """The launch positions that a kernel is written over, by name. Raises CompileError for positions that cannot be launched."""
    positions: tuple[Position, ...] = ast.cached("positions", _positions_of)
    return positions


def _positions_of(ast: UOp) -> tuple[Position, ...]:
    positions: dict[str, Position] = {}
    for u in ast.toposort():
        if u.op is Ops.SPECIAL and u.dtype != dtypes.void:
            named = read_name(u.arg)
            level, _ = named or (CORE, 0)
            if named is None or level == CORE or len(u.src) != 1 or u.dtype != dtypes.index:
                raise CompileError(f"SPECIAL {u.arg!r} of {u.dtype.name} with {len(u.src)} extents is no position of a launch: it is an "
                                   "index with one extent and a name: g0, g1, … for groups, l0, l1, … in a group, i0, i1, … without groups")
            p = Position(u, *named, u.src[0])
        elif u.op is Ops.DEFINE_VAR and u.arg[0] == CORE:
            if u.arg[1] != 0 or u.arg[2] < 0:
                raise CompileError(f"{CORE} counts cores from 0, found bounds [{u.arg[1]}, {u.arg[2]}]")
            p = Position(u, CORE, 0, sy.const(u.arg[2] + 1))
        else:
            continue
        if positions.setdefault(p.name, p) is not p:
            raise CompileError(f"two positions of one launch are {p.name}: {positions[p.name].node!r} and {u!r}")
        for s in p.extent.toposort():
            if s.op in (Ops.SPECIAL, Ops.RANGE, Ops.LOAD) or (s.op is Ops.DEFINE_VAR and s.arg[0] == CORE):
                raise CompileError(f"the extent of position {p.name} depends on {s!r}; it is known when the kernel is launched, from "
                                   "constants and variables")
    kinds = {p.kind for p in positions.values()}
    if "i" in kinds and len(kinds) > 1:
        raise CompileError(f"positions {', '.join(sorted(positions))} of one launch: i0, i1, … count all positions, so there are no "
                           "groups and cores beside them")
    if CORE in kinds and "g0" in positions:
        raise CompileError(f"{CORE} and g0 of one launch are both its dimension 0; use one of them")
    return tuple(positions[name] for name in sorted(positions))


def over_ranges(ast: UOp) -> UOp:
    """The same kernel over RANGEs (see the module's docstring); itself if it has no positions. Raises CompileError for positions that
    cannot be launched, for a STORE that does not depend on a position, as each value of the position would repeat it, and for a malformed
    STORE. Cached on the node."""
    ranged: UOp = ast.cached("over_ranges", _over_ranges)
    return ranged


def _over_ranges(ast: UOp) -> UOp:
    for store in ast.src:
        where, ranges = store.src[0], store.src[2:]
        if where.op is not Ops.INDEX or len(where.src) != 2 or any(r.op is not Ops.RANGE for r in ranges):
            behind = ", ".join(r.op.value for r in ranges) or "nothing"
            raise CompileError(f"a STORE of a kernel is STORE(INDEX(PARAM, index), value, RANGEs), found {len(where.src) - 1} indices, and "
                               f"{behind} behind the value: a STORE has no gate; what is not to be written has no position")
    return _Lifting(ast).run() if positions_of(ast) else ast


def index_extent(expr: UOp) -> UOp:
    """A launch-size expression as an index expression, without NEG, ABS, conversions and AFTERs."""
    done: dict[UOp, UOp] = {}
    for u in expr.toposort(gate=lambda n: n.op is not Ops.AFTER):
        if u.op is Ops.CONST:
            done[u] = sy.const(int(u.arg))
        elif u.op in _LEAVES:
            done[u] = u
        elif u.op is Ops.AFTER:
            done[u] = index_extent(u.src[0])
        elif u.op in CASTS or u.op is Ops.BIND:
            done[u] = done[u.src[-1 if u.op is Ops.BIND else 0]]
        elif u.op is Ops.NEG:
            done[u] = sy.scale(done[u.src[0]], -1)
        elif u.op is Ops.ABS:
            done[u] = sy.maximum(done[u.src[0]], sy.scale(done[u.src[0]], -1))
        else:
            done[u] = UOp(u.op, dtypes.index, tuple(done[s] for s in u.src))
    return sy.simplify(done[expr], {})


class _Lifting:
    """Converts one kernel over positions to a kernel over RANGEs."""

    def __init__(self, ast: UOp):
        self.ast = ast
        self.positions = {p.node: p for p in positions_of(ast)}
        self.next = 1 + max((int(u.arg) for u in ast.walk(Ops.RANGE)), default=-1)
        self.stages: dict[UOp, UOp] = {}                        # STAGE → its replacement
        self.needed: dict[UOp, tuple[UOp, ...]] = {}            # STAGE → positions for which it gets RANGEs

    def run(self) -> UOp:
        for u in self.ast.walk(Ops.STAGE):
            body = u.src[0].toposort(gate=lambda n: n.op is not Ops.STAGE)
            needed = {n for n in body if n in self.positions}
            needed.update(p for n in body if n.op is Ops.STAGE for p in self.needed[n])
            steps = [n.src[1] for n in body if n.op is Ops.INDEX and n.src[0].op is Ops.PARAM]
            order = self._outside_in(needed, steps)
            mine = self._ranges(order, marked=False)
            stage = u.replace(src=(self._with(u.src[0], mine), *mine.values(), *u.src[1:]))
            self.stages[u], self.needed[u] = stage, order
        return self.ast.replace(src=tuple(self._store(s) for s in self.ast.src))

    def _store(self, store: UOp) -> UOp:
        param, index = store.src[0].src
        counted = set(index.toposort())
        for p in self.positions.values():
            if p.node not in counted and not (p.extent.op is Ops.CONST and p.extent.arg == 1):
                raise CompileError(f"the STORE to slot {param.arg.slot} does not count position {p.name} in its index: it would be done "
                                   "again for each of its values; every position must count in every STORE's index")
        mine = self._ranges(self._outside_in(self.positions, [index]), marked=True)
        where = store.src[0].replace(src=(param, self._with(index, mine)))
        return store.replace(src=(where, self._with(store.src[1], mine), *mine.values(), *store.src[2:]))

    def _ranges(self, positions: Sequence[UOp], marked: bool) -> dict[UOp, UOp]:
        """Node of a position → a new RANGE. `marked`: the RANGE gets a SPECIAL that names its launch position."""
        ranges = {}
        for node in positions:
            p = self.positions[node]
            mark = (UOp(Ops.SPECIAL, dtypes.void, (), p.name),) if marked else ()
            ranges[node] = UOp(Ops.RANGE, dtypes.index, (index_extent(p.extent), *mark), self.next)
            self.next += 1
        return ranges

    def _with(self, expr: UOp, mine: dict[UOp, UOp]) -> UOp:
        """Rewrite a stage's expression over its own RANGEs. `mine`: position → RANGE."""
        done = dict(mine)
        for u in expr.toposort(gate=lambda n: n.op is not Ops.STAGE and n not in mine):
            if u in done:
                continue
            if u.op is Ops.STAGE:
                done[u] = self.stages[u]
                continue
            src = tuple([done[s] for s in u.src])
            if u.op is Ops.INDEX and u.src[0].op is Ops.STAGE:
                src = (src[0], *(mine[p] for p in self.needed[u.src[0]]), *src[1:])
            done[u] = u if src == u.src else u.replace(src=src)
        return done[expr]

    def _outside_in(self, positions: Iterable[UOp], indices: Sequence[UOp]) -> tuple[UOp, ...]:
        """Sort positions, outermost first: by the largest step that each has in `indices`, then groups before positions in a group, then
        the last axis first."""
        steps: dict[UOp, int] = {}
        for index in indices:
            for node, step in _steps(index).items():
                steps[node] = max(steps.get(node, 0), step)

        def rank(node: UOp) -> tuple[int, bool, int]:
            p = self.positions[node]
            return -steps.get(node, 0), p.kind == "l", -p.axis
        return tuple(sorted(positions, key=rank))


def _steps(index: UOp) -> dict[UOp, int]:
    """Node → coefficient with which it enters an index; nodes below a division or remainder get the coefficient of that."""
    steps: dict[UOp, int] = {}
    todo = [(index, 1)]
    while todo:
        u, k = todo.pop()
        if u.op is Ops.MUL and any(s.op is Ops.CONST for s in u.src):
            factor, x = sorted(u.src, key=lambda s: s.op is not Ops.CONST)
            todo.append((x, k * abs(int(factor.arg))))
        elif u.op is Ops.LOAD or not u.src or u.op is Ops.SPECIAL:
            steps[u] = steps.get(u, 0) + k
        else:
            todo += [(s, k) for s in u.src]
    return steps


# -- launch dimensions ----------------------------------------------------------------------------------------------------
def launch_of(ast: UOp, global_limits: Sequence[int] = NO_LIMITS, local_limits: Sequence[int] = NO_LIMITS) -> LaunchDims:
    """The launch of a kernel AST, over positions or over RANGEs that were positions, as three dimensions within the limits; a single
    position for a kernel over plain RANGEs. Raises CompileError for positions that cannot be launched, LaunchError for extents that cannot
    be fitted.

    Dimension 0 is that of g0, l0, i0 or core_id; dimensions that no position names have one position."""
    extents: dict[str, UOp] = ast.cached("launch_extents", _launch_extents)
    if not extents:
        return ONCE
    kinds: dict[str, dict[int, UOp]] = {"g": {}, "l": {}}
    direct = False
    for name, extent in extents.items():
        named = read_name(name)
        assert named is not None
        level, axis = named
        direct |= level == "i"
        kinds["l" if level == "l" else "g"][axis] = extent
    dims = {}
    for kind, limits in (("g", global_limits), ("l", local_limits)):
        own = [kinds[kind].get(k, ONE) for k in range(max(kinds[kind], default=-1) + 1)]
        if not direct or kind == "g":
            dims[kind] = fit_dimensions(own, [_most(e) for e in own], limits)
    return LaunchDims(dims["g"], dims.get("l"))


def _launch_extents(ast: UOp) -> dict[str, UOp]:
    """Name of a position of a kernel → its extent."""
    extents = {p.name: p.extent for p in positions_of(ast)}
    for r in ast.walk(Ops.RANGE):
        for mark in r.src[1:]:
            extents[mark.arg] = (mark.src or r.src)[0]
    return extents


def _most(extent: UOp) -> int | None:
    """The largest value of a launch-size expression; None if its bounds are unknown."""
    try:
        return sy.vmax(index_extent(extent))
    except (ValueError, OverflowError):
        return None
