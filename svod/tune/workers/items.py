"""The items of an executor: those that wait, and those that its workers have."""
from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from svod.errors import TuneError
from svod.system.monitor import Monitor
from svod.tune.workers.executor import SHARED_BELOW, Batch, Kind, function_of
from svod.tune.workers.fleet import Carrier, Fleet, fits
from svod.tune.workers.jobs import Outcome
from svod.tune.workers.waiting import Waiting

MAX_ATTEMPTS = 3            # an item is `lost` after this many workers were lost while they ran it
OVERDUE = 3.0               # seconds past the deadlines of a compile worker's items after which idle workers run these items as well
CLOSED_OUTCOME = Outcome("lost", kind="closed")


@dataclasses.dataclass(slots=True, eq=False)
class Task:
    """An item of a batch, from its submission to its outcome."""

    batch: Batch
    index: int
    attempts: int = 0           # number of times that the item was given to a worker
    running: int = 0            # number of workers that run the item now
    settled: bool = False       # whether its outcome was delivered

    @property
    def home(self) -> str:
        return self.batch.homes[self.index]

    def settle(self, outcome: Outcome) -> None:
        """Deliver the item's outcome, unless it has one from another worker."""
        if not self.settled:
            self.settled = True
            self.batch.deliver(self.index, outcome)


