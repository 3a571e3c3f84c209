"""Places each stage at a loop of a state, fits loops to regions, and chooses the axis that is the vector.

A *point* (stage, depth) is inside the outermost `depth` loops of that stage's order. A stage that is not at the root is emitted at a point
of another stage's loop nest. Its *path* is the list of points around it, outermost first. Lowering, the cost model and the check of STAGE
use this."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from svod.core.kernel.kernel import Node, ResolvedStage, Stage
from svod.core.kernel.scheduler import AUTO, INLINE, LOOP, ROOT, UPCAST, AxisLoop, Derived, Scheduler, StagePlace, cut_of
from svod.core.machine.isa import DOTS
from svod.errors import KernelOptError

Path = tuple[tuple[int, int], ...]


class Placement(NamedTuple):
    """The placement of every stage of a state."""

    resolved: tuple[ResolvedStage | None, ...]
    paths: tuple[Path | None, ...]                     # per stage: its path; () at the root, None if inlined
    children: dict[tuple[int, int], tuple[int, ...]]   # point → stages emitted there, in topological order
    roots: tuple[int, ...]                             # stages that are phases of their own, in order
    readers: tuple[tuple[int, ...], ...]               # per stage: the stages that read it

    def stage(self, s: int) -> ResolvedStage:
        """The resolved form of stage `s`, which must not be inlined."""
        r = self.resolved[s]
        assert r is not None, "an inlined stage is part of its readers"
        return r

    def reads_of(self, s: int) -> Iterator[tuple[ResolvedStage, Node]]:
        """The reads of stage `s` by stages that are not inlined."""
        for q in self.readers[s]:
            r = self.resolved[q]
            if r is not None and self.paths[q] is not None:
                for node in r.read_nodes:
                    if node.arg == s:
                        yield r, node


@Derived
def place_stages(state: Scheduler) -> Placement:
    """Place every stage. Raises KernelOptError if a stage is placed inside a loop that does not hold all its readers.

    The result depends on the kernel, `order`, `place`, `split_reduce` and the set of rows that are loops, but on no extent and no hint:
    `apply_opt` keeps it if these stay the same."""
    return _Placer(state).place()


class _Placer:
    """Places the stages of a state; readers come before the stages that they read."""

    def __init__(self, state: Scheduler) -> None:
        self.state, self.kernel = state, state.kernel
        self.resolved = state.kernel.resolve(state.inlined)
        n = len(self.kernel.stages)
        self.readers: list[list[int]] = [[] for _ in range(n)]
        for r in self.resolved:
            if r is not None:
                for s in r.reads:
                    self.readers[s].append(r.stage.index)
        self.paths: list[Path | None] = [None] * n
        self.axis_deps: dict[int, frozenset[int]] = {}      # axis of a placed stage → loop rows outside the stage that its start depends on
        self.children: dict[tuple[int, int], list[int]] = {}
        self.roots: list[int] = []

    def place(self) -> Placement:
        for s in range(len(self.kernel.stages) - 1, -1, -1):
            place = self.state.place[s]
            if place == ROOT:
                self._at_root(s)
            elif place != INLINE and self.readers[s]:   # a stage without readers was read only by stages that are not needed any more
                self._inside(s, place)
        children = {point: tuple(sorted(stages)) for point, stages in self.children.items()}
        return Placement(self.resolved, tuple(self.paths), children, tuple(reversed(self.roots)), tuple(map(tuple, self.readers)))

    def _at_root(self, s: int) -> None:
        self.paths[s] = ()
        self.roots.append(s)

    def _inside(self, s: int, place: StagePlace) -> None:
        """Place a stage at a point of another stage's nest, or at the root if no loop holds all its readers."""
        common, deps = self._readers_of(s)
        if place == AUTO:
            path = self._innermost_that_moves(common, deps)
        elif common:
            assert isinstance(place, int)
            path = self._at_loop(s, place, common)
        else:
            raise KernelOptError(f"stage {self.kernel.stages[s].name} is read by more than one phase; it can only live at the root")
        if not path:
            self._at_root(s)    # needed outside all loops of a phase, so it is its own phase instead of being computed by each core
            return
        self.paths[s] = path
        self.children.setdefault(path[-1], []).append(s)

    def _readers_of(self, s: int) -> tuple[Path, frozenset[int]]:
        """(deepest point around all readers of a stage, loop rows that move its reads). The path is () if the readers belong to several
        phases."""
        deps: frozenset[int] = frozenset()
        common: Path | None = None
        for q in self.readers[s]:
            moved_by, point = self._read_by(s, q)
            deps |= moved_by
            common = point if common is None else _common(common, point)
        assert common is not None
        return common, deps

    def _read_by(self, s: int, q: int) -> tuple[frozenset[int], Path]:
        """(loop rows that move the reads of stage `s` by stage `q`, the path to the outermost point that is inside of all these loops)."""
        state, r, path = self.state, self.resolved[q], self.paths[q]
        assert r is not None and path is not None
        rows_of = [frozenset(x for x in state.axis_rows[a] if state.rows[x].role == LOOP) | self.axis_deps.get(a, frozenset())
                   for a in r.axes]
        moved_by: frozenset[int] = frozenset()
        for node, axes in r.reads_with_axes():
            if node.arg == s:
                for axis, moving in zip(self.kernel.stages[s].outs, axes, strict=True):
                    rows = frozenset().union(*[rows_of[a] for a in moving])
                    moved_by |= rows
                    self.axis_deps[axis] = self.axis_deps.get(axis, frozenset()) | rows
        if s in r.after_reduce and cut_of(state, q) is not None:
            # The results of a split reduction are used in another phase, so stages read there cannot be inside this one.
            return moved_by, ()
        depth = 0       # a copy's loops are not in the state: stages that it reads are computed before its loops
        if not is_derived(self.kernel.stages[q]):
            depth = max((i + 1 for i, row in enumerate(state.order[q]) if row in moved_by), default=0)
            if s in r.after_reduce:
                depth = min(depth, first_reduce(state, q))
        return moved_by, (*path, (q, depth))

    def _innermost_that_moves(self, common: Path, deps: frozenset[int]) -> Path:
        """The path to the innermost loop of `common` that moves the read, so that nothing is computed twice; () if no loop moves it."""
        for k in range(len(common) - 1, -1, -1):
            t, depth = common[k]
            while depth and self.state.order[t][depth - 1] not in deps:
                depth -= 1
            if depth:
                return (*common[:k], (t, depth))
        return ()

    def _at_loop(self, s: int, row: int, common: Path) -> Path:
        """The path to the loop that STAGE chose. Raises KernelOptError if the loop no longer exists, or does not hold all readers."""
        state, name = self.state, self.kernel.stages[s].name
        t = state.stage_of_row(row)
        outer = self.paths[t]
        if outer is None or row not in state.order[t]:
            raise KernelOptError(f"stage {name} cannot live at {state.rows[row].name}: that is not a loop of this state")
        path = (*outer, (t, state.order[t].index(row) + 1))
        if self.readers[s] == [t]:
            r = self.resolved[t]
            assert r is not None
            reach = first_reduce(state, t) if s in r.after_reduce else len(state.order[t])
            *outside, (_, depth) = common
            common = (*outside, (t, max(depth, reach)))
        if not _encloses(path, common):
            raise KernelOptError(f"stage {name} is also read outside the loop {state.rows[row].name}; "
                                 f"stage it at a loop that holds all its readers")
        return path


