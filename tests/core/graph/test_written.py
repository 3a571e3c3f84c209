"""The check for buffers that overlap written memory, compared with a comparison of every byte range with every other."""
from __future__ import annotations

import random

import pytest

from svod.core.graph.written import Span, WrittenMemory
from svod.errors import SharedMemoryError


def share(spans: dict[int, Span], written: set[int]) -> bool:
    """Whether a written buffer has a byte in common with another, byte by byte."""
    places = {n: set(range(*span)) for n, span in spans.items()}
    return any(n != m and places[n] & places[m] for n in written & spans.keys() for m in spans)


@pytest.mark.parametrize("seed", range(40))
def test_moves_beside_every_pair_of_ranges(seed: int) -> None:
    rng = random.Random(seed)
    size, count = rng.choice((40, 200)), rng.randint(1, 9)
    written = set(rng.sample(range(count), rng.randint(0, count)))

    def some() -> Span:
        begin = rng.randrange(size)
        return begin, begin + rng.randint(0, 9)
    memory, spans, outcomes = WrittenMemory({}, written), dict[int, Span](), set[bool]()
    for _ in range(60):
        moved = {n: some() for n in rng.sample(range(count), rng.randint(1, min(3, count)))}
        refused = share({**spans, **moved}, written)
        outcomes.add(refused)
        if refused:
            with pytest.raises(SharedMemoryError, match=r"share \d+ bytes? of memory"):
                memory.move(moved)
        else:
            memory.move(moved)
            spans.update(moved)
    assert False in outcomes


def test_what_is_shared_is_said() -> None:
    memory = WrittenMemory({3: (0, 100), 5: (100, 200)}, [5, 7])
    with pytest.raises(SharedMemoryError, match="buffer 5, which is assigned to, and buffer 3 of the same plan share 4 bytes"):
        memory.move({3: (10, 104)})
    memory.move({3: (0, 100)})
    with pytest.raises(SharedMemoryError, match=r"buffer 5, .* and buffer 7 of the same plan share 1 byte of"):
        memory.move({7: (199, 300)})
