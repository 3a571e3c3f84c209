"""A GPU that is there: its memory, its modules, and the stream on which everything of this process happens."""
from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from typing import Any

from svod.compile.cuda.driver import Driver, OutOfMemory
from svod.compile.cuda.targets import DEVICE, Architecture, Card, architecture_of, runs, target_of
from svod.core.machine.target import Target
from svod.errors import DeviceError

GRAIN = 512                 # bytes: memory is kept in sizes of so many, and from 8 of them on in eighths of a power of two
STAGED = 1 << 20            # bytes from which on copies go through pinned memory
CHUNK = 4 << 20


def rounded(nbytes: int) -> int:
    """The size of a piece of memory that holds `nbytes`."""
    step = max(GRAIN, 1 << max(0, nbytes.bit_length() - 4))
    return max(1, -(-nbytes // step)) * step


class DeviceMemory:
    """Memory of a device. It goes back to the pool with the object."""

    def __init__(self, pool: Pool, nbytes: int) -> None:
        self.pool, self.nbytes = pool, nbytes
        self.address = pool.take(rounded(nbytes))
        self._free = weakref.finalize(self, pool.give, rounded(nbytes), self.address)
        self._free.atexit = False       # the driver frees what a process leaves


class Pool:
    """Pieces of a device's memory that were used before, by size."""

    def __init__(self, device: GpuDevice) -> None:
        self.device = device
        self.free: dict[int, list[int]] = {}
        self.lock = threading.Lock()
        self.held = 0                   # bytes of the driver's
        self._given: deque[tuple[int, int]] = deque()       # (size, address) of pieces that are not in `free` yet

    def take(self, size: int) -> int:
        """The address of `size` bytes. Raises DeviceError where the device has too little memory."""
        with self.lock:
            self._sort()
            waiting = self.free.get(size)
            if waiting:
                return waiting.pop()
            driver = self.device.use()
            try:
                address = driver.allocate(size)
            except OutOfMemory:
                self._return(driver)
                try:
                    address = driver.allocate(size)
                except OutOfMemory as e:
                    raise DeviceError(f"{self.device.name} has no {size:,} bytes of memory left; this process holds {self.held:,}: compute "
                                      "smaller batches, or end what else uses the GPU") from e
            self.held += size
            return address

    def give(self, size: int, address: int) -> None:
        """Keep memory for the next who needs as much. Without waiting: the thread that holds the lock may be this one, inside a
        collection."""
        if os.getpid() == self.device.process:
            self._given.append((size, address))

    def _sort(self) -> None:
        while self._given:
            size, address = self._given.popleft()
            self.free.setdefault(size, []).append(address)

    def _return(self, driver: Driver) -> None:
        self._sort()
        for size, waiting in self.free.items():
            for address in waiting:
                driver.free(address)
                self.held -= size
        self.free.clear()


class GpuDevice:
    """A device that is there, its primary context and one stream. It belongs to the process that opened it.

    `architecture`: whose code it runs, where that is not what it runs best. Raises DeviceError for one whose code it does not run."""

    def __init__(self, driver: Driver, ordinal: int, architecture: Architecture | None = None) -> None:
        count = driver.count()
        if ordinal >= count:
            raise DeviceError(f"the device {DEVICE}:{ordinal}: this machine has {count} GPU{'s' * (count != 1)}, "
                              f"{DEVICE}:0 to {DEVICE}:{count - 1}")
        self.driver, self.ordinal, self.process = driver, ordinal, os.getpid()
        self.handle = driver.device(ordinal)
        self.name = driver.name(self.handle)
        self.capability = driver.attribute(self.handle, "major"), driver.attribute(self.handle, "minor")
        self._asked = architecture
        if architecture is not None and not runs(architecture, self.capability):
            raise DeviceError(f"the device {DEVICE}:{ordinal}:{architecture.name}: {self.name} has compute capability "
                              f"{'.'.join(map(str, self.capability))} and does not run code for {architecture.name}")
        self.context = driver.retain_context(self.handle)
        self.pool = Pool(self)
        self.lock = threading.RLock()       # of the stream: who holds it puts work there
        driver.use_context(self.context)
        self.stream = driver.create_stream()
        self._pinned: list[int] = []
        self._events: list[int] = []
        self._reached: dict[int, bool] = {}     # by the number of another device: whether its memory is
        self._clocks: list[tuple[int, int]] = []
        self._filling: DeviceMemory | None = None       # what the second cache is filled with between runs

    def use(self) -> Driver:
        """The driver, with this device's context in the calling thread. Raises DeviceError in a fork of the process that opened it."""
        if os.getpid() != self.process:
            raise DeviceError(f"{self.name} was opened before this process was forked, and CUDA does not survive that: start processes "
                              "with the method 'spawn' or 'forkserver'")
        self.driver.use_context(self.context)
        return self.driver

    def architecture(self) -> Architecture:
        """The architecture whose code the device runs."""
        return self._asked or architecture_of(*self.capability)

    def target(self) -> Target:
        """The device as a target, from what the driver says of it."""
        architecture = self.architecture()

        def asked(what: str, otherwise: float) -> int:
            return self.driver.attribute(self.handle, what) or int(otherwise)
        typical = architecture.card
        rate = 2 * 1e3 * asked("memory_clock", 0) * asked("memory_bus", 0) / 8      # kHz, both edges, bits
        card = Card(self.name, asked("units", typical.units), asked("unit_threads", typical.unit_threads),
                    asked("unit_groups", typical.unit_groups), asked("unit_shared", typical.unit_shared),
                    asked("group_shared", typical.group_shared), typical.unit_cache, asked("l2", typical.l2),
                    1e3 * asked("clock", typical.clock / 1e3), rate or typical.memory_rate, asked("group_threads", typical.group_threads),
                    asked("unit_registers", typical.unit_registers), typical.group_reserved)
        numbered = f"{DEVICE}:{self.ordinal}"
        plain = numbered if self.ordinal else DEVICE
        return target_of(architecture, card, plain if self._asked is None else f"{numbered}:{self._asked.name}")

    # -- time ---------------------------------------------------------------------------------------
    def clock(self, number: int = 0) -> tuple[int, int]:
        """Two events between which time is counted: those of a number, of which several can be on the stream at a time."""
        while len(self._clocks) <= number:
            driver = self.use()
            self._clocks.append((driver.create_event(), driver.create_event()))
        return self._clocks[number]

    def fill_cache(self) -> None:
        """Have the second cache filled with something else: twice its size is written."""
        if self._filling is None:
            self._filling = DeviceMemory(self.pool, 2 * self.target().l2)
        self.use().fill(self._filling.address, 0, self._filling.nbytes, self.stream)

    # -- copies -------------------------------------------------------------------------------------
    def copy_in(self, device: int, host: int, nbytes: int) -> None:
        """Copy from the host, and wait for it."""
        with self.lock:
            driver = self.use()
            if nbytes < STAGED:
                driver.copy_in(device, host, nbytes, self.stream)
            else:
                for part, (start, size) in enumerate(_parts(nbytes)):
                    pinned, event = self._buffer(driver, part)
                    if part >= 2:
                        driver.wait_event(event)
                    ctypes.memmove(pinned, host + start, size)
                    driver.copy_in(device + start, pinned, size, self.stream)
                    driver.record(event, self.stream)
            driver.wait(self.stream)

    def copy_out(self, host: int, device: int, nbytes: int) -> None:
        """Copy to the host, and wait for it."""
        with self.lock:
            driver = self.use()
            if nbytes < STAGED:
                driver.copy_out(host, device, nbytes, self.stream)
                driver.wait(self.stream)
                return
            parts = _parts(nbytes)
            for part in range(len(parts) + 1):
                if part < len(parts):
                    pinned, event = self._buffer(driver, part)
                    driver.copy_out(pinned, device + parts[part][0], parts[part][1], self.stream)
                    driver.record(event, self.stream)
                if part:        # while the next part is on its way
                    pinned, event = self._buffer(driver, part - 1)
                    driver.wait_event(event)
                    ctypes.memmove(host + parts[part - 1][0], pinned, parts[part - 1][1])

    def copy_from(self, address: int, other: GpuDevice, source: int, nbytes: int) -> bool:
        """Copy from the memory of a device, this one or another, and wait for it; False where this one does not reach it."""
        with self.lock:
            driver = self.use()
            if other.context == self.context:
                driver.copy(address, source, nbytes, self.stream)
            elif self._reaches(driver, other):
                driver.copy_peer(address, self.context, source, other.context, nbytes, self.stream)
            else:
                return False
            driver.wait(self.stream)
            return True

    def _reaches(self, driver: Driver, other: GpuDevice) -> bool:
        if other.ordinal not in self._reached:
            self._reached[other.ordinal] = driver.reaches(self.handle, other.handle)
            if self._reached[other.ordinal]:
                driver.open_peer(other.context)
        return self._reached[other.ordinal]

    def _buffer(self, driver: Driver, part: int) -> tuple[int, int]:
        """The pinned memory of a part, one of two, and the event that says when it was copied."""
        while len(self._pinned) < 2:
            self._pinned.append(driver.allocate_pinned(CHUNK))
            self._events.append(driver.create_event())
        return self._pinned[part % 2], self._events[part % 2]


def _parts(nbytes: int) -> list[tuple[int, int]]:
    """(first byte, bytes) of the chunks of a copy."""
    return [(start, min(CHUNK, nbytes - start)) for start in range(0, nbytes, CHUNK)]


class Module:
    """An image on a device. It is unloaded with the object."""

    def __init__(self, device: GpuDevice, image: bytes) -> None:
        self.device = device
        self.handle = device.use().load_module(image)
        self.functions: dict[str, int] = {}
        self._free = weakref.finalize(self, _unload, device, self.handle)
        self._free.atexit = False

    def function(self, symbol: str, shared: int) -> int:
        """A kernel that launches may give `shared` bytes of memory that it does not declare."""
        found = self.functions.get(symbol)
        if found is None:
            driver = self.device.use()
            found = self.functions[symbol] = driver.function(self.handle, symbol)
            if shared:
                driver.allow_shared(found, shared)
        return found


def _unload(device: Any, module: int) -> None:
    if os.getpid() == device.process:
        device.use().unload_module(module)
