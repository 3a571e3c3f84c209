"""Sketches of attention for groups: one pass over blocks of keys (ONLINE), with a tile of queries for each group.

    16-bit numbers, scores and weights in registers: HOLD
        ONLINE(s3, 128) TC(s2.r0, (mma_bf16,s2.o1,s2.o2)) … TILE(o1, 64) TILE(o0, 16) ORDER(out, o0, o1, o0.in, r0, o1.in, o2) …
        HOLD(s3, (mma_bf16,s3.o1,s3.r0)) … HOLD(out, (mma_bf16,o1.in,o2)) UPCAST(o2, 8) LOCAL(o1.in, 4) PIPELINE(r0, 2)

    other numbers, scores and weights in shared memory
    ONLINE(s3, 64) TILE(o1, 64) ORDER(out, o0, o1, r0, o1.in, o2) STAGE(s8, r0) … STAGE(s1, r0) STAGE(s0, o1)
        TC(s2.r0, (mma_bf16,s2.o1,s2.o2)) UPCAST(s2.o2, 8) LOCAL(s2.o1, 4)      scores of 64 queries and 64 keys, of 4 subgroups
        LOCAL(s3.o1, 64) GROUP(s3.r0, 2)                                        maxima, and sums of weights: two threads a query
        TC(s8.r0, (mma_bf16,s8.o1,s8.o2)) UPCAST(s8.o2, 8) LOCAL(s8.o1, 4)      sums of weighted values
        LOCAL(o2, 16) LOCAL(o1.in, 8) UPCAST(o1.in, 8) UPCAST(o2, 4)            the sums of all blocks stay in registers

The queries lie in shared memory for the whole pass; the keys and values of a block lie there while it is computed, or are copied ahead
(PIPELINE). If no matrix instruction fits, each thread has a register tile of scores and one of weighted values.
"""
from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from svod.core.cost.groups.spread import thread_counts
from svod.core.cost.sketch_facts import extent_of, instructions, name_of, resolved, try_opt
from svod.core.cost.sketch_online import blocks_start, main_axes, row_maxima
from svod.core.cost.template import Apply, Choose, Do, Each, Hole, Maybe, Need, Only, Point, Template, Value, fact
from svod.core.kernel.algorithms.online import masked_limits
from svod.core.kernel.placement import vector_width
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.isa import Dot

KEYS = (32, 64, 128)            # keys of a block
QUERIES = (32, 64, 128)         # queries of a group
THREAD_COLUMNS = (4, 8, 16)     # columns of a thread's register tile
BUFFERS = 2                     # buffers of keys and values, which are copied ahead
HELD_ROWS = (1, 2)              # tiles of queries in a subgroup, if scores stay in registers
ROW_CHAINS = 4                  # independent partial maxima and sums of a row
OTHER_REGISTERS = 64            # registers of a thread for everything but scores and sums
HELD_RESULTS = 32               # most elements of a tile of scores or sums in a thread's registers
MOST_HEADS = 16                 # most heads whose groups are scheduled side by side
HEADS_L2_SHARE = 2              # keys and values of these heads may take the second cache divided by this
HALF_BYTES = 2                  # size of a 16-bit number


class _Part(NamedTuple):
    """A stage of the pass that is cut into tiles. `rows`, `columns`: names of its tiles' axes; `summed`: its reduce axis, "" if that is not
    tiled; `across`: extent of the columns."""

    stage: int
    rows: str
    columns: str
    summed: str
    across: int


class _Pass(NamedTuple):
    """The parts of the pass. `tile`: local axis of the queries; `lane`: local axis of the weighted values; `scores`, `sums`: both products;
    `out`: the output stage; `of_rows`: stages that reduce the rows of a block: maxima, and sums of weights."""

    tile: int
    lane: int
    scores: _Part
    sums: _Part
    out: _Part
    of_rows: tuple[_Part, ...]


class _Tile(NamedTuple):
    """A tile of a stage. `rows`, `columns`: tiles of a subgroup, or elements of a thread; `over_rows`, `over_columns`: subgroups or threads
    along each axis."""

    rows: int
    columns: int
    over_rows: int
    over_columns: int


