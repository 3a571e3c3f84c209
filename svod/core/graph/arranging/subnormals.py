"""Probabilities of an attention that would be subnormal numbers become zeros: some processors take a hundred times as long to multiply with
such a number.

    e = exp(s - max(s))                 e' = where(s - max(s) >= log(least normal number), e, 0)
    sum(e / sum(e) · v)                 sum(e' / sum(e') · v)

The largest e of a sum is 1, so that the others count less than their share of it is rounded. Exponentials that anything else than such sums
reads keep their values.
"""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache

import numpy as np

from svod.core.graph.graph import alu, broadcast
from svod.core.graph.shapes import shape_of
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.ir.origin import inherit_origin
from svod.core.ir.uop import MOVEMENT, Ops, UOp

_OF_STATISTICS = Ops.RESHAPE, Ops.EXPAND
_AS_FACTOR = MOVEMENT | {Ops.CAST, Ops.CONTIGUOUS}      # users of a probability that pass it on


def without_subnormal_weights(sink: UOp, wanted: Callable[[UOp], bool]) -> UOp:
    """Set subnormal probabilities of the attentions in a graph to zero, for each exponential with `wanted(exponential)` true."""
    order = sink.toposort()
    exponentials = [u for u in order if _is_of_softmax(u) and wanted(u)]
    if not exponentials:
        return sink
    users = defaultdict[UOp, list[UOp]](list)
    for u in order:
        for s in u.src:
            users[s].append(u)
    weights = {e for e in exponentials if _only_weighs(e, users)}
    if not weights:
        return sink
    done: dict[UOp, UOp] = {}
    for u in order:
        src = tuple([done[s] for s in u.src])
        done[u] = u if src == u.src else u.replace(src=src)
        if done[u] is not u:
            inherit_origin(done[u], u)
        if u in weights:
            done[u] = _without_subnormals(done[u])
    return done[sink]


def _is_of_softmax(u: UOp) -> bool:
    """Whether a node is the exponential of values less their maximum along some axes."""
    if u.op is not Ops.EXP or u.dtype not in (dtypes.float32, dtypes.float64) or u.src[0].op is not Ops.SUB:
        return False
    values, most = u.src[0].src
    while most.op in _OF_STATISTICS:
        most = most.src[0]
    return most.op is Ops.REDUCE_AXIS and most.arg[0] == "MAX" and most.src[0] is values


def _only_weighs(e: UOp, users: dict[UOp, list[UOp]]) -> bool:
    """Whether all that reads an exponential are its sums, and sums of products with it, of which there is one at least."""
    is_weight, open_, seen = False, [e], {e}
    while open_:
        u = open_.pop()
        for user in users[u]:
            if user.op is Ops.REDUCE_AXIS and user.arg[0] == "ADD":
                is_weight = is_weight or u.op is Ops.MUL
            elif user.op in _AS_FACTOR or user.op is Ops.MUL or (user.op is Ops.FDIV and user.src[0] is u):
                if user not in seen:
                    seen.add(user)
                    open_.append(user)
            else:
                return False
    return is_weight


def _without_subnormals(e: UOp) -> UOp:
    x = e.src[0]

    def constant(value: float) -> UOp:
        return broadcast(UOp.const(e.dtype, value), shape_of(e))
    return alu(Ops.WHERE, alu(Ops.CMPLE, constant(_log_of_least_normal(e.dtype)), x), e, constant(0.0))


@cache
def _log_of_least_normal(dtype: DType) -> float:
    return math.log(np.finfo(to_numpy(dtype)).tiny)
