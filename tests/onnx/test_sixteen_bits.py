"""Every operator in float16 and bfloat16: its results are those of float64, rounded once.

The operands of a row of the table have numbers of several magnitudes, so that squares, sums and products within an operator overflow or
underflow in 16 bits although its result does not. The reference is the onnx package's evaluator in float64. If it lacks an operator or
computes it in fewer bits, the reference is svod in float64, which is then compared with onnxruntime in float32.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import svod.onnx
import svod.onnx.operators
from svod.onnx.registry import MICROSOFT, _operators
from svod.onnx.schemas import schema_of
from tests.draws import a_sixteenth, an_eighth

NEWEST = onnx.defs.onnx_opset_version()
KINDS: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
RNG = np.random.default_rng(16)
Array = Any


def numbers(*shape: int, low: float = 0.5, high: float = 1.5, signed: bool = False, scaled: bool = True) -> Array:
    """Numbers whose rows along the first axis have the magnitudes 1, 300 and 1/4096."""
    x = RNG.uniform(low, high, shape)
    if signed:
        x *= RNG.choice([-1.0, 1.0], shape)
    if scaled:
        x *= np.resize([1.0, 300.0, 2.0 ** -12], shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
    return x


def signed(*shape: int) -> Array:
    return numbers(*shape, signed=True)


def plain(*shape: int, low: float = -1.5, high: float = 1.5) -> Array:
    """Numbers of one magnitude."""
    return numbers(*shape, low=low, high=high, scaled=False)


@dataclass(frozen=True)
class Fixed:
    """An operand that is float32, regardless of the type of the others."""

    array: Array


@dataclass(frozen=True)
class Row:
    """Operands of one node: floats become 16-bit, integers and bools stay, None is left out. `slack`: an absolute error that float32
    makes if operands cancel, relative to the largest result of a row along the first axis. `apart`: the same in units of the type's
    epsilon, for values that are rounded more than once. `by_svod`: the onnx package's evaluator cannot be the reference."""

    operands: Sequence[Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    opset: int = NEWEST
    outputs: int = 1
    slack: float = 0.0
    apart: float = 0.0
    by_svod: bool = False
    kinds: tuple[str, ...] = ("float16", "bfloat16")


def row(*operands: Any, **attributes: Any) -> Row:
    """Make a row; keywords that are no attributes of an operator are fields of the row."""
    own = {k: attributes.pop(k) for k in ("opset", "outputs", "slack", "apart", "by_svod", "kinds") if k in attributes}
    return Row(operands, attributes, **own)


def multiplied(*operands: Any, **attributes: Any) -> list[Row]:
    """Rows of attention. Its probabilities are rounded to bfloat16 before their product with the values, as in PyTorch's kernels, so
    that matrix instructions can multiply them."""
    return [row(*operands, kinds=("float16",), **attributes), row(*operands, kinds=("bfloat16",), apart=1.0, **attributes)]


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


KIND = "the type of 16 bits, as TensorProto numbers it"
LARGE = numbers(3, 2, 6, 6, low=30000, high=60000, scaled=False)        # their sums exceed the range of float16
IMAGE, HOLD = numbers(3, 2, 6, 5), np.array([[[0, 1], [2, 0]]])

ROWS: dict[str, list[Row]] = {
    # -- elements
    **{name: [row(signed(3, 7))] for name in (
        "Abs", "Neg", "Floor", "Ceil", "Round", "Sign", "Relu", "Sigmoid", "Softsign", "HardSwish", "LeakyRelu", "Elu", "Celu", "Selu",
        "HardSigmoid", "Swish", "ThresholdedRelu", "Erf", "Tanh", "Sinh", "Cosh", "Sin", "Cos", "Tan", "Atan", "Asinh", "IsNaN", "IsInf",
        "Exp", "Reciprocal", "Hardmax", "ArgMax", "ArgMin", "Flatten", "Transpose", "Dropout")},
    **{name: [row(numbers(3, 7))] for name in ("Log", "Sqrt")},
    **{name: [row(plain(3, 7, low=-0.95, high=0.95))] for name in ("Asin", "Acos", "Atanh")},
    **{name: [row(signed(3, 7), slack=1e-6)] for name in ("Softplus", "Mish")},
    "Acosh": [row(plain(3, 7, low=1.01, high=40))],
    "Gelu": [row(plain(3, 7, low=-4, high=4), slack=1e-6, approximate=how) for how in ("none", "tanh")] + [row(signed(3, 7), slack=1e-6)],
    "Shrink": [row(signed(3, 7), bias=0.1, lambd=0.3, kinds=("float16",))],
    "PRelu": [row(signed(3, 7), plain(7))],
    "SwiGLU": [row(signed(3, 7), signed(3, 7), alpha=0.7)],
    **{name: [row(signed(3, 7), signed(3, 7))] for name in (
        "Add", "Sub", "Mul", "Div", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Equal", "Max", "Min")},
    "Mod": [row(signed(3, 7), signed(3, 7), fmod=1)],
    "Pow": [row(numbers(3, 7), plain(3, 7, low=-3, high=3)), row(signed(3, 7), np.array([3, -2, 0, 1, 2, 5, 4])),
            row(numbers(3, 7), Fixed(np.full(1, 1 / 3, np.float32)))],
    "Sum": [row(np.array([40000.0, 3e-5]), np.array([40000.0, 2e-5]), np.array([-60000.0, 1e-5]))],
    "Mean": [row(np.array([40000.0]), np.array([40000.0]), np.array([40000.0])), row(signed(3, 7), signed(3, 7), slack=1e-6)],
    "Where": [row(np.array([True, False, True]), signed(2, 3), signed(2, 3))],
    "Clip": [row(signed(3, 7), np.array(-0.3), np.array(200.3))],
    "Cast": [row(signed(3, 7), to=TensorProto.FLOAT)],
    "CastLike": [row(Fixed(signed(3, 7).astype(np.float32)), plain(2))],
    "Softmax": [row(signed(3, 7)), row(signed(3, 7), axis=0)],
    "LogSoftmax": [row(signed(3, 7), slack=1e-6, by_svod=True)],
    # -- views and choices
    "Reshape": [row(signed(3, 4), ints(2, 6))], "Squeeze": [row(signed(3, 1, 2), ints(1))], "Unsqueeze": [row(signed(3, 2), ints(1))],
    "Expand": [row(signed(3, 1), ints(3, 4))], "Tile": [row(signed(3, 2), ints(1, 2))],
    "Concat": [row(signed(3, 2), signed(3, 1), axis=1)], "Split": [row(signed(3, 4), ints(1, 3), axis=1, outputs=2)],
    "Slice": [row(signed(3, 7), ints(6), ints(0), ints(1), ints(-2))],
    "Pad": [row(signed(3, 4), ints(0, 1, 0, 2), np.array(0.3)), row(signed(3, 4), ints(0, 1, 0, 2), mode="reflect")],
    "DepthToSpace": [row(signed(3, 4, 2, 2), blocksize=2)], "SpaceToDepth": [row(signed(3, 1, 4, 4), blocksize=2)],
    "Trilu": [row(signed(3, 4))], "ReverseSequence": [row(signed(3, 4), ints(1, 2, 3, 2))],
    "Compress": [row(signed(3, 4), np.array([True, False, True]), axis=0)], "CenterCropPad": [row(signed(3, 4), ints(5, 3))],
    "Col2Im": [row(numbers(3, 4, 6), ints(3, 4), ints(2, 2)),
               row(LARGE[:, :, :2, :3].reshape(3, 4, 3) * [1, -0.5, 0.5], ints(1, 4), ints(1, 2))],
    "Gather": [row(signed(3, 4), ints(2, -1))], "GatherElements": [row(signed(3, 4), ints(2, 0, -1, 1).reshape(1, 4))],
    "GatherND": [row(signed(3, 4), ints(2, 1, 0, 3).reshape(2, 2))],
    "Scatter": [row(signed(3, 4), ints(2, 0, 1, 1).reshape(1, 4), signed(1, 4), opset=10, kinds=("float16",), by_svod=True)],
    "ScatterElements": [row(signed(3, 4), ints(2, 0, 1, 1).reshape(1, 4), signed(1, 4)),
                        row(np.zeros((1, 2)), ints(0, 0, 0).reshape(1, 3), np.array([[6e4, 6e4, -6e4]]), axis=1, reduction="add"),
                        row(np.ones((1, 2)), ints(0, 0, 0, 1).reshape(1, 4), np.array([[300.0, 300, 1e-3, 7]]), axis=1, reduction="mul")],
    "ScatterND": [row(np.zeros(3), ints(1, 1, 1, 1).reshape(4, 1), np.array([2048.0, 1, 1, 1]), reduction="add")],
    "TensorScatter": [row(signed(3, 1, 4, 2), signed(3, 1, 2, 2), ints(0, 1, 2))],
    "OneHot": [row(ints(0, 2), np.array(3), np.array([0.3, 1e-6]))],
    "TopK": [row(signed(3, 7), ints(3), outputs=2)],
    # -- reductions
    **{f"Reduce{name}": [row(numbers(3, 50), ints(1)), row(signed(3, 50), ints(1), slack=1e-6)] for name in ("Sum", "Mean")},
    **{f"Reduce{name}": [row(signed(3, 50), ints(1))] for name in ("Max", "Min", "L1", "SumSquare", "LogSumExp")},
    "ReduceL2": [row(signed(3, 50), ints(1)), row(np.full((1, 50), 300.0), ints(1)), row(np.full((1, 50), 1e-4), ints(1))],
    "ReduceLogSum": [row(numbers(3, 50), ints(1), slack=1e-6)],
    "ReduceProd": [row(np.array([[300.0, 200, 100, 1 / 512, 1 / 256], [1e-4, 1e-3, 3e-2, 7e3, 9e2]]), ints(1))],
    "CumSum": [row(numbers(3, 50), np.array(1)), row(numbers(3, 50), np.array(1), exclusive=1, reverse=1)],
    "CumProd": [row(np.array([[300.0, 200, 100, 1 / 512, 1 / 256], [1e-4, 1e-3, 3e-2, 7e3, 9e2]]), np.array(1))],
    "GlobalAveragePool": [row(LARGE), row(IMAGE)], "GlobalMaxPool": [row(IMAGE)],
    "GlobalLpPool": [row(IMAGE, p=p, by_svod=True) for p in (2, 3)],
    "NegativeLogLikelihoodLoss": [row(-LARGE[:, :, 0], np.array([[0, 1, 1, 0, 1, 0]] * 3), numbers(2, scaled=False), reduction=how)
                                  for how in ("mean", "sum", "none")],
    "SoftmaxCrossEntropyLoss": [row(signed(3, 4, 5), RNG.integers(0, 4, (3, 5)), numbers(4, scaled=False), reduction=how, outputs=2,
                                    slack=1e-6, by_svod=True)
                                for how in ("mean", "sum", "none")],
    # -- products
    "MatMul": [row(numbers(3, 50), numbers(50, 4, scaled=False)), row(signed(3, 50), plain(50, 4), slack=1e-6)],
    "Gemm": [row(np.full((1, 100), 100.0), np.full((100, 1), 10.0), alpha=0.01),
             row(numbers(3, 50), numbers(50, 4, low=5, high=15, scaled=False), alpha=0.01),
             row(numbers(3, 50), numbers(4, 50, low=5, high=15, scaled=False), signed(3, 1), alpha=0.01, beta=0.3, transB=1, slack=1e-6),
             row(np.array([[256.0, 256]]), np.array([[129.0], [129]]), np.array([-2000.0])),
             row(np.array([[1.0]]), np.array([[0.1]]), np.array([[300.0]]), alpha=0.5, beta=300.0)],
    "Einsum": [row(numbers(3, 50), numbers(50, 4, scaled=False), equation="ij,jk->ik"),
               row(numbers(3, 5), numbers(5, 4, low=200, high=300, scaled=False), numbers(4, 2, low=1e-3, high=2e-3, scaled=False),
                   equation="ij, jk, kl -> il")],
    "Det": [row(numbers(3, 3, 3) * np.eye(3) + plain(3, 3, 3) / 8192, slack=1e-6), row(np.array([[400.0, 1], [390, 400]]))],
    # -- convolution and pooling
    "Conv": [row(IMAGE, numbers(4, 2, 3, 3, scaled=False), pads=[1, 1, 1, 1]),
             row(IMAGE, numbers(4, 2, 3, 3, scaled=False), plain(4), strides=[2, 1], pads=[0, 1, 2, 0], slack=1e-6),
             row(np.array([[[100.0], [0.31]]]), np.array([[[10.0], [1.0]]]), np.array([-1000.0]), slack=1e-4),
             row(np.array([[[256.0], [256]]]), np.array([[[129.0], [129]]]), np.array([-2000.0]))],
    "ConvTranspose": [row(IMAGE, numbers(2, 4, 3, 3, scaled=False), strides=[2, 1], pads=[1, 0, 0, 1]),
                      row(np.array([[[256.0], [256]]]), np.array([[[129.0]], [[129]]]), np.array([-2000.0])),
                      row(np.array([[[100.0], [0.31]]]), np.array([[[10.0]], [[1.0]]]), np.array([-1000.0]), slack=1e-4)],
    "AveragePool": [row(LARGE, kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
                    row(IMAGE, kernel_shape=[3, 2], strides=[2, 2], ceil_mode=1, count_include_pad=1)],
    "MaxPool": [row(signed(3, 2, 6, 5), kernel_shape=[3, 2], outputs=2, by_svod=True)],
    "MaxUnpool": [row(signed(1, 1, 2, 2), ints(1, 3, 8, 14).reshape(1, 1, 2, 2), kernel_shape=[2, 2], strides=[2, 2])],
    "LpPool": [row(IMAGE, kernel_shape=[3, 3]), row(IMAGE, kernel_shape=[2, 2], p=3)],
    "LRN": [row(IMAGE, size=3, by_svod=True), row(numbers(3, 5, 2, 3), size=3, alpha=0.5, bias=2.0, by_svod=True)],
    "CausalConvWithState": [row(signed(3, 2, 7), plain(2, 1, 3), plain(2), signed(3, 2, 2), activation="silu", outputs=2, slack=2e-6)],
    # -- norms
    "BatchNormalization": [row(numbers(3, 4, 5), plain(4), plain(4), plain(4), numbers(4, scaled=False), slack=1e-6),
                           row(numbers(3, 4, 5), *(Fixed(numbers(4, scaled=False).astype(np.float32)) for _ in range(4)), slack=1e-6),
                           row(LARGE, np.ones(2), np.zeros(2), np.array([-3e4, 6e4]), np.array([1e-4, 6e4]))],
    "InstanceNormalization": [row(numbers(3, 4, 8), plain(4), plain(4), slack=3e-6), row(LARGE, plain(2), plain(2), slack=3e-6)],
    "LayerNormalization": [row(numbers(3, 32), plain(32), plain(32), outputs=3, slack=3e-6), row(LARGE, plain(6), plain(6), slack=3e-6)],
    "GroupNormalization": [row(numbers(3, 4, 8), plain(4), plain(4), num_groups=2, slack=3e-6)],
    "RMSNormalization": [row(numbers(3, 32), plain(32)), row(LARGE, Fixed(plain(6).astype(np.float32)))],
    "LpNormalization": [row(signed(3, 50), axis=1, p=p, by_svod=True) for p in (1, 2)],
    "MeanVarianceNormalization": [row(LARGE, slack=3e-6, by_svod=True), row(numbers(3, 2, 8), axes=[2], slack=3e-6, by_svod=True)],
    # -- attention
    "Attention": [
        *multiplied(*(numbers(2, 2, 4, 8, low=200, high=300, scaled=False) for _ in range(2)), signed(2, 2, 4, 8), scale=1e-4, slack=1e-4),
        *multiplied(signed(3, 2, 4, 8), plain(3, 2, 5, 8) / 128, signed(3, 2, 5, 8), plain(4, 5), is_causal=1, softcap=2.0, slack=1e-6)],
    "LinearAttention": [row(plain(1, 3, 4), plain(1, 3, 4), plain(1, 3, 4), None, -numbers(1, 3, 4, scaled=False), plain(1, 3, 2),
                            q_num_heads=2, kv_num_heads=2, outputs=2, slack=3e-6)],
    "RotaryEmbedding": [row(signed(3, 2, 5, 8), plain(3, 5, 4), plain(3, 5, 4), slack=1e-6)],
    # -- images and grids
    "Resize": [row(IMAGE, None, Fixed(np.array([1, 1, 1.7, 0.6], np.float32)), mode=how, slack=1e-6, by_svod=how == "cubic")
               for how in ("nearest", "linear", "cubic")],
    "Upsample": [row(IMAGE, Fixed(np.array([1, 1, 2, 1.5], np.float32)), mode=how, opset=9, kinds=("float16",), by_svod=True)
                 for how in ("nearest", "linear")],
    "AffineGrid": [row(plain(2, 2, 3), ints(2, 3, 4, 5), slack=1e-6)],
    "GridSample": [row(IMAGE, plain(3, 4, 4, 2, low=-1.2, high=1.2), mode=how, padding_mode="border", slack=3e-6,
                        by_svod=how == "cubic") for how in ("nearest", "linear", "cubic")],
    "DeformConv": [row(IMAGE, numbers(4, 2, 3, 3, scaled=False), plain(*IMAGE.shape[:1], 18, *(n - 2 for n in IMAGE.shape[2:])),
                       slack=1e-5, by_svod=True)],
    "MaxRoiPool": [row(IMAGE, np.array([[0.0, 0, 0, 4, 4], [1, 1, 1, 3, 5]]), pooled_shape=[2, 2], by_svod=True)],
    "RoiAlign": [row(IMAGE, np.array([[0.0, 0, 4, 4], [1, 1, 3, 5]]), ints(0, 1), output_height=2, output_width=2, sampling_ratio=2,
                     slack=1e-6)],
    # -- layers that recur
    **{name: [row(signed(5, 2, 3), plain(1, gates * 4, 3), plain(1, gates * 4, 4), plain(1, 2 * gates * 4), hidden_size=4,
                  outputs=2, slack=2e-6)] for name, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4))},
    # -- quantised
    "QuantizeLinear": [row(signed(3, 7), np.array(0.3), np.array(128, np.uint8)),
                       row(plain(20, 50, low=-30, high=30), np.array(0.3), np.array(3, np.int8))],
    "DequantizeLinear": [row(RNG.integers(-128, 128, (3, 7)).astype(np.int8), np.array(0.3), np.array(3, np.int8)),
                         row(RNG.integers(0, 65536, (3, 7)).astype(np.uint16), np.array(1e-3), np.array(60000, np.uint16))],
    "QLinearMatMul": [row(RNG.integers(0, 255, (3, 7)).astype(np.uint8), np.array(300.0), np.array(100, np.uint8),
                          RNG.integers(0, 255, (7, 2)).astype(np.uint8), np.array(300.0), np.array(9, np.uint8), np.array(6e4),
                          np.array(7, np.uint8))],
    # -- signals, and what is made of nothing
    "DFT": [row(signed(3, 8, 1), None, np.array(1), slack=1e-6, by_svod=True),
            row(signed(3, 5, 2), None, np.array(1), inverse=1, slack=1e-6, by_svod=True)],
    "STFT": [row(signed(3, 32, 1), np.array(8), numbers(16, scaled=False), np.array(16), slack=1e-6, by_svod=True)],
    **{f"{name}Window": [row(np.array(11), output_datatype=KIND, slack=1e-12)] for name in ("Hann", "Hamming", "Blackman")},
    "MelWeightMatrix": [row(np.array(4), np.array(16), np.array(8000), *(Fixed(np.float32(hertz)) for hertz in (100, 3900)),
                            output_datatype=KIND)],
    "Range": [row(np.array(0.1), np.array(9.0), np.array(0.3))],
    "EyeLike": [row(signed(3, 4))],
    # -- com.microsoft
    "com.microsoft.Gelu": [row(plain(3, 7, low=-4, high=4), slack=1e-6)],
    "com.microsoft.BiasGelu": [row(plain(3, 7, low=-4, high=4), plain(7), slack=1e-6)],
    "com.microsoft.FastGelu": [row(plain(3, 7, low=-4, high=4), plain(7), slack=1e-6)],
    "com.microsoft.QuickGelu": [row(signed(3, 7))],
    "com.microsoft.FusedConv": [row(IMAGE, numbers(4, 2, 3, 3, scaled=False), plain(4), activation="Relu", slack=1e-6)],
    "com.microsoft.FusedMatMul": [row(numbers(3, 50), numbers(4, 50, low=5, high=15, scaled=False), transB=1, alpha=0.01)],
    "com.microsoft.FusedGemm": [row(numbers(3, 50), numbers(50, 4, low=5, high=15, scaled=False), plain(4), alpha=0.01,
                                    activation="Relu", slack=1e-6)],
    "SimplifiedLayerNormalization": [row(numbers(3, 32), plain(32))],
    "com.microsoft.SkipLayerNormalization": [row(LARGE[0], LARGE[1], plain(6), plain(6), plain(6), slack=3e-6)],
    "com.microsoft.SkipSimplifiedLayerNormalization": [row(LARGE[0], LARGE[1], plain(6), plain(6))],
    "com.microsoft.EmbedLayerNormalization": [row(np.array([[0, 2, 1]], np.int32), np.zeros((1, 3), np.int32), signed(3, 8), plain(3, 8),
                                                  plain(2, 8), plain(8), plain(8), slack=3e-6, outputs=2)],
    "com.microsoft.Attention": [row(plain(2, 4, 8), plain(8, 24), plain(24), num_heads=2, slack=3e-6)],
    "com.microsoft.MultiHeadAttention": multiplied(*(plain(2, 4, 8) for _ in range(3)), plain(24), num_heads=2, slack=3e-6),
    "com.microsoft.GatherBlockQuantized": [row(Fixed(RNG.integers(0, 255, (4, 16)).astype(np.uint8)), np.array([2, 0]), numbers(4, 2),
                                               block_size=16, bits=4, gather_axis=0, quantize_axis=1, by_svod=True)],
    "com.microsoft.MatMulBnb4": [row(numbers(3, 32), Fixed(RNG.integers(0, 255, 64).astype(np.uint8)), plain(8, low=0.5),
                                     K=32, N=4, block_size=16, quant_type=1, slack=3e-6)],
    "com.microsoft.GroupQueryAttention": [row(*(plain(2, 4, 16) for _ in range(3)), None, None, np.array([3, 3], np.int32),
                                              np.array([4], np.int32), num_heads=2, kv_num_heads=2, slack=3e-6)],
    "com.microsoft.RotaryEmbedding": [row(signed(2, 5, 8), np.arange(10).reshape(2, 5), plain(16, 4), plain(16, 4), slack=1e-6)],
    "com.microsoft.MatMulIntegerToFloat": [row(*(RNG.integers(0, 255, shape).astype(np.uint8) for shape in ((3, 7), (7, 2))),
                                               np.array(2e-3), np.array(1e-4), *(np.array(zero, np.uint8) for zero in (9, 3)), plain(2),
                                               slack=1e-6)],
    "com.microsoft.MatMulNBits": [row(numbers(3, 32), RNG.integers(0, 255, (4, 1, 16)).astype(np.uint8), numbers(4, scaled=False),
                                      K=32, N=4, bits=4, block_size=32)],
}

# operators that no row tests, with the reason
APART = {
    **dict.fromkeys(("Identity", "Shape", "Size", "Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt", "SequenceConstruct",
                     "SequenceInsert", "SplitToSequence", "ConcatFromSequence", "Constant",
                     "ConstantOfShape"), "hands on what it is given, or what is in the file"),
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), "its nodes are computed each: test_nodes_inside_of_nodes"),
    **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"),
                    "makes random numbers"),
    "NonZero": "is refused where its operand is not known",
    "BitCast": "reads the bits",
    **dict.fromkeys(("com.microsoft.SimplifiedLayerNormalization", "com.microsoft.QuantizeLinear",
                     "com.microsoft.DequantizeLinear"), "is the operator of that name in ai.onnx"),
    **dict.fromkeys((f"com.microsoft.{name}" for name in (
        "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "QAttention", "QGemm", "QLinearAveragePool", "QLinearAdd",
        "QLinearMul", "QLinearConcat", "QLinearGlobalAveragePool", "QLinearLeakyRelu",
        "QLinearSigmoid", "QLinearSoftmax")), "its floats are scales, of float32"),
}