def first_reduce(state: Scheduler, stage: int) -> int:
    """The number of loops of a stage outside its first reduce loop."""
    order = state.order[stage]
    for i, row in enumerate(order):
        if state.kernel.axes[state.rows[row].axis].kind == "r":
            return i
    return len(order)


def _common(a: Path, b: Path) -> Path:
    """The path to the deepest point around both paths."""
    out: list[tuple[int, int]] = []
    for (s, d), (t, e) in zip(a, b, strict=False):
        if s != t:
            break
        out.append((s, min(d, e)))
        if d != e:
            break
    return tuple(out)


def _encloses(outer: Path, inner: Path) -> bool:
    k = len(outer) - 1
    if len(inner) <= k or inner[:k] != outer[:k]:
        return False
    (s, depth), (t, inner_depth) = outer[k], inner[k]
    return s == t and depth <= inner_depth


def is_derived(stage: Stage) -> bool:
    """Whether a stage's loops follow from its readers instead of opts: copies and elementwise values."""
    return not stage.is_output and not stage.has_reduce


def is_computed_once(state: Scheduler, placement: Placement, s: int) -> bool:
    """Whether a stage is a phase of its own that reads only constants and depends on no variable, so that it runs once, at prepare."""
    r = placement.resolved[s]
    if r is None or placement.paths[s] != () or r.stage.is_output:
        return False
    phases = _needed(placement, s, lambda q: placement.paths[q] == ())
    return all(q.reads or any(n.kind == "load" for n in q.nodes) for q in phases) \
        and all(reads_constants(state, q) for q in _needed(placement, s, lambda _: True))


def _needed(placement: Placement, s: int, through: Callable[[int], bool]) -> list[ResolvedStage]:
    """A stage and all stages that it reads, directly or through others, as long as `through` holds for each; without duplicates."""
    needed, seen = [s], {s}
    for q in needed:
        for n in placement.stage(q).reads:
            if n not in seen and through(n):
                seen.add(n)
                needed.append(n)
    return [placement.stage(q) for q in needed]


def reads_constants(state: Scheduler, r: ResolvedStage) -> bool:
    """Whether a stage's value is the same in every run, provided that the stages it reads are."""
    kernel = state.kernel
    return all(kernel.axes[a].bound is None for a in r.axes) and all(
        n.kind != "variable" and (n.kind != "load" or kernel.params[n.arg].arg.constant) for n in r.nodes)


# -- extents --------------------------------------------------------------------------------------

NO_ROW = -1             # row number of a copy loop, which is no row of the state, as it is derived from the copy's readers
COPY_VECTOR = -2        # row number of a copy's vector lanes
COPY_ROWS = -3          # row number of the loop over neighbouring rows in the tile of a copy
COPY_GROUP = -4         # row number of the elements that one dot instruction sums up


