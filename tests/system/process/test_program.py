"""The program of a process, its Python, and its streams."""
from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from svod.system.process import program, streams, threads


@pytest.mark.parametrize(("argv", "name"), [(["/usr/bin/a.py", "--fast"], "a.py"), ([], "python"), ([""], "python"), (["-c"], "-c")])
def test_the_name_of_the_program(argv: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert program.name() == name and program.arguments() == argv[1:] and program.command() == argv
    monkeypatch.setattr(sys, "argv", None)
    assert program.name() == "python" and program.arguments() == program.command() == []
    monkeypatch.delattr(sys, "argv")
    assert program.name() == "python" and program.arguments() == program.command() == []


@pytest.mark.parametrize(("names", "why"), [
    ({}, ""), ({"frozen": True}, "this program is frozen"), ({"frozen": "macosx_app"}, "this program is frozen"),
    ({"executable": ""}, "sys.executable is empty"), ({"executable": None}, "sys.executable is empty"),
    ({"orig_argv": []}, "this Python is embedded in a program")])
def test_whether_a_second_python_can_be_started(names: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in names.items():
        monkeypatch.setattr(sys, name, value, raising=False)
    assert program.why_no_python().startswith(why) and bool(program.why_no_python()) == bool(why)


@pytest.mark.skipif(not os.path.exists("/proc/self/exe"), reason="needs /proc")
def test_the_python_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert program.python() == sys.executable, "also where that is a link of a virtual environment"
    app = tmp_path / "app"
    app.touch(0o755)
    for name in (str(app), str(tmp_path / "none")):
        monkeypatch.setattr(sys, "executable", name)
        found = program.python()
        assert found != name and subprocess.run([found, "-c", "import sys; sys.exit(5)"], check=False).returncode == 5


@pytest.mark.skipif(not os.path.exists("/proc/self/exe"), reason="needs /proc")
def test_a_python_that_an_update_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system appends " (deleted)" to the name of the running file. The new file with the old name can be run."""
    monkeypatch.setattr(os, "readlink", lambda path: f"{sys.executable} (deleted)")
    assert program.python() == sys.executable and program.why_no_python() == ""
    monkeypatch.setattr(sys, "executable", None)
    assert program.python() == "" and program.why_no_python()


class Poor:
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_streams_that_lack_methods(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    closed = open(os.devnull)   # noqa: SIM115
    closed.close()
    for stream in (None, Poor(), closed, object()):
        assert not streams.is_terminal(stream) and streams.descriptor(stream) is None and streams.columns(stream, 77) == 77
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        streams.tell("to nobody")
    monkeypatch.undo()
    monkeypatch.setattr(sys, "stderr", None)
    print("to nobody", file=streams.errors())
    monkeypatch.undo()
    assert capfd.readouterr().out == "", "what is for standard error does not go to standard output"


def test_descriptors_of_standard_streams_are_left_alone() -> None:
    read, write = os.pipe()
    assert streams.above_standard(read) == read
    program_text = ("import os; from svod.system.process.streams import above_standard; [os.close(n) for n in range(3)]; "
                    "numbers = [above_standard(n) for n in os.pipe()]; assert min(numbers) > 2 and not os.get_inheritable(numbers[0]); "
                    "os.write(numbers[1], b'x'); assert os.read(numbers[0], 1) == b'x'")
    assert subprocess.run([sys.executable, "-c", program_text], check=False).returncode == 0
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("patched", [False, True])
def test_native_threads(patched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native threads start at once, also if Python's threads are greenlets, which would run later."""
    if patched:
        monkeypatch.setattr("_thread.start_new_thread", lambda function, args, kwargs=None: 1)
    assert threads.are_greenlets() == patched
    seen: list[int] = []
    main = threading.get_native_id()
    thread = threads.start_native("name", lambda n: seen.append(n + (threading.get_native_id() != main)), 4)
    thread.join()
    assert seen == [5]
    done = threading.Event()
    waits = threads.start_native("name", done.wait)
    waits.join(0.01)
    done.set()
    waits.join()


def test_files_of_the_package() -> None:
    assert "svod_run_plan" in program.package_text("svod.compile.cpu", "runtime.ll")
