"""What a state costs, read from its tables without lowering it: the search ranks its proposals by this.

Per stage: how often its body runs, the vector instructions of one run (values that an inner loop does not change are counted at
the loop they stand in), the registers it needs, and what its accesses cost beyond the first-level cache
(svod/core/cost/memory_traffic.py). The time is
the slowest of these and a share of the others, stages added up. It ranks; it does not promise.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from svod.core.cost.memory_traffic import LINE, PAGE, Access, levels, traffic
from svod.core.cost.op_count import count_operations
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import TRANSCENDENTAL
from svod.core.kernel.intrinsics import rate_of
from svod.core.kernel.kernel import Node, ResolvedStage
from svod.core.kernel.layout import Layouts, lay_out, layouts
from svod.core.kernel.non_temporal import stores_whole_vectors
from svod.core.kernel.placement import EmittedLoop, Placement, fit, is_computed_once, is_derived, lane_row, place_stages
from svod.core.kernel.scheduler import DOT, LOOP, UPCAST, Scheduler

_COSTLY = frozenset(op.value for op in TRANSCENDENTAL)
_COMBINED = {2: 6.0, 3: 30.0}     # operations that combine two results of so many components: ARGMAX; EXPSUM, with its exponential
_LATENCY = 4.0            # cycles of a multiply-add or add
_WINDOW = 400.0           # instructions that a core looks ahead: sums that end within them overlap with the next ones
_LOOP_CYCLES = 1.5        # of one iteration's bookkeeping
_LAUNCH_CYCLES = 2000.0   # of a phase that wakes other cores
_OVERLAP = 0.4            # the share that is not hidden of what does not bound a stage
_TRANSLATED = 0.3         # the share of translations that is never hidden: what waits for them are the oldest instructions
_LANE_LOAD = 1.5          # loads' worth of one lane that is loaded by itself
_LANE_MASKED = 6.0        # the same under a mask
_SPREAD = 4.0             # operations that bring a mask to the lanes of one of several wide loads
_LANE_READ = 8.0          # the same from a staged area, whose rows are mostly a power of two apart and share cache sets
_LANE_TURNED = 0.5        # the same where squares are transposed in registers
_SQUARE = 4               # positions side by side from which stores of lanes are transposed in registers
_LANE_STORE = 3.0         # cycles of one lane that is taken out of a vector and stored by itself
_CONTENTION = 0.15        # the share of loads that is not hidden behind arithmetic, or the other way round: they are issued from one queue
_SPILL_CYCLES = 5.0       # of an accumulator that is kept in memory, each iteration: stored and loaded again before it is used
_SHORT_STEP = 4           # elements between lanes up to which vectors are loaded and shuffled
_ANYWHERE = PAGE + LINE   # bytes between neighbours of a gathered axis: another page, another set


@dataclass(frozen=True)
class Cost:
    """`cycles` of one core for the whole kernel, and what bounds it."""

    cycles: float
    accumulators: int         # vector registers that live through the reduce loops, at most over the stages
    loads_per_fma: float      # of the stage with most multiply-adds
    scratch_bytes: int
    flops: float
    bytes_moved: float        # from memory


class _Nest(NamedTuple):
    """A stage as it is emitted."""

    r: ResolvedStage
    box: list[int]                      # positions of its dims
    own: list[tuple[EmittedLoop, ...]]        # per local axis its rows
    loops: list[tuple[int, int]]        # (local axis, iterations) of its loops, outermost first
    outside: list[tuple[int, int, int]] # (row, local axis it moves or -1, iterations) of the loops around it, outermost first
    lane: int                           # local axis of the vector, or -1
    lane_piece: int
    lane_extent: int

    @property
    def times(self) -> float:
        total = 1.0
        for _, _, e in self.outside:
            total *= e
        return total


def cost_of(state: Scheduler) -> Cost:
    """What the state costs, by analysis alone, remembered on it. Raises KernelOptError when its placements do not go together."""
    if state._cost is None:
        state._cost = _cost_of(state)
    cost: Cost = state._cost
    return cost


def _cost_of(state: Scheduler) -> Cost:
    found = place_stages(state)
    kernel = state.kernel
    pieces: dict[int, list[tuple[EmittedLoop, ...]]] = {}
    moves: dict[int, frozenset[int]] = {}      # axis of a stage → loop rows around the stage that move its base
    brought: dict[int, list[tuple[int, ...]]] = {}   # argument → loops of the stages that read it
    total = accumulators = 0.0
    scratch = 0
    flops = moved = 0.0
    best_fmas, ratio = 0.0, 0.0
    threads = state.thread[1] if state.thread else state.split_reduce[1] if state.split_reduce else 1
    lay = layouts(state, found)
    inner = _innermost(lay)
    kept = float(count_operations(kernel.ast).bytes_moved)      # what passes through the caches from one run to the next
    for s in range(len(kernel.stages) - 1, -1, -1):
        r, path = found.resolved[s], found.paths[s]
        if r is None or path is None:
            continue
        nest = _nest(state, found, r, pieces, moves, inner)
        pieces[s] = nest.own
        if path != ():
            size = _stored_bytes(state, lay, s)
            for e in nest.box:
                size *= e
            scratch += size
        cost = _stage_cost(state, lay, nest, inner)
        past = _goes_past(state, lay, nest)
        if not kernel.written:      # else what goes past the caches is read again
            kept -= past            # the output stage comes first: nothing reads it
        cost_of_data, stage_moved = _data(state, found, lay, nest, cost.reads, brought, past, kept)
        cycles = max(cost.compute, *cost_of_data)
        cycles += _OVERLAP * (cost.compute + sum(cost_of_data) - cycles) + _TRANSLATED * cost_of_data[3]
        if not is_computed_once(state, found, s):
            total += cycles / _cores(state, nest, path == (), threads) + (_LAUNCH_CYCLES if path == () and threads > 1 else 0.0)
        accumulators = max(accumulators, cost.accumulators)
        flops += cost.flops
        moved += stage_moved
        if cost.fmas > best_fmas:
            best_fmas, ratio = cost.fmas, cost.loads / cost.fmas
    return Cost(total, int(accumulators), ratio, scratch, flops, moved)


def needed(state: Scheduler) -> dict[int, list[int]]:
    """Per stage that is computed somewhere: how many positions of each of its dims one computation has."""
    return _needs(state)[0]


def loops_that_move(state: Scheduler, s: int) -> dict[int, frozenset[int]]:
    """Per output axis of a stage the loop rows around it that move the part of it that is computed."""
    moves = _needs(state)[1]
    return {a: moves.get(a, frozenset()) for a in state.kernel.stages[s].outs}


def _needs(state: Scheduler) -> tuple[dict[int, list[int]], dict[int, frozenset[int]]]:
    found = place_stages(state)
    pieces: dict[int, list[tuple[EmittedLoop, ...]]] = {}
    moves: dict[int, frozenset[int]] = {}
    inner = _innermost(layouts(state, found))
    boxes = {}
    for s in range(len(found.resolved) - 1, -1, -1):
        r = found.resolved[s]
        if r is not None and found.paths[s] is not None:
            nest = _nest(state, found, r, pieces, moves, inner)
            pieces[s], boxes[s] = nest.own, nest.box
    return boxes, moves


def _cores(state: Scheduler, nest: _Nest, is_phase: bool, threads: int) -> float:
    """How many cores share a stage's work: whole iterations of the parallel loop are dealt out."""
    if threads < 2:
        return 1.0
    shared = 0
    if state.thread is not None:
        row = state.thread[0]
        shared = next((e for x, _, e in nest.outside if x == row), 0)
        if not shared and nest.r.stage.index == state.kernel.output:
            shared = next((p.extent for group in nest.own for p in group if p.row == row), 1)
    if not shared:
        shared = threads
        if is_phase and not nest.r.stage.is_output:
            shared = 1
            for a, e in nest.loops:
                shared *= e if a < len(nest.box) else 1
    return shared / -(-shared // threads)


def _nest(state: Scheduler, found: Placement, r: ResolvedStage, pieces: dict[int, list[tuple[EmittedLoop, ...]]],
          moves: dict[int, frozenset[int]], inner: dict[int, int]) -> _Nest:
    stage, path = r.stage, found.paths[r.stage.index]
    outside: list[tuple[int, int, int]] = []
    if path:
        box = [_box(state, found, pieces, stage.index, dim, path) for dim in range(len(stage.outs))]
        _find_moves(state, found, stage.index, path, moves)
        for t, depth in path:
            for row in state.order[t][:depth]:
                extent = next((p.extent for p in pieces[t][_local_axis(state, found.resolved[t], row)] if p.row == row), 1)
                if extent > 1:
                    outside.append((row, next((i for i, a in enumerate(stage.outs) if row in moves[a]), -1), extent))
    else:
        box = [state.axis_extent(a) for a in stage.outs]
    if is_derived(stage):
        lane = inner.get(stage.index, len(box) - 1)
        own = _copy_pieces(state, r, box, lane)
        order: tuple[int, ...] = tuple(p.row for group in own for p in group if p.role == LOOP)
        lane_piece = own[lane][-1].row if lane >= 0 else -1
    else:
        own = [fit(state, state.axis_rows[a], e) for a, e in zip(r.axes, box + [state.axis_extent(a) for a in stage.reds], strict=True)]
        order = state.order[stage.index]
        lane_piece = lane_row(state, r)
        lane = r.axes.index(state.rows[lane_piece].axis) if lane_piece >= 0 else -1
    lane_extent = next((p.extent for p in own[lane] if p.row == lane_piece and p.role != LOOP), 1) if lane >= 0 else 1
    by_row = {p.row: (a, p.extent) for a, group in enumerate(own) for p in group if p.role == LOOP and p.extent > 1}
    return _Nest(r, box, own, [by_row[row] for row in order if row in by_row], outside, lane, lane_piece, lane_extent)


def _local_axis(state: Scheduler, r: ResolvedStage | None, row: int) -> int:
    assert r is not None
    return r.axes.index(state.rows[row].axis)


def _find_moves(state: Scheduler, found: Placement, s: int, path: Any, moves: dict[int, frozenset[int]]) -> None:
    """Which loops around a stage move the part of each of its dims that is computed."""
    depth_in = dict(path)
    outs = state.kernel.stages[s].outs
    for axis in outs:
        moves[axis] = frozenset()
    for q in found.readers[s]:
        r = found.resolved[q]
        if r is None:
            continue
        opened = frozenset(state.order[q][:depth_in.get(q, 0)])
        for node in r.nodes:
            if node.kind == "read" and node.arg == s:
                for dim, lin in enumerate(node.dims):
                    for a, _ in lin.coefs:
                        axis = r.axes[a]
                        moves[outs[dim]] |= opened.intersection(state.axis_rows[axis]) | moves.get(axis, frozenset())


def _goes_past(state: Scheduler, lay: Layouts, nest: _Nest) -> float:
    """Bytes of the output, where the stage stores it past the caches; else 0."""
    r = nest.r
    if r.store is None or not state.stream or not stores_whole_vectors(state, r, nest.own, nest.lane, nest.lane_piece):
        return 0.0
    return float(state.kernel.params[r.store_slot].arg.size * _stored_bytes(state, lay, r.stage.index))


def _data(state: Scheduler, found: Placement, lay: Layouts, nest: _Nest, reads: list[Node], brought: dict[int, list[tuple[int, ...]]],
          past: float, kept: float) -> tuple[tuple[float, ...], float]:
    """Cycles that a stage's accesses cost at each level, over all times it runs; bytes from memory. `past`: bytes that it stores past the
    caches; `kept`: as for `traffic`."""
    r, target = nest.r, state.target
    positions = [1.0] * len(nest.own)
    for a, group in enumerate(nest.own):
        for p in group:
            if p.role != LOOP:
                positions[a] *= p.extent
    accesses, shared = [], []
    threads = state.thread[1] if state.thread else 1
    parallel = next((i for i, a in enumerate(r.axes) if state.thread and a == state.rows[state.thread[0]].axis), None)
    turned_over = 0.0       # lines
    rows = tuple(row for row, _, _ in nest.outside)
    own_rows = () if is_derived(r.stage) else tuple(
        row for row in state.order[r.stage.index] if any(p.row == row and p.extent > 1 for p in nest.own[_local_axis(state, r, row)]))

    def dense(n: Node) -> Access:
        """A read of a staged value, from where it lies."""
        path = found.paths[n.arg] or ()
        outer = frozenset([row for t, depth in path for row in state.order[t][:depth]])
        packed = lay.packed.get(n.arg)
        extents = []
        for dim, (axis, lin) in enumerate(zip(state.kernel.stages[n.arg].outs, n.dims, strict=True)):
            full = packed.padded if packed is not None and packed.dim == dim else state.kernel.axes[axis].extent
            span = full if not path or lin.atoms else 1
            for a, c in lin.coefs if path else ():
                extent = 1
                for p in nest.own[a]:
                    if p.row not in outer:
                        extent *= p.extent
                span += abs(c) * (extent - 1)
            extents.append(min(span, full))
        tiled = lay.tiles[n.arg][0]
        whole = tiled >= 0 and extents[tiled] == state.kernel.axes[state.kernel.stages[n.arg].outs[tiled]].extent
        layout = lay_out(state, lay, n.arg, tuple(extents), whole)
        size = _stored_bytes(state, lay, n.arg)
        steps = dict[int, int]()
        for lin, stride in zip(n.dims, layout.strides, strict=True):
            for a, c in lin.coefs:
                steps[a] = steps.get(a, 0) + abs(c) * stride * size
        around = sum([row in outer for row in (*rows, *own_rows)])
        tile = (n.dims[tiled].coefs[0][0], layout.tile, layout.outer * size) if layout.tiled >= 0 else None
        return Access(tuple(steps.items()), size, float(layout.size * size), local=True, fixed=around, tile=tile)

    for n in reads:
        if n.linear is not None:
            steps = {a: abs(c) * n.dtype.itemsize for a, c in n.linear.coefs}
            for atom, _ in n.linear.atoms:
                for a in r.nodes[atom].deps:
                    steps.setdefault(a, _ANYWHERE)
            accesses.append(Access(tuple(steps.items()), n.dtype.itemsize, float(state.kernel.params[n.arg].arg.size * n.dtype.itemsize)))
            seen = brought.setdefault(n.arg, [])
            shared.append(any(x[:len(rows)] == rows for x in seen))
            seen.append((*rows, *own_rows))
        else:
            accesses.append(dense(n))
            shared.append(False)
            if found.paths[n.arg] == () and threads > 1 and not is_computed_once(state, found, n.arg):
                size = _stored_bytes(state, lay, n.arg)
                for a in state.kernel.stages[n.arg].outs:
                    size *= state.axis_extent(a)
                turned_over += size / LINE * (1.0 if any(a == parallel for a, _ in accesses[-1].steps) else threads)
    size = _stored_bytes(state, lay, r.stage.index)
    if r.store is not None:
        if not past:
            steps = {a: abs(c) * size for a, c in r.store.coefs}
            accesses.append(Access(tuple(steps.items()), size, float(state.kernel.params[r.store_slot].arg.size * size), 2.0))
            shared.append(False)
    elif nest.outside or not is_derived(r.stage):
        layout = lay_out(state, lay, r.stage.index, tuple(nest.box), all(e == x for e, x in zip(nest.box, _full(state, r), strict=True)))
        steps = {a: n * size for a, n in enumerate(layout.strides)}
        tile = (layout.tiled, layout.tile, layout.outer * size) if layout.tiled >= 0 else None
        accesses.append(Access(tuple(steps.items()), size, float(layout.size * size), 2.0, bool(nest.outside), len(nest.outside), tile))
        shared.append(False)
    loops = [(a, e) for _, a, e in nest.outside] + nest.loops
    cycles: tuple[float, ...]
    cycles, moved = traffic(target, loops, len(nest.outside), positions, accesses, shared, kept)
    _, near, far = levels(target)
    # what a phase before has written lies in the caches of all cores
    cycles = (cycles[0], cycles[1] + turned_over * near.unforeseen * (1.0 - 1.0 / threads), *cycles[2:])
    if past:
        # past the caches, and from memory again when it is read; a line whose neighbour is stored much later is a place of its own
        lines = past / LINE
        alone = nest.lane_extent * size <= LINE and (not nest.loops or nest.loops[-1][0] != nest.lane)
        cost = 2.0 * far.streamed - near.streamed + (far.unforeseen - far.streamed) * alone
        cycles = (*cycles[:2], cycles[2] + lines * cost, cycles[3])
        moved += past
    return cycles, moved


def tiling_family(state: Scheduler) -> tuple[Any, ...]:
    """States of one family tile the same axes at the same levels and stage the same values, with whatever amounts."""
    rows = state.rows
    levels = tuple(tuple(rows[r].role for r in ids if rows[r].extent > 1) for ids in state.axis_rows)
    place = tuple(rows[p].axis if isinstance(p, int) else p for p in state.place)
    return levels, place


def _innermost(lay: Layouts) -> dict[int, int]:
    """Per staged value the dim that lies innermost in its area."""
    return {s: order[-1] for s, order in lay.orders.items() if order}


def _stored_bytes(state: Scheduler, lay: Layouts, s: int) -> int:
    """Bytes of one element of a stage's value where it is staged."""
    return lay.packed[s].dtype.itemsize if s in lay.packed else state.kernel.stages[s].dtype.itemsize


def _full(state: Scheduler, r: ResolvedStage) -> list[int]:
    return [state.kernel.axes[a].extent for a in r.stage.outs]


def _copy_pieces(state: Scheduler, r: ResolvedStage, box: list[int], lane: int) -> list[tuple[EmittedLoop, ...]]:
    """Derived loops: vectors along the innermost dim."""
    width = max(1, state.target.vector_bytes // r.lanes_bytes)
    out: list[tuple[EmittedLoop, ...]] = [(EmittedLoop(-1 - i, LOOP, e, 1),) for i, e in enumerate(box)]
    if box:
        n = min(box[lane], 4 * width)
        out[lane] = (EmittedLoop(-1 - lane, LOOP, -(-box[lane] // n), n), EmittedLoop(-100, UPCAST, n, 1))
    return out


def _box(state: Scheduler, found: Any, pieces: dict[int, list[tuple[EmittedLoop, ...]]], s: int, dim: int, path: Any) -> int:
    """Positions of a dim that the readers need under the loops around the stage."""
    axis = state.kernel.stages[s].outs[dim]
    full = state.kernel.axes[axis].extent
    depth_in = dict(path)
    need = 1
    for q in found.readers[s]:
        r = found.resolved[q]
        if r is None or q not in pieces:
            continue
        opened = frozenset(state.order[q][:depth_in[q]]) if q in depth_in else frozenset()
        for node in r.nodes:
            if node.kind != "read" or node.arg != s:
                continue
            lin = node.dims[dim]
            if lin.atoms:
                return full
            extent = 1
            for a, c in lin.coefs:
                span = 1
                for p in pieces[q][a]:
                    if p.row not in opened:
                        span *= p.extent
                extent += abs(c) * (span - 1)
            need = max(need, extent)
    return min(need, full)


class _StageCost(NamedTuple):
    compute: float           # cycles of all times the stage runs
    accumulators: float
    flops: float
    loads: float             # of one time
    fmas: float
    reads: list[Node]


def _stage_cost(state: Scheduler, lay: Layouts, nest: _Nest, inner: dict[int, int]) -> _StageCost:
    r, own, loops, lane, lane_piece, lane_extent = nest.r, nest.own, nest.loops, nest.lane, nest.lane_piece, nest.lane_extent
    width = max(1, state.target.vector_bytes // r.lanes_bytes)
    outs = len(r.stage.outs)
    prefix = [1.0]
    for _, e in loops:
        prefix.append(prefix[-1] * e)
    body = prefix[-1]
    expanded = [1.0] * len(own)            # expanded positions per axis; vectors on the lane axis
    upcast = [1.0] * len(own)
    for a, group in enumerate(own):
        for p in group:
            if p.role not in (LOOP, DOT):
                positions = -(-p.extent // width) if p.row == lane_piece else p.extent
                expanded[a] *= positions
                if p.role == UPCAST:
                    upcast[a] *= positions
    tile = 1.0
    for a in range(len(own)):
        tile *= expanded[a]

    def runs(deps: tuple[int, ...]) -> float:
        """How often a value that depends on these axes is computed."""
        k = 0
        for i, (a, _) in enumerate(loops):
            if a in deps:
                k = i + 1
        times = prefix[k]
        for a in deps:
            times *= expanded[a]
        return times

    loads = alu = fmas = 0.0
    reads: list[Node] = []
    skip = _masks(r)
    dot = rate_of(lay.dots.get(r.stage.index), state.target)
    for red in r.reductions:
        product = r.nodes[red.values[0]]
        if red.combiner == "ADD" and product.kind == "alu" and product.op == "MUL":
            skip.add(red.values[0])
        fmas += body * tile
        alu += body * tile * (dot.cost if len(red.values) == 1 else _COMBINED[len(red.values)])
    for i, n in enumerate(r.nodes):
        if n.dtype == dtypes.index or i in skip:
            continue
        if n.kind == "load" or n.kind == "read":
            count = runs(n.deps) * _shared(n, expanded, nest, width)
            known = n.gate >= 0 and _is_known(r, n.gate, nest)
            if n.gate >= 0 and not known:
                alu += count        # a mask each
            if lane in n.deps:
                vectors, shuffles = _lane_loads(n, nest, inner, known, min(width, lane_extent), expanded, state.target.has_masked_memory)
                alu += shuffles * count
                count *= vectors
            loads += count * dot.load if n.kind == "read" else count
            reads.append(n)
        elif n.kind in ("alu", "cast"):
            count = runs(n.deps)
            weight = 14.0 if n.op in _COSTLY else 8.0 if n.op in ("FDIV", "RECIPROCAL", "SQRT") else 1.5 if n.op in ("MAX", "MIN") else 1.0
            alu += weight * count
    store = prefix[sum(1 for a, _ in loops if a < outs)] if all(a < outs for a, _ in loops[:sum(1 for x, _ in loops if x < outs)]) else body
    for a in range(outs):
        store *= expanded[a]
    store *= dot.store
    is_turned = lane >= 0 and lane < outs and r.store is not None and r.store.coef(lane) != 1
    if is_turned:
        assert r.store is not None
        turned = any(c == 1 and expanded[a] >= _SQUARE for a, c in r.store.coefs)
        store *= (_LANE_TURNED if turned else _conflict(r.store.coef(lane) * r.stage.dtype.itemsize)) * min(width, lane_extent)
    accs = 1.0
    for a in range(len(own)):
        accs *= upcast[a]
    vectors = expanded[lane] if 0 <= lane < outs else 1.0
    if dot.corrects:    # a sum beside it for each vector
        alu += body * vectors * tile / max(accs, 1.0)
        accs += vectors
    spills = 0.0
    inner_reduce = bool(loops) and loops[-1][0] >= outs
    registers = accs + vectors + 1     # accumulators, a row of vectors, what is read in all lanes
    if is_turned:
        registers += vectors - 1
    if r.reductions and registers > state.target.vector_registers:
        spills = _SPILL_CYCLES * (registers - state.target.vector_registers) * body * tile / accs
    if r.reductions and not inner_reduce and any(a >= outs for a, _ in loops):
        loads += 2.0 * accs * body * sum(len(red.values) for red in r.reductions)    # accumulators in scratch
    slots = (max(loads, alu) + _CONTENTION * min(loads, alu)) / 2 + spills
    sums = math.prod(e for a, e in loops if a >= outs)
    ahead = 1.0 + _WINDOW * body / (sums * max(loads + alu, 1.0))     # sums that are under way at once
    chain = _LATENCY * body * (tile / max(accs, 1.0)) / ahead if r.reductions else 0.0
    overhead = _LOOP_CYCLES * sum(prefix[1:])
    compute = max(slots, chain) + overhead + store
    lanes = lane_extent / -(-lane_extent // width) if lane >= 0 else 1.0     # positions per vector
    times = nest.times
    return _StageCost(compute * times, accs, 2 * fmas * dot.group * lanes * times, loads, max(fmas, 1.0), reads)


def _masks(r: ResolvedStage) -> set[int]:
    """The nodes that only loads' masks are made of."""
    gates = {n.gate for n in r.nodes if n.gate >= 0}
    used: set[int] = set()
    for i in range(len(r.nodes) - 1, -1, -1):
        (gates if i in gates and i not in used else used).update(r.nodes[i].src)
    return gates - used


def _shared(n: Node, expanded: list[float], nest: _Nest, width: int) -> float:
    """Different positions of a load or read over all expanded ones: neighbouring windows read some of the same elements, once."""
    share = 1.0
    for lin in n.dims if n.linear is None else (n.linear,):
        terms = [(abs(c) * (width if a == nest.lane else 1), expanded[a]) for a, c in lin.coefs if expanded[a] > 1.0]
        if len(terms) < 2:
            continue
        terms.sort()
        step, count = terms[0]
        for c, e in terms[1:]:
            if c % step == 0 and c <= count * step:
                more = count + c // step * (e - 1.0)
                share *= more / (count * e)
                count = more
            else:
                step, count = c, e
    return share


def _is_known(r: ResolvedStage, gate: int, nest: _Nest) -> bool:
    """Whether a mask says the same of each lane wherever the loops are, but for what concerns all lanes: code holds it as constants."""
    moved = {a for a, _ in nest.loops} | {a for _, a, e in nest.outside if e > 1}
    todo, seen = [gate], False
    while todo:
        n = r.nodes[todo.pop()]
        if n.kind == "alu" and n.op == "AND":
            todo += n.src
        elif nest.lane in n.deps:
            seen = True
            if not moved.isdisjoint(n.deps):
                return False
    return seen


def _lane_loads(n: Node, nest: _Nest, inner: dict[int, int], known: bool, lanes: int, expanded: list[float],
                masks: bool) -> tuple[float, float]:
    """(loads' worth, shuffles) of one vector of a load or read, by how its lanes lie in memory. `known`: code holds its mask as a constant.
    `masks`: the target has masked loads."""
    lane = nest.lane
    apart = next(p.stride for p in nest.own[lane] if p.row == nest.lane_piece)
    across = 1.0
    if n.linear is None:
        # scratch is laid out as it is read: along the innermost dim, which another reader may have decided
        steps = [lin.coef(lane) if dim == inner.get(n.arg, dim) else _ANYWHERE for dim, lin in enumerate(n.dims) if lin.coef(lane)]
        step, turned, single = max(steps, key=abs, default=_ANYWHERE), False, _LANE_READ
        if any(c % lanes for lin in n.dims if lin.coef(lane) for a, c in lin.coefs if a != lane):
            across = 2.0
    else:
        step = n.linear.coef(lane)
        if any(lane in nest.r.nodes[x].deps for x, _ in n.linear.atoms):
            step = _ANYWHERE
        beside = [a for a, c in n.linear.coefs if c == 1 and a != lane]
        turned = any(expanded[a] >= lanes or (is_derived(nest.r.stage) and a < len(nest.box) and nest.box[a] >= lanes) for a in beside)
        single = _LANE_LOAD if n.gate < 0 else _LANE_MASKED
        if n.linear.const % lanes or any(c % lanes for a, c in n.linear.coefs if a != lane):
            across = 2.0        # not all vectors are aligned: a wide one takes two lines
    step = abs(step * apart)
    if step <= 1 or (step <= _SHORT_STEP and (n.gate < 0 or masks)):
        return across * step, (step - 1.0) * (1.0 if n.gate < 0 or known else 1.0 + 2.0 * _SPREAD)
    return (_LANE_TURNED if turned and n.gate < 0 else single) * lanes, 0.0


def _conflict(stride: int) -> float:
    """Cycles of one store of a lane: neighbours a multiple of the cache's set stride apart evict each other."""
    return 40.0 if stride % PAGE == 0 else 12.0 if stride % (PAGE // 2) == 0 else 4.0 if stride % (PAGE // 4) == 0 else _LANE_STORE
