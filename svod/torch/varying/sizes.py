"""The sizes of a graph that differ from call to call, as variables of one plan for all of them.

    placeholders x (s0, s1), mask (s0, s1)      Variable("s0", 2, 288), Variable("s1", 2, 288)
    a call with x of (3, 17)                    x is copied to memory in the layout of the largest sizes; the plan runs with s0=3, s1=17
    a call with x of (3, 300)                   beyond the bounds: the plan is made anew, for s1 up to 576

Dynamo and torch.export name such sizes by symbols, and know ranges of them. A range without end gets a bound that leaves room, but not so
much that a tensor of the largest sizes exceeds `MOST_TENSOR_BYTES`; pages that no run touches take no memory from the system.
"""
from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from svod.core.graph import graph as graphs
from svod.core.graph.storage import base_of
from svod.core.ir.variable import Variable, layout_shape
from svod.tensor import Tensor
from svod.torch.memory import gpu_of, memory_over, svod_tensor
from svod.torch.watch import form_of

# A bound is LEAST_BOUND times a power of two: sizes that are powers of two themselves share cache sets.
LEAST_BOUND = 9
WISHED_BOUND = 288              # least bound where memory allows it
NO_END = 1 << 48                # a range with a larger end counts as one without end
MOST_TENSOR_BYTES = 1 << 28     # most bytes of a tensor of the largest sizes, unless a call needs more


class SizePlace(NamedTuple):
    """The source of a symbol's value in a call: extent `axis` of an argument, or, if `axis` is None, the argument itself, an int."""

    argument: int
    axis: int | None


