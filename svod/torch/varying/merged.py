"""Tensors with axes that PyTorch has merged, although the extent of an inner one differs from call to call.

    view x (s0, s1, 64) as (s0*s1, 64)      MergedAxes: x itself, whose first two axes stand for one
    addmm(bias, that, w)                    MergedAxes: the product of (s0, s1, 64) with w
    view that as (s0, s1, 3, 64)            a view of (s0, s1, 192): an ordinary tensor again

Memory has the strides of the largest sizes, so that no view merges such axes. Linear layers merge them only to split them again. Any
other operation gets a copy.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from svod.core.graph import graph
from svod.core.ir.variable import is_symbolic, upper
from svod.errors import ShapeError
from svod.tensor import Tensor

VIEWS_OF_ATEN = {f"aten.{name}.default" for name in ("view", "reshape", "_unsafe_view", "view_copy", "_reshape_alias")}
_ROWS = {"aten.mm.default": 0, "aten.addmm.default": 1}      # the number of the operand whose rows may be merged


class MergedAxes:
    """A tensor that represents one with merged axes: axis i of the latter consists of `parts[i]` ≥ 1 consecutive axes of `tensor`."""

    def __init__(self, tensor: Tensor, parts: Sequence[int]) -> None:
        self.tensor, self.parts = tensor, tuple(parts)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape with merged axes."""
        return merged_shape(self.tensor.shape, self.parts)

    def copy(self) -> Tensor:
        """The tensor with merged axes, in memory of its own."""
        return _gathered(self.tensor, self.shape)


def merged_shape(shape: Sequence[Any], parts: Sequence[int]) -> tuple[Any, ...]:
    """Multiply consecutive extents of a shape: `parts[i]` of them make axis i of the result."""
    return tuple([math.prod(shape[end - n:end]) for n, end in zip(parts, itertools.accumulate(parts), strict=True)])


def reshaped(x: Tensor | MergedAxes, size: Sequence[Any]) -> Tensor | MergedAxes:
    """View a tensor, or one with merged axes, in another shape. If there is no such view, the result has merged axes or is a copy."""
    tensor = x.tensor if isinstance(x, MergedAxes) else x
    try:
        return tensor.reshape(*size)
    except ShapeError:
        runs = _runs(tensor.shape, size)
    if runs is None:
        return _gathered(tensor, size)
    kept = [run if is_symbolic(run[1:]) else (n,) for run, n in zip(runs, size, strict=True)]
    return MergedAxes(tensor.reshape(*itertools.chain(*kept)), list(map(len, kept)))


def _runs(old: Sequence[Any], new: Sequence[Any]) -> list[tuple[Any, ...]] | None:
    """Groups of consecutive extents of `old`, one for each axis of `new`, with its extent as their product; None if an axis of `old` is
    split."""
    runs, i = [], 0
    for n in new:
        first, product = i, None
        while product != n and i < len(old):
            product, i = old[i] * (1 if product is None else product), i + 1
        if product != n:
            return None
        runs.append(tuple(old[first:i]))
    return runs if i == len(old) else None


def through(name: str, operation: Any, args: Sequence[Any]) -> tuple[Sequence[Any], tuple[int, ...] | None]:
    """Replace operands with merged axes by ordinary tensors. Returns the operands, and the `parts` of the result's axes if these stay
    merged: in a product whose rows are merged, and in an elementwise operation whose operands are merged in the same way. For other
    operations, returns copies of the operands, and None."""
    merged = [a for a in args if isinstance(a, MergedAxes)]
    if name in _ROWS and merged == [args[_ROWS[name]]] and merged[0].parts[1:] == (1,):
        stays = True
    else:
        stays = (bool(merged) and torch.Tag.pointwise in operation.tags and all(m.parts == merged[0].parts for m in merged)
                 and all(_is_beside(a, merged[0].parts) for a in args if isinstance(a, Tensor)))
    if not stays:
        return without_merged(args), None
    return [a.tensor if isinstance(a, MergedAxes) else a for a in args], merged[0].parts


def _is_beside(t: Tensor, parts: Sequence[int]) -> bool:
    """Whether broadcasting aligns the axes of a tensor with unmerged last axes of the result only."""
    return t.ndim <= len(parts) and all(n == 1 for n in parts[len(parts) - t.ndim:])


def without_merged(value: Any) -> Any:
    """Replace tensors with merged axes by copies, also in lists and dicts."""
    if isinstance(value, MergedAxes):
        return value.copy()
    if isinstance(value, dict):
        return {k: without_merged(v) for k, v in value.items()}
    return [without_merged(v) for v in value] if isinstance(value, (list, tuple)) else value


def _gathered(x: Tensor, size: Sequence[Any]) -> Tensor:
    """A copy of a tensor in another shape of as many elements. Each element is read from its position in memory, which has the strides
    of the largest sizes."""
    old, new = x.shape, tuple(size)
    least = min(len(old), len(new))
    first = next((i for i in range(least) if old[i] != new[i]), least)
    behind = next((i for i in range(least - first) if old[-1 - i] != new[-1 - i]), least - first)
    inner, wanted = old[first:len(old) - behind], new[first:len(new) - behind]
    number: Any = 0         # number of the element among the inner axes
    for i, n in enumerate(wanted):
        ones = (1,) * (len(wanted) - 1 - i)
        number = number * n + Tensor.arange(n).reshape(-1 if not ones else n, *ones)
    at = number * 0         # number of the element in memory: zeros of the wanted shape, also if there are no inner axes
    for i, n in enumerate(inner):
        after = math.prod(inner[i + 1:])
        at, number = at * upper(n) + number // after, number % after
    whole = graph.pad(x.uop, [(0, upper(n) - n if first <= i < len(old) - behind else 0) for i, n in enumerate(old)])
    rows = Tensor.from_uop(whole).reshape(*old[:first], math.prod(map(upper, inner)), *old[len(old) - behind:])
    return rows.take(at, first)
