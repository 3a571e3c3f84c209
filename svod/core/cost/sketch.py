"""Sketches: whole chains whose opts only pay together, with amounts derived from the target's vector width, registers and caches.

`sketches(state)` lists them. The heuristic is the shortest of those predicted fastest (`cost_model`). Sketches read the accesses alone. A
*contraction* is a sum of products whose operands each lack an output axis that the other has, so a register tile reuses both. Other
reductions get their vectors where memory is contiguous. Costly elementwise stages that are read twice are staged."""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from svod.core.cost.cpu import cost_of
from svod.core.cost.sketch_ahead import ahead
from svod.core.cost.sketch_contractions import contraction_sketches, inner_contraction
from svod.core.cost.sketch_facts import (
    bytes_of_arguments,
    contiguous_axes,
    extent_of,
    factors_of,
    is_constant,
    lane_amounts,
    name_of,
    outgrows_caches,
    resolved,
    tile_amounts,
    try_opt,
    work_of,
)
from svod.core.cost.sketch_online import online_sketches
from svod.core.cost.sketch_tiles import tile_sketches
from svod.core.ir.uop import TRANSCENDENTAL
from svod.core.kernel import intrinsics as dots
from svod.core.kernel.kernel import LinearIndex, ResolvedStage, node_sources
from svod.core.kernel.non_temporal import has_non_temporal_stores
from svod.core.kernel.placement import FROM_SCRATCH, REDUCED, SAME_VALUE, SCATTERED, UNIT_STRIDE, is_derived, place_stages, vector_width
from svod.core.kernel.scheduler import Scheduler

_COSTLY = frozenset(op.value for op in TRANSCENDENTAL) | {"FDIV", "RECIPROCAL", "SQRT"}
_MIN_PARALLEL = 1 << 15        # operations below which a second core costs more than it brings
_EVEN = 1.12                   # cores wait for the last one for no more than this share of the time
_STREAM_GAIN = 1.03            # predicted gains of STREAM below this are none: a product of 1024 was predicted 1.02 and lost 2-5 %
_SHORT_STRIDE = 0.15           # worth of an access every few elements along a vector axis, which wide loads and shuffles make
TIE = 1.015                    # predictions this near each other say nothing
_ROWS_AT_A_TIME = 8            # rows added between loading sums from scratch and storing them there
_HALVES_AT_A_TIME = 4          # halves of vectors that a sum over memory reads in a row
_WINDOW = 32                   # positions of a window that become straight-line code where neighbours share what they read
_STRAIGHT = 8                  # the same of any window


def heuristic(state: Scheduler) -> Scheduler:
    """The best sketch by analysis: what runs when nothing is known about a kernel. Among sketches predicted equal it takes the fewest
    phases, as cores wait for each other between phases, and then the shortest chain."""
    candidates = _distinct(_generate(state))
    limit = TIE * min((cost_of(s).cycles for s in candidates), default=0.0)
    best = min((s for s in candidates if cost_of(s).cycles <= limit), key=lambda s: (_phases(s), len(s.applied_opts), cost_of(s).cycles),
               default=state)
    return ahead(best)


def _phases(state: Scheduler) -> int:
    """Number of stages that every call computes as a whole, the output included."""
    return sum(not is_constant(state, s) for s in place_stages(state).roots)


def sketches(state: Scheduler) -> list[Scheduler]:
    """All distinct sketches that apply."""
    candidates = _distinct(ahead(s) for s in _generate(state))
    fastest = min(candidates, key=lambda s: cost_of(s).cycles, default=None)
    return candidates if fastest is None else _distinct([*candidates, _streamed(fastest)])


def _distinct(states: Iterable[Scheduler]) -> list[Scheduler]:
    by_digest: dict[bytes, Scheduler] = {}
    for s in states:
        by_digest.setdefault(s.digest, s)
    return list(by_digest.values())


def _streamed(state: Scheduler) -> Scheduler:
    """STREAM where the caches do not keep the output, though the prediction does not gain: the free part of the last cache is not known."""
    if not outgrows_caches(state) or not has_non_temporal_stores(state):
        return state
    return try_opt(state, "STREAM", state.kernel.stages[state.kernel.output].name)


