"""How much random tests draw: enough for every change by default, more with `pytest --draws 10`."""
from __future__ import annotations

from hypothesis import settings

SCALE = 1.0         # set by --draws before tests are collected


def count(n: int) -> int:
    """`n` times what --draws asks for."""
    return max(1, round(n * SCALE))


def draws(n: int) -> settings:
    """Settings of a hypothesis test that draws `n` examples by default."""
    return settings(max_examples=count(n))
