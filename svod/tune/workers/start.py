"""Starting the executor that the user asked for: inline, local or Ray, now or in the background."""
from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from svod.core.machine.target import HOST
from svod.errors import ConfigError, TuneError
from svod.tune.workers.executor import Executor, InlineExecutor
from svod.tune.workers.jobs import WorkerConfig
from svod.tune.workers.local_executor import LocalExecutor

log = logging.getLogger("svod.tune")
RAY_START_DEADLINE = 15.0   # seconds that Ray has to start before the local executor is used instead
MOST_WORKERS = 4096
START_WAIT_SECONDS = 5.0    # seconds that `ExecutorStart.close` waits for an executor that is still starting


def parse_workers(spec: str) -> tuple[str, int | None]:
    """Split an executor's text into its name, "ray", "local" or "inline", and its number of workers or None. Raises ConfigError."""
    name, colon, count = spec.partition(":")
    counted = name in ("ray", "local") and (not colon or (count.isdecimal() and 0 < int(count) <= MOST_WORKERS))
    if not counted and spec != "inline":
        raise ConfigError(f"asked for workers {spec!r}; use ray:N, local:N (N processes, 1 to {MOST_WORKERS}), ray, local or inline")
    return name, int(count) if count else None


def check_address(address: str | None) -> None:
    """Raise ConfigError for a text that cannot be the address of a Ray cluster. None is valid: no cluster."""
    if address is not None and "://" in address:
        raise ConfigError(f"asked for the Ray cluster at {address!r}; svod must run on a node of the cluster and connects with "
                          "--address auto or host:port, because Ray's client protocol cannot kill a worker in time")
    _, _, port = (address or "").rpartition(":")
    if address not in (None, "auto") and not port.isdecimal():
        raise ConfigError(f"asked for the Ray cluster at {address!r}; use auto or host:port")


def make_executor(spec: str = "local", address: str | None = None, config: WorkerConfig | None = None, device: str = HOST,
                  shared_cores: bool | None = None, start_deadline: float = RAY_START_DEADLINE,
                  say: Callable[[str], None] = log.warning) -> Executor:
    """The executor that `spec` names ("ray:N", "local:N", "inline"; without N: one worker per core).

    `address` (Ray only): "auto" or "host:port" connects to a cluster, None starts a new Ray on this machine. Where Ray is not installed or
    the new one is not up within `start_deadline` seconds, the local executor takes over and `say` gets one line. Raises TuneError for a
    cluster that cannot be reached, ConfigError for an invalid spec or address."""
    name, count = parse_workers(spec)
    if address is not None and name != "ray":
        raise ConfigError(f"asked for workers {spec!r} at address {address!r}; an address needs ray workers: ray:N or ray")
    if name == "inline":
        return InlineExecutor(config, device)
    if name == "ray":
        check_address(address)
        from svod.tune.workers.ray_executor import RayUnavailable, start_ray_executor
        try:
            return start_ray_executor(count, address, config, device, shared_cores, start_deadline)
        except RayUnavailable as e:
            if address is not None:
                raise _unreachable(address, e) from e
            say(f"tuning with local workers instead of Ray: {e}")
    return LocalExecutor(count, config, device, shared_cores)


def check_reachable(address: str) -> None:
    """Raise TuneError where nothing listens at the address of a Ray cluster."""
    from svod.tune.workers.ray_executor import RayUnavailable, knock
    try:
        knock(address)
    except RayUnavailable as e:
        raise _unreachable(address, e) from e


def _unreachable(address: str, why: Exception) -> TuneError:
    return TuneError(f"cannot tune on the Ray cluster at {address!r}: {why}")


class ExecutorStart:
    """A call of `make_executor` in the background, as Ray takes seconds to start. `result` waits for the executor; `close` ends it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._made: Executor | None = None
        self._closed = False
        self._error: BaseException | None = None
        self._done = threading.Event()      # not Thread.join: when Ctrl-C interrupts a join, the thread counts as ended, though it runs
        threading.Thread(target=self._make, args=(args, kwargs), name="svod-executor-start", daemon=True).start()

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._made = make_executor(*args, **kwargs)
        except BaseException as e:  # raised again in the thread that asks for the result
            self._error = e
        if self._closed and self._made is not None:
            self._made.close()
        self._done.set()

    def result(self, seconds: float | None = None) -> Executor:
        """Wait up to `seconds` for the executor and return it. Raises the error of `make_executor`, or TuneError if it is not there in
        time."""
        if not self._done.wait(seconds):
            raise TuneError(f"the workers have not started within {seconds:.0f} s; a larger --budget, or a machine that is less busy, "
                            "helps")
        if self._error is not None:
            raise self._error
        assert self._made is not None
        return self._made

    def close(self) -> None:
        """End the executor. One that is still starting ends itself when it is up, or with this process. Idempotent."""
        self._closed = True
        if self._done.wait(START_WAIT_SECONDS):
            with contextlib.suppress(Exception):    # an executor that did not start needs no end; `result` raises the error
                self.result().close()
