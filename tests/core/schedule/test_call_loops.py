"""Nested loops of calls: compared with an interpreter on random trees of loops; the loop to which a call belongs, the order of the calls in
a loop, and the errors for ill-formed loops."""
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from svod.core.graph import graph
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.calls import MOST_INVOCATIONS, programs_of, unroll
from svod.core.schedule.calls import ProgramStep as Step
from svod.core.schedule.schedule import create_schedule
from svod.errors import ScheduleError
from tests.call_trees import ROWS, WIDTH, Call, Loop, interpret, random_arrays, random_tree, variable
from tests.core.schedule.test_schedule_order import any_order
from tests.core.scheduling import run_schedule
from tests.draws import a_quarter
from tests.hand_kernels import number

VOID, INDEX, I32 = dtypes.void, dtypes.index, dtypes.int32


def turns(n: int, axis: int = 0) -> UOp:
    return UOp(Ops.RANGE, INDEX, (number(n),), axis)


def end(*src: UOp) -> UOp:
    return UOp(Ops.END, VOID, src)


def after(content: UOp, *done: UOp) -> UOp:
    return UOp(Ops.AFTER, content.dtype, (content, *done))


def call(y: UOp, x: UOp, *counters: UOp, constant: int = 0) -> UOp:
    """Make a call of y = (y·3 + x + constant) & 1023 on one row of y. The row's number is the sum of the given counters, RANGEs and
    numbers."""
    depths = tuple(range(len(counters)))
    binds = [UOp(Ops.BIND, INDEX, (variable(d), c)) for d, c in zip(depths, counters, strict=True)]
    return UOp(Ops.CALL, VOID, (y, x, *binds), Call(0, 1, depths, (), constant).kernel())


def memory() -> UOp:
    return graph.buffer(I32, ROWS * WIDTH)


def kinds(*outputs: UOp) -> list[str]:
    """List the steps of the only loop of a graph, with the number of each RANGE."""
    (program,) = programs_of(graph.sink(*outputs)).values()
    ranges = list(dict.fromkeys(s.range for s in program.steps if s.range is not None))
    return [f"{s.kind} {ranges.index(s.range)}" if s.range is not None else s.kind for s in program.steps]


def values(*outputs: UOp) -> list[tuple[int, ...]]:
    """List the values of the variables in each invocation of the only loop of a graph."""
    (program,) = programs_of(graph.sink(*outputs)).values()
    return [tuple(v for _, v in i.values) for i in unroll(program.steps)]


def build(statements: tuple[Call | Loop, ...], contents: list[UOp], ranges: tuple[UOp, ...] = ()) -> list[UOp]:
    """Build the calls and ENDs of a tree, and put their AFTERs into `contents`. Loops at one depth with equal numbers of iterations share
    their RANGE."""
    units = []
    for s in statements:
        if isinstance(s, Loop):
            before, r = list(contents), turns(s.times, len(ranges))
            unit = end(*build(s.body, contents, (*ranges, r)), r)
            contents[:] = [b if b is c else after(b, unit) for b, c in zip(before, contents, strict=True)]
        else:
            binds = [UOp(Ops.BIND, INDEX, (variable(d), ranges[d])) for d in s.counters]
            unit = UOp(Ops.CALL, VOID, (contents[s.y], contents[s.x], *binds), s.kernel())
            contents[s.y] = after(contents[s.y], unit)
        units.append(unit)
    return units


@pytest.mark.parametrize("seed", a_quarter(range(40)))
def test_random_trees_of_loops_do_what_a_plain_interpreter_does(seed: int) -> None:
    rng = random.Random(seed)
    tree, start = random_tree(rng), random_arrays(rng)
    buffers = [memory() for _ in start]
    contents = list(buffers)
    build(tree, contents)
    state = [a.copy() for a in start]
    calls = interpret(tree, state)
    schedule = create_schedule(graph.sink(*contents))
    assert len(schedule.calls) == calls
    for _ in range(2):
        found = run_schedule(schedule, dict(zip(buffers, start, strict=True)))
        for buffer, want in zip(buffers, state, strict=True):
            np.testing.assert_array_equal(found.get(buffer, want.ravel()), want.ravel(), str(tree))
        schedule = replace(schedule, calls=any_order(schedule.calls, rng))


