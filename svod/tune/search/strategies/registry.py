"""Strategies by name. Optuna is imported where its strategy is asked for: it may not be installed, and takes a second to import."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svod.config import BeamConfig
from svod.tune.search.strategies.beam import Beam
from svod.tune.search.strategies.evolve import Evolution
from svod.tune.search.strategies.random_walks import RandomWalks
from svod.tune.search.strategies.strategy import Strategy


def check_strategy(name: str, optuna_storage: str) -> None:
    """Raise TuneError where a strategy needs a package that is not installed, or a storage that cannot be opened."""
    if name == "optuna":
        from svod.tune.search.strategies.optuna_study import check_storage

        check_storage(optuna_storage)


def make_strategy(base: Any, config: BeamConfig) -> Strategy:
    """The strategy that `config` names, for the kernel whose untouched state is `base`. Raises TuneError where it needs a package that is
    not installed, or a storage that cannot be opened."""
    if config.strategy == "optuna":
        from svod.tune.search.strategies.optuna_study import OptunaStudy

        return OptunaStudy(base, config)
    named: dict[str, Callable[[Any, BeamConfig], Strategy]] = {"beam": Beam, "evolve": Evolution, "random": RandomWalks}
    return named[config.strategy](base, config)
