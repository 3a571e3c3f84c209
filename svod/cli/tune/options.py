"""The options of svod-tune as data."""
from __future__ import annotations

import ast
import shlex
from dataclasses import dataclass, fields
from pathlib import Path

from svod.cli.installation import program

DEFAULT_BEAM = 8
DEFAULT_BUDGET = 600.0
#: The options that a recommended command repeats from the given one, besides the beam's width and the budget.
REPEATED_OPTIONS = frozenset({"db", "device", "numerics", "max_error", "workers", "address", "target", "top", "only", "capture_for",
                     "actions", "strategy", "optuna_storage", "dim", "shape", "inputs", "random_weights", "outputs", "fallback", "torch",
                     "lock_path"})
REPORT_FORMAT, LOCK_FORMAT = "svod-tune-report", "svod-lock"       # formats that --json and --lock write, and may replace
TORCH = ("compile", "modules", "off")       # values of --torch
_WITH_TORCH = ("torch", "torchvision", "transformers")      # packages whose import shows that a script uses PyTorch


@dataclass(frozen=True)
class TuneOptions:
    """The options of a command. The program that is tuned is `script`, a file or directory, or `module`, which runs as `python -m` does;
    `args` are its arguments. `source` is a capture that replaces the program."""

    script: str | None
    args: tuple[str, ...] = ()
    beam: int = DEFAULT_BEAM
    budget: float = DEFAULT_BUDGET
    workers: str = "ray"
    address: str | None = None
    target: tuple[str, ...] = ()
    db: str | None = None
    device: str | None = None
    numerics: str | None = None
    max_error: float | None = None
    fresh: bool = False
    resume: bool = False
    top: int | None = None
    only: tuple[str, ...] = ()
    capture_for: float | None = None
    module: str | None = None
    source: str | None = None
    capture_to: str | None = None
    actions: str | None = None
    strategy: str | None = None
    optuna_storage: str | None = None
    dry_run: bool = False
    compile_only: bool = False
    json_path: str | None = None
    lock_path: str | None = None
    log_json: str | None = None
    verbose: bool = False
    dim: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()
    inputs: str | None = None
    random_weights: bool = False
    outputs: tuple[str, ...] = ()
    fallback: str | None = None
    torch: str | None = None

    @property
    def is_onnx(self) -> bool:
        """Whether an ONNX file is tuned, and not a program."""
        return self.script is not None and self.script.endswith(".onnx")

    @property
    def of_onnx(self) -> list[str]:
        """The names of the given options that are only for ONNX files."""
        given = {"--dim": self.dim, "--shape": self.shape, "--inputs": self.inputs, "--random-weights": self.random_weights,
                 "--outputs": self.outputs, "--fallback": self.fallback}
        return [name for name, value in given.items() if value]

    @property
    def subject(self) -> str:
        """The script, module or capture, as the user named it."""
        return self.script or self.module or self.source or ""

    @property
    def program(self) -> list[str]:
        """The program that is tuned, as Python takes it: a script, or -m and a module. [] for a capture. An ONNX file or a program of
        torch.export is run by a module of svod."""
        if self.is_onnx:
            return ["-m", "svod.onnx.run", self.script or "", *(f"--dim={d}" for d in self.dim), *(f"--shape={s}" for s in self.shape),
                    *([f"--inputs={self.inputs}"] if self.inputs else []), *(["--random-weights"] if self.random_weights else []),
                    *(f"--outputs={o}" for o in self.outputs), *([f"--fallback={self.fallback}"] if self.fallback else [])]
        if self.script is not None:
            return [*(["-m", "svod.torch.run"] if self.script.endswith(".pt2") else []), self.script]
        return ["-m", self.module] if self.module is not None else []

    @property
    def runs_torch(self) -> bool:
        """Whether the program is run by `svod.torch.run`: because of --torch, or without that option if the script calls torch.compile."""
        return self.calls_compile if self.torch is None else self.torch in ("compile", "modules")

    @property
    def imports_torch(self) -> bool:
        """Whether the script itself imports PyTorch, or a package that is built on it."""
        return any(name.split(".")[0] in _WITH_TORCH for name in _imports(self._tree).values())

    @property
    def calls_compile(self) -> bool:
        """Whether the script seems to call torch.compile or the method `compile` of a PyTorch module: it imports PyTorch, and has a
        `compile` that belongs to no other imported module, such as `re`."""
        return self.imports_torch and _names_compile(self._tree)

    @property
    def _tree(self) -> ast.Module:
        """The script's syntax tree; an empty one for an ONNX file, a module, or a directory with a __main__.py."""
        try:
            return ast.parse("" if self.is_onnx else Path(self.script or "").read_bytes())
        except (OSError, SyntaxError, ValueError):
            return ast.Module([], [])

    @property
    def launched(self) -> list[str]:
        """The arguments of the Python command that runs the program, with the program's own arguments."""
        launcher = ["-m", "svod.torch.run", *(["--modules"] if self.torch == "modules" else [])] if self.runs_torch else []
        return [*launcher, *self.program, *self.args]

    @property
    def started(self) -> list[str]:
        """`launched` for a child process of a command. If a module of svod's runs the program, the current directory is not on its path: a
        `numpy.py` there is no part of an ONNX file or of a script elsewhere."""
        is_run = self.launched[:1] == ["-m"] and self.launched[1].startswith("svod.")
        return [*["-P"] * is_run, *self.launched]

    @property
    def asked(self) -> list[str]:
        """For an ONNX file, the option that passes the given svod-tune command to `svod.onnx.run`, which repeats it in messages about
        missing options; [] for a program."""
        modes = {name: True for name in ("dry_run", "compile_only") if getattr(self, name)}
        return [f"--command={self.command_line(**modes)}"] if self.is_onnx else []

    def command_line(self, **changes: object) -> str:
        """A recommended command line: this command's with `changes` to its options, without --dry-run, --json, --capture-to and --fresh."""
        values: dict[str, object] = {"beam": self.beam, "budget": f"{self.budget:g}"}
        for f in fields(self):
            if f.name in REPEATED_OPTIONS and getattr(self, f.name) != f.default:
                values[f.name] = getattr(self, f.name)
        subject = [self.script] if self.script is not None else self.program
        words = [*(subject or ("--from", self.source or ""))]
        for name, value in {**values, **changes}.items():
            option = f"--{name.removesuffix('_path').replace('_', '-')}"
            for one in value if isinstance(value, tuple) else (value,):
                words += [option, *([] if one is True else [f"{one:g}" if isinstance(one, float) else str(one)])]
        if self.args:
            words += ["--", *self.args]
        return f"{program('svod-tune')} {shlex.join(words)}"


def _imports(tree: ast.Module) -> dict[str, str]:
    """All imports of a script, anywhere in it: the name in the script → the full name."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.split(".")[0]: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def _names_compile(tree: ast.Module) -> bool:
    """Whether a script mentions torch.compile, or calls a method `compile` of an object that is no imported module."""
    imported = _imports(tree)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and imported.get(node.id) == "torch.compile":
            return True
        if isinstance(node, ast.Attribute) and node.attr == "compile":
            owner = imported.get(node.value.id, "") if isinstance(node.value, ast.Name) else ""
            if owner == "torch" or (id(node) in called and not owner):
                return True
    return False
