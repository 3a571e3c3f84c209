"""A Ctrl-C at any point leaves no lock taken, and no thread waits forever."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType

import numpy as np
import pytest

from svod import Tensor
from svod.compile.llvm.codegen import _Reduction
from svod.system.monitor import Monitor
from svod.tensor import replacement
from svod.tune.workers.local_executor import LocalExecutor
from tests.patience import NEVER
from tests.tune.workers.test_child import CONFIG, JOBS


def interrupted(work: Callable[[], object]) -> Iterator[int]:
    """Run `work` again and again, with a KeyboardInterrupt at its first point, at its second, and so on, until it has no more points; yield
    after each. A point is a place where Python handles signals: the beginning of a function, and the end of a call of C code."""
    for point in count():
        left = point

        def profile(frame: FrameType, event: str, _: object) -> None:
            nonlocal left
            if event in ("call", "c_return"):
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt

        try:
            sys.setprofile(profile)
            try:
                work()
            finally:
                sys.setprofile(None)
            return
        except KeyboardInterrupt:
            yield point


def test_a_monitor_is_free_after_an_interrupt() -> None:
    changed = Monitor()
    begun = list[int]()

    def work() -> None:
        with changed.lock:
            begun.append(1)
            changed.notify_all()

    points = 0
    for _ in interrupted(work):
        points += 1
        assert not changed._is_owned()
    assert points >= 3 and begun


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")     # an interrupt may come while a generator is freed
def test_an_executor_goes_on_after_an_interrupted_submit() -> None:
    """The search of a Ctrl-C confirms what was found, on the same workers."""
    with LocalExecutor(1, CONFIG, device="TEST") as executor:
        points = 0
        for point in interrupted(lambda: executor.submit(f"{JOBS}:echo", [1], kind="bench", deadline=NEVER)):
            points += 1
            answer = executor.submit(f"{JOBS}:echo", [point], kind="bench", deadline=NEVER).poll(NEVER)
            assert answer is not None and answer[1].value == point
        assert points > 10


def test_code_is_generated_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("svod.compile.llvm.codegen.llvm.set_option", lambda *_: None)       # an interrupt leaves llvmlite's own lock taken
    reduction = _Reduction()

    def work() -> None:
        assert reduction.switched(True, lambda: bytes(reduction._running)) == bytes(1)

    points = 0
    for _ in interrupted(work):
        points += 1
        assert not reduction._running and not reduction._changed._is_owned()
    assert points > 3


def test_tensors_are_computed_after_an_interrupt() -> None:
    y = Tensor(np.arange(7, dtype=np.float32)) + 1

    def work() -> None:
        with replacement.Computing([y]):
            pass

    points = 0
    for _ in interrupted(work):
        points += 1
        assert replacement._replacing.lock.acquire(timeout=NEVER)
        replacement._replacing.lock.release()
    assert points > 3
    np.testing.assert_array_equal(y.numpy(), np.arange(1, 8))
