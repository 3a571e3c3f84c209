"""Every block of Python in README.md and docs/ runs: page by page, the blocks of a page one after the other in one process.

A block that needs a library that svod does not is fenced as ```python with the library's name, ```python torch, and is left out where that
is not installed. A block that begins with a file's name, as in `# model.py`, is that file, and blocks of ```bash run beside a page's
files."""
from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import NEVER

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python ?(\w*)\n(?!# \w+\.py\n)(.*?)^```$", re.M | re.S)
FILE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.M | re.S)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)
WITH_COMMANDS = [p for p in sorted((ROOT / "docs").glob("*.md")) if COMMANDS.search(p.read_text(encoding="utf-8"))]
PROGRAMS = {"python": "", **{f"svod-{tool}": f"-m svod.cli.{tool}" for tool in ("tune", "db", "bench")}}
PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if BLOCK.search(p.read_text(encoding="utf-8"))]


def program_of(page: Path) -> str:
    """The blocks of a page as one program, each line where it stands in the page."""
    text = page.read_text(encoding="utf-8")
    parts: list[str] = []
    for found in BLOCK.finditer(text):
        library, code = found.groups()
        if library and importlib.util.find_spec(library) is None:
            continue
        parts.append("\n" * (text[:found.start()].count("\n") + 1 - sum(p.count("\n") for p in parts)) + code)
    return "".join(parts)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    file = tmp_path / f"page_{page.stem}.py"     # onnx.py would be imported by the page itself
    file.write_text(program_of(page), encoding="utf-8")
    environment = {**os.environ, "SVOD_TUNE_DB": str(tmp_path / "tuning.db"), "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, str(file)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=NEVER)
    assert run.returncode == 0, f"{page.name}, line as in the page:\n{run.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda p: p.name)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name, code in FILE.findall(text):
        (tmp_path / name).write_text(code, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    for name, arguments in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    for block in COMMANDS.findall(text):
        run = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True,
                             timeout=NEVER)
        assert (run.returncode, run.stderr) == (0, ""), f"{page.name}: {block}\n{run.stdout}"


def test_lines_are_those_of_the_page() -> None:
    page = ROOT / "docs" / "jit.md"
    lines = program_of(page).splitlines()
    text = page.read_text(encoding="utf-8").splitlines()
    assert lines and all(line in ("", text[i]) for i, line in enumerate(lines)) and any(lines)
