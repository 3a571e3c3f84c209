"""The graph node of an array: a BUFFER over its memory in the array's shape, made for every array that enters a graph, so made fast."""
from __future__ import annotations

from svod.core.graph import graph
from svod.core.graph.buffer import Array, Buffer
from svod.core.graph.traits import HAS_BUFFERS
from svod.core.ir.dtype import DType
from svod.core.ir.uop import Ops, UOp


def node_over(array: Array, dtype: DType, *, shared: bool, given: Array | None) -> UOp:
    """A new BUFFER over `array`, reshaped to its shape: C-contiguous, aligned, of the NumPy type that holds `dtype`, with an element or
    more. `shared`: others than svod can write to the array; `given`: they can by this array and its views only."""
    node = graph.buffer(dtype, array.size)
    buffer = Buffer(dtype, array.size, array=array.reshape(-1))
    buffer.given, buffer.shared = given, shared
    node.remarks.update(buffer=buffer, shape=(array.size,), traits=HAS_BUFFERS)
    if array.shape == (array.size,):
        return node
    view = UOp(Ops.RESHAPE, dtype, (node,), array.shape)
    view.remarks.update(shape=array.shape, traits=HAS_BUFFERS)    # the results of `shape_of` and `traits_of`
    return view
