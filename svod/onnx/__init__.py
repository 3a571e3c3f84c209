"""ONNX models as functions of arrays.

    import svod.onnx
    model = svod.onnx.load("model.onnx")
    y = model(x)
"""
from __future__ import annotations

from svod.onnx.model import Input, Model, Outputs, load
from svod.onnx.reader import OnnxError
from svod.onnx.session import InferenceSession, SessionOptions

__all__ = ["InferenceSession", "Input", "Model", "OnnxError", "Outputs", "SessionOptions", "load"]
