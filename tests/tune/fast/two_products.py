"""A plan of two products whose factors may be rounded, for the tests of the policy "fast"."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.cpu.host import host_target
from svod.compile.plan.execution_plan import ExecutionPlan

NEEDED = {"avx512f", "bf16"}
needs_instructions = pytest.mark.skipif(not set(host_target().features) >= NEEDED, reason="needs a CPU with AVX-512 BF16")
RNG = np.random.default_rng(0)
X, V, W = (RNG.standard_normal((n, m)).astype(np.float32) for n, m in ((96, 128), (128, 160), (160, 64)))


def of(path: Path | str, most: float | None = None) -> svod.PrepareConfig:
    return svod.PrepareConfig(numerics="fast", max_error=most, db=str(path))


def plan_of(how: svod.PrepareConfig, x: np.ndarray = X, w: np.ndarray = W) -> tuple[Tensor, ExecutionPlan]:
    weights = [Tensor(V), Tensor(w)]
    y = (Tensor(x) @ weights[0]).relu() @ weights[1]
    return y, y.prepare(how, constants=weights)


def exact(x: np.ndarray = X, w: np.ndarray = W) -> np.ndarray:
    y, plan = plan_of(svod.PrepareConfig(numerics="float32", db=":none:"), x, w)
    plan.execute()
    return y.numpy().copy()


def rounded(plan: ExecutionPlan) -> int:
    return sum(k.opts[:1] != () and k.opts[0][0] == "ROUND" for k in plan.kernels)
