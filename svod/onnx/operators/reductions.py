"""Reductions, running sums, losses."""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from svod.core.ir.dtype import dtypes
from svod.onnx.operators.movement import ints
from svod.onnx.registry import Array, Node, axes_in, axis_in, operator
from svod.tensor import Tensor

Reduce = Callable[[Tensor, tuple[int, ...], bool], Tensor]


def reduction(name: str, function: Reduce, exact: bool = False) -> None:
    @operator(f"Reduce{name}", known=("axes",), exact=exact)
    def compute(node: Node, x: Tensor, axes: Array | None = None) -> Tensor:
        wanted = ints(node, "axes", axes)
        keep = bool(node.get("keepdims", 1))
        if not wanted:
            if node.get("noop_with_empty_axes", 0):
                return function(x, (), keep).cast(x.dtype)
            wanted = list(range(x.ndim))
        places = tuple(sorted(axes_in(wanted, x.ndim)))
        return function(x, places, keep).cast(x.dtype)


def extreme(largest: bool) -> Reduce:
    """Over no elements the largest is the type's smallest value."""
    def compute(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
        if any(x.shape[a] == 0 for a in axes):
            shape = [1 if i in axes else n for i, n in enumerate(x.shape)]
            out = Tensor.full(tuple(shape), x.dtype.min if largest else x.dtype.max, x.dtype)
            return out if keep else out.reshape([n for i, n in enumerate(x.shape) if i not in axes])
        return x.max(axes, keep) if largest else x.min(axes, keep)
    return compute


def total(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return x.sum(axes, keep) if axes else x


def average(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    """The mean of integers is the quotient of whole numbers, without its fraction."""
    if not axes or not x.dtype.is_int:
        return x.mean(axes, keep) if axes else x
    wide = x if x.dtype is dtypes.uint64 else x.cast(dtypes.int64)
    return wide.sum(axes, keep).div(max(1, math.prod(x.shape[a] for a in axes)), rounding_mode="trunc")


def real(x: Tensor) -> Tensor:
    """The operand of a function of real numbers: float64 holds integers up to 2⁵³."""
    return x.cast(dtypes.float64) if x.dtype.is_int else x


reduction("Sum", total)
reduction("Mean", average)
reduction("Prod", lambda x, axes, keep: x.prod(axes, keep) if axes else x)
reduction("Max", lambda x, axes, keep: extreme(True)(x, axes, keep) if axes else x, exact=True)
reduction("Min", lambda x, axes, keep: extreme(False)(x, axes, keep) if axes else x, exact=True)
reduction("L1", lambda x, axes, keep: total(x.abs(), axes, keep))
reduction("SumSquare", lambda x, axes, keep: total(x.mul(x), axes, keep))
reduction("L2", lambda x, axes, keep: total(real(x).square(), axes, keep).sqrt())
reduction("LogSum", lambda x, axes, keep: total(real(x), axes, keep).log())
reduction("LogSumExp", lambda x, axes, keep: real(x).logsumexp(axes, keep) if axes else x)


def running(name: str, scan: Callable[[Tensor, int], Tensor], neutral: int) -> None:
    @operator(name, known=("axis",))
    def compute(node: Node, x: Tensor, axis: Array) -> Tensor:
        at = axis_in(int(np.asarray(axis).reshape(-1)[0]), x.ndim)
        t = x.flip(at) if node.get("reverse", 0) else x
        if node.get("exclusive", 0):
            n = t.shape[at]
            pairs = [(1, 0) if i == at else (0, 0) for i in range(t.ndim)]
            t = t.pad(pairs, "constant", neutral).shrink([(0, n) if i == at else None for i in range(t.ndim)])
        out = scan(t, at).cast(x.dtype)
        return out.flip(at) if node.get("reverse", 0) else out


running("CumSum", Tensor.cumsum, 0)
running("CumProd", Tensor.cumprod, 1)


def pooled(name: str, function: Callable[[Tensor, tuple[int, ...]], Tensor]) -> None:
    @operator(name)
    def compute(node: Node, x: Tensor) -> Tensor:
        return function(x, tuple(range(2, x.ndim)))


pooled("GlobalAveragePool", lambda x, axes: x.mean(axes, keepdim=True))
pooled("GlobalMaxPool", lambda x, axes: x.max(axes, keepdim=True))


@operator("GlobalLpPool")
def global_lp_pool(node: Node, x: Tensor) -> Tensor:
    return x.norm(float(node.get("p", 2)), tuple(range(2, x.ndim)), keepdim=True).cast(x.dtype)


# -- losses ----------------------------------------------------------------------------------------------------------------------
@operator("NegativeLogLikelihoodLoss", 12)
def nll_loss(node: Node, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    return likelihood(node, x, target, weight)


def likelihood(node: Node, logs: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """The mean divides by the sum of the weights of the positions that are not ignored."""
    ignored, reduction = node.get("ignore_index"), node.get("reduction", "mean")
    keep = None if ignored is None else target.ne(ignored)
    at = target if keep is None else target.masked_fill(target.eq(ignored), 0)
    loss = logs.gather(1, at.unsqueeze(1).cast("int64")).squeeze(1).neg()
    share = Tensor.ones(*target.shape, dtype=logs.dtype) if weight is None else weight.take(at.cast("int64"), 0)
    if keep is not None:
        share = share.mul(keep.cast(share.dtype))
    loss = loss.mul(share)
    if reduction == "none":
        return loss.cast(logs.dtype)
    total = loss.sum()
    if reduction == "sum":
        return total.cast(logs.dtype)
    return total.div(share.sum()).cast(logs.dtype)


@operator("SoftmaxCrossEntropyLoss", 12)
def cross_entropy(node: Node, x: Tensor, target: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    logs = x.log_softmax(1)
    return likelihood(node, logs, target, weight), logs
