"""Helpers for tests of the command svod-tune: captures to tune, and stand-ins for sessions and workers."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from svod import config
from svod.bench.race import Ratio
from svod.bench.roofline import Ceilings
from svod.cli.tune.command import cli
from svod.cli.tune.survey import SurveyRow
from svod.compile.cpu.host import host_target
from svod.compile.llvm.codegen import CODEGEN_REVISION, COMPILER
from svod.compile.plan.compiler import Compiler, compiler_for
from svod.errors import TuneError
from svod.tune import capture
from svod.tune.db import Measurement, TuningDB, Verdict
from svod.tune.search.confirmation import Finding
from svod.tune.session import SessionResult
from svod.tune.workers.executor import InlineExecutor
from tests.bench.stored_ceilings import store_ceilings
from tests.patience import NEVER
from tests.plans import canonical, gemm_then_softmax, scaled
from tests.tune import search_kernels

ROOT = Path(__file__).parents[3]
TARGET = host_target()
BEAM = config.BeamConfig(width=4)
CEILINGS = Ceilings(TARGET.key, TARGET.threads, True, {"float32": (1e11, 2e11)}, {"memory": {"read": (1e10, 2e10), "copy": (1e10, 2e10)}},
                    (1e-9, 1e-7))
MODEL = """
import sys
import numpy as np
from svod.tensor import Tensor
x = Tensor(np.ones((16, 24), np.float32))
print((x @ x.permute(1, 0)).relu().numpy().sum(), *sys.argv[1:], __name__, flush=True)
"""


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "model.py"
    path.write_text(text)
    return str(path)


def captured(tmp_path: Path, runs: int = 10) -> str:
    """A capture file of two plans."""
    plans = []
    for unbound, times in ((gemm_then_softmax(), runs), (scaled(64), 1)):
        seconds = dict(zip(unbound.kernels, (8e-6, 2e-6), strict=False))
        plans.append(capture.CapturedPlan(capture.plan_digest(unbound, TARGET.key), TARGET.key, unbound, seconds, times))
    capture.write_capture(tmp_path / "c.jsonl", capture.Capture(plans))
    return str(tmp_path / "c.jsonl")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, list(arguments))


def main(tmp_path: Path, *arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run the console script in a process of its own, which knows ceilings of this machine."""
    store_ceilings(tmp_path / "known")
    return subprocess.run([sys.executable, "-m", "svod.cli.tune", *arguments], capture_output=True, text=True, cwd=tmp_path, check=False,
                          input=stdin, timeout=NEVER, env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path),
                                                          "XDG_DATA_HOME": str(tmp_path / "known"), **env})


def compiler() -> Compiler:
    return compiler_for(TARGET, config.PrepareConfig(object_cache=":none:"))


def records_of_winner(key: str, chain: Sequence[Any], linear: str) -> list[Any]:
    return [Measurement(key, TARGET.key, tuple(chain), linear, "ok", CODEGEN_REVISION, COMPILER, 1, "confirm", time=5e-6, baseline=1e-5,
                        ratio=0.5, ratio_low=0.49, ratio_high=0.51), Verdict(key, TARGET.key, linear, "verified", CODEGEN_REVISION)]


def a_row(name: str = "gemm", share: float = 0.5) -> SurveyRow:
    kernel = canonical(search_kernels.gemm(8, 8, 8))
    return SurveyRow(kernel, name, ("/a/very/long/path/to/the/model.py:12", "layers.1"), 2, 1e-4, share, "f", 1024, 768)


class FakeSession:
    """A stand-in for a session: for every kernel it finds the empty chain, twice as fast as the heuristic's, and records it."""

    interrupted = False
    begun: list[tuple[str, float]]      # target and budget in seconds of each session
    lost = 0                            # number of the session, counted from 1, that has no worker
    checked: list[float]                # seconds that each check of a plan was given

    def __init__(self, tasks: Sequence[Any], target: Any, *, db: TuningDB, listener: Any, budget: Any, **others: Any) -> None:
        self.tasks, self.db, self.listener, self.result = tasks, db, listener, SessionResult()
        self.begun.append((target.key, budget.total))
        if len(self.begun) == self.lost:
            raise TuneError("no worker is left that can bench")

    def run(self) -> SessionResult:
        for t in self.tasks:
            linear = compiler().linear_of(t.kernel, ())
            self.result.rows += self.db.record(records_of_winner(t.key, (), linear))
            self.result.findings[t.key] = Finding((), "beam", 5e-6, 1e-5, True, True, "2 rounds without a gain", linear,
                                                  Ratio(2.0, 1.9, 2.1), None, None)
        self.result.interrupted, self.result.candidates, self.result.seconds = self.interrupted, 40, 2.0
        self.result.timed, self.result.searches = 30, len(self.tasks)
        return self.result


class NoExecutor:
    """A stand-in for an executor, which counts how often one was started."""

    started = 0

    def __init__(self, *a: Any, **k: Any) -> None:
        NoExecutor.started += 1

    def result(self, seconds: float | None = None) -> InlineExecutor:
        return InlineExecutor()

    def close(self) -> None:
        pass
