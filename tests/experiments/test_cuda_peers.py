"""The cases of experiments/cuda_peers.py at small sizes on the CPU, against NumPy; and its handling of times and failures."""
from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("cuda_peers")


def softmax(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


@pytest.mark.slow
def test_what_is_timed_is_right(script: Any) -> None:
    library, known = script.Svod("CPU"), script.cases(small=True)
    for name, want in (("gemm_4096", lambda x, w: x @ w), ("stream", lambda x: np.maximum(x, 0)), ("softmax", softmax),
                       ("add", lambda x, y: x + y), ("row_sum", lambda x: x.sum(-1)), ("transpose", lambda x: x.T),
                       ("plan", lambda x, w: x @ np.linalg.matrix_power(w, script.KERNELS))):
        case = known[name]
        wide = want(*(a.astype(np.float64) for a in script.arrays_of(case)))
        got = library.prepare(case).reshape(wide.shape)
        assert np.abs(got - wide).max() <= script.TOLERANCE[case.dtype] * np.abs(wide).max(), name
        assert library.sample(2) > 0
    assert len(library.plan.kernels) == script.KERNELS, "one launch each"


def test_shapes_are_right(script: Any) -> None:
    """Each kernel once, at a small size and of either type."""
    library, known = script.Svod("CPU"), script.shapes(small=True)
    kernels = {"softmax": softmax, "layer_norm": lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5),
               "add": lambda x: x + x, "row_sum": lambda x: x.sum(-1), "column_sum": lambda x: x.sum(0),
               "transpose": lambda x: x.T}
    assert len(known) == 48
    for (name, want), dtype in zip(kernels.items(), ("float32", "bfloat16") * 3, strict=True):
        case = known[f"{name}_32767x1023_{dtype}"]
        wide = want(script.arrays_of(case)[0].astype(np.float64))
        got = library.prepare(case).reshape(wide.shape)
        assert np.abs(got - wide).max() <= script.TOLERANCE[dtype] * np.abs(wide).max(), name


def test_resnet50_has_its_weights(script: Any) -> None:
    """Parameters of torchvision's model without 26,560 gains of norms, which are in the convolutions, and 1,000 last biases."""
    shapes = list(script.resnet_weights())
    assert len(list(script.resnet_convolutions())) == 53 and sum(int(np.prod(s)) for s in shapes) == 25_557_032 - 26_560 - 1000


def test_products_have_the_goal_of_their_instructions(script: Any) -> None:
    with_it, without = script.cases(False, wgmma=True), script.cases(False, wgmma=False)
    assert {n: (c.goal, c.of) for n, c in with_it.items() if "gemm" in n} == {
        "gemm_4096": (0.8, "svod"), "gemm_8192": (0.8, "svod"), "gemm_4096_mma": (0.6, "older"), "gemm_8192_mma": (0.6, "older")}
    assert {n: c.goal for n, c in without.items() if "gemm" in n} == {"gemm_4096": 0.6, "gemm_8192": 0.6}
    assert {n: c.goal for n, c in with_it.items() if "gemm" not in n} == {n: c.goal for n, c in without.items() if "gemm" not in n}


class Library:
    """A process that takes `seconds[case]` per call and `searched[case]` after a search, and that ends for cases without an entry."""

    def __init__(self, script: Any, seconds: dict[str, float], searched: dict[str, float]) -> None:
        self.script, self.seconds, self.searched = script, seconds, searched
        self.prepared, self.asked = list[tuple[str, float]](), None

    def send(self, question: Any) -> None:
        self.asked = question
        if isinstance(question, list):
            self.prepared.append((question[0], question[1]))

    def receive(self, seconds: float | None = None) -> Any:
        name, searched = self.prepared[-1] if self.prepared else ("", 0.0)
        if self.asked is None:
            return {"wgmma": False}
        if isinstance(self.asked, list):
            if name not in self.seconds:
                raise self.script.Ended("it has ended")
            return [1.0, 2.0]
        return self.asked * (self.searched if searched else self.seconds)[name]


