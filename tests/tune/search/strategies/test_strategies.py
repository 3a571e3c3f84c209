"""Rules that every strategy has to keep, and rules of single strategies, tested without hardware."""
from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import optuna
import pytest
from click.testing import CliRunner

from svod.cli.tune.command import cli
from svod.config import STRATEGIES, BeamConfig
from svod.core.cost.cpu import cost_of
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.chain_text import chain_text
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.errors import ConfigError, KernelOptError, TuneError
from svod.tune.measure.candidate import FAILED, Candidate, Origin, Status
from svod.tune.search.actions import default_actions, lanes_of, mutations
from svod.tune.search.confirmation import finish
from svod.tune.search.kernel_search import KernelSearch, SearchedKernel
from svod.tune.search.strategies.evolve import Evolution
from svod.tune.search.strategies.registry import check_strategy, make_strategy
from svod.tune.search.strategies.strategy import FIRST_WIDTH, Proposer
from tests.draws import a_half
from tests.tune.replay import BASE, HEURISTIC, ReplayedMeasurer, is_failure, make_search, run

LANES = lanes_of(BASE.kernel, BASE.target)


def seconds(c: Candidate) -> float:
    """A made-up time: the prediction plus up to a fifth that depends on the state's digest, so that predictions help but do not suffice."""
    return 1e-9 * cost_of(c.state).cycles * (1 + 0.2 * c.digest[0] / 255)


def nearby(state: Scheduler) -> Iterator[Scheduler]:
    """All valid states that differ from a state by one opt."""
    for opt in default_actions(state, LANES):
        try:
            after = apply_opt(state, opt)
            cost_of(after)
        except KernelOptError:
            continue
        yield after
    yield from mutations(BASE, state.applied_opts, LANES)


@cache
def best_nearby() -> float:
    """The least time among some thousand states, which are found from the heuristic's by going on from the fastest three times."""
    known = {HEURISTIC.digest: HEURISTIC}
    for _ in range(3):
        ranked = sorted(known.values(), key=lambda s: seconds(Candidate(s, (), Origin.ACTION)))
        known |= {n.digest: n for s in ranked[:6] for n in nearby(s)}
    return min(seconds(Candidate(s, (), Origin.ACTION)) for s in known.values())


def search_for(strategy: str, measurer: ReplayedMeasurer | None = None, **options: Any) -> KernelSearch:
    return make_search(measurer or ReplayedMeasurer(seconds=seconds), width=4, strategy=strategy, **{"patience": 1000, **options})


def strategy_of(search: KernelSearch) -> Proposer:
    assert isinstance(search.strategy, Proposer)
    return search.strategy


@pytest.mark.parametrize("strategy", a_half(STRATEGIES))
def test_enough_measurements_find_what_is_nearly_the_best(strategy: str) -> None:
    """Two of three seeds have to find it, as random walks may have bad luck with one."""
    def is_found(seed: int) -> bool:
        search = search_for(strategy, seed=seed)
        while search.lead.best > 1.1 * best_nearby() and search.counts.timed < 1500:
            search.step()
        return search.lead.best <= 1.1 * best_nearby() and search.lead.incumbent is not search.lead.baseline
    assert [is_found(seed) for seed in range(3)].count(True) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_state_is_proposed_twice_and_a_round_has_its_size(strategy: str) -> None:
    proposed: list[bytes] = []
    search = search_for(strategy)
    propose = search.strategy.propose

    def noted() -> list[Candidate]:
        chosen = list(propose())
        assert 0 < len(chosen) <= 8 * FIRST_WIDTH
        proposed.extend(c.digest for c in chosen)
        return chosen
    search.strategy.propose = noted  # type: ignore[method-assign]
    run(search, 12)
    assert len(proposed) == len(set(proposed)) > 100


