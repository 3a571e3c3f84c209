"""The values of its variables at which a plan is timed: the values that its kernels are timed at, combined position by position.

    kernels over n (1, 256, 512) and over n, m (1, 256, 512; 1, 8)        n=1 m=1, n=256 m=8, n=512 m=1
"""
from __future__ import annotations

from collections.abc import Iterable

from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.plan_parts import VariableSpec
from svod.tune.measure.sizes import geometric_mean, side_by_side

Values = dict[str, int]


def plan_sizes(calls: Iterable[tuple[VariableSpec, ...]]) -> list[Values]:
    """The values of its variables to time a plan at. `calls`: the variables of each kernel call; every call is within its bounds at one or
    more of the returned sets of values. A plan without variables has one empty set."""
    distinct = list(dict.fromkeys(calls))
    points: dict[str, set[int]] = {}
    for variables in distinct:
        for v in variables:
            points.setdefault(v.name, set()).update(v.points)
    sizes = [dict(zip(points, size, strict=True)) for size in side_by_side([sorted(p) for p in points.values()])]
    for variables in distinct:
        if not any(all(low <= size[v.name] <= high for v in variables for low, high in [v.bounds]) for size in sizes):
            sizes.append({**sizes[0], **{v.name: v.points[-1] for v in variables}})
    return sizes


def profile_at_sizes(plan: ExecutionPlan, runs: int) -> list[float]:
    """Seconds of each kernel of `plan.every`: geometric means over the values that it runs with. The plan's variables keep their values."""
    columns: list[list[float]] = [[] for _ in plan.every]
    for values in plan_sizes(k.variables for k in plan.every):
        with plan.at(values):
            for number, seconds in zip(plan.running, plan.profile(runs), strict=True):
                columns[number].append(seconds)
    return [geometric_mean(column) for column in columns]
