"""Sectors, bank conflicts and footprints: counted by hand, and against sets of addresses."""
from __future__ import annotations

import itertools
import random

from svod.core.cost.footprint import bank_turns, lane_granules, line_turns, shared_granules, touched_bytes, waves_of
from svod.core.cost.groups.device import DEVICE_LINE_BYTES, SECTOR_BYTES


def test_sectors_of_the_docstring() -> None:
    assert lane_granules(((4, 32),), 32, 4, SECTOR_BYTES) == 4
    assert lane_granules(((16, 32),), 32, 16, SECTOR_BYTES) == 16
    assert lane_granules(((256, 32),), 32, 4, SECTOR_BYTES) == 32
    assert lane_granules(((0, 32),), 32, 4, SECTOR_BYTES) == 1
    assert lane_granules(((4, 8), (4096, 4)), 32, 4, SECTOR_BYTES) == 4, "four rows of eight"


def test_lines_take_turns() -> None:
    assert line_turns(((4, 32),), 32, 4, DEVICE_LINE_BYTES) == 1
    assert line_turns(((16, 32),), 32, 16, DEVICE_LINE_BYTES) == 4, "eight neighbours at a time fill a line"
    assert line_turns(((4096, 32),), 32, 4, DEVICE_LINE_BYTES) == 32
    assert line_turns(((4096, 8), (16, 4)), 32, 16, DEVICE_LINE_BYTES) == 32, "each eight ask for eight lines"
    assert line_turns(((4096, 4), (16, 8)), 32, 16, DEVICE_LINE_BYTES) == 16, "and here for four"
    assert line_turns(((0, 32),), 32, 4, DEVICE_LINE_BYTES) == 1


def test_rows_that_begin_anywhere_share_sectors() -> None:
    lanes, rows = (4, 16), (1023 * 4, 8)
    assert shared_granules((lanes, rows), ((64, 32),), 4, SECTOR_BYTES) == 0.5, "64 bytes of each row; a sector between neighbours"
    assert shared_granules((lanes, (1024 * 4, 8)), ((64, 32),), 4, SECTOR_BYTES) == 0.0
    assert shared_granules((lanes,), ((64, 32), rows), 4, SECTOR_BYTES) == 0.5, "rows of other groups do so, too"
    assert shared_granules(((4, 1023),), (rows,), 4, SECTOR_BYTES) == 32 / (4 * 1023)


def test_banks() -> None:
    assert bank_turns(((4, 32),), 32, 4) == 1
    assert bank_turns(((128, 32),), 32, 4) == 32, "a column of a square of 32"
    assert bank_turns(((132, 32),), 32, 4) == 1, "the same with rows padded by one element"
    assert bank_turns(((0, 32),), 32, 4) == 1, "all want one element"
    assert bank_turns(((8, 32),), 32, 4) == 2


def test_touched_bytes_count_distinct_sectors() -> None:
    """The estimate is exact for disjoint rows and for overlapping windows that begin at sectors, and never less than the number of distinct
    sectors."""
    rng = random.Random(0)
    for _ in range(200):
        inner, rows, pitch = rng.choice((8, 16, 64)), rng.randint(1, 9), rng.choice((64, 128, 1000)) * SECTOR_BYTES
        steps = ((4, inner), (pitch, rows))
        assert touched_bytes(steps, 4, 1 << 40, SECTOR_BYTES) == _counted(steps)
    for step, window, places in ((4, 3, 40), (4, 5, 7), (SECTOR_BYTES, 3, 10)):
        steps = ((step, window), (step, places))
        assert touched_bytes(steps, 4, 1 << 40, SECTOR_BYTES) >= _counted(steps)
        assert touched_bytes(steps, 4, 1 << 40, SECTOR_BYTES) <= _counted(steps) + 2 * SECTOR_BYTES
    assert touched_bytes(((4, 1000),), 4, 160, SECTOR_BYTES) == 160, "no more than there is"


def _counted(steps: tuple[tuple[int, int], ...]) -> int:
    places = itertools.product(*[range(n) for _, n in steps])
    return SECTOR_BYTES * len({sum(step * k for (step, _), k in zip(steps, at, strict=True)) // SECTOR_BYTES for at in places})


def test_waves() -> None:
    assert waves_of([10, 8], 16) == [2, 8]
    assert waves_of([10, 8], 4) == [1, 4]
    assert waves_of([3, 2], 100) == [3, 2]
    assert waves_of([], 100) == []
