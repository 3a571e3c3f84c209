"""Helpers for tests of sessions: sessions with replayed measurers, and a budget that counts rounds instead of seconds."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from svod.config import BeamConfig
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target
from svod.tune.db import TuningDB
from svod.tune.search.budget import ModelBudget
from svod.tune.search.events import SearchEvent
from svod.tune.session import KernelTask, TuneSession
from svod.tune.workers.executor import Executor
from tests.tune.replay import ReplayedMeasurer
from tests.tune.search_kernels import TARGET


class Rounds(ModelBudget):
    """A budget that ends after `rounds` rounds of each kernel, however long they take; the heuristic's timing is the first round."""

    def __init__(self, rounds: int) -> None:
        super().__init__(1000.0, 1000.0)
        self.rounds = rounds

    def next(self, kernels: Sequence[Any]) -> Any:
        return super().next([k for k in kernels if len(k.history) < self.rounds])


def replayed_session(db: TuningDB, executor: Executor, *kernels: Kernel, measurers: dict[str, ReplayedMeasurer] | None = None,
                     events: list[SearchEvent] | None = None, target: Target = TARGET, budget: ModelBudget | None = None,
                     ceilings: Any = None, **options: Any) -> TuneSession:
    """A session with a beam of width 2 that runs no kernel. Each kernel's measurer is taken from `measurers`, or a new one is added to it.
    `options`: other fields of the BeamConfig."""
    made: dict[str, ReplayedMeasurer] = {} if measurers is None else measurers
    heard: list[SearchEvent] = [] if events is None else events
    config = BeamConfig(width=2, **{"round_size": 6, **options})
    return TuneSession([KernelTask(k, name=f"kernel {i}") for i, k in enumerate(kernels)], target, executor=executor, db=db, config=config,
                       budget=budget, listener=heard.append, ceilings=ceilings,
                       measurer_of=lambda k: made.setdefault(k.key, ReplayedMeasurer()))
