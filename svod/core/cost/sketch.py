"""Sketches for CPUs: whole chains of opts that pay only together, with amounts derived from the target's vector width, registers and
caches.

`sketches(state)` lists them. The heuristic is the shortest of those that are predicted fastest (`cpu.py`). Sketches depend only on the
accesses. A *contraction* is a sum of products in which each operand lacks an output axis that the other has, so a register tile reuses
both. Other reductions get vectors along contiguous memory. Costly elementwise stages that are read twice are staged."""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from svod.core.cost.cpu import bounds_of, cost_of, within
from svod.core.cost.sketch_ahead import ahead
from svod.core.cost.sketch_channels import CHANNELS
from svod.core.cost.sketch_contractions import CONTRACTION, MATRIX_VECTOR, inner_contraction, matrix_of, squares
from svod.core.cost.sketch_facts import (
    bytes_of_arguments,
    contiguous_axes,
    extent_of,
    factors_of,
    first_change,
    instructions,
    is_constant,
    lane_amounts,
    name_of,
    outgrows_caches,
    resolved,
    tile_amounts,
    try_opt,
)
from svod.core.cost.sketch_online import ATTENTION
from svod.core.cost.sketch_tiles import TILES
from svod.core.cost.sketch_winograd import WINOGRAD
from svod.core.cost.template import Apply, Choose, Do, Each, Hole, Maybe, Need, Only, Point, Prefer, Steps, Template, fact, inner, schedule
from svod.core.cost.work import OperationKind, kind_of
from svod.core.kernel.apply import algorithm_of
from svod.core.kernel.kernel import LinearIndex, ResolvedStage, reachable
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.non_temporal import has_non_temporal_stores
from svod.core.kernel.numerics import canonical_sum
from svod.core.kernel.placement import (
    FROM_SCRATCH,
    REDUCED,
    SAME_VALUE,
    SCATTERED,
    UNIT_STRIDE,
    is_derived,
    place_stages,
    vector_row,
    vector_width,
)
from svod.core.kernel.scheduler import ROOT, UPCAST, Scheduler
from svod.core.machine.levels import CORE_START_CYCLES
from svod.core.machine.target import FAST, SAME

FEW_SKETCHES = 12               # sketches of each template for a quick choice: at most half the time of all, and 3 % slower code
MOST_FOR_PACKING = 2.0          # least predicted gain for which a quick choice packs constants
MIN_PARALLEL_OPERATIONS = 1 << 13       # operations per core below which a second core costs more than it gains
SURELY_PARALLEL_OPERATIONS = 1 << 17    # operations per core above which sharing the work pays, if no dot instruction computes them
FEW_CORE_STARTS = 3.0                   # predicted time, in starts of the other cores, below which one core computes a kernel
MANY_CORE_STARTS = 16.0                 # predicted time, in starts of the other cores, above which sharing the work pays
EVEN_FACTOR = 1.12              # most uneven division of work among cores, as slowest core over average
STREAM_GAIN_FACTOR = 1.03       # least predicted gain for STREAM: a matrix product of 1024 lost 2-5 % at a predicted gain of 1.02
SHORT_STRIDE_SHARE = 0.15       # score of an access whose lanes are a few elements apart: wide loads and shuffles
TIE_FACTOR = 1.015              # predictions within this factor count as equal
ALGORITHM_FACTOR = 1.1     # a sketch with an algorithm is taken if others are predicted to take so many times as long
MANY_SUMS = 16                  # sums from which on what all of them read is computed once, before them
SUMMED_ROWS = 8                 # rows that are added between loading sums from scratch memory and storing them
HALF_VECTORS = 4                # half vectors that one iteration of a sum along contiguous memory reads
OVERLAPPING_WINDOW = 32         # most positions of an overlapping window that becomes straight-line code, as neighbours share elements
STRAIGHT_LINE_POSITIONS = 8     # most positions of any other window that becomes straight-line code
SIDE_BY_SIDE = (1, 4)           # rows computed side by side; several only if the kernel has inner reductions
VECTORS_AT_ONCE = (4, 2, 1)
WINDOW_ROWS = (4, 2)


def heuristic(state: Scheduler) -> Scheduler:
    """The best sketch by prediction, which runs if nothing was measured. Among sketches with equal predictions it takes one that computes
    what the AST says, with the fewest phases, as cores wait for each other between phases, and then the shortest chain."""
    return _best_of(list(_generate(state, is_bounded=True)), state)


def quick_choice(state: Scheduler) -> Scheduler:
    """The best of the first sketches of each template, which begins with those that mostly are the best. One that packs no constants is
    taken if it is not much slower, because packing takes longer than a run gains by it."""
    found = [s for start in starts(state) for steps in _EACH_TEMPLATE
             for s in islice(schedule([steps, FINISH], start, is_bounded=True), FEW_SKETCHES)]
    best, unpacked = _best_of(found, state), [s for s in found if not _packs(s)]
    if not _packs(best) or not unpacked:
        return best
    other = _best_of(unpacked, state)
    return other if cost_of(other).cycles <= MOST_FOR_PACKING * cost_of(best).cycles else best


def _packs(state: Scheduler) -> bool:
    """Whether constants are packed, in a phase that runs once."""
    return _phases(state) < len(place_stages(state).roots)


