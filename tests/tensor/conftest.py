"""Every module here runs with the NumPy interpreter of graphs, and with the compiler where it is built."""
from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.tensor import checking

AVAILABLE = ["reference", "scheduled"] + (["compiled"] if importlib.util.find_spec("svod.prepare") else [])


@pytest.fixture(scope="module", autouse=True, params=AVAILABLE)
def evaluator(request: pytest.FixtureRequest) -> Iterator[str]:
    """Sets the evaluator that `check` uses."""
    checking.active = request.param
    yield request.param
    checking.active = "reference"
