"""Runs PyTorch modules with svod.

    torch.compile(model, backend="svod")               needs no import of svod: PyTorch finds the backend by its entry point
    run = svod.torch.compile(model, *example_inputs)   through torch.export: no guards in the call path
    print(svod.torch.report())                         graphs, plans, kernels, and the operations left to PyTorch

The stages of a model:

    Dynamo or torch.export  →  FX graph of ATen operations  →  translate: svod tensors  →  plan  →  call
"""
from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from svod.errors import UnsupportedError

_WHERE = {"compile": "svod.torch.exported", "report": "svod.torch.reports"}
__all__ = ["compile", "report"]

if TYPE_CHECKING:
    from svod.torch.exported import compile
    from svod.torch.reports import report


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'svod.torch' has no attribute {name!r}")
    if find_spec("torch") is None:
        raise UnsupportedError(f"svod.torch.{name} needs the package torch; pip install 'svod[torch]'")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted(__all__)
