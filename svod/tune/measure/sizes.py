"""The values of its variables at which a kernel is timed and verified.

    v0 in 1 … 512, hints ()          timed at 1, 256, 512;    with hints (64, 100): timed at 64, 100
    o0 = v0, split by 8 and by 64    verified at 1, 512 and next to the amounts: 7, 8, 9 and 63, 64, 65

A *size* is a tuple with one value per variable, in the order of `Kernel.variables`. A kernel without variables has one size: (). With
several variables, the first size has the first value of each, the second size the second value of each, and so on. That is enough to find
a fault in the handling of one variable, as it shows at any values of the others.

A candidate is compared with the heuristic's time at the same size. Its score is the geometric mean over the sizes. At no size may it take
longer than 1.2 times the heuristic's time (`svod.tune.db.winners.WORST_RATIO`).
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from svod.compile.plan.plan_parts import VariableSpec
from svod.core.cost.op_count import count_operations
from svod.core.ir.launch import evaluate_extent
from svod.core.ir.uop import UOp
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.schedule.kernel_variables import specialize

Size = tuple[int, ...]

MOST_TIMED_SIZES = 4    # most sizes that a kernel is timed at: each costs as much as a kernel of a constant shape
MOST_VERIFIED = 16      # most sizes that a candidate is verified at


def side_by_side(points: Sequence[Sequence[int]]) -> tuple[Size, ...]:
    """Combine the values of each variable into sizes, position by position; a variable with fewer values than others repeats them. Equal
    sizes are returned once. Without variables the only size is ()."""
    if not points:
        return ((),)
    count = max(map(len, points))
    return tuple(dict.fromkeys(tuple(p[i % len(p)] for p in points) for i in range(count)))


def values_of(kernel: Kernel, size: Size) -> dict[str, int]:
    """The values of a size by the names of the variables."""
    return dict(zip(kernel.variables, size, strict=True))


def describe_size(kernel: Kernel, size: Size) -> str:
    """A size as text, such as `v0=7, v1=64`."""
    return ", ".join(f"{name}={value}" for name, value in values_of(kernel, size).items())


def at_size(kernel: Kernel, size: Size) -> Kernel:
    """The kernel with its variables replaced by their values in a size. It uses the same buffers."""
    return Kernel(specialize(kernel.ast, values_of(kernel, size)))


# -- timing -------------------------------------------------------------------------------------------------------------------
def sizes_of_variables(variables: Sequence[VariableSpec]) -> tuple[Size, ...]:
    """The sizes at which a kernel or plan with these variables is timed: their hints, else the least, the middle and the largest value."""
    return side_by_side([v.points for v in variables])


def merged_sizes(kernel: Kernel, calls: Iterable[Sequence[VariableSpec]]) -> tuple[Size, ...]:
    """The sizes at which a kernel is timed: at most `MOST_TIMED_SIZES` of the sizes of its calls, from the least to the largest. Without
    calls they come from the bounds of the kernel's variables. A kernel without variables has one size, which has no values."""
    own = [int(name[1:]) for name in kernel.variables]      # a variable with only one possible value is a constant of the kernel
    sizes = sorted({s for given in calls for s in sizes_of_variables([given[i] for i in own])}, key=lambda s: (math.prod(s), s))
    if not sizes:
        return sizes_of_variables([VariableSpec(name, low, high) for name, (low, high) in kernel.variables.items()])
    if len(sizes) <= MOST_TIMED_SIZES:
        return tuple(sizes)
    return tuple(sizes[round(i * (len(sizes) - 1) / (MOST_TIMED_SIZES - 1))] for i in range(MOST_TIMED_SIZES))


def variable_names(kernel: Kernel, calls: Sequence[Sequence[VariableSpec]]) -> dict[str, str]:
    """The kernel's names of its variables (v0, v1, …) → the user's names; several joined by / where calls differ."""
    return {name: "/".join(dict.fromkeys(given[int(name[1:])].name for given in calls)) for name in kernel.variables} if calls else {}


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def work_of(kernel: Kernel, sizes: Sequence[Size]) -> tuple[float, float]:
    """Operations and bytes of one call; geometric means over the sizes of a kernel with variables."""
    if not kernel.variables:
        work = count_operations(kernel.ast)
        return float(work.flops), float(work.bytes_moved)
    counts = [count_operations(at_size(kernel, size).ast) for size in sizes]
    return geometric_mean([max(1, e.flops) for e in counts]), geometric_mean([max(1, e.bytes_moved) for e in counts])


# -- verifying ----------------------------------------------------------------------------------------------------------------
def sizes_to_verify(state: Scheduler) -> tuple[Size, ...]:
    """The least and the largest size, and for each amount that the state's chain splits a symbolic axis by, the sizes at which the axis is
    a multiple of the amount, one less and one more. If there are more than `MOST_VERIFIED` sizes, each amount keeps about equally many."""
    kernel = state.kernel
    bounds = kernel.variables
    beside: dict[str, list[list[int]]] = {name: [] for name in bounds}
    for axis in kernel.axes:
        if axis.bound is None:
            continue
        for amount in sorted(_amounts(state, axis.index)):
            for name in bounds:
                beside[name].append(_values_beside(axis.bound, amount, name, bounds))
    points = [list(dict.fromkeys((low, high, *(v for turn in zip_longest(*beside[name]) for v in turn if v is not None))))
              for name, (low, high) in bounds.items()]
    return side_by_side(points)[:MOST_VERIFIED]


def _amounts(state: Scheduler, axis: int) -> set[int]:
    """The numbers that an axis is divided by: the strides of its loops, the number of cores or of parts that it is split over, and half of
    each, because the remainder of a tile is computed in halves."""
    rows = [state.rows[r] for r in state.axis_rows[axis]]
    amounts = {r.stride for r in rows}
    if state.thread is not None and state.rows[state.thread.row].axis == axis:
        amounts.add(state.thread.cores)
    if state.split_reduce is not None and state.split_reduce.axis == axis:
        amounts.add(state.split_reduce.parts)
    return {a for amount in amounts for a in (amount, amount // 2) if a > 1}


def _values_beside(bound: UOp, amount: int, name: str, bounds: Mapping[str, tuple[int, int]]) -> list[int]:
    """Values of a variable for which an extent, `bound`, is `amount`, one less and one more, or as near as possible. Where the extent is
    always larger, the least multiple of the amount that it can exceed is used instead. Exact for extents that grow by one with the
    variable."""
    low, high = bounds[name]
    others = {n: h for n, (_, h) in bounds.items()}
    first, last = (evaluate_extent(bound, {**others, name: v}) for v in (low, high))
    if first == last:
        return []
    goal = amount * max(1, -(-(min(first, last) + 1) // amount))
    values = []
    for wanted in (goal, goal - 1, goal + 1):
        value = low + round((wanted - first) * (high - low) / (last - first))
        if low <= value <= high:
            values.append(value)
    return values
