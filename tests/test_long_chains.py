"""Every pass over a graph takes time linear in its nodes: chains of 1,200 shared squarings, whose expressions have 2^1200 leaves, in
seconds.

A pass that is not linear would never end, so the limits of these tests are far above the time on a slow machine."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from svod.compile.cpu.host import host_target
from svod.core.cost.sketch import heuristic
from svod.core.kernel.scheduler import Scheduler
from svod.core.tree.show import MAX_EXPRESSION, print_nest
from svod.tune.capture import read_capture
from tests.patience import NEVER

LENGTH = 1200       # beyond the limit of recursion
PROGRAM = """
import functools, sys
import numpy as np
import svod
from svod import Tensor

def chain(x):
    return functools.reduce(lambda t, _: t * t * 0.5 + 0.1, range({length}), x)

x = np.full(4, 0.5, np.float32)
expected = functools.reduce(lambda t, _: t * t * np.float32(0.5) + np.float32(0.1), range({length}), x)
{body}
"""
BODIES = {
    "realize": "found = chain(Tensor(x)).numpy()",
    "jit": "found = svod.jit(chain)(x).numpy()",
    "explain": "t = chain(Tensor(x)); str(svod.explain(t)); found = t.numpy()",
    "profile": "t = chain(Tensor(x)); plan = t.prepare(); str(plan.analyze()); str(svod.profile(plan)); plan.execute(); found = t.numpy()",
}


@pytest.mark.slow
@pytest.mark.parametrize(("body", "variables"), [(body, {}) for body in BODIES] + [("realize", {"DEBUG": "2"}), ("jit", {"DEBUG": "2"})])
def test_a_long_chain_of_shared_values(body: str, variables: dict[str, str], tmp_path: Path) -> None:
    text = PROGRAM.format(length=LENGTH, body=BODIES[body]) + "\nassert np.allclose(found, expected, rtol=1e-4), (found, expected)"
    environment = {**os.environ, "SVOD_TUNE_DB": ":none:", "SVOD_OBJECT_CACHE": str(tmp_path), **variables}
    run = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=NEVER)
    assert run.returncode == 0, run.stderr[-2000:]
    assert ("phase 0" in run.stdout + run.stderr) == ("DEBUG" in variables)


@pytest.mark.slow
def test_a_capture_and_the_nests_of_a_report(tmp_path: Path) -> None:
    text = PROGRAM.format(length=LENGTH, body=BODIES["realize"])
    environment = {**os.environ, "SVOD_TUNE_DB": ":none:", "SVOD_CAPTURE": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=NEVER)
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = list(read_capture(tmp_path).kernels.values())
    assert len(kernels) >= 3
    for kernel in kernels:
        for state in (Scheduler(kernel, host_target()), heuristic(Scheduler(kernel, host_target()))):
            lines = print_nest(state).splitlines()
            assert lines[0].startswith("phase 0") and max(map(len, lines)) < 2 * MAX_EXPRESSION


@pytest.mark.slow
def test_random_numbers_with_debug() -> None:
    """The generator's graph shares its words: weights of every layer are made of it."""
    run = subprocess.run([sys.executable, "-c", "from svod import Tensor; Tensor.rand(4).realize()"],
                         env={**os.environ, "DEBUG": "2", "SVOD_TUNE_DB": ":none:"}, capture_output=True, text=True, timeout=NEVER)
    assert run.returncode == 0 and "phase 0" in run.stdout + run.stderr
