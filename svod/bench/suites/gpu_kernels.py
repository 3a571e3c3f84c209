"""The suite gpu: core's kinds of kernels, in types and sizes that fill a GPU, and small ones for other devices.

A device that computes in software (`Target.software_lanes`), or the CPU, takes seconds for a GPU's millisecond: it gets the same kernels
with extents a quarter to an eighth as long. Types that a device lacks are reported and left out when the case is prepared.
"""
from __future__ import annotations

from collections.abc import Sequence

from svod.bench.suites import cases
from svod.bench.suites.cases import Case
from svod.core.machine.target import Target

GPU = "gpu"
WIDE, HALF, BRAIN = "float32", "float16", "bfloat16"


def is_gpu(target: Target) -> bool:
    """Whether a target is a real GPU, not one emulated on a processor."""
    return target.has_groups and not target.software_lanes


def gpu_cases(small: bool) -> Sequence[Case]:
    """The 25 kernels of the suite gpu. `small`: with extents for a device that computes in software."""
    def pick(real: int, software: int) -> int:
        return software if small else real
    return (*_products([pick(1024, 128), pick(4096, 512)], pick(4096, 512)),
            *_rows(pick(16384, 1024), pick(4096, 512)),
            *(_attention(pick(16, 4), pick(2048, 256), pick(128, 64), dtype) for dtype in (WIDE, HALF, BRAIN)),
            *_convolutions(pick(256, 32), pick(112, 28), pick(448, 112)),
            *_copies(pick(8192, 1024), pick(32, 8), pick(4096, 256)))


def _suffix(dtype: str) -> str:
    return "" if dtype == WIDE else f"_{dtype}"


def _word(dtype: str) -> str:
    return "" if dtype == WIDE else f" {dtype}"


def _products(sizes: Sequence[int], wide: int) -> list[Case]:
    """Square products of each type, and one with few rows, which reads a large matrix of weights once."""
    found = [cases.matmul(f"gpu_gemm_{n}{_suffix(t)}", f"GEMM {n}{_word(t)}", (n, n), (n, n), t, suite=GPU)
             for n in sizes for t in (WIDE, HALF, BRAIN)]
    few = cases.matmul(f"gpu_gemm_16x{wide}_{HALF}", f"GEMM 16×{wide}×{wide} {HALF}", (16, wide), (wide, wide), HALF, suite=GPU)
    return [*found, few]


def _rows(rows: int, columns: int) -> list[Case]:
    shape, kinds = f"{rows}×{columns}", (("softmax", "softmax", cases.softmax), ("layer_norm", "layer norm", cases.layer_norm),
                                         ("rms_norm", "RMS norm", cases.rms_norm))
    return [make(f"gpu_{name}_{rows}x{columns}{_suffix(t)}", f"{words} {shape}{_word(t)}", rows, columns, dtype=t, suite=GPU)
            for name, words, make in kinds for t in (WIDE, HALF)]


def _attention(heads: int, length: int, width: int, dtype: str) -> Case:
    return cases.attention(f"gpu_attention_{heads}x{length}x{width}{_suffix(dtype)}",
                           f"attention {heads} heads × {length} × {width}{_word(dtype)}", heads, length, width, dtype=dtype, suite=GPU)


def _convolutions(channels: int, size: int, image: int) -> list[Case]:
    found = [cases.conv2d(f"gpu_conv{k}x{k}_{channels}_{size}{_suffix(t)}", f"conv {k}×{k} {channels}→{channels} at {size}²{_word(t)}",
                          channels, channels, k, size, dtype=t, suite=GPU) for k, t in ((3, WIDE), (3, HALF), (1, HALF))]
    return [*found, cases.conv2d(f"gpu_conv7x7_s2_{image}", f"conv 7×7 stride 2 3→64 at {image}²", 3, 64, 7, image, 2, suite=GPU),
            cases.conv2d(f"gpu_conv_depthwise_{size}", f"conv 3×3 depthwise {channels} at {size}²", channels, channels, 3, size,
                         groups=channels, suite=GPU)]


def _copies(side: int, heads: int, length: int) -> list[Case]:
    return [cases.transpose(f"gpu_transpose_{side}", f"transpose {side}²", side, side, suite=GPU),
            cases.heads_first(f"gpu_heads_{length}x{heads}x128", f"heads first {length}×{heads}×128", length, heads, 128, suite=GPU),
            cases.cast(f"gpu_cast_{side}", f"cast {side}² to float16", side, side, HALF, suite=GPU)]
