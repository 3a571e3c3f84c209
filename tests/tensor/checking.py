"""`check(tensor, expected)`: every numeric test of the front end ends here.

The values come from the active evaluator: the NumPy interpreter of graphs, or the compiler. `conftest.py` runs each module once
with each that exists.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from svod.core.dtype import dtypes, to_numpy
from svod.tensor import Tensor
from tests.graph_reference import evaluate_graph

Array = np.ndarray[Any, np.dtype[Any]]

Cases = tuple[tuple[Callable[[], object], str], ...]  # calls, and the message each is to raise

EVALUATORS: dict[str, Callable[[Tensor], Array]] = {
    "reference": lambda t: evaluate_graph(t.uop),
    "compiled": lambda t: t.numpy(),
}
active = "reference"

# relative error a function of several roundings may have, by dtype; absolute for results near zero
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-6, "float64": 1e-13}


def evaluate(tensor: Tensor) -> Array:
    """The tensor's values by the active evaluator; bfloat16 as float32."""
    return EVALUATORS[active](tensor)


def check(tensor: Tensor, expected: Any, tolerance: float | None = None, dtype: str | None = None) -> None:
    """The tensor's shape, dtype and values are those of `expected`, exactly for bools and integers, within the tolerance of the
    dtype (times `tolerance`) for floats. `dtype` names the expected dtype where the array cannot (bfloat16)."""
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
