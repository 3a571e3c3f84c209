"""Profiles of running programs, traces, and the symbol names for perf: results of programs do not change, and the reported figures follow
from the work and the times."""
from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import svod
from svod.compile.backend import device_named
from svod.compile.plan import run_log
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.observe import add_to_perf_map
from svod.compile.plan.run_log import RunLog
from svod.config import NONE, PrepareConfig
from svod.errors import ConfigError
from svod.tensor import Tensor
from tests.core.corpus import data

CONFIG = PrepareConfig(db=NONE, threads=1)


class Steps:
    """A clock for tests: every second reading is 2 ms after the one before."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 2e-3
        return self.now


def logged(plan: ExecutionPlan, monkeypatch: pytest.MonkeyPatch, level: int = 1) -> tuple[RunLog, io.StringIO]:
    out = io.StringIO()
    log = RunLog(level, True, out)
    plan.log_runs(log)
    monkeypatch.setattr("svod.compile.plan.running.runs.time", Steps())
    return log, out


def test_a_table_and_a_trace_of_the_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    y = (data(16, 8) @ data(8, 24)).softmax(-1)
    plan = y.prepare(CONFIG)
    log, out = logged(plan, monkeypatch)
    for _ in range(3):
        plan.execute()
    expected = data(16, 8).numpy() @ data(8, 24).numpy()
    expected = np.exp(expected) / np.exp(expected).sum(-1, keepdims=True)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5)
    log.finish(tmp_path / "t.json")
    lines = out.getvalue().splitlines()
    assert lines[0] == "svod: 6 runs of 2 kernels, 12.0 ms"
    (gemm,) = (x.split() for x in lines if x.startswith("gemm_0"))
    assert gemm[:7] == ["gemm_0", "3", "6.00", "ms", "50", "%", "2.00"] and gemm[8] == "0.00307", "2·16·8·24 in 2 ms"
    events: list[dict[str, Any]] = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [e["name"] for e in events] == ["gemm_0", "softmax_1"] * 3
    assert all(e["ph"] == "X" and e["dur"] == pytest.approx(2000) and e["pid"] == os.getpid() for e in events)
    assert events[1]["ts"] == pytest.approx(events[0]["ts"] + 4000)
    assert events[0]["args"]["GFLOP/s"] == pytest.approx(2 * 16 * 8 * 24 / 2e-3 / 1e9)
    assert events[0]["args"]["GB/s"] == pytest.approx(4 * (16 * 8 + 8 * 24 + 16 * 24) / 2e-3 / 1e9)
    assert events[0]["args"]["opts"] == plan.kernels[0].chain and events[0]["args"]["device"] == "CPU:llvm"


def test_each_kernel_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = (data(16, 8) @ data(8, 24)).prepare(CONFIG)
    log, out = logged(plan, monkeypatch, level=2)
    plan.execute()
    assert out.getvalue().startswith("gemm_0  2.00 ms  3.07 MFLOP/s  1.41 MB/s")
    log.finish(None)
    assert "svod: 1 run of 1 kernel, 2.00 ms" in out.getvalue()


def test_work_is_that_of_the_values_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    n = svod.Variable("n", 1, 16)
    plan = (data(16, 8)[:n] @ data(8, 24)).prepare(CONFIG)
    log, _ = logged(plan, monkeypatch)
    for value in (4, 16):
        plan.execute(n=value)
    four, sixteen = json.loads(log.trace_json())["traceEvents"]
    assert (four["args"]["n"], sixteen["args"]["n"]) == (4, 16)
    assert four["args"]["GFLOP/s"] == pytest.approx(2 * 4 * 8 * 24 / 2e-3 / 1e9)
    assert sixteen["args"]["GFLOP/s"] == pytest.approx(4 * four["args"]["GFLOP/s"])
    with plan.at({"n": 4}):
        profiled = svod.profile(plan, seconds=0.01)
    assert profiled.kernels[0].flops == 2 * 4 * 8 * 24


def test_functions_of_python_are_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Tensor(np.arange(4, dtype=np.float32))
    y = svod.custom_function(np.sin, x + 1, dtype="float32", shape=(4,)) * 2
    plan = y.prepare(CONFIG)
    log, out = logged(plan, monkeypatch)
    plan.execute()
    np.testing.assert_allclose(y.numpy(), 2 * np.sin(np.arange(1, 5)), rtol=1e-6)
    log.finish(None)
    assert "svod: 3 runs of 3 kernels" in out.getvalue() and "sin" in out.getvalue()


def test_a_trace_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "MOST_EVENTS", 2)
    plan = (data(4, 4) * 2).prepare(CONFIG)
    log, _ = logged(plan, monkeypatch)
    for _ in range(5):
        plan.execute()
    trace = json.loads(log.trace_json())
    assert len(trace["traceEvents"]) == 2 and trace["otherData"] == {"events left out": 3}


def test_a_plan_without_a_log_is_one_call() -> None:
    plan = (data(4, 4) * 2).prepare(CONFIG)
    plan.execute()
    assert plan._runs.is_plain and plan._runs.log is None


def test_names_for_perf(tmp_path: Path) -> None:
    plan = (data(16, 8) @ data(8, 24)).prepare(CONFIG)
    for _ in range(2):
        add_to_perf_map(plan, device_named("CPU").pair, tmp_path)
    lines = (tmp_path / f"perf-{os.getpid()}.map").read_text().splitlines()
    kernel = plan.kernels[0]
    addresses = kernel.loaded.addresses  # type: ignore[union-attr]
    assert [int(line.split()[0], 16) for line in lines] == list(addresses), "each once"
    for line in lines:
        _, size, name = line.split(maxsplit=2)
        assert int(size, 16) > 0 and name.startswith(f"svod gemm_0 {kernel.key[:12]} svod_p")


@pytest.mark.slow
def test_the_variables(tmp_path: Path) -> None:
    program = "import numpy as np, svod\nf = svod.jit(lambda x: x @ x)\nfor _ in range(3): f(np.ones((8, 8), np.float32))\n" \
              "import os; print(os.getpid())"
    environment = {**os.environ, "SVOD_TUNE_DB": NONE, "SVOD_PROFILE": "1", "SVOD_TRACE": str(tmp_path / "t.json"), "SVOD_PERF_MAP": "1"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "svod: 3 runs of 1 kernel" in run.stderr
    assert len(json.loads((tmp_path / "t.json").read_text())["traceEvents"]) == 3
    names = Path(f"/tmp/perf-{run.stdout.strip()}.map")
    assert "svod gemm_0" in names.read_text()
    names.unlink()
    with pytest.raises(ConfigError, match=r"SVOD_TRACE.*cannot be written.*make its directory first"):
        (data(4, 4) * 2).prepare(PrepareConfig(db=NONE, trace=str(tmp_path / "none" / "t.json")))
