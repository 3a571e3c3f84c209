"""Weights of attentions are recognised in every form, and tiny ones are zeros. Other exponentials keep their values."""
from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.compile.lower.lower import lower
from svod.core.ir.uop import Ops
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.attention_weights import attention_weights
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.tensor import Tensor
from tests.agreement import TOLERANCE, Case, run_native
from tests.chains import random_state
from tests.compile.native import AVX512, runnable_targets
from tests.core.corpus import data, kernel_of
from tests.draws import draws
from tests.tensor.strategies import seeds

KEYS = 7


def attention(scores: Tensor, values: Tensor) -> Tensor:
    return scores.softmax(-1) @ values


def rounded(scores: Tensor, values: Tensor) -> Tensor:
    return (scores.softmax(-1).cast("bfloat16") @ values.cast("bfloat16")).cast(scores.dtype)


def divided_later(scores: Tensor, values: Tensor) -> Tensor:
    exps = (scores - scores.max(-1, keepdim=True)).exp()
    return (exps @ values) / exps.sum(-1, keepdim=True)


def without_empty_rows(scores: Tensor, values: Tensor) -> Tensor:
    return scores.softmax(-1).where(scores.ne(-math.inf).any(-1, keepdim=True), 0) @ values


def kept_finite(scores: Tensor, values: Tensor) -> Tensor:
    most = scores.max(-1, keepdim=True)
    exps = (scores - Tensor.zeros_like(most).where(most.eq(-math.inf), most)).exp()
    return (exps / exps.sum(-1, keepdim=True)) @ values


ATTENTIONS = {a.__name__: a for a in (attention, rounded, without_empty_rows, kept_finite)}     # each is one kernel
BEHIND: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": Tensor.sigmoid, "silu": Tensor.silu, "softplus": Tensor.softplus, "mish": Tensor.mish,
    "a quotient by a sum with a constant": lambda y: 2 / (y.abs() + 1e-6)}
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a softmax": lambda x, y: x.softmax(-1),
    "a logarithm of sums": lambda x, y: (x - x.max(-1, keepdim=True)).exp().sum(-1).log(),
    "a logarithm of weighted sums": lambda x, y: ((x - x.max(-1, keepdim=True)).exp() @ y).log(),
    "a quotient by weighted sums": lambda x, y: 2 / (x.softmax(-1) @ y),
    "a quotient by weighted sums and a tiny constant": lambda x, y: 2 / (x.softmax(-1) @ y + 1e-30),
    "relative to the maximum of another row": lambda x, y: (x - x.flip(0).max(-1, keepdim=True)).exp() @ y,
    "relative to a mean": lambda x, y: (x - x.mean(-1, keepdim=True)).exp() @ y,
    "sums over rows": lambda x, y: x.softmax(-1).mean(0),
    "weighted sums over rows": lambda x, y: (x.softmax(-1) * y[:5, :1]).sum(0),
    "the probability of a class": lambda x, y: (x.softmax(-1) * y[:, 0]).sum(-1),
    "chosen probabilities": lambda x, y: x.softmax(-1).where(y[:, 0] > 0, 0).sum(-1),
    "whole numbers of probabilities": lambda x, y: (x.softmax(-1).unsqueeze(-1) * y).cast("int32").sum(-2),
    "roots of probabilities": lambda x, y: x.softmax(-1).sqrt() @ y}


def scores_of(dtype: str = "float32") -> Tensor:
    """Scores that the kernel computes itself, so that attention is one kernel."""
    return data(5, 2, dtype=dtype) @ data(2, KEYS, dtype=dtype)


def exponents(kernel: Kernel, inlined: frozenset[int]) -> set[tuple[int, int]]:
    return {(r.stage.index, n.src[0]) for r in kernel.resolve(inlined) if r is not None for n in r.nodes if n.op == "EXP"}