class VaryingSizes:
    """The symbols of a graph's sizes with their ranges and their sources in a call (`places`). `varying`: the numbers of the arguments
    with such sizes."""

    def __init__(self, places: Mapping[Any, Sequence[SizePlace]], ranges: Mapping[Any, tuple[int, int | None]],
                 bytes_of_tensors: Collection[Any], same: Mapping[Any, Any] | None = None) -> None:
        self.places, self.ranges = dict(places), dict(ranges)
        self._same = dict(same or {})       # maps a symbol to another one that has the same value in all calls
        self.varying = frozenset(p.argument for found in places.values() for p in found)
        self._varying_axes = {p for found in places.values() for p in found}
        self._bytes = list(bytes_of_tensors)
        self._seen: dict[Any, int] = dict.fromkeys(places, 0)      # symbol → its largest value so far

    @classmethod
    def of(cls, graph: Any, fixed: Collection[int]) -> Self | None:
        """The sizes of a graph that vary between calls. None if none varies, or if the value of a symbol is not the size of an argument.
        `fixed`: the positions of the arguments whose sizes may not vary."""
        places: dict[Any, list[SizePlace]] = {}
        found: list[Any] = []
        for number, node in enumerate(n for n in graph.nodes if n.op == "placeholder"):
            example = node.meta.get("val")
            if isinstance(example, (torch.SymFloat, torch.SymBool)):
                return None
            extents = [(None, example)] if isinstance(example, torch.SymInt) else list(enumerate(getattr(example, "shape", ())))
            for axis, size in extents:
                if isinstance(size, torch.SymInt):
                    found.append(size)
                    if not size.node.expr.is_Symbol or number in fixed:
                        return None
                    places.setdefault(size.node.expr, []).append(SizePlace(number, axis))
        if not places:
            return None
        known = found[0].node.shape_env.var_to_range
        ranges = {s: _range_of(known[s], any(p.axis is not None for p in where)) for s, where in places.items()}
        return cls(places, ranges, {_bytes_of(example) for node in graph.nodes for example in _of_varying_size(node.meta.get("val"))})

    def values(self, given: Sequence[Any]) -> dict[Any, int] | None:
        """The value of each symbol in a call; None if it is outside of its range, or if arguments disagree on it."""
        values = {}
        for symbol, found in self.places.items():
            all_of_it = {_at(given, p) for p in found}
            low, high = self.ranges[symbol]
            n = all_of_it.pop()
            if all_of_it or type(n) is not int or n < low or (high is not None and n > high):
                return None
            values[symbol] = n
        return values

    def joined(self, values: Mapping[Any, int]) -> VaryingSizes | None:
        """The same sizes with one symbol for all symbols that are equal in `values`; None if no two are equal. PyTorch leaves two
        symbols for sizes that must be equal if it traces an operation without looking inside."""
        first: dict[int, Any] = {}
        same = {s: first[n] for s, n in values.items() if first.setdefault(n, s) is not s}
        if not same:
            return None
        places = {s: [*found, *(p for other, one in same.items() if one is s for p in self.places[other])]
                  for s, found in self.places.items() if s not in same}
        return VaryingSizes(places, self.ranges, self._bytes, {**self._same, **same})

    def form(self, argument: Any, number: int) -> Any:
        """The properties of an argument in the key of a plan for all sizes."""
        if number not in self.varying:
            return form_of_argument(argument)
        if not isinstance(argument, torch.Tensor):
            return type(argument)
        fixed = [n for axis, n in enumerate(argument.shape) if (number, axis) not in self._varying_axes]
        return argument.dtype, argument.device, argument.layout, argument.ndim, *fixed

    def variables(self, values: Mapping[Any, int]) -> SizeVariables:
        """Variables for the sizes of a call, with bounds that leave room for other calls."""
        for symbol, n in values.items():
            self._seen[symbol] = max(self._seen[symbol], n)
        least = {s: self._bound(s, n) for s, n in self._seen.items()}
        bounds = {s: self._bound(s, max(n, WISHED_BOUND)) for s, n in self._seen.items()}
        while self._largest(bounds) > MOST_TENSOR_BYTES and bounds != least:
            widest = max(bounds, key=lambda s: bounds[s] / least[s])
            bounds[widest] = max(least[widest], bounds[widest] // 2)
        return SizeVariables({s: Variable(str(s), min(self.ranges[s][0], n - 1), n) for s, n in bounds.items()}, values, self._same)

    def _bound(self, symbol: Any, n: int) -> int:
        """A bound for a symbol with the value n: LEAST_BOUND times a power of two, within the symbol's range."""
        bound, high = LEAST_BOUND, self.ranges[symbol][1]
        while bound < n:
            bound *= 2
        return bound if high is None else min(bound, high)

    def _largest(self, bounds: Mapping[Any, int]) -> int:
        return max(int(n.subs(self._same).subs(bounds)) for n in self._bytes)


class SizeVariables:
    """A variable for each symbol, bound to the value of one call. `same`: maps further symbols to the symbol whose variable they share.
    `dims`: the bound variables by symbol."""

    def __init__(self, variables: Mapping[Any, Variable], values: Mapping[Any, int], same: Mapping[Any, Any]) -> None:
        self._bounds = {s: (v.min, v.max) for s, v in variables.items()}
        self.dims = {s: v.bind(values[s]) for s, v in variables.items()}
        self.dims |= {s: self.dims[one] for s, one in same.items()}

    def holds(self, values: Mapping[Any, int]) -> bool:
        """Whether the plan for these variables runs for these values."""
        return all(low <= values[s] <= high for s, (low, high) in self._bounds.items())

    def extent(self, size: Any) -> Any:
        """A size of the graph as an int or Dim. Raises ShapeError for one that no expression of variables gives."""
        return sympy_interp(PythonReferenceAnalysis, self.dims, size.node.expr) if isinstance(size, torch.SymInt) else size

    def shape(self, example: Any) -> tuple[Any, ...]:
        """The shape of a fake tensor."""
        return tuple(map(self.extent, example.shape))


class Room:
    """Memory for an argument in the layout of its largest sizes. `tensor`: the svod tensor of its shape over that memory."""

    def __init__(self, shape: tuple[Any, ...], like: Any) -> None:
        self._memory = torch.zeros(layout_shape(shape), dtype=like.dtype, device=like.device)
        flat = svod_tensor(self._memory, shared=True)
        self.tensor = Tensor.from_uop(graphs.storage_view(base_of(flat.uop), shape))
        self._array = None if gpu_of(like) else memory_over(self._memory)
        self.read(like)

    def read(self, t: Any) -> Any:
        """Copy a tensor into this memory, and return the memory as a run reads it."""
        self._memory[tuple([slice(0, n) for n in t.shape])].copy_(t)
        return memory_over(self._memory) if self._array is None else self._array


def form_of_argument(argument: Any, _: int = 0) -> Any:
    """The properties of an argument in the key of a plan for its sizes."""
    if isinstance(argument, torch.Tensor):
        return form_of(argument)
    return (type(argument), argument) if isinstance(argument, Hashable) else type(argument)


def _at(given: Sequence[Any], place: SizePlace) -> Any:
    """The value of a size in a call, read from its source `place`; None if the argument has no such axis."""
    argument = given[place.argument]
    if place.axis is None:
        return argument
    return argument.shape[place.axis] if isinstance(argument, torch.Tensor) and argument.ndim > place.axis else None


def _of_varying_size(value: Any) -> Iterator[Any]:
    """The tensors in a node's example that have sizes that vary."""
    for v in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(v, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in v.shape):
            yield v


def _bytes_of(example: Any) -> Any:
    """The bytes of a fake tensor with sizes that vary, as an expression of symbols."""
    return math.prod([n.node.expr if isinstance(n, torch.SymInt) else n for n in example.shape]) * example.element_size()


def _range_of(known: Any, is_extent: bool) -> tuple[int, int | None]:
    """The range of a symbol as ints. It begins at 1 or above for an extent, at 0 or above for another number; an end of None means no
    limit."""
    low = int(is_extent)
    return (low if known.lower < low else int(known.lower)), (int(known.upper) if known.upper < NO_END else None)
