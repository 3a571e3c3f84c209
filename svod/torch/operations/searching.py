"""Searches of values in sorted sequences, and bags of embeddings, which search the bag of each index."""
from __future__ import annotations

from typing import Any

from svod.core.ir.dtype import dtypes
from svod.errors import UnsupportedError
from svod.tensor import Tensor, where
from svod.tensor.searching import searchsorted
from svod.torch.operations.table import aten


@aten("searchsorted.Tensor", "searchsorted.Scalar", widens=False)
def positions_in_sorted(sequence: Tensor, values: Any, out_int32: bool = False, right: bool = False, side: str | None = None,
                        sorter: Tensor | None = None) -> Tensor:
    """The positions at which values would be put into sorted sequences. `sorter`: the order that sorts the sequences."""
    in_order = sequence if sorter is None else sequence.gather(-1, sorter)
    found = searchsorted(in_order, values, right or side == "right")
    return found.cast(dtypes.int32) if out_int32 else found


@aten("bucketize.Tensor", "bucketize.Scalar", widens=False)
def bucketize(values: Any, boundaries: Tensor, out_int32: bool = False, right: bool = False) -> Tensor:
    """The number of the interval between boundaries in which each value lies."""
    return positions_in_sorted(boundaries, values, out_int32, right)


@aten("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = 0, sparse: bool = False,
                  per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int = -1) -> tuple[Any, ...]:
    """The sum (mode 0), mean (1) or maximum (2) of rows of `weight` over bags of indices, which begin at `offsets`. Results for a backward
    pass are not computed."""
    bags, width, count = offsets.shape[0] - include_last_offset, weight.shape[1], indices.shape[0]
    bag = searchsorted(offsets, Tensor.arange(count, dtype=offsets.dtype), right=True).sub(1)
    if padding_idx >= 0:
        bag = where(indices.eq(padding_idx), bags, bag)         # out of range: left out
    rows = weight.take(indices, 0)
    if per_sample_weights is not None:
        rows = rows.mul(per_sample_weights.unsqueeze(1))
    result = Tensor.full((bags, width), 0, weight.dtype)
    if mode == 2:
        result = result.scatter_reduce(0, bag.unsqueeze(1).expand(count, width), rows, "amax", include_self=False)
    else:
        result = result.index_add(0, bag, rows)
    if mode == 1:
        result = result.div(Tensor.full((bags,), 0, weight.dtype).scatter_add(0, bag, 1).maximum(1).unsqueeze(1))
    return result, _for_backward, _for_backward, _for_backward


def _for_backward() -> Tensor:
    raise UnsupportedError("results of embedding_bag for a backward pass")
