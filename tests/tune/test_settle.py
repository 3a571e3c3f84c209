"""Chains that are slower inside a plan than the heuristic's are given up, and are not chosen again."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from svod.bench.race import Ratio
from svod.compile.cpu.host import host_target
from svod.compile.plan.compiler import Choice, compile_all, compiler_for
from svod.compile.plan.unbound_plan import UnboundPlan, build_plan, synthetic_arrays
from svod.config import BeamConfig, PrepareConfig
from svod.core.kernel.chain_text import chain_text, parse_chain
from svod.core.machine.target import FAST
from svod.tune import at_prepare
from svod.tune.capture import plan_digest
from svod.tune.chains import choose_each
from svod.tune.db import Measurement, TuningDB, Verdict
from svod.tune.plan_chains import compile_unbound_plan
from svod.tune.plans.check import Gain, InPlan, PlanCheck
from svod.tune.plans.settle import ROUNDS, BothWays, Settling
from svod.tune.resolved import Resolved
from tests.plans import gemm_then_softmax

TARGET = host_target()
CONFIG, BEAM = PrepareConfig(object_cache=":none:"), BeamConfig(width=1)
UNBOUND = gemm_then_softmax(24, 40, 16)
GEMM, SOFTMAX = (c.kernel for c in UNBOUND.calls)
COMPILER = compiler_for(TARGET, CONFIG)
PLAIN = Choice((), "database", "")
FASTER, EQUAL, SLOWER = Ratio(0.8, 0.79, 0.81), Ratio(1.0, 0.99, 1.01), Ratio(1.3, 1.2, 1.4)


def tuned_database() -> TuningDB:
    """A database in which the empty chain is the winner of both kernels, twice as fast as the heuristic's when timed alone."""
    db = TuningDB.open(":none:")
    for key, kernel in UNBOUND.kernels.items():
        linear, own = COMPILER.linear_of(kernel, ()), COMPILER.linear_of(kernel, COMPILER.heuristic(kernel))
        assert linear != own
        db.record([Measurement(key, TARGET.key, (), linear, "ok", COMPILER.pair.revision, COMPILER.pair.key, 1, "confirm", time=1e-6,
                               baseline=2e-6, baseline_linear=own, ratio=0.5, ratio_low=0.49, ratio_high=0.51),
                   Verdict(key, TARGET.key, linear, "verified", COMPILER.pair.revision)])
    return db


def timing(db: TuningDB, ratios: dict[str, Ratio], noisy: str | None = None,
           plan: Ratio = EQUAL) -> tuple[Callable[[], BothWays | None], list[list[str]]]:
    """(a stand-in for the timing of the plan, in which kernels with the database's chain have the given ratios, and the plan has the ratio
    `plan` while there are any; for each of its calls the list of these kernels)."""
    asked: list[list[str]] = []
    heuristics = {k: Choice(COMPILER.heuristic(v), "heuristic", "") for k, v in UNBOUND.kernels.items()}

    def timed() -> BothWays:
        choices = choose_each(UNBOUND.kernels, Resolved(CONFIG, COMPILER, db, {}))
        changed = [k for k, c in choices.items() if c.source == "database"]
        asked.append(changed)
        kernels = tuple(InPlan(k, 1, None, Gain(1e-6, ratios[k].median * 1e-6), 0.0, 0.0, ratio=ratios[k]) for k in changed)
        whole = plan if changed else Ratio(1.0, 1.0, 1.0)
        check = PlanCheck(1e-3, whole, 0.0, 9, noisy, 1, len(changed), kernels)
        return BothWays(check, compile_all(UNBOUND.kernels, heuristics, COMPILER), compile_all(UNBOUND.kernels, choices, COMPILER))
    return timed, asked


def settle(digest: str, timed: Callable[[], BothWays | None], db: TuningDB) -> PlanCheck | None:
    """The check of the plan after all rounds; `timed` returns None when no time is left."""
    settling = Settling(UNBOUND, digest, COMPILER, db)
    while (now := timed()) is not None and settling.gives_up(now):
        pass
    return settling.check


