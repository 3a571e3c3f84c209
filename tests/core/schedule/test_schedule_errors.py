"""A node that cannot be scheduled is refused with its name, at any position in the graph."""
from __future__ import annotations

import numpy as np
import pytest

from svod.core.graph import graph
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.schedule import create_schedule
from svod.errors import ScheduleError, ShapeError, SvodError
from svod.tensor import Tensor

NO_VALUES = (Ops.CALL, Ops.END, Ops.RANGE, Ops.STORE, Ops.LOAD, Ops.INDEX, Ops.STAGE, Ops.PARAM, Ops.SPECIAL,
             Ops.MSELECT, Ops.PROGRAM, Ops.LINEAR, Ops.SOURCE, Ops.BINARY)


@pytest.mark.parametrize("op", NO_VALUES, ids=lambda op: op.value)
def test_what_is_no_value_of_a_graph_is_named(op: Ops) -> None:
    x = Tensor(np.ones(4, np.float32)).uop
    alien = UOp(op, dtypes.float32, (x,))
    with pytest.raises(ShapeError, match=f"^{op.value} has no shape: it is not a value of the graph level"):
        create_schedule(graph.sink(alien))
    for above in (UOp(Ops.ADD, dtypes.float32, (x, alien)), UOp(Ops.CONTIGUOUS, dtypes.float32, (alien,)),
                  UOp(Ops.AFTER, dtypes.float32, (x, UOp(Ops.ASSIGN, dtypes.float32, (x, alien)))),
                  UOp(Ops.RESHAPE, dtypes.float32, (alien,), (2, 2))):
        with pytest.raises(SvodError, match=op.value):
            create_schedule(graph.sink(above))


def test_an_assign_is_read_through_what_it_leaves() -> None:
    x, y = graph.buffer(dtypes.float32, 4), graph.buffer(dtypes.float32, 4)
    assign = UOp(Ops.ASSIGN, dtypes.float32, (x, x))
    for src in ((x,), (x, y), (y, assign)):
        malformed = UOp(Ops.AFTER, dtypes.float32, src)
        with pytest.raises(ScheduleError, match="AFTER names a BUFFER"):
            create_schedule(graph.sink(malformed))
    for used in (assign, graph.reshape(assign, (2, 2)), UOp(Ops.ADD, dtypes.float32, (y, assign))):
        with pytest.raises(ScheduleError, match="ASSIGN"):
            create_schedule(graph.sink(used))
