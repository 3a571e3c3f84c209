"""What a nest's accesses cost beyond the first-level cache, from strides and extents alone.

An access touches, with some loops running, *lines*, *pages* and *sets* of a cache: `footprint` counts them. From the innermost loop
outwards, a loop of e iterations either keeps what the iterations share (the data of one iteration fit the cache: then only what is new
is loaded) or loads it e times; between "fits" and "is far too large" the share that is lost grows evenly, as replacement is not perfect:

    traffic(k) = traffic(k + 1) · (r + f · (e - r)),     r = lines(k) / lines(k + 1),     f = share lost inside loop k

A line that a prefetcher brings costs bandwidth; one that it does not foresee costs a share of the level's latency. Prefetchers follow a few
streams and stop at the end of a page, so the first lines after every change of page count as unforeseen.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from svod.core.graph.allocator import HUGE_PAGE
from svod.core.machine.target import Target

LINE = 64
PAGE = 4096                 # bytes of a page of memory; also of one way of a first-level cache, which is indexed by the offset in a page
ANYWHERE = PAGE + LINE      # bytes between neighbours of a gathered axis: another page, another set
L2_WAYS = 16
KEPT = 0.75                 # the share of a cache that the data of a loop may take and still be kept
STREAMS = 32                # pages that prefetchers follow at once
TLB, TLB_CYCLES = 64, 4.0   # pages of the first-level table, and what a miss costs when others overlap with it
WALKS, WALK_CYCLES = 1536, 25.0
UNFORESEEN = 4              # lines after a change of page until a prefetcher is ahead
MISSES = 12                 # unforeseen lines on their way at once (line fill buffers of one core)

# Wires: the latency of a cache grows with the square root of its size, and so its bandwidth shrinks. Anchored at 1 MB with 14 cycles and 64
# bytes a cycle, and at a 32 MB last-level cache with 50 cycles and 24 bytes a cycle; 300 cycles and 10 bytes of one core for memory.
_L2 = (1 << 20, 14.0, 64.0)
_L3 = (32 << 20, 50.0, 24.0)
_MEMORY = (300.0, 10.0)


class CacheLevel(NamedTuple):
    """Where lines come from that miss a cache of `size` bytes (sets × ways lines): cycles of a line without and with prefetching."""

    size: float
    sets: int               # 0: hashed, no conflicts
    ways: int
    unforeseen: float
    streamed: float


@lru_cache(maxsize=16)
def levels(target: Target) -> tuple[CacheLevel, CacheLevel, CacheLevel]:
    """First level (misses come from the second), second (from the third), third (from memory)."""
    (size2, latency2, rate2), (size3, latency3, rate3), (latency, rate) = _L2, _L3, _MEMORY
    l2 = math.sqrt(target.l2 / size2)
    l3 = math.sqrt(max(target.l3, target.l2) / size3)
    if not target.l3:
        l3 = max(l3, latency / latency3)
    beyond_l2 = max(14.0 * l2, latency3 * l3)
    near, far = max(1.0, latency2 * l2 / MISSES), beyond_l2 / MISSES
    width2, width3 = rate2 / l2, min(rate3 / l3, 48.0)
    memory = max(latency, beyond_l2)
    return (CacheLevel(target.l1, PAGE // LINE, max(1, target.l1 // PAGE), max(near, LINE / width2), LINE / width2),
            CacheLevel(target.l2, max(1, target.l2 // (LINE * L2_WAYS)), L2_WAYS, max(far, LINE / width3), LINE / width3),
            CacheLevel(max(target.l2, target.l3), 0, 16, memory / MISSES, LINE / min(rate, width3)))


class Footprint(NamedTuple):
    """What an access touches."""

    lines: float
    pages: float
    sets1: float            # different sets of the first-level cache, of the second
    sets2: float


class Tile(NamedTuple):
    """An axis cut into tiles of `positions`, `apart` bytes from one tile to the next."""

    axis: int
    positions: int
    apart: int


class Access(NamedTuple):
    """One access of a loop nest. `steps`: (axis, bytes between neighbours) of each axis it depends on; a gathered axis has the step
    ANYWHERE. `passes`: 1 for a read, 2 for a write that is also fetched. `fixed`: number of outermost loops that do not move the access,
    as each of their iterations makes the data anew."""

    steps: tuple[tuple[int, int], ...]
    itemsize: int
    limit: float            # bytes of what it reads from
    passes: float = 1.0
    local: bool = False     # scratch: it does not come from memory at first
    fixed: int = 0
    tile: Tile | None = None


@lru_cache(maxsize=65536)
def footprint(steps: tuple[tuple[int, int], ...], itemsize: int, limit: float, sets2: int) -> Footprint:
    """The footprint of an access. `steps`: (bytes, count) of the running axes, ascending. A step inside the span so far extends it."""
    span = float(itemsize)
    outer: list[list[float]] = []
    for step, count in steps:
        if outer:
            last = outer[-1]
            if step <= last[0] * last[1]:
                last[1] += (step / last[0]) * (count - 1)
                continue
        elif step <= max(span, LINE):
            span += step * (count - 1)
            continue
        outer.append([step, count])
    run = max(1.0, math.ceil(span / LINE))
    lines, reach, pages, first, second = run, span, 1.0, min(run, PAGE / LINE), min(run, float(sets2))
    way2 = sets2 * LINE
    for reached, times in outer:
        lines *= times
        if reached < PAGE:
            reach += reached * (times - 1)
        else:
            pages *= times
        whole = int(reached)
        first *= min(times, PAGE // math.gcd(PAGE, whole))
        second *= min(times, way2 // math.gcd(way2, whole))
    most = max(1.0, limit / LINE)
    lines = min(lines, most)
    pages = min(pages * max(1.0, reach / PAGE), max(1.0, limit / PAGE), lines)
    return Footprint(lines, pages, min(first, PAGE / LINE, lines), min(second, float(sets2), lines))


def lost(taken: float) -> float:
    """The share of a cache's content that is evicted before its next use, when the data take `taken` times the cache."""
    return 0.0 if taken <= KEPT else 1.0 - KEPT / taken


