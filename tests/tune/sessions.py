"""Sessions of one test: replayed measurers, or budgets that count rounds and not seconds."""
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
    """Ends after `rounds` rounds of each kernel, the timing of the heuristic among them, however long they take."""

    def __init__(self, rounds: int) -> None:
        super().__init__(1000.0, 1000.0)
        self.rounds = rounds

    def next(self, kernels: Sequence[Any]) -> Any:
        return super().next([k for k in kernels if len(k.history) < self.rounds])


def replayed_session(db: TuningDB, executor: Executor, *kernels: Kernel, measurers: dict[str, ReplayedMeasurer] | None = None,
                     events: list[SearchEvent] | None = None, target: Target = TARGET, budget: ModelBudget | None = None,
                     ceilings: Any = None, **options: Any) -> TuneSession:
    """A session of beam 2 in which nothing is run: each kernel's measurer is the one of `measurers`, else a new one, put there.
    `options`: of the BeamConfig."""
    made: dict[str, ReplayedMeasurer] = {} if measurers is None else measurers
    heard: list[SearchEvent] = [] if events is None else events
    config = BeamConfig(width=2, **{"round_size": 6, **options})
    return TuneSession([KernelTask(k, name=f"kernel {i}") for i, k in enumerate(kernels)], target, executor=executor, db=db, config=config,
                       budget=budget, listener=heard.append, ceilings=ceilings,
                       measurer_of=lambda k: made.setdefault(k.key, ReplayedMeasurer()))
