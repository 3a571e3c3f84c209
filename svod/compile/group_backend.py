"""The common base of backends of devices with thread groups: scheduling and cost of kernels."""
from __future__ import annotations

from svod.compile.backend import Backend
from svod.compile.plan.object_cache import ObjectCache
from svod.core.cost.cost import Cost
from svod.core.cost.groups.group_cost import group_cost, group_work
from svod.core.cost.groups.group_sketch import group_heuristic, group_sketches
from svod.core.cost.work import StageWork
from svod.core.kernel.scheduler import Scheduler


class GroupBackend(Backend):
    """A device with its own memory that launches grids of thread groups."""

    reads_host_memory = False

    def start(self, cache: ObjectCache) -> None:
        """Do nothing: queues load no code."""

    def cost(self, state: Scheduler) -> Cost:
        return group_cost(state)

    def work(self, state: Scheduler) -> list[StageWork]:
        return group_work(state)

    def heuristic(self, state: Scheduler) -> Scheduler:
        return group_heuristic(state)

    def sketches(self, state: Scheduler) -> list[Scheduler]:
        return group_sketches(state)
