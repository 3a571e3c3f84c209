"""Lock files: written chains are used, and no content of a file leads to an error, wrong numbers or a slow kernel."""
from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import svod
from svod import PrepareConfig, Tensor
from svod.compile.plan.compiler import compiler_for
from svod.core.kernel.chain_text import chain_text
from svod.core.kernel.scheduler import Opt
from svod.errors import ConfigError
from svod.tune.checks import to_transfer
from svod.tune.db import TuningDB, Verdict
from svod.tune.lock import Locked, LockedRounding, check_whole, locked_lines, read_lock, write_lock
from svod.tune.resolved import resolve
from tests.tune.db.samples import choice

A, B = (np.random.default_rng(n).standard_normal((48, 48)).astype(np.float32) for n in (1, 2))
HEADER = '{"format": "svod-lock", "version": 1}\n'


def kernel() -> Any:
    return svod.kernel(Tensor(A) @ Tensor(B))


def prepared(lock: Path) -> Any:
    """Prepare a product with a lock file, check its numbers, and return its kernel."""
    y = Tensor(A) @ Tensor(B)
    plan = y.prepare(PrepareConfig(lock=str(lock), db=":none:"))
    plan.execute()
    np.testing.assert_allclose(y.numpy(), A.astype(np.float64) @ B, rtol=1e-4, atol=1e-4)
    return plan.kernels[0]


def test_what_is_locked_is_used_on_its_target_alone(tmp_path: Path) -> None:
    k = kernel().apply("UPCAST(o0, 4) UPCAST(o1, 16)")
    lines = [Locked(k.key, k.state.target.key, k.state.applied_opts, "gemm", "fc", 1.25), Locked(k.key, "another/target", (), "gemm")]
    assert write_lock(tmp_path / "m.lock.jsonl", lines) == 2
    found = prepared(tmp_path / "m.lock.jsonl")
    assert found.opts_source == "lock" and found.chain == k.chain == "UPCAST(o0, 4) UPCAST(o1, 16)"
    text = (tmp_path / "m.lock.jsonl").read_text().splitlines()
    assert json.loads(text[2]) == {"chain": k.chain, "from": "fc", "gain": 1.25, "kernel": k.key, "name": "gemm",
                                   "target": k.state.target.key}
    write_lock(tmp_path / "m.lock.jsonl", lines[1:])
    assert prepared(tmp_path / "m.lock.jsonl").opts_source == "heuristic"


def test_a_lock_for_other_targets_alone_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For example in a container with another number of cores. The warning says for which targets the file has lines, and this target."""
    k, path = kernel(), tmp_path / "m.lock.jsonl"
    here = k.state.target.key
    write_lock(path, [Locked(name * 32, f"cpu/{name}", ()) for name in "abca"] + [Locked("e" * 32, "cpu/a", ())])
    with caplog.at_level(logging.WARNING, "svod"):
        assert prepared(path).opts_source == "heuristic" and prepared(path).opts_source == "heuristic"
    said = f"the lock file {path} has 2 kernels for cpu/a, 1 kernel for cpu/b and others for 1 more target, none for this machine's {here}"
    assert caplog.text.count(said) == 1
    caplog.clear()
    write_lock(path, [Locked("d" * 32, here, ()), Locked("a" * 32, "cpu/a", ())])
    with caplog.at_level(logging.WARNING, "svod"):
        assert prepared(path).opts_source == "heuristic"
    assert "none for this machine" not in caplog.text


def test_a_lock_whose_lines_fit_no_kernel_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here, path = kernel().state.target.key, tmp_path / "m.lock.jsonl"
    write_lock(path, [Locked(name * 32, here, ()) for name in "ab"])
    with caplog.at_level(logging.WARNING, "svod"):
        for _ in range(2):
            assert prepared(path).opts_source == "heuristic"
        (Tensor(A) @ Tensor(B)).exp().sum().prepare(PrepareConfig(lock=str(path), db=":none:"))
    assert caplog.text.count(f"the lock file {path} has 2 kernels for this machine, and so far none of this program's") == 1


def test_kernels_of_small_plans_count_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here, path = kernel().state.target.key, tmp_path / "m.lock.jsonl"
    write_lock(path, [Locked(name * 32, here, ()) for name in "abcd"])
    config = PrepareConfig(lock=str(path), db=":none:")
    with caplog.at_level(logging.WARNING, "svod"):
        (Tensor(A) @ Tensor(B)).prepare(config)
        assert not caplog.records
        (Tensor(A) + Tensor(B)).sin().prepare(config)
    assert caplog.text.count("has 4 kernels for this machine, and so far none") == 1


def test_a_lock_that_is_used_or_of_a_larger_plan_is_not_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A program makes other plans beside that of the model that a lock file is for."""
    k, larger, used = kernel().apply("UPCAST(o0, 4) UPCAST(o1, 16)"), tmp_path / "larger.lock.jsonl", tmp_path / "used.lock.jsonl"
    here = k.state.target.key
    write_lock(larger, [Locked(name * 32, here, ()) for name in "abc"])
    write_lock(used, [Locked(k.key, here, k.state.applied_opts), Locked("a" * 32, here, ())])
    with caplog.at_level(logging.WARNING, "svod"):
        assert prepared(larger).opts_source == "heuristic" and prepared(used).opts_source == "lock"
        (Tensor(A) @ Tensor(B)).exp().sum().prepare(PrepareConfig(lock=str(used), db=":none:"))
    assert not caplog.records


