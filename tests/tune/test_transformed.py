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
from svod.core.graph import graph
from svod.core.graph.storage import base_of
from svod.core.kernel.apply import algorithm_of
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.schedule.schedule import create_schedule
from svod.tune.plans.transformed import added_bytes, within_limit
from tests.compile.native import AVX512
from tests.core.corpus import data

TWO = replace(AVX512, threads=2)


def convolution(channels: int) -> Kernel:
    taps = data(channels, channels, 3, 3)
    y = data(1, channels, 28, 28).conv2d(taps, padding=1)
    return Kernel(create_schedule(graph.sink(y.uop), frozenset({base_of(taps.uop)})).calls[-1].ast)


@pytest.mark.parametrize(("m", "factor"), [(2, 16 / 9), (4, 4)])
def test_transformed_taps_take_a_multiple_of_their_bytes(m: int, factor: float) -> None:
    kernel, taps = convolution(32), 32 * 32 * 9 * 4
    chain = parse_chain(f"WINOGRAD(out, {m}) STAGE(s2, root)")
    assert added_bytes(kernel, chain, TWO) == pytest.approx((factor - 1) * taps)
    assert added_bytes(kernel, parse_chain("STAGE(s0, root)"), TWO) == 0, "as many as they were"


@pytest.mark.parametrize(("limit", "transformed", "warning"), [
    (None, ["small", "large"], ""), (1.0, ["small", "large"], ""),
    (0.2, ["small"], "1 kernel of a plan computes directly: with transformed constants all of them would take 0.527 MB more"),
    (0.0, [], "2 kernels of a plan compute directly")])
def test_kernels_beyond_the_limit_compute_directly(limit: float | None, transformed: list[str], warning: str,
                                                   caplog: pytest.LogCaptureFixture) -> None:
    """Of two kernels, the one that needs more memory is the first to compute directly. A chain that the user gives stays."""
    kernels = {"small": convolution(32), "large": convolution(64), "given": convolution(48)}
    chain = parse_chain("WINOGRAD(out, 4) STAGE(s2, root)")
    choices = {name: Choice(chain, "explicit" if name == "given" else "heuristic", "") for name in kernels}
    resolved: Any = SimpleNamespace(config=PrepareConfig(transformed_mb=limit),
                                    compiler=SimpleNamespace(target=TWO, backend=backend_named(TWO.device)))
    plan: Any = SimpleNamespace(kernels=kernels)
    with caplog.at_level(logging.WARNING, logger="svod"):
        found = within_limit(plan, choices, resolved)
    assert [name for name, choice in found.items() if algorithm_of(choice.chain)] == [*transformed, "given"]
    assert all(choice.chain for choice in found.values()) and (warning in caplog.text if warning else not caplog.text)
