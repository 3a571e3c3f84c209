"""The part of a plan on one device: the queue of its kernels, the memory that they share, and the tensors' memory that they use.

    a device that reads host memory    addresses are addresses of arrays; nothing is copied
    any other device                   addresses are of Buffers' memory on the device, which is updated before a run if the host's is newer

Most plans have one part. In a plan with several parts, the queue of the plan's main device makes the lists of launches; kernels of other
devices, copies between devices and Python functions are host items between them.
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


class DevicePart:
    """A plan's part on one device. `is_remote`: whether the device cannot read host memory. `queue`: None if it runs no kernels."""

    def __init__(self, device: str) -> None:
        self.device, self.backend = device, backend_named(device)
        self.is_remote = not self.backend.reads_host_memory
        self.queue: LaunchQueue | None = None
        self.held: dict[int, Buffer] = {}           # number of a buffer in the plan → the Buffer
        self.shared: Memory | None = None           # memory of intermediates and temporaries of one run
        self.kept: Memory | None = None             # memory of temporaries that outlive a run
        self.offsets: Mapping[int, int] = {}        # index of a buffer or temporary → its offset in `shared`, in bytes
        self.shared_bytes = 0
        self._touch = True                          # whether `shared` takes its page faults when it is allocated
        self._memories: dict[int, Memory] = {}      # memory of each of `held`, kept alive as long as queues use its address
        self._new: set[int] = set()                 # numbers of the `held` Buffers that were not loaded yet
        self._variants: dict[Variant, Variant] = {}

    # -- kernels ------------------------------------------------------------------------------------
    def make_queue(self, kernels: Sequence[PreparedKernel], variants: Sequence[Variant], addresses: Sequence[int], main: str,
                   threads: int | None) -> LaunchQueue:
        """Make the queue of this device's kernels; `main`: the device of kernels that name none. The kernels of other devices are replaced
        by items without phases, so that the numbers of all kernels are the plan's numbers."""
        own = [k if (k.device or main) == self.device else elsewhere(k) for k in kernels]
        if all(o is k for o, k in zip(own, kernels, strict=True)):
            self._variants = {v: v for v in variants}
        else:
            self._variants = {v: Variant(v.buckets, v.kernels, tuple([own[i] for i in v.kernels])) for v in variants}
        self.queue = self.backend.queue(own, list(self._variants.values()), addresses, threads)
        return self.queue

    def variant(self, variant: Variant) -> Variant:
        """Return this device's variant for a variant of the plan."""
        return self._variants[variant]

    # -- the plan's own memory -------------------------------------------------------------------
    def allocate(self, placement: BufferPlacement, kept: Mapping[int, int], *, touch: bool) -> tuple[dict[int, int], int]:
        """Allocate the memory that intermediates share, and the `kept` temporaries (number → bytes). `touch`: whether to touch the pages
        that intermediates share. Returns the address of each, and the total bytes of `kept`."""
        self._touch = touch
        always = plan_memory(kept, dict.fromkeys(kept, 0), dict.fromkeys(kept, 0), "disabled")
        self.shared_bytes, self.offsets = placement.total, placement.offsets
        self.shared = self.backend.allocate(placement.total, touch) if placement.total else None
        # not touched here, because phases that run once fill it
        self.kept = self.backend.allocate(always.total, touch=False) if always.total else None
        addresses = {}
        for memory, places in ((self.shared, placement), (self.kept, always)):
            for number, offset in places.offsets.items():
                addresses[number] = offset + (memory.address if memory is not None else 0)
        return addresses, always.total

    def allocate_again(self) -> dict[int, int]:
        """Allocate the shared memory again after its release. Returns the address by number."""
        self.shared = memory = self.backend.allocate(self.shared_bytes, self._touch)
        return {number: memory.address + offset for number, offset in self.offsets.items()}

    # -- tensors' memory, on a device that cannot read host memory ----------------------------------
    def hold(self, number: int, buffer: Buffer, *, content: bool = False) -> int:
        """Use the memory of a Buffer for the plan's buffer `number`. Returns the address of its memory on this device. `content` False:
        its content is loaded later."""
        memory = self._memories[number] = buffer.memory_on(self.backend, content=content)
        self.held[number] = buffer
        if not content:
            self._new.add(number)
        return memory.address

    def load(self, numbers: Iterable[int] | None, bind: Callable[[int, int], None]) -> None:
        """Bring the content of Buffers to this device; None: of all Buffers not loaded yet. Calls `bind` with the number and the address
        of each Buffer whose memory changed. Operations issued afterwards wait for operations of other libraries on this part's memory."""
        for stream in self.streams:
            self.backend.follow(stream)
        for number in list(self._new) if numbers is None else self.held.keys() & numbers:
            memory = self.held[number].memory_on(self.backend)
            if memory is not self._memories[number]:
                self._memories[number] = memory
                bind(number, memory.address)
            self._new.discard(number)

    def note_written(self, numbers: Iterable[int], *, copy: bool) -> None:
        """Mark Buffers as written by a run; see `Buffer.written_on`."""
        for number in self.held.keys() & numbers:
            self.held[number].written_on(self.backend, copy=copy)

    @property
    def streams(self) -> set[int | None]:
        """The streams on which other libraries use memory of this part; None: an unknown one."""
        return streams_of(self.held.values())

    def lead(self) -> None:
        """Make operations that other libraries issue from now on, on this part's memory, wait for the operations issued here."""
        for stream in self.streams:
            self.backend.lead(stream)

    def release(self, numbers: Iterable[int]) -> None:
        """Stop using the Buffers with these numbers."""
        for number in list(self.held.keys() & numbers):
            del self.held[number], self._memories[number]
            self._new.discard(number)

    def call(self, function: HostProgram, addresses: Sequence[int], sizes: Sequence[int], written: Sequence[int],
             values: Mapping[str, int]) -> None:
        """Call a Python function on host copies of device memory, one per slot, and copy the slots that it writes back."""
        arrays = [np.empty(nbytes, np.uint8) for nbytes in sizes]
        for array, address in zip(arrays, addresses, strict=True):
            with noted(self.backend.label, HOST, array.nbytes, self.backend):
                self.backend.copy_out(address_of(array), address, array.nbytes)
        function.run([address_of(a) for a in arrays], arrays, values)
        for slot in written:
            with noted(HOST, self.backend.label, arrays[slot].nbytes, self.backend):
                self.backend.copy_in(addresses[slot], address_of(arrays[slot]), arrays[slot].nbytes)


