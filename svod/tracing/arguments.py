"""The arguments of a call: the key of their signature, and the arrays and values that differ from call to call.

    f(x, {"scale": 2.0}, n.bind(5))
      key      ((4, 8), float32), ("dict", ("scale", float, …)), ("variable", n)        given  [x]      values  {n: 5}

Arrays and tensors of any library are inputs of the plan. Every other argument is a constant: it is part of the key.
"""
from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from svod.core.graph import graph
from svod.core.graph.buffer import Array, Buffer, aligned_empty, buffer_of
from svod.core.graph.memory import node_over
from svod.core.graph.storage import base_of, is_padding_view
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.ir.uop import Ops, UOp
from svod.core.ir.variable import BoundVariable, Dim, bound_values, is_symbolic, layout_shape, number_of, without_binds
from svod.core.machine.target import HOST
from svod.errors import ScheduleError, SvodError
from svod.tensor import Tensor
from svod.tensor.dlpack import is_shareable

Leaf = Any      # an array or a tensor among the arguments: np.ndarray, Tensor, or an object of another library


def key_of(value: Any, given: list[Leaf], values: dict[str, int]) -> Hashable:
    """The key of an argument. Collects arrays and tensors in `given`, and the values of bound variables, which are not part of the key.

    Raises SvodError for an argument that is neither a tensor nor a constant."""
    kind = type(value)
    if kind is np.ndarray:
        given.append(value)
        return value.shape, value.dtype
    if kind is Tensor:
        given.append(value)
        memory = value._memory
        if memory is not None and value._memory_dtype is not dtypes.bfloat16:
            return memory.shape, memory.dtype
        return _key_of_tensor(value, values)
    if kind is BoundVariable:
        _note(value.name, value.value, values)
        return "variable", value.declared
    return _key_of_other(value, given, values)


def _key_of_other(value: Any, given: list[Leaf], values: dict[str, int]) -> Hashable:
    if is_leaf(value):
        tensor = as_tensor(value)
        given.append(tensor)
        return _key_of_tensor(tensor, values)
    if isinstance(value, Dim):
        return "variable", _unbound(value, values)
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple([key_of(v, given, values) for v in value])
    if isinstance(value, dict):
        return "dict", tuple([(k, key_of(v, given, values)) for k, v in value.items()])
    if isinstance(value, (float, np.floating)):      # as bytes: 0.0 == -0.0, and nan != nan
        return type(value).__name__, np.asarray(value).tobytes()
    try:
        hash(value)
    except TypeError:
        raise SvodError(f"svod.jit: an argument of type {type(value).__name__} is neither a tensor nor hashable; pass tensors, arrays, "
                        "numbers, strings, or tuples, lists and dicts of them") from None
    return type(value).__name__, value


def _key_of_tensor(t: Tensor, values: dict[str, int]) -> Hashable:
    shape = t.shape
    if is_symbolic(shape):
        shape = tuple([_unbound(n, values) if isinstance(n, Dim) else n for n in shape])    # type: ignore[misc]
    dtype = t.dtype if t.dtype == dtypes.bfloat16 else to_numpy(t.dtype)
    return (shape, dtype) if t.device == HOST else (shape, dtype, t.device)


def _note(name: str, value: int, values: dict[str, int]) -> None:
    if values.setdefault(name, value) != value:
        raise ScheduleError(f"bind mismatch on {name}, {values[name]} != {value} (arguments of one call)")


def _unbound(n: Dim, values: dict[str, int]) -> UOp:
    """A Dim without the values of its variables. Collects the values."""
    if n.expr.op is Ops.BIND:
        declared, value = n.expr.src
        _note(declared.arg[0], value.arg, values)
        return declared
    for name, bound in bound_values(n).items():
        _note(name, bound, values)
    number, _, _ = without_binds(number_of(n, dtypes.int64))
    return number


def is_leaf(value: Any) -> bool:
    """Whether an argument is an array or a tensor of NumPy, svod or another library."""
    if isinstance(value, (Tensor, np.ndarray)):
        return True
    return not isinstance(value, (np.generic, type)) and (is_shareable(value) or hasattr(value, "__array_interface__")
                                                          or hasattr(value, "__array__"))


