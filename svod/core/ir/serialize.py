"""Conversion of UOp graphs to JSON-able data and back, without recursion: the form in which kernels go to workers and to the database.

    ast_to_data(u)  →  {"format": 1, "nodes": [[op, dtype, [source, …], arg], …]}
    data_to_ast(d)  →  the same UOp: hash-consing makes it `is` the original within one process, `key` is equal everywhere

Nodes are listed sources first; a source is the position of an earlier node; the last node is the root. (Pickle would recurse along `src`,
overflow the stack on deep graphs, and could run code; JSON does neither.)

An arg is written as

    None, bool, int, str, finite float      themselves
    other floats                            ["f", the 16 hex digits of its IEEE double, most significant first]
    bytes                                   ["y", hex]
    tuple                                   ["t", element, …]
    Ops member, DType                       ["o", name], ["d", name]
    UOp                                     ["u", position of an earlier node]
    dataclass in `ARG_TYPES`                ["c", class name, {field: value, …}]; fields at their defaults are left out

The data may come from a file or another machine, so `data_to_ast` checks all of it; FormatError says what is wrong.
"""
from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

from svod.core.ir.dtype import BY_NAME, DType
from svod.core.ir.param import Param
from svod.core.ir.uop import BINARY_OPS, TERNARY, UNARY, Ops, UOp
from svod.errors import FormatError

GRAPH_FORMAT = 1
MAX_NODES = 1_000_000      # most nodes of a graph: a kernel has tens to thousands, so more means a damaged or hostile file
MAX_ARG_DEPTH = 16         # deepest nesting of tuples and dataclasses in one arg
ARG_TYPES: dict[str, type] = {"Param": Param}      # dataclasses that may be args; `svod.core.ir.variable` adds Dim

_OPS: dict[str, Ops] = {op.value: op for op in Ops}
_ARITY: dict[Ops, int] = {op: n for ops, n in ((UNARY, 1), (BINARY_OPS, 2), (TERNARY, 3)) for op in ops}
_ARITY |= {Ops.CAST: 1, Ops.BITCAST: 1, Ops.GEP: 1, Ops.CONST: 0, Ops.PARAM: 0}


def ast_to_data(root: UOp) -> dict[str, Any]:
    """Convert `root` and all nodes below it to JSON-able data (see the module's docstring). Equal graphs give equal data.

    Raises FormatError for an arg that has no stable form."""
    position: dict[UOp, int] = {}
    nodes: list[list[Any]] = []
    stack: list[tuple[UOp, bool]] = [(root, False)]
    while stack:
        u, ready = stack.pop()
        if u in position:
            continue
        if ready:
            position[u] = len(nodes)
            nodes.append([u.op.value, u.dtype.name, [position[s] for s in u.src], _arg_to_data(u.arg, position)])
            continue
        stack.append((u, True))
        below = (*u.src, *_uops_in(u.arg))
        stack.extend((s, False) for s in reversed(below) if s not in position)
    return {"format": GRAPH_FORMAT, "nodes": nodes}


def data_to_ast(data: object) -> UOp:
    """Rebuild a UOp from the data of `ast_to_data`. Raises FormatError, which names the node, for data that `ast_to_data` does not
    write."""
    if not isinstance(data, dict) or data.get("format") != GRAPH_FORMAT:
        given = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise FormatError(f"expected a kernel AST of format {GRAPH_FORMAT}, found {given!r}; it was written by another version of svod")
    rows = data.get("nodes")
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_NODES:
        raise FormatError(f"expected 1 to {MAX_NODES} nodes in a kernel AST, found {len(rows) if isinstance(rows, list) else rows!r}")
    nodes: list[UOp] = []
    for n, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != 4:
            raise FormatError(f"node {n} of the AST is not [op, dtype, sources, arg]: {row!r:.200}")
        name, dtype_name, sources, arg = row
        op = _OPS.get(name) if isinstance(name, str) else None
        dtype = BY_NAME.get(dtype_name) if isinstance(dtype_name, str) else None
        if op is None or dtype is None:
            raise FormatError(f"node {n} of the AST has an unknown operation or dtype: {name!r:.80}, {dtype_name!r:.80}")
        if not isinstance(sources, list) or not all(type(s) is int and 0 <= s < n for s in sources):
            raise FormatError(f"node {n} ({name}) of the AST reads nodes that do not come before it: {sources!r:.200}")
        if _ARITY.get(op, len(sources)) != len(sources) or (op is Ops.RANGE and not sources):
            raise FormatError(f"node {n} ({name}) of the AST has {len(sources)} sources, expected {_ARITY.get(op, 'an extent')}")
        value = _data_to_arg(arg, nodes, n, 0)
        if op is Ops.CONST and not _is_const_of(value, dtype):
            raise FormatError(f"node {n} of the AST is a {dtype.name} constant with value {value!r:.80}")
        nodes.append(UOp(op, dtype, tuple([nodes[s] for s in sources]), value))
    return nodes[-1]


