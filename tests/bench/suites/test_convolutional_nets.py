"""The convolutional nets of the suite torch: they have the sizes that were published, and svod computes PyTorch's numbers."""
from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import svod.torch  # noqa: E402
from svod.bench.suites.convolutional_nets import RepVgg, YoloV3Tiny, YoloV8, with_he_weights  # noqa: E402
from svod.bench.suites.torch_modules import SMALL, leaves, make  # noqa: E402


@pytest.mark.parametrize(("name", "millions", "shapes"), [
    ("repvgg_a0", 8.3, [(1, 1000)]),
    ("yolov8n", 3.2, [(1, 144, 20, 20), (1, 144, 10, 10), (1, 144, 5, 5)]),
    ("yolov3_tiny", 8.9, [(1, 255, 5, 5), (1, 255, 10, 10)]),
])
def test_nets_have_the_published_parameters(name: str, millions: float, shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    module, args, kwargs = make(name, SMALL)
    with torch.inference_mode():
        outputs = leaves(module(*args, **kwargs))
    assert round(sum(p.numel() for p in module.parameters()) / 1e6, 1) == millions
    assert [tuple(t.shape) for t in outputs] == shapes


@pytest.mark.parametrize(("net", "images", "shapes"), [
    (lambda: RepVgg([(1, 5), (2, 7), (1, 16)]), (3, 3, 37, 24), [(3, 1000)]),
    pytest.param(lambda: YoloV8(4, 2), (1, 3, 32, 96), [(1, 144, 4, 12), (1, 144, 2, 6), (1, 144, 1, 3)], marks=pytest.mark.slow),
    pytest.param(lambda: YoloV3Tiny(3), (2, 3, 96, 32), [(2, 255, 3, 1), (2, 255, 6, 2)], marks=pytest.mark.slow),
], ids=["repvgg", "yolov8", "yolov3"])
def test_numbers_are_pytorchs(net: Any, images: tuple[int, ...], shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(1)
    module, x = with_he_weights(net()).eval(), torch.randn(images)
    with torch.inference_mode():
        expected, got = leaves(module(x)), leaves(svod.torch.compile(module, x)(x))
    assert [tuple(t.shape) for t in got] == shapes
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
