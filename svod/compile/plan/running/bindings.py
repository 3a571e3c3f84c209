"""The memory of a plan's inputs and outputs: the memory given when the plan was made, or memory bound since."""
from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from svod.compile.plan.part import array_at, buffer_over
from svod.compile.plan.plan_parts import PlanBuffer, PreparedKernel, address_of, check_array, is_shared, written_by
from svod.compile.plan.running.devices import PlanDevices
from svod.core.graph.buffer import Buffer, aligned_empty
from svod.core.ir.dtype import dtypes
from svod.errors import LaunchError


class Bindings:
    """The memory that is bound to a plan. `buffers`: the plan's buffers, by number. `arrays`: the arrays bound later, kept alive here.
    `unbound`: the numbers of the buffers that kernels use and that have no memory yet. `bindable`: the inputs and outputs. `written`: the
    buffers that a run writes; `carried`: the ones among them that hold state from run to run. `count`: how often memory was bound or
    released, so that a caller can tell whether another one has bound memory since."""

    def __init__(self, kernels: Sequence[PreparedKernel], buffers: Sequence[PlanBuffer], devices: PlanDevices) -> None:
        self.buffers = tuple(buffers)
        self.arrays: dict[int, np.ndarray[Any, Any]] = {}
        self.count = 0
        self.carried: frozenset[int] = frozenset()
        self.bindable = {i for i, b in enumerate(buffers) if b.kind in ("input", "output")}
        self.written = frozenset(index for k in kernels for index in written_by(k))
        self._devices = devices
        used = {index for k in kernels for index in k.buffers}
        self._without_memory = frozenset(i for i in self.bindable & used if not buffers[i].has_memory)
        self.unbound = set(self._without_memory)

    def go_on_from(self, before: Bindings) -> None:
        """Take over the memory that is bound to the same plan with other code."""
        self.buffers, self.arrays, self.carried, self.count = before.buffers, before.arrays, before.carried, before.count + 1
        self._without_memory, self.unbound = before._without_memory, before.unbound
        for index, array in self.arrays.items():
            self._devices.bind(index, address_of(array))

    def array_of(self, index: int) -> np.ndarray[Any, Any] | None:
        """Return the host memory of a buffer, or None."""
        return self.arrays.get(index, self.buffers[index].array)

    def newest(self, index: int) -> np.ndarray[Any, Any] | None:
        """Return the content of a buffer. If a run left it on a device, it is copied to the host."""
        held = self._devices.part_of(index).held.get(index)
        newest = held.array if held is not None else None       # reading `array` updates the user's array
        array = self.array_of(index)
        return newest if array is None else array

    def bind_new(self, index: int, array: np.ndarray[Any, Any], address: int) -> None:
        """Use an array at a known address for an input or output. The caller must ensure that it fits and overlaps no other buffer."""
        devices = self._devices
        if devices.is_local:
            devices.queue.bind(index, address)
        else:
            part = devices.part_of(index)
            over = array_at(address, self.buffers[index].nbytes) if part.is_remote else None
            devices.bind(index, address if over is None else part.hold(index, buffer_over(over)))
        if self.unbound:
            self.unbound.discard(index)
        self.arrays[index] = array
        self.count += 1

    def bind_buffer(self, index: int, buffer: Buffer) -> None:
        """Use a tensor's memory for an input or output, like `bind_new` for arrays."""
        part = self._devices.part_of(index)
        if not part.is_remote:
            self.bind_new(index, buffer.array, buffer.address)
            return
        self.arrays.pop(index, None)
        self._devices.bind(index, part.hold(index, buffer))
        self.unbound.discard(index)
        self.count += 1

    def bind_array(self, index: int, array: np.ndarray[Any, Any]) -> None:
        """Use an array for an input or output. Raises LaunchError if it does not fit, or if it overlaps another buffer and the plan writes
        one of them."""
        if index not in self.bindable:
            raise LaunchError(f"buffer {index} cannot be bound: the plan's inputs and outputs are {sorted(self.bindable)}")
        check_array(index, array, self.buffers[index], index in self.written)
        for i in range(len(self.buffers)):
            held = self.array_of(i)
            if i != index and held is not None and (index in self.written or i in self.written) and is_shared(held, array):
                raise LaunchError(f"buffer {index}: the array lies in memory of buffer {i}, and the plan writes one of them; copy it")
        self.bind_new(index, array, address_of(array))

    def release(self, numbers: Collection[int] = ()) -> None:
        """Release the bound arrays, and the original memory of the inputs and outputs in `numbers`, which must be bound again before the
        next run."""
        self.arrays.clear()
        self.count += 1
        if numbers:
            self.buffers = tuple([replace(b, array=None, storage=None) if i in numbers else b for i, b in enumerate(self.buffers)])
            self._without_memory |= frozenset(numbers)
        self.unbound = set(self._without_memory)
        for part in self._devices.parts.values():
            part.release(self._without_memory)

    def of_replica(self) -> list[PlanBuffer]:
        """Return the buffers of a replica: they share the memory that is only read, and have new memory for what the plan writes."""
        buffers = []
        for index, b in enumerate(self.buffers):
            array, storage = self.array_of(index), self._devices.part_of(index).held.get(index, b.storage)
            if index in self.written and array is not None:
                array, storage = aligned_empty(array.nbytes, dtypes.uint8).view(array.dtype), None
            elif index in self.written and storage is not None:
                storage = Buffer(storage.dtype, storage.size, storage.device)
            buffers.append(replace(b, array=array, storage=storage))
        return buffers
