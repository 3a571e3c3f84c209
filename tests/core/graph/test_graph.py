"""Shapes and validation of graph nodes, normalisation by the constructors, and nodes without elements."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from svod.core.graph import graph
from svod.core.graph.buffer import Buffer, buffer_from_numpy, buffer_of
from svod.core.graph.shapes import broadcast_shapes, shape_of
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.errors import DeviceError, DTypeError, ShapeError
from tests.graph_reference import evaluate_graph


def data(*shape: int) -> UOp:
    return graph.reshape(graph.buffer(dtypes.float32, int(np.prod(shape))), shape)


def test_shapes() -> None:
    x = data(2, 3, 4)
    index = graph.cast(data(5, 1), dtypes.int32)
    for node, shape in ((x, (2, 3, 4)), (graph.reshape(x, (6, -1)), (6, 4)), (graph.permute(x, (2, 0, 1)), (4, 2, 3)),
                        (graph.expand(data(1, 3), (5, 3)), (5, 3)), (graph.pad(x, ((1, 0), (0, 0), (2, 3))), (3, 3, 9)),
                        (graph.shrink(x, ((0, 2), (1, 2), (0, 4))), (2, 1, 4)), (graph.flip(x, (0, -1)), (2, 3, 4)),
                        (graph.window(x, ((2, 2, 2, 1), (1, 2, 1, 2))), (2, 1, 2, 2, 2)), (graph.gather(x, index, 1), (2, 5, 1, 4)),
                        (graph.reduce_axis(x, "ADD", (0, -1)), (1, 3, 1)), (graph.arg_reduce(x, x, "ARGMAX", (1,)), (2, 1, 4)),
                        (graph.alu(Ops.ADD, x, x), (2, 3, 4)), (graph.iota(7), (7,)), (graph.full((2, 0), 1, dtypes.bool), (2, 0)),
                        (graph.contiguous(graph.flip(x, 0)), (2, 3, 4)), (graph.detach(x), (2, 3, 4)), (graph.assign(x, x), (24,)),
                        (graph.cat((x, data(2, 1, 4), data(2, 0, 4)), 1), (2, 4, 4)),
                        (graph.copy(x, "CUDA"), (2, 3, 4)), (UOp.const(dtypes.int8, 3), ())):
        assert shape_of(node) == shape


def test_a_deep_graph_needs_no_recursion() -> None:
    x = data(3)
    y = x
    for _ in range(5000):
        y = UOp(Ops.NEG, dtypes.float32, (y,))
    assert shape_of(y) == (3,)


@pytest.mark.parametrize(("make", "match"), [
    (lambda x: graph.reshape(x, (5,)), r"reshape of shape \(2, 3\) to \(5,\)"), (lambda x: graph.reshape(x, (4, -1)), "work out"),
    (lambda x: graph.permute(x, (0,)), "permute"), (lambda x: graph.permute(x, (0, 2)), "axis 2"), (lambda x: graph.expand(x, (2, 6)),
    "expand"),
    (lambda x: graph.expand(x, (1, 2, 3)), "expand"), (lambda x: graph.pad(x, ((0, -1), (0, 0))), "pad of"),
    (lambda x: graph.pad(x, ((0, 1),)), "pad of"),
    (lambda x: graph.shrink(x, ((1, 0), (0, 3))), "shrink"), (lambda x: graph.flip(x, (0, 0)), "twice"),
    (lambda x: graph.window(x, ((1, 4, 1, 1),)), "does not fit axis 1"), (lambda x: graph.window(x, ((1, 2, 1, 1), (1, 2, 1, 1))),
    "distinct"),
    (lambda x: graph.window(x, ((1, 2, 0, 1),)), "positive"), (lambda x: graph.alu(Ops.ADD, x, data(2, 1)),
    r"ADD of shapes \(2, 3\) and \(2, 1\)"),
    (lambda x: graph.gather(x, graph.iota(2), 2), "axis 2"), (lambda x: graph.assign(x, data(3, 2)), "assign"),
    (lambda x: shape_of(UOp(Ops.REDUCE_AXIS, x.dtype, (x, x), ("ADD", (0,)))), "takes 1 operand"),
    (lambda x: shape_of(UOp(Ops.REDUCE_AXIS, x.dtype, (x,), ("ADD", (1, 0)))), "ascending"), (lambda x: shape_of(graph.sink(x)),
    "SINK has no shape"),
    (lambda x: broadcast_shapes("add", (2, 3), (3, 2)), r"add of shapes \(2, 3\) and \(3, 2\)"),
])
def test_malformed_nodes_are_refused_by_name(make: Callable[[UOp], object], match: str) -> None:
    with pytest.raises(ShapeError, match=match):
        make(data(2, 3))


@pytest.mark.parametrize("make", [
    lambda x: graph.alu(Ops.ADD, x, graph.cast(x, dtypes.int32)), lambda x: graph.alu(Ops.WHERE, x, x, x),
    lambda x: graph.bitcast(x, dtypes.int8),
    lambda x: graph.gather(x, x, 0)])
def test_dtypes_must_fit(make: Callable[[UOp], object]) -> None:
    with pytest.raises(DTypeError):
        make(data(2, 3))


def test_constructors_drop_what_changes_nothing() -> None:
    x = data(2, 3)
    assert graph.reshape(x, (2, 3)) is x and graph.permute(x, (0, 1)) is x and graph.expand(x, (2, 3)) is x
    assert graph.pad(x, ((0, 0), (0, 0))) is x and graph.shrink(x, ((0, 2), (0, 3))) is x and graph.flip(x, ()) is x
    assert graph.cast(x, dtypes.float32) is x and graph.reduce_axis(x, "ADD", ()) is x
    assert graph.permute(graph.permute(x, (1, 0)), (1, 0)) is x
    assert graph.reshape(graph.reshape(x, (6,)), (2, 3)) is x
    assert graph.flip(data(1, 3), 0).op is Ops.RESHAPE
    assert graph.shrink(graph.shrink(x, ((1, 2), (0, 3))), ((0, 1), (1, 2))) is graph.shrink(x, ((1, 2), (1, 2)))


def test_nodes_without_elements_are_constants() -> None:
    x = data(2, 3)
    none = graph.shrink(x, ((0, 0), (0, 3)))
    for node in (none, graph.alu(Ops.ADD, none, none), graph.permute(none, (1, 0)), graph.reshape(none, (3, 0)),
                 graph.cast(none, dtypes.int8),
                 graph.reduce_axis(none, "MAX", (0,)), graph.pad(none, ((1, 1), (0, 0)), 5), graph.gather(none, graph.iota(2), 0),
                 graph.expand(data(1, 3), (0, 3)), graph.contiguous(none)):
        assert not list(node.walk(Ops.BUFFER))
    assert (evaluate_graph(graph.pad(none, ((1, 1), (0, 0)), 5)) == 5).all()
    assert (evaluate_graph(graph.reduce_axis(none, "MUL", (0,))) == 1).all()
    assert (evaluate_graph(graph.reduce_axis(none, "MIN", (0,))) == np.inf).all()
    with pytest.raises(ShapeError, match="no element"):
        graph.arg_reduce(none, none, "ARGMAX", (0,))


def test_buffers() -> None:
    assert graph.buffer(dtypes.int8, 3) is not graph.buffer(dtypes.int8, 3)
    node = graph.buffer(dtypes.float64, 5)
    storage = buffer_of(node)
    assert buffer_of(node) is storage and not storage.is_allocated and storage.nbytes == 40
    assert storage.address % 64 == 0 and storage.is_allocated
    array = np.arange(4, dtype=np.int32)
    shared = buffer_of(buffer_from_numpy(array, dtypes.int32))
    assert np.shares_memory(shared.array, array) and not shared.read_only
    array.flags.writeable = False
    assert buffer_of(buffer_from_numpy(array, dtypes.int32)).read_only
    assert not np.shares_memory(buffer_of(buffer_from_numpy(array, dtypes.int64)).array, array)
    with pytest.raises(DeviceError, match="memory for 4 elements"):
        shared.bind(np.zeros(3, np.int32))
    with pytest.raises(DeviceError, match="no storage"):
        buffer_of(graph.iota(3))
    assert Buffer(dtypes.int8, 3, "CUDA").device == "CUDA"
