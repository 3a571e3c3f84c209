"""Libraries in separate processes: the messages, processes that fail, and the resulting runs."""
from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svod.bench.blocks.families import block_case, drawn_block
from svod.bench.load import MachineLoad, read_machine
from svod.bench.peers import PEER_LIBRARIES, PreparedPeer, calls
from svod.bench.peers.alone import Alone, AloneError, Done, Order, Process, RemoteContestant
from svod.bench.results import CaseResult, Run, RunSettings
from svod.bench.runner import run_case, run_suite
from svod.bench.suites.cases import REFERENCE, Case, whole_model
from svod.bench.suites.reference import difference
from svod.bench.timer import Contestant, calibrate, take_sample
from svod.cli.bench import alone as child
from svod.compile.cpu.host import host_target
from svod.config import BenchConfig, PrepareConfig
from svod.errors import UnsupportedError
from tests.patience import NEVER

CASE = whole_model("file", "a file", "onnx", "files", 1e-3)
SETTINGS = RunSettings("svod-bench run", "onnx", "*", "db-only", None, False, 0, "2026-01-01T00:00:00Z", 0.0)
CONFIG = BenchConfig(rounds=7, case_seconds=0.0, precision=0.01, min_sample=200.0)


class FakeProcess:
    """Answers like a child process. `behaviour` by contestant: seconds of a call, a number added to the outputs, or an error."""

    started: list[str]
    ended: list[str]
    asked: list[Order]

    def __init__(self, name: str, behaviour: dict[str, Any]) -> None:
        self.name, self.id, self.behaviour, self.orders, self.failed = name, os.getpid(), behaviour[name], 0, False
        self.started.append(name)

    def ask(self, message: Any, seconds: float) -> Any:
        if isinstance(message, Order):
            self.asked.append(message)
            self.orders += 1
            if isinstance(self.behaviour, Exception):
                self.failed = isinstance(self.behaviour, AloneError)
                raise self.behaviour
            wrong = self.behaviour if self.behaviour > 1 else 0.0
            return Done([np.ones((2, 3), np.float32) + np.float32(wrong), np.arange(3)], "a remark", None, (), 0.5, None)
        if self.behaviour < 0:
            self.failed = True
            raise AloneError("its process ended with the status -11")
        return None if message[0] == "run" else message[1] * abs(self.behaviour)

    def end(self) -> None:
        self.ended.append(self.name)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Run a case whose contestants, svod's and libraries, behave as specified."""
    FakeProcess.started, FakeProcess.ended, FakeProcess.asked = [], [], []
    monkeypatch.setattr(Alone, "pause", lambda self: None)
    monkeypatch.setattr(Alone, "watch", lambda self: lambda: MachineLoad())

    def do(behaviour: dict[str, Any], cases: Sequence[Case] = (CASE,), known: Sequence[CaseResult] = ()) -> Run:
        own = {n: PrepareConfig() for n in ("heuristic", "tuned") if n in behaviour}
        alone = Alone([n for n in behaviour if n not in own], own, 5, 2, start=lambda name: FakeProcess(name, behaviour))  # type: ignore[arg-type,return-value]
        with closing(alone):
            return run_suite(cases, [], [], SETTINGS, CONFIG, target=host_target(), alone=alone, known=known)
    return do


def test_each_contestant_has_a_process_and_its_own_clock(run: Callable[..., Run]) -> None:
    case = run({"heuristic": 2e-3, "onnxruntime": 3e-3}).cases[0]
    own = case.outcome("heuristic")
    assert own is not None and own.median == pytest.approx(2e-3) and own.speedups["onnxruntime"].median == pytest.approx(1.5)
    assert own.remark == "a remark" and own.prepare_seconds == 0.5 and case.rounds == 7
    assert sorted(FakeProcess.ended) == ["heuristic", "onnxruntime"]
    assert sorted((o.contestant, o.seed, o.threads, o.config is not None) for o in FakeProcess.asked) == [
        ("heuristic", 5, 2, True), ("onnxruntime", 5, 2, False)]


def test_what_fails_costs_itself(run: Callable[..., Run]) -> None:
    case = run({"heuristic": 2e-3, "tuned": AloneError("no memory"), "onnxruntime": 3e-3}).cases[0]
    assert [(o.name, o.status, o.why) for o in case.contestants if o.status != "ok"] == [("tuned", "failed", "no memory")]
    case = run({"heuristic": -2e-3, "onnxruntime": 3e-3}).cases[0]      # it fails when it is run
    broken = case.outcome("heuristic")
    assert broken is not None and broken.status == "failed" and "status -11" in broken.why
    assert case.best_peer == "onnxruntime"


def test_numbers_are_compared_first(run: Callable[..., Run]) -> None:
    case = run({"heuristic": 2.0, "onnxruntime": 3e-3}).cases[0]
    wrong = case.outcome("heuristic")
    assert wrong is not None and wrong.status == "wrong" and "the reference's by 2.0e+00" in wrong.why and not wrong.samples


