"""Results of the studies of the search, with replayed searches and timings."""
from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svod.bench.race import Ratio
from svod.config import BeamConfig
from svod.core.cost.sketch import heuristic
from svod.core.ir.serialize import ast_to_data
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.tune.measure.candidate import Status
from svod.tune.measure.measurer import Failure
from svod.tune.workers.executor import InlineExecutor
from tests.tune.replay import ReplayedMeasurer
from tests.tune.search_kernels import TARGET, gemm

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
ONE, SLOWER, FASTER, UNSURE = Ratio(1.0, 1.0, 1.0), Ratio(0.95, 0.94, 0.96), Ratio(1.2, 1.1, 1.3), Ratio(0.99, 0.97, 1.01)


@pytest.fixture
def paired(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("paired")


def line(paired: Any, *ratios: Ratio, chain: tuple[Opt, ...] = ()) -> Any:
    found = paired.Found("a", (), 2.0, 100, "ended"), paired.Found("b", chain, 4.0, 50, "ended")
    return paired.Line("kernel", 0, found, (1e-3, 1e-3 / ratios[0].median), ((ONE,) * len(ratios), ratios))


@pytest.mark.parametrize(("ratios", "verdict"), [
    ((FASTER,), "better"), ((UNSURE,), "="), ((SLOWER,), "worse"), ((SLOWER, SLOWER, SLOWER), "worse"), ((SLOWER, UNSURE, SLOWER), "="),
    ((FASTER, FASTER, FASTER), "better"), ((FASTER, UNSURE, FASTER), "="), ((FASTER, SLOWER, FASTER), "="),
    ((Ratio(0.96, 0.9, 1.02),), "worse"),        # the interval reaches 1, the median is not within 3 % of it
])
def test_better_and_worse_are_what_all_processes_say(ratios: tuple[Ratio, ...], verdict: str, paired: Any) -> None:
    assert line(paired, *ratios).verdict(1) == verdict and line(paired, *ratios).verdict(0) == "="


@pytest.mark.parametrize(("chain", "processes"), [((Opt("UPCAST", "o0", 4),), 3), ((), 1)])
def test_winners_that_differ_are_timed_in_several_processes(chain: tuple[Opt, ...], processes: int, paired: Any,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []

    def in_a_process(function: Any, ast: Any, chains: Any, seed: int) -> Any:
        seeds.append(seed)
        assert function is paired.time_chains and chains == [[], [o.to_json() for o in chain]]
        return (1e-3, (len(seeds) % 3) * 1e-3), (ONE, UNSURE)
    monkeypatch.setattr(paired, "in_a_process", in_a_process)
    found = paired.Found("a", (), 2.0, 100, "ended"), paired.Found("b", chain, 4.0, 50, "ended")
    times, ratios = paired.time_winners(gemm(48, 64, 40), found, 7)
    assert seeds == list(range(7, 7 + processes)) and times == (1e-3, 1e-3) and ratios == ((ONE,) * processes, (UNSURE,) * processes)


def test_chains_that_end_in_one_state_share_its_samples(paired: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "TIMING_SECONDS", 0.05)
    lanes, rows = ["UPCAST", "o1", 16], ["UPCAST", "o0", 4]
    times, ratios = paired.time_chains(ast_to_data(gemm(48, 64, 40).ast), [[lanes, rows], [rows, lanes], []], 0)
    assert times[0] == times[1] and ratios[0] == ratios[1] == ONE and min(times) > 0.0


def test_the_table(paired: Any) -> None:
    four, eight = ((Opt("UPCAST", "o0", n),) for n in (4, 8))
    lines = [line(paired, FASTER, chain=four), line(paired, SLOWER, chain=eight), line(paired, ONE)]
    rows = [*paired.head(["a", "b"]), *map(paired.row, lines)]
    assert len({r.count("|") for r in rows}) == 1
    assert rows[2] == "| kernel | 0 | 1000 µs | 1.200 (1.200–1.200) better | 100, 50 | 2.0, 4.0 |" and "| same |" in rows[4]
    said = paired.summary(lines, ["a", "b"])
    assert said[0] == "b over a: 1.045x (geometric mean of 3), 1 better, 1 worse beyond noise: kernel (seed 0)"
    assert said[2] == "b: 4.0 s and 50 candidates a kernel (medians), 4.0 s at most"
    nothing = replace(lines[1], found=(lines[1].found[0], replace(lines[1].found[1], nothing=True)))
    assert "| nothing |" in paired.row(nothing)
    said = paired.summary([lines[0], nothing], ["a", "b"])
    assert said[0] == "b over a: 1.200x (geometric mean of 1), 1 better, 0 worse beyond noise; nothing found for 1"
    assert "0 better" in paired.summary([nothing], ["a", "b"])[0]
    data = json.loads(json.dumps(paired.as_data(lines[1]), allow_nan=False))
    assert data["verdicts"] == ["=", "worse"] and data["found"][1]["chain"] == [["UPCAST", "o0", 8]]


def search(paired: Any, measurer: ReplayedMeasurer, candidates: int = 0, **options: Any) -> Any:
    config = BeamConfig(**{"width": 2, "round_size": 6, **options})
    with InlineExecutor() as executor:
        return paired.search(gemm(48, 64, 40), "gemm", "a setting", config, candidates=candidates, target=TARGET, executor=executor,
                             ceilings=None, measurer=measurer)


@pytest.mark.slow
def test_a_search_ends_with_the_round_that_has_the_candidates(paired: Any) -> None:
    whole, part = search(paired, ReplayedMeasurer()), search(paired, ReplayedMeasurer(), 15)
    assert 15 <= part.candidates < whole.candidates and part.setting == "a setting"


def test_without_sketches_the_search_answers_for_itself(paired: Any) -> None:
    """The heuristic is faster than all that is found: where sketches start the search it is its result, elsewhere it is not."""
    def seconds(c: Any) -> float:
        return 1e-4 if c.origin == "heuristic" else 1e-3

    class Forgetful(ReplayedMeasurer):
        def build(self, *args: Any, **more: Any) -> Any:
            self.built.clear()      # allows the heuristic's code to be found again
            return super().build(*args, **more)
    with_sketches, without = (search(paired, Forgetful(seconds=seconds), sketches=on) for on in (True, False))
    assert with_sketches.chain == heuristic(Scheduler(gemm(48, 64, 40), TARGET)).applied_opts != without.chain
    assert not with_sketches.nothing and not without.nothing


@pytest.mark.slow
def test_where_nothing_else_runs_the_heuristic_stands_in(paired: Any) -> None:
    def crash(c: Any) -> Any:
        return None if c.origin == "heuristic" else Failure(Status.CRASH, "the table says so")
    found = search(paired, ReplayedMeasurer(running=crash), sketches=False)
    assert found.nothing and found.chain == heuristic(Scheduler(gemm(48, 64, 40), TARGET)).applied_opts
    assert not search(paired, ReplayedMeasurer(running=crash)).nothing, "a search from sketches answers with the heuristic"

    class Unconfirmed(ReplayedMeasurer):
        def confirm(self, candidates: Any, seconds: float) -> Any:
            return [Failure(Status.CRASH, "the table says so")] * len(candidates)
    assert not search(paired, Unconfirmed(), sketches=False).nothing, "the fastest that it verified is its own"


def test_variants_of_the_ablation_are_settings_of_the_search(paired: Any) -> None:
    variants = importlib.import_module("ablation").VARIANTS
    configs = {name: BeamConfig(**settings) for name, settings in variants.items()}
    assert configs["full"] == configs.pop("full again") == BeamConfig()
    assert len(set(map(repr, configs.values()))) == len(variants) - 1
    assert {"without sketches", "without mutations", "reference grid"} < set(variants)
