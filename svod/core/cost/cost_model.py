"""What a state costs, read from its loop nest without lowering it: the search ranks its proposals by this.

Per stage: the vector instructions of all its runs and the registers they need (`compute_cost`), and what its accesses cost beyond the
first cache (`data_cost`). A stage takes the slowest of these and a share of the others; stages are added up. The prediction ranks states;
it does not promise a time.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from svod.core.cost.compute_cost import compute_cost
from svod.core.cost.data_cost import DataCost
from svod.core.cost.op_count import count_operations
from svod.core.kernel.loop_nest import StageNest, loop_nest, stored_bytes
from svod.core.kernel.non_temporal import has_non_temporal_stores
from svod.core.kernel.placement import is_computed_once
from svod.core.kernel.scheduler import Derived, Scheduler, cores_of

_LAUNCH_CYCLES = 2000.0   # cycles for a phase that wakes other cores
_OVERLAP = 0.4            # the share that is not hidden of what does not bound a stage
_TRANSLATED = 0.3         # the share of translations that is never hidden: what waits for them are the oldest instructions


@dataclass(frozen=True)
class Cost:
    """`cycles` of one core for the whole kernel, and what bounds it."""

    cycles: float
    accumulators: int         # vector registers that live through the reduce loops, at most over the stages
    loads_per_fma: float      # of the stage with most multiply-adds
    scratch_bytes: int
    flops: float
    bytes_moved: float        # from memory


def cost_of(state: Scheduler) -> Cost:
    """The predicted cost of a state, remembered on it. Raises KernelOptError when its placements contradict each other."""
    return _COST.of(state)


def _cost_of(state: Scheduler) -> Cost:
    nest, kernel = loop_nest(state), state.kernel
    total = accumulators = flops = moved = 0.0
    scratch = 0
    most_multiply_adds, loads_per_fma = 0.0, 0.0
    threads = cores_of(state)
    data = DataCost(state, nest, kept=float(count_operations(kernel.ast).bytes_moved))
    for s, stage in nest.stages.items():
        is_phase = nest.placement.paths[s] == ()
        if not is_phase:
            scratch += stored_bytes(state, nest.layouts, s) * prod(stage.region)
        compute = compute_cost(state, nest, s)
        streamed = stage.r.store is not None and state.stream and has_non_temporal_stores(state)
        non_temporal = float(kernel.params[stage.r.store_slot].arg.size * stored_bytes(state, nest.layouts, s)) if streamed else 0.0
        if not kernel.written:      # else what goes past the caches is read again
            data.kept -= non_temporal       # the output stage comes first: nothing reads it
        traffic = data.of_stage(s, compute.reads, non_temporal)
        slowest = max(compute.cycles, *traffic.cycles)
        cycles = slowest + (_OVERLAP * (compute.cycles + sum(traffic.cycles) - slowest) + _TRANSLATED * traffic.translated)
        if not is_computed_once(state, nest.placement, s):
            total += cycles / _speedup(state, stage, is_phase, threads) + (_LAUNCH_CYCLES if is_phase and threads > 1 else 0.0)
        accumulators = max(accumulators, compute.accumulators)
        flops += compute.flops
        moved += traffic.moved
        if compute.multiply_adds > most_multiply_adds:
            most_multiply_adds, loads_per_fma = compute.multiply_adds, compute.loads / compute.multiply_adds
    return Cost(total, int(accumulators), loads_per_fma, scratch, flops, moved)


_COST = Derived(_cost_of)


def _speedup(state: Scheduler, stage: StageNest, is_phase: bool, threads: int) -> float:
    """Speed-up of a stage by cores: each takes whole iterations of the parallel loop."""
    if threads < 2:
        return 1.0
    shared = 0
    if state.thread is not None:
        row = state.thread.row
        shared = next((loop.iterations for loop in stage.around if loop.row == row), 0)
        if not shared and stage.r.stage.index == state.kernel.output:
            shared = next((p.extent for group in stage.axes for p in group if p.row == row), 1)
    if not shared:
        shared = threads
        if is_phase and not stage.r.stage.is_output:
            shared = 1
            for a, loop in stage.loops:
                shared *= loop.extent if a < len(stage.region) else 1
    return shared / -(-shared // threads)


def tiling_family(state: Scheduler) -> tuple[Any, ...]:
    """A key that states share when they tile the same axes at the same levels and stage the same values, whatever the amounts."""
    rows = state.rows
    levels = tuple(tuple(rows[r].role for r in ids if rows[r].extent > 1) for ids in state.axis_rows)
    place = tuple(rows[p].axis if isinstance(p, int) else p for p in state.place)
    return levels, place
