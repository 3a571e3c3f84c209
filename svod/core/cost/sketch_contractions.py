"""Sketches of contractions for CPUs: register tiles of vectors × positions, and the place where each operand is packed.

    UPCAST(o0, 12) UPCAST(o1, 32) LANES(o1.in)                             24 vectors of results, 2 + 1 of operands
    … ORDER(out, (o1, o0)) STAGE(s1, o1)                                   the columns of a tile packed once for all rows
    … UNROLL(r0, 2)                                                        less bookkeeping per multiply-add
    … TILE(o1, N/cores) STAGE(s1, o1) THREAD(o1, cores)                    the input of windows copied once by each core
"""
from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import NamedTuple

from svod.core.cost.cpu import bounds_of, cost_of
from svod.core.cost.sketch_facts import (
    Factor,
    bytes_of,
    extent_of,
    factors_of,
    factors_of_product,
    first_change,
    is_constant,
    lane_amounts,
    name_of,
    resolved,
    rows_held,
    tile_amounts,
    try_opt,
)
from svod.core.cost.template import Apply, Cheaper, Choose, Do, Hole, Need, Only, Point, Template, fact
from svod.core.kernel.contraction import skipping_window, windows_of
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.numerics import canonical_sum
from svod.core.kernel.placement import is_derived, place_stages, vector_width
from svod.core.kernel.scheduler import ROOT, Scheduler
from svod.core.machine.target import SAME

MIN_STAGED_BYTES = 1 << 13     # bytes; a smaller operand is read in place
# a tile that reads its operand in place is a sketch too if it takes less than this many times the cycles of the tile that stages it
UNSTAGED_FACTOR = 1.1
SHARED_PER_CORE = 2            # least iterations per core of a loop that is shared by the cores rather than one inside of it
LEAST_PASSES = 4               # least times that an operand is read for its copy to pay
SHORT_SUM = 4                  # iterations; a shorter reduce loop becomes straight-line code
MOST_TILES = 6                 # most register tiles for each vector axis
VARIED_TILES = 2               # the best tiles for each vector axis, which are tried in all variants; others are tried in one


