"""Numbers of draws in random tests: enough for every change by default, more with `pytest --draws 10` and `--chains 100`."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

SCALE = 1.0         # set by --draws before tests are collected
FEW = 0.5           # SCALE where slow tests are left out
CHAINS = 10.0       # random chains of opts for each kernel of the corpus, on all backends together; set by --chains


def count(n: int) -> int:
    """`n` times what --draws asks for."""
    return max(1, round(n * SCALE))


def chains(share: float) -> int:
    """The number of random chains for each kernel of the corpus in a test with this share of the budget."""
    return max(1, round(CHAINS * SCALE * share))


def a_half(values: Iterable[Any]) -> list[Any]:
    """Make test parameters of `values`: of every two, one is fast, and the others are marked slow."""
    return _one_of(2, values)


def a_quarter(values: Iterable[Any]) -> list[Any]:
    """Make test parameters of `values`: of every four, one is fast, and the others are marked slow."""
    return _one_of(4, values)


def an_eighth(values: Iterable[Any]) -> list[Any]:
    """Make test parameters of `values`: of every eight, one is fast, and the others are marked slow."""
    return _one_of(8, values)


def a_sixteenth(values: Iterable[Any]) -> list[Any]:
    """Make test parameters of `values`: of every sixteen, one is fast, and the others are marked slow."""
    return _one_of(16, values)


def _one_of(n: int, values: Iterable[Any]) -> list[Any]:
    return [v if k % n == k // n % n else pytest.param(*(v if type(v) is tuple else (v,)), marks=pytest.mark.slow)
            for k, v in enumerate(values)]


def draws(n: int) -> settings:
    """Settings of a hypothesis test that draws `n` examples by default."""
    return settings(max_examples=count(n))
