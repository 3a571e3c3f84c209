"""Reductions, running sums, losses."""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from svod.core.ir.dtype import dtypes
from svod.onnx.operators.movement import ints
from svod.onnx.registry import Array, OnnxNode, axes_in, axis_in, operator
from svod.tensor import Tensor

NOTHING_IGNORED = -(1 << 31)       # no class has this number
Reduce = Callable[[Tensor, tuple[int, ...], bool], Tensor]


def reduction(name: str, function: Reduce, exact: bool = False) -> None:
    @operator(f"Reduce{name}", known=("axes",), exact=exact)
    def compute(node: OnnxNode, x: Tensor, axes: Array | None = None) -> Tensor:
        wanted = ints(node, "axes", axes)
        keep = bool(node.get("keepdims", 1))
        if not wanted:
            if node.get("noop_with_empty_axes", 0):
                return function(x, (), keep).cast(x.dtype)
            wanted = list(range(x.ndim))
        places = tuple(sorted(axes_in(wanted, x.ndim)))
        return function(x, places, keep).cast(x.dtype)


def extreme(largest: bool) -> Reduce:
    """Make the reduction to the largest or smallest element. Without elements, the maximum is the type's smallest value."""
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
    """The mean along axes. For integers, it is the truncated quotient."""
    if not axes or not x.dtype.is_int:
        return x.mean(axes, keep) if axes else x
    wide = x if x.dtype is dtypes.uint64 else x.cast(dtypes.int64)
    return wide.sum(axes, keep).div(max(1, math.prod(x.shape[a] for a in axes)), rounding_mode="trunc")


def real(x: Tensor) -> Tensor:
    """Convert integers to float64, which represents them up to 2⁵³, for a function of real numbers; floats stay unchanged."""
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
    def compute(node: OnnxNode, x: Tensor, axis: Array) -> Tensor:
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


operator("GlobalAveragePool")(lambda node, x: x.mean(tuple(range(2, x.ndim)), keepdim=True))
operator("GlobalMaxPool")(lambda node, x: x.max(tuple(range(2, x.ndim)), keepdim=True))


@operator("GlobalLpPool")
def global_lp_pool(node: OnnxNode, x: Tensor) -> Tensor:
    return x.norm(float(node.get("p", 2)), tuple(range(2, x.ndim)), keepdim=True).cast(x.dtype)


# -- losses ----------------------------------------------------------------------------------------------------------------------
@operator("NegativeLogLikelihoodLoss", 12)
def nll_loss(node: OnnxNode, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    return x.nll_loss(target, weight, node.get("ignore_index", NOTHING_IGNORED), node.get("reduction", "mean"))


@operator("SoftmaxCrossEntropyLoss", 12)
def cross_entropy(node: OnnxNode, x: Tensor, target: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    logs = x.log_softmax(1)
    return nll_loss(node, logs, target, weight), logs
