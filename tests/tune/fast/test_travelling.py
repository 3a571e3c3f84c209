"""Choices of kernels to round that were made elsewhere: in another database, in a lock file."""
from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svod.config import PrepareConfig
from svod.tune.db import OWN, TEAM, Rounding, TuningDB, described
from svod.tune.db.moving import export, import_file, merge
from svod.tune.lock import Locked, LockedRounding, write_lock
from svod.tune.resolved import resolve
from tests.tune.fast.two_products import W, needs_instructions, of, plan_of, rounded

pytestmark = needs_instructions


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A database in which a plan has chosen to round both of its kernels."""
    plan_of(of(tmp_path / "made.db", 1e-2))[1].execute()
    return tmp_path / "made.db"


def records_of(path: Path) -> list[Rounding]:
    with TuningDB.open(path) as db:
        return [r for r, _ in db.select(Rounding)]


def locked(path: Path, records: list[Rounding], **options: Any) -> PrepareConfig:
    """A configuration with a lock file of these records."""
    write_lock(path, [], None, [LockedRounding(r) for r in records])
    return replace(of(":none:"), lock=str(path), **options)


@pytest.mark.parametrize("options", [{}, {"winners_only": True}, {"winners_only": True, "anonymous": True}, None], ids=str)
def test_a_choice_of_another_database_is_used(options: dict[str, bool] | None, made: Path, tmp_path: Path) -> None:
    """`options`: those of an export; None: the databases are merged."""
    with TuningDB.open(made) as db, TuningDB.open(tmp_path / "empty.db") as empty:
        if options is None:
            merge(empty, made)
        else:
            export(db, tmp_path / "out.jsonl", **options)
            import_file(empty, tmp_path / "out.jsonl")
        assert [layer for _, layer in empty.select(Rounding)] == [TEAM, TEAM]
    plan = plan_of(of(tmp_path / "empty.db"))[1]
    assert rounded(plan) == 2 and {k.opts_source for k in plan.kernels} == {"fast"}
    assert rounded(plan_of(replace(of(tmp_path / "empty.db"), imported="ignore"))[1]) == 0
    assert rounded(plan_of(replace(of(made), imported="ignore"))[1]) == 2


def test_a_choice_is_retracted_and_restored(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = records_of(made)[0]
    with TuningDB.open(made) as db:
        assert db.retract(first.kernel, None, None, "too coarse") == 1
    with caplog.at_level(logging.WARNING, "svod"):
        assert rounded(plan_of(of(made))[1]) == 1
    assert f"1 kernel of a plan stays in float32: the chain of {first.kernel[:12]} was found wrong or was retracted" in caplog.text
    with TuningDB.open(made) as db:
        assert db.restore(first.kernel, None, None, "fine enough") == 1
    assert rounded(plan_of(of(made))[1]) == 2


def test_a_choice_of_a_lock_file_is_used_before_the_database(made: Path, tmp_path: Path) -> None:
    records = records_of(made)
    lock = tmp_path / "m.lock.jsonl"
    how = locked(lock, records)
    plan = plan_of(how)[1]
    assert rounded(plan) == 2 and all(str(lock) in k.why for k in plan.kernels)
    assert rounded(plan_of(how, w=W + 1)[1]) == 0, "it is for constants of the same content"
    one = [replace(r, used=r is records[0]) for r in records]
    assert rounded(plan_of(locked(lock, one, db=str(made)))[1]) == 1
    tight = replace(how, max_error=records[0].plan_error / 2, db=str(tmp_path / "new.db"))
    plan = plan_of(tight)[1]
    assert rounded(plan) == 0, "it holds for its limit alone"
    plan.execute()
    assert {r.max_error for r in records_of(tmp_path / "new.db")} == {tight.max_error}


def test_the_chains_of_a_lock_file_are_rounded_where_the_choice_is_made(made: Path, tmp_path: Path,
                                                                        caplog: pytest.LogCaptureFixture) -> None:
    """A lock file that was written under the policy has chains for its target alone. That there are none for float32 is no mistake."""
    records = records_of(made)
    write_lock(tmp_path / "l.jsonl", [Locked(r.kernel, r.target, ()) for r in records])
    with caplog.at_level(logging.WARNING, "svod"):
        plan = plan_of(replace(of(tmp_path / "t.db", 1e-2), lock=str(tmp_path / "l.jsonl")))[1]
        assert rounded(plan) == 0
    assert "none for this machine" not in caplog.text


def test_a_lock_file_of_an_older_version_is_read(made: Path, tmp_path: Path) -> None:
    path, exact = tmp_path / "old.lock.jsonl", PrepareConfig(numerics="float32", db=":none:")
    line = {"kernel": records_of(made)[0].kernel, "target": resolve(exact).target.key, "chain": "UPCAST(o0, 4) UPCAST(o1, 16)"}
    path.write_text(json.dumps({"format": "svod-lock", "version": 1}) + "\n" + json.dumps(line) + "\n")
    found = {k.key: k.opts_source for k in plan_of(replace(exact, lock=str(path)))[1].kernels}
    assert found[line["kernel"]] == "lock"
    assert rounded(plan_of(replace(of(made), lock=str(path)))[1]) == 2, "the database has the choice"


@pytest.mark.parametrize(("changes", "reason"), [
    ({"linear": "0" * 32}, "gives other code"), ({"chain": (("ROUND", "out", "bfloat16"),)}, "times what the heuristic's does"),
    ({"chain": (("UPCAST", "o7", 8),)}, "does not apply")])
def test_a_chain_that_may_not_be_used_leaves_its_kernel_in_float32(changes: dict[str, Any], reason: str, made: Path, tmp_path: Path,
                                                                   caplog: pytest.LogCaptureFixture) -> None:
    first, second = records_of(made)
    with caplog.at_level(logging.WARNING, "svod"):
        assert rounded(plan_of(locked(tmp_path / "l.jsonl", [replace(first, **changes), second]))[1]) == 1
    assert reason in caplog.text


def test_a_choice_of_this_machine_describes_its_kernels(made: Path) -> None:
    with TuningDB.open(made) as db:
        assert {layer for _, layer in db.select(Rounding)} == {OWN}
        assert described(db).keys() == {r.kernel for r, _ in db.select(Rounding)}
        assert all("gemm" in k.name and k.flops > 0 for k in described(db).values())