def test_lines_for_other_threads_are_proposed_to_be_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    k, path = kernel(), tmp_path / "m.lock.jsonl"
    here = k.state.target
    more, chain = here.key.rpartition("/t")[0] + "/t64", tuple(Opt(*o) for o in (("UPCAST", "o1", 8), ("THREAD", "o0", 64)))
    config = PrepareConfig(lock=str(path), db=":none:", check_budget=0.0)

    def proposed(*lines: Locked) -> list[str]:
        path.unlink(missing_ok=True)
        write_lock(path, lines)
        found = to_transfer(k.kernel, resolve(config))
        return [] if found is None else [chain_text(c) for c in found.chains]
    found = proposed(Locked(k.key, more, chain), Locked("e" * 32, more, chain))
    assert found and all(c.startswith("UPCAST(o1, 8)") and f"THREAD(o0, {here.threads})" in c for c in found)
    assert proposed(Locked(k.key, "another/target", chain)) == proposed(Locked("e" * 32, more, chain)) == []
    with caplog.at_level(logging.WARNING, "svod"):
        write_lock(path, [Locked(k.key, more, chain)])
        assert (Tensor(A) @ Tensor(B)).prepare(config).kernels[0].opts_source == "heuristic"
    assert f"none for this machine's {here.key}; those for other threads are checked before they are used; svod-tune -o" in caplog.text


def test_the_environment_names_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    k = kernel().apply("UPCAST(o0, 4) UPCAST(o1, 16)")
    write_lock(tmp_path / "l.jsonl", [Locked(k.key, k.state.target.key, k.state.applied_opts)])
    monkeypatch.setenv("SVOD_LOCK", str(tmp_path / "l.jsonl"))
    assert (Tensor(A) @ Tensor(B)).prepare(PrepareConfig(db=":none:")).kernels[0].opts_source == "lock"


@pytest.mark.parametrize("text", [
    "", "not json", "[]", '{"format": "svod-tune-db", "version": 2}\n', '{"format": "svod-lock", "version": 99}\n', "\x00" * 100,
    HEADER + '{"kernel": KERNEL, "target": TARGET, "chain": "UPCAST(o9, 4)"}\n',
    HEADER + '{"kernel": KERNEL, "target": TARGET, "chain": 5}\n',
    HEADER + "[" * 5000, HEADER + '{"kernel": KERNEL, "target": TARGET, "chain": "import os"}\n',
    HEADER + '{"kernel": KERNEL, "target": TARGET, "chain": "' + "UPCAST(o0, 2) " * 5000 + '"}\n'])