def test_without_a_reference_there_is_nothing(run: Callable[..., Run]) -> None:
    case = run({"heuristic": 2e-3, "onnxruntime": AloneError("it is broken")}).cases[0]
    assert {(o.name, o.status) for o in case.contestants} == {("heuristic", "failed"), ("onnxruntime", "failed")}
    assert "onnxruntime, with which the others are compared: it is broken" in case.contestants[0].why


def test_libraries_without_the_suite_stay_out(run: Callable[..., Run]) -> None:
    case = run({"heuristic": 2e-3, "onnxruntime": 3e-3, "torch": 1e-3, "inductor": 1e-3}).cases[0]
    assert [o.name for o in case.contestants] == ["heuristic", "onnxruntime"]
    assert all(suite in PEER_LIBRARIES[name].suites for suite, name in REFERENCE.items())


def test_a_lower_precision_has_a_time_but_is_not_the_best_peer(run: Callable[..., Run]) -> None:
    case = run({"heuristic": 2e-3, "onnxruntime": 3e-3, "openvino_bf16": 1e-3}).cases[0]
    lower, own = case.outcome("openvino_bf16"), case.outcome("heuristic")
    assert case.best_peer == "onnxruntime" and lower is not None and own is not None
    assert (lower.precision, lower.median, own.precision) == ("bfloat16", pytest.approx(1e-3), "")
    assert own.speedups["openvino_bf16"].median == pytest.approx(0.5)
    case = run({"heuristic": AloneError("it is broken"), "onnxruntime": -3e-3, "openvino_bf16": 1e-3}).cases[0]
    assert [o.status for o in case.contestants] == ["failed", "failed", "ok"] and case.best_peer is None


