"""What the studies of the search make of searches and timings; both are replayed here."""
from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from svod.bench.race import Ratio
from svod.compile.host import host_target
from svod.config import BeamConfig
from svod.core.scheduler import Opt, Scheduler
from svod.core.sketch import heuristic
from svod.tune.executor import InlineExecutor
from tests.tune.replay import ReplayedLaboratory
from tests.tune.search_kernels import TARGET, gemm

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
ONE, SLOWER, FASTER, UNSURE = Ratio(1.0, 1.0, 1.0), Ratio(0.95, 0.94, 0.96), Ratio(1.2, 1.1, 1.3), Ratio(0.99, 0.97, 1.01)


@pytest.fixture
def paired(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("paired")


def line(paired: Any, ratio: Ratio, again: Ratio | None = None, chain: tuple[Opt, ...] = ()) -> Any:
    found = paired.Found("a", (), 2.0, 100, "ended"), paired.Found("b", chain, 4.0, 50, "ended")
    return paired.Line("kernel", 0, found, (1e-3, 1e-3 / ratio.median), (ONE, ratio), (None, again))


@pytest.mark.parametrize(("ratio", "again", "verdict"), [
    (FASTER, None, "better"), (UNSURE, None, "="), (SLOWER, None, "worse"), (SLOWER, SLOWER, "worse"), (SLOWER, UNSURE, "="),
    (FASTER, FASTER, "better"), (FASTER, UNSURE, "="), (FASTER, SLOWER, "="), (SLOWER, FASTER, "="),
    (Ratio(0.96, 0.9, 1.02), None, "worse"),        # the interval reaches 1, the median is not within 3 % of it
])
def test_better_and_worse_are_what_two_timings_say(ratio: Ratio, again: Ratio | None, verdict: str, paired: Any) -> None:
    assert line(paired, ratio, again).verdict(1) == verdict and line(paired, ratio, again).verdict(0) == "="


@pytest.mark.parametrize(("first", "timings"), [(FASTER, 2), (SLOWER, 2), (UNSURE, 1)])
def test_a_winner_that_differs_is_timed_twice(first: Ratio, timings: int, paired: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed:
        def __init__(self, ratio: Ratio) -> None:
            self.ratios = ONE, ratio

        def seconds(self, i: int) -> float:
            return 1e-3 / self.ratios[i].median

        def ratio(self, _: int, i: int) -> Ratio:
            return self.ratios[i]
    left = [Timed(first), Timed(UNSURE)]
    monkeypatch.setattr(paired, "confirm", lambda contestants, **_: left.pop(0))
    found = paired.Found("a", (), 2.0, 100, "ended"), paired.Found("b", (Opt("UPCAST", "o0", 4),), 4.0, 50, "ended")
    _, ratios, again = paired.time_winners(gemm(48, 64, 40), found, host_target(), random.Random(0))
    assert len(left) == 2 - timings and ratios == (ONE, first) and again == (None, UNSURE if timings == 2 else None)
    assert paired.Line("kernel", 0, found, (1e-3, 1e-3), ratios, again).verdict(1) == "="


def test_the_table(paired: Any) -> None:
    four, eight = ((Opt("UPCAST", "o0", n),) for n in (4, 8))
    lines = [line(paired, FASTER, chain=four), line(paired, SLOWER, chain=eight), line(paired, ONE)]
    rows = [*paired.head(["a", "b"]), *map(paired.row, lines)]
    assert len({r.count("|") for r in rows}) == 1
    assert rows[2] == "| kernel | 0 | 1000 µs | 1.200 ±8.4 % better | 100, 50 | 2.0, 4.0 |" and "| same |" in rows[4]
    said = paired.summary(lines, ["a", "b"])
    assert said[0] == "b over a: 1.045x (geometric mean of 3), 1 better, 1 worse beyond noise: kernel (seed 0)"
    assert said[2] == "b: 4.0 s and 50 candidates a kernel (medians), 4.0 s at most"
    data = json.loads(json.dumps(paired.as_data(lines[1]), allow_nan=False))
    assert data["verdicts"] == ["=", "worse"] and data["found"][1]["chain"] == [["UPCAST", "o0", 8]]


def search(paired: Any, lab: ReplayedLaboratory, candidates: int = 0, **options: Any) -> Any:
    config = BeamConfig(**{"width": 2, "round_size": 6, **options})
    with InlineExecutor() as executor:
        return paired.search(gemm(48, 64, 40), "gemm", "a setting", config, candidates=candidates, target=TARGET, executor=executor,
                             ceilings=None, laboratory=lab)


def test_a_search_ends_with_the_round_that_has_the_candidates(paired: Any) -> None:
    whole, part = search(paired, ReplayedLaboratory()), search(paired, ReplayedLaboratory(), 15)
    assert 15 <= part.candidates < whole.candidates and part.setting == "a setting"


def test_without_sketches_the_search_answers_for_itself(paired: Any) -> None:
    """The heuristic is faster than all that is found: where sketches start the search it is its result, elsewhere it is not."""
    def seconds(c: Any) -> float:
        return 1e-4 if c.origin == "heuristic" else 1e-3

    class Forgetful(ReplayedLaboratory):
        def build(self, *args: Any, **more: Any) -> Any:
            self.built.clear()      # the heuristic's code may be found again
            return super().build(*args, **more)
    with_sketches, without = (search(paired, Forgetful(seconds=seconds), sketches=on) for on in (True, False))
    assert with_sketches.chain == heuristic(Scheduler(gemm(48, 64, 40), TARGET)).applied_opts != without.chain


def test_variants_of_the_ablation_are_settings_of_the_search(paired: Any) -> None:
    variants = importlib.import_module("ablation").VARIANTS
    configs = {name: BeamConfig(**settings) for name, settings in variants.items()}
    assert configs["full"] == BeamConfig() and len(set(map(repr, configs.values()))) == len(variants)
    assert {"without sketches", "without mutations", "reference grid"} < set(variants)
