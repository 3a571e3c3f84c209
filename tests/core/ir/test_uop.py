"""Nodes: equal content is one object, also after copying and pickling graphs of any depth."""
from __future__ import annotations

import _thread
import copy
import operator
import pickle

import pytest

from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp


def test_copies_and_pickles_of_a_deep_graph() -> None:
    u = UOp(Ops.DEFINE_VAR, dtypes.index, (), ("n", 0, 5))
    for i in range(5000):
        u = u * i + u
    assert pickle.loads(pickle.dumps(u)) is u and copy.copy(u) is u and copy.deepcopy([u])[0] is u


def test_an_interrupt_while_nodes_die_is_not_lost() -> None:
    """The interrupt arrives before the nodes are freed, and freeing them runs no Python code that could receive and lose it."""
    nodes = [UOp.const(dtypes.int32, 1_000_003 + i) for i in range(100)]
    with pytest.raises(KeyboardInterrupt):
        list(map(operator.call, (_thread.interrupt_main, nodes.clear)))
    assert not nodes


def test_a_node_that_died_makes_room_for_an_equal_one() -> None:
    key = UOp.const(dtypes.int32, 1_000_003).key
    first = UOp.const(dtypes.int32, 1_000_003)
    del first
    again = UOp.const(dtypes.int32, 1_000_003)
    assert again is UOp.const(dtypes.int32, 1_000_003) and again.key == key
