"""The toy device as a target: groups of threads, shared memory, short vectors, one core."""
from __future__ import annotations

from svod.core.machine.target import Target

TOY = Target(arch="toy", cpu="toy", features=(), vector_bytes=16, vector_registers=64, l1=1 << 14, l2=1 << 18, l3=1 << 22, threads=1,
             has_non_temporal=False, group_threads=64, shared_bytes=1 << 14, subgroup=4, has_async_copies=True, device="TOY")