def _best_of(found: list[Scheduler], state: Scheduler) -> Scheduler:
    """The best of the sketches found for a state. One with an algorithm has to be faster by ALGORITHM_FACTOR than those without: it takes
    more memory and rounds otherwise, and predictions of the two are further apart than those of two tiles."""
    near = {found[k]: cycles for k, cycles in within(found, ALGORITHM_FACTOR if any(map(_has_algorithm, found)) else TIE_FACTOR).items()}
    chosen = {s: cycles for s, cycles in near.items() if not _has_algorithm(s)} or near
    most = TIE_FACTOR * min(chosen.values(), default=0.0)
    near = {s: cycles for s, cycles in chosen.items() if cycles <= most}
    best = min(_distinct(near), key=lambda s: (_has_algorithm(s), _phases(s), len(s.applied_opts), near[s]), default=state)
    return next(schedule(PREFETCHED, best))


def _has_algorithm(state: Scheduler) -> bool:
    return bool(algorithm_of(state.applied_opts))


def _phases(state: Scheduler) -> int:
    """The number of phases that run in every call of the kernel, the output's phase included."""
    return sum(not is_constant(state, s) for s in place_stages(state).roots)


def sketches(state: Scheduler) -> list[Scheduler]:
    """All distinct sketches of a state."""
    candidates = _distinct(prefetched for s in _generate(state) for prefetched in schedule(PREFETCHED, s))
    fastest = min(candidates, key=lambda s: cost_of(s).cycles, default=None)
    return candidates if fastest is None else _distinct([*candidates, *schedule(STREAMED, fastest)])


def _distinct(states: Iterable[Scheduler]) -> list[Scheduler]:
    by_digest: dict[bytes, Scheduler] = {}
    for s in states:
        by_digest.setdefault(s.digest, s)
    return list(by_digest.values())


def _generate(state: Scheduler, is_bounded: bool = False) -> Iterator[Scheduler]:
    for start in starts(state):
        yield from schedule([Choose(*TEMPLATES), FINISH], start, is_bounded=is_bounded)


def starts(state: Scheduler) -> list[Scheduler]:
    """The states that sketches begin with: the state itself, and, where the policy allows it, one whose output sums products of rounded
    factors."""
    if state.target.numerics != FAST or not state.target.uses_intrinsics or state.applied_opts:
        return [state]
    output = state.kernel.stages[state.kernel.output].name
    after = try_opt(state, "ROUND", output, "bfloat16")
    return [state] if after is state or not instructions(after, after.kernel.output) else [state, after]


# -- vectors and rows ----------------------------------------------------------------------------------

def _vector_axes(state: Scheduler, r: ResolvedStage) -> list[int]:
    """The axes along which vectors of a stage may run. The first is the best one, or -1 if there is none. A stage without reductions
    adds the axis along which it stores contiguously. If the best one is a reduce axis, the best output axis is added (the columns of a
    window); if another axis is shorter than a vector, the best of the axes that are long enough. If the accesses speak against all axes
    that are long enough, it is the best of those, as vectors gain in arithmetic too."""
    scores, width, outs = _vector_scores(state, r), vector_width(state, r), len(r.stage.outs)
    best = _best(scores)
    found = [best]
    if not r.reductions:
        found += [a for a in range(outs) if r.store is not None and r.store.coef(a) == 1 and extent_of(state, r, a) >= width]
    if best >= outs and extent_of(state, r, best) >= width:
        found.append(_best({a: v for a, v in scores.items() if a < outs and v.positions >= width}))
    elif best < 0 or extent_of(state, r, best) < width:
        others = {a: v for a, v in scores.items() if (a < outs if best >= outs else extent_of(state, r, a) >= width)}
        other = _best(others)
        found.append(other if other >= 0 else _best({a: v for a, v in others.items() if v.positions >= width}, -math.inf))
    return [a for a in dict.fromkeys(found) if a >= 0] or [-1]


class _VectorScore(NamedTuple):
    """How well the accesses of a stage suit vectors along an axis. `positions`: positions along it that are computed at a time."""

    score: float
    positions: int


def _best(scores: Mapping[int, _VectorScore], least: float = 0.0) -> int:
    """The axis with the highest score above `least`; -1 if there is none."""
    axis = max(scores, key=lambda a: scores[a].score, default=-1)
    return axis if axis >= 0 and scores[axis].score > least else -1