def test_the_first_walk_is_lowered_before_the_last_is_found() -> None:
    class Noting(ReplayedMeasurer):
        def lower(self, candidates: Any, limit: int) -> Any:
            queued.clear()
            for c in candidates:
                queued.append(len(search.strategy.seen))        # type: ignore[attr-defined]
                yield from super().lower([c], limit)
    queued: list[int] = []
    search = search_for("random", Noting(seconds=seconds))
    run(search, 4)
    assert len(queued) == 8 * FIRST_WIDTH and queued[-1] - queued[0] == len(queued) - 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_seed_decides_the_trace(strategy: str) -> None:
    def trace(seed: int) -> list[Any]:
        measurer = ReplayedMeasurer(seconds=seconds)
        finish(run(search_for(strategy, measurer, seed=seed), 6))
        return measurer.trace
    assert trace(1) == trace(1) != trace(2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_round_had_no_time_for_is_proposed_again(strategy: str) -> None:
    now = [0.0]
    measurer = ReplayedMeasurer(seconds=seconds, clock=lambda s: now.__setitem__(0, now[0] + s))
    search = search_for(strategy, measurer)
    search.clock = lambda: now[0]
    search.step()
    search.step(deadline=now[0] + 0.1)
    left = [c for c in strategy_of(search).seen.values() if c.status is Status.QUEUED and c.round]
    assert left and search.strategy.queued >= len(left)
    run(search, 8)
    waiting = [c for c in left if c.status is Status.QUEUED]
    assert len(waiting) < len(left) and all(strategy_of(search).queue[c.digest] is c for c in waiting)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_search_ends_where_nothing_is_left(strategy: str) -> None:
    """A search ends when the two allowed states next to the untouched one have been tried."""
    allowed = {apply_opt(BASE, Opt("UPCAST", "o1", n)).digest for n in (16, 32)} | {BASE.digest}

    def fenced(base: Any, config: BeamConfig) -> Any:
        made = make_strategy(base, config)
        assert isinstance(made, Proposer)
        offer = made.offer
        made.offer = lambda state, origin: offer(state, origin) if state.digest in allowed else None  # type: ignore[method-assign]
        return made
    measurer = ReplayedMeasurer(seconds=seconds)
    config = BeamConfig(width=2, strategy=strategy, patience=1000)
    search = run(KernelSearch(SearchedKernel("key", "gemm", BASE, HEURISTIC), config, measurer, strategy_of=fenced), 200)
    assert search.why == "nothing left to try"
    assert {BASE.digest, HEURISTIC.digest} <= set(strategy_of(search).seen) <= allowed
    assert len(measurer.built) == len(set(measurer.built)) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_candidates_that_fail_cost_themselves_only(strategy: str) -> None:
    measurer = ReplayedMeasurer(seconds=seconds, wrong=lambda c: c.digest[1] % 4 == 0,
                                building=lambda c: is_failure(Status.TIMEOUT)(c) if c.digest[1] % 4 == 1 and c.chain else None)
    search = run(search_for(strategy, measurer), 8)
    kept = strategy_of(search).members
    assert kept and all(c.status is Status.VERIFIED for c in kept)
    assert any(c.status in FAILED for c in strategy_of(search).seen.values())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_wide_search_begins_as_a_narrow_one(strategy: str) -> None:
    search = make_search(ReplayedMeasurer(seconds=lambda c: 1e-3), width=8, strategy=strategy)
    run(search, 12)
    assert search.widened == 1 and strategy_of(search).width == 8


# -- names and packages -------------------------------------------------------------------------------------------------------
def test_an_unknown_strategy_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=re.escape("strategy='annealing') is not usable; accepted: one of beam, evolve, random, optuna")):
        BeamConfig(strategy="annealing")
    answer = CliRunner().invoke(cli, ["model.py", "--strategy", "annealing"])
    assert answer.exit_code == 2 and "'beam', 'evolve', 'random', 'optuna'" in answer.output


def test_the_reference_systems_rules_are_those_of_a_beam() -> None:
    with pytest.raises(ConfigError, match="strict='reference', strategy='random'"):
        BeamConfig(strict="reference", strategy="random")


