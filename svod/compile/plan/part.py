"""The part of a plan that one device has: the queue of its kernels, the memory that they share, and the tensors' memory that they use.

    a device that reads the host's memory    addresses are those of arrays; nothing is copied
    any other                                addresses are those of Buffers' memory there: copied before a run, if it is newer on the host

Most plans have one part. In a plan with several, the queue of one device, the plan's, makes the lists of launches; kernels of other
devices, copies between devices and functions of Python are items between them.
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from svod.compile.backend import LaunchQueue, backend_named
from svod.compile.plan.host_item import Elsewhere, HostProgram
from svod.compile.plan.memory_planner import BufferPlacement, plan_memory
from svod.compile.plan.plan_parts import PlanBuffer, PreparedKernel, Variant, address_of
from svod.core.graph.buffer import PIECE, Array, Buffer, Memory, aligned_empty, give_back, streams_of
from svod.core.graph.copies import noted
from svod.core.ir.dtype import dtypes
from svod.core.machine.target import HOST


class Part:
    """A device of a plan. `is_remote`: it does not read the host's memory. `queue`: there is none where it runs no kernels."""

    def __init__(self, device: str) -> None:
        self.device, self.backend = device, backend_named(device)
        self.is_remote = not self.backend.reads_host_memory
        self.queue: LaunchQueue | None = None
        self.held: dict[int, Buffer] = {}           # the plan's number of a buffer → the Buffer
        self.shared: Memory | None = None           # memory of intermediates and temporaries of one run
        self.kept: Memory | None = None             # memory of temporaries that outlive a run
        self.offsets: Mapping[int, int] = {}        # number → offset in `shared`, in bytes
        self.shared_bytes = 0
        self._memories: dict[int, Memory] = {}      # memory of each of `held`, alive as long as queues have its address
        self._new: set[int] = set()                 # numbers of `held` that were not loaded yet
        self._variants: dict[Variant, Variant] = {}

    # -- kernels ------------------------------------------------------------------------------------
    def make_queue(self, kernels: Sequence[PreparedKernel], variants: Sequence[Variant], addresses: Sequence[int], main: str,
                   threads: int | None) -> LaunchQueue:
        """Make the queue of those kernels that are of this device; `main`: the device of kernels that name none. The others take their
        places as items that somebody else runs, so that the numbers of all kernels are the plan's."""
        own = [k if (k.device or main) == self.device else elsewhere(k) for k in kernels]
        if all(o is k for o, k in zip(own, kernels, strict=True)):
            self._variants = {v: v for v in variants}
        else:
            self._variants = {v: Variant(v.buckets, v.kernels, tuple([own[i] for i in v.kernels])) for v in variants}
        self.queue = self.backend.queue(own, list(self._variants.values()), addresses, threads)
        return self.queue

    def variant(self, variant: Variant) -> Variant:
        """A variant of the plan as the queue knows it."""
        return self._variants[variant]

    # -- memory of the plan's own -------------------------------------------------------------------
    def allocate(self, placement: BufferPlacement, kept: Mapping[int, int]) -> tuple[dict[int, int], int]:
        """Allocate what intermediates share, and `kept` (bytes by number). The address of each, and the bytes that are kept."""
        always = plan_memory(kept, dict.fromkeys(kept, 0), dict.fromkeys(kept, 0), "disabled")
        self.shared_bytes, self.offsets = placement.total, placement.offsets
        self.shared = self.backend.allocate(placement.total) if placement.total else None
        self.kept = self.backend.allocate(always.total, touch=False) if always.total else None      # phases that run once fill it
        addresses = {}
        for memory, places in ((self.shared, placement), (self.kept, always)):
            for number, offset in places.offsets.items():
                addresses[number] = offset + (memory.address if memory is not None else 0)
        return addresses, always.total

    def allocate_again(self) -> dict[int, int]:
        """Allocate what was released. The address of each number."""
        self.shared = memory = self.backend.allocate(self.shared_bytes)
        return {number: memory.address + offset for number, offset in self.offsets.items()}

    # -- tensors' memory, on a device that does not read the host's ----------------------------------
    def hold(self, number: int, buffer: Buffer, *, content: bool = False) -> int:
        """Use a Buffer. Returns the address of its memory here. `content` False: it is loaded later."""
        memory = self._memories[number] = buffer.memory_on(self.backend, content=content)
        self.held[number] = buffer
        if not content:
            self._new.add(number)
        return memory.address

    def load(self, numbers: Iterable[int] | None, bind: Callable[[int, int], None]) -> None:
        """Have the content of Buffers here; None: of those that were not loaded yet. Calls `bind` with a number and an address where there
        was other memory before. What is begun then comes after what other libraries do with memory of this part."""
        for stream in self.streams:
            self.backend.follow(stream)
        for number in list(self._new) if numbers is None else self.held.keys() & numbers:
            memory = self.held[number].memory_on(self.backend)
            if memory is not self._memories[number]:
                self._memories[number] = memory
                bind(number, memory.address)
            self._new.discard(number)

    def note_written(self, numbers: Iterable[int], *, copy: bool) -> None:
        """A run has written Buffers; see `Buffer.written_on`."""
        for number in self.held.keys() & numbers:
            self.held[number].written_on(self.backend, copy=copy)

    @property
    def streams(self) -> set[int | None]:
        """The streams on which other libraries use memory of this part; None: one that is not known."""
        return streams_of(self.held.values())

    def lead(self) -> None:
        """Let what other libraries do from now on with memory of this part come after what was begun here."""
        for stream in self.streams:
            self.backend.lead(stream)

    def release(self, numbers: Iterable[int]) -> None:
        """Let go of Buffers."""
        for number in list(self.held.keys() & numbers):
            del self.held[number], self._memories[number]
            self._new.discard(number)

    def call(self, function: HostProgram, addresses: Sequence[int], sizes: Sequence[int], written: Sequence[int],
             values: Mapping[str, int]) -> None:
        """Call a function of Python on copies of device memory, by slot, and copy the slots back that it writes."""
        arrays = [np.empty(nbytes, np.uint8) for nbytes in sizes]
        for array, address in zip(arrays, addresses, strict=True):
            with noted(self.backend.label, HOST, array.nbytes, self.backend):
                self.backend.copy_out(address_of(array), address, array.nbytes)
        function.run([address_of(a) for a in arrays], arrays, values)
        for slot in written:
            with noted(HOST, self.backend.label, arrays[slot].nbytes, self.backend):
                self.backend.copy_in(addresses[slot], address_of(arrays[slot]), arrays[slot].nbytes)


