"""The worker inside a Ray actor: one child process and, for timing, the machine's lock. This module does not import Ray.

The actor itself never runs a candidate, so no candidate can kill it: an error that Ray reports about it is a failure of the infrastructure,
and its items may run again elsewhere.
"""
from __future__ import annotations

import dataclasses
import platform
import time

from svod.compile.backend import device_named
from svod.core.machine.target import Target
from svod.system.process.cores import usable_cores
from svod.tune.workers.child import Child, Request
from svod.tune.workers.executor import SHARED_BELOW, YIELD_SECONDS
from svod.tune.workers.forkserver import ForkServer, ServerLost
from svod.tune.workers.jobs import Outcome, WorkerConfig, identity, machine_name
from svod.tune.workers.machine_lock import MachineLock


class RayWorker:
    """The class of the Ray actors, which are synchronous: an actor runs one method at a time."""

    def __init__(self, config: WorkerConfig, device: str, times: bool, yields: bool) -> None:
        """Make a worker. `times`: it is a bench worker, which takes the lock of `device` to time. `yields`: a compile worker waits while
        another process holds that lock."""
        self._config, self._device = config, device
        self._machine = machine_name()
        self._server = ForkServer(config)
        self._child = Child(self._server)
        self._lock = MachineLock(device)
        self._yields = yields and not times and usable_cores() < SHARED_BELOW

    def hello(self) -> dict[str, str]:
        """The `jobs.identity` of this worker, and its host, machine and number of cores."""
        return {**identity(), "host": platform.node(), "machine": self._machine, "cores": str(usable_cores())}

    def wait_until_ready(self) -> None:
        """Wait until an item can start at once. Raises TuneError when children cannot start."""
        self._server.wait_until_ready()

    def target(self) -> Target:
        """The target for which this machine times programs. Called only after `hello` has shown that the worker runs the same svod."""
        return device_named(self._device).backend.target()

    def acquire(self, seconds: float) -> bool:
        """Wait up to `seconds` for the right to time on this machine. Returns whether it is held."""
        end = time.monotonic() + seconds
        return self._lock.acquire(lambda: time.monotonic() > end)

    def release(self) -> None:
        """Release the machine's lock, so that other processes may time."""
        self._lock.release()

    def run(self, requests: list[Request]) -> list[Outcome]:
        """Run items one after the other. The outcome is `lost` where this machine could not run one."""
        return [self._run(request) for request in requests]

    def _run(self, request: Request) -> Outcome:
        if self._yields:
            self._lock.wait_for_others(YIELD_SECONDS)
        try:
            return dataclasses.replace(self._child.run(request), host=self._machine)
        except ServerLost as e:
            self._child.close()
            self._server.close()
            self._server = ForkServer(self._config)
            self._child = Child(self._server)
            return Outcome("lost", kind="worker", message=str(e))