class Items:
    """The items of an executor. `changed`: the executor's lock, which the callers of all methods hold. `shared_cores`: whether compilers
    and kernels share the cores of a machine; None: they do if its bench worker has fewer than SHARED_BELOW cores."""

    def __init__(self, changed: Monitor, fleet: Fleet, shared_cores: bool | None) -> None:
        self._changed, self._fleet, self._shared_cores = changed, fleet, shared_cores
        self._queues: dict[Kind, Waiting[Task]] = {"compile": Waiting(), "bench": Waiting()}
        self.active: dict[Kind, Counter[str]] = {"compile": Counter(), "bench": Counter()}      # machine → number of its busy carriers
        self.held: dict[str, tuple[float, list[Task]]] = {}     # name of a busy carrier → (time when its items are overdue, the items)

    def put(self, batch: Batch, indices: Iterable[int]) -> None:
        """Queue items of a batch. Raises TuneError where no worker is left for them."""
        if (why := self._fleet.why_hopeless(batch)) is not None:
            aim = f" for {batch.target.key}" if batch.target and batch.kind == "bench" else ""
            raise TuneError(f"no worker is left that can {batch.kind}{aim}: {why}")
        self._queues[batch.kind].extend(Task(batch, i) for i in indices)
        self._changed.notify_all()

    def _may_take(self, carrier: Carrier, task: Task) -> bool:
        """Whether a carrier may take a waiting item. A bench item belongs to the worker of its batch, or to its home, while that is up."""
        if carrier.kind == "compile":
            return True
        owner = task.batch.worker or task.home
        return fits(carrier, task.batch) and (owner in ("", carrier.name) or owner not in self._fleet.up)

    def wait_for(self, carrier: Carrier) -> bool:
        """Whether an item waits that a carrier may take."""
        return any(self._may_take(carrier, t) for t in self._queues[carrier.kind])

    def _has_cores(self, carrier: Carrier) -> bool:
        """Whether an item may start on a carrier's machine without disturbing a timing there, or being disturbed while it is timed."""
        timers = [c for c in self._fleet.carriers if c.kind == "bench" and c.host == carrier.host]
        shared = any(c.cores < SHARED_BELOW for c in timers) if self._shared_cores is None else self._shared_cores
        if not shared:
            return True
        if carrier.kind == "bench":
            return not self.active["compile"][carrier.host]
        return not self.active["bench"][carrier.host] and not any(self.wait_for(c) for c in timers if c.name in self._fleet.up)

    def next_for(self, carrier: Carrier) -> list[Task]:
        """The next items for a carrier: one, or up to `carrier.chunk` if many are waiting; [] if the carrier has to wait."""
        while self.wait_for(carrier) and self._has_cores(carrier):
            if taken := self._taken(carrier):
                return self._hand_over(carrier, taken)
            self._changed.notify_all()      # carriers of the other kind may wait until no item of this kind is left
        late = self._overdue(carrier)
        return self._hand_over(carrier, late) if late else []

    def _taken(self, carrier: Carrier) -> list[Task]:
        """Remove from the queue the next items for a carrier, and return them. The outcome of cancelled items is delivered here."""
        waiting, taken = self._queues[carrier.kind], list[Task]()
        for _ in range(max(1, min(carrier.chunk, len(waiting) // (2 * len(self._fleet.left(carrier.kind)))))):
            task = waiting.take(carrier.name, lambda t: self._may_take(carrier, t))
            if task is None:
                break
            if carrier.kind == "bench":
                task.batch.worker = carrier.name
            if task.batch.cancelled:
                task.settle(Outcome("lost", kind="cancelled"))
            else:
                taken.append(task)
                if task.attempts:
                    break       # an item under which a worker was lost runs alone, so that no other items are lost with it
        return taken

    def _hand_over(self, carrier: Carrier, tasks: list[Task]) -> list[Task]:
        """Note that items are given to a carrier, and return them."""
        for task in tasks:
            task.attempts += 1
            task.running += 1
        self.active[carrier.kind][carrier.host] += 1
        self._fleet.note(carrier, "busy", function_of(tasks[0].batch.job), len(tasks))
        self.held[carrier.name] = time.monotonic() + sum(t.batch.deadline for t in tasks) + OVERDUE, tasks
        return tasks

    def _overdue(self, carrier: Carrier) -> list[Task]:
        """An item that another compile carrier has had for too long, for an idle one to run as well; [] if there is none."""
        if carrier.kind != "compile" or not self._has_cores(carrier):
            return []
        now = time.monotonic()
        late = (t for due, tasks in self.held.values() if due < now for t in tasks if t.batch.kind == "compile")
        return next(([t] for t in late if t.running == 1 and not t.settled and not t.batch.cancelled and t.attempts < MAX_ATTEMPTS), [])

    def take_back(self, carrier: Carrier, tasks: Sequence[Task], outcomes: Sequence[tuple[Task, Outcome]], retry: Sequence[Task],
                  closing: bool) -> None:
        """End the items that a carrier has run. Items in `retry` are queued again, unless the executor is closing."""
        self.held.pop(carrier.name, None)
        for task in tasks:
            task.running -= 1
        for task, outcome in outcomes:
            if outcome.status != "lost" or not task.running:    # another worker may still answer
                task.settle(dataclasses.replace(outcome, worker=carrier.name, attempts=task.attempts))
        again = [t for t in retry if not t.settled and not t.running]
        if closing:
            for task in again:
                task.settle(CLOSED_OUTCOME)
        elif again:
            self._queues[carrier.kind].extend_left(again)
            self.drop_hopeless(carrier.kind)

    def drop_hopeless(self, *kinds: Kind) -> None:
        """End the waiting items of these kinds for which no worker is left."""
        for kind in kinds:
            waiting = self._queues[kind]
            reasons = {batch: self._fleet.why_hopeless(batch) for batch in {t.batch for t in waiting}}
            for task in waiting:
                if (why := reasons[task.batch]) is not None:
                    task.settle(Outcome("lost", kind="no worker", message=why, attempts=task.attempts))
            self._queues[kind] = Waiting(t for t in waiting if reasons[t.batch] is None)

    def drop_all(self, why: str) -> None:
        """End all items, including those that workers are running, after all workers were set aside."""
        for task in (t for _, tasks in self.held.values() for t in tasks):
            task.settle(Outcome("lost", kind="no worker", message=why, attempts=task.attempts))
        self.drop_hopeless("compile", "bench")

    def close(self) -> None:
        """End the items that wait."""
        pending = [t for q in self._queues.values() for t in q]
        self._queues = {"compile": Waiting(), "bench": Waiting()}
        for task in pending:
            task.settle(CLOSED_OUTCOME)
