"""Vectors of channels that have their own weights: which kernels get them, and that the numbers stay."""
from __future__ import annotations

import random
from dataclasses import replace

import pytest

from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.core.cost.sketch import heuristic, sketches
from svod.core.cost.template import made_by
from svod.core.ir.uop import Ops
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.tensor import Tensor
from tests.agreement import Case, run_interpreted, run_native
from tests.compile.native import AVX512, runnable_targets
from tests.core.corpus import conv, data, gemm, kernel_of

TARGET = replace(AVX512, threads=2)
NATIVE = [replace(t, threads=2) for t in runnable_targets().values()]


def of_channels(tensor: Tensor) -> list[Scheduler]:
    """The sketches whose vectors are channels."""
    return [s for s in sketches(Scheduler(Kernel(kernel_of(tensor)), TARGET)) if made_by(s).startswith("CHANNELS")]


def with_constant(tensor: Tensor, size: int) -> Kernel:
    """The kernel of a tensor; parameters of `size` elements are constants of the plan."""
    ast = kernel_of(tensor)
    params = [p for p in ast.walk(Ops.PARAM) if p.arg.size == size]
    return Kernel(ast.substitute({p: p.replace(arg=replace(p.arg, constant=True)) for p in params}))


def test_channels_with_their_own_weights_are_vectors() -> None:
    deep = conv(64, 64, 8, 7, padding=3, groups=64)
    chosen = heuristic(Scheduler(with_constant(deep, 64 * 7 * 7), TARGET))
    assert made_by(chosen) == "CHANNELS: positions 8", "rows of eight fill half of a vector"
    assert {opt.axis for opt in chosen.applied_opts if opt.op == "STAGE"} == {"s0", "s1"}
    assert of_channels(deep)


def test_other_kernels_have_no_such_vectors() -> None:
    assert not of_channels(conv(8, 8, 7, 3, groups=8)), "fewer channels than lanes"
    assert not of_channels(conv(48, 48, 7, 3)), "all channels are summed"
    assert not of_channels(gemm(48, 48, 48)) and not of_channels(data(48, 9, 7).max(2))
    assert not of_channels((data(9, 48) * data(9, 48)).sum(0)), "contiguous as they are"


@pytest.mark.parametrize("seed", range(3))
def test_numbers_stay(seed: int) -> None:
    rng, target = random.Random(seed), NATIVE[-1] if NATIVE else TARGET
    stood = 0
    for axes in (1, 2, 3):
        channels, sizes = rng.choice((16, 17, 37)), [rng.choice((1, 5, 7, 13)) for _ in range(axes)]
        taps = [rng.choice((1, 2, 3, 7)) for _ in sizes]
        x, w = data(rng.choice((1, 2)), channels, *sizes), data(channels, 1, *taps)
        padding = [max(t // 2, t - n) for t, n in zip(taps, sizes, strict=True)]
        made = getattr(x, f"conv{axes}d")(w, data(channels), rng.choice((1, 2)), padding, groups=channels)
        case = Case(Kernel(kernel_of(made)))
        for state in sketches(Scheduler(case.kernel, target)):
            if made_by(state).startswith("CHANNELS"):
                program = lower(state)
                validate(program)
                (run_native(case, program, target, 2) if NATIVE else run_interpreted(case, program, 2))
                stood += 1
    assert stood
