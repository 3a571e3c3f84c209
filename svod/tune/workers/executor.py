"""Executors, which run the jobs of a search: one small interface with three implementations.

    inline     in the calling process, one after the other, unprotected: for debugging
    local:N    N compile workers and one bench worker, children of this process (`local_executor.py`)   (0.2 s to start)
    ray:N      the same children inside Ray actors, here or on a cluster (`ray_executor.py`)            (4 s to start)

    with make_executor("local:2") as executor:
        batch = executor.submit("svod.tune.measure.work:compile_candidate", items, kind="compile", deadline=10.0)
        for index, outcome in batch:            # as they complete, every index exactly once
            batch.deadline = 20 * median        # for items that have not started yet

Guarantees (`InlineExecutor` names its exceptions):

* Every item gets exactly one `Outcome`. Nothing that a candidate does raises here, stops other items, or affects this process.
* A deadline runs from the start of the item on a ready worker. It does not include waiting for a worker, the worker's start and setup, or
  the machine lock.
* If a worker is lost through no fault of the candidate, another worker gets the item. After MAX_ATTEMPTS such losses the item is `lost`.
* A compile item whose worker is silent far beyond the deadline (its machine is frozen) is started on an idle worker as well. The first
  answer counts.
* A worker takes items only while it is up. A worker that cannot work (it does not start, or runs another version of svod) gets no more
  items, with a warning. If no worker of a kind is left, the waiting items are `lost`, kind "no worker", and `submit` raises TuneError.
* A machine has one bench worker, which runs one item at a time. It holds the machine-wide lock of its device (`machine_lock.py`) while it
  has items. All bench items of a batch run on one worker while it is up: one on a machine that can time programs for the batch's target.
  Compile workers take items for any target.
* Where compilers and kernels share cores (`shared_cores`: by default where the bench worker's machine has fewer than 8), a bench item
  starts only when no compile item is running on that machine, and no compile item starts while a bench item is running or waiting there,
  or, for at most YIELD_SECONDS, while another svod process times there.
* `close` (also at exit and after an exception in a `with`) leaves no process behind. Unfinished items become `lost`.
"""
from __future__ import annotations

import dataclasses
import logging
import math
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from svod.compile.backend import device_named
from svod.core.machine.target import HOST, Target
from svod.errors import TuneError
from svod.tune.workers.child import Request, make_request
from svod.tune.workers.jobs import Outcome, WorkerConfig, decode, encode, resolve_job
from svod.tune.workers.machine_lock import MachineLock

log = logging.getLogger("svod.tune")
Kind = Literal["compile", "bench"]
YIELD_SECONDS = 5.0         # longest pause of a compile item while another process times on these cores
SHARED_BELOW = 8            # with fewer cores than this, compilers are idle during timing


@dataclasses.dataclass(frozen=True)
class Activity:
    """The current activity of one worker, for display. `state`: "starting" (for the first time, or after it was lost), "idle", "busy" or
    "set aside" (it gets no more items). `seconds`: the time in this state. `job`: the job of a busy worker (`race_candidates`), or the
    reason why it is set aside. `items`: the number of its current items. `host`: its machine, "" for this one."""

    name: str
    kind: Kind
    host: str
    state: str
    seconds: float
    job: str = ""
    items: int = 0


class Batch(Iterator[tuple[int, Outcome]]):
    """The items of one `submit` and of later `add` calls. Iterating gives (index, outcome) as items complete. `deadline`: the deadline, in
    seconds, that items get when they start; it may be changed."""

    def __init__(self, job: str, items: Iterable[Any], kind: Kind, deadline: float, setup: Any,
                 homes: Sequence[str] = (), target: Target | None = None) -> None:
        self.kind: Kind = kind
        self.target = target
        self.worker = ""            # for bench items: name of the worker that took the first one
        self.deadline = deadline
        self.job = job
        self.payloads: list[bytes] = []
        self.homes: list[str] = []
        self.unanswered: set[int] = set()       # indices of items whose outcome `poll` has not returned yet
        self._template = make_request(job, None, deadline, setup)
        self._outcomes: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        self.cancelled = False
        self.extend(items, homes)

    def __len__(self) -> int:
        return len(self.payloads)

    def extend(self, items: Iterable[Any], homes: Sequence[str] = ()) -> range:
        """Add items; called by executors only. Returns their indices."""
        payloads = [encode(item) for item in items]
        new = range(len(self.payloads), len(self.payloads) + len(payloads))
        self.payloads += payloads
        self.homes += homes or [""] * len(payloads)
        self.unanswered.update(new)
        return new

    def request(self, index: int) -> Request:
        return dataclasses.replace(self._template, item=self.payloads[index], deadline=self.deadline)

    def deliver(self, index: int, outcome: Outcome) -> None:
        """Add the outcome of one item; called by executors only."""
        self._outcomes.put((index, outcome))

    def cancel(self) -> None:
        """Start no further item. Items that have not started end as `lost`, kind "cancelled"; running items finish."""
        self.cancelled = True

    def __next__(self) -> tuple[int, Outcome]:
        outcome = self.poll(None)
        if outcome is None:
            raise StopIteration
        return outcome

    def poll(self, timeout: float | None = 0.0) -> tuple[int, Outcome] | None:
        """Wait up to `timeout` seconds for the next (index, outcome). None: no item completed in that time, or all outcomes were
        returned (`finished`)."""
        if self.finished:
            return None
        try:
            index, outcome = self._outcomes.get(timeout=timeout) if timeout != 0.0 else self._outcomes.get_nowait()
        except queue.Empty:
            return None
        self.unanswered.discard(index)
        return index, outcome

    @property
    def finished(self) -> bool:
        return not self.unanswered


