"""WINOGRAD: the transformed convolution gives the results of the direct one, on any extents, and refuses what it cannot compute."""
from __future__ import annotations

import random

import numpy as np
import pytest

from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.spec.evaluate import evaluate
from svod.errors import KernelOptError
from svod.tensor import Tensor
from tests.agreement import Case, run_interpreted, run_native, steps
from tests.chains import random_state
from tests.compile.native import AVX512, runnable_targets
from tests.core.corpus import data, kernel_of

TARGETS = list(runnable_targets().values())
EXTENTS = (1, 2, 3, 5, 7, 13, 16, 17)


def conv(batch: int, channels: int, outputs: int, height: int, width: int, rows: int = 3, columns: int = 3, padding: int = 1,
         epilogue: bool = True) -> Tensor:
    y = data(batch, channels, height, width).conv2d(data(outputs, channels, rows, columns), padding=padding)
    return (y + data(outputs, 1, 1)).relu() if epilogue else y


def winograd(kernel: Kernel, m: int) -> Scheduler:
    return apply_opt(Scheduler(kernel, AVX512), Opt("WINOGRAD", "out", m))


@pytest.mark.parametrize("m", [2, 3, 4, 6])
def test_the_rewritten_kernel_computes_the_convolution(m: int) -> None:
    windows = {2: ((3, 3), (3, 1), (5, 3), (5, 5)), 3: ((3, 3), (1, 5)), 4: ((3, 3), (1, 3), (5, 1)), 6: ((1, 3), (3, 1))}
    rng, done = random.Random(m), 0
    for _ in range(300):
        if done == 6:
            break
        shape = rng.choice((1, 2)), rng.choice(EXTENTS), rng.choice(EXTENTS), *(rng.choice(EXTENTS) for _ in range(2))
        rows, columns = rng.choice(windows[m])
        padding = rng.choice((0, 1, 2)) if rows > 1 and columns > 1 else 0
        sides = [n + 2 * padding - k + 1 for n, k in ((shape[3], rows), (shape[4], columns))]
        if min(n for n, k in zip(sides, (rows, columns), strict=True) if k > 1) < m or min(sides) < 1 or shape[1] == 1:
            continue
        done += 1
        case = Case(Kernel(kernel_of(conv(*shape, rows, columns, padding, rng.random() < 0.5))), done)
        state = winograd(case.kernel, m)
        got = evaluate(state.kernel.ast, case.args, {})
        args = [a.copy() for a in case.args]
        for slot, values in zip(case.slots, got, strict=True):
            args[slot] = values
        case.check(args, f"evaluator, {shape} {rows}x{columns} padding {padding}")
    assert done == 6


@pytest.mark.parametrize("m", [2, 4])
def test_any_chain_computes_the_convolution(m: int) -> None:
    rng, done = random.Random(m), 0
    for _ in range(100):
        if done == 8:
            break
        sides = [rng.choice(EXTENTS) for _ in range(2)]
        if min(sides) < m:
            continue
        done += 1
        case = Case(Kernel(kernel_of(conv(1, rng.choice((2, 3, 5)), rng.choice((1, 3, 8)), *sides))), done)
        target = rng.choice(TARGETS)
        start = apply_opt(Scheduler(case.kernel, target), Opt("WINOGRAD", "out", m))
        state = random_state(rng, start, rng.randint(0, 6))
        program = lower(state)
        validate(program)
        if steps(program) <= 60_000:
            run_interpreted(case, program, rng.randint(1, 3))
        run_native(case, program, target, rng.randint(1, 3))
    assert done == 8


def test_tiles_of_constant_positions() -> None:
    case = Case(Kernel(kernel_of(conv(1, 5, 16, 14, 15))))
    state = apply_opts(Scheduler(case.kernel, AVX512), (
        Opt("WINOGRAD", "out", 4), Opt("PADTO", "o1", 16), Opt("PADTO", "o2", 16), Opt("UPCAST", "o1", 4), Opt("UPCAST", "o2", 4)))
    for target in TARGETS:
        run_native(case, lower(state), target, 1)


@pytest.mark.parametrize(("build", "m", "reason"), [
    (lambda: data(1, 4, 9, 9).conv2d(data(4, 4, 3, 3), stride=2), 2, "no windows whose positions are one apart"),
    (lambda: data(1, 4, 9, 9).conv2d(data(4, 4, 3, 3), dilation=2), 2, "no windows whose positions are one apart"),
    (lambda: data(1, 4, 9, 9).conv2d(data(4, 1, 3, 3), groups=4), 2, "over no channels"),
    (lambda: data(9, 5) @ data(5, 7), 2, "no windows"),
    (lambda: data(9, 5).sum(1), 2, "not one sum of products"),
    (lambda: data(1, 4, 9, 9, dtype="float64").conv2d(data(4, 4, 3, 3, dtype="float64")), 2, "products of float32"),
    (lambda: conv(1, 4, 4, 9, 9), 1, "a tile is 2 to"), (lambda: conv(1, 4, 4, 9, 9), 9, "a tile is 2 to"),
    (lambda: conv(1, 4, 4, 3, 9), 4, "a tile is 2 to 3"), (lambda: conv(1, 4, 4, 9, 9), 6, "509 times that of the sums"),
])
def test_reasons_for_refusing(build: object, m: int, reason: str) -> None:
    assert callable(build)
    with pytest.raises(KernelOptError, match=reason):
        winograd(Kernel(kernel_of(build())), m)


def test_what_one_opt_has_rewritten_is_no_other_opts_kernel() -> None:
    """Opts that rewrite kernels may name the same stage with the same argument; what one refuses stays refused."""
    kernel = Kernel(kernel_of(conv(1, 4, 4, 9, 9)))
    for _ in range(2):
        with pytest.raises(KernelOptError, match="is not the maximum"):
            apply_opt(Scheduler(kernel, AVX512), Opt("ONLINE", "out", 4))
        assert winograd(kernel, 4).kernel is not kernel
    assert winograd(kernel, 4).kernel is winograd(kernel, 4).kernel, "it is rewritten once"


def test_errors_of_large_sums_are_small() -> None:
    """The largest error relative to the largest output, of 64 channels, against float64."""
    rng = np.random.default_rng(3)
    kernel = Kernel(kernel_of(conv(1, 64, 8, 12, 12, epilogue=False)))
    args = [rng.standard_normal(int(p.arg.size)).astype(np.float32) for p in kernel.params]
    exact = evaluate(kernel.ast, args, {})[0].astype(np.float64)
    for m, most in ((2, 2e-6), (4, 1e-5)):
        got = evaluate(winograd(kernel, m).kernel.ast, args, {})[0]
        assert np.abs(got - exact).max() <= most * np.abs(exact).max()
