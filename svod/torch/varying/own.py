"""The own plans of single sets of sizes beside one plan of a graph for all sizes (`svod.tracing.own_plans`)."""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from svod.config import PrepareConfig
from svod.prepare import complete_config
from svod.torch.plans import AtenProgram, Plan, make_plan
from svod.torch.weights import Weights
from svod.tracing.own_plans import OwnPlans
from svod.tune.first_forms import has_first_forms

log = logging.getLogger("svod.torch")


class OwnPlansOfGraph:
    """The own plans beside the plan of a program for all sizes, which took so many seconds to prepare."""

    def __init__(self, program: AtenProgram, plan: Plan, config: PrepareConfig | None, prepare_seconds: float) -> None:
        self._own = OwnPlans[Plan](program.name, log, prepare_seconds)
        self.is_due = self._own.is_due
        self._program, self._config = program, config
        self._copied = [s.argument for s in plan.sources if s.order is None]    # the arguments with sizes that vary are among them

    @property
    def plans(self) -> list[Plan]:
        return self._own.plans

    def run(self, plan: Plan, weights: Weights, given: Sequence[Any], values: Mapping[Any, int]) -> list[Any]:
        """Run a call with `plan`, the plan for all sizes, or with the own plan for its sizes. `weights`: those of the plan."""
        def run(one: Plan | None) -> list[Any]:
            weights.turn_to(one or plan, None)
            return plan.run(given, None, values) if one is None else one.run(given)
        return self._own.run(values, tuple([given[i].stride() for i in self._copied]), run, lambda: self._maker(plan, weights, given))

    def _maker(self, plan: Plan, weights: Weights, given: Sequence[Any]) -> Callable[[], Plan | None]:
        """The function that makes the plan for the sizes of a call. It keeps no argument of these sizes."""
        like = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) if i in self._copied else t for i, t in enumerate(given)]
        constants = dict(zip(plan.weights, weights.tensors, strict=True))

        def make() -> Plan | None:
            with torch.no_grad():
                made = make_plan(self._program, like, constants, (), self._config, apart=True)
            return made if made.is_pure else None
        return make


def own_plans_of(program: AtenProgram, plan: Plan, kept: Sequence[int], config: PrepareConfig | None,
                 prepare_seconds: float) -> OwnPlansOfGraph | None:
    """The own plans beside a plan; None if there may be none. `kept`: arguments that the module keeps and the graph writes."""
    allowed = plan.sizes is not None and plan.is_pure and not kept and has_first_forms(complete_config(config))
    return OwnPlansOfGraph(program, plan, config, prepare_seconds) if allowed else None
