"""The devices of a plan: its part on each device, the queues of the devices that run kernels, and the memory allocated on them."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from svod.compile.backend import LaunchQueue
from svod.compile.plan.memory_planner import PlannerMode, plan_memory
from svod.compile.plan.packed import PackedMemory, packed_memory
from svod.compile.plan.part import DevicePart, buffer_over, devices_of
from svod.compile.plan.plan_parts import PlanBuffer, PreparedKernel, Variant, address_of, lifetimes_of, temporary_numbers


@dataclass(frozen=True)
class PlanMemory:
    """The bytes that a plan allocates. `shared`: intermediates and temporaries of one run, as the planner placed them; this is the peak.
    `lower_bound`: the largest total size of the intermediates and temporaries alive at one level. `kept`: memory that stays from run to
    run (packed weights); plans with the same packed weights share it."""

    mode: PlannerMode
    shared: int
    lower_bound: int
    kept: int


class PlanDevices:
    """The devices of a plan, by name. `main`: the device whose `queue` makes the lists of launches. `is_local`: whether all memory is host
    memory. `packed`: kernel number → its packed constants, which other plans may have packed already. `is_released`: whether the memory
    that intermediates share was released."""

    def __init__(self, kernels: Sequence[PreparedKernel], buffers: Sequence[PlanBuffer], variants: Sequence[Variant], main: str,
                 threads: int | None, planner: PlannerMode) -> None:
        self.main = main
        self.parts = {name: DevicePart(name) for name in devices_of(kernels, buffers, main)}
        self.is_local = not any(p.is_remote for p in self.parts.values())
        self.is_released = False
        self.packed: dict[int, PackedMemory] = {}
        self._places = [b.device or main for b in buffers]
        self._runners = [k.device or main for k in kernels]
        addresses = self._allocate(kernels, buffers, planner)
        running = {main, *(k.device or main for k in kernels if not k.is_host_item)}
        self.queues = {name: p.make_queue(kernels, variants, addresses, main, threads) for name, p in self.parts.items() if name in running}
        self.queue = self.queues[main]

    def part_of(self, index: int) -> DevicePart:
        """Return the part on the device that holds a buffer."""
        return self.parts[self._places[index]]

    def queue_of(self, number: int) -> LaunchQueue:
        """Return the queue that runs a kernel, by its number among all."""
        return self.queues[self._runners[number]]

    def runner_of(self, number: int) -> DevicePart:
        """Return the part on the device that runs a kernel."""
        return self.parts[self._runners[number]]

    def bind(self, index: int, address: int) -> None:
        """Set the address of a buffer in all queues."""
        for queue in self.queues.values():
            queue.bind(index, address)

    def load(self, numbers: Iterable[int] | None) -> None:
        """Copy the content of buffers to the devices whose kernels read it; None: of all buffers not loaded yet."""
        for part in self.parts.values():
            part.load(numbers, self.bind)

    def load_rest(self) -> None:
        """Load all buffers that were not loaded yet."""
        if not self.is_local:
            self.load(None)

    def note_written(self, numbers: Iterable[int], *, copy: bool) -> None:
        for part in self.parts.values():
            part.note_written(numbers, copy=copy)

    def lead(self) -> None:
        """Make operations that other libraries issue from now on wait for the operations issued so far."""
        for part in self.parts.values():
            part.lead()

    def wait(self) -> None:
        for queue in self.queues.values():
            queue.wait()

    # -- the memory of intermediates and temporaries ------------------------------------------------
    def release(self) -> int:
        """Free the memory that intermediates share, until the next run. Returns the number of bytes freed."""
        if self.is_released or not self.memory.shared:
            return 0
        for part in self.parts.values():
            part.shared = None
        self.is_released = True
        return self.memory.shared

    def allocate_again(self) -> None:
        for part in self.parts.values():
            if part.shared_bytes:
                for index, address in part.allocate_again().items():
                    self.bind(index, address)
        self.is_released = False

    def _allocate(self, kernels: Sequence[PreparedKernel], buffers: Sequence[PlanBuffer], planner: PlannerMode) -> list[int]:
        """Allocate, and return the address of every buffer (0: unbound), then of every temporary in the order of `temporary_numbers`."""
        alive = lifetimes_of(kernels, buffers)
        end = len(buffers) + sum(len(k.spec.temps) for k in kernels)
        place = self._places + [""] * (end - len(buffers))      # the device of each number
        addresses = [self._address_of(i, b) for i, b in enumerate(buffers)] + [0] * (end - len(buffers))
        packed: set[int] = set()            # numbers of temporaries with packed constants, which several plans share
        for number, (k, temps) in enumerate(zip(kernels, temporary_numbers(kernels, end), strict=True)):
            part = self.runner_of(number)
            for t in temps:
                place[t] = part.device
            memory = packed_memory(k, buffers, part.backend, part.device)
            if memory is not None:
                self.packed[number] = memory
                for t, address in memory.addresses.items():
                    addresses[temps[t]] = address
                    packed.add(temps[t])
        shared, bound, kept = 0, 0, sum(m.nbytes for m in set(self.packed.values()))
        # Runs with other sizes than the largest use a part of the memory, and the system gives pages for that part, unless all are touched.
        touch = not any(phase.counts for k in kernels for phase in k.spec.phases)
        for part in self.parts.values():
            here = {n: size for n, size in alive.sizes.items() if place[n] == part.device}
            placement = plan_memory(here, alive.first, alive.last, planner)
            own = {n: size for n, size in alive.kept.items() if n not in packed and place[n] == part.device}
            made, always = part.allocate(placement, own, touch=touch)
            shared, bound, kept = shared + placement.total, bound + placement.lower_bound, kept + always
            for n, address in made.items():
                addresses[n] = address
        self.memory = PlanMemory(planner, shared, bound, kept)
        return addresses

    def _address_of(self, index: int, b: PlanBuffer) -> int:
        """Return the address of a buffer for kernels; 0 for a buffer without memory."""
        part = self.part_of(index)
        if not b.has_memory:
            return 0
        if not part.is_remote:
            return address_of(_content_of(b))
        return part.hold(index, b.storage if b.storage is not None else buffer_over(b.array),       # type: ignore[arg-type]
                         content=b.kind == "constant")


def _content_of(b: PlanBuffer) -> np.ndarray[Any, Any]:
    """Return the memory in which kernels of the host read a buffer."""
    if b.array is not None:
        return b.array
    assert b.storage is not None and b.storage.source is not None
    return b.storage.source