def _generate(state: Scheduler) -> Iterator[Scheduler]:
    kernel = state.kernel
    out = kernel.output
    r = resolved(state, out)
    operands = factors_of(state, r)
    inner = [s.index for s in kernel.stages if not s.is_output and s.has_reduce]
    if operands is not None:
        for tiled in contraction_sketches(state, r, operands):
            yield _finish(tiled, inner)
        for tiled, left in online_sketches(state):
            yield _finish(tiled, left)
        for axis, arg in dots.applicable(kernel, state.target, out):
            start = try_opt(state, "TC", axis, arg)
            for tiled in tile_sketches(start, r) if isinstance(arg, tuple) else contraction_sketches(start, r, operands):
                yield _finish(tiled, inner)
        return
    for lane in _vector_axes(state, r):
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
    width = vector_width(state, r)
    outs = range(len(r.stage.outs))
    stored = next((a for a in outs if r.store.coef(a) == 1 and extent_of(state, r, a) >= width), -1)
    read = next((a for i, n in enumerate(r.nodes) if n.kind in ("load", "read") for a in contiguous_axes(state, r, i).direct
                 if a != stored and a in outs and extent_of(state, r, a) >= width), -1)
    if stored < 0 or read < 0:
        return
    # lines are stored in pairs; the inner loop goes on where memory is read, or where it is stored
    for columns in (2 * width, width):
        if columns <= extent_of(state, r, stored):
            tile = try_opt(try_opt(state, "UPCAST", name_of(state, r, read), width), "UPCAST", name_of(state, r, stored), columns)
            tile = try_opt(tile, "LANES", f"{name_of(state, r, stored)}.in")
            yield tile
            order = [row for row in tile.order[r.stage.index] if tile.rows[row].extent > 1 and tile.rows[row].axis != r.axes[read]]
            reads = [row for row in tile.order[r.stage.index] if tile.rows[row].extent > 1 and tile.rows[row].axis == r.axes[read]]
            yield try_opt(tile, "ORDER", r.stage.name, tuple(tile.rows[row].name for row in order + reads))


def _reductions(state: Scheduler, r: ResolvedStage, lane: int) -> Iterator[Scheduler]:
    """Reductions that are not contractions: several rows at a time, rows that stream past many sums, tiles of windows."""
    outs = len(r.stage.outs)
    if lane < 0:
        return
    if lane >= outs:
        several = _row_tile(state, r, 4)
        if several is not state:
            done = _vectors(several, r, lane, 4 if state.target.vector_registers >= 32 else 2)
            yield try_opt(done, "LANES", f"{name_of(state, r, lane)}.in")
        half = vector_width(state, r) // 2
        if half >= 4 and _is_past_caches(state):
            # what waits for memory gains nothing from wide vectors, and some cores fetch more at once with half of them
            yield try_opt(try_opt(state, "UPCAST", name_of(state, r, lane), half), "UNROLL", name_of(state, r, lane), _HALVES_AT_A_TIME)
        return
    yield from _past_sums(state, r, lane)
    yield from _window_tiles(state, r, lane)


def _steps(state: Scheduler, r: ResolvedStage, lane: int) -> dict[int, int]:
    """Elements between neighbours of each axis, in the read along the vector axis that depends on most axes."""
    resolved = state.kernel.resolve(state.inlined)[r.stage.index]
    assert resolved is not None
    linears = [n.linear for n in resolved.nodes if n.kind == "load" and n.linear is not None and n.linear.coef(lane) == 1]
    best = max(linears, key=lambda lin: len(lin.coefs), default=None)
    return {a: abs(c) for a, c in best.coefs} if best is not None else {}


