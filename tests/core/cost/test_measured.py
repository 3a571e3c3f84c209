"""Predictions against recorded times of chains: they must not become worse than when a table was made."""
from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

TABLES = Path(__file__).parent / "measured"
EXPERIMENTS = Path(__file__).resolve().parents[3] / "experiments"
# per table, of the cost model when the table was made: Spearman's correlation within kernels (mean) and over all chains, and the loss by
# choosing the chain that is predicted fastest (geometric mean over kernels, and of the kernel that loses most: a cliff of one kernel is
# lost in a mean). The times are of kernels alone, with their constants in the caches; predictions are for kernels in a plan
RANKS = {"x86_64-znver3-avx2-t2": (0.677, 0.680, 1.256, 2.853), "x86_64-znver4-avx512f-t2": (0.709, 0.802, 1.067, 3.983),
         "x86_64-rocketlake-amx-t2": (0.806, 0.854, 1.065, 3.587)}
MOST_LOST = 0.002       # tolerated loss of correlation: as much as one chain whose prediction moves past that of another one
MOST_SLOWER = 0.01      # tolerated rise of a loss


@pytest.fixture
def measured_chains(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("measured_chains")


def test_each_table_has_its_ranks() -> None:
    assert {path.stem for path in TABLES.glob("*.jsonl")} == set(RANKS)


@pytest.mark.parametrize("name", RANKS)
def test_a_table_is_named_after_its_target(measured_chains: Any, name: str) -> None:
    target, _ = measured_chains.read(TABLES / f"{name}.jsonl")
    arch, cpu, vectors, threads = name.split("-")
    assert (arch, cpu, threads) == (target.arch, target.cpu, f"t{target.threads}")
    assert vectors in target.features and "avx512" not in {*target.features} - {vectors}


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_predictions_rank_measured_chains_as_well_as_before(measured_chains: Any, name: str) -> None:
    kernels = list(measured_chains.replayed(TABLES / f"{name}.jsonl"))
    assert sum(len(pairs) for _, pairs in kernels) >= 300
    (within, pooled), lost = measured_chains.correlations(kernels), measured_chains.mean_loss(kernels)
    least_within, least_pooled, most_lost, largest = RANKS[name]
    assert within >= least_within - MOST_LOST and pooled >= least_pooled - MOST_LOST, (within, pooled)
    assert lost <= most_lost + MOST_SLOWER, lost
    assert not [name for name, pairs in kernels if measured_chains.loss(pairs) > largest + MOST_SLOWER]


def test_a_rank_correlation_by_hand(measured_chains: Any) -> None:
    assert measured_chains.spearman([(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]) == pytest.approx(1.0)
    assert measured_chains.spearman([(1.0, 30.0), (2.0, 20.0), (3.0, 10.0)]) == pytest.approx(-1.0)
    assert measured_chains.spearman([(1.0, 1.0), (1.0, 2.0), (2.0, 3.0)]) == pytest.approx(0.866, abs=1e-3), "equal ones share a rank"
    kernels = [("a", [(1.0, 5.0), (2.0, 7.0), (3.0, 9.0)]), ("b", [(100.0, 9.0), (200.0, 7.0), (300.0, 5.0)])]
    assert measured_chains.correlations(kernels)[0] == pytest.approx(0.0), "one kernel is ranked right, one the wrong way round"
    assert measured_chains.mean_loss(kernels) == pytest.approx((9 / 5) ** 0.5), "the second kernel gets its slowest chain"
