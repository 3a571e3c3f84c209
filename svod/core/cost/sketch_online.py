"""Sketches of attention for CPUs, in one pass over blocks of the keys: each block is computed for a tile of queries while it is in a near
cache.

    TILE(o1, T)  ORDER(o1, r0, o1.in, o2)  STAGE(scores, r0) …     for queries by T: for blocks: { scores, maxima, weights, sums, parts };
                                                                   for queries in T: (m, s, a) = expsum(…)

Keys and values are read once for T queries, and scores of T queries and a block stay in the second-level cache."""
from __future__ import annotations

from collections.abc import Iterator

from svod.core.cost.sketch_facts import extent_of, factors_of, lane_amounts, name_of, resolved, rows_held, tile_amounts, try_opt
from svod.core.cost.template import Do, Hole, Only, Point, Template, fact
from svod.core.ir.uop import Ops
from svod.core.kernel.kernel import ResolvedStage, Stage
from svod.core.kernel.placement import place_stages, vector_width
from svod.core.kernel.scheduler import Scheduler

BLOCK_KEYS = 256        # approximate keys of a block, so that rescaling between blocks is cheap
QUERY_TILES = (16, 8)   # register tiles of queries that share a block
L2_SHARE = 4            # scores and weights may take the second cache divided by this
QUERY_VECTORS = 4       # vectors of results in each row of a register tile


def row_maxima(state: Scheduler) -> list[Stage]:
    """The stages that are maxima of rows, to which ONLINE may apply."""
    return [s for s in state.kernel.stages if not s.is_output and s.value.arg == ("MAX", 1) and len(s.reds) == 1 and s.outs]


def blocks_start(state: Scheduler, peak: Stage, block: int) -> Scheduler | None:
    """The state after ONLINE, if the whole kernel becomes one weighted sum; else None."""
    start = try_opt(state, "ONLINE", peak.name, block)
    is_sum = start is not state and [red.combiner for red in resolved(start, start.kernel.output).reductions] == ["EXPSUM"]
    return start if is_sum else None


def main_axes(state: Scheduler, r: ResolvedStage) -> tuple[int, int]:
    """For a kernel after ONLINE: (the output axis of the weighted values, the longest output axis whose rows share these values); -1 if
    there is none."""
    peak, _, part = (r.nodes[v] for v in r.reductions[0].values)
    outs = range(len(r.stage.outs))
    lane = max((a for a in outs if a in part.deps and a not in peak.deps), default=-1,
               key=lambda a: (r.store is not None and r.store.coef(a) == 1, extent_of(state, r, a)))
    values = _weighted_axes(state, part.arg)
    queries = [a for a in outs if a in peak.deps and extent_of(state, r, a) > 1 and a not in values]
    return lane, max(queries, key=lambda a: extent_of(state, r, a), default=-1)


def _rounds_weights(state: Scheduler, r: ResolvedStage) -> bool:
    """Whether weights are rounded to a narrow type before they are multiplied. Dot and matrix instructions for the whole row are then
    better than blocks."""
    part = resolved(state, r.nodes[r.reductions[0].values[2]].arg)
    factors = factors_of(state, part)
    return factors is not None and any(x.stage >= 0 and state.kernel.stages[x.stage].value.op is Ops.CAST for x in factors[:1])


