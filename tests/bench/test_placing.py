"""Pinning a contestant's threads to cores while it is timed."""
from __future__ import annotations

import hashlib
import os
import queue
import threading
from pathlib import Path

import pytest

from svod.bench import placing
from svod.bench.placing import distribute, placed
from svod.bench.timer import Contestant

DATA = bytes(1 << 20)       # hashing that many bytes releases the interpreter's lock


def calm() -> None:
    """A `pause` without effect: no thread of these contestants spins after a run."""


class Library:
    """A contestant with one additional thread; the caller works as well, or waits."""

    def __init__(self, *, along: bool) -> None:
        self.along = along
        self.orders: queue.Queue[bool] = queue.Queue()
        self.done: queue.Queue[bool] = queue.Queue()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while self.orders.get():
            hashlib.sha256(DATA).digest()
            self.done.put(True)

    def run(self, times: int) -> None:
        for _ in range(times):
            self.orders.put(True)
            if self.along:
                hashlib.sha256(DATA).digest()
            self.done.get()

    @property
    def cores(self) -> set[int]:
        assert self.thread.native_id is not None
        return os.sched_getaffinity(self.thread.native_id)

    def close(self) -> None:
        self.orders.put(False)
        self.thread.join()


needs_cores = pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
                                 reason="needs Linux and two cores")


@needs_cores
@pytest.mark.parametrize("along", [True, False])
def test_threads_that_work_stay_on_a_core_and_are_free_afterwards(along: bool) -> None:
    library, allowed = Library(along=along), os.sched_getaffinity(0)
    try:
        with placed([Contestant(library.run, "library")], calm):
            own = os.sched_getaffinity(0)
            assert len(own) == 1 and len(library.cores) == 1
            if along:
                assert library.cores != own
        assert os.sched_getaffinity(0) == allowed and library.cores == allowed
    finally:
        library.close()


@needs_cores
@pytest.mark.parametrize("breaks", ["a contestant", "the body"])
def test_threads_are_free_after_an_error(breaks: str) -> None:
    library, allowed = Library(along=True), os.sched_getaffinity(0)

    def second(times: int) -> None:
        assert len(library.cores) == 1, "the first one was placed"
        if breaks == "a contestant":
            raise RuntimeError("no")
    try:
        with pytest.raises(RuntimeError, match="no"), placed([Contestant(library.run), Contestant(second)], calm):
            raise RuntimeError("no")
        assert os.sched_getaffinity(0) == allowed and library.cores == allowed
    finally:
        library.close()


@needs_cores
def test_threads_that_are_made_meanwhile_are_not_left_on_the_callers_core() -> None:
    made: list[Library] = []
    allowed = os.sched_getaffinity(0)

    def run(times: int) -> None:
        made.extend([] if made else [Library(along=True)])
        made[0].run(times)
    try:
        with placed([Contestant(run)], calm):
            assert len(made[0].cores) == 1 and made[0].cores != os.sched_getaffinity(0)
        assert made[0].cores == allowed
    finally:
        made[0].close()


@needs_cores
def test_a_thread_that_pins_itself_meanwhile_stays_there() -> None:
    """As svod's workers do: a thread that pins itself in the meantime keeps its core."""
    made: list[Library] = []
    allowed, other = os.sched_getaffinity(0), set[int]()

    def run(times: int) -> None:
        if not made:
            made.append(Library(along=True))
            assert made[0].thread.native_id is not None
            other.add(max(allowed - os.sched_getaffinity(0)))       # another core than the caller's
            os.sched_setaffinity(made[0].thread.native_id, other)
        made[0].run(times)
    try:
        with placed([Contestant(run)], calm):
            assert made[0].cores == other != os.sched_getaffinity(0)
        assert made[0].cores == other
    finally:
        made[0].close()


def test_nothing_is_placed_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    monkeypatch.setattr(placing, "TASKS", Path("/nowhere"))
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    with placed([Contestant(ran.append)], calm):
        assert not ran and (allowed is None or os.sched_getaffinity(0) == allowed)


@pytest.mark.parametrize("used, cores_of, order, placed_on", [
    ({1: 90, 2: 80}, {1: {0}, 2: {0, 1}}, [0, 1], {2: 1}),                                       # the caller is on 0
    ({1: 5, 2: 80, 3: 80}, {1: {0}, 2: {0, 1}, 3: {0, 1}}, [0, 1], {2: 1, 3: 0}),                # the caller only waits
    ({1: 90, 2: 80}, {1: {1}, 2: {0}}, [0, 1], {}),                                              # pinned already
    ({1: 9, 2: 70, 3: 40, 4: 38}, {1: {0}, 2: {0, 1}, 3: {0, 1}, 4: {0, 1}}, [0, 1], {2: 1, 3: 0, 4: 0}),
    ({1: 90, 2: 3}, {1: {0}, 2: {0, 1}}, [0, 1], {}),                                            # it only waits
    ({1: 90, 2: 80}, {1: {0}, 2: {2, 3}}, [0, 1, 2, 3], {2: 2}),                                 # it may not run everywhere
    ({1: 90, 2: 80}, {1: {0}, 2: {4, 5}}, [0, 1], {}),
    ({1: 90, 2: 80, 3: 80}, {1: {9}, 2: {0, 1, 2}, 3: {0, 1, 2}}, [0, 2, 1], {2: 0, 3: 2}),      # 1 is a sibling of 0
    ({}, {}, [0, 1], {}),
])
def test_the_busiest_gets_the_core_that_has_least_to_do(used: dict[int, int], cores_of: dict[int, set[int]], order: list[int],
                                                        placed_on: dict[int, int]) -> None:
    assert distribute(used, cores_of, order) == placed_on
