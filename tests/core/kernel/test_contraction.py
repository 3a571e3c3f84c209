"""Windows of convolutions with wide padding: iterations of a reduce loop that only add zeros are found and skipped, and results stay the
same."""
from __future__ import annotations

import random
from dataclasses import replace

import pytest

from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.cost.cpu import cost_of
from svod.core.cost.sketch import heuristic, sketches
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.contraction import Window, skipping_window
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.scheduler import Opt, Scheduler
from tests.agreement import Case, run_interpreted, run_native
from tests.chains import random_state
from tests.compile.native import AVX512, runnable_targets
from tests.core.corpus import conv, data, kernel_of

TARGET = replace(AVX512, threads=2)
NATIVE = [replace(t, threads=2) for t in runnable_targets().values()]


def windows(kernel: Kernel, *chain: Opt) -> dict[str, Window]:
    """Return the windows by the name of their reduce axis."""
    state = apply_opts(Scheduler(kernel, TARGET), chain)
    out = loop_nest(state).stages[kernel.output]
    found = {kernel.axes[out.r.axes[a]].name: skipping_window(state, out.r, a, out.axes[a])
             for a in range(len(out.r.stage.outs), len(out.r.axes))}
    return {name: w for name, w in found.items() if w is not None}


def dynamic_loops(program: Program) -> int:
    """Return the loops of the last phase whose start is not a constant."""
    code = program.code[-1]
    return sum(i.op == "LOOP" and code[i.src[0]].op == "MAX" for i in code)


def test_windows_of_wide_padding() -> None:
    """Row o reads with tap q and a dilation of 5 the padded row o + 5·q; rows 5 to 12 have data, the others are padding."""
    wide = Kernel(kernel_of(conv(3, 6, 7, 3, dilation=5, padding=5)))
    assert windows(wide) == {"r1": Window(1, 4, 1, 5, 5, 12, 11 / 21), "r2": Window(2, 5, 1, 5, 5, 12, 11 / 21)}
    assert windows(wide, Opt("UNROLL", "r2", 0)).keys() == {"r1"}, "straight-line code has no bounds"
    assert not windows(Kernel(kernel_of(conv(3, 6, 7, 3, padding=1)))), "nineteen of twenty-one taps are used"
    assert not windows(Kernel(kernel_of(conv(3, 6, 7, 3, dilation=2))))
    strided = windows(Kernel(kernel_of(conv(3, 6, 12, 3, dilation=5, padding=5, stride=3))))
    assert strided["r1"][2:4] == (3, 5)


def test_windows_of_taps_that_a_phase_lacks() -> None:
    """Position o of a block of two and tap q of two read the weight 2·(1 - q) + o, which the kernel of three has if it is below 3."""
    kernel = Kernel(kernel_of(data(1, 8, 9).conv_transpose1d(data(8, 4, 3), stride=2), 0))
    assert windows(kernel) == {"r1": Window(2, 4, -1, 2, 0, 3, 0.75)}


def test_windows_that_skip_few_need_other_loops_inside() -> None:
    """Nineteen of 21 taps of a row are used: the loop skips the others if another loop of many iterations is inside of it."""
    kernel = Kernel(kernel_of(conv(16, 6, 7, 3, padding=1)))
    assert not windows(kernel)
    outside = windows(kernel, Opt("ORDER", "out", ("o0", "o1", "o2", "r1", "r2", "r0")))
    assert {name: w.share for name, w in outside.items()} == {"r1": 19 / 21, "r2": 19 / 21}
    assert windows(kernel, Opt("ORDER", "out", ("o0", "o1", "o2", "r1", "r0", "r2"))).keys() == {"r1"}


def test_the_share_of_taps_that_are_used() -> None:
    """The computed share equals a count over all positions."""
    rng = random.Random(3)
    for _ in range(200):
        outputs, summed, tile = rng.randint(1, 17), rng.randint(1, 7), rng.randint(1, 5)
        low = rng.randint(-3, 12)
        w = Window(0, 1, rng.choice((-2, -1, 1, 2, 3)), rng.randint(1, 7), low, low + rng.randint(1, 20))
        starts = range(0, outputs, tile)
        used = sum(any(w.low <= w.step * o + w.apart * q < w.high for o in range(start, start + tile))
                   for start in starts for q in range(summed))
        # the region of a tile includes all positions between its first and its last one
        assert used / (len(starts) * summed) <= w.used(tile, outputs, summed) <= 1.0
        if tile == 1:
            assert w.used(1, outputs, summed) == used / (outputs * summed)


def test_loops_over_padding_are_skipped_and_cost_less() -> None:
    kernel = Kernel(kernel_of(conv(16, 16, 16, 3, dilation=12, padding=12)))
    state = Scheduler(kernel, TARGET)
    assert dynamic_loops(lower(state)) == 2
    order = apply_opts(state, [Opt("ORDER", "out", ("o0", "o1", "o2", "r1", "r2", "r0"))])
    unrolled = apply_opts(order, [Opt("UNROLL", "r1", 0), Opt("UNROLL", "r2", 0)])
    assert cost_of(order).cycles < 0.5 * cost_of(unrolled).cycles, "a quarter of the products remains"
    chosen = heuristic(state)
    loops = [chosen.rows[row].name for row in chosen.order[kernel.output]]
    assert loops.index("r1") < loops.index("r0") and loops.index("r2") < loops.index("r0")


@pytest.mark.slow
def test_parts_of_a_sum_are_all_combined() -> None:
    """The phase that adds the nine parts of a sum over eighteen rows of taps skips none of them: parts are not taps."""
    kernel = Kernel(kernel_of(data(1, 1, 12, 12).conv2d(data(1, 1, 18, 9), padding=(17, 8))))
    state = apply_opts(Scheduler(kernel, replace(AVX512, threads=9)), [Opt("THREAD", "r0", 9)])
    run_interpreted(Case(kernel), lower(state), 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_numbers_stay(seed: int) -> None:
    """Sketches and random chains give the evaluator's results at random extents and strides: with tiles that do not divide, output loops
    inside reduce loops, and sums in parts."""
    shapes, rng = random.Random(seed), random.Random(seed)      # other opts leave the shapes as they are
    target = NATIVE[-1] if NATIVE else TARGET
    stood = 0
    for size in (1, 7, shapes.randint(2, 13), shapes.choice((8, 11, 16))):
        apart = shapes.randint(max(2, size // 2 + 1), size + 2)
        taps, stride = shapes.choice((2, 3, 5)), shapes.choice((1, 1, 2))
        wide = conv(shapes.choice((1, 3)), shapes.choice((5, 17)), size, taps, dilation=apart, padding=apart * (taps // 2), stride=stride)
        stride = shapes.randint(2, 4)
        lacking = data(1, 8, size).conv_transpose1d(data(8, shapes.choice((5, 17)), stride + shapes.randint(1, stride)), stride=stride,
                                                    padding=shapes.randint(0, stride // 2))
        for tensor in (wide, lacking):
            case = Case(Kernel(kernel_of(tensor, 0)))
            start = Scheduler(case.kernel, target)
            for state in (*sketches(start)[:12], *(random_state(rng, start, rng.randint(1, 8)) for _ in range(12))):
                program = lower(state)
                validate(program)
                stood += dynamic_loops(program) > 0
                (run_native(case, program, target, 2) if NATIVE else run_interpreted(case, program, 2))
    assert stood >= 16
