"""The memory planner: places the intermediate buffers of a plan in memory.

Two buffers may share memory when their lifetimes do not overlap. A lifetime is a closed interval of *execution levels*: kernels of one
level may run at the same time, so a buffer read at level 3 and one first written at level 3 are both alive there. In a plan that runs its
kernels one after the other, each kernel is a level.

Only intermediates are planned. Inputs, outputs and constants belong to the user or outlive the run, and are never passed in.

Example: three buffers of 256 bytes, alive at levels 0–1, 1–2 and 2–3 (arena):

    offsets {a: 0, b: 256, c: 0}, total 512, which is the minimum, because a and b are both alive at level 1

Modes: `arena` places every buffer where it fits; `remap` reuses a slot only for buffers of equal rounded size, which separates buffers of
different sizes (a kernel that writes past the end of a buffer is found sooner); `disabled` gives each buffer its own memory.
"""
from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from svod.errors import ConfigError

PlannerMode = Literal["arena", "remap", "disabled"]
ALIGNMENT = 64
REMAP_GRAIN = 256           # remap rounds sizes up to this, so that nearly equal buffers can share


@dataclass(frozen=True)
class BufferPlacement:
    """The byte offset of each buffer in one allocation of `total` bytes; offsets are multiples of 64. `lower_bound`: the largest total size
    of the buffers alive at one level, which every placement needs."""

    offsets: dict[int, int]
    total: int
    lower_bound: int


def plan_memory(sizes: Mapping[int, int], first_use: Mapping[int, int], last_use: Mapping[int, int],
                mode: PlannerMode = "arena") -> BufferPlacement:
    """Place buffers of `sizes` bytes that are alive from level `first_use` to level `last_use`, both included.

    The result is the same for equal arguments, whatever the order of the mappings. Raises ConfigError for an unknown mode or
    a buffer without a lifetime."""
    if mode not in get_args(PlannerMode):
        raise ConfigError(f"memory planner mode {mode!r} is not known; use one of {', '.join(get_args(PlannerMode))}")
    for buffer in sizes:
        if buffer not in first_use or buffer not in last_use or last_use[buffer] < first_use[buffer]:
            raise ConfigError(f"buffer {buffer} has no lifetime: first use {first_use.get(buffer)}, last use {last_use.get(buffer)}")
    lifetimes = {b: Lifetime(first_use[b], last_use[b]) for b in sizes}
    rounded = {b: _round_up(n, ALIGNMENT) for b, n in sizes.items()}
    bound = _largest_level(rounded, lifetimes)
    if mode == "arena":
        offsets, total = _plan_arena(rounded, lifetimes, bound)
    elif mode == "remap":
        offsets, total = _plan_remap(sizes, lifetimes)
    else:
        offsets, total = {}, 0
        for buffer in sorted(sizes):
            offsets[buffer] = total
            total += rounded[buffer]
    return BufferPlacement(offsets, total, bound)


def lower_bound(sizes: Mapping[int, int], first_use: Mapping[int, int], last_use: Mapping[int, int]) -> int:
    """Compute `BufferPlacement.lower_bound` of these buffers without placing them."""
    return _largest_level({b: _round_up(n, ALIGNMENT) for b, n in sizes.items()}, {b: Lifetime(first_use[b], last_use[b]) for b in sizes})


class Lifetime(NamedTuple):
    """The first and the last level that uses a buffer."""

    first: int
    last: int


class _Found(NamedTuple):
    offsets: dict[int, int]
    total: int




def _largest_level(sizes: Mapping[int, int], lifetimes: Mapping[int, Lifetime]) -> int:
    changes: dict[int, int] = {}
    for buffer, (first, last) in lifetimes.items():
        changes[first] = changes.get(first, 0) + sizes[buffer]
        changes[last + 1] = changes.get(last + 1, 0) - sizes[buffer]
    alive = most = 0
    for level in sorted(changes):
        alive += changes[level]
        most = max(most, alive)
    return most


def _plan_arena(sizes: Mapping[int, int], lifetimes: Mapping[int, Lifetime], bound: int) -> _Found:
    """Return the best of a few greedy placements, or the first that reaches the lower bound.

    The best order differs between graphs; each order costs microseconds per pair of buffers. The order by size is "greedy by size for
    offset calculation" of Pisarchyk and Lee (arXiv:2001.03288), the order by the level with the most live bytes follows their "greedy by
    breadth"."""
    alive: dict[int, int] = {}
    for buffer, (first, last) in lifetimes.items():
        for level in range(first, last + 1):
            alive[level] = alive.get(level, 0) + sizes[buffer]
    crowd = {b: max(alive[level] for level in range(first, last + 1)) for b, (first, last) in lifetimes.items()}
    orders: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda b: (-sizes[b], lifetimes[b].first, b),
        lambda b: (-crowd[b], -sizes[b], lifetimes[b].first, b),
        lambda b: (-sizes[b] * (1 + lifetimes[b].last - lifetimes[b].first), -sizes[b], b),
        lambda b: (lifetimes[b].first - lifetimes[b].last, -sizes[b], b),
        lambda b: (lifetimes[b].first, -sizes[b], b),
    )
    best: _Found | None = None
    for order in orders:
        placed = _place_in_order(sorted(sizes, key=order), sizes, lifetimes)
        if best is None or placed.total < best.total:
            best = placed
        if best.total <= bound:
            break
    assert best is not None
    return best


def _place_in_order(order: Iterable[int], sizes: Mapping[int, int], lifetimes: Mapping[int, Lifetime]) -> _Found:
    """Place each buffer into the smallest gap (best fit) between the buffers placed before it that are alive at the same time."""
    placed: list[tuple[int, int, int, int]] = []        # (offset, end, first, last), ordered by offset
    offsets: dict[int, int] = {}
    total = 0
    for buffer in order:
        size, (first, last) = sizes[buffer], lifetimes[buffer]
        best, best_gap, cursor = -1, 0, 0
        for offset, end, other_first, other_last in placed:
            if other_last < first or last < other_first:
                continue
            gap = offset - cursor
            if gap >= size and (best < 0 or gap < best_gap):
                best, best_gap = cursor, gap
            cursor = max(cursor, end)
        if best < 0:
            best = cursor
        offsets[buffer] = best
        total = max(total, best + size)
        insort(placed, (best, best + size, first, last))
    return _Found(offsets, total)


def _plan_remap(sizes: Mapping[int, int], lifetimes: Mapping[int, Lifetime]) -> _Found:
    offsets: dict[int, int] = {}
    free_from: dict[int, list[tuple[int, int]]] = {}    # rounded size → (level of the last use, offset) of its slots
    total = 0
    for buffer in sorted(sizes, key=lambda b: (lifetimes[b].first, b)):
        size = _round_up(sizes[buffer], REMAP_GRAIN)
        slots = free_from.setdefault(size, [])
        for i, (level, offset) in enumerate(slots):
            if level < lifetimes[buffer].first:
                slots[i] = (lifetimes[buffer].last, offset)
                offsets[buffer] = offset
                break
        else:
            slots.append((lifetimes[buffer].last, total))
            offsets[buffer] = total
            total += size
    return _Found(offsets, total)


def _round_up(size: int, grain: int) -> int:
    return -(-size // grain) * grain
