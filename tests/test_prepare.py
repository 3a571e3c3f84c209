"""From tensors to a plan: what the configuration decides."""
from __future__ import annotations

import numpy as np
import pytest

from svod import Tensor
from svod.config import PrepareConfig
from svod.errors import UnsupportedError

X = np.ones((300, 300), np.float32)


def test_no_more_threads_than_asked_for() -> None:
    """Independent kernels of one level run at the same time, but not on cores that were not given."""
    x = Tensor(X)
    plan = Tensor.prepare_batch([x.sum(0), x.max(1), x * 3], PrepareConfig(threads=1))
    assert [k.level for k in plan.kernels] == [0, 0, 0]
    assert plan.threads == 1
    plan.execute()
    assert [float(o[0]) for o in plan.outputs] == [300, 1, 3]


def test_another_device_than_the_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="device='CUDA'"):
        (Tensor(X) + 1).prepare(PrepareConfig(device="CUDA"))
    (Tensor(X) + 1).prepare(PrepareConfig(device="cpu"))
