"""Runs a PyTorch script with svod as the default backend of `torch.compile`.

    python -m svod.torch.run SCRIPT [ARGS]              a script that calls torch.compile
    python -m svod.torch.run --modules SCRIPT [ARGS]    also one that never does: its outermost modules are compiled when they are called
    python -m svod.torch.run -m MODULE [ARGS]
    python -m svod.torch.run PROGRAM.pt2                a program that torch.export has saved; it runs once, with its example inputs

An outermost module is one that is called outside of any other; it is compiled if it is in evaluation mode and gradients are off. Other
processes are not affected. If torch is not installed, the script runs unchanged.
"""
from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from svod.system.process.directories import working_directory
from svod.system.process.program import arguments, become
from svod.system.process.streams import tell

USAGE = "usage: python -m svod.torch.run [--modules] SCRIPT [ARGS] | -m MODULE [ARGS] | PROGRAM.pt2"
BACKEND_NAME = "svod"
MOST_MODULES = 256      # most compilations by Dynamo: one for each outermost module and each set of argument sizes


def main(words: Sequence[str]) -> int:
    """Run a script or module as `__main__`, or a saved program. Returns 2 if `words` name none."""
    rest = list(words)
    modules = rest[:1] == ["--modules"]
    rest = rest[modules:]
    is_module = rest[:1] == ["-m"]
    rest = rest[is_module:]
    if not rest or rest[0].startswith("-"):
        tell(USAGE)
        return 2
    if not is_module and not Path(rest[0]).exists():
        tell(f"{rest[0]} does not exist")
        return 2
    if rest[0].endswith(".pt2") and not is_module:
        return run_saved(rest[0])
    try:
        import torch
    except ImportError:
        pass        # the script does not use PyTorch, or reports itself that it is missing
    else:
        use_svod(torch, modules)
    become(rest)
    # The program's own folder comes first on the path, as Python puts it there: it replaces the current directory that `python -m` puts
    # there, and under `python -P`, which puts none, it is added.
    sys.path[:not sys.flags.safe_path] = [str(working_directory() or "") if is_module else str(Path(rest[0]).resolve().parent)]
    if is_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(rest[0], run_name="__main__")
    return 0


def run_saved(path: str) -> int:
    """Run a program that torch.export has saved, once, with the example inputs in the file. Returns 2 if the file has none, or no
    program."""
    import torch

    from svod.torch.exported import compile

    try:
        program = torch.export.load(path)
    except Exception as e:      # torch raises errors of any type for a file that is cut off or has something else
        tell(f"{path} has no program that torch.export.save writes, or is cut off: {' '.join(str(e).split()):.200}")
        return 2
    if program.example_inputs is None:
        tell(f"{path} was saved without example inputs")
        return 2
    args, kwargs = program.example_inputs
    compile(program)(*args, **kwargs)
    return 0


def use_svod(torch: Any, modules: bool) -> None:
    """Make svod the backend of `torch.compile` in this process; with `modules`, compile outermost modules when they are called."""
    # import it first: it must see the original nn.Module.__call__, which `compile_outermost` replaces
    importlib.import_module("torch._dynamo")
    from svod.torch.backend import svod_backend

    registry = torch._dynamo.backends.registry
    if BACKEND_NAME not in torch._dynamo.list_backends(exclude_tags=()):      # a checkout that is not installed has no entry point
        registry.register_backend(svod_backend, name=BACKEND_NAME)
    torch.compiler.set_default_backend(BACKEND_NAME)
    if modules:
        compile_outermost(torch)


def compile_outermost(torch: Any) -> None:
    """Compile every outermost module (called outside of any other) with svod when it is called."""
    kind = torch.nn.Module
    original = kind.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training or torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        kind.__call__ = original        # inner modules are called as usual: Dynamo recognises that function
        try:
            if self._compiled_call_impl is None and not isinstance(self, torch._dynamo.OptimizedModule):
                self._compiled_call_impl = torch.compile(function_of(self), backend=BACKEND_NAME)
            return original(self, *args, **kwargs)
        finally:
            kind.__call__ = call
    kind.__call__ = call
    torch._dynamo.config.recompile_limit = MOST_MODULES     # the lambdas of all modules count as one function for this limit


def function_of(module: Any) -> Any:
    """A lambda that calls a module. Dynamo traces it, whereas it does not trace a direct call of one of PyTorch's own modules."""
    call = module._call_impl
    return lambda *args, **kwargs: call(*args, **kwargs)


if __name__ == "__main__":
    sys.exit(main(arguments()))