@pytest.fixture
def run(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the script with libraries of these seconds per call. Returns its status, its output, and svod's process."""
    def of(svod: dict[str, float], torch: dict[str, float], searched: dict[str, float], *arguments: str) -> tuple[int, Any, Library]:
        libraries = {"svod": Library(script, svod, searched), "torch": Library(script, torch, torch)}
        libraries["older"] = libraries["svod"]
        path = tmp_path / "ratios.json"
        monkeypatch.setattr(script.Processes, "named", lambda self, name: libraries[name])
        monkeypatch.setattr(script.Processes, "ask", lambda self, peer, question: (peer.send(question), peer.receive())[1])
        monkeypatch.setattr(sys, "argv", ["cuda_peers.py", "--torch", "python", "--json", str(path), *arguments])
        return script.main(), json.loads(path.read_text()), libraries["svod"]
    return of


def test_a_missed_goal_fails_after_everything_was_measured(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Products may take at most 1 / 0.6 of the other's time, the stream 1 / 0.9; models have no goal."""
    torch = {"gemm_4096": 1e-3, "softmax": 1e-3, "gpt2_block": 1e-3}
    only = "--only", "gemm_4096,conv,softmax,gpt2_block"
    status, wrote, _ = run({"gemm_4096": 2e-3, "softmax": 1e-3, "gpt2_block": 9e-3}, torch, {}, *only)
    records = {r["case"]: r for r in wrote["records"]}
    assert status == 1 and [r["met"] for r in records.values()] == [False, False, True, True]
    assert records["gemm_4096"]["ratio"] == pytest.approx(0.5) and records["conv"]["failed"] == "it has ended"
    table = capsys.readouterr().out.split("all goals:")[1].splitlines()[1:]
    assert [line.split()[0] for line in table] == ["gemm_4096", "conv", "softmax"] and ["MISSED" in t for t in table] == [True, True, False]
    status, wrote, _ = run({"gemm_4096": 1.6e-3, "softmax": 1e-3}, torch, {}, "--only", "gemm_4096,softmax")
    assert status == 0 and all(r["met"] for r in wrote["records"])


def test_what_missed_its_goal_is_searched(run: Any) -> None:
    torch = {"gemm_4096": 1e-3, "softmax": 1e-3, "conv": 1e-3}
    status, wrote, svod = run({"gemm_4096": 2e-3, "softmax": 1e-3, "conv": 3e-3}, torch, {"gemm_4096": 1e-3, "conv": 4e-3},
                              "--tune", "5", "--only", "gemm_4096,softmax,conv")
    assert svod.prepared == [("gemm_4096", 0.0), ("softmax", 0.0), ("conv", 0.0), ("gemm_4096", 5.0), ("conv", 5.0)]
    records = {r["case"]: r for r in wrote["records"]}
    assert status == 1 and records["gemm_4096"]["met"] and records["gemm_4096"]["searched"] == 5
    assert records["conv"]["ratio"] == pytest.approx(1 / 3) and not records["conv"]["searched"], "the better one is kept"


def test_no_time_is_left(run: Any) -> None:
    status, wrote, svod = run({"softmax": 1e-3}, {"softmax": 1e-3}, {}, "--seconds", "1e-9", "--only", "softmax")
    assert status == 1 and not svod.prepared and "no time" in wrote["records"][0]["failed"]


def test_a_process_that_ends_or_does_not_answer(script: Any) -> None:
    """The error says which; a script that does not catch it ends."""
    with pytest.raises(SystemExit, match=r"has ended; its error stands above"):
        script.Peer([sys.executable, "-c", "input()"], {}).ask(1)
    slow = script.Peer([sys.executable, "-c", "import time; time.sleep(60)"], {})
    with pytest.raises(script.Ended, match="no answer in 0 s"):
        slow.ask(1, 0.2)
    assert slow.process.returncode is not None
