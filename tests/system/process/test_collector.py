"""What the garbage collector visits while a plan is prepared."""
from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any
from weakref import ref

import numpy as np
import pytest

import svod.prepare
from svod import Tensor
from svod.system.process.collector import rare_collections


class Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    were_frozen = gc.get_freeze_count() > 0       # The test session freezes the objects that it collects.
    gc.unfreeze()
    yield
    gc.unfreeze()
    if were_frozen:
        gc.freeze()


def test_objects_of_before_are_spared_until_the_end() -> None:
    before = ref(Cycle())
    with rare_collections():
        within = ref(Cycle())
        gc.collect()
        assert before() is not None and within() is None
    gc.collect()
    assert before() is None


def test_new_objects_are_collected_rarely_and_count_as_old_afterwards() -> None:
    usual = gc.get_threshold()
    gc.collect()
    with rare_collections():
        built = [[i] for i in range(3 * usual[0])]
        assert gc.get_count()[0] > 2 * usual[0], "no collection of new objects"
    assert gc.get_count()[0] <= 2 * usual[0] and gc.get_threshold() == usual
    assert any(o is built[0] for o in gc.get_objects(generation=2))


def test_contexts_may_overlap() -> None:
    usual, first, second = gc.get_threshold(), rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] > usual[0] and gc.get_freeze_count()
    second.__exit__(None, None, None)
    assert gc.get_threshold() == usual and not gc.get_freeze_count()


def test_a_collector_that_is_off_stays_off() -> None:
    usual = gc.get_threshold()
    gc.set_threshold(0, *usual[1:])
    try:
        with rare_collections():
            assert not gc.get_threshold()[0]
        assert not gc.get_threshold()[0]
    finally:
        gc.set_threshold(*usual)


def test_frozen_objects_stay_frozen() -> None:
    gc.freeze()
    with pytest.raises(ValueError), rare_collections(), rare_collections():
        raise ValueError
    assert gc.get_freeze_count()


def test_an_error_ends_it() -> None:
    with pytest.raises(ValueError), rare_collections():
        raise ValueError
    assert not gc.get_freeze_count()


def test_plans_are_prepared_so(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule_of, spared = svod.prepare.schedule_of, []

    def watched(*given: Any, **named: Any) -> Any:
        spared.append(gc.get_freeze_count() > 0)
        return schedule_of(*given, **named)
    monkeypatch.setattr(svod.prepare, "schedule_of", watched)
    assert (Tensor(np.ones(3, np.float32)) + 1).numpy().tolist() == [2, 2, 2]
    assert spared and all(spared) and not gc.get_freeze_count()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system with fork")
def test_a_child_collects_as_its_parent_did_before() -> None:
    usual = gc.get_threshold()
    with rare_collections():
        child = os.fork()
        if child == 0:
            os._exit(min(gc.get_freeze_count(), 1) + (gc.get_threshold() != usual))
        assert os.waitpid(child, 0)[1] == 0 and gc.get_freeze_count()
