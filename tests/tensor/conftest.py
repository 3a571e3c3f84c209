"""Runs every module here with the compiler, and with `--all` also with the NumPy interpreter of graphs and with the schedule's kernels
in the evaluator. With `--device` only the compiler is used, on that device."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tensor import checking


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    others = [] if metafunc.config.getoption("--device") else [e for e in checking.EVALUATORS if e != "compiled"]
    evaluators = ["compiled", *(pytest.param(e, marks=pytest.mark.slow) for e in others)]
    metafunc.parametrize("evaluator", evaluators, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def evaluator(request: pytest.FixtureRequest) -> Iterator[str]:
    """Sets the evaluator that `check` uses."""
    checking.active = request.param
    yield request.param
    checking.active = "reference"
