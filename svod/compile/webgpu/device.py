"""An adapter's device in this process: its memory and copies.

An address is a number that svod assigns: each device has a range of addresses in which its buffers get consecutive parts. So plans can
compute with addresses and offsets (`svod.compile.plan`) although WebGPU has only buffer objects. No address is used twice in a process: a
device that replaces a lost one continues after its addresses, and adapters have separate ranges.

    allocate(1000) → address a        a + 256 → (buffer, 256)
"""
from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from svod.compile.webgpu.adapter import LIMITS, WISHED, adapter, adapter_target, device_name, package
from svod.errors import DeviceError, LaunchError, SvodError

# bytes: minimum distance between the addresses of two buffers, so that addresses beyond the end of a buffer are unused
ADDRESS_STEP_BYTES = 1 << 20
ADAPTER_ADDRESSES = 1 << 52               # number of addresses of an adapter; addresses below this are invalid
STAGING = 32 << 20          # maximum bytes of the staging buffer, and of each piece of a copy
MOST_BEGUN = 64             # maximum number of submissions without a wait: this limits the memory that they keep alive
BUFFER_UNIT_BYTES = 16      # sizes of buffers are multiples of it, so the last vector of four elements is complete


class GpuMemory:
    """Memory of the device, freed when the object is deleted."""

    def __init__(self, device: WebGpuDevice, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self.address = device.make(nbytes)
        weakref.finalize(self, device.free, self.address)


class WebGpuDevice:
    """A wgpu device of the adapter with a number. Its addresses begin at `first`; `before`: why the adapter's previous device, which had
    the lower addresses, was lost. `lost`: why this device cannot be used any more."""

    def __init__(self, number: int = 0, lost: WebGpuDevice | None = None) -> None:
        wgpu = package()
        self.number, self.name = number, device_name(number)
        self.adapter = adapter(number)
        wished = [f for f in WISHED if f in self.adapter.features]
        limits = {name: self.adapter.limits[name] for name in LIMITS if name in self.adapter.limits}
        try:
            self.wgpu = self.adapter.request_device_sync(required_features=wished, required_limits=limits)
        except Exception as error:      # wgpu raises exceptions of several classes
            raise DeviceError(f"{self.name}: the adapter {self.adapter.info['device']} gives no device: {error_text(error)}") from error
        self.queue = self.wgpu.queue
        self.has_timestamps = "timestamp-query" in wished
        self.alignment = int(self.wgpu.limits["min-storage-buffer-offset-alignment"])
        self.most_bound = int(self.wgpu.limits["max-storage-buffer-binding-size"])
        self.most_bindings = int(self.wgpu.limits["max-storage-buffers-per-shader-stage"])
        self.tick = self._seconds_per_tick()
        self.process = os.getpid()
        self.lost = ""
        self._begun: dict[str, None] = {}       # names of kernels that were submitted and may not have finished
        self._submissions = 0                   # number of submissions since the last wait
        self.lock = threading.Lock()            # lets one read at a time use the staging buffer
        self._usage = wgpu.BufferUsage
        self.first: int = (number + 1) * ADAPTER_ADDRESSES if lost is None else lost.next + ADDRESS_STEP_BYTES
        self.before = "" if lost is None else lost.lost
        self.next: int = self.first
        self._table = threading.Lock()          # guards the lists of buffers
        self._unused: deque[int] = deque()      # addresses of buffers to be freed
        self._starts: list[int] = []
        self._buffers: list[tuple[Any, int]] = []       # (buffer, bytes), in the order of `_starts`
        self._staging: Any = None
        self._layouts: dict[int, Any] = {}
        self._filling: Any = None               # buffer that is cleared between runs to fill the L2 cache
        self.nothing = (self.wgpu.create_buffer(size=4096, usage=wgpu.BufferUsage.UNIFORM),      # zeros, as bounds of empty launches
                        self.wgpu.create_buffer(size=256, usage=wgpu.BufferUsage.STORAGE))

    def _seconds_per_tick(self) -> float:
        """Return the unit of timestamps in seconds; wgpu reports it in nanoseconds."""
        api = importlib.import_module("wgpu.backends.wgpu_native._api")
        period = getattr(api.libf, "wgpuQueueGetTimestampPeriod", None)
        return 1e-9 * (float(period(self.queue._internal)) if period is not None else 1.0)

    def bind_group_layout(self, storages: int) -> Any:
        """Return the binding layout of a launch's numbers and `storages` buffers. (The layout that wgpu derives lacks bindings that are not
        read.)"""
        layout = self._layouts.get(storages)
        if layout is None:
            types = ["uniform", *["storage"] * storages]
            layout = self._layouts[storages] = self.wgpu.create_bind_group_layout(entries=[
                {"binding": n, "visibility": package().ShaderStage.COMPUTE, "buffer": {"type": t}} for n, t in enumerate(types)])
        return layout

    def reopened(self) -> WebGpuDevice:
        """Return the current device: this one, or its replacement if it was lost. Raises DeviceError in a fork of the process that opened
        it."""
        self.check_process()
        return WebGpuDevice(self.number, lost=self) if self.lost else self

    def check_process(self) -> None:
        """Raise DeviceError in a fork of the process that opened the device: drivers would wait there for threads that no longer exist."""
        if self.process != os.getpid():
            raise DeviceError(f"{self.name} was opened before this process was forked, and its driver does not survive that: start "
                              "processes with the method 'spawn' or 'forkserver'")

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Turn errors of wgpu inside the context into LaunchError, and record whether the device was lost. `what`: the operation, for
        the message."""
        self.check_process()
        if self.lost:
            raise LaunchError(f"this plan's device {self.name} is gone: {self.lost}; prepare the plan again")
        try:
            yield
        except SvodError:
            raise
        except Exception as error:      # wgpu raises exceptions of several classes
            again = "; prepare the plan again, on a device that is opened anew" if self.is_lost_by(error) else ""
            begun = ", ".join(name for name in list(self._begun)[:8] if name not in what)
            raise LaunchError(f"{self.name} failed while {what}{f', after {begun} had begun' if begun else ''}: {error_text(error)}{again}"
                              ) from error

    def is_lost_by(self, error: BaseException) -> bool:
        """Whether an error of wgpu says that the device is lost; records it."""
        if "lost" in str(error).lower():
            self.lost = error_text(error)
        return bool(self.lost)

    # -- work -------------------------------------------------------------------------------------
    def submit(self, encoder: Any, kernels: Sequence[str]) -> None:
        """Submit the launches of kernels in an encoder."""
        self._begun.update(dict.fromkeys(kernels))
        self._submissions += 1
        self.queue.submit([encoder.finish()])
        if self._submissions > MOST_BEGUN:
            self.wait()

    def wait(self) -> None:
        """Wait for all submitted work. Raises LaunchError for its errors."""
        with self.trying("its work was waited for"):
            self.wgpu._poll_wait()
            self._settle()

    def _settle(self) -> None:
        """Record that all submitted work is done."""
        self._begun.clear()
        self._submissions = 0

    # -- memory -----------------------------------------------------------------------------------
    def make(self, nbytes: int) -> int:
        """Allocate a buffer and return its address. Raises LaunchError if the device has no room for it."""
        size = max(BUFFER_UNIT_BYTES, -(-nbytes // BUFFER_UNIT_BYTES) * BUFFER_UNIT_BYTES)
        most = int(self.wgpu.limits["max-buffer-size"])
        if size > most:
            raise LaunchError(f"{nbytes} bytes of memory on {self.name}: a buffer of this device has at most {most} bytes; use smaller "
                              "tensors, or the CPU (unset SVOD_DEVICE)")
        usage = self._usage.STORAGE | self._usage.COPY_SRC | self._usage.COPY_DST
        with self._table:
            self._destroy_unused()
            with self.trying(f"it was asked for {nbytes} bytes of memory"):
                buffer = self.wgpu.create_buffer(size=size, usage=usage)
            address = self.next
            self.next += -(-(size + 1) // ADDRESS_STEP_BYTES) * ADDRESS_STEP_BYTES
            self._starts.append(address)
            self._buffers.append((buffer, size))
        return address

    def free(self, address: int) -> None:
        """Mark a buffer to be freed, without waiting: the garbage collector may call this in the thread that holds the lock of the
        lists."""
        if self.process != os.getpid():         # a forked child has no such buffer
            return
        self._unused.append(address)
        if self._table.acquire(blocking=False):
            try:
                self._destroy_unused()
            finally:
                self._table.release()

    def _destroy_unused(self) -> None:
        while self._unused:
            number = bisect_right(self._starts, self._unused.popleft()) - 1
            buffer, _ = self._buffers.pop(number)
            self._starts.pop(number)
            if not self.lost:
                buffer.destroy()

    def find(self, address: int) -> tuple[Any, int, int]:
        """Find the buffer at an address: (buffer, offset, bytes from there to its end). Raises LaunchError if there is none."""
        with self._table:
            number = bisect_right(self._starts, address) - 1
            if number >= 0:
                buffer, size = self._buffers[number]
                offset = address - self._starts[number]
                if offset <= size:
                    return buffer, offset, size - offset
        if address < self.first:
            raise LaunchError(f"values on {self.name} are gone with its device ({self.before}): compute them again from tensors of the CPU")
        raise LaunchError(f"the address {address:#x} is no memory of {self.name}")

    # -- copies -----------------------------------------------------------------------------------
    def write(self, address: int, host: int, nbytes: int) -> None:
        """Copy from the host's memory."""
        if not nbytes:
            return
        buffer, offset, _ = self.find(address)
        before, after = offset % 4, -(offset + nbytes) % 4
        if before or after:         # whole words are written: their other bytes are read first
            words = bytearray(self.bytes_at(address - before, before + nbytes + after))
            words[before:before + nbytes] = ctypes.string_at(host, nbytes)
            with self.trying("values were copied to it"):
                self.queue.write_buffer(buffer, offset - before, words)
            return
        with self.trying("values were copied to it"):
            for at in range(0, nbytes, STAGING):
                part = (ctypes.c_uint8 * min(STAGING, nbytes - at)).from_address(host + at)
                self.queue.write_buffer(buffer, offset + at, part)

    def read(self, host: int, address: int, nbytes: int) -> None:
        """Copy to the host's memory, after all work submitted before."""
        if not nbytes:
            return
        _, offset, _ = self.find(address)
        before, after = offset % 4, -(offset + nbytes) % 4
        if before or after:
            ctypes.memmove(host, self.bytes_at(address - before, before + nbytes + after)[before:before + nbytes], nbytes)
            return
        with self.lock, self.trying("values were copied from it"):
            for at in range(0, nbytes, STAGING):
                self._read_part(host + at, address + at, min(STAGING, nbytes - at))
            self._settle()

    def copy(self, address: int, source: int, nbytes: int) -> bool:
        """Start a copy within the device. Returns False, without copying, unless it consists of whole words and two different buffers."""
        (buffer, offset, _), (read, first, _) = self.find(address), self.find(source)
        if buffer is read or offset % 4 or first % 4 or nbytes % 4:
            return False
        with self.trying("values were copied on it"):
            encoder = self.wgpu.create_command_encoder()
            encoder.copy_buffer_to_buffer(read, first, buffer, offset, nbytes)
            self.submit(encoder, ())
        return True

    def bytes_at(self, address: int, nbytes: int) -> bytes:
        """Read the bytes of whole words."""
        made = ctypes.create_string_buffer(nbytes)
        self.read(ctypes.addressof(made), address, nbytes)
        return made.raw

    def _read_part(self, host: int, address: int, nbytes: int) -> None:
        buffer, offset, _ = self.find(address)
        staging, self._staging = self._staging, None        # not used again if Ctrl-C leaves it mapped
        if staging is None or staging.size < nbytes:
            size = min(STAGING, 1 << max(16, (nbytes - 1).bit_length()))
            staging = self.wgpu.create_buffer(size=size, usage=self._usage.MAP_READ | self._usage.COPY_DST)
        encoder = self.wgpu.create_command_encoder()
        encoder.copy_buffer_to_buffer(buffer, offset, staging, 0, nbytes)
        self.queue.submit([encoder.finish()])
        staging.map_sync("READ", 0, nbytes)
        view = staging.read_mapped(0, nbytes, copy=False)
        ctypes.memmove(host, ctypes.addressof(ctypes.c_uint8.from_buffer(view)) if not view.readonly else bytes(view), nbytes)
        staging.unmap()
        self._staging = staging

    def fill_cache(self, encoder: Any, buffer: Any, offset: int) -> None:
        """Fill the L2 cache with other data, by writing twice its size, before the following work in an encoder that uses `buffer`. Only
        commands that use the same memory wait for each other, so one word is copied to `offset` in `buffer`, which nothing reads."""
        if self._filling is None:
            usage = self._usage.COPY_SRC | self._usage.COPY_DST
            self._filling = self.wgpu.create_buffer(size=2 * adapter_target(self.number).l2, usage=usage)
        encoder.clear_buffer(self._filling)
        encoder.copy_buffer_to_buffer(self._filling, 0, buffer, offset, BUFFER_UNIT_BYTES)


def error_text(error: BaseException) -> str:
    """Return the text of a wgpu error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and line.strip() not in ("Validation Error", "Caused by:")]
    return " ".join(lines)[:2000] or type(error).__name__


def trusted_module(made: WebGpuDevice, code: str) -> Any:
    """Make a shader module without checks of bounds and loops, if wgpu supports it: LINEAR never accesses memory out of bounds."""
    api = importlib.import_module("wgpu.backends.wgpu_native._api")
    create = getattr(api.libf, "wgpuDeviceCreateShaderModuleTrusted", None)
    if create is None:
        return made.wgpu.create_shader_module(code=code)
    ffi = api.ffi
    source = api.new_struct_p("WGPUShaderSourceWGSL *", code=api.to_c_string_view(code))
    source[0].chain.next = ffi.NULL
    source[0].chain.sType = api.lib.WGPUSType_ShaderSourceWGSL
    described = api.new_struct_p("WGPUShaderModuleDescriptor *", nextInChain=ffi.cast("WGPUChainedStruct *", source),
                                 label=api.to_c_string_view(""))
    return api.GPUShaderModule("", create(made.wgpu._internal, described, 0), made.wgpu)
