"""By which prediction proposals are ranked: the analytic cost of a state, or a model that has learned from measurements.

The learned model is gradient boosting of trees over a state's features (`features.py`). It predicts by what factor the analytic prediction
is wrong, relative to the heuristic's chain of the same kernel: times of several kernels go together, and a model that knows little ranks
as the analytic one does. It learns from the candidates of its own search, anew in each round, and from what the database has of other
kernels. The faster a candidate is, the more it counts: what matters is the order of the fast ones. Absolute errors are minimised, as a
sample may be disturbed.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import log
from typing import Any, Protocol

import numpy as np

from svod.compile.backend import backend_named
from svod.config import BeamConfig
from svod.core.kernel.scheduler import Scheduler
from svod.errors import KernelOptError, TuneError
from svod.tune.measure.candidate import Candidate
from svod.tune.search.features import COSTS, features

LEAST_SAMPLES = 32         # measurements of its own that a model without evidence needs
EVIDENCE_WEIGHT = 0.2      # weight of a measurement of another search, beside 1 of an own one
TREES, LEAVES, LEAST_LEAF, RATE = 60, 8, 8, 0.08


@dataclass(frozen=True)
class Evidence:
    """One measured state of some kernel: its features relative to those of the heuristic's chain, its time over that chain's, and the
    logarithm of that over what the analytic model says it is."""

    features: tuple[float, ...]
    ratio: float
    error: float


class CostModel(Protocol):
    """Ranks candidates by what they are expected to take."""

    def learn(self, measured: Iterable[Candidate]) -> None:
        """Take all that the search has measured so far."""

    def predictions(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Predict the times of candidates of one kernel, in the model's own unit."""


class AnalyticCost:
    """Ranks by `Candidate.predicted`."""

    def learn(self, measured: Iterable[Candidate]) -> None:
        """There is nothing to learn."""

    def predictions(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        return [c.predicted for c in candidates]


class LearnedCost:
    """Ranks by the analytic prediction, corrected by what was measured. Without enough measurements it ranks as the analytic model."""

    def __init__(self, base: Scheduler, seed: int, evidence: Sequence[Evidence] = ()) -> None:
        self.anchor = features(backend_named(base.target.device).heuristic(base))
        self.seed, self.evidence = seed, evidence
        self.known: dict[bytes, tuple[float, ...]] = {}
        self.learned = -1          # measurements of its own that the model has learned from; -1: there is no model
        self.model: Any = None

    def features(self, c: Candidate) -> tuple[float, ...]:
        if c.digest not in self.known:
            self.known[c.digest] = relative(features(c.state), self.anchor)
        return self.known[c.digest]

    def learn(self, measured: Iterable[Candidate]) -> None:
        own = [c for c in measured if c.samples and 0.0 < c.predicted < float("inf")]
        if len(own) == self.learned or (not self.evidence and len(own) < LEAST_SAMPLES):
            return
        self.learned = len(own)
        errors = np.array([log(c.fitness / c.predicted) for c in own])
        errors -= np.median(errors) if own else 0.0       # the unit of predictions is one of its own
        best = min((c.fitness for c in own), default=0.0)
        rows = [*(self.features(c) for c in own), *(e.features for e in self.evidence)]
        weights = [*(best / c.fitness for c in own), *(EVIDENCE_WEIGHT * min(1.0, 1.0 / e.ratio) for e in self.evidence)]
        with one_thread():
            self.model = regressor(self.seed).fit(np.array(rows), np.concatenate([errors, [e.error for e in self.evidence]]), weights)

    def predictions(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        if self.model is None or not candidates:
            return [c.predicted for c in candidates]
        with one_thread():
            errors = self.model.predict(np.array([self.features(c) for c in candidates]))
        predictions: list[float] = (np.array([c.predicted for c in candidates]) * np.exp(errors)).tolist()
        return predictions


def relative(of: Sequence[float], anchor: Sequence[float]) -> tuple[float, ...]:
    """Features of a state with those of the analytic model relative to another state's."""
    return (*(a - b for a, b in zip(of[:COSTS], anchor[:COSTS], strict=True)), *of[COSTS:])


def evidence_of(state: Scheduler, heuristic: Scheduler, ratio: float) -> Evidence | None:
    """The training sample from a state that took `ratio` times as long as the heuristic's; None where its opts do not go together."""
    try:
        cost = backend_named(state.target.device).cost
        predicted = cost(state).cycles / cost(heuristic).cycles
        return Evidence(relative(features(state), features(heuristic)), ratio, log(ratio / predicted))
    except KernelOptError:
        return None


def regressor(seed: int) -> Any:
    """An untrained model. Raises TuneError where scikit-learn is not installed."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError as e:
        raise TuneError(f"the learned cost model needs the package scikit-learn ({e}): pip install 'svod[tune]'") from None
    return HistGradientBoostingRegressor(loss="absolute_error", max_iter=TREES, max_leaf_nodes=LEAVES, min_samples_leaf=LEAST_LEAF,
                                         learning_rate=RATE, early_stopping=False, random_state=seed)


def one_thread() -> AbstractContextManager[Any]:
    """A context in which the model uses one thread: others would spin beside the workers."""
    from threadpoolctl import threadpool_limits  # a dependency of scikit-learn

    return threadpool_limits(1)  # type: ignore[no-any-return]


def make_cost_model(config: BeamConfig, base: Scheduler, evidence: Sequence[Evidence] = ()) -> CostModel:
    """The model that `config` names, for the kernel whose untouched state is `base`. Raises TuneError where it needs a package that is not
    installed."""
    if config.cost_model == "analytic":
        return AnalyticCost()
    regressor(config.seed)
    return LearnedCost(base, config.seed, evidence)
