"""The table of ATen operations, and the decorator that fills it.

The function of an operation gets the operation's arguments in the order and by the names of its ATen schema: tensors as svod tensors, sizes
as ints, dtypes as svod dtypes. Arguments that say where and how memory lies (device, layout, memory_format) are left out. It returns a
tensor, or a tuple for an operation with several results. An element of the tuple may be a function without arguments, which makes that
result when it is used.

PyTorch computes in float32 with 16-bit floats and rounds the result, and so does the translator: a function gets float32 in place of 16-bit
floats, unless its entry says `widens=False`, and its results are cast to the dtypes that PyTorch gives. An entry says so for a function

* that moves, chooses, compares or orders elements: widened copies would cost memory. A number that elements are compared with takes their
  type, as in PyTorch;
* that rounds once by itself, and whose products, sums in order or scattered sums read 16-bit memory.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from svod.tensor import Tensor

F = TypeVar("F", bound=Callable[..., Any])


class Operation(NamedTuple):
    """The function of svod for an ATen operation. `promotes`: its operands are cast to their common type, by PyTorch's rule, before.
    `widens`: it gets float32 in place of 16-bit floats."""

    function: Callable[..., Any]
    promotes: bool = False
    widens: bool = True


TABLE: dict[str, Operation] = {}        # key: the name of the overload, "aten.add.Tensor"


def aten(*overloads: str, promotes: bool = False, widens: bool = True) -> Callable[[F], F]:
    """Decorate the function of the overloads, named as in "add.Tensor"; "relu" is "relu.default"."""
    def put(function: F) -> F:
        for overload in overloads:
            name = f"aten.{overload if '.' in overload else overload + '.default'}"
            assert name not in TABLE, f"{name} is in the table twice"
            TABLE[name] = Operation(function, promotes, widens)
        return function
    return put


def own(name: str) -> Callable[[F], F]:
    """Decorate the function of an operator of svod's own (`svod/torch/whole.py`)."""
    def put(function: F) -> F:
        TABLE[f"svod.{name}.default"] = Operation(function)
        return function
    return put


def methods(names: str, promotes: bool = False, widens: bool = True) -> None:
    """Operations that a method of Tensor of the same name does. `names` with spaces between: "abs", or "add.Tensor"."""
    for name in names.split():
        aten(name, promotes=promotes, widens=widens)(getattr(Tensor, name.partition(".")[0]))


def of_integers(factor: float, x: Tensor) -> float:
    """A factor as PyTorch converts it for integer tensors: 0.5 becomes 0."""
    return int(factor) if x.dtype.is_int else factor
