"""Operators of com.microsoft, which exported, optimised and quantised models have."""
from __future__ import annotations

from svod.onnx.operators.microsoft import attention, fused, quantised

FILES = (attention, fused, quantised)