def _block_of(row: int, width: int) -> int:
    """The keys of a block: a divisor of the row near `BLOCK_KEYS`, in whole vectors, so that nothing is masked; `BLOCK_KEYS` if there is
    none."""
    blocks = [n for n in range(BLOCK_KEYS // 2, BLOCK_KEYS * 2, width) if row % n == 0]
    return min(blocks, key=lambda n: abs(n - BLOCK_KEYS), default=BLOCK_KEYS)


def _blocks(p: Point) -> Iterator[int]:
    """The keys of a block, if the row has more than two blocks."""
    peak = p[_PEAK]
    row = p.state.kernel.axes[peak.reds[0]].extent
    block = _block_of(row, vector_width(p.state, resolved(p.state, peak.index)))
    if row > 2 * block:
        yield block


def _query_counts(p: Point) -> list[int]:
    """Numbers of queries in a tile, so that scores and weights of a block fit their share of the second cache."""
    bytes_of_query = 2 * p[_KEYS] * p.stage.stage.dtype.itemsize
    width = vector_width(p.state, p.stage)
    counts = [n * rows_held(QUERY_VECTORS * width, width, p.state.target.vector_registers) for n in QUERY_TILES]
    return [n for n in counts if n * bytes_of_query <= p.state.target.l2 // L2_SHARE]


def _tile_of_queries(p: Point) -> Scheduler:
    """Order the loops: tiles of queries, in them blocks of keys, in these the queries of a tile and vectors of the output."""
    state, r, (lane, tile), queries = p.state, p.stage, p[_AXES], p[_QUERIES]
    others = [name_of(state, r, a) for a in range(len(r.stage.outs)) if a not in (lane, tile) and extent_of(state, r, a) > 1]
    outer, inside = state, [name_of(state, r, lane)]
    if tile >= 0:
        name = name_of(state, r, tile)
        outer = try_opt(state, "TILE", name, queries) if extent_of(state, r, tile) > queries else state
        if outer is not state:
            others.append(name)
            name = f"{name}.in"
        inside = [name, *inside]
    vectors = try_opt(outer, "UPCAST", inside[-1], lane_amounts(extent_of(state, r, lane), vector_width(state, r), 4)[0])
    loops = [x for x in (*others, name_of(state, r, len(r.stage.outs)), *inside) if vectors.rows[vectors.row_id(x)].extent > 1]
    return try_opt(vectors, "ORDER", r.stage.name, tuple(loops))


def _weighted_axes(state: Scheduler, stage: int) -> frozenset[int]:
    """The output axes on which the weighted value depends, in the stage that sums a block."""
    r = resolved(state, stage)
    product = r.nodes[r.reductions[0].values[0]]
    return frozenset(r.nodes[product.src[1]].deps) if len(product.src) == 2 else frozenset()


def _register_tile(p: Point) -> Scheduler:
    """Choose a register tile for the sums of a block, with vectors along the output's vector axis. Each weight is broadcast to all
    lanes, so rows of weights stay contiguous."""
    state, (lane, tile), queries = p.state, p[_AXES], p[_QUERIES]
    r = resolved(state, p.stage.nodes[p.stage.reductions[0].values[2]].arg)
    width = vector_width(state, r)
    amount = lane_amounts(extent_of(state, r, lane), width, 4)[0]
    if tile >= 0:
        rows = tile_amounts(min(queries, extent_of(state, r, tile)), rows_held(amount, width, state.target.vector_registers))[0]
        state = try_opt(state, "UPCAST", name_of(state, r, tile), rows)
    state = try_opt(state, "UPCAST", name_of(state, r, lane), amount)
    return try_opt(try_opt(state, "LANES", f"{name_of(state, r, lane)}.in"), "UNROLL", name_of(state, r, len(r.stage.outs)), 2)


def _near(p: Point) -> Scheduler:
    """STAGE values of a block at the loop over blocks: its sums, its weights (two stages read them), and loads under a mask."""
    state, kernel, loop = p.state, p.state.kernel, p.name(len(p.stage.stage.outs))
    inside = place_stages(state).paths
    for s in kernel.stages:
        if s.is_output or inside[s.index] == ():
            continue
        readers = sum(s.index in reads for reads in kernel.reads)
        nodes = resolved(state, s.index).nodes
        masked = any(n.kind == "load" and n.gate >= 0 for n in nodes)      # the last block may be cut short; only the copy then has masks
        if s.has_reduce or masked or (readers > 1 and any(n.kind == "alu" and n.op == "EXP" for n in nodes)):
            state = try_opt(state, "STAGE", s.name, loop)
    return state


_PEAK = Hole("", lambda p: row_maxima(p.state))
_KEYS = Hole("keys", _blocks)
_AXES = fact(lambda p: axes if (axes := main_axes(p.state, p.stage))[0] >= 0 and p.stage.store is not None else None)
_QUERIES = Hole("queries", _query_counts)

# Of the stages that reduce a block, only the weighted sums get a register tile here.
ATTENTION = Template(
    "ATTENTION", _PEAK, _KEYS, Do(lambda p: blocks_start(p.state, p[_PEAK], p[_KEYS])),
    Only(lambda p: not _rounds_weights(p.state, p.stage)), _AXES, _QUERIES, Do(_tile_of_queries), Do(_near), Do(_register_tile))