@pytest.mark.parametrize(("error", "status"), [(0.0, "ok"), (0.04, "ok"), (0.06, "wrong")])
def test_a_lower_precision_may_differ_by_more(error: float, status: str, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = FakeProcess.ask

    def ask(self: FakeProcess, message: Any, seconds: float) -> Any:
        done = answer(self, message, seconds)
        if isinstance(message, Order) and message.contestant.startswith("openvino"):
            done.outputs[0] += np.float32(error)
        return done
    monkeypatch.setattr(FakeProcess, "ask", ask)
    case = run({"heuristic": 2e-3, "onnxruntime": 3e-3, "openvino_bf16": 1e-3, "openvino": 1e-3}).cases[0]
    found = {o.name: o.status for o in case.contestants}
    assert found["openvino_bf16"] == status and found["openvino"] == ("wrong" if error else "ok")


def test_libraries_of_whole_models_have_a_process_beside_the_shared_one(run: Callable[..., Run],
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    model, kernel = (Case(op, op, "models", "g", op, (), (2, 3), "float32", 6.0, lambda: None) for op in ("model", "gelu"))
    monkeypatch.setitem(run_case.__kwdefaults__, "refer", lambda case, operands: np.ones((2, 3)))
    monkeypatch.setitem(run_case.__kwdefaults__, "place", lambda contestants, pause: nullcontext())
    found = run({"heuristic": 2e-3, "ncnn": 3e-3, "onnxruntime": 3e-3}, (model, kernel))
    assert [[(o.name, o.median) for o in c.contestants] for c in found.cases] == [[("ncnn", pytest.approx(3e-3))], []]
    assert FakeProcess.started == FakeProcess.ended == ["ncnn"]     # one process, although operands have several placements


@pytest.mark.slow
def test_known_results_stay(run: Callable[..., Run]) -> None:
    first = run({"heuristic": 2e-3, "onnxruntime": 3e-3})
    other = whole_model("other", "another", "onnx", "files", 1e-3)
    both = run({"heuristic": 1e-3, "onnxruntime": 3e-3}, (other,), first.cases)
    assert [c.name for c in both.cases] == ["file", "other"] and both.cases[0] == first.cases[0]
    assert both.groups[0].cases["heuristic/onnxruntime"] == 2
    again = run({"heuristic": 1e-3, "onnxruntime": 3e-3}, (CASE,), both.cases)
    assert [c.name for c in again.cases] == ["other", "file"]
    assert [c.outcome("heuristic").median for c in again.cases] == pytest.approx([1e-3, 1e-3])  # type: ignore[union-attr]


BLOCKS = [block_case(drawn_block("image", 0, number)) for number in range(3)]


def test_children_of_blocks_stay_for_the_next_one(run: Callable[..., Run]) -> None:
    found = run({"heuristic": 2e-3, "torch": 3e-3}, BLOCKS)
    assert [c.svod is not None for c in found.cases] == [True] * 3
    assert sorted(FakeProcess.started) == sorted(FakeProcess.ended) == ["heuristic", "torch"] and len(FakeProcess.asked) == 6


@pytest.mark.parametrize("behaviour", [AloneError("it took more than 400 s, and was ended"), -2e-3])
def test_a_child_that_failed_is_replaced(run: Callable[..., Run], behaviour: Any) -> None:
    found = run({"heuristic": behaviour, "torch": 3e-3}, BLOCKS)
    assert [o.status for c in found.cases if (o := c.outcome("heuristic"))] == ["failed"] * 3
    assert FakeProcess.started.count("heuristic") == 3 and FakeProcess.started.count("torch") == 1


def test_a_child_that_has_had_many_cases_is_replaced(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("svod.bench.peers.alone.MOST_ORDERS", 2)
    run({"heuristic": 2e-3, "torch": 3e-3}, BLOCKS)
    assert sorted(FakeProcess.started) == sorted(FakeProcess.ended) == ["heuristic"] * 2 + ["torch"] * 2


def test_what_is_unsupported_costs_no_child(run: Callable[..., Run]) -> None:
    run({"heuristic": UnsupportedError("it has no such operation"), "torch": 3e-3}, BLOCKS)
    assert sorted(FakeProcess.started) == ["heuristic", "torch"]


# -- a real process -----------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_child_says_what_it_cannot_do_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('a file of the current directory was imported')")
    monkeypatch.chdir(tmp_path)
    process = Process("heuristic")
    with pytest.raises(AloneError, match="nonsuch"):
        process.ask(Order("heuristic", "nonsuch", "onnx", 0, 1, PrepareConfig()), 60.0)
    process.end()
    with pytest.raises(AloneError):
        process.ask(("run", 1), 5.0)


def test_a_child_that_hangs_is_ended() -> None:
    process = Process("heuristic")
    with pytest.raises(AloneError, match="it took more than"):
        process.ask(Order("heuristic", "nonsuch", "onnx", 0, 1, PrepareConfig()), 0.0)
    with pytest.raises(AloneError, match="ended with the status -9"):
        process.ask(("run", 1), 5.0)
    process.end()


def test_the_child_serves_its_contestant(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    class Peer:
        def prepare(self, case: Case, operands: Sequence[Any]) -> PreparedPeer:
            if case.name == "other":
                raise UnsupportedError("there is no such operation")
            held = MachineLoad()
            weakref.finalize(held, dropped.append, case.name)
            return PreparedPeer(lambda n: ran.append(n) if n != 13 else 1 // 0, lambda: [np.ones(2)], False, "slow today",  # type: ignore[arg-type,return-value]
                                again=lambda case, operands: held)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(child, "_contestant", lambda order: Peer())
    monkeypatch.setattr(child, "_resolved", lambda order: whole_model(order.case, "", "onnx", "", 0.0))
    dropped: list[str] = []

    pipe, other = Pipe()
    thread = threading.Thread(target=child.main, args=(str(os.dup(other.fileno())),))
    other.close()
    thread.start()
    pipe.send(Order("heuristic", "file", "onnx", 0, 1))
    kind, done = pipe.recv()
    assert kind == "done" and done.remark == "slow today" and np.array_equal(done.outputs[0], np.ones(2))
    pipe.send(("sample", 4, None))
    kind, seconds = pipe.recv()
    assert kind == "done" and seconds > 0 and ran == [1, 4]
    pipe.send(("run", 13))
    assert pipe.recv() == ("failed", "ZeroDivisionError: integer division or modulo by zero")
    pipe.send(("run", 2))
    assert pipe.recv() == ("done", None) and ran[-1] == 2
    pipe.send(("explain",))
    assert pipe.recv() == ("done", ()) and not dropped
    for case, answer in (("other", "unsupported"), ("third", "done")):     # an order takes the place of the one before it
        pipe.send(Order("heuristic", case, "onnx", 0, 1))
        assert pipe.recv()[0] == answer and dropped == ["file"]
    pipe.close()
    thread.join(NEVER)
    assert not thread.is_alive() and dropped == ["file", "third"]


# -- what it stands on --------------------------------------------------------------------------------

def test_remote_samples_take_the_time_of_the_process() -> None:
    asked: list[Any] = []

    class Remote:
        name = "there"

        def ask(self, message: Any, seconds: float) -> Any:
            asked.append(message)
            return message[1] * 1e-3 if message[0] == "sample" else None
    contestant = RemoteContestant(Remote())  # type: ignore[arg-type]
    assert calibrate(contestant, None, time.perf_counter, 4e-3) == (5, pytest.approx(1e-3))
    assert take_sample(contestant, 3, 1e-3, warm=0.02) == pytest.approx(1e-3) and asked[-1] == ("sample", 3, 0.02)
    assert take_sample(contestant, 3, 1e-5) == pytest.approx(1e-3) and asked[-1] == ("sample", 3, 0.0)
    assert take_sample(Contestant(calls(lambda: None)), 2, 1.0) >= 0


def test_children_are_no_foreign_load() -> None:
    alone, doubled = read_machine(), read_machine(processes=[os.getpid()])
    assert doubled.own >= alone.own + 0.5 * (alone.own - 0.1)
    assert read_machine(processes=[2 ** 22 + 1]).own == pytest.approx(read_machine().own, abs=0.5)


def test_outputs_are_compared_one_by_one() -> None:
    a, b = np.array([1e6, 2e6], np.float32), np.array([3, 4])
    assert difference([a, b], [a, b], "float32") == 0.0
    assert difference([a, b + 1], [a, b], "float32") == 0.25        # relative to the largest value of that output
    assert difference([a], [a, b], "float32") == difference(a, [a], "float32") == np.inf