def inlinings(kernel: Kernel) -> list[frozenset[int]]:
    """All sets of elementwise stages that are not outputs."""
    stages = [s.index for s in kernel.stages if not s.has_reduce and not s.is_output]
    return [frozenset(chosen) for n in range(len(stages) + 1) for chosen in combinations(stages, n)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attention_has_weights_wherever_its_stages_are(name: str, dtype: str) -> None:
    kernel = Kernel(kernel_of(ATTENTIONS[name](scores_of(dtype), data(KEYS, 3, dtype=dtype))))
    for inlined in inlinings(kernel):
        assert attention_weights(kernel, inlined) == exponents(kernel, inlined) != set(), f"{kernel}, inlined {sorted(inlined)}"


@pytest.mark.parametrize("name", BEHIND)
def test_what_rounds_tiny_differences_away_may_follow(name: str) -> None:
    kernel = Kernel(kernel_of(BEHIND[name](attention(scores_of(), data(KEYS, 3)))))
    for inlined in inlinings(kernel):
        nodes = {r.stage.index: r.nodes for r in kernel.resolve(inlined) if r is not None}
        of_rows = {(s, n) for s, n in exponents(kernel, inlined) if nodes[s][n].op == "SUB"}
        assert attention_weights(kernel, inlined) == of_rows != set(), f"{kernel}, inlined {sorted(inlined)}"


@pytest.mark.parametrize("causal", [False, True])
def test_one_pass_over_blocks_has_weights(causal: bool) -> None:
    q, k, v = data(2, 5, 3), data(2, 9, 3), data(2, 9, 4)
    kernel = Kernel(kernel_of(q.scaled_dot_product_attention(k, v, is_causal=causal)))
    row = next(s.name for s in kernel.stages if s.value.arg == ("MAX", 1))
    state = apply_opt(Scheduler(kernel, AVX512), Opt("ONLINE", row, 4))
    assert attention_weights(state.kernel, state.inlined) == exponents(state.kernel, state.inlined) != set()


@pytest.mark.parametrize("name", OTHERS)
def test_other_exponentials_are_no_weights(name: str) -> None:
    kernel = Kernel(kernel_of(OTHERS[name](scores_of(), data(KEYS, 3))))
    assert any(u.op is Ops.EXP for u in kernel.ast.toposort())
    assert not any(attention_weights(kernel, inlined) for inlined in inlinings(kernel))


@pytest.mark.parametrize("dtype, far, large", [("float32", 80.0, 1e33), ("float64", 700.0, 1e300)])
@pytest.mark.parametrize("target", runnable_targets().values(), ids=runnable_targets())
def test_tiny_weights_are_zeros(target: Target, dtype: str, far: float, large: float) -> None:
    """Values are so large that weights which are not set to 0 are seen in the sums."""
    assert np.exp(-far) * large * KEYS > 10 * TOLERANCE[dtype]
    kernel = Kernel(kernel_of(attention(scores_of(dtype), data(KEYS, 3, dtype=dtype))))
    queries, keys, values = np.zeros((5, 2)), np.zeros((2, KEYS)), np.full((KEYS, 3), large)
    queries[:, 0], keys[0, 1:], values[0] = 1, -far, 1
    inputs = {a.size: a.astype(dtype).ravel() for a in (queries, keys, values)}
    case = Case(kernel)
    case.args = [np.zeros(p.arg.size, dtype) if p.arg.slot in kernel.outs else inputs[p.arg.size] for p in kernel.params]
    case.want = [np.ones(15, dtype)]
    for seed in range(4):
        run_native(case, lower(random_state(random.Random(seed), Scheduler(kernel, target), 2 * seed)), target, 2)


@pytest.mark.parametrize("dtype, far", [("float32", 80.0), ("float64", 700.0)])
def test_a_softmax_keeps_small_probabilities(dtype: str, far: float) -> None:
    scores = np.full((2, KEYS), -far, dtype)
    scores[:, 0] = 0
    np.testing.assert_allclose(Tensor(scores).softmax(-1).numpy(), np.exp(scores), rtol=1e-5, atol=0)


@draws(10)
@given(rows=st.sampled_from([1, 5, 33]), keys=st.sampled_from([1, 2, 17, 64]), spread=st.sampled_from([1.0, 40.0, 300.0]), seed=seeds)
def test_attentions_are_right(rows: int, keys: int, spread: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal(s).astype(np.float32) for s in ((rows, 4), (keys, 4)))
    k *= spread
    values = rng.standard_normal((keys, 7)).astype(np.float32)
    wide = q.astype(np.float64) @ k.T.astype(np.float64)
    exps = np.exp(wide - wide.max(-1, keepdims=True))
    want = exps / exps.sum(-1, keepdims=True) @ values.astype(np.float64)
    for attend in (attention, divided_later, without_empty_rows, kept_finite):
        got = attend(Tensor(q) @ Tensor(np.ascontiguousarray(k.T)), Tensor(values)).numpy()
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * max(1.0, spread))


def test_nan_scores_and_rows_without_scores_give_nan() -> None:
    scores, kept = np.float32([[0, np.nan, 1], [0, 0, 0], [0, 0, 0]]), np.array([True, False, True])[:, None]
    x = Tensor(scores).unsqueeze(-1) @ Tensor(np.ones((3, 1, 1), np.float32))
    got = attention(x.squeeze(-1).where(Tensor(kept), -math.inf), Tensor(np.ones((3, 2), np.float32))).numpy()
    assert np.isnan(got[:2]).all()
    np.testing.assert_allclose(got[2], 1, rtol=1e-6)
