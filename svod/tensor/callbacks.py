"""Functions of NumPy arrays in the middle of a graph: what svod has no operation for, or what only the host can do.

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
    """The tensor that `fn` computes of tensors: a lazy one of `shape` and `dtype`, as any other. With a tuple or list of dtypes, and as
    many shapes, `fn` has that many results, and so has this.

    Every run of a plan that needs a result calls `fn` once, in the thread that runs it, between the kernels before and after: with a NumPy
    array per tensor, C-ordered, read-only, over the plan's own memory. What `fn` returns, an array or a tuple of them, must have exactly
    the declared shapes and dtypes; it is copied. Extents that depend on a variable are declared as such (`shape=(n, 3)`), and arrays have
    the extents that the variable has in the run. bfloat16 has no NumPy type: cast to float32 and back.

    `fn` must be a function of its arguments: calls of one function with the same tensors are one call, and a call none of whose results
    has elements is not made. Copy an array that is to be kept after the call: the next run writes over it. Replicas of a plan may call
    `fn` from several threads at once. `fn` may compute with svod, but not run the plan that calls it, nor wait for a thread that does.
    What it raises is raised by whoever runs the plan, unchanged. Graphs that differ in a function have schedules of their own: define it
    outside of loops.

    Raises ArgumentError for what is no function or no tensor and for results that are not declared, ShapeError and DTypeError for shapes
    and dtypes that no array has; a run raises them for results that are not as declared."""
    if not callable(fn) or isinstance(fn, Tensor):
        raise ArgumentError(f"custom_function takes a function of NumPy arrays first, then tensors; got {type(fn).__name__}")
    name = name_of(fn)
    for t in tensors:
        if not isinstance(t, Tensor):
            raise ArgumentError(f"custom_function {name} takes tensors, got {type(t).__name__}; close over everything else, as in "
                                "functools.partial(fn, axis=1)")
    if shape is None or dtype is None:
        raise ArgumentError(f"custom_function {name}: the result must be declared, as in shape=(3, 4), dtype='float32'; of several results "
                            "shape=((3, 4), (4,)), dtype=('float32', 'int64')")
    several = isinstance(dtype, (tuple, list))
    types, shapes = _declared(name, shape, dtype)
    for d in (*types, *(t.dtype for t in tensors)):
        _check_dtype(name, d)
    nodes = graph.callback(host_function(fn), tuple(zip(types, shapes, strict=True)), several, *(t.uop for t in tensors))
    results = tuple(Tensor.from_uop(u) for u in nodes)
    return results if several else results[0]


def _declared(name: str, shape: Sequence[Any], dtype: DTypeLike | Sequence[DTypeLike]) -> tuple[list[DType], list[tuple[int, ...]]]:
    """The declared dtype and shape of each result. Raises ArgumentError unless there are as many of both, and ShapeError."""
    several = isinstance(dtype, (tuple, list))
    types = [as_dtype(d) for d in (dtype if isinstance(dtype, (tuple, list)) else (dtype,))]
    if several and (not isinstance(shape, (tuple, list)) or len(shape) != len(types) or not types
                    or not all(isinstance(s, (tuple, list)) for s in shape)):
        raise ArgumentError(f"custom_function {name}: {len(types)} dtypes and the shapes {shape!r}: give a tuple for each result")
    shapes = [shape_argument((tuple(s),)) for s in shape] if several else [shape_argument((shape,))]
    negative = [s for s in shapes if any(lower(n) < 0 for n in s)]
    if negative:
        raise ShapeError(f"custom_function {name}: {negative[0]} is not a shape: extents are not negative")
    return types, shapes


def _check_dtype(name: str, dtype: DType) -> None:
    if dtype == dtypes.bfloat16:
        raise DTypeError(f"custom_function {name}: NumPy has no bfloat16; cast to float32 before, and back after")
