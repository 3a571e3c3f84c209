"""Storage of BUFFER nodes: a flat NumPy array, memory of a device, or both. Each is allocated at its first use.

    buffer.array                the content on the host, copied from the device if it is newer there
    buffer.memory_on(space)     the content on a device, copied there if it is newer on the host
    buffer.written_on(space)    notes that kernels wrote the content on a device; the host's array is updated if there is one

A Buffer belongs to one BUFFER UOp and lives as long as that UOp: a tensor, a plan or a graph that still needs the content holds the node.
Memory that svod allocates begins at a multiple of 64 bytes, which is a cache line and the widest vector register. Memory of a user's NumPy
array begins at any address. A file is mapped (`map_file`), and parts of it become buffers without being read.

A device whose kernels read the host's memory needs no copies and has no `Space`.
"""
from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from svod.core.graph import graph
from svod.core.graph.allocator import LARGE_ARRAYS, OWN_BLOCK_BYTES
from svod.core.graph.copies import noted
from svod.core.ir.dtype import DType, to_numpy
from svod.core.ir.uop import Ops, UOp
from svod.core.machine.target import HOST
from svod.errors import DeviceError
from svod.system.forksafe import remake_after_fork

ALIGNMENT = 64          # bytes
PIECE = 32 << 20        # bytes that are copied to a device at a time; during the copy, no more than this of a mapped file is in memory

Array = np.ndarray[Any, np.dtype[Any]]


def aligned_empty(size: int, dtype: DType) -> Array:
    """Make an uninitialised flat array of `size` elements, aligned to 64 bytes; large arrays reuse freed memory."""
    kind = to_numpy(dtype)
    if size * kind.itemsize >= OWN_BLOCK_BYTES:
        return LARGE_ARRAYS.allocate(size * kind.itemsize).view(kind)
    raw = np.empty(size * kind.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start:start + size * kind.itemsize].view(kind)


class Memory(Protocol):
    """A block of a device's memory, which is freed when this object is."""

    @property
    def address(self) -> int: ...


class Space(Protocol):
    """The separate memory of a device whose kernels cannot read the host's memory (`svod.compile.backend.Backend`)."""

    @property
    def label(self) -> str: ...
    def allocate(self, nbytes: int, touch: bool = True) -> Memory: ...
    def has_lost(self, memory: Memory) -> bool: ...
    def wait(self) -> None: ...
    def follow(self, stream: int | None) -> None: ...
    def lend(self, memory: Memory, stream: int | None) -> int | None: ...
    def copy_in(self, device: int, host: int, nbytes: int) -> None: ...
    def copy_out(self, host: int, device: int, nbytes: int) -> None: ...


Streams = frozenset[int | None]


class _Place:
    """The memory of a Buffer on a device. `version`: the `Buffer.version` of the content that was last copied there. `ahead`: whether the
    device has the only up-to-date content: the host's array is older, or there is none. `streams`: the streams on which another library
    reads and writes the memory; None in it stands for an unknown stream."""

    __slots__ = ("ahead", "memory", "space", "streams", "version")

    def __init__(self, space: Space, memory: Memory, streams: Streams = frozenset()) -> None:
        self.space, self.memory, self.streams, self.ahead, self.version = space, memory, streams, bool(streams), -1


_placing = threading.RLock()        # held while contents move between the host and devices
remake_after_fork(sys.modules[__name__], "_placing", threading.RLock)


