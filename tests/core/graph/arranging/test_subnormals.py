"""Subnormal probabilities of attentions become zeros, and nothing else does."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.core.graph import graph
from svod.core.graph.arranging.subnormals import without_subnormal_weights
from svod.core.ir.uop import Ops
from svod.tensor import Tensor
from tests.draws import draws
from tests.tensor.strategies import seeds


def attention(scores: Tensor, values: Tensor) -> Tensor:
    return scores.softmax(-1) @ values


def rounded(scores: Tensor, values: Tensor) -> Tensor:
    return (scores.softmax(-1).cast("bfloat16") @ values.cast("bfloat16")).cast(scores.dtype)


def divided_later(scores: Tensor, values: Tensor) -> Tensor:
    exps = (scores - scores.max(-1, keepdim=True)).exp()
    return (exps @ values) / exps.sum(-1, keepdim=True)


ATTENTIONS = {"softmax": attention, "rounded": rounded, "divided later": divided_later}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a softmax": lambda x: x.softmax(-1), "a logarithm of sums": lambda x: x.logsumexp(-1),
    "a sum of exponentials of any values": lambda x: (x.exp().unsqueeze(-1) * Tensor.arange(x.shape[-1], dtype=x.dtype)).sum(-2),
    "probabilities that are read elsewhere, too": lambda x: Tensor.cat([p := x.softmax(-1), p @ Tensor.ones(x.shape[-1], 2)], -1),
    "kept probabilities": lambda x: (p := x.softmax(-1)).where(p > 0.5, 0) @ Tensor.ones(x.shape[-1], 2)}


def flushed(value: Tensor) -> Tensor:
    return Tensor.from_uop(without_subnormal_weights(graph.sink(value.uop), lambda exponential: True).src[0])


@pytest.mark.parametrize("dtype, far", [("float32", 95.0), ("float64", 720.0)])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_subnormal_probabilities_are_zeros(name: str, dtype: str, far: float) -> None:
    """All positions but the first have subnormal exponentials, with values so large that their products would be seen."""
    assert 0 < np.exp(np.dtype(dtype).type(-far)) < np.finfo(dtype).tiny
    most = 1e307 if dtype == "float64" and name != "rounded" else 1e38      # bfloat16 has no numbers beyond 3e38
    scores, values = np.full((2, 37), -far, dtype), np.full((37, 3), most, dtype)
    scores[:, 0], values[0] = 0, 1
    np.testing.assert_array_equal(flushed(ATTENTIONS[name](Tensor(scores), Tensor(values))).numpy(), 1)


@pytest.mark.parametrize("name", OTHERS)
def test_other_exponentials_keep_their_values(name: str) -> None:
    sink = graph.sink(OTHERS[name](Tensor(np.zeros((2, 5), np.float32))).uop)
    assert any(u.op is Ops.EXP for u in sink.toposort()) and without_subnormal_weights(sink, lambda exponential: True) is sink


def test_layers_are_all_changed() -> None:
    x = Tensor(np.ones((4, 4), np.float32)).realize()
    for _ in range(3):
        x = attention(x, x)
    sink = without_subnormal_weights(graph.sink(x.uop), lambda exponential: True)
    read = [u for u in sink.toposort() if u.op is Ops.EXP]
    assert len(read) == 3
    assert all(user.op is Ops.WHERE for e in read for user in sink.toposort() if e in user.src)


@draws(10)
@given(rows=st.sampled_from([1, 5, 33]), keys=st.sampled_from([1, 2, 17, 64]), spread=st.sampled_from([1.0, 40.0, 300.0]), seed=seeds)
def test_attentions_are_right(rows: int, keys: int, spread: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, values = (rng.standard_normal((rows, keys)) * spread).astype(np.float32), rng.standard_normal((keys, 7)).astype(np.float32)
    if keys > 1:
        scores[:, rng.integers(keys)] = -np.inf
    wide = scores.astype(np.float64)
    exps = np.exp(wide - wide.max(-1, keepdims=True))
    want = exps / exps.sum(-1, keepdims=True) @ values.astype(np.float64)
    for attend in (attention, divided_later):
        np.testing.assert_allclose(flushed(attend(Tensor(scores), Tensor(values))).numpy(), want, rtol=1e-5, atol=1e-5)


def test_a_row_with_a_score_that_is_no_number_is_none() -> None:
    scores = np.float32([[0, np.nan, 1], [-np.inf, -np.inf, -np.inf], [0, 0, 0]])
    got = flushed(attention(Tensor(scores), Tensor(np.ones((3, 2), np.float32)))).numpy()
    assert np.isnan(got[:2]).all() and (got[2] == 1).all()
