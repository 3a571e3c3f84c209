"""From tensors to a plan: what the configuration decides."""
from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from svod import Tensor
from svod.config import PrepareConfig
from svod.core import schedule
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


def test_without_a_schedule_cache_nothing_is_looked_up_or_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_ASTS", OrderedDict())
    plan = (Tensor(X).sum(0) + 3).prepare(PrepareConfig(disable_schedule_cache=True))
    assert not schedule._ASTS
    plan.execute()
    assert float(plan.outputs[0][0]) == 303
    (Tensor(X).sum(0) + 3).prepare(PrepareConfig())
    assert schedule._ASTS
