"""What the study of a GEMM's parts takes out of the code is what it says."""
from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svod.compile.lower.interpreter import interpret
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.core.graph import graph
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.schedule.schedule import create_schedule
from svod.tensor import Tensor
from tests.compile.native import AVX2

CHAIN = (Opt("ORDER", "out", ("o1", "o0")), Opt("UPCAST", "o0", 2), Opt("UPCAST", "o1", 16), Opt("UNROLL", "r0", 2),
         Opt("STAGE", "s1", "o1"))


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Any:
    experiments = Path(__file__).resolve().parents[2] / "experiments"
    monkeypatch.syspath_prepend(str(experiments))
    monkeypatch.syspath_prepend(str(experiments / "chains"))
    return importlib.import_module("gemm_pieces")


def test_each_piece_is_taken_out_and_nothing_else(pieces: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((7, 11), np.float32), rng.standard_normal((11, 32), np.float32)
    state = Scheduler(Kernel(create_schedule(graph.sink((Tensor(a) @ Tensor(b)).uop)).calls[0].ast), AVX2)
    for opt in CHAIN:
        state = apply_opt(state, opt)
    results = {}
    for name, program in pieces.variants(lower(state)).items():
        validate(program)
        out = np.full(7 * 32, 5.0, np.float32)
        if name not in ("no packing", "none"):       # these read what nobody wrote
            interpret(program, (out, a.ravel(), b.ravel()))
        results[name] = out.reshape(7, 32)
    product = a @ b
    np.testing.assert_allclose(results["chain"], product, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(results["A stays"], product[[0, 1, 0, 1, 0, 0, 1]], rtol=1e-5, atol=1e-5)     # the last tile is rows 5 and 6
    np.testing.assert_allclose(results["C stays"][:2], product[5:], rtol=1e-5, atol=1e-5)
    assert (results["C stays"][2:] == 5.0).all()


def test_without_a_copy_is_an_error(pieces: Any) -> None:
    x = Tensor(np.zeros((4, 16), np.float32)) @ Tensor(np.zeros((16, 16), np.float32))
    state = apply_opt(Scheduler(Kernel(create_schedule(graph.sink(x.uop)).calls[0].ast), AVX2), Opt("UPCAST", "o0", 2))
    with pytest.raises(ValueError, match="copies nothing"):
        pieces.variants(lower(state))
