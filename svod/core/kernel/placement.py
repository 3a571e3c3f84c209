"""Where the stages of a state live, which loops surround them, and which axis is the vector.

A *point* is (stage, depth): inside the first `depth` loops of that stage's order. A stage that is not at the root is emitted
at a point of another stage's nest, its *path* is the points it stands in, outermost first. All of this is derived from the
state; lowering, features and the legality of STAGE read it.
"""
from __future__ import annotations

from typing import NamedTuple

from svod.core.kernel.kernel import Linear, ResolvedStage, Stage
from svod.core.kernel.scheduler import AUTO, INLINE, LOOP, ROOT, UPCAST, Scheduler
from svod.errors import KernelOptError

Path = tuple[tuple[int, int], ...]


class Placement(NamedTuple):
    """The placement of every stage of a state."""

    resolved: tuple[ResolvedStage | None, ...]
    paths: tuple[Path | None, ...]                     # per stage; () at the root, None when inlined
    children: dict[tuple[int, int], tuple[int, ...]]   # point → stages emitted there, in topological order
    roots: tuple[int, ...]                             # stages that are phases, in order
    readers: tuple[tuple[int, ...], ...]               # per stage: the stages that read it


def place_stages(state: Scheduler) -> Placement:
    """Place every stage. Raises KernelOptError when a placement is not around all readers of its stage.

    It depends on the kernel, `order`, `place`, `split_reduce` and on which rows are loops, on no extent and no hint: `apply_opt`
    keeps it where those stay."""
    if state._placement is None:
        state._placement = _plan(state)
    placement: Placement = state._placement
    return placement


def _plan(state: Scheduler) -> Placement:
    kernel = state.kernel
    resolved = kernel.resolve(state.inlined)
    n = len(kernel.stages)
    readers: list[list[int]] = [[] for _ in range(n)]
    for r in resolved:
        if r is not None:
            for s in r.reads:
                readers[s].append(r.stage.index)
    paths: list[Path | None] = [None] * n
    axis_deps: dict[int, frozenset[int]] = {}   # axis of a placed stage → loop rows outside that its base depends on
    children: dict[tuple[int, int], list[int]] = {}
    roots = []
    for s in range(n - 1, -1, -1):
        if state.place[s] == INLINE:
            continue
        if state.place[s] == ROOT:
            paths[s] = ()
            roots.append(s)
            continue
        if not readers[s]:
            continue   # its readers were inlined into something that does not need it
        stage = kernel.stages[s]
        deps: set[int] = set()
        common: Path | None = None
        for q in readers[s]:
            r = resolved[q]
            assert r is not None
            path_q = paths[q]
            assert path_q is not None
            order = state.order[q]
            rows_of = [frozenset(x for x in state.axis_rows[a] if state.rows[x].role == LOOP) | axis_deps.get(a, frozenset())
                       for a in r.axes]
            needed: set[int] = set()
            for node in r.nodes:
                if node.kind == "read" and node.arg == s:
                    for i, lin in enumerate(node.dims):
                        used = _axes_of(r, lin)
                        found = frozenset().union(*(rows_of[a] for a in used))
                        needed |= found
                        axis = stage.outs[i]
                        axis_deps[axis] = axis_deps.get(axis, frozenset()) | found
            deps |= needed
            if is_derived(kernel.stages[q]):
                depth = 0   # copy loops are not loops of the state: what they read stands before them
            else:
                depth = max((i + 1 for i, row in enumerate(order) if row in needed), default=0)
                if s in r.after_reduce:
                    depth = min(depth, first_reduce(state, q))
            # what a reduction cut into parts does with its results is done in another phase
            cut = s in r.after_reduce and state.split_reduce is not None and kernel.axes[state.split_reduce[0]].stage == q
            point = () if cut else (*path_q, (q, depth))
            common = point if common is None else _common(common, point)
        assert common is not None
        place = state.place[s]
        if not common:
            if place != AUTO:
                raise KernelOptError(f"stage {stage.name} is read by more than one phase; it can only live at the root")
            paths[s] = ()
            roots.append(s)
            continue
        if place == AUTO:
            t, depth = common[-1]
            outer = common[:-1]
            while True:
                while depth and state.order[t][depth - 1] not in deps:
                    depth -= 1
                if depth or not outer:
                    break
                t, depth = outer[-1]
                outer = outer[:-1]
            if depth == 0:
                # needed before any loop of a phase: a phase of its own, not once per core
                paths[s] = ()
                roots.append(s)
                continue
            path = (*outer, (t, depth))
        else:
            assert isinstance(place, int)
            t = state.stage_of_row(place)
            path_t = paths[t]
            if path_t is None or place not in state.order[t]:
                raise KernelOptError(f"stage {stage.name} cannot live at {state.rows[place].name}: that is not a loop of this state")
            path = (*path_t, (t, state.order[t].index(place) + 1))
            if len(readers[s]) == 1 and readers[s][0] == t:
                r = resolved[t]
                assert r is not None
                reach = first_reduce(state, t) if s in r.after_reduce else len(state.order[t])
                common = (*common[:-1], (t, max(common[-1][1], reach)))
            if not _encloses(path, common):
                raise KernelOptError(f"stage {stage.name} is also read outside the loop {state.rows[place].name}; "
                                     f"stage it at a loop that holds all its readers")
        paths[s] = path
        children.setdefault(path[-1], []).append(s)
    return Placement(resolved, tuple(paths), {k: tuple(sorted(v)) for k, v in children.items()}, tuple(reversed(roots)),
                tuple(tuple(r) for r in readers))


