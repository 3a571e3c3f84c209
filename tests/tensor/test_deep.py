"""Programs with hundreds of dependent operations are cut into kernels of a bounded depth."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from svod import Tensor
from svod.core.schedule.cut import MAX_DEPTH
from tests.draws import a_half

RNG = np.random.default_rng(5)
ROWS = RNG.standard_normal((250, 37)).astype("f4")
WEIGHT = (RNG.standard_normal((37, 37)) / 6).astype("f4")


def scale(t: Tensor | np.ndarray, n: int) -> Tensor | np.ndarray:
    for _ in range(n):
        t = t * 1.001 + 0.5
    return t


def recur(x: Tensor | np.ndarray, tanh: Callable[..., Tensor | np.ndarray]) -> Tensor | np.ndarray:
    h = x[0]
    for i in range(1, 250):
        h = tanh(h * 0.9 + x[i])
    return h


def layers(x: Tensor | np.ndarray, w: Tensor | np.ndarray) -> Tensor | np.ndarray:
    for _ in range(40):
        x = x @ w
        x = x / (1.0 + x * x)
    return x


def softmaxes(x: Tensor | np.ndarray) -> Tensor | np.ndarray:
    for _ in range(30):
        e = (x - x.max(axis=1, keepdims=True)) * 3.0
        e = e.exp() if isinstance(e, Tensor) else np.exp(e)
        x = e / e.sum(axis=1, keepdims=True)
    return x


@pytest.mark.parametrize("program", a_half([
    lambda x, w, tanh: scale(x, 400), lambda x, w, tanh: recur(x, tanh), lambda x, w, tanh: layers(x, w), lambda x, w, tanh: softmaxes(x)]),
    ids=["elementwise", "recurrence", "layers", "softmax"])
def test_deep_programs_agree_with_numpy(program: Callable[..., Tensor | np.ndarray]) -> None:
    found = program(Tensor(ROWS), Tensor(WEIGHT), Tensor.tanh)
    assert isinstance(found, Tensor)
    want = program(ROWS.astype("f8"), WEIGHT.astype("f8"), np.tanh)
    np.testing.assert_allclose(found.numpy(), want, rtol=1e-4, atol=1e-5)


def test_a_deep_chain_is_cut_where_a_kernel_would_become_too_deep() -> None:
    plan = scale(Tensor(ROWS), 400).prepare()
    assert 800 / MAX_DEPTH <= len(plan.kernels) <= 800 / MAX_DEPTH + 1
    assert len(scale(Tensor(ROWS), MAX_DEPTH // 2 - 1).prepare().kernels) == 1
