"""Runs operations that svod lacks with PyTorch, inside svod's plan.

    f = an operation that svod lacks        svod tensors → callback: f of PyTorch tensors over the same memory → svod tensors

Values that svod cannot represent stay in PyTorch, such as complex numbers that are not pairs (`operations/complex_numbers.py`). An
operation with such a result runs together with the operations that read it, in one callback that returns representable results.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from svod.core.ir.dtype import DType, dtypes
from svod.errors import UnsupportedError
from svod.tensor import Tensor
from svod.tensor.callbacks import custom_function
from svod.torch.memory import TORCH_DTYPES, is_representable, svod_dtype, tensor_to_read

_QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


class FallbackSeconds:
    """Counts the seconds that PyTorch takes for operations of a plan."""

    def __init__(self) -> None:
        self.seconds = 0.0


class Foreign:
    """A value that svod cannot represent, or that is not computed yet: `compute` makes it from `inputs` as PyTorch tensors. `example`: a
    fake tensor of its shape and dtype."""

    def __init__(self, inputs: Sequence[Tensor], compute: Callable[..., Any], example: Any) -> None:
        self.inputs, self.compute, self.example = tuple(inputs), compute, example


def run_in_torch(operation: Any, args: Any, kwargs: Any, clock: FallbackSeconds) -> Any:
    """Run an ATen operation on svod tensors, Foreign values and constants. The results are svod tensors, which a callback computes, or
    `Foreign` values if svod lacks their dtype.

    Raises UnsupportedError for an operation whose results have shapes that depend on values, or are on another device."""
    leaves, structure = pytree.tree_flatten((list(args), dict(kwargs)))
    # checked here, because fake results of such operations claim to be float32
    if any(leaf in _QUANTISED for leaf in leaves if isinstance(leaf, torch.dtype)):
        raise UnsupportedError(f"{operation} makes quantised tensors")
    inputs: dict[int, Tensor] = {}
    for leaf in leaves:
        for t in leaf.inputs if isinstance(leaf, Foreign) else (leaf,) if isinstance(leaf, Tensor) else ():
            inputs[id(t)] = t
    tensors = list(inputs.values())
    number = {ident: i for i, ident in enumerate(inputs)}

    def compute(*given: Any) -> Any:
        def value(leaf: Any) -> Any:
            if isinstance(leaf, Foreign):
                return leaf.compute(*[given[number[id(t)]] for t in leaf.inputs])
            return given[number[id(leaf)]] if isinstance(leaf, Tensor) else leaf
        positional, named = pytree.tree_unflatten([value(leaf) for leaf in leaves], structure)
        return operation(*positional, **named)
    results, form = pytree.tree_flatten(_example_results(operation, leaves, structure))
    if any(isinstance(r, torch.Tensor) and r.device.type != "cpu" for r in results):
        raise UnsupportedError(f"{operation} on {next(r.device for r in results if r.device.type != 'cpu')}")
    chosen = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor) and is_representable(r)]
    declared = [(tuple(results[i].shape), svod_dtype(results[i].dtype)) for i in chosen]
    made = _callback(str(operation), compute, tensors, declared, chosen, clock)
    values: list[Any] = list(results)
    for i, r in enumerate(results):
        if i in chosen:
            values[i] = made[chosen.index(i)]
        elif isinstance(r, torch.Tensor):
            values[i] = Foreign(tensors, lambda *given, i=i: pytree.tree_leaves(compute(*given))[i], r)
    return pytree.tree_unflatten(values, form)


def _example_results(operation: Any, leaves: Sequence[Any], structure: Any) -> Any:
    """Fake results of an operation, with their shapes and dtypes. Raises UnsupportedError if these depend on values."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def example(leaf: Any) -> Any:
        if isinstance(leaf, Foreign):
            return torch.empty(tuple(leaf.example.shape), dtype=leaf.example.dtype)
        return torch.empty(leaf.shape, dtype=TORCH_DTYPES[leaf.dtype]) if isinstance(leaf, Tensor) else leaf
    try:
        with mode:
            positional, named = pytree.tree_unflatten([example(leaf) for leaf in leaves], structure)
            return operation(*positional, **named)
    except Exception as error:      # operations raise errors of many types for arguments that they refuse
        raise UnsupportedError(f"{operation}: {error}") from error


def _callback(name: str, compute: Callable[..., Any], tensors: Sequence[Tensor], results: Sequence[tuple[tuple[int, ...], DType]],
              chosen: Sequence[int], clock: FallbackSeconds) -> Sequence[Tensor]:
    """The `chosen` leaves of the result of `compute`, as svod tensors. NumPy has no bfloat16: such values are passed as float32, which
    represents them exactly."""
    if not results:
        return ()
    narrow = [t.dtype == dtypes.bfloat16 for t in tensors]

    def call(*arrays: Any) -> Any:
        start = time.perf_counter()
        given = [tensor_to_read(a) for a in arrays]
        made = pytree.tree_leaves(compute(*[t.bfloat16() if n else t for t, n in zip(given, narrow, strict=True)]))
        found = tuple([_as_array(made[i], *result) for i, result in zip(chosen, results, strict=True)])
        clock.seconds += time.perf_counter() - start
        return found
    call.__name__ = name
    declared = [dtypes.float32 if dtype == dtypes.bfloat16 else dtype for _, dtype in results]
    made = custom_function(call, *[t.cast(dtypes.float32) if n else t for t, n in zip(tensors, narrow, strict=True)],
                           shape=tuple(shape for shape, _ in results), dtype=tuple(declared))
    return [t.cast(dtype) for t, (_, dtype) in zip(made, results, strict=True)]


def _as_array(t: Any, shape: tuple[int, ...], dtype: DType) -> Any:
    """A result as a NumPy array. Zeros if PyTorch declares the result but returns None in inference, as for the workspace of a backward
    pass."""
    if t is None:
        t = torch.zeros(shape, dtype=TORCH_DTYPES[dtype])
    t = t.detach().resolve_conj().resolve_neg()
    return (t.float() if t.dtype is torch.bfloat16 else t).contiguous().numpy()
