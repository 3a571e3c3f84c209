"""A replacement of NVIDIA's driver without a GPU: device memory is host memory, kernels run in the emulator, and every call is recorded.

    copy_in, launch, record, copy_out       only queued on the stream
    wait, wait_event                        execute the work queued on the stream, in order, up to that point
    follow_event                            queues a wait: the work of the other stream up to the event is executed first

Work is executed as late as a real driver may execute it, so code that reads too early, or reuses memory too early, gets wrong numbers.
`stand_in` makes CUDA a device of this machine."""
from __future__ import annotations

import ctypes
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from svod.compile.backend import BACKENDS
from svod.compile.cuda.backend import Cuda
from svod.compile.cuda.code import Nvptx
from svod.compile.cuda.device import DEFAULT_STREAM
from svod.compile.cuda.driver import Driver, OutOfMemory
from svod.compile.cuda.ptxas import PtxasReport
from svod.errors import DeviceLost
from tests.compile.cuda.emulator import Emulated

SIZES = {"major": 9, "minor": 0, "units": 4, "unit_threads": 128, "unit_groups": 8, "unit_shared": 64 << 10, "group_shared": 60 << 10,
         "l2": 1 << 20, "group_threads": 64, "unit_registers": 65536, "clock": 0, "memory_clock": 0, "memory_bus": 0}


