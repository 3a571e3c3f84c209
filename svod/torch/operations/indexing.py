"""Selection of elements by positions in tensors."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from svod.core.ir.dtype import dtypes
from svod.errors import UnsupportedError
from svod.tensor import Tensor
from svod.tensor.searching import searchsorted
from svod.torch.operations.table import aten, methods

methods("index_select take", widens=False)


@aten("embedding", widens=False)
def embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> Tensor:
    """Rows of `weight` at `indices`."""
    return indices.embedding(weight)


@aten("index.Tensor", "_unsafe_index.Tensor", widens=False)
def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Elements of x at positions in integer tensors, one for each of its first axes; None selects the whole axis."""
    if any(i is not None and i.dtype.kind == "b" for i in indices):
        raise UnsupportedError("index with a mask: the number of chosen elements depends on values")
    return x[tuple([slice(None) if i is None else i for i in indices])]


@aten("gather", widens=False)
def gather(x: Tensor, dim: int, positions: Tensor, sparse_grad: bool = False) -> Tensor:
    """One element along an axis for each position."""
    return x.gather(dim, positions)


@aten("searchsorted.Tensor", "searchsorted.Scalar", widens=False)
def positions_in_sorted(sequence: Tensor, values: Any, out_int32: bool = False, right: bool = False, side: str | None = None,
                        sorter: Tensor | None = None) -> Tensor:
    """The positions at which values would be put into sorted sequences. `sorter`: the order that sorts the sequences."""
    in_order = sequence if sorter is None else sequence.gather(-1, sorter)
    found = searchsorted(in_order, _as_values(values, sequence), right or side == "right")
    return found.cast(dtypes.int32) if out_int32 else found


@aten("bucketize.Tensor", "bucketize.Scalar", widens=False)
def bucketize(values: Any, boundaries: Tensor, out_int32: bool = False, right: bool = False) -> Tensor:
    """The number of the interval between boundaries in which each value lies."""
    return positions_in_sorted(boundaries, values, out_int32, right)


def _as_values(values: Any, sequence: Tensor) -> Tensor:
    return values if isinstance(values, Tensor) else Tensor.full((), values, sequence.dtype)
