"""Runs every module here with the compiler, and with `--all` also with the NumPy interpreter of graphs and with the schedule's kernels
in the evaluator, unless the module does not use `checking` or names its `EVALUATORS`. With `--device` only the compiler is used, on that
device."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tensor import checking


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_checked = any(v is checking or getattr(v, "__module__", "") == checking.__name__ for v in vars(metafunc.module).values())
    named = getattr(metafunc.module, "EVALUATORS", checking.EVALUATORS) if is_checked else ()
    others = [] if metafunc.config.getoption("--device") else [e for e in named if e != "compiled"]
    evaluators = ["compiled", *(pytest.param(e, marks=pytest.mark.slow) for e in others)]
    metafunc.parametrize("evaluator", evaluators, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def evaluator(request: pytest.FixtureRequest) -> Iterator[str]:
    """Sets the evaluator that `check` uses."""
    checking.active = request.param
    yield request.param
    checking.active = "reference"
