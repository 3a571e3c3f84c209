"""The options of svod-tune, and its end where there is nothing to tune."""
from __future__ import annotations

import importlib.util
import json
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from svod.cli.installation import program
from svod.cli.tune import run as tune_run
from svod.cli.tune.command import check, cli
from svod.cli.tune.options import TuneOptions
from svod.errors import FormatError, SvodError
from tests.cli.tune.commands import MODEL, ROOT, main, run, script
from tests.patience import NEVER


@pytest.mark.parametrize(("arguments", "said"), [
    (["none.py"], "none.py does not exist"), ([], "no script was given"), (["m.py", "--beam", "0"], "--dry-run"),
    (["m.py", "--epochs", "3"], "svod-tune m.py -- --epochs"), (["m.py", "-x"], "go after --"), (["m.py", "--budget", "0"], "--budget"),
    (["m.py", "--budget", "many"], "'many' is not usable; accepted: a number of seconds, above 0 and at most 10,000,000"),
    (["m.py", "--budget", "nan"], "accepted: a number of seconds, above 0"),
    (["m.py", "--max-error", "-1"], "'-1' is not usable; accepted: a share (0.01 is 1 %), at least 0"),
    (["m.py", "--beam", "x"], "'x' is not usable; accepted: an integer, at least 1; to see what would be tuned use --dry-run"),
    (["m.py", "--top", "abc"], "'abc' is not usable; accepted: an integer, at least 1"),
    (["--from", "none.jsonl"], "none.jsonl does not exist"),
    (["m.py", "--capture-for", "nan"], "a number of seconds, above 0"), (["m.py", "--from", "m.py"], "both"),
    (["m.py", "--workers", "local:2", "--address", "auto"], "--address auto needs Ray"),
    (["m.py", "--top", "0"], "--top"), (["."], "__main__"), (["-m", "no.such.module"], "there is no module 'no'"),
    (["-m", "m", "--from", "m.py"], "both"), (["weights.pt"], "weights.pt is no text and no program"),
])
def test_bad_options_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text("")
    (tmp_path / "weights.pt").write_bytes(b"PK\3\4" + bytes(9))
    done = run(*arguments)
    assert done.exit_code == 2 and said in done.output, done.output


def test_an_onnx_file_without_the_package_onnx_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *package: None if name == "onnx" else find(name, *package))
    (tmp_path / "m.onnx").write_bytes(b"")
    done = run(str(tmp_path / "m.onnx"))
    assert done.exit_code == 2 and "m.onnx needs the package onnx" in done.output and "svod[onnx]" in done.output
    assert "to capture its kernels" not in done.output


@pytest.mark.parametrize(("arguments", "said"), [
    (["--json", "none/r.json"], "--json none/r.json: the directory"), (["--json", "."], "is a directory"),
    (["--capture-to", "m.py/c.jsonl"], "--capture-to m.py/c.jsonl: the directory"), (["--db", "m.py"], "not a tuning database"),
    (["--db", "other.db"], "not a tuning database"), (["--db", "m.py/t.db"], "is not a directory"),
    (["--db", "x.jsonl"], "put a .db file before it"), (["--db", "m.py:t.db"], "not a tuning database"),
    (["--address", "head"], "use auto or host:port"),
    (["--json", "m.py"], "--json m.py: the command reads this file"), (["--capture-to", "./m.py"], "the command reads this file"),
    (["--json", "other.db"], "an SQLite database, which would be lost"),
    (["--json", "notes.txt"], "--json notes.txt: this file was not written by --json, and would be lost"),
    (["-o", "report.json"], "was not written by --lock"), (["--capture-to", "notes.txt"], "was not written by --capture-to"),
])
def test_what_cannot_be_written_is_refused_before_the_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str],
                                                                  said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text("open('ran', 'w')")
    with closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE notes(x)")
        other.commit()
    (tmp_path / "notes.txt").write_text("what I found")
    (tmp_path / "report.json").write_text('{\n "format": "svod-tune-report"}')
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(SvodError, match=re.escape(said)):
        CliRunner().invoke(cli, ["m.py", *arguments], catch_exceptions=False)
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_options_stand_on_both_sides_and_the_rest_is_the_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TuneOptions] = []
    monkeypatch.setattr(tune_run, "tune", lambda options: seen.append(options) or 0)
    path = script(tmp_path, "")
    assert run("--beam", "3", path, "one", "--budget", "5", "--only", "a", "--only", "b", "--", "--beam", "9", "--", "-x").exit_code == 0
    [o] = seen
    assert (o.script, o.args, o.beam, o.budget, o.only) == (path, ("one", "--beam", "9", "--", "-x"), 3, 5.0, ("a", "b"))
    assert o.command_line(beam=6, fresh=True) == (f"{program('svod-tune')} {path} --beam 6 --budget 5 --only a --only b --fresh "
                                                   "-- one --beam 9 -- -x")
    monkeypatch.setenv("BEAM", "5")
    assert run(path).exit_code == 0 and seen[-1].beam == 5
    check(TuneOptions(None, source=path))


