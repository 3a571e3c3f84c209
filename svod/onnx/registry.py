"""The table of operators: the function that computes a node, by its name, domain and operator set version.

    @operator("Add", 7)
    def add(node: OnnxNode, a: Tensor, b: Tensor) -> Tensor: ...

    @operator("ReduceSum", 13, known=("axes",))
    def reduce_sum(node: OnnxNode, x: Tensor, axes: Array | None = None) -> Tensor: ...

A function gets the node and its operands, as tensors. Operands named in `known` are NumPy arrays instead, because their values are needed
during translation. With `raw` all operands are passed in their present form, array or tensor. A missing operand is None. The result is a
value, or a tuple with one for each output.

16-bit operands are passed as float32, and results are rounded (`svod.onnx.precision`). With `exact` operands stay 16-bit, unless earlier
nodes passed on unrounded values: for functions that move, choose or compare elements, or that depend on their operands' types. With
`multiplies` operands stay 16-bit if the device has matrix instructions for them: such a function rounds between its two products.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from svod.errors import ShapeError, UnsupportedError

Array = np.ndarray[Any, Any]
F = TypeVar("F", bound=Callable[..., Any])

MICROSOFT = "com.microsoft"
DOMAINS = {"": "", "ai.onnx": "", MICROSOFT: MICROSOFT}


@dataclass(frozen=True)
class Operator:
    """An entry of the table. `since`: the first operator set version that `function` implements. `known`: the positions of operands
    whose values must be known while the graph is walked. The module's docstring says in which form operands are passed under `raw`,
    `exact`, `multiplies` and `narrow`."""

    name: str
    since: int
    function: Callable[..., Any]
    known: tuple[int, ...]
    raw: bool
    exact: bool
    multiplies: bool
    narrow: bool


@dataclass
class OnnxNode:
    """A node as seen by an operator's function. `asked`: for each output, whether it has a name. `walk`: the interface to the graph
    around the node (`svod.onnx.walk._Inside`), which computes its subgraphs."""

    op: str
    name: str
    domain: str
    version: int
    attributes: dict[str, Any]
    asked: Sequence[bool] = (True,)
    walk: Any = field(default=None, repr=False)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or its default."""
        return self.attributes.get(name, default)

    def need(self, name: str) -> Any:
        if name not in self.attributes:
            raise UnsupportedError(f"{self}: it lacks the attribute {name}")
        return self.attributes[name]

    def __str__(self) -> str:
        return f"{self.op} {self.name!r}" if self.name else self.op


_operators: dict[tuple[str, str], list[Operator]] = {}


def operator(name: str, since: int = 1, *, domain: str = "", known: Sequence[str] = (), raw: bool = False,
             exact: bool = False, multiplies: bool = False, narrow: bool = False) -> Callable[[F], F]:
    """Add a function to the table; it may be added under several names."""
    def enter(function: F) -> F:
        names = list(inspect.signature(function).parameters)[1:]
        missing = [k for k in known if k not in names]
        assert not missing, f"{name} has no operand {missing}"
        entry = Operator(name, since, function, tuple(names.index(k) for k in known), raw, exact, multiplies, narrow)
        _operators.setdefault((domain, name), []).append(entry)
        return function
    return enter


def find(domain: str, name: str, version: int) -> Operator | None:
    """The entry for an operator in a version of its operator set; None if there is none."""
    known = _operators.get((DOMAINS.get(domain, domain), name), [])
    fitting = [o for o in known if o.since <= version]
    return max(fitting, key=lambda o: o.since, default=None)


def axis_in(axis: int, rank: int) -> int:
    """The axis, counted from the first. Raises ShapeError for an axis outside -rank … rank - 1."""
    if not -rank <= axis < rank:
        raise ShapeError(f"there is no axis {axis}: the operand has {rank}")
    return axis % rank


def axes_in(axes: Iterable[Any], rank: int) -> list[int]:
    """The axes, counted from the first. Raises ShapeError for an axis out of range, and for one that occurs twice."""
    found = [axis_in(int(a), rank) for a in axes]
    if len(set(found)) < len(found):
        raise ShapeError(f"the axes {[int(a) for a in axes]} name one of {rank} twice")
    return found