def _tile_score(lane: int, tile: int, n: int, m: int, width: int) -> float:
    """A score of how well a register tile of n lanes × m positions uses the multipliers: the share of useful lanes and positions,
    multiply-adds per load, and whether there are enough multiply-adds to hide their latency (two per cycle, four cycles each)."""
    v = -(-n // width)
    lanes_used = lane / (-(-lane // n) * v * width)
    useful = tile / (-(-tile // m) * m)
    fmas, loads = v * m, v + m
    return lanes_used * useful * min(1.0, fmas / 8) * min(1.0, fmas / loads / 1.3)


def tiles_of(lane: int, tile: int, width: int, registers: int) -> list[tuple[int, int]]:
    """(lanes, positions) of register tiles for axes of these extents, those with the best score first."""
    scores: dict[tuple[int, int], float] = {}
    for n in lane_amounts(lane, width, 4):
        for m in tile_amounts(tile, rows_held(n, width, registers))[:3]:
            scores[n, m] = _tile_score(lane, tile, n, m, width)
    return sorted(scores, key=lambda pair: -scores[pair])


class _RegisterTile(NamedTuple):
    """A register tile: `lanes` positions of local axis `lane`, along which the operand `vectors` is read in vectors, times `rows` positions
    of local axis `tile`, along which `scalars` is read one by one. `rank`: 0 for the best tile of these axes."""

    lane: int
    lanes: int
    tile: int
    rows: int
    vectors: Factor
    scalars: Factor
    rank: int


class _LoopOrder(NamedTuple):
    """An order of the output's axes. `inner`: the operand that the inner loop reads repeatedly, which is staged at axis `at`; `other`: the
    other operand."""

    axes: tuple[int, ...]
    inner: Factor
    at: int
    other: Factor


class LaneChoice(NamedTuple):
    score: float
    axis: int           # the vector axis
    vectors: Factor     # the operand that is read in vectors
    broadcast: Factor


def lane_choices(state: Scheduler, r: ResolvedStage, operands: tuple[Factor, Factor], region: Sequence[int] = ()) -> list[LaneChoice]:
    """The output axes that can be the vector, best first. `region`: the extents of the output axes if only a part is computed at a time."""
    width = vector_width(state, r)
    choices = []
    for a, e in enumerate(region or [extent_of(state, r, a) for a in range(len(r.stage.outs))]):
        if e == 1:
            continue
        for x, y in (operands, operands[::-1]):
            if a in x.axes and a not in y.axes:
                use = e / (-(-e // width) * width) if e < 4 * width else 1.0
                read = 1.0 if a in x.unit else 0.97 if a in x.staged_unit and x.stage >= 0 else 0.3
                store = 1.0 if r.store is None or r.store.coef(a) == 1 else 0.9
                choices.append(LaneChoice(use * read * store, a, x, y))
    return sorted(choices, key=lambda c: -c.score)


def _register_tiles(p: Point) -> Iterator[_RegisterTile]:
    """Register tiles for the two best vector axes, the best ones first."""
    ranked: list[list[_RegisterTile]] = []
    for _, lane, x, y in lane_choices(p.state, p.stage, p[OPERANDS])[:2]:
        others = [a for a in p.outs if a != lane and p.extent(a) > 1]
        tile = min((a for a in others if a not in x.axes), key=lambda a: (-min(p.extent(a), 16), -a),
                   default=others[-1] if others else None)
        if tile is not None:
            pairs = tiles_of(p.extent(lane), p.extent(tile), p.width, p.state.target.vector_registers)[:MOST_TILES]
            ranked.append([_RegisterTile(lane, n, tile, m, x, y, rank) for rank, (n, m) in enumerate(pairs)])
    yield from sorted(itertools.chain(*ranked), key=lambda t: t.rank)


def _loop_orders(p: Point) -> list[_LoopOrder]:
    """Two loop orders: with the vector operand's loops outermost, so that all inner iterations use the staged part of it; and with the
    other operand's loops outermost. Only the first for tiles without variants."""
    t = p[_TILE]
    x, y = t.vectors.axes, t.scalars.axes
    others = [a for a in p.outs if a not in (t.lane, t.tile)]
    shared, x_only = [a for a in others if a in x and a in y], [a for a in others if a in x and a not in y]
    y_only = [a for a in others if a not in x]
    return [_LoopOrder((*shared, *x_only, t.lane, *y_only, t.tile), t.vectors, t.lane, t.scalars),
            _LoopOrder((*shared, *y_only, t.tile, *x_only, t.lane), t.scalars, t.tile, t.vectors)][:2 if _has_variants(p) else 1]


def _has_variants(p: Point) -> bool:
    return p[_TILE].rank < VARIED_TILES


def _innermost_lane(p: Point) -> str:
    """The name of the vector loop, "" if there is none."""
    lane = p.stage.axes[p[_TILE].lane]
    return next((row.name for row in reversed(p.state.rows) if row.axis == lane and row.role == "upcast"), "") if p[LANES] > 1 else ""


def _is_near_unstaged(p: Point) -> bool:
    """Whether the tile that reads its inner operand in place is worth a sketch besides the one that stages it: the tile is tried in all
    variants, or takes less than `UNSTAGED_FACTOR` times the cycles, or all are bounded. False if nothing was staged."""
    if p[_STAGED] is p.state or _has_variants(p) or p.is_bounded:
        return p[_STAGED] is not p.state
    most = UNSTAGED_FACTOR * cost_of(p[_STAGED]).cycles
    return all(bound < most for bound in bounds_of(p.state))


def _unroll_last(state: Scheduler, r: ResolvedStage) -> Scheduler:
    """Unroll the innermost reduce loop by two, or a short one completely, for less bookkeeping per multiply-add. Loops that skip zeros are
    not unrolled."""
    skipping = {r.axes[a] for a in _skipping_axes(state, r)}
    summed = [a for a in r.stage.reds if a not in skipping]
    if not summed:
        return state
    axis = state.kernel.axes[summed[-1]]
    if axis.extent <= SHORT_SUM:
        return try_opt(state, "UNROLL", axis.name, 0)
    return try_opt(state, "UNROLL", axis.name, 2)


def _unroll_windows(state: Scheduler, r: ResolvedStage, t: _RegisterTile, y: Factor) -> Scheduler:
    """Like `_unroll_last`, for sums over windows: unrolling the innermost reduce loop keeps elements that neighbouring windows of the
    tile share in registers. If there are too few registers for that, the outermost reduce loop is unrolled instead."""
    last = len(r.axes) - 1
    if len(r.stage.reds) > 1 and y.stage >= 0 and any(lin.coef(t.tile) and lin.coef(last) for lin in r.nodes[y.node].dims):
        v, k = -(-t.lanes // vector_width(state, r)), extent_of(state, r, last)
        if k <= SHORT_SUM and v * (t.rows + 1) + t.rows + k - 1 > state.target.vector_registers:
            return try_opt(state, "UNROLL", state.kernel.axes[r.stage.reds[0]].name, 2)
    return _unroll_last(state, r)


def _skipped(p: Point) -> list[list[int]]:
    """Reduce axes to put outside of the others: their loops skip zeros, and outside bounds are computed rarely and branches predicted
    well. Axes that skip few iterations are put there for the best tile alone, as one of two choices."""
    windows = windows_of(p.state.kernel, p.stage.stage.index)
    every = [a for a in p.reds if a in windows]
    small = [a for a in every if windows[a].is_small]
    return [small, every] if len(small) < len(every) and p[_TILE].rank == 0 else [small]


def _ordered(state: Scheduler, r: ResolvedStage, axes: Sequence[int], skipping: Sequence[int]) -> Scheduler:
    summed = range(len(r.stage.outs), len(r.axes))
    summed_in_order = [*skipping, *(a for a in summed if a not in skipping)] if skipping else []
    names = [name_of(state, r, a) for a in (*axes, *summed_in_order) if extent_of(state, r, a) > 1]
    return try_opt(state, "ORDER", r.stage.name, tuple(names)) if len(names) > 1 else state


def _skipping_axes(state: Scheduler, r: ResolvedStage) -> list[int]:
    """The reduce axes whose loops skip iterations that add zeros."""
    if not windows_of(state.kernel, r.stage.index):
        return []
    axes = loop_nest(state).stages[r.stage.index].axes
    return [a for a in range(len(r.stage.outs), len(r.axes)) if skipping_window(state, r, a, axes[a]) is not None]


def _stage_operand(state: Scheduler, r: ResolvedStage, order: _LoopOrder) -> Scheduler:
    """STAGE the inner operand of a loop order: constants at the root, once at prepare; others at the loop of the order's axis `at`. Each
    iteration of that loop reads all rows of one that is both factors, as in a Gram matrix: it is staged inside the loops that move both, if
    the cores share one of these, else at the root."""
    x, at = order.inner, order.at
    if x.stage < 0 or not is_derived(state.kernel.stages[x.stage]):
        return state
    name = state.kernel.stages[x.stage].name
    if bytes_of(state, x.stage) < MIN_STAGED_BYTES and at in x.unit:
        return state
    if is_constant(state, x.stage):
        return try_opt(state, "STAGE", name, ROOT)
    if x.stage == order.other.stage:
        both = [a for a in x.axes & order.other.axes if a < len(r.stage.outs)]
        is_shared = any(extent_of(state, r, a) >= SHARED_PER_CORE * state.target.threads for a in both)
        return try_opt(state, "STAGE", name, _last_loop_over(state, r, both) if is_shared else ROOT)
    loops = state.order[r.stage.index]
    # the innermost loop over that axis; if there is none, the innermost loop over an output axis that the operand depends on
    wanted = [row for row in loops if state.rows[row].axis == r.axes[at] and state.rows[row].extent > 1]
    if not wanted:
        outs = set(r.axes[:len(r.stage.outs)]) & {r.axes[a] for a in x.axes}
        wanted = [row for row in loops if state.rows[row].axis in outs and state.rows[row].extent > 1]
    return try_opt(state, "STAGE", name, state.rows[wanted[-1]].name if wanted else ROOT)


def _is_computed(state: Scheduler, y: Factor) -> bool:
    """Whether reading an operand in place needs a mask, a conversion or arithmetic, which a copy does once."""
    if y.stage < 0 or not is_derived(state.kernel.stages[y.stage]) or state.place[y.stage] != "inline":
        return False
    nodes = resolved(state, y.stage).nodes
    return any(n.kind == "cast" or (n.kind == "load" and n.gate >= 0) or (n.kind == "alu" and n.dtype.is_float) for n in nodes)


def _stage_masked(state: Scheduler, r: ResolvedStage, y: Factor) -> Scheduler:
    """STAGE operand `y` too, if it is no plain load: at the root if the second cache holds all of it, else where no loop repeats it."""
    if not _is_computed(state, y):
        return state
    is_small = bytes_of(state, y.stage) <= state.target.l2
    return try_opt(state, "STAGE", state.kernel.stages[y.stage].name, ROOT if is_small else _last_loop_over(state, r, y.axes))


def _stage_columns(state: Scheduler, r: ResolvedStage, order: _LoopOrder, t: _RegisterTile) -> Scheduler:
    """STAGE an operand at the root whose elements are read one by one, again and again, along another axis than its rows in memory, where
    each lies in a line and often a page of its own. Returns the state unchanged for other operands, and for one that the second caches
    cannot hold."""
    y, vectors = order.other, order.inner
    if y is not t.scalars:
        return state
    if y.stage < 0 or not is_derived(state.kernel.stages[y.stage]) or state.place[y.stage] != "inline" or _is_computed(state, y):
        return state
    outs, last = len(r.stage.outs), len(r.axes) - 1
    passes = prod([state.rows[row].extent for row in state.order[r.stage.index]
                   if (a := r.axes.index(state.rows[row].axis)) < outs and a not in y.axes])
    if last in y.unit or last not in y.axes or last not in vectors.axes or passes < LEAST_PASSES:
        return state
    if not MIN_STAGED_BYTES <= bytes_of(state, y.stage) <= state.target.threads * state.target.l2:
        return state
    return try_opt(state, "STAGE", state.kernel.stages[y.stage].name, ROOT)


def _last_loop_over(state: Scheduler, r: ResolvedStage, axes: Collection[int]) -> str:
    """The name of the last of the outermost loops that are over output axes among `axes`; `ROOT` if the outermost loop is not."""
    last = ROOT
    for row in state.order[r.stage.index]:
        local = r.axes.index(state.rows[row].axis)
        if local >= len(r.stage.outs) or local not in axes:
            break
        last = state.rows[row].name
    return last


def _stage_share(state: Scheduler, r: ResolvedStage, y: Factor, tile: int) -> Scheduler:
    """STAGE the input of overlapping windows once per core, so that it stays in that core's cache. An output axis along which windows
    overlap is split into one part per core. Inside a part, the tile's loop goes innermost if the operand depends on it, since neighbours
    then share cache lines. Returns the state unchanged if no windows overlap."""
    if state.target.threads < 2 or y.stage < 0 or not is_derived(state.kernel.stages[y.stage]) or state.place[y.stage] != "inline":
        return state
    if bytes_of(state, y.stage) > state.target.threads * state.target.l2:
        return state
    outs = len(r.stage.outs)
    summed = [a for a in y.axes if a >= outs]
    reads = [lin for lin in r.nodes[y.node].dims if any(lin.coef(q) for q in summed)]
    for row in state.order[r.stage.index]:
        a = r.axes.index(state.rows[row].axis)
        extent = state.rows[row].extent
        if a >= outs or extent < 2 * state.target.threads or not any(lin.coef(a) for lin in reads):
            continue
        tiled = try_opt(state, "TILE", state.rows[row].name, -(-extent // state.target.threads))
        if tiled is state:
            continue
        others = [x for x in tiled.order[r.stage.index]
                  if x != row and tiled.rows[x].extent > 1 and r.axes.index(tiled.rows[x].axis) < outs]
        if tile in y.axes:
            others.sort(key=lambda x: tiled.rows[x].axis == r.axes[tile])
        tiled = try_opt(tiled, "ORDER", r.stage.name, tuple(tiled.rows[x].name for x in (row, *others)))
        staged = try_opt(tiled, "STAGE", state.kernel.stages[y.stage].name, state.rows[row].name)
        return try_opt(staged, "THREAD", state.rows[row].name, state.target.threads) if staged is not tiled else state
    return state


OPERANDS = fact(lambda p: factors_of(p.state, p.stage))
_TILE = Hole("", _register_tiles)
LANES = Hole("lanes", lambda p: (p[_TILE].lanes,))
ROWS = Hole("rows", lambda p: (p[_TILE].rows,))
_ORDER = Hole("", _loop_orders)
_SKIPPING = Hole("", _skipped)
_STAGED = fact(lambda p: _stage_operand(p.state, p.stage, p[_ORDER]))       # the state after staging the inner operand
_UNROLL = Do(lambda p: _unroll_windows(p.state, p.stage, p[_TILE], p[_ORDER].other))

# Operands are staged if that makes them contiguous or keeps them in a near cache. The best tiles come in all variants, others only if they
# are predicted to be faster.
CONTRACTION = Template(
    "CONTRACTION", OPERANDS, _TILE, LANES, ROWS,
    Need(Apply("UPCAST", lambda p: p[_TILE].tile, ROWS), Apply("UPCAST", lambda p: p[_TILE].lane, LANES)), Apply("LANES", _innermost_lane),
    _ORDER, _SKIPPING, Do(lambda p: _ordered(p.state, p.stage, p[_ORDER].axes, p[_SKIPPING])), _STAGED, Choose(
        [Do(lambda p: p[_STAGED]), Choose(
            [Do(lambda p: _stage_masked(p.state, p.stage, p[_ORDER].other)), _UNROLL],
            [Need(Do(lambda p: _stage_share(p.state, p.stage, p[_ORDER].other, p[_TILE].tile))), _UNROLL,
             Cheaper(lambda p: cost_of(p.state).cycles, _has_variants)],
            [Need(Do(lambda p: _stage_columns(p.state, p.stage, p[_ORDER], p[_TILE]))), _UNROLL,
             Cheaper(lambda p: cost_of(p.state).cycles, _has_variants)])],
        [Only(_is_near_unstaged)]))


# -- a matrix times a vector, in order -----------------------------------------------------------------

class _Matrix(NamedTuple):
    """The matrix of a product with a vector. `rows`: the local axis of its rows, which the vector lacks."""

    factor: Factor
    rows: int


def matrix_of(state: Scheduler, r: ResolvedStage) -> _Matrix | None:
    """The matrix of a product with a vector whose terms are added one after the other for each row (`numerics=same`); else None."""
    canonical = canonical_sum(state.kernel, r.stage.index) if state.target.numerics == SAME and r.reductions else None
    factors = factors_of_product(state, r) if canonical is not None and canonical.lanes == 1 else None
    if factors is None or factors_of(state, r) is not None:
        return None
    x, y = factors
    found = [_Matrix(m, a) for m, other in ((x, y), (y, x)) for a in range(len(r.stage.outs))
             if a in m.axes and a not in other.axes and a not in m.unit and extent_of(state, r, a) > 1]
    return max(found, key=lambda m: extent_of(state, r, m.rows), default=None)


def squares(state: Scheduler, r: ResolvedStage, matrix: _Matrix) -> Scheduler:
    """Multiply a matrix and a vector in squares, which lowering transposes in registers: vectors of the results of several rows."""
    width = vector_width(state, r)
    rows = try_opt(state, "UPCAST", name_of(state, r, matrix.rows), min(width, extent_of(state, r, matrix.rows)))
    if rows is state:
        return state
    rows = try_opt(rows, "LANES", f"{name_of(state, r, matrix.rows)}.in")
    return first_change(rows, *[("UNROLL", name_of(state, r, len(r.axes) - 1), n) for n in (width, width // 2, width // 4) if n > 1])


def _copied(p: Point) -> Scheduler:
    """Read the matrix from a copy that lies as it is read: packed once if it is constant, else made for the rows of a tile."""
    matrix = p[_MATRIX].factor
    if matrix.stage < 0 or not is_derived(p.state.kernel.stages[matrix.stage]):
        return p.state
    place = ROOT if is_constant(p.state, matrix.stage) else p.name(p[_MATRIX].rows)
    return try_opt(p.state, "STAGE", p.state.kernel.stages[matrix.stage].name, place)


_MATRIX = fact(lambda p: matrix_of(p.state, p.stage))
_VECTORS_OF_ROWS = Hole("vectors", lambda p: (4, 2, 1))

# Results of neighbouring rows lie in a vector, so that each adds its terms in order.
MATRIX_VECTOR = Template("MATRIX VECTOR", _MATRIX, Choose(
    [Do(lambda p: squares(p.state, p.stage, p[_MATRIX]))],
    [_VECTORS_OF_ROWS, Apply("UPCAST", lambda p: p[_MATRIX].rows, lambda p: p[_VECTORS_OF_ROWS] * p.width, must=True),
     Need(Do(_copied)), Apply("UNROLL", lambda p: len(p.stage.axes) - 1, 4)]))


# -- a contraction inside another nest -----------------------------------------------------------------

def inner_contraction(state: Scheduler, r: ResolvedStage, operands: tuple[Factor, Factor]) -> Scheduler | None:
    """Tile a contraction inside another nest (attention's scores): a register tile of the region computed at a time, with its vector
    operand staged at the innermost loop that moves it, and the other operand too if it is no plain load. None if the region has no axis
    that only one operand depends on."""
    nest = loop_nest(state).stages.get(r.stage.index)
    if nest is None:
        return state
    region = nest.region
    width, registers = vector_width(state, r), state.target.vector_registers
    choices = lane_choices(state, r, operands, region)
    if not choices:
        return None
    _, lane, x, y = choices[0]
    others = [t for t, e in enumerate(region) if t not in x.axes and t != lane and e > 1]
    tile = max(others, key=lambda t: region[t], default=-1)
    n, m = tiles_of(region[lane], region[tile] if tile >= 0 else 1, width, registers)[0]
    if m > 1:
        state = try_opt(state, "UPCAST", name_of(state, r, tile), m)
    done = try_opt(state, "UPCAST", name_of(state, r, lane), n)
    if done is not state and n > 1:
        state = try_opt(done, "LANES", f"{name_of(state, r, lane)}.in")
    state = _unroll_last(state, r)
    if x.stage >= 0 and lane not in x.unit and is_derived(state.kernel.stages[x.stage]):
        state = _stage_around(state, r, x, whole_bytes=state.target.l2 if x.stage == y.stage else 0)
    return _stage_around(state, r, y, whole_bytes=state.target.l2) if _is_computed(state, y) else state


def _stage_around(state: Scheduler, r: ResolvedStage, x: Factor, whole_bytes: int = 0) -> Scheduler:
    """STAGE an operand of a stage inside another nest: constants and operands of at most `whole_bytes` at the root, others at the innermost
    loop that moves them."""
    name = state.kernel.stages[x.stage].name
    if is_constant(state, x.stage) or bytes_of(state, x.stage) <= whole_bytes:
        return try_opt(state, "STAGE", name, ROOT)
    path = place_stages(state).paths[r.stage.index] or ()
    rows = [row for t, depth in path for row in state.order[t][:depth]]
    moved_by = [terms for terms, _ in loop_nest(state).stages[r.stage.index].starts]
    wanted = {row for a in x.axes if a < len(moved_by) for row in moved_by[a]}
    return try_opt(state, "STAGE", name, next((state.rows[row].name for row in reversed(rows) if row in wanted), ROOT))
