"""Processes that fork while other threads work."""
from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svod import Tensor
from svod.system.forksafe import remake_after_fork
from svod.tune.db import TuningDB
from tests.locks import held_elsewhere
from tests.patience import NEVER

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")


def in_child(work: Callable[[], bool], seconds: float = NEVER) -> None:
    """Fork; the child runs `work`, which has to return True. The time limit only detects a child that hangs."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail(f"the child did not end within {seconds:g} s")


def test_a_lock_that_another_thread_holds_is_free_in_the_child() -> None:
    class Owner:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            remake_after_fork(self, "lock", threading.Lock)

    owner = Owner()
    with held_elsewhere(owner.lock):
        in_child(lambda: owner.lock.acquire(timeout=NEVER))
        assert owner.lock.locked(), "the parent's is as it was"


def test_the_locks_of_the_pipeline_are_free_in_the_child(tmp_path: Path) -> None:
    """Another thread holds every lock of `realize` and of a lookup at the time of the fork."""
    import svod.compile.cpu.runtime as runtime
    import svod.compile.plan.compiler as compiler_module
    import svod.prepare as prepare
    import svod.tensor.replacement as replacement
    from svod.tensor.operations import random

    numbers = np.arange(35, dtype=np.float32).reshape(5, 7)

    def work() -> bool:
        return bool(np.array_equal((Tensor(numbers) * 3 + 1).sum(1).numpy(), (numbers * 3 + 1).sum(1)))
    assert work()
    db = TuningDB.open(tmp_path / "tune.db")
    locks: list[Any] = [runtime._load_lock, compiler_module._compilers_lock, prepare._lock, replacement._replacing.lock,
                        random._stream._lock, db.storage.lock, db.claims.heartbeat.lock]
    for compiler in compiler_module._compilers.values():
        locks += [compiler._lock, *compiler._flights]
    with held_elsewhere(*locks):
        in_child(lambda: work() and Tensor.rand(3).numpy().shape == (3,) and db.winner("kernel", "target") is None
                 and db.claims.take("kernel", "target") is not None)
    db.close()


def test_a_claim_stays_with_the_process_that_took_it(tmp_path: Path) -> None:
    """A child that inherits a claim neither renews nor releases it, and makes its own claims over a separate connection."""
    with TuningDB.open(tmp_path / "t.db") as db, TuningDB.open(":none:") as memory:
        claim, within = db.claims.take("k", "t"), memory.claims.take("k", "t")
        assert claim is not None and within is not None and db.storage.own is not None
        inherited = db.storage.own.conn

        def work() -> bool:
            def execute(*a: Any) -> Any:
                raise AssertionError("the parent's connection was used")
            assert db.storage.own is not None
            db.storage.own.conn = type("Parent", (), {"execute": execute, "close": execute})()
            assert not claim.renew() and not within.renew()
            claim.release()
            within.release()
            assert db.claims.take("k", "t") is None and db.claims.holder("k", "t") is not None, "it is the parent's"
            assert memory.claims.take("k", "t") is not None, "a claim within a process is none in another"
            own = db.claims.take("other", "t")
            assert own is not None and own.renew()
            own.release()
            return db.claims.holder("other", "t") is None
        in_child(work)
        assert db.storage.own.conn is inherited and claim.renew() and within.renew() and memory.claims.take("k", "t") is None
        claim.release()
        assert db.claims.holder("k", "t") is None


def test_a_renewal_or_a_claim_is_the_first_thing_a_child_does(tmp_path: Path) -> None:
    """Every method works as the first call after a fork."""
    with TuningDB.open(tmp_path / "t.db") as db:
        claim = db.claims.take("k", "t")
        assert claim is not None

        def child_of(act: Callable[[TuningDB], object]) -> Callable[[], bool]:
            def work() -> bool:
                before = db.storage.own
                act(db)
                return db.storage.own is not before and db.storage._pid == os.getpid()
            return work
        in_child(child_of(lambda d: d.claims.renew(claim)))
        in_child(child_of(lambda d: d.claims.take("other", "t")))
        assert db.claims.holder("k", "t") is not None


@pytest.mark.slow
def test_a_child_realizes_while_a_thread_of_its_parent_does() -> None:
    numbers = np.arange(12, dtype=np.float32)
    stop = threading.Event()

    def work() -> bool:
        return bool(np.array_equal((Tensor(numbers) * 2).numpy(), numbers * 2))

    def loop() -> None:
        while not stop.is_set():
            assert work()
    assert work()   # compiled before the fork: a fork inside LLVM is another problem
    thread = threading.Thread(target=loop)
    interval = sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(1e-5)     # makes threads switch at arbitrary points
        for _ in range(10):
            in_child(work)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def test_a_captured_function_is_captured_anew_in_the_child() -> None:
    """Also a function whose plan was running in another thread, which held its lock, during the fork."""
    import svod

    weight = np.arange(35, dtype=np.float32).reshape(5, 7)
    f = svod.jit(lambda x: x @ Tensor(weight))
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    assert np.array_equal(f(x).numpy(), x @ weight)
    plan, = f.plans
    with held_elsewhere(f._lock):
        plan._runs._is_launching = True
        try:
            in_child(lambda: not f.plans and np.array_equal(f(x).numpy(), x @ weight) and len(f.plans) == 1)
        finally:
            plan._runs._is_launching = False
    assert f.plans == (plan,) and np.array_equal(f(x).numpy(), x @ weight), "the parent's are as they were"