class EmittedLoop(NamedTuple):
    """A loop row as it is emitted: its extent cut to the required region, with the resulting stride."""

    row: int
    role: str
    extent: int
    stride: int


def fit(state: Scheduler, rows: tuple[int, ...], extent: int) -> tuple[EmittedLoop, ...]:
    """Fit the rows of an axis (outermost first) to `extent` positions. Inner rows keep their extents while they fit. The outermost row
    takes the rest, rounded up, unless threads are bound to it; it may become larger than in the state, since threads that read the axis may
    go beyond its end.

    If the rows do not divide the extent and a loop stands inside rows that are no loops, these rows become the innermost ones. A tile is
    then one contiguous block of positions, which can be moved back or cut short, instead of a comb with teeth beyond the end.

        o0 of 17 = loop 3 × upcast 2 × loop 3     strides 6, 3, 1   →   loop 3 × loop 3 × upcast 2     strides 6, 2, 1
    """
    table = state.rows
    rows = tuple([r for r in rows if table[r].extent > 1])    # a row of extent 1 has no loop any more
    out = _fit(table, rows, extent)
    if not out or out[0].stride * out[0].extent == extent:
        return out
    loops = tuple([r for r in rows if table[r].role == LOOP])
    if loops == rows[:len(loops)]:
        return out
    return _fit(table, loops + tuple([r for r in rows if table[r].role != LOOP]), extent)


def _fit(table: Sequence[AxisLoop], rows: tuple[int, ...], extent: int) -> tuple[EmittedLoop, ...]:
    out: list[EmittedLoop] = []
    rest, stride = extent, 1
    for r in reversed(rows):
        loop = table[r]
        e = rest if loop.extent > rest or (r == rows[0] and loop.role in (LOOP, UPCAST)) else loop.extent
        out.append(EmittedLoop(r, loop.role, e, stride))
        stride *= e
        rest = -(-rest // e)
    out.reverse()
    return tuple(out)


def span(loops: Iterable[EmittedLoop]) -> int:
    """Positions of an axis from the first to the last that these loops reach: 1 + Σ stride·(extent - 1)."""
    return 1 + sum(loop.stride * (loop.extent - 1) for loop in loops)


# -- lanes ----------------------------------------------------------------------------------------

def vector_width(state: Scheduler, r: ResolvedStage) -> int:
    """Lanes of a stage's vectors: a register's bytes divided by the size of the widest value."""
    return max(1, state.target.vector_bytes // r.lanes_bytes)


def vector_row(state: Scheduler, r: ResolvedStage) -> int:
    """The loop row that is the vector of a stage, or -1: the row that LANES chose, else the upcast row with the best score, which favours
    accesses of unit stride."""
    s = r.stage.index
    chosen = state.dots[s]
    if chosen is not None and DOTS[chosen.name].fragments:
        return -1       # a thread's elements of a tile are no vector
    if chosen is not None and chosen.columns >= 0:
        return state.axis_rows[chosen.columns][-1]      # the columns of a tile are the vector
    if state.vector_rows[s] >= 0:
        return state.vector_rows[s]
    best, best_score = -1, 0.0
    for local, axis in enumerate(r.axes):
        for row in state.axis_rows[axis]:
            piece = state.rows[row]
            if piece.role != UPCAST or piece.extent < 2:
                continue
            width = vector_width(state, r)
            used = piece.extent / (-(-piece.extent // width) * width)   # share of the lanes that are used
            score = _lane_score(r, local, piece.stride) * used
            if axis in r.stage.reds:
                score *= 0.9   # lanes on a reduce axis have to be combined at the end
            if score > best_score:
                best, best_score = row, score
    return best


# Scores of accesses along a vector axis: with unit stride; from scratch memory, which is laid out as it is read; of one value for all
# lanes; any other access.
UNIT_STRIDE, FROM_SCRATCH, SAME_VALUE, SCATTERED = 1.0, 0.8, 0.3, -0.5
REDUCED = 4.0      # factor on the scores of accesses inside reductions, which run more often than the store


def _lane_score(r: ResolvedStage, local: int, stride: int) -> float:
    """The score of local axis `local` as the vector axis: the sum over its accesses."""
    total = 0.0
    for node in r.nodes:
        if node.kind == "load":
            lin = node.linear
            assert lin is not None
            c = lin.coef(local) * stride
            irregular = any(local in r.nodes[a].deps for a, _ in lin.atoms)
            value = SCATTERED if irregular or c not in (0, 1) else UNIT_STRIDE if c == 1 else SAME_VALUE
        elif node.kind == "read":
            value = FROM_SCRATCH if any(lin.coef(local) for lin in node.dims) else SAME_VALUE
        else:
            continue
        total += value * (REDUCED if r.reductions else 1.0)
    if r.store is not None:
        c = r.store.coef(local) * stride
        total += UNIT_STRIDE if c == 1 else 0.0 if c == 0 else SCATTERED
    elif not r.reductions:
        total += 1.0
    return total + (1.0 if local < len(r.stage.outs) else 0.0)