def _vector_scores(state: Scheduler, r: ResolvedStage) -> dict[int, _VectorScore]:
    """The scores of the local axes with several positions, before any loop is tiled; `vector_row` chooses among existing tiles."""
    below = reachable(r.nodes, [v for red in r.reductions for v in red.values])
    width, scores, ordered = vector_width(state, r), dict[int, _VectorScore](), _axes_in_order(state, r)
    # inside another nest, only few positions of an output axis may be needed at a time
    needed = () if r.stage.is_output else loop_nest(state).stages[r.stage.index].region
    for a in range(len(r.axes)):
        e = needed[a] if a < len(needed) else extent_of(state, r, a)
        if e == 1 or a not in ordered:
            continue
        score = 0.0
        for i, n in enumerate(r.nodes):
            if n.kind not in ("load", "read"):
                continue
            weight = REDUCED if i in below else 1.0
            unit, staged = contiguous_axes(state, r, i)
            if a in unit:
                score += UNIT_STRIDE * weight
            elif a not in n.deps:
                score += SAME_VALUE * weight
            elif a in staged and n.kind == "read" and state.place[n.arg] != "inline":
                score += FROM_SCRATCH * weight
            else:
                score += (SHORT_STRIDE_SHARE if _short_stride(state, r, i, a) else SCATTERED) * weight
        if r.store is not None and a < len(r.stage.outs):
            c = r.store.coef(a)
            score += UNIT_STRIDE if c == 1 else SCATTERED
        elif a < len(r.stage.outs):
            score += 0.5
        score *= min(1.0, e / width)
        if a >= len(r.stage.outs):
            score *= 0.95
        scores[a] = _VectorScore(score, e)
    return scores


def _axes_in_order(state: Scheduler, r: ResolvedStage) -> range:
    """The axes along which vectors may run: all of them, unless the order of the stage's sums is given (`numerics=same`)."""
    canonical = canonical_sum(state.kernel, r.stage.index) if state.target.numerics == SAME and r.reductions else None
    if canonical is None:
        return range(len(r.axes))
    return range(len(r.stage.outs)) if canonical.lanes == 1 else range(len(r.axes) - 1, len(r.axes))


def _short_stride(state: Scheduler, r: ResolvedStage, node: int, a: int) -> bool:
    """Whether a node's stride along an axis is 2 to 4 elements, so that wide loads and shuffles are faster than a load per lane."""
    n = r.nodes[node]
    if n.kind == "load":
        assert n.linear is not None
        return 1 < abs(n.linear.coef(a)) <= 4
    contiguous = _contiguous_dims(state, n.arg)
    return any(1 < abs(lin.coef(a)) <= 4 and dim in contiguous for dim, lin in enumerate(n.dims))


def _contiguous_dims(state: Scheduler, s: int) -> frozenset[int]:
    """The dims of a stage along which all its loads are contiguous."""
    inner = resolved(state, s)
    loads = [n.linear for n in inner.nodes if n.kind == "load" and n.linear is not None]
    return frozenset(d for d in range(len(inner.stage.outs)) if loads and all(lin.coef(d) == 1 for lin in loads))


def _vectors(state: Scheduler, r: ResolvedStage, a: int, vectors: int) -> Scheduler:
    """Upcast an axis in vectors, for a stage that is not a contraction."""
    if a < 0:
        return state
    amounts = lane_amounts(extent_of(state, r, a), vector_width(state, r), vectors)[:2]
    state = first_change(state, *[("UPCAST", name_of(state, r, a), n) for n in amounts])
    if r.reductions and a < len(r.stage.outs):
        # short inner reduce axes (windows) become straight-line code, as neighbouring positions share loads
        positions = 1
        for q in reversed(range(len(r.stage.outs), len(r.axes))):
            positions *= extent_of(state, r, q)
            if positions > STRAIGHT_LINE_POSITIONS:
                break
            state = try_opt(state, "UNROLL", name_of(state, r, q), 0)
    return state


def _with_vector(state: Scheduler, r: ResolvedStage, a: int) -> Scheduler:
    """Make axis `a`, which is upcast, the vector if accesses, scattered as most of them are, leave the stage without one (`vector_row`):
    arithmetic gains by vectors too."""
    inlined = state.kernel.resolve(state.inlined)[r.stage.index]
    assert inlined is not None
    return state if a < 0 or vector_row(state, inlined) >= 0 else try_opt(state, "LANES", f"{name_of(state, r, a)}.in")


def _stage_windows(state: Scheduler, r: ResolvedStage) -> Scheduler:
    """STAGE each value that overlapping windows read and that is more than a load: a mask, a conversion, arithmetic. The copy is placed at
    the second innermost output loop, so that it serves a whole row of windows."""
    for node in {n.arg: n for n in r.nodes if n.kind == "read"}.values():
        inner = resolved(state, node.arg)
        overlapping = any(len(lin.coefs) > 1 for lin in node.dims)
        if not overlapping or state.place[node.arg] != "inline" or all(n.kind == "load" and n.gate < 0 for n in inner.nodes):
            continue
        loops = [row for row in state.order[r.stage.index] if r.axes.index(state.rows[row].axis) < len(r.stage.outs)
                 and state.rows[row].extent > 1]
        name = state.kernel.stages[node.arg].name
        state = first_change(state, *[("STAGE", name, state.rows[row].name) for row in reversed(loops[:-1] or loops)])
    return state


def _repeated(p: Point) -> dict[str, frozenset[int]]:
    """The reductions read by the stage that would be computed repeatedly: in loops over axes that they do not depend on, or by several
    cores, as the loops over their own axes have fewer iterations than there are cores. Returns name → the axes of the stage that the
    reduction depends on."""
    inlined = p.state.kernel.resolve(p.state.inlined)[p.stage.stage.index]
    assert inlined is not None
    needed: dict[str, set[int]] = {}
    for n in inlined.nodes:
        if n.kind == "read" and p.state.kernel.stages[n.arg].has_reduce:
            needed.setdefault(p.state.kernel.stages[n.arg].name, set()).update(n.deps)
    loops = [(p.stage.axes.index(row.axis), row.extent) for row in map(p.state.rows.__getitem__, p.state.order[p.stage.stage.index])
             if row.extent > 1]
    found = {}
    for name, deps in needed.items():
        around = loops[:max([k + 1 for k, (a, _) in enumerate(loops) if a in deps], default=0)]
        shared = math.prod([extent for a, extent in around if a in p.outs])
        if any(a not in deps for a, _ in around) or shared < p.state.target.threads:
            found[name] = frozenset(deps)
    return found


