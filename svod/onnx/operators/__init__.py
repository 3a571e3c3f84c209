"""The operators of ONNX, by what they do. Each file enters its own into the table (`svod.onnx.registry`)."""
from __future__ import annotations

from svod.onnx.operators import (
    activations,
    attention,
    control,
    convolution,
    creation,
    elementwise,
    indexing,
    microsoft,
    movement,
    norms,
    products,
    quantised,
    random,
    recurrent,
    reductions,
    resample,
    signal,
)

FILES = (activations, attention, control, convolution, creation, elementwise, indexing, microsoft, movement, norms, products,
         quantised, random, recurrent, reductions, resample, signal)
