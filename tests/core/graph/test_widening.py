"""The rewrite that moves conversions of 16-bit floats to float32 after movements."""
from __future__ import annotations

import numpy as np
import pytest

from svod.core.graph.shapes import shape_of
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.normalize import normalize
from svod.tensor import Tensor


def widened_at(t: Tensor) -> list[tuple[int, ...]]:
    """List the shapes of the conversions to float32 in the graph of a tensor after `normalize`."""
    sink = normalize(UOp(Ops.SINK, dtypes.void, (t.uop,))).sink
    return [shape_of(u) for u in sink.toposort() if u.op is Ops.CAST and u.dtype == dtypes.float32]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_windows_of_padded_halves_are_widened_last(dtype: str) -> None:
    x = Tensor(np.random.default_rng(0).standard_normal((1, 3, 5, 7)).astype(np.float32)).cast(dtype).realize()
    moved = x.cast("float32").permute(0, 1, 3, 2).pad((1, 1, 2, 0)).flip(3)
    assert widened_at(moved) == [moved.shape]
    np.testing.assert_array_equal(moved.numpy(), x.permute(0, 1, 3, 2).pad((1, 1, 2, 0)).flip(3).cast("float32").numpy())


def test_what_is_not_exact_in_16_bits_or_repeated_is_widened_first() -> None:
    x = Tensor(np.arange(6, dtype=np.float16).reshape(2, 3)).realize()
    filled = x.cast("float32").pad((1, 1), value=0.1)
    assert widened_at(filled) == [(2, 3)]
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(filled.numpy(), np.pad(numbers, ((0, 0), (1, 1)), constant_values=0.1))
    assert widened_at(x.cast("float32").unsqueeze(0).expand(4, 2, 3) * 2) == [(1, 2, 3)]


@pytest.mark.parametrize(("taps", "outputs", "is_first"), [(3, 2, True), (3, 6, True), (3, 7, False), (5, 13, True), (5, 64, False)])
def test_images_of_few_products_are_widened_before_their_windows(taps: int, outputs: int, is_first: bool) -> None:
    """Windows of 13×11 positions in 15×13 repeat an element 6.6 times, those in 17×15 of 25 positions 14 times."""
    rng = np.random.default_rng(taps * outputs)
    pad = taps // 2
    image, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 3, 13, 11), (outputs, 3, taps, taps)))
    x, w = (Tensor(a).cast("bfloat16").realize() for a in (image, weight))
    y = x.conv2d(w, padding=pad)
    assert ((1, 3, 13 + 2 * pad, 11 + 2 * pad) in widened_at(y)) == is_first
    exact = Tensor(x.numpy().astype(np.float64)).conv2d(Tensor(w.numpy().astype(np.float64)), padding=pad).numpy()
    np.testing.assert_allclose(y.cast("float32").numpy(), exact, atol=float(np.abs(exact).max()) * 2 ** -7)


@pytest.mark.parametrize(("fill", "is_first"), [(0, True), (0.1, False)])
def test_padded_windows_are_widened_first_if_their_fill_is_a_16_bit_number(fill: float, is_first: bool) -> None:
    x = Tensor(np.random.default_rng(0).standard_normal((1, 2, 7, 5)).astype(np.float32)).cast("bfloat16").realize()
    windows = x.unfold(2, 3, 1).unfold(3, 3, 1)
    padded = windows.pad(((0, 0), (0, 0), (0, 1), (0, 1), (0, 0), (0, 0)), value=fill)
    y = padded.cast("float32").unsqueeze(0).expand(2, *padded.shape) * 2
    assert ((1, 2, 7, 5) in widened_at(y)) == is_first
    np.testing.assert_array_equal(y.numpy()[1], padded.cast("float32").realize().numpy() * 2)