class Buffer:
    """Storage of `size` elements of `dtype`; bfloat16 elements are stored as the uint16 of their bits. `device`: the device that the BUFFER
    node names. The content of a buffer of the CPU may also lie on another device, if it was computed there."""

    __slots__ = ("__weakref__", "_address", "_array", "_place", "closed", "derived", "device", "dtype", "given", "read_only", "shared",
                 "size", "source", "version", "watched")

    def __init__(self, dtype: DType, size: int, device: str = HOST, array: Array | None = None) -> None:
        """Create the storage. `array`: memory to use (flat, C-contiguous, of the right type and size; shared, not copied); None: memory is
        allocated at the first use.

        Raises DeviceError for an array that does not fit."""
        self.dtype, self.size, self.device = dtype, size, device
        self.read_only = False
        self.closed = ""        # reason why the buffer has no memory (`close`); "" for an open buffer
        self.version = 0        # number of writes by svod that were noted (`svod.core.graph.changes`)
        self.watched = 0        # number of captures that hold results computed from the content
        self.given: Array | None = None     # the user's array whose memory this is, if it is one
        self.derived: weakref.WeakValueDictionary[Any, Any] | None = None       # see `svod.core.graph.derived`
        self.shared = False     # whether code outside svod can write to the memory without svod noticing
        self._address: int | None = None        # the address of `_array`; None until the first use of `address`
        self._array: Array | None = None
        # read-only bytes with the content, at any address, which kernels of the CPU read in place and from which `array` is copied
        self.source: Array | None = None
        self._place: _Place | None = None       # the memory on a device, if there is any
        if array is not None:
            self.bind(array)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def is_allocated(self) -> bool:
        return self._array is not None or self._place is not None

    @property
    def is_away(self) -> bool:
        """Whether the content on a device is newer than on the host."""
        return self._place is not None and self._place.ahead

    @property
    def host(self) -> Array | None:
        """The flat array on the host, if there is one; the content on a device may be newer."""
        return self._array

    @property
    def array(self) -> Array:
        """The flat array on the host with the newest content; allocated now (uninitialised) if there is none. From now on every write to
        the buffer updates it. Raises DeviceError for a `closed` buffer."""
        if self._place is not None and self._place.ahead:
            self._fetch()
        if self._array is None:
            with _placing:      # threads that ask at once get one array
                if self._array is None:
                    self._array = self._made()
        return self._array

    def _made(self) -> Array:
        if self.closed:
            raise DeviceError(self.closed)
        memory = aligned_empty(self.size, self.dtype)
        if self.source is not None:
            memory.view(np.uint8)[:] = self.source
            give_back(self.source)
            memory.flags.writeable = False
        return memory

    @property
    def address(self) -> int:
        """Address of the first byte."""
        array = self.array
        if self._address is None:
            self._address = int(array.__array_interface__["data"][0])
        return self._address

    def bind(self, array: Array) -> None:
        """Use `array`, a user's array or a slice of an arena, as the memory. A read-only array makes the buffer read-only."""
        kind = to_numpy(self.dtype)
        if array.dtype != kind or array.shape != (self.size,) or not array.flags.c_contiguous:
            layout = "" if array.flags.c_contiguous else ", not contiguous"
            raise DeviceError(f"memory for {self.size} elements of {kind}: got {array.dtype} of shape {array.shape}{layout}; "
                              "pass a flat contiguous array of that type and size")
        self._array, self._address, self.source, self.derived, self._place = array, None, None, None, None
        self.read_only = not array.flags.writeable

    def bind_bytes(self, source: Array) -> None:
        """Take the content from `source`, a flat uint8 array at any alignment, which is copied when `array` is first asked for. The buffer
        becomes read-only."""
        if source.dtype != np.uint8 or source.shape != (self.nbytes,):
            raise DeviceError(f"the content of {self.nbytes} bytes: got {source.dtype} of shape {source.shape}")
        self._array, self.source, self.read_only, self._place = None, source, True, None

    def close(self, reason: str) -> None:
        """Release the host's memory. Until `bind` or `open` is called, using it raises DeviceError with `reason`."""
        self._array, self.closed = None, reason

    def open(self, array: Array | None) -> None:
        """Undo `close`. `array`: the host's memory that `close` released; None if there was none."""
        if array is not None:
            self.bind(array)
        else:
            self.closed = ""

    # -- on a device ------------------------------------------------------------------------------
    def place(self, space: Space, memory: Memory, stream: int | None) -> None:
        """Use `memory`, which belongs to another library on a device, as the memory of this buffer. `stream`: the stream on which that
        library uses it, None if unknown. The library may write to it at any time, so the buffer counts as `shared` from now on."""
        self._place, self.shared = _Place(space, memory, frozenset((stream,))), True

    def share_on(self, space: Space, stream: int | None) -> Memory:
        """Return the memory on a device, for another library to use from now on. `stream`: the stream on which it uses the memory, None if
        unknown; a known stream waits for the work that svod has issued on the device."""
        memory = self.memory_on(space)
        assert self._place is not None
        self._place.streams |= {space.lend(memory, stream)}
        self._place.ahead = True
        return memory

    def memory_on(self, space: Space, *, content: bool = True) -> Memory:
        """Return the memory on a device. The newest content is copied there unless the device has it; if the buffer is `shared` and no
        capture watches it, it is copied at each call. `content` False: return the memory without copying the content."""
        with _placing:
            place = self._place
            if place is None or place.space is not space or (not place.ahead and space.has_lost(place.memory)):
                if place is not None and place.ahead:
                    self._fetch()
                place = self._place = _Place(space, space.allocate(max(1, self.nbytes)))
            if content and not place.ahead and (place.version != self.version or (self.shared and not self.watched)):
                self._upload(place)
            return place.memory

    def _upload(self, place: _Place) -> None:
        source = self.source if self._array is None else self._array.view(np.uint8)
        if source is not None:
            with noted(HOST, place.space.label, self.nbytes, place.space):
                for start in range(0, self.nbytes, PIECE):
                    part = source[start:start + PIECE]
                    place.space.copy_in(place.memory.address + start, part.ctypes.data, part.nbytes)
                    give_back(part)
        place.version = self.version

    def written_on(self, space: Space, *, copy: bool = True) -> None:
        """Note that kernels of a device have written the content. The host's array, which a user may hold, is updated now if there is one;
        with `copy` False it is updated at its next use."""
        with _placing:
            place = self._place
            if place is None or place.space is not space:
                raise DeviceError(f"{self!r} was written on a device where it does not lie")
            place.ahead = True
            if copy and self._array is not None:
                self._fetch()

    def read(self) -> Array:
        """Return the newest content in a new array. Raises DeviceError for a `closed` buffer."""
        with _placing:
            if self._array is not None or not self.is_away:
                return self.array.copy()
            made = aligned_empty(self.size, self.dtype)
            self._copy_to(made)
            return made

    def forget_copies(self) -> None:
        """Drop cached results computed from the content and its copy on a device, because code outside svod may write to the array from now
        on."""
        self.derived = None
        if self._place is not None and not self._place.ahead:
            self._place.version = -1

    def _fetch(self) -> None:
        """Copy the content from the device to the host's array if the device's content is newer."""
        with _placing:
            place = self._place
            if place is None or not place.ahead:
                return
            array = aligned_empty(self.size, self.dtype) if self._array is None else self._array
            self._copy_to(array)
            self._array = array
            place.ahead, place.version = bool(place.streams), self.version

    def _copy_to(self, array: Array) -> None:
        if self.closed:
            raise DeviceError(self.closed)
        assert self._place is not None
        space = self._place.space
        for stream in self._place.streams:
            space.follow(stream)
        with noted(space.label, HOST, self.nbytes, space):
            space.copy_out(int(array.ctypes.data), self._place.memory.address, self.nbytes)

    def __repr__(self) -> str:
        state = "read-only" if self.read_only else "allocated" if self.is_allocated else "not allocated"
        return f"<Buffer {self.device} {self.dtype.name}[{self.size}] {state}>"


