"""Elements that a kernel reaches, compared with elements counted one by one."""
from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from svod.core.graph import graph
from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.regions import Region, are_disjoint, find_overlap, region_of, regions_of
from svod.core.schedule.schedule import create_schedule, kernel_ast
from tests.core.scheduling import run_schedule

steps = st.lists(st.tuples(st.integers(1, 12), st.integers(2, 4)), max_size=2, unique_by=lambda s: s[0]).map(lambda s: tuple(sorted(s)))
regions = st.builds(Region, st.integers(0, 30), st.integers(1, 6), steps)


def elements(r: Region) -> set[int]:
    starts = {r.start}
    for stride, times in r.steps:
        starts = {s + i * stride for s in starts for i in range(times)}
    return {s + j for s in starts for j in range(r.run)}


@settings(max_examples=50)
@given(regions, regions)
def test_disjoint_regions_share_no_element(a: Region, b: Region) -> None:
    assert max(elements(a)) + 1 == a.end and len(elements(a)) <= a.size
    assert not (are_disjoint(a, b) and elements(a) & elements(b))
    assert not a.covers(b) or elements(b) <= elements(a)
    assert elements(a.moved(3, 2)) == {2 * (x + 3) + k for x in elements(a) for k in range(2)}


@settings(max_examples=40)
@given(st.lists(regions, max_size=6))
def test_overlaps_among_many_are_those_of_pairs(found: list[Region]) -> None:
    pair = find_overlap(found)
    if pair is None:
        assert all(not elements(a) & elements(b) for a, b in itertools.combinations(found, 2))
    else:
        assert not are_disjoint(found[pair[0]], found[pair[1]])


Boxes = list[tuple[tuple[int, int], ...]]


@st.composite
def blocks(draw: st.DrawFn) -> tuple[tuple[int, ...], Boxes]:
    """Draw a shape and boxes into which it is cut repeatedly."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    boxes: Boxes = [tuple((0, n) for n in shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        low, high = box[axis]
        cut = draw(st.integers(low, high))
        boxes += [(*box[:axis], half, *box[axis + 1:]) for half in ((low, cut), (cut, high)) if half[0] < half[1]]
    return shape, boxes


@settings(max_examples=40)
@given(blocks())
def test_blocks_of_an_array_do_not_overlap(cut: tuple[tuple[int, ...], Boxes]) -> None:
    shape, boxes = cut
    found = []
    for box in boxes:
        index, axis = sy.const(0), 0
        for (low, high), stride in zip(box, [math.prod(shape[a + 1:]) for a in range(len(shape))], strict=True):
            if high > low + 1:
                index = sy.add(index, sy.scale(sy.make_range(high - low, axis), stride))
            index, axis = sy.shift(index, low * stride), axis + 1
        found.append(region_of(index, math.prod(shape)))
        where = np.ravel_multi_index(np.meshgrid(*[np.arange(*b) for b in box], indexing="ij"), shape)
        assert elements(found[-1]) == set(where.ravel().tolist())
    assert find_overlap(found) is None
    assert all(are_disjoint(a, b) for a, b in itertools.combinations(found, 2))
    assert find_overlap([*found, found[0]]) is not None


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-9, 9)), min_size=1, max_size=3), st.integers(0, 9))
def test_a_region_holds_what_an_index_reaches(terms: list[tuple[int, int]], extra: int) -> None:
    lowest = sum(min(0, k) * (n - 1) for n, k in terms)
    index, reached = sy.const(extra - lowest), {extra - lowest}
    for axis, (n, k) in enumerate(terms):
        if n > 1:
            index = sy.add(index, sy.scale(sy.make_range(n, axis), k))
        reached = {x + i * k for x in reached for i in range(n)}
    found = region_of(index, max(reached) + 1 + extra)
    assert reached <= elements(found) and found.start == min(reached) and found.end == max(reached) + 1


def part(x: UOp, y: UOp, row: int, column: int) -> tuple[UOp, UOp]:
    """Return (value, target) of an assignment: two columns of y, from `column` on, to two rows of x, from `row` on."""
    target = graph.shrink(graph.reshape(x, (8, 6)), [(row, row + 2), (0, 5)])
    value = graph.permute(graph.shrink(graph.reshape(y, (5, 9)), [(0, 5), (column, column + 2)]), (1, 0))
    return value, target


def test_what_is_done_to_other_parts_is_the_same_kernel() -> None:
    x, y = graph.buffer(dtypes.int32, 48), graph.buffer(dtypes.int32, 45)
    first, second = kernel_ast(*part(x, y, 0, 0)), kernel_ast(*part(x, y, 5, 7))
    assert first.ast is second.ast and first.offsets == (0, 0) and second.offsets == (30, 7)
    assert regions_of(first.ast) == (Region(0, 5, ((6, 2),)), Region(0, 2, ((9, 5),)))


def test_reads_under_a_gate_are_found_again() -> None:
    """In a padded part, the index of the load is outside the part if the gate is false; the kernel still reads the right elements."""
    x = graph.buffer(dtypes.int32, 40)
    values = np.arange(40, dtype=np.int32)
    for begin in (0, 3, 34):
        y = graph.pad(graph.shrink(x, [(begin, begin + 6)]), [(2, 30)])
        schedule = create_schedule(graph.sink(graph.alu(Ops.ADD, y, y)))
        memory = run_schedule(schedule, {x: values})
        np.testing.assert_array_equal(memory[schedule.outputs[0]], np.pad(values[begin:begin + 6], (2, 30)) * 2)
