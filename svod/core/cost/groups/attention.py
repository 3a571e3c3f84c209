"""Options of attention in one pass over blocks of the keys (ONLINE), a tile of queries to each group.

    of 16-bit numbers, scores and weights in registers: HOLD
        ONLINE(s3, 128) TC(s2.r0, (mma_bf16,s2.o1,s2.o2)) … TILE(o1, 64) TILE(o0, 16) ORDER(out, o0, o1, o0.in, r0, o1.in, o2) …
        HOLD(s3, (mma_bf16,s3.o1,s3.r0)) … HOLD(out, (mma_bf16,o1.in,o2)) UPCAST(o2, 8) LOCAL(o1.in, 4) PIPELINE(r0, 2)

    others, scores and weights in shared memory
    ONLINE(s3, 64) TILE(o1, 64) ORDER(out, o0, o1, r0, o1.in, o2) STAGE(s8, r0) … STAGE(s1, r0) STAGE(s0, o1)
        TC(s2.r0, (mma_bf16,s2.o1,s2.o2)) UPCAST(s2.o2, 8) LOCAL(s2.o1, 4)      scores of 64 queries and 64 keys, of 4 subgroups
        LOCAL(s3.o1, 64) GROUP(s3.r0, 2)                                        maxima, and sums of weights: two threads a query
        TC(s8.r0, (mma_bf16,s8.o1,s8.o2)) UPCAST(s8.o2, 8) LOCAL(s8.o1, 4)      sums of weighted values
        LOCAL(o2, 16) LOCAL(o1.in, 8) UPCAST(o1.in, 8) UPCAST(o2, 4)            what they are added to stays in registers

The queries lie in shared memory for the whole pass, the keys and values of a block while it is computed, or before (PIPELINE). Without
matrix instructions that fit, each thread has a register tile of scores and one of weighted values.
"""
from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from svod.core.cost.groups.spread import thread_counts
from svod.core.cost.sketch_facts import extent_of, name_of, resolved, try_opt
from svod.core.cost.sketch_online import blocks_start, main_axes, row_maxima
from svod.core.kernel.intrinsics import applicable
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.online import masked_limits
from svod.core.kernel.placement import vector_width
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.isa import DOTS, Dot

_BLOCKS = (32, 64, 128)         # keys at a time
_QUERIES = (32, 64, 128)        # of a group
_WIDE = (4, 8, 16)              # columns of a thread's tile
_BUFFERS = 2                    # buffers of keys and values that are copied ahead
_HIGH = (1, 2)                  # tiles of queries of a subgroup, where scores stay in registers
_CHAINS = 4                     # partial maxima and sums of a row beside each other
_BESIDE = 64                    # registers of a thread beside what it holds
_HEADS, _L2_SHARE = 16, 2        # heads whose groups begin one after the other; the part of the second cache for their keys and values
_HALF = 2                       # bytes of a number of 16 bits
_MOST_HELD = 32                 # elements of a tile of scores or sums that a thread holds


class _Part(NamedTuple):
    """A stage of the pass as its tiles are cut: its name and that of its reduce axis, and the axes of its rows and columns."""

    stage: int
    rows: str
    columns: str
    summed: str


class _Pass(NamedTuple):
    """The stage that the pass sums up, its local axes of queries and of what is weighted, both products, and how its own tiles are cut."""

    r: ResolvedStage
    tile: int
    lane: int
    scores: _Part
    sums: _Part
    out: _Part


def attention_options(state: Scheduler) -> Iterator[Scheduler]:
    """Whole chains of a kernel that is one weighted sum over the row of a maximum."""
    if not state.target.shared_bytes:
        return
    for s in row_maxima(state):
        for block in _BLOCKS:
            start = blocks_start(state, s, block) if state.kernel.axes[s.reds[0]].extent >= 2 * block else None
            if start is not None:
                for queries in _QUERIES:
                    yield from _passes(start, queries, block)