def test_a_chain_that_loses_inside_its_plan_is_not_used_again() -> None:
    with tuned_database() as db:
        timed, asked = timing(db, {GEMM: SLOWER, SOFTMAX: FASTER})
        check = settle("p" * 32, timed, db)
        assert asked == [[GEMM, SOFTMAX], [SOFTMAX]] and check is not None
        assert check.given_up == ("gemm (block.linear): inside the plan its chain takes 1.30 µs, the heuristic's 1.00 µs",)
        now = choose_each(UNBOUND.kernels, Resolved(CONFIG, COMPILER, db, {}))
        assert (now[GEMM].source, now[SOFTMAX].source) == ("heuristic", "database")
        [told] = [m for m, _ in db.select(Measurement, GEMM) if m.inside]
        assert told.inside == "p" * 32 and told.chain == () and (told.ratio, told.ratio_low) == (1.3, 1.2)
        again, asked = timing(db, {GEMM: FASTER, SOFTMAX: FASTER})
        kept = settle("p" * 32, again, db)
        assert kept is not None and kept.given_up == () and asked == [[SOFTMAX]]


def test_what_is_not_certain_gives_nothing_up() -> None:
    with tuned_database() as db:
        timed, asked = timing(db, dict.fromkeys((GEMM, SOFTMAX), Ratio(1.2, 0.95, 1.4)))
        check = settle("p" * 32, timed, db)
        assert check is not None and check.given_up == ()
        assert len(asked) == 1 and not any(m.inside for m, _ in db.select(Measurement))


def test_a_busy_machine_keeps_no_chain_that_is_certain_to_lose() -> None:
    with tuned_database() as db:
        timed, asked = timing(db, {GEMM: SLOWER, SOFTMAX: Ratio(1.2, 0.95, 1.4)}, noisy="the machine was busy")
        check = settle("p" * 32, timed, db)
        assert check is not None and len(check.given_up) == 1 and asked == [[GEMM, SOFTMAX], [SOFTMAX]]
        assert [m.noisy for m, _ in db.select(Measurement) if m.inside] == [True]


def test_a_plan_that_is_slower_as_a_whole_keeps_the_heuristics_chains() -> None:
    """No kernel stands out: each may lose too little to be seen."""
    with tuned_database() as db:
        timed, asked = timing(db, dict.fromkeys((GEMM, SOFTMAX), Ratio(1.02, 0.98, 1.05)), plan=Ratio(1.04, 1.01, 1.06))
        check = settle("p" * 32, timed, db)
        assert asked == [[GEMM, SOFTMAX], []] and check is not None and len(check.given_up) == 2
        assert "the plan takes 1.04 ms with its tuned chains, 1.00 ms with the heuristic's" in check.given_up[0]
        assert {c.source for c in choose_each(UNBOUND.kernels, Resolved(CONFIG, COMPILER, db, {})).values()} == {"heuristic"}


def test_a_chain_that_gains_stays_in_a_plan_that_is_slower_as_a_whole() -> None:
    with tuned_database() as db:
        timed, asked = timing(db, {GEMM: FASTER, SOFTMAX: Ratio(1.2, 0.95, 1.4)}, plan=Ratio(1.04, 1.01, 1.06))
        check = settle("p" * 32, timed, db)
        assert asked[:2] == [[GEMM, SOFTMAX], [GEMM]] and check is not None and len(check.given_up) == 1


def test_no_time_is_left() -> None:
    with tuned_database() as db:
        assert settle("p" * 32, lambda: None, db) is None
        timed, asked = timing(db, {GEMM: SLOWER, SOFTMAX: SLOWER})
        check = settle("p" * 32, lambda: None if asked else timed(), db)
        assert len(asked) == 1 and check is not None and len(check.given_up) == 2, "the first timing stands"


def test_the_rounds_are_few() -> None:
    """If every chain that the database chooses is slower, the rounds end; the last round only measures and gives nothing up."""
    with tuned_database() as db, TuningDB.open(":none:") as other:
        timed, asked = timing(db, {GEMM: SLOWER, SOFTMAX: FASTER})
        settle(plan_digest(UNBOUND, TARGET.key), timed, other)
        assert len(asked) == ROUNDS



