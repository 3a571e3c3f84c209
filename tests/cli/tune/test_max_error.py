"""--max-error: the options that it needs, and a program whose kernels are chosen."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from svod import config
from svod.cli.tune.command import check
from svod.cli.tune.options import TuneOptions
from svod.cli.tune.plans import checks
from svod.cli.tune.setting import EXIT_SCRIPT
from svod.compile.cpu.host import host_target
from svod.tune.db import TuningDB
from svod.tune.fast.report import OF_FIRST_RUN
from svod.tune.lock import read_lock

SCRIPT = """
import numpy as np
import svod
from svod import Tensor
v, w = (Tensor(np.random.default_rng(k).standard_normal((256, 256)).astype(np.float32)) for k in (1, 2))
y = (Tensor(np.ones((256, 256), np.float32)) @ v).relu() @ w
plan = y.prepare(constants=[v, w])
print(*(k.opts_source for k in plan.kernels))
plan.execute()
"""


@pytest.mark.parametrize(("given", "reason"), [
    ({"script": "m.py"}, "give both"), ({"script": "m.py", "numerics": "same"}, "give both"),
    ({"script": None, "source": "c.jsonl", "numerics": "fast"}, "needs the program"),
    ({"script": "m.py", "numerics": "fast", "compile_only": True}, "on this machine"),
])
def test_what_it_needs(given: dict[str, object], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("m.py", "c.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(click.UsageError, match=reason):
        check(TuneOptions(max_error=1e-2, **given))     # type: ignore[arg-type]


def run_tune(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "svod", "tune", "m.py", "--numerics", "fast", "--max-error", "0.05", "--budget", "15",
                           "--workers", "inline", "--db", "t.db", "--json", "out.json", *options], cwd=folder, capture_output=True,
                          text=True, env=config.environment_with_svod(BEAM=None, SVOD_TUNE_DB=":none:"), check=False)


@pytest.mark.parametrize(("code", "failure"), [
    ("", ""), ("import sys; sys.exit(7)", "m.py ended with status 7 in the run that chooses the kernels to round"),
    ("import os; os.kill(os.getpid(), 9)", "m.py was killed by SIGKILL in the run that chooses the kernels to round"),
    ("import os, signal; os.kill(os.getppid(), signal.SIGINT); signal.pause()",
     "m.py was ended by Ctrl-C in the run that chooses the kernels to round"),
    ("import time; time.sleep(99)", "m.py was ended after 1 s in the run that chooses the kernels to round")])
def test_the_end_of_the_run_that_chooses_is_told(code: str, failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHOICE_SECONDS", 0.5 if "sleep" in code else 60.0)
    options = SimpleNamespace(started=("-c", code), subject="m.py", device=None, max_error=0.05, json_path=None, is_onnx=False)
    with TuningDB.open(":none:") as db:
        setting, captured = SimpleNamespace(options=options, db=db), SimpleNamespace(kernels={})
        assert checks.choose_roundings(captured, setting, 0.2) == ((), failure)       # type: ignore[arg-type]


def test_sample_inputs_are_described_alike_everywhere() -> None:
    assert checks._samples(TuneOptions("m.py")) == OF_FIRST_RUN == "those of the program's first run"
    assert checks._samples(TuneOptions("m.onnx")) == f"{OF_FIRST_RUN}, which are made up, of the types that m.onnx declares"
    assert checks._samples(TuneOptions("m.onnx", inputs="x.npz")) == f"{OF_FIRST_RUN}, which are in x.npz"


def test_a_program_that_fails_in_the_run_that_chooses(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(f"import os, sys\n{SCRIPT}\nif 'SVOD_MAX_ERROR' in os.environ:\n    os._exit(7)\n".replace(
        "plan.execute()", "plan.execute() if 'SVOD_MAX_ERROR' not in os.environ else None"))
    done, why = run_tune(tmp_path), "m.py ended with status 7 in the run that chooses the kernels to round"
    assert done.returncode == EXIT_SCRIPT, done.stderr
    assert f"svod-tune: {why}" in done.stderr and f"numerics=fast: {why}: it stays in float32" in done.stderr + done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["rounding_failure"] == why


@pytest.mark.skipif(not {"avx512f", "bf16"} <= set(host_target().features), reason="needs a CPU with AVX-512 BF16")
def test_a_program_chooses_its_kernels(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(SCRIPT)
    environment = config.environment_with_svod(BEAM=None, SVOD_TUNE_DB=":none:")
    done = run_tune(tmp_path, "-o", "m.lock.jsonl")
    assert done.returncode == 0, done.stderr
    found, = json.loads((tmp_path / "out.json").read_text())["roundings"]
    assert found["error"] <= 0.05 and found["kernels"] and found["samples"] == OF_FIRST_RUN
    assert "numerics=fast: an error of at most 0.05" in done.stderr
    locked = read_lock(tmp_path / "m.lock.jsonl").roundings
    assert {x.kernel: x.record.used for x in locked} == {k["kernel"]: k["used"] for k in found["kernels"]}
    assert all("gemm" in x.name for x in locked) and "which of them are rounded in 1 plan" in done.stderr
    run = subprocess.run([sys.executable, "m.py"], cwd=tmp_path, capture_output=True, text=True, check=True,
                         env={**environment, "SVOD_NUMERICS": "fast", "SVOD_LOCK": "m.lock.jsonl"})
    assert run.stdout.split().count("fast") == sum(x.record.used for x in locked)