def _uops_in(arg: Any) -> list[UOp]:
    """List the UOps inside an arg, in order. Recursive, as args are nested at most MAX_ARG_DEPTH deep."""
    if isinstance(arg, UOp):
        return [arg]
    cls = ARG_TYPES.get(type(arg).__name__)
    if cls is type(arg):
        arg = tuple([getattr(arg, f.name) for f in dataclasses.fields(cls)])
    return [u for v in arg for u in _uops_in(v)] if isinstance(arg, tuple) else []


def _arg_to_data(value: Any, position: dict[UOp, int]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else ["f", struct.pack(">d", value).hex()]
    if isinstance(value, tuple):
        return ["t", *(_arg_to_data(v, position) for v in value)]
    if isinstance(value, bytes):
        return ["y", value.hex()]
    if isinstance(value, Ops):
        return ["o", value.value]
    if isinstance(value, DType):
        return ["d", value.name]
    if isinstance(value, UOp):
        return ["u", position[value]]
    if dataclasses.is_dataclass(value) and ARG_TYPES.get(type(value).__name__) is type(value):
        fields = {f.name: _arg_to_data(getattr(value, f.name), position) for f in dataclasses.fields(value)
                  if getattr(value, f.name) != f.default}
        return ["c", type(value).__name__, fields]
    raise FormatError(f"{type(value).__name__} {value!r:.80} cannot be stored as the arg of a UOp: it has no stable form")


def _data_to_arg(data: Any, nodes: list[UOp], n: int, depth: int) -> Any:
    if data is None or type(data) in (bool, int, str):
        return data
    if type(data) is float and math.isfinite(data):
        return data
    if depth < MAX_ARG_DEPTH and type(data) is list and data:
        tag, rest = data[0], data[1:]
        if tag == "t":
            return tuple([_data_to_arg(v, nodes, n, depth + 1) for v in rest])
        if tag == "c" and len(rest) == 2 and type(rest[0]) is str and rest[0] in ARG_TYPES and type(rest[1]) is dict:
            return _data_to_dataclass(ARG_TYPES[rest[0]], rest[1], nodes, n, depth)
        if tag == "u" and len(rest) == 1 and type(rest[0]) is int and 0 <= rest[0] < n:
            return nodes[rest[0]]
        if len(rest) == 1 and type(rest[0]) is str:
            value = _text_to_arg(tag, rest[0], n)
            if value is not None:
                return value
    raise FormatError(f"node {n} of the AST has an arg svod does not write: {data!r:.200}")


def _text_to_arg(tag: Any, text: str, n: int) -> Ops | DType | bytes | float | None:
    """Decode a tagged string to an operation, a dtype, bytes or a float; None for another tag or an unknown name."""
    if tag == "o":
        return _OPS.get(text)
    if tag == "d":
        return BY_NAME.get(text)
    try:
        if tag == "y":
            return bytes.fromhex(text)
        if tag == "f" and len(text) == 16:
            return float(struct.unpack(">d", bytes.fromhex(text))[0])
    except (ValueError, struct.error) as e:
        raise FormatError(f"node {n} of the AST has an arg that is not hexadecimal: {text!r:.80}") from e
    return None


def _data_to_dataclass(cls: type, data: dict[Any, Any], nodes: list[UOp], n: int, depth: int) -> Any:
    known = {f.name for f in dataclasses.fields(cls)}
    if not known.issuperset(data):
        raise FormatError(f"node {n} of the AST: {cls.__name__} has no fields {sorted(map(str, data.keys() - known))}")
    try:
        value = cls(**{k: _data_to_arg(v, nodes, n, depth + 1) for k, v in data.items()})
    except TypeError as e:
        raise FormatError(f"node {n} of the AST: {e}") from e
    if cls is Param and not _is_param(value):
        raise FormatError(f"node {n} of the AST: slot, size and bounds of {value!r} must be integers, slot and size not negative")
    return value


def _is_param(p: Param) -> bool:
    bounds = all(b is None or type(b) is int for b in (p.vmin, p.vmax))
    return type(p.slot) is int and type(p.size) is int and p.slot >= 0 and p.size >= 0 and type(p.constant) is bool and bounds


def _is_const_of(value: Any, dtype: DType) -> bool:
    if dtype.is_float:
        return type(value) is float
    return type(value) is (bool if dtype.kind == "b" else int)
