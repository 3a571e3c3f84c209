"""A corpus of about 40 small kernels of the kinds that models consist of: `CORPUS[name]()` is a canonical kernel AST.

Each is built with the Tensor front end and scheduled; an entry whose schedule has several kernels names one of them. Extents are small
enough for the NumPy evaluator and include 1, primes and non-multiples of vector widths.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from svod.core.graph import graph
from svod.core.ir.uop import UOp
from svod.core.schedule.schedule import create_schedule
from svod.tensor import Tensor

Build = Callable[[], Tensor]


def data(*shape: int, dtype: str = "float32") -> Tensor:
    """Make a realised Tensor of a shape; kernels depend only on its shape and dtype."""
    base = "float32" if dtype == "bfloat16" else dtype
    return Tensor(np.zeros(shape, base)) if base == dtype else Tensor(np.zeros(shape, np.uint16)).bitcast(dtype)


def kernel_of(tensor: Tensor, index: int = -1) -> UOp:
    """Return kernel AST number `index` of the schedule of one Tensor."""
    return create_schedule(graph.sink(tensor.uop)).calls[index].ast


def gemm(m: int, n: int, k: int, dtype: str = "float32") -> Tensor:
    return data(m, k, dtype=dtype) @ data(k, n, dtype=dtype)


def conv(c: int, o: int, size: int, k: int, n: int = 1, **options: int) -> Tensor:
    groups = options.get("groups", 1)
    return data(n, c, size, size).conv2d(data(o, c // groups, k, k), **options)


def batch_normed_conv() -> Tensor:
    y = data(1, 3, 9, 9).conv2d(data(5, 3, 3, 3), padding=1)
    return (y.batch_norm(data(5), data(5), data(5), data(5)) + data(1, 5, 9, 9)).relu()


def attention(tokens: int, width: int, causal: bool = False) -> Tensor:
    q, k, v = (data(2, 3, tokens, width) for _ in range(3))
    return q.scaled_dot_product_attention(k, v, is_causal=causal)


def attention_window() -> Tensor:
    """Attention with a mask: each query attends to its own position, the three before it, and all after it."""
    rows, columns = Tensor.arange(36).reshape(36, 1), Tensor.arange(36)
    scores = (data(36, 3) @ data(3, 36)).where(columns > rows - 4, float("-inf"))
    return scores.softmax(-1) @ data(36, 3)


def residual_layer_norm() -> Tensor:
    return (data(5, 33) + data(5, 33)).layer_norm(33, data(33), data(33))


BUILDERS: dict[str, Build] = {
    "gemm": lambda: gemm(17, 19, 23),
    "gemm_aligned": lambda: gemm(32, 48, 16),
    "gemm_nt": lambda: data(13, 24) @ data(20, 24).transpose(0, 1),
    "gemm_tn": lambda: data(24, 13).transpose(0, 1) @ data(24, 20),
    "gemm_batched": lambda: data(3, 9, 14) @ data(3, 14, 10),
    "gemm_broadcast": lambda: data(2, 3, 5, 8) @ data(8, 6),
    "gemm_bias_relu": lambda: data(12, 20).linear(data(18, 20), data(18)).relu(),
    "gemm_gelu": lambda: data(7, 16).linear(data(24, 16), data(24)).gelu(),
    "gemm_f16": lambda: gemm(11, 16, 20, "float16"),
    "gemm_f64": lambda: gemm(6, 9, 10, "float64"),
    "gemm_bf16": lambda: gemm(9, 16, 12, "bfloat16"),
    "gemm_int8": lambda: data(10, 16, dtype="int8").cast("int32") @ data(16, 12, dtype="int8").cast("int32"),
    "gemv": lambda: data(37, 29) @ data(29),
    "vecmat": lambda: data(29) @ data(29, 37),
    "dot": lambda: (data(101) * data(101)).sum(),
    "outer": lambda: data(13, 1) * data(1, 17),
    "conv3x3": lambda: conv(3, 8, 10, 3, padding=1),
    "conv_stride": lambda: conv(4, 6, 11, 3, n=2, stride=2, padding=1),
    "conv_dilated": lambda: conv(2, 4, 12, 3, dilation=2),
    "conv_wide_padding": lambda: conv(3, 6, 7, 3, dilation=5, padding=5),
    "conv_one_channel": lambda: data(1, 1, 5, 5).conv2d(data(1, 1, 18, 9), padding=(17, 8)),
    "conv_groups": lambda: conv(4, 6, 7, 3, padding=1, groups=2),
    "conv_depthwise": lambda: conv(6, 6, 9, 3, padding=1, groups=6),
    "conv1x1": lambda: conv(8, 5, 7, 1),
    "conv_bn_residual": batch_normed_conv,
    "max_pool": lambda: data(1, 3, 11, 11).max_pool2d(3, 2, 1),
    "avg_pool": lambda: data(2, 3, 8, 8).avg_pool2d(2),
    "global_avg_pool": lambda: data(2, 5, 7, 7).mean((2, 3)),
    "softmax": lambda: data(5, 37).softmax(-1),
    "softmax_columns": lambda: data(19, 6).softmax(0),
    "log_softmax": lambda: data(3, 4, 11).log_softmax(-1),
    "layer_norm": lambda: data(6, 32).layer_norm(32, data(32), data(32)),
    "layer_norm_residual": residual_layer_norm,
    "rms_norm": lambda: data(4, 3, 29).rms_norm(29, data(29)),
    "sum_rows": lambda: data(21, 34).sum(1),
    "sum_columns": lambda: data(34, 21).sum(0),
    "sum_all": lambda: data(7, 9, 5).sum(),
    "sum_middle": lambda: data(5, 13, 6).sum(1),
    "max_rows": lambda: data(16, 31).max(1),
    "mean_var": lambda: data(8, 40).var(1),
    "argmax": lambda: data(9, 23).argmax(1),
    "transpose": lambda: data(13, 29).transpose(0, 1).contiguous(),
    "permute": lambda: data(3, 5, 7, 2).permute(2, 0, 3, 1).contiguous(),
    "elementwise": lambda: (data(3, 41) * 2.0 + data(3, 41)).exp(),
    "broadcast_add": lambda: data(6, 1, 10) + data(7, 1),
    "int_arithmetic": lambda: data(50, dtype="int32") * 3 + data(50, dtype="int32"),
    "cast_f16": lambda: data(45, dtype="float16").cast("float32"),
    "embedding": lambda: data(4, 3, dtype="int64").embedding(data(11, 8)),
    "gather_rows": lambda: data(12, 5)[data(7, dtype="int32")],
    "attention": lambda: attention(9, 8),
    "attention_causal": lambda: attention(6, 4, causal=True),
    "attention_window": attention_window,
    "pad": lambda: data(5, 6).pad((1, 2, 0, 3)) + 1.0,
    "cat": lambda: Tensor.cat([data(3, 7), data(2, 7)], dim=0) * 2.0,
    "cat_part": lambda: Tensor.cat([data(5, 3), data(5, 7)], dim=1),       # columns 3 … 9 of 10
    "flip": lambda: data(6, 11).flip(1).contiguous(),
    "scalar": lambda: data(1) + data(1),
}


def _entry(build: Build) -> Callable[[], UOp]:
    return lambda: kernel_of(build())


CORPUS: dict[str, Callable[[], UOp]] = {name: _entry(build) for name, build in BUILDERS.items()}
