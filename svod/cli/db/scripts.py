"""Runs a script, a module or an ONNX file in a child process: for the kernels that it prepares, or to fill an object cache."""
from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from svod import config
from svod.cli.installation import program
from svod.cli.tune.options import TuneOptions
from svod.errors import DatabaseError
from svod.system.checked import checked
from svod.system.process.directories import temporary_folder
from svod.system.process.program import python
from svod.tune.capture import FormLine
from svod.tune.db import RecordError
from svod.tune.db.records import parse_json

SCRIPT_SECONDS = 600.0  # seconds after which a script is ended


class CapturedKernel(NamedTuple):
    """A kernel that a script prepared. `ast`: its AST as `ast_to_data` makes it; None where that is not known."""

    kernel: str
    target: str
    name: str
    structure: str
    ast: Any = None


def run_script(options: TuneOptions, command: Sequence[str], *, shown: bool = False, **variables: str) -> str:
    """Run a program to its end, with changes to its environment. Returns its failure in words, or "". `command`: the command of svod-db,
    with its options, that messages about missing sizes of an ONNX file repeat. `shown`: whether the user sees its output."""
    asked = [f"--command={program('svod-db')} {shlex.join([*command, options.subject])}"] if options.is_onnx else []
    try:
        done = subprocess.run([python(), *options.started, *asked], env=config.environment_with_svod(**variables), stdin=subprocess.DEVNULL,
                              stdout=None if shown else subprocess.DEVNULL, stderr=None if shown else subprocess.PIPE,
                              timeout=SCRIPT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"it did not end within {SCRIPT_SECONDS:.0f} s"
    last = "" if shown else f": {(done.stderr.decode(errors='replace').strip().splitlines() or [''])[-1]}"
    return "" if done.returncode == 0 else f"it ended with status {done.returncode}{last}"


class CapturedProgram(NamedTuple):
    """The kernels that a program prepared, the digests of its plans with their targets, the forms of their convolutions, and its failure in
    words, or ""."""

    kernels: list[CapturedKernel]
    plans: dict[str, str]
    forms: list[FormLine]
    failure: str


def captured_program(options: TuneOptions) -> CapturedProgram:
    """Run a program for the kernels that it prepares. Raises DatabaseError where there are none."""
    with temporary_folder("svod-why-") as directory:
        failure = run_script(options, ["why"], SVOD_CAPTURE=str(directory))
        kernels: dict[tuple[str, str], CapturedKernel] = {}
        plans: dict[str, str] = {}
        forms: list[FormLine] = []
        for path in sorted(Path(directory).rglob("*.jsonl")):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    data = parse_json(line, "a line")
                except RecordError:
                    continue  # the last line of a process that was killed while writing
                if not isinstance(data, dict) or "only_in_form" in data:
                    continue
                if "form" in data:
                    forms.append(checked(data, FormLine, DatabaseError))
                if isinstance(data.get("plan"), str) and isinstance(data.get("target"), str):
                    plans[data["plan"]] = data["target"]
                if isinstance(data.get("kernel"), str) and isinstance(data.get("target"), str):
                    c = CapturedKernel(data["kernel"], data["target"], str(data.get("name", "")), str(data.get("structure", "")),
                                       data.get("ast"))
                    kernels[c.kernel, c.target] = c
    if not kernels:
        raise DatabaseError(f"{options.subject} prepared no kernel" + (f"; {failure}" if failure else ""))
    return CapturedProgram(list(kernels.values()), plans, forms, failure)
