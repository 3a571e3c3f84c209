"""What a state costs, read from its tables without lowering it: the search ranks its proposals by this.

Per stage: how often its body runs, the vector instructions of one run (values that an inner loop does not change are counted at
the loop they stand in), the registers it needs, and the bytes that cross each cache level when the innermost loops whose data fit keep
it. The time is the slowest of these, stages added up. It ranks; it does not promise.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from svod.core.dots import rate_of, stored_bytes
from svod.core.dtype import DType, dtypes
from svod.core.kernel import Linear, ResolvedStage
from svod.core.nest import Piece, Plan, fit, is_derived, lane_row, plan
from svod.core.scheduler import DOT, LOOP, ROOT, UPCAST, Scheduler
from svod.core.uop import TRANSCENDENTAL

_COSTLY = frozenset(op.value for op in TRANSCENDENTAL)
_LATENCY = 4.0            # cycles of a multiply-add or add
_LOOP_CYCLES = 1.5        # of one iteration's bookkeeping
_LINE = 64
_BYTES_PER_CYCLE = (64.0, 24.0, 10.0)   # into L1 from L2, from L3, from memory; one core
_LANE_LOAD = 1.5          # loads' worth of one lane that is loaded by itself
_LANE_READ = 8.0          # the same from a staged area, whose rows are mostly a power of two apart and share cache sets
_FAR_PASSES = 12.0        # passes' worth of a staged area that does not stay in the second cache
_SET_STRIDE = 4096        # bytes apart, two addresses share a set of the first cache, and every fourth of the second
_SET_ROWS = 8             # of a set's ways that one access may fill


class Machine(Protocol):
    """The measured limits that scale predictions (svod.bench.ceilings.Ceilings)."""

    def flops_per_second(self, dtype: DType, threads: int | None = None) -> float: ...


@dataclass(frozen=True)
class Features:
    """`cycles` of one core for the whole kernel, and what bounds it."""

    cycles: float
    accumulators: int         # vector registers that live through the reduce loops, at most over the stages
    loads_per_fma: float      # of the stage with most multiply-adds
    scratch_bytes: int
    flops: float
    bytes_moved: float        # from memory

    def predicted_seconds(self, ceilings: Machine | None = None, lanes: int = 16) -> float:
        """Predicted time; without ceilings at 4 GHz."""
        clock = ceilings.flops_per_second(dtypes.float32, 1) / (4 * lanes) if ceilings is not None else 4e9
        return self.cycles / clock


def features(state: Scheduler) -> Features:
    """Analyse a state. Raises KernelOptError when its placements do not go together."""
    found = plan(state)
    kernel = state.kernel
    boxes: dict[int, list[int]] = {}
    pieces: dict[int, list[tuple[Piece, ...]]] = {}
    total = accumulators = 0.0
    scratch = 0
    flops = moved = 0.0
    best_fmas, ratio = 0.0, 0.0
    threads = state.thread[1] if state.thread else state.split_reduce[1] if state.split_reduce else 1
    inner = _innermost_dims(state, found)
    for s in range(len(kernel.stages) - 1, -1, -1):
        r, path = found.resolved[s], found.paths[s]
        if r is None or path is None:
            continue
        stage = r.stage
        if path == ():
            box = [state.axis_extent(a) for a in stage.outs]
            times = 1.0
        else:
            box = [_box(state, found, pieces, boxes, s, dim, path) for dim in range(len(stage.outs))]
            times = 1.0
            for t, depth in path:
                for row in state.order[t][:depth]:
                    times *= next((p.extent for group in pieces[t] for p in group if p.row == row), 1)
            size = stored_bytes(state, s)
            for e in box:
                size *= e
            scratch += size
            if size > state.target.l2 // 2:     # written and read again from far away, by a few readers
                total += _FAR_PASSES * size * times / (_BYTES_PER_CYCLE[1] * max(1, threads))
        boxes[s] = box
        derived = is_derived(stage)
        if derived:
            lane = inner.get(s, len(box) - 1)
            own = _copy_pieces(state, r, box, lane)
            order = [p.row for group in own for p in group if p.role == LOOP]
            lane_extent = own[lane][-1].extent if lane >= 0 and len(own[lane]) > 1 else 1
            lane_piece = own[lane][-1].row if lane >= 0 else -1
        else:
            extents = box + [state.axis_extent(a) for a in stage.reds]
            own = [fit(state, state.axis_rows[a], e) for a, e in zip(r.axes, extents, strict=True)]
            order = list(state.order[s])
            lane_piece = lane_row(state, r)
            lane = r.axes.index(state.rows[lane_piece].axis) if lane_piece >= 0 else -1
            lane_extent = next((p.extent for p in own[lane] if p.row == lane_piece), 1) if lane >= 0 else 1
        pieces[s] = own
        cycles, accs, stage_flops, stage_moved, loads, fmas = _stage_cost(state, r, own, order, lane, lane_piece, lane_extent, times, inner)
        cores = min(threads, max(1, _iterations(own, order))) if not (path == () and _once(state, found.resolved, s)) else 1e9
        total += cycles / cores + (2000.0 if path == () and threads > 1 else 0.0)
        accumulators = max(accumulators, accs)
        flops += stage_flops
        moved += stage_moved
        if fmas > best_fmas:
            best_fmas, ratio = fmas, loads / fmas
    return Features(total, int(accumulators), ratio, scratch, flops, moved)


def family(state: Scheduler) -> tuple[Any, ...]:
    """States of one family tile the same axes at the same levels and stage the same values, with whatever amounts."""
    rows = state.rows
    levels = tuple(tuple(rows[r].role for r in ids if rows[r].extent > 1) for ids in state.axis_rows)
    place = tuple(rows[p].axis if isinstance(p, int) else p for p in state.place)
    return levels, place


def _once(state: Scheduler, resolved: tuple[ResolvedStage | None, ...], s: int) -> bool:
    """True for a root stage that reads only constants: it is computed at prepare."""
    r = resolved[s]
    if r is None or r.stage.is_output or state.place[s] != ROOT:
        return False
    loads = [n for n in r.nodes if n.kind == "load"]
    return bool(loads) and not r.reads and all(state.kernel.params[n.arg].arg.constant for n in loads)


def _innermost_dims(state: Scheduler, found: Plan) -> dict[int, int]:
    """Per staged value the dim that lies innermost in its area: the last one that a reader's vectors run along."""
    inner: dict[int, int] = {}
    for r in reversed(found.resolved):      # readers before what they read
        if r is None:
            continue
        if is_derived(r.stage):
            lane = inner.get(r.stage.index, len(r.stage.outs) - 1)
        else:
            row = lane_row(state, r)
            lane = r.axes.index(state.rows[row].axis) if row >= 0 else -1
        for node in r.nodes:
            if node.kind == "read":
                for dim, lin in enumerate(node.dims):
                    if lin.coef(lane):
                        inner[node.arg] = max(dim, inner.get(node.arg, 0))
    return inner


