"""Chains that were not measured on this machine: each is measured once, and used only if it is right and no slower than the heuristic's."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svod import BeamConfig, PrepareConfig, Tensor
from svod import kernel as kernel_by_hand
from svod.compile.plan.compiler import Compiler, Heuristic, compiler_for
from svod.core.kernel.chain_text import chain_of
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt
from svod.tune import at_prepare
from svod.tune.chains import NOT_CHECKED, choose, fault, objection
from svod.tune.checks import to_check, to_transfer
from svod.tune.db import OWN, TEAM, Measurement, Record, Search, TuningDB, layers, moving
from svod.tune.db.records import CHECK, TRANSFER
from svod.tune.resolved import database, resolve
from svod.tune.unfinished import left_to_search
from tests.tune.db.samples import confirmed, verdict

RNG = np.random.default_rng(7)
SLOW: Any = (["UPCAST", "o0", 2],)


def product(m: int = 96, n: int = 80, k: int = 64) -> tuple[Tensor, np.ndarray[Any, Any]]:
    a, b = (RNG.random(shape, np.float32) for shape in ((m, k), (k, n)))
    return Tensor(a) @ Tensor(b), a @ b


def kernel_of(t: Tensor) -> tuple[Kernel, Compiler]:
    plan = t.prepare(PrepareConfig(db=":none:"))
    form = plan.kernels[0].form
    assert form is not None
    return form.kernel, compiler_for(form.target, PrepareConfig())


def evidence(kernel: Kernel, compiler: Compiler, chain: Any, ratio: float, **changes: Any) -> list[Record]:
    """A confirmed measurement of a chain and its verification, as another machine might have recorded them."""
    opts = tuple(Opt.from_json(list(o)) for o in chain)
    linear = compiler.linear_of(kernel, opts)
    facts = {"chain": tuple(o.to_json() for o in opts), "codegen": compiler.pair.revision, "compiler": compiler.pair.key, **changes}
    return [confirmed(ratio, linear, kernel.key, compiler.target.key, **facts),
            verdict("verified", linear, kernel.key, compiler.target.key, compiler.pair.revision)]


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[Record]], PrepareConfig]]:
    """A configuration whose database has the given records in the team's layer."""
    monkeypatch.setattr(at_prepare, "_checking", at_prepare._Clock())
    opened: list[TuningDB] = []

    def make(records: list[Record]) -> PrepareConfig:
        config = PrepareConfig(db=str(tmp_path / "tuning.db"), check_budget=300.0)   # workers start slowly on a busy machine
        opened.append(database(config))
        opened[0].record(records, layer=TEAM, must=True)
        return config
    yield make
    for db in opened:
        db.close()


@pytest.mark.slow
def test_a_chain_of_others_is_measured_once_before_it_is_used(team: Callable[[list[Record]], PrepareConfig],
                                                             caplog: pytest.LogCaptureFixture) -> None:
    t, wanted = product()
    kernel, compiler = kernel_of(t)
    heuristic = [o.to_json() for o in compiler.heuristic(kernel)]
    chain = [*heuristic[:-1]] if len(heuristic) > 1 else []
    config = team(evidence(kernel, compiler, chain, 0.5))
    db = database(config)
    assert choose(kernel, resolve(config)).why == NOT_CHECKED
    with caplog.at_level(logging.WARNING, "svod"):
        t2, wanted = product()
        plan = t2.prepare(config)
    assert "checking chains of others or of relatives for 1 kernel" in caplog.text
    plan.execute()
    np.testing.assert_allclose(t2.numpy(), wanted, rtol=1e-4)
    linear = compiler.linear_of(kernel, chain_of(chain))
    here = [m for m, layer in db.select(Measurement, kernel.key) if layer == OWN and m.linear == linear]
    assert here and all(m.strategy == CHECK for m in here)
    assert to_check(kernel, resolve(config)) is None
    caplog.clear()
    with caplog.at_level(logging.WARNING, "svod"):
        product()[0].prepare(config)
    assert "checking" not in caplog.text
    assert {s.strategy for s, _ in db.select(Search, kernel.key)} == {CHECK}
    assert left_to_search(db, kernel.key, compiler.target.key, BeamConfig(width=8)) is None, "a check is no search that was narrower"


def test_a_forged_time_makes_no_kernel_slow(team: Callable[[list[Record]], PrepareConfig]) -> None:
    t, _ = product(160, 160, 160)
    kernel, compiler = kernel_of(t)
    forged = [r for n in range(3) for r in evidence(kernel, compiler, SLOW, 0.01 + 0.001 * n, taken_at=float(n))]
    config = team(forged)
    db = database(config)
    plan = product(160, 160, 160)[0].prepare(config)
    [used] = plan.kernels
    assert [o[0] for o in used.opts] != ["UPCAST"] and used.opts_source in ("heuristic", "database")
    best = db.ranking(kernel.key, compiler.target.key)[0]
    problem = objection(best, kernel, resolve(config))
    assert best.own or (problem is not None and problem != NOT_CHECKED)


@pytest.mark.parametrize(("imported", "source"), [("trust", "database"), ("ignore", "heuristic")])
def test_others_may_be_trusted_or_ignored(imported: str, source: str, team: Callable[[list[Record]], PrepareConfig]) -> None:
    kernel, compiler = kernel_of(product()[0])
    config = team(evidence(kernel, compiler, [o.to_json() for o in compiler.heuristic(kernel)][:-1], 0.5))
    config = PrepareConfig(db=config.db, imported=imported)
    assert [k.opts_source for k in product()[0].prepare(config).kernels] == [source]
    assert not database(config).tried_here(kernel.key, compiler.target.key, compiler.pair.revision)


