"""The values of small graphs, compared with an interpreter that shares no code with svod, and values that depend on Variables."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from svod import Tensor, Variable, where
from svod.core.graph.buffer import buffer_of
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import UOp
from svod.core.ir.variable import number_of
from svod.core.spec.graphs import GraphValues
from tests.graph_reference import evaluate_graph as reference

RNG = np.random.default_rng(0)
X = Tensor(RNG.standard_normal((3, 5, 7)).astype("f4"))
K = Tensor(RNG.integers(-9, 9, (4, 6)))

GRAPHS: dict[str, Any] = {
    "views": lambda: X.permute(2, 0, 1).flip(0).pad([(1, 0), (0, 2), (0, 0)]).shrink([(0, 6), (1, 4), (0, 5)]).reshape(15, 6),
    "windows": lambda: X.unfold(2, 3, 2).contiguous(), "join": lambda: Tensor.cat([X, X.abs()], 1),
    "gather": lambda: K.take(Tensor([3, 0, 9]), 0),
    "sums": lambda: K.sum(1), "products": lambda: K.prod(0), "extremes": lambda: K.max(0).minimum(K.min()), "places": lambda: X.argmax(1),
    "scan": lambda: K.cumsum(1), "order": lambda: K.sort(1)[0], "scatter": lambda: K.scatter(0, K.abs().remainder(4), K),
    "bits": lambda: X.bitcast("int32").bitwise_right_shift(3), "narrow": lambda: X.cast("bfloat16").mul(3).cast("float16").add(1),
    "choice": lambda: where(X.gt(0), X.floor(), X.sqrt()), "largest": lambda: X.topk(2, 1)[0], "float sums": lambda: X.mean((0, 2)),
    "functions": lambda: X.exp().add(1).log()}


def content(node: UOp) -> Any:
    return buffer_of(node).array


@pytest.mark.parametrize("name", GRAPHS)
def test_values_of_graphs(name: str) -> None:
    tensor = GRAPHS[name]()
    found, wanted = GraphValues(content, 1000, bit_exact=False).of(tensor.uop), reference(tensor.uop)
    assert found is not None and found.shape == wanted.shape
    if name in ("functions", "float sums"):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert GraphValues(content, 1000).of(tensor.uop) is None, "a kernel may round it otherwise"
    else:
        np.testing.assert_array_equal(found, wanted)


def test_what_is_too_large_or_unknown_has_no_value() -> None:
    assert GraphValues(content, 23).of(K.add(1).uop) is None
    assert GraphValues(lambda u: None, 24).of(K.add(1).uop) is None
    assert GraphValues(content, 24).of(Tensor([1e10, np.nan]).cast("int32").uop) is None
    assert GraphValues(content, 24).of(Tensor([0.0, -0.0]).max().uop) is None


def test_numbers_of_variables() -> None:
    """Results that are one number or expression for all values of a Variable are known: comparisons that the bounds decide, quotients and
    remainders by constants."""
    n = Variable("n", 2, 12)
    size = Tensor.from_uop(number_of(n, K.dtype))

    def value(t: Tensor) -> Any:
        found = GraphValues(content, 100).of(t.uop)
        return None if found is None else found.tolist()
    assert str(value(size.mul(3).add(1))) == "3*n+1" and str(value(size.div(2, rounding_mode="trunc"))) == "(n//2)"
    assert str(value(Tensor.stack([size, Tensor(7)], 0))) == "[n, 7]"
    assert value(size.gt(0)) is True and value(size.eq(-1)) is False and value(size.sub(size)) == 0
    assert value(size.eq(5)) is None and value(size.cast("float32")) is None
    assert str(value(where(size.lt(0), size.add(12), size))) == "n" and value(where(size.eq(5), 1, 0)) is None
    assert value(size.maximum(1).eq(size)) is True and str(value(size.neg().abs())) == "n"


def test_integers_beside_variables_are_held_in_their_type() -> None:
    """In an array some of whose elements depend on a Variable, the others wrap modulo 2^64 or 2^32 as in a kernel."""
    size = Tensor.from_uop(number_of(Variable("n", 2, 12), K.dtype))
    both = Tensor.stack([size, Tensor(np.int64(3))], 0)

    def value(t: Tensor) -> Any:
        found = GraphValues(content, 100).of(t.uop)
        return None if found is None else found.tolist()
    assert both.dtype == dtypes.int64
    large = both.mul(2 ** 62)[1:]
    assert value(large) == [3 * 2 ** 62 - 2 ** 64] == Tensor(np.array([3])).mul(2 ** 62).tolist()
    assert value(large.minimum(5)) == [-2 ** 62] and value(large.mul(2)) == [-2 ** 63] and value(large.mul(4).add(5)) == [5]
    assert value(both.mul(2 ** 62)) is None, "for some n it is no int64"
    assert value(both.add(2 ** 31).cast("int32")[1:]) == [3 - 2 ** 31]
