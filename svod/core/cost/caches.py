"""Predicts the cycles that a core spends on misses of its first-level cache, from strides and extents alone.

An access touches, with some loops running, *lines*, *pages* and *sets* of a cache: `footprint` counts them. From the innermost loop
outwards, a loop of e iterations either keeps what the iterations share (the data of one iteration fit the cache: then only what is new is
loaded) or loads it e times; between "fits" and "is far too large" the share that is lost grows evenly, as replacement is not perfect:

    traffic(k) = traffic(k + 1) · (r + f · (e - r)),     r = lines(k) / lines(k + 1),     f = share lost inside loop k

A line that a prefetcher brings costs bandwidth; one that it does not foresee costs a share of the level's latency. Prefetchers follow a few
streams and stop at the end of a page, so the first lines after every change of page count as unforeseen.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from svod.core.cost.footprint import touched
from svod.core.cost.work import Access, AccessKind
from svod.core.machine.levels import CACHE_LINE_BYTES
from svod.core.machine.target import Target

PAGE_BYTES = 4096           # bytes of a page of memory, and of one way of a first-level cache, which is indexed by the offset in a page
ANYWHERE_BYTES = PAGE_BYTES + CACHE_LINE_BYTES  # bytes assumed between neighbours of a gathered axis: another page, and another set


class CacheLevel(NamedTuple):
    """A cache of `size` bytes (sets × ways lines), and the price of its misses. `unforeseen`, `streamed`: cycles to fetch a line that was
    not prefetched, and one that was."""

    size: float
    sets: int               # 0: addresses are hashed, so there are no conflicts
    ways: int
    unforeseen: float
    streamed: float


class Anchor(NamedTuple):
    """A measured cache, from which others are extrapolated: because of longer wires, latency grows with the square root of the size, and
    bandwidth shrinks by the same factor."""

    size_bytes: int
    latency_cycles: float
    bytes_per_cycle: float


@dataclass(frozen=True)
class Caches:
    """The caches and page tables that one core reads through."""

    levels: tuple[CacheLevel, CacheLevel, CacheLevel]   # each with the price of its misses, which are served by the next level or by memory
    kept_share: float = 0.75            # share of a cache that the data of a loop may take and still be kept
    streams: int = 32                   # pages that prefetchers follow at once
    table_pages: int = 64               # pages in the first-level translation table (TLB)
    table_miss_cycles: float = 4.0      # cycles of a miss of that table, which overlaps with others
    walk_pages: int = 1536              # pages in the second-level translation table
    walk_cycles: float = 25.0           # cycles of a miss of both tables
    own_share: float = math.inf         # bytes of the last cache that the cores of the target can count on
    crossing_cycles: float = 0.0        # cycles to fetch a run of lines that another core has stored: few of these transfers overlap
    unforeseen_lines: int = 4           # lines after a change of page that are fetched before the prefetcher is ahead

    def lost(self, taken: float) -> float:
        """The share of a cache's content that is evicted before its next use, when the data in use are `taken` times as large as the
        cache."""
        return 0.0 if taken <= self.kept_share else 1.0 - self.kept_share / taken


SECOND = Anchor(1 << 20, 14.0, 64.0)
LAST = Anchor(32 << 20, 50.0, 24.0)
MEMORY_CYCLES, MEMORY_BYTES = 300.0, 10.0       # latency of memory in cycles, and bytes per cycle that one core gets
SECOND_WAYS = 16
PLAN_KERNELS = 32           # kernels of a plan, each with data of its own, that run between two runs of one of them
OWN_LAST_BYTES = 16 << 20   # bytes of the last cache for each core of a target: cores of other programs use the rest of a server's
CROSSING_LINES = 2.5        # runs of lines from other cores that are fetched at the same time
FILL_BUFFERS = 12           # lines without prefetch that are fetched at the same time


@lru_cache(maxsize=16)
def caches_of(target: Target) -> Caches:
    """The caches of a target, extrapolated from their sizes."""
    l2 = math.sqrt(target.l2 / SECOND.size_bytes)
    l3 = math.sqrt(max(target.l3, target.l2) / LAST.size_bytes)
    if not target.l3:
        l3 = max(l3, MEMORY_CYCLES / LAST.latency_cycles)
    beyond_l2 = max(SECOND.latency_cycles * l2, LAST.latency_cycles * l3)
    near, far = max(1.0, SECOND.latency_cycles * l2 / FILL_BUFFERS), beyond_l2 / FILL_BUFFERS
    width2, width3 = SECOND.bytes_per_cycle / l2, min(LAST.bytes_per_cycle / l3, 48.0)
    memory, line = max(MEMORY_CYCLES, beyond_l2), CACHE_LINE_BYTES
    return Caches((CacheLevel(target.l1, PAGE_BYTES // line, max(1, target.l1 // PAGE_BYTES), max(near, line / width2), line / width2),
                   CacheLevel(target.l2, max(1, target.l2 // (line * SECOND_WAYS)), SECOND_WAYS, max(far, line / width3), line / width3),
                   CacheLevel(max(target.l2, target.l3), 0, 16, memory / FILL_BUFFERS, line / min(MEMORY_BYTES, width3))),
                  own_share=OWN_LAST_BYTES * target.threads, crossing_cycles=beyond_l2 / CROSSING_LINES)


class CacheFootprint(NamedTuple):
    """Lines and pages that an access touches, and the sets of caches in which its lines lie."""

    lines: float
    pages: float
    sets1: float            # different sets of the first-level cache
    sets2: float            # different sets of the second-level cache


@lru_cache(maxsize=65536)
def footprint(steps: tuple[tuple[int, float], ...], itemsize: int, limit: float, sets2: int) -> CacheFootprint:
    """The footprint of an access. `steps`: (bytes from one iteration to the next, iterations) of each loop that runs. `limit`: bytes of
    the whole array; `sets2`: sets of the second-level cache."""
    area = touched(steps, itemsize, CACHE_LINE_BYTES)
    run = max(1.0, math.ceil(area.run / CACHE_LINE_BYTES))
    reach, pages, first, second = area.run, 1.0, min(run, PAGE_BYTES / CACHE_LINE_BYTES), min(run, float(sets2))
    way2 = sets2 * CACHE_LINE_BYTES
    for step, times in area.windows:
        if step < PAGE_BYTES:
            reach += step * (times - 1)
        else:
            pages *= times
        first *= min(times, PAGE_BYTES // math.gcd(PAGE_BYTES, step))
        second *= min(times, way2 // math.gcd(way2, step))
    lines = min(area.granules(CACHE_LINE_BYTES), max(1.0, limit / CACHE_LINE_BYTES))
    pages = min(pages * max(1.0, reach / PAGE_BYTES), max(1.0, limit / PAGE_BYTES), lines)
    return CacheFootprint(lines, pages, min(first, PAGE_BYTES / CACHE_LINE_BYTES, lines), min(second, float(sets2), lines))


class Traffic(NamedTuple):
    """Cycles of one core for the accesses of a loop nest, by level, and the bytes moved from memory."""

    first: float            # cycles to fetch lines into the first cache
    second: float           # cycles to fetch lines into the second cache
    memory: float           # cycles to fetch lines from memory
    translated: float       # cycles for address translations
    crossing: float         # cycles to fetch lines that no prefetcher foresees from second caches of other cores
    moved: float            # bytes moved from memory

    @property
    def cycles(self) -> tuple[float, float, float, float]:
        return self.first, self.second, self.memory, self.translated


Triple = tuple[float, float, float]


class _Lost(NamedTuple):
    """Shares of data that are evicted between two iterations of a loop: lines of each cache, and pages of each table."""

    lines: Triple           # in the first, second and third cache
    pages: Triple           # in the first-level table, in both tables, and among the pages that prefetchers follow


class _Course(NamedTuple):
    """The footprint of an access while the outermost k loops of a nest stand still, for each k from 0 (the whole nest runs) to the
    number of loops (one innermost iteration)."""

    access: Access
    depth: int              # outermost loops that the access stands inside of; loops further inside reuse its value from a register
    footprints: list[CacheFootprint]


def traffic(caches: Caches, loops: Sequence[tuple[int, float]], outside: int, body: Sequence[float], accesses: Sequence[Access],
            shared: Sequence[bool], kept: float = 0.0) -> Traffic:
    """The traffic of a nest. `loops`: (axis, iterations), outermost first; axis -1 moves no access. `outside`: how many of these loops
    belong to nests around this one. `body`: positions of each axis in one innermost iteration. `shared`: for each access, whether
    another stage inside the same outer loops loads the same data. `kept`: bytes of arguments that pass through the caches between two
    runs of the kernel."""
    courses = _courses(loops, body, accesses, caches.levels[1].sets)
    gone = [_lost_inside(caches, [c.footprints[k] for c in courses if c.depth >= k], 0.0 if k else kept) for k in range(len(loops) + 1)]
    in_plan, cycles = _lost_in_plan(caches, kept), [0.0, 0.0, 0.0]
    translated = crossing = moved = 0.0
    for course, is_shared in zip(courses, shared, strict=True):
        a, whole = course.access, course.footprints[0]
        passes = 2.0 if a.kind is AccessKind.STORE else 1.0     # a line that is written is fetched first
        lines, pages = _repeated(course, loops, gone)
        around = course.footprints[min(outside, len(loops))] if is_shared else None
        fetched = lines[0]
        crossed = _subtract_what_is_there(lines, course, caches, gone[0], in_plan, around)
        visits = max(pages[2], 1.0)
        surprise = min(1.0, caches.unforeseen_lines * visits / max(lines[1], lines[0], 1.0))
        for c, level in enumerate(caches.levels):
            cycles[c] += passes * lines[c] * (surprise * level.unforeseen + (1.0 - surprise) * level.streamed)
        streamed = caches.levels[1].streamed
        cycles[1] += crossed * streamed
        # the next lines of a run are on their way when the first one arrives
        crossing += crossed * max(0.0, caches.crossing_cycles / max(1.0, fetched / visits) - streamed)
        translated += pages[0] * caches.table_miss_cycles * (pages[0] > whole.pages)
        translated += pages[1] * caches.walk_cycles * (pages[1] > whole.pages)
        moved += passes * lines[2] * CACHE_LINE_BYTES
    return Traffic(cycles[0], cycles[1], cycles[2], translated, crossing, moved)


def _courses(loops: Sequence[tuple[int, float]], body: Sequence[float], accesses: Sequence[Access], sets2: int) -> list[_Course]:
    """The footprints of each access at each depth, computed from one innermost iteration outwards."""
    extents = list(body)
    out = []
    for a in accesses:
        steps = steps_of(a)
        moved_by = {axis for axis, _ in steps}
        depth = max([k + 1 for k, (axis, _) in enumerate(loops) if axis in moved_by and k >= a.fixed], default=0)
        out.append((moved_by, steps, _Course(a, depth, [_print(a, steps, extents, sets2)])))
    for k in range(len(loops) - 1, -1, -1):
        axis, count = loops[k]
        if axis >= 0:
            extents[axis] *= count
        for moved_by, steps, course in out:
            still = axis not in moved_by or k < course.access.fixed
            course.footprints.append(course.footprints[-1] if still else _print(course.access, steps, extents, sets2))
    for *_, course in out:
        course.footprints.reverse()
    return [course for *_, course in out]


def _lost_inside(caches: Caches, here: Sequence[CacheFootprint], kept: float) -> _Lost:
    """The shares of data that one iteration of a loop evicts from the caches and page tables. `here`: footprints of its accesses; `kept`:
    bytes that pass through the caches in any case."""
    lost, (l1, l2, l3) = caches.lost, caches.levels
    room = max(sum([p.lines for p in here]) * CACHE_LINE_BYTES, kept)
    first = max([room / l1.size, *[(p.lines / p.sets1 - 1.0) / l1.ways for p in here]])
    second = max([room / l2.size, *[(p.lines / p.sets2 - 1.0) / l2.ways for p in here]])
    pages = sum([p.pages for p in here])
    return _Lost((lost(first), lost(second), lost(room / l3.size)),
                 (lost(pages / caches.table_pages), lost(pages / caches.walk_pages), lost(pages / caches.streams)))


def _repeated(course: _Course, loops: Sequence[tuple[int, float]], gone: Sequence[_Lost]) -> tuple[list[float], list[float]]:
    """Count the misses over all iterations of the loops, on data that are new or were evicted: (lines per cache, pages per table)."""
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


def _lost_in_plan(caches: Caches, kept: float) -> Triple:
    """The shares of data that other kernels of a plan evict from the caches between two runs of a kernel."""
    first, second, third = [cache.size for cache in caches.levels]
    taken = PLAN_KERNELS * kept
    return caches.lost(taken / first), caches.lost(taken / second), caches.lost(taken / min(third, caches.own_share))


def _subtract_what_is_there(lines: list[float], course: _Course, caches: Caches, gone: _Lost, in_plan: Triple,
                            around: CacheFootprint | None) -> float:
    """Reduce `lines`, the lines fetched into each cache, by those that are cached before they are needed: kept from the last run,
    computed inside the nest, or loaded by another stage. `in_plan`: the shares of data that other kernels evict between two runs. `around`:
    footprint of one run of the nest, if another stage loads the same data; else None. Returns the lines that lie in second caches of other
    cores than those that need them."""
    a, whole, crossing = course.access, course.footprints[0].lines, 0.0
    taken = 2.0 * whole * CACHE_LINE_BYTES
    for c, cache in enumerate(caches.levels):
        there = 1.0 - (in_plan[c] if a.is_evicted else caches.lost(taken / cache.size) if a.is_made_inside else gone.lines[c])
        cores = a.cores if c < 2 else 1     # the third cache is shared
        lines[c] = max(lines[c], cores * whole)
        if around is not None:
            there = max(there, 1.0 - caches.lost(2.0 * around.lines * CACHE_LINE_BYTES / cache.size))
            lines[c] *= 1.0 - there
        else:
            lines[c] = max(0.0, lines[c] - there * cores * whole)
            crossing = (1.0 - a.near) * there * cores * whole if c == 1 else crossing
    return crossing


def steps_of(a: Access) -> list[tuple[int, int]]:
    """(local axis, bytes between neighbours) of an access, gathered axes included."""
    return [*[(axis, abs(step)) for axis, step in a.coefs if axis not in a.gathered], *[(axis, ANYWHERE_BYTES) for axis in a.gathered]]


def _print(a: Access, moves: list[tuple[int, int]], extents: Sequence[float], sets2: int) -> CacheFootprint:
    """The footprint of an access whose axes have these extents. `moves`: the result of `steps_of`."""
    steps = [(step, extents[axis]) for axis, step in moves if extents[axis] > 1]
    if a.tile is not None and extents[a.tile.axis] > a.tile.positions:
        steps = [(step, extents[x]) for x, step in a.coefs if extents[x] > 1 and x != a.tile.axis]
        inside = next(step for x, step in a.coefs if x == a.tile.axis)
        steps += [(inside, a.tile.positions), (a.tile.apart, extents[a.tile.axis] / a.tile.positions)]
    steps.sort()
    return footprint(tuple(steps), a.itemsize, a.limit, sets2)
