"""Predictions split by stage or phase: the parts add up to the total, and no part is faster than the resource that bounds it."""
from __future__ import annotations

from dataclasses import replace

import pytest

from svod.compile.backend import backend_named
from svod.core.cost.cost import Cost
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from tests.compile.cuda.target import card_target
from tests.compile.native import AVX512
from tests.core.corpus import CORPUS
from tests.draws import a_half
from tests.hand_kernels import gemm


def costs(kernel: Kernel, target: Target) -> list[Cost]:
    backend, state = backend_named(target.device), Scheduler(kernel, target)
    return [backend.cost(s) for s in (state, backend.heuristic(state), *backend.sketches(state)[:3])]


@pytest.mark.parametrize("target", [AVX512, card_target("sm_90")], ids=["cpu", "groups"])
@pytest.mark.parametrize("name", a_half(sorted(CORPUS)[::9]))
def test_parts_add_up(name: str, target: Target) -> None:
    kernel = Kernel(CORPUS[name]())
    if kernel.library_kernel is not None:
        return
    for cost in costs(kernel, target):
        assert sum([p.cycles for p in cost.parts]) == pytest.approx(cost.cycles)
        assert all(p.cycles >= 0.999 * max(c for _, c in p.terms) > 0.0 for p in cost.parts)


def test_a_prediction_is_printed() -> None:
    """The multiply-adds of a register tile bound a product on one core; waking the second core is a term of its own."""
    backend = backend_named(AVX512.device)
    state = Scheduler(Kernel(gemm(64, 80, 48)), AVX512)
    tiled = apply_opts(state, [Opt("UPCAST", "o0", 4), Opt("UPCAST", "o1", 16)])
    lines = str(backend.cost(tiled)).splitlines()
    assert len(lines) == 2 and lines[0].endswith(" cycles") and "longest first: instructions" in lines[1] and "launch" not in lines[1]
    threads = Scheduler(state.kernel, replace(AVX512, threads=2))
    assert "launch" in str(backend.cost(apply_opts(threads, [*tiled.applied_opts, Opt("THREAD", "o0", 2)])))
