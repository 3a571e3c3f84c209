"""The workers of an executor and their lives: each is starting, up, lost, or set aside for good."""
from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from svod.core.machine.target import Target, unfit
from svod.tune.workers.child import Request
from svod.tune.workers.executor import Activity, Batch, Kind
from svod.tune.workers.jobs import Outcome


class WorkerLost(Exception):
    """The infrastructure failed while an item ran. The item may run again on another worker."""


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
        """Make a running `run` return soon. Called by another thread when the executor closes."""

    def close(self) -> None:
        """End this carrier's worker. Called once, at the end of the thread that runs the carrier."""


class Fleet:
    """The carriers of an executor. Methods are called with the executor's lock held; `up` and `aside` may be read without it.

    carriers   all that were added, in this order
    up         names of the carriers that have a worker
    aside      name of a carrier that gets no more items → the reason
    """

    def __init__(self) -> None:
        self.carriers: list[Carrier] = []
        self.up: set[str] = set()
        self.aside: dict[str, str] = {}
        # kind → the time at which its last worker was lost; before any was up, the start of the executor
        self._alone_since: dict[Kind, float] = dict.fromkeys(("compile", "bench"), time.monotonic())
        self._doing: dict[str, tuple[str, float, str, int]] = {}    # name of a carrier → state, its start, job, items: see Activity

    def add(self, carrier: Carrier) -> None:
        self.note(carrier, "starting")
        self.carriers.append(carrier)

    def clear(self) -> None:
        """Forget all carriers, once their threads have ended."""
        for carrier in self.carriers:
            self._leave(carrier)
        self.carriers.clear()

    def note(self, carrier: Carrier, state: str, job: str = "", items: int = 0) -> None:
        self._doing[carrier.name] = state, time.monotonic(), job, items

    def activity(self) -> list[Activity]:
        now = time.monotonic()
        return [Activity(c.name, c.kind, c.host, state, now - since, job, items)
                for c in self.carriers for state, since, job, items in [self._doing[c.name]]]

    def is_busy(self, carrier: Carrier) -> bool:
        return self._doing[carrier.name][0] == "busy"

    def left(self, kind: Kind) -> list[Carrier]:
        """The carriers of a kind that are not set aside."""
        return [c for c in self.carriers if c.kind == kind and c.name not in self.aside]

    def is_any_up(self, kind: Kind) -> bool:
        return any(c.kind == kind and c.name in self.up for c in self.carriers)

    def without_worker(self, kind: Kind) -> float:
        """The seconds since the last worker of a kind was lost; 0 while one is up."""
        return 0.0 if self.is_any_up(kind) else time.monotonic() - self._alone_since[kind]

    def has_started(self, carrier: Carrier) -> None:
        self.note(carrier, "idle")
        self.up.add(carrier.name)

    def lose(self, carrier: Carrier) -> None:
        """Note that a carrier has no worker for now."""
        self._leave(carrier)
        self.note(carrier, "starting")

    def _leave(self, carrier: Carrier) -> None:
        was_up = self.is_any_up(carrier.kind)
        self.up.discard(carrier.name)
        if was_up and not self.is_any_up(carrier.kind):
            self._alone_since[carrier.kind] = time.monotonic()

    def set_aside(self, carrier: Carrier, why: str) -> None:
        """Give a carrier no further items. `why`: the reason, in words."""
        self._leave(carrier)
        self.aside[carrier.name] = why
        self.note(carrier, "set aside", why)

    def why_hopeless(self, batch: Batch) -> str | None:
        """Why no worker can run a batch; None if one can, or may be able to once its target is known."""
        left = self.left(batch.kind)
        if any(fits(c, batch) for c in left):
            return None
        if others := {c.target.key for c in left if c.target is not None}:
            return f"those that are left time {', '.join(sorted(others))}"
        return next((self.aside[c.name] for c in reversed(self.carriers) if c.kind == batch.kind and c.name in self.aside),
                    "none was started")


def fits(carrier: Carrier, batch: Batch) -> bool:
    """Whether a worker's machine can run the items of a batch."""
    return (batch.kind == "compile" or batch.target is None or carrier.target is None
            or unfit(carrier.target.key, batch.target) is None)
