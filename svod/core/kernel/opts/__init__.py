"""The opts. Each is a pure function (state, axis, arg) → state, which raises KernelOptError with the reason if it does not apply.

The docstrings show the loop nest before and after. Amounts are positions of the axis; 0 means the whole axis.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svod.core.kernel.opts.instructions import hold, tc
from svod.core.kernel.opts.loops import lanes, padto, reorder, swap, thread, tile, unroll, upcast
from svod.core.kernel.opts.rewrites import flatten, online, round_factors, winograd
from svod.core.kernel.opts.stages import inline, prefetch, stage, stream
from svod.core.kernel.opts.threads import group, grouptop, local, nolocals, pipeline, splitk
from svod.core.kernel.scheduler import Scheduler

Rule = Callable[[Scheduler, str, Any], Scheduler]

#: The opts by which a kernel computes its results otherwise, with other roundings.
ALGORITHMS = frozenset({"WINOGRAD", "ROUND"})
OPTS: dict[str, Rule] = {
    "UPCAST": upcast, "UNROLL": unroll, "LANES": lanes, "THREAD": thread, "TILE": tile, "ORDER": reorder, "SWAP": swap,
    "STAGE": stage, "INLINE": inline, "PADTO": padto, "STREAM": stream, "PREFETCH": prefetch, "TC": tc, "HOLD": hold, "ONLINE": online,
    "FLATTEN": flatten, "WINOGRAD": winograd, "ROUND": round_factors,
    "LOCAL": local, "GROUP": group, "GROUPTOP": grouptop, "NOLOCALS": nolocals, "SPLITK": splitk, "PIPELINE": pipeline,
}
