"""The models of experiments/ at small shapes, against their NumPy versions; one of them also as a script."""
from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import svod
from tests.patience import NEVER

MODELS = Path(__file__).resolve().parents[2] / "experiments" / "models"
SMALL = [  # script, class, arguments, input shape
    ("mlp", "Perceptron", {"widths": (9, 17, 5)}, (3, 9)),
    ("mlp", "Perceptron", {"widths": (4, 1)}, (1, 4)),
    ("resnet18", "ResNet18", {"width": 8, "classes": 10}, (1, 3, 32, 32)),
    ("resnet18", "ResNet18", {"width": 3, "classes": 7}, (2, 3, 37, 45)),
    ("bert_block", "BertBlock", {"hidden": 24, "heads": 3, "intermediate": 40}, (1, 13, 24)),
    ("bert_block", "BertBlock", {"hidden": 16, "heads": 2, "intermediate": 16}, (2, 1, 16)),
    ("gpt2_block", "Gpt2Block", {"hidden": 24, "heads": 3}, (1, 13, 24)),
    ("gpt2_block", "Gpt2Block", {"hidden": 16, "heads": 1}, (2, 8, 16)),
]


def module_of(script: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script as a module whose neighbours are importable, as when it is run."""
    monkeypatch.syspath_prepend(MODELS)
    return importlib.import_module(script)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "name", "arguments", "shape"), SMALL)
def test_model_agrees_with_numpy(script: str, name: str, arguments: dict[str, Any], shape: tuple[int, ...],
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    model = getattr(module_of(script, monkeypatch), name)(**arguments)
    f = svod.jit(model)
    for seed in range(2):   # the second call runs the captured plan with another input
        x = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        wanted = model.reference(x)
        got = f(x).numpy()
        assert got.shape == wanted.shape and got.dtype == np.float32
        np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max(), rtol=0)
    assert len(f.plans) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("script", "name", "arguments", "shape", "paths"), [
    ("resnet18", "ResNet18", {"width": 4, "classes": 3}, (1, 3, 32, 32),
     {"conv1", "maxpool", "layer1.0.conv1", "layer3.1.conv2", "layer4.0.conv1", "fc"}),
    ("gpt2_block", "Gpt2Block", {"hidden": 8, "heads": 2}, (1, 5, 8), {"attn.c_attn", "mlp.c_fc", "mlp.c_proj"}),
])
def test_kernels_come_from_module_paths(script: str, name: str, arguments: dict[str, Any], shape: tuple[int, ...], paths: set[str],
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    f = svod.jit(getattr(module_of(script, monkeypatch), name)(**arguments))
    f(np.zeros(shape, np.float32))
    origins = {k.origin for k in f.plans[0].kernels}
    assert paths <= origins, origins
    assert not [o for o in origins if ":" in o], "a kernel without a module path"


@pytest.mark.parametrize("script", ["mlp", "resnet18", "bert_block", "gpt2_block"])
def test_docstring_has_the_command_line(script: str) -> None:
    assert f"python experiments/models/{script}.py" in (MODELS / f"{script}.py").read_text(encoding="utf-8")


@pytest.mark.slow
def test_script_reports(tmp_path: Path) -> None:
    """Run in another directory and without an installed svod, a script uses the checkout that contains it."""
    done = subprocess.run([sys.executable, str(MODELS / "mlp.py"), "--runs=3"], cwd=tmp_path, capture_output=True, text=True, timeout=NEVER)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^prepared in \d+\.\d\d s$", done.stdout, re.M)
    assert re.search(r"^4 kernels: 4 heuristic$", done.stdout, re.M)
    assert re.search(r"^largest difference to NumPy: \S+ of the largest output$", done.stdout, re.M)
    assert re.search(r"^latency: \d+\.\d+ ms \(median of 3 runs", done.stdout, re.M)


@pytest.mark.slow
def test_a_block_runs_at_several_lengths(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    block = module_of("bert_block", monkeypatch)
    model = block.BertBlock(hidden=16, heads=2, intermediate=16)
    x = np.random.default_rng(0).standard_normal((1, 19, 16), dtype=np.float32)
    monkeypatch.setattr(sys, "argv", ["bert_block.py", "--symbolic", "--buckets", "4", "--runs", "1"])
    block.run_model(None, model, x, model.reference, tokens=1)
    said = capsys.readouterr().out
    assert re.findall(r"^ +(\d+) tokens: largest difference to NumPy \S+, latency", said, re.M) == ["1", "2", "5", "9", "18", "19"]
    assert "plans: 1" in said
    monkeypatch.setattr(sys, "argv", ["bert_block.py", "--buckets", "4"])
    with pytest.raises(SystemExit):
        block.run_model(None, model, x, model.reference, tokens=1)


@pytest.mark.slow
def test_script_refuses_a_wrong_output(tmp_path: Path) -> None:
    program = (f"import sys; sys.path.insert(0, {str(MODELS)!r}); from run_model import run_model; import numpy as np\n"
               "run_model(None, lambda x: x + 1, np.ones(5, np.float32), lambda x: x + 1.001)")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=NEVER)
    assert done.returncode == 1
    assert "the output is wrong" in done.stderr and "Traceback" not in done.stderr


def test_missing_dependency_is_answered_with_a_line_to_paste(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-S", str(MODELS / "resnet18.py")], cwd=tmp_path, capture_output=True, text=True, timeout=NEVER,
                          env={})
    assert done.returncode == 1
    assert "-m pip install" in done.stderr and "Traceback" not in done.stderr