def test_a_shipped_chain_needs_no_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Until a check of this machine has refused it."""
    kernel, compiler = kernel_of(product()[0])
    chain = [o.to_json() for o in compiler.heuristic(kernel)][:-1]
    with TuningDB.open(tmp_path / "ours.db") as made:
        made.record(evidence(kernel, compiler, chain, 0.5), must=True)
        moving.export(made, tmp_path / "shipped.jsonl")
    monkeypatch.setattr(layers, "shipped_files", lambda: (tmp_path / "shipped.jsonl",))
    config = PrepareConfig(db=str(tmp_path / "tuning.db"))
    with caplog.at_level(logging.WARNING, "svod"):
        [used] = product()[0].prepare(config).kernels
    assert (used.opts_source, chain_of(used.opts)) == ("database", chain_of(chain)) and "checking" not in caplog.text
    database(config).record(evidence(kernel, compiler, chain, 2.0, strategy=CHECK), must=True)
    assert choose(kernel, resolve(config)).source == "heuristic"


def test_a_spent_budget_leaves_the_heuristic(team: Callable[[list[Record]], PrepareConfig], caplog: pytest.LogCaptureFixture) -> None:
    kernel, compiler = kernel_of(product()[0])
    config = team(evidence(kernel, compiler, [o.to_json() for o in compiler.heuristic(kernel)][:-1], 0.5))
    config = PrepareConfig(db=config.db, check_budget=0.0)
    with caplog.at_level(logging.INFO, "svod"):
        [used] = product()[0].prepare(config).kernels
    template = kernel_by_hand(product()[0]).heuristic().template
    assert used.opts_source == "heuristic" and template and used.why == f"{NOT_CHECKED}; {template}", used.why
    assert "checking" not in caplog.text and "the check budget of this process" in caplog.text


def test_a_check_that_confirms_the_heuristic_names_its_template(tmp_path: Path) -> None:
    config = PrepareConfig(db=str(tmp_path / "t.db"))
    kernel, compiler = kernel_of(product()[0])
    chain = compiler.heuristic(kernel)
    linear = compiler.linear_of(kernel, chain)
    own = evidence(kernel, compiler, [o.to_json() for o in chain], 1.0, strategy=TRANSFER, baseline_linear=linear)
    with database(config) as db:
        db.record(own, must=True)
        choice = choose(kernel, resolve(config))
    template = kernel_by_hand(product()[0]).heuristic().template
    assert (choice.chain, choice.source) == (chain, "heuristic")
    assert template and choice.told == f"no chain of its relatives is faster here; {template}"


def test_what_is_slower_here_is_not_used_however_often_others_praise_it(tmp_path: Path) -> None:
    kernel, compiler = kernel_of(product()[0])
    with TuningDB.open(tmp_path / "t.db") as db:
        for n in range(5):
            db.record(evidence(kernel, compiler, [], 0.2, taken_at=float(n)), layer=TEAM)
        db.record(evidence(kernel, compiler, [], 1.5, taken_at=9.0))
        [winner] = db.ranking(kernel.key, compiler.target.key)
        assert winner.slower_here and winner.ratio == 0.2
        assert fault(winner, kernel, compiler) == "the chain of others is slower than the heuristic here"


@pytest.mark.slow
def test_a_relatives_chain_is_checked_and_used(team: Callable[[list[Record]], PrepareConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    # on a busy machine two threads wait for each other longer than such a kernel runs, and its chain gains nothing
    monkeypatch.setenv("SVOD_THREADS", "1")
    relative, compiler = kernel_of(product(192, 192, 192)[0])
    kernel, _ = kernel_of(product(128, 160, 96)[0])
    chain = [o.to_json() for o in compiler.heuristic(relative)]
    config = team([])
    db = database(config)
    db.record([*evidence(relative, compiler, chain, 0.5), *described(relative)], must=True)
    # the heuristic is replaced by a poor chain, so that the relative's chain certainly gains something
    bad = (Opt("UPCAST", "o0", 2),)
    monkeypatch.setattr(Compiler, "_heuristic_of", lambda self, k: Heuristic(bad, ""))
    monkeypatch.setattr(type(compiler.backend), "heuristic", lambda self, state: apply(state, bad))
    assert to_transfer(kernel, resolve(config)) is not None
    t, wanted = product(128, 160, 96)
    plan = t.prepare(config)
    plan.execute()
    np.testing.assert_allclose(t.numpy(), wanted, rtol=1e-4)
    [used] = plan.kernels
    assert used.opts_source == "transfer", used.why
    winner = db.winner(kernel.key, compiler.target.key)
    assert winner is not None and winner.strategy == TRANSFER
    assert to_transfer(kernel, resolve(config)) is None, "it is tried once"
    off = PrepareConfig(db=config.db, transfer=False)
    assert [k.opts_source for k in product(64, 160, 96)[0].prepare(off).kernels] == ["heuristic"]


def apply(state: Any, opts: Any) -> Any:
    from svod.core.kernel.apply import apply_opts
    return apply_opts(state, opts)


def described(kernel: Kernel) -> list[Record]:
    from svod.core.ir.serialize import ast_to_data
    from svod.core.schedule.family import family_key
    from svod.tune.db import KernelRecord
    return [KernelRecord(kernel.key, name="gemm", ast=ast_to_data(kernel.ast), ast_version=1, structure=family_key(kernel.ast), flops=1e6,
                         bytes=1e5)]
