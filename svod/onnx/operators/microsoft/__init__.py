"""Operators of the domain com.microsoft, which exported, optimised and quantised models contain."""
from __future__ import annotations

from svod.onnx.operators.microsoft import attention, fused, quantised

FILES = (attention, fused, quantised)
