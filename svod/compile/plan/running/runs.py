"""The runs of a plan: launches and host items in their order, logging, and the reasons why a plan refuses to run."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import numpy as np

from svod.compile.backend import LaunchQueue
from svod.compile.plan.host_item import BufferCopy, HostProgram
from svod.compile.plan.part import copy_between
from svod.compile.plan.plan_parts import KernelLog, Launches, PlanBuffer, PreparedKernel, Segment, Variant, written_by
from svod.compile.plan.running.bindings import Bindings
from svod.compile.plan.running.devices import PlanDevices
from svod.compile.plan.running.values import PlanValues
from svod.core.graph.buffer import Buffer, give_back
from svod.core.graph.copies import noted
from svod.core.machine.target import HOST
from svod.errors import LaunchError


class Runs:
    """Runs a plan. `numbers`: the numbers, among all kernels, of the ones that run now; `kernels`: these kernels. `segments`: the segments
    of a run. `is_plain`: whether a run is only one call of the queue. `failure`: why the plan refuses to run, or None."""

    def __init__(self, every: Sequence[PreparedKernel], variants: Sequence[Variant], devices: PlanDevices, values: PlanValues,
                 bindings: Bindings) -> None:
        self.failure: str | None = None
        self.log: KernelLog | None = None       # log of the time of each kernel
        self._every, self._variants = every, variants
        self._devices, self._values, self._bindings = devices, values, bindings
        self._is_launching = False              # launches or segments are running
        self._calling = ""                      # the name of the Python function that is being called
        self._next: Callable[[], None] | None = None        # called once, after the next run
        # outputs that cannot be read before the first run: (Buffer, its host array)
        self._closed: list[tuple[Buffer, np.ndarray[Any, Any] | None]] = []
        # first of consecutive kernels of another device → that device's queue, and the launches of all these kernels
        self._elsewhere: dict[int, tuple[LaunchQueue, tuple[Launches, ...]]] = {}
        self._select(variants[-1])

    # -- the kernels of a run -----------------------------------------------------------------------
    def choose(self) -> None:
        """Select the kernels for the current values of the variables."""
        if len(self._variants) > 1:
            now = self._values.known()
            self._select(next((v for v in self._variants if v.holds(now)), self._variants[-1]))

    def _select(self, variant: Variant) -> None:
        devices = self._devices
        self.numbers = variant.kernels
        self.kernels = variant.chosen
        self.segments = devices.queue.segments(devices.parts[devices.main].variant(variant))
        if len(devices.queues) > 1:
            self.segments = self._joined(self.segments)
        self._launches, *_ = self.segments[0]
        self._note_form()

    def _note_form(self) -> None:
        self.is_plain = not self.segments[0].items and not self._closed and self.log is None and self._next is None

    def _joined(self, segments: Iterable[Segment]) -> tuple[Segment, ...]:
        """Join consecutive kernels of another device into one item, which has the number of the first of them."""
        joined: list[Segment] = []
        for s in segments:
            if joined and not s.launches.size:
                before = joined.pop()
                s = Segment(before.launches, (*before.items, *s.items), (*before.kernels, *s.kernels))
            joined.append(s)
        found = []
        for s in joined:
            items: list[int] = []
            for (is_item, _), run in groupby(s.items, lambda n: (self._every[n].is_host_item, self._every[n].device)):
                numbers = list(run)
                if not is_item:
                    queue = self._devices.queue_of(numbers[0])
                    self._elsewhere[numbers[0]] = queue, queue.runs_of(numbers)
                items += numbers if is_item else numbers[:1]
            found.append(s._replace(items=tuple(items)))
        return tuple(found)

    def go_on_from(self, before: Runs) -> None:
        """Take over the state of the same plan with other code, but no call that waits for a run."""
        self.log, self._closed = before.log, before._closed
        self.choose()
        self._note_form()

    def call_after_run(self, function: Callable[[], None]) -> None:
        """Call a function once, after the next run."""
        self._next, self.is_plain = function, False

    def log_to(self, log: KernelLog) -> None:
        """Time each kernel in every run from now on. Kernels then run one after the other."""
        self.log, self.is_plain = log, False

    def close_until_run(self, buffers: Iterable[Buffer], reason: str) -> None:
        """Make outputs of the plan unreadable, for `reason`, until it has run for the first time."""
        for buffer in buffers:
            self._closed.append((buffer, buffer.host))
            buffer.close(reason)
        self.is_plain = False

    # -- whether it may run -------------------------------------------------------------------------
    @property
    def is_going_on(self) -> bool:
        """Whether the plan, or a function that it calls, is running."""
        return self._is_launching or bool(self._calling)

    def check_not_calling(self) -> None:
        """Raise LaunchError if called from a function that the plan calls."""
        if self._calling:
            self._refuse()

    def check_usable(self) -> None:
        """Raise LaunchError if the plan cannot be run any more."""
        if self.failure is not None:
            self._refuse()

    def note_fork(self) -> None:
        """Handle a fork, in the child process: a run that was in progress in the parent will never finish here."""
        if self.is_going_on:
            self._is_launching = False
            self.poison("the process was forked while it ran")

    def poison(self, reason: str) -> None:
        """Make the plan refuse to run, because its buffers are in an inconsistent state."""
        self.failure = reason

    def _check_ready(self) -> None:
        if self.failure is not None or self._bindings.unbound or self._values.unset or self._calling:
            self._refuse()
        if self._devices.is_released:
            self._devices.allocate_again()

    def _refuse(self) -> None:
        if self.failure is not None:
            raise LaunchError(f"this plan cannot be run any more: {self.failure}; prepare it again")
        if self._calling:
            raise LaunchError(f"{self._calling}, a function that this plan calls, runs or changes the plan itself; run another one, "
                              "made by prepare() or replicate() before")
        if self._bindings.unbound:
            raise LaunchError(f"inputs {sorted(self._bindings.unbound)} of the plan have no memory; bind them before the first run")
        raise LaunchError(f"variables {', '.join(sorted(self._values.unset))} have no value; pass them to execute()")

    # -- runs ---------------------------------------------------------------------------------------
    def run(self, times: int, *, cold: bool | None = None, wait: bool = True) -> float | None:
        """Run all kernels `times` times. Returns the seconds by the device's clock if `cold` is not None (see `LaunchQueue.run_timed`), the
        device has a clock and the plan `is_plain`; otherwise None. `wait`: whether to wait for the last kernel."""
        if self.is_plain:
            return self._launch(self._launches, times, self._devices.queue, cold=cold, wait=wait)
        self._run_segments(times, wait)
        return None

    def run_kernel(self, position: int, times: int) -> float | None:
        """Run the phases of one of `kernels` `times` times, except the once phases. Returns the seconds by the device's own clock, without
        clearing its caches; None if the device has no clock, and for host items."""
        self._check_ready()
        self._devices.load_rest()
        number = self.numbers[position]
        if self.kernels[position].is_host_item:
            for _ in range(times):
                self._do(number)
            return None
        queue = self._devices.queue_of(number)
        return self._launch(queue.kernel_launches(number), times, queue, cold=False)

    def profile(self, runs: int) -> list[float]:
        """Time each of `kernels` separately; returns the minimum of `runs` runs in seconds."""
        best = [float("inf")] * len(self.kernels)
        for _ in range(runs):
            for i in range(len(best)):
                start = time.perf_counter()
                try:
                    seconds = self.run_kernel(i, 1)
                except BaseException:
                    self._stopped_after(self.kernels[:i + 1])
                    raise
                best[i] = min(best[i], time.perf_counter() - start if seconds is None else seconds)
        return best

    def run_once_phases(self) -> float:
        """Run the phases that read only constants (weights packed for a kernel). Returns the seconds it took; 0 if nothing ran."""
        start = time.perf_counter()
        ran = False
        for number, kernel in enumerate(self._every):
            if kernel.is_host_item:
                continue
            queue = self._devices.queue_of(number)
            launches = queue.once_launches(number)
            if not launches.size:
                continue
            packed = self._devices.packed.get(number)
            with packed.lock if packed is not None else nullcontext():
                if packed is None or not packed.filled:
                    self._give(launches, 1, queue)
                    _give_back_packed(kernel, self._bindings.buffers)
                    ran = True
                if packed is not None:
                    packed.filled = True
        return time.perf_counter() - start if ran else 0.0

    def _stopped_after(self, kernels: Iterable[PreparedKernel]) -> None:
        """Handle a run that stopped after `kernels`. If it has changed state from which the next run would continue, the plan refuses to
        run from now on; otherwise the next run overwrites its results."""
        changed = self._bindings.carried & {index for k in kernels for index in written_by(k)}
        if changed:
            self.poison(f"a run stopped half-way, after buffer {min(changed)}, which runs go on from, was written")

    def _run_segments(self, times: int, wait: bool) -> None:
        """Run all kernels and host items, and open the outputs after the first run."""
        self._check_ready()
        begun: set[int] = set()
        self._is_launching = True
        try:
            for _ in range(times):
                if self.log is not None:
                    self._run_logged(self.log, begun)
                    continue
                for launches, items, kernels in self.segments:
                    begun.update(kernels)
                    if launches.size or not items:
                        self._launch(launches, 1, self._devices.queue, wait=False)
                        self._is_launching = True
                    for number in items:
                        self._do(number)
            if wait:
                self._devices.wait()
        except BaseException:
            if self.segments[0].items or self.log is not None:      # a single call of the queue runs to its end
                self._stopped_after(self._every[i] for i in begun)
            raise
        finally:
            self._is_launching = False
        if self._closed and times:
            for buffer, array in self._closed:
                buffer.open(array)
            self._closed.clear()
            self._note_form()
        if self._next is not None:
            call, self._next = self._next, None
            self._note_form()
            call()

    def _run_logged(self, log: KernelLog, begun: set[int]) -> None:
        """Run the kernels one by one, and log the time of each. Their numbers are added to `begun`."""
        values = self._values.known()
        for number, kernel in zip(self.numbers, self.kernels, strict=True):
            begun.add(number)
            start, seconds = time.perf_counter(), None
            if kernel.is_host_item:
                self._do(number)
            else:
                queue = self._devices.queue_of(number)
                seconds = self._launch(queue.kernel_launches(number), 1, queue, cold=False)
                self._is_launching = True
            end = time.perf_counter()
            if seconds is None:
                seconds = end - start
            if not isinstance(kernel.loaded, BufferCopy):    # a copy reports its time itself
                device = HOST if kernel.is_host_item else self._devices.runner_of(number).backend.label
                # the host notices the end of a device's kernel, not its start
                log.add(kernel, device, max(start, end - seconds), seconds, values)

    def _do(self, number: int) -> None:
        """Execute an item that the plan's main queue does not run, by its number among all: call a Python function, copy from device to
        device, or launch the kernels of another device."""
        k, devices, bindings = self._every[number], self._devices, self._bindings
        if isinstance(k.loaded, HostProgram):
            self._call(number, k, k.loaded)
        elif isinstance(k.loaded, BufferCopy):
            addresses, _ = devices.queue.arguments(number)
            to, source = (devices.part_of(b) for b in k.buffers)
            with noted(source.backend.label, to.backend.label, k.loaded.nbytes, to.backend):
                copy_between(to, addresses[0], source, addresses[1], k.loaded.nbytes,
                             None if source.is_remote else bindings.array_of(k.buffers[1]))
        else:
            queue, runs = self._elsewhere[number]
            for launches in runs:
                self._launch(launches, 1, queue, wait=False)
                self._is_launching = True

    def _call(self, number: int, k: PreparedKernel, function: HostProgram) -> None:
        addresses, numbers = self._devices.queue.arguments(number)
        values = {v.name: n for v, n in zip(k.variables, numbers, strict=True)}
        owners = [self._bindings.array_of(b) for b in k.buffers]
        self._calling = k.name or k.spec.name
        try:
            part = self._devices.runner_of(number)
            if part.is_remote:
                part.call(function, addresses, [size * dtype.itemsize for dtype, size in k.spec.params], k.spec.outs, values)
            else:
                function.run(addresses, [part.shared if o is None else o for o in owners], values)
        finally:
            self._calling = ""

    def _launch(self, launches: Launches, times: int, queue: LaunchQueue, *, cold: bool | None = None, wait: bool = True) -> float | None:
        """Run launches on a queue after checking that the plan is ready; see `run` for the seconds. Raises the errors of kernels, which
        cannot raise them themselves."""
        if self.failure is not None or self._bindings.unbound or self._values.unset:
            self._refuse()
        if self._devices.is_released:
            self._devices.allocate_again()
        return self._give(launches, times, queue, cold, wait)

    def _give(self, launches: Launches, times: int, queue: LaunchQueue, cold: bool | None = None, wait: bool = True) -> float | None:
        self._is_launching = True
        try:
            if cold is not None:
                return queue.run_timed(launches, times, cold)
            queue.run(launches, times, wait)
            return None
        finally:
            self._is_launching = False
            if queue.may_fail:
                self._raise_failure(queue)

    def _raise_failure(self, queue: LaunchQueue) -> None:
        failure = queue.take_failure()
        if failure is not None:
            if self._bindings.carried:
                self.poison("a kernel failed, and runs go on from what the one before left")
            raise failure


def _give_back_packed(kernel: PreparedKernel, buffers: Sequence[PlanBuffer]) -> None:
    """Release the pages of mapped files that a kernel has packed. Code that still reads them loads them from the file again."""
    for slot in kernel.packing.slots if kernel.packing is not None else ():
        b = buffers[kernel.buffers[slot]]
        content = b.storage.source if b.array is None and b.storage is not None else b.array
        if content is not None:
            give_back(content)
