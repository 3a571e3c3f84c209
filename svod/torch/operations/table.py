"""The table of ATen operations, and the decorator that fills it.

The function of an operation gets the arguments in the order and by the names of the ATen schema: tensors as svod tensors, sizes as ints,
dtypes as svod dtypes. Arguments about memory (device, layout, memory_format) are left out. It returns a tensor, or a tuple for an operation
with several results. An element of the tuple may be a function without arguments, which is called if that result is used.

PyTorch computes operations on 16-bit floats in float32 and rounds the result, and so does the translator: a function gets float32 in place
of 16-bit floats, unless its entry has `widens=False`, and its results are cast to the dtypes that PyTorch gives. An entry has this

* for a function that moves, chooses, compares or sorts elements, because widened copies would cost memory; a number that elements are
  compared with is converted to their type, as in PyTorch;
* for a function that rounds once by itself, and whose products, ordered sums or scattered sums read 16-bit memory.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from svod.tensor import Tensor

F = TypeVar("F", bound=Callable[..., Any])


class Operation(NamedTuple):
    """svod's implementation of an ATen operation. `promotes`: its operands are cast to their common type first, by PyTorch's rule.
    `widens`: it gets float32 in place of 16-bit floats."""

    function: Callable[..., Any]
    promotes: bool = False
    widens: bool = True


TABLE: dict[str, Operation] = {}        # key: the name of the overload, such as "aten.add.Tensor"


def aten(*overloads: str, promotes: bool = False, widens: bool = True) -> Callable[[F], F]:
    """Register a function for overloads, named as in "add.Tensor"; "relu" stands for "relu.default"."""
    def put(function: F) -> F:
        for overload in overloads:
            name = f"aten.{overload if '.' in overload else overload + '.default'}"
            assert name not in TABLE, f"{name} is in the table twice"
            TABLE[name] = Operation(function, promotes, widens)
        return function
    return put


def own(name: str, widens: bool = True) -> Callable[[F], F]:
    """Register a function for one of svod's own operators (`svod/torch/whole.py`)."""
    def put(function: F) -> F:
        TABLE[f"svod.{name}.default"] = Operation(function, widens=widens)
        return function
    return put


def methods(names: str, promotes: bool = False, widens: bool = True) -> None:
    """Register methods of Tensor for operations of the same names, which `names` separates by spaces: "abs", or "add.Tensor"."""
    for name in names.split():
        aten(name, promotes=promotes, widens=widens)(getattr(Tensor, name.partition(".")[0]))


def of_integers(factor: float, x: Tensor) -> float:
    """Convert a factor for integer tensors as PyTorch does: 0.5 becomes 0."""
    return int(factor) if x.dtype.is_int else factor
