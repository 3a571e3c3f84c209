"""ONNX models as functions of arrays.

    import svod.onnx
    model = svod.onnx.load("model.onnx")
    y = model(x)
"""
from __future__ import annotations

from svod.onnx.model import Input, Model, Outputs, load
from svod.onnx.reader import OnnxError

__all__ = ["Input", "Model", "OnnxError", "Outputs", "load"]
