"""Convolutional nets of the suite torch, written from their published descriptions: RepVGG-A0, and detectors like YOLOv8n and YOLOv3-tiny.

    images (n, 3, h, w)  →  RepVgg       (n, 1000)
                         →  YoloV8       three maps (n, 64 + classes, h/s, w/s), s = 8, 16, 32
                         →  YoloV3Tiny   two maps (n, 3·(5 + classes), h/s, w/s), s = 32, 16

The detectors return the maps of their heads; no boxes are decoded. Sides of their images are multiples of 32.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Tensor = Any        # stands for torch.Tensor, because mypy also runs without torch

CLASSES = 80                    # kinds of objects in the data set COCO
BOX_CHANNELS = 64               # YOLOv8's for a box: four distances to its sides, each a distribution over 16 values


def with_he_weights(net: nn.Module) -> nn.Module:
    """Draw the weights of convolutions after He et al. ("Delving deep into rectifiers", 2015), so that values keep their size from layer to
    layer."""
    for m in net.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
    return net


# -- RepVGG ---------------------------------------------------------------------------------------------

class RepVgg(nn.Sequential):  # type: ignore[misc]
    """RepVGG (Ding et al., 2021) in its form for inference: the branches of each block are merged into one 3×3 convolution. `stages`: the
    blocks and the width of each stage, whose first block halves the image."""

    def __init__(self, stages: Sequence[tuple[int, int]]) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for blocks, width in stages:
            for i in range(blocks):
                layers += [nn.Conv2d(channels, width, 3, stride=1 if i else 2, padding=1), nn.ReLU()]
                channels = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def repvgg_a0() -> nn.Module:
    """The smallest RepVGG of its paper."""
    return with_he_weights(RepVgg([(1, 48), (2, 48), (4, 96), (14, 192), (1, 1280)]))


# -- YOLOv8 ---------------------------------------------------------------------------------------------

def normed(channels: int, width: int, size: int, stride: int, activation: nn.Module) -> nn.Sequential:
    """A convolution that keeps the sides of the image but for its stride, a norm and an activation."""
    return nn.Sequential(nn.Conv2d(channels, width, size, stride, size // 2, bias=False), nn.BatchNorm2d(width), activation)


def swished(channels: int, width: int, size: int = 1, stride: int = 1) -> nn.Sequential:
    """A convolution with a norm and SiLU."""
    return normed(channels, width, size, stride, nn.SiLU())


class Bottleneck(nn.Module):  # type: ignore[misc]
    """Two 3×3 convolutions, to whose result the input is added if `residual`."""

    def __init__(self, channels: int, residual: bool) -> None:
        super().__init__()
        self.body, self.residual = nn.Sequential(swished(channels, channels, 3), swished(channels, channels, 3)), residual

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class C2f(nn.Module):  # type: ignore[misc]
    """A chain of bottlenecks over half of the channels; the other half and the results of all bottlenecks are joined."""

    def __init__(self, channels: int, width: int, depth: int = 1, residual: bool = False) -> None:
        super().__init__()
        self.enter, self.leave = swished(channels, width), swished((2 + depth) * (width // 2), width)
        self.chain = nn.ModuleList([Bottleneck(width // 2, residual) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.enter(x).chunk(2, 1))
        for block in self.chain:
            parts.append(block(parts[-1]))
        return self.leave(torch.cat(parts, 1))


class Sppf(nn.Module):  # type: ignore[misc]
    """Spatial pyramid pooling: maxima over windows of 5, 9 and 13, as three pools of 5 one after the other."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.enter, self.leave = swished(channels, channels // 2), swished(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.enter(x)]
        for _ in range(3):
            parts.append(functional.max_pool2d(parts[-1], 5, 1, 2))
        return self.leave(torch.cat(parts, 1))


class Head(nn.Module):  # type: ignore[misc]
    """The channels of a box and those of the classes for each position of a map, each by three convolutions."""

    def __init__(self, channels: int, box_width: int, class_width: int) -> None:
        super().__init__()
        self.box, self.classes = (nn.Sequential(swished(channels, width, 3), swished(width, width, 3), nn.Conv2d(width, out, 1))
                                  for width, out in ((box_width, BOX_CHANNELS), (class_width, CLASSES)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.box(x), self.classes(x)], 1)


