"""All that depends on the code of a plan's kernels: devices with memory and queues, values of variables, bindings, runs. A plan whose
kernels get other code changes to other equipment."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from svod.compile.plan.memory_planner import PlannerMode
from svod.compile.plan.plan_parts import PlanBuffer, PreparedKernel, variants_of
from svod.compile.plan.running.bindings import Bindings
from svod.compile.plan.running.devices import PlanDevices
from svod.compile.plan.running.runs import Runs
from svod.compile.plan.running.values import PlanValues


class Equipment(NamedTuple):
    """The equipment of a plan."""

    every: tuple[PreparedKernel, ...]
    devices: PlanDevices
    values: PlanValues
    bindings: Bindings
    runs: Runs

    @classmethod
    def of(cls, kernels: Sequence[PreparedKernel], buffers: Sequence[PlanBuffer], device: str, threads: int | None,
           planner: PlannerMode) -> Equipment:
        """Allocate the memory of kernels, and make their launches."""
        every = tuple(kernels)
        variants = variants_of(every)
        devices = PlanDevices(every, buffers, variants, device, threads, planner)
        values, bindings = PlanValues(every, devices), Bindings(every, buffers, devices)
        return cls(every, devices, values, bindings, Runs(every, variants, devices, values, bindings))

    def go_on_from(self, before: Equipment) -> None:
        """Take over the bound memory, the variables' values and the state of the runs of the same plan with other code."""
        self.bindings.go_on_from(before.bindings)
        self.values.set(before.values.known())
        self.runs.go_on_from(before.runs)
