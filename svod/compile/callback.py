"""A function of Python as an item of a plan: it gets the memory of its operands as NumPy arrays, and what it returns is stored.

    operands   C-contiguous, read-only, over the plan's memory; of the shape that the variables say, within the strides of the largest
    results    returned: arrays of exactly the shape and dtype that were declared, copied to where later kernels read them
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from svod.compile.program import ProgramSpec
from svod.core.callback import HostArray, HostCall
from svod.core.dtype import to_numpy
from svod.core.variable import is_symbolic, layout_shape, shape_at
from svod.errors import ArgumentError, DTypeError, ShapeError

Array = np.ndarray[Any, Any]


class _Memory:
    """Memory at an address, for NumPy. An array over it keeps `owner` alive."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, address: int, array: HostArray, writable: bool, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"version": 3, "data": (address, not writable), "shape": layout_shape(array.shape),
                                    "typestr": to_numpy(array.dtype).str}


def array_at(address: int, array: HostArray, values: Mapping[str, int], writable: bool, owner: object) -> Array:
    """The part of the memory at `address` that an array is, for these values of the variables."""
    whole = np.asarray(_Memory(address, array, writable, owner))
    return whole[tuple([slice(n) for n in shape_at(array.shape, values)])] if is_symbolic(array.shape) else whole


class HostProgram:
    """A call that has no code: `addresses` of phases, of which it has none."""

    addresses: tuple[int, ...] = ()

    def __init__(self, call: HostCall) -> None:
        self.call = call

    def spec(self, variables: int) -> ProgramSpec:
        """What the call is given, in the terms of a program: parameters by slot, the first of them written."""
        return ProgramSpec(self.call.function.name, tuple((a.dtype, math.prod(layout_shape(a.shape))) for a in self.call.stored),
                           tuple(range(self.call.stored_results)), (), (),
                           tuple(f"v{i}" for i in range(variables)))

    def run(self, addresses: Sequence[int], owners: Sequence[object], values: Mapping[str, int]) -> None:
        """Call the function on the memory that is given by slot, and store what it returns. Raises what the function raises, and
        ArgumentError, ShapeError or DTypeError for results that are not what was declared."""
        def given(a: HostArray, writable: bool) -> Array:
            if a.slot is None:
                empty = np.empty(shape_at(a.shape, values), to_numpy(a.dtype))
                empty.flags.writeable = False
                return empty
            return array_at(addresses[a.slot], a, values, writable, owners[a.slot])

        returned = self.call.function.call(*[given(a, False) for a in self.call.operands])
        results = self.call.results
        name = self.call.function.name
        if self.call.several:
            if not isinstance(returned, (tuple, list)) or len(returned) != len(results):
                found = f"{len(returned)} results" if isinstance(returned, (tuple, list)) else type(returned).__name__
                raise ArgumentError(f"custom function {name} returned {found}; declared are {len(results)} results: return a tuple of them")
        else:
            returned = (returned,)
        for i, (value, a) in enumerate(zip(returned, results, strict=True)):
            position = f" as result {i}" if self.call.several else ""
            _check(f"custom function {name} returned{position}", value, a, shape_at(a.shape, values))
        # all are checked before one is stored: a run that fails here has written nothing of this call
        for value, a in zip(returned, results, strict=True):
            if a.slot is not None:
                np.copyto(given(a, True), value)


def _check(what: str, value: object, a: HostArray, shape: tuple[int, ...]) -> None:
    if not isinstance(value, (np.ndarray, np.generic)):
        raise ArgumentError(f"{what} {type(value).__name__}; return a NumPy array of {a.dtype.name}{list(shape)}")
    if value.dtype != to_numpy(a.dtype):
        raise DTypeError(f"{what} {value.dtype}; declared is {a.dtype.name}: return result.astype({a.dtype.name!r}), or declare what it "
                         "returns")
    if value.shape != shape:
        raise ShapeError(f"{what} shape {value.shape}; declared is {shape}")
