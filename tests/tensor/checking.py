"""Compares tensors with expected arrays: every numeric test of the front end calls `check(tensor, expected)`.

The values come from the active evaluator: the NumPy interpreter of graphs, the schedule's kernels run by the reference evaluator of kernel
ASTs, or the compiler. `conftest.py` runs each module with every evaluator that exists.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from svod.core.graph import graph
from svod.core.graph.buffer import bfloat16_bits_to_float32, buffer_of
from svod.core.ir.dtype import dtypes, to_numpy
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.schedule import create_schedule
from svod.core.spec.evaluate import evaluate as evaluate_kernel
from svod.tensor import Tensor
from svod.tensor.realize import constant_value
from tests.graph_reference import evaluate_graph

Array = np.ndarray[Any, np.dtype[Any]]

def run_schedule(tensor: Tensor) -> Array:
    """Compute the tensor's values by its schedule, with every kernel evaluated by `svod.core.spec.evaluate`, without machine code."""
    if constant_value(tensor.uop) is not None or tensor.is_realized:
        return tensor.numpy()
    schedule = create_schedule(graph.sink(tensor.uop))
    memory: dict[UOp, Array] = {}
    for call in schedule.calls:
        for b in call.args:
            if b not in memory:
                memory[b] = np.zeros(b.arg, to_numpy(b.dtype)) if b.src[0].op is Ops.LUNIQUE else buffer_of(b).array.copy()
        views = [memory[b][offset:] for b, offset in zip(call.args, call.offsets, strict=True)]
        for view, content in zip(views, evaluate_kernel(call.ast, views), strict=False):
            view[:] = content
    flat = memory[schedule.outputs[0]].reshape(tensor.shape)
    return bfloat16_bits_to_float32(flat) if tensor.dtype == dtypes.bfloat16 else flat


Cases = tuple[tuple[Callable[[], object], str], ...]  # calls, each with the message that it has to raise

EVALUATORS: dict[str, Callable[[Tensor], Array]] = {
    "reference": lambda t: evaluate_graph(t.uop),
    "scheduled": run_schedule,
    "compiled": lambda t: t.numpy(),
}
active = "reference"

# allowed relative error of a function with several roundings, by dtype; absolute for results near zero
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-6, "float64": 1e-13}


def evaluate(tensor: Tensor) -> Array:
    """Compute the tensor's values by the active evaluator; bfloat16 as float32."""
    return EVALUATORS[active](tensor)


def check(tensor: Tensor, expected: Any, tolerance: float | None = None, dtype: str | None = None) -> None:
    """Check that the tensor's shape, dtype and values are those of `expected`, exactly for bools and integers, within the tolerance of
    the dtype (times `tolerance`) for floats. `dtype` names the expected dtype if the array cannot (bfloat16)."""
    wanted = np.asarray(expected)
    got = evaluate(tensor)
    assert tensor.shape == wanted.shape == got.shape, (tensor.shape, wanted.shape, got.shape)
    assert tensor.dtype.name == (dtype or wanted.dtype.name), (tensor.dtype, wanted.dtype)
    assert got.dtype == (np.float32 if tensor.dtype == dtypes.bfloat16 else to_numpy(tensor.dtype))
    if tensor.dtype.is_float:
        bound = TOLERANCE[tensor.dtype.name] * (1 if tolerance is None else tolerance)
        np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), rtol=bound, atol=bound)
    else:
        np.testing.assert_array_equal(got, wanted)
