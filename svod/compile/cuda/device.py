"""A GPU of this machine: its memory, its modules, and the stream for all of this process's work.

If a program has made a context of this GPU current, as pycuda does, svod uses that context; otherwise it uses the primary context, as
PyTorch does. Each use of the device makes that context current in the calling thread, and restores the thread's own context afterwards.

    copy_in a, launch k0, launch k1, copy_out b      in this order on the device; the host waits in copy_out only

The stream runs its work in order, so memory can be given to its next user while kernels that read it are still running. If other libraries
share memory, their streams and this one wait for each other (`follow`, `lead`), and the host does not wait. A copy to the device passes
through pinned memory, and the host's array has been read when the call returns. An error in a kernel is raised by a later call, at the
latest by the next one that waits; `working` adds the names of the kernels that were running.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from svod.compile.cuda.driver import Driver, OutOfMemory
from svod.compile.cuda.targets import DEVICE, Architecture, Card, architecture_of, runs, target_of
from svod.core.machine.target import Target
from svod.errors import DeviceError, DeviceLost

GRAIN_BYTES = 512  # bytes: sizes of memory are rounded up to multiples of this, large sizes to multiples of an eighth of a power of two
STAGED = 1 << 20            # bytes: a copy to the host of at least this size goes through pinned memory
COPY_CHUNK_BYTES = 4 << 20             # bytes of each piece of a copy through pinned memory
RING = 3 * COPY_CHUNK_BYTES            # bytes of pinned memory: room for two chunks, wherever the first one begins
MOST_COPIES = 256           # maximum number of copies that use the ring at the same time
NAMED = 8                   # maximum number of kernels that an error names
DEFAULT_STREAM = 1          # CUDA's legacy default stream, by its number in the driver and in DLPack; it exists as long as the device


def rounded(nbytes: int) -> int:
    """Round a number of bytes up to a size that pieces of memory have."""
    step = max(GRAIN_BYTES, 1 << max(0, nbytes.bit_length() - 4))
    return max(1, -(-nbytes // step)) * step


class DeviceMemory:
    """Memory of a device. It returns to the pool when the object is deleted. `lent`: the streams on which other libraries have used the
    memory; None stands for a stream that may no longer exist when the memory is returned."""

    def __init__(self, pool: PiecePool, nbytes: int) -> None:
        self.pool, self.nbytes = pool, nbytes
        self.address, self.lent = pool.take(rounded(nbytes)), set[int | None]()
        self._free = weakref.finalize(self, pool.give, rounded(nbytes), self.address, self.lent)
        self._free.atexit = False       # the driver frees memory when the process ends


class PiecePool:
    """A pool of unused pieces of a device's memory, by size."""

    def __init__(self, device: GpuDevice) -> None:
        self.device = device
        self.free: dict[int, list[int]] = {}
        self.lock = threading.Lock()
        self.held = 0                   # bytes allocated from the driver
        self._given: deque[tuple[int, int]] = deque()       # (size, address) of returned pieces that are not in `free` yet
        self._lent: deque[tuple[int, int, set[int | None]]] = deque()       # pieces that other libraries have used on their streams

    def take(self, size: int) -> int:
        """Return the address of `size` bytes. Raises DeviceError if the device has too little memory."""
        self.device.check_process()     # in a fork, a lock may be held by a thread that no longer exists
        if self._lent:
            self._take_back()
        try:
            return self._take(size)
        except OutOfMemory:
            self._return()
        try:
            return self._take(size)
        except OutOfMemory as e:
            raise DeviceError(f"{self.device.name} has no {size:,} bytes of memory left; this process holds {self.held:,}: compute "
                              "smaller batches, or end what else uses the GPU") from e

    def _take(self, size: int) -> int:
        with self.lock:
            self._sort()
            waiting = self.free.get(size)
            if waiting:
                return waiting.pop()
            with self.device.naming(), self.device.current() as driver:
                address = driver.allocate(size)
            self.held += size
            return address

    def give(self, size: int, address: int, lent: set[int | None]) -> None:
        """Return memory to the pool, without waiting: the garbage collector may call this in the thread that holds the lock."""
        if os.getpid() == self.device.process:
            if lent:
                self._lent.append((size, address, lent))
            else:
                self._given.append((size, address))

    def _take_back(self) -> None:
        """Return lent buffers to the pool, ordered after the work that their borrowers have issued."""
        with self.device.working() as driver:
            back = [self._lent.popleft() for _ in range(len(self._lent))]
            for stream in {stream for _, _, lent in back for stream in lent}:
                if stream is None:
                    driver.wait_for_all()
                else:
                    self.device.follow(stream)
            self._given += [(size, address) for size, address, _ in back]

    def _sort(self) -> None:
        while self._given:
            size, address = self._given.popleft()
            self.free.setdefault(size, []).append(address)

    def _return(self) -> None:
        """Free all unused memory to the driver, after all work on it has finished. First acquire the lock of the stream, because waiting
        for the stream would end a recording of a graph by another thread."""
        with self.device.working() as driver:
            self.device.wait()
            with self.lock:
                self._sort()
                for size, waiting in self.free.items():
                    while waiting:
                        driver.free(waiting.pop())
                        self.held -= size


