"""The study of decision rules, on recorded finalists."""
from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from svod.bench.race import paired_ratio

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
BASE = tuple(1.0 + 0.01 * (i % 5) for i in range(20))


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("finalists")


def finalist(study: Any, length: int, ratio: float, anew: tuple[float, ...], restless: float = 0.0) -> Any:
    """A finalist that takes `restless` more in every other round."""
    samples = tuple(b * ratio * (1 + restless * (i % 2)) for i, b in enumerate(BASE))
    found = paired_ratio(samples, BASE)
    return study.Finalist((["UPCAST", "o0", 2],) * length, found.low, found.median, found.high, samples, anew)


@pytest.mark.parametrize(("ratios", "chosen"), [
    # the heuristic's chain is the longest; per rule: upper end alone, the rule, 0.5 %, 1 %, 1 % without precedence, overlap
    ((1.0, 0.999, 0.998), (2, 0, 0, 0, 1, 2)), ((1.0, 0.98, 0.979), (2, 1, 1, 1, 1, 2)), ((1.0, 0.994, 0.991), (2, 2, 1, 0, 1, 2)),
    ((1.0, 1.1, 1.2), (0, 0, 0, 0, 0, 0))])
def test_what_the_rules_choose(ratios: tuple[float, ...], chosen: tuple[int, ...], study: Any) -> None:
    field = [finalist(study, length, ratio, (ratio,)) for length, ratio in zip((5, 1, 3), ratios, strict=True)]
    assert tuple(rule(field) for rule in study.RULES.values()) == chosen


def test_what_may_be_as_fast_is_told_by_the_pair(study: Any) -> None:
    field = [finalist(study, 5, 1.0, (1.0,)), finalist(study, 1, 0.9, (0.9,), 0.04), finalist(study, 3, 0.91, (0.91,))]
    assert study.within(1.003)(field) == 2 and study.by_overlap(field) == 1


def test_the_table_is_the_same_when_it_is_read_again(study: Any, tmp_path: Path) -> None:
    field = (finalist(study, 5, 1.0, (1.0, 1.0, 1.0)), finalist(study, 1, 0.98, (0.99, 1.0, 0.9)),
             finalist(study, 3, 0.979, (0.9, 0.9, 2.0)))
    found = [study.Confirmation("gemm", 0, field), study.Confirmation("gemm", 1, field)]
    (tmp_path / "a.json").write_text(json.dumps([asdict(c) for c in found], allow_nan=False), encoding="utf-8")
    assert list(study.stored(str(tmp_path / "a.json"))) == found
    lines = study.table(found)
    assert lines[2] == "| the lowest upper end alone | 0.00 % | 0.0 % | 3.0 |"
    assert lines[3] == "| within 0.3 % of it the heuristic's own, else the shortest | 10.00 % | 10.0 % | 1.0 |"
