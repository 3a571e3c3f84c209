"""svod-db: each command, bad input, and use without the optional packages."""
from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from svod import Tensor
from svod.cli import _run
from svod.cli.db import verify
from svod.cli.db.commands import cli
from svod.cli.db.reasons import LIBRARY_KERNEL, form_line, plan_lines, predicted_algorithms, reason_lines
from svod.cli.db.scripts import CapturedKernel
from svod.compile.cpu.host import host_target
from svod.compile.lower.program import ProgramSpec
from svod.compile.plan.object_cache import Build, CachedObject, ObjectCache, ObjectKey
from svod.config import PrepareConfig
from svod.core.ir.serialize import ast_to_data
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.schedule.canonical import AST_REVISION
from svod.core.tree.show import print_nest
from svod.errors import ConfigError, DatabaseError
from svod.system.quantities import seconds
from svod.tune.db import KernelRecord, OriginRecord, Search, TuningDB, files, layers
from svod.tune.db.moving import export
from svod.tune.db.transfer import write_records
from svod.tune.lock import Locked, LockedRounding, LockedTimes, write_lock
from svod.tune.plans.forms import ConvolutionForm, key_of
from svod.tune.resolved import resolve
from tests.cli.tune.test_alternatives import Captured
from tests.compile.native import AVX512
from tests.core.corpus import data, gemm, kernel_of
from tests.draws import a_half
from tests.patience import NEVER, wait_until
from tests.plans import canonical
from tests.tune.db.samples import OTHER, TARGET, choice, form_times, plan_times, screened, verdict, winning
from tests.tune.search_kernels import elementwise
from tests.tune.workers.test_child import is_gone

ROOT = Path(__file__).parents[2]
GEMM, CONV = "a1" * 16, "b2" * 16


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database with two kernels, one of them on two targets."""
    monkeypatch.setattr(layers, "shipped_files", lambda: ())
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record([*winning(0.5, "aa", GEMM), *winning(0.8, "bb", CONV), *winning(0.9, "cc", CONV, OTHER),
                   screened("dd", CONV, status="timeout"),
                   OriginRecord(GEMM, "model.py:7")])
    return tmp_path / "t.db"


SHIPPED_KERNEL = "c3" * 16


@pytest.fixture
def with_shipped(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The database of `path`, with shipped records of one of its kernels and of another kernel."""
    with TuningDB.open(tmp_path / "shipped.db") as db:
        db.record([*winning(0.1, "ss", GEMM), *winning(0.2, "zz", SHIPPED_KERNEL)])
        export(db, tmp_path / "shipped.jsonl", winners_only=True, anonymous=True)
    monkeypatch.setattr(layers, "shipped_files", lambda: (tmp_path / "shipped.jsonl",))
    return path


def test_the_commands_tell_what_ships_with_svod_from_the_users_records(with_shipped: Path, tmp_path: Path) -> None:
    path = with_shipped
    rows = {(r["kernel"], r["target"]): r["layer"] for r in json.loads(run(path, "list", "--json").output)}
    assert rows == {(GEMM, TARGET): "shipped", (CONV, TARGET): "own", (CONV, OTHER): "own"}, "the user's kernels, with the chains in use"
    stats = json.loads(run(path, "stats", "--json").output)
    assert stats["kernels"] == 2 and stats["measurements"] == 4 and stats["read"] == []
    assert stats["shipped"] == [str(tmp_path / "shipped.jsonl")] and stats["winners_by_layer"] == {"shipped": 1, "own": 2}
    assert run(path, "export", "-o", str(tmp_path / "out.jsonl"), "--winners").exit_code == 0
    exported = (tmp_path / "out.jsonl").read_text()
    assert GEMM in exported and SHIPPED_KERNEL not in exported and '"ss"' not in exported
    assert run(path, "export", "-o", str(tmp_path / "out.jsonl"), "--kernel", SHIPPED_KERNEL).exit_code != 0
    assert "shipped layer" in run(path, "why", SHIPPED_KERNEL).output
    shown = run(path, "show", SHIPPED_KERNEL).output
    assert "5.00x the heuristic; shipped layer" in shown
    both = run(path, "show", GEMM).output
    assert [line.split("\t")[6] for line in both.splitlines() if line.startswith("confirm\t")] == ["shipped", "own"]
    assert run(path, "gc").exit_code == 0 and run(path, "retract", SHIPPED_KERNEL).exit_code == 0
    assert "found retracted" in run(path, "why", SHIPPED_KERNEL).output


def run(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["--db", str(path), *arguments])


