"""What backends of devices with groups of threads have in common: how kernels are scheduled, and what a state costs."""
from __future__ import annotations

from svod.compile.backend import Backend
from svod.compile.plan.object_cache import ObjectCache
from svod.core.cost.cost import Cost
from svod.core.cost.groups.group_cost import group_cost, group_work
from svod.core.cost.groups.group_sketch import group_heuristic, group_sketches
from svod.core.cost.work import StageWork
from svod.core.kernel.scheduler import Scheduler


class GroupBackend(Backend):
    """A device with memory of its own that launches grids of groups."""

    reads_host_memory = False

    def start(self, cache: ObjectCache) -> None:
        """Queues need nothing that takes time to load."""

    def cost(self, state: Scheduler) -> Cost:
        return group_cost(state)

    def work(self, state: Scheduler) -> list[StageWork]:
        return group_work(state)

    def heuristic(self, state: Scheduler) -> Scheduler:
        return group_heuristic(state)

    def sketches(self, state: Scheduler) -> list[Scheduler]:
        return group_sketches(state)
