"""Strategies by name. Optuna is imported only for its own strategy: it may not be installed, and its import takes a second."""
from __future__ import annotations

from collections.abc import Sequence

from svod.config import BeamConfig
from svod.core.kernel.scheduler import Scheduler
from svod.tune.search.cost_models import Evidence, make_cost_model, regressor
from svod.tune.search.strategies.beam import Beam
from svod.tune.search.strategies.evolve import Evolution
from svod.tune.search.strategies.random_walks import RandomWalks
from svod.tune.search.strategies.strategy import Strategy


def check_strategy(name: str, optuna_storage: str, cost_model: str) -> None:
    """Raise TuneError where a search needs a package that is not installed, or a storage that cannot be opened."""
    if cost_model == "learned":
        regressor(0)
    if name == "optuna":
        from svod.tune.search.strategies.optuna_study import check_storage

        check_storage(optuna_storage)


def make_strategy(base: Scheduler, config: BeamConfig, evidence: Sequence[Evidence] = ()) -> Strategy:
    """The strategy that `config` names, for the kernel whose state without opts is `base`; a learned cost model begins with `evidence`.
    Raises TuneError where a package is needed that is not installed, or a storage cannot be opened."""
    model = make_cost_model(config, base, evidence)
    if config.strategy == "optuna":
        from svod.tune.search.strategies.optuna_study import OptunaStudy

        return OptunaStudy(base, config, model)
    named: dict[str, type[Beam | Evolution | RandomWalks]] = {"beam": Beam, "evolve": Evolution, "random": RandomWalks}
    return named[config.strategy](base, config, model)
