"""Calls of kernels in a graph: arguments, variables, unrolled loops of calls, and all errors."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from svod.core.graph import graph
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.ir.variable import Variable
from svod.core.schedule.calls import MOST_INVOCATIONS, Invocation, memory_of, programs_of, unroll
from svod.core.schedule.calls import ProgramStep as Step
from svod.core.schedule.schedule import create_schedule
from svod.errors import ScheduleError, ShapeError
from tests.core.scheduling import run_schedule
from tests.hand_kernels import Ast, number

VOID, INDEX, F32 = dtypes.void, dtypes.index, dtypes.float32
N = 4


def variable(name: str = "i", low: int = 0, high: int = 7) -> UOp:
    return UOp(Ops.DEFINE_VAR, INDEX, (), (name, low, high))


def accumulate(size: int = 8 * N) -> UOp:
    """Make the kernel y = y·2 + x[i·4 : i·4 + 4]."""
    k = Ast()
    y, x = k.param(0, N), k.param(1, size)
    r, = k.axes(N)
    return k.sink(k.store(y, r, k.load(y, r) * 2.0 + k.load(x, variable() * N + r), r))


def add() -> UOp:
    """Make the kernel y = a + b."""
    k = Ast()
    y, a, b = k.param(0, N), k.param(1, N), k.param(2, N)
    r, = k.axes(N)
    return k.sink(k.store(y, r, k.load(a, r) + k.load(b, r), r))


def turns(n: int | UOp, axis: int = 0) -> UOp:
    return UOp(Ops.RANGE, INDEX, (n if isinstance(n, UOp) else number(n),), axis)


def bind(value: UOp | int, var: UOp | None = None) -> UOp:
    return UOp(Ops.BIND, INDEX, (var or variable(), value if isinstance(value, UOp) else number(value)))


def call(ast: UOp, *args: UOp) -> UOp:
    return UOp(Ops.CALL, VOID, args, ast)


def end(called: UOp, *ranges: UOp) -> UOp:
    return UOp(Ops.END, VOID, (called, *ranges))


def after(content: UOp, *done: UOp) -> UOp:
    return UOp(Ops.AFTER, content.dtype, (content, *done))


def memory(size: int = N) -> UOp:
    return graph.buffer(F32, size)


# -- schedules of calls and loops ----------------------------------------------------------------------------------------
def test_a_loop_is_unrolled_into_invocations_with_fixed_variables() -> None:
    y, x, r = memory(), memory(8 * N), turns(3)
    looped = after(y, end(call(accumulate(), y, x, bind(r)), r))
    (program,) = programs_of(graph.sink(looped)).values()
    assert [s.kind for s in program.steps] == ["BEGIN", "RUN", "END"]
    assert [i.values for i in unroll(program.steps)] == [(("i", 0),), (("i", 1),), (("i", 2),)]
    schedule = create_schedule(graph.sink(looped))
    assert len({c.ast for c in schedule.calls}) == 1 and [c.offsets for c in schedule.calls] == [(0, 0), (0, N), (0, 2 * N)]
    assert [c.deps[-1:] for c in schedule.calls] == [(), (0,), (1,)]       # each turn waits for the one before, not for the kernel
    assert [c.why for c in schedule.calls] == [f"called with i = {i}" for i in range(3)]
    start, values = np.ones(N, np.float32), np.arange(8 * N, dtype=np.float32)
    want = start
    for i in range(3):
        want = want * 2 + values[i * N:(i + 1) * N]
    np.testing.assert_array_equal(run_schedule(schedule, {y: start, x: values})[schedule.outputs[0]], want)


def test_calls_of_one_loop_take_turns_on_the_same_memory() -> None:
    """x = x + y and y = y + x alternate. Only the last call is the operand of an END. The first belongs to the loop too, because the last
    depends on its result and it uses the loop's RANGE."""
    x, y, r = memory(), memory(), turns(4)
    k = Ast()
    p, a = k.param(0, N), k.param(1, N)
    e, = k.axes(N)
    more = k.sink(k.store(p, e, k.load(p, e) + k.load(a, e) + variable().cast(F32), e))
    first = call(more, x, y, bind(r))
    last = call(more, y, after(x, first), bind(r))
    done = end(last, r)
    schedule = create_schedule(graph.sink(after(y, done), after(x, done)))
    assert len(schedule.calls) == 8
    a1, b1 = np.arange(N, dtype=np.float32), np.ones(N, np.float32)
    wanted = [a1.copy(), b1.copy()]
    for i in range(4):
        wanted[0] += wanted[1] + i
        wanted[1] += wanted[0] + i
    found = run_schedule(schedule, {x: a1, y: b1})
    for buffer, want in zip(schedule.outputs, reversed(wanted), strict=True):
        np.testing.assert_array_equal(found[buffer], want)


