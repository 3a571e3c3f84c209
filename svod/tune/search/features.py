"""What a learned cost model reads from a state: a vector of numbers, the same length for every kernel.

The first COSTS numbers are the analytic model's that depend on the size of a kernel; a model reads them relative to those of the
heuristic's chain. The others are of the loops: how much lies side by side in registers, how loops are tiled and shared, where stages live.
"""
from __future__ import annotations

from collections.abc import Iterable
from math import log2, prod

from svod.compile.backend import backend_named
from svod.core.kernel.scheduler import DOT, INLINE, LOOP, ROOT, UNROLL, UPCAST, Scheduler

COSTS = 6
NAMES = (
    "cycles", "scratch_bytes", "flops", "bytes_moved", "flops_per_cycle", "bytes_per_cycle", "accumulators", "loads_per_fma",
    "upcast", "upcast_most", "upcast_rows", "unroll", "unroll_rows", "partial_sums", "dot_rows", "loops", "tiles",
    "loops_of_output", "innermost", "innermost_reduce", "cores", "shared_iterations", "shared_depth",
    "inlined", "phases", "staged_inside", "split_reduce", "padding", "non_temporal", "prefetches", "vectors_chosen", "instructions_chosen",
    "online", "chain")


def features(state: Scheduler) -> tuple[float, ...]:
    """The features of a state, in the order of NAMES; sizes are logarithms. Raises KernelOptError where its opts do not go together."""
    return (*_costs(state), *_rows(state), *_order(state), *_stages(state))


def _log(values: Iterable[float]) -> float:
    return log2(prod(values))


def _costs(state: Scheduler) -> tuple[float, ...]:
    cost = backend_named(state.target.device).cost(state)
    cycles = max(cost.cycles, 1.0)
    return (log2(cycles), log2(1 + cost.scratch_bytes), log2(1 + cost.flops), log2(1 + cost.bytes_moved), cost.flops / cycles,
            cost.bytes_moved / cycles, cost.accumulators, cost.loads_per_fma)


def _rows(state: Scheduler) -> tuple[float, ...]:
    """How the axes are split."""
    live = [(r.extent, r.role, state.kernel.axes[r.axis].kind) for r in state.rows if r.extent > 1]
    upcast = [n for n, role, kind in live if role == UPCAST and kind == "o"]
    unroll = [n for n, role, _ in live if role == UNROLL]
    partial_sums = [n for n, role, kind in live if role == UPCAST and kind == "r"]
    return (_log(upcast), max(upcast, default=0), len(upcast), _log(unroll), len(unroll), _log(partial_sums),
            sum(role == DOT for _, role, _ in live), sum(role == LOOP for _, role, _ in live), sum(len(ids) - 1 for ids in state.axis_rows))


def _order(state: Scheduler) -> tuple[float, ...]:
    """The loops of the output, the innermost loop of the reductions, and the loop that the cores share."""
    rows, loops = state.rows, state.order[state.kernel.output]
    innermost = [rows[ids[-1]].extent for s, ids in zip(state.kernel.stages, state.order, strict=True) if s.has_reduce and ids]
    shared = (0, 0.0, -1) if state.thread is None else (
        state.thread.cores, log2(rows[state.thread.row].extent), loops.index(state.thread.row) if state.thread.row in loops else -1)
    return len(loops), log2(rows[loops[-1]].extent) if loops else 0.0, log2(max(innermost, default=1)), *shared


def _stages(state: Scheduler) -> tuple[float, ...]:
    """Where stages live, and the hints."""
    places = [p for p, s in zip(state.place, state.kernel.stages, strict=True) if not s.is_output]
    padding = sum(log2(pad / a.extent) for pad, a in zip(state.pads, state.kernel.axes, strict=True) if pad)
    return (places.count(INLINE), places.count(ROOT), sum(isinstance(p, int) for p in places),
            0 if state.split_reduce is None else state.split_reduce.parts, padding, state.stream, len(state.prefetch),
            sum(v >= 0 for v in state.vector_rows), sum(d is not None for d in state.dots), len(state.online), len(state.applied_opts))
