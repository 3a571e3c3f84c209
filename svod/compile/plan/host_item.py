"""Items of a plan that are executed by the thread that runs the plan: Python functions, and copies between devices.

A function gets its operands as NumPy arrays, and its results are copied into the plan's memory:

    operands   C-ordered, read-only, over the plan's memory; if the shape depends on variables, a view of a part of the largest array
    results    returned as arrays of exactly the declared shape and dtype; copied into the buffers that later kernels read
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from svod.compile.lower.program import ProgramSpec
from svod.core.graph.callback import HostArray, HostCall
from svod.core.ir.dtype import DType, to_numpy
from svod.core.ir.variable import is_symbolic, layout_shape, shape_at
from svod.errors import ArgumentError, DTypeError, ShapeError

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]


class HostItem:
    """Takes the place of code in an item without compiled code. It holds no state of a run, so several plans may share it."""

    addresses: tuple[int, ...] = ()     # always empty, because the item has no phases


class Elsewhere(HostItem):
    """An item that another device's queue runs."""


class BufferCopy(HostItem):
    """A copy of a buffer to another device: `size` elements of `dtype`."""

    def __init__(self, dtype: DType, size: int) -> None:
        self.dtype, self.size = dtype, size

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def spec(self) -> ProgramSpec:
        """Describe the copy like a program: slot 0 is its destination, slot 1 its source."""
        return ProgramSpec("copy", ((self.dtype, self.size), (self.dtype, self.size)), (0,), (), (), ())


class _AddressedMemory:
    """Memory at an address, for NumPy. An array over it keeps `owner` alive."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__, self.owner = interface, owner


class _Argument:
    """An operand or a result of a call, with everything that is the same in all runs computed in advance."""

    def __init__(self, a: HostArray) -> None:
        self.slot, self.dtype, self.declared = a.slot, to_numpy(a.dtype), a.shape
        self.constant = None if is_symbolic(a.shape) else a.shape
        self.layout = layout_shape(a.shape)

    def shape_at(self, values: Mapping[str, int]) -> Shape:
        return shape_at(self.declared, values) if self.constant is None else self.constant

    def array(self, addresses: Sequence[int], owners: Sequence[object], values: Mapping[str, int], writable: bool) -> Array:
        """Make the array over the memory of its slot, with its shape at these values of the variables."""
        if self.slot is None:
            empty = np.empty(self.shape_at(values), self.dtype)
            empty.flags.writeable = False
            return empty
        interface = {"version": 3, "data": (addresses[self.slot], not writable), "shape": self.layout, "typestr": self.dtype.str}
        whole = np.asarray(_AddressedMemory(interface, owners[self.slot]))
        return whole if self.constant is not None else whole[tuple([slice(n) for n in self.shape_at(values)])]

    def check(self, value: object, values: Mapping[str, int], name: str, number: int | None) -> None:
        """Raise an error if `value`, result `number` of the function `name`, is not as declared."""
        shape = self.shape_at(values)
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype == self.dtype and value.shape == shape:
            return
        what = f"custom function {name} returned" + ("" if number is None else f" as result {number}:")
        if not isinstance(value, (np.ndarray, np.generic)):
            raise ArgumentError(f"{what} {type(value).__name__}; return a NumPy array of {self.dtype}{list(shape)}")
        if value.dtype != self.dtype:
            raise DTypeError(f"{what} {value.dtype}; declared is {self.dtype}: return result.astype({self.dtype.name!r}), or declare what "
                             "it returns")
        raise ShapeError(f"{what} shape {value.shape}; declared is {shape}")


class HostProgram(HostItem):
    """A call of a Python function."""

    def __init__(self, call: HostCall) -> None:
        self.call = call
        self.operands = [_Argument(a) for a in call.operands]
        self.results = [_Argument(a) for a in call.results]

    def spec(self, variables: int) -> ProgramSpec:
        """Describe the call like a program: parameters by slot, of which the first ones are written."""
        return ProgramSpec(self.call.function.name, tuple((a.dtype, math.prod(layout_shape(a.shape))) for a in self.call.stored),
                           tuple(range(self.call.stored_results)), (), (), tuple(f"v{i}" for i in range(variables)))

    def run(self, addresses: Sequence[int], owners: Sequence[object], values: Mapping[str, int]) -> None:
        """Call the function on the memory of each slot, and store its results. Raises the function's own errors, and ArgumentError,
        ShapeError or DTypeError for results that differ from the declaration."""
        returned = self.call.function.call(*[a.array(addresses, owners, values, False) for a in self.operands])
        name, several = self.call.function.name, self.call.several
        if not several:
            returned = (returned,)
        elif not isinstance(returned, (tuple, list)) or len(returned) != len(self.results):
            given = f"{len(returned)} results" if isinstance(returned, (tuple, list)) else type(returned).__name__
            raise ArgumentError(f"custom function {name} returned {given}; declared are {len(self.results)} results: return a tuple of "
                                "them")
        for i, (value, a) in enumerate(zip(returned, self.results, strict=True)):
            a.check(value, values, name, i if several else None)
        # all results are checked before the first is stored: if a check fails, nothing of this call was written
        for value, a in zip(returned, self.results, strict=True):
            if a.slot is not None:
                np.copyto(a.array(addresses, owners, values, True), value)
