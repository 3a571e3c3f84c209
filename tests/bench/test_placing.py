"""Which core each thread of a contestant runs on while it is timed."""
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

DATA = bytes(1 << 20)       # hashing that much releases the interpreter's lock


def calm() -> None:
    """No thread of these contestants spins after a run."""


class Library:
    """Works with one thread of its own; the caller works along, or waits."""

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
def test_threads_are_free_after_an_error() -> None:
    allowed = os.sched_getaffinity(0)

    def broken(times: int) -> None:
        raise RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"), placed([Contestant(broken)], calm):
        pytest.fail("a contestant that fails is not timed")
    assert os.sched_getaffinity(0) == allowed


def test_nothing_is_placed_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    monkeypatch.setattr(placing, "TASKS", Path("/nowhere"))
    with placed([Contestant(ran.append)], calm):
        assert not ran


@pytest.mark.parametrize("used, cores_of, placed_on", [
    ({1: 90, 2: 80}, {1: {0}, 2: {0, 1}}, {2: 1}),                                       # the caller is on 0
    ({1: 5, 2: 80, 3: 80}, {1: {0}, 2: {0, 1}, 3: {0, 1}}, {2: 1, 3: 0}),                # the caller only waits
    ({1: 90, 2: 80}, {1: {1}, 2: {0}}, {}),                                              # pinned already
    ({1: 9, 2: 70, 3: 40, 4: 38}, {1: {0}, 2: {0, 1}, 3: {0, 1}, 4: {0, 1}}, {2: 1, 3: 0, 4: 0}),
    ({1: 90, 2: 3}, {1: {0}, 2: {0, 1}}, {}),                                            # it only waits
    ({}, {}, {}),
])
def test_the_busiest_gets_the_core_that_has_least_to_do(used: dict[int, int], cores_of: dict[int, set[int]],
                                                        placed_on: dict[int, int]) -> None:
    assert distribute(used, cores_of, {0, 1}) == placed_on
