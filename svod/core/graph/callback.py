"""Python functions that a plan calls between its kernels, as graphs and schedules represent them.

    CUSTOM_FUNCTION(x, …)   arg = ("CALLBACK", (function, results, operands, several, i))     graph: the i-th result of one call
    SINK(STORE(INDEX(PARAM, 0), CUSTOM_FUNCTION(PARAM, …)), …)                       kernel: a STORE for each result that is used

`results` and `operands` are a pair (dtype, shape) per array; those without elements are no sources and have no PARAM. `several`: the
function returns a tuple of results, however many. In a graph `function` is a `HostFunction`, in a schedule its token and name, so that
schedules that are remembered keep nobody's function alive. A token stands for one function of one process, as the UNIQUE of a BUFFER for
its memory: it is not a digest of code, and nothing that has one is written to a file.

Nodes that call one function with the same operands for the same results are one call.
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
    """The stand-in of a function in the arg of a node: one object, and one number, per function. `name`: for people."""

    number: int
    name: str


class HostFunction(Token):
    """A function that a graph calls, as `host_function` makes it. A node with it keeps the function alive."""

    call: Callable[..., Any]


_functions: weakref.WeakValueDictionary[Hashable, HostFunction] = weakref.WeakValueDictionary()     # by the identity of the function


def host_function(call: Callable[..., Any]) -> HostFunction:
    """Return the HostFunction of `call`: the same one for the same function, or method of the same object, as long as a graph contains
    it."""
    ident = (id(call.__func__), id(call.__self__)) if isinstance(call, MethodType) else id(call)
    function = _functions.get(ident)
    if function is None:
        made = HostFunction(next(_tokens), name_of(call))
        object.__setattr__(made, "call", call)
        # setdefault: two threads that need it at once agree on one
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
    """Return the part of a node that is equal for all results of one call."""
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
    """One array of a call. `slot`: the slot of its memory; None if it has no elements, or if nothing reads it."""

    dtype: DType
    shape: Shape
    slot: int | None


@dataclass(frozen=True)
class HostCall:
    """A call of a function, as a kernel of a schedule says it. `several`: it returns a tuple of results."""

    function: HostFunction
    results: tuple[HostArray, ...]
    operands: tuple[HostArray, ...]
    several: bool

    @property
    def stored_results(self) -> int:
        """The number of results with memory, which have the first slots."""
        return sum(a.slot is not None for a in self.results)

    @property
    def stored(self) -> tuple[HostArray, ...]:
        """The arrays with memory, by slot."""
        arguments = [a for a in (*self.results, *self.operands) if a.slot is not None]
        return tuple(sorted(arguments, key=lambda a: a.slot or 0))


def callback_ast(results: Sequence[UOp], params: Sequence[UOp]) -> UOp:
    """The kernel of one call: `results` are the nodes of it that are used, `params` a PARAM for each of them, then for each source."""
    stores = []
    for u, param in zip(results, params, strict=False):
        value = UOp(Ops.CUSTOM_FUNCTION, u.dtype, tuple(params[len(results):]), (CALLBACK, _named(u)))
        where = UOp(Ops.INDEX, u.dtype, (param, UOp.const(dtypes.index, 0)))
        stores.append(UOp(Ops.STORE, dtypes.void, (where, value)))
    return UOp(Ops.SINK, dtypes.void, tuple(stores))


def calls_back(ast: UOp) -> bool:
    """Whether a kernel is a call of a function."""
    return ast.op is Ops.SINK and bool(ast.src) and ast.src[0].op is Ops.STORE and is_callback(ast.src[0].src[1])


def host_call(ast: UOp, functions: Mapping[int, HostFunction]) -> HostCall:
    """The call of a kernel that calls a function of Python. `functions`: by token, as the graph has them. Raises ScheduleError for
    another."""
    value = ast.src[0].src[1]
    number, name, results, operands, several, _ = value.arg[1]
    if number not in functions:
        raise ScheduleError(f"a schedule calls {name}, a function of Python that is not given with it: prepare the graph that it is of")
    stored = {store.src[1].arg[1][-1]: store.src[0].src[0].arg.slot for store in ast.src}
    given = iter(value.src)
    return HostCall(functions[number], tuple(HostArray(dtype, shape, stored.get(i)) for i, (dtype, shape) in enumerate(results)),
                    tuple(HostArray(dtype, shape, next(given).arg.slot if has_elements(shape) else None) for dtype, shape in operands),
                    several)
