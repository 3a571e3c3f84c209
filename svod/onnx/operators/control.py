"""Branches, loops, sequences and optionals. Known conditions and counts are decided during translation. Sequences are Python lists and
absent optionals None during translation, so they cost nothing when the plan runs."""
from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import onnx

from svod.errors import UnsupportedError
from svod.onnx.registry import Array, OnnxNode, operator
from svod.onnx.values import Undecided, Value, dtype_of, is_known, shape_of, tensor_of
from svod.tensor import Tensor, where

log = logging.getLogger("svod.onnx")

MOST_TURNS, MANY_TURNS = 1000, 100


@operator("If", raw=True, known=("condition",))
def branch(node: OnnxNode, condition: Value) -> tuple[Value, ...]:
    if is_known(condition):
        return tuple(node.walk(node.need("then_branch" if bool(condition.reshape(-1)[0]) else "else_branch")))
    number, chosen = node.walk.at_branch()
    if chosen is not None:
        return tuple(node.walk(node.need("then_branch" if chosen else "else_branch")))
    # compute both branches and select each element, if possible
    try:
        yes, no = node.walk(node.need("then_branch")), node.walk(node.need("else_branch"))
    except (Undecided, UnsupportedError):       # an unsupported operation in a branch matters only if the branch is taken
        raise Undecided(number, condition) from None
    if not all(map(_is_alike, yes, no)):
        raise Undecided(number, condition)
    return tuple(where(condition.reshape(()), tensor_of(a), tensor_of(b)) for a, b in zip(yes, no, strict=True))


def _is_alike(a: Value, b: Value) -> bool:
    """Whether two values are tensors of the same shape and type."""
    if any(isinstance(v, list) or v is None for v in (a, b)):
        return False
    return shape_of(a) == shape_of(b) and dtype_of(a) is dtype_of(b)


@operator("Loop", raw=True, known=("count", "condition"))
def loop(node: OnnxNode, count: Value = None, condition: Value = None, *carried: Value) -> tuple[Value, ...]:
    """Unroll the loop: each iteration is a copy of the body. If the condition depends on data, all iterations up to the limit are
    computed, and an iteration's state replaces the one before as long as the condition holds."""
    body, collected = node.need("body"), len(node.need("body").output) - 1 - len(carried)
    if count is not None and not is_known(count):
        raise UnsupportedError(f"{node}: the number of its turns is computed from data")
    most = MOST_TURNS + 1 if count is None else int(count.reshape(-1)[0])
    go: Value = np.array(True) if condition is None else condition
    state, kept, turn = list(carried), [list[Value]() for _ in range(collected)], 0
    while turn < most and _may_go_on(go):
        if not is_known(go) and (count is None or collected):
            raise UnsupportedError(f"{node}: whether it goes on is computed from data, and it "
                                   + ("has no limit of turns" if count is None else "collects something in each turn"))
        if turn == MOST_TURNS:
            raise UnsupportedError(f"{node} takes more than {MOST_TURNS} turns, each of which is a copy of its graph")
        then, *results = node.walk(body, np.array(turn, np.int64), np.array(True), *state)
        settled = node.walk.known(then)
        then = then if settled is None else settled
        if is_known(go):
            state, go = results[:len(carried)], then
        else:
            state, go = _chosen(node, go, results, state), tensor_of(go).reshape(()).logical_and(tensor_of(then).reshape(()))
        for values, value in zip(kept, results[len(carried):], strict=True):
            values.append(value)
        turn += 1
    if turn > MANY_TURNS:
        log.warning("%s is unrolled: %d copies of its graph", node, turn)
    return (*state, *(stacked(node, values, i) for values, i in zip(kept, body.output[1 + len(carried):], strict=True)))


def _may_go_on(condition: Value) -> bool:
    return not is_known(condition) or bool(condition.reshape(-1)[0])


def _chosen(node: OnnxNode, condition: Value, new: Sequence[Value], old: Sequence[Value]) -> list[Value]:
    """Select the new state if the condition holds, else the old one."""
    if not all(map(_is_alike, new, old)):
        raise UnsupportedError(f"{node}: whether it goes on is computed from data, and its state changes its shape or type")
    return [where(tensor_of(condition).reshape(()), tensor_of(a), tensor_of(b)) for a, b in zip(new, old, strict=True)]


def stacked(node: OnnxNode, values: Sequence[Value], declared: onnx.ValueInfoProto) -> Value:
    """Stack the values collected in the iterations along a new first axis. Without an iteration, the result has the declared shape and
    type."""
    if not values:
        return nothing_of(node, declared)
    if all(is_known(v) for v in values):
        return np.stack(values)
    return Tensor.stack([tensor_of(v) for v in values], 0)


def nothing_of(node: OnnxNode, declared: onnx.ValueInfoProto) -> Array:
    """An array of a declared type and shape with an empty first axis. Undeclared sizes become 0."""
    tensor = declared.type.tensor_type
    if declared.type.WhichOneof("value") != "tensor_type" or not tensor.HasField("shape"):
        raise UnsupportedError(f"{node} takes no turn, and its body does not declare the shape of {declared.name!r}")
    sizes = [d.dim_value if d.HasField("dim_value") else 0 for d in tensor.shape.dim]
    return np.zeros((0, *sizes), onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))


@operator("Scan", 9, raw=True)
def scan(node: OnnxNode, *operands: Value) -> tuple[Value, ...]:
    body, count = node.need("body"), node.need("num_scan_inputs")
    return scanned(node, body, list(operands[:-count]), list(operands[-count:]), 0)