def _axes_of(r: ResolvedStage, lin: Linear) -> set[int]:
    used = {a for a, _ in lin.coefs}
    for node, _ in lin.atoms:
        used.update(r.nodes[node].deps)
    return used


def first_reduce(state: Scheduler, stage: int) -> int:
    """How many loops of the stage stand outside its first reduce loop."""
    order = state.order[stage]
    for i, row in enumerate(order):
        if state.kernel.axes[state.rows[row].axis].kind == "r":
            return i
    return len(order)


def _common(a: Path, b: Path) -> Path:
    """The deepest point around both."""
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
    return len(inner) > k and inner[:k] == outer[:k] and inner[k][0] == outer[k][0] and outer[k][1] <= inner[k][1]


def is_derived(stage: Stage) -> bool:
    """True for stages whose loops are derived from where they are read: copies and elementwise values."""
    return not stage.is_output and not stage.has_reduce


def is_computed_once(state: Scheduler, found: Placement, s: int) -> bool:
    """Whether a stage is a phase of its own that reads nothing but constants of the plan, and depends on no variable: it is computed when
    the plan is prepared."""
    r = found.resolved[s]
    if r is None or found.paths[s] != () or r.stage.is_output:
        return False
    return bool(r.reads or any(n.kind == "load" for n in r.nodes)) and _is_constant(state, found, s) \
        and all(found.paths[q] != () or is_computed_once(state, found, q) for q in r.reads)


def _is_constant(state: Scheduler, found: Placement, s: int) -> bool:
    """Whether the value of a stage is the same in every run."""
    kernel, r = state.kernel, found.resolved[s]
    assert r is not None, "what is read is not inlined"
    if any(kernel.axes[a].bound is not None for a in r.axes) or any(n.kind == "variable" for n in r.nodes):
        return False
    return all(kernel.params[n.arg].arg.constant for n in r.nodes if n.kind == "load") \
        and all(_is_constant(state, found, q) for q in r.reads)


# -- extents --------------------------------------------------------------------------------------

class EmittedLoop(NamedTuple):
    """A row as it is emitted: its extent cut to what is needed, the stride that follows."""

    row: int
    role: str
    extent: int
    stride: int


