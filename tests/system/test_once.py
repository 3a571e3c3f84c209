"""A resource of the process is made once, whichever threads ask for it first."""
from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from svod.system.once import once


def test_threads_that_call_first_get_one_resource() -> None:
    made, barrier = [], threading.Barrier(8)

    @once
    def resource() -> object:
        made.append(object())
        time.sleep(0.05)        # the others arrive meanwhile
        return made[-1]

    def ask(_: int) -> object:
        barrier.wait()
        return resource()
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(ask, range(8))) == {made[0]} and len(made) == 1
    assert resource() is made[0]


def test_after_an_exception_it_is_made_anew() -> None:
    turns = iter([ValueError("busy"), None])

    @once
    def resource() -> str:
        if (error := next(turns)) is not None:
            raise error
        return "made"
    with pytest.raises(ValueError, match="busy"):
        resource()
    assert resource() == resource() == "made"


def test_a_child_that_is_forked_while_a_thread_makes_it_makes_its_own() -> None:
    begun, go, parent = threading.Event(), threading.Event(), os.getpid()

    @once
    def resource() -> int:
        if os.getpid() == parent:
            begun.set()
            go.wait(20)
        return os.getpid()
    thread = threading.Thread(target=resource)
    thread.start()
    begun.wait()
    pid = os.fork()
    if not pid:
        os._exit(0 if resource() == os.getpid() else 1)
    go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and resource() == os.getpid()
