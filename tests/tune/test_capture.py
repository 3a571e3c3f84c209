"""Captures: written plans can be read, tuned and run elsewhere; invalid lines are reported and skipped."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svod import Tensor, Variable
from svod.compile.cpu.host import host_target
from svod.compile.plan.compiler import Choice, compile_all, compiler_for
from svod.compile.plan.plan_parts import VariableSpec
from svod.compile.plan.unbound_plan import UnboundPlan, build_plan, synthetic_arrays
from svod.config import PrepareConfig
from svod.core.schedule.family import family_key
from svod.errors import FormatError, TuneError
from svod.tracing.graphs import realize_tensors
from svod.tune import capture
from svod.tune.capture import Capture, CapturedPlan, CaptureWatch, StopCapture, plan_digest, read_capture, write_capture
from tests.plans import canonical, gemm_then_softmax, scaled
from tests.tune import search_kernels

TARGET = host_target()
ROOT = Path(__file__).parents[2]


class Runs:
    """A stand-in for a plan whose runs are counted."""

    def __init__(self, runs: int = 0) -> None:
        self.runs = runs


@pytest.fixture(autouse=True)
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[Path, Any]:
    """A fresh set of capture recorders for one test."""
    found: dict[Path, Any] = {}
    monkeypatch.setattr(capture, "_recorders", found)
    return found


def flush(recorders: dict[Path, Any]) -> None:
    for r in recorders.values():
        r.flush()


def file_of(directory: Path) -> Path:
    [file] = directory.glob("*.jsonl")
    return file


def run(unbound: UnboundPlan) -> list[Any]:
    """Run a plan with the heuristic's chains on synthetic inputs. Returns its outputs."""
    compiler = compiler_for(TARGET, PrepareConfig(object_cache=":none:"))
    choices = {k: Choice(compiler.heuristic(v), "heuristic", "") for k, v in unbound.kernels.items()}
    compiled = compile_all(unbound.kernels, choices, compiler)
    plan = build_plan(unbound, compiled, synthetic_arrays(unbound), threads=TARGET.threads)
    plan.execute()
    return [np.array(o) for o in plan.outputs]


def test_what_is_written_is_read_and_can_be_run(tmp_path: Path) -> None:
    unbound = gemm_then_softmax()
    key = unbound.calls[0].kernel
    capture.append(tmp_path, unbound, {key: 2e-6}, target=TARGET)
    found = read_capture(tmp_path)
    [plan] = found.plans
    assert not found.problems and plan.target == TARGET.key and plan.seconds == {key: 2e-6} and plan.runs == 1
    assert plan.unbound.calls == unbound.calls
    assert plan.unbound.buffers == unbound.buffers and plan.unbound.outputs == unbound.outputs
    assert {k: v.ast for k, v in plan.unbound.kernels.items()} == {k: v.ast for k, v in unbound.kernels.items()}
    [before], [after] = run(unbound), run(plan.unbound)
    assert np.array_equal(before, after) and np.allclose(after.reshape(24, 40).sum(1), 1, atol=1e-5)


def test_duplicates_count_up_and_kernels_are_written_once(tmp_path: Path, recorders: dict[Path, Any]) -> None:
    unbound, live, dead = gemm_then_softmax(), Runs(), Runs(5)
    capture.append(tmp_path, unbound, {}, target=TARGET, plan=live)
    capture.append(tmp_path, unbound, {}, target=TARGET, plan=dead)
    capture.append(tmp_path, unbound, {}, target=TARGET)
    live.runs = 10
    flush(recorders)
    assert read_capture(tmp_path).plans[0].runs == 16
    del dead
    live.runs = 20
    flush(recorders)
    [plan] = read_capture(tmp_path).plans
    assert plan.runs == 26, "what a plan ran counts after its end"
    lines = [json.loads(x) for x in file_of(tmp_path).read_text().splitlines()]
    assert sum("kernel" in x for x in lines) == 2 and sum("plan" in x for x in lines) == 1
    capture.append(tmp_path, gemm_then_softmax(8, 8, 8), {}, target=TARGET)
    assert len(read_capture(tmp_path).plans) == 2


def test_files_of_several_processes_are_merged(tmp_path: Path, recorders: dict[Path, Any]) -> None:
    unbound = scaled(times=3)
    key = unbound.calls[0].kernel
    for seconds in (3e-6, 1e-6, 2e-6):
        capture.append(tmp_path / "all", unbound, {key: seconds}, target=TARGET)
        recorders.clear()               # pretends that another process writes
    found = read_capture(tmp_path / "all")
    [plan] = found.plans
    assert plan.runs == 3 and plan.seconds == {key: 1e-6} and plan.unbound.counts == {key: 3} and len(found.commands) == 3
    write_capture(tmp_path / "one.jsonl", found)
    again = read_capture(tmp_path / "one.jsonl")
    assert [(p.digest, p.runs, p.seconds, p.unbound.calls) for p in again.plans] == [(p.digest, p.runs, p.seconds, p.unbound.calls)
                                                                                    for p in found.plans]
    write_capture(tmp_path / "two.jsonl", again)
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