class FakeDriver(Driver):
    """A GPU with small groups. `room`: bytes of its memory; `sizes`: attributes that differ from `SIZES`; `failing`: the name of a kernel
    whose launch faults."""

    def __init__(self, room: int = 1 << 28, sizes: Mapping[str, int] | None = None) -> None:
        self.sizes = {**SIZES, **(sizes or {})}
        self.calls: list[tuple[Any, ...]] = []
        self.room, self.failing = room, ""
        self.memory: dict[int, np.ndarray[Any, Any]] = {}
        self.owner: dict[int, int] = {}         # address → the context that it was allocated in
        self.theirs: dict[int, int] = {}        # address → the context of another library's memory, or the device of memory of all
        self._contexts: dict[int, list[int]] = {}       # thread → its stack
        self.reached = True                     # whether devices reach each other's memory
        self.opened: set[tuple[int, int]] = set()       # (context, whose memory it reaches)
        self.modules: list[Emulated] = []
        self.loaded: list[int] = []             # the context of each module
        self.functions: list[tuple[Emulated, str]] = []
        self.capturing: list[tuple[Any, ...]] | None = None
        self.graphs: dict[int, list[tuple[Any, ...]]] = {}
        self.streams: dict[int, deque[Callable[[], None]]] = {DEFAULT_STREAM: deque()}      # work that waits
        self.gone: set[int] = set()             # streams that their owner has destroyed; what is on them is done all the same
        self.come: set[object] = set()          # points in time: where events were recorded
        self.recorded: dict[int, tuple[int, object]] = {}       # event → the stream that it is on, and where
        self.lost: DeviceLost | None = None     # after it every call fails

    def begin(self, stream: int, work: Callable[[], None]) -> None:
        """Queue work on a stream."""
        self._check()
        self.streams[stream].append(work)

    def _check(self) -> None:
        if self.lost is not None:
            raise DeviceLost(str(self.lost))

    def _next(self, stream: int) -> None:
        try:
            self.streams[stream].popleft()()
        except DeviceLost as error:
            self.lost = error
            raise

    @property
    def is_idle(self) -> bool:
        """Whether all streams are empty."""
        return not any(self.streams.values())

    def names(self) -> list[str]:
        """List the names of the calls so far."""
        return [c[0] for c in self.calls]

    def count(self) -> int:
        return 2

    def device(self, ordinal: int) -> int:
        return ordinal

    def name(self, device: int) -> str:
        return f"fake GPU {device}"

    def attribute(self, device: int, what: str) -> int:
        return self.sizes[what]

    def retain_context(self, device: int) -> int:
        return 100 + device

    @property
    def context(self) -> int:
        """Return the calling thread's current context, 0 if there is none. Each thread has a context stack."""
        return self.contexts[-1] if self.contexts else 0

    @property
    def contexts(self) -> list[int]:
        return self._contexts.setdefault(threading.get_ident(), [])

    def current_context(self) -> int:
        return self.context

    def current_device(self) -> int:
        assert self.context, "no context is current"
        return self.context % 100

    def enter_context(self, context: int) -> None:
        self.contexts.append(context)

    def leave_context(self) -> None:
        self.contexts.pop()

    def place_of(self, address: int) -> tuple[int, int]:
        """See `Driver.place_of`. Memory that was not allocated by this driver belongs to another library: to its context in `theirs`, or to
        all contexts."""
        own = next((self.owner[a] for a, raw in self.memory.items() if a <= address < a + raw.nbytes), None)
        context = self.theirs.get(address, 0) if own is None else own
        return context % 100, context if own is not None or context >= 100 else 0

    def allocate(self, nbytes: int) -> int:
        self._check()
        self.calls.append(("allocate", nbytes))
        if sum(m.nbytes for m in self.memory.values()) + nbytes > self.room:
            raise OutOfMemory("out of memory (code 2)")
        raw = np.full(nbytes + 256, 0xA5, np.uint8)
        address = -(-raw.ctypes.data // 256) * 256
        self.memory[address], self.owner[address] = raw, self.context
        return address

    def _context_of(self, address: int, nbytes: int) -> int:
        """Return the context in which the memory at an address was allocated; an error unless it has this many bytes."""
        return next(self.owner[a] for a, raw in self.memory.items() if a <= address and address + nbytes <= a + raw.nbytes)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self.calls.append(("copy", nbytes))
        assert self._context_of(to, nbytes) == self._context_of(source, nbytes) == self.context
        self.begin(stream, lambda: self._move(to, source, nbytes))

    def reaches(self, device: int, other: int) -> bool:
        self.calls.append(("reaches", device, other))
        return self.reached

    def open_peer(self, context: int) -> None:
        assert (self.context, context) not in self.opened
        self.opened.add((self.context, context))

    def copy_peer(self, to: int, context: int, source: int, source_context: int, nbytes: int, stream: int) -> None:
        self.calls.append(("copy_peer", nbytes))
        assert self.context == context and (context, source_context) in self.opened
        assert (self._context_of(to, nbytes), self._context_of(source, nbytes)) == (context, source_context)
        self.begin(stream, lambda: self._move(to, source, nbytes))

    def free(self, address: int) -> None:
        assert self.is_idle, "memory is freed that may be in use"
        self.calls.append(("free", address))
        del self.memory[address], self.owner[address]

    def allocate_pinned(self, nbytes: int) -> int:
        self.calls.append(("allocate_pinned", nbytes))
        raw = np.zeros(nbytes, np.uint8)
        self.memory[raw.ctypes.data], self.owner[raw.ctypes.data] = raw, -1
        return raw.ctypes.data

    def _move(self, to: int, source: int, nbytes: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def copy_in(self, device: int, host: int, nbytes: int, stream: int) -> None:
        self.calls.append(("copy_in", nbytes))
        self.begin(stream, lambda: self._move(device, host, nbytes))

    def copy_out(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self.calls.append(("copy_out", nbytes))
        self.begin(stream, lambda: self._move(host, device, nbytes))

    def create_stream(self) -> int:
        stream = 6 + len(self.streams)
        self.streams[stream] = deque()
        return stream

    def is_done(self, stream: int) -> bool:
        assert self.capturing is None, "a stream that records is asked: the recording is void"
        self._check()
        return not self.streams[stream]

    def wait(self, stream: int) -> None:
        self.calls.append(("wait",))
        assert self.capturing is None, "a stream that records is waited for: the recording is void"
        self._check()
        while self.streams[stream]:
            self._next(stream)

    def create_event(self) -> int:
        self.calls.append(("create_event",))
        return self.names().count("create_event")

    def record(self, event: int, stream: int) -> None:
        self.calls.append(("record", event))
        assert stream not in self.gone
        point = object()
        self.recorded[event] = stream, point
        self.begin(stream, lambda: self.come.add(point))

    def wait_event(self, event: int) -> None:
        self.calls.append(("wait_event",))
        self._come_to(*self.recorded[event])

    def _come_to(self, stream: int, point: object) -> None:
        self._check()
        while point not in self.come:
            self._next(stream)

    def follow_event(self, stream: int, event: int) -> None:
        self.calls.append(("follow_event", stream, event))
        recorded = self.recorded[event]
        self.begin(stream, lambda: self._come_to(*recorded))

    def wait_for_all(self) -> None:
        self.calls.append(("wait_for_all",))
        for stream in self.streams:
            while self.streams[stream]:
                self._next(stream)

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self.calls.append(("fill", nbytes))
        self.begin(stream, lambda: ctypes.memset(address, value, nbytes))

    def seconds_between(self, first: int, second: int) -> float:
        return 0.25

    def load_module(self, image: bytes) -> int:
        self.calls.append(("load_module", image))
        self.modules.append(Emulated(image.decode(), seed=len(self.modules)))
        self.loaded.append(self.context)
        return len(self.modules) - 1

    def unload_module(self, module: int) -> None:
        assert self.is_idle, "code is unloaded that may run"
        self.calls.append(("unload_module",))

    def function(self, module: int, symbol: str) -> int:
        assert self.loaded[module] == self.context, "a function of another context"
        self.functions.append((self.modules[module], symbol))
        return len(self.functions) - 1

    def allow_shared(self, function: int, nbytes: int) -> None:
        self.calls.append(("allow_shared", nbytes))

    def launch(self, function: int, grid: Sequence[int], block: int, shared: int, stream: int, arguments: Sequence[int]) -> None:
        launch = ("launch", function, (grid[0], grid[1]), block, shared, tuple(arguments))
        assert self.loaded[self.modules.index(self.functions[function][0])] == self.context, "an invalid handle: of another context"
        if self.capturing is not None:
            self.capturing.append(launch)
            return
        self.calls.append(launch)
        self.begin(stream, lambda: self._run(launch))

    def _run(self, launch: tuple[Any, ...]) -> None:
        module, symbol = self.functions[launch[1]]
        if symbol == self.failing:
            raise DeviceLost("CUDA: cuStreamSynchronize: an illegal memory access was encountered (code 700)")
        module.launch(symbol, *launch[2:])

    def begin_capture(self, stream: int) -> None:
        self.calls.append(("begin_capture",))
        self.capturing = []

    def end_capture(self, stream: int) -> int:
        self.calls.append(("end_capture",))
        assert self.capturing is not None
        self.graphs[len(self.graphs) + 1] = self.capturing
        self.capturing = None
        return len(self.graphs)

    def abandon_capture(self, stream: int) -> None:
        self.calls.append(("abandon_capture",))
        self.capturing = None

    def launch_graph(self, graph: int, stream: int) -> None:
        self.calls.append(("launch_graph",))
        launches = self.graphs[graph]
        self.begin(stream, lambda: [self._run(launch) for launch in launches].clear())

    def free_graph(self, graph: int) -> None:
        self.calls.append(("free_graph",))


class Interpreted(Nvptx):
    """A compiler whose image is the LLVM IR itself, for the emulator."""

    key = "LLVM IR for NVIDIA's GPUs, emulated"     # type: ignore[assignment]

    def image_of(self, source: str, arch: str, assembled: bool = True) -> tuple[str, bytes, tuple[PtxasReport, ...]]:
        return "ir", source.encode(), ()


def stand_in(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make CUDA a device with this driver."""
    module = types.ModuleType("svod_fake_cuda")
    module.BACKEND = fake_backend(driver)       # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(BACKENDS, "CUDA", module.__name__)
    monkeypatch.setattr("svod.compile.plan.compiler._compilers", {})


def fake_backend(driver: FakeDriver) -> Cuda:
    """Make a CUDA backend with this driver."""
    return Cuda(0, lambda: driver, Interpreted())
