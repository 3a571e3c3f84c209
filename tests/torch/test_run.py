"""`python -m svod.torch.run`: unmodified scripts; PyTorch's threads release the cores, and their number is svod's."""
from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")

import svod.torch  # noqa: E402
from svod.cli.tune.command import _check_script  # noqa: E402
from svod.cli.tune.options import TuneOptions  # noqa: E402
from svod.config import PrepareConfig  # noqa: E402
from svod.torch import functions, threads  # noqa: E402
from svod.torch.plans import make_plan  # noqa: E402
from svod.torch.run import main  # noqa: E402
from svod.torch.threads import share_cores  # noqa: E402

SCRIPT = """
import sys, torch
import helper
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh()).eval()
x = torch.randn(3, 4)
run = torch.compile(model) if sys.argv[1] == "compiled" else model
model.train()
model(x).sum().backward()
model.eval()
with torch.no_grad():
    torch.testing.assert_close(run(x), model[1](model[0](x)), rtol=1e-5, atol=1e-6)
import svod.torch
print([(g.calls, g.is_whole) for g in svod.torch.report().graphs], __name__, sys.argv[1:])
"""


class Shifted(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x + 1


@pytest.mark.parametrize(("options", "kind"), [([], "compiled"), pytest.param(["--modules"], "plain", marks=pytest.mark.slow)])
def test_a_script_runs_with_svod(options: list[str], kind: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "helper.py").write_text("", encoding="utf-8")
    words = [sys.executable, "-m", "svod.torch.run", *options, str(tmp_path / "script.py"), kind, "--flag"]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1].endswith(f"__main__ ['{kind}', '--flag']") and "(1, True)" in run.stdout


def test_without_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--modules"]) == main(["--what"]) == 2
    assert "usage" in capsys.readouterr().err
    assert main(["none.py"]) == 2 and "none.py does not exist" in capsys.readouterr().err


def test_a_saved_program_runs_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, program = str(tmp_path / "model.pt2"), torch.export.export(Shifted(), (torch.ones(3),))
    torch.export.save(program, path)
    before = set(functions.functions)
    assert main(TuneOptions(script=path).launched[2:]) == 0
    (made,) = set(functions.functions) - before
    assert (made.name, made.calls) == ("Shifted", 1)
    program.example_inputs = None
    torch.export.save(program, path)
    assert main([path]) == 2 and "without example inputs" in capsys.readouterr().err
    _check_script(path, False)
    whole = Path(path).read_bytes()
    for wrong in (whole[:1000], b"", b"import svod\n"):
        Path(path).write_bytes(wrong)
        assert main([path]) == 2 and "has no program that torch.export.save writes, or is cut off" in capsys.readouterr().err


def test_one_thread_holds_an_idle_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for _ in range(2):
        share_cores()
    assert sum(t.name == "svod: idle OpenMP team" for t in threading.enumerate()) == 1


@pytest.mark.parametrize(("of_torch", "variable", "option", "used"), [
    (1, None, None, 1), (4, None, None, None), (3, "2", None, None), (1, None, 2, 2)])
def test_the_threads_of_torch_are_followed_where_nothing_else_is_said(of_torch: int, variable: str | None, option: int | None,
                                                                      used: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: of_torch)
    monkeypatch.setattr(threads, "affinity", lambda: range(8))
    monkeypatch.setattr(threads, "physical_core", lambda core: str(core // 2))      # four cores of two hardware threads
    if variable is not None:
        monkeypatch.setenv("SVOD_THREADS", variable)
    given = None if option is None else PrepareConfig(threads=option)
    found = threads.with_threads_of_torch(given)
    assert found is given if used in (None, option) else found is not None and found.threads == used


def test_a_graph_has_the_threads_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PrepareConfig] = []

    def made(*given: Any) -> Any:
        seen.extend([part for part in given if isinstance(part, PrepareConfig)])
        return make_plan(*given)
    monkeypatch.setattr(functions, "make_plan", made)
    monkeypatch.setattr(threads, "affinity", lambda: range(64))
    monkeypatch.setattr(threads, "physical_core", str)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert bool((svod.torch.compile(torch.nn.ReLU(), torch.ones(3))(-torch.ones(3)) == 0).all())
    assert [config.threads for config in seen] == [1]


def test_where_torch_is_deterministic_no_plan_has_first_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PrepareConfig | None] = []

    def recorded(*args: Any) -> Any:
        seen.append(args[4])
        return make_plan(*args)
    monkeypatch.setattr(functions, "make_plan", recorded)
    monkeypatch.delenv("SVOD_FIRST_FORMS")      # it would show in a configuration that has the number of threads of an earlier test
    x = torch.arange(12.0).reshape(3, 4)
    try:
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            with torch.inference_mode():
                torch.testing.assert_close(svod.torch.compile(torch.nn.Softmax(-1), x)(x), torch.softmax(x, -1))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [c is not None and c.first_forms is False for c in seen] == [False, True]
