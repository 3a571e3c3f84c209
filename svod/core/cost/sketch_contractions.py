"""Sketches of contractions: register tiles of vectors × positions, and where each operand is packed.

    UPCAST(o0, 12) UPCAST(o1, 32) LANES(o1.in)                             24 vectors of results, 2 + 1 of operands
    … ORDER(out, (o1, o0)) STAGE(s1, o1)                                   the columns of a tile packed once for all rows
    … UNROLL(r0, 2)                                                        less bookkeeping per multiply-add
    … TILE(o1, N/cores) STAGE(s1, o1) THREAD(o1, cores)                    what windows read copied once by each core
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from svod.core.cost.cpu import cost_of
from svod.core.cost.sketch_facts import (
    Factor,
    bytes_of,
    extent_of,
    is_constant,
    lane_amounts,
    name_of,
    resolved,
    rows_held,
    tile_amounts,
    try_opt,
)
from svod.core.kernel.contraction import skipping_window
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.placement import is_derived, place_stages, vector_width
from svod.core.kernel.scheduler import ROOT, Scheduler

_STAGE_BYTES = 1 << 13         # operands smaller than this are read in place
_UNSTAGED = 1.1                # times the cycles of a tile that copies an operand: one that does not, and is predicted so, is a sketch too
_WHOLE = 4                     # iterations of a reduce loop that become straight-line code


def _tile_score(lane: int, tile: int, n: int, m: int, width: int) -> float:
    """How well a register tile of n lanes × m positions uses the multipliers: the share of useful lanes and positions, multiply-adds per
    load, and whether they hide their latency (two a cycle, four cycles each)."""
    v = -(-n // width)
    lanes_used = lane / (-(-lane // n) * v * width)
    useful = tile / (-(-tile // m) * m)
    fmas, loads = v * m, v + m
    return lanes_used * useful * min(1.0, fmas / 8) * min(1.0, fmas / loads / 1.3)


def _tiles(lane: int, tile: int, width: int, registers: int) -> list[tuple[int, int]]:
    """(lane amount, tile amount) pairs for axes of these extents, those with the most multiply-adds per load first."""
    scores: dict[tuple[int, int], float] = {}
    for n in lane_amounts(lane, width, 4):
        v = -(-n // width)
        for m in tile_amounts(tile, rows_held(v, registers))[:3]:
            scores[n, m] = _tile_score(lane, tile, n, m, width)
    return sorted(scores, key=lambda pair: -scores[pair])


@dataclass(frozen=True, slots=True)
class _RegisterTile:
    """n positions of the output axis `lane`, in vectors of the operand x, times m of the axis `tile`, one by one of y. Local axes."""

    lane: int
    n: int
    tile: int
    m: int
    x: Factor
    y: Factor


def _unroll_last(state: Scheduler, r: ResolvedStage) -> Scheduler:
    """Unroll the innermost reduce loop by two, a short one whole: less bookkeeping per multiply-add. Those that skip zeros stay loops."""
    skipping = {r.axes[a] for a in _skipping_axes(state, r)}
    summed = [a for a in r.stage.reds if a not in skipping]
    if not summed:
        return state
    axis = state.kernel.axes[summed[-1]]
    if axis.extent <= _WHOLE:
        return try_opt(state, "UNROLL", axis.name, 0)
    return try_opt(state, "UNROLL", axis.name, 2)


def _unroll_windows(state: Scheduler, r: ResolvedStage, t: _RegisterTile, y: Factor) -> Scheduler:
    """As `_unroll_last`, for windows: their overlap along the tile stays in registers; with too few, another loop is unrolled."""
    last = len(r.axes) - 1
    if len(r.stage.reds) > 1 and y.stage >= 0 and any(lin.coef(t.tile) and lin.coef(last) for lin in r.nodes[y.node].dims):
        v, k = -(-t.n // vector_width(state, r)), extent_of(state, r, last)
        if k <= _WHOLE and v * (t.m + 1) + t.m + k - 1 > state.target.vector_registers:
            return try_opt(state, "UNROLL", state.kernel.axes[r.stage.reds[0]].name, 2)
    return _unroll_last(state, r)


class LaneChoice(NamedTuple):
    score: float
    axis: int           # the vector axis
    vectors: Factor     # the operand read in vectors
    broadcast: Factor


def lane_choices(state: Scheduler, r: ResolvedStage, operands: tuple[Factor, Factor]) -> list[LaneChoice]:
    """The axes that can be the vector, best first."""
    width = vector_width(state, r)
    choices = []
    for a in range(len(r.stage.outs)):
        e = extent_of(state, r, a)
        if e == 1:
            continue
        for x, y in (operands, operands[::-1]):
            if a in x.axes and a not in y.axes:
                use = e / (-(-e // width) * width) if e < 4 * width else 1.0
                read = 1.0 if a in x.unit else 0.97 if a in x.staged_unit and x.stage >= 0 else 0.3
                store = 1.0 if r.store is None or r.store.coef(a) == 1 else 0.9
                choices.append(LaneChoice(use * read * store, a, x, y))
    return sorted(choices, key=lambda c: -c.score)


def contraction_sketches(state: Scheduler, r: ResolvedStage, operands: tuple[Factor, Factor]) -> Iterator[Scheduler]:
    """Register tiles of the output stage: vector axis × tile axis, with operands staged where that makes them contiguous or near. The
    tiles that use the multipliers best come in variants; of the others come those predicted to be faster."""
    choices = lane_choices(state, r, operands)
    width, registers = vector_width(state, r), state.target.vector_registers
    shares: list[float] = []        # predicted cycles where each core copies its share of the windows
    for rank in range(6):
        for _, lane, x, y in choices[:2]:
            others = [a for a in range(len(r.stage.outs)) if a != lane and extent_of(state, r, a) > 1]
            tile = min((a for a in others if a not in x.axes), key=lambda a: (-min(extent_of(state, r, a), 16), -a),
                       default=others[-1] if others else None)
            if tile is None:
                continue
            pairs = _tiles(extent_of(state, r, lane), extent_of(state, r, tile), width, registers)
            if rank < len(pairs):
                n, m = pairs[rank]
                yield from _tiled(state, r, _RegisterTile(lane, n, tile, m, x, y), shares, variants=rank < 2)


def _tiled(state: Scheduler, r: ResolvedStage, t: _RegisterTile, shares: list[float], *, variants: bool) -> Iterator[Scheduler]:
    """The sketches of one register tile. `shares`: of all tiles, see `contraction_sketches`."""
    lane_name, tile_name = name_of(state, r, t.lane), name_of(state, r, t.tile)
    s = state
    if t.m > 1:
        s = try_opt(s, "UPCAST", tile_name, t.m)
    s = try_opt(s, "UPCAST", lane_name, t.n)
    if s is state:
        return
    lane_in = next((row.name for row in reversed(s.rows) if row.axis == r.axes[t.lane] and row.role == "upcast"), None)
    if lane_in is not None and t.n > 1:
        s = try_opt(s, "LANES", lane_in)
    outside, inside = _two_orders(s, r, t)
    for base, inner, at, other in ((outside, t.x, t.lane, t.y), (inside, t.y, t.tile, t.x)):
        staged = _stage_operand(base, r, inner, at)
        yield _unroll_windows(_stage_masked(staged, r, other), r, t, other)
        own = _stage_share(staged, r, other, t.tile)
        if own is not None:
            own = _unroll_windows(own, r, t, other)
            cycles = cost_of(own).cycles
            if variants or cycles < min(shares, default=math.inf):
                yield own
            shares.append(cycles)
        if staged is not base and (variants or cost_of(base).cycles < _UNSTAGED * cost_of(staged).cycles):
            yield base
        if not variants:
            return


def _two_orders(state: Scheduler, r: ResolvedStage, t: _RegisterTile) -> tuple[Scheduler, Scheduler]:
    """Two loop orders: the vector operand's loops outside, so that every inner iteration uses its staged part; and the other way round."""
    others = [a for a in range(len(r.stage.outs)) if a not in (t.lane, t.tile)]
    shared = [a for a in others if a in t.x.axes and a in t.y.axes]
    x_only = [a for a in others if a in t.x.axes and a not in t.y.axes]
    y_only = [a for a in others if a not in t.x.axes]
    return (_ordered(state, r, [*shared, *x_only, t.lane, *y_only, t.tile]),
            _ordered(state, r, [*shared, *y_only, t.tile, *x_only, t.lane]))


