"""Runs ONNX models as functions of arrays.

    import svod.onnx
    model = svod.onnx.load("model.onnx")
    y = model(x)
"""
from __future__ import annotations

from importlib.util import find_spec

from svod.errors import UnsupportedError
from svod.system.process.collector import rare_collections

if find_spec("onnx") is None:
    raise UnsupportedError("svod.onnx needs the package onnx; pip install 'svod[onnx]'")

with rare_collections():
    from svod.onnx.compare import NodeDifference, compare
    from svod.onnx.model import Input, Model, Outputs, load
    from svod.onnx.reader import OnnxError
    from svod.onnx.session import (
        ExecutionMode,
        GraphOptimizationLevel,
        InferenceSession,
        SessionOptions,
        get_available_providers,
        get_device,
    )

__all__ = ["ExecutionMode", "GraphOptimizationLevel", "InferenceSession", "Input", "Model", "NodeDifference", "OnnxError", "Outputs",
           "SessionOptions", "compare", "get_available_providers", "get_device", "load"]


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted(__all__)
