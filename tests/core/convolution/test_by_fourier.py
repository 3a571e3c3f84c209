"""Convolutions by transforms of blocks give a direct convolution's results, for all sizes of images, taps, channels, groups and blocks."""
from __future__ import annotations

import random
from math import prod
from typing import Any

import numpy as np
import pytest

from svod import PrepareConfig, Tensor
from svod.core.convolution.by_fourier import by_fourier, sizes_of
from svod.core.convolution.price import block_lengths
from svod.core.graph.channels import convolutions
from svod.core.graph.graph import sink
from svod.core.graph.library_kernel import has_fourier
from svod.core.ir.variable import Variable

Array = np.ndarray[Any, Any]


def direct(x: Array, w: Array, padding: int, groups: int) -> Array:
    """The convolution in float64, tap by tap."""
    rank = x.ndim - 2
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *[(padding, padding)] * rank])
    results = [n - k + 1 for n, k in zip(padded.shape[2:], w.shape[2:], strict=True)]
    split = padded.reshape(x.shape[0], groups, x.shape[1] // groups, *padded.shape[2:])
    taps = w.astype(np.float64).reshape(groups, w.shape[0] // groups, *w.shape[1:])
    made = np.zeros((x.shape[0], groups, w.shape[0] // groups, *results))
    for at in np.ndindex(*w.shape[2:]):
        part = split[(..., *[slice(k, k + n) for k, n in zip(at, results, strict=True)])]
        made += np.einsum("ngc...,goc->ngo...", part, taps[(..., *at)])
    return made.reshape(x.shape[0], w.shape[0], *results)


def convolved(x: Tensor, w: Tensor, padding: int, groups: int, **named: Any) -> Tensor:
    return getattr(x, f"conv{x.ndim - 2}d")(w, padding=padding, groups=groups, **named)


def by_blocks(x: Array, w: Array, padding: int, groups: int, lengths: tuple[int, ...]) -> Array:
    made = convolved(Tensor(x), Tensor(w), padding, groups)
    (u, c), = convolutions(sink(made.uop))
    sizes = sizes_of(u, c)
    assert sizes is not None
    value = Tensor.from_uop(by_fourier(u, c, sizes, lengths).value)
    value.prepare(PrepareConfig(numerics="same")).execute()     # the policy under which nothing is rewritten a second time
    return value.numpy().reshape(made.shape)


@pytest.mark.parametrize("seed", range(60))
def test_random_convolutions(seed: int) -> None:
    draw = random.Random(seed)
    rank, groups = draw.choice([1, 1, 2, 2, 3]), draw.choice([1, 1, 2, 3])
    inputs, outputs = (1, 1) if draw.random() < 0.4 else (draw.choice([1, 2, 3, 7]), draw.choice([1, 2, 5]))
    longest = {1: 90, 2: 23, 3: 9}[rank]
    size = [draw.randint(1, longest) for _ in range(rank)]
    padding = draw.choice([0, 0, 1, 3])
    taps = [draw.randint(1, min(n + 2 * padding, 13)) for n in size]
    lengths = tuple(draw.choice([n for n in range(k, 2 * longest) if has_fourier(n) and n >= k]) for k in taps)
    dtype = draw.choice(["float32", "float64"])
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((draw.choice([1, 2, 3]), groups * inputs, *size)).astype(dtype)
    w = rng.standard_normal((groups * outputs, inputs, *taps)).astype(dtype)
    want = direct(x, w, padding, groups)
    got = by_blocks(x, w, padding, groups, lengths)
    # the error of a transform is small beside the numbers of its block
    bound = 4 * np.finfo(dtype).eps * (2 + np.log2(prod(lengths))) * np.abs(x).max() * np.abs(w).sum(tuple(range(1, w.ndim))).max()
    assert got.shape == want.shape and np.abs(got - want).max() <= bound


def test_blocks_of_whole_lines() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((1, 2, 3001)), rng.standard_normal((2, 1, 130))
    assert np.allclose(by_blocks(x, w, 7, 2, (512,)), direct(x, w, 7, 2), rtol=0, atol=1e-11)


def test_an_infinity_spreads_over_its_pair_of_blocks_only() -> None:
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((1, 1, 200)), rng.standard_normal((1, 1, 5))
    x[0, 0, 3] = np.inf
    got, want = by_blocks(x, w, 0, 1, (20,)), direct(x, w, 0, 1)        # 13 blocks of 16 results, of which the first has a pair
    paired = np.zeros(196, bool)
    paired[:16] = paired[7 * 16:8 * 16] = True
    assert not np.isfinite(got[0, 0, paired]).any()
    assert np.allclose(got[0, 0, ~paired], want[0, 0, ~paired], atol=1e-12)


def test_an_outlier_raises_the_error_of_its_pair_of_blocks_only() -> None:
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((1, 1, 200)).astype(np.float32), rng.standard_normal((1, 1, 5)).astype(np.float32)
    x[0, 0, 3] = 1e6
    error = np.abs(by_blocks(x, w, 0, 1, (20,)) - direct(x, w, 0, 1))[0, 0]
    paired = np.r_[0:16, 112:128]
    assert error[paired].max() > 1e-3 and np.delete(error, paired).max() < 1e-5 and error.max() < 1e6 * 1e-6 * 20


@pytest.mark.parametrize("shape, taps, options, dtype", [
    ((1, 2, 40), (3, 2, 9), {"stride": 2}, "float32"),
    ((1, 2, 40), (3, 2, 9), {"dilation": 2}, "float32"),
    ((1, 2, 20, 20), (3, 2, 5, 5), {"stride": (1, 2)}, "float32"),
    ((1, 2, 40), (3, 2, 9), {}, "int32"),
])
def test_what_has_no_transform(shape: tuple[int, ...], taps: tuple[int, ...], options: dict[str, Any], dtype: str) -> None:
    x, w = Tensor(np.ones(shape, dtype)), Tensor(np.ones(taps, dtype))
    made = convolved(x, w, 0, 1, **options)
    assert [sizes_of(u, c) for u, c in convolutions(sink(made.uop))] in ([None], [])


def test_a_batch_of_unknown_size_has_no_transform() -> None:
    n = Variable("n", 1, 8)
    x = Tensor(np.ones((8, 2, 40), np.float32)).shrink([(0, n), None, None])
    made = convolved(x, Tensor(np.ones((3, 2, 9), np.float32)), 0, 1)
    assert [sizes_of(u, c) for u, c in convolutions(sink(made.uop))] == [None]


def test_blocks_have_transforms_and_cover_the_taps() -> None:
    made = convolved(Tensor(np.ones((1, 1, 300, 1), np.float32)), Tensor(np.ones((1, 1, 37, 1), np.float32)), 0, 1)
    (u, c), = convolutions(sink(made.uop))
    sizes = sizes_of(u, c)
    assert sizes is not None
    found = list(block_lengths(sizes))
    assert len(found) > 3 and all(has_fourier(n) and n > 37 and m == 1 for n, m in found)
