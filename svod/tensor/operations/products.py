"""Sums of products by index notation, diagonals, distances."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from svod.core.graph.shapes import broadcast_shapes, normalize_axes
from svod.core.ir.dtype import dtypes, promote
from svod.errors import ShapeError, UnsupportedError
from svod.tensor.base import Scalar
from svod.tensor.operations.elementwise import Operand
from svod.tensor.operations.linalg import Linalg
from svod.tensor.precision import rounds_once

ProductsT = TypeVar("ProductsT", bound="Products")


class Products(Linalg):
    """The method einsum and its special cases."""

    __slots__ = ()

    @classmethod
    def einsum(cls, equation: str, *operands: Operand) -> Self:
        """Sum products by index notation, as numpy.einsum: 'ij,jk->ik'. '...' stands for axes that are broadcast, and a repeated letter in
        a term for a diagonal. An axis of extent 1 is broadcast to the extent that its letter has in another operand.

        Operands are multiplied from left to right. An axis is summed as soon as no later term needs it, so the work does not exceed one
        loop over all letters. Products are accumulated as in `matmul`."""
        tensors = [cls(o) if not isinstance(o, cls) else o for o in
                   (operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands)]
        terms, result = _parse(equation, [t.shape for t in tensors])
        return tensors[0]._summed_products(terms, result, *tensors[1:])

    @rounds_once
    def _summed_products(self, terms: Sequence[str], result: str, *others: Operand) -> Self:
        """Compute einsum of self and other tensors, whose axes are named by the letters of `terms`."""
        product: Self | None = None
        letters = ""
        for i, (tensor, term) in enumerate(zip((self, *others), terms, strict=True)):
            later = set(result).union(*terms[i + 1:])
            single: tuple[Self, str] = tensor._diagonals(term)
            if product is None:
                product, letters = _summed(*single, later)
            else:
                product, letters = _product((product, letters), _summed(*single, later | set(letters)), later)
        assert product is not None
        return product.permute(tuple(map(letters.index, result)))

    def _diagonals(self, term: str) -> tuple[Self, str]:
        """(the diagonal of axes that share a letter of `term`, the term with each letter once)."""
        tensor = self
        for letter in dict.fromkeys(term):
            while term.count(letter) > 1:
                first = term.index(letter)
                second = term.index(letter, first + 1)
                tensor = tensor.diagonal(0, first, second)      # the new axis is the last one
                term = term[:first] + term[first + 1:second] + term[second + 1:] + letter
        return tensor, term

    def tensordot(self, other: Operand, dims: int | Sequence[Sequence[int]] = 2) -> Self:
        """Sum products over the last `dims` axes of self and the first `dims` axes of other, or over the axes given for each."""
        b = self._as_tensor(other)
        if isinstance(dims, int):
            left, right = list(range(self.ndim - dims, self.ndim)), list(range(dims))
        else:
            left, right = ([t._axis("tensordot", a) for a in axes] for t, axes in zip((self, b), dims, strict=True))
        if len(left) != len(right) or any(a < 0 or c >= b.ndim or self.shape[a] != b.shape[c] for a, c in zip(left, right, strict=False)):
            raise ShapeError(f"tensordot of {self.shape} and {b.shape} over axes {left} and {right}: their extents must agree")
        letters = [chr(i) for i in range(ord("a"), ord("a") + self.ndim)]
        others = [chr(i) for i in range(ord("A"), ord("A") + b.ndim)]
        for a, c in zip(left, right, strict=True):
            others[c] = letters[a]
        kept = [x for i, x in enumerate(letters) if i not in left] + [x for i, x in enumerate(others) if i not in right]
        return self.einsum(f"{''.join(letters)},{''.join(others)}->{''.join(kept)}", self, b)

    def outer(self, other: Operand) -> Self:
        """The products of all pairs of elements of two vectors: (n,) and (m,) give (n, m)."""
        b = self._as_tensor(other)
        if self.ndim != 1 or b.ndim != 1:
            raise ShapeError(f"outer of {self.shape} and {b.shape}: both are vectors")
        return self.unsqueeze(1).mul(b)

    def inner(self, other: Operand) -> Self:
        """The sum of products over the last axis of both operands: (…, k) and (…, k)."""
        b = self._as_tensor(other)
        if self.ndim == 0 or b.ndim == 0:
            return self.mul(b)
        return self.tensordot(b, ((-1,), (-1,)))

    @rounds_once
    def addmm(self, mat1: Operand, mat2: Operand, *, beta: Scalar = 1, alpha: Scalar = 1) -> Self:
        """The sum beta · self + alpha · (mat1 @ mat2). With beta 0, the values of self are not read."""
        product = self._as_tensor(mat1).matmul(mat2)
        own = self if beta == 1 else self.zeros_like() if beta == 0 else self.mul(beta)
        return own.add(product if alpha == 1 else product.mul(alpha))

    # -- diagonals -------------------------------------------------------------------------------
    def diagonal(self, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Self:
        """The elements whose position along dim2 exceeds that along dim1 by `offset`, as a new last axis. A view."""
        a, b = self._axis("diagonal", dim1), self._axis("diagonal", dim2)
        if a == b:
            raise ShapeError(f"diagonal of {self.shape} along axes {dim1} and {dim2}: name two axes")
        rest = [i for i in range(self.ndim) if i not in (a, b)]
        moved = self.permute([*rest, a, b])
        rows, columns = moved.shape[-2:]
        first_row, first_column = max(0, -offset), max(0, offset)
        n = min(rows - first_row, columns - first_column)
        if n <= 0 or 0 in moved.shape:
            return self.full((*moved.shape[:-2], max(0, n)), 0, self.dtype)
        square = moved.narrow(-2, first_row, n).narrow(-1, first_column, n)
        lead = square.shape[:-2]
        flat = square.reshape(*lead, n * n).pad([(0, 0)] * len(lead) + [(0, n)])
        return flat.reshape(*lead, n, n + 1).narrow(-1, 0, 1).squeeze(-1)

    def diag(self, diagonal: int = 0) -> Self:
        """The diagonal of a matrix, or for a vector the matrix with it on the diagonal and zeros elsewhere."""
        if self.ndim == 2:
            return self.diagonal(diagonal)
        if self.ndim != 1:
            raise ShapeError(f"diag of {self.shape}: give a vector or a matrix")
        return self.diag_embed(diagonal)

    def diag_embed(self, offset: int = 0) -> Self:
        """Square matrices with the last axis on their diagonals, and zeros elsewhere. A view with padding."""
        if self.ndim == 0:
            raise ShapeError("diag_embed of a tensor without axes: its last axis becomes a diagonal")
        *lead, n = self.shape
        if 0 in self.shape:
            return self.full((*lead, n + abs(offset), n + abs(offset)), 0, self.dtype)
        rows = self.unsqueeze(-1).pad([(0, 0)] * (len(lead) + 1) + [(0, n)]).reshape(*lead, n * (n + 1))
        square = rows.narrow(-1, 0, n * n).reshape(*lead, n, n)
        return square.pad([(0, 0)] * len(lead) + [(max(0, -offset), max(0, offset)), (max(0, offset), max(0, -offset))])

    def trace(self) -> Self:
        """The sum of a matrix's diagonal, with the dtype of `sum`."""
        if self.ndim != 2:
            raise ShapeError(f"trace of {self.shape}: it needs a matrix")
        return self.diagonal().sum()

    # -- distances -------------------------------------------------------------------------------
    @rounds_once
    def norm(self, p: float | str = 2.0, dim: int | Sequence[int] | None = None, keepdim: bool = False, *,
             axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Self:
        """The p-norm (Σ |x|^p)^(1/p) over axes. p='fro' is 2; inf and -inf give the largest and smallest |x|; 0 counts nonzero elements."""
        axes, keep = dim if axis is None else axis, keepdim or keepdims
        x = self._float()
        size = x.abs()
        if p in ("fro", 2):
            return x.square().sum(axes, keep).sqrt()
        if p == math.inf or p == -math.inf:
            return size.max(axes, keep) if p == math.inf else size.min(axes, keep)
        if p == 0:
            return x.ne(0).cast(x.dtype).sum(axes, keep)
        if p == 1:
            return size.sum(axes, keep)
        if isinstance(p, (int, float)):
            return size.pow(float(p)).sum(axes, keep).pow(1.0 / p)
        raise UnsupportedError(f"norm with p={p!r}: use a number, 'fro', or an infinity")

    @rounds_once
    def normalize(self, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Self:
        """Divide by the norm along an axis: x / max(norm, eps)."""
        x = self._float()
        return x.div(x.norm(p, dim, True).maximum(eps))

    @rounds_once
    def cosine_similarity(self, other: Operand, dim: int = 1, eps: float = 1e-8) -> Self:
        """The cosine of the angle between x and y along an axis, Σ x·y / (max(|x|, eps) · max(|y|, eps)), broadcast."""
        a, b = self._float(), self._as_tensor(other)._float()
        shape = broadcast_shapes("cosine_similarity", a.shape, b.shape)
        at = normalize_axes("cosine_similarity", dim, len(shape))[0]
        a, b = a.broadcast_to(shape), b.broadcast_to(shape)
        lengths = a.norm(2, at).maximum(eps).mul(b.norm(2, at).maximum(eps))
        return a.mul(b).sum(at).div(lengths)

    @rounds_once
    def cdist(self, other: Operand, p: float = 2.0) -> Self:
        """The distances of all pairs of rows: (…, n, d) and (…, m, d) give (…, n, m). They are norms of differences, so that distances
        of close rows are accurate."""
        y = self._as_tensor(other)
        if self.ndim < 2 or y.ndim < 2 or self.shape[-1] != y.shape[-1]:
            raise ShapeError(f"cdist of {self.shape} and {y.shape}: they are (…, n, d) and (…, m, d)")
        return self.unsqueeze(-2).sub(y.unsqueeze(-3)).norm(p, -1)

    @rounds_once
    def pairwise_distance(self, other: Operand, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Self:
        """The norm |x - y + eps| along the last axis."""
        return self.sub(other).add(eps).norm(p, -1, keepdim)

    # -- grids -----------------------------------------------------------------------------------
    @classmethod
    def meshgrid(cls, *tensors: Operand, indexing: str = "ij") -> tuple[Self, ...]:
        """Expand each vector along its own axis and repeat it along the others. indexing='xy' exchanges the first two axes. Views."""
        given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
        vectors = [t if isinstance(t, cls) else cls(t) for t in given]
        if indexing not in ("ij", "xy"):
            raise UnsupportedError(f"meshgrid with indexing={indexing!r}: use 'ij' or 'xy'")
        if not vectors or any(v.ndim > 1 for v in vectors):
            raise ShapeError(f"meshgrid of {' and '.join(str(v.shape) for v in vectors)}: give vectors")
        order = list(range(len(vectors)))
        if indexing == "xy" and len(order) > 1:
            order[:2] = [1, 0]
        shape = tuple(vectors[i].numel() for i in order)
        places = {v: a for a, v in enumerate(order)}
        return tuple(v.reshape(tuple(v.numel() if a == places[i] else 1 for a in range(len(shape)))).expand(shape)
                     for i, v in enumerate(vectors))


def _parse(equation: str, shapes: Sequence[tuple[int, ...]]) -> tuple[list[str], str]:
    """(the letters of each operand's axes, the letters of the result's axes). Axes of '...' get upper-case Greek letters."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")

    def wrong(why: str) -> ShapeError:
        return ShapeError(f"einsum {equation!r} of shapes {' and '.join(map(str, shapes))}: {why}")
    if len(terms) != len(shapes):
        raise wrong(f"it names {len(terms)} operand(s)")
    named = [t.replace("...", "") for t in terms]
    if any(t.count("...") > 1 for t in (*terms, right)) or not all(x.isascii() and x.isalpha() for t in (*named, right.replace("...", ""))
                                                                   for x in t):
        raise wrong("use letters, and '...' once in a term")
    hidden = [len(s) - len(n) for s, n in zip(shapes, named, strict=True)]
    if any(h < 0 or (h and "..." not in t) for h, t in zip(hidden, terms, strict=True)):
        raise wrong("a term needs a letter for each axis, or '...'")
    dots = "".join(chr(0x391 + i) for i in range(max(hidden, default=0)))
    full = [t.replace("...", dots[len(dots) - h:]) for t, h in zip(terms, hidden, strict=True)]
    extents = _extents(full, shapes, wrong)
    if arrow:
        result = right.replace("...", dots)
    else:
        every = "".join(full)
        result = dots + "".join(sorted(x for x in set(every) if every.count(x) == 1 and x not in dots))
    if len(set(result)) != len(result) or not set(result) <= set(extents):
        raise wrong("the result names each of its axes once, and only axes of operands")
    if not set(dots) <= set(result) and any(extents[d] != 1 for d in dots):
        raise wrong("the result lacks '...'")
    return full, result


def _extents(terms: Sequence[str], shapes: Sequence[tuple[int, ...]], wrong: Callable[[str], ShapeError]) -> dict[str, int]:
    """The extent of each letter. An extent of 1 is broadcast between operands, but not within one operand."""
    extents: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        own: dict[str, int] = {}
        for letter, n in zip(term, shape, strict=True):
            known = extents.setdefault(letter, n)
            if own.setdefault(letter, n) != n or (known != n and 1 not in (known, n)):
                raise wrong(f"axis {letter!r} has extents {own[letter] if own[letter] != n else known} and {n}")
            extents[letter] = n if known == 1 else known
    return extents


def _summed(tensor: ProductsT, term: str, later: set[str]) -> tuple[ProductsT, str]:
    """Sum a tensor over the axes that are not in `later`."""
    axes = tuple(i for i, letter in enumerate(term) if letter not in later)
    if not axes:
        return tensor, term
    # an integer sum keeps its dtype here, as in NumPy's einsum
    return tensor.sum(axes, dtype=tensor.dtype if tensor.dtype.kind != "b" else dtypes.int64), "".join(x for x in term if x in later)


def _product(a: tuple[ProductsT, str], b: tuple[ProductsT, str], later: set[str]) -> tuple[ProductsT, str]:
    """Multiply two terms, and sum the product over the axes that are not in `later`."""
    (first, own), (second, other) = a, b
    kept = [x for x in dict.fromkeys(own + other) if x in later]
    both = [x for x in dict.fromkeys(own + other) if x not in later]
    letters = kept + both

    def spread(tensor: ProductsT, term: str) -> ProductsT:
        ordered = tensor.permute(tuple(term.index(x) for x in letters if x in term))
        sizes = iter(ordered.shape)
        return ordered.reshape(tuple(next(sizes) if x in term else 1 for x in letters))
    dtype = promote(first.dtype, second.dtype)
    x, y = spread(first, own), spread(second, other)
    if not both:
        return x.mul(y), "".join(kept)
    shape = broadcast_shapes("einsum", x.shape, y.shape)
    return x._contract(y, shape, tuple(range(len(kept), len(letters))), dtype), "".join(kept)
