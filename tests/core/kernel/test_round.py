"""ROUND: the rewritten kernel computes what the kernel does with rounded factors, by every chain, and it is refused elsewhere."""
from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from svod.compile.cpu.host import host_target
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.core.cost.sketch import heuristic, sketches, starts
from svod.core.kernel.algorithms.rounding import can_round, rounded
from svod.core.kernel.apply import apply_opt, apply_opts, is_rounded
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import FAST, SAME
from svod.core.spec.evaluate import evaluate
from svod.errors import KernelOptError
from svod.tensor import Tensor
from tests.agreement import Case, run_interpreted, run_native, steps
from tests.chains import random_state
from tests.compile.native import AVX512, runnable_targets
from tests.core.corpus import data, kernel_of

Array = np.ndarray[Any, np.dtype[Any]]

HOST = host_target()
FAST_TARGETS = [replace(t, numerics=FAST) for t in runnable_targets().values()]
WITH_DOTS = replace(AVX512, features=(*AVX512.features, "amx", "bf16", "vnni"), numerics=FAST)
EXTENTS = (1, 2, 3, 5, 7, 13, 16, 17, 31, 33)
ROUND = Opt("ROUND", "out", "bfloat16")


def product(rng: random.Random) -> Tensor:
    m, k, n = (rng.choice(EXTENTS) for _ in range(3))
    x, w = data(m, k), data(k, n)
    return (x @ w + data(n)).relu() if rng.random() < 0.5 else x @ w


def linear(rng: random.Random) -> Tensor:
    m, k, n = (rng.choice(EXTENTS) for _ in range(3))
    return data(m, k).linear(data(k, n).T) if rng.random() < 0.5 else data(2, m, k) @ data(2, k, n)


