"""Timing a part of a kernel: the CPU's form of grid shrinking.

A phase computes iterations begin ≤ i < end of its outermost parallel loops. While screening and racing, a long kernel is timed on a slice
of them, of at least 1 ms, and the time is scaled back. A slice is timed only where its time represents the whole kernel:

* The kernel has one phase, not counting phases that run only once, at prepare. Where one phase computes partial results and another
  combines them, cutting both by the same share would not scale both times alike.
* The slice holds at least four iterations per core. On a target with groups of threads it is whole waves, at least four: as many groups as
  all units of the device run at a time. Less than a wave takes as long as a wave does.
* The slice does not fall into a smaller cache than the whole. Every buffer of a memory-bound kernel may shrink with the slice, so the
  bytes of the slice must stay in the cache level of the whole. A compute-bound kernel (above 16 operations a byte) reuses what it loads;
  for it only a fall below the second level counts.
"""
from __future__ import annotations

import math
import time
from collections.abc import Sequence

from svod.compile.lower.program import PhaseSpec, ProgramSpec
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.resources import PhaseResources
from svod.core.cost.groups.device import device_of, resident_groups
from svod.core.cost.op_count import count_operations
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target

SLICE_SECONDS = 1e-3
WORTH_SLICING = 4e-3             # seconds: shorter kernels are timed whole
TILES_PER_CORE = 4               # least iterations of a slice per core; with groups of threads, least number of waves
COMPUTE_BOUND = 16.0             # operations per byte of the buffers above which a kernel counts as compute-bound
ROUNDED = 6                      # decimals that iteration counts are rounded to, so that a float error never adds an iteration
LEVEL_MARGIN = 1.25              # a slice exceeds a cache only if its bytes are this many times the cache's


def _only_phase(spec: ProgramSpec) -> int | None:
    """The index of the only phase that runs with every call; None if there are several such phases."""
    running = [i for i, p in enumerate(spec.phases) if not p.once]
    return running[0] if len(running) == 1 else None


def least_fraction(kernel: Kernel, target: Target) -> float:
    """The smallest fraction of a kernel whose buffers are in the same cache level as the whole kernel's buffers; 1 if no smaller one is."""
    size = kernel.nbytes
    levels = [target.l1, target.l2]
    if count_operations(kernel.ast).flops < COMPUTE_BOUND * size:
        levels.append(target.l3)
    below = max((level for level in levels if level and size > level), default=0)
    return min(1.0, LEVEL_MARGIN * below / size) if size else 1.0


def wave_of(phase: PhaseSpec, target: Target, resources: Sequence[PhaseResources]) -> int:
    """Iterations of a phase that run at the same time on all units of a target with groups of threads. `resources`: one entry for each
    phase of the program. Where they do not say how many groups a unit holds, registers are assumed not to limit it. A software driver
    runs one group on each core."""
    device = device_of(target)
    if device.is_software:
        return device.units
    threads, resident = next(((r.threads, r.resident) for r in resources if r.symbol == phase.symbol), (phase.block, None))
    if resident is None:
        resident = resident_groups(device, threads, 1, phase.shared_bytes)
    return device.units * resident * (threads // phase.block)


def least_part(kernel: Kernel, spec: ProgramSpec, target: Target, incumbent: float | None, plan: ExecutionPlan,
               resources: Sequence[PhaseResources] = ()) -> float:
    """The fraction of the kernel to time: 1 for all of it. `incumbent`: seconds of the best so far, or None. `resources`: see `wave_of`.

    With an incumbent the part takes about 1 ms at the incumbent's speed. Without one, slices are run, doubling, until one takes 1 ms: a
    kernel without opts may need minutes for a whole run."""
    number = _only_phase(spec)
    if number is None or (incumbent is not None and incumbent < WORTH_SLICING):
        return 1.0
    phase = spec.phases[number]
    wave = wave_of(phase, target, resources) if target.has_groups else 0

    def whole(part: float) -> float:
        """Round a fraction of the kernel up to whole waves."""
        return math.ceil(round(part * phase.extent / wave, ROUNDED)) * wave / phase.extent if wave else part
    least = whole(max(least_fraction(kernel, target), TILES_PER_CORE * (wave or phase.threads) / phase.extent))
    if least > 0.5:
        return 1.0
    if incumbent is not None:
        part = whole(max(least, min(1.0, SLICE_SECONDS / incumbent)))
        return 1.0 if wave and part > 0.5 else part
    part = least
    while part <= 0.5:
        share = part_of_run(plan, spec, part)
        started = time.perf_counter()
        seconds = plan.repeat_timed(1, cold=True)
        if seconds is None:
            seconds = time.perf_counter() - started
        if seconds >= SLICE_SECONDS:
            return share if seconds / share >= WORTH_SLICING else 1.0
        part = whole(part * (2 if seconds <= 0 else max(2.0, min(16.0, 1.2 * SLICE_SECONDS / seconds))))
    return 1.0


def part_of_run(plan: ExecutionPlan, spec: ProgramSpec, part: float) -> float:
    """Let `plan` run about `part` of its kernel, which has one phase that can be cut. Returns the exact share it then runs."""
    phase = _only_phase(spec)
    assert phase is not None
    extent = spec.phases[phase].extent
    count = max(1, min(extent, math.ceil(round(extent * part, ROUNDED))))
    # the slice is from the middle, because the first and the last iterations handle borders
    begin = (extent - count) // 2
    plan.set_range(0, phase, begin, begin + count)
    return count / extent


def full_run(plan: ExecutionPlan, spec: ProgramSpec) -> None:
    """Let `plan` run all of its kernel."""
    for i, phase in enumerate(spec.phases):
        plan.set_range(0, i, 0, phase.extent)