def streams_of(buffers: Iterable[Buffer]) -> set[int | None]:
    """Return the streams on which other libraries use the buffers' memory on a device; None in it stands for an unknown stream. Called in
    each run of a plan."""
    return {stream for b in buffers if (place := b._place) is not None and place.streams for stream in place.streams}


def buffer_of(node: UOp) -> Buffer:
    """Return the storage of a BUFFER node; the Buffer is made at the first call, without allocating memory."""
    buffer: Buffer | None = node.remarks.get("buffer")
    if buffer is None:
        if node.op is not Ops.BUFFER:
            raise DeviceError(f"{node.op.value} has no storage of its own: only a BUFFER does")
        buffer = node.remarks.setdefault("buffer", Buffer(node.dtype, node.arg, node.src[1].arg))
    return buffer


def buffer_from_numpy(array: Array, dtype: DType) -> UOp:
    """Make a BUFFER node of `array`'s elements in row-major order, as `dtype`; for bfloat16 `array` holds the uint16 of the bits.

    A C-contiguous array of that type is shared, so later writes to it are seen; any other array is copied."""
    own = np.ascontiguousarray(array, dtype=to_numpy(dtype))
    node = graph.buffer(dtype, own.size)
    node.remarks["buffer"] = buffer = Buffer(dtype, own.size, array=own.reshape(-1))
    if own is array or np.may_share_memory(own, array):
        buffer.given, buffer.shared = array, True
    return node