def _output_loops(p: Point) -> list[int]:
    """The rows of the loops over output axes that have several iterations, outermost first."""
    rows = p.state.rows
    return [x for x in p.state.order[p.stage.stage.index] if rows[x].extent > 1 and p.stage.axes.index(rows[x].axis) in p.outs]


def _reductions_first(p: Point) -> Scheduler:
    """Order the loops so that those over axes that no repeated reduction depends on are innermost."""
    needed = frozenset().union(*_repeated(p).values())
    loops = sorted(_output_loops(p), key=lambda x: p.stage.axes.index(p.state.rows[x].axis) not in needed)
    return try_opt(p.state, "ORDER", p.stage.stage.name, tuple([p.state.rows[x].name for x in loops])) if needed else p.state


def _side_by_side(p: Point) -> Scheduler:
    """UPCAST each short axis that no repeated reduction depends on, as a whole, so that one result of the reduction serves all its
    positions."""
    state, repeated = p.state, _repeated(p)
    needed = frozenset().union(*repeated.values())
    for a in p.outs if repeated else ():
        if a not in needed and 1 < p.extent(a) <= STRAIGHT_LINE_POSITIONS:
            state = try_opt(state, "UPCAST", p.name(a), 0)
    return state


def _reductions_apart(p: Point) -> Scheduler:
    """Compute repeated reductions in phases of their own."""
    state = p.state
    for name in _repeated(p):
        state = try_opt(state, "STAGE", name, ROOT)
    return state


def _row_tile(state: Scheduler, r: ResolvedStage, rows: int) -> Scheduler:
    """Upcast an output axis by `rows`, if it has enough rows and `rows` divides it. Of a stage that has no reductions itself, an axis along
    which the reductions that it reads differ."""
    for a in (range(len(r.stage.outs)) if r.reductions else sorted(_reduced_along(state, r))) if rows > 1 else ():
        e = extent_of(state, r, a)
        if e >= 4 * rows and e % rows == 0 and state.rows[state.row_id(name_of(state, r, a))].extent == e:
            return try_opt(state, "UPCAST", name_of(state, r, a), rows)
    return state


def _reduced_along(state: Scheduler, r: ResolvedStage) -> set[int]:
    """The axes of a stage along which the reductions that it reads differ."""
    inlined = state.kernel.resolve(state.inlined)[r.stage.index]
    assert inlined is not None
    return {a for n in inlined.nodes if n.kind == "read" and state.kernel.stages[n.arg].has_reduce for a in n.deps}


LANE = Hole("", lambda p: _vector_axes(p.state, p.stage))
_KEEP_REPEATED = Prefer(Do(lambda p: _keep_repeated(p.state, p.stage)))
_ROWS = Hole("rows", lambda p: SIDE_BY_SIDE if _untiled_reductions(p.state) else (1,))
_VECTORS = Hole("vectors", lambda p: VECTORS_AT_ONCE)

VECTORS = Template(
    "VECTORS", _ROWS, _VECTORS, Do(lambda p: _vectors(p.state, p.stage, p[LANE], p[_VECTORS])),
    Do(lambda p: _row_tile(p.state, p.stage, p[_ROWS])), Prefer(Do(lambda p: _stage_windows(p.state, p.stage))),
    Maybe(Do(lambda p: _with_vector(p.state, p.stage, p[LANE]))),
    Prefer(Do(_side_by_side)), Choose([], Need(Do(_reductions_first)), Need(Do(_reductions_apart))), _KEEP_REPEATED)


# -- transposes ----------------------------------------------------------------------------------------

def _stored_axis(p: Point) -> int | None:
    """The output axis along which values are stored contiguously, if it fills a vector."""
    store = p.stage.store
    return None if store is None else next((a for a in p.outs if store.coef(a) == 1 and p.extent(a) >= p.width), None)


def _read_axis(p: Point) -> int | None:
    """Another output axis along which values that vary along both axes are read contiguously, if it fills a vector."""
    return next((a for i, n in enumerate(p.stage.nodes) if n.kind in ("load", "read") and p[_STORED] in n.deps
                 for a in contiguous_axes(p.state, p.stage, i).direct if a != p[_STORED] and a in p.outs and p.extent(a) >= p.width), None)


def _columns(p: Point) -> list[int]:
    """Numbers of columns of a tile to try: two vectors, and one vector."""
    return [n for n in (2 * p.width, p.width) if n <= p.extent(p[_STORED])]


def _read_innermost(p: Point) -> tuple[str, ...]:
    """The names of the stage's loops, reordered: loops over the axis along which reads are contiguous become the innermost."""
    loops = [p.state.rows[row] for row in p.state.order[p.stage.stage.index] if p.state.rows[row].extent > 1]
    return tuple([row.name for row in sorted(loops, key=lambda row: row.axis == p.stage.axes[p[_READ]])])