class Traffic(NamedTuple):
    """Cycles of one core for the accesses of a loop nest, by level, and the bytes that come from memory."""

    first: float            # lines into the first cache
    second: float           # into the second
    memory: float           # from memory
    translated: float       # addresses of pages
    moved: float            # bytes

    @property
    def cycles(self) -> tuple[float, float, float, float]:
        return self.first, self.second, self.memory, self.translated


Triple = tuple[float, float, float]


class _Lost(NamedTuple):
    """The shares that are evicted between two iterations of a loop: of lines in each cache, of pages in each table."""

    lines: Triple           # first cache, second, third
    pages: Triple           # first-level table, walks, streams of prefetchers


class _Course(NamedTuple):
    """The footprint of an access inside the first k loops of a nest, for k from 0 (the whole nest) to all (one iteration)."""

    access: Access
    depth: int              # loops outside of which the access stands: inside them it is a register
    footprints: list[Footprint]


def traffic(target: Target, loops: Sequence[tuple[int, float]], outside: int, body: Sequence[float], accesses: Sequence[Access],
            shared: Sequence[bool], kept: float = 0.0) -> Traffic:
    """Traffic of a nest with `loops` (axis, iterations), outermost first. The first `outside` of them belong to nests around it. `body`:
    positions of each axis in one innermost iteration. An axis of -1 moves no access. `shared`: a neighbour inside the same outer loops
    brings the data. `kept`: bytes of the arguments that pass through the caches between two runs."""
    caches = _, second, _ = levels(target)
    courses = _courses(loops, body, accesses, second.sets)
    gone = [_lost_inside(caches, [c.footprints[k] for c in courses if c.depth >= k], 0.0 if k else kept) for k in range(len(loops) + 1)]
    cycles = [0.0, 0.0, 0.0]
    translated = moved = 0.0
    for course, is_shared in zip(courses, shared, strict=True):
        a, whole = course.access, course.footprints[0]
        lines, pages = _repeated(course, loops, gone)
        around = course.footprints[min(outside, len(loops))] if is_shared else None
        _subtract_what_is_there(lines, course, caches, gone[0], around)
        visits = max(pages[2], 1.0)
        surprise = min(1.0, UNFORESEEN * visits / max(lines[1], lines[0], 1.0))
        for c, level in enumerate(caches):
            cycles[c] += a.passes * lines[c] * (surprise * level.unforeseen + (1.0 - surprise) * level.streamed)
        # what lies in huge pages that a cache holds needs few translations; in memory, another row of DRAM costs as much as one
        if not HUGE_PAGE <= a.limit <= min(target.l3, TLB * HUGE_PAGE):
            translated += pages[0] * TLB_CYCLES * (pages[0] > whole.pages) + pages[1] * WALK_CYCLES * (pages[1] > whole.pages)
        moved += a.passes * lines[2] * LINE
    return Traffic(cycles[0], cycles[1], cycles[2], translated, moved)