def _passes(start: Scheduler, queries: int, block: int) -> Iterator[Scheduler]:
    r = resolved(start, start.kernel.output)
    lane, tile = main_axes(start, r)
    if tile < 0 or lane < tile or extent_of(start, r, tile) < queries // 2:
        return
    queries = min(queries, extent_of(start, r, tile))
    peaks, totals, parts = (r.nodes[v] for v in r.reductions[0].values)
    of_peaks = resolved(start, peaks.arg)
    down = _moved(peaks.dims, tile)                     # the dim of the maxima along which queries lie
    read = next(n for n in of_peaks.nodes if n.kind == "read")
    scores = _part(start, read.arg, _moved(read.dims, down), _moved(read.dims, len(of_peaks.stage.outs)))
    sums = _part(start, parts.arg, _moved(parts.dims, tile), _moved(parts.dims, lane))
    if scores is None or sums is None:
        return
    rows = [(s, down) for s in (peaks.arg, totals.arg)]
    columns = extent_of(start, r, lane)
    name = name_of(start, r, tile)
    out = _Part(r.stage.index, f"{name}.in" if extent_of(start, r, tile) > queries else name, name_of(start, r, lane), "")
    for high in _HIGH:
        done = _held(start, _Pass(r, tile, lane, scores, sums, out), rows, queries, block, high)
        if done is not None:
            yield from _with_copies_ahead(done, r)
    for threads in thread_counts(start)[-2:]:
        for held in _in_tiles(start, scores, sums, queries, block, columns, threads):
            placed = _placed(held, _Pass(r, tile, lane, scores, sums, out), queries)
            for s, axis in rows:
                placed = _row_threads(placed, s, axis, queries, threads)
            done = _thread_tile(placed, out, queries, columns, threads)
            if done is not None:
                yield from _with_copies_ahead(done, r)


def _with_copies_ahead(state: Scheduler, r: ResolvedStage) -> Iterator[Scheduler]:
    yield state
    ahead = try_opt(state, "PIPELINE", name_of(state, r, len(r.stage.outs)), _BUFFERS)
    if ahead is not state:
        yield ahead