_STORED, _READ = fact(_stored_axis), fact(_read_axis)
_COLUMNS = Hole("columns", _columns)

# Tiles of values that are read along one axis and stored along another; lowering transposes them in registers. Vectors run along the stored
# axis, so that what is read is turned, or along the read one, so that results are. The innermost loop runs along the stored axis, or along
# the read one.
TRANSPOSE = Template(
    "TRANSPOSE", _STORED, _READ, _COLUMNS,
    Apply("UPCAST", _READ, lambda p: p.width), Apply("UPCAST", _STORED, _COLUMNS),
    Choose(Apply("LANES", inner(_STORED)), Apply("LANES", inner(_READ))),
    Maybe(Apply("ORDER", lambda p: p.stage.stage.name, _read_innermost)))


# -- reductions that are not contractions --------------------------------------------------------------

def _half_vector(p: Point) -> int | None:
    """Elements of half a vector, for kernels that exceed the caches; else None. A sum that waits for memory gains nothing from whole
    vectors, and with half vectors some cores keep more fetches in flight."""
    half = p.width // 2
    return half if half >= 4 and _is_past_caches(p.state) else None


_LANES = Apply("LANES", inner(LANE))
_HALF = fact(_half_vector)

ROW_SUMS = Template("ROW SUMS", Choose(
    [Need(Do(lambda p: _row_tile(p.state, p.stage, SIDE_BY_SIDE[-1]))),
     Do(lambda p: _vectors(p.state, p.stage, p[LANE], 4 if p.state.target.vector_registers >= 32 else 2)), _LANES],
    [_HALF, Apply("UPCAST", LANE, _HALF), Apply("UNROLL", LANE, HALF_VECTORS)]), _KEEP_REPEATED)


def _steps(state: Scheduler, r: ResolvedStage, lane: int) -> dict[int, int]:
    """The strides, in elements, of one load along each axis: of the loads that are contiguous along `lane`, the one that depends on the
    most axes. {} if there is none."""
    resolved = state.kernel.resolve(state.inlined)[r.stage.index]
    assert resolved is not None
    linears = [n.linear for n in resolved.nodes if n.kind == "load" and n.linear is not None and n.linear.coef(lane) == 1]
    best = max(linears, key=lambda lin: len(lin.coefs), default=None)
    return {a: abs(c) for a, c in best.coefs} if best is not None else {}


def _across(p: Point) -> int | None:
    """The innermost long reduce axis that has larger steps through memory than the vector axis. None if there is none, or the vector axis
    has few vectors."""
    steps = _steps(p.state, p.stage, p[LANE])
    across = [a for a in p.reds if steps.get(a, 0) > 1 and p.extent(a) >= 2 * SUMMED_ROWS]
    return across[-1] if across and p.extent(p[LANE]) >= 8 * p.width else None


def _row_vectors(p: Point) -> tuple[int, ...]:
    """Numbers of vectors of a row per iteration, if the sums of a whole row fit half of the second cache; else (). A single one is tried
    as well, as some cores then fetch faster from memory."""
    return VECTORS_AT_ONCE[::2] if p.extent(p[LANE]) * p[_SUM_BYTES] <= p.state.target.l2 // 2 else ()