def elsewhere(kernel: PreparedKernel) -> PreparedKernel:
    """A kernel as a queue that does not run it has it: with its buffers and temporaries, and without phases."""
    return replace(kernel, loaded=Elsewhere(), spec=replace(kernel.spec, phases=()))


def buffer_over(array: Array) -> Buffer:
    """The bytes of an array that others than svod write to."""
    buffer = Buffer(dtypes.uint8, array.nbytes, array=array.reshape(-1).view(np.uint8))
    buffer.shared = True
    return buffer


def copy_between(to: Part, address: int, source: Part, source_address: int, nbytes: int, read: Array | None) -> None:
    """Copy from the memory of one device to that of another: directly, where one reaches the other, else by the host's memory, in pieces.
    One of them, or both, may be the host, whose memory files are mapped to. `read`: the array of the host that the source lies in, if it is
    one; what was read of a file is given back."""
    if to.is_remote and source.is_remote and to.backend.copy_from(address, source.backend, source_address, nbytes):
        return
    piece = aligned_empty(min(nbytes, PIECE), dtypes.uint8) if to.is_remote and source.is_remote else None
    given = read.reshape(-1).view(np.uint8)[source_address - address_of(read):] if read is not None else None
    for start in range(0, nbytes, PIECE):
        size = min(PIECE, nbytes - start)
        if piece is not None:
            source.backend.copy_out(address_of(piece), source_address + start, size)
            to.backend.copy_in(address + start, address_of(piece), size)
        elif to.is_remote:
            to.backend.copy_in(address + start, source_address + start, size)
        elif source.is_remote:
            source.backend.copy_out(address + start, source_address + start, size)
        else:
            ctypes.memmove(address + start, source_address + start, size)
        if given is not None:
            give_back(given[start:start + size])


def array_at(address: int, nbytes: int) -> Array:
    """The bytes at an address of the host."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)) if nbytes else np.empty(0, np.uint8)


def devices_of(kernels: Iterable[PreparedKernel], buffers: Iterable[PlanBuffer], main: str) -> list[str]:
    """The devices of a plan, the main one first."""
    return list(dict.fromkeys([main, *(k.device or main for k in kernels), *(b.device or main for b in buffers)]))


