"""NVIDIA's driver, called through ctypes: devices, contexts, memory, streams, modules, launches, graphs.

The driver's library exists on every machine that can run kernels, whereas installing pycuda requires a compiler. `PycudaDriver` makes the
same calls through pycuda in a program that uses it. The rest of svod's CUDA backend calls an object with the methods of `Driver`, which
tests replace.
"""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from svod.errors import DeviceError, DeviceLost

DRIVER_LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
OUT_OF_MEMORY = 2
ATTRIBUTES = {
    "group_threads": 1, "clock": 13, "units": 16, "memory_clock": 36, "memory_bus": 37, "l2": 38, "unit_threads": 39, "major": 75,
    "minor": 76, "unit_shared": 81, "unit_registers": 82, "group_shared": 97, "unit_groups": 106,
}
"""Property of a target → number of the CUdevice_attribute that has it."""
LOST = frozenset({214, 700, 702, 710, *range(714, 720)})
"""Numbers of CUresult after which a process cannot use the device any more: memory errors, time limits, traps, invalid addresses."""
POINTER_CONTEXT, POINTER_DEVICE = 1, 9      # numbers of CUpointer_attribute
DYNAMIC_SHARED = 8      # number of the CUfunction_attribute: bytes of shared memory that a launch may request
PEER_IS_OPEN = 704      # CUresult: the context can access the other one's memory already
NOT_READY = 600         # CUresult: the stream has unfinished work
RELAXED_CAPTURE = 2     # capture mode without restrictions on other calls and threads


class OutOfMemory(DeviceError):
    """The device has no memory left."""


