"""Selection of elements by positions in tensors."""
from __future__ import annotations

from collections.abc import Sequence

from svod.errors import UnsupportedError
from svod.tensor import Tensor
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