def convolution(rng: random.Random) -> Tensor:
    rows, stride = rng.choice((1, 3)), rng.choice((1, 2, 3))
    height, width = (rng.choice((5, 7, 9, 16)) for _ in range(2))
    y = data(1, rng.choice((2, 3, 5, 16)), height, width)
    return y.conv2d(data(rng.choice((1, 4, 7, 17)), y.shape[1], rows, rows), padding=rows // 2, stride=stride).relu()


def to_bfloat16(values: Array) -> Array:
    """Round to nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("make", [product, linear, convolution])
def test_the_rewritten_kernel_is_the_kernel_of_rounded_factors(make: Any) -> None:
    rng, numbers, done = random.Random(5), np.random.default_rng(5), 0
    for _ in range(40):
        kernel = Kernel(kernel_of(make(rng)))
        if not can_round(kernel, "out"):
            continue
        done += 1
        args = [numbers.standard_normal(int(p.arg.size)).astype(np.float32) for p in kernel.params]
        factors = _slots_of_factors(kernel)
        want = evaluate(kernel.ast, [to_bfloat16(a) if i in factors else a for i, a in enumerate(args)], {})
        for got, expected in zip(evaluate(rounded(kernel, "out", "bfloat16").ast, args, {}), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)
    assert done >= 10


def _slots_of_factors(kernel: Kernel) -> set[int]:
    """The arguments that are factors: those that the stages which are multiplied read."""
    stages = [s for s in kernel.stages if not s.is_output]
    return {n.arg for s in stages for r in [kernel.resolve(frozenset())[s.index]] if r is not None for n in r.nodes if n.kind == "load"}


@pytest.mark.parametrize("make", [product, convolution])
def test_any_chain_computes_it(make: Any) -> None:
    rng, done = random.Random(7), 0
    for _ in range(48):
        if done == 12:
            break
        kernel = Kernel(kernel_of(make(rng)))
        target = rng.choice(FAST_TARGETS)
        if not can_round(kernel, "out"):
            continue
        done += 1
        case = Case(kernel, done)
        state = random_state(rng, apply_opt(Scheduler(kernel, target), ROUND), rng.randint(0, 6))
        program = lower(state)
        validate(program)
        if steps(program) <= 60_000:
            run_interpreted(case, program, rng.randint(1, 3))
        run_native(case, program, target, rng.randint(1, 3))
    assert done == 12


@pytest.mark.parametrize("make", [product, linear, convolution])
def test_sketches_with_instructions_compute_it(make: Any) -> None:
    """On this machine where it has the instructions, else by the interpreter of LINEAR."""
    rng, found = random.Random(11), 0
    native = {"amx", "bf16", "avx512f"} <= set(HOST.features)
    target = replace(HOST, numerics=FAST) if native else WITH_DOTS
    for _ in range(14):
        kernel = Kernel(kernel_of(make(rng)))
        state = Scheduler(kernel, target)
        if len(starts(state)) < 2:
            continue
        case = Case(kernel, found)
        for s in rng.sample(all_of := [s for s in sketches(state) if is_rounded(s.applied_opts)], min(4, len(all_of))):
            program = lower(s)
            validate(program)
            found += 1
            if native:
                run_native(case, program, target, 2)
            elif steps(program) <= 60_000:
                run_interpreted(case, program, 2)
    assert found >= 8


def test_a_stride_becomes_a_dim_of_its_own() -> None:
    """Instructions take positions that are one apart: the copy of a strided convolution has them."""
    for stride, rows in ((2, 1), (2, 3), (3, 3)):
        kernel = Kernel(kernel_of(data(1, 32, 33, 33).conv2d(data(32, 32, rows, rows), stride=stride)))
        state = apply_opt(Scheduler(kernel, WITH_DOTS), ROUND)
        assert len(starts(Scheduler(kernel, WITH_DOTS))) == 2, (stride, rows)
        assert all(not any(lin.coefs and max(c for _, c in lin.coefs) > 1 for lin in n.dims[-1:])
                   for n in state.kernel.resolve(frozenset())[state.kernel.output].nodes if n.kind == "read")  # type: ignore[union-attr]


@pytest.mark.parametrize(("build", "arg", "before", "reason"), [
    (lambda: data(9, 5) @ data(5, 7), "float16", (), "needs the type to round to: bfloat16"),
    (lambda: data(9, 5) @ data(5, 7), None, (), "needs the type to round to"),
    (lambda: data(9, 5) @ data(5, 7), "bfloat16", (Opt("UPCAST", "o0", 3),), "comes before all other opts"),
    (lambda: data(1, 4, 9, 9).conv2d(data(4, 4, 3, 3)), "bfloat16", (Opt("WINOGRAD", "out", 2),), "combined with no other algorithm"),
    (lambda: data(9, 5) @ data(5, 7), "bfloat16", (ROUND,), "conversions of narrower numbers"),
    (lambda: data(9, 5, dtype="bfloat16").cast("float32") @ data(5, 7, dtype="bfloat16").cast("float32"), "bfloat16", (),
     "conversions of narrower numbers"),
    (lambda: data(9, 5, dtype="float64") @ data(5, 7, dtype="float64"), "bfloat16", (), "products of float32"),
    (lambda: data(9, 5).sum(1), "bfloat16", (), "not one sum of products"),
    (lambda: data(9, 5) + 1, "bfloat16", (), "not one sum of products"),
])
def test_reasons_for_refusing(build: Any, arg: Any, before: tuple[Opt, ...], reason: str) -> None:
    state = apply_opts(Scheduler(Kernel(kernel_of(build())), WITH_DOTS), before)
    with pytest.raises(KernelOptError, match=reason):
        apply_opt(state, Opt("ROUND", "out", arg))


@pytest.mark.parametrize("numerics", ["float32", SAME])
def test_other_policies_refuse_it_and_have_no_sketch_of_it(numerics: str) -> None:
    target = replace(WITH_DOTS, numerics=numerics)
    state = Scheduler(Kernel(kernel_of(data(64, 64) @ data(64, 64))), target)
    with pytest.raises(KernelOptError, match=f"`numerics={numerics}` keeps products of float32"):
        apply_opt(state, ROUND)
    assert starts(state) == [state]
    assert not any(is_rounded(s.applied_opts) for s in sketches(state))


def test_winograd_does_not_follow_it() -> None:
    state = apply_opt(Scheduler(Kernel(kernel_of(data(1, 8, 9, 9).conv2d(data(8, 8, 3, 3)))), WITH_DOTS), ROUND)
    with pytest.raises(KernelOptError, match="comes before all other opts"):
        apply_opt(state, Opt("WINOGRAD", "out", 2))


def test_the_heuristic_rounds_large_products() -> None:
    chain = heuristic(Scheduler(Kernel(kernel_of(data(256, 256) @ data(256, 256))), WITH_DOTS)).applied_opts
    assert [o.op for o in chain[:2]] == ["ROUND", "TC"]


def test_a_target_without_instructions_rounds_nothing() -> None:
    state = Scheduler(Kernel(kernel_of(data(256, 256) @ data(256, 256))), replace(AVX512, numerics=FAST))
    assert starts(state) == [state]


def test_the_factors_of_a_gram_matrix_are_apart() -> None:
    """Both factors are one stage, which no instruction takes; rounded, each has its own."""
    x = data(40, 24)
    kernel = Kernel(kernel_of(x @ x.T))
    case, state = Case(kernel), apply_opt(Scheduler(kernel, WITH_DOTS), ROUND)
    for got, want in zip(evaluate(state.kernel.ast, case.args, {}), case.want, strict=True):
        np.testing.assert_array_equal(got, want)