def as_tensor(value: Leaf) -> Tensor:
    """The tensor over the memory of an array or tensor. Raises SvodError for memory that cannot be shared."""
    if isinstance(value, Tensor):
        return value
    try:
        return Tensor(value)
    except SvodError:
        raise
    except Exception as error:      # other libraries raise errors of any type
        raise SvodError(f"svod.jit: an argument of type {type(value).__module__}.{type(value).__name__} cannot be read as an array: "
                        f"{error}") from error


def memory_of(leaf: Array | Tensor) -> Array:
    """The array whose memory a kernel reads for an argument."""
    if isinstance(leaf, Tensor):
        if leaf._memory is not None:
            return leaf._memory
    elif type(leaf) is np.ndarray:
        flags = leaf.flags
        if flags.c_contiguous and flags.aligned and leaf.dtype.isnative:
            return leaf
    return buffer_under(leaf).array


def buffer_under(leaf: Leaf) -> Buffer:
    """The buffer of an argument, computed now if it has no memory yet."""
    return buffer_of(base_of(in_memory(as_tensor(leaf)).uop))


def in_memory(t: Tensor) -> Tensor:
    """Realize a tensor and return it over a buffer in the layout of its shape. A constant gets memory here."""
    if is_padding_view(t.uop) and base_of(t.uop).op is Ops.BUFFER:
        return t
    if not t.realize().is_realized:
        return t.contiguous().realize()
    own = not is_symbolic(t.shape) or is_padding_view(t.uop)
    return t if own else Tensor.from_uop(graph.copy(t.uop, t.device)).realize()


def in_own_layout(values: Array, dtype: DType, shape: Sequence[Any]) -> Tensor:
    """Copy an array to new memory in the layout of `shape`, whose extents are those of the array; some are bound variables."""
    layout = layout_shape(shape)
    memory = aligned_empty(math.prod(layout), dtype)
    memory.reshape(layout)[tuple([slice(n) for n in values.shape])] = values
    return Tensor.from_uop(graph.storage_view(node_over(memory, dtype, shared=False, given=None), tuple(shape)))


# -- nested values --------------------------------------------------------------------------------------

def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Apply `leaf` to every element of nested tuples, lists and dicts; returns the same structure with its results."""
    if isinstance(value, (tuple, list)):
        items = [mapped(v, leaf) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {k: mapped(v, leaf) for k, v in value.items()}
    return leaf(value)


def substitute(value: Any, stand_ins: Iterator[Any]) -> Any:
    """Replace each array or tensor in a nested value by the next of `stand_ins`."""
    return mapped(value, lambda v: next(stand_ins) if is_leaf(v) else v)


def structure_of(value: Any, outputs: list[Tensor]) -> Any:
    """Replace each tensor in a nested value by the class Tensor, which `rebuild` replaces again. Appends the tensors to `outputs`."""
    def leaf(v: Any) -> Any:
        if not isinstance(v, Tensor):
            return v
        outputs.append(v)
        return Tensor
    return mapped(value, leaf)


def rebuild(structure: Any, results: Iterator[Tensor]) -> Any:
    """Replace each class Tensor in a result of `structure_of` by the next of `results`."""
    return mapped(structure, lambda v: next(results) if v is Tensor else v)



def names_of_leaves(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """A readable name for each array or tensor among a call's arguments, in order: `x`, or `x[0]`, `x[1]`, … if an argument has several."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):     # a function that is not written in Python may have no signature
        parameters = []
    variadic = inspect.Parameter.VAR_POSITIONAL
    positional = [p.name for p in parameters if p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is variadic), "argument")
    named = [(positional[i] if i < len(positional) else f"{rest}[{i - len(positional)}]", a) for i, a in enumerate(args)]
    names: list[str] = []
    for name, value in (*named, *kwargs.items()):
        count = _leaves_in(value)
        names += [name] if count == 1 else [f"{name}[{i}]" for i in range(count)]
    return names


def _leaves_in(value: Any) -> int:
    found: list[bool] = []
    mapped(value, lambda v: found.append(is_leaf(v)))
    return sum(found)
