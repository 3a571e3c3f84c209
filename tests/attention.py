"""Attention over random shapes with the masks of models, and the expected results in float64."""
from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from svod import Tensor
from svod.config import PrepareConfig
from svod.core.graph import graph
from svod.core.ir.dtype import BY_NAME
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt
from svod.core.schedule.schedule import create_schedule
from svod.core.spec.values import from_float, to_float

Array = np.ndarray[Any, np.dtype[Any]]
KINDS = ("plain", "causal", "kept", "added", "grouped")
TOLERANCE = {"float32": 3e-6, "float16": 3e-3, "bfloat16": 2e-2}     # relative to the largest value: probabilities and results are rounded
PLAIN = PrepareConfig(object_cache=":none:", db=":none:")


@dataclass
class AttentionCase:
    """A case of softmax(q @ kᵀ / √e + mask) @ v. `kept`: with a mask of bools, of which one row keeps nothing; `added`: with a mask of
    numbers, some of them infinite; `grouped`: two query heads share each head of keys and values."""

    kind: str
    dtype: str
    q: Array
    k: Array
    v: Array
    mask: Array | None

    @staticmethod
    def draw(rng: random.Random, kind: str, dtype: str, shape: tuple[int, int, int, int, int]) -> AttentionCase:
        """`shape`: heads, queries, keys, width of queries and keys, width of values."""
        heads, queries, keys, width, columns = shape
        numbers = np.random.default_rng(rng.randrange(1 << 30))
        shared = 2 if kind == "grouped" else 1
        q, k, v = (to_float(from_float(numbers.standard_normal(s, np.float32), BY_NAME[dtype]), BY_NAME[dtype]).astype(np.float64)
                   for s in ((heads * shared, queries, width), (heads, keys, width), (heads, keys, columns)))
        mask: Array | None = None
        if kind == "kept":
            mask = numbers.random((queries, keys)) < 0.4
            mask[queries // 2] = False
        if kind == "added":
            mask = np.where(numbers.random((queries, keys)) < 0.3, -np.inf, numbers.standard_normal((queries, keys))).astype(np.float32)
        return AttentionCase(kind, dtype, q, k, v, mask)

    @property
    def tensor(self) -> Tensor:
        q, k, v = (Tensor(x.astype(np.float32)).cast(self.dtype) if self.dtype != "bfloat16" else
                   Tensor(from_float(x.astype(np.float32), BY_NAME[self.dtype])).bitcast(self.dtype) for x in (self.q, self.k, self.v))
        if self.kind == "grouped":
            k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        return q.scaled_dot_product_attention(k, v, None if self.mask is None else Tensor(self.mask), is_causal=self.kind == "causal")

    @property
    def want(self) -> Array:
        k, v = (np.repeat(x, len(self.q) // len(self.k), 0) for x in (self.k, self.v))
        scores = self.q @ k.transpose(0, 2, 1) / np.sqrt(self.q.shape[-1])
        if self.kind == "causal":
            scores = np.where(np.tri(*scores.shape[1:], dtype=np.bool_), scores, -np.inf)
        elif self.mask is not None:
            scores = np.where(self.mask, scores, -np.inf) if self.mask.dtype == np.bool_ else scores + self.mask
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out: Array = np.nan_to_num(weights / weights.sum(-1, keepdims=True)) @ v
        return out

    def kernel(self) -> Kernel:
        """The kernel of the attention itself, which follows the kernels that make the mask."""
        return Kernel(create_schedule(graph.sink(self.tensor.uop)).calls[-1].ast)

    def check(self, chain: tuple[Opt, ...], device: str) -> None:
        """Run the kernel on a device under a chain, and compare the result."""
        kernel, y = self.kernel(), self.tensor
        plan = y.prepare(replace(PLAIN, device=device, opts={kernel.key: chain}))
        plan.execute()
        assert any(k.opts_source == "explicit" for k in plan.kernels)
        got, want = y.numpy().astype(np.float64), self.want
        error = float(np.abs(got - want).max() / max(1.0, np.abs(want).max()))
        assert error <= TOLERANCE[self.dtype], f"off by {error:.2g} of the largest: {' '.join(map(str, chain))}"
