"""Which memory the threads of a group touch: sectors of one instruction of a subgroup, bank conflicts, and what a group reads in all.

    lanes 0…31 read x[lane], 4 bytes each                     4 sectors
    lanes 0…31 read 16 bytes each, beside each other          16 sectors
    lanes 0…31 read x[lane * 64]                              32 sectors, of which 4 bytes are used
    lanes 0…31 read one element                               1 sector
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from svod.core.cost.groups.device import LINE, SECTOR

BANKS, BANK = 32, 4     # shared memory: elements of 4 bytes, 32 at a time
Steps = tuple[tuple[int, int], ...]     # (bytes between neighbours, how many of them), the fastest first


@lru_cache(maxsize=1 << 14)
def lane_offsets(steps: Steps, lanes: int) -> tuple[int, ...]:
    """The distance in bytes of each lane's address from the first lane's."""
    offsets = [0]
    for step, count in steps:
        if len(offsets) >= lanes:
            break
        offsets = [step * k + at for k in range(min(count, -(-lanes // len(offsets)))) for at in offsets]
    return tuple(offsets[:lanes])


@lru_cache(maxsize=1 << 14)
def sectors_of(steps: Steps, lanes: int, width: int) -> int:
    """Sectors that one access of `width` bytes by each of `lanes` threads touches."""
    return len({s for at in lane_offsets(steps, lanes) for s in range(at // SECTOR, (at + width - 1) // SECTOR + 1)})


@lru_cache(maxsize=1 << 14)
def cache_turns(steps: Steps, lanes: int, width: int) -> int:
    """Turns in which the first cache serves one access of `width` bytes by each of `lanes` threads. As many neighbours as ask for a line
    together are served at a time, and each line that they touch takes a turn."""
    offsets, together = lane_offsets(steps, lanes), max(1, LINE // width)
    return sum(len({line for at in offsets[k:k + together] for line in range(at // LINE, (at + width - 1) // LINE + 1)})
               for k in range(0, len(offsets), together))


@lru_cache(maxsize=1 << 14)
def bank_turns(steps: Steps, lanes: int, width: int) -> int:
    """Turns in which shared memory serves one access of `width` bytes by each of `lanes` threads: lanes that want different elements of one
    bank wait for each other."""
    return turns_of(lane_offsets(steps, lanes), width)


@lru_cache(maxsize=1 << 14)
def turns_of(offsets: tuple[int, ...], width: int) -> int:
    """The same of accesses that begin at these bytes."""
    wanted: dict[int, set[int]] = {}
    for at in offsets:
        for word in range(at // BANK, (at + width - 1) // BANK + 1):
            wanted.setdefault(word % BANKS, set()).add(word)
    return max(len(words) for words in wanted.values())


@lru_cache(maxsize=1 << 15)
def touched_bytes(steps: Steps, itemsize: int, limit: int) -> float:
    """Bytes of the distinct sectors that a nest of steps touches, in any order, at most `limit`."""
    run, outer = itemsize, list[list[int]]()
    for step, count in sorted((abs(step), count) for step, count in steps if step and count > 1):
        if step <= max(run, SECTOR):
            run += step * (count - 1)
        elif outer and step % outer[-1][0] == 0 and step <= outer[-1][0] * outer[-1][1]:
            outer[-1][1] += step // outer[-1][0] * (count - 1)      # neighbouring windows overlap
        else:
            outer.append([step, count])
    return float(min(-(-run // SECTOR) * SECTOR * math.prod(count for _, count in outer), max(limit, SECTOR)))


@lru_cache(maxsize=1 << 14)
def shared_sectors(inside: Steps, outside: Steps, itemsize: int) -> float:
    """Sectors that a group and its neighbour store parts of, for each that it stores: one between any two of their rows, where rows do not
    begin at multiples of a sector."""
    run = itemsize
    for step, count in sorted((abs(step), count) for step, count in inside if step and count > 1):
        if step > run:
            break
        run += step * (count - 1)
    further = [step for step, count in (*inside, *outside) if count > 1 and abs(step) >= run]
    return SECTOR / run if any(step % SECTOR for step in further) else 0.0


def waves_of(grid: Sequence[int], resident: int) -> list[int]:
    """The iterations of each loop of a grid, the last one fastest, inside a wave of `resident` groups that run at a time."""
    inside, left = [1] * len(grid), resident
    for k in range(len(grid) - 1, -1, -1):
        inside[k] = min(grid[k], max(1, left))
        left //= grid[k]
        if left < 1:
            break
    return inside
