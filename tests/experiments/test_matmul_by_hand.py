"""`experiments/matmul_by_hand.py`: each step applies on this machine, is right, and is predicted no slower."""
from __future__ import annotations

import numpy as np
import pytest

import svod
from experiments.matmul_by_hand import steps, walk
from svod import Tensor


@pytest.mark.parametrize("size", [1, 7, 64])
def test_each_step_is_right(size: int) -> None:
    rng = np.random.default_rng(size)
    a, b = (Tensor(rng.standard_normal((size, size), dtype=np.float32)) for _ in range(2))
    walked = list(walk(svod.kernel(a @ b)))
    assert len(walked) == 1 + len(list(steps(walked[0][1].state.target)))
    assert all(k.check() for _, k in walked)
    if size == 64:
        said = [why for why, _ in walked]
        assert sum(why.startswith("left out") for why in said) <= (walked[0][1].state.target.threads == 1)
        assert walked[-1][1].cost().cycles < 0.2 * walked[0][1].cost().cycles