def _queries(p: Point) -> Iterator[int]:
    lane, tile = main_axes(p.state, p.stage)
    if 0 <= tile <= lane:
        extent = p.extent(tile)
        yield from [min(n, extent) for n in QUERIES if extent >= n // 2]


def _pass(p: Point) -> _Pass | None:
    """Find the parts of the pass; None if a product does not sum along exactly one axis."""
    state, r = p.state, p.stage
    lane, tile = main_axes(state, r)
    peaks, totals, parts = (r.nodes[v] for v in r.reductions[0].values)
    of_peaks = resolved(state, peaks.arg)
    down = _moved(peaks.dims, tile)                     # the dim of the maxima that runs along the queries
    read = next(n for n in of_peaks.nodes if n.kind == "read")
    columns = extent_of(state, r, lane)
    scores = _part(state, read.arg, _moved(read.dims, down), _moved(read.dims, len(of_peaks.stage.outs)), p[_KEYS])
    sums = _part(state, parts.arg, _moved(parts.dims, tile), _moved(parts.dims, lane), columns)
    if scores is None or sums is None:
        return None
    axes, name = state.kernel.axes, name_of(state, r, tile)
    of_rows = [_Part(st.index, axes[st.outs[down]].name, axes[st.reds[0]].name, "", p[_KEYS])
               for st in (state.kernel.stages[peaks.arg], state.kernel.stages[totals.arg])]
    out = _Part(r.stage.index, f"{name}.in" if extent_of(state, r, tile) > p[_QUERIES] else name, name_of(state, r, lane), "", columns)
    return _Pass(tile, lane, scores, sums, out, tuple(of_rows))


def _moved(dims: Any, local: int) -> int:
    """The dim of a read whose index advances by one with each position of local axis `local`; -1 if there is none."""
    return next((d for d, lin in enumerate(dims) if lin.coef(local) == 1), -1)


def _part(state: Scheduler, s: int, rows: int, columns: int, across: int) -> _Part | None:
    """Describe a stage of the pass, whose rows and columns are its output axes number `rows` and `columns`. `across`: extent of the
    columns. None if an axis number is -1, or the stage does not have exactly one reduce axis."""
    stage, axes = state.kernel.stages[s], state.kernel.axes
    if min(rows, columns) < 0 or len(stage.reds) != 1:
        return None
    return _Part(s, axes[stage.outs[rows]].name, axes[stage.outs[columns]].name, axes[stage.reds[0]].name, across)


def _instruction(state: Scheduler, part: _Part) -> Dot | None:
    """The matrix instruction for a product whose tiles a subgroup holds in registers; None if none fits."""
    return next((x.dot for x in instructions(state, part.stage) if x.axis == part.summed and x.has_tiles
                 and x.arg[1:] == (part.rows, part.columns) and x.dot.fragments is not None and not x.dot.reads_shared), None)


def _power_below(n: int) -> int:
    """The largest power of two up to n. Full rounds of this many threads also cover positions past an axis' end that readers touch."""
    return 1 << (n.bit_length() - 1)


def _heads_together(state: Scheduler, heads: str, operands: set[int]) -> int:
    """How many heads are scheduled side by side, if a mask leaves some tiles of queries fewer blocks than others: the largest divisor of
    the number of heads for which keys and values fit their share of the second cache."""
    axes, stages = state.kernel.axes, state.kernel.stages
    count = state.rows[state.row_id(heads)].extent
    nbytes = sum(prod([axes[a].extent for a in stages[s].outs]) * HALF_BYTES for s in operands if any(n.kind == "load" for n in resolved(
        state, s).nodes))
    most = min(MOST_HEADS, int(count * state.target.l2 / (HEADS_L2_SHARE * max(1, nbytes))))
    return max([n for n in range(1, most + 1) if count % n == 0], default=1)


def _placed(p: Point, values: bool) -> Scheduler:
    """Order the loops: tiles of queries, in them blocks of keys. The stages of a block are computed inside the loop over blocks, the
    queries are staged outside of it. `values`: stage also elementwise values that several stages read, instead of computing them in
    each."""
    state, r, parts, queries = p.state, p.stage, p[_PASS], p[_QUERIES]
    tile, lane = parts.tile, parts.lane
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


# -- scores, weights and sums in the registers of the threads that hold them as results of a matrix instruction ------------------------

def _held_instruction(p: Point) -> Dot | None:
    """The instruction for both products; None if its tiles do not fit the blocks, the group or the registers of its threads."""
    parts, queries, keys, high, target = p[_PASS], p[_QUERIES], p[_KEYS], p[_HIGH], p.state.target
    dot = _instruction(p.state, parts.scores)
    if dot is None or dot is not _instruction(p.state, parts.sums) or queries % (dot.rows * high) or keys % dot.positions:
        return None
    held = high * dot.rows * (keys + 2 * (parts.out.across + dot.columns)) // dot.threads
    threads = queries // (dot.rows * high) * dot.threads
    return dot if threads <= target.group_threads and held <= target.registers_per_thread - OTHER_REGISTERS else None


def _by_subgroups(part: Hole[_Part], wide: Value[int]) -> list[Apply]:
    """Steps that give each subgroup `_HIGH` × `wide` tiles, and bind the remaining rows of tiles to subgroups."""
    return [Apply("UPCAST", lambda p: p[part].columns, wide), Apply("UPCAST", lambda p: p[part].rows, _HIGH),
            Apply("LOCAL", lambda p: p[part].rows, lambda p: p[_QUERIES] // (p[_DOT].rows * p[_HIGH]))]


def _in_tiles_of(op: str, part: Hole[_Part], axis: Value[str]) -> Apply:
    """The step that applies `op`, TC or HOLD, with the chosen instruction to the tiles of a part of the pass."""
    return Apply(op, axis, lambda p: (p[_DOT].name, p[part].rows, p[part].columns))


def _stage_name(part: Hole[_Part]) -> Value[str]:
    return lambda p: p.state.kernel.stages[p[part].stage].name


_PEAK = Hole("", lambda p: row_maxima(p.state) if p.state.target.shared_bytes else ())
_KEYS = Hole("keys", lambda p: [n for n in KEYS if p.state.kernel.axes[p[_PEAK].reds[0]].extent >= 2 * n])
_QUERIES = Hole("queries", _queries)
_PASS = fact(_pass)
_HIGH = Hole("tiles of a subgroup", lambda p: HELD_ROWS)
_DOT = fact(_held_instruction)
_PRODUCT = Hole("", lambda p: (p[_PASS].scores, p[_PASS].sums))
_OF_ROWS = Hole("", lambda p: p[_PASS].of_rows)
_OUT = Hole("", lambda p: (p[_PASS].out,))

HELD_PASS = Template(
    "ATTENTION IN REGISTERS", _HIGH, _DOT,
    Each(_PRODUCT, _in_tiles_of("TC", _PRODUCT, lambda p: p[_PRODUCT].summed),
         *_by_subgroups(_PRODUCT, lambda p: -(-p[_PRODUCT].across // p[_DOT].columns)), Apply("UNROLL", lambda p: p[_PRODUCT].summed, 0)),
    Do(lambda p: _placed(p, values=False)),
    Each(_OF_ROWS, _in_tiles_of("HOLD", _OF_ROWS, _stage_name(_OF_ROWS)),
         *_by_subgroups(_OF_ROWS, lambda p: min(ROW_CHAINS, p[_KEYS] // p[_DOT].columns)),
         Apply("UNROLL", lambda p: p[_OF_ROWS].columns, 0)),
    _OUT, Need(_in_tiles_of("HOLD", _OUT, _stage_name(_OUT))), *_by_subgroups(_OUT, lambda p: -(-p[_OUT].across // p[_DOT].columns)))


# -- scores and weights in shared memory -----------------------------------------------------------------------------------------------

def _matrix_tile(p: Point) -> _Tile | None:
    """Divide the tiles of a product among all subgroups: rows first, then columns. None if a subgroup would have too many tiles."""
    part, dot = p[_PRODUCT], p[_PRODUCT_DOT]
    subgroups, rows, columns = p[_THREADS] // dot.threads, -(-p[_QUERIES] // dot.rows), -(-part.across // dot.columns)
    over_rows = _power_below(min(subgroups, rows))
    over_columns = _power_below(min(subgroups // over_rows, columns))
    tile = _Tile(-(-rows // over_rows), -(-columns // over_columns), over_rows, over_columns)
    return tile if tile.rows * tile.columns * dot.rows * dot.columns <= 2 * HELD_RESULTS * dot.threads else None


def _thread_tile(p: Point, part: _Part) -> _Tile | None:
    """Divide a part among all threads: a register tile of neighbouring columns, and of as many rows as remain. None if the tile is too
    large."""
    wide = next(n for n in THREAD_COLUMNS if -(-part.across // n) <= p[_THREADS] or n == THREAD_COLUMNS[-1])
    over_columns = min(p[_THREADS], -(-part.across // wide))
    over_rows = _power_below(min(p[_THREADS] // over_columns, p[_QUERIES]))
    tile = _Tile(-(-p[_QUERIES] // over_rows), wide, over_rows, over_columns)
    return tile if tile.rows * wide <= HELD_RESULTS and over_columns * wide >= part.across else None


def _in_thread_tiles(part: Hole[_Part]) -> list[Apply | Hole[Any]]:
    """Steps that give each thread a register tile of a part, with no more threads than there are positions left."""
    tile = fact(lambda p: _thread_tile(p, p[part]))
    return [tile,
            Apply("UPCAST", lambda p: p[part].columns, lambda p: p[tile].columns),
            Apply("LOCAL", lambda p: p[part].columns, lambda p: min(p[tile].over_columns, _power_below(p.left(p[part].columns)))),
            Apply("UPCAST", lambda p: p[part].rows, lambda p: p[tile].rows),
            Apply("LOCAL", lambda p: p[part].rows, lambda p: min(p[tile].over_rows, _power_below(p.left(p[part].rows)))),
            Apply("LANES", lambda p: f"{p[part].columns}.in" if p[tile].columns > 1 else "")]


def _row_threads(p: Point) -> int:
    return _power_below(min(p[_QUERIES], p[_THREADS]))


_THREADS = Hole("threads", lambda p: thread_counts(p.state)[-2:])
_PRODUCT_DOT = fact(lambda p: _instruction(p.state, p[_PRODUCT]))
_MATRIX_TILE = fact(_matrix_tile)

SHARED_PASS = Template(
    "ATTENTION IN SHARED MEMORY", _THREADS,
    Each(_PRODUCT, Choose(
        [_PRODUCT_DOT, _MATRIX_TILE,
         Apply("TC", lambda p: p[_PRODUCT].summed, lambda p: (p[_PRODUCT_DOT].name, p[_PRODUCT].rows, p[_PRODUCT].columns)),
         Apply("UPCAST", lambda p: p[_PRODUCT].rows, lambda p: p[_MATRIX_TILE].rows),
         Apply("UPCAST", lambda p: p[_PRODUCT].columns, lambda p: p[_MATRIX_TILE].columns),
         Apply("LOCAL", lambda p: p[_PRODUCT].rows, lambda p: p[_MATRIX_TILE].over_rows),
         Apply("LOCAL", lambda p: p[_PRODUCT].columns, lambda p: p[_MATRIX_TILE].over_columns),
         Apply("UNROLL", lambda p: p[_PRODUCT].summed, 0)],
        [Only(lambda p: _instruction(p.state, p[_PRODUCT]) is None), *_in_thread_tiles(_PRODUCT),
         Apply("UNROLL", lambda p: p[_PRODUCT].summed, 4)])),
    Do(lambda p: _placed(p, values=True)),
    Each(_OF_ROWS, Apply("UPCAST", lambda p: p[_OF_ROWS].columns, lambda p: vector_width(p.state, resolved(p.state, p[_OF_ROWS].stage))),
         Apply("LOCAL", lambda p: p[_OF_ROWS].rows, _row_threads),
         Apply("GROUP", lambda p: p[_OF_ROWS].columns, lambda p: p[_THREADS] // _row_threads(p))),
    _OUT, *_in_thread_tiles(_OUT))

ATTENTION = Template(
    "ATTENTION", _PEAK, _KEYS, Do(lambda p: blocks_start(p.state, p[_PEAK], p[_KEYS])), _QUERIES, _PASS,
    Choose(HELD_PASS, SHARED_PASS), Maybe(Apply("PIPELINE", lambda p: p.reds[0], BUFFERS)))