# -- the loop to which a call belongs ------------------------------------------------------------------------------------
def test_calls_before_and_after_an_inner_loop_depend_on_the_outer_range_only() -> None:
    x, y, z, r, s = memory(), memory(), memory(), turns(2), turns(3, 1)
    p = call(x, y, r)
    k = call(y, after(x, p), r, s)
    q = call(z, after(y, end(k, s)), r)
    done = after(z, end(q, r))
    assert kinds(done) == ["BEGIN 0", "RUN", "BEGIN 1", "RUN", "END 1", "RUN", "END 0"]
    assert values(done) == [(i, *j) for i in range(2) for j in ((), *((j,) for j in range(3)), ())]
    state = [np.full((ROWS, WIDTH), n, np.int32) for n in range(3)]
    tree = Loop(2, (Call(0, 1, (0,), (), 0), Loop(3, (Call(1, 0, (0, 1), (), 0),)), Call(2, 1, (0,), (), 0)))
    found = run_schedule(create_schedule(graph.sink(done)), dict(zip((x, y, z), state, strict=True)))
    interpret((tree,), state)
    np.testing.assert_array_equal(found[z], state[2].ravel())


def test_an_end_of_an_end_closes_the_outer_loop() -> None:
    x, y, r, s, t = memory(), memory(), turns(2), turns(1, 1), turns(3, 2)
    k = call(x, y, r, s)
    assert values(after(x, end(end(k, s), r))) == [(0, 0), (1, 0)]
    assert values(after(x, end(end(k, r), s))) == [(0, 0), (1, 0)]
    assert kinds(after(x, end(end(end(k, s), t), r))) == ["BEGIN 0", "BEGIN 1", "BEGIN 2", "RUN", "END 2", "END 1", "END 0"]
    assert values(after(x, end(end(end(k, s), t), r))) == [(i, 0) for i in range(2) for _ in range(3)]      # t counts and is not read
    assert kinds(after(x, end(end(end(end(k), s)), r))) == ["BEGIN 0", "BEGIN 1", "RUN", "END 1", "END 0"]


def test_a_call_of_an_inner_loop_may_depend_on_the_outer_range_only_or_on_none() -> None:
    x, y, r, s = memory(), memory(), turns(2), turns(3, 1)
    assert values(after(x, end(end(call(x, y, r), s), r))) == [(0,)] * 3 + [(1,)] * 3
    assert values(after(x, end(end(call(x, y), s), r))) == [()] * 6


def test_what_depends_on_no_range_and_is_not_named_by_the_end_runs_once() -> None:
    x, y, z, r, s = memory(), memory(), memory(), turns(2), turns(3, 1)
    once = call(x, z)
    inner = end(call(y, after(x, once), s), s)
    outer = end(call(z, after(y, inner), r), r)
    programs = programs_of(graph.sink(after(z, outer)))
    assert [len(unroll(p.steps)) for p in programs.values()] == [1, 3, 2] and list(programs) == [once, inner, outer]
    named = end(once, inner, call(z, after(y, inner), r), r)
    assert values(after(z, named)) == [(), (0,), (1,), (2,), (0,), (), (0,), (1,), (2,), (1,)]


def test_loops_one_after_the_other_share_a_range() -> None:
    x, y, r, s = memory(), memory(), turns(2), turns(2, 1)
    first = end(call(x, y, r, s), s)
    second = end(call(y, after(x, first), r, s), s)
    assert kinds(after(y, end(second, r))) == ["BEGIN 0", "BEGIN 1", "RUN", "END 1", "BEGIN 1", "RUN", "END 1", "END 0"]
    assert values(after(y, end(second, r))) == [(i, j) for i in range(2) for _ in range(2) for j in range(2)]


