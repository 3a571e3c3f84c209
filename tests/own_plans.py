"""What the tests of own plans of a set of sizes share."""
from __future__ import annotations

import pytest

from svod.compile.plan.running import background
from svod.tracing import own_plans
from svod.tracing.own_plans import PAIRS, TURN

RUNS = 2 * PAIRS * TURN + 1         # runs that take turns, the last of which makes the decision


def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[background.BackgroundWork]:
    """What the background thread would work on, where every run is enough for a preparation."""
    monkeypatch.setenv("SVOD_FIRST_FORMS", "1")
    monkeypatch.setattr(own_plans, "LEAST_RUN_SECONDS", 0.0)
    monkeypatch.setattr(own_plans, "PAYS_BACK", 0)
    monkeypatch.setattr(own_plans, "LEAST_RUNS", 0)
    found: list[background.BackgroundWork] = []
    monkeypatch.setattr(background._background, "enqueue", found.append)
    return found


def decide(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """Keep or drop own plans, whatever the times are."""
    monkeypatch.setattr(own_plans, "verdict", lambda pairs: kept if len(pairs) == PAIRS else None)
