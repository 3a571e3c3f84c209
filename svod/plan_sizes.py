"""At which values of its variables a plan is timed: at all that its kernels are, side by side.

    kernels over n (1, 256, 512) and over n, m (1, 256, 512; 1, 8)        n=1 m=1, n=256 m=8, n=512 m=1

A kernel's seconds are the geometric mean over the values that it runs with.
"""
from __future__ import annotations

from collections.abc import Iterable

from svod.compile.plan import ExecutionPlan
from svod.compile.plan_parts import VariableSpec
from svod.tune.sizes import geometric_mean, side_by_side

Values = dict[str, int]


def plan_sizes(calls: Iterable[tuple[VariableSpec, ...]]) -> list[Values]:
    """The values to time a plan of these calls at, from the least to the largest; one empty set of values for a plan without variables."""
    points: dict[str, set[int]] = {}
    for variables in calls:
        for v in variables:
            points.setdefault(v.name, set()).update(v.points)
    if not points:
        return [{}]
    return [dict(zip(points, size, strict=True)) for size in side_by_side([sorted(p) for p in points.values()])]


def profile_at_sizes(plan: ExecutionPlan, runs: int) -> list[float]:
    """Seconds of each kernel (`ExecutionPlan.profile`), whatever its variables are set to; 0 for one that runs with none of the values."""
    sizes = plan_sizes(k.variables for k in plan.kernels)
    found: list[list[float]] = [[] for _ in plan.kernels]
    for values in sizes:
        with plan.at(values):
            for column, seconds in zip(found, plan.profile(runs), strict=True):
                if seconds > 0:
                    column.append(seconds)
    return [geometric_mean(column) if column else 0.0 for column in found]