def test_turns_are_multiplied_and_bounded() -> None:
    x, y = memory(), memory()
    k = call(x, y)
    for n, m in ((128, 128), (1, 1 << 14), (1 << 14, 1)):
        (program,) = programs_of(graph.sink(after(x, end(end(k, turns(n)), turns(m, 1))))).values()
        assert len(unroll(program.steps)) == MOST_INVOCATIONS
    with pytest.raises(ScheduleError, match=r"more than 16384 invocations or turns, 16512: .* loop inside the kernel"):
        create_schedule(graph.sink(after(x, end(end(k, turns(129)), turns(128, 1)))))
    with pytest.raises(ScheduleError, match=f"invocations or turns, {1 << 60}"):
        create_schedule(graph.sink(after(x, end(end(k, turns(1 << 30)), turns(1 << 30, 1)))))


# -- the order of the calls in a loop ------------------------------------------------------------------------------------
def test_a_content_is_read_before_it_is_overwritten_in_each_turn() -> None:
    """q overwrites x, which p reads. The graph orders neither before the other and lists q first, but p has to run first."""
    x, y, z, r, s = memory(), memory(), memory(), turns(2), turns(2, 1)
    p, q = end(call(y, x, r, s), s), call(x, z, r)
    done = end(call(z, after(x, q), r), p, r)
    schedule = create_schedule(graph.sink(after(z, done), after(y, done)))
    state = [np.array([[i + n] * WIDTH for i in range(ROWS)], np.int32) for n in range(3)]
    found = run_schedule(schedule, dict(zip((x, y, z), state, strict=True)))
    interpret((Loop(2, (Loop(2, (Call(1, 0, (0, 1), (), 0),)), Call(0, 2, (0,), (), 0), Call(2, 0, (0,), (), 0))),), state)
    for buffer, want in zip((y, z), state[1:], strict=True):
        np.testing.assert_array_equal(found[buffer], want.ravel())


def test_an_order_alone_is_kept_inside_a_loop_and_by_a_loop() -> None:
    x, y, z, r, s = memory(), memory(), memory(), turns(2), turns(2, 1)
    first, second = call(y, z, r, constant=1), end(call(x, z, s, constant=2), s)
    k = call(graph.buffer(I32, ROWS * WIDTH), after(x, second, after(y, first)), r)
    assert values(after(k.src[0], end(second, k, r))) == [v for i in range(2) for v in ((i,), (0,), (1,), (i,))]
    before = after(y, call(y, z, constant=3))
    inside = call(x, z, r)
    looped = end(call(graph.buffer(I32, ROWS * WIDTH), after(x, inside, before), r), r)
    schedule = create_schedule(graph.sink(after(looped.src[0].src[0], looped), before))
    assert [c.deps[:1] for c in schedule.calls].count((0,)) == 4 and schedule.calls[0].args[0] is y


# -- what is refused -----------------------------------------------------------------------------------------------------
X, Y, Z, W = memory(), memory(), memory(), memory()
R, S = turns(2), turns(3, 1)
K = call(X, Y, R, S)


def value_of(content: UOp) -> UOp:
    return UOp(Ops.ADD, I32, (content, content))


