"""Random trees of loops and calls over three arrays, and a plain interpreter of them, the reference for loops of calls."""
from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

import svod
from svod import Tensor
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from tests.hand_kernels import Ast, number

Array = np.ndarray[Any, np.dtype[Any]]
ROWS, WIDTH, ARRAYS, MOST_TURNS = 7, 3, 3, 3


@dataclass(frozen=True)
class Call:
    """The statement y[row] = (y[row]·3 + x[column] + constant) & 1023 on arrays y and x. row and column are sums of the counters of
    surrounding loops, given by their depths."""

    y: int
    x: int
    row: tuple[int, ...]
    column: tuple[int, ...]
    constant: int

    @property
    def counters(self) -> list[int]:
        return sorted({*self.row, *self.column})

    def kernel(self) -> UOp:
        k = Ast()
        y, x = (k.param(slot, ROWS * WIDTH, dtypes.int32) for slot in range(2))
        e, = k.axes(WIDTH)
        row, column = (sum((variable(d) for d in depths), number(0)) * WIDTH + e for depths in (self.row, self.column))
        value = k.load(y, row) * 3 + k.load(x, column) + self.constant
        return k.sink(k.store(y, row, value.alu(Ops.AND, UOp.const(dtypes.int32, 1023)), e))


@dataclass(frozen=True)
class Loop:
    times: int
    body: tuple[Call | Loop, ...]


def variable(depth: int) -> UOp:
    return UOp(Ops.DEFINE_VAR, dtypes.index, (), (f"c{depth}", 0, MOST_TURNS - 1))


def random_tree(rng: random.Random, depth: int = 0) -> tuple[Call | Loop, ...]:
    """Up to three statements for each of up to three levels of loops."""
    statements: list[Call | Loop] = []
    for _ in range(rng.randint(1, 3)):
        if depth < 3 and rng.random() < (0.8 if depth == 0 else 0.45):
            statements.append(Loop(rng.randint(1, MOST_TURNS), random_tree(rng, depth + 1)))
        else:
            y, x = rng.sample(range(ARRAYS), 2)
            row, column = (tuple(d for d in range(depth) if rng.random() < 0.5) for _ in range(2))
            statements.append(Call(y, x, row, column, rng.randint(-3, 3)))
    return tuple(statements)


def random_arrays(rng: random.Random) -> list[Array]:
    return [np.array([[rng.randint(0, 1023) for _ in range(WIDTH)] for _ in range(ROWS)], np.int32) for _ in range(ARRAYS)]


def interpret(statements: tuple[Call | Loop, ...], state: list[Array], counts: tuple[int, ...] = ()) -> int:
    """Run the statements on the arrays of `state`, one after the other. Returns the number of calls."""
    calls = 0
    for s in statements:
        if isinstance(s, Loop):
            calls += sum(interpret(s.body, state, (*counts, turn)) for turn in range(s.times))
        else:
            row, column = (sum(counts[d] for d in depths) for depths in (s.row, s.column))
            state[s.y][row] = (state[s.y][row] * 3 + state[s.x][column] + s.constant) & 1023
            calls += 1
    return calls


def do(statements: tuple[Call | Loop, ...], state: list[Tensor], counters: tuple[Any, ...] = ()) -> None:
    """Run the statements as loops and calls of tensors."""
    for s in statements:
        if isinstance(s, Loop):
            with svod.call_loop(s.times) as i:
                do(s.body, state, (*counters, i))
        else:
            svod.call_kernel(s.kernel(), state[s.y], state[s.x], **{f"c{d}": counters[d] for d in s.counters})
