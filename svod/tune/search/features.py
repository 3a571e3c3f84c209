"""The features of a kernel's state that a learned cost model reads: a vector of the same length for every kernel and device.

The first NUM_COST_FEATURES features are predicted costs, which grow with the kernel: a model reads them relative to the same
features of the heuristic's chain. Then come numbers of loops and operations of the stage with the most work, per core or thread, and
numbers of the decisions that the state has made.
"""
from __future__ import annotations

from math import log2

from svod.compile.backend import backend_named
from svod.core.kernel.scheduler import INLINE, ROOT, Scheduler

NUM_COST_FEATURES = 6
NAMES = (
    "cycles", "scratch_bytes", "flops", "bytes_moved", "flops_per_cycle", "bytes_per_cycle", "accumulators",
    "lanes", "results", "summed_together", "iterations", "innermost", "summed", "loops", "loops_around", "times", "loads_per_operation",
    "stages", "tiles", "cores", "inlined", "phases", "staged_inside", "split_reduce", "padding", "non_temporal", "prefetches",
    "vectors_chosen", "instructions_chosen", "online", "chain")


def features(state: Scheduler) -> tuple[float, ...]:
    """The features of a state, in the order of NAMES; sizes are logarithms. Raises KernelOptError where its opts contradict each other."""
    return (*_costs(state), *_work(state), *_places(state))


def _log(size: float) -> float:
    return log2(max(size, 1.0))


def _costs(state: Scheduler) -> tuple[float, ...]:
    cost = backend_named(state.target.device).cost(state)
    cycles = max(cost.cycles, 1.0)
    return (log2(cycles), log2(1 + cost.scratch_bytes), log2(1 + cost.flops), log2(1 + cost.bytes_moved), cost.flops / cycles,
            cost.bytes_moved / cycles, cost.accumulators)


def _work(state: Scheduler) -> tuple[float, ...]:
    """Numbers of loops and operations of the stage with the most operations, and the number of stages."""
    works = backend_named(state.target.device).work(state)
    most = max(works, key=lambda w: w.at.times * w.body * w.tile)
    innermost = most.loops[-1][1] if most.loops else 1
    loads = sum(most.runs(n.deps) for _, n, is_load in most.values() if is_load)
    return (_log(min(most.lanes, most.stage.num_lanes)), _log(most.rows), _log(most.tile / most.rows), _log(most.body), _log(innermost),
            _log(most.summed()), len(most.loops), most.outside, _log(most.at.times), loads / max(most.body * most.tile, 1.0), len(works))


def _places(state: Scheduler) -> tuple[float, ...]:
    """Numbers of loop splits and cores; of stages inlined, stored in a phase of their own and stored inside another stage's loop; and of
    the other opts, such as padding, prefetches and chosen vector axes."""
    places = [p for p, s in zip(state.place, state.kernel.stages, strict=True) if not s.is_output]
    padding = sum(log2(pad / a.extent) for pad, a in zip(state.pads, state.kernel.axes, strict=True) if pad)
    return (sum(len(ids) - 1 for ids in state.axis_rows), 0 if state.thread is None else state.thread.cores,
            places.count(INLINE), places.count(ROOT), sum(isinstance(p, int) for p in places),
            0 if state.split_reduce is None else state.split_reduce.parts, padding, state.stream, len(state.prefetch),
            sum(v >= 0 for v in state.vector_rows), sum(d is not None for d in state.dots), len(state.rewrites), len(state.applied_opts))