def _courses(loops: Sequence[tuple[int, float]], body: Sequence[float], accesses: Sequence[Access], sets2: int) -> list[_Course]:
    """The footprint of each access per depth, from one innermost iteration outwards."""
    extents = list(body)
    out = []
    for a in accesses:
        moved_by = {axis for axis, _ in a.steps}
        depth = max([k + 1 for k, (axis, _) in enumerate(loops) if axis in moved_by and k >= a.fixed], default=0)
        out.append((moved_by, _Course(a, depth, [_print(a, extents, sets2)])))
    for k in range(len(loops) - 1, -1, -1):
        axis, count = loops[k]
        if axis >= 0:
            extents[axis] *= count
        for moved_by, course in out:
            still = axis not in moved_by or k < course.access.fixed
            course.footprints.append(course.footprints[-1] if still else _print(course.access, extents, sets2))
    for _, course in out:
        course.footprints.reverse()
    return [course for _, course in out]


def _lost_inside(caches: tuple[CacheLevel, CacheLevel, CacheLevel], here: Sequence[Footprint], kept: float) -> _Lost:
    """What one iteration of a loop evicts from the caches and page tables. `kept`: bytes that pass through in any case."""
    l1, l2, l3 = caches
    room = max(sum([p.lines for p in here]) * LINE, kept)
    first = max([room / l1.size, *[(p.lines / p.sets1 - 1.0) / l1.ways for p in here]])
    second = max([room / l2.size, *[(p.lines / p.sets2 - 1.0) / l2.ways for p in here]])
    pages = sum([p.pages for p in here])
    return _Lost((lost(first), lost(second), lost(room / l3.size)), (lost(pages / TLB), lost(pages / WALKS), lost(pages / STREAMS)))


def _repeated(course: _Course, loops: Sequence[tuple[int, float]], gone: Sequence[_Lost]) -> tuple[list[float], list[float]]:
    """Misses over all iterations: lines per cache and pages per table that are new or were evicted."""
    footprints = course.footprints
    one = footprints[len(loops)]
    lines, pages = [one.lines] * 3, [one.pages] * 3
    for k in range(course.depth - 1, -1, -1):
        (_, count), around, inside, inner = loops[k], footprints[k], footprints[k + 1], gone[k + 1]
        ratio, turns = around.lines / inside.lines, around.pages / inside.pages
        again, turned = count - ratio, count - turns
        again = 0.0 if again < 0.0 else again
        turned = 0.0 if turned < 0.0 else turned
        gone_lines, gone_pages = inner
        for c in (0, 1, 2):
            lines[c] *= ratio + gone_lines[c] * again
            pages[c] *= turns + gone_pages[c] * turned
    return lines, pages


def _subtract_what_is_there(lines: list[float], course: _Course, caches: tuple[CacheLevel, CacheLevel, CacheLevel], gone: _Lost,
                            around: Footprint | None) -> None:
    """Take lines out of `lines` that are present at the start: kept from the last run, made in the nest, or a neighbour's in `around`."""
    whole = course.footprints[0].lines
    taken = 2.0 * whole * LINE
    for c, cache in enumerate(caches):
        there = 1.0 - (lost(taken / cache.size) if course.access.local else gone.lines[c])
        if around is not None:
            there = max(there, 1.0 - lost(2.0 * around.lines * LINE / cache.size))
            lines[c] *= 1.0 - there
        else:
            lines[c] = max(0.0, lines[c] - there * whole)


def _print(a: Access, extents: Sequence[float], sets2: int) -> Footprint:
    """The footprint of an access over axes of these extents."""
    steps = [(step, extents[axis]) for axis, step in a.steps if extents[axis] > 1]
    if a.tile is not None and extents[a.tile.axis] > a.tile.positions:
        steps = [(step, extents[x]) for x, step in a.steps if extents[x] > 1 and x != a.tile.axis]
        inside = next(step for x, step in a.steps if x == a.tile.axis)
        steps += [(inside, a.tile.positions), (a.tile.apart, extents[a.tile.axis] / a.tile.positions)]
    steps.sort()
    return footprint(tuple(steps), a.itemsize, a.limit, sets2)
