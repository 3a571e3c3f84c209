"""Sketches of convolutions with fewer multiplications (`svod.core.kernel.algorithms.winograd`), in phases for groups.

    WINOGRAD(out, 4) FLATTEN(M) STAGE(M, root) STAGE(V, root) STAGE(U, root)      U once, at prepare; a thread transforms a tile of V
    … UPCAST(y, 4) UPCAST(x, 4) LOCAL(x, 7) LOCAL(y, 7)                           a thread computes a tile of results
    … UPCAST(M.o0, 8) … STAGE(copy of U, M.r0) STAGE(copy of V, M.r0) …           a product of two matrices for each point, as any other

M is a matrix of outputs × tiles of all images, whatever the size of an image. The last chain is that of the fastest contraction
(`contractions.py`), which `group_sketch.py` chooses.
"""
from __future__ import annotations

from math import inf

from svod.core.cost.groups.device import Device, device_of
from svod.core.cost.groups.spread import GROUP_SIZES, spread_outputs, stored_along
from svod.core.cost.sketch_facts import try_opt
from svod.core.cost.template import Apply, Do, Hole, Point, Template, fact
from svod.core.ir.dtype import dtypes
from svod.core.kernel.algorithms.winograd import elements_of_stages, tile_sizes, window_axes
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import ROOT, Scheduler


def products_of(kernel: Kernel) -> int:
    """The stage of the products of a rewritten kernel."""
    return next(s.index for s in reversed(kernel.stages) if s.has_reduce and not s.is_output)


def least_cycles(state: Scheduler) -> float:
    """A lower bound of the cycles of all sketches of WINOGRAD: those of its launches, of the products alone, and of the bytes that each
    phase has to move. Infinite if there are no such sketches."""
    name, device = state.kernel.stages[state.kernel.output].name, device_of(state.target)
    for m in tile_sizes(state.kernel, name)[:1]:
        taps, data, products, results, sums = elements_of_stages(state.kernel, name, m)
        # one of the operands may be a constant, which is transformed at prepare
        phases = ((0, min(taps, data)), (products * sums, taps + data + products), (0, products + results))
        return sum([_least_of_phase(device, multiply_adds, elements) for multiply_adds, elements in phases])
    return inf


def _least_of_phase(device: Device, multiply_adds: int, elements: int) -> float:
    """The least cycles of a phase with so many multiply-adds, in which so many elements of four bytes move from or to memory."""
    arithmetic = multiply_adds / (device.units * device.arithmetic)
    memory = elements * dtypes.float32.itemsize / (device.units * device.memory)
    return device.launch_cycles + max(arithmetic, memory) + device.unhidden_share * min(arithmetic, memory)


def _in_phases(p: Point) -> Scheduler:
    """Compute the products, and the stages that their operands copy, in phases of their own."""
    kernel, s = p.state.kernel, products_of(p.state.kernel)
    state = try_opt(p.state, "FLATTEN", kernel.stages[s].name)
    for root in (s, *[source for copy in kernel.reads[s] for source in kernel.reads[copy]]):
        state = try_opt(state, "STAGE", kernel.stages[root].name, ROOT)
    return state


def _results(p: Point) -> Scheduler | None:
    """A tile of results for each thread, and neighbouring tiles for neighbouring threads."""
    state = p.state
    for a in p[_WINDOW_AXES]:
        after = try_opt(state, "UPCAST", p.name(a), p[_TILE_SIDE])
        if after is state:
            return None
        state = after
    return spread_outputs(state, p.stage, stored_along(state, p.stage), p[_RESULT_THREADS])


_OUTPUT_NAME = fact(lambda p: p.stage.stage.name)
_TILE_SIDE = Hole("outputs", lambda p: tile_sizes(p.state.kernel, p[_OUTPUT_NAME])[:1])
_WINDOW_AXES = fact(lambda p: window_axes(p.state.kernel, p[_OUTPUT_NAME]))
_RESULT_THREADS = Hole("threads of results", lambda p: dict.fromkeys([min(n, p.state.target.group_threads) for n in GROUP_SIZES]))

WINOGRAD_PHASES = Template(
    "WINOGRAD", _OUTPUT_NAME, _TILE_SIDE, _WINDOW_AXES, Apply("WINOGRAD", _OUTPUT_NAME, _TILE_SIDE, must=True), Do(_in_phases),
    _RESULT_THREADS, Do(_results))