def test_what_a_search_at_prepare_found_is_settled_inside_the_plan(monkeypatch: pytest.MonkeyPatch,
                                                                   caplog: pytest.LogCaptureFixture) -> None:
    def check(unbound: Any, heuristic: Any, tuned: Any, *a: Any, **k: Any) -> PlanCheck:
        slower = [key for key in (GEMM,) if tuned[key].chain != heuristic[key].chain]
        kernels = tuple(InPlan(key, 1, None, Gain(1e-6, 1.3e-6), 0.0, 0.0, ratio=SLOWER) for key in slower)
        return PlanCheck(1e-3, Ratio(1.0, 0.99, 1.01), 0.0, 9, None, 1, len(slower), kernels)
    monkeypatch.setattr(at_prepare, "check_plan", check)
    found = {k: Choice((), "beam", "2.00× the heuristic") for k in (GEMM, SOFTMAX)}
    with tuned_database() as db, caplog.at_level("WARNING", "svod"):
        settled = at_prepare.settle_at_prepare(UNBOUND, found, Resolved(CONFIG, COMPILER, db, {}), BEAM)
    assert settled[GEMM].source == "heuristic" and settled[GEMM].chain == COMPILER.heuristic(UNBOUND.kernels[GEMM])
    assert settled[SOFTMAX] is found[SOFTMAX], "what is not given up stays as the search found it"
    assert "a chain is given up, as it is slower in this plan: gemm (block.linear)" in caplog.text
    plain = {k: Choice(COMPILER.heuristic(v), "heuristic", "") for k, v in UNBOUND.kernels.items()}
    monkeypatch.setattr(at_prepare, "check_plan", None)
    with tuned_database() as db:
        settled = at_prepare.settle_at_prepare(UNBOUND, plain, Resolved(CONFIG, COMPILER, db, {}), BEAM)
        assert settled == plain, "nothing was found: nothing is timed"


def test_a_plan_with_rounded_kernels_is_settled_as_a_whole(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Under the policy "fast", a kernel that is rounded keeps its chain, and runs with it where the others are timed."""
    checked = []

    def check(unbound: UnboundPlan, heuristic: Any, tuned: Any, *a: Any, **k: Any) -> PlanCheck:
        arrays = synthetic_arrays(unbound)
        plans = [build_plan(unbound, code, arrays, device=TARGET.device) for code in (heuristic, tuned)]
        checked.append([[kernel.chain for kernel in plan.kernels] for plan in plans])
        slower = [key for key in unbound.kernels if tuned[key].chain != heuristic[key].chain]
        kernels = tuple(InPlan(key, 1, None, Gain(1e-6, 1.3e-6), 0.0, 0.0, ratio=SLOWER) for key in slower)
        return PlanCheck(1e-3, Ratio(1.0, 0.99, 1.01), 0.0, 9, None, 1, len(slower), kernels)
    monkeypatch.setattr(at_prepare, "check_plan", check)
    monkeypatch.setattr(at_prepare, "search_at_prepare", lambda *a: at_prepare.Searched({SOFTMAX: Choice((), "beam", "2.00×")}, True))
    rounding, config = "ROUND(out, bfloat16)", replace(CONFIG, numerics=FAST, max_error=0.1, beam=replace(BEAM, ignore_cache=True))
    with tuned_database() as db, caplog.at_level("WARNING", "svod"):
        resolved = Resolved.of(config, TARGET.allowing(*config.allowed), db)
        code = compile_unbound_plan(UNBOUND, {}, resolved, rounded={GEMM: Choice(parse_chain(rounding), "fast", "")})
    own = chain_text(COMPILER.heuristic(UNBOUND.kernels[SOFTMAX]))
    assert checked == [[[rounding, own], [rounding, ""]], [[rounding, own], [rounding, own]]]
    assert {k: chain_text(c.chain) for k, c in code.items()} == {GEMM: rounding, SOFTMAX: own}
    assert "a chain is given up, as it is slower in this plan: softmax (block.softmax)" in caplog.text
