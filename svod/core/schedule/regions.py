"""The elements of its buffers that a kernel accesses.

`narrow_params`: each PARAM is shrunk to the smallest interval of its buffer that the kernel accesses, so that kernels that do the same to
different parts of a buffer become one kernel, called with different offsets.

    STORE(p0[i + 24], LOAD(p1[i + 8]); i:8), both of 100 elements   →   STORE(p0[i], LOAD(p1[i]); i:8), both of 8; offsets 24 and 8

`Region`: the elements as runs of equal length that repeat at equal distances, an upper bound. A column of a matrix and the next one are two
regions whose intervals overlap and that have no element in common.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from svod.core.ir import symbolic as sy
from svod.core.ir.uop import Ops, UOp
from svod.core.ir.variable import is_symbolic


def begin_at_zero(nodes: Sequence[UOp]) -> tuple[tuple[UOp, ...], dict[UOp, int]]:
    """Shift the SHRINK of every BUFFER that is used only through one SHRINK to the beginning of the buffer: SHRINK(b, 8…12) → SHRINK(b,
    0…4). Returns the nodes, and BUFFER → elements of the shift. Kernels that differ only in these shifts then share one AST."""
    readers: dict[UOp, list[UOp]] = {}
    buffers: dict[UOp, None] = {}
    for node in nodes:
        for u in node.toposort(gate=lambda n: n.op is not Ops.BUFFER):
            if u.op is Ops.BUFFER:
                buffers[u] = None
            else:
                for s in u.src:
                    users = readers.setdefault(s, [])
                    if u not in users:
                        users.append(u)
    moved: dict[UOp, UOp] = {}
    first: dict[UOp, int] = {}
    for b in buffers:
        node, strides = b, [1]
        while len(above := readers.get(node, [])) == 1 and node not in nodes:
            if above[0].op is Ops.RESHAPE and node is b:
                shape = above[0].arg
                strides = [math.prod(shape[a + 1:]) for a in range(len(shape))]
            elif above[0].op is Ops.PERMUTE:
                strides = [strides[a] for a in above[0].arg]
            else:
                break
            node = above[0]
        if len(above) == 1 and above[0].op is Ops.SHRINK and node not in nodes:
            begin = 0 if is_symbolic([low for low, _ in above[0].arg]) else sum(
                k * low for k, (low, _) in zip(strides, above[0].arg, strict=True))
            if begin:
                first[b] = begin
                moved[above[0]] = above[0].replace(src=(node,), arg=tuple((0, high - low) for low, high in above[0].arg))
    return tuple(n.substitute(moved) for n in nodes) if moved else tuple(nodes), first


class Region(NamedTuple):
    """Runs of `run` elements (or bytes) from `start` on; each step (stride, times) repeats all before it, smaller strides first."""

    start: int
    run: int
    steps: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """The first position after the last run."""
        return self.start + self.span()

    @property
    def size(self) -> int:
        """The largest number of elements (or bytes) in the region."""
        return self.run * math.prod(times for _, times in self.steps)

    def span(self, period: int | None = None) -> int:
        """The number of positions from the first to the end. With `period`: only of the part that repeats with this period, i.e. of the
        steps with smaller strides."""
        return self.run + sum(stride * (times - 1) for stride, times in self.steps if period is None or stride < period)

    def has_period(self, period: int) -> bool:
        """Whether the region looks the same in each interval of `period` positions: `period` divides every larger stride."""
        return all(stride < period or stride % period == 0 for stride, _ in self.steps)

    def covers(self, other: Region) -> bool:
        """Whether this region is known to contain every element of the other."""
        return self == other or (not self.steps and self.start <= other.start and other.end <= self.end)

    def moved(self, offset: int, scale: int = 1) -> Region:
        """The region shifted by `offset`, then counted in units that are `scale` times smaller."""
        return Region((self.start + offset) * scale, self.run * scale, tuple((stride * scale, times) for stride, times in self.steps))


def are_disjoint(a: Region, b: Region) -> bool:
    """Whether two regions are known to share no element: their intervals do not overlap, or their parts within a common period do not."""
    if a.end <= b.start or b.end <= a.start:
        return True
    for period in {stride for stride, _ in (*a.steps, *b.steps)}:
        if a.has_period(period) and b.has_period(period):
            gap = (b.start - a.start) % period
            if gap >= a.span(period) and period - gap >= b.span(period):
                return True
    return False


def find_overlap(regions: Sequence[Region]) -> tuple[int, int] | None:
    """The indices of two regions that may share an element; None if no two do.

    Groups of regions are split by intervals, and by intervals within each period, until no group splits further. Regions of different
    groups are disjoint, so only pairs within a group are compared."""
    periods: list[int | None] = [None, *sorted({stride for r in regions for stride, _ in r.steps}, reverse=True)]
    groups = [list(range(len(regions)))]
    while True:
        before = len(groups)
        for period in periods:
            groups = [part for g in groups for part in _apart(regions, g, period)]
        if len(groups) == before:
            break
    return next(((i, j) for g in groups for at, i in enumerate(g) for j in g[at + 1:] if not are_disjoint(regions[i], regions[j])), None)


def _apart(regions: Sequence[Region], group: list[int], period: int | None) -> list[list[int]]:
    """Split a group into groups whose intervals do not overlap: on the number line, or modulo `period`."""
    if len(group) < 2 or (period is not None and not all(regions[i].has_period(period) for i in group)):
        return [group]
    begin = {i: regions[i].start if period is None else regions[i].start % period for i in group}
    order = sorted(group, key=begin.__getitem__)
    groups: list[list[int]] = []
    reached = 0
    for i in order:
        if groups and begin[i] < reached:
            groups[-1].append(i)
        else:
            groups.append([i])
        reached = max(reached, begin[i] + regions[i].span(period))
    if period is not None and len(groups) > 1 and reached > period + begin[order[0]]:
        # modulo the period, the last group overlaps the first ones
        last = groups.pop()
        while groups and begin[groups[0][0]] + period < reached:
            last += groups.pop(0)
        groups.append(last)
    return groups


# -- regions of kernels ----------------------------------------------------------------------------------------------------
def _indices(ast: UOp) -> dict[UOp, list[UOp]]:
    """PARAM → index expressions at which it is read and written; [] for a PARAM that is used in any other way too."""
    indices_of: dict[UOp, list[UOp]] = {}
    whole: set[UOp] = set()
    for u in ast.toposort():
        if u.op is Ops.INDEX and u.src[0].op is Ops.PARAM:
            indices_of.setdefault(u.src[0], []).append(u.src[1])
        else:
            whole.update(s for s in u.src if s.op is Ops.PARAM)
            if u.op is Ops.STORE and u.src[1].op is Ops.CUSTOM_FUNCTION:    # no index tells which elements it writes
                whole.add(u.src[0].src[0])
    return {p: [] if p in whole else indices for p, indices in indices_of.items()} | {p: [] for p in whole}


def reached_sizes(ast: UOp) -> dict[UOp, int]:
    """PARAM → number of elements, counted from its first, that a kernel may access by the bounds of its indices. PARAMs without indices
    are left out."""
    return {p: max(map(sy.vmax, indices)) + 1 for p, indices in _indices(ast).items() if indices}


def narrow_params(ast: UOp) -> tuple[UOp, dict[int, int]]:
    """Shrink PARAMs; see the module's docstring. Returns (AST, slot → offset in elements)."""
    first: dict[UOp, int] = {}
    narrowed: dict[UOp, UOp] = {}
    for param, indices in _indices(ast).items():
        if not indices:
            continue
        bounds = [sy.bounds(i) for i in indices]
        low, high = min(lo for lo, _ in bounds), max(hi for _, hi in bounds)
        # under a gate, the bounds of an index may lie outside the buffer
        if low >= 0 and high < param.arg.size and high - low + 1 < param.arg.size:
            first[param] = low
            narrowed[param] = param.replace(arg=replace(param.arg, size=high - low + 1))
    if not narrowed:
        return ast, {}
    done: dict[UOp, UOp] = {}
    for u in ast.toposort():
        src = tuple([done[s] for s in u.src])
        if u.op is Ops.INDEX and u.src[0] in narrowed:
            src = (narrowed[u.src[0]], sy.shift(src[1], -first[u.src[0]]))
        done[u] = u if src == u.src else u.replace(src=src)
    return done[ast], {p.arg.slot: low for p, low in first.items()}