def test_a_plan_with_variables_is_captured_with_its_bounds_and_hints(tmp_path: Path) -> None:
    x = np.arange(40, dtype=np.float32).reshape(8, 5)
    settings = PrepareConfig(capture=str(tmp_path), object_cache=":none:")
    for n in (3, 5):
        rows = Variable("rows", 1, 7, hint=(2, 6)).bind(n)
        symbolic = (Tensor(x)[:rows] * 2).sum(1)
        realize_tensors([symbolic], settings)
        assert np.array_equal(symbolic.numpy(), 2 * x[:n].sum(1))
    prepared = (Tensor(x)[:Variable("rows", 1, 7, hint=(2, 6))] * 2).sum(1).prepare(settings)
    assert prepared.variable_values() == {}, "timing leaves variables as they were"
    found = read_capture(tmp_path)
    assert not found.problems
    plan = found.plans[0]
    [call] = plan.unbound.calls
    assert call.variables == (VariableSpec("rows", 1, 7, (2, 6)),)
    assert plan.seconds.keys() == plan.unbound.kernels.keys(), "timed, whether bound or not"
    write_capture(tmp_path / "one", found)
    assert [p.unbound.calls for p in read_capture(tmp_path / "one").plans] == [p.unbound.calls for p in found.plans]
    data = [json.loads(line) for line in file_of(tmp_path).read_text().splitlines()]
    wrong: Any
    for wrong, told in (([["rows", 1, 99, [], None]], "the variables"), ([], "the variables"), ([["rows", 1]], "length 3 to 5, got 2"),
                        ([["rows", 7, 1, [], None]], "cannot be 7 to 1"), ([["rows", 1, 7, [9], None]], "the hints [9]"),
                        ([["rows", 1, 7, [], [5, 8]]], "the bucket (5, 8)")):
        bad = [line if "plan" not in line else change(line, calls=[[*line["calls"][0][:-1], wrong]]) for line in data]
        (tmp_path / "bad").write_text("".join(json.dumps(line) + "\n" for line in bad))
        assert told in read_capture(tmp_path / "bad").problems[0]


def test_a_half_line_is_left_out(tmp_path: Path) -> None:
    capture.append(tmp_path, scaled(), {}, target=TARGET)
    file = file_of(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"kernel":"abc","ta')
    assert len(read_capture(tmp_path).plans) == 1 and not read_capture(tmp_path).problems


def test_a_file_that_is_cut_off_says_where(tmp_path: Path) -> None:
    """The half line of a killed process is not reported for a directory of captures; for a single file that a user gives it is."""
    unbound = scaled()
    plan = CapturedPlan(plan_digest(unbound, TARGET.key), TARGET.key, unbound, {}, 3)
    path = tmp_path / "c.jsonl"
    write_capture(path, Capture([plan]))
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for end, plans, line in ((ends[3] - 2, 1, 4), (ends[2] - 2, 0, 3), (ends[1] - 2, 0, 2)):
        path.write_bytes(data[:end])
        found = read_capture(path)
        assert len(found.plans) == plans and found.problems == [f"c.jsonl, line {line} is cut off, the end of the file is missing"]
    path.write_bytes(data[:ends[0] - 2])
    with pytest.raises(FormatError, match="line 1 is cut off"):
        read_capture(path)
    path.write_bytes(b"")
    with pytest.raises(FormatError, match="is empty; make a capture with"):
        read_capture(path)
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "1.jsonl").touch()
    assert read_capture(tmp_path / "killed") == Capture(), "a process that was killed before its first line"


