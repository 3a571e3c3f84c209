"""The exchange of kernels' first forms for their own (`svod.tune.first_forms`).

    first run of the plan → a thread compiles the own form of one kernel after the other → memory for them, constants packed → exchange

All kernels of a plan change at once, between two runs. A kernel whose own form cannot be compiled keeps its first form, and one warning
says so. The thread ends when nothing is left to compile, and with the program: the step that it takes then is finished (the compilation
of one kernel, or the packing of constants), and the rest is not begun. Own forms are kept in the object cache, so that the next process
goes on from there; so are those of a plan that is dropped before.

A fork waits for the step in progress as well, FORK_SECONDS at most, since a child must not inherit LLVM in the middle of its work. In the
child, a plan that has first forms compiles the own ones after its next run.
"""
from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from svod.compile.plan.compiler import Compiled
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.plan_parts import PreparedKernel
from svod.system.forksafe import remake_after_fork
from svod.system.optional import reason

log = logging.getLogger("svod")

FORK_SECONDS = 1.0      # longest time that a fork waits for a step; the compilation of one kernel takes a tenth of it or less
LOCK_SECONDS = 10.0     # longest time that `complete` waits for a plan that another thread uses

_forking = threading.local()
_step = threading.RLock()        # held during a step; a thread that waits for it may hold a plan's lock, one that holds it waits for none


def with_code(kernel: PreparedKernel, code: Compiled) -> PreparedKernel:
    """Return an item of a plan with the code of its kernel."""
    return replace(kernel, spec=code.spec, loaded=code.loaded, opts=tuple(o.to_json() for o in code.chain), opts_source=code.source,
                   why=code.why, packing=code.packing, form=code.form)


class Exchange:
    """Compiles the own forms of a plan's kernels step by step, and lets the plan change to them. `own`: compiles the own form, by kernel
    key. Steps may be taken by any thread; each waits for the one before."""

    def __init__(self, plan: ExecutionPlan, own: Mapping[str, Callable[[], Compiled]]) -> None:
        self._plan = weakref.ref(plan)
        self._left, self._made = dict(own), dict[str, Compiled]()
        self._failed: list[str] = []
        self._use: Callable[[], bool] | None = None

    @property
    def plan(self) -> ExecutionPlan | None:
        """The plan, as long as it lives and runs first forms."""
        plan = self._plan()
        return plan if plan is not None and plan.finish is not None else None

    def step(self) -> bool:
        """Compile the next kernel, or make the exchange. Returns whether there is another step."""
        return self._take_step(-1.0)

    def _take_step(self, lock_seconds: float) -> bool:
        with _step:
            if self._left:      # also where the plan has gone: the next plan of these kernels has their own forms
                self._compile(*next(iter(self._left.items())))
                return True
            plan = self.plan
            if plan is None:
                return False
            if self._use is None:
                self._use = self._prepared(plan)
                return True
        self._exchange(plan, self._use, lock_seconds)
        return False

    def finish(self, lock_seconds: float = -1.0) -> None:
        """Take all steps. Inside a run of the plan by the same thread, the exchange itself is made after the run. If another thread has the
        plan for `lock_seconds` (-1: however long), the background thread makes it."""
        while self._take_step(lock_seconds):
            pass

    def begin_after_run(self, plan: ExecutionPlan) -> None:
        """Let the background thread take the steps after the plan's next run."""
        plan.call_after_run(lambda: _background.add(self))

    def _compile(self, key: str, compile_own: Callable[[], Compiled]) -> None:
        try:
            self._made[key] = compile_own()
        except Exception as e:      # a border between threads: the first form goes on
            self._failed.append(f"{key[:12]}: {reason(e)}")
        del self._left[key]

    def _prepared(self, plan: ExecutionPlan) -> Callable[[], bool]:
        """Return the function that lets the plan run the own forms."""
        if self._failed:
            log.warning("%d kernels of a plan keep the code that compiled first, since their own cannot be compiled (%s)",
                        len(self._failed), self._failed[0])
        try:
            return plan.exchange([with_code(k, self._made[k.key]) if k.key in self._made else k for k in plan.every])
        except Exception as e:
            log.warning("a plan keeps the code that compiled first (%s)", reason(e))
            return lambda: True

    def _exchange(self, plan: ExecutionPlan, use: Callable[[], bool], lock_seconds: float) -> None:
        while plan.lock.acquire(timeout=lock_seconds):
            try:
                if _step.acquire(blocking=False):
                    try:
                        if plan.finish is not None and not use():
                            self.begin_after_run(plan)
                        elif plan.finish is not None:
                            plan.finish = self._use = None
                            self._made.clear()
                        return
                    finally:
                        _step.release()
            finally:
                plan.lock.release()
            with _step:         # another exchange's step is waited for without the plan's lock, so that runs of the plan go on
                pass
        _background.add(self)


class _Background:
    """The thread that takes the steps of all exchanges, one after the other."""

    def __init__(self) -> None:
        self._exchanges: deque[Exchange] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ends = False

    def add(self, exchange: Exchange) -> None:
        with self._lock:
            self._exchanges.append(exchange)
            if self._thread is None and not self._ends:
                thread = threading.Thread(target=self._work, name="svod-own-forms", daemon=True)
                with suppress(RuntimeError):        # no thread can be started now: the next plan tries it again
                    thread.start()
                    self._thread = thread

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._ends or not self._exchanges:
                    self._thread = None
                    return
                exchange = self._exchanges[0]
            try:
                goes_on = exchange.step()
            except Exception as e:      # a border between threads: other plans go on
                log.warning("a plan keeps the code that compiled first (%s)", reason(e))
                goes_on = False
            if not goes_on:
                self._exchanges.popleft()

    def end(self) -> None:
        """Let the thread end after its present step, and wait for it."""
        with self._lock:
            self._ends, thread = True, self._thread
        if thread is not None:
            thread.join()


_background = _Background()
_exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()
_exchanges_lock = threading.Lock()      # held while the set is extended or listed


def exchange_after_run(plan: ExecutionPlan, own: Mapping[str, Callable[[], Compiled]]) -> Exchange:
    """Compile the own forms of a plan's kernels, by their keys, in the background after the plan's next run, and let it change to them."""
    exchange = Exchange(plan, own)
    plan.finish = exchange.finish
    with _exchanges_lock:
        _exchanges.add(exchange)
    exchange.begin_after_run(plan)
    return exchange


def complete() -> None:
    """Wait until the plans of this process run their own forms, for the time before measurements, or before a server answers. A plan that
    another thread uses for 10 s on end, or that waits for this thread, changes later."""
    with _exchanges_lock:
        found = list(_exchanges)
    for exchange in found:
        exchange.finish(LOCK_SECONDS)


def _before_fork() -> None:
    _forking.holds_step = _step.acquire(timeout=FORK_SECONDS)


def _after_fork_in_parent() -> None:
    if _forking.holds_step:
        _step.release()


def _after_fork_in_child() -> None:
    for exchange in list(_exchanges):
        if (plan := exchange.plan) is not None:
            exchange.begin_after_run(plan)


remake_after_fork(sys.modules[__name__], "_step", threading.RLock)
remake_after_fork(sys.modules[__name__], "_exchanges_lock", threading.Lock)
remake_after_fork(sys.modules[__name__], "_background", _Background)
atexit.register(lambda: _background.end())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
