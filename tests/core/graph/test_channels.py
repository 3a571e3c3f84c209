"""The rewrite of convolutions to channels-last memory: results stay the same, and nothing is copied between two convolutions."""
from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.config import PrepareConfig
from svod.core.graph import graph
from svod.core.graph.channels import channels_last, convolutions
from svod.core.graph.shapes import shape_of
from svod.core.graph.widening import widened_last
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.schedule import create_schedule
from svod.prepare import arranged
from svod.tensor import Tensor
from svod.tune.resolved import Resolved
from tests.compile.native import AVX512
from tests.core.corpus import data
from tests.draws import a_half, count, draws
from tests.tensor.strategies import seeds


def values(rng: np.random.Generator, *shape: int) -> Tensor:
    return Tensor(rng.integers(-3, 4, shape).astype(np.float32))


def network(seed: int) -> Tensor:
    """Make a network of convolutions of all kinds, a residual and pooling; it sums small integers, which is exact in any order."""
    rng, chosen = np.random.default_rng(seed), random.Random(seed)
    n, c, size = chosen.randint(1, 2), chosen.choice((1, 2, 3, 8, 9)), chosen.randint(6, 9)
    x = values(rng, n, c, size, size)
    for _ in range(chosen.randint(1, 3)):
        groups = chosen.choice([g for g in (1, 1, 2, 3) if c % g == 0])
        taps, o = chosen.choice((1, 3)), groups * chosen.choice((1, 4, 8))
        y = x.conv2d(values(rng, o, c // groups, taps, taps), values(rng, o), padding=taps // 2, groups=groups,
                     stride=chosen.choice((1, 1, 2)), dilation=1).relu()
        x, c = (y + x if y.shape == x.shape else y), o
        x = x.max_pool2d(2, 1) if chosen.random() < 0.3 else x
    return x


def computed(sink: UOp) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Compute the value of a graph with one output."""
    plan = Tensor.from_uop(sink.src[0]).prepare(PrepareConfig(db=":none:"))
    plan.execute()
    return np.array(plan.outputs[0]).ravel()


@pytest.mark.slow
def test_the_same_is_computed() -> None:
    for seed in range(count(8)):
        sink = graph.sink(network(seed).uop)
        last = channels_last(sink, lambda image: True)
        assert last is not sink and len(list(convolutions(last))) == len(list(convolutions(sink)))
        np.testing.assert_array_equal(computed(last), computed(sink))


def test_nothing_is_copied_between_convolutions() -> None:
    """Only the input and weights with several taps are copied: a convolution stores its result in the order that the next one reads."""
    def kernels(sink: UOp) -> list[str]:
        return [c.name_hint for c in create_schedule(sink).calls]
    x = data(2, 8, 6, 6)
    for _ in range(3):
        x = x.conv2d(data(8, 8, 3, 3), data(8), padding=1).relu() + x
    sink = graph.sink(x.conv2d(data(16, 8, 1, 1)).uop)
    before, after = kernels(sink), kernels(channels_last(sink, lambda image: True))
    assert len(before) == 4 and len(after) == 4 + 1 + 3


@pytest.mark.parametrize("channels", [3, 8, 9])
def test_rows_of_channels_are_whole_lines(channels: int) -> None:
    """Rows of channels are padded to multiples of 16 bytes, four 32-bit numbers."""
    sink = channels_last(graph.sink(data(2, channels, 6, 6).conv2d(data(4, channels, 3, 3)).uop), lambda image: True)
    found = [shape_of(u) for u in sink.walk(Ops.CONTIGUOUS)]
    assert sorted(shape[-1] for shape in found) == [4 * -(-channels // 4)] * 2


def test_what_lies_so_is_not_copied() -> None:
    x, w = data(2, 6, 6, 8).permute(0, 3, 1, 2), data(16, 3, 3, 8).permute(0, 3, 1, 2)
    assert len(create_schedule(channels_last(graph.sink(x.conv2d(w).uop), lambda image: True)).calls) == 1


def test_what_is_not_wanted_stays() -> None:
    sink = graph.sink(data(2, 8, 6, 6).conv2d(data(8, 8, 3, 3)).uop)
    assert channels_last(sink, lambda image: False) is sink
    pooled = graph.sink(data(2, 8, 6, 6).avg_pool2d(3).uop)
    assert channels_last(pooled, lambda image: True) is pooled


@pytest.mark.parametrize("weight, place, axes", a_half([
    ((1, 3, 3, 1, 1, 3, 3), 1, (2, 5, 6)), ((1, 2, 3, 1, 1, 3, 3), 2, (5, 6)), ((1, 2, 3, 1, 1, 3, 3), 2, (1, 5, 6)),
    ((1, 2, 3, 1, 1, 3, 3), 2, (2, 5, 6)), ((1, 2, 3, 4, 4, 3, 3), 2, (0, 1, 2, 3, 5, 6))]),
    ids=["by_outputs", "each_channel", "each_channel_summed", "convolution", "of_each_place"])
def test_products_with_windows_that_look_like_convolutions(weight: tuple[int, ...], place: int, axes: tuple[int, ...]) -> None:
    """Rows of three 32-bit channels are no multiple of 16 bytes. `place`: the axis of the weight that runs along the image's channels."""
    rng = np.random.default_rng(0)
    windows = Tensor.from_uop(graph.window(values(rng, 2, 3, 6, 6).uop, [(2, 3, 1, 1), (3, 3, 1, 1)]))
    y = (windows.reshape(2, *[3 if a == place else 1 for a in (1, 2)], 4, 4, 3, 3) * values(rng, *weight)).sum(axes)
    np.testing.assert_array_equal(computed(channels_last(graph.sink(y.uop), lambda image: True)), computed(graph.sink(y.uop)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("features, tiled", [((), False), (("bf16",), False), (("bf16", "amx"), True)], ids=["avx512", "pairs", "tiles"])
def test_16_bit_images_have_channels_last_where_cores_multiply_tiles(features: tuple[str, ...], tiled: bool, dtype: str) -> None:
    target = replace(AVX512, features=(*AVX512.features, *features))
    here = SimpleNamespace(config=PrepareConfig(), target=target, target_of=lambda device: target)
    x, w = data(2, 8, 6, 6).cast(dtype).contiguous(), data(4, 8, 3, 3).cast(dtype).contiguous()
    sink = graph.sink(x.conv2d(w).uop)
    assert (arranged(sink, cast(Resolved, here)) is not widened_last(sink)) == (tiled and dtype == "bfloat16")


@draws(4)
@given(channels=st.sampled_from([1, 3, 8, 17, 48]), outs=st.sampled_from([1, 5, 32]), size=st.integers(3, 19),
       taps=st.sampled_from([1, 2, 3]), dilation=st.sampled_from([1, 2]), seed=seeds)
def test_16_bit_convolutions_with_channels_last_are_right(channels: int, outs: int, size: int, taps: int, dilation: int, seed: int) -> None:
    """Small integers: sums are exact in any order, and below 256 they are exact in bfloat16."""
    rng, padding = np.random.default_rng(seed), dilation * (taps - 1)
    x, w = rng.integers(-1, 2, (2, channels, size, size)), rng.choice([-1, 0, 0, 0, 1], (outs, channels, taps, taps))
    images, weights = (Tensor(a.astype(np.float32)).cast("bfloat16").realize() for a in (x, w))
    sink = graph.sink(images.conv2d(weights, padding=padding, dilation=dilation).uop)
    last = Tensor.from_uop(channels_last(sink, lambda image: True).src[0])
    padded = np.pad(x, [(0, 0), (0, 0), (padding, padding), (padding, padding)])
    rows = padded.shape[-1] - dilation * (taps - 1)
    want = sum(np.einsum("nchw,oc->nohw", padded[..., i * dilation:i * dilation + rows, j * dilation:j * dilation + rows], w[..., i, j])
               for i in range(taps) for j in range(taps))
    np.testing.assert_array_equal(last.numpy(), want)


def test_memory_that_is_written_stays_where_it_is() -> None:
    """A buffer that a convolution reads and that is assigned to keeps its layout."""
    state = Tensor(np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4)).realize()
    weight = Tensor(np.ones((1, 3, 3, 3), np.float32))
    y = state.conv2d(weight)
    want = y.numpy()
    sink = channels_last(graph.sink(state.conv2d(weight).uop, state.assign(state * 2).uop), lambda image: True)
    plans = [Tensor.from_uop(u) for u in sink.src]
    got, doubled = (t.numpy() for t in plans)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(doubled.ravel(), 2 * np.arange(96, dtype=np.float32))
