"""The memory by which algorithms make the constants of a plan larger is limited."""
from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from svod import PrepareConfig
from svod.compile.backend import backend_named
from svod.compile.plan.compiler import Choice
from svod.compile.plan.unbound_plan import BufferSpec, Call, UnboundPlan
from svod.core.graph import graph
from svod.core.graph.storage import base_of
from svod.core.kernel.apply import algorithm_of
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target
from svod.core.schedule.schedule import create_schedule
from svod.tune.plans.transformed import added_bytes, within_limit
from tests.compile.cuda.target import card_target
from tests.compile.native import AVX512
from tests.core.corpus import data

TWO = replace(AVX512, threads=2)


def convolution(channels: int) -> Kernel:
    taps = data(channels, channels, 3, 3)
    y = data(1, channels, 28, 28).conv2d(taps, padding=1)
    return Kernel(create_schedule(graph.sink(y.uop), frozenset({base_of(taps.uop)})).calls[-1].ast)


CHAIN = parse_chain("WINOGRAD(out, 4) STAGE(s2, root)")


def plan_of(kernels: dict[str, Kernel], taps: dict[str, int]) -> UnboundPlan:
    """Two calls of each kernel with different taps, by default; `taps`: how many different ones the calls of a kernel have."""
    buffers, calls = list[BufferSpec](), list[Call]()
    for name, kernel in kernels.items():
        first = len(buffers)
        for k in range(2):
            known = k >= taps.get(name, 2)
            args = []
            for p in kernel.params:
                is_constant = bool(p.arg.constant)
                args.append(first + p.arg.slot if known and is_constant else len(buffers))
                kind: Any = "constant" if is_constant else "output" if p.arg.slot in kernel.outs else "input"
                buffers.append(BufferSpec(p.dtype, p.arg.size, kind))
            calls.append(Call(name, tuple(args), name, "", "", 0, (0,) * len(args)))
    return UnboundPlan(tuple(calls), tuple(buffers), (), kernels)


def limited(limit: float | None, plan: UnboundPlan, explicit: str = "", target: Target = TWO) -> dict[str, Choice]:
    choices = {name: Choice(CHAIN, "explicit" if name == explicit else "heuristic", "") for name in plan.kernels}
    resolved: Any = SimpleNamespace(config=PrepareConfig(transformed_mb=limit),
                                    compiler=SimpleNamespace(target=target, backend=backend_named(target.device)))
    return within_limit(plan, choices, resolved)


@pytest.mark.parametrize(("m", "factor"), [(2, 16 / 9), (4, 4)])
def test_transformed_taps_take_a_multiple_of_their_bytes(m: int, factor: float) -> None:
    kernel, taps = convolution(32), 32 * 32 * 9 * 4
    chain = parse_chain(f"WINOGRAD(out, {m}) STAGE(s2, root)")
    assert added_bytes(kernel, chain, TWO) == pytest.approx((factor - 1) * taps)
    assert added_bytes(kernel, parse_chain("STAGE(s0, root)"), TWO) == 0, "as many as they were"


@pytest.mark.parametrize(("limit", "transformed", "warning"), [
    (None, ["small", "large"], ""), (1.1, ["small", "large"], ""),
    (1.0, ["small"], "1 kernel of a plan computes directly: with transformed constants all of them would take 1.05 MB more"),
    (0.2, [], "2 kernels of a plan compute directly")])
def test_kernels_beyond_the_limit_compute_directly(limit: float | None, transformed: list[str], warning: str,
                                                   caplog: pytest.LogCaptureFixture) -> None:
    """Of two kernels with two calls each, the one that needs more memory is the first to compute directly. A chain that the user gives
    stays."""
    kernels = {"small": convolution(32), "large": convolution(64), "given": convolution(48)}
    with caplog.at_level(logging.WARNING, logger="svod"):
        found = limited(limit, plan_of(kernels, {}), "given")
    assert [name for name, choice in found.items() if algorithm_of(choice.chain)] == [*transformed, "given"]
    assert all(choice.chain for choice in found.values()) and (warning in caplog.text if warning else not caplog.text)


@pytest.mark.parametrize(("taps", "is_transformed"), [(1, True), (2, False)])
def test_calls_with_the_same_constants_share_transformed_ones(taps: int, is_transformed: bool) -> None:
    """Taps of 64 channels take 0.42 MB more."""
    found = limited(0.5, plan_of({"conv": convolution(64)}, {"conv": taps}))
    assert bool(algorithm_of(found["conv"].chain)) == is_transformed


@pytest.mark.parametrize(("limit", "is_transformed"), [(1.0, True), (0.1, False)])
def test_the_limit_holds_on_groups(limit: float, is_transformed: bool) -> None:
    """A kernel that computes directly gets the fastest sketch without an algorithm, though others are predicted to be faster."""
    found = limited(limit, plan_of({"conv": convolution(64)}, {"conv": 1}), target=card_target("sm_90"))
    assert bool(algorithm_of(found["conv"].chain)) == is_transformed and "STAGE" in str(found["conv"].chain)