def test_turns_and_variables_are_expressions_of_what_is_bound() -> None:
    """The loop has a RANGE of n//2 + 1 with n bound to 5, and binds i to n - 3."""
    n = bind(5, variable("n", 1, 9))
    y, x = memory(), memory(8 * N)
    r = turns(UOp(Ops.IDIV, INDEX, (n, number(2))) + 1)
    counted = create_schedule(graph.sink(after(y, end(call(accumulate(), y, x, bind(r)), r))))
    assert [c.why for c in counted.calls] == [f"called with i = {i}" for i in range(3)]
    assert create_schedule(graph.sink(after(y, call(accumulate(), y, x, bind(n - 3))))).calls[0].why == "called with i = 2"
    count = Variable("count", 1, 9, hint=5)
    r = turns(count.bind(3).expr)
    assert len(create_schedule(graph.sink(after(y, end(call(accumulate(), y, x, bind(r)), r)))).calls) == 3
    with pytest.raises(ScheduleError, match=r"missing runtime value for launch-size variable count; bind it, as in count.bind\(1\)"):
        create_schedule(graph.sink(after(y, end(call(add(), y, x, x), turns(count.expr)))))


def test_loops_of_the_same_range_are_loops_of_their_own() -> None:
    """Two loops with RANGEs of equal extent stay separate loops, one after the other or independent of each other."""
    y, z, x, r = memory(), memory(), memory(8 * N), turns(2)
    ast = accumulate()
    twice = after(y, end(call(ast, y, x, bind(r)), r))
    twice = after(twice, end(call(ast, twice, x, bind(r)), r))
    beside = after(z, end(call(ast, z, x, bind(r)), r))
    schedule = create_schedule(graph.sink(twice, beside))
    assert len(schedule.calls) == 6 and len({c.ast for c in schedule.calls}) == 1
    values = np.arange(8 * N, dtype=np.float32)
    want = np.zeros(N, np.float32)
    for i in (0, 1, 0, 1):
        want = want * 2 + values[i * N:(i + 1) * N]
    found = run_schedule(schedule, {y: np.zeros(N, np.float32), z: np.zeros(N, np.float32), x: values})
    np.testing.assert_array_equal(found[y], want)
    np.testing.assert_array_equal(found[z], values[:N] * 2 + values[N:2 * N])


def test_an_end_without_range_is_one_call_and_a_call_need_not_read_the_count() -> None:
    y, a = memory(), memory()
    once = create_schedule(graph.sink(after(y, end(call(add(), y, a, a)))))
    assert len(once.calls) == 1
    k = Ast()
    p, = (k.param(0, N),)
    e, = k.axes(N)
    doubled = k.sink(k.store(p, e, k.load(p, e) * 2.0, e))
    schedule = create_schedule(graph.sink(after(y, end(call(doubled, y), turns(5)))))
    np.testing.assert_array_equal(run_schedule(schedule, {y: np.ones(N, np.float32)})[y], np.full(N, 32, np.float32))


def test_values_are_computed_for_a_call_and_reads_of_the_old_content_come_before() -> None:
    y, a = memory(), memory()
    old = UOp(Ops.MUL, F32, (y, y))
    written = after(y, call(add(), y, UOp(Ops.ADD, F32, (a, a)), a))
    schedule = create_schedule(graph.sink(old, written, UOp(Ops.ADD, F32, (written, a))))
    assert [c.why for c in schedule.calls].count("argument of a call") == 1
    content = {y: np.arange(N, dtype=np.float32), a: np.ones(N, np.float32)}
    found = run_schedule(schedule, content)
    for buffer, want in zip(schedule.outputs, (content[y] ** 2, [3.0] * N, [4.0] * N), strict=True):
        np.testing.assert_array_equal(found[buffer], want)


