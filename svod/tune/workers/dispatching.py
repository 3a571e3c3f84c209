"""The base of the local and the Ray executor, whose workers run outside of this process.

It hands the items that wait (`Items`) to the workers that are up (`Fleet`), and runs items again after a worker was lost. The handle
of each worker, its `Carrier`, has a thread of its own.
"""
from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from svod import config
from svod.core.machine.target import Target
from svod.errors import TuneError
from svod.system.monitor import Monitor
from svod.system.optional import reason
from svod.tune.workers.executor import Activity, Batch, Executor, Kind
from svod.tune.workers.fleet import Carrier, Fleet, WorkerLost
from svod.tune.workers.items import CLOSED_OUTCOME, MAX_ATTEMPTS, Items, Task
from svod.tune.workers.jobs import Outcome

log = logging.getLogger("svod.tune")
OVERDUE_POLL = 1.0          # seconds between looks for overdue items
WORKER_END_SECONDS = 2.0    # seconds that workers have to end before the fork server is killed
SWITCH_SECONDS = 5e-4       # Python's thread switch interval while an executor is open; the default, 5 ms, delays every item


class DispatchingExecutor(Executor):
    """Hands items to carriers, each with a thread of its own, until it is closed."""

    def __init__(self, description: str, shared_cores: bool | None) -> None:
        self.description = description
        self.yields = shared_cores is not False         # compilers pause on a machine of few cores while another process times there
        self._changed = Monitor()
        self._fleet = Fleet()
        self._items = Items(self._changed, self._fleet, shared_cores)
        self.abandoned = False                  # whether all carriers are set aside, and `close` waits for none of them
        self._threads: list[tuple[threading.Thread, Carrier]] = []
        self.closing = False
        self._ending, self._ended = threading.Event(), threading.Event()
        self._switch_seconds = sys.getswitchinterval()      # the process's own interval, restored by `close`
        sys.setswitchinterval(min(self._switch_seconds, SWITCH_SECONDS))
        atexit.register(self.close)
        # started now, because Python 3.12 and later cannot start a thread at exit
        threading.Thread(target=self._limit_end, name="svod-executor-end", daemon=True).start()

    def _add(self, carrier: Carrier) -> None:
        with self._changed.lock:
            self._fleet.add(carrier)
        thread = threading.Thread(target=self._drive, args=(carrier,), name=f"svod-{carrier.name}", daemon=True)
        self._threads.append((thread, carrier))
        thread.start()

    def activity(self) -> list[Activity]:
        with self._changed.lock:
            return self._fleet.activity()

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
        with self._changed.lock:
            if self.closing:
                raise TuneError("the executor is closed")
            self._items.put(batch, indices)

    def workers(self, kind: Kind) -> int:
        with self._changed.lock:
            return len(self._fleet.left(kind))

    def without_worker(self, kind: Kind) -> float:
        """The seconds since the last worker of a kind was lost; 0 while one is up."""
        with self._changed.lock:
            return self._fleet.without_worker(kind)

    # -- a carrier's thread -------------------------------------------------------------------------------------------------
    def _drive(self, carrier: Carrier) -> None:
        """Run items on a carrier until the executor closes or the carrier is set aside."""
        while self._brought_up(carrier) and (tasks := self._take(carrier)):
            host = carrier.host
            outcomes, retry = self._run(carrier, tasks)
            with self._changed.lock:
                self._items.take_back(carrier, tasks, outcomes, retry, self.closing)
                last = not self._items.wait_for(carrier)
            if last:
                try:
                    carrier.idle()
                except Exception as e:  # any error of a carrier ends this carrier only
                    self._set_aside(carrier, reason(e))
            with self._changed.lock:
                self._items.active[carrier.kind][host] -= 1
                if self._fleet.is_busy(carrier):
                    self._fleet.note(carrier, "idle")
                self._changed.notify_all()
        carrier.close()

    def _take(self, carrier: Carrier) -> list[Task]:
        """Wait for items that a carrier may run, and return them; [] when the executor closes."""
        with self._changed.lock:
            while not self.closing:
                if tasks := self._items.next_for(carrier):
                    return tasks
                self._changed.wait(OVERDUE_POLL if carrier.kind == "compile" else None)
        return []

    def _run(self, carrier: Carrier, tasks: Sequence[Task]) -> tuple[list[tuple[Task, Outcome]], list[Task]]:
        """Run items on a carrier. Returns the items that have an outcome, with it, and the items to run again."""
        try:
            outcomes = carrier.run([t.batch.request(t.index) for t in tasks])
        except WorkerLost as e:
            self._lose(carrier)
            if not self.closing:
                log.info("worker %s was lost (%s)", carrier.name, e)
            lost = {t: Outcome("lost", kind="worker", message=f"{t.attempts} workers lost under it, the last: {e}")
                    for t in tasks if t.attempts >= MAX_ATTEMPTS}
            return list(lost.items()), [t for t in tasks if t not in lost]
        except Exception as e:  # any error of a carrier ends this carrier only, and others get its items
            self._set_aside(carrier, reason(e))
            return [], list(tasks)
        # a worker that `close` has killed reports a crash: the item ends as closed
        return [(t, CLOSED_OUTCOME if self.closing and o.status == "crash" else o) for t, o in zip(tasks, outcomes, strict=True)], []

    def _brought_up(self, carrier: Carrier) -> bool:
        """Wait until a carrier's worker is up, without giving the carrier items. Returns False if the executor closes or no worker can
        start."""
        while not self.closing and carrier.name not in self._fleet.aside:
            if carrier.name in self._fleet.up:
                return True
            try:
                carrier.start()
            except WorkerLost as e:
                self._lose(carrier)
                log.info("worker %s did not start (%s)", carrier.name, e)
            except Exception as e:  # any error of a carrier ends this carrier only
                self._set_aside(carrier, reason(e))
            else:
                with self._changed.lock:
                    self._fleet.has_started(carrier)
                    self._items.drop_hopeless(carrier.kind)       # the carrier's target is known now, and waiting items may not fit it
                    self._changed.notify_all()
        return False

    def _lose(self, carrier: Carrier) -> None:
        with self._changed.lock:
            self._fleet.lose(carrier)

    def _set_aside(self, carrier: Carrier, why: str) -> None:
        """Give a carrier no further items. `why`: the reason, in words."""
        with self._changed.lock:
            self._fleet.lose(carrier)
            if self.closing:
                return
            self._fleet.set_aside(carrier, why)
            others = self._fleet.left(carrier.kind)
            self._items.drop_hopeless(carrier.kind)
            self._changed.notify_all()
        if others:      # if no carrier is left, the outcomes of the items give the reason
            config.log_once(log, logging.WARNING, f"a worker is set aside: {why}")

    def _abandon(self, why: str) -> None:
        """Give up all carriers at once, even if their threads hang: their items end as `lost`, and `close` does not wait for them."""
        with self._changed.lock:
            self.abandoned = True
            for carrier in self._fleet.carriers:
                self._fleet.set_aside(carrier, why)
            self._items.drop_all(why)
            self._changed.notify_all()
        log.warning("%s", why)

    # -- the end ------------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        with self._changed.lock:
            if not self.closing:
                sys.setswitchinterval(self._switch_seconds)
            self.closing = True
            self._items.close()
            self._changed.notify_all()
        self._ending.set()
        for thread, carrier in self._threads:
            while thread.is_alive() and not self.abandoned:
                carrier.interrupt()     # repeatedly, as it may have just started something
                thread.join(0.05)
        self._ended.set()
        self._threads.clear()
        with self._changed.lock:
            self._fleet.clear()
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