def test_what_cannot_be_used_is_said_and_the_heuristic_runs(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    k = kernel()
    path = tmp_path / "l.jsonl"
    path.write_text(text.replace("KERNEL", json.dumps(k.key)).replace("TARGET", json.dumps(k.state.target.key)))
    with caplog.at_level(logging.WARNING, "svod"):
        assert prepared(path).opts_source == "heuristic"
    assert str(path) in caplog.text and ("should be text" in caplog.text) == ('"chain": 5' in text)


def test_what_is_no_lock_file_is_said_to_be_unused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, text, said in (("empty", "", "it is empty"), ("script", "import numpy\n", "no lock file of svod"),
                             ("newer", '{"format": "svod-lock", "version": 9}\n', "update svod")):
        (tmp_path / name).write_text(text)
        assert locked_lines(tmp_path / name) == {}
        assert f"the lock file {tmp_path / name} is not used: " in caplog.text and said in caplog.text
    (tmp_path / "long").write_text(HEADER + json.dumps({"kernel": "k", "target": "t", "chain": "TILE(o0, 2) " * 10_000}))
    assert locked_lines(tmp_path / "long") == {} and "its chain has 120000 characters; 20000 are read" in caplog.text


def test_lines_of_what_was_not_searched_stay(tmp_path: Path) -> None:
    """A file may have lines for several targets, and its kernels may be tuned one by one: lines of other targets and kernels stay."""
    path, chain = tmp_path / "l.jsonl", (Opt("TILE", "o0", 4),)
    old = [Locked(k, t, chain, k, "fc", 1.5) for k in "abc" for t in ("here", "there")]
    write_lock(path, old)
    new = Locked("a", "here", (), "a")
    assert write_lock(path, [new], {"here": {"a", "b"}}) == 5, "c is no kernel of the model any more"
    assert set(locked_lines(path).values()) == {new, *(x for x in old if (x.kernel, x.target) not in (("a", "here"), ("c", "here")))}
    path.write_bytes(path.read_bytes() + b'{"kernel": "\xff", "target": "there", "chain": "", "gain": "x"}\n')
    assert write_lock(path, [new], {"here": {"a", "b"}}) == 6
    assert write_lock(path, [new]) == 1


def test_choices_of_kernels_to_round_come_back(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    lines = [LockedRounding(r, "gemm") for r in choice("a" * 32, "b" * 32)]
    assert write_lock(path, [Locked("k", "t", ())], None, lines) == 1
    assert read_lock(path) == ({("k", "t"): Locked("k", "t", ())}, tuple(lines), ())
    header, _, first, _ = path.read_text().splitlines()
    assert json.loads(header)["version"] == 2 and '"chain": "ROUND(out, bfloat16) UPCAST(o0, 8)' in first and '"name": "gemm"' in first
    write_lock(path, [Locked("k", "t", ())])
    assert json.loads(path.read_text().splitlines()[0])["version"] == 1, "a file without them is for older versions, too"


def test_a_choice_that_lost_a_line_is_not_used_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, other = tmp_path / "l.jsonl", [LockedRounding(r) for r in choice("a" * 32, plan="other")]
    write_lock(path, [Locked("k", "t", ())], None, [*[LockedRounding(r) for r in choice("a" * 32, "b" * 32, "c" * 32)], *other])
    whole = path.read_text().splitlines()
    lost = next(i for i, line in enumerate(whole) if '"' + "b" * 32 + '"' in line)
    path.write_text("\n".join(whole[:lost] + whole[lost + 1:]) + "\n")
    assert read_lock(path) == ({("k", "t"): Locked("k", "t", ())}, tuple(other), ())
    said = "2 of 3 lines are there of the choice of kernels to round for plan 7a7a7a7a7a7a, which is not used"
    assert said in caplog.text
    assert "choose again with svod-tune --numerics fast --max-error E" in caplog.text
    with pytest.raises(ConfigError, match=said):
        check_whole(path)
    path.write_text("".join(line.replace('"of": 3, ', "") + "\n" for line in path.read_text().splitlines()))
    assert len(read_lock(path).roundings) == 3, "files of versions that told no number are read as they are"


def test_a_line_that_is_there_twice_does_not_replace_a_lost_one(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    write_lock(path, [], None, [LockedRounding(r) for r in choice("a" * 32, "b" * 32)])
    first, second, _ = path.read_text().splitlines()
    path.write_text(f"{first}\n{second}\n{second}\n")
    assert read_lock(path).roundings == ()


def test_a_new_choice_for_a_plan_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path, a, b = tmp_path / "l.jsonl", "a" * 32, "b" * 32

    def kept(*new: LockedRounding, searched: dict[str, set[str]]) -> set[tuple[str, str, float]]:
        write_lock(path, [], None, [LockedRounding(r) for r in (*choice(a, b, target="here"), *choice(a, b, target="there"),
                                                                *choice(b, target="here", plan="other"))])
        write_lock(path, [], searched, new)
        return {(x.target, x.record.plan, x.record.taken_at) for x in read_lock(path).roundings}
    old = ("here", "7a" * 16, 1e9), ("there", "7a" * 16, 1e9), ("here", "other", 1e9)
    assert kept(searched={"here": {a, b}}) == set(old)
    newer = [LockedRounding(r) for r in choice(a, target="here", weights="of today", taken_at=2e9)]
    assert kept(*newer, searched={"here": {a, b}}) == {("here", "7a" * 16, 2e9), *old[1:]}
    assert kept(searched={"here": {b}}) == set(old[1:]), "the model has no longer a plan with the kernel a"


@pytest.mark.parametrize(("changes", "reason"), [
    ({"kind": "surprise"}, "unknown kind 'surprise'"), ({"plan": None}, "plan"), ({"error": "small"}, "error"),
    ({"chain": 5}, "should be text"), ({"used": "yes"}, "used"), ({"plan_error": -1.0}, "plan_error"),
    ({"chain": "import os"}, "import"), ({"id": "0" * 32}, "altered")])
def test_a_malformed_choice_is_said(changes: dict[str, object], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "l.jsonl"
    line = {**LockedRounding(choice("a" * 32)[0]).to_json(), **changes}
    path.write_text(HEADER.replace("1", "2") + json.dumps(line) + "\n")
    assert read_lock(path) == ({}, (), ()) and f"the lock file {path}: line 2: " in caplog.text and reason in caplog.text


def test_a_lock_that_is_not_there_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert prepared(tmp_path / "nowhere.jsonl").opts_source == "heuristic" and "cannot be read and is not used" in caplog.text
    for other in (tmp_path, Path("/dev/zero")):
        assert locked_lines(str(other)) == {} and f"{other} cannot be read and is not used: it is no file" in caplog.text


def test_a_chain_that_is_predicted_to_be_far_slower_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = (Tensor(np.ones((256, 256), np.float32)) for _ in range(2))
    k = svod.kernel(a @ b)
    write_lock(tmp_path / "l.jsonl", [Locked(k.key, k.state.target.key, ())])
    plan = (a @ b).prepare(PrepareConfig(lock=str(tmp_path / "l.jsonl"), db=":none:"))
    assert plan.kernels[0].opts_source == "heuristic" and "times what the heuristic's does" in caplog.text


def test_a_chain_that_was_found_wrong_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    k = kernel().apply("UPCAST(o0, 4) UPCAST(o1, 16)")
    target, compiler = k.state.target, compiler_for(k.state.target, PrepareConfig())
    linear = compiler.linear_of(k.kernel, k.opts)
    write_lock(tmp_path / "l.jsonl", [Locked(k.key, target.key, k.state.applied_opts)])

    def source(codegen: int) -> str:
        path = tmp_path / f"{codegen}.db"
        with TuningDB.open(path) as db:
            db.record([Verdict(k.key, target.key, linear, "wrong", codegen)])
        plan = (Tensor(A) @ Tensor(B)).prepare(PrepareConfig(lock=str(tmp_path / "l.jsonl"), db=str(path)))
        return str(plan.kernels[0].opts_source)
    assert source(compiler.pair.revision - 1) == "lock", "an older code generator made it wrong"
    assert source(compiler.pair.revision) == "heuristic" and "was found wrong" in caplog.text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=60) | st.sampled_from([HEADER.encode(), b'{"kernel": "k", "target": "t", "chain": "UPCAST(o0, 4)"}\n']),
                max_size=6))
def test_any_bytes_are_read_without_an_error(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("lock") / "l.jsonl"
    path.write_bytes(b"".join(parts))
    assert all(isinstance(o, Opt) for line in locked_lines(path).values() for o in line.chain)


@given(st.lists(st.tuples(st.sampled_from(["UPCAST", "TILE"]), st.sampled_from(["o0", "r0"]), st.integers(0, 64)), max_size=5))
def test_chains_come_back(tmp_path_factory: pytest.TempPathFactory, opts: list[tuple[str, str, int]]) -> None:
    chain = tuple(Opt(*o) for o in opts)
    path = tmp_path_factory.mktemp("lock") / "l.jsonl"
    write_lock(path, [Locked("k", "t", chain)])
    assert locked_lines(path) == {("k", "t"): Locked("k", "t", chain)} and chain_text(chain) in path.read_text()
