"""The experiment that says what preparing a model costs: what it counts, on a model of two equal layers."""
from __future__ import annotations

import importlib
import re
from pathlib import Path

import numpy as np
import pytest

from svod.tensor import Tensor

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


def test_kernels_and_what_is_compiled_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.setenv("SVOD_OBJECT_CACHE", str(tmp_path / "objects"))
    experiment = importlib.import_module("prepare_time")
    weights = [Tensor(np.random.default_rng(i).standard_normal((37, 37), dtype=np.float32)) for i in (1, 2)]

    def layers(x: Tensor) -> Tensor:
        return (x @ weights[0]).contiguous() @ weights[1]
    monkeypatch.setitem(experiment.MODELS, "layers", lambda: (layers, (37, 37)))
    compile_object = importlib.import_module("svod.compile.cpu.backend").compile_object
    found = []
    for _ in range(2):
        experiment.measure("layers")
        line = capsys.readouterr().out
        counts = re.search(r"(\d+) kernels, (\d+) distinct, (\d+) modules compiled", line)
        assert counts and "of the lower bound" in line
        found.append(tuple(int(n) for n in counts.groups()))
    kernels, distinct, modules = found[0]
    assert kernels > distinct and modules >= distinct
    assert found[1] == (kernels, distinct, 0)       # the code of the first run is in memory
    assert importlib.import_module("svod.compile.cpu.backend").compile_object is compile_object
