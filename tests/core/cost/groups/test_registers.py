"""The registers that the cost model assumes, against those that ptxas takes."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from svod.compile.cuda import ptxas
from svod.compile.cuda.ptx import emit_ptx
from svod.compile.cuda.render import render
from svod.compile.lower.lower import lower
from svod.core.cost.groups.group_cost import phase_pricers
from svod.core.cost.groups.group_sketch import group_heuristic
from svod.core.graph import graph
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.schedule.schedule import create_schedule
from svod.tensor import Tensor
from tests.compile.cuda.target import card_target


def zeros(*shape: int) -> Tensor:
    return Tensor(np.zeros(shape, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("build", [
    lambda: zeros(512, 256) @ zeros(256, 512), lambda: (zeros(512, 256).cast("float16") @ zeros(256, 512).cast("float16")),
    lambda: zeros(1, 3, 224, 224).conv2d(zeros(64, 3, 7, 7), stride=2, padding=3).relu(), lambda: zeros(128, 1000).softmax(-1),
], ids=["matmul", "tensor cores", "the first convolution of ResNet", "softmax"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_the_registers_of_the_heuristic(build: Callable[[], Tensor], arch: str) -> None:
    """Within a factor of two, and nothing is spilled."""
    if ptxas.ptxas_version() is None:
        pytest.skip("there is no ptxas on PATH: the CUDA toolkit has it")
    target = card_target(arch)
    kernel = Kernel(create_schedule(graph.sink(build().uop)).calls[-1].ast)
    state = group_heuristic(Scheduler(kernel, target))
    _, reports = ptxas.assemble(emit_ptx(render(lower(state), target), arch), arch)
    for pricer, report in zip(phase_pricers(state), sorted(reports, key=lambda r: r.symbol), strict=False):
        assert report.registers / 2 <= pricer.phase().registers <= 2 * report.registers, report
        assert not report.spill_stores and not report.spill_loads