def _strips(p: Point) -> list[int]:
    """The width of a strip of columns for each core, in whole vectors, so that its sums stay in the first cache; [] if strips do not
    help."""
    extent, target, columns = p.extent(p[LANE]), p.state.target, 4 * p.width
    strip = min(-(-extent // max(1, target.threads)), target.l1 // 4 // p[_SUM_BYTES]) // columns * columns
    return [strip] if 0 < strip < extent else []


def _by_steps(p: Point, first: str = "") -> Scheduler:
    """Order the loops by their steps through memory, the largest outermost; the loop `first` is outermost of all."""
    state, r, steps = p.state, p.stage, _steps(p.state, p.stage, p[LANE])

    def step(x: int) -> float:
        axis, inner = state.rows[x].axis, state.axis_rows[state.rows[x].axis]
        if state.rows[x].name == first:
            return math.inf
        return steps.get(r.axes.index(axis), 0) * math.prod(state.rows[y].extent for y in inner[inner.index(x) + 1:])

    loops = sorted([x for x in state.order[r.stage.index] if state.rows[x].extent > 1], key=step, reverse=True)
    return try_opt(state, "ORDER", r.stage.name, tuple(state.rows[x].name for x in loops))


def _shared_rows(p: Point) -> Scheduler:
    """Give each core a part of the rows, if the loop over them is the outermost and there is enough work."""
    state = p.state
    first = next((x for x in state.order[p.stage.stage.index] if state.rows[x].extent > 1), None)
    if first is None or state.rows[first].axis != p.stage.axes[p[_ACROSS]] or _operations_per_core(state) < MIN_PARALLEL_OPERATIONS:
        return state
    return try_opt(state, "THREAD", p.name(p[_ACROSS]), state.target.threads)


_ACROSS = fact(_across)
_SUM_BYTES = fact(lambda p: sum(d.itemsize for red in p.stage.reductions for d in red.dtypes))
_ROW_VECTORS = Hole("vectors", _row_vectors)
_STRIP = Hole("strip", _strips)
_UNROLL_ROWS = Apply("UNROLL", _ACROSS, SUMMED_ROWS)

# Memory is read in order, with the loop over rows outermost. The sums of a whole row stay in scratch memory, and several rows are added at
# a time. Each core takes a part of the rows, or a strip of columns of all rows.
COLUMN_SUMS = Template("COLUMN SUMS", _ACROSS, _SUM_BYTES, Choose(
    [_ROW_VECTORS, Apply("UPCAST", LANE, lambda p: lane_amounts(p.extent(p[LANE]), p.width, p[_ROW_VECTORS])[0]),
     _UNROLL_ROWS, Do(_by_steps), Do(_shared_rows)],
    [_STRIP, Apply("TILE", LANE, _STRIP, must=True),
     Apply("UPCAST", inner(LANE), lambda p: 4 * p.width), _UNROLL_ROWS, Do(lambda p: _by_steps(p, p.name(p[LANE])))]), _KEEP_REPEATED)


def _overlapping_axes(p: Point) -> list[int]:
    """The output axes, other than the vector axis, along which neighbouring positions read overlapping small windows."""
    return [a for a in p.outs if a != p[LANE] and p.extent(a) >= 2 and _windows_along(p, a) and _straight_line_axes(p, a)]


def _windows_along(p: Point, *axes: int) -> set[int]:
    """The reduce axes over which windows overlap that neighbouring positions along one of the output axes `axes` read."""
    inlined = p.state.kernel.resolve(p.state.inlined)[p.stage.stage.index]
    assert inlined is not None
    return {q for n in inlined.nodes if n.linear is not None for a in axes for q in _overlapping_reductions(p.state, p.stage, n.linear, a)}


def _straight_line_axes(p: Point, a: int) -> list[int]:
    """The reduce axes that become straight-line code for a tile along output axis `a` and the vector axis: all of a small window; of a
    larger one those over which windows overlap along both axes, or along `a`; [] if these have too many positions."""
    choices = [*p.reds], sorted(_windows_along(p, a, p[LANE])), sorted(_windows_along(p, a))
    return next((axes for axes in choices if math.prod(map(p.extent, axes)) <= OVERLAPPING_WINDOW), [])


def _window_tiles(p: Point) -> Iterable[tuple[int, int]]:
    """(rows, positions along the vector axis) of register tiles. A row of at most four vectors is also tried as a whole: its masks are
    then constants, so it needs no masked copy."""
    extent, width = p.extent(p[LANE]), p.width
    whole = [(n, extent) for n in WINDOW_ROWS if extent <= 4 * width]
    return dict.fromkeys([(n, lane_amounts(extent, width, 4 // n)[0]) for n in WINDOW_ROWS] + whole)


def _overlapping_reductions(state: Scheduler, r: ResolvedStage, lin: LinearIndex, a: int) -> list[int]:
    """The reduce axes over which near positions of an output axis read some of the same elements: neighbours, or with dilated windows
    positions a few apart."""
    stride, outs = abs(lin.coef(a)), len(r.stage.outs)
    taps = [(q, abs(k), extent_of(state, r, q)) for q, k in lin.coefs if q >= outs and k] if stride else []
    return [q for q, k, n in taps if (stride % k == 0 and stride // k < n) or (k % stride == 0 and n > 1 and k // stride < WINDOW_ROWS[0])]


_WINDOW_AXIS = Hole("", _overlapping_axes)
_WINDOW_TILE = Hole("", _window_tiles)
_WINDOW_ROWS = Hole("rows", lambda p: (tile_amounts(p.extent(p[_WINDOW_AXIS]), p[_WINDOW_TILE][0])[0],))
_WINDOW_LANES = Hole("lanes", lambda p: (p[_WINDOW_TILE][1],))
_REDUCED = Hole("", lambda p: _straight_line_axes(p, p[_WINDOW_AXIS]))

# Overlapping windows as straight-line code, several rows side by side, so that neighbours share elements.
WINDOWS = Template(
    "WINDOWS", _WINDOW_AXIS, _WINDOW_TILE, _WINDOW_ROWS, _WINDOW_LANES,
    Apply("UPCAST", _WINDOW_AXIS, _WINDOW_ROWS), Apply("UPCAST", LANE, _WINDOW_LANES), Each(_REDUCED, Apply("UNROLL", _REDUCED, 0)), _LANES,
    Prefer(Only(lambda p: p[_WINDOW_LANES] < p.extent(p[LANE])), Do(lambda p: _stage_windows(p.state, p.stage))))


# -- whole kernels -------------------------------------------------------------------------------------

def _finish(p: Point) -> Scheduler:
    """Finish a sketch: stage costly values that several stages or many inner sums read, give inner reductions their vectors, and share the
    work among cores."""
    state = _keep_costly(p.state)
    for s in reversed(_untiled_reductions(p.state)):       # readers first, as their tiles decide which positions of a reduction are needed
        r = resolved(state, s)
        operands = factors_of(state, r)
        tiled = inner_contraction(state, r, operands) if operands is not None else None
        matrix = matrix_of(state, r)
        if tiled is None and matrix is not None:
            tiled = squares(state, r, matrix)
        if tiled is None:
            state = _keep_repeated(state, r)
            r = resolved(state, s)
            axis = _vector_axes(state, r)[-1]
            tiled = _with_vector(_vectors(state, r, axis, 4), r, axis)
        state = tiled
    state = _parallel(_keep_gathered(state))
    past = _streamed(state)
    return past if past is not state and cost_of(past).cycles * STREAM_GAIN_FACTOR < cost_of(state).cycles else state


def _untiled_reductions(state: Scheduler) -> list[int]:
    """The inner reductions whose loops no opt has tiled. The accumulators that a sum begins with (`numerics=same`) are no tile."""
    kernel, in_order = state.kernel, state.target.numerics == SAME
    tiled = {kernel.axes[row.axis].stage for row in state.rows if row.role == UPCAST and not (
        in_order and kernel.axes[row.axis].kind == "r" and canonical_sum(kernel, kernel.axes[row.axis].stage) is not None)}
    return [s.index for s in state.kernel.stages if s.has_reduce and not s.is_output and s.index not in tiled]


def _keep_costly(state: Scheduler) -> Scheduler:
    """STAGE values with costly operations that several stages read."""
    for s in _read_by_several(state):
        if _is_costly(state, resolved(state, s)):
            state = _staged_once(state, s)
    return state


def _keep_gathered(state: Scheduler) -> Scheduler:
    """STAGE values of several loads that several stages read, where that is predicted to be faster."""
    for s in _read_by_several(state):
        if sum(n.kind in ("load", "read") for n in resolved(state, s).nodes) > 1:
            after = _staged_once(state, s)
            if after is not state and cost_of(after).cycles * TIE_FACTOR < cost_of(state).cycles:
                state = after
    return state


def _read_by_several(state: Scheduler) -> list[int]:
    """The elementwise stages that several stages read, and that have no place of their own yet."""
    kernel = state.kernel
    return [s.index for s in kernel.stages if is_derived(s) and state.place[s.index] == "inline"
            and sum(1 for q in kernel.stages if s.index in kernel.reads[q.index]) > 1]


def _staged_once(state: Scheduler, s: int) -> Scheduler:
    """STAGE a value at the innermost loop around all readers, or before loops around it if that computes at most half as many values."""
    kernel = state.kernel
    loops = [row for i in state.order[kernel.output] if (row := state.rows[i]).extent > 1]
    kept, least = state, math.inf
    for depth in range(len(loops), -1, -1):
        after = try_opt(state, "STAGE", kernel.stages[s].name, loops[depth - 1].name if depth else ROOT)
        if after is not state:
            computed = math.prod(loop_nest(after).stages[s].region) * math.prod(row.extent for row in loops[:depth])
            kept, least = (after, computed) if 2 * computed <= least else (kept, least)
    return kept


def _keep_repeated(state: Scheduler, r: ResolvedStage) -> Scheduler:
    """STAGE values with costly operations, once for all sums that read them, if each is read by many sums."""
    for node in r.read_nodes if r.reductions else ():
        stage, still = state.kernel.stages[node.arg], [a for a in range(len(r.stage.outs)) if not any(lin.coef(a) for lin in node.dims)]
        if is_derived(stage) and state.place[stage.index] == "inline" and _is_costly(state, resolved(state, stage.index)) \
                and math.prod(extent_of(state, r, a) for a in still) >= MANY_SUMS:
            state = try_opt(state, "STAGE", stage.name, ROOT)
    return state


def _is_costly(state: Scheduler, r: ResolvedStage) -> bool:
    """Whether a stage computes a division, a root or a transcendental function that depends on all its axes longer than 1. One that depends
    on fewer, such as the mean of a row, is left to `_keep_gathered`."""
    long = {a for a in range(len(r.stage.outs)) if extent_of(state, r, a) > 1}
    return any(n.kind == "alu" and kind_of(n) >= OperationKind.DIVISION and long.issubset(n.deps) for n in r.nodes)


def _is_past_caches(state: Scheduler) -> bool:
    """Whether the kernel's arguments exceed all caches."""
    return bytes_of_arguments(state) > max(state.target.l2, state.target.l3)


def _operations_per_core(state: Scheduler) -> float:
    return state.kernel.operations / state.target.threads


def _parallel(state: Scheduler) -> Scheduler:
    """Share a loop among the cores. A reduction is split into parts if there are no output loops, or too few iterations for the cores. Of
    a kernel that takes little time, the other cores' start may cost more than they save."""
    if state.target.threads < 2 or state.thread is not None or state.split_reduce is not None:
        return state
    work = _operations_per_core(state)
    if work < MIN_PARALLEL_OPERATIONS:
        return state
    is_much = work >= SURELY_PARALLEL_OPERATIONS and not any(state.dots)
    starts = math.inf if is_much else _core_starts(state)
    if starts < FEW_CORE_STARTS:
        return state
    choices = _shared(state)
    if starts < MANY_CORE_STARTS and state not in choices:
        choices.append(state)
    return choices[0] if len(choices) == 1 else choices[next(iter(within(choices, 1.0)))]


def _core_starts(state: Scheduler) -> float:
    """The predicted time of a state in starts of the other cores: exact if it is below `MANY_CORE_STARTS`, else a lower bound."""
    cycles = 0.0
    for cycles in bounds_of(state):
        if cycles >= MANY_CORE_STARTS * CORE_START_CYCLES:
            break
    return cycles / CORE_START_CYCLES


def _shared(state: Scheduler) -> list[Scheduler]:
    """The states to choose from, in each of which the cores share one loop. If sharing that loop moves it outside of another one, inner
    reductions may be computed more often, so each loop is a choice, and so is none."""
    kernel = state.kernel
    even, least, cut = _loops_to_share(state)
    found = _sharing(state, even) or _sharing(state, least, cut)
    outermost = next((row for row in state.order[kernel.output] if state.rows[row].extent > 1), None)
    is_moved = any(s.thread is not None and s.thread.row != outermost for s in found)
    if is_moved and any(s.has_reduce and not s.is_output for s in kernel.stages):
        found = [*_sharing(state, *[[row] for row in dict.fromkeys([*even, *least])], cut), state]
    return found or [state]


class _LoopsToShare(NamedTuple):
    """Loops that cores may share, the preferred one first. `even`: output loops that divide evenly, first those with two iterations per
    core, outermost first, as the other cores then make up for a late one; `least`: output loops, the most even one first; `cut`: reduce
    loops to split into parts."""

    even: list[int]
    least: list[int]
    cut: list[int]


def _loops_to_share(state: Scheduler) -> _LoopsToShare:
    threads, r = state.target.threads, resolved(state, state.kernel.output)
    extent = {row: state.rows[row].extent for row in state.order[state.kernel.output] if state.rows[row].extent > 1}
    waste = {row: -(-n // threads) * threads / n for row, n in extent.items()}
    outer = [row for row in extent if r.axes.index(state.rows[row].axis) < len(r.stage.outs)]
    shared = [row for row in outer if extent[row] >= threads]
    many = [row for row in shared if waste[row] <= EVEN_FACTOR and extent[row] >= 2 * threads]
    least = sorted(shared, key=lambda row: waste[row])
    even = list(dict.fromkeys([*many, *[row for row in least if waste[row] <= EVEN_FACTOR]]))
    return _LoopsToShare(even, least, [row for row in extent if row not in outer and extent[row] >= 4 * threads])


def _sharing(state: Scheduler, *loops: list[int]) -> list[Scheduler]:
    """For each list of loops, the state in which the cores share the first loop of the list that they can share, if there is one."""
    found = [first_change(state, *[("THREAD", state.rows[row].name, state.target.threads) for row in rows]) for rows in loops]
    return [s for s in found if s is not state]


def _streamed(state: Scheduler) -> Scheduler:
    """Apply STREAM if the caches do not keep the output, even if the prediction does not improve: the model does not know how much of the
    last cache is free."""
    if not outgrows_caches(state) or not has_non_temporal_stores(state):
        return state
    return try_opt(state, "STREAM", state.kernel.stages[state.kernel.output].name)


_INSTRUCTION = Hole("instruction", lambda p: instructions(p.state, p.stage.stage.index))
_IS_CONTRACTION = Only(lambda p: factors_of(p.state, p.stage) is not None)
_IS_NONE = Only(lambda p: factors_of(p.state, p.stage) is None)

INSTRUCTIONS = Template(
    "INSTRUCTIONS", _INSTRUCTION, Apply("TC", lambda p: p[_INSTRUCTION].axis, lambda p: p[_INSTRUCTION].arg), Choose(
        [Only(lambda p: p[_INSTRUCTION].has_tiles), TILES],
        [Only(lambda p: not p[_INSTRUCTION].has_tiles), CONTRACTION]))

# A contraction is a sum of products in which each operand lacks an output axis that the other has.
_OF_CONTRACTIONS: tuple[Steps, ...] = CONTRACTION, ATTENTION, INSTRUCTIONS, WINOGRAD
_OF_OTHERS: tuple[Steps, ...] = (
    MATRIX_VECTOR,
    VECTORS,
    [Only(lambda p: not p.stage.reductions), TRANSPOSE],
    [Only(lambda p: bool(p.stage.reductions) and p[LANE] in p.reds), ROW_SUMS],
    [Only(lambda p: bool(p.stage.reductions) and p[LANE] in p.outs), Choose(COLUMN_SUMS, WINDOWS)])
TEMPLATES: tuple[Steps, ...] = (
    [_IS_CONTRACTION, Choose(*_OF_CONTRACTIONS)],
    [_IS_NONE, LANE, Choose(*_OF_OTHERS)],
    [_IS_NONE, CHANNELS],
    [_IS_NONE])
_EACH_TEMPLATE: tuple[Steps, ...] = (       # the same, each template for itself, without those that are costly to price and to compile
    *([_IS_CONTRACTION, steps] for steps in _OF_CONTRACTIONS if steps is not WINOGRAD),
    *([_IS_NONE, LANE, steps] for steps in _OF_OTHERS), *TEMPLATES[2:])
FINISH = Do(_finish)
PREFETCHED, STREAMED = Template("PREFETCH", Do(lambda p: ahead(p.state))), Template("STREAM", Do(lambda p: _streamed(p.state)))
