"""Packed constants: constants stored in the order in which a kernel reads them, by the phases that run once. All plans with the same
packing share one copy."""
from __future__ import annotations

import threading
from collections.abc import Sequence

from svod.compile.backend import Backend
from svod.compile.plan.memory_planner import plan_memory
from svod.compile.plan.plan_parts import PlanBuffer, PreparedKernel
from svod.core.graph.derived import find_derived, remember_derived
from svod.system.forksafe import remake_after_fork


class PackedMemory:
    """The temporaries of a kernel that its once phases fill, at `addresses`, with `nbytes` in total. Hold `lock` to fill them, unless they
    are `filled` already."""

    def __init__(self, backend: Backend, sizes: dict[int, int]) -> None:
        places = plan_memory(sizes, dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0), "disabled")
        self.nbytes = places.total
        self._memory = backend.allocate(places.total, touch=False)
        self.addresses = {temp: self._memory.address + offset for temp, offset in places.offsets.items()}
        self.filled = False
        self.lock = threading.Lock()
        remake_after_fork(self, "lock", threading.Lock)


def packed_memory(kernel: PreparedKernel, buffers: Sequence[PlanBuffer], backend: Backend,
                  device: str) -> PackedMemory | None:
    """Return the memory that a kernel shares with kernels of other plans that pack the same constants in the same way; None if it is
    unknown whether the constants are the same."""
    packing = kernel.packing
    if packing is None:
        return None
    storages = [s for slot in packing.slots if (s := buffers[kernel.buffers[slot]].storage) is not None]
    if len(storages) < len(packing.slots):
        return None
    offsets = tuple(kernel.offsets[slot] for slot in packing.slots) if kernel.offsets else ()
    what = "packed", device, packing.digest, offsets
    found: PackedMemory | None = find_derived(storages, what)
    if found is None:
        found = remember_derived(storages, what, PackedMemory(backend, {t: kernel.spec.temps[t] for t in packing.temps}))
    return found
