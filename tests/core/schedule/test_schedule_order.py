"""The dependencies of a schedule are sufficient: programs with assignments and called kernels, which read old and new contents of buffers,
give NumPy's results of the statements one after the other, in every order of calls that the dependencies allow."""
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from svod.core.graph import graph
from svod.core.graph.storage import base_of
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.schedule import KernelCall, Schedule, create_schedule
from svod.tensor import Tensor
from svod.tensor.calls import call_kernel, call_loop
from tests.core.scheduling import run_schedule
from tests.draws import a_half
from tests.hand_kernels import Ast

Array = np.ndarray[Any, np.dtype[Any]]
N = 6


def doubling() -> UOp:
    """Make the kernel y = y·2 + x + i."""
    k = Ast()
    y, x = k.param(0, N, dtypes.int32), k.param(1, N, dtypes.int32)
    r, = k.axes(N)
    i = UOp(Ops.DEFINE_VAR, dtypes.index, (), ("i", 0, 9))
    return k.sink(k.store(y, r, k.load(y, r) * 2 + k.load(x, r) + i.cast(dtypes.int32), r))


class Program:
    """Random statements over three arrays: recorded values, assignments to arrays and parts of arrays, calls of a kernel, once or in a
    loop. svod executes them lazily, NumPy immediately."""

    def __init__(self, seed: int, statements: int):
        self.rng = random.Random(seed)
        self.start = [np.random.default_rng([seed, i]).integers(-9, 9, N).astype(np.int32) for i in range(3)]
        self.statements = [(self.rng.randrange(5), self.rng.randrange(3), self.rng.randrange(3), self.rng.randint(2, 5),
                            self.rng.choice(("value", "value", "array", "array", "part", "call"))) for _ in range(statements)]

    def run(self, state: list[Any], flip: Callable[[Any], Any], assign: Callable[[list[Any], int, Any], None],
            assign_part: Callable[[list[Any], int, Any], None], call: Callable[[list[Any], int, Any, int], None]) -> list[Any]:
        """Execute the statements, which changes `state`; returns the recorded values followed by `state`."""
        values: list[Any] = []
        for kind, i, j, c, target in self.statements:
            x = state[i]
            match kind:
                case 0:
                    value = flip(x)
                case 1:
                    value = x * c + state[j]
                case 2 if values:
                    value = values[c % len(values)] - x
                case 3:
                    value = x.sum(0, keepdims=True) + state[j]
                case _:
                    value = x + 1
            if target == "value":
                values.append(value)
            elif target == "array":
                assign(state, j, value)
            elif target == "call":
                call(state, j, value, c - 2)
            else:
                assign_part(state, j, value[2:5])
        return [*values, *state]

    def with_numpy(self, arrays: list[Array]) -> list[Array]:
        def assign(state: list[Array], i: int, value: Array) -> None:
            state[i] = value.astype(np.int32)

        def assign_part(state: list[Array], i: int, value: Array) -> None:
            state[i] = state[i].copy()
            state[i][1:4] = value

        def call(state: list[Array], i: int, value: Array, turns: int) -> None:
            for turn in range(turns) if turns else [7]:
                state[i] = (state[i] * 2 + value + turn).astype(np.int32)

        return self.run(list(arrays), lambda a: a[::-1].copy(), assign, assign_part, call)

    def with_svod(self, state: list[Tensor]) -> list[Tensor]:
        def assign_part(state: list[Tensor], i: int, value: Tensor) -> None:
            state[i][1:4] = value

        def call(state: list[Tensor], i: int, value: Tensor, turns: int) -> None:
            if turns:
                with call_loop(turns) as turn:
                    call_kernel(doubling(), state[i], value.cast(dtypes.int32), i=turn)
            else:
                call_kernel(doubling(), state[i], value.cast(dtypes.int32), i=7)

        return self.run(state, lambda t: t.flip(0), lambda state, i, value: state[i].assign(value), assign_part, call)


def any_order(calls: tuple[KernelCall, ...], rng: random.Random) -> tuple[KernelCall, ...]:
    """Return the calls in a random order that their dependencies allow."""
    left, placed = list(range(len(calls))), []
    while left:
        i = rng.choice([i for i in left if set(calls[i].deps) <= set(placed)])
        left.remove(i)
        placed.append(i)
    number = {old: new for new, old in enumerate(placed)}
    return tuple(replace(calls[i], deps=tuple(sorted(number[d] for d in calls[i].deps))) for i in placed)


@pytest.mark.parametrize("seed", a_half(range(24)))
def test_every_order_that_the_dependencies_allow_gives_what_the_statements_say(seed: int) -> None:
    program = Program(seed, 3 + seed % 9)
    state = [Tensor(a.copy()) for a in program.start]
    contents = {base_of(t.uop): a for t, a in zip(state, program.start, strict=True)}
    outputs = [t.uop for t in program.with_svod(state)]
    wanted = program.with_numpy(program.start)
    schedule = create_schedule(graph.sink(*outputs))
    for i, call in enumerate(schedule.calls):
        assert all(0 <= d < i for d in call.deps) and all(a.op is Ops.BUFFER for a in call.args)
    for _ in range(4):
        shuffled: Schedule = replace(schedule, calls=any_order(schedule.calls, program.rng))
        memory = run_schedule(shuffled, contents)
        for k, (buffer, want) in enumerate(zip(schedule.outputs, wanted, strict=True)):
            np.testing.assert_array_equal(memory[buffer], want, f"output {k}")


def test_calls_of_one_kernel_wait_for_each_other_by_call() -> None:
    """x += 1 three times is one kernel that is called three times, and each call waits for the one before it."""
    x = Tensor(np.zeros(N, np.int32))
    for _ in range(3):
        x.assign(x + 1)
    schedule = create_schedule(graph.sink(x.uop))
    assert len({c.ast for c in schedule.calls}) == 1
    assert [c.deps for c in schedule.calls] == [(), (0,), (1,)] or [c.deps for c in schedule.calls] == [(), (0,), (0, 1)]
    x.realize()
    assert x.tolist() == [3] * N


def test_what_has_only_an_order_between_them_waits_too() -> None:
    """The second call does not read the result of the first, but overwrites memory that the first reads, so it waits for it."""
    x, y = Tensor(np.arange(N, dtype=np.int32)), Tensor(np.ones(N, np.int32))
    old = x * 2
    x.assign(y)
    reader, writer = create_schedule(graph.sink(old.uop, x.uop)).calls
    assert set(writer.args) & set(reader.args) == {base_of(x.uop).src[0]} and writer.deps == (0,)
