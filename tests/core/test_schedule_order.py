"""The order of a schedule: its dependencies are enough. Reads of old and new content of buffers that are assigned to again and again, in
every order that the dependencies allow, against NumPy doing one statement after the other."""
from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from svod.core import graph
from svod.core.buffer import buffer_of
from svod.core.schedule import KernelCall, Schedule, create_schedule
from svod.core.uop import Ops, UOp
from svod.tensor import Tensor
from tests.core.scheduling import run_schedule

Array = np.ndarray[Any, np.dtype[Any]]
N = 6


class Program:
    """Statements over three arrays, written down for svod and done by NumPy as they are written."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.arrays = [np.random.default_rng([seed, i]).integers(-9, 9, N).astype(np.int32) for i in range(3)]
        self.state = [Tensor(a.copy()) for a in self.arrays]
        self.contents = {graph.base_of(t.uop): buffer_of(graph.base_of(t.uop)).array.copy() for t in self.state}
        self.lazy: list[tuple[Tensor, Array]] = []

    def value(self) -> tuple[Tensor, Array]:
        i, j, c = self.rng.randrange(3), self.rng.randrange(3), self.rng.randint(2, 5)
        x, a = self.state[i], self.arrays[i]
        match self.rng.randrange(5):
            case 0:
                return x.flip(0), a[::-1].copy()
            case 1:
                return x * c + self.state[j], a * c + self.arrays[j]
            case 2 if self.lazy:
                t, b = self.rng.choice(self.lazy)
                return t - x, b - a
            case 3:
                return x.sum(0, keepdim=True) + self.state[j], a.sum(dtype=np.int32) + self.arrays[j]
            case _:
                return x + 1, a + 1

    def write(self, statements: int) -> None:
        for _ in range(statements):
            t, a = self.value()
            if self.rng.random() < 0.5:
                self.lazy.append((t, a))
            else:
                i = self.rng.randrange(3)
                self.state[i].assign(t)
                self.arrays[i] = a

    @property
    def results(self) -> tuple[list[UOp], list[Array]]:
        return [t.uop for t, _ in self.lazy] + [t.uop for t in self.state], [a for _, a in self.lazy] + self.arrays


def any_order(calls: tuple[KernelCall, ...], rng: random.Random) -> tuple[KernelCall, ...]:
    """The calls in a random order that their dependencies allow."""
    left, placed = list(range(len(calls))), []
    while left:
        i = rng.choice([i for i in left if set(calls[i].deps) <= set(placed)])
        left.remove(i)
        placed.append(i)
    return tuple(calls[i] for i in placed)


@pytest.mark.parametrize("seed", range(24))
def test_every_order_that_the_dependencies_allow_gives_what_the_statements_say(seed: int) -> None:
    program = Program(seed)
    program.write(3 + seed % 9)
    outputs, wanted = program.results
    schedule = create_schedule(graph.sink(*outputs))
    for i, call in enumerate(schedule.calls):
        assert all(0 <= d < i for d in call.deps) and all(a.op is Ops.BUFFER for a in call.args)
    for _ in range(4):
        shuffled: Schedule = replace(schedule, calls=any_order(schedule.calls, program.rng))
        memory = run_schedule(shuffled, program.contents)
        for k, (buffer, want) in enumerate(zip(schedule.outputs, wanted, strict=True)):
            np.testing.assert_array_equal(memory[buffer], want, f"output {k}")


def test_calls_of_one_kernel_wait_for_each_other_by_call() -> None:
    """x += 1 three times is one kernel, called three times, each after the one before."""
    x = Tensor(np.zeros(N, np.int32))
    for _ in range(3):
        x.assign(x + 1)
    schedule = create_schedule(graph.sink(x.uop))
    assert len({c.ast for c in schedule.calls}) == 1
    assert [c.deps for c in schedule.calls] == [(), (0,), (1,)] or [c.deps for c in schedule.calls] == [(), (0,), (0, 1)]
    x.realize()
    assert x.tolist() == [3] * N


def test_what_has_only_an_order_between_them_waits_too() -> None:
    """The second call reads nothing that the first writes: it overwrites what the first reads."""
    x, y = Tensor(np.arange(N, dtype=np.int32)), Tensor(np.ones(N, np.int32))
    old = x * 2
    x.assign(y)
    reader, writer = create_schedule(graph.sink(old.uop, x.uop)).calls
    assert set(writer.args) & set(reader.args) == {graph.base_of(x.uop).src[0]} and writer.deps == (0,)