@pytest.mark.slow
@pytest.mark.parametrize(("options", "says"), [
    ([], "no size"), (["--dim", "seq=16"], "seq"), (["--dim", "rows=x"], "give a size or a range"),
    (["--dim", "rows=2", "--outputs", "z"], "z"),
    (["--shape", "x=2xhalf"], "give the input and its extents"), (["--shape", "w=2x8"], "no input w")])
def test_options_that_an_onnx_file_does_not_take_end_with_status_2(tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str],
                                                                   says: str) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the package onnx")
    x, y = (onnx.helper.make_tensor_value_info(name, 1, ["rows", 8]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Softmax", ["x"], ["y"])], "g", [x], [y])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), str(tmp_path / "m.onnx"))
    done = run(str(tmp_path / "m.onnx"), *options, "--db", ":none:")
    assert done.exit_code == 2 and says in capfd.readouterr().err and "nothing to tune" not in done.output


@pytest.mark.slow
def test_console_script_answers_bad_input_with_status_2(tmp_path: Path) -> None:
    path = script(tmp_path, "print('hello')")
    done = main(tmp_path, path, "--workers", "many")
    assert done.returncode == 2 and "use ray:N, local:N" in done.stderr and "Traceback" not in done.stderr
    done = main(tmp_path, path, BEAM="abc")
    assert done.returncode == 2 and "BEAM='abc'" in done.stderr and "Traceback" not in done.stderr
    done = main(tmp_path, path, "--beam", "2", "--db", ":none:", BEAM="abc")
    assert done.returncode == 5 and "prepared no kernel" in done.stderr and done.stdout == "hello\n", "BEAM is not used"


def test_scripts_that_give_nothing_to_tune(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = run(script(tmp_path, "print('hello')"), "--db", ":none:")
    assert done.exit_code == 5 and "prepared no kernel" in done.output and done.output.startswith("svod-tune: running")
    assert capfd.readouterr().out == "hello\n"
    done = run(script(tmp_path, "raise SystemExit('no data')"), "--db", ":none:")
    assert done.exit_code == 5 and "ended with status 1 before it prepared a kernel" in done.output
    (tmp_path / "bad.jsonl").write_text("{}")
    with pytest.raises(FormatError, match="not a capture"):
        CliRunner().invoke(cli, ["--from", str(tmp_path / "bad.jsonl")], catch_exceptions=False)


@pytest.mark.slow
def test_a_module_is_run_as_python_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text("from package import other\nimport sys\nprint(other.X, __name__, *sys.argv[1:])")
    (tmp_path / "package" / "other.py").write_text("X = 'imported'")
    done = main(tmp_path, "-m", "package", "--db", ":none:", "one", "--", "--beam", "9")
    assert done.returncode == 5 and done.stdout == "imported __main__ one --beam 9\n", done.stderr
    options = TuneOptions(None, ("a b",), module="package")
    assert options.subject == "package" and options.command_line().endswith(" -m package --beam 8 --budget 600 -- 'a b'")


@pytest.mark.slow
def test_json_has_the_standard_output_for_itself(tmp_path: Path) -> None:
    done = main(tmp_path, script(tmp_path, MODEL), "--dry-run", "--json", "-", "--db", ":none:")
    assert done.returncode == 0 and json.loads(done.stdout)["format"] == "svod-tune-report"
    assert "__main__" in done.stderr and "family" in done.stderr, "what the script prints, and the table"


@pytest.mark.slow
@pytest.mark.parametrize(("stdout", "status"), [(">&-", 4), (">/dev/full", 4), (">/dev/null", 0)])
def test_json_that_the_standard_output_does_not_take_is_said(tmp_path: Path, stdout: str, status: int) -> None:
    command = [sys.executable, "-m", "svod.cli.tune", script(tmp_path, MODEL), "--dry-run", "--json", "-", "--db", ":none:"]
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(["sh", "-c", f'"$@" {stdout}', "sh", *command], stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False,
                          timeout=NEVER, env=buffered)
    assert done.returncode == status and ("svod-tune: the standard output cannot be written: " in done.stderr) == (status == 4)