def test_an_order_alone_is_a_dependency() -> None:
    """With AFTER(x, CALL, AFTER(y, …)) the call waits for the write of y, although it does not read y."""
    x, y, a = memory(), memory(), memory()
    first = after(y, call(add(), y, a, a))
    second = after(x, call(add(), x, a, a), first)
    assert [c.deps for c in create_schedule(graph.sink(second, first)).calls] == [(), (0,)]
    assert [c.deps for c in create_schedule(graph.sink(after(x, call(add(), x, a, a)), first)).calls] == [(), ()]


def test_a_store_under_an_after_is_an_assignment_and_a_kernels_own_orders_nothing() -> None:
    """STORE(view of x, value) writes the view, as an ASSIGN does. A STORE inside a kernel implies no order: the CALL does."""
    x, a, b = memory(2 * N), memory(), memory()
    half = graph.shrink(x, [(N, 2 * N)])
    stored = after(x, UOp(Ops.STORE, VOID, (half, UOp(Ops.ADD, F32, (a, b)))))
    schedule = create_schedule(graph.sink(stored, UOp(Ops.MUL, F32, (stored, stored))))
    given = {x: np.arange(2 * N, dtype=np.float32), a: np.full(N, 2, np.float32), b: np.arange(N, dtype=np.float32)}
    found = run_schedule(schedule, given)
    want = np.concatenate([given[x][:N], given[a] + given[b]])
    for buffer, values in zip(schedule.outputs, (want, want * want), strict=True):
        np.testing.assert_array_equal(found[buffer], values)
    assert schedule == create_schedule(graph.sink(*(u.substitute({stored: graph.assign(half, UOp(Ops.ADD, F32, (a, b)))})
                                                   for u in (stored, UOp(Ops.MUL, F32, (stored, stored))))))

    ast = add()
    own, = ast.src
    called = call(ast, a, b, b)
    assert create_schedule(graph.sink(after(a, called, own))) == create_schedule(graph.sink(after(a, called)))
    assert create_schedule(graph.sink(after(a, own))).calls == ()
    assert create_schedule(graph.sink(after(after(a, own), called), after(b, own))).outputs == (a, b)


def test_only_variables_that_the_kernel_reads_are_fixed() -> None:
    y, x = memory(), memory(8 * N)
    called = call(accumulate(), y, x, bind(2), bind(3, variable("unused")))
    assert unroll((Step("RUN", called, None),)) == (Invocation(called, (("i", 2),)),)
    schedule = create_schedule(graph.sink(after(y, called)))
    assert schedule.calls[0].offsets == (0, 2 * N) and schedule.calls[0].why == "called with i = 2"


def test_memory_of_several_devices_is_that_of_one() -> None:
    parts = tuple(memory() for _ in range(3))
    stack = UOp(Ops.MSTACK, F32, parts)
    assert memory_of(stack) is parts[0] and memory_of(UOp(Ops.MSELECT, F32, (stack,), 2)) is parts[2]
    y = memory()
    schedule = create_schedule(graph.sink(after(y, call(add(), y, stack, UOp(Ops.MSELECT, F32, (stack,), 1)))))
    assert set(schedule.calls[0].args) == {y, parts[0], parts[1]}
    for alien in (UOp(Ops.MSELECT, F32, (stack,), 3), UOp(Ops.MSELECT, F32, (y,), 0), UOp(Ops.MSTACK, F32, ())):
        with pytest.raises(ScheduleError, match="a multi-device argument must name the memory of one device"):
            memory_of(alien)


# -- what is refused -----------------------------------------------------------------------------------------------------
Y, X, A, A2 = memory(), memory(8 * N), memory(), memory()
R, R2 = turns(3), turns(3, 1)


def stored_at(shift: int) -> UOp:
    k = Ast()
    p = k.param(0, N)
    e, = k.axes(N)
    return k.sink(k.store(p, e + shift, number(1).cast(F32), e))


def through_iota() -> UOp:
    k = Ast()
    p = k.param(0, N)
    e, = k.axes(N)
    counted = UOp(Ops.IOTA, F32, (), N)
    return k.sink(k.store(p, e, UOp(Ops.LOAD, F32, (UOp(Ops.INDEX, F32, (counted, e)),)), e))


