"""The memory that strided loops touch: lines, sectors and banks, counted from steps alone.

    for i in 16: for j in 64: x[i·1000 + j], 4 bytes each     runs of 256 bytes in 16 windows, 4000 bytes apart
        64 lines of 64 bytes, 128 sectors of 32 bytes

    lanes 0…31 access x[lane], 4 bytes each                   4 sectors, 1 turn of 32 banks
    lanes 0…31 access 16 bytes each, side by side             16 sectors
    lanes 0…31 access x[lane · 64]                            32 sectors, of which 4 bytes are used; 32 turns
    lanes 0…31 access one element                             1 sector
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from svod.core.kernel.group_memory.banks import BANK_BYTES, BANKS

Steps = tuple[tuple[int, int], ...]     # (bytes between neighbours, iterations) of each loop, the one that runs fastest first


class Footprint(NamedTuple):
    """A regular pattern of touched bytes: a run of contiguous bytes, repeated at the distances given by nested windows."""

    run: float                                  # contiguous bytes
    windows: list[tuple[int, float]]            # (bytes from one window to the next, number of windows), the smallest distance first

    def granules(self, granule: int) -> float:
        """The number of distinct lines, or sectors, of `granule` bytes."""
        count = float(max(1, math.ceil(self.run / granule)))
        for _, windows in self.windows:
            count *= windows
        return count


def touched(steps: Iterable[tuple[int, float]], itemsize: int, granule: int) -> Footprint:
    """The footprint of loops with these steps, given in any order. A step that stays inside the run, or reaches the next granule, makes
    the run longer. A step that stays inside the windows so far makes windows overlap, and adds only windows that are new."""
    run, windows = float(itemsize), list[tuple[int, float]]()
    for step, count in sorted([(abs(step), count) for step, count in steps if step and count > 1]):
        if windows:
            last, known = windows[-1]
            if step <= last * known and step % last == 0:
                windows[-1] = last, known + step / last * (count - 1)
                continue
        elif step <= max(run, granule):
            run += step * (count - 1)
            continue
        windows.append((step, count))
    return Footprint(run, windows)


@lru_cache(maxsize=1 << 15)
def touched_bytes(steps: Steps, itemsize: int, limit: int, granule: int) -> float:
    """Bytes of the distinct granules that loops touch; at most `limit`."""
    return min(granule * touched(steps, itemsize, granule).granules(granule), float(max(limit, granule)))


@lru_cache(maxsize=1 << 14)
def shared_granules(inside: Steps, outside: Steps, itemsize: int, granule: int) -> float:
    """The share of the granules that a group of threads stores which a neighbouring group stores too. If rows do not begin at multiples
    of a granule, each row shares one granule with the next; else the share is 0."""
    run = touched(inside, itemsize, 1).run
    further = [step for step, count in (*inside, *outside) if count > 1 and abs(step) >= run]
    return granule / run if any(step % granule for step in further) else 0.0


# -- one access by each thread of a subgroup ----------------------------------------------------------------
@lru_cache(maxsize=1 << 14)
def lane_offsets(steps: Steps, lanes: int) -> tuple[int, ...]:
    """The distance in bytes from the first lane's address to each lane's."""
    offsets = [0]
    for step, count in steps:
        if len(offsets) >= lanes:
            break
        offsets = [step * k + at for k in range(min(count, -(-lanes // len(offsets)))) for at in offsets]
    return tuple(offsets[:lanes])


def _granules(offsets: Iterable[int], width: int, granule: int) -> int:
    return len({g for at in offsets for g in range(at // granule, (at + width - 1) // granule + 1)})


@lru_cache(maxsize=1 << 14)
def lane_granules(steps: Steps, lanes: int, width: int, granule: int) -> int:
    """The number of distinct granules that one access of `width` bytes by each of `lanes` threads touches."""
    return _granules(lane_offsets(steps, lanes), width, granule)


@lru_cache(maxsize=1 << 14)
def line_turns(steps: Steps, lanes: int, width: int, line: int) -> int:
    """The number of turns in which a cache serves one access of `width` bytes by each of `lanes` threads. It serves the neighbouring
    threads that together access a line's worth of bytes at a time; each line that they touch takes one turn."""
    offsets, together = lane_offsets(steps, lanes), max(1, line // width)
    return sum(_granules(offsets[k:k + together], width, line) for k in range(0, len(offsets), together))


@lru_cache(maxsize=1 << 14)
def bank_turns(steps: Steps, lanes: int, width: int) -> int:
    """The number of turns in which shared memory serves one access of `width` bytes by each of `lanes` threads. Lanes that access different
    words of one bank take turns."""
    return turns_of(lane_offsets(steps, lanes), width)


@lru_cache(maxsize=1 << 14)
def turns_of(offsets: tuple[int, ...], width: int) -> int:
    """`bank_turns` for accesses that begin at these byte offsets."""
    wanted: dict[int, set[int]] = {}
    for at in offsets:
        for word in range(at // BANK_BYTES, (at + width - 1) // BANK_BYTES + 1):
            wanted.setdefault(word % BANKS, set()).add(word)
    return max(len(words) for words in wanted.values())


def waves_of(grid: Sequence[int], resident: int) -> list[int]:
    """How many iterations of each loop of a grid run in one wave, which is `resident` groups that run at a time. The last loop of the
    grid runs fastest."""
    inside, left = [1] * len(grid), resident
    for k in range(len(grid) - 1, -1, -1):
        inside[k] = min(grid[k], max(1, left))
        left //= grid[k]
        if left < 1:
            break
    return inside
