"""einsum, diagonals, distances, grids against NumPy."""
from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.core.ir.uop import Ops
from svod.errors import ShapeError, UnsupportedError
from svod.tensor import Tensor
from tests.draws import draws
from tests.tensor import checking
from tests.tensor.checking import Cases, check
from tests.tensor.strategies import Array, make, seeds, shapes, views

few = draws(8)


@pytest.fixture(scope="module", autouse=True)
def evaluator() -> Iterator[None]:
    """Evaluate node by node in NumPy, because the functions consist of operations that are tested with all evaluators."""
    checking.active = "reference"
    yield


@few
@given(data=st.data(), seed=seeds, dtype=st.sampled_from(["float32", "float64", "int32", "float16"]))
def test_einsum(data: st.DataObject, seed: int, dtype: str) -> None:
    """Random letters: repeated, summed, with extent 1 in some operands, broadcast by '...', in up to three operands."""
    extents = {x: data.draw(st.sampled_from([1, 2, 3, 5])) for x in "abcd"}
    dots = data.draw(st.booleans())
    terms = ["".join(data.draw(st.lists(st.sampled_from("abcd"), min_size=0, max_size=3))) for _ in range(data.draw(st.integers(1, 3)))]
    used = sorted(set("".join(terms)))
    result = "".join(data.draw(st.permutations([x for x in used if data.draw(st.booleans())])))
    arrays = []
    for k, term in enumerate(terms):
        lead = (data.draw(st.sampled_from([1, 2])),) * dots
        here = {x: data.draw(st.sampled_from([n, n, 1])) for x, n in extents.items()}
        arrays.append(make((*lead, *(here[x] for x in term)), dtype, seed + k))
    equation = ",".join("..." * dots + t for t in terms) + "->" + "..." * dots + result
    wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in arrays]
    check(Tensor.einsum(equation, *[Tensor(a) for a in arrays]), np.einsum(equation, *wide).astype(dtype), 40 if dtype == "float16" else 8)


def test_einsum_without_an_arrow_and_what_it_schedules() -> None:
    a, b = make((4, 3), "float32", 0), make((3, 5), "float32", 1)
    check(Tensor.einsum("ij,jk", Tensor(a), Tensor(b)), np.einsum("ij,jk", a, b), 4)
    check(Tensor.einsum("ba", Tensor(a)), np.einsum("ba", a))
    check(Tensor.einsum("...i->...", [Tensor(a)]), a.sum(1), 4)
    check(Tensor(a).tensordot(Tensor(b), 1), np.tensordot(a, b, 1), 4)
    check(Tensor(a).tensordot(Tensor(a), ((0, 1), (0, 1))), np.asarray(np.tensordot(a, a, ((0, 1), (0, 1)))), 8)
    check(Tensor(a).inner(Tensor(b.T.copy())), np.inner(a, b.T), 4)
    check(Tensor(a[0]).outer(Tensor(b[0])), np.outer(a[0], b[0]))
    check(Tensor.zeros(4, 5).addmm(Tensor(a), Tensor(b), alpha=2), 2 * (a @ b), 4)
    check(Tensor.full((5,), math.nan).addmm(Tensor(a), Tensor(b), beta=0), a @ b, 4)


@few
@given(x=views("int32", least=2, most=3), offset=st.integers(-3, 4), data=st.data())
def test_diagonals(x: tuple[Tensor, Array], offset: int, data: st.DataObject) -> None:
    t, a = x
    first, second = data.draw(st.permutations(range(a.ndim)))[:2]
    found = t.diagonal(offset, first, second)
    check(found, np.diagonal(a, offset, first, second))
    assert not list(found.uop.walk(Ops.GATHER)), "a view"
    vector = a.reshape(-1)[:5]
    check(Tensor(vector.copy()).diag(offset), np.diag(vector, offset))
    if a.ndim == 2:
        check(t.trace(), np.asarray(np.trace(a), np.int64))


@few
@given(x=views("float32", least=1, most=3, zero=False), p=st.sampled_from([0, 1, 2, 3.0, "fro", math.inf, -math.inf]), data=st.data())
def test_norms(x: tuple[Tensor, Array], p: float | str, data: st.DataObject) -> None:
    t, a = x
    axis = data.draw(st.integers(0, a.ndim - 1))
    wide = a.astype(np.float64)
    order = 2 if p == "fro" else p
    check(t.norm(p, axis, True), np.linalg.norm(wide, order, axis, keepdims=True).astype(np.float32), 20)  # type: ignore[call-overload]
    length = np.maximum(np.linalg.norm(wide, axis=axis, keepdims=True), 1e-12)
    check(t.normalize(dim=axis), (wide / length).astype(np.float32), 8)
    cosines = (wide * wide).sum(axis) / np.maximum(length.squeeze(axis), 1e-8) ** 2
    check(t.cosine_similarity(t.mul(2), axis), np.asarray(cosines, np.float32), 20)


@few
@given(rows=shapes(1, 1), columns=shapes(1, 1), seed=seeds)
def test_distances_and_grids(rows: tuple[int], columns: tuple[int], seed: int) -> None:
    a, b = make((2, *rows, 3), "float32", seed), make((2, *columns, 3), "float32", seed + 1)
    apart = np.sqrt(((a[:, :, None].astype(np.float64) - b[:, None]) ** 2).sum(-1)).astype(np.float32)
    check(Tensor(a).cdist(Tensor(b)), apart, 8)
    for indexing in ("ij", "xy"):
        ours = Tensor.meshgrid(Tensor(a[0, :, 0].copy()), Tensor(b[0, :, 0].copy()), Tensor([1, 2]), indexing=indexing)
        grids = np.meshgrid(a[0, :, 0], b[0, :, 0], np.array([1, 2], np.int32), indexing=indexing)  # type: ignore[arg-type,call-overload]
        for t, expected in zip(ours, grids, strict=True):
            check(t, expected)


def test_errors_of_products() -> None:
    t = Tensor.zeros(2, 3)
    cases: Cases = (
        (lambda: Tensor.einsum("ij,jk->ik", t, t), r"einsum 'ij,jk->ik' of shapes \(2, 3\) and \(2, 3\): axis 'j' has extents 3 and 2"),
        (lambda: Tensor.einsum("ij,jk->ik", t), "names 2 operand"), (lambda: Tensor.einsum("ijk", t), "a letter for each axis"),
        (lambda: Tensor.einsum("ij->iz", t), "only axes of operands"), (lambda: Tensor.einsum("ij->ii", t), "each of its axes once"),
        (lambda: Tensor.einsum("i1", t), "use letters"), (lambda: t.outer(t), r"outer of \(2, 3\) and \(2, 3\)"),
        (lambda: t.tensordot(t, 1), r"tensordot of \(2, 3\) and \(2, 3\)"), (lambda: t.diagonal(0, 1, 1), "two axes"),
        (lambda: Tensor.zeros(2, 2, 2).diag(), "a vector or a matrix"), (lambda: Tensor.zeros(2).trace(), "needs a matrix"),
        (lambda: t.cdist(Tensor.zeros(2, 4)), r"cdist of \(2, 3\) and \(2, 4\)"), (lambda: Tensor.meshgrid(t), "give vectors"))
    for act, match in cases:
        with pytest.raises(ShapeError, match=match):
            act()
    for act, match in ((lambda: t.norm("nuc"), "norm with p='nuc'"), (lambda: Tensor.meshgrid(Tensor([1]), indexing="ab"), "'ij' or 'xy'")):
        with pytest.raises(UnsupportedError, match=match):
            act()