@operator("Scan", 8, raw=True)
def scan_old(node: OnnxNode, lengths: Value, *operands: Value) -> tuple[Value, ...]:
    """Run `scan` for each element of a batch axis in front of the scanned one, as in opset 8."""
    if lengths is not None:
        raise UnsupportedError(f"{node} with lengths for each batch")
    body, count = node.need("body"), node.need("num_scan_inputs")
    results: list[list[Value]] = []
    for b in range(shape_of(operands[-1])[0]):
        one = [tensor_of(o)[b] for o in operands]
        results.append(list(scanned(node, body, one[:-count], one[-count:], 0)))
    return tuple(Tensor.stack([tensor_of(r[i]) for r in results], 0) for i in range(len(results[0])))


def scanned(node: OnnxNode, body: onnx.GraphProto, state: list[Value], inputs: list[Value], first: int) -> tuple[Value, ...]:
    axes, directions = node.get("scan_input_axes") or [0] * len(inputs), node.get("scan_input_directions") or [0] * len(inputs)
    sequences = [tensor_of(v).movedim(a, 0) for v, a in zip(inputs, axes, strict=True)]
    turns = sequences[0].shape[0]
    if turns > MOST_TURNS:
        raise UnsupportedError(f"{node} takes {turns} turns, each of which is a copy of its graph; {MOST_TURNS} are made")
    collected: list[list[Value]] = []
    for turn in range(turns):
        at = [s[turns - 1 - turn if d else turn] for s, d in zip(sequences, directions, strict=True)]
        results = node.walk(body, *state, *at)
        count = len(state)
        state = results[:count]
        collected.append(results[count:])
    outputs: list[Value] = []
    declared = body.output[len(state):]
    kinds = node.get("scan_output_directions") or [0] * len(declared)
    places = node.get("scan_output_axes") or [0] * len(declared)
    for i, (reverse, axis) in enumerate(zip(kinds, places, strict=True)):
        values = [tensor_of(c[i]) for c in collected]
        if not values:
            outputs.append(np.moveaxis(nothing_of(node, declared[i]), 0, axis))
            continue
        outputs.append(Tensor.stack(list(reversed(values)) if reverse else values, 0).movedim(0, axis))
    return (*state, *outputs)


# -- sequences and optionals ----------------------------------------------------------------------------------------------------
def position(node: OnnxNode, at: Value, default: int) -> int:
    if at is None:
        return default
    if not is_known(at):
        raise UnsupportedError(f"{node}: the position in a sequence is computed from data")
    return int(at.reshape(-1)[0])


@operator("SequenceEmpty", 11, raw=True)
def empty(node: OnnxNode) -> tuple[Value, ...]:
    return ([],)


@operator("SequenceConstruct", 11, raw=True)
def construct(node: OnnxNode, *values: Value) -> tuple[Value, ...]:
    return (list(values),)


@operator("SequenceInsert", 11, raw=True, known=("at",))
def insert(node: OnnxNode, sequence: Value, value: Value, at: Value = None) -> tuple[Value, ...]:
    place = position(node, at, len(sequence))
    place = place + len(sequence) if place < 0 else place
    return ([*sequence[:place], value, *sequence[place:]],)


@operator("SequenceErase", 11, raw=True, known=("at",))
def erase(node: OnnxNode, sequence: Value, at: Value = None) -> tuple[Value, ...]:
    place = position(node, at, -1) % len(sequence)
    return ([v for i, v in enumerate(sequence) if i != place],)


@operator("SequenceAt", 11, raw=True, known=("place",))
def at(node: OnnxNode, sequence: Value, place: Value) -> Value:
    return sequence[position(node, place, 0)]


@operator("SequenceLength", 11, raw=True)
def length(node: OnnxNode, sequence: Value) -> Value:
    return np.array(len(sequence), np.int64)


@operator("ConcatFromSequence", 11, raw=True)
def concat(node: OnnxNode, sequence: Value) -> Tensor:
    tensors, axis = [tensor_of(v) for v in sequence], node.need("axis")
    return Tensor.stack(tensors, axis) if node.get("new_axis", 0) else Tensor.cat(tensors, axis)


@operator("SplitToSequence", 11, raw=True, known=("sizes",))
def split(node: OnnxNode, x: Value, sizes: Value = None) -> tuple[Value, ...]:
    t, axis = tensor_of(x), node.get("axis", 0)
    if sizes is None:
        parts = t.split(1, axis)
        return ([p if node.get("keepdims", 1) else p.squeeze(axis) for p in parts],)
    if not is_known(sizes):
        raise UnsupportedError(f"{node}: the sizes of the parts are computed from data")
    wanted = int(sizes) if sizes.ndim == 0 else [int(n) for n in sizes]
    return (list(t.split(wanted, axis)),)


@operator("SequenceMap", 17, raw=True)
def sequence_map(node: OnnxNode, sequence: Value, *others: Value) -> tuple[Value, ...]:
    body = node.need("body")
    results = [node.walk(body, v, *(o[i] if isinstance(o, list) else o for o in others)) for i, v in enumerate(sequence)]
    return tuple([r[k] for r in results] for k in range(len(body.output)))


@operator("Optional", 15, raw=True)
def optional(node: OnnxNode, value: Value = None) -> tuple[Value, ...]:
    return (value,)


@operator("OptionalHasElement", 15, raw=True)
def has_element(node: OnnxNode, value: Value = None) -> Value:
    return np.array(value is not None)


@operator("OptionalGetElement", 15, raw=True)
def get_element(node: OnnxNode, value: Value) -> tuple[Value, ...]:
    if value is None:
        raise UnsupportedError(f"{node} of an optional that is absent")
    return (value,)


