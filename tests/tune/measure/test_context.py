"""Timed runs of large kernels find the caches as in a plan."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from svod.core.graph import graph
from svod.core.graph.storage import base_of
from svod.core.ir.serialize import ast_to_data
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.schedule.schedule import create_schedule
from svod.tune.measure.context import KernelContext, Runner, Setup
from svod.tune.measure.work import compile_candidate
from tests.compile.native import runnable_targets
from tests.core.corpus import data

NATIVE = list(runnable_targets().values())
pytestmark = pytest.mark.skipif(not NATIVE, reason="this processor runs none of the targets")


def product(m: int, n: int, k: int) -> Kernel:
    """A product of an argument and a constant."""
    weights = data(k, n)
    return Kernel(create_schedule(graph.sink((data(m, k) @ weights).uop), frozenset({base_of(weights.uop)})).calls[-1].ast)


def runner_of(kernel: Kernel, chain: str) -> Runner:
    context = KernelContext(Setup(ast_to_data(kernel.ast), NATIVE[-1]))
    opts = [opt.to_json() for opt in parse_chain(chain)]
    [runner] = context.ready_for_timing([compile_candidate((opts, True), context)])
    return runner


@pytest.mark.parametrize(("chain", "flushed"), [("UPCAST(o1, 16)", 1), ("UPCAST(o1, 16) STAGE(s1, root)", 2)])
def test_constants_leave_the_caches_and_arguments_are_divided(chain: str, flushed: int) -> None:
    runner = runner_of(product(64, 512, 640), chain)
    names, plan = list[str](), runner.between
    assert plan is not None
    names = [k.spec.name for k in plan.kernels]
    assert names == ["svod_flush"] * flushed + ["svod_own"], "constants, as they are and as they are packed; the other factor"
    before = [array.copy() for array in runner.context.buffers.arrays]
    seconds: Any = runner.contestant().run(3)
    assert seconds > 0
    for slot, array in enumerate(before):
        changed = slot in runner.spec.outs
        assert np.array_equal(runner.context.buffers.arrays[slot], array) != changed
    want = before[1].reshape(64, 640) @ before[2].reshape(640, 512)
    assert np.allclose(runner.context.buffers.arrays[0].reshape(64, 512), want, rtol=1e-4)


def test_small_kernels_run_again_and_again() -> None:
    assert runner_of(product(16, 32, 64), "UPCAST(o1, 16)").between is None