class Executor(ABC):
    """Runs the jobs of a search on workers. The module's docstring has the guarantees."""

    description: str = ""       # such as "2 local workers"; it is shown to the user and stored with searches
    device: str = HOST          # the device on which bench workers time

    @abstractmethod
    def submit(self, job: str, items: Iterable[Any], *, kind: Kind, deadline: float, setup: Any = None,
               homes: Sequence[str] = (), target: Target | None = None) -> Batch:
        """Queue `items` for `job` (see `svod.tune.workers.jobs`), each with its own deadline of `deadline` seconds. Does not wait.

        `setup`: payload of the job's setup, or None. `homes`: for each item the preferred worker (`Outcome.worker`), which has data that
        the item needs; another worker takes a compile item if the preferred one is busy, a bench item only if it is gone. `target`: the
        target of the programs in bench items; None: any machine runs them. Raises FormatError for items that are not plain data, TuneError
        after `close` and where no worker is left for them."""

    @abstractmethod
    def add(self, batch: Batch, items: Iterable[Any], homes: Sequence[str] = ()) -> range:
        """Queue more items for a batch. Returns their indices. May only be called by the thread that takes the batch's outcomes."""

    @abstractmethod
    def workers(self, kind: Kind) -> int:
        """The number of items of `kind` that run at once."""

    def targets(self) -> list[Target]:
        """The targets of the machines that time, each once. Raises DeviceError where this machine lacks the device."""
        return [device_named(self.device).backend.target()]

    @abstractmethod
    def activity(self) -> list[Activity]:
        """The current activity of each worker. Cheap enough to be called several times a second, by any thread."""

    @abstractmethod
    def close(self) -> None:
        """End all workers now. Idempotent."""

    @abstractmethod
    def wait_until_ready(self, seconds: float = math.inf) -> None:
        """Wait until the first item can start at once. Raises TuneError when workers cannot start, or not within `seconds`."""

    def run(self, job: str, items: Iterable[Any], *, kind: Kind, deadline: float, setup: Any = None) -> list[Outcome]:
        """Submit items and wait for them. Returns the outcomes in the order of the items."""
        outcomes = dict(self.submit(job, items, kind=kind, deadline=deadline, setup=setup))
        return [outcomes[i] for i in sorted(outcomes)]

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def function_of(job: str) -> str:
    """The name of a job's function, without its module."""
    return job.rpartition(":")[2]


# -- inline ----------------------------------------------------------------------------------------
class _InlineBatch(Batch):
    """A batch that runs its next item when the outcome is requested."""

    executor: InlineExecutor
    _index = 0

    def poll(self, timeout: float | None = 0.0) -> tuple[int, Outcome] | None:
        index = self._index
        if index == len(self.payloads):
            return None
        self._index += 1
        self.unanswered.discard(index)
        if self.cancelled or self.executor.closed:
            return index, Outcome("lost", kind="cancelled" if self.cancelled else "closed")
        return index, self.executor.run_request(self.request(index), self.kind)


class InlineExecutor(Executor):
    """Runs items in the calling process, without deadlines. A crash ends the process. An exception becomes an outcome; Ctrl-C does not."""

    description = "inline (unprotected)"

    def __init__(self, config: WorkerConfig | None = None, device: str = HOST) -> None:
        self.config, self.device = config or WorkerConfig(), device
        self.closed = False
        self._lock = MachineLock(device)
        self._setup = ""            # key of the setup that `_state` was made by
        self._state: Any = None
        self._doing: tuple[Kind, str, float] = ("compile", "", time.monotonic())    # kind and job of the current item, and its start

    def submit(self, job: str, items: Iterable[Any], *, kind: Kind, deadline: float, setup: Any = None,
               homes: Sequence[str] = (), target: Target | None = None) -> Batch:
        if self.closed:
            raise TuneError("the executor is closed")
        batch = _InlineBatch(job, items, kind, deadline, setup)
        batch.executor = self
        return batch

    def add(self, batch: Batch, items: Iterable[Any], homes: Sequence[str] = ()) -> range:
        return batch.extend(items)

    def run_request(self, request: Request, kind: Kind) -> Outcome:
        started = time.perf_counter()
        self._doing = kind, function_of(request.job), time.monotonic()
        try:
            run, set_up = resolve_job(request.job, self.config.job_modules)
            if kind == "bench":
                self._lock.acquire()
            if request.setup_key and request.setup_key != self._setup:
                self._setup, self._state = "", None
                payload = decode(request.setup)
                self._state = payload if set_up is None else set_up(payload)
                self._setup = request.setup_key
            started = time.perf_counter()
            result = run(decode(request.item), self._state if request.setup_key else None)
            seconds = time.perf_counter() - started
            return Outcome("ok", decode(encode(result)), seconds=seconds, worker="inline")
        except Exception as e:  # any exception of a candidate becomes an outcome, as in svod.tune.workers.child
            return Outcome("error", None, type(e).__name__, str(e), time.perf_counter() - started, "inline")
        finally:
            self._lock.release()
            self._doing = kind, "", time.monotonic()

    def workers(self, kind: Kind) -> int:
        return 1

    def activity(self) -> list[Activity]:
        kind, job, since = self._doing
        return [Activity("inline", kind, "", "busy" if job else "idle", time.monotonic() - since, job, int(bool(job)))]

    def wait_until_ready(self, seconds: float = math.inf) -> None:
        """Returns at once, as there is nothing to wait for."""

    def close(self) -> None:
        self.closed = True
        self._setup, self._state = "", None