def takes_floats(domain: str, name: str) -> bool:
    schema = schema_of(name, domain, NEWEST)
    return schema is None or any("tensor(float16)" in p.types for p in (*schema.inputs, *schema.outputs))


def test_the_table_has_every_operator() -> None:
    there = {f"{domain}.{name}".lstrip(".") for domain, name in _operators if takes_floats(domain, name)}
    assert there == ROWS.keys() | APART.keys()
    assert not ROWS.keys() & APART.keys()


def built(name: str, given: Row, kind: str, operands: Sequence[Any]) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """A model of one node over operands of a type, and its inputs."""
    domain, _, op = name.rpartition(".")
    feeds = {f"i{k}": np.asarray(o) for k, o in enumerate(operands) if o is not None}
    made = helper.np_dtype_to_tensor_dtype(np.dtype(KINDS.get(kind, kind)))
    attributes = {k: made if v is KIND else v for k, v in given.attributes.items()}
    names = [f"i{k}" if o is not None else "" for k, o in enumerate(operands)]
    node = helper.make_node(op, names, [f"o{k}" for k in range(given.outputs)], domain=domain, **attributes)
    inputs = [helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in feeds.items()]
    graph = helper.make_graph([node], "g", inputs, [helper.make_empty_tensor_value_info(o) for o in node.output])
    opsets = [helper.make_opsetid("", given.opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), feeds


def of_type(operands: Sequence[Any], kind: Any, narrow: Any) -> list[Any]:
    """Convert the operands: floats of a row are rounded to the narrow type, then converted to the given type."""
    def typed(operand: Any) -> Any:
        if isinstance(operand, Fixed):
            return operand.array
        return operand if getattr(operand, "dtype", None) != np.float64 else operand.astype(narrow).astype(kind)
    return [typed(o) for o in operands]


def run(name: str, given: Row, kind: str, operands: Sequence[Any], as_weights: bool = False) -> list[Any]:
    model, feeds = built(name, given, kind, operands)
    if as_weights:
        del model.graph.input[:]
        model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in feeds.items())
        feeds = {}
    made = svod.onnx.load(model)(feeds)
    return list(made) if isinstance(made, (list, tuple)) else [made]


