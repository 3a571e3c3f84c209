"""Random shapes, arrays and views for hypothesis. A view is made twice: by tensor operations and by NumPy's.

NumPy has no bfloat16: its arrays are float32 with values that bfloat16 represents. `any_dtype` and `float_dtype`, for tests that read the
dtype from the array, do not include it; `tests/tensor/test_bfloat16.py` covers the operations.
"""
from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from svod.core.ir.dtype import dtypes
from svod.tensor import Tensor

Array = np.ndarray[Any, np.dtype[Any]]

INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
NUMPY_FLOATS = [f for f in FLOATS if f != "bfloat16"]
EXTENTS = [1, 1, 2, 3, 5, 7]

any_dtype = st.sampled_from(["bool", *INTS, *NUMPY_FLOATS])
int_dtype = st.sampled_from(INTS)
float_dtype = st.sampled_from(NUMPY_FLOATS)
seeds = st.integers(0, 2 ** 32 - 1)


def shapes(least: int = 0, most: int = 4, zero: bool = True) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with `least` to `most` axes: extents 1, primes, and sometimes 0."""
    extents = st.sampled_from(EXTENTS * 4 + [0] if zero else EXTENTS)
    return st.lists(extents, min_size=least, max_size=most).map(tuple)


def rounded_to_bfloat16(values: Any) -> Array:
    """The values rounded to bfloat16, ties to even, as float32."""
    exact = np.array(values, np.float32)
    bits = exact.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(exact), exact, rounded)


def make(shape: tuple[int, ...], dtype: str, seed: int, special: bool = False) -> Array:
    """Random values: small integers (of all magnitudes if `special`), normally distributed floats (with NaN, infinities and signed
    zeros)."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype == "bfloat16":
        return rounded_to_bfloat16(make(shape, "float32", seed, special))
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        small = rng.integers(max(info.min, -9), 10, shape).astype(kind)
        if not special:
            return small
        edge = rng.choice(np.array([info.min, info.max, 0, 1, info.max - 1], kind), shape)
        return np.where(rng.random(shape) < 0.3, edge, small).astype(kind)
    values = np.asarray(rng.standard_normal(shape)).astype(kind)
    if not special:
        return values
    edge = rng.choice(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], kind), shape)
    return np.where(rng.random(shape) < 0.2, edge, values).astype(kind)


@st.composite
def views(draw: st.DrawFn, dtype: str | st.SearchStrategy[str] = "float32", least: int = 0, most: int = 4, zero: bool = True,
          special: bool = False) -> tuple[Tensor, Array]:
    """A tensor and its array: data, or a permuted, reversed, sliced, padded or repeated view of it."""
    name = dtype if isinstance(dtype, str) else draw(dtype)
    array = make(draw(shapes(least, most, zero)), name, draw(seeds), special)
    tensor = Tensor(array, dtype=name)
    for step in draw(st.lists(st.sampled_from(["permute", "flip", "slice", "pad", "expand"]), max_size=2)):
        if array.ndim == 0:
            break
        axis = draw(st.integers(0, array.ndim - 1))
        n = array.shape[axis]
        if step == "permute":
            order = draw(st.permutations(range(array.ndim)))
            tensor, array = tensor.permute(order), array.transpose(order)
        elif step == "flip":
            tensor, array = tensor.flip(axis), np.flip(array, axis)
        elif step == "slice" and n > 1:
            cut = [slice(None)] * array.ndim
            cut[axis] = slice(draw(st.integers(0, n - 1)), None, draw(st.integers(1, 2)))
            tensor, array = tensor[tuple(cut)], array[tuple(cut)]
        elif step == "pad":
            pads = [(0, 0)] * array.ndim
            pads[axis] = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
            tensor, array = tensor.pad(pads, value=1), np.pad(array, pads, constant_values=1)
        elif step == "expand" and n == 1:
            shape = tuple(3 if i == axis else m for i, m in enumerate(array.shape))
            tensor, array = tensor.expand(shape), np.broadcast_to(array, shape)
    return tensor, array


def float_result(dtype: str) -> str:
    """The dtype of a float function of `dtype`."""
    return dtype if np.dtype(dtype).kind == "f" else dtypes.default_float.name
