"""Executors, which run the jobs of a search: one small interface with three implementations.

    inline     in the calling process, one after the other, unprotected: for debugging
    local:N    N compile workers and one bench worker, children of this process            (0.2 s to start)
    ray:N      the same children inside Ray actors, here or on a cluster (`ray_executor.py`)   (4 s to start)

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
  has items. All bench items of a batch run on one worker while it is up, whose machine can time programs for the batch's target. Compile
  workers take items for any target.
* Where compilers and kernels share cores (`shared_cores`: by default where the bench worker's machine has fewer than 8), a bench item
  starts only when no compile item is running on that machine, and no compile item starts while a bench item is running or waiting there,
  or, for at most YIELD_SECONDS, while another svod process times there.
* `close` (also at exit and after an exception in a `with`) leaves no process behind. Unfinished items become `lost`.
"""
from __future__ import annotations

import atexit
import dataclasses
import logging
import math
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

from svod import config
from svod.compile.backend import device_named
from svod.core.machine.target import HOST, Target, unfit
from svod.errors import ConfigError, TuneError
from svod.system.optional import reason
from svod.system.process.cores import usable_cores
from svod.tune.workers.child import Child, Request, make_request
from svod.tune.workers.forkserver import ForkServer, ServerLost
from svod.tune.workers.jobs import Outcome, WorkerConfig, decode, encode, resolve_job
from svod.tune.workers.machine_lock import MachineLock
from svod.tune.workers.waiting import Waiting

log = logging.getLogger("svod.tune")
Kind = Literal["compile", "bench"]
MOST_WORKERS = 4096
MAX_ATTEMPTS = 3            # an item is `lost` after this many workers were lost while they ran it
YIELD_SECONDS = 5.0         # longest pause of a compile item while another process times on these cores
OVERDUE = 3.0               # seconds after all deadlines of a compile worker's items at which idle workers start them as well
OVERDUE_POLL = 1.0          # seconds between looks for overdue items
WORKER_END_SECONDS = 2.0         # seconds that workers have to end before the fork server is killed
CLOSED_OUTCOME = Outcome("lost", kind="closed")
SWITCH_SECONDS = 5e-4       # Python's thread switch interval while an executor is open; the default, 5 ms, delays every item
SHARED_BELOW = 8            # with fewer cores than this, compilers are idle during timing


class WorkerLost(Exception):
    """The infrastructure failed while an item ran. The item may run again on another worker."""


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
        """The next (index, outcome); None when none completes within `timeout` seconds, or all were returned before (`finished`)."""
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
        self._doing = kind, _function(request.job), time.monotonic()
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
        except Exception as e:  # the border of a worker, as in svod.tune.workers.child
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
        """There is nothing to wait for."""

    def close(self) -> None:
        self.closed = True
        self._setup, self._state = "", None


# -- the dispatcher of the local and the Ray executor -----------------------------------------------
class Carrier(Protocol):
    """The executor's handle of one worker, which runs items one after the other. Each carrier has its own thread."""

    name: str
    kind: Kind
    chunk: int      # most items of one `run`; above 1 where a round trip is expensive
    host: str       # the machine of its worker; "": this one
    cores: int      # number of cores of the worker's machine
    target: Target | None       # target of the worker's machine; None: not known yet, or the worker takes items for any target

    def start(self) -> object:
        """Start the worker and wait for it. Called when it was not started yet, or was lost. Raises WorkerLost where another attempt may
        succeed, TuneError where none will."""

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Run all requests. Raises WorkerLost when the infrastructure failed, TuneError when this carrier cannot work any more."""

    def idle(self) -> None:
        """Release exclusive resources, such as the machine lock. Called when no further item that this carrier may take is waiting."""

    def interrupt(self) -> None:
        """Make `run` return soon. Called by another thread when the executor closes."""

    def close(self) -> None:
        """End the worker. Called by the carrier's own thread at its end."""


