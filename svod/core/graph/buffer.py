"""Storage of BUFFER nodes: a flat NumPy array, memory of a device, or both. Each is allocated when first asked for.

    buffer.array                the content on the host, copied from the device if it is newer there
    buffer.memory_on(space)     the content on a device, copied there if it is newer on the host
    buffer.written_on(space)    kernels wrote it there: the host's array is older now, and copied only if somebody has it

A Buffer belongs to one BUFFER UOp and lives as long as somebody holds that UOp: a tensor, a plan or a graph that still needs the content
holds the node. Memory that svod allocates begins at a multiple of 64 bytes, a cache line and the widest vector register; memory taken over
from NumPy begins where NumPy put it. A file is mapped (`map_file`) and its parts become buffers without being read.

A device whose kernels read the host's memory needs no copies; it is not a `Space` in this sense.
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

ALIGNMENT = 64
PIECE = 32 << 20        # bytes that are copied to a device at a time: of a mapped file no more than this is in memory

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
    """Memory of a device. It is freed with the object."""

    @property
    def address(self) -> int: ...


class Space(Protocol):
    """The memory of a device that does not read the host's (`svod.compile.backend.Backend`)."""

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
    """The memory of a Buffer on a device. `version`: of the content that was copied there. `ahead`: the host's array is older, or there is
    none. `streams`: those on which another library reads and writes the memory, None: one that is not known."""

    __slots__ = ("ahead", "memory", "space", "streams", "version")

    def __init__(self, space: Space, memory: Memory, streams: Streams = frozenset()) -> None:
        self.space, self.memory, self.streams, self.ahead, self.version = space, memory, streams, bool(streams), -1


_placing = threading.RLock()        # held while contents move between the host and devices
remake_after_fork(sys.modules[__name__], "_placing", threading.RLock)


class Buffer:
    """`size` elements of `dtype`. bfloat16 is held as the uint16 of its bits. `device`: what the graph says; the content of a buffer of the
    CPU may lie on another device too, where it was computed."""

    __slots__ = ("__weakref__", "_address", "_array", "_place", "_source", "closed", "derived", "device", "dtype", "given", "read_only",
                 "shared", "size", "version", "watched")

    def __init__(self, dtype: DType, size: int, device: str = HOST, array: Array | None = None) -> None:
        """Storage over `array` (flat, C-contiguous, of the right type and size; shared, not copied), or none yet.

        Raises DeviceError for an array that does not fit."""
        self.dtype, self.size, self.device = dtype, size, device
        self.read_only = False
        self.closed = ""        # why there is no memory to be had, while there is none; binding an array opens the buffer
        self.version = 0        # number of writes by svod that were noted (`svod.core.graph.changes`)
        self.watched = 0        # number of captures that hold what was computed from the content
        self.given: Array | None = None     # the array of the user's that lies in this memory
        self.derived: weakref.WeakValueDictionary[Any, Any] | None = None       # see `svod.core.graph.derived`
        self.shared = False     # others than svod can write to the memory, and nothing tells
        self._address: int | None = None        # the address of `_array`; None until it is asked for
        self._array: Array | None = None
        self._source: Array | None = None       # bytes to copy the content from when the memory is first asked for
        self._place: _Place | None = None       # the place of the content on a device
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
        """The flat array that is the memory, allocated now (uninitialised) if need be, with the newest content. From now on it is written
        whenever the buffer is. Raises DeviceError for a `closed` buffer."""
        if self._place is not None and self._place.ahead:
            self._fetch()
        if self._array is None:
            if self.closed:
                raise DeviceError(self.closed)
            memory = aligned_empty(self.size, self.dtype)
            if self._source is not None:
                memory.view(np.uint8)[:] = self._source
                give_back(self._source)
                memory.flags.writeable = False
            self._array = memory
        return self._array

    @property
    def address(self) -> int:
        """Address of the first byte."""
        array = self.array
        if self._address is None:
            self._address = int(array.__array_interface__["data"][0])
        return self._address

    def bind(self, array: Array) -> None:
        """Make `array` the memory: a user's array, or a piece of an arena. A read-only array makes the buffer read-only."""
        kind = to_numpy(self.dtype)
        if array.dtype != kind or array.shape != (self.size,) or not array.flags.c_contiguous:
            layout = "" if array.flags.c_contiguous else ", not contiguous"
            raise DeviceError(f"memory for {self.size} elements of {kind}: got {array.dtype} of shape {array.shape}{layout}; "
                              "pass a flat contiguous array of that type and size")
        self._array, self._address, self.derived, self._place = array, None, None, None
        self.read_only = not array.flags.writeable

    def bind_bytes(self, source: Array) -> None:
        """Hold what is in `source`, flat uint8 that lies anywhere: copied when the memory is first asked for, read-only."""
        if source.dtype != np.uint8 or source.shape != (self.nbytes,):
            raise DeviceError(f"the content of {self.nbytes} bytes: got {source.dtype} of shape {source.shape}")
        self._array, self._source, self.read_only, self._place = None, source, True, None

    def close(self, reason: str) -> None:
        """Let go of the host's memory; asking for it is a DeviceError with `reason` until an array is bound, or `open` is called."""
        self._array, self.closed = None, reason

    def open(self, array: Array | None) -> None:
        """Undo `close`, with the host's memory of before."""
        if array is not None:
            self.bind(array)
        else:
            self.closed = ""

    # -- on a device ------------------------------------------------------------------------------
    def place(self, space: Space, memory: Memory, stream: int | None) -> None:
        """Be memory of another library on a device, which uses it on a stream, None: one that is not known. It writes there, so what was
        read of the memory before counts for nothing."""
        self._place, self.shared = _Place(space, memory, frozenset((stream,))), True

    def share_on(self, space: Space, stream: int | None) -> Memory:
        """The memory on a device, which another library can use from now on, on a stream that waits for the work that svod has issued
        there; None: on one that is not known."""
        memory = self.memory_on(space)
        assert self._place is not None
        self._place.streams |= {space.lend(memory, stream)}
        self._place.ahead = True
        return memory

    def memory_on(self, space: Space, *, content: bool = True) -> Memory:
        """The memory on a device, with the newest content. It is copied there unless it is there already; each time, where others than svod
        can write to the array. `content` False: it need not be there yet."""
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
        source = self._source if self._array is None else self._array.view(np.uint8)
        if source is not None:
            with noted(HOST, place.space.label, self.nbytes, place.space):
                for start in range(0, self.nbytes, PIECE):
                    part = source[start:start + PIECE]
                    place.space.copy_in(place.memory.address + start, part.ctypes.data, part.nbytes)
                    give_back(part)
        place.version = self.version

    def written_on(self, space: Space, *, copy: bool = True) -> None:
        """Kernels of the device have written the content. The array on the host, which a user may have, is written too, if there is one.
        `copy` False: it is written when it is next asked for."""
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
        """Drop results computed from the content, and its copy on a device: others may write to the array from now on."""
        self.derived = None
        if self._place is not None and not self._place.ahead:
            self._place.version = -1

    def _fetch(self) -> None:
        """Copy the content to the host."""
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
    """The streams on which other libraries use memory of buffers on a device; None: one that is not known. Asked in each run of a plan."""
    return {stream for b in buffers if (place := b._place) is not None and place.streams for stream in place.streams}


