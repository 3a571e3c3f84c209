"""Sketches: whole chains that only pay in combination, their amounts derived from the target's vector width, registers and caches.

`sketches(state)` lists them; the heuristic is the shortest of those predicted fastest (svod/core/features.py). Everything is read
from the accesses: a *contraction* is a sum of products whose operands each lack an output axis that the other has, so that a register
tile reuses both; other reductions put their vectors where memory is contiguous; elementwise stages that are costly and read twice are
kept.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from svod.core import dots
from svod.core.features import loops_that_move, needed
from svod.core.kernel import Linear, ResolvedStage, node_sources
from svod.core.nest import is_derived, plan
from svod.core.scheduler import ROOT, Opt, Scheduler
from svod.core.streams import can_stream
from svod.core.tile_sketch import tile_sketches
from svod.core.traffic import levels, lost
from svod.core.uop import TRANSCENDENTAL
from svod.errors import KernelOptError

_COSTLY = frozenset(op.value for op in TRANSCENDENTAL) | {"FDIV", "RECIPROCAL", "SQRT"}
_MIN_PARALLEL = 1 << 15        # operations below which a second core costs more than it brings
_EVEN = 1.12                   # cores wait for the last one for no more than this share of the time
TIE = 1.015                    # predictions this near each other say nothing
_ROWS_AT_A_TIME = 8            # rows added between loading sums from scratch and storing them there
_WINDOW = 32                   # positions of a window that become straight-line code
_STAGE_BYTES = 1 << 13         # operands smaller than this are read in place


def heuristic(state: Scheduler) -> Scheduler:
    """The sketch that the analysis of states puts first, the shortest of those that it cannot tell apart: what runs when nothing is known
    about a kernel."""
    found = sketches(state)
    limit = TIE * min((s.features().cycles for s in found), default=0.0)
    return min((s for s in found if s.features().cycles <= limit), key=lambda s: (len(s.applied_opts), s.features().cycles), default=state)


def sketches(state: Scheduler) -> list[Scheduler]:
    """All sketches that apply, different ones only."""
    seen: set[bytes] = set()
    out = []
    for s in _generate(state):
        if s.digest not in seen:
            seen.add(s.digest)
            out.append(s)
    return out


def _try(state: Scheduler, op: str, axis: str, arg: Any = None) -> Scheduler:
    """The state after an opt that is worth having where it applies, else the state as it was."""
    try:
        return state.apply_opt(Opt(op, axis, arg))
    except KernelOptError:
        return state


# -- facts ------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Operand:
    """A factor of a contraction: the local axes it depends on, and which of them it can be read along in vectors."""

    node: int
    axes: frozenset[int]
    stage: int                  # the stage it is a read of, or -1
    unit: frozenset[int]        # axes along which it is contiguous as it lies in memory
    staged_unit: frozenset[int] # axes along which it would be contiguous once staged


def _resolved(state: Scheduler, s: int) -> ResolvedStage:
    """The stage with every stage it reads kept apart, so that operands are seen."""
    found = state.kernel.resolve(frozenset())[s]
    assert found is not None
    return found


def _contiguous_axes(state: Scheduler, r: ResolvedStage, node: int) -> tuple[frozenset[int], frozenset[int]]:
    """(axes along which a node reads memory with stride 1, axes along which it would once its stage is staged)."""
    n = r.nodes[node]
    if n.kind == "load":
        assert n.linear is not None
        unit = frozenset(a for a, c in n.linear.coefs if c == 1)
        return unit, unit
    if n.kind == "read":
        inner = _resolved(state, n.arg)
        strides: dict[int, set[int]] = {}
        for m in inner.nodes:
            if m.kind == "load":
                assert m.linear is not None
                for dim in range(len(inner.stage.outs)):
                    strides.setdefault(dim, set()).add(m.linear.coef(dim))
        direct, staged = set(), set()
        for dim, lin in enumerate(n.dims):
            for a, c in lin.coefs:
                if abs(c) == 1 and sum(1 for other in n.dims if other.coef(a)) == 1:
                    staged.add(a)
                    if strides.get(dim) == {1} and c == 1:
                        direct.add(a)
        return frozenset(direct), frozenset(staged)
    if not n.src:
        return frozenset(), frozenset()
    parts = [_contiguous_axes(state, r, s) for s in n.src]
    return frozenset().union(*(p[0] for p in parts)), frozenset().union(*(p[1] for p in parts))


def _operands(state: Scheduler, r: ResolvedStage) -> tuple[_Operand, _Operand] | None:
    """The factors of a contraction, or None for a stage that is not one."""
    if len(r.reductions) != 1 or r.reductions[0].combiner != "ADD":
        return None
    node = r.nodes[r.reductions[0].values[0]]
    while node.kind == "cast":
        node = r.nodes[node.src[0]]
    if node.kind != "alu" or node.op != "MUL":
        return None
    found = []
    for n in node.src:
        m = r.nodes[n]
        while m.kind == "cast":
            n, m = m.src[0], r.nodes[m.src[0]]
        unit, staged = _contiguous_axes(state, r, n)
        found.append(_Operand(n, frozenset(r.nodes[n].deps), m.arg if m.kind == "read" else -1, unit, staged))
    a, b = found
    outs = frozenset(i for i in range(len(r.stage.outs)) if _extent(state, r, i) > 1)
    if (outs - a.axes) and (outs - b.axes):
        return a, b
    return None


def _extent(state: Scheduler, r: ResolvedStage, local: int) -> int:
    return state.kernel.axes[r.axes[local]].extent


def _name(state: Scheduler, r: ResolvedStage, local: int) -> str:
    return state.kernel.axes[r.axes[local]].name


def _work(state: Scheduler, r: ResolvedStage) -> int:
    """Value operations of a stage, roughly: positions × nodes."""
    total = 1
    for axis in r.axes:
        total *= state.kernel.axes[axis].extent
    return total * max(1, sum(1 for n in r.nodes if n.kind in ("alu", "load", "read")) // 2)


def _width(state: Scheduler, r: ResolvedStage) -> int:
    return max(1, state.target.vector_bytes // r.lanes_bytes)


# -- amounts ----------------------------------------------------------------------------------------

def lane_amounts(extent: int, width: int, vectors: int) -> list[int]:
    """Amounts for a vector axis, best first: whole vectors, at most `vectors`, that waste the least; a short axis whole."""
    if extent <= width:
        return [extent]
    options = [v * width for v in range(1, vectors + 1) if v * width <= extent]
    if extent <= vectors * width:
        options.append(extent)
    # an axis like 56 or 28 is better cut evenly into vectors with idle lanes than with a moved-back last tile
    options += [d for d in range(width + 1, vectors * width) if extent % d == 0 and d * 10 >= -(-d // width) * width * 7]

    def waste(n: int) -> float:
        return -(-extent // n) * -(-n // width) * width / extent
    return sorted(dict.fromkeys(options), key=lambda n: (round(waste(n), 2), -n))


def tile_amounts(extent: int, limit: int) -> list[int]:
    """Amounts of a register tile up to `limit`, best first: little recomputed, then large."""
    options = list(range(min(limit, extent), 0, -1))

    def waste(n: int) -> float:
        return -(-extent // n) * n / extent
    return sorted(dict.fromkeys(options), key=lambda n: (waste(n) * (1.0 + 0.6 / n), -n))


# -- building ---------------------------------------------------------------------------------------

def _generate(state: Scheduler) -> Iterator[Scheduler]:
    kernel = state.kernel
    out = kernel.output
    r = _resolved(state, out)
    operands = _operands(state, r)
    inner = [s.index for s in kernel.stages if not s.is_output and s.has_reduce]
    if operands is not None:
        for tiled in _contractions(state, r, operands):
            yield _finish(tiled, inner)
        for axis, arg in dots.applicable(kernel, state.target, out):
            start = _try(state, "TC", axis, arg)
            for tiled in tile_sketches(start, r) if isinstance(arg, tuple) else _contractions(start, r, operands):
                yield _finish(tiled, inner)
        return
    lane = _best_vector_axis(state, r)
    for rows in ((1, 4) if inner else (1,)):
        for vectors in (4, 2, 1):
            done = _vectors(state, r, lane, vectors)
            if rows > 1:
                done = _row_tile(done, r, rows)
            near = _stage_windows(done, r)
            if near is not done:
                yield _finish(near, inner)
            yield _finish(done, inner)
    special = _reductions(state, r, lane) if r.reductions else _squares(state, r)
    yield from (_finish(s, inner) for s in special)
    yield _finish(state, inner)


def _squares(state: Scheduler, r: ResolvedStage) -> Iterator[Scheduler]:
    """Tiles for values that are read along one axis and stored along another: squares, which lowering transposes in registers."""
    if r.store is None:
        return
    width = _width(state, r)
    outs = range(len(r.stage.outs))
    stored = next((a for a in outs if r.store.coef(a) == 1 and _extent(state, r, a) >= width), -1)
    read = next((a for i, n in enumerate(r.nodes) if n.kind in ("load", "read") for a in _contiguous_axes(state, r, i)[0]
                 if a != stored and a in outs and _extent(state, r, a) >= width), -1)
    if stored < 0 or read < 0:
        return
    # lines are stored in pairs; the inner loop goes on where memory is read, or where it is stored
    for columns in (2 * width, width):
        if columns <= _extent(state, r, stored):
            tile = _try(_try(state, "UPCAST", _name(state, r, read), width), "UPCAST", _name(state, r, stored), columns)
            tile = _try(tile, "LANES", f"{_name(state, r, stored)}.in")
            yield tile
            order = [row for row in tile.order[r.stage.index] if tile.rows[row].extent > 1 and tile.rows[row].axis != r.axes[read]]
            reads = [row for row in tile.order[r.stage.index] if tile.rows[row].extent > 1 and tile.rows[row].axis == r.axes[read]]
            yield _try(tile, "ORDER", r.stage.name, tuple(tile.rows[row].name for row in order + reads))


def _reductions(state: Scheduler, r: ResolvedStage, lane: int) -> Iterator[Scheduler]:
    """Reductions that are no contractions: several rows at a time, rows that stream past many sums, tiles of windows."""
    outs = len(r.stage.outs)
    if lane < 0:
        return
    if lane >= outs:
        several = _row_tile(state, r, 4)
        if several is not state:
            done = _vectors(several, r, lane, 4 if state.target.vector_registers >= 32 else 2)
            yield _try(done, "LANES", f"{_name(state, r, lane)}.in")
        return
    yield from _past_sums(state, r, lane)
    yield from _window_tiles(state, r, lane)


def _steps(state: Scheduler, r: ResolvedStage, lane: int) -> dict[int, int]:
    """Elements between neighbours of each axis in what is read along the vector axis, of the read that depends on most axes."""
    found = state.kernel.resolve(state.inlined)[r.stage.index]
    assert found is not None
    linears = [n.linear for n in found.nodes if n.kind == "load" and n.linear is not None and n.linear.coef(lane) == 1]
    best = max(linears, key=lambda lin: len(lin.coefs), default=None)
    return {a: abs(c) for a, c in best.coefs} if best is not None else {}


def _past_sums(state: Scheduler, r: ResolvedStage, lane: int) -> Iterator[Scheduler]:
    """Memory is read in its order: where a reduce axis takes larger steps than the vector axis, its loop goes outside and the sums of a
    whole row lie in scratch, several rows added at a time. Each core has a part of the rows, or a strip of all of them."""
    steps = _steps(state, r, lane)
    outs, width = len(r.stage.outs), _width(state, r)
    across = [a for a in range(outs, len(r.axes)) if steps.get(a, 0) > 1 and _extent(state, r, a) >= 2 * _ROWS_AT_A_TIME]
    extent = _extent(state, r, lane)
    if not across or extent < 8 * width:
        return
    name, row = _name(state, r, lane), _name(state, r, across[-1])
    sizes = sum(d.itemsize for red in r.reductions for d in red.dtypes)

    def ordered(s: Scheduler, first: int = -1) -> Scheduler:
        loops = [x for x in s.order[r.stage.index] if s.rows[x].extent > 1]

        def step(x: int) -> int:
            axis = r.axes.index(s.rows[x].axis)
            inner = s.axis_rows[r.axes[axis]]
            if x == first:
                return 1 << 62
            return steps.get(axis, 0) * math.prod(s.rows[y].extent for y in inner[inner.index(x) + 1:])

        loops.sort(key=step, reverse=True)
        return _try(s, "ORDER", r.stage.name, tuple(s.rows[x].name for x in loops))

    amount = lane_amounts(extent, width, 4)[0]
    if extent * sizes <= state.target.l2 // 2:
        whole = ordered(_try(_try(state, "UPCAST", name, amount), "UNROLL", row, _ROWS_AT_A_TIME))
        first = next((x for x in whole.order[r.stage.index] if whole.rows[x].extent > 1), None)
        if first is not None and whole.rows[first].axis == r.axes[across[-1]] and _is_large(state):
            whole = _try(whole, "THREAD", row, state.target.threads)
        yield whole
    strip = min(-(-extent // max(1, state.target.threads)), state.target.l1 // 4 // sizes) // (4 * width) * 4 * width
    if 0 < strip < extent:
        tiled = _try(state, "TILE", name, strip)
        if tiled is not state:
            yield ordered(_try(_try(tiled, "UPCAST", f"{name}.in", 4 * width), "UNROLL", row, _ROWS_AT_A_TIME), tiled.row_id(name))


def _window_tiles(state: Scheduler, r: ResolvedStage, lane: int) -> Iterator[Scheduler]:
    """Overlapping windows whole as straight-line code, those of several rows side by side: neighbours share what they read."""
    outs = len(r.stage.outs)
    reds = range(outs, len(r.axes))
    if math.prod(_extent(state, r, a) for a in reds) > _WINDOW:
        return
    found = state.kernel.resolve(state.inlined)[r.stage.index]
    assert found is not None
    for a in range(outs):
        if a == lane or _extent(state, r, a) < 2 or not any(_overlaps(state, r, n.linear, a) for n in found.nodes if n.linear is not None):
            continue
        for n in (4, 2):
            tile = _try(state, "UPCAST", _name(state, r, a), tile_amounts(_extent(state, r, a), n)[0])
            done = _try(tile, "UPCAST", _name(state, r, lane), lane_amounts(_extent(state, r, lane), _width(state, r), 4 // n)[0])
            for q in reds:
                done = _try(done, "UNROLL", _name(state, r, q), 0)
            done = _try(done, "LANES", f"{_name(state, r, lane)}.in")
            near = _stage_windows(done, r)
            if near is not done:
                yield near
            yield done


def _overlaps(state: Scheduler, r: ResolvedStage, lin: Linear, a: int) -> bool:
    """Whether neighbours of an output axis read some of the same elements."""
    c = abs(lin.coef(a))
    return c > 0 and any(q >= len(r.stage.outs) and abs(k) > 0 and c % k == 0 and c // abs(k) < _extent(state, r, q) for q, k in lin.coefs)


def _finish(state: Scheduler, inner: list[int]) -> Scheduler:
    """Keep costly values that are read twice, give the inner reductions their vectors, share the work among cores."""
    state = _keep_costly(state)
    for s in inner:
        r = _resolved(state, s)
        operands = _operands(state, r)
        state = _inner_contraction(state, r, operands) if operands is not None else _vectors(state, r, _best_vector_axis(state, r), 4)
    state = _parallel(state)
    return _try(state, "STREAM", state.kernel.stages[state.kernel.output].name) if _streams(state) else state


def _streams(state: Scheduler) -> bool:
    """Whether storing the output past the caches is possible and costs less than fetching its lines, writing them back, and finding some
    of them there."""
    target = state.target
    _, near, far = levels(target)
    size = _bytes(state, state.kernel.output)
    cached = 2.0 * (near.streamed * lost(size / target.threads / target.l2) + far.streamed * lost(size / max(target.l2, target.l3)))
    return cached > 2.0 * far.streamed - near.streamed and can_stream(state)


def _keep_costly(state: Scheduler) -> Scheduler:
    """STAGE elementwise values with costly operations that more than one stage reads, at the innermost loop around all readers."""
    kernel = state.kernel
    for s in kernel.stages:
        if not is_derived(s) or state.place[s.index] != "inline":
            continue
        r = _resolved(state, s.index)
        readers = sum(1 for q in kernel.stages if s.index in kernel.reads[q.index])
        if readers < 2 or not any(n.kind == "alu" and n.op in _COSTLY for n in r.nodes):
            continue
        for row in reversed(state.order[kernel.output]):
            if state.rows[row].extent > 1:
                staged = _try(state, "STAGE", s.name, state.rows[row].name)
                if staged is not state:
                    state = staged
                    break
    return state


def _best_vector_axis(state: Scheduler, r: ResolvedStage) -> int:
    """The local axis along which most accesses are contiguous; below a REDUCE they count four times."""
    below: set[int] = set()
    todo = [v for red in r.reductions for v in red.values]
    while todo:
        v = todo.pop()
        if v not in below:
            below.add(v)
            todo += node_sources(r.nodes[v])
    best, best_score = -1, 0.0
    width = _width(state, r)
    for a in range(len(r.axes)):
        e = _extent(state, r, a)
        if e == 1:
            continue
        score = 0.0
        for i, n in enumerate(r.nodes):
            if n.kind not in ("load", "read"):
                continue
            weight = 4.0 if i in below else 1.0
            unit, staged = _contiguous_axes(state, r, i)
            if a in unit:
                score += weight
            elif a not in n.deps:
                score += 0.3 * weight
            elif a in staged and n.kind == "read" and state.place[n.arg] != "inline":
                score += 0.8 * weight
            else:
                score += (0.15 if _short_stride(state, r, i, a) else -0.5) * weight
        if r.store is not None and a < len(r.stage.outs):
            c = r.store.coef(a)
            score += 1.0 if c == 1 else -0.5
        elif a < len(r.stage.outs):
            score += 0.5
        score *= min(1.0, e / width)
        if a >= len(r.stage.outs):
            score *= 0.95
        elif not r.stage.is_output:
            score *= 0.4    # inside another nest only a few positions of an output axis are needed at a time
        if score > best_score:
            best, best_score = a, score
    return best


def _short_stride(state: Scheduler, r: ResolvedStage, node: int, a: int) -> bool:
    """True when a node reads every few elements along an axis: wide loads and shuffles, not one load per lane."""
    n = r.nodes[node]
    if n.kind == "load":
        assert n.linear is not None
        return 1 < abs(n.linear.coef(a)) <= 4
    contiguous = _contiguous_dims(state, n.arg)
    return any(1 < abs(lin.coef(a)) <= 4 and dim in contiguous for dim, lin in enumerate(n.dims))


def _contiguous_dims(state: Scheduler, s: int) -> frozenset[int]:
    """The dims of a stage along which all its loads are contiguous."""
    inner = _resolved(state, s)
    loads = [n.linear for n in inner.nodes if n.kind == "load" and n.linear is not None]
    return frozenset(d for d in range(len(inner.stage.outs)) if loads and all(lin.coef(d) == 1 for lin in loads))


def _vectors(state: Scheduler, r: ResolvedStage, a: int, vectors: int) -> Scheduler:
    """Vectors along an axis for a stage that is not a contraction."""
    if a < 0:
        return state
    for n in lane_amounts(_extent(state, r, a), _width(state, r), vectors)[:2]:
        done = _try(state, "UPCAST", _name(state, r, a), n)
        if done is not state:
            state = done
            break
    if r.reductions and a < len(r.stage.outs):
        # short inner reduce axes (windows) as straight-line code: neighbouring positions share loads
        last = len(r.axes) - 1
        if last >= len(r.stage.outs) and _extent(state, r, last) <= 8:
            state = _try(state, "UNROLL", _name(state, r, last), 0)
    return state


def _stage_windows(state: Scheduler, r: ResolvedStage) -> Scheduler:
    """STAGE what overlapping windows read under a mask, at the innermost loop that still holds a whole row of windows."""
    for node in {n.arg: n for n in r.nodes if n.kind == "read"}.values():
        inner = _resolved(state, node.arg)
        overlapping = any(len(lin.coefs) > 1 for lin in node.dims)
        if not overlapping or state.place[node.arg] != "inline" or not any(n.kind == "load" and n.gate >= 0 for n in inner.nodes):
            continue
        loops = [row for row in state.order[r.stage.index] if r.axes.index(state.rows[row].axis) < len(r.stage.outs)
                 and state.rows[row].extent > 1]
        for row in reversed(loops[:-1] or loops):
            staged = _try(state, "STAGE", state.kernel.stages[node.arg].name, state.rows[row].name)
            if staged is not state:
                state = staged
                break
    return state


def _row_tile(state: Scheduler, r: ResolvedStage, rows: int) -> Scheduler:
    """Several rows side by side, where a row operation has enough of them."""
    for a in range(len(r.stage.outs)):
        e = _extent(state, r, a)
        if e >= 4 * rows and e % rows == 0 and state.rows[state.row_id(_name(state, r, a))].extent == e:
            return _try(state, "UPCAST", _name(state, r, a), rows)
    return state


def _is_large(state: Scheduler) -> bool:
    """Whether there is work for all cores."""
    work = sum(_work(state, _resolved(state, s.index)) for s in state.kernel.stages)
    return work >= _MIN_PARALLEL * state.target.threads


def _parallel(state: Scheduler) -> Scheduler:
    """Share the outermost loop among the cores; a reduction without output loops is cut into parts."""
    target, kernel = state.target, state.kernel
    r = _resolved(state, kernel.output)
    if target.threads < 2 or not _is_large(state) or state.thread is not None or state.split_reduce is not None:
        return state
    outs = len(r.stage.outs)
    loops = [row for row in state.order[kernel.output] if state.rows[row].extent > 1]
    def waste(row: int) -> float:
        extent = state.rows[row].extent
        return -(-extent // target.threads) * target.threads / extent
    shared = [row for row in loops if r.axes.index(state.rows[row].axis) < outs and state.rows[row].extent >= target.threads]
    cut = [row for row in loops if r.axes.index(state.rows[row].axis) >= outs and state.rows[row].extent >= 4 * target.threads]
    # the outermost loop whose iterations can be dealt out evenly, also when a core is late; else the one that comes nearest to it
    many = [row for row in shared if waste(row) <= _EVEN and state.rows[row].extent >= 2 * target.threads]
    for row in (*many, *sorted(shared, key=waste), *cut):
        done = _try(state, "THREAD", state.rows[row].name, target.threads)
        if done is not state:
            return done
    return state


# -- contractions -----------------------------------------------------------------------------------

def _tile_score(lane: int, tile: int, n: int, m: int, width: int) -> float:
    """How well a register tile of n lanes × m positions uses the multipliers: lanes and positions that do work, multiply-adds per load,
    and enough of them to hide their latency (two a cycle, four cycles each)."""
    v = -(-n // width)
    lanes_used = lane / (-(-lane // n) * v * width)
    useful = tile / (-(-tile // m) * m)
    fmas, loads = v * m, v + m
    return lanes_used * useful * min(1.0, fmas / 8) * min(1.0, fmas / loads / 1.3)


def _tiles(state: Scheduler, r: ResolvedStage, lane: int, tile: int) -> list[tuple[int, int]]:
    """(lane amount, tile amount) pairs, best first: the most multiply-adds per load that the registers hold."""
    width, registers = _width(state, r), state.target.vector_registers
    pairs: list[tuple[float, int, int]] = []
    for n in lane_amounts(_extent(state, r, lane), width, 4):
        v = -(-n // width)
        for m in tile_amounts(_extent(state, r, tile), max(1, (registers - v - 1) // v))[:3]:
            pairs.append((_tile_score(_extent(state, r, lane), _extent(state, r, tile), n, m, width), n, m))
    pairs.sort(key=lambda p: -p[0])
    return [(n, m) for _, n, m in pairs]


def _unroll_last(state: Scheduler, r: ResolvedStage) -> Scheduler:
    """The innermost reduce loop in steps of two, a short one whole: less bookkeeping per multiply-add."""
    if not r.stage.reds:
        return state
    axis = state.kernel.axes[r.stage.reds[-1]]
    if axis.extent <= 4:
        return _try(state, "UNROLL", axis.name, 0)
    return _try(state, "UNROLL", axis.name, 2)


def _lane_choices(state: Scheduler, r: ResolvedStage, operands: tuple[_Operand, _Operand]) -> list[tuple[float, int, _Operand, _Operand]]:
    """(score, vector axis, operand read in vectors, operand broadcast), best first."""
    width = _width(state, r)
    found = []
    for a in range(len(r.stage.outs)):
        e = _extent(state, r, a)
        if e == 1:
            continue
        for x, y in (operands, operands[::-1]):
            if a in x.axes and a not in y.axes:
                use = e / (-(-e // width) * width) if e < 4 * width else 1.0
                read = 1.0 if a in x.unit else 0.97 if a in x.staged_unit and x.stage >= 0 else 0.3
                store = 1.0 if r.store is None or r.store.coef(a) == 1 else 0.9
                found.append((use * read * store, a, x, y))
    found.sort(key=lambda c: -c[0])
    return found


def _contractions(state: Scheduler, r: ResolvedStage, operands: tuple[_Operand, _Operand]) -> Iterator[Scheduler]:
    """Register tiles of the output stage: vector axis × tile axis, operands staged where that makes them contiguous or near."""
    choices = _lane_choices(state, r, operands)
    for rank in range(6):
        for _, lane, x, y in choices[:2]:
            tiles_of = [t for t in range(len(r.stage.outs)) if t not in x.axes and t != lane and _extent(state, r, t) > 1]
            tiles_of.sort(key=lambda t: (-min(_extent(state, r, t), 16), -t))
            if not tiles_of:
                tiles_of = [t for t in range(len(r.stage.outs)) if t != lane and _extent(state, r, t) > 1][-1:]
            if not tiles_of:
                continue
            pairs = _tiles(state, r, lane, tiles_of[0])
            if rank < len(pairs):
                n, m = pairs[rank]
                yield from _tiled(state, r, lane, tiles_of[0], n, m, x, y, variants=rank == 0 or rank == 1)


def _tiled(state: Scheduler, r: ResolvedStage, lane: int, tile: int, n: int, m: int, x: _Operand, y: _Operand,
           variants: bool) -> Iterator[Scheduler]:
    lane_name, tile_name = _name(state, r, lane), _name(state, r, tile)
    s = state
    if m > 1:
        s = _try(s, "UPCAST", tile_name, m)
    s = _try(s, "UPCAST", lane_name, n)
    if s is state:
        return
    lane_in = next((row.name for row in reversed(s.rows) if row.axis == r.axes[lane] and row.role == "upcast"), None)
    if lane_in is not None and n > 1:
        s = _try(s, "LANES", lane_in)
    shared = [a for a in range(len(r.stage.outs)) if a in x.axes and a in y.axes and a not in (lane, tile)]
    y_only = [a for a in range(len(r.stage.outs)) if a not in x.axes and a not in (lane, tile)]
    x_only = [a for a in range(len(r.stage.outs)) if a in x.axes and a not in y.axes and a not in (lane, tile)]
    # the vector operand's loops outside, so that its staged part is used by every iteration of the others
    outer = [*shared, *x_only, lane, *y_only, tile]
    outside = _ordered(s, r, outer)
    inside = _ordered(s, r, [*shared, *y_only, tile, *x_only, lane])
    for base, inner_operand, first in ((outside, x, True), (inside, y, False)):
        staged = _stage_operand(base, r, inner_operand, [lane] if first else [tile])
        staged = _stage_masked(staged, r, y if first else x)
        yield _unroll_last(staged, r)
        if not variants:
            return
        if staged is not base:
            yield base


def _ordered(state: Scheduler, r: ResolvedStage, axes: list[int]) -> Scheduler:
    names = [_name(state, r, a) for a in axes if _extent(state, r, a) > 1]
    return _try(state, "ORDER", r.stage.name, tuple(names)) if len(names) > 1 else state


def _bytes(state: Scheduler, s: int) -> int:
    st = state.kernel.stages[s]
    total = st.dtype.itemsize
    for a in st.outs:
        total *= state.kernel.axes[a].extent
    return total


def _constant(state: Scheduler, s: int) -> bool:
    r = _resolved(state, s)
    loads = [n for n in r.nodes if n.kind == "load"]
    return bool(loads) and not r.reads and all(state.kernel.params[n.arg].arg.constant for n in loads)


def _stage_operand(state: Scheduler, r: ResolvedStage, x: _Operand, at: list[int]) -> Scheduler:
    """STAGE the operand that is read in vectors: constants once at prepare, others at the loop of their own axis."""
    if x.stage < 0 or not is_derived(state.kernel.stages[x.stage]):
        return state
    name = state.kernel.stages[x.stage].name
    if _bytes(state, x.stage) < _STAGE_BYTES and (at[0] in x.unit):
        return state
    if _constant(state, x.stage):
        return _try(state, "STAGE", name, ROOT)
    order = state.order[r.stage.index]
    # the innermost loop the operand depends on, or the loops given
    wanted = [row for row in order if state.rows[row].axis == r.axes[at[0]] and state.rows[row].extent > 1]
    if not wanted:
        outs = set(r.axes[:len(r.stage.outs)]) & {r.axes[a] for a in x.axes}
        wanted = [row for row in order if state.rows[row].axis in outs and state.rows[row].extent > 1]
    if not wanted:
        return _try(state, "STAGE", name, ROOT)
    return _try(state, "STAGE", name, state.rows[wanted[-1]].name)


def _stage_masked(state: Scheduler, r: ResolvedStage, y: _Operand) -> Scheduler:
    """STAGE the other operand too when reading it in place needs a mask or a conversion: masks die in the copy."""
    for operand in (y,):
        if operand.stage < 0 or not is_derived(state.kernel.stages[operand.stage]) or state.place[operand.stage] != "inline":
            continue
        inner = _resolved(state, operand.stage)
        if not any(n.kind == "cast" or (n.kind == "load" and n.gate >= 0) or (n.kind == "alu" and n.dtype.is_float) for n in inner.nodes):
            continue
        name = state.kernel.stages[operand.stage].name
        if _bytes(state, operand.stage) <= state.target.l2:
            return _try(state, "STAGE", name, ROOT)
        # inside the loops it depends on, outside the first one that would compute it again
        at = -1
        for row in state.order[r.stage.index]:
            local = r.axes.index(state.rows[row].axis)
            if local >= len(r.stage.outs) or local not in operand.axes:
                break
            at = row
        return _try(state, "STAGE", name, state.rows[at].name if at >= 0 else ROOT)
    return state


def _inner_contraction(state: Scheduler, r: ResolvedStage, operands: tuple[_Operand, _Operand]) -> Scheduler:
    """A contraction inside another nest (attention's scores): a register tile of the part that is computed at a time, and its vector
    operand staged at the innermost loop that moves it."""
    box = needed(state).get(r.stage.index)
    if box is None:
        return state
    width, registers = _width(state, r), state.target.vector_registers
    best: tuple[float, int, _Operand] | None = None
    for a, e in enumerate(box):
        for x, y in (operands, operands[::-1]):
            if e > 1 and a in x.axes and a not in y.axes:
                score = e / (-(-e // width) * width) * (1.0 if a in x.unit else 0.97 if a in x.staged_unit and x.stage >= 0 else 0.3)
                if best is None or score > best[0]:
                    best = score, a, x
    if best is None:
        return _vectors(state, r, _best_vector_axis(state, r), 4)
    _, lane, x = best
    tiles_of = [t for t, e in enumerate(box) if t not in x.axes and t != lane and e > 1]
    tile = max(tiles_of, key=lambda t: box[t], default=-1)
    n, m = _best_tile(box[lane], box[tile] if tile >= 0 else 1, width, registers)
    if m > 1:
        state = _try(state, "UPCAST", _name(state, r, tile), m)
    done = _try(state, "UPCAST", _name(state, r, lane), n)
    if done is not state and n > 1:
        state = _try(done, "LANES", f"{_name(state, r, lane)}.in")
    state = _unroll_last(state, r)
    if x.stage >= 0 and lane not in x.unit and is_derived(state.kernel.stages[x.stage]):
        state = _stage_around(state, r, x)
    return state


def _best_tile(lane: int, tile: int, width: int, registers: int) -> tuple[int, int]:
    """(lane amount, tile amount) with the most multiply-adds per load that the registers hold."""
    best = (0.0, min(lane, width), 1)
    for n in lane_amounts(lane, width, 4):
        v = -(-n // width)
        for m in tile_amounts(tile, max(1, (registers - v - 1) // v))[:3]:
            best = max(best, (_tile_score(lane, tile, n, m, width), n, m))
    return best[1:]


def _stage_around(state: Scheduler, r: ResolvedStage, x: _Operand) -> Scheduler:
    """STAGE an operand of a stage inside another nest: constants once, others at the innermost loop that moves what is read."""
    name = state.kernel.stages[x.stage].name
    if _constant(state, x.stage):
        return _try(state, "STAGE", name, ROOT)
    path = plan(state).paths[r.stage.index] or ()
    rows = [row for t, depth in path for row in state.order[t][:depth]]
    moving = loops_that_move(state, r.stage.index)
    wanted = frozenset().union(*(moving[r.axes[a]] for a in x.axes if a < len(r.stage.outs)))
    for row in reversed(rows):
        if row in wanted:
            return _try(state, "STAGE", name, state.rows[row].name)
    return _try(state, "STAGE", name, ROOT)


def placements(state: Scheduler) -> list[str]:
    """Where the stages of a state live, for people: `s1 at o1`."""
    found = plan(state)
    out = []
    for s, path in enumerate(found.paths):
        if path:
            t, depth = path[-1]
            row = state.order[t][depth - 1] if depth else None
            where = state.rows[row].name if row is not None else f"the start of {state.kernel.stages[t].name}"
            out.append(f"{state.kernel.stages[s].name} at {where}")
        elif path == () and not state.kernel.stages[s].is_output:
            out.append(f"{state.kernel.stages[s].name} at the root")
    return out
