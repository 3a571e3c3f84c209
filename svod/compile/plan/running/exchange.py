"""The exchange of kernels' first forms for their own (`svod.tune.first_forms`).

    first run of the plan → a thread compiles the own form of one kernel after the other → memory for them, constants packed → exchange

All kernels of a plan change at once, between two runs. A kernel whose own form cannot be compiled keeps its first form, and one warning
says so. A step is the compilation of one kernel, which takes a tenth of a second or less, or the packing of constants. Own forms are kept
in the object cache, so that the next process goes on from there; so are those of a plan that is dropped before. In a forked child, a plan
that has first forms compiles the own ones after its next run.
"""
from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace

from svod.compile.plan.compiler import Compiled
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.plan_parts import PreparedKernel
from svod.compile.plan.running import background
from svod.system.optional import reason

log = logging.getLogger("svod")


def with_code(kernel: PreparedKernel, code: Compiled) -> PreparedKernel:
    """Return an item of a plan with the code of its kernel."""
    return replace(kernel, spec=code.spec, loaded=code.loaded, opts=tuple(o.to_json() for o in code.chain), opts_source=code.source,
                   why=code.why, packing=code.packing, form=code.form)


class Exchange(background.BackgroundWork):
    """Compiles the own forms of a plan's kernels step by step, and lets the plan change to them. `own`: compiles the own form, by kernel
    key."""

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
        with background.step_lock:
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
        plan.call_after_run(lambda: background.enqueue(self))

    def go_on_after_fork(self) -> None:
        if (plan := self.plan) is not None:
            self.begin_after_run(plan)

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
                if background.step_lock.acquire(blocking=False):
                    try:
                        if plan.finish is not None and not use():
                            self.begin_after_run(plan)
                        elif plan.finish is not None:
                            plan.finish = self._use = None
                            self._made.clear()
                        return
                    finally:
                        background.step_lock.release()
            finally:
                plan.lock.release()
            with background.step_lock:     # another exchange's step is waited for without the plan's lock, so that runs of the plan go on
                pass
        background.enqueue(self)


def exchange_after_run(plan: ExecutionPlan, own: Mapping[str, Callable[[], Compiled]]) -> Exchange:
    """Compile the own forms of a plan's kernels, by their keys, in the background after the plan's next run, and let it change to them."""
    exchange = Exchange(plan, own)
    plan.finish = exchange.finish
    background.register(exchange)
    exchange.begin_after_run(plan)
    return exchange
