"""Every command that a tool recommends is run as it was printed, and has the effect that its remark says."""
from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from svod.cli.installation import interpreter, program
from svod.cli.tune.command import cli as tune_command
from svod.cli.tune.next_steps import Ended, next_steps, why_no_graph
from svod.cli.tune.options import TuneOptions
from svod.cli.tune.report import KernelReport
from svod.cli.tune.survey import SurveyRow
from svod.tune.db import Search, TuningDB
from svod.tune.db.records import BUDGET_SPENT
from tests.patience import NEVER
from tests.plans import canonical
from tests.tune.search_kernels import elementwise

ROOT = Path(__file__).parents[2]
MODEL = """
import numpy as np
from svod import Tensor
print(((Tensor(np.arange(61, dtype=np.float32)) * 2).numpy() == 2 * np.arange(61)).all())
"""


GAINED = "PLAN_GAINED"      # environment variable with the share of the promised gain that the whole plan is to show
# svod-tune with times from a table: every second candidate takes half as long as the heuristic. The machine's ceilings are made up.
REPLAYED = f"""#!{sys.executable}
import os
from svod.bench import roofline
from svod.bench.race import Ratio
from svod.compile.lower.lower import lower
from svod.tune import session
from svod.tune.measure.candidate import Origin
from svod.tune.measure.measurer import Lowered
from svod.tune.plans import check as plan_check
from tests.bench.example_run import CEILINGS
from tests.tune.replay import ReplayedMeasurer

def check_plan(*plan, seconds):
    gained = float(os.environ["{GAINED}"])
    return plan_check.PlanCheck(1.0, Ratio(1 - gained / 2, 0.99 - gained / 2, 1.01 - gained / 2), 0.5, 7, None, 0, 1)

def measurer(session, kernel, shrink):
    return ReplayedMeasurer(lambda c: 1e-3 if c.origin is Origin.HEURISTIC else 0.5e-3, lambda c: Lowered(lower(c.state).digest, 100, 1e6))

session.TuneSession._worker_measurer = measurer
roofline.cached_ceilings = lambda *given, **how: CEILINGS
plan_check.check_plan = check_plan      # The command imports these by name, so this comes first.

from svod.cli.tune import main
main()
"""


