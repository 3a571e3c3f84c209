"""Calls of Python functions between the kernels of a plan: their nodes in graphs and their kernels in schedules.

    CUSTOM_FUNCTION(x, …)   arg = ("CALLBACK", (function, results, operands, several, i))     graph: the i-th result of one call
    SINK(STORE(INDEX(PARAM, 0), CUSTOM_FUNCTION(PARAM, …)), …)                       kernel: a STORE for each result that is used

`results` and `operands` have a pair (dtype, shape) for each array; an operand without elements is no source and has no PARAM. `several`:
whether the function returns a tuple of results (also a tuple of one). In a graph `function` is a `HostFunction`; in a schedule it is the
number of its token and its name, so that a cached schedule does not keep the function alive. A token number stands for one function of one
process, as a UNIQUE stands for the memory of a BUFFER: it is not a digest of code, so schedules with one are never written to a file.

Nodes with the same function, operands and result types denote one call.
"""
from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import Ops, UOp
from svod.errors import ScheduleError, ShapeError

CALLBACK = "CALLBACK"
Shape = tuple[int, ...]
Arrays = tuple[tuple[DType, Shape], ...]

_tokens = itertools.count()


@dataclass(frozen=True, eq=False)
class Token:
    """The identity of a function in the arg of a node: one Token and one number for each function. `name` appears in messages only."""

    number: int
    name: str


class HostFunction(Token):
    """A Python function that a graph calls; made by `host_function`. A node that holds it keeps the function alive."""

    call: Callable[..., Any]


_functions: weakref.WeakValueDictionary[Hashable, HostFunction] = weakref.WeakValueDictionary()     # key: the id of the function


def host_function(call: Callable[..., Any]) -> HostFunction:
    """Return the HostFunction of `call`. As long as a graph contains it, the same function (or method of the same object) gives the same
    HostFunction."""
    ident = (id(call.__func__), id(call.__self__)) if isinstance(call, MethodType) else id(call)
    function = _functions.get(ident)
    if function is None:
        made = HostFunction(next(_tokens), name_of(call))
        object.__setattr__(made, "call", call)
        # setdefault: two threads that make a HostFunction of one function at the same time get the same object
        function = _functions.setdefault(ident, made)
    return function


def name_of(call: Callable[..., Any]) -> str:
    """Return the name of a function for messages: `qr`, `lambda`."""
    inner = call.func if isinstance(call, partial) else call
    return str(getattr(inner, "__name__", type(inner).__name__)).strip("<>")


def has_elements(shape: Shape) -> bool:
    return 0 not in shape


# -- graph ------------------------------------------------------------------------------------------
def is_callback(u: UOp) -> bool:
    """Whether a node is the result of a function of Python."""
    return u.op is Ops.CUSTOM_FUNCTION and u.arg[0] == CALLBACK


def call_of(u: UOp) -> Hashable:
    """Return a key of the call that a node is a result of; it is equal for all results of one call."""
    return u.src, u.arg[1][:-1]


def callback_shape(u: UOp, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of a result. Raises ShapeError if the operands differ from the node's description."""
    function, results, operands, _, i = u.arg[1]
    said = [(dtype, shape) for dtype, shape in operands if has_elements(shape)]
    if [(s.dtype, shape) for s, shape in zip(u.src, shapes, strict=True)] != said or not 0 <= i < len(results):
        raise ShapeError(f"custom function {function.name} of shapes {' and '.join(map(str, shapes))}, result {i}: it takes "
                         f"{' and '.join(str(shape) for _, shape in said)} and has {len(results)} results")
    shape: Shape = results[i][1]
    return shape


def without_functions(root: UOp) -> UOp:
    """Replace each function in a graph by its token and name, so that the graph is data that can be printed."""
    done: dict[UOp, UOp] = {}
    for u in root.toposort():
        made = u.replace(src=tuple([done[s] for s in u.src]))
        done[u] = made.replace(arg=(CALLBACK, _named(u))) if is_callback(u) and isinstance(u.arg[1][0], HostFunction) else made
    return done[root]


def _named(u: UOp) -> tuple[Any, ...]:
    function, *rest = u.arg[1]
    return function.number, function.name, *rest


def functions_of(sink: UOp) -> dict[int, HostFunction]:
    """Return the functions that a graph calls, by token."""
    return {u.arg[1][0].number: u.arg[1][0] for u in sink.walk(Ops.CUSTOM_FUNCTION) if is_callback(u)}


# -- schedule ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class HostArray:
    """One operand or result of a call. `slot`: the slot of its memory; None for an array without elements and for a result that is not
    used."""

    dtype: DType
    shape: Shape
    slot: int | None


@dataclass(frozen=True)
class HostCall:
    """A call of a Python function, read from its kernel in a schedule. `several`: whether the function returns a tuple of results."""

    function: HostFunction
    results: tuple[HostArray, ...]
    operands: tuple[HostArray, ...]
    several: bool

    @property
    def stored_results(self) -> int:
        """The number of results that have memory; they occupy the first slots."""
        return sum(a.slot is not None for a in self.results)

    @property
    def stored(self) -> tuple[HostArray, ...]:
        """The results and operands that have memory, in the order of their slots."""
        arguments = [a for a in (*self.results, *self.operands) if a.slot is not None]
        return tuple(sorted(arguments, key=lambda a: a.slot or 0))


def callback_ast(results: Sequence[UOp], params: Sequence[UOp]) -> UOp:
    """Make the kernel of one call. `results`: the nodes of its used results; `params`: a PARAM for each of them, then one for each
    operand."""
    stores = []
    for u, param in zip(results, params, strict=False):
        value = UOp(Ops.CUSTOM_FUNCTION, u.dtype, tuple(params[len(results):]), (CALLBACK, _named(u)))
        where = UOp(Ops.INDEX, u.dtype, (param, UOp.const(dtypes.index, 0)))
        stores.append(UOp(Ops.STORE, dtypes.void, (where, value)))
    return UOp(Ops.SINK, dtypes.void, tuple(stores))


def calls_back(ast: UOp) -> bool:
    """Whether a kernel is a call of a Python function."""
    return ast.op is Ops.SINK and bool(ast.src) and ast.src[0].op is Ops.STORE and is_callback(ast.src[0].src[1])


def host_call(ast: UOp, functions: Mapping[int, HostFunction]) -> HostCall:
    """Read the call from the kernel of a Python function. `functions`: the functions of the graph, by token number. Raises ScheduleError if
    the kernel's function is not among them."""
    value = ast.src[0].src[1]
    number, name, results, operands, several, _ = value.arg[1]
    if number not in functions:
        raise ScheduleError(f"a schedule calls {name}, a function of Python that is not given with it: prepare the graph that it is of")
    stored = {store.src[1].arg[1][-1]: store.src[0].src[0].arg.slot for store in ast.src}
    given = iter(value.src)
    return HostCall(functions[number], tuple(HostArray(dtype, shape, stored.get(i)) for i, (dtype, shape) in enumerate(results)),
                    tuple(HostArray(dtype, shape, next(given).arg.slot if has_elements(shape) else None) for dtype, shape in operands),
                    several)