class Staging:
    """A ring buffer of pinned host memory. Copies between host and device pass through it piece by piece."""

    def __init__(self, driver: Driver) -> None:
        self.base = driver.allocate_pinned(RING)
        self._next = 0
        self._copies: deque[tuple[int, int, int]] = deque()     # (begin, end, event that marks the end of the copy), the oldest first
        self._spare: list[int] = []                             # unused events

    @contextlib.contextmanager
    def piece(self, driver: Driver, nbytes: int, stream: int) -> Iterator[tuple[int, list[int]]]:
        """Give the address of `nbytes` unused bytes, for a copy that the caller issues inside the context, and an empty list. When the
        context ends, an event that marks the end of the copy is recorded on `stream` and added to the list."""
        begin = self._next if self._next + nbytes <= RING else 0
        end = begin + nbytes
        while len(self._copies) >= MOST_COPIES or any(b < end and begin < e for b, e, _ in self._copies):
            driver.wait_event(self._copies[0][2])
            self._spare.append(self._copies.popleft()[2])
        self._next = -(-end // GRAIN_BYTES) * GRAIN_BYTES
        event = self._spare.pop() if self._spare else driver.create_event()
        events: list[int] = []
        try:
            yield self.base + begin, events
        finally:        # this is needed also if Ctrl-C came after the copy was issued
            self._copies.append((begin, end, event))
            driver.record(event, stream)
            events.append(event)


    def settle(self) -> None:
        """Mark all copies as done, so that their parts of the ring are unused again."""
        self._spare += [event for _, _, event in self._copies]
        self._copies.clear()


class GpuDevice:
    """A device of this machine, with a context and one stream. It belongs to the process that opened it.

    `architecture`: the architecture to compile for, if it is not the device's own. Raises DeviceError if the device does not run its
    code."""

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
        self.context = self._shared_context() or driver.retain_context(self.handle)
        self.pool = PiecePool(self)
        self.lock = threading.RLock()       # a thread holds this lock while it issues work to the stream
        with self.current():
            self.stream = driver.create_stream()
        self._staging: Staging | None = None
        self._pending: dict[str, None] = {}     # names of kernels that were launched and may not have finished
        self.retired: deque[tuple[Callable[[int], None], int]] = deque()    # (call that frees an unused module or graph, its handle)
        self._reached: dict[int, bool] = {}     # number of another device → whether its memory is accessible
        self._point: int | None = None          # the event by which one stream waits for another; None: not made yet
        self._clocks: list[tuple[int, int]] = []
        self._filling: DeviceMemory | None = None       # memory that is written between runs to fill the L2 cache

    def _shared_context(self) -> int:
        """Return the calling thread's context if it belongs to this device, so that the thread's memory and streams can be used; otherwise
        0."""
        context = self.driver.current_context()
        return self.driver.adopt_context() if context and self.driver.current_device() == self.handle else 0

    @contextlib.contextmanager
    def current(self) -> Iterator[Driver]:
        """Give the driver, with this device's context current in the calling thread; the thread's own context is restored afterwards.
        Raises DeviceError in a fork of the process that opened the device."""
        self.check_process()
        if self.driver.current_context() == self.context:
            yield self.driver
            return
        self.driver.enter_context(self.context)
        try:
            yield self.driver
        finally:
            self.driver.leave_context()

    def check_memory(self, address: int) -> None:
        """Raise DeviceError if the memory belongs to another context of this device, which svod's kernels cannot access."""
        with self.current() as driver:
            context = driver.place_of(address)[1]
        if context not in (0, self.context):
            raise DeviceError(f"memory of another context of {self.name}: svod works in the context that was current when it first used "
                              "the GPU, else in the primary one. Use svod there first, or let the other library use the primary context "
                              "(import pycuda.autoprimaryctx instead of pycuda.autoinit)")

    def check_process(self) -> None:
        """Raise DeviceError in a fork of the process that opened the device."""
        if os.getpid() != self.process:
            raise DeviceError(f"{self.name} was opened before this process was forked, and CUDA does not survive that: start processes "
                              "with the method 'spawn' or 'forkserver'")

    def retire(self, free: Callable[[int], None], handle: int) -> None:
        """Mark a module or a graph to be freed later, when nothing runs. This does not call the driver, because the garbage collector may
        run in a thread that uses another device, or that records launches."""
        if os.getpid() == self.process:
            self.retired.append((free, handle))

    @contextlib.contextmanager
    def working(self, kernels: Sequence[str] = ()) -> Iterator[Driver]:
        """Give the driver, to issue work to the stream; `kernels`: the names of the kernels that are launched inside."""
        self.check_process()        # in a fork, the lock may be held by a thread that no longer exists
        with self.lock, self.naming(), self.current() as driver:
            if kernels:
                if self._pending and driver.is_done(self.stream):
                    self._settle(driver)
                self._pending.update(dict.fromkeys(kernels))
            yield driver

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Add to an error of the driver inside the context the names of the kernels that may have caused it: the ones that may not have
        finished."""
        try:
            yield
        except DeviceError as e:
            if isinstance(e.__cause__, DeviceError) or (not self._pending and not isinstance(e, DeviceLost)):
                raise       # the error has the names of the kernels already, or there are none
            names = list(self._pending)
            ran = f"; it happened in a run of {', '.join(names[:NAMED])}{', …' if len(names) > NAMED else ''}" if names else ""
            after = ". After such an error this process cannot use the GPU any more" if isinstance(e, DeviceLost) else ""
            raise type(e)(f"{e}{ran} on {self.name}{after}") from e

    def follow(self, stream: int) -> None:
        """Make work issued to this device's stream from now on wait for the work on `stream`."""
        self._order(stream, self.stream)

    def lead(self, stream: int) -> None:
        """Make work issued to `stream` from now on wait for the work on this device's stream."""
        self._order(self.stream, stream)

    def _order(self, first: int, second: int) -> None:
        if first != second:
            with self.working() as driver:
                if self._point is None:
                    self._point = driver.create_event()
                driver.record(self._point, first)
                driver.follow_event(second, self._point)

    def wait(self) -> None:
        """Wait for all work on the stream. Raises its errors."""
        with self.working() as driver:
            driver.wait(self.stream)
            self._settle(driver)

    def _settle(self, driver: Driver) -> None:
        """Clear the records of work on the stream, which is empty."""
        self._pending.clear()
        if self._staging is not None:
            self._staging.settle()
        while self.retired:
            free, handle = self.retired.popleft()
            free(handle)

    def architecture(self) -> Architecture:
        """The architecture whose code the device runs."""
        return self._asked or architecture_of(*self.capability)

    def target(self) -> Target:
        """The device as a target, from the driver's description."""
        architecture = self.architecture()

        def asked(what: str, otherwise: float) -> int:
            return self.driver.attribute(self.handle, what) or int(otherwise)
        typical = architecture.card
        # memory_clock in kHz, two transfers a cycle, memory_bus in bits
        rate = 2 * 1e3 * asked("memory_clock", 0) * asked("memory_bus", 0) / 8
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
        """Return the two events that time a run. Each `number` has its own pair, so several can be on the stream at the same time."""
        with self.current() as driver:
            while len(self._clocks) <= number:
                self._clocks.append((driver.create_event(), driver.create_event()))
        return self._clocks[number]

    def fill_cache(self) -> None:
        """Fill the L2 cache with other data, by writing twice its size."""
        if self._filling is None:
            self._filling = DeviceMemory(self.pool, 2 * self.target().l2)
        with self.current() as driver:
            driver.fill(self._filling.address, 0, self._filling.nbytes, self.stream)

    # -- copies -------------------------------------------------------------------------------------
    def copy_in(self, device: int, host: int, nbytes: int) -> None:
        """Copy from the host. The host memory has been read when this returns."""
        with self.working() as driver:
            staging = self._staged(driver)
            for start, size in _parts(nbytes):
                with staging.piece(driver, size, self.stream) as (pinned, _):
                    ctypes.memmove(pinned, host + start, size)
                    driver.copy_in(device + start, pinned, size, self.stream)

    def copy_out(self, host: int, device: int, nbytes: int) -> None:
        """Copy to the host, and wait for it."""
        with self.working() as driver:
            if nbytes < STAGED:
                driver.copy_out(host, device, nbytes, self.stream)
                self.wait()
                return
            staging, waiting = self._staged(driver), deque[tuple[int, int, int, int]]()
            for start, size in _parts(nbytes):
                with staging.piece(driver, size, self.stream) as (pinned, events):
                    driver.copy_out(pinned, device + start, size, self.stream)
                waiting.append((host + start, pinned, size, events[0]))
                if len(waiting) > 1:        # the device copies the next part meanwhile
                    _take(driver, *waiting.popleft())
            _take(driver, *waiting.popleft())
            self._settle(driver)

    def copy_from(self, address: int, other: GpuDevice, source: int, nbytes: int) -> bool:
        """Copy from the memory of this or another device; the two devices wait for each other. Returns False if this device cannot access
        that memory."""
        if other is not self:
            other.wait()
        with self.working() as driver:
            if other.context == self.context:
                driver.copy(address, source, nbytes, self.stream)
            elif self._reaches(driver, other):
                driver.copy_peer(address, self.context, source, other.context, nbytes, self.stream)
            else:
                return False
            if other is not self:
                self.wait()
            return True

    def _staged(self, driver: Driver) -> Staging:
        if self._staging is None:
            self._staging = Staging(driver)
        return self._staging

    def _reaches(self, driver: Driver, other: GpuDevice) -> bool:
        if other.ordinal not in self._reached:
            self._reached[other.ordinal] = driver.reaches(self.handle, other.handle)
            if self._reached[other.ordinal]:
                driver.open_peer(other.context)
        return self._reached[other.ordinal]


def _take(driver: Driver, host: int, pinned: int, nbytes: int, event: int) -> None:
    """Wait for a piece of a copy, and copy it from pinned memory to the host."""
    driver.wait_event(event)
    ctypes.memmove(host, pinned, nbytes)


def _parts(nbytes: int) -> list[tuple[int, int]]:
    """List (first byte, bytes) of the chunks of a copy."""
    return [(start, min(COPY_CHUNK_BYTES, nbytes - start)) for start in range(0, nbytes, COPY_CHUNK_BYTES)]


class LoadedImage:
    """A module loaded on a device. It is unloaded when the object is deleted."""

    def __init__(self, device: GpuDevice, image: bytes) -> None:
        self.device = device
        with device.current() as driver:
            self.handle = driver.load_module(image)
        self.functions: dict[str, int] = {}
        self._free = weakref.finalize(self, device.retire, device.driver.unload_module, self.handle)
        self._free.atexit = False

    def function(self, symbol: str, shared: int) -> int:
        """Return a kernel, whose launches may request `shared` bytes of dynamic shared memory."""
        found = self.functions.get(symbol)
        if found is None:
            with self.device.current() as driver:
                found = self.functions[symbol] = driver.function(self.handle, symbol)
                if shared:
                    driver.allow_shared(found, shared)
        return found