def reversed_in_place() -> UOp:
    k = Ast()
    p = k.param(0, N)
    e, = k.axes(N)
    return k.sink(k.store(p, e, k.load(p, e * -1 + (N - 1)), e))


GRAPHS: dict[str, tuple[Callable[[], UOp], str]] = {
    "AFTER of a STORE to other memory": (lambda: after(Y, UOp(Ops.STORE, VOID, (A, Y))), "STOREs to it: one is to something else"),
    "AFTER of a STORE to a value": (lambda: after(Y, UOp(Ops.STORE, VOID, (UOp(Ops.ADD, F32, (Y, Y)), Y))), "STORE to ADD"),
    "AFTER of a STORE of another shape": (lambda: after(Y, UOp(Ops.STORE, VOID, (Y, X))), "shape and dtype must agree"),
    "AFTER of a STORE with RANGEs": (lambda: after(Y, UOp(Ops.STORE, VOID, (Y, A, R))), "a view of the buffer and a value, found 3"),
    "AFTER of a STORE and a CALL": (lambda: after(Y, UOp(Ops.STORE, VOID, (Y, A)), call(add(), Y, A, A)), "either ASSIGNs or one CALL"),
    "AFTER of a value": (lambda: after(Y, A), r"ASSIGNs or STOREs to it or a CALL, END\(CALL\) or AFTER; found BUFFER"),
    "AFTER of nothing but an order": (lambda: after(Y, after(A, call(add(), A, Y, Y))), "either ASSIGNs or one CALL"),
    "AFTER of two calls": (lambda: after(Y, call(add(), Y, A, A), call(add(), Y, A, X)), "several calls are several AFTERs"),
    "AFTER of an END of a value": (lambda: after(Y, end(A)), "END that must wrap a CALL, found BUFFER"),
    "AFTER of what a call does not write": (lambda: after(A, call(add(), Y, A, A)), "a call that does not write it"),
    "END of two RANGEs": (lambda: after(Y, end(call(accumulate(), Y, X, bind(R)), R, R2)), "must close at most one RANGE, found 2"),
    "RANGE without END": (lambda: after(Y, call(accumulate(), Y, X, bind(R))), "a loop of calls is missing its END"),
    "a loop read from outside": (lambda: UOp(Ops.ADD, F32, (after(Y, (k := call(add(), Y, A, A))), after(Y, end(k, R)))),
                                 "by ADD, of what a call leaves inside a loop"),
    "a loop read from another": (lambda: UOp(Ops.ADD, F32, (
        after(Y, end((k := call(accumulate(), Y, X, bind(R))), R)), after(A, end(call(add(), A, after(Y, k), Y), R)))),
        "reads what is left inside another loop"),
    "a value computed in a loop": (lambda: after(A, end(call(add(), A, UOp(Ops.ADD, F32, (
        (inner := after(Y, call(accumulate(), Y, X, bind(R)))), inner)), A2), R)),
        "a value is computed, by ADD, of what a call leaves inside a loop"),
    "END of no RANGE": (lambda: after(Y, end(call(add(), Y, A, A), A)), "END closes a RANGE, found BUFFER"),
    "no turns": (lambda: after(Y, end(call(add(), Y, A, A), turns(0))), "invalid bounds of the RANGE of a loop of calls: first 0, last -1"),
    "turns by variable": (lambda: after(Y, end(call(add(), Y, A, A), turns(variable("n", 1, 9)))),
                          "must end at a concrete integer: missing runtime value for launch-size variable n"),
    "too many turns": (lambda: after(Y, end(call(add(), Y, A, A), turns(MOST_INVOCATIONS + 1))), "loop inside the kernel"),
    "unbound": (lambda: after(Y, call(accumulate(), Y, X)), "reads the variable i, which has no BIND"),
    "bound twice": (lambda: after(Y, call(accumulate(), Y, X, bind(1), bind(2))), r"bind mismatch on i, 1 != 2"),
    "bound outside": (lambda: after(Y, call(accumulate(), Y, X, bind(8))), r"variable i=8 is outside bounds \[0, 7\]"),
    "counted outside": (lambda: after(Y, end(call(accumulate(), Y, X, bind(turns(9))), turns(9))), r"variable i=8 is outside bounds"),
    "bound to a value": (lambda: after(Y, call(accumulate(), Y, X, bind(A))), "a number or to a loop's RANGE: unsupported op .*: BUFFER"),
    "bound to nothing": (lambda: after(Y, call(accumulate(), Y, X, bind(variable("n", 1, 9)))), "variable i .*: missing runtime value"),
    "BIND of no variable": (lambda: after(Y, call(add(), Y, A, A, UOp(Ops.BIND, INDEX, (number(1), number(1))))),
                            "BIND of a CALL must wrap a DEFINE_VAR, found CONST"),
    "memory of its own": (lambda: after(Y, call(through_iota(), Y)), "a LOAD of IOTA: .* memory of its own is a STAGE, sized"),
    "no kernel": (lambda: after(Y, call(UOp(Ops.SINK, VOID), Y)), "the body of a CALL is a kernel"),
    "missing argument": (lambda: after(Y, call(add(), Y, A)), r"parameters at the slots \[0, 1, 2\] is called with 2 arguments"),
    "other dtype": (lambda: after(Y, call(add(), Y, A, graph.buffer(dtypes.int32, N))), "given are 4 of int32"),
    "too small": (lambda: after(Y, call(add(), Y, A, memory(3))), "slot 2 .* takes 4 elements of float32; given are 3"),
    "written value": (lambda: after(Y, call(add(), UOp(Ops.ADD, F32, (A, A)), Y, A)), "slot 0 .* must be memory, found ADD"),
    "written and read as two slots": (lambda: after(Y, call(add(), Y, Y, A)), "another slot is the same memory"),
    "store outside": (lambda: after(Y, call(stored_at(1), Y)), "reaches elements 1 to 4 of slot 0, which has 4"),
    "load outside": (lambda: after(Y, call(accumulate(3 * N), Y, X, bind(3))), "elements 12 to 15 of slot 1, .*for some value of i"),
    "reads elsewhere what it writes": (lambda: after(Y, call(reversed_in_place(), Y)), "reads slot 0, which it writes, at other elements"),
    "same content twice": (lambda: UOp(Ops.ADD, F32, (after(Y, call(add(), Y, A, A)), after(Y, UOp(Ops.ASSIGN, F32, (Y, A))))),
                           "two ASSIGNs start from the same content"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_calls_that_are_refused(name: str) -> None:
    make, said = GRAPHS[name]
    with pytest.raises((ScheduleError, ShapeError), match=said):
        create_schedule(graph.sink(make()))


K = call(accumulate(), Y, X, bind(R))
BEGIN, RUN, END = Step("BEGIN", None, R), Step("RUN", K, None), Step("END", K, R)
PROGRAMS: dict[str, tuple[tuple[Step, ...], str]] = {
    "range missing END": ((BEGIN, RUN), "the RANGE of a loop of calls is missing END"),
    "END of a call that is unknown": ((BEGIN, Step("END", K, R)), "END of a loop is of a CALL that is unknown"),
    "END of a RANGE that is not active": ((Step("RUN", call(add(), Y, A, A), None), Step("END", call(add(), Y, A, A), R)), "not active"),
    "variable of a RANGE that no loop has": ((RUN,), "variable i of a CALL is a RANGE that is missing from the loop"),
    "no call to run": ((BEGIN, Step("RUN", None, None), END), "step 1 of a loop of calls, RUN, references an unknown CALL: "),
    "run of a buffer": ((Step("RUN", A, None),), "step 0 of a loop of calls, RUN, references an unknown CALL"),
    "no RANGE to begin": ((Step("BEGIN", None, None), RUN, END), "step 0 .* BEGIN, references an unknown CALL or RANGE"),
    "turns without a call": ((Step("RUN", call(add(), Y, A, A), None), Step("BEGIN", None, turns(1 << 40)),
                              Step("END", call(add(), Y, A, A), turns(1 << 40))), "comes to more than 16384 invocations or turns"),
    "variable of a RANGE that is over": ((BEGIN, RUN, END, RUN), "variable i of a CALL is a RANGE that is not active"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_are_refused(name: str) -> None:
    program, said = PROGRAMS[name]
    with pytest.raises(ScheduleError, match=said):
        unroll(program)
