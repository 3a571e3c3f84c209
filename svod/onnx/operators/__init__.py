"""The operators of ONNX, grouped by their use. Importing a file adds its operators to the table (`svod.onnx.registry`)."""
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
