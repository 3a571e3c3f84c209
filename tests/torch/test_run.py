"""`python -m svod.torch.run`: unmodified scripts; PyTorch's threads release the cores."""
from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")

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


def test_one_thread_holds_an_idle_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for _ in range(2):
        share_cores()
    assert sum(t.name == "svod: idle OpenMP team" for t in threading.enumerate()) == 1
