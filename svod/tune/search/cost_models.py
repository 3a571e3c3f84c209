"""The cost models by which proposals are ranked: the analytic cost of a state, or a model that has learned from measurements.

The learned model is gradient boosting of trees over a state's features (`features.py`). It predicts the factor by which the analytic
prediction is wrong, relative to the heuristic's chain of the same kernel. So it can learn from several kernels together, and a model that
has learned little ranks like the analytic one. It learns from the candidates of its own search, anew in each round, and from the
database's measurements of other kernels. The faster a candidate is, the more it counts, because only the order of the fast ones matters.
Absolute errors are minimised, as a sample may be disturbed.
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
from svod.tune.search.features import NUM_COST_FEATURES, features

LEAST_SAMPLES = 32         # measurements of the running search that a model needs if the database has no evidence
EVIDENCE_WEIGHT = 0.2      # weight of a measurement of another search; one of the running search has weight 1
TREES, LEAVES, LEAST_LEAF, RATE = 60, 8, 8, 0.08


@dataclass(frozen=True)
class Evidence:
    """One measured state of some kernel. `features`: relative to the features of the heuristic's chain; `ratio`: the state's time over
    that chain's time; `error`: log(ratio / the ratio that the analytic model predicts)."""

    features: tuple[float, ...]
    ratio: float
    error: float


class CostModel(Protocol):
    """Ranks candidates by predicted time."""

    def learn(self, measured: Iterable[Candidate]) -> None:
        """Learn from all candidates that the search has measured so far."""

    def predictions(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Predict the times of candidates of one kernel, in the model's own unit."""


class AnalyticCost:
    """Ranks by `Candidate.predicted`."""

    def learn(self, measured: Iterable[Candidate]) -> None:
        """Does nothing: the analytic model has nothing to learn."""

    def predictions(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        return [c.predicted for c in candidates]


class LearnedCost:
    """Ranks by the analytic prediction times a learned correction. Without enough measurements it ranks as the analytic model."""

    def __init__(self, base: Scheduler, seed: int, evidence: Sequence[Evidence] = ()) -> None:
        self.anchor = features(backend_named(base.target.device).heuristic(base))
        self.seed, self.evidence = seed, evidence
        self.known: dict[bytes, tuple[float, ...]] = {}
        self.learned = -1          # number of this search's measurements that the model was trained on; -1: there is no model yet
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
        errors -= np.median(errors) if own else 0.0       # removes the factor between predicted cycles and measured seconds
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
    """The features `of` a state, the first NUM_COST_FEATURES of them as differences from those of the state `anchor`."""
    return (*(a - b for a, b in zip(of[:NUM_COST_FEATURES], anchor[:NUM_COST_FEATURES], strict=True)), *of[NUM_COST_FEATURES:])


def evidence_of(state: Scheduler, heuristic: Scheduler, ratio: float) -> Evidence | None:
    """The training sample from a state that took `ratio` times as long as the heuristic's; None if one of them has no predicted cost."""
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
    """A context in which the model uses one thread: more threads would take cores from the workers."""
    from threadpoolctl import threadpool_limits  # a dependency of scikit-learn

    return threadpool_limits(1)  # type: ignore[no-any-return]


def make_cost_model(config: BeamConfig, base: Scheduler, evidence: Sequence[Evidence] = ()) -> CostModel:
    """The model that `config` names, for the kernel whose state without opts is `base`. Raises TuneError where it needs a package that
    is not installed."""
    if config.cost_model == "analytic":
        return AnalyticCost()
    regressor(config.seed)
    return LearnedCost(base, config.seed, evidence)