def _past_sums(state: Scheduler, r: ResolvedStage, lane: int) -> Iterator[Scheduler]:
    """Read memory in order: where a reduce axis has larger steps than the vector axis, its loop goes outside. The sums of a whole row
    stay in scratch, and several rows are added at a time. Each core takes a part of the rows, or a strip of all of them."""
    steps = _steps(state, r, lane)
    outs, width = len(r.stage.outs), vector_width(state, r)
    across = [a for a in range(outs, len(r.axes)) if steps.get(a, 0) > 1 and extent_of(state, r, a) >= 2 * _ROWS_AT_A_TIME]
    extent = extent_of(state, r, lane)
    if not across or extent < 8 * width:
        return
    name, row = name_of(state, r, lane), name_of(state, r, across[-1])
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
        return try_opt(s, "ORDER", r.stage.name, tuple(s.rows[x].name for x in loops))

    # several vectors of each row at a time, or one: some cores fetch what is past the caches faster the second way
    for vectors in (4, 1) if extent * sizes <= state.target.l2 // 2 else ():
        amount = lane_amounts(extent, width, vectors)[0]
        whole = ordered(try_opt(try_opt(state, "UPCAST", name, amount), "UNROLL", row, _ROWS_AT_A_TIME))
        first = next((x for x in whole.order[r.stage.index] if whole.rows[x].extent > 1), None)
        if first is not None and whole.rows[first].axis == r.axes[across[-1]] and _is_large(state):
            whole = try_opt(whole, "THREAD", row, state.target.threads)
        yield whole
    strip = min(-(-extent // max(1, state.target.threads)), state.target.l1 // 4 // sizes) // (4 * width) * 4 * width
    if 0 < strip < extent:
        tiled = try_opt(state, "TILE", name, strip)
        if tiled is not state:
            yield ordered(try_opt(try_opt(tiled, "UPCAST", f"{name}.in", 4 * width), "UNROLL", row, _ROWS_AT_A_TIME), tiled.row_id(name))


def _window_tiles(state: Scheduler, r: ResolvedStage, lane: int) -> Iterator[Scheduler]:
    """Overlapping windows as straight-line code, those of several rows side by side: neighbours share what they read."""
    outs = len(r.stage.outs)
    reds = range(outs, len(r.axes))
    if math.prod(extent_of(state, r, a) for a in reds) > _WINDOW:
        return
    resolved = state.kernel.resolve(state.inlined)[r.stage.index]
    assert resolved is not None
    for a in range(outs):
        if a == lane or extent_of(state, r, a) < 2 or not any(
                _overlaps(state, r, n.linear, a) for n in resolved.nodes if n.linear is not None):
            continue
        extent, width = extent_of(state, r, lane), vector_width(state, r)
        # a row that a few vectors hold is computed whole, too: along it masks are known, and no copy is needed to be rid of them
        amounts = [(n, lane_amounts(extent, width, 4 // n)[0]) for n in (4, 2)]
        amounts += [(n, extent) for n in (4, 2) if extent <= 4 * width]
        for n, vector in dict.fromkeys(amounts):
            tile = try_opt(state, "UPCAST", name_of(state, r, a), tile_amounts(extent_of(state, r, a), n)[0])
            done = try_opt(tile, "UPCAST", name_of(state, r, lane), vector)
            for q in reds:
                done = try_opt(done, "UNROLL", name_of(state, r, q), 0)
            done = try_opt(done, "LANES", f"{name_of(state, r, lane)}.in")
            near = done if vector == extent else _stage_windows(done, r)
            if near is not done:
                yield near
            yield done


def _overlaps(state: Scheduler, r: ResolvedStage, lin: LinearIndex, a: int) -> bool:
    """Whether neighbours of an output axis read some of the same elements."""
    c = abs(lin.coef(a))
    outs = len(r.stage.outs)
    return c > 0 and any(q >= outs and abs(k) > 0 and c % k == 0 and c // abs(k) < extent_of(state, r, q) for q, k in lin.coefs)


def _finish(state: Scheduler, inner: list[int]) -> Scheduler:
    """Stage costly values that are read twice, give the inner reductions their vectors, and share the work among cores."""
    state = _keep_costly(state)
    for s in inner:
        r = resolved(state, s)
        operands = factors_of(state, r)
        tiled = inner_contraction(state, r, operands) if operands is not None else None
        state = tiled if tiled is not None else _vectors(state, r, _best_vector_axis(state, r), 4)
    return _past_caches(_parallel(state))


def _past_caches(state: Scheduler) -> Scheduler:
    """STREAM where the prediction gains."""
    past = _streamed(state)
    return past if cost_of(past).cycles * _STREAM_GAIN < cost_of(state).cycles else state


def _keep_costly(state: Scheduler) -> Scheduler:
    """STAGE elementwise values with costly operations that more than one stage reads, at the innermost loop around all readers."""
    kernel = state.kernel
    for s in kernel.stages:
        if not is_derived(s) or state.place[s.index] != "inline":
            continue
        r = resolved(state, s.index)
        readers = sum(1 for q in kernel.stages if s.index in kernel.reads[q.index])
        if readers < 2 or not any(n.kind == "alu" and n.op in _COSTLY for n in r.nodes):
            continue
        for row in reversed(state.order[kernel.output]):
            if state.rows[row].extent > 1:
                staged = try_opt(state, "STAGE", s.name, state.rows[row].name)
                if staged is not state:
                    state = staged
                    break
    return state


def _vector_axes(state: Scheduler, r: ResolvedStage) -> list[int]:
    """The axes that vectors of a stage can lie along: the best one, -1 for none, and where that is a reduce axis that fills no vector
    (the columns of a window), the best output axis as well."""
    best = _best_vector_axis(state, r)
    if best < len(r.stage.outs) or extent_of(state, r, best) >= vector_width(state, r):
        return [best]
    output = _best_vector_axis(state, r, outputs_only=True)
    return [best, output] if output >= 0 else [best]


def _best_vector_axis(state: Scheduler, r: ResolvedStage, *, outputs_only: bool = False) -> int:
    """The local axis whose accesses are worth most along a vector, before any loop is tiled: `vector_row` chooses among tiles."""
    below: set[int] = set()
    todo = [v for red in r.reductions for v in red.values]
    while todo:
        v = todo.pop()
        if v not in below:
            below.add(v)
            todo += node_sources(r.nodes[v])
    best, best_score = -1, 0.0
    width = vector_width(state, r)
    for a in range(len(r.stage.outs) if outputs_only else len(r.axes)):
        e = extent_of(state, r, a)
        if e == 1:
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
                score += (_SHORT_STRIDE if _short_stride(state, r, i, a) else SCATTERED) * weight
        if r.store is not None and a < len(r.stage.outs):
            c = r.store.coef(a)
            score += UNIT_STRIDE if c == 1 else SCATTERED
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
    """Whether a node reads every few elements along an axis, which wide loads and shuffles do better than a load per lane."""
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
    """Vectors along an axis for a stage that is not a contraction."""
    if a < 0:
        return state
    for n in lane_amounts(extent_of(state, r, a), vector_width(state, r), vectors)[:2]:
        done = try_opt(state, "UPCAST", name_of(state, r, a), n)
        if done is not state:
            state = done
            break
    if r.reductions and a < len(r.stage.outs):
        # short inner reduce axes (windows) as straight-line code: neighbouring positions share loads
        positions = 1
        for q in reversed(range(len(r.stage.outs), len(r.axes))):
            positions *= extent_of(state, r, q)
            if positions > _STRAIGHT:
                break
            state = try_opt(state, "UNROLL", name_of(state, r, q), 0)
    return state


def _stage_windows(state: Scheduler, r: ResolvedStage) -> Scheduler:
    """STAGE the masked reads of overlapping windows, at the innermost loop that still holds a whole row of windows."""
    for node in {n.arg: n for n in r.nodes if n.kind == "read"}.values():
        inner = resolved(state, node.arg)
        overlapping = any(len(lin.coefs) > 1 for lin in node.dims)
        if not overlapping or state.place[node.arg] != "inline" or not any(n.kind == "load" and n.gate >= 0 for n in inner.nodes):
            continue
        loops = [row for row in state.order[r.stage.index] if r.axes.index(state.rows[row].axis) < len(r.stage.outs)
                 and state.rows[row].extent > 1]
        for row in reversed(loops[:-1] or loops):
            staged = try_opt(state, "STAGE", state.kernel.stages[node.arg].name, state.rows[row].name)
            if staged is not state:
                state = staged
                break
    return state


def _row_tile(state: Scheduler, r: ResolvedStage, rows: int) -> Scheduler:
    """Several rows side by side, where a row operation has enough of them."""
    for a in range(len(r.stage.outs)):
        e = extent_of(state, r, a)
        if e >= 4 * rows and e % rows == 0 and state.rows[state.row_id(name_of(state, r, a))].extent == e:
            return try_opt(state, "UPCAST", name_of(state, r, a), rows)
    return state


def _is_past_caches(state: Scheduler) -> bool:
    """Whether no cache holds the kernel's buffers."""
    return bytes_of_arguments(state) > max(state.target.l2, state.target.l3)


def _is_large(state: Scheduler) -> bool:
    """Whether there is work for all cores."""
    work = sum(work_of(state, resolved(state, s.index)) for s in state.kernel.stages)
    return work >= _MIN_PARALLEL * state.target.threads


def _parallel(state: Scheduler) -> Scheduler:
    """Share the outermost loop among the cores. A reduction is cut into parts where there are no output loops, or too few for the cores."""
    target, kernel = state.target, state.kernel
    r = resolved(state, kernel.output)
    if target.threads < 2 or not _is_large(state) or state.thread is not None or state.split_reduce is not None:
        return state
    outs = len(r.stage.outs)
    loops = [row for row in state.order[kernel.output] if state.rows[row].extent > 1]
    def waste(row: int) -> float:
        extent = state.rows[row].extent
        return -(-extent // target.threads) * target.threads / extent
    shared = [row for row in loops if r.axes.index(state.rows[row].axis) < outs and state.rows[row].extent >= target.threads]
    cut = [row for row in loops if r.axes.index(state.rows[row].axis) >= outs and state.rows[row].extent >= 4 * target.threads]
    # the outermost loop whose iterations can be dealt out evenly, also when a core is late; else the one that comes nearest to it, or
    # parts of the sums, whatever costs less
    many = [row for row in shared if waste(row) <= _EVEN and state.rows[row].extent >= 2 * target.threads]
    least = sorted(shared, key=waste)

    def first(rows: list[int]) -> Scheduler | None:
        return next((done for row in rows if (done := try_opt(state, "THREAD", state.rows[row].name, target.threads)) is not state), None)

    even = first([*many, *(row for row in least if waste(row) <= _EVEN)])
    if even is not None:
        return even
    uneven = [done for done in (first(least), first(cut)) if done is not None]
    return min(uneven, key=lambda s: cost_of(s).cycles, default=state)