def fit(state: Scheduler, rows: tuple[int, ...], extent: int) -> tuple[EmittedLoop, ...]:
    """The rows of an axis (outermost first) over `extent` positions: inner amounts are kept while they fit, the outermost row takes
    the rest, rounded up.

    Where the amounts do not divide the extent and a loop stands inside expanded rows, the expanded rows become the innermost ones: a
    tile is then one block of positions, which can be moved back or cut short, instead of a comb with teeth beyond the end.

        o0 of 17 = loop 3 × upcast 2 × loop 3     strides 6, 3, 1   →   loop 3 × loop 3 × upcast 2     strides 6, 2, 1
    """
    table = state.rows
    rows = tuple([r for r in rows if table[r].extent > 1])    # what is used up is no loop any more
    out = _fit(state, rows, extent)
    if not out or out[0].stride * out[0].extent == extent:
        return out
    loops = tuple([r for r in rows if table[r].role == LOOP])
    if loops == rows[:len(loops)]:
        return out
    return _fit(state, loops + tuple([r for r in rows if table[r].role != LOOP]), extent)


def _fit(state: Scheduler, rows: tuple[int, ...], extent: int) -> tuple[EmittedLoop, ...]:
    out: list[EmittedLoop] = []
    rest, stride = extent, 1
    for i in range(len(rows) - 1, -1, -1):
        row = state.rows[rows[i]]
        e = rest if i == 0 and row.role == LOOP else min(row.extent, rest)
        out.append(EmittedLoop(rows[i], row.role, e, stride))
        stride *= e
        rest = -(-rest // e)
    out.reverse()
    return tuple(out)


# -- lanes ----------------------------------------------------------------------------------------

def lane_row(state: Scheduler, r: ResolvedStage) -> int:
    """The row that is the vector of a stage with axis rows: LANES' choice, else the upcast row that makes most accesses unit-stride."""
    s = r.stage.index
    chosen = state.dots[s]
    if chosen is not None and chosen.columns >= 0:
        return state.axis_rows[chosen.columns][-1]      # the columns of a tile
    if state.lanes[s] >= 0:
        return state.lanes[s]
    best, best_score = -1, 0.0
    for local, axis in enumerate(r.axes):
        for row in state.axis_rows[axis]:
            piece = state.rows[row]
            if piece.role != UPCAST or piece.extent < 2:
                continue
            width = max(1, state.target.vector_bytes // r.lanes_bytes)
            used = piece.extent / (-(-piece.extent // width) * width)   # the share of the lanes that does work
            score = _lane_score(r, local, piece.stride) * used
            if axis in r.stage.reds:
                score *= 0.9   # lanes on a reduce axis are combined across at the end
            if score > best_score:
                best, best_score = row, score
    return best


def _lane_score(r: ResolvedStage, local: int, stride: int) -> float:
    """How well the accesses of a stage suit `local` as the vector axis: unit stride 1, the same for all lanes 0.3, else -0.5 each;
    what stands below a REDUCE runs more often and counts four times."""
    total = 0.0
    for node in r.nodes:
        if node.kind == "load":
            lin = node.linear
            assert lin is not None
            c = lin.coef(local) * stride
            irregular = any(local in r.nodes[a].deps for a, _ in lin.atoms)
            value = -0.5 if irregular else 1.0 if c == 1 else 0.3 if c == 0 else -0.5
        elif node.kind == "read":
            value = 0.8 if any(lin.coef(local) for lin in node.dims) else 0.3   # scratch is laid out as it is read
        else:
            continue
        total += value * (4.0 if r.reductions else 1.0)
    if r.store is not None:
        c = r.store.coef(local) * stride
        total += 1.0 if c == 1 else 0.0 if c == 0 else -0.5
    elif not r.reductions:
        total += 1.0
    return total + (1.0 if local < len(r.stage.outs) else 0.0)