def _ordered(state: Scheduler, r: ResolvedStage, axes: list[int]) -> Scheduler:
    skipping, summed = _skipping_axes(state, r), range(len(r.stage.outs), len(r.axes))
    summed_in_order = [*skipping, *(a for a in summed if a not in skipping)] if skipping else []
    names = [name_of(state, r, a) for a in (*axes, *summed_in_order) if extent_of(state, r, a) > 1]
    return try_opt(state, "ORDER", r.stage.name, tuple(names)) if len(names) > 1 else state


def _skipping_axes(state: Scheduler, r: ResolvedStage) -> list[int]:
    """The reduce axes whose loops skip what adds zeros. Outside the others, their bounds are computed seldom and predicted well."""
    axes = loop_nest(state).stages[r.stage.index].axes
    return [a for a in range(len(r.stage.outs), len(r.axes)) if skipping_window(state, r, a, axes[a]) is not None]


def _stage_operand(state: Scheduler, r: ResolvedStage, x: Factor, at: int) -> Scheduler:
    """STAGE an operand: constants once at prepare, others at the loop of the output axis `at`."""
    if x.stage < 0 or not is_derived(state.kernel.stages[x.stage]):
        return state
    name = state.kernel.stages[x.stage].name
    if bytes_of(state, x.stage) < _STAGE_BYTES and at in x.unit:
        return state
    if is_constant(state, x.stage):
        return try_opt(state, "STAGE", name, ROOT)
    order = state.order[r.stage.index]
    # the innermost loop of that axis, or of those that the operand depends on
    wanted = [row for row in order if state.rows[row].axis == r.axes[at] and state.rows[row].extent > 1]
    if not wanted:
        outs = set(r.axes[:len(r.stage.outs)]) & {r.axes[a] for a in x.axes}
        wanted = [row for row in order if state.rows[row].axis in outs and state.rows[row].extent > 1]
    if not wanted:
        return try_opt(state, "STAGE", name, ROOT)
    return try_opt(state, "STAGE", name, state.rows[wanted[-1]].name)