class Shell:
    """Runs command lines in a directory of its own. `searches`: the searches that its database has."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "model.py").write_text(MODEL)
        (directory / "bin").mkdir()
        (directory / "bin" / "svod-tune").write_text(REPLAYED)
        (directory / "bin" / "svod-tune").chmod(0o755)
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(directory), "XDG_DATA_HOME": str(directory / "data"),
                    "SVOD_OBJECT_CACHE": str(directory / "objects"), "BEAM_ROUND_SIZE": "1", "BEAM_RUNS": "1", "BEAM_PATIENCE": "1",
                    "PATH": f"{directory / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}", GAINED: "1.0"}

    def __call__(self, command: str, **env: str) -> str:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=self.directory, env={**self.env, **env},
                              check=False, timeout=NEVER)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout + done.stderr

    @property
    def searches(self) -> list[Search]:
        with TuningDB.open(self.directory / "t.db", read_only=True) as db:
            return sorted((s for s, _ in db.select(Search) if s.ended_at is not None), key=lambda s: s.started_at)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def recommended(output: str) -> list[tuple[str, str]]:
    """(command, remark) of each `next:` and `or:` line, and of the recommendation after --dry-run."""
    steps = re.findall(r"^(?:next:|or:) +(.*?)    # (.*)$", output, re.M)
    return steps or [(command, remark) for remark, command in re.findall(r"^nothing to search with beam \d+; (.*?): (.*)$", output, re.M)]


@pytest.mark.slow
def test_a_budget_that_was_too_short_is_doubled(shell: Shell) -> None:
    """The longer budget is also twice as long as the steps before the search took, which a busy machine makes longer."""
    command, budgets = "svod-tune model.py --db t.db --workers inline --beam 1 --budget 0.001", [0.001]
    while "nothing was searched" in (said := shell(f"{command} || true")):
        command, goes_on = recommended(said)[-1]
        assert goes_on == "goes on with 1 kernel for which the budget was too short"
        budgets.append(float(re.findall(r"--budget (\S+)", command)[0]))
        assert budgets[-1] >= 2 * max(1.0, budgets[-2])
    assert len(budgets) > 1 and [s.config["budget"] for s in shell.searches] == budgets


@pytest.mark.slow
@pytest.mark.parametrize(("gained", "remark", "says"), [("1.0", "everything about the first kernel", "{key}"),
                                                       ("0.0", "a wider beam searches on", "1 kernel to search")])
def test_what_svod_tune_recommends_is_so(gained: str, remark: str, says: str, shell: Shell) -> None:
    """The first recommended command uses the result. The second shows it if the plan gained what was promised, else searches further."""
    said = shell("svod-tune model.py --db t.db --workers inline --beam 1 --budget 1000", **{GAINED: gained})
    assert shell.searches[-1].outcome != BUDGET_SPENT
    [(use, starts), (command, further)] = recommended(said)
    assert (starts, further) == ("starts with these kernels", remark)
    assert "; database" in shell(use, DEBUG="1"), "the plan's table says where a chain is from"
    assert says.format(key=shell.searches[-1].kernel) in shell(command)


@pytest.mark.slow
def test_what_a_dry_run_recommends_is_so(shell: Shell) -> None:
    dry = "svod-tune model.py --db t.db --workers inline --beam 1 --budget 200 --dry-run"
    [command] = re.findall(r"^next: (.*)$", shell(dry), re.M)
    assert "1 kernel to search" in shell(command) and len(shell.searches) == 1
    while (steps := recommended(shell(dry.replace("--beam 1", f"--beam {shell.searches[-1].config['width']}")))):
        [(command, remark)] = steps
        before = shell.searches
        assert "1 kernel to search" in shell(command) and len(shell.searches) == len(before) + 1, remark
        assert (shell.searches[-1].config["width"] == 2 * before[-1].config["width"]) == (remark == "to search further")
        if remark == "to search anew, without what is known" or shell.searches[-1].config["width"] > 2:
            break
    else:
        pytest.fail("nothing was recommended")


@pytest.mark.slow
def test_what_svod_db_recommends_is_so(shell: Shell) -> None:
    said = shell("! svod-db --db t.db list")
    [command] = re.findall(r"tune something: (.*)$", said, re.M)
    command = command.replace("SCRIPT", "model.py --workers inline --budget 200")
    assert "stored in" in shell(command) and shell.searches


@pytest.mark.parametrize("python", ["python", "python3"])
def test_without_programs_beside_the_python_its_modules_are_recommended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                        python: str) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    for name in (python, "svod-bench"):
        (folder / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / python))
    monkeypatch.setattr("svod.cli.installation.python", lambda: str(folder / python))
    monkeypatch.setenv("PATH", "/nowhere")
    assert program("svod-bench") == f"'{folder}/svod-bench'" and interpreter() == f"'{folder}/{python}'"
    assert TuneOptions("m y.py").command_line() == f"'{folder}/{python}' -m svod tune 'm y.py' --beam 8 --budget 600"
    monkeypatch.setenv("PATH", str(folder))
    assert program("svod-bench") == "svod-bench" and program("svod-db") == f"{python} -m svod db"


def test_there_is_always_a_next_step() -> None:
    """The recommendations for ends that tests cannot easily cause; they name the files that have the results."""
    options = TuneOptions("my model.py", ("--x", "1 2"), db="a b.db", fresh=True)
    ended = Ended(False, True, Path.cwd() / "svod-tuned-1.jsonl", True, True, False, False)
    assert next_steps(options, [], ended)[1].endswith("--db tuning.db import svod-tuned-1.jsonl    # into a database that can be written")
    [_, again] = next_steps(options, [], replace(ended, interrupted=True))
    assert "'my model.py'" in again and "--fresh" not in again and again.endswith("-- --x '1 2'    # goes on where this one was ended")
    row = SurveyRow(canonical(elementwise(8)), "elementwise", (), 1, 1e-6, 1.0, "f", 8, 64)
    tuned = KernelReport(row, (), "database", 2e-6, 1e-6, True, True, None, "", "")
    [_, use, show] = next_steps(options, [tuned], replace(ended, not_stored=False))
    assert use.startswith("next: SVOD_TUNE_DB='a b.db' ") and "'my model.py' --x '1 2'" in use
    assert f"--db 'a b.db' show {row.key[:8]}" in show
    elsewhere = next_steps(replace(options, device="WEBGPU:1"), [tuned], replace(ended, not_stored=False))[1]
    assert elsewhere.startswith("next: SVOD_DEVICE=WEBGPU:1 SVOD_TUNE_DB='a b.db' ")
    assert next_steps(options, [replace(tuned, source="heuristic")], replace(ended, not_stored=False))[1].startswith("next: ")


NOT_REPEATED = {"fresh", "resume", "dry_run", "compile_only", "json_path", "log_json", "capture_to", "verbose"}
VALUES: dict[str, object] = {
    "script": "a b.onnx", "args": ("--x", "1 2"), "beam": 3, "budget": 40.0, "workers": "local:2", "address": "auto", "target": ("k", "l"),
    "db": "a b.db", "device": "WEBGPU:1", "numerics": "same", "max_error": 0.01, "top": 3, "only": ("conv", "gemm x"), "capture_for": 2.5,
    "module": "m.n", "source": "c.jsonl", "actions": "reference", "strategy": "optuna", "optuna_storage": "sqlite:///s.db",
    "dim": ("batch=1", "length=1..512"), "shape": ("x=1x3",),
    "inputs": "i n.npz", "random_weights": True, "outputs": ("a,b",), "fallback": "reference", "torch": "modules",
    "lock_path": "m.lock.jsonl"}


@pytest.mark.parametrize("name", [f.name for f in fields(TuneOptions) if f.name not in NOT_REPEATED])
def test_a_recommended_command_repeats_the_option(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed again, a recommended command gives each option the value that it had. Options that only concern the output of a run are not
    repeated."""
    monkeypatch.chdir(tmp_path)
    Path("i n.npz").touch()
    given = {"script": None if name in ("module", "source") else "model.py", name: VALUES[name]}
    options = TuneOptions(**given)      # type: ignore[arg-type]
    words = shlex.split(options.command_line())[1:]
    words = words[words.index("tune") + 1:] if "tune" in words else words
    read = tune_command.make_context("svod-tune", words).params
    assert read[name] == getattr(options, name), words


