"""Checks of schedules written or changed by hand: one that cannot run is refused, and the error names the invalid call."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from svod.core.graph import graph
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.schedule import KernelCall, Schedule, create_schedule
from svod.core.schedule.schedule_check import check_schedule
from svod.errors import ScheduleError
from svod.prepare import complete_config, make_unbound_plan, prepare_graph
from svod.tensor import Tensor
from svod.tensor.replacement import Computing
from svod.tune.resolved import resolve

N = 6
A = graph.buffer(dtypes.float32, N)


def chain(length: int = 3) -> Schedule:
    """Make a schedule of `length` calls, each of which reads the result of the one before it."""
    u = A
    for _ in range(length):
        u = graph.contiguous(UOp(Ops.ADD, dtypes.float32, (u, graph.flip(u, [0]))))
    made = create_schedule(graph.sink(u))
    assert [c.deps for c in made.calls] == [(i - 1,) if i else () for i in range(length)]
    return made


def with_call(i: int, **changes: object) -> Schedule:
    made = chain()
    calls = list(made.calls)
    calls[i] = replace(calls[i], **changes)     # type: ignore[arg-type]
    return replace(made, calls=tuple(calls))


def with_deps(*deps: tuple[int, ...]) -> Schedule:
    made = chain(len(deps))
    return replace(made, calls=tuple(replace(c, deps=d) for c, d in zip(made.calls, deps, strict=True)))


def overwritten() -> Schedule:
    """Make a schedule whose call 1 overwrites the buffer that call 0 reads, without waiting for call 0."""
    made = create_schedule(graph.sink(graph.flip(A, [0]), graph.assign(A, UOp(Ops.MUL, dtypes.float32, (A, A)))))
    assert [c.deps for c in made.calls] == [(), (0,)]
    return replace(made, calls=(made.calls[0], replace(made.calls[1], deps=())))


def written_twice(*, beside: bool) -> Schedule:
    """Make a schedule whose last call has an earlier level than the call before it, and writes the same elements or the ones next to
    them."""
    b = graph.buffer(dtypes.float32, N)
    half, other = graph.shrink(A, [(0, N // 2)]), graph.shrink(A, [(N // 2, N)] if beside else [(0, N // 2)])
    late = create_schedule(graph.sink(graph.assign(half, graph.shrink(graph.contiguous(graph.flip(b, [0])), [(0, N // 2)]))))
    early = create_schedule(graph.sink(graph.assign(other, graph.shrink(b, [(0, N // 2)]))))
    assert len(late.calls) == 2 and len(early.calls) == 1
    return replace(late, calls=(*late.calls, *early.calls))


def own(number: int) -> UOp:
    return UOp(Ops.BUFFER, dtypes.float32, (UOp(Ops.LUNIQUE, dtypes.void, (), number), A.src[1]), N)


BAD: dict[str, tuple[Callable[[], Schedule], str]] = {
    "unknown dependency": (lambda: with_deps((), (0,), (7,)), r"call 2 \(elementwise\) depends on call 7, which is unknown; .* has 3"),
    "negative dependency": (lambda: with_deps((), (-1,)), r"call 1 .* depends on call -1, which is unknown"),
    "itself": (lambda: with_deps((), (1,)), r"in a cycle: call 1 \(elementwise\), which waits for call 1"),
    "cycle": (lambda: with_deps((), (2,), (0, 1)),
              r"in a cycle: call 1 \(elementwise\), which waits for call 2 .*, which waits for call 1 "),
    "cycle below": (lambda: with_deps((1,), (2,), (3,), (2,)),
                    r"in a cycle: call 2 .*, which waits for call 3 .*, which waits for call 2 "),
    "out of order": (lambda: with_deps((2,), (), (1,)), r"call 0 \(elementwise\) depends on call 2 \(elementwise\), which comes after it"),
    "read before it is written": (lambda: with_call(1, args=(own(1), own(8))),
                                  r"a buffer is not found: call 1 .* reads number 8 of the schedule's own buffers"),
    "output that nothing writes": (lambda: replace(chain(), outputs=(own(9),)), "a buffer is not found: output 0 .* is number 9"),
    "output that is no buffer": (lambda: replace(chain(), outputs=(UOp.const(dtypes.float32, 1),)), "output 0 of a schedule is CONST"),
    "argument that is no buffer": (lambda: with_call(0, args=(own(0), UOp.const(dtypes.float32, 1))), r"slot 1 of call 0 .* is CONST"),
    "missing argument": (lambda: with_call(2, args=(own(2),)), r"call 2 .* has 1 arguments and 2 offsets; its kernel takes 2"),
    "missing offset": (lambda: with_call(2, offsets=(0,)), r"call 2 .* has 2 arguments and 1 offsets; its kernel takes 2"),
    "no kernel": (lambda: with_call(1, ast=UOp(Ops.SINK, dtypes.void)), "the kernel of a call of a schedule is a SINK of STOREs"),
    "read without waiting": (lambda: with_deps((), (), (1,)),
                             r"call 1 .* reads a buffer that call 0 .*, before it, writes, and does not wait"),
    "overwritten without waiting": (lambda: written_twice(beside=False),
                                    r"call 2 .* writes a buffer that call 1 .*, before it, writes, and does not wait for it"),
    "written without waiting": (overwritten, r"call 1 .* writes a buffer that call 0 .*, before it, reads, and does not wait for it"),
}


@pytest.mark.parametrize("name", BAD)
def test_schedules_that_are_refused(name: str) -> None:
    make, said = BAD[name]
    with pytest.raises(ScheduleError, match=said):
        check_schedule(made := make())
    with pytest.raises(ScheduleError, match=said):
        make_unbound_plan(made, frozenset())


def test_a_schedule_by_hand_is_read_as_one_that_was_made() -> None:
    """A schedule assembled by hand, with its calls in another valid order, is accepted like one that was made by `create_schedule`."""
    made = chain()
    first, second, third = made.calls
    twin = KernelCall(first.ast, (own(5), A), (0, 0), "twin", "", (), "by hand")
    by_hand = Schedule((twin, first, replace(second, deps=(1,)), replace(third, deps=(2,))), (own(5), *made.outputs))
    assert check_schedule(by_hand) == [0, 0, 1, 2]
    assert len(make_unbound_plan(by_hand, frozenset())[0].calls) == 4


def test_parts_beside_each_other_are_written_in_any_order() -> None:
    assert check_schedule(written_twice(beside=True)) == [0, 1, 0]


def test_a_batch_has_an_output_for_each_tensor() -> None:
    tensors = [Tensor(np.arange(3, dtype=np.float32)) + k for k in (1, 2)]
    nodes = [t.uop for t in tensors]
    prepared = prepare_graph(nodes[:1], resolve(complete_config(None)))
    with Computing(tensors) as work, pytest.raises(ScheduleError, match="a batch of 2 tensors is attached to a plan with 1 outputs"):
        prepared.attach(work)
    assert [t.uop for t in tensors] == nodes
