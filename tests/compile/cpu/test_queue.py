"""Queues of launches on CPUs: memory is bound to the words that hold its address."""
from __future__ import annotations

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.cpu import queue
from svod.compile.cpu.queue import CpuQueue

READERS = 24        # kernels that read the input, each at another offset


@pytest.mark.parametrize("few", [0, 1 << 20], ids=["as arrays", "one by one"])
def test_all_words_get_the_address_of_memory_bound_anew(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In either way of writing them; memory that is bound already is not written again, and may be bound back."""
    monkeypatch.setattr(queue, "_FEW_PLACES", few)
    queues, real = set[CpuQueue](), CpuQueue.bind

    def bind(self: CpuQueue, index: int, address: int) -> None:
        queues.add(self)
        real(self, index, address)
    monkeypatch.setattr(CpuQueue, "bind", bind)

    @svod.jit
    def parts(x: Tensor) -> list[Tensor]:
        return [x[k:k + 50] * (k + 1) for k in range(READERS)]
    a, b = (np.random.default_rng(seed).random(READERS + 50, np.float32) for seed in (0, 1))
    for x in (a, b, b, a, b.copy()):
        for k, found in enumerate(parts(x)):
            np.testing.assert_array_equal(found.numpy(), x[k:k + 50] * (k + 1))
    assert any(q._many for q in queues) == (few == 0)
