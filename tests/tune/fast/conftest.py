"""Told times for the tests of the policy "fast"."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from svod import config
from svod.tune.fast.selection import Effect
from svod.tune.fast.trial import RoundedPlans, Times


@pytest.fixture(autouse=True)
def told_times(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rounded kernels save time, whatever the machine does meanwhile; lines that are said once are said again."""
    monkeypatch.setattr(config, "_said", set())
    monkeypatch.setattr(RoundedPlans, "effects", lambda self: [Effect(k, 2.0, 1.0, self.error_of(frozenset((k,)))) for k in self._rounded])
    monkeypatch.setattr(RoundedPlans, "times", lambda self, kernels: Times(10.0, 10.0 - len(kernels)))
    yield