GRAPHS: dict[str, tuple[Callable[[], list[UOp]], str]] = {
    "closed already": (lambda: [after(X, end(end(K, S), S))], "closes a RANGE that an END inside it has closed already"),
    "closed already two loops inside": (lambda: [after(X, end(end(end(call(X, Y, R), R), S), R))], "has closed already"),
    "outer RANGE without END": (lambda: [after(X, end(K, S))], "missing its END: a call depends on a RANGE that no END closes"),
    "inner RANGE without END": (lambda: [after(X, end(K, R))], "missing its END"),
    "END of two RANGEs": (lambda: [after(X, end(K, R, S))], "must close at most one RANGE, found 2; a nest has an END for each"),
    "END of several calls without RANGE": (lambda: [after(X, end(call(X, Y), call(Z, Y)))], "END of 2 CALLs closes no RANGE"),
    "two ENDs of one call": (lambda: [after(X, end(K, S)), after(X, end(K, R))], "stands in two loops of calls, .* the loops cross"),
    "crossing": (lambda: [after(X, end(K, R)), after(Z, end(call(Z, after(X, K), S), S))], "reads what is left inside another loop"),
    "left in an inner loop, read after it": (lambda: [after(Z, end(end(K, S), call(Z, after(X, K), R), R))], "inside another loop"),
    "left in a loop named by its END, read after it": (
        lambda: [after(Y, end(end(k := call(X, Y), S), call(Y, after(X, k)), R))], "inside another loop"),
    "left in an outer loop, read outside": (lambda: [after(X, end(K, S)), after(Z, call(Z, after(X, end(K, S)), 1 * number(1)))],
                                            "missing its END"),
    "left in an outer loop, an output": (lambda: [after(X, (e := end(call(X, Y), S))), after(Z, end(call(Z, after(X, e)), e, R))],
                                         "an output is what a call leaves inside a loop"),
    "left in an outer loop, a value": (lambda: [value_of(after(X, (e := end(call(X, Y), S)))), after(Z, end(call(Z, Y), e, R))],
                                       "by ADD, of what a call leaves inside a loop"),
    "assigned in a loop": (lambda: [after(Z, end(k := call(X, Y), call(Z, after(
        inner := after(X, k), UOp(Ops.ASSIGN, I32, (inner, Y)))), R))], "by ASSIGN, of what a call leaves inside a loop"),
    "each overwrites what the other reads": (lambda: [after(Z, end(call(Z, Y, R), call(X, Y, R), call(Y, X, R), R))], "in a circle"),
    "two of the same content": (lambda: [after(X, end(call(X, Y, R), call(X, Z, R), R))], "calls of a loop start from the same content"),
    "after what comes after it": (lambda: [after(Z, end(k := call(X, Y, R), q := call(Z, after(X, k), R), call(
        W, after(X, k, after(Z, q)), R), R))], "in a circle"),
    "after its own END": (lambda: [after(Z, end(call(Z, after(X, (k := call(X, Y)), after(X, end(k, S)))), R))], "in a circle"),
    "two contents from before": (lambda: [after(Z, end(call(Z, X, R), call(after(X, call(X, Y)), Y, R), R))],
                                 "reads two contents of it from before the loop"),
    "END of nothing": (lambda: [after(X, end(end(), R))], "END must wrap a CALL, found nothing"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_loops_that_are_refused(name: str) -> None:
    make, said = GRAPHS[name]
    with pytest.raises(ScheduleError, match=said):
        create_schedule(graph.sink(*make()))


RUN = Step("RUN", K, None)
PROGRAMS: dict[str, tuple[tuple[Step, ...], str]] = {
    "crossing": ((Step("BEGIN", None, R), Step("BEGIN", None, S), RUN, Step("END", K, R), Step("END", K, S)), "the loops cross"),
    "begun twice": ((Step("BEGIN", None, R), Step("BEGIN", None, R), RUN), "begins that is active already"),
    "ended twice": ((Step("BEGIN", None, R), Step("BEGIN", None, S), RUN, Step("END", K, S), Step("END", K, S), Step("END", K, R)),
                    "not active: its BEGIN does not stand before it, or it is closed already"),
    "outer missing END": ((Step("BEGIN", None, R), Step("BEGIN", None, S), RUN, Step("END", K, S)), "is missing END"),
    "inner over": ((Step("BEGIN", None, R), Step("BEGIN", None, S), RUN, Step("END", K, S), RUN, Step("END", K, R)),
                   "variable c1 of a CALL is a RANGE that is not active"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_are_refused(name: str) -> None:
    program, said = PROGRAMS[name]
    with pytest.raises(ScheduleError, match=said):
        unroll(program)
