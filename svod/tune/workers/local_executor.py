"""The executor of this machine: children of this process, forked by a fork server."""
from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence

from svod.core.machine.target import HOST, Target
from svod.system.process.cores import usable_cores
from svod.tune.workers.child import Child, Request
from svod.tune.workers.dispatching import DispatchingExecutor
from svod.tune.workers.executor import SHARED_BELOW, YIELD_SECONDS, Kind
from svod.tune.workers.fleet import WorkerLost
from svod.tune.workers.forkserver import ForkServer, ServerLost
from svod.tune.workers.jobs import Outcome, WorkerConfig
from svod.tune.workers.machine_lock import MachineLock

log = logging.getLogger("svod.tune")


class _LocalCarrier:
    chunk = 1
    host = ""
    target: Target | None = None

    def __init__(self, owner: LocalExecutor, kind: Kind, name: str) -> None:
        self.kind: Kind = kind
        self.name = name
        self._owner = owner
        self._child: Child | None = None
        self._server: ForkServer | None = None
        self._lock = MachineLock(owner.device)
        self.cores = usable_cores()

    def start(self) -> None:
        """Does nothing, as a child starts within 10 ms."""

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        if self.kind == "compile":
            if self._owner.yields and self.cores < SHARED_BELOW:
                self._lock.wait_for_others(YIELD_SECONDS)
        elif not self._lock.acquire(lambda: self._owner.closing):
            raise WorkerLost("closing")
        try:
            if self._child is None:
                self._server = self._owner.server()
                self._child = Child(self._server)
            return [self._child.run(request) for request in requests]
        except ServerLost as e:
            self._drop_child()
            self._owner.replace_server(self._server)
            raise WorkerLost(str(e)) from e

    def idle(self) -> None:
        self._lock.release()

    def interrupt(self) -> None:
        child = self._child
        if child is not None:
            child.interrupt()

    def close(self) -> None:
        self._drop_child()
        self.idle()

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class LocalExecutor(DispatchingExecutor):
    """N compile children and one bench child, forked by one fork server, which starts in the background. A child starts with its first
    item."""

    def __init__(self, workers: int | None = None, config: WorkerConfig | None = None, device: str = HOST,
                 shared_cores: bool | None = None) -> None:
        count = usable_cores() if workers is None else workers
        self.config = config or WorkerConfig()
        self.device = device
        self._server_lock = threading.Lock()
        self._server = ForkServer(self.config)    # started first: if it cannot start, there is nothing else to close
        try:
            super().__init__(f"{count} local worker{'s' if count != 1 else ''}", shared_cores)
            for i in range(count):
                self._add(_LocalCarrier(self, "compile", f"local-compile-{i}"))
            self._add(_LocalCarrier(self, "bench", "local-bench-0"))
        except BaseException:       # the system allows no further thread, or has no place for the machine's lock
            self.close()
            raise

    def wait_until_ready(self, seconds: float = math.inf) -> None:
        self.server().wait_until_ready(seconds)

    def server(self) -> ForkServer:
        with self._server_lock:
            return self._server

    def replace_server(self, lost: ForkServer | None) -> None:
        """Start another fork server in place of `lost`, unless another thread has done so."""
        with self._server_lock:
            if self._server is lost and not self.closing:
                log.warning("the fork server of the workers ended unexpectedly; starting another")
                self._server.close()
                self._server = ForkServer(self.config)

    def _abort(self) -> None:
        self._server.abort()

    def _shut_down(self) -> None:
        self._server.close()
