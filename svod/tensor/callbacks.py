"""Calls Python functions of NumPy arrays within a graph, for operations that svod lacks or that only the host can do.

    q, r = svod.custom_function(np.linalg.qr, x, shape=((5, 3), (3, 3)), dtype=("float64", "float64"))
    y = q @ z                    # nothing runs before y is realised: kernels, the function, kernels
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from svod.core.graph import graph
from svod.core.graph.callback import host_function, name_of
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.variable import lower
from svod.errors import ArgumentError, DTypeError, ShapeError
from svod.tensor.base import DTypeLike, as_dtype, shape_argument
from svod.tensor.tensor import Tensor


def custom_function(fn: Callable[..., Any], *tensors: Tensor, shape: Sequence[Any] | None = None,
                    dtype: DTypeLike | Sequence[DTypeLike] | None = None) -> Any:
    """The lazy tensor of `shape` and `dtype` that `fn` computes from tensors. With a tuple or list of dtypes, and as many shapes, `fn`
    returns that many results, and `custom_function` a tuple of that many tensors.

    A run of a plan that needs a result calls `fn` once, in the running thread, after the kernels that compute its arguments. The arguments
    are one NumPy array per tensor: C-ordered, read-only, over the plan's own memory. `fn` returns an array or a tuple of arrays with
    exactly the declared shapes and dtypes; they are copied. Declare an extent that depends on a variable by the variable (`shape=(n, 3)`);
    in a run, the arrays have its value. NumPy has no bfloat16: cast to float32 and back.

    The result of `fn` may depend on its arguments only: several calls with the same tensors become one, and a call whose results are all
    empty is left out. Copy an argument to keep it after the call, because the next run overwrites it. Replicas of a plan may call `fn` from
    several threads at once. `fn` may compute with svod, but it may neither run the plan that calls it nor wait for a thread that does. An
    exception of `fn` reaches the caller of the run unchanged. Graphs with different functions have different schedules: define `fn` outside
    of loops.

    Raises ArgumentError if `fn` is not a function, an operand is not a tensor or a result is not declared, and ShapeError and DTypeError
    for shapes and dtypes that no array has. A run raises them for results that differ from the declaration."""
    if not callable(fn) or isinstance(fn, Tensor):
        raise ArgumentError(f"custom_function takes a function of NumPy arrays first, then tensors; got {type(fn).__name__}")
    name = name_of(fn)
    for t in tensors:
        if not isinstance(t, Tensor):
            raise ArgumentError(f"custom_function {name} takes tensors, got {type(t).__name__}; close over everything else, as in "
                                "functools.partial(fn, axis=1)")
    if shape is None or dtype is None:
        raise ArgumentError(f"custom_function {name}: the result must be declared, as in shape=(3, 4), dtype='float32'; several results as "
                            "in shape=((3, 4), (4,)), dtype=('float32', 'int64')")
    several = isinstance(dtype, (tuple, list))
    types, shapes = _declared(name, shape, dtype)
    if dtypes.bfloat16 in (*types, *(t.dtype for t in tensors)):
        raise DTypeError(f"custom_function {name}: NumPy has no bfloat16; cast to float32 before, and back after")
    nodes = graph.callback(host_function(fn), tuple(zip(types, shapes, strict=True)), several, *(t.uop for t in tensors))
    results = tuple(Tensor.from_uop(u) for u in nodes)
    return results if several else results[0]


def _declared(name: str, shape: Sequence[Any], dtype: DTypeLike | Sequence[DTypeLike]) -> tuple[list[DType], list[tuple[int, ...]]]:
    """The declared dtype and shape of each result. Raises ArgumentError if their numbers differ, and ShapeError."""
    several = isinstance(dtype, (tuple, list))
    types = [as_dtype(d) for d in (dtype if isinstance(dtype, (tuple, list)) else (dtype,))]
    if several and (not isinstance(shape, (tuple, list)) or len(shape) != len(types) or not types
                    or not all(isinstance(s, (tuple, list)) for s in shape)):
        raise ArgumentError(f"custom_function {name}: {len(types)} dtypes and the shapes {shape!r}: give a tuple for each result")
    shapes = [shape_argument((tuple(s),)) for s in shape] if several else [shape_argument((shape,))]
    negative = [s for s in shapes if any(lower(n) < 0 for n in s)]
    if negative:
        raise ShapeError(f"custom_function {name}: {negative[0]} is not a shape: an extent cannot be negative")
    return types, shapes