def elsewhere(kernel: PreparedKernel) -> PreparedKernel:
    """Make the placeholder for a kernel that another device's queue runs: with its buffers and temporaries, and without phases."""
    return replace(kernel, loaded=Elsewhere(), spec=replace(kernel.spec, phases=()))


def buffer_over(array: Array) -> Buffer:
    """Make a Buffer over the bytes of an array that code outside svod may write."""
    buffer = Buffer(dtypes.uint8, array.nbytes, array=array.reshape(-1).view(np.uint8))
    buffer.shared = True
    return buffer


def copy_between(to: DevicePart, address: int, source: DevicePart, source_address: int, nbytes: int, read: Array | None) -> None:
    """Copy from the memory of one device to another: directly if one can access the other, otherwise through host memory, in pieces. One or
    both may be the host, whose memory may be a mapped file. `read`: the host array that contains the source, if there is one; pages that
    were read from a mapped file are released again."""
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
    """Return an array of the bytes at a host address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)) if nbytes else np.empty(0, np.uint8)


def devices_of(kernels: Iterable[PreparedKernel], buffers: Iterable[PlanBuffer], main: str) -> list[str]:
    """List the devices of a plan, the main one first."""
    return list(dict.fromkeys([main, *(k.device or main for k in kernels), *(b.device or main for b in buffers)]))


