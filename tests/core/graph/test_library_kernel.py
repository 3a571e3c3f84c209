"""Library kernels in the graph: shapes and errors, scheduling, reference results and costs."""
from __future__ import annotations

import numpy as np
import pytest

from svod.core.cost.op_count import count_operations
from svod.core.graph import graph
from svod.core.graph.shapes import shape_of
from svod.core.graph.storage import base_of
from svod.core.ir.dtype import dtypes
from svod.core.ir.serialize import ast_to_data, data_to_ast
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.kernel import Kernel
from svod.core.schedule.schedule import create_schedule
from svod.core.spec.evaluate import evaluate
from svod.errors import DTypeError, ShapeError, UnsupportedError

F32, I64 = dtypes.float32, dtypes.int64


def buffer(*shape: int, dtype: dtypes = F32) -> UOp:  # type: ignore[valid-type]
    return graph.reshape(graph.buffer(dtype, int(np.prod(shape))), shape)  # type: ignore[arg-type]


def test_shapes_and_errors() -> None:
    x = buffer(2, 5, 3)
    assert shape_of(graph.library_kernel("SCAN", ("ADD",), F32, x)) == (2, 5, 3)
    assert shape_of(graph.library_kernel("TOPK", (2, True), I64, buffer(4, 7))) == (4, 2)
    at, value = buffer(2, 9, 3, dtype=I64), buffer(2, 9, 3)  # type: ignore[arg-type]
    assert shape_of(graph.library_kernel("SCATTER", ("SET",), F32, x, at, value)) == (2, 5, 3)
    for error, match, name, options, operands in (
            (UnsupportedError, "SCAN, SORT, ARGSORT, TOPK, SCATTER", "FOLD", (), (x,)),
            (UnsupportedError, "SCAN with 'SUB'", "SCAN", ("SUB",), (x,)),
            (ShapeError, r"SCAN of \(4, 7\)", "SCAN", ("ADD",), (buffer(4, 7),)),
            (ShapeError, "k=8", "TOPK", (8, True), (buffer(4, 7),)),
            (ShapeError, "SCATTER into", "SCATTER", ("SET",), (x, at, buffer(2, 8, 3))),
            (DTypeError, "SCATTER of float32", "SCATTER", ("SET",), (x, value, value))):
        with pytest.raises(error, match=match):
            graph.library_kernel(name, options, F32, *operands)  # type: ignore[arg-type]


def test_a_library_kernel_is_a_kernel_of_its_own_between_buffers() -> None:
    """Views and constants among its operands are stored first, its readers read its buffer, and its AST survives serialization."""
    x, y = buffer(6, 4), buffer(1, 4, 6)
    moved = graph.reshape(graph.permute(x, (1, 0)), (1, 4, 6))
    zeros = graph.full((1, 4, 6), 0, dtypes.int32)
    scattered = graph.library_kernel("SCATTER", ("ADD",), F32, y, zeros, moved)
    calls = create_schedule(graph.sink(graph.alu(Ops.NEG, scattered))).calls
    assert [c.name_hint for c in calls] == ["fill", "copy", "scatter", "elementwise"]
    call = calls[2]
    assert call.deps == (0, 1)
    kernel = Kernel(call.ast)
    assert kernel.library_kernel is not None and data_to_ast(ast_to_data(call.ast)) is call.ast
    work = count_operations(call.ast)
    assert work.flops == 24 and work.bytes_written == 96 and work.bytes_read == 3 * 96
    assert all(Kernel(c.ast).library_kernel is None for i, c in enumerate(calls) if i != 2)


def test_a_library_kernel_reads_what_was_assigned() -> None:
    x, new = buffer(1, 6, 1), buffer(1, 6, 1)
    content = graph.assign(x, new)
    written = graph.reshape(graph.shrink(new, ((0, 1), (0, 3), (0, 1))), (3,))
    part = graph.shrink(graph.assign(graph.shrink(base_of(x), ((2, 5),)), written), ((2, 5),))
    calls = create_schedule(graph.sink(graph.library_kernel("SCAN", ("ADD",), F32, graph.reshape(content, (1, 6, 1))))).calls
    assert [c.name_hint for c in calls] == ["copy", "scan"] and calls[1].deps == (0,) and calls[1].args[1] is base_of(x)
    calls = create_schedule(graph.sink(graph.library_kernel("SCAN", ("ADD",), F32, graph.reshape(part, (1, 3, 1))))).calls
    assert [c.name_hint for c in calls] == ["copy", "scan"] and calls[1].args[1] is base_of(x) and calls[1].offsets == (0, 2)


def test_sums_are_exact_where_asked() -> None:
    """The sum 2^24 + 1 + 1 + … stays at 2^24 in float32; the exact evaluation does not."""
    values = np.array([2.0 ** 24, 1, 1, 1, 1], np.float32)
    ast = create_schedule(graph.sink(graph.library_kernel("SCAN", ("ADD",), F32, buffer(1, 5, 1)))).calls[0].ast
    args = [np.zeros(5, np.float32), values]
    assert evaluate(ast, args)[0][-1] == 2.0 ** 24 + 4
    assert evaluate(ast, args, exact=False)[0][-1] == 2.0 ** 24