def buffer_of(node: UOp) -> Buffer:
    """Return the storage of a BUFFER node, made (but not allocated) at its first use."""
    buffer: Buffer | None = node.remarks.get("buffer")
    if buffer is None:
        if node.op is not Ops.BUFFER:
            raise DeviceError(f"{node.op.value} has no storage of its own: only a BUFFER does")
        buffer = node.remarks.setdefault("buffer", Buffer(node.dtype, node.arg, node.src[1].arg))
    return buffer


def buffer_from_numpy(array: Array, dtype: DType) -> UOp:
    """A new BUFFER node over `array`'s elements in row-major order, as `dtype`.

    Shares the memory of a C-contiguous array of that type (and then sees later writes to it); copies any other. bfloat16
    takes the uint16 of its bits."""
    own = np.ascontiguousarray(array, dtype=to_numpy(dtype))
    node = graph.buffer(dtype, own.size)
    node.remarks["buffer"] = buffer = Buffer(dtype, own.size, array=own.reshape(-1))
    if own is array or np.may_share_memory(own, array):
        buffer.given, buffer.shared = array, True
    return node


def map_file(path: str | os.PathLike[str]) -> Array:
    """The bytes of a file, mapped: flat uint8, read-only. Nothing is read before it is used, and what was read can be dropped again by the
    system. The file must not be cut short while the array or a buffer over it lives: the system ends a process that reads beyond it.

    Raises DeviceError for what cannot be opened or mapped."""
    try:
        with open(path, "rb") as file:
            empty = os.fstat(file.fileno()).st_size == 0
            raw = np.empty(0, np.uint8) if empty else np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise DeviceError(f"{os.fspath(path)} cannot be mapped: {error}") from error
    raw.flags.writeable = False
    return raw


def give_back(array: Array) -> None:
    """Let the system have the memory of a part of a mapped file that will not be read soon. Later reads get it from the file again.
    Nothing happens for an array that is no part of a read-only mapping."""
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
    """A new, read-only BUFFER node over `size` elements of `dtype` that lie `offset` bytes into `mapped` (what `map_file` gives),
    little-endian. Nothing is copied, unless the elements do not lie at multiples of their size: such a buffer is copied when its memory is
    first asked for.

    The memory is ordinary CPU memory that fills itself from the file, so kernels read it in place; on a `device` DISK:path it is only
    copied from. Raises DeviceError for bytes outside `mapped`."""
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
