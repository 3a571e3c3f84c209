"""The memory planner: buffers that are alive at the same level do not overlap, and little memory is wasted."""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from svod.compile.plan.memory_planner import ALIGNMENT, plan_memory
from svod.errors import ConfigError

MODES = ["arena", "remap", "disabled"]
BUFFERS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 12), st.integers(0, 6)), max_size=25)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=100)
@given(buffers=BUFFERS)
def test_live_buffers_never_overlap(mode, buffers):
    sizes = {i: b[0] for i, b in enumerate(buffers)}
    first = {i: b[1] for i, b in enumerate(buffers)}
    last = {i: b[1] + b[2] for i, b in enumerate(buffers)}
    arena = plan_memory(sizes, first, last, mode)
    live = [sum(-(-sizes[i] // ALIGNMENT) * ALIGNMENT for i in sizes if first[i] <= level <= last[i]) for level in range(20)]
    assert arena.lower_bound == max(live) <= arena.total
    assert set(arena.offsets) == set(sizes)
    for i, offset in arena.offsets.items():
        assert offset % ALIGNMENT == 0 and offset + sizes[i] <= arena.total
    for i in sizes:
        for j in sizes:
            if i < j and first[i] <= last[j] and first[j] <= last[i]:
                a, b = arena.offsets[i], arena.offsets[j]
                assert a + sizes[i] <= b or b + sizes[j] <= a or 0 in (sizes[i], sizes[j])


def test_chain_needs_two_slots():
    n = 10
    sizes = dict.fromkeys(range(n), 256)
    use = {i: i for i in range(n)}, {i: i + 1 for i in range(n)}
    assert plan_memory(sizes, *use).total == 512
    assert plan_memory(sizes, *use, "remap").total == 512
    assert plan_memory(sizes, *use, "disabled").total == 2560


def test_small_buffer_takes_the_tightest_gap():
    # At level 1 buffer 1 ends at 512 and buffer 2 begins at 640: buffer 3 fits between them.
    sizes = {0: 640, 1: 512, 2: 128, 3: 64}
    arena = plan_memory(sizes, {0: 0, 1: 1, 2: 0, 3: 1}, {0: 0, 1: 1, 2: 1, 3: 1})
    assert arena.total == 768
    assert arena.offsets[3] == 512


def test_a_path_of_overlaps_reaches_the_bound():
    # Largest first, the two of 384 bytes that are never alive together end up at 0, and of the two between one is left on top: 1024.
    sizes, first, last = {0: 320, 1: 320, 2: 384, 3: 384}, {0: 1, 1: 2, 2: 0, 3: 3}, {0: 2, 1: 4, 2: 1, 3: 5}
    arena = plan_memory(sizes, first, last)
    assert arena.total == arena.lower_bound == 704
    # all are rounded to 512, and two are alive at a time
    assert plan_memory(sizes, first, last, "remap").total == 1024


def test_order_of_the_mapping_does_not_matter():
    sizes = {i: (i * 7919) % 4096 for i in range(20)}
    first, last = {i: i // 2 for i in sizes}, {i: i // 2 + i % 4 for i in sizes}
    backwards = dict(reversed(sizes.items()))
    assert plan_memory(sizes, first, last) == plan_memory(backwards, first, last)


def test_bad_arguments_are_named():
    with pytest.raises(ConfigError, match="tlsf"):
        plan_memory({}, {}, {}, "tlsf")
    with pytest.raises(ConfigError, match="buffer 3"):
        plan_memory({3: 8}, {3: 2}, {3: 1})
