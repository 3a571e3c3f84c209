"""Every module here runs with the NumPy interpreter of graphs, with the schedule's kernels in it, and with the compiler. With `--device` it
runs with the compiler only, on that device."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tensor import checking


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    evaluators = ["compiled"] if metafunc.config.getoption("--device") else list(checking.EVALUATORS)
    metafunc.parametrize("evaluator", evaluators, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def evaluator(request: pytest.FixtureRequest) -> Iterator[str]:
    """Sets the evaluator that `check` uses."""
    checking.active = request.param
    yield request.param
    checking.active = "reference"
