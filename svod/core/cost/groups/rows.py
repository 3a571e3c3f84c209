"""Sketches for rows that the threads of a group hold in registers: reductions along the rows, and elementwise stages that use the results.

    softmax of 4096 columns      UPCAST(s1.r0, 4) GROUP(s1.r0, 256) UNROLL(s1.r0, 0) … UPCAST(o1, 4) LOCAL(o1, 256) UPCAST(o1, 0)
    of 64 columns                UPCAST(s1.r0, 4) GROUP(s1.r0, 8) UNROLL(s1.r0, 0) … UPCAST(o1, 4) LOCAL(o1, 8) UPCAST(o1, 0) LOCAL(o0, 16)

Each thread has the same elements in all stages. Without loops they are loaded once, and values that several stages compute of them are
computed once."""
from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from svod.core.cost.groups.spread import STORED
from svod.core.cost.template import Apply, Each, Hole, Point, Template, fact
from svod.core.kernel.placement import is_derived, place_stages

ROW_THREADS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SEVERAL_ROWS = 128              # threads; a smaller group computes several rows
HELD_ELEMENTS = 32              # most elements of a row in each thread, all at once
LONG_ROW_THREADS = (512, 1024)  # numbers of threads for longer rows
LOADED_ELEMENTS = 16            # elements of a longer row that each thread loads at a time


def _reduced_axes(p: Point) -> list[str] | None:
    """The longest reduce axis of each stage that reduces rows. None unless the kernel is one phase that stores a value for each element of
    the rows."""
    placement, kernel = place_stages(p.state), p.state.kernel
    inside = [s for s in kernel.stages if s.has_reduce and placement.paths[s.index]]
    roots = [s for s in placement.roots if not is_derived(kernel.stages[s])]
    if not inside or roots != [p.stage.stage.index] or p.stage.stage.has_reduce:
        return None
    return [max([kernel.axes[a] for a in s.reds], key=lambda axis: axis.extent).name for s in inside]


def _thread_counts(p: Point) -> Iterator[int]:
    """Numbers of threads for a row. Long rows get large groups, so that few rows are computed at a time, and the second cache keeps them
    from stage to stage."""
    extent, limit = p.extent(p[STORED]), p.state.target.group_threads
    yield from [n for n in ROW_THREADS if n <= min(limit, extent) and extent <= n * HELD_ELEMENTS]
    yield from [n for n in LONG_ROW_THREADS if n <= limit and extent > n * HELD_ELEMENTS]


def _vector(p: Point) -> int:
    """Elements of a vector: the largest number that gives all threads whole vectors and equally many; else the largest that divides the
    row."""
    extent, threads = p.extent(p[STORED]), p[_THREADS]
    fitting = [w for w in (p.width, p.width // 2, 1) if w and extent % w == 0 and threads * w <= extent]
    return next((w for w in fitting if extent % (threads * w) == 0), fitting[0])


def _outer_axis(p: Point) -> int:
    """The local axis along which a group has several rows, or -1."""
    return next((a for a in range(p[STORED] - 1, -1, -1) if p.extent(a) > 1), -1)


def _rows(p: Point) -> int:
    """Rows of a group: a divisor of their number, so that none is masked."""
    return gcd(p.extent(p[_OUTER]), SEVERAL_ROWS // p[_THREADS]) if p[_OUTER] >= 0 and p[_THREADS] < SEVERAL_ROWS else 1


_REDUCED, _OUTER = fact(_reduced_axes), fact(_outer_axis)
_AXIS = Hole("", lambda p: p[_REDUCED])
_THREADS = Hole("threads", _thread_counts)
_VECTOR = Hole("vector", lambda p: (_vector(p),))
# amount of UNROLL, in vectors; 0: the whole row at once
_VECTORS = fact(lambda p: 0 if p.extent(p[STORED]) <= p[_THREADS] * HELD_ELEMENTS else LOADED_ELEMENTS // p[_VECTOR])
_ROWS = Hole("rows", lambda p: (_rows(p),))

ROWS = Template(
    "ROWS", _REDUCED, STORED, _OUTER, _THREADS, _VECTOR, _VECTORS, _ROWS,
    Each(_AXIS, Apply("UPCAST", _AXIS, _VECTOR), Apply("GROUP", _AXIS, _THREADS), Apply("UNROLL", _AXIS, _VECTORS)),
    Apply("UPCAST", STORED, _VECTOR), Apply("LOCAL", STORED, _THREADS), Apply("UPCAST", STORED, _VECTORS),
    Apply("LOCAL", _OUTER, _ROWS))
