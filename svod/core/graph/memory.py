"""Construction of graph nodes over NumPy arrays; it runs for every array that enters a graph, so it has to be fast."""
from __future__ import annotations

from svod.core.graph import graph
from svod.core.graph.buffer import Array, Buffer
from svod.core.graph.traits import HAS_BUFFERS
from svod.core.ir.dtype import DType
from svod.core.ir.uop import Ops, UOp


def node_over(array: Array, dtype: DType, *, shared: bool, given: Array | None) -> UOp:
    """Make a BUFFER over the memory of `array`, reshaped to its shape. `array`: C-contiguous, aligned, of the NumPy type of `dtype`, with
    at least one element. `shared`: whether code outside svod can write to its memory. `given`: the only array, with its views, through
    which such code can write; None if there is no such array."""
    node = graph.buffer(dtype, array.size)
    buffer = Buffer(dtype, array.size, array=array.reshape(-1))
    buffer.given, buffer.shared = given, shared
    node.remarks.update(buffer=buffer, shape=(array.size,), traits=HAS_BUFFERS)
    if array.shape == (array.size,):
        return node
    view = UOp(Ops.RESHAPE, dtype, (node,), array.shape)
    view.remarks.update(shape=array.shape, traits=HAS_BUFFERS)    # the results of `shape_of` and `traits_of`
    return view