def _iterations(own: list[tuple[Piece, ...]], order: list[int]) -> int:
    n = 1
    for group in own:
        for p in group:
            if p.role == LOOP:
                n *= p.extent
    return n


def _copy_pieces(state: Scheduler, r: ResolvedStage, box: list[int], lane: int) -> list[tuple[Piece, ...]]:
    """Derived loops: vectors along the innermost dim."""
    width = max(1, state.target.vector_bytes // r.lanes_bytes)
    out: list[tuple[Piece, ...]] = [(Piece(-1 - i, LOOP, e, 1),) for i, e in enumerate(box)]
    if box:
        n = min(box[lane], 4 * width)
        out[lane] = (Piece(-1 - lane, LOOP, -(-box[lane] // n), n), Piece(-100, UPCAST, n, 1))
    return out


def _box(state: Scheduler, found: Any, pieces: dict[int, list[tuple[Piece, ...]]], boxes: dict[int, list[int]], s: int, dim: int,
         path: Any) -> int:
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


def _stage_cost(state: Scheduler, r: ResolvedStage, own: list[tuple[Piece, ...]], order: list[int], lane: int, lane_piece: int,
                lane_extent: int, times: float, inner: dict[int, int]) -> tuple[float, float, float, float, float, float]:
    width = max(1, state.target.vector_bytes // r.lanes_bytes)
    outs = len(r.stage.outs)
    loops: list[tuple[int, int]] = []      # (local axis, extent), outermost first
    by_row = {p.row: (a, p.extent) for a, group in enumerate(own) for p in group if p.role == LOOP}
    for row in order:
        if row in by_row and by_row[row][1] > 1:
            loops.append(by_row[row])
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
    accesses: list[tuple[tuple[int, ...], Linear | None, int, int]] = []
    skip = set()
    dot = rate_of(state, r.stage.index)
    for red in r.reductions:
        product = r.nodes[red.values[0]]
        if red.combiner == "ADD" and product.kind == "alu" and product.op == "MUL":
            skip.add(red.values[0])
        fmas += body * tile
        alu += body * tile * (dot.cost if len(red.values) == 1 else 6)
    for i, n in enumerate(r.nodes):
        if n.dtype == dtypes.index or i in skip:
            continue
        if n.kind == "load" or n.kind == "read":
            count = runs(n.deps)
            if lane in n.deps:
                if n.linear is not None:
                    unit = n.linear.coef(lane) == 1
                else:   # scratch is laid out as it is read: along the innermost dim, which another reader may have decided
                    unit = all(not lin.coef(lane) or dim == inner.get(n.arg, dim) for dim, lin in enumerate(n.dims))
                if not unit or (n.linear is not None and any(lane in r.nodes[x].deps for x, _ in n.linear.atoms)):
                    count *= (_LANE_LOAD if n.kind == "load" else _LANE_READ) * min(width, lane_extent)
            if n.gate >= 0:
                alu += 3 * count
            if n.linear is not None and any(expanded[a] > _SET_ROWS and n.linear.coef(a) * n.dtype.itemsize % _SET_STRIDE == 0 and a != lane
                                            for a in n.deps):
                count *= 2.0    # rows side by side that share the sets of the first cache push each other out
            loads += count * dot.load if n.kind == "read" else count
            size = state.kernel.params[n.arg].arg.size if n.kind == "load" else 1 << 62
            accesses.append((n.deps, n.linear, n.dtype.itemsize if n.kind == "load" else stored_bytes(state, n.arg), size))
        elif n.kind in ("alu", "cast"):
            count = runs(n.deps)
            weight = 14.0 if n.op in _COSTLY else 8.0 if n.op in ("FDIV", "RECIPROCAL", "SQRT") else 1.5 if n.op in ("MAX", "MIN") else 1.0
            alu += weight * count
    store = prefix[sum(1 for a, _ in loops if a < outs)] if all(a < outs for a, _ in loops[:sum(1 for x, _ in loops if x < outs)]) else body
    for a in range(outs):
        store *= expanded[a]
    store *= dot.store
    if lane >= 0 and lane < outs and r.store is not None and r.store.coef(lane) != 1:
        store *= _conflict(r.store.coef(lane) * r.stage.dtype.itemsize) * min(width, lane_extent)   # lane by lane
    accs = 1.0
    for a in range(len(own)):
        accs *= upcast[a]
    if dot.corrects:    # a sum beside it for each vector
        vectors = expanded[lane] if lane >= 0 else 1.0
        alu += body * vectors * tile / max(accs, 1.0)
        accs += vectors
    spills = 0.0
    inner_reduce = bool(loops) and loops[-1][0] >= outs
    if r.reductions and accs + 2 > state.target.vector_registers:
        spills = 2.0 * (accs + 2 - state.target.vector_registers) * body
    if r.reductions and not inner_reduce and any(a >= outs for a, _ in loops):
        spills += 2.0 * accs * body    # accumulators in scratch
    slots = max((loads + spills) / 2, alu / 2)
    chain = _LATENCY * body * (tile / max(accs, 1.0)) if r.reductions else 0.0
    overhead = _LOOP_CYCLES * sum(prefix[1:])
    compute = max(slots, chain) + overhead + store
    traffic, moved = _traffic(state, loops, own, accesses, prefix)
    cycles = max(compute, *traffic) + 0.25 * sum(traffic)
    lanes = lane_extent / -(-lane_extent // width) if lane >= 0 else 1.0     # positions per vector
    return cycles * times, accs, 2 * fmas * dot.group * lanes * times, moved * times, loads, max(fmas, 1.0)


def _conflict(stride: int) -> float:
    """Cycles of one store of a lane: neighbours a multiple of the cache's set stride apart evict each other."""
    return 40.0 if stride % 4096 == 0 else 12.0 if stride % 2048 == 0 else 4.0 if stride % 1024 == 0 else 1.0


def _traffic(state: Scheduler, loops: list[tuple[int, int]], own: list[tuple[Piece, ...]],
             accesses: list[tuple[tuple[int, ...], Linear | None, int, int]], prefix: list[float]) -> tuple[list[float], float]:
    """Cycles to bring data into L1 from L2, L3 and memory, and the bytes from memory."""
    flat = [1.0] * len(own)
    for a, group in enumerate(own):
        for p in group:
            if p.role != LOOP:
                flat[a] *= p.extent
    inside = list(flat)
    # footprints with the loops from number k on running; and the room they take in a cache whose sets they do not use evenly
    footprints: list[list[float]] = []
    rooms: list[float] = []
    for k in range(len(loops), -1, -1):
        if k < len(loops):
            a, e = loops[k]
            inside[a] *= e
        row = []
        room = 0.0
        for deps, linear, itemsize, size in accesses:
            n = float(itemsize)
            run = 1.0
            for a in deps:
                n *= inside[a]
                if linear is not None and linear.coef(a) == 1:
                    run = inside[a]
            if linear is not None and run * itemsize < _LINE:
                n *= _LINE / (run * itemsize)     # whole lines for a few elements
            row.append(min(n, float(size) * itemsize))
            spread = 1.0
            if linear is not None:
                apart = min((abs(linear.coef(a)) * itemsize for a in deps if inside[a] > 1 and linear.coef(a) != 1), default=0)
                if apart and apart % (_SET_STRIDE // 2) == 0:
                    spread = min(16.0, max(1.0, apart / (max(run, 1.0) * itemsize)))
            room += row[-1] * spread
        footprints.append(row)
        rooms.append(room)
    footprints.reverse()    # footprints[k]: inside the first k loops
    rooms.reverse()
    out = []
    moved = 0.0
    target = state.target
    for level, cache in enumerate((target.l1, target.l2, max(target.l2, target.l3))):     # not every machine has a third level
        k = 0
        while k < len(loops) and rooms[k] > cache * 0.8:
            k += 1
        n = sum(footprints[k]) * prefix[k]
        compulsory = sum(footprints[0])
        n = max(n, compulsory if compulsory > cache * 0.8 else 0.0) if k or compulsory > cache * 0.8 else 0.0
        out.append(n / _BYTES_PER_CYCLE[level])
        moved = n
    return out, moved
