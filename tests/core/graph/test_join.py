"""The rewrite of CAT: the conditions for selects and for storing part by part, and correct results of both."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from svod.core.graph import graph
from svod.core.graph.shapes import shape_of
from svod.core.graph.storage import base_of
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.schedule import Schedule, create_schedule
from svod.core.schedule.schedule_check import check_schedule
from svod.errors import ScheduleError
from tests.core.scheduling import run_schedule
from tests.graph_reference import evaluate_graph

Array = np.ndarray


def leaf(*shape: int) -> UOp:
    return graph.reshape(graph.buffer(dtypes.int32, int(np.prod(shape))), shape)


def check(node: UOp) -> Schedule:
    """Return the schedule of a node, after checking its result against the reference."""
    rng = np.random.default_rng(0)
    contents = {b: rng.integers(-99, 99, b.arg).astype(np.int32) for b in node.walk(Ops.BUFFER)}
    schedule = create_schedule(graph.sink(node))
    got = run_schedule(schedule, contents)[schedule.outputs[0]]
    np.testing.assert_array_equal(got, evaluate_graph(node, contents).ravel())
    return schedule


def doubled(x: UOp) -> UOp:
    return graph.alu(Ops.ADD, x, x)


def test_what_is_read_by_elementwise_work_is_selected_from() -> None:
    call, = check(doubled(graph.cat([leaf(3, 4), leaf(2, 4), leaf(1, 4)], 0))).calls
    assert len(list(call.ast.walk(Ops.LOAD))) == 3


def test_an_output_is_stored_part_by_part() -> None:
    schedule = check(graph.cat([leaf(3, 4), doubled(leaf(3, 2)), leaf(3, 4)], 1))
    assert [c.name_hint for c in schedule.calls] == ["copy", "elementwise", "copy"]
    assert all(not c.deps and c.args[0] is schedule.outputs[0] for c in schedule.calls)
    assert schedule.calls[0].ast is schedule.calls[2].ast and [c.offsets[0] for c in schedule.calls] == [0, 4, 6]


def test_many_parts_are_stored_by_one_kernel_each() -> None:
    """Concatenating 200 slices of one tensor calls one kernel 200 times, at different offsets."""
    x = leaf(200, 7)
    joined = graph.cat([graph.shrink(x, [(i, i + 1), (0, 7)]) for i in reversed(range(200))], 0)
    schedule = check(doubled(joined))
    assert len({c.ast for c in schedule.calls}) == 2 and len(schedule.calls) == 201
    assert schedule.calls[-1].deps == tuple(range(200))


def test_a_concatenation_of_concatenations_is_one() -> None:
    grown = leaf(1, 3)
    for _ in range(20):
        grown = graph.cat([grown, leaf(1, 3)], 0)
    assert len(check(doubled(grown)).calls) == 22
    rows = [graph.cat([leaf(2, 3), leaf(2, 4)], 1) for _ in range(3)]
    assert len(check(graph.cat(rows, 0)).calls) == 6


def test_no_element_passes_many_selects() -> None:
    """The limit applies to the total of nested selects."""
    rows = [graph.cat([leaf(2, 3), leaf(2, 4), leaf(2, 1)], 1) for _ in range(4)]
    schedule = check(doubled(graph.cat(rows, 0)))
    assert len(schedule.calls) == 13 and len(list(schedule.calls[-1].ast.walk(Ops.LOAD))) == 1


def test_a_part_is_computed_where_it_is_stored() -> None:
    """One call per part: a reduction is computed directly into the joined buffer, and a value that is three parts is copied three times."""
    x, y = leaf(4, 5), leaf(4, 1)
    total = graph.reduce_axis(x, "ADD", (1,))
    assert [c.name_hint for c in check(graph.cat([total, y], 1)).calls] == ["reduce", "copy"]
    assert len(check(graph.cat([y, y, y], 0)).calls) == 3


def products(h: UOp, w: UOp) -> UOp:
    """The product of a square matrix and a vector."""
    n = shape_of(h)[0]
    return graph.reduce_axis(graph.alu(Ops.MUL, w, graph.expand(graph.reshape(h, (1, n)), (n, n))), "ADD", (1,))


def states(count: int, width: int) -> list[UOp]:
    """The states of a recurrence: each is the product of a matrix and the last one."""
    found, w = [leaf(width)], leaf(width, width)
    for _ in range(count):
        found.append(graph.reshape(products(found[-1], w), (width,)))
    return found[1:]


def test_states_are_computed_where_they_are_joined() -> None:
    """Each step writes its part and reads the part before it. Parts that begin within a cache line are copied."""
    joined = graph.cat([graph.reshape(h, (1, 16)) for h in states(5, 16)], 0)
    schedule = check(joined)
    assert [(c.args[0], c.offsets[0], c.deps) for c in schedule.calls] == [
        (schedule.outputs[0], 16 * i, (i - 1,) if i else ()) for i in range(5)]
    assert len(check(graph.cat([graph.reshape(h, (1, 7)) for h in states(5, 7)], 0)).calls) > 5


@settings(max_examples=20)
@given(st.data())
def test_states_that_others_read_as_well(data: st.DataObject) -> None:
    width, count = data.draw(st.sampled_from([1, 3, 16, 32])), data.draw(st.integers(1, 6))
    found = states(count, width)
    picked = [found[i] for i in data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=6))]
    read, returned = (found[data.draw(st.integers(0, count - 1))] for _ in range(2))
    nodes = [graph.cat([graph.reshape(h, (1, width)) for h in picked], 0), products(read, leaf(width, width)),
             graph.cat([*map(doubled, found), leaf(width)], 0), *[returned] * data.draw(st.integers(0, 1))]
    rng = np.random.default_rng(0)
    contents = {b: rng.integers(-99, 99, b.arg).astype(np.int32) for b in graph.sink(*nodes).walk(Ops.BUFFER)}
    schedule = create_schedule(graph.sink(*nodes))
    check_schedule(schedule)
    got = run_schedule(schedule, contents)
    for node, output in zip(nodes, schedule.outputs, strict=True):
        np.testing.assert_array_equal(got[output], evaluate_graph(node, contents).ravel())


@settings(max_examples=30)
@given(st.data())
def test_random_concatenations(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 3))

    def build(shape: list[int], depth: int) -> UOp:
        kind = data.draw(st.sampled_from(["leaf", "cat", "cat", "double"] if depth else ["leaf"]))
        if kind == "leaf":
            return leaf(*shape)
        if kind == "double":
            return doubled(build(shape, depth - 1))
        axis = data.draw(st.integers(0, rank - 1))
        count = data.draw(st.integers(1, min(12, shape[axis])))
        cuts = sorted(data.draw(st.lists(st.integers(0, shape[axis]), min_size=count - 1, max_size=count - 1)))
        extents = [b - a for a, b in zip([0, *cuts], [*cuts, shape[axis]], strict=True)]
        return graph.cat([build([*shape[:axis], n, *shape[axis + 1:]], depth - 1) if n else
                          graph.full((*shape[:axis], 0, *shape[axis + 1:]), 0, dtypes.int32) for n in extents], axis)
    node = build([data.draw(st.sampled_from([1, 2, 5, 7])) for _ in range(rank)], 3)
    if base_of(node).op is not Ops.BUFFER:
        check(node)


def test_contents_do_not_fork() -> None:
    x, y = graph.buffer(dtypes.int32, 6), graph.buffer(dtypes.int32, 6)
    with pytest.raises(ScheduleError, match="same content"):
        create_schedule(graph.sink(graph.assign(x, y), graph.assign(x, doubled(y))))


def test_a_part_is_written_from_another_without_a_temporary() -> None:
    x = graph.buffer(dtypes.int32, 24)
    square = graph.reshape(x, (4, 6))

    def columns(begin: int, end: int) -> UOp:
        return graph.shrink(square, [(0, 4), (begin, end)])
    assert len(check(graph.assign(columns(0, 2), columns(4, 6))).calls) == 1
    assert len(check(graph.assign(columns(0, 2), doubled(columns(0, 2)))).calls) == 1
    assert len(check(graph.assign(columns(0, 2), columns(1, 3))).calls) == 2