def map_file(path: str | os.PathLike[str]) -> Array:
    """Map a file: returns its bytes as a flat, read-only uint8 array. The system reads a page when it is first used, and may drop it again.
    The file must not be truncated while the array or a buffer over it lives: the system kills a process that reads beyond the end.

    Raises DeviceError if the file cannot be opened or mapped."""
    try:
        with open(path, "rb") as file:
            empty = os.fstat(file.fileno()).st_size == 0
            raw = np.empty(0, np.uint8) if empty else np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise DeviceError(f"{os.fspath(path)} cannot be mapped: {error}") from error
    raw.flags.writeable = False
    return raw


def give_back(array: Array) -> None:
    """Tell the system that it may drop the pages of `array`, a part of a mapped file that will not be read soon. A later read loads them
    from the file again. Does nothing for an array that is not part of a read-only mapping."""
    base: Any = array
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, mmap.mmap) or not memoryview(base).readonly or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (first + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        base.madvise(mmap.MADV_DONTNEED, start, length)


def buffer_from_bytes(mapped: Array, offset: int, dtype: DType, size: int, device: str = HOST) -> UOp:
    """Make a read-only BUFFER node over `size` little-endian elements of `dtype`, `offset` bytes into `mapped` (the result of `map_file`).
    Kernels read the mapped memory in place as they read any CPU memory. Elements that are not aligned to their size are copied to memory of
    their own when `array` is first asked for; a buffer on a `device` DISK:path is only a source of copies. Raises
    DeviceError for bytes outside `mapped`."""
    nbytes = size * dtype.itemsize
    if offset < 0 or size < 0 or offset + nbytes > mapped.size:
        raise DeviceError(f"{size} elements of {dtype.name} at byte {offset} end at byte {offset + nbytes}; there are {mapped.size}")
    part = mapped[offset:offset + nbytes]
    node = graph.buffer(dtype, size, device)
    if size and part.ctypes.data % dtype.itemsize:
        buffer_of(node).bind_bytes(part)
        return node
    array = part.view(to_numpy(dtype))
    buffer = buffer_of(node)
    buffer.bind(array)
    buffer.given, buffer.shared = array, True
    return node


def float32_to_bfloat16_bits(values: Array) -> Array:
    """Return the uint16 bits of float32 values rounded to bfloat16, to nearest even; NaN stays NaN."""
    bits = np.asarray(values, np.float32, order="C").view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


def bfloat16_bits_to_float32(bits: Array) -> Array:
    """Return the float32 values of bfloat16 bits; exact."""
    return np.asarray(bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