def main(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the console script in a process of its own, as a user does."""
    return subprocess.run([sys.executable, "-m", "svod.cli.db", *arguments], capture_output=True, text=True, cwd=ROOT, check=False,
                          env={**os.environ, **env})


def test_list(path: Path) -> None:
    lines = [line.split("\t") for line in run(path, "list").output.splitlines()]
    assert lines[0] == ["kernel", "name", "from", "target", "heuristic", "tuned", "gain", "layer", "records", "opts"]
    assert [(x[0], x[2], x[3], x[4], x[5], x[6], x[8]) for x in lines[1:]] == [
        (GEMM[:12], "model.py:7", TARGET, "100 µs", "50.0 µs", "2.00×", "1"), (CONV[:12], "", TARGET, "100 µs", "80.0 µs", "1.25×", "2"),
        (CONV[:12], "", OTHER, "100 µs", "90.0 µs", "1.11×", "1")]
    assert lines[1][9] == "UPCAST(o0, 8) ORDER(o0, o0,r0) NOLOCALS()"
    data = json.loads(run(path, "list", "--json").output)
    assert [d["kernel"] for d in data] == [GEMM, CONV, CONV] and data[0]["chain"][0] == ["UPCAST", "o0", 8]
    empty = run(path.with_name("none.db"), "list")
    assert "svod-tune SCRIPT" in str(empty.exception) and not path.with_name("none.db").exists()


def test_the_list_is_filtered_and_ordered(path: Path) -> None:
    with TuningDB.open(path) as db:
        db.record([Search("s", CONV, TARGET, started_at=5.0, ended_at=6.0, outcome="budget spent", result={"calls": 3.0})])

    def listed(*arguments: str) -> list[tuple[str, str]]:
        lines = run(path, "list", *arguments).output.splitlines()
        shown = [(x.split("\t")[0], x.split("\t")[3]) for x in lines[1:]]
        assert [(d["kernel"][:12], d["target"]) for d in json.loads(run(path, "list", "--json", *arguments).output)] == shown
        return shown
    gemm, conv, elsewhere = (GEMM[:12], TARGET), (CONV[:12], TARGET), (CONV[:12], OTHER)
    assert listed() == listed("--sort", "saved") == [conv, gemm, elsewhere], "it is called three times a run"
    assert listed("--sort", "gain") == [gemm, conv, elsewhere] and listed("--sort", "latest") == [conv, gemm, elsewhere]
    assert listed("--from", "model.py") == [gemm] and listed("--target", "/t8") == [elsewhere]
    assert listed("--gain", "1.2") == [conv, gemm] and listed("gemm*", "--gain", "1.5") == [gemm] and listed("gemm_5?2") == listed()
    none = run(path, "list", "conv*")
    assert none.exit_code == 0 and none.output == "none of the 3 kernels fits; svod-db list without filters shows them\n"


@pytest.mark.parametrize("columns", a_half([80, 120]))
def test_the_list_on_a_terminal_has_two_lines_a_kernel(path: Path, columns: int) -> None:
    with TuningDB.open(path) as db:
        db.record(winning(0.25, "ee", "c3" * 16, chain=[("UPCAST", "o0", n) for n in range(2, 20)]))
    lines = on_a_terminal(columns, "--db", str(path), "list").splitlines()
    assert max(map(len, lines)) <= columns
    assert [line for line in lines if line in (TARGET, OTHER)] == [TARGET, OTHER], "each target is named once"
    rows = [(line, below) for line, below in itertools.pairwise(lines) if "×" in line]
    assert len(rows) == 4 and all(below.startswith("    UPCAST(o0, ") for _, below in rows)
    assert "gemm_512 a1a1a1a1" in rows[0][0] and "model.py:7" in rows[0][0]
    assert "gemm_512 c3c3c3c3" in rows[2][0] and rows[2][1].endswith("…")


def on_a_terminal(columns: int, *arguments: str) -> str:
    """Output of svod-db on a terminal of `columns` columns."""
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-m", "svod.cli.db", *arguments],
                  {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"})
    out = b""
    with os.fdopen(fd, "rb", buffering=0) as stream, contextlib.suppress(OSError):     # EIO: the terminal is closed
        while part := stream.read(65536):
            out += part
    assert os.waitpid(pid, 0)[1] == 0, out
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out.decode()).replace("\r\n", "\n")


def test_show_has_the_loops_of_the_chain_in_use(path: Path) -> None:
    kernel, target = canonical(elementwise(1000)), host_target()
    state = apply_opts(Scheduler(kernel, target), [Opt("UPCAST", "o0", 8)])
    with TuningDB.open(path) as db:
        db.record([*winning(0.5, "ee", kernel.key, target.key, chain=[("UPCAST", "o0", 8)])[:2],
                   KernelRecord(kernel.key, "elementwise", ast_to_data(kernel.ast), AST_REVISION),
                   KernelRecord(CONV, "gemm_512", ast={"nodes": []}, ast_version=2)])
        db.record(winning(0.5, "ff", CONV, target.key))
    assert print_nest(state).strip() in run(path, "show", kernel.key[:8]).output
    other = run(path, "show", CONV[:8]).output
    assert "loops     are shown on a machine with this target" in other and "loops     cannot be shown by this svod: " in other


def test_the_database_may_be_named_before_and_behind_the_command(path: Path) -> None:
    other = path.with_name("other.db")
    runner = CliRunner()
    expected = run(path, "list").output
    assert expected and runner.invoke(cli, ["list", "--db", str(path)]).output == expected
    assert runner.invoke(cli, ["--db", str(other), "list", "--json", "--db", str(path)]).output == run(path, "list", "--json").output


MADE_BY = {"import", "merge", "verify"}      # commands that make a database: verify records what it measures of the chains that ship


@pytest.mark.parametrize("name", sorted(cli.commands.keys() - MADE_BY))
def test_a_database_that_is_not_there_is_bad_input(tmp_path: Path, name: str) -> None:
    asks = cli.commands[name].params[0].name in ("kernel", "what")
    arguments = {"export": ["-o", str(tmp_path / "x.jsonl")], "bake": ["m.py", "-o", str(tmp_path)]}.get(name, [GEMM] if asks else [])
    other = tmp_path / "other.db"
    missing = CliRunner().invoke(cli, [name, *arguments, "--db", str(other)])
    assert isinstance(missing.exception, DatabaseError) and not missing.stdout
    said = str(missing.exception)
    assert said.startswith(f"there is no database at {other}; tune something: ") and said.endswith(f"--db {other}")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["import records.jsonl", "merge t.db", f"retract {GEMM}", "verify", "rekey", "gc"])
def test_a_database_that_cannot_be_written_is_said_before_the_work(path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    export(TuningDB.open(path, read_only=True), path.parent / "records.jsonl")
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(files, "takes_files", lambda directory: directory != path.parent)
    for place in ("t.db", "none.db"):
        before = sorted(path.parent.iterdir())
        done = CliRunner().invoke(cli, ["--db", str(path.parent / place), *command.split()])
        assert isinstance(done.exception, DatabaseError) and f"{path.parent / place} cannot be written" in str(done.exception)
        assert not done.stdout and sorted(path.parent.iterdir()) == before


def test_show(path: Path) -> None:
    out = run(path, "show", GEMM[:6]).output
    for piece in (GEMM, "gemm_512", "model.py:7", TARGET, "1 ok", "2.00x the heuristic", "verified"):
        assert piece in out
    data = json.loads(run(path, "show", CONV, "--json").output)
    assert len(data["measurements"]) == 3 and {w["target"] for w in data["winners"]} == {TARGET, OTHER}


def test_a_kernel_is_found_by_where_it_comes_from(path: Path) -> None:
    assert GEMM in run(path, "show", "model.py:7").output
    missing = run(path, "show", "nowhere")
    assert "a name or origin that contains it" in str(missing.exception)


@pytest.mark.parametrize("command", [["list"], ["stats"], ["export", "-o", "kept.jsonl"]])
def test_a_database_with_damaged_pages_is_refused(path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    kept = '{"format": "svod-tune-db", "version": 2}\n'
    Path("kept.jsonl").write_text(kept)
    pages = bytearray(path.read_bytes())
    pages[4096:] = bytes(b ^ 0x5A for b in pages[4096:])
    path.write_bytes(pages)
    done = run(path, *command)
    assert isinstance(done.exception, DatabaseError) and f"{path} is damaged" in str(done.exception)
    assert Path("kept.jsonl").read_text() == kept


def test_why(path: Path) -> None:
    out = run(path, "why", CONV[:8], "--target", TARGET.replace("t2", "t4")).output
    assert "another target" in out and "first difference: threads; asked: 4; in the record: 8" in out
    assert run(path, "why", GEMM).output.count("the database has a winner") == 1


def test_why_names_the_algorithms_of_a_convolution() -> None:
    convolution = Kernel(kernel_of(data(1, 64, 28, 28).conv2d(data(64, 64, 3, 3), padding=1)))
    target = replace(AVX512, threads=2, l3=32 << 20)
    found = predicted_algorithms(Scheduler(convolution, target))
    assert found.startswith("predicted: WINOGRAD(out, 4) ") and ", direct " in found and found.endswith(" cycles")
    assert predicted_algorithms(Scheduler(canonical(elementwise(256)), target)) == ""


def test_why_begins_with_the_lock_file(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the lock file decides if it can be used, also for a kernel that the database does not know; else both reasons are given."""
    lock, kernel, here = tmp_path / "m.lock.jsonl", canonical(elementwise(256)), host_target().key
    with TuningDB.open(path) as db:
        db.record([*winning(0.5, "ee", kernel.key, here), KernelRecord(kernel.key, "elementwise", ast_to_data(kernel.ast), AST_REVISION)])
    write_lock(lock, [Locked(kernel.key, here, (Opt("UPCAST", "o0", 16),), "elementwise", gain=1.5), Locked(CONV, OTHER, (), "conv"),
                      Locked("d4" * 16, "another/target", (), "locked_alone")])
    assert run(path, "why", kernel.key).output.count("the database has a winner") == 1, "without a lock file"
    monkeypatch.setenv("SVOD_LOCK", str(lock))
    out = run(path, "why", kernel.key).output
    assert f"{lock} has its chain, which goes before the tuning database: UPCAST(o0, 16) (1.50× the heuristic" in out
    assert "the database" not in out.replace("the tuning database", "")
    out = run(path, "why", CONV, "--target", TARGET).output
    assert f"has no chain for it on this target, but on {OTHER}\n" in out and "the database has a winner" in out
    assert "has no chain for it\n" in run(path, "why", GEMM).output
    out = run(path, "why", "locked_alone").output
    assert "locked_alone\n    another/target\n" in out and "goes before the tuning database: as it is" in out
    other = tmp_path / "other.lock.jsonl"
    write_lock(other, [Locked(kernel.key, here, (Opt("UPCAST", "o7", 8),))])
    out = run(path, "why", kernel.key, "--lock", str(other)).output
    assert f"the chain of the lock file {other} is not used: it does not apply: " in out and "the database has a winner" in out
    with pytest.raises(ConfigError, match=r"nothing\.jsonl"):
        CliRunner().invoke(cli, ["why", GEMM, "--lock", str(tmp_path / "nothing.jsonl")], catch_exceptions=False)


@pytest.mark.parametrize(("content", "said"), [
    ('{"format": "svod-lock", "version": 2}\n{"chain": "", "kernel": "KEY", "target": "TARGET"}\n{"kind": "rounding", "cha', "line 3: "),
    ('{"format": "svod-lock", "version": 2}\n{"kernel": 3}\n{"chain": "", "kernel": "KEY", "target": "TARGET"}\n', "line 2: "),
    ("nonsense", "is not used: this is no lock file"), ("", "is not used: it is empty")])
def test_why_goes_on_with_what_can_be_read_of_a_lock_file(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str,
                                                          said: str) -> None:
    lock = tmp_path / "m.lock.jsonl"
    lock.write_text(content.replace("KEY", GEMM).replace("TARGET", TARGET))
    monkeypatch.setenv("SVOD_LOCK", str(lock))
    done = run(path, "why", GEMM)
    assert done.exit_code == 0 and said in done.stderr and done.stderr.count(str(lock)) == 1
    assert ("what can be read of it is used" in done.stderr) == ("KEY" in content)
    assert ("has its chain, which goes before" if "KEY" in content else "has no chain for it") in done.output


@pytest.mark.parametrize("made", [lambda: data(3, 17).sort()[0], lambda: data(1, 7).cumsum(1)], ids=["sort", "scan"])
def test_why_says_that_library_kernels_have_no_chain_to_choose(path: Path, made: Callable[[], Tensor]) -> None:
    kernel = Kernel(kernel_of(made()))
    with TuningDB.open(path) as db:
        asked = CapturedKernel(kernel.key, host_target().key, "by_hand", "", ast_to_data(kernel.ast))
        assert reason_lines(db, asked, None)[2:] == [f"    {LIBRARY_KERNEL}"]
        other = Kernel(kernel_of(data(3, 17).exp()))
        lines = reason_lines(db, asked._replace(kernel=other.key, ast=ast_to_data(other.ast)), None)
        assert "the kernel is not known" in lines[2] and LIBRARY_KERNEL not in "".join(lines)


def test_choices_of_kernels_to_round_are_shown(path: Path, tmp_path: Path) -> None:
    alone = "d4" * 16
    with TuningDB.open(path) as db:
        db.record([*choice(GEMM, alone, CONV), KernelRecord(alone, name="never_searched")])
    rounded = "in plan 7a7a7a7a7a7a its factors are rounded to bfloat16: rounded alone it costs an error of 2.0e-03"
    for command in ("show", "why"):
        assert rounded in run(path, command, GEMM).output and "it stays in float32" in run(path, command, CONV).output
        assert "it stays in float32" in run(path, command, "never_searched").output
    assert "ROUND(out, bfloat16) UPCAST(o0, 8)" in run(path, "show", GEMM).output
    assert [r["used"] for r in json.loads(run(path, "show", GEMM, "--json").output)["roundings"]] == [True]
    stats = json.loads(run(path, "stats", "--json").output)
    assert (stats["roundings"], stats["plans_that_chose_roundings"]) == (3, 1)
    result = run(path, "retract", alone)
    assert result.exit_code == 0 and "1 chain of" in result.output

    lock = tmp_path / "m.lock.jsonl"
    write_lock(lock, [], None, [LockedRounding(r, "of_the_lock") for r in choice("e5" * 16)])
    out = run(path, "why", "of_the_lock", "--lock", str(lock)).output
    assert "of_the_lock\n" in out and f"by the lock file, {rounded}" in out


def test_why_under_the_policy_fast_with_a_lock_file_that_has_no_chain_of_a_kernel(path: Path, tmp_path: Path) -> None:
    """A choice of kernels to round has the chains of those that it rounds."""
    kernel, other = Kernel(kernel_of(gemm(64, 64, 256))), Kernel(kernel_of(gemm(32, 64, 256)))
    target, lock = replace(host_target(), numerics="fast").key, tmp_path / "m.lock.jsonl"
    write_lock(lock, [], None, [LockedRounding(r) for r in choice(kernel.key, other.key, target=target)])
    with TuningDB.open(path) as db:
        def why(asked: Kernel, lock: Path | None) -> str:
            return "\n".join(reason_lines(db, CapturedKernel(asked.key, target, "gemm", "", ast_to_data(asked.ast)),
                                          None if lock is None else str(lock)))
        not_chosen = why(kernel, None).splitlines()[-1]
        assert "stays in float32, as no plan has chosen" in not_chosen or "stays in float32, as it has no product" in not_chosen
        rounded, kept = why(kernel, lock), why(other, lock)
        assert "has its chain in a choice of kernels to round" in rounded and ": ROUND(out, bfloat16) UPCAST(o0, 8)\n" in rounded
        assert "its factors are rounded" in rounded
        assert why(other, None).endswith(not_chosen) and not_chosen not in rounded + kept
        assert "not known" not in rounded and "no chain for it" not in rounded
        assert "has no chain for it" in kept and "it stays in float32, as the kernels" in kept


def test_the_forms_of_convolutions_are_shown(path: Path, tmp_path: Path) -> None:
    revision = resolve(PrepareConfig(db=":none:")).compiler.pair.revision
    fast, slow = form_times(0.5, taken_at=2e9, codegen=revision), form_times(1.5, codegen=revision, lengths=(2048,))
    with TuningDB.open(path) as db:
        db.record([fast, slow, form_times(0.7, codegen=0, lengths=(512,))])
    taken = "by transforms of blocks of 1024, measured in a plan: directly 100 µs, by transforms of blocks of 1024 50.0 µs (0.50×"
    for command in ("show", "why"):
        out = run(path, command, "1×2×20000").output
        assert out.index(taken) < out.index("directly, measured in a plan: directly 100 µs, by transforms of blocks of 2048 150 µs (1.50×")
        assert f"this is not used: it was measured with code generator 0, now {revision}" in out and "database" not in out
    assert [f["ratio"] for f in json.loads(run(path, "show", fast.kernel[:8], "--json").output)["form_times"]].count(0.5) == 1
    stats = json.loads(run(path, "stats", "--json").output)
    assert (stats["form_times"], stats["convolutions_timed"]) == (3, 1)
    assert "1 chain of" in run(path, "retract", fast.kernel, "--linear", fast.linear).output
    assert "this is not used: it was retracted" in run(path, "why", fast.kernel).output

    write_lock(tmp_path / "m.lock.jsonl", [], None, times=[LockedTimes(form_times(0.5, "e5" * 16, codegen=revision))])
    assert f"by the lock file, {taken}" in run(path, "why", "e5" * 16, "--lock", str(tmp_path / "m.lock.jsonl")).output


def test_why_of_a_script_names_the_forms_of_its_convolutions(path: Path, tmp_path: Path) -> None:
    described = "float32 convolution of 1×2×20000 with 2×1×301 in 2 groups"
    resolved = resolve(PrepareConfig(db=":none:"))
    target = resolved.target.key
    line = {"form": key_of(described), "of": "7a", "target": target, "described": described, "lengths": [1024], "is_transformed": True,
            "why": "predicted: all of it", "is_open": False, "other": None}
    rows = [{"kernel": GEMM, "target": TARGET}, {"kernel": "other", "target": TARGET, "only_in_form": True}, line]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    script = tmp_path / "model.py"
    script.write_text(f"import os\nwith open(os.environ['SVOD_CAPTURE'] + '/1.jsonl', 'w') as f:\n    f.write({lines!r})\n")
    first = run(path, "why", str(script)).output
    assert f"{described}: by transforms of blocks of 1024, predicted: all of it" in first and "other" not in first
    with TuningDB.open(path) as db:
        db.record([form_times(1.5, key_of(described), target, codegen=resolved.compiler.pair.revision)])
    assert f"{described}: directly, measured in a plan: directly 100 µs" in run(path, "why", str(script)).output


def test_why_of_a_script_names_the_alternatives_of_its_plans(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, script, lock = Captured(tmp_path), tmp_path / "model.py", tmp_path / "m.lock.jsonl"
    script.write_text("import os, shutil\n"
                      f"shutil.copy({str(captured.path)!r}, os.environ['SVOD_CAPTURE'] + '/1.jsonl')\n")
    revision, digest = resolve(PrepareConfig(db=":none:")).compiler.pair.revision, captured.plan.digest

    def why(*options: str) -> list[str]:
        out = run(path, "why", str(script), *options).output
        return out[out.find(digest[:12]):].splitlines() if digest[:12] in out else []
    assert why() == [], "without a record nothing is to be said"
    newest = replace(captured.times(0.8, revision), taken_at=2e9)
    with TuningDB.open(path) as db:
        db.record([newest, captured.times(0.7, revision), captured.times(0.6, 0)])
    said = why()
    assert said[0].endswith("plan of 3 calls") and f"    {captured.plan.target}" == said[1]
    assert said[2].startswith("    with 2 alternatives, measured: by the rules 100 µs, with 2 alternatives 80.0 µs (0.80×")
    assert "not used" not in said[2] and "stored with channels last" in said[3]
    unused = [line.rpartition("; this is not used: ")[2] for line in said if "not used" in line]
    assert sorted(unused) == ["another record goes before it", f"it was measured with code generator 0, now {revision}"]
    assert why("--target", TARGET) == []

    write_lock(lock, [], None, times=[LockedTimes(replace(captured.times(1.1, revision), described="of the lock"))])
    said = why("--lock", str(lock))
    assert said[2].startswith("    by the lock file, by the rules, measured: by the rules") and "not used" not in said[2]
    assert "\n".join(said).count("another record goes before it") == 2
    monkeypatch.setenv("SVOD_NOOPT", "1")
    assert "\n".join(why("--lock", str(lock))).count("SVOD_IMPORTED=ignore or SVOD_NOOPT leaves it out") == 3


@pytest.mark.parametrize(("is_open", "age", "ratio", "said"), [
    (True, 0, 0.5, ""), (False, 0, 1.5, ""), (False, 0, 0.5, "transforms, which it found faster, are predicted to be far slower"),
    (True, 1, 1.5, "it was measured with code generator ")])
def test_why_says_that_lines_of_the_lock_file_about_a_convolution_do_not_count(is_open: bool, age: int, ratio: float, said: str,
                                                                               tmp_path: Path, path: Path) -> None:
    here, lock = resolve(PrepareConfig(db=":none:")), tmp_path / "m.lock.jsonl"
    form = ConvolutionForm("c" * 32, "a convolution", (1024,), False, "predicted: all of it", is_open)
    times = form_times(ratio, form.key, here.target.key, codegen=here.compiler.pair.revision - age)
    write_lock(lock, [], None, times=[LockedTimes(times)])
    with TuningDB.open(path) as db:
        line = form_line(db, form, here.target.key, str(lock))
    assert ("the lock file's times are not used: " in line) == bool(said) and said in line
    assert ("directly, predicted" in line) == bool(said)


def test_a_record_of_a_plan_is_not_used_where_a_convolution_has_another_form(tmp_path: Path, path: Path) -> None:
    plan, here = "7b" * 16, resolve(PrepareConfig(db=":none:"))
    form = ConvolutionForm("c" * 32, "a convolution", (1024,), True, "predicted: all of it", True)
    times = form_times(1.5, form.key, here.target.key, codegen=here.compiler.pair.revision)
    with TuningDB.open(path) as db:
        db.record([plan_times(1.5, plan, here.target.key, codegen=times.codegen)])
        assert "another form" not in "".join(plan_lines(db, plan, here.target.key, [form], None))
        db.record([times])
        assert "another form" in plan_lines(db, plan, here.target.key, [form], None)[-1]
        assert "another form" not in "".join(plan_lines(db, plan, here.target.key, [], None))


def test_a_kernel_that_was_searched_in_vain_is_shown(path: Path) -> None:
    begun = Search("s" * 32, "e5" * 16, TARGET, strategy="beam", executor="1 local worker", started_at=1e9)
    with TuningDB.open(path) as db:
        db.record([begun, replace(begun, ended_at=1e9 + 3, outcome="interrupted", result={"timed": 0})])
    why = run(path, "why", "e5e5").output
    assert "ended before anything was measured (interrupted)" in why and "0 timed" in why and TARGET in why
    row = next(x for x in run(path, "list").output.splitlines() if x.startswith("e5e5"))
    assert row.split("\t")[8:] == ["0", "no winner: the search ended before anything was measured (interrupted)"]
    assert {d["kernel"]: d["searches"] for d in json.loads(run(path, "list", "--json").output)}["e5" * 16] == 1
    shown = run(path, "show", "e5e5").output
    assert "used      the heuristic's chain: the search ended" in shown and "searched  2001" in shown
    stats = json.loads(run(path, "stats", "--json").output)
    assert (stats["kernels"], stats["winners"], stats["searched_without_a_winner"]) == (3, 3, 1)


@pytest.mark.slow
def test_why_of_a_script(path: Path, tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text("import json, os, sys\n"
                      f"rows = [{{'kernel': '{GEMM}', 'target': '{TARGET}', 'name': 'gemm'}}, {{'kernel': 'new', 'target': '{TARGET}'}}]\n"
                      "with open(os.environ['SVOD_CAPTURE'] + '/1.jsonl', 'w') as f:\n"
                      "    f.write('\\n'.join(map(json.dumps, rows)) + '\\n{\"cut off')\n"
                      "sys.exit('it broke')\n")
    out = run(path, "why", str(script)).output
    assert "the database has a winner" in out and "new" in out and "not known" in out and "ended with status 1: it broke" in out
    script.write_text("import sys; sys.exit(' '.join(sys.argv[1:]))")
    done = main("--db", str(path), "why", str(script), "--", "--layers", "2")
    assert done.returncode == 2 and done.stderr.strip().endswith("ended with status 1: --layers 2")
    script.write_text("pass")
    done = main("--db", str(path), "why", str(script))
    assert done.returncode == 2 and done.stderr.strip() == f"svod-db: {script} prepared no kernel"


@pytest.mark.slow
def test_why_of_an_onnx_file(path: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the package onnx")
    rows, hidden = onnx.helper.make_tensor_value_info, ["rows", 8]
    model = onnx.helper.make_model(onnx.helper.make_graph([onnx.helper.make_node("Softmax", ["x"], ["y"])], "g", [rows("x", 1, hidden)],
                                                          [rows("y", 1, hidden)]), opset_imports=[onnx.helper.make_opsetid("", 17)],
                                   ir_version=8)
    onnx.save(model, str(tmp_path / "m.onnx"))
    lacks = main("--db", str(path), "why", str(tmp_path / "m.onnx"))
    assert lacks.returncode == 2 and "svod-db why" in lacks.stderr and "--dim rows=" in lacks.stderr
    assert "softmax" in run(path, "why", str(tmp_path / "m.onnx"), "--dim", "rows=3").output


@pytest.fixture
def _with_names_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current directory with files that have the names of modules which a program imports."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("numpy", "random", "queue", "onnx", "torch", "svod"):
        Path(f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')")


@pytest.mark.usefixtures("_with_names_of_modules")
def test_an_onnx_file_imports_nothing_from_the_current_directory(path: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the package onnx")
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([onnx.helper.make_node("Softmax", ["x"], ["y"])], "g", [info("x", 1, [3, 8])], [info("y", 1, [3, 8])])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), str(tmp_path / "m.onnx"))
    done = run(path, "why", str(tmp_path / "m.onnx"))
    assert done.exit_code == 0 and "softmax" in done.output


@pytest.mark.usefixtures("_with_names_of_modules")
def test_a_script_imports_from_its_own_folder_alone(path: Path, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("rows = 3")
    (tmp_path / "model.py").write_text("import beside, numpy as np\nfrom svod import Tensor\n"
                                       "Tensor(np.ones((beside.rows, 8), np.float32)).softmax(-1).numpy()\n")
    # Python runs the script itself without options, and a module of svod runs it with --torch.
    for how in ((), ("--torch", "compile")):
        done = run(path, "why", str(tmp_path / "model.py"), *how)
        assert done.exit_code == 0 and "softmax" in done.output


def test_a_script_ends_with_the_command_that_runs_it(path: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(f"import os, time\nopen({str(tmp_path / 'new')!r}, 'w').write(str(os.getpid()))\n"
                                      f"os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'pid')!r})\ntime.sleep(100)")
    with subprocess.Popen([sys.executable, "-m", "svod.cli.db", "--db", str(path), "why", str(tmp_path / "slow.py")], cwd=ROOT) as process:
        assert wait_until(lambda: (tmp_path / "pid").exists())
        process.terminate()
        assert process.wait(NEVER) == 143
    assert is_gone(int((tmp_path / "pid").read_text()))


BAKED_MODEL = """
import os, sys
import numpy as np
from svod import Tensor
if os.environ["HOME"] == "elsewhere":       # nothing may be compiled here
    from svod.compile.cpu import runtime
    from svod.compile.plan import compiler
    compiler.lower_kernel = runtime.compile_object = None
y = (Tensor(np.ones((8, 8), np.float32)) @ Tensor(np.ones((8, 8), np.float32))).relu()
assert (y.numpy() == 8).all()
sys.exit(*sys.argv[1:])
"""


def test_baked_objects_are_used_by_another_user_from_a_read_only_copy(tmp_path: Path) -> None:
    """One bake fills a directory; a second program with its copy compiles nothing, and stores nothing in it or in its own cache."""
    script, objects, copy, own = (tmp_path / name for name in ("model.py", "objects", "copy", "own"))
    script.write_text(BAKED_MODEL)
    done = CliRunner().invoke(cli, ["--db", ":none:", "bake", str(script), "-o", str(objects), "--", "it broke"])
    assert done.exit_code == 1 and "it ended with status 1" in done.output and not isinstance(done.exception, DatabaseError)
    assert f"for {host_target().key}, " in done.output and done.output.count("fits here") == 2
    made = len(list(objects.rglob("*.obj")))
    assert f"{script}: {made} objects made, 0 of the objects that it uses were there already" in done.output
    shutil.copytree(objects, copy)
    for place in (*copy.rglob("*"), copy):
        place.chmod(0o555 if place.is_dir() else 0o444)
    there = {p: p.read_bytes() for p in copy.rglob("*.obj")}
    run = subprocess.run([sys.executable, str(script)], env={**os.environ, "HOME": "elsewhere", "PYTHONPATH": str(ROOT),
                                                            "SVOD_OBJECT_CACHE": f"{own}{os.pathsep}{copy}"},
                         capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "") and not own.exists() and there == {p: p.read_bytes() for p in copy.rglob("*.obj")}
    listed = json.loads(CliRunner().invoke(cli, ["list", "--objects", "--json", str(copy)]).output)
    assert {r["target"] for r in listed} == {host_target().key, host_target().key.rpartition("/")[0]}
    assert sum(r["objects"] for r in listed) == len(there) and not any(r["unfit"] for r in listed)


def test_the_objects_of_a_baked_onnx_file_are_those_that_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the package onnx")
    info, floats = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["x", "w"], ["p"]), onnx.helper.make_node("Relu", ["p"], ["y"])], "g",
                                   [info("x", floats, [3, 8])], [info("y", floats, None)],
                                   [onnx.numpy_helper.from_array(np.ones((8, 5), np.float32), "w")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    bake = ["--db", ":none:", "bake", "model.onnx", "-o", "objects"]
    first = CliRunner().invoke(cli, bake)
    made = len(list(tmp_path.glob("objects/??/*.obj")))
    assert first.exit_code == 0 and made and f"model.onnx: {made} objects made" in first.output
    assert f"0 objects made, {made} of the objects that it uses were there already" in CliRunner().invoke(cli, bake).output


def test_a_bake_counts_its_own_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of other programs in the directory are no objects of this one, whether they were there before or not."""
    (tmp_path / "model.py").write_text(BAKED_MODEL)
    (tmp_path / "none.py").write_text("import svod")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    bake = ["--db", ":none:", "bake", "-o", "objects"]
    assert "0 of the objects that it uses were there already" in CliRunner().invoke(cli, [*bake, "model.py"]).output
    made = len(list(tmp_path.glob("objects/??/*.obj")))
    (tmp_path / "objects" / "ab").mkdir(exist_ok=True)
    (tmp_path / "objects" / "ab" / "another.obj").touch()
    again = CliRunner().invoke(cli, [*bake, "-m", "model"])
    assert again.exit_code == 0 and f"model: 0 objects made, {made} of the objects that it uses were there already" in again.output
    none = CliRunner().invoke(cli, [*bake, "none.py"])
    assert isinstance(none.exception, DatabaseError) and str(none.exception) == "none.py compiled no kernel"


@pytest.mark.parametrize("content", [None, "", "nonsense", '{"format": "svod-lock", "version": 1}\n{"kernel": 3}\n'])
def test_a_bake_with_a_lock_file_that_cannot_be_used_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    script, lock = tmp_path / "model.py", tmp_path / "model.lock.jsonl"
    script.write_text("")
    if content is not None:
        lock.write_text(content)
    bake = ["bake", str(script), "-o", str(tmp_path / "objects")]
    with pytest.raises(ConfigError, match=f"the lock file {lock}"):
        CliRunner().invoke(cli, [*bake, "--lock", str(lock)], catch_exceptions=False)
    monkeypatch.setenv("SVOD_LOCK", str(lock))
    with pytest.raises(ConfigError, match=f"the lock file {lock}"):
        CliRunner().invoke(cli, bake, catch_exceptions=False)
    assert not (tmp_path / "objects").exists()


def test_objects_that_are_not_loaded_here_are_listed_with_the_reason(tmp_path: Path) -> None:
    here = resolve(PrepareConfig.from_env(db=":none:")).compiler.build
    for name in "ab":
        assert ObjectCache(tmp_path / "objects").put(ObjectKey(name, "", here), CachedObject(ProgramSpec("", (), (), (), ()), b"code"))
    (tmp_path / "empty").mkdir()
    listed = ["list", "--objects", str(tmp_path / "objects"), str(tmp_path / "empty")]
    done = CliRunner().invoke(cli, listed)
    assert "2 objects, " in done.output and ": fits here" in done.output and f"{tmp_path / 'empty'} has no objects; " in done.output
    damaged = next(tmp_path.glob("objects/??/*.obj"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    done = CliRunner().invoke(cli, listed)
    assert ": 1 object, " in done.output and f"{tmp_path / 'objects'}: 1 of 2 objects is damaged and not used" in done.output
    (tmp_path / "objects").chmod(0o777)
    done = CliRunner().invoke(cli, listed)
    assert f"does not fit here: not loaded, as {tmp_path / 'objects'} may be written by everybody" in done.output


def test_objects_for_other_machines_are_listed_with_their_differences(tmp_path: Path) -> None:
    for target, objects in ((OTHER, 2), (TARGET, 1)):
        for n in range(objects):
            entry = CachedObject(ProgramSpec("", (), (), (), ()), b"")
            assert ObjectCache(tmp_path).put(ObjectKey(str(n), "", Build(target, 1, "llvm 1", "0" * 16)), entry)
    done = CliRunner().invoke(cli, ["list", "--objects", str(tmp_path)])
    assert done.exit_code == 0 and f"{tmp_path}: 2 objects, " in done.output and f"for {OTHER}, llvm 1: does not fit here: " in done.output
    assert done.output.count("compiler llvm 1, here ") == done.output.count("another version of svod") == 2


def test_schedules_fit_every_machine_with_the_same_code(tmp_path: Path) -> None:
    build = resolve(PrepareConfig.from_env(db=":none:")).compiler.build
    for code in (build.code, "0" * 16):
        entry = CachedObject(ProgramSpec("", (), (), (), ()), b"")
        assert ObjectCache(tmp_path).put(ObjectKey("a", "data", Build(OTHER, 1, "llvm 1", code).anywhere), entry)
    out = CliRunner().invoke(cli, ["list", "--objects", str(tmp_path)]).output
    assert "for any target: fits here\n" in out and "for any target: does not fit here: another version of svod\n" in out


def test_stats(path: Path) -> None:
    data = json.loads(run(path, "stats", "--json").output)
    assert (data["kernels"], data["winners"], data["measurements"], data["verdicts"]) == (2, 3, 4, {"verified": 3})
    assert data["winners_by_layer"] == {"own": 3} and data["bytes"] > 0
    assert "1 timeout" in run(path, "stats").output


def test_export_import_merge_retract_gc(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    assert "written to" in run(path, "export", "-o", str(out), "--winners", "--kernel", GEMM[:5]).output
    other = tmp_path / "o.db"
    assert ": 4 new records, 0 known" in run(other, "import", str(out)).output, "measurement, verdict, kernel, origin"
    assert ": 0 new records, 4 known" in run(other, "import", str(out)).output
    good = out.read_text()
    out.write_text(good + "{}\n")
    result = run(other, "import", str(out))
    assert result.exit_code == 1 and "1 skipped" in result.output and "unknown kind" in result.output
    out.write_bytes(good.encode() + b'{"kind": "\xff"}\n')
    assert f"skipped {out}:6: the line is not text in UTF-8" in run(other, "import", str(out)).output
    with pytest.raises(DatabaseError, match="svod-db import reads"):
        CliRunner().invoke(cli, ["--db", str(other), "merge", str(out)], catch_exceptions=False)
    out.write_text(good[:-100])
    cut = tmp_path / "cut.db"
    result = run(cut, "import", str(out))
    assert result.exit_code == 1 and f"skipped {out}:5: the line is cut off" in result.output
    assert f"3 new records, 0 known, 1 skipped; in {cut}" in result.output
    assert "new records" in run(other, "merge", str(path)).output
    result = run(other, "retract", GEMM, "--reason", "slow in production")
    assert result.exit_code == 0 and "1 chain of" in result.output
    assert "slow in production" in run(other, "why", GEMM).output
    assert "0 void claims removed" in run(other, "gc", "--older-than", "0").output


@pytest.mark.parametrize(("arguments", "message"), [
    (["show", "zz"], "no kernel in the database"),
    (["show", "gemm"], "means 2 kernels"),
    (["show"], "Missing argument"),
    (["merge", "missing.db"], "does not exist"),
    (["merge"], "Missing argument"),
    (["import", "README-not-there"], "does not exist"),
    (["export"], "Missing option"),
    (["gc", "--older-than", "-1"], "-1"),
    (["gc", "--older-than", "nan"], "'nan' is not usable; accepted: a number of days, at least 0"),
    (["gc", "--older-than", "abc"], "accepted: a number of days, at least 0"),
    (["verify", "--budget", "inf"], "a number of seconds, at least 1"),
    (["list", "--gain", "abc"], "accepted: a number of times, at least 0"),
    (["--db", "typo.db", "show", "gemm"], "there is no database at"),
    (["--db", "typo.db", "export", "-o", "empty.jsonl"], "there is no database at"),
    (["retract", GEMM, "--target", "other"], "nothing to retract"),
    (["polish"], "No such command"),
    (["list", "--colour"], "No such option"),
    (["why", "nothing.py"], "does not exist"),
    (["bake", "nothing.py", "-o", "objects"], "does not exist"),
    (["bake", "README.md", "-o", "/proc/nothing"], "objects cannot be kept in /proc/nothing"),
    (["bake", "-o", "objects"], "no script was given; give SCRIPT or -m MODULE"),
    (["bake", "docs", "-o", "objects"], "docs is a directory without a __main__.py"),
    (["bake", "-m", "no.such.module", "-o", "objects"], "there is no module 'no'"),
    *(([command, "README.md", "--dim", "n=2", *out], "--dim: only for ONNX files")
      for command, out in (("bake", ["-o", "objects"]), ("why", []))),
    *((["list", "--objects", directory], f"there are no objects in {ROOT / directory}: {why}")
      for directory, why in (("/nowhere", "No such file or directory"), ("README.md", "Not a directory"))),
    (["export", "-o", "/proc/nothing/x.jsonl"], "/proc/nothing"),
])
def test_bad_input_is_one_line_and_status_2(path: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch,
                                            capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["svod-db", "--db", str(path), *arguments])
    status = _run("svod-db", "svod.cli.db.commands", {})        # `run_command` without the handlers of signals
    said = capfd.readouterr().err
    assert status == 2 and message in said and "Traceback" not in said
    assert len([line for line in said.splitlines() if message in line]) == 1


def test_an_export_does_not_replace_a_database(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="SQLite database, which would be lost"):
        CliRunner().invoke(cli, ["--db", str(path), "export", "-o", str(path)], catch_exceptions=False)
    assert path.read_bytes() == before


def test_an_export_replaces_exports_alone(path: Path, tmp_path: Path) -> None:
    script, mine = tmp_path / "model.py", tmp_path / "mine.jsonl"
    script.write_text("import svod")
    with pytest.raises(ConfigError, match="was not written by -o, and would be lost"):
        CliRunner().invoke(cli, ["--db", str(path), "export", "-o", str(script)], catch_exceptions=False)
    assert script.read_text() == "import svod"
    assert run(path, "export", "-o", str(mine)).exit_code == 0 and run(path, "export", "-o", str(mine), "--winners").exit_code == 0


def test_a_check_that_cannot_be_recorded_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TuningDB.open(path, read_only=True) as db:
        [won] = db.ranking(GEMM, TARGET)
    monkeypatch.setattr(verify, "verify", lambda *a, **k: [verify.Checked("gemm", won, won)])
    assert "used" in run(path, "verify").output

    def full(*a: object, **k: object) -> object:
        raise sqlite3.OperationalError("database or disk is full")
    monkeypatch.setattr(files, "open_for_writing", full)
    with pytest.raises(DatabaseError, match="what was measured is not recorded: "):
        CliRunner().invoke(cli, ["--db", str(path), "verify"], catch_exceptions=False)


def test_what_ships_for_other_machines_is_not_missed(with_shipped: Path) -> None:
    done = run(with_shipped, "verify")
    assert f"2 kernels of {TARGET} cannot be checked here" in done.output, "the user's"
    assert f"1 kernel of {TARGET} cannot be checked here" in run(with_shipped, "verify", SHIPPED_KERNEL).output
    assert "cannot be checked" not in run(with_shipped.with_name("none.db"), "verify").output


def test_a_file_that_is_read_alone_is_named(tmp_path: Path) -> None:
    write_records(tmp_path / "none.jsonl", [])
    done = CliRunner().invoke(cli, ["--db", str(tmp_path / "none.jsonl"), "list"])
    assert f"no kernels in {tmp_path / 'none.jsonl'}; tune something" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("command", ["list", "stats", "gc", "retract x"])
def test_a_database_that_is_none(tmp_path: Path, command: str) -> None:
    bad = tmp_path / "bad.db"
    bad.write_text("text " * 1000)
    done = main("--db", str(bad), *command.split())
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "not a database" in done.stderr
    assert bad.read_text() == "text " * 1000


def test_variables_that_are_not_used_are_not_looked_at(path: Path) -> None:
    done = main("list", SVOD_TUNE_DB=str(path), SVOD_THREADS="many", BEAM="abc")
    assert done.returncode == 0 and GEMM[:12] in done.stdout and not done.stderr


@pytest.mark.parametrize("where", ["while it is imported", "while it runs", "while its options are read"])
def test_ctrl_c_is_one_line_whenever_it_comes(tmp_path: Path, where: str) -> None:
    interrupt = "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    (tmp_path / "slow_command.py").write_text(
        "import os, signal, time, click\n"
        f"def interrupt(*a):\n    {interrupt}\n"
        f"if {where == 'while it is imported'}: interrupt()\n"
        "@click.command()\n"
        f"@click.option('--x', callback=interrupt if {where == 'while its options are read'} else None)\n"
        "def cli(x): interrupt()\n")
    done = subprocess.run([sys.executable, "-c", "from svod.cli import run_command; run_command('svod-x', 'slow_command')"],
                          capture_output=True, text=True, check=False, timeout=NEVER,
                          env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "svod-x: interrupted\n")


@pytest.mark.slow
def test_streams_that_cannot_take_what_is_said(path: Path) -> None:
    done = main("--db", str(path), "list", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and GEMM[:12] in done.stdout and " ?s\t" in done.stdout and not done.stderr
    command = f"{sys.executable} -m svod.cli.db --db {path} list"
    for closed, said in ((">&-", ""), (">&- 2>&-", ""), ("> /dev/full", "svod-db: No space left on device\n")):
        done = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, cwd=ROOT, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (2 if said else 0, "", said)


@pytest.mark.parametrize("lines", [1, 9000])
def test_a_full_disk_is_said_wherever_it_shows(lines: int, tmp_path: Path) -> None:
    """A full disk is reported whenever it is noticed: with /dev/full at the first write of a long output, or at the last flush of a short
    one."""
    (tmp_path / "long_command.py").write_text(f"import click\n@click.command()\ndef cli(): print('x\\n' * {lines})\n")
    program = "from svod.cli import run_command; run_command('svod-x', 'long_command')"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=NEVER,
                              env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"})
    assert (done.returncode, done.stderr) == (2, "svod-x: No space left on device\n")


def test_rich_tables_do_not_take_records_for_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from svod.system.tables import print_table
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    print_table(("a", "b"), [("[bold]x[/]", "1"), ("y" * 5, "22")], right=frozenset({"b"}), fold=frozenset({"a"}))
    assert "[bold]x[/]" in capsys.readouterr().out


def test_words() -> None:
    assert [seconds(x) for x in (None, 2.0, 1.234e-3, 999.6e-6, 5e-5, 1e-9)] == ["–", "2.00 s", "1.23 ms", "1.00 ms", "50.0 µs", "1.00 ns"]


def test_verdicts_of_wrong_are_shown(path: Path) -> None:
    with TuningDB.open(path) as db:
        db.record([verdict("wrong", "aa", GEMM, reason="row 3")])
    assert "found wrong: row 3" in run(path, "show", GEMM).output


@pytest.mark.parametrize("command", [["list"], ["show", "k"], ["why", "k"], ["stats"]])
def test_a_terminal_obeys_no_record(path: Path, command: list[str]) -> None:
    hostile = "\x1b[2J\x9b31mname\x07"
    with TuningDB.open(path) as db:
        db.record([KernelRecord("k" * 32, name=hostile, ast_version=9), OriginRecord("k" * 32, hostile),
                   screened("dd", status="error", reason=hostile, chain=[[hostile, hostile, hostile]]),
                   verdict("wrong", "aa", reason=hostile)])
    done = run(path, *command)
    assert not set(done.output) & set("\x1b\x9b\x07")