@pytest.mark.parametrize(("text", "torch", "says"), [
    ("import torch\nm(x)\n", None, "never calls torch.compile: --torch modules"),
    ("import torch\nf = torch.compile(m)\n", None, "those that need gradients run in PyTorch"),
    ("import torch\nm.compile(backend='inductor')\n", "compile", "another backend keeps that backend"),
    ("import torch\nm(x)\n", "modules", "ran none of its modules")])
def test_why_nothing_of_a_script_of_pytorchs_is_tuned(text: str, torch: str | None, says: str, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(text)
    options = TuneOptions(str(tmp_path / "m.py"), torch=torch)
    assert options.runs_torch is ("compile" in text or torch is not None) and says in why_no_graph(options)


@pytest.mark.parametrize(("text", "runs"), [
    ("import torch\ntorch.compile(m)(x)\n", True), ("import torch as t\n@t.compile\ndef f(x): return x\n", True),
    ("from torch import nn, compile as c\nf = c(m)\n", True), ("import torch\nm = torch.nn.ReLU()\nm.compile()\n", True),
    ("from torch.nn import ReLU\nReLU().compile()\n", True), ("def f():\n    import torch\n    return torch.compile\n", True),
    ("from transformers import AutoModel\nAutoModel.from_pretrained('x').compile()\n", True),
    ("try:\n    import torch\nexcept ImportError:\n    torch = None\nimport svod\n", False), ("import torch, re\nre.compile('x')\n", False),
    ("import torch\nimport re as r\nfrom sass import compile as c\nr.compile('x'), c('x')\n", False),
    ("import torch\ncompile('1', '', 'eval')\n", False),
    ("import torch\n# torch.compile(m) is slower\ntext = 'torch.compile(m)'\n", False), ("import torchinfo\nm.compile()\n", False),
    ("# import torch\nm.compile()\n", False), ("import torch\ntorch.compile(\n", False), ("", False)])
def test_scripts_that_call_torch_compile_run_under_svod_torch_run(text: str, runs: bool, tmp_path: Path) -> None:
    script = tmp_path / "m.py"
    script.write_text(text)
    options = TuneOptions(str(script))
    assert options.runs_torch is runs and ("svod.torch.run" in options.launched) is runs
    assert TuneOptions(str(script), torch="compile").runs_torch and not TuneOptions(str(script), torch="off").runs_torch
    assert not TuneOptions(str(tmp_path / "m.onnx")).runs_torch and not TuneOptions(None, module="m").runs_torch
