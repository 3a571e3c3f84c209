"""Sequences and optionals: lists and None while the graph is walked. They cost nothing when the plan runs."""
from __future__ import annotations

import numpy as np

from svod.errors import UnsupportedError
from svod.onnx.registry import Node, operator
from svod.onnx.values import Value, is_known, tensor_of
from svod.tensor import Tensor


def position(node: Node, at: Value, default: int) -> int:
    if at is None:
        return default
    if not is_known(at):
        raise UnsupportedError(f"{node}: the position in a sequence is computed from data")
    return int(at.reshape(-1)[0])


@operator("SequenceEmpty", 11, raw=True)
def empty(node: Node) -> tuple[Value, ...]:
    return ([],)


@operator("SequenceConstruct", 11, raw=True)
def construct(node: Node, *values: Value) -> tuple[Value, ...]:
    return (list(values),)


@operator("SequenceInsert", 11, raw=True, known=("at",))
def insert(node: Node, sequence: Value, value: Value, at: Value = None) -> tuple[Value, ...]:
    place = position(node, at, len(sequence))
    place = place + len(sequence) if place < 0 else place
    return ([*sequence[:place], value, *sequence[place:]],)


@operator("SequenceErase", 11, raw=True, known=("at",))
def erase(node: Node, sequence: Value, at: Value = None) -> tuple[Value, ...]:
    place = position(node, at, -1) % len(sequence)
    return ([v for i, v in enumerate(sequence) if i != place],)


@operator("SequenceAt", 11, raw=True, known=("place",))
def at(node: Node, sequence: Value, place: Value) -> Value:
    return sequence[position(node, place, 0)]


@operator("SequenceLength", 11, raw=True)
def length(node: Node, sequence: Value) -> Value:
    return np.array(len(sequence), np.int64)


@operator("ConcatFromSequence", 11, raw=True)
def concat(node: Node, sequence: Value) -> Tensor:
    tensors, axis = [tensor_of(v) for v in sequence], node.need("axis")
    return Tensor.stack(tensors, axis) if node.get("new_axis", 0) else Tensor.cat(tensors, axis)


@operator("SplitToSequence", 11, raw=True, known=("sizes",))
def split(node: Node, x: Value, sizes: Value = None) -> tuple[Value, ...]:
    t, axis = tensor_of(x), node.get("axis", 0)
    if sizes is None:
        parts = t.split(1, axis)
        return ([p if node.get("keepdims", 1) else p.squeeze(axis) for p in parts],)
    if not is_known(sizes):
        raise UnsupportedError(f"{node}: the sizes of the parts are computed from data")
    wanted = int(sizes) if sizes.ndim == 0 else [int(n) for n in sizes]
    return (list(t.split(wanted, axis)),)


@operator("SequenceMap", 17, raw=True)
def sequence_map(node: Node, sequence: Value, *others: Value) -> tuple[Value, ...]:
    body = node.need("body")
    results = [node.walk(body, v, *(o[i] if isinstance(o, list) else o for o in others)) for i, v in enumerate(sequence)]
    return tuple([r[k] for r in results] for k in range(len(body.output)))


@operator("Optional", 15, raw=True)
def optional(node: Node, value: Value = None) -> tuple[Value, ...]:
    return (value,)


@operator("OptionalHasElement", 15, raw=True)
def has_element(node: Node, value: Value = None) -> Value:
    return np.array(value is not None)


@operator("OptionalGetElement", 15, raw=True)
def get_element(node: Node, value: Value) -> tuple[Value, ...]:
    if value is None:
        raise UnsupportedError(f"{node} of an optional that is absent")
    return (value,)


