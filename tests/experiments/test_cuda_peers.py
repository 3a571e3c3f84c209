"""The cases that experiments/cuda_peers.py times, at small sizes on the CPU, against NumPy."""
from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("cuda_peers")


def softmax(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def test_what_is_timed_is_right(script: Any) -> None:
    library, known = script.Svod("CPU", 0.0), script.cases(small=True)
    for name, want in (("gemm_4096", lambda x, w: x @ w), ("stream", lambda x: np.maximum(x, 0)), ("softmax", softmax),
                       ("plan", lambda x, w: x @ np.linalg.matrix_power(w, script.KERNELS))):
        case = known[name]
        wide = want(*(a.astype(np.float64) for a in script.arrays_of(case)))
        got = library.prepare(case).reshape(wide.shape)
        assert np.abs(got - wide).max() <= script.TOLERANCE[case.dtype] * np.abs(wide).max(), name
        assert library.sample(2) > 0
    assert len(library.plan.kernels) == script.KERNELS, "one launch each"


def test_resnet50_has_its_weights(script: Any) -> None:
    """Those of torchvision's model, without the norms' 26,560 gains, which are in the convolutions, and the last layer's 1,000 biases."""
    shapes = list(script.resnet_weights())
    assert len(list(script.resnet_convolutions())) == 53 and sum(int(np.prod(s)) for s in shapes) == 25_557_032 - 26_560 - 1000
