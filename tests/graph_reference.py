"""The meaning of a graph in NumPy: an interpreter of docs/ir.md, section 1, node by node. The oracle of the front end's tests.

It follows the written definitions and shares no code with svod but the node type and the bfloat16 conversion.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from svod.core.graph.buffer import bfloat16_bits_to_float32, buffer_of, float32_to_bfloat16_bits
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.ir.uop import ALU, Ops, UOp

Array = np.ndarray[Any, np.dtype[Any]]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def evaluate_graph(node: UOp, buffers: Mapping[UOp, Array] | None = None) -> Array:
    """The value of a graph node. `buffers` gives the flat content of BUFFERs; the others are read from their storage.

    bfloat16 is computed in float32, rounded to bfloat16 after every node, and returned as float32."""
    values: dict[UOp, Any] = {}
    with np.errstate(all="ignore"):
        for u in node.toposort(gate=lambda n: n.op is not Ops.BUFFER):
            if u.op not in (Ops.UNIQUE, Ops.DEVICE):
                values[u] = _rounded(_value(u, [values[s] for s in u.src if s in values], buffers or {}), u.dtype)
    result = values[node]
    assert isinstance(result, np.ndarray)
    return result


def _rounded(value: Any, dtype: DType) -> Any:
    if dtype == dtypes.bfloat16 and isinstance(value, np.ndarray):
        return bfloat16_bits_to_float32(float32_to_bfloat16_bits(value))
    return value


def _numpy_type(dtype: DType) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype == dtypes.bfloat16 else to_numpy(dtype)


def _value(u: UOp, src: list[Any], buffers: Mapping[UOp, Array]) -> Any:
    kind = _numpy_type(u.dtype) if u.op is not Ops.SINK else np.dtype(np.float32)
    match u.op:
        case Ops.BUFFER:
            flat = buffers[u] if u in buffers else buffer_of(u).array
            return bfloat16_bits_to_float32(flat) if u.dtype == dtypes.bfloat16 and flat.dtype == np.uint16 else flat
        case Ops.CONST:
            return np.array(u.arg, kind)
        case Ops.IOTA:
            return np.arange(u.arg, dtype=kind)
        case Ops.RESHAPE:
            return src[0].reshape(u.arg)
        case Ops.PERMUTE:
            return src[0].transpose(u.arg)
        case Ops.EXPAND:
            return np.broadcast_to(src[0], u.arg)
        case Ops.PAD:
            pads, fill = u.arg
            return np.pad(src[0], pads, constant_values=fill) if pads else src[0]
        case Ops.SHRINK:
            return src[0][tuple(slice(b, e) for b, e in u.arg)]
        case Ops.FLIP:
            return np.flip(src[0], u.arg)
        case Ops.WINDOW:
            return _windows(src[0], u.arg)
        case Ops.GATHER:
            return _gather(src[0], src[1], u.arg)
        case Ops.REDUCE_AXIS:
            return _reduce(u.arg[0], u.arg[1], src, kind)
        case Ops.GEP:
            return src[0][u.arg]
        case Ops.CAST:
            return src[0].astype(kind)
        case Ops.BITCAST:
            return _bitcast(src[0], u.src[0].dtype, u.dtype)
        case Ops.CUSTOM_FUNCTION if u.arg[0] == "CALLBACK":
            function, _, _, several, i = u.arg[1]
            returned = function.call(*src)
            return np.asarray(returned[i] if several else returned)
        case Ops.CUSTOM_FUNCTION:
            return _library_kernel(*u.arg, src, kind).astype(kind)
        case Ops.CONTIGUOUS | Ops.DETACH | Ops.COPY:
            return src[0]
        case Ops.CAT:
            return np.concatenate(src, u.arg)
        case Ops.ASSIGN:
            return _positions(u.src[0]), src[1]
        case Ops.AFTER:
            content = np.array(src[0])
            for positions, value in src[1:]:
                content[positions] = value
            return content
    assert u.op in ALU, f"{u.op} is not a graph operation"
    result = _alu(u.op, src)
    assert result.dtype == kind, (u, result.dtype, kind)
    return result


def _positions(view: UOp) -> Array:
    """The positions in its storage that a view reads."""
    chain = []
    node = view
    while node.op not in (Ops.BUFFER, Ops.AFTER):
        chain.append(node)
        node = node.src[0]
    found = np.arange(_storage_size(node))
    for u in reversed(chain):
        found = np.asarray(_value(u, [found], {}))
    return found


def _storage_size(content: UOp) -> int:
    """The number of elements of the storage under an AFTER."""
    while content.op is Ops.AFTER:
        content = content.src[0]
    return int(content.arg)


def _windows(x: Array, windows: tuple[tuple[int, int, int, int], ...]) -> Array:
    for axis, size, stride, dilation in windows:
        count = (x.shape[axis] - dilation * (size - 1) - 1) // stride + 1
        columns = [np.take(x, k * dilation + stride * np.arange(count), axis) for k in range(size)]
        x = np.stack(columns, -1)
    return x


def _gather(x: Array, index: Array, axis: int) -> Array:
    n = x.shape[axis]
    inside = (index >= 0) & (index < n)
    taken = np.take(x, np.where(inside, index, 0).astype(np.int64), axis)
    mask = inside.reshape(index.shape + (1,) * (x.ndim - axis - 1))
    return np.where(mask, taken, np.zeros((), x.dtype))


_REDUCERS = {"ADD": np.add, "MUL": np.multiply, "MAX": np.maximum, "MIN": np.minimum, "AND": np.bitwise_and, "OR": np.bitwise_or}


def _reduce(combiner: str, axes: tuple[int, ...], src: list[Array], kind: np.dtype[Any]) -> Any:
    if combiner in _REDUCERS:
        # floats are summed in float64, because the oracle should add no error of its own
        wide = np.dtype(np.float64) if kind.kind == "f" else kind
        return _REDUCERS[combiner].reduce(src[0].astype(wide), axis=axes, keepdims=True).astype(kind)
    value, index = src
    rest = [a for a in range(value.ndim) if a not in axes]
    moved = [np.transpose(s, [*rest, *axes]).reshape([value.shape[a] for a in rest] + [-1]) for s in (value, index)]
    at = (np.argmax if combiner == "ARGMAX" else np.argmin)(moved[0], -1)[..., None]
    shape = tuple(1 if a in axes else n for a, n in enumerate(value.shape))
    return tuple(np.take_along_axis(m, at, -1).reshape(shape) for m in moved)


def _bitcast(x: Array, old: DType, new: DType) -> Array:
    bits = float32_to_bfloat16_bits(x) if old == dtypes.bfloat16 else np.ascontiguousarray(x).reshape(x.shape)
    return bfloat16_bits_to_float32(bits.view(np.uint16)) if new == dtypes.bfloat16 else bits.view(to_numpy(new))


def _library_kernel(name: str, options: tuple[Any, ...], src: list[Array], kind: np.dtype[Any]) -> Array:
    """Position by position, as the table in svod/core/graph/library_kernel.py says."""
    x = src[0]
    if name == "SCAN":
        combiner, columns = options[0], []
        for i in range(x.shape[1]):
            so_far = x[:, :i + 1]
            if combiner.startswith("ARG"):
                columns.append(i - (np.argmax if combiner == "ARGMAX" else np.argmin)(so_far[:, ::-1], 1))
            elif combiner == "LOGADDEXP":
                columns.append(np.logaddexp.reduce(so_far.astype(np.float64), axis=1))
            else:
                # values are combined in the dtype of the result
                wide = so_far.astype(np.float64 if kind.kind == "f" else kind)
                columns.append(_REDUCERS[combiner].reduce(wide, axis=1, dtype=wide.dtype))
        return np.stack(columns, 1)
    if name == "SCATTER":
        out = x.copy()
        places, values = np.broadcast_arrays(src[1], src[2])
        places, values = (np.broadcast_to(a, (x.shape[0], a.shape[1], x.shape[2])) for a in (places, values))
        for o, j, k in np.ndindex(*places.shape):
            at = int(places[o, j, k])
            at = at + x.shape[1] if at < 0 else at
            if 0 <= at < x.shape[1]:
                new = values[o, j, k]
                out[o, at, k] = new if options[0] == "SET" else _REDUCERS[options[0]](out[o, at, k], new)
        return out
    descending = options[-1]
    first = options[0] if name == "TOPK" else x.shape[1]

    def order(value: Any) -> tuple[bool, Any]:
        nan = bool(value != value)
        number = 0 if nan else int(value) if x.dtype.kind != "f" else float(value)
        return (not nan, -number) if descending else (nan, number)
    positions = np.array([sorted(range(x.shape[1]), key=lambda i, row=row: order(row[i]))[:first] for row in x])  # type: ignore[misc]
    return np.take_along_axis(x, positions, 1) if name == "SORT" else positions


_FUNCTIONS: dict[Ops, Any] = {
    Ops.NEG: np.negative, Ops.ABS: np.abs, Ops.SQRT: np.sqrt, Ops.FLOOR: np.floor, Ops.CEIL: np.ceil, Ops.TRUNC: np.trunc,
    Ops.ROUND: np.rint, Ops.NOT: np.invert, Ops.EXP: np.exp, Ops.EXP2: np.exp2, Ops.LOG: np.log, Ops.LOG2: np.log2, Ops.SIN: np.sin,
    Ops.COS: np.cos, Ops.TANH: np.tanh, Ops.ADD: np.add, Ops.SUB: np.subtract, Ops.MUL: np.multiply, Ops.FDIV: np.true_divide,
    Ops.MAX: np.maximum, Ops.MIN: np.minimum, Ops.POW: np.power, Ops.AND: np.bitwise_and, Ops.OR: np.bitwise_or,
    Ops.XOR: np.bitwise_xor, Ops.SHL: np.left_shift, Ops.SHR: np.right_shift, Ops.CMPLT: np.less, Ops.CMPLE: np.less_equal,
    Ops.CMPEQ: np.equal, Ops.CMPNE: np.not_equal, Ops.IDIV: np.floor_divide, Ops.MOD: np.remainder,
}


def _alu(op: Ops, src: list[Array]) -> Array:
    if op is Ops.WHERE:
        return np.where(src[0], src[1], src[2])
    if op is Ops.MULACC:
        return np.asarray(src[0] * src[1] + src[2])
    if op is Ops.RECIPROCAL:
        return np.asarray(np.true_divide(np.ones((), src[0].dtype), src[0]))
    if op is Ops.ERF:
        return np.asarray(_erf(src[0]).astype(src[0].dtype)) if src[0].size else src[0]
    if op in (Ops.IDIV, Ops.MOD):
        # a target may trap on these, so the front end must never emit them
        assert not (src[1] == 0).any(), f"{op} by zero"
        assert not (src[1].dtype.kind == "i" and ((src[1] == -1) & (src[0] == np.iinfo(src[0].dtype).min)).any()), f"{op} overflows"
    if op in (Ops.SHL, Ops.SHR):
        assert ((src[1] >= 0) & (src[1] < src[0].dtype.itemsize * 8)).all(), f"{op} by an amount outside the width"
    return np.asarray(_FUNCTIONS[op](*src))