def wanted(name: str, given: Row, narrow: Any) -> list[Any]:
    """The results in float64 for operands that were rounded to the narrow type."""
    wide = of_type(given.operands, np.float64, narrow)
    if not given.by_svod and not name.startswith(MICROSOFT) and "Simplified" not in name:
        model, feeds = built(name, given, "float64", wide)
        return list(ReferenceEvaluator(model).run(None, feeds))
    results = run(name, given, "float64", wide)
    model, feeds = built(name, replace(given, opset=min(given.opset, 21)), "float32", of_type(given.operands, np.float32, narrow))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("o0", TensorProto.FLOAT, None))
    for ours, other in zip(results, onnxruntime_results(model, feeds), strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-4, atol=1e-5 * np.abs(other).max(initial=0))
    return results


def onnxruntime_results(model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    """Run onnxruntime; skips the test if it is not installed, because it is not a test dependency."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def rounding(x: Array, kind: Any) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(kind).astype(np.float64)


def check(result: Array, exact: Array, kind: Any, given: Row) -> None:
    """Whether a result is a rounding of a number that is as close to the exact one as float32 allows."""
    assert result.shape == np.shape(exact)
    if result.dtype != kind:
        np.testing.assert_allclose(np.asarray(result, np.float64), np.asarray(exact, np.float64), rtol=1e-5)
        return
    exact = np.asarray(exact, np.float64)
    rows = np.abs(np.where(np.isfinite(exact), exact, 0))
    most = rows.max(tuple(range(1, exact.ndim)), keepdims=True) if exact.ndim > 1 else rows.max(initial=0)
    near = 1e-5 * rows + (given.slack + given.apart * float(ml_dtypes.finfo(kind).eps)) * most
    below, above, got = rounding(exact - near, kind), rounding(exact + near, kind), result.astype(np.float64)
    wrong = ~((below <= got) & (got <= above) | (np.isnan(exact) & np.isnan(got)))
    found = zip(*(v[wrong] for v in (got, exact, below, above)), strict=True)
    shown = "; ".join(f"{g} for {e}, which is {b} to {a}" for g, e, b, a in found)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}: {shown[:400]}"


# the first row of an operator with each of its types, other rows with one type in turn
CASES = [(name, i, kind) for name, rows in ROWS.items() for i, given in enumerate(rows)
         for kind in (given.kinds if i == 0 else [list(given.kinds)[i % len(given.kinds)]])]


@pytest.mark.parametrize(("name", "i", "kind"), a_sixteenth(CASES))
def test_results_are_rounded_once(name: str, i: int, kind: str) -> None:
    given, narrow = ROWS[name][i], KINDS[kind]
    results = run(name, given, kind, of_type(given.operands, narrow, narrow))
    for result, exact in zip(results, wanted(name, given, narrow), strict=True):
        check(result, exact, narrow, given)


@pytest.mark.parametrize("name", an_eighth(ROWS))
def test_known_operands_too(name: str) -> None:
    """Known operands: weights are known during translation."""
    given = ROWS[name][0]
    results = run(name, given, "float16", of_type(given.operands, np.float16, np.float16), as_weights=True)
    for result, exact in zip(results, wanted(name, given, np.float16), strict=True):
        check(result, exact, np.float16, given)


# -- graphs --------------------------------------------------------------------------------------------------------------------
def graph_of(nodes: Sequence[Any], kind: Any, made: int, x: Array, weights: dict[str, Array] | None = None) -> onnx.ModelProto:
    """A model of x whose last node makes y, of a type given by TensorProto's number."""
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(np.dtype(kind)), x.shape)],
                              [helper.make_tensor_value_info("y", made, None)],
                              [numpy_helper.from_array(w.astype(kind), k) for k, w in (weights or {}).items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def both(model: onnx.ModelProto, x: Array) -> tuple[Array, Array]:
    """The results of svod and of onnxruntime."""
    return svod.onnx.load(model, device="CPU")(x), onnxruntime_results(model, {"x": x})[0]


NODE, INFO = helper.make_node, helper.make_tensor_value_info


def test_nodes_hand_on_what_was_not_rounded() -> None:
    """Squares that float16 cannot represent, and sums between two of them, as in onnxruntime. A Cast rounds."""
    x = np.array([300, 3e-5, 2049], np.float16)
    roots = graph_of([NODE("Mul", ["x", "x"], ["s"]), NODE("Reshape", ["s", "to"], ["r"]), NODE("Sqrt", ["r"], ["y"])],
                     np.float16, TensorProto.FLOAT16, x)
    roots.graph.initializer.append(numpy_helper.from_array(ints(3, 1), "to"))
    ours, theirs = both(roots, x)
    np.testing.assert_array_equal(ours, x.reshape(3, 1))
    np.testing.assert_array_equal(ours, theirs)
    steps = graph_of([NODE("Add", ["x", "one"], ["s"]), NODE("Sub", ["s", "x"], ["y"])], np.float16, TensorProto.FLOAT16, x,
                     {"one": np.array(0.5)})
    ours, theirs = both(steps, x)
    np.testing.assert_array_equal(ours, [0.5, 0.5, 0.5])
    np.testing.assert_array_equal(ours, theirs)
    cast = graph_of([NODE("Cast", ["x"], ["w"], to=TensorProto.FLOAT), NODE("Mul", ["w", "w"], ["s"]),
                     NODE("Cast", ["s"], ["h"], to=TensorProto.FLOAT16), NODE("Sqrt", ["h"], ["y"])], np.float16, TensorProto.FLOAT16, x)
    np.testing.assert_array_equal(both(cast, x)[0], [np.inf, 0, np.inf])


def test_nodes_of_bfloat16_round_each() -> None:
    """Each node of bfloat16 rounds, because processors and devices have instructions that multiply it."""
    x = np.array([256], ml_dtypes.bfloat16)
    steps = graph_of([NODE("Add", ["x", "one"], ["s"]), NODE("Sub", ["s", "x"], ["y"])], ml_dtypes.bfloat16, TensorProto.BFLOAT16, x,
                     {"one": np.array(1.0)})
    assert svod.onnx.load(steps)(x) == 0


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_nodes_inside_of_nodes(kind: str) -> None:
    narrow, number = KINDS[kind], helper.np_dtype_to_tensor_dtype(np.dtype(KINDS[kind]))
    body = helper.make_graph([NODE("ReduceL2", ["s"], ["n"], keepdims=0), NODE("Div", ["s", "n"], ["d"]), NODE("Mul", ["d", "n"], ["next"]),
                              NODE("Identity", ["go"], ["on"])], "body",
                             [INFO("k", TensorProto.INT64, []), INFO("go", TensorProto.BOOL, []), INFO("s", number, [50])],
                             [INFO("on", TensorProto.BOOL, []), INFO("next", number, [50])])
    x = np.full(50, 300, narrow)
    loop = graph_of([NODE("Loop", ["count", "", "x"], ["y"], body=body)], narrow, number, x)
    loop.graph.initializer.append(numpy_helper.from_array(np.array(3), "count"))
    np.testing.assert_allclose(svod.onnx.load(loop)(x).astype(np.float32), 300, rtol=4e-3 if kind == "bfloat16" else 0)


def test_layers_in_float16_are_no_further_from_float64_than_in_onnxruntime() -> None:
    rng = np.random.default_rng(1)
    weights = {f"w{k}": (rng.standard_normal((48, 48)) / 5).astype(np.float16) for k in range(12)}
    nodes, last = [], "x"
    for k in range(12):
        made = "y" if k == 11 else f"r{k}"
        nodes += [NODE("MatMul", [last, f"w{k}"], [f"m{k}"]), NODE("Relu", [f"m{k}"], [made])]
        last = made
    x = rng.standard_normal((31, 48)).astype(np.float16)
    exact = x.astype(np.float64)
    for w in weights.values():
        exact = np.maximum(exact @ w.astype(np.float64), 0)
    ours, theirs = (np.linalg.norm(y - exact) for y in both(graph_of(nodes, np.float16, TensorProto.FLOAT16, x, weights), x))
    assert ours <= 1.01 * theirs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", [np.float32, np.float64])
def test_casts_round_to_the_nearest_and_halves_to_even(kind: str, source: Any) -> None:
    narrow = KINDS[kind]
    step = float(ml_dtypes.finfo(narrow).eps)
    above, below = (1 + step / 2 * (1 + d) for d in (2.0 ** -10, -2.0 ** -10))
    x = np.array([1 + step / 2, 1 + 1.5 * step, -1 - step / 2, above, below, 1e38, -np.inf, np.nan, *(n * 2.0 ** -26 for n in (4, 3, 2))],
                 source)
    number = helper.np_dtype_to_tensor_dtype(np.dtype(narrow))
    got = svod.onnx.load(graph_of([NODE("Cast", ["x"], ["y"], to=number)], source, number, x))(x)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got.astype(np.float32), x.astype(narrow).astype(np.float32))
    assert list(got[:5].astype(float)) == [1, 1 + 2 * step, -1, 1 + step, 1]


def test_statistics_of_layer_norm_have_the_type_that_is_stashed() -> None:
    x = numbers(3, 32).astype(np.float16)
    nodes = [NODE("LayerNormalization", ["x", "g"], ["z", "y", ""], stash_type=TensorProto.BFLOAT16)]
    mean = svod.onnx.load(graph_of(nodes, np.float16, TensorProto.BFLOAT16, x, {"g": np.ones(32)}))(x)
    assert mean.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(mean.astype(float), x.astype(float).mean(1, keepdims=True), rtol=4e-3)