def regions_of(ast: UOp) -> tuple[Region, ...]:
    """The elements of each PARAM that a kernel accesses, by slot, counted from the start of the PARAM. Cached on the node."""
    result: tuple[Region, ...] = ast.cached("regions", _regions_of)
    return result


def _regions_of(ast: UOp) -> tuple[Region, ...]:
    reached: dict[int, Region] = {}
    for param, indices in _indices(ast).items():
        regions = {region_of(i, param.arg.size) for i in indices}
        if len(regions) == 1:
            reached[param.arg.slot] = regions.pop()
        else:
            start = min((r.start for r in regions), default=0)
            end = max((r.end for r in regions), default=param.arg.size)
            reached[param.arg.slot] = Region(start, end - start)
    return tuple(reached[slot] for slot in sorted(reached))


def region_of(index: UOp, size: int) -> Region:
    """The region of a buffer of `size` elements that an index reaches. Its terms are sorted by step: terms that leave no gap extend the
    run, others repeat it."""
    terms, start = sy.linear(index)
    widths: dict[int, int] = {}
    for atom, k in terms.items():
        low, high = sy.bounds(atom)
        start += k * (low if k > 0 else high)
        if high > low:
            widths[abs(k)] = widths.get(abs(k), 0) + abs(k) * (high - low)
    run, steps = 1, []
    for step, width in sorted(widths.items()):
        if step <= run:
            run += width
        else:
            steps.append((step, width // step + 1))
    region = Region(start, run, tuple(steps))
    if region.start < 0 or region.end > size:   # the index is under a gate
        start = max(0, region.start)
        return Region(start, min(size, region.end) - start)
    return region
