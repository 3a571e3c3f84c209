"""Translates a graph node by node, from values of its inputs to values of its outputs, as a lazy graph of svod."""
from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from svod.core.ir.origin import scope
from svod.errors import SvodError, UnsupportedError
from svod.onnx import operators
from svod.onnx.known import MOST_KNOWN, Known, differs
from svod.onnx.precision import Halves
from svod.onnx.reader import (
    Arrays,
    OnnxError,
    all_nodes,
    attributes_of,
    describe_missing,
    domain_of,
    in_order,
    needed_for,
    reads,
    subgraphs,
    type_name,
)
from svod.onnx.registry import OnnxNode, Operator, find
from svod.onnx.schemas import type_mistake
from svod.onnx.values import DIFFERS, Value, is_known, is_narrow_integer, tensor_of
from svod.system.forksafe import remake_after_fork
from svod.tensor import Tensor

log = logging.getLogger("svod.onnx")


class Walk:
    """Translates the graphs of one model. It keeps arrays of weights, so that a weight becomes the same tensor in every translation."""

    def __init__(self, model: onnx.ModelProto, opsets: dict[str, int], arrays: Arrays, wanted: Sequence[str] | None = None) -> None:
        """Prepare translations. `wanted`: the outputs that they will compute; by default any value of the graph."""
        self.model, self.opsets, self.arrays = model, opsets, arrays
        self._order: dict[int, tuple[onnx.GraphProto, list[onnx.NodeProto]]] = {}
        self.nodes = self._in_order(model.graph) if wanted is None else self.needed(model.graph, set(wanted))
        self._weights: dict[int, Tensor] = {}       # key: the id of the model's array
        self._own: set[int] = set()
        # The key is the id of a message. The message is kept alive, too, because protobuf makes new objects for unreferenced messages.
        self._initial: dict[int, tuple[onnx.GraphProto, dict[str, Value]]] = {}
        self._attributes: dict[int, tuple[onnx.NodeProto, dict[str, Any]]] = {}
        self._chosen: dict[int, bool] = {}      # branches chosen for the current translation
        self.known, self.halves = Known(), Halves()
        self._branches = 0
        self._draws: Counter[int] = Counter()
        self.run_number: Tensor | None = None
        self._lock = threading.RLock()
        remake_after_fork(self, "_lock", threading.RLock)

    # -- before anything is computed -----------------------------------------------------------------------------------
    def missing(self) -> list[tuple[str, int, int, str, str]]:
        """The operators that svod lacks: name, opset, number of nodes, name of the first node, reason."""
        count: Counter[tuple[str, str]] = Counter()
        first: dict[tuple[str, str], str] = {}
        for node in (n for outer in self.nodes for n in (outer, *(i for sub in subgraphs(outer) for i in all_nodes(sub)))):
            domain = domain_of(node)
            if self._operator(node) is None:
                count[domain, node.op_type] += 1
                first.setdefault((domain, node.op_type), node.name or (node.output[0] if node.output else ""))
        return [(f"{d}.{op}" if d else op, self.opsets.get(d, 1), n, first[d, op], "") for (d, op), n in count.items()]

    def lacking(self) -> list[str]:
        """The first output of each node that svod cannot compute, or that has such a node in a subgraph."""
        return [node.output[0] for node in self.nodes
                if any(self._operator(n) is None for n in (node, *(inner for sub in subgraphs(node) for inner in all_nodes(sub))))]

    def check(self, what: str) -> None:
        """Raise UnsupportedError, which lists every operator that svod lacks, if there are any. `what`: the model's name."""
        missing = self.missing()
        if missing:
            raise UnsupportedError(describe_missing(missing, what))

    def _operator(self, node: onnx.NodeProto) -> Operator | None:
        domain = domain_of(node)
        assert operators.FILES, "they enter the table when they are imported"
        # without an entry for a domain, a model uses the first version of its operator set
        return find(domain, node.op_type, self.opsets.get(domain, 1))

    def deciding_inputs(self) -> set[str]:
        """The names of the inputs whose values determine shapes, axes or branches; these values are part of a plan's key. Only scalars
        and lists of integers qualify: with images, each would need its own plan."""
        deciding: set[str] = set()
        direct: set[str] = set()
        self._collect_deciding(self.nodes, deciding, direct)
        return {i.name for i in self.model.graph.input if i.name in deciding and _may_decide(i, i.name in direct)}

    def _collect_deciding(self, nodes: Sequence[onnx.NodeProto], deciding: set[str], direct: set[str]) -> None:
        """Collect in `deciding` the names of the values that must be known, from the last node to the first. `direct` gets those that an
        operator names in `known`; the others are only needed to compute these."""
        for node in reversed(nodes):
            for sub in subgraphs(node):
                self._collect_deciding(self._in_order(sub), deciding, direct)
            operator = self._operator(node)
            needed = operator.known if operator is not None else ()
            for i, name in enumerate(node.input):
                if name and i in needed:
                    deciding.add(name)
                    direct.add(name)
            if node.op_type in ("Shape", "Size"):
                continue        # a tensor's shape and type are known without its values
            if any(o in deciding for o in node.output):
                deciding.update(n for n in node.input if n)

    # -- walking ------------------------------------------------------------------------------------------------------
    def run(self, inputs: Mapping[str, Value], outputs: Sequence[str] | None = None, chosen: Mapping[int, bool] | None = None,
            number: Tensor | None = None, device: str | None = None) -> list[Value]:
        """Compute the values of the model's outputs, or of the named ones, from values of its inputs. `chosen`: for each branch with a
        computed condition, by its number in the translation, whether it is taken. `number`: the run's number, uint32 (1,), for nodes
        with a seed. `device`: the device that computes the CPU's tensors; None: the CPU. Raises Undecided for a branch that is not
        chosen yet. Threads take turns."""
        graph = self.model.graph
        with self._lock:
            self._chosen, self._branches, self.known, self.halves = dict(chosen or {}), 0, Known(), Halves(device)
            self.run_number, self._draws = number, Counter()
            values: dict[str, Value] = {**self._initializers(graph), **inputs}
            wanted = [o.name for o in graph.output] if outputs is None else list(outputs)
            self._compute(graph, values, set(wanted))
            return [_value(values, name) for name in wanted]

    def at_branch(self) -> tuple[int, bool | None]:
        """(number of the branch that the translation has reached, the choice: True for `then`, None if not chosen yet)."""
        self._branches += 1
        return self._branches, self._chosen.get(self._branches)

    def turn(self, node: onnx.NodeProto) -> int:
        """The number of earlier calls for this node in the current translation; counts this call."""
        self._draws[id(node)] += 1
        return self._draws[id(node)] - 1

    @property
    def has_seeds(self) -> bool:
        """Whether a node has a seed for its random numbers."""
        return any(a.name == "seed" for node in self.nodes for n in (node, *(i for s in subgraphs(node) for i in all_nodes(s)))
                   for a in n.attribute)

    def subgraph(self, graph: onnx.GraphProto, operands: Sequence[Value], outer: Mapping[str, Value]) -> list[Value]:
        """The outputs of a node's subgraph, which may read values of the graphs around it."""
        values = {**outer, **self._initializers(graph), **{i.name: v for i, v in zip(graph.input, operands, strict=True)}}
        wanted = [o.name for o in graph.output]
        self._compute(graph, values, set(wanted))
        return [_value(values, name) for name in wanted]

    def _compute(self, graph: onnx.GraphProto, values: dict[str, Value], wanted: set[str]) -> None:
        for node in self.needed(graph, wanted):
            results = self._node(node, values)
            values.update((name, r) for name, r in zip(node.output, results, strict=False) if name)

    def needed(self, graph: onnx.GraphProto, wanted: set[str]) -> list[onnx.NodeProto]:
        """The nodes that the wanted values depend on, in order."""
        return needed_for(wanted, self._in_order(graph))

    def _in_order(self, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
        """The nodes of a graph in an order in which they can be computed."""
        if id(graph) not in self._order:
            self._order[id(graph)] = graph, in_order(graph)
        return self._order[id(graph)][1]

    def needed_inputs(self, wanted: Sequence[str]) -> set[str]:
        """The names of the graph's inputs that the wanted values depend on."""
        read = {name for node in self.needed(self.model.graph, set(wanted)) for name in reads(node)} | set(wanted)
        return {i.name for i in self.model.graph.input if i.name in read}

    def _initializers(self, graph: onnx.GraphProto) -> dict[str, Value]:
        _, known_values = self._initial.get(id(graph), (graph, None))
        if known_values is None:
            known_values = dict[str, Value](self.arrays.by_name(graph.initializer))
            for sparse in graph.sparse_initializer:
                known_values[sparse.values.name] = dense(sparse, self.arrays)
            self._initial[id(graph)] = graph, known_values
            self._owned(known_values)
        return dict(known_values)

    def _node(self, proto: onnx.NodeProto, values: dict[str, Value]) -> list[Value]:
        operator = self._operator(proto)
        assert operator is not None, "check() saw to it"
        _, attributes = self._attributes.get(id(proto), (proto, None))
        if attributes is None:
            attributes = attributes_of(proto, self.arrays)
            self._attributes[id(proto)] = proto, attributes
            self._owned(attributes)
        domain = domain_of(proto)
        asked = [bool(o) for o in proto.output]
        node = OnnxNode(proto.op_type, proto.name or (proto.output[0] if proto.output else ""), domain, self.opsets.get(domain, 1),
                        attributes, asked, _Inside(self, values, proto))
        operands = [_value(values, n) if n else None for n in proto.input]
        while operands and operands[-1] is None:
            operands.pop()
        if mistake := type_mistake(node.op, domain, node.version, operands):
            raise OnnxError(f"{node} of {_shapes(operands)}: {mistake}")
        try:
            with scope(node.name.strip("/").replace("/", ".") or node.op):
                made = self.halves.computed(node, operator, self._operands(node, operator, operands))
        except UnsupportedError as e:
            e.node = proto.output[0]        # the outermost of nested nodes is the one that another runtime can compute
            raise
        except OnnxError:
            raise
        except (SvodError, TypeError, ValueError, LookupError, ArithmeticError, AssertionError) as e:
            if any(map(differs, operands)):
                raise UnsupportedError(f"{node} of {_shapes(operands)} cannot be computed for {DIFFERS} ({e})") from e
            raise OnnxError(f"{node} of {_shapes(operands)} cannot be computed: {type(e).__name__}: {e}") from e
        return [self.known.settled(r) for r in made] if _are_known(proto, operands) else made

    def _operands(self, node: OnnxNode, operator: Operator, operands: Sequence[Value]) -> list[Value]:
        """The operands in the form that the operator's function takes."""
        taken: list[Value] = []
        for i, o in enumerate(operands):
            value: Value = self.known.value(o) if i in operator.known else None
            if value is None and o is not None and not operator.raw:
                if i in operator.known:
                    raise UnsupportedError(f"{node}: operand {i} decides about shapes, and is computed from "
                                           + (f"{DIFFERS}" if differs(o) else "data that is not known while the model is loaded; "
                                              "load(…, outputs=[…]) leaves the nodes behind it out"))
                value = self.tensor(o, operator.narrow)
            taken.append(o if value is None else value)
        return taken

    def tensor(self, value: Value, narrow: bool = False) -> Tensor:
        """Convert a value to a tensor; each array of the model becomes the same tensor at each use. `narrow`: integers of 2 and 4 bits
        become int8; without it they are refused."""
        if not is_known(value):
            return tensor_of(value)
        is_narrow = is_narrow_integer(value)
        kept = None if is_narrow and not narrow else self._weights.get(id(value))
        made = tensor_of(value.astype(np.int8) if is_narrow and narrow else value) if kept is None else kept
        if kept is None and id(value) in self._own:
            self._weights[id(value)] = made
        if value.size <= MOST_KNOWN:
            self.known.note(made)
        return made

    def _owned(self, values: Mapping[str, Value]) -> None:
        """Record arrays that live as long as the model, so that each is converted to a tensor only once."""
        self._own.update(id(v) for v in values.values() if isinstance(v, np.ndarray) and v.size > 1)


class _Inside:
    """The interface by which a node's operator computes the node's subgraphs, with the values around it."""

    def __init__(self, walk: Walk, values: Mapping[str, Value], proto: onnx.NodeProto) -> None:
        self.walk, self.values, self.proto = walk, values, proto

    def __call__(self, graph: onnx.GraphProto, *operands: Value) -> list[Value]:
        return self.walk.subgraph(graph, operands, self.values)

    def at_branch(self) -> tuple[int, bool | None]:
        return self.walk.at_branch()

    def run_number(self) -> Tensor:
        """The number of the run, uint32 of one element. Raises UnsupportedError if runs are not counted."""
        if self.walk.run_number is None:
            raise UnsupportedError("a node with a seed draws numbers of a run, and runs are not counted here")
        return self.walk.run_number

    def turn(self) -> int:
        """The number of earlier loop iterations in which the node drew numbers in this translation."""
        return self.walk.turn(self.proto)

    def known(self, value: Value) -> np.ndarray[Any, Any] | None:
        """The array that a value is known to be; None if it is computed when the plan runs."""
        return self.walk.known.value(value)


def _value(values: Mapping[str, Value], name: str) -> Value:
    """The value with a name. Raises UnsupportedError for an optional output that svod's function of the operator does not return."""
    if name not in values:
        raise UnsupportedError(f"{name!r} is an output that svod's form of its operator does not have")
    return values[name]


def _may_decide(info: onnx.ValueInfoProto, is_direct: bool) -> bool:
    """Whether the values of an input may be part of a plan's key."""
    if info.type.WhichOneof("value") != "tensor_type":
        return False
    rank, kind = len(info.type.tensor_type.shape.dim), type_name(info.type.tensor_type.elem_type)
    return rank == 0 or (rank == 1 and (is_direct or not kind.startswith(("float", "bfloat"))))


def _are_known(node: onnx.NodeProto, operands: Sequence[Value]) -> bool:
    """Whether the results of a node are computed during translation: its operands are known and small. Not for nodes with subgraphs; the
    nodes in these are tested one by one."""
    return (all(o is None or is_known(o) for o in operands) and sum(o.size for o in operands if o is not None) <= MOST_KNOWN
            and not any(True for _ in subgraphs(node)))


def _shapes(operands: Sequence[Value]) -> str:
    return ", ".join("nothing" if o is None else f"a list of {len(o)}" if isinstance(o, list) else f"{tuple(o.shape)}" for o in operands)


def dense(sparse: onnx.SparseTensorProto, arrays: Arrays) -> np.ndarray[Any, Any]:
    """Convert a sparse tensor to an array."""
    values, indices, shape = arrays.of(sparse.values), arrays.of(sparse.indices), tuple(sparse.dims)
    out = np.zeros(shape, values.dtype)
    if indices.ndim == 1:
        out.reshape(-1)[indices] = values
    else:
        out[tuple(indices.T)] = values
    return out
