"""When the garbage collector runs while a plan is prepared, and what it visits."""
from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import ref

import numpy as np
import pytest

import svod
import svod.prepare
from svod import Tensor
from svod.system.process import collector
from svod.system.process.collector import MANY_NEW, rare_collections


class Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def usual_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(collector, "_made_old", 0)
    were_frozen = gc.get_freeze_count() > 0       # The test session freezes the objects that it collects.
    usual = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    yield
    gc.enable()
    gc.unfreeze()
    gc.set_threshold(*usual)
    if were_frozen:
        gc.freeze()


@contextmanager
def collections() -> Iterator[list[int]]:
    """The generations that the collector visits until the end, in order."""
    visited: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            visited.append(info["generation"])
    gc.callbacks.append(note)
    try:
        yield visited
    finally:
        gc.callbacks.remove(note)


def test_many_new_objects_are_not_visited_and_count_as_old_afterwards() -> None:
    gc.collect()
    with collections() as visited:
        with rare_collections():
            built = [[i] for i in range(2 * MANY_NEW)]
        within = len(visited)
        later = [[i] for i in range(1000)]
    assert within == 0 and visited and max(visited) < 2
    assert gc.get_threshold() == (700, 10, 10) and not gc.get_freeze_count()
    assert any(o is built[0] for o in gc.get_objects(generation=2)) and len(later) == 1000


def test_few_new_objects_stay_new() -> None:
    gc.collect()
    with rare_collections():
        cycle = ref(Cycle())
    gc.collect(0)
    assert cycle() is None


def test_contexts_may_overlap() -> None:
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] > 700
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


def test_a_collector_that_is_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.set_threshold(0, 10, 10)
    monkeypatch.setattr(collector, "ALL_AFTER", 0)
    with collections() as visited:
        for _ in range(3):
            with rare_collections():
                assert gc.get_threshold() == (0, 10, 10)
                assert len([[i] for i in range(2 * MANY_NEW)])
    assert gc.get_threshold() == (0, 10, 10) and not visited


@pytest.mark.parametrize("threshold", [(50_000, 20, 20), (900, 10, 10), (0, 10, 10), (2_000_000, 10, 10)])
def test_a_threshold_that_the_program_sets_within_stays(threshold: tuple[int, int, int]) -> None:
    def scaled(x: Tensor) -> Tensor:
        gc.set_threshold(*threshold)
        return Tensor(x.shape[0]) * (x + 1)
    assert svod.jit(scaled)(Tensor(np.ones(3, np.float32))).numpy().tolist() == [6, 6, 6]
    assert gc.get_threshold() == threshold


def test_a_threshold_that_the_program_puts_back_within_becomes_the_usual_one() -> None:
    with rare_collections():
        found = gc.get_threshold()
        gc.set_threshold(50_000, 10, 10)
        with rare_collections():
            pass
        assert gc.get_threshold() == (50_000, 10, 10)
        gc.set_threshold(*found)
    assert gc.get_threshold() == (700, 10, 10)


def test_other_generations_keep_the_thresholds_that_the_program_sets_within() -> None:
    with rare_collections():
        gc.set_threshold(gc.get_threshold()[0], 20, 30)
    assert gc.get_threshold() == (700, 20, 30)


@pytest.mark.parametrize("within", [False, True])
def test_frozen_objects_stay_frozen(within: bool) -> None:
    if not within:
        gc.freeze()
    with pytest.raises(ValueError), rare_collections(), rare_collections():
        if within:
            gc.freeze()
        built = [[i] for i in range(2 * MANY_NEW)]
        raise ValueError(len(built))
    assert gc.get_freeze_count()


@pytest.mark.parametrize("begins, ends", [*itertools.product([False, True], repeat=2)])
def test_what_the_program_disables_stays_disabled(begins: bool, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "ALL_AFTER", 0)
    set_to = {False: gc.disable, True: gc.enable}
    set_to[begins]()
    with collections() as visited:
        with rare_collections():
            set_to[ends]()
            built = [[i] for i in range(2 * MANY_NEW)]
        assert visited == ([2] if ends else []) and len(built) == 2 * MANY_NEW
    assert gc.isenabled() == ends and gc.get_threshold() == (700, 10, 10)


def test_an_error_ends_it() -> None:
    with pytest.raises(ValueError), rare_collections():
        raise ValueError
    assert gc.get_threshold() == (700, 10, 10)


def test_garbage_of_a_loop_that_prepares_plans_is_collected() -> None:
    made, y = [], Tensor(np.zeros(3, np.float32)).realize()
    for _ in range(300):
        made.append(ref(Cycle()))
        y.assign(y + 1).realize()
    assert y.numpy().tolist() == [300] * 3
    assert sum(cycle() is not None for cycle in made) < 150


def test_garbage_of_large_structures_is_collected_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "ALL_AFTER", 10 * MANY_NEW)
    made = []
    for _ in range(40):
        with rare_collections():
            made.append(ref(Cycle()))
            built = [[i] for i in range(2 * MANY_NEW)]
        del built
    assert sum(cycle() is not None for cycle in made) <= 6


def test_a_handler_may_prepare_a_plan_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of a signal, or a finalizer, runs between any two lines."""
    monkeypatch.setattr(collector, "MANY_NEW", 0)
    handled = 0

    def handler(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal handled
        if frame.f_code.co_filename != collector.__file__:
            return None
        if event == "line":
            sys.settrace(None)
            with rare_collections():
                handled += 1
            sys.settrace(handler)
        return handler

    def run() -> None:
        before = sys.gettrace()
        sys.settrace(handler)
        try:
            with rare_collections():
                pass
        finally:
            sys.settrace(before)
    thread = threading.Thread(target=run, daemon=True)      # waits for itself in vain if a lock is held
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and handled > 10
    assert gc.get_threshold() == (700, 10, 10) and not gc.get_freeze_count()


def test_an_interrupt_leaves_nothing_behind_after_the_next_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises KeyboardInterrupt when a call returns."""
    monkeypatch.setattr(collector, "MANY_NEW", 0)
    for at in itertools.count():
        returned = 0

        def interrupt(frame: FrameType, event: str, value: Any, at: int = at) -> None:
            nonlocal returned
            if event == "c_return" and frame.f_code.co_filename == collector.__file__:
                returned += 1
                if returned == at + 1:
                    raise KeyboardInterrupt
        before = sys.getprofile()
        sys.setprofile(interrupt)
        try:
            with rare_collections():
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(before)
        if returned <= at:
            break
        assert not gc.get_freeze_count()
        with rare_collections():
            assert gc.get_threshold()[0] > 700
        assert gc.get_threshold() == (700, 10, 10)
    assert at > 8


def test_plans_are_prepared_so(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule_of, thresholds = svod.prepare.schedule_of, []

    def watched(*given: Any, **named: Any) -> Any:
        thresholds.append(gc.get_threshold()[0])
        return schedule_of(*given, **named)
    monkeypatch.setattr(svod.prepare, "schedule_of", watched)
    assert (Tensor(np.ones(3, np.float32)) + 1).numpy().tolist() == [2, 2, 2]
    assert thresholds and min(thresholds) > 700 and gc.get_threshold() == (700, 10, 10)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system with fork")
def test_a_child_collects_as_its_parent_did_before() -> None:
    with rare_collections():
        child = os.fork()
        if child == 0:
            os._exit(gc.get_threshold() != (700, 10, 10))
        assert os.waitpid(child, 0)[1] == 0 and gc.get_threshold()[0] > 700
