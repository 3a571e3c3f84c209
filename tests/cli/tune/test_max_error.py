"""--max-error: the options that it needs, and a program whose kernels are chosen."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from svod import config
from svod.cli.tune.command import check
from svod.cli.tune.options import TuneOptions
from svod.compile.cpu.host import host_target

SCRIPT = """
import numpy as np
import svod
from svod import Tensor
v, w = (Tensor(np.random.default_rng(k).standard_normal((256, 256)).astype(np.float32)) for k in (1, 2))
y = (Tensor(np.ones((256, 256), np.float32)) @ v).relu() @ w
y.prepare(constants=[v, w]).execute()
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


@pytest.mark.skipif(not {"amx", "bf16"} <= set(host_target().features), reason="needs a CPU with AMX and AVX-512 BF16")
def test_a_program_chooses_its_kernels(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "-m", "svod", "tune", "m.py", "--numerics", "fast", "--max-error", "0.05", "--budget", "4",
                           "--workers", "inline", "--db", "t.db", "--json", "out.json"], cwd=tmp_path, capture_output=True, text=True,
                          env=config.environment_with_svod(BEAM=None), check=False)
    assert done.returncode == 0, done.stderr
    found, = json.loads((tmp_path / "out.json").read_text())["roundings"]
    assert found["error"] <= 0.05 and found["kernels"] and found["samples"] == "those of the first run of m.py"
    assert "numerics=fast: an error of at most 0.05" in done.stderr