def test_a_storage_without_a_study_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text("")
    answer = CliRunner().invoke(cli, [str(script), "--optuna-storage", "sqlite://"])
    assert answer.exit_code == 2 and "is for --strategy optuna" in answer.output.replace("\n", " ")


def test_without_optuna_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "svod.tune.search.strategies.optuna_study", raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(TuneError, match=re.escape("pip install 'svod[tune]'")):
        make_strategy(BASE, BeamConfig(strategy="optuna"))


# -- evolve -------------------------------------------------------------------------------------------------------------------
def test_a_child_of_two_has_opts_of_both() -> None:
    evolution = Evolution(BASE, BeamConfig())
    first, second = (Opt("UPCAST", "o0", 4), Opt("UNROLL", "r0", 2)), (Opt("UPCAST", "o1", 16), Opt("UNROLL", "r0", 8))
    children = {chain_text(evolution.cross(first, second).applied_opts) for _ in range(200)}
    assert "UPCAST(o0, 4) UPCAST(o1, 16) UNROLL(r0, 8)" in children, "axis by axis"
    assert "UPCAST(o0, 4) UNROLL(r0, 8)" in children, "the first opts of one, the last of the other"


def test_the_fastest_become_parents() -> None:
    search = search_for("evolve")
    run(search, 6)
    evolution = search.strategy
    assert isinstance(evolution, Evolution)
    fastest = evolution.fastest(8)
    assert fastest[0].fitness == min(c.fitness for c in evolution.seen.values() if c.status is not Status.SLOW)
    parents = [evolution.parent(fastest) for _ in range(300)]
    assert parents.count(fastest[0]) > 2 * parents.count(fastest[4]) > 0


# -- optuna -------------------------------------------------------------------------------------------------------------------
def finished(study: optuna.Study, state: optuna.trial.TrialState) -> Sequence[optuna.trial.FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(state,))


@pytest.mark.slow
def test_the_study_is_mirrored_to_a_storage_that_optuna_reads(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/studies.db"
    crash = is_failure(Status.CRASH)
    measurer = ReplayedMeasurer(seconds=seconds, building=lambda c: crash(c) if c.digest[1] % 4 == 1 and c.chain else None)
    search = run(search_for("optuna", measurer, optuna_storage=url), 3)
    study = optuna.load_study(study_name=BASE.kernel.key, storage=url)
    complete, failed = finished(study, optuna.trial.TrialState.COMPLETE), finished(study, optuna.trial.TrialState.FAIL)
    assert len(complete) > 10 and any(t.user_attrs.get("status") == "crash" for t in failed)
    known = {chain_text(c.chain): c for c in strategy_of(search).seen.values()}
    for trial in complete:
        c = known[trial.user_attrs["chain"]]
        assert trial.value == pytest.approx(seconds(c)) and trial.params
        assert apply_opts(BASE, c.chain).digest == c.digest
    run(search_for("optuna", optuna_storage=url, seed=1), 2)
    again = optuna.load_study(study_name=BASE.kernel.key, storage=url)
    assert len(again.trials) > len(complete) + len(failed), "another search goes on in it"


def test_a_storage_that_cannot_be_opened_is_said_before_anything_runs(tmp_path: Path) -> None:
    for url in (f"sqlite:///{tmp_path}/missing/studies.db", "not a url", "nosuchdriver://x"):
        with pytest.raises(TuneError, match=r"the Optuna storage .* cannot be used"):
            check_strategy("optuna", url, "analytic")
        with pytest.raises(TuneError, match=r"the Optuna storage .* cannot be used"):
            make_strategy(BASE, BeamConfig(strategy="optuna", optuna_storage=url))


@pytest.mark.slow
def test_a_storage_that_fails_later_ends_the_mirror_and_not_the_search(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "studies.db"
    search = search_for("optuna", optuna_storage=f"sqlite:///{path}")
    run(search, 2)
    path.unlink()
    path.mkdir()
    run(search, 2)
    assert caplog.text.count("left alone from now on") == 1 and len(search.history) == 4
