"""The decision whether a kernel that the database knows is searched further, also at prepare time."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svod import BeamConfig, PrepareConfig, Tensor
from svod.bench import race
from svod.tune import at_prepare
from svod.tune.db import Search, TuningDB, winners
from svod.tune.db.records import AT_BOUND, BUDGET_SPENT, FAILED, INTERRUPTED
from svod.tune.unfinished import was_cut_short, what_is_left

GAINS_NOTHING = "2 rounds without a gain"


def search(outcome: str, *, at: float | None = 1.0, seconds: float = 0.0, **config: Any) -> Search:
    return Search(f"s{at}", "kernel", "target", config=config, ended_at=at, outcome=outcome, result={"seconds": seconds})


@pytest.mark.parametrize(("outcome", "reason"), [
    (BUDGET_SPENT, "its search ended with its budget after 1.50 s"), (INTERRUPTED, "Ctrl-C ended its search after 1.50 s"),
    (FAILED, "an error ended its search after 1.50 s"), (GAINS_NOTHING, None), ("nothing left to try", None), (AT_BOUND, None)])
def test_a_search_that_was_cut_short_goes_on(outcome: str, reason: str | None) -> None:
    assert what_is_left([search(outcome, seconds=1.5, width=4)], BeamConfig(width=4)) == reason


@pytest.mark.parametrize(("before", "asked", "reason"), [
    ({"width": 4}, BeamConfig(width=8), "it was searched with a width of 4, 8 is asked for"), ({"width": 8}, BeamConfig(width=4), None),
    ({"patience": 1}, BeamConfig(patience=2), "it was searched with a patience of 1, 2 is asked for"),
    ({"round_size": 5}, BeamConfig(), "it was searched with a round size of 5, 10 is asked for"),
    ({"mutations": False}, BeamConfig(), "it was searched with mutations = False"),
    ({"mutations": True}, BeamConfig(mutations=False), None),
    ({"actions": "reference"}, BeamConfig(), "it was searched with actions = reference"), ({}, BeamConfig(width=64), None)])
def test_a_search_that_tried_less_goes_on(before: dict[str, Any], asked: BeamConfig, reason: str | None) -> None:
    assert what_is_left([search(GAINS_NOTHING, **before)], asked) == reason


def test_a_search_by_another_strategy_is_no_end() -> None:
    by_chance = replace(search(GAINS_NOTHING, width=4), strategy="random")
    assert what_is_left([by_chance], BeamConfig()) == "it was searched by the strategy random, beam is asked for"
    assert what_is_left([by_chance], BeamConfig(strategy="random")) is None
    assert what_is_left([by_chance, replace(search(GAINS_NOTHING, at=2.0, width=4), strategy="beam")], BeamConfig()) is None
    assert what_is_left([replace(by_chance, outcome=AT_BOUND)], BeamConfig()) is None, "the machine allows nothing faster"


def test_the_most_complete_search_counts() -> None:
    asked, short = BeamConfig(width=4), search(BUDGET_SPENT, at=3.0, width=4)
    assert what_is_left([search(GAINS_NOTHING, at=1.0, width=4), short], asked) is None, "a later, shorter search takes nothing away"
    assert what_is_left([search(GAINS_NOTHING, at=1.0, width=2), short], asked) == "its search ended with its budget"
    assert what_is_left([search(AT_BOUND, width=1)], BeamConfig(width=64)) is None, "the machine allows nothing faster"
    assert what_is_left([], asked) is None
    assert what_is_left([search("", at=None, width=1)], asked) == "its search was killed"
    assert what_is_left([search("", at=None, width=1), search(GAINS_NOTHING, at=1.0, width=4)], asked) is None


def test_what_resume_goes_on_with() -> None:
    with TuningDB.open(":none:") as db:
        assert not was_cut_short(db, "kernel", "target")
        begun = replace(search("", at=None), started_at=5.0)
        db.record([begun])
        assert was_cut_short(db, "kernel", "target"), "it was killed"
        db.record([replace(begun, ended_at=9.0, outcome=BUDGET_SPENT)])
        assert was_cut_short(db, "kernel", "target")
        db.record([replace(search(GAINS_NOTHING, at=20.0), started_at=10.0)])
        assert not was_cut_short(db, "kernel", "target") and not was_cut_short(db, "kernel", "other")


def test_beam_at_prepare_searches_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow search is followed by a wide one; after it nothing is left to search, by the records of the database."""
    monkeypatch.setattr(at_prepare, "cached_ceilings", lambda *args, **kwargs: None)
    # times of a busy machine are not used, and the kernel is searched again
    monkeypatch.setattr(race, "disturbance", lambda *args: None)
    monkeypatch.setattr(winners, "DRIFT_FACTOR", float("inf"))
    monkeypatch.setattr(winners, "is_slower", lambda *args: False)
    db = str(tmp_path / "t.db")

    def searches(**beam: Any) -> int:
        """The number of ended searches after one more prepare."""
        at_prepare.begin_budget()
        config = PrepareConfig(beam=BeamConfig(executor="inline", round_size=1, patience=1, runs=1, sketches=False, **beam), db=db)
        plan = (Tensor(np.arange(53, dtype=np.float32)) * 5).prepare(config)
        plan.execute()
        assert plan.outputs[0].tolist() == [5 * i for i in range(53)]
        with TuningDB.open(db, read_only=True) as opened:
            return len([s for s, _ in opened.select(Search) if s.ended_at is not None])
    assert searches(width=1) == 1
    assert searches(width=1) == 1, "it was complete"
    assert searches(width=2) == 2, "it was narrower"
    assert searches(width=1) == searches(width=2) == 2