class Driver:
    """The driver calls that svod makes. All raise DeviceError with the driver's own message; `allocate` raises OutOfMemory."""

    def __init__(self, library: Any):
        self.library = library
        self._call("cuInit", c_uint(0))

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self.library, name)(*args)
        if code:
            raise self._error(name, int(code))

    def _ask(self, kind: type[Any], name: str, *args: Any) -> int:
        """Call the function `name` of the driver, and return the number, of type `kind`, that it writes to its first argument; 0 for a
        null pointer."""
        out = kind()
        self._call(name, byref(out), *args)
        return int(out.value or 0)

    def _error(self, name: str, code: int) -> DeviceError:
        said = c_char_p()
        found = self.library.cuGetErrorString(c_int(code), byref(said)) == 0 and said.value
        why = f"{name}: {said.value.decode() if found and said.value else 'an error'} (code {code})"
        if code == OUT_OF_MEMORY:
            return OutOfMemory(why)
        return (DeviceLost if code in LOST else DeviceError)(f"CUDA: {why}")

    # -- devices ------------------------------------------------------------------------------------
    def count(self) -> int:
        """Return the number of devices."""
        return self._ask(c_int, "cuDeviceGetCount")

    def device(self, ordinal: int) -> int:
        """Return the handle of a device."""
        return self._ask(c_int, "cuDeviceGet", c_int(ordinal))

    def name(self, device: int) -> str:
        """Return the name of a device."""
        out = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", out, c_int(256), c_int(device))
        return out.value.decode()

    def attribute(self, device: int, what: str) -> int:
        """Return a device's attribute, by its name in `ATTRIBUTES`."""
        return self._ask(c_int, "cuDeviceGetAttribute", c_int(ATTRIBUTES[what]), c_int(device))

    def retain_context(self, device: int) -> int:
        """Return the device's primary context, which all libraries of a process share."""
        return self._ask(c_void_p, "cuDevicePrimaryCtxRetain", c_int(device))

    def current_context(self) -> int:
        """Return the calling thread's context; 0: it has none."""
        return self._ask(c_void_p, "cuCtxGetCurrent")

    def adopt_context(self) -> int:
        """Return the calling thread's context, for use with `enter_context`."""
        return self.current_context()

    def current_device(self) -> int:
        """Return the handle of the device of the calling thread's context, which must exist."""
        return self._ask(c_int, "cuCtxGetDevice")

    def enter_context(self, context: int) -> None:
        """Make a context current in the calling thread until `leave_context`."""
        self._call("cuCtxPushCurrent_v2", c_void_p(context))

    def leave_context(self) -> None:
        """Restore the context that the calling thread had before `enter_context`."""
        self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def place_of(self, address: int) -> tuple[int, int]:
        """Return the ordinal of the device that holds memory, and the context that the memory belongs to (0: all contexts)."""
        ordinal = self._ask(c_int, "cuPointerGetAttribute", c_int(POINTER_DEVICE), c_uint64(address))
        return ordinal, self._ask(c_void_p, "cuPointerGetAttribute", c_int(POINTER_CONTEXT), c_uint64(address))

    # -- memory -------------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> int:
        """Allocate memory of the device, and return its address, a multiple of 256."""
        return self._ask(c_uint64, "cuMemAlloc_v2", c_size_t(nbytes))

    def free(self, address: int) -> None:
        """Free memory of the device."""
        self._call("cuMemFree_v2", c_uint64(address))

    def allocate_pinned(self, nbytes: int) -> int:
        """Allocate pinned host memory, which the device copies from without the CPU, and return its address."""
        return self._ask(c_void_p, "cuMemAllocHost_v2", c_size_t(nbytes))

    def copy_in(self, device: int, host: int, nbytes: int, stream: int) -> None:
        """Start a copy to the device; from pinned memory it is asynchronous."""
        self._call("cuMemcpyHtoDAsync_v2", c_uint64(device), c_void_p(host), c_size_t(nbytes), c_void_p(stream))

    def copy_out(self, host: int, device: int, nbytes: int, stream: int) -> None:
        """Start a copy to the host."""
        self._call("cuMemcpyDtoHAsync_v2", c_void_p(host), c_uint64(device), c_size_t(nbytes), c_void_p(stream))

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Start a copy within a device."""
        self._call("cuMemcpyDtoDAsync_v2", c_uint64(to), c_uint64(source), c_size_t(nbytes), c_void_p(stream))

    def reaches(self, device: int, other: int) -> bool:
        """Whether a device can access the memory of another one directly."""
        return bool(self._ask(c_int, "cuDeviceCanAccessPeer", c_int(device), c_int(other)))

    def open_peer(self, context: int) -> None:
        """Give the calling thread's context access to the memory of another one, unless another library has done so."""
        code = self.library.cuCtxEnablePeerAccess(c_void_p(context), c_uint(0))
        if code not in (0, PEER_IS_OPEN):
            raise self._error("cuCtxEnablePeerAccess", int(code))

    def copy_peer(self, to: int, context: int, source: int, source_context: int, nbytes: int, stream: int) -> None:
        """Start a copy from the memory of one context to another."""
        self._call("cuMemcpyPeerAsync", c_uint64(to), c_void_p(context), c_uint64(source), c_void_p(source_context), c_size_t(nbytes),
                   c_void_p(stream))

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Start to set `nbytes` bytes of memory to `value`."""
        self._call("cuMemsetD8Async", c_uint64(address), ctypes.c_ubyte(value), c_size_t(nbytes), c_void_p(stream))

    # -- streams and events -------------------------------------------------------------------------
    def create_stream(self) -> int:
        """Create a stream that does not wait for the default one."""
        return self._ask(c_void_p, "cuStreamCreate", c_uint(1))

    def is_done(self, stream: int) -> bool:
        """Whether all work on a stream is done. Raises its errors."""
        code = self.library.cuStreamQuery(c_void_p(stream))
        if code not in (0, NOT_READY):
            raise self._error("cuStreamQuery", int(code))
        return not code

    def wait(self, stream: int) -> None:
        """Wait for all work on a stream. Raises its errors."""
        self._call("cuStreamSynchronize", c_void_p(stream))

    def create_event(self) -> int:
        """Create an event: a point in time on a stream."""
        return self._ask(c_void_p, "cuEventCreate", c_uint(0))

    def record(self, event: int, stream: int) -> None:
        """Record an event on a stream: it completes when all earlier work is done."""
        self._call("cuEventRecord", c_void_p(event), c_void_p(stream))

    def follow_event(self, stream: int, event: int) -> None:
        """Make work issued to a stream from now on wait for an event as last recorded; the host does not wait."""
        self._call("cuStreamWaitEvent", c_void_p(stream), c_void_p(event), c_uint(0))

    def wait_for_all(self) -> None:
        """Wait for all work on all streams of the context, including other libraries' streams."""
        self._call("cuCtxSynchronize")

    def wait_event(self, event: int) -> None:
        """Wait until an event has completed."""
        self._call("cuEventSynchronize", c_void_p(event))

    def seconds_between(self, first: int, second: int) -> float:
        """Return the time from one event to another; both must have completed."""
        out = c_float()
        name = "cuEventElapsedTime_v2" if hasattr(self.library, "cuEventElapsedTime_v2") else "cuEventElapsedTime"
        self._call(name, byref(out), c_void_p(first), c_void_p(second))
        return out.value * 1e-3

    # -- code ---------------------------------------------------------------------------------------
    def load_module(self, image: bytes) -> int:
        """Load a module from a cubin, or from PTX that ends with a zero byte."""
        return self._ask(c_void_p, "cuModuleLoadData", c_char_p(image))

    def unload_module(self, module: int) -> None:
        """Free a module; its functions must not be launched any more."""
        self._call("cuModuleUnload", c_void_p(module))

    def function(self, module: int, symbol: str) -> int:
        """Return a kernel of a module."""
        return self._ask(c_void_p, "cuModuleGetFunction", c_void_p(module), c_char_p(symbol.encode()))

    def allow_shared(self, function: int, nbytes: int) -> None:
        """Allow launches of a kernel to request this many bytes of shared memory."""
        self._call("cuFuncSetAttribute", c_void_p(function), c_int(DYNAMIC_SHARED), c_int(nbytes))

    def launch(self, function: int, grid: Sequence[int], block: int, shared: int, stream: int, arguments: Sequence[int]) -> None:
        """Launch `grid` (x, y) blocks of `block` threads. `arguments`: 64-bit values."""
        values = (c_uint64 * len(arguments))(*[a & 0xFFFF_FFFF_FFFF_FFFF for a in arguments])
        base = ctypes.addressof(values)
        pointers = (c_void_p * len(arguments))(*[base + 8 * k for k in range(len(arguments))])
        self._call("cuLaunchKernel", c_void_p(function), c_uint(grid[0]), c_uint(grid[1]), c_uint(1), c_uint(block), c_uint(1), c_uint(1),
                   c_uint(shared), c_void_p(stream), pointers, None)

    # -- graphs -------------------------------------------------------------------------------------
    def begin_capture(self, stream: int) -> None:
        """Start to record the work that is issued to a stream, instead of executing it."""
        self._call("cuStreamBeginCapture_v2", c_void_p(stream), c_int(RELAXED_CAPTURE))

    def end_capture(self, stream: int) -> int:
        """End the recording, and return the recorded graph, ready to be launched."""
        graph, ready = c_void_p(), c_void_p()
        self._call("cuStreamEndCapture", c_void_p(stream), byref(graph))
        try:
            self._call("cuGraphInstantiateWithFlags", byref(ready), graph, ctypes.c_ulonglong(0))
        finally:
            self._call("cuGraphDestroy", graph)
        return ready.value or 0

    def abandon_capture(self, stream: int) -> None:
        """End the recording and discard it; do nothing if there is none."""
        graph = c_void_p()
        self.library.cuStreamEndCapture(c_void_p(stream), byref(graph))
        if graph.value:
            self._call("cuGraphDestroy", graph)

    def launch_graph(self, graph: int, stream: int) -> None:
        """Launch a recorded graph."""
        self._call("cuGraphLaunch", c_void_p(graph), c_void_p(stream))

    def free_graph(self, graph: int) -> None:
        """Free a recorded graph."""
        self._call("cuGraphExecDestroy", c_void_p(graph))


def library_of_driver() -> Any:
    """Load the driver's library. Raises DeviceError, which says what is missing and what to do."""
    for name in DRIVER_LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.cuGetErrorString.argtypes = (c_int, POINTER(c_char_p))
        return library
    raise DeviceError(f"there is no NVIDIA driver on this machine ({DRIVER_LIBRARIES[0]}): install it, or only compile, as for an H100 "
                      "with SVOD_DEVICE=CUDA:sm_90")
