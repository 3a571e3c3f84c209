"""The option of the random chains: `pytest tests/compile/lower/test_random_chains.py --chains 2000`."""
from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chains", type=int, default=None, metavar="N",
                     help="random chains of opts to check against the evaluator, over all kernels (the default is a short run)")


@pytest.fixture(scope="session")
def chains(request: pytest.FixtureRequest) -> int:
    """How many random chains to check in all. The option is known only where pytest is pointed at this folder or a file in it."""
    return int(request.config.getoption("--chains", default=None) or 250)