def _held(state: Scheduler, parts: _Pass, rows: list[tuple[int, int]], queries: int, block: int, high: int) -> Scheduler | None:
    """A pass whose scores, weights and sums stay in the registers of the threads that hold them as results of a matrix instruction. Each
    subgroup has `high` tiles of queries, and all columns. `rows`: the stages that reduce a block, and their axis of queries."""
    dot = _instruction(state, parts.scores)
    columns = extent_of(state, parts.r, parts.lane)
    if dot is None or dot is not _instruction(state, parts.sums) or queries % (dot.rows * high) or block % dot.positions:
        return None
    subgroups = queries // (dot.rows * high)
    held = high * dot.rows * (block + 2 * (columns + dot.columns)) // dot.threads
    if subgroups * dot.threads > state.target.group_threads or held > state.target.registers_per_thread - _BESIDE:
        return None
    across = -(-columns // dot.columns)
    for part, wide in ((parts.scores, block // dot.columns), (parts.sums, across)):
        state = try_opt(state, "TC", part.summed, (dot.name, part.rows, part.columns))
        state = try_opt(_by_subgroups(state, part, high, wide, subgroups), "UNROLL", part.summed, 0)
    state = _placed(state, parts, queries, values=False)
    for s, axis in rows:
        stage, axes = state.kernel.stages[s], state.kernel.axes
        of = _Part(s, axes[stage.outs[axis]].name, axes[stage.reds[0]].name, "")
        state = try_opt(state, "HOLD", stage.name, (dot.name, of.rows, of.columns))
        state = try_opt(_by_subgroups(state, of, high, min(_CHAINS, block // dot.columns), subgroups), "UNROLL", of.columns, 0)
    laid = try_opt(state, "HOLD", parts.r.stage.name, (dot.name, parts.out.rows, parts.out.columns))
    return _by_subgroups(laid, parts.out, high, across, subgroups) if laid is not state else None


def _by_subgroups(state: Scheduler, part: _Part, high: int, wide: int, subgroups: int) -> Scheduler:
    """`high` by `wide` tiles to each subgroup, and rows of them dealt out to so many subgroups."""
    for op, name, amount in (("UPCAST", part.columns, wide), ("UPCAST", part.rows, high), ("LOCAL", part.rows, subgroups)):
        state = try_opt(state, op, name, amount) if amount > 1 else state
    return state


def _moved(dims: Any, local: int) -> int:
    """The dim of a read that local axis `local` moves by one, or -1."""
    return next((d for d, lin in enumerate(dims) if lin.coef(local) == 1), -1)


def _part(state: Scheduler, s: int, rows: int, columns: int) -> _Part | None:
    """A stage with the outputs number `rows` and `columns`, which sums along one axis."""
    stage, axes = state.kernel.stages[s], state.kernel.axes
    if min(rows, columns) < 0 or len(stage.reds) != 1:
        return None
    return _Part(s, axes[stage.outs[rows]].name, axes[stage.outs[columns]].name, axes[stage.reds[0]].name)


def _in_tiles(state: Scheduler, scores: _Part, sums: _Part, queries: int, block: int, columns: int, threads: int) -> Iterator[Scheduler]:
    """Both products in tiles of matrix instructions where they fit, else in register tiles of threads."""
    done: Scheduler | None = state
    for part, across in ((scores, block), (sums, columns)):
        dot = _instruction(state, part)
        if done is not None and dot is not None:
            done = _matrix_tile(done, part, dot, queries, across, threads)
        elif done is not None:
            done = _thread_tile(done, part, queries, across, threads)
            done = try_opt(done, "UNROLL", part.summed, 4) if done is not None else None
    if done is not None:
        yield done


def _instruction(state: Scheduler, part: _Part) -> Dot | None:
    """The matrix instruction of a product, whose tiles a subgroup holds."""
    for axis, arg in applicable(state.kernel, state.target, part.stage):
        if axis == part.summed and isinstance(arg, tuple) and arg[1:] == (part.rows, part.columns):
            dot = DOTS[arg[0]]
            if dot.fragments is not None and not dot.reads_shared:
                return dot
    return None


def _matrix_tile(state: Scheduler, part: _Part, dot: Dot, down: int, across: int, threads: int) -> Scheduler | None:
    """Tiles of `down` rows and `across` columns by all subgroups: rows are dealt out to them, then columns."""
    state = try_opt(state, "TC", part.summed, (dot.name, part.rows, part.columns))
    subgroups = threads // dot.threads
    rows, columns = -(-down // dot.rows), -(-across // dot.columns)
    over_rows = _power_below(min(subgroups, rows))
    over_columns = _power_below(min(subgroups // over_rows, columns))
    high, wide = -(-rows // over_rows), -(-columns // over_columns)
    if high * wide * dot.rows * dot.columns > 2 * _MOST_HELD * dot.threads:
        return None
    for op, name, amount in (("UPCAST", part.rows, high), ("UPCAST", part.columns, wide),
                             ("LOCAL", part.rows, over_rows), ("LOCAL", part.columns, over_columns)):
        state = try_opt(state, op, name, amount) if amount > 1 else state
    return try_opt(state, "UNROLL", part.summed, 0)


def _thread_tile(state: Scheduler, part: _Part, down: int, across: int, threads: int) -> Scheduler | None:
    """A register tile to each thread: some columns beside each other, and as many rows as are left to it."""
    wide = next(n for n in _WIDE if -(-across // n) <= threads or n == _WIDE[-1])
    over_columns = min(threads, -(-across // wide))
    over_rows = _power_below(min(threads // over_columns, down))
    high = -(-down // over_rows)
    if high * wide > _MOST_HELD or over_columns * wide < across:
        return None
    for name, amount, over in ((part.columns, wide, over_columns), (part.rows, high, over_rows)):
        state = try_opt(state, "UPCAST", name, amount) if amount > 1 else state
        over = min(over, _power_below(state.rows[state.row_id(name)].extent))
        state = try_opt(state, "LOCAL", name, over) if over > 1 else state
    return try_opt(state, "LANES", f"{part.columns}.in") if wide > 1 else state


def _power_below(n: int) -> int:
    """The largest power of two up to n. Full rounds of so many threads cover positions that readers touch past an axis' end."""
    return 1 << (n.bit_length() - 1)


def _row_threads(state: Scheduler, s: int, axis: int, queries: int, threads: int) -> Scheduler:
    """Maxima or sums of rows: a row to each thread, or to several."""
    stage, axes = state.kernel.stages[s], state.kernel.axes
    rows = _power_below(min(queries, threads))
    parts = threads // rows
    state = try_opt(state, "UPCAST", axes[stage.reds[0]].name, vector_width(state, resolved(state, s)))
    state = try_opt(state, "LOCAL", axes[stage.outs[axis]].name, rows)
    return try_opt(state, "GROUP", axes[stage.reds[0]].name, parts) if parts > 1 else state


def _heads_together(state: Scheduler, heads: str, operands: set[int]) -> int:
    """Heads that are scheduled side by side where a mask makes blocks uneven: the largest divisor of the number of heads for which keys and
    values fit a part of the second cache."""
    axes, stages = state.kernel.axes, state.kernel.stages
    count = state.rows[state.row_id(heads)].extent
    nbytes = sum(prod([axes[a].extent for a in stages[s].outs]) * _HALF for s in operands if any(n.kind == "load" for n in resolved(
        state, s).nodes))
    most = min(_HEADS, int(count * state.target.l2 / (_L2_SHARE * max(1, nbytes))))
    return max([n for n in range(1, most + 1) if count % n == 0], default=1)


def _placed(state: Scheduler, parts: _Pass, queries: int, values: bool = True) -> Scheduler:
    """The loop over blocks around a tile of queries, and in it what is computed and read of a block; around it the queries. `values`: what
    several stages read is computed once, and not by each of them."""
    r, tile, lane = parts.r, parts.tile, parts.lane
    name, along, blocks = name_of(state, r, tile), name_of(state, r, lane), name_of(state, r, len(r.stage.outs))
    others = [name_of(state, r, a) for a in range(len(r.stage.outs)) if a not in (lane, tile) and extent_of(state, r, a) > 1]
    inside = [name, along]
    operands = {s for product in (parts.scores, parts.sums) for s in resolved(state, product.stage).reads}
    if extent_of(state, r, tile) > queries:
        state = try_opt(state, "TILE", name, queries)
        heads = [others.pop()] if others and masked_limits(state.kernel) else []
        together = _heads_together(state, heads[0], operands) if heads else 1
        if heads and together == state.rows[state.row_id(heads[0])].extent:
            others += [name, *heads]
        elif together > 1:
            state = try_opt(state, "TILE", heads[0], together)
            others += [*heads, name, f"{heads[0]}.in"]
        else:
            others += [*heads, name]
        inside = [f"{name}.in", along]
    state = try_opt(state, "ORDER", r.stage.name, (*others, blocks, *inside))
    for s in reversed(state.kernel.stages):
        readers = sum(s.index in reads for reads in state.kernel.reads)
        if not s.is_output and (s.has_reduce or s.index in operands or (values and readers > 1)):
            state = try_opt(state, "STAGE", s.name, blocks)
    fixed = min(resolved(state, parts.scores.stage).reads)
    return try_opt(state, "STAGE", state.kernel.stages[fixed].name, others[-1]) if others else state
