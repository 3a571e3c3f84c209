"""Masked stages around which one loop moves two dims at once: numbers against the evaluator."""
from __future__ import annotations

import random

import pytest

from svod.compile.lower.lower import lower
from svod.core.cost.runs import stage_runs
from svod.core.ir.uop import UOp
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.core.tree.passes import loop_tree
from svod.errors import KernelOptError
from tests.agreement import Case, run_interpreted
from tests.chains import random_state, try_opts
from tests.compile.native import AVX2, AVX512
from tests.draws import count
from tests.hand_kernels import Ast, inside

EXTENTS = (1, 2, 3, 5, 7, 11, 13)


def slanted_window(rows: int, columns: int, size: int) -> UOp:
    """The sums y[i, j] = Σ_t x[i + t, i + j] over an image with a border of zeros: the loop over i moves both dims of the image."""
    k, height, width = Ast(), rows + size - 1, rows + columns - 1
    y, x = k.param(0, rows * columns), k.param(1, height * width)
    p, q, i, j, t = k.axes(height + 2, width + 2, rows, columns, size)
    gate = inside(p, 1, height + 1) & inside(q, 1, width + 1)
    image = k.stage(k.load(x, p * width + q + (-width - 1), gate), p, q)
    return k.sink(k.store(y, i * columns + j, k.reduce("ADD", k.read(image, i + t, i + j), t), i, j))


@pytest.mark.parametrize("target", [AVX2, AVX512], ids=["avx2", "avx512"])
def test_numbers_of_masks_over_loops_that_move_two_dims(target: Target) -> None:
    moved = 0
    for seed in range(count(16)):
        rng = random.Random(f"slanted {seed}")
        kernel = Kernel(slanted_window(*[rng.choice(EXTENTS) for _ in range(3)]))
        base = Scheduler(kernel, target)
        outer = kernel.axes[kernel.stages[kernel.output].outs[0]].name
        opts = [Opt("UPCAST", outer, rng.choice((2, 4))), Opt("STAGE", "s0", outer)]
        state = random_state(rng, try_opts(base, *opts[rng.randint(0, 1):]), rng.randint(2, 6))
        try:
            runs = stage_runs(kernel, loop_nest(state).stages, loop_tree(state))
            program = lower(state)
        except KernelOptError:      # placements that an opt has moved since
            continue
        moved += any(len(loop.moves) > 1 for at in runs.values() for loop in at.around)
        run_interpreted(Case(kernel, seed), program, rng.randint(1, 3))
    assert moved >= count(16) // 4