@dataclasses.dataclass(slots=True, eq=False)
class _Task:
    batch: Batch
    index: int
    attempts: int = 0           # number of times that the item was given to a worker
    running: int = 0            # number of workers that run the item now
    settled: bool = False       # whether its outcome was delivered

    @property
    def home(self) -> str:
        return self.batch.homes[self.index]


def fits(carrier: Carrier, batch: Batch) -> bool:
    """Whether a worker's machine can run the items of a batch."""
    return (batch.kind == "compile" or batch.target is None or carrier.target is None
            or unfit(carrier.target.key, batch.target) is None)


def _function(job: str) -> str:
    """The name of a job's function, without its module."""
    return job.rpartition(":")[2]


class DispatchingExecutor(Executor):
    """The base of the local and the Ray executor: queues items, hands them to carriers, one thread each, keeps compiling and timing on
    shared cores apart, and runs items again after a worker was lost."""

    def __init__(self, description: str, shared_cores: bool | None) -> None:
        self.description = description
        self._shared_cores = shared_cores
        self.yields = shared_cores is not False         # compilers pause on a machine of few cores while another process times there
        self._changed = threading.Condition()
        self._queues: dict[Kind, Waiting[_Task]] = {"compile": Waiting(), "bench": Waiting()}
        self._active: dict[Kind, Counter[str]] = {"compile": Counter(), "bench": Counter()}     # machine → number of its busy carriers
        self._up: set[str] = set()              # names of the carriers that have a worker
        self._aside: dict[str, str] = {}        # name of a carrier that gets no more items → the reason
        self._held: dict[str, tuple[float, list[_Task]]] = {}   # name of a busy carrier → (time when its items are overdue, the items)
        self.abandoned = False                  # all carriers are set aside, and `close` waits for none of them
        # kind → the time at which its last worker was lost; before any was up, the start of the executor
        self._alone_since: dict[Kind, float] = dict.fromkeys(("compile", "bench"), time.monotonic())
        self._threads: list[tuple[threading.Thread, Carrier]] = []
        self._doing: dict[str, tuple[str, float, str, int]] = {}    # name of a carrier → state, its start, job, items: see Activity
        self.closing = False
        self._ending, self._ended = threading.Event(), threading.Event()
        self._switch_seconds = sys.getswitchinterval()      # the process's own interval, restored by `close`
        sys.setswitchinterval(min(self._switch_seconds, SWITCH_SECONDS))
        atexit.register(self.close)
        # started now, because Python 3.12 and later cannot start a thread at exit
        threading.Thread(target=self._limit_end, name="svod-executor-end", daemon=True).start()

    def _add(self, carrier: Carrier) -> None:
        self._note(carrier, "starting")
        thread = threading.Thread(target=self._drive, args=(carrier,), name=f"svod-{carrier.name}", daemon=True)
        self._threads.append((thread, carrier))
        thread.start()

    def _note(self, carrier: Carrier, state: str, job: str = "", items: int = 0) -> None:
        self._doing[carrier.name] = state, time.monotonic(), job, items

    def activity(self) -> list[Activity]:
        now = time.monotonic()
        with self._changed:
            return [Activity(c.name, c.kind, c.host, state, now - since, job, items)
                    for _, c in self._threads for state, since, job, items in [self._doing[c.name]]]

    def submit(self, job: str, items: Iterable[Any], *, kind: Kind, deadline: float, setup: Any = None,
               homes: Sequence[str] = (), target: Target | None = None) -> Batch:
        batch = Batch(job, items, kind, deadline, setup, homes, target)
        self._queue(batch, range(len(batch)))
        return batch

    def add(self, batch: Batch, items: Iterable[Any], homes: Sequence[str] = ()) -> range:
        new = batch.extend(items, homes)
        self._queue(batch, new)
        return new

    def _queue(self, batch: Batch, indices: Iterable[int]) -> None:
        with self._changed:
            if self.closing:
                raise TuneError("the executor is closed")
            if (why := self._why_hopeless(batch)) is not None:
                aim = f" for {batch.target.key}" if batch.target and batch.kind == "bench" else ""
                raise TuneError(f"no worker is left that can {batch.kind}{aim}: {why}")
            self._queues[batch.kind].extend(_Task(batch, i) for i in indices)
            self._changed.notify_all()

    def workers(self, kind: Kind) -> int:
        return sum(c.kind == kind and c.name not in self._aside for _, c in self._threads)

    def _shares_cores(self, host: str) -> bool:
        """Whether compilers and kernels share the cores of a machine."""
        if self._shared_cores is not None:
            return self._shared_cores
        return any(c.kind == "bench" and c.host == host and c.cores < SHARED_BELOW for _, c in self._threads)

    def _may_take(self, carrier: Carrier, task: _Task) -> bool:
        """Whether a carrier may take a waiting item. A bench item belongs to the worker of its batch, or to its home, while that is up."""
        if carrier.kind == "compile":
            return True
        owner = task.batch.worker or task.home
        return fits(carrier, task.batch) and (owner in ("", carrier.name) or owner not in self._up)

    def _may_start(self, carrier: Carrier) -> bool:
        return any(self._may_take(carrier, t) for t in self._queues[carrier.kind]) and self._has_cores(carrier)

    def _has_cores(self, carrier: Carrier) -> bool:
        """Whether an item may start on a carrier's machine without disturbing a timing there, or being disturbed while it is timed."""
        if not self._shares_cores(carrier.host):
            return True
        if carrier.kind == "compile":
            return not self._active["bench"][carrier.host] and not self._is_timing_due(carrier.host)
        return not self._active["compile"][carrier.host]

    def _is_timing_due(self, host: str) -> bool:
        """Whether a bench item waits that a bench worker of the machine `host` may take."""
        timers = [c for _, c in self._threads if c.kind == "bench" and c.host == host and c.name in self._up]
        return any(self._may_take(c, t) for c in timers for t in self._queues["bench"])

    def _take(self, carrier: Carrier) -> list[_Task]:
        """The next items for a carrier: one, or up to its chunk while there are enough for all carriers. Empty when closing."""
        kind = carrier.kind
        taken: list[_Task] = []
        with self._changed:
            while not self.closing:
                if not self._may_start(carrier):
                    if taken := self._overdue(carrier):
                        return self._hand_over(carrier, taken)
                    self._changed.wait(OVERDUE_POLL if kind == "compile" else None)
                    continue
                waiting = self._queues[kind]
                for _ in range(max(1, min(carrier.chunk, len(waiting) // (2 * self.workers(kind))))):
                    task = waiting.take(carrier.name, lambda t: self._may_take(carrier, t))
                    if task is None:
                        break
                    if kind == "bench":
                        task.batch.worker = carrier.name
                    if task.batch.cancelled:
                        self._settle(task, Outcome("lost", kind="cancelled"))
                    else:
                        taken.append(task)
                        if task.attempts:
                            break       # an item under which a worker was lost runs alone, so that no other items are lost with it
                if taken:
                    return self._hand_over(carrier, taken)
                self._changed.notify_all()      # carriers of the other kind may wait until no item of this kind is left
        return []

    def _hand_over(self, carrier: Carrier, tasks: list[_Task]) -> list[_Task]:
        """Note that items are given to a carrier, and return them. Called with the lock held."""
        for task in tasks:
            task.attempts += 1
            task.running += 1
        self._active[carrier.kind][carrier.host] += 1
        self._note(carrier, "busy", _function(tasks[0].batch.job), len(tasks))
        self._held[carrier.name] = time.monotonic() + sum(t.batch.deadline for t in tasks) + OVERDUE, tasks
        return tasks

    def _overdue(self, carrier: Carrier) -> list[_Task]:
        """An item that another compile carrier has had for too long, for an idle one to run as well; [] if there is none. Called with the
        lock held."""
        if carrier.kind != "compile" or not self._has_cores(carrier):
            return []
        now = time.monotonic()
        late = (t for due, tasks in self._held.values() if due < now for t in tasks if t.batch.kind == "compile")
        return next(([t] for t in late if t.running == 1 and not t.settled and not t.batch.cancelled and t.attempts < MAX_ATTEMPTS), [])

    def _settle(self, task: _Task, outcome: Outcome) -> None:
        """Deliver the outcome of an item, unless it has one from another worker. Called with the lock held."""
        if not task.settled:
            task.settled = True
            task.batch.deliver(task.index, outcome)

    def _drive(self, carrier: Carrier) -> None:
        """Run items on a carrier until the executor closes or the carrier is set aside. The body of its thread."""
        while self._brought_up(carrier) and (tasks := self._take(carrier)):
            host = carrier.host
            outcomes, retry = self._run(carrier, tasks)
            with self._changed:
                self._held.pop(carrier.name, None)
                for task in tasks:
                    task.running -= 1
                for task, outcome in outcomes:
                    if outcome.status != "lost" or not task.running:    # another worker may still answer
                        self._settle(task, dataclasses.replace(outcome, worker=carrier.name, attempts=task.attempts))
                again = [t for t in retry if not t.settled and not t.running]
                if self.closing:
                    for task in again:
                        self._settle(task, CLOSED_OUTCOME)
                else:
                    self._queues[carrier.kind].extend_left(again)
                    if again:
                        self._drop_hopeless(carrier.kind)
                last = not any(self._may_take(carrier, t) for t in self._queues[carrier.kind])
            if last:
                try:
                    carrier.idle()
                except Exception as e:  # the border of a carrier: the carrier is given up
                    self._set_aside(carrier, reason(e))
            with self._changed:
                self._active[carrier.kind][host] -= 1
                if self._doing[carrier.name][0] == "busy":
                    self._note(carrier, "idle")
                self._changed.notify_all()
        carrier.close()

    def _run(self, carrier: Carrier, tasks: Sequence[_Task]) -> tuple[list[tuple[_Task, Outcome]], list[_Task]]:
        """Run items on a carrier. Returns (the items that have an outcome, with their outcomes; the items to run again)."""
        try:
            outcomes = carrier.run([t.batch.request(t.index) for t in tasks])
        except WorkerLost as e:
            self._lose(carrier)
            if not self.closing:
                log.info("worker %s was lost (%s)", carrier.name, e)
            lost = {t: Outcome("lost", kind="worker", message=f"{t.attempts} workers lost under it, the last: {e}")
                    for t in tasks if t.attempts >= MAX_ATTEMPTS}
            return list(lost.items()), [t for t in tasks if t not in lost]
        except Exception as e:  # the border of a carrier: the carrier is given up, and others get its items
            self._set_aside(carrier, reason(e))
            return [], list(tasks)
        # a worker that `close` has killed reports a crash: the item ends as closed
        return [(t, CLOSED_OUTCOME if self.closing and o.status == "crash" else o) for t, o in zip(tasks, outcomes, strict=True)], []

    def _brought_up(self, carrier: Carrier) -> bool:
        """Wait until a carrier's worker is up; the carrier has no items meanwhile. Returns False if that will never be."""
        while not self.closing and carrier.name not in self._aside:
            if carrier.name in self._up:
                return True
            try:
                carrier.start()
            except WorkerLost as e:
                self._lose(carrier)
                log.info("worker %s did not start (%s)", carrier.name, e)
            except Exception as e:  # the border of a carrier
                self._set_aside(carrier, reason(e))
            else:
                with self._changed:
                    self._note(carrier, "idle")
                    self._up.add(carrier.name)
                    self._drop_hopeless(carrier.kind)       # its machine's target is known now, and may not fit waiting items
                    self._changed.notify_all()
        return False

    def _lose(self, carrier: Carrier) -> None:
        """Note that a carrier has no worker for now."""
        with self._changed:
            self._up.discard(carrier.name)
            self._note(carrier, "starting")
            if not self._is_any_up(carrier.kind):
                self._alone_since[carrier.kind] = time.monotonic()

    def _is_any_up(self, kind: Kind) -> bool:
        return any(c.kind == kind and c.name in self._up for _, c in self._threads)

    def without_worker(self, kind: Kind) -> float:
        """The seconds since the last worker of a kind was lost; 0 while one is up."""
        with self._changed:
            return 0.0 if self._is_any_up(kind) else time.monotonic() - self._alone_since[kind]

    def _set_aside(self, carrier: Carrier, why: str) -> None:
        """Give a carrier no further items. `why`: the reason, in words."""
        self._lose(carrier)
        with self._changed:
            if self.closing:
                return
            self._aside[carrier.name] = why
            others = any(c.kind == carrier.kind and c.name not in self._aside for _, c in self._threads)
            self._note(carrier, "set aside", why)
            self._drop_hopeless(carrier.kind)
            self._changed.notify_all()
        if others:      # without others, the batch's outcomes give the reason
            config.log_once(log, logging.WARNING, f"a worker is set aside: {why}")

    def _why_hopeless(self, batch: Batch) -> str | None:
        """Why no worker is left for a batch; None if there is one or may still be one."""
        carriers = [c for _, c in self._threads if c.kind == batch.kind]
        if any(c.name not in self._aside and fits(c, batch) for c in carriers):
            return None
        others = {c.target.key for c in carriers if c.name not in self._aside and c.target is not None}
        if others:
            return f"those that are left time {', '.join(sorted(others))}"
        return next((self._aside[c.name] for c in reversed(carriers) if c.name in self._aside), "none was started")

    def _abandon(self, why: str) -> None:
        """Give up all carriers at once, even if their threads hang: their items end as `lost`, and `close` does not wait for them."""
        with self._changed:
            self.abandoned = True
            for _, carrier in self._threads:
                self._aside[carrier.name] = why
                self._up.discard(carrier.name)
                self._note(carrier, "set aside", why)
            for task in (t for _, tasks in self._held.values() for t in tasks):
                self._settle(task, Outcome("lost", kind="no worker", message=why, attempts=task.attempts))
            for kind in tuple(self._queues):
                self._drop_hopeless(kind)
            self._changed.notify_all()
        log.warning("%s", why)

    def _drop_hopeless(self, kind: Kind) -> None:
        """End the waiting items of a kind for which no worker is left. Called with the lock held."""
        waiting = self._queues[kind]
        reasons = {batch: self._why_hopeless(batch) for batch in {t.batch for t in waiting}}
        for task in waiting:
            if (why := reasons[task.batch]) is not None:
                self._settle(task, Outcome("lost", kind="no worker", message=why, attempts=task.attempts))
        self._queues[kind] = Waiting(t for t in waiting if reasons[t.batch] is None)

    def close(self) -> None:
        with self._changed:
            if not self.closing:
                sys.setswitchinterval(self._switch_seconds)
            self.closing = True
            pending = [t for q in self._queues.values() for t in q]
            self._queues = {"compile": Waiting(), "bench": Waiting()}
            self._changed.notify_all()
            for task in pending:
                self._settle(task, CLOSED_OUTCOME)
        self._ending.set()
        for thread, carrier in self._threads:
            while thread.is_alive() and not self.abandoned:
                carrier.interrupt()     # repeatedly, as it may have just started something
                thread.join(0.05)
        self._ended.set()
        self._threads.clear()
        self._shut_down()
        atexit.unregister(self.close)

    def _limit_end(self) -> None:
        """Once `close` has begun, call `_abort` if the carriers have not ended within WORKER_END_SECONDS. The body of a thread."""
        self._ending.wait()
        if not self._ended.wait(WORKER_END_SECONDS):
            self._abort()

    def _abort(self) -> None:
        """Kill the processes that carriers wait for. Called by another thread when the carriers take too long to end."""

    def _shut_down(self) -> None:
        """End the processes that all carriers share, such as the fork server. Called after the carriers' threads have ended."""


# -- local -----------------------------------------------------------------------------------------
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


# -- choosing --------------------------------------------------------------------------------------
def parse_workers(spec: str) -> tuple[str, int | None]:
    """("ray" | "local" | "inline", count or None). Raises ConfigError."""
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