def _stage_masked(state: Scheduler, r: ResolvedStage, y: Factor) -> Scheduler:
    """STAGE the other operand too where reading it in place needs a mask or a conversion: the copy does both once."""
    if y.stage < 0 or not is_derived(state.kernel.stages[y.stage]) or state.place[y.stage] != "inline":
        return state
    inner = resolved(state, y.stage)
    if not any(n.kind == "cast" or (n.kind == "load" and n.gate >= 0) or (n.kind == "alu" and n.dtype.is_float) for n in inner.nodes):
        return state
    name = state.kernel.stages[y.stage].name
    if bytes_of(state, y.stage) <= state.target.l2:
        return try_opt(state, "STAGE", name, ROOT)
    # inside the loops it depends on, outside the first one that would compute it again
    at = ROOT
    for row in state.order[r.stage.index]:
        local = r.axes.index(state.rows[row].axis)
        if local >= len(r.stage.outs) or local not in y.axes:
            break
        at = state.rows[row].name
    return try_opt(state, "STAGE", name, at)


def _stage_share(state: Scheduler, r: ResolvedStage, y: Factor, tile: int) -> Scheduler | None:
    """STAGE what overlapping windows read once per core, so that it stays in that core's cache. An output axis along which windows
    overlap is cut into one part per core. Inside a part, operands read one by one get short tiles along memory, where neighbours share
    lines; operands read in vectors get wide ones, where neighbours across share more. None where no windows overlap."""
    if state.target.threads < 2 or y.stage < 0 or not is_derived(state.kernel.stages[y.stage]) or state.place[y.stage] != "inline":
        return None
    if bytes_of(state, y.stage) > state.target.threads * state.target.l2:
        return None
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
        return try_opt(staged, "THREAD", state.rows[row].name, state.target.threads) if staged is not tiled else None
    return None


def inner_contraction(state: Scheduler, r: ResolvedStage, operands: tuple[Factor, Factor]) -> Scheduler | None:
    """A contraction inside another nest (attention's scores): a register tile of the part computed at a time, its vector operand staged
    at the innermost loop that moves it. None where that part has no axis that only one operand depends on."""
    nest = loop_nest(state).stages.get(r.stage.index)
    if nest is None:
        return state
    region = nest.region
    width, registers = vector_width(state, r), state.target.vector_registers
    best, best_score = None, 0.0
    for a, e in enumerate(region):
        for x, y in (operands, operands[::-1]):
            if e > 1 and a in x.axes and a not in y.axes:
                score = e / (-(-e // width) * width) * (1.0 if a in x.unit else 0.97 if a in x.staged_unit and x.stage >= 0 else 0.3)
                if best is None or score > best_score:
                    best, best_score = (a, x), score
    if best is None:
        return None
    lane, x = best
    tiles_of = [t for t, e in enumerate(region) if t not in x.axes and t != lane and e > 1]
    tile = max(tiles_of, key=lambda t: region[t], default=-1)
    n, m = _tiles(region[lane], region[tile] if tile >= 0 else 1, width, registers)[0]
    if m > 1:
        state = try_opt(state, "UPCAST", name_of(state, r, tile), m)
    done = try_opt(state, "UPCAST", name_of(state, r, lane), n)
    if done is not state and n > 1:
        state = try_opt(done, "LANES", f"{name_of(state, r, lane)}.in")
    state = _unroll_last(state, r)
    if x.stage >= 0 and lane not in x.unit and is_derived(state.kernel.stages[x.stage]):
        state = _stage_around(state, r, x)
    return state


def _stage_around(state: Scheduler, r: ResolvedStage, x: Factor) -> Scheduler:
    """STAGE an operand of a stage inside another nest: constants once, others at the innermost loop that moves them."""
    name = state.kernel.stages[x.stage].name
    if is_constant(state, x.stage):
        return try_opt(state, "STAGE", name, ROOT)
    path = place_stages(state).paths[r.stage.index] or ()
    rows = [row for t, depth in path for row in state.order[t][:depth]]
    moved_by = [terms for terms, _ in loop_nest(state).stages[r.stage.index].starts]
    wanted = {row for a in x.axes if a < len(moved_by) for row in moved_by[a]}
    for row in reversed(rows):
        if row in wanted:
            return try_opt(state, "STAGE", name, state.rows[row].name)
    return try_opt(state, "STAGE", name, ROOT)
