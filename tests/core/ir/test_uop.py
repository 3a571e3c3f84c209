"""Nodes are one object for one content, also when they are copied and pickled, however deep their graph is."""
from __future__ import annotations

import copy
import pickle

from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp


def test_copies_and_pickles_of_a_deep_graph() -> None:
    u = UOp(Ops.DEFINE_VAR, dtypes.index, (), ("n", 0, 5))
    for i in range(5000):
        u = u * i + u
    assert pickle.loads(pickle.dumps(u)) is u and copy.copy(u) is u and copy.deepcopy([u])[0] is u