class YoloV8(nn.Module):  # type: ignore[misc]
    """A detector like YOLOv8: a backbone of C2f blocks, a neck that joins its maps upwards and then downwards, a head for each of three
    maps. `width`: channels after the first convolution; `depth`: bottlenecks of the longest C2f blocks, half of it in all others."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        c2, c3, c4, c5 = (width * k for k in (2, 4, 8, 16))
        few = depth // 2

        def stage(channels: int, out: int, blocks: int) -> nn.Sequential:
            return nn.Sequential(swished(channels, out, 3, 2), C2f(out, out, blocks, residual=True))
        self.to_8 = nn.Sequential(swished(3, width, 3, 2), stage(width, c2, few), stage(c2, c3, depth))
        self.to_16, self.to_32 = stage(c3, c4, depth), nn.Sequential(stage(c4, c5, few), Sppf(c5))
        self.up_16, self.up_8 = C2f(c5 + c4, c4, few), C2f(c4 + c3, c3, few)
        self.halve_8, self.down_16 = swished(c3, c3, 3, 2), C2f(c3 + c4, c4, few)
        self.halve_16, self.down_32 = swished(c4, c4, 3, 2), C2f(c4 + c5, c5, few)
        self.heads = nn.ModuleList([Head(c, max(BOX_CHANNELS, c3 // 4), max(CLASSES, c3)) for c in (c3, c4, c5)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        map_8 = self.to_8(x)
        map_16 = self.to_16(map_8)
        map_32 = self.to_32(map_16)
        joined_16 = self.up_16(torch.cat([doubled(map_32), map_16], 1))
        out_8 = self.up_8(torch.cat([doubled(joined_16), map_8], 1))
        out_16 = self.down_16(torch.cat([self.halve_8(out_8), joined_16], 1))
        out_32 = self.down_32(torch.cat([self.halve_16(out_16), map_32], 1))
        return tuple(head(m) for head, m in zip(self.heads, (out_8, out_16, out_32), strict=True))


def doubled(x: Tensor) -> Tensor:
    """An image of twice the sides, each pixel repeated."""
    return functional.interpolate(x, scale_factor=2.0, mode="nearest")


def yolov8n() -> nn.Module:
    """A detector of the width and depth of YOLOv8n."""
    return with_he_weights(YoloV8(16, 2))


# -- YOLOv3-tiny ----------------------------------------------------------------------------------------

def leaky(channels: int, width: int, size: int = 3) -> nn.Sequential:
    """A convolution with a norm and a leaky ReLU."""
    return normed(channels, width, size, 1, nn.LeakyReLU(0.1))


class YoloV3Tiny(nn.Module):  # type: ignore[misc]
    """A detector like YOLOv3-tiny: convolutions and max pools, then a head over the last map, and one over that map doubled and joined
    with the map of twice its sides. `width`: channels after the first convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        out = 3 * (5 + CLASSES)         # for each of three anchors: a box, whether it has an object, the classes
        pool = nn.MaxPool2d(2)
        self.to_16 = nn.Sequential(leaky(3, width), *[m for k in (1, 2, 4, 8) for m in (pool, leaky(k * width, 2 * k * width))])
        # the last pool has stride 1; its windows at the right and lower edges have one row or column less, as repeating them amounts to
        self.to_32 = nn.Sequential(pool, leaky(16 * width, 32 * width), nn.ReplicationPad2d((0, 1, 0, 1)), nn.MaxPool2d(2, 1),
                                   leaky(32 * width, 64 * width), leaky(64 * width, 16 * width, 1))
        self.head_32 = nn.Sequential(leaky(16 * width, 32 * width), nn.Conv2d(32 * width, out, 1))
        self.narrow = leaky(16 * width, 8 * width, 1)
        self.head_16 = nn.Sequential(leaky(24 * width, 16 * width), nn.Conv2d(16 * width, out, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        map_16 = self.to_16(x)
        map_32 = self.to_32(map_16)
        return self.head_32(map_32), self.head_16(torch.cat([doubled(self.narrow(map_32)), map_16], 1))


def yolov3_tiny() -> nn.Module:
    """A detector of the widths of YOLOv3-tiny."""
    return with_he_weights(YoloV3Tiny(16))
