"""A plan's buffers on a device that does not read the host's memory: each array has a copy there.

    execute()    inputs → device, launches, outputs → host         repeat()    launches over what the device has
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from svod.compile.backend import Backend, Memory
from svod.compile.plan.host_callback import HostProgram
from svod.compile.plan.plan_parts import address_of


class Mirror:
    """Copies of host memory, by the index of the buffer."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.copies: dict[int, Memory] = {}
        self.hosts: dict[int, tuple[int, int]] = {}      # (address, bytes)

    def place(self, buffer: int, address: int, nbytes: int) -> int:
        """Let a buffer be `nbytes` at a host address. Returns the address of its copy, whose content stays as it is."""
        if buffer not in self.copies:
            self.copies[buffer] = self.backend.allocate(nbytes)
        self.hosts[buffer] = address, nbytes
        return self.copies[buffer].address

    def load(self, buffers: Iterable[int]) -> None:
        """Copy to the device."""
        for b in self.hosts.keys() & buffers:
            self.backend.copy_in(self.copies[b].address, *self.hosts[b])

    def store(self, buffers: Iterable[int]) -> None:
        """Copy back to the host."""
        for b in self.hosts.keys() & buffers:
            address, nbytes = self.hosts[b]
            self.backend.copy_out(address, self.copies[b].address, nbytes)

    def call(self, function: HostProgram, addresses: Sequence[int], sizes: Sequence[int], written: Sequence[int],
             values: Mapping[str, int]) -> None:
        """Call a function of Python on copies of device memory, by slot, and copy the slots back that it writes."""
        arrays = [np.empty(nbytes, np.uint8) for nbytes in sizes]
        for array, address in zip(arrays, addresses, strict=True):
            self.backend.copy_out(address_of(array), address, array.nbytes)
        function.run([address_of(a) for a in arrays], arrays, values)
        for slot in written:
            self.backend.copy_in(addresses[slot], address_of(arrays[slot]), arrays[slot].nbytes)
