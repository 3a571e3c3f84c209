"""svod: an autotuning compiler for tensor programs, centred on BEAM search.

    from svod import Tensor
    y = (Tensor(a) @ Tensor(b)).relu().softmax(-1)     # nothing runs yet
    y.numpy()                                          # realize

Names are imported when they are first used, so that `import svod` stays cheap.
"""
from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from svod.system import process as _process  # noqa: F401 this import records the current directory, to which relative paths in the environment refer
from svod.system import source as _source  # noqa: F401 this import records the state of svod's files before other modules are imported from them
from svod.system.process.collector import rare_collections as _rare_collections

__version__ = "0.1.0"

_WHERE = {
    "Tensor": "svod.tensor", "where": "svod.tensor", "call_kernel": "svod.tensor.calls",
    "call_loop": "svod.tensor.calls",
    "custom_function": "svod.tensor.callbacks", "scope": "svod.core.ir.origin",
    "dtypes": "svod.core.ir.dtype",
    "unique": "svod.tensor.host", "bincount": "svod.tensor.host", "searchsorted": "svod.tensor.searching", "histc": "svod.tensor.searching",
    "jit": "svod.tracing", "kernel": "svod.by_hand", "profile": "svod.bench.profile", "explain": "svod.explaining",
    "ExecutionPlan": "svod.compile.plan.execution_plan", "complete": "svod.compile.plan.running.background",
    "PrepareConfig": "svod.config", "BeamConfig": "svod.config", "OptimizerConfig": "svod.config", "BenchConfig": "svod.config",
    "SvodError": "svod.errors", "Variable": "svod.core.ir.variable",
}
_MODULES = {"nn": "svod.nn", "linalg": "svod.tensor.linalg", "fft": "svod.tensor.fft", "onnx": "svod.onnx", "torch": "svod.torch"}
__all__ = ["BeamConfig", "BenchConfig", "ExecutionPlan", "OptimizerConfig", "PrepareConfig", "SvodError", "Tensor", "Variable",
           "bincount", "call_kernel", "call_loop", "complete", "custom_function", "dtypes", "explain", "fft", "histc", "jit", "kernel",
           "linalg", "nn", "profile", "scope", "searchsorted", "unique", "where"]

if TYPE_CHECKING:
    from svod import nn
    from svod.bench.profile import profile
    from svod.by_hand import kernel
    from svod.compile.plan.execution_plan import ExecutionPlan
    from svod.compile.plan.running.background import complete
    from svod.config import BeamConfig, BenchConfig, OptimizerConfig, PrepareConfig
    from svod.core.ir.dtype import dtypes
    from svod.core.ir.origin import scope
    from svod.core.ir.variable import Variable
    from svod.errors import SvodError
    from svod.explaining import explain
    from svod.tensor import Tensor, fft, linalg, where
    from svod.tensor.callbacks import custom_function
    from svod.tensor.calls import call_kernel, call_loop
    from svod.tensor.host import bincount, unique
    from svod.tensor.searching import histc, searchsorted
    from svod.tracing import jit


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _WHERE:
        if not name.startswith("__") and find_spec(f"{__name__}.{name}") is not None:  # `from svod import config` calls this function first
            return import_module(f"{__name__}.{name}")
        from svod.tensor import Tensor

        hint = f"; a Tensor has it: Tensor.{name}" if not name.startswith("_") and hasattr(Tensor, name) else ""
        raise AttributeError(f"module 'svod' has no attribute {name!r}{hint}")
    with _rare_collections():
        value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, for `dir(svod)` and completion."""
    return sorted([*__all__, "__version__"])