def change(line: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {**line, **values}


@pytest.mark.parametrize(("damage", "reason"), [
    (lambda k, p: [change(k, kernel="0" * 32), p], "another version of svod"),
    (lambda k, p: [change(k, ast={"format": 1, "nodes": []}), p], "nodes"),
    (lambda k, p: [k, change(p, plan="00")], "was altered"),
    (lambda k, p: [k, change(p, outputs=[99])], "buffer 99 of a plan is not among"),
    (lambda k, p: [k, change(p, buffers=[["float32", -1, "input"]] * len(p["buffers"]))], "`int` >= 0 - at `$.buffers[0][1]`"),
    (lambda k, p: [k, change(p, buffers=[["float32", 1, "input"]] * len(p["buffers"]))], "are needed"),
    (lambda k, p: [k, change(p, buffers=[["floaty", 1, "input"]] * len(p["buffers"]))], "is not known"),
    (lambda k, p: [k, change(p, buffers=[["float32", 1000, "constant"]] * len(p["buffers"]))], "a constant"),
    (lambda k, p: [k, change(p, calls=[])], "order of their levels"),
    (lambda k, p: [k, change(p, calls=[[p["calls"][0][0], [0], "", "", "", 0, [0], []]])], "takes 3 buffers"),
    (lambda k, p: [k, change(p, calls=[[*p["calls"][0][:6], [0], []]])], "gives 1 offsets"),
    (lambda k, p: [k, change(p, calls=[[*p["calls"][0][:6], [0, 0, 1], []]])], "from 1 on are needed"),
    (lambda k, p: [k, change(p, calls=[["x", [0], "", "", "", 0, [0], []]])], "could not be read"),
    (lambda k, p: [k, change(p, calls=[[1, 2]])], "`array` of length 8"),
    (lambda k, p: [k, change(p, seconds=[])], "Expected `object`, got `array` - at `$.seconds`"),
    (lambda k, p: [k, change(p, seconds={p["calls"][0][0]: -1.0})], "Expected `float` > 0.0"),
    (lambda k, p: [{"what": 1}], "neither a kernel nor a plan"),
    (lambda k, p: [[1]], "not a JSON object"),
])
def test_damaged_lines_are_reported_and_skipped(tmp_path: Path, damage: Any, reason: str) -> None:
    capture.append(tmp_path, scaled(), {}, target=TARGET)
    file = file_of(tmp_path)
    head, kernel, plan = file.read_text().splitlines()[:3]
    lines = damage(json.loads(kernel), json.loads(plan))
    file.write_text("\n".join([head, *map(json.dumps, lines)]) + "\n")
    found = read_capture(tmp_path)
    assert not found.plans and any(reason in p for p in found.problems), found.problems


@pytest.mark.parametrize(("text", "reason"), [
    ('{"format": "svod-capture", "version": 99}', "version 99"), ('{"format": "other"}', "svod-capture"), ("hello", "not JSON"),
    ("\x00\x01", "not JSON"), ('{"a": ' * 3000, "recursion")])
def test_what_is_no_capture_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(text + "\n")
    with pytest.raises(FormatError, match=reason):
        read_capture(file)


def test_where_nothing_can_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="capture-to"):
        read_capture(tmp_path / "none.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(TuneError, match="SVOD_CAPTURE"):
        capture.append(tmp_path / "file", scaled(), {}, target=TARGET)
    assert read_capture(tmp_path).plans == [], "an empty directory is an empty capture"


def test_stop(tmp_path: Path) -> None:
    capture.append(tmp_path, scaled(), {}, target=TARGET)
    capture.check_stop(tmp_path)
    capture.request_stop(tmp_path)
    with pytest.raises(StopCapture):
        capture.append(tmp_path, scaled(7), {}, target=TARGET)
    assert len(read_capture(tmp_path).plans) == 2, "the plan that met the stop counts"
    assert not issubclass(StopCapture, Exception)


def test_the_watch_sees_each_kernel_once(tmp_path: Path) -> None:
    watch = CaptureWatch(tmp_path)
    assert not watch.poll()
    unbound = gemm_then_softmax()
    capture.announce(tmp_path, unbound, target=TARGET)
    news = watch.poll()
    assert sorted(news.kernels) == sorted(unbound.kernels) and not news.plans and not watch.poll()
    first = unbound.calls[0].kernel
    capture.append(tmp_path, unbound, {first: 0.5}, target=TARGET)
    news = watch.poll()
    assert not news.kernels, "announced before"
    assert news.plans == [{first: 0.5 * unbound.counts[first]}] and not watch.poll()
    file = file_of(tmp_path)
    with file.open("a") as f:
        f.write('{"kernel":"abcd')
    assert not watch.poll()
    with file.open("a") as f:
        f.write('ef","target":""}\n')
    assert watch.poll().kernels == ["abcdef"]


def test_families() -> None:
    def family(kernel: Any) -> str:
        return family_key(canonical(kernel).ast)
    assert family(search_kernels.gemm(64, 32, 16)) == family(search_kernels.gemm(17, 300, 5))
    different = [family(k) for k in (search_kernels.gemm(8, 8, 8), search_kernels.softmax(8, 8), search_kernels.elementwise(8),
                                     search_kernels.row_reduce(8, 8), search_kernels.row_reduce(8, 8, "MAX"),
                                     search_kernels.gather(8, 8, 8))]
    assert len(set(different)) == len(different)


SCRIPT = """
import os, sys
import numpy as np
from svod.tensor import Tensor
x = Tensor(np.ones((8, 16), np.float32))
y = (x @ x.permute(1, 0)).relu()
pid = os.fork() if len(sys.argv) > 1 else -1
if pid == 0:
    (x + 1).numpy()
    os._exit(0)         # without flushing at exit
if pid > 0:
    os.waitpid(pid, 0)
plan = y.prepare()
for _ in range(41):
    plan.execute()
"""


@pytest.mark.slow
@pytest.mark.parametrize("forks", [False, True])
def test_prepare_captures(tmp_path: Path, forks: bool) -> None:
    script = tmp_path / "s.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "SVOD_CAPTURE": str(tmp_path / "c"), "PYTHONPATH": str(ROOT), "BEAM": "4", "SVOD_TUNE_DB": ":none:"}
    done = subprocess.run([sys.executable, str(script), *(["fork"] if forks else [])], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = read_capture(tmp_path / "c")
    assert not found.problems and len(found.plans) == 1 + forks
    plan = max(found.plans, key=lambda p: p.runs)
    assert plan.runs == 41 and plan.seconds.keys() == plan.unbound.kernels.keys()
