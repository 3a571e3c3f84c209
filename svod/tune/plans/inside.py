"""Times of kernels inside two plans of the same calls, whose code differs.

Each plan is run as a whole, which leaves the caches as in use, and then kernel by kernel in its order, so that each kernel finds the caches
as the one before left them. The two take turns in an order that is drawn for each pass: neither always runs on what the other leaves.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.unbound_plan import UnboundPlan

LEAST_PASSES, MOST_PASSES = 7, 25       # seven are enough for a confidence interval


def passes_inside(plans: tuple[ExecutionPlan, ExecutionPlan], unbound: UnboundPlan, left: Callable[[], float],
                  rng: random.Random) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    """Yield for each pass, and each of the two plans of `unbound`, the seconds of all calls of a kernel together, by its key. Ends when
    `left` returns no more seconds, after LEAST_PASSES passes at least."""
    for number in range(MOST_PASSES):
        if number >= LEAST_PASSES and left() <= 0:
            return
        spent = dict[str, float](), dict[str, float]()
        for i in rng.sample((0, 1), 2):
            plans[i].execute()
            for at, seconds in zip(plans[i].running, plans[i].profile(1), strict=True):
                kernel = unbound.calls[at].kernel
                spent[i][kernel] = spent[i].get(kernel, 0.0) + seconds
        yield spent
