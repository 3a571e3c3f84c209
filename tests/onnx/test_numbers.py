"""Results of single nodes at the limits of their operators' definitions: types, ties, empty extents, infinities and NaN."""
from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import svod.onnx
from tests.draws import a_half, a_quarter
from tests.onnx.test_model import info, model

F, D, H, U = np.float32, np.float64, np.float16, np.uint8


def results(op: str, operands: list[Any], attributes: dict[str, Any], opset: int, as_weights: bool = False, outputs: int = 1) -> list[Any]:
    """The outputs of one node whose operands are inputs, or weights, which are known during translation."""
    names = [f"i{k}" if o is not None else "" for k, o in enumerate(operands)]
    out = [f"o{k}" for k in range(outputs)]
    given = {n: o for n, o in zip(names, operands, strict=True) if n}
    m = svod.onnx.load(model([helper.make_node(op, names, out, **attributes)],
                             [] if as_weights else [info(n, list(o.shape), helper.np_dtype_to_tensor_dtype(o.dtype))
                                                    for n, o in given.items()],
                             [helper.make_empty_tensor_value_info(o) for o in out], given if as_weights else None, opset))
    made = m({} if as_weights else given)
    return list(made) if outputs > 1 else [made]


# (operator, opset, attributes, operands, expected result)
ROWS: list[tuple[str, int, dict[str, Any], list[Any], Any]] = [
    ("ThresholdedRelu", 10, {"alpha": 0.5}, [np.array([-np.inf, np.nan, 2, 0.5], F)], np.array([0, 0, 2, 0], F)),
    ("Shrink", 9, {"lambd": 1.0}, [np.array([np.nan, -np.inf, 0.5, 3], F)], np.array([0, -np.inf, 0, 3], F)),
    ("Clip", 6, {"max": 1.0}, [np.array([-np.inf, 2], F)], np.array([np.finfo(F).min, 1], F)),
    ("BitShift", 11, {"direction": "LEFT"}, [np.array(3, U), np.array(1, U)], np.array(6, U)),
    ("BitShift", 11, {"direction": "RIGHT"}, [np.array([255, 255], U), np.array([3, 200], U)], np.array([31, 0], U)),
    ("Erf", 9, {}, [np.array([0, 9], np.int32)], np.array([0, 1], np.int32)),
    ("ReduceMean", 11, {"keepdims": 0}, [np.array([2 ** 40 + 1, 2 ** 40 + 4])], np.array(2 ** 40 + 2)),
    ("ReduceMean", 11, {"keepdims": 0}, [np.array([-3, 0, 1], np.int32)], np.array(0, np.int32)),
    ("ReduceL2", 11, {"keepdims": 0}, [np.array([60000, 80000], np.int32)], np.array(100000, np.int32)),
    ("Det", 11, {}, [np.array([[2, 1], [1, 3]], H)], np.array(5, H)),
    ("Compress", 11, {"axis": 0}, [np.ones((2, 3), F), np.array([False, False])], np.ones((0, 3), F)),
    ("Hardmax", 13, {}, [np.ones((2, 0), F)], np.ones((2, 0), F)),
    ("ScatterElements", 18, {"reduction": "add"}, [np.array([False, True]), np.array([0, 1, 1]), np.array([True, False, False])],
     np.array([True, True])),
    ("ScatterND", 18, {"reduction": "mul"}, [np.array([True, True]), np.array([[1], [1]]), np.array([False, True])],
     np.array([True, False])),
    ("Resize", 13, {"mode": "nearest"}, [np.ones((1, 2), F), np.ones(0, F), np.array([0.5, 1], F)], np.ones((0, 2), F)),
    ("RoiAlign", 16, {"sampling_ratio": 1}, [np.ones((1, 2, 3, 3), F), np.ones((0, 4), F), np.ones(0, np.int64)],
     np.ones((0, 2, 1, 1), F)),
    ("GridSample", 20, {"mode": "nearest", "padding_mode": "reflection"},       # position 2.5 rounds to 2, whose mirror image is 1
     [np.array([[[[5, 7]]]], F), np.array([[[[2, 0]]]], F)], np.array([[[[7]]]], F)),
    ("QuantizeLinear", 21, {}, [np.array([1, -1], H), np.array(0.5, H), np.array(60001, np.uint16)], np.array([60003, 59999], np.uint16)),
    ("QuantizeLinear", 23, {"precision": TensorProto.FLOAT}, [np.array([1000], H), np.array(0.3, H), np.array(0, np.uint16)],
     np.array([3333], np.uint16)),
    ("DequantizeLinear", 21, {"axis": 0, "block_size": 2}, [np.array([1, 2, 3], U), np.array([1, 10], F)], np.array([1, 2, 30], F)),
    ("DequantizeLinear", 23, {"output_dtype": TensorProto.FLOAT}, [np.array([4097], np.uint16), np.array(1, H)], np.array([4097], F)),
]


@pytest.mark.parametrize(("op", "opset", "attributes", "operands", "wanted"), ROWS, ids=[f"{r[0]}-{i}" for i, r in enumerate(ROWS)])
def test_single_nodes(op: str, opset: int, attributes: dict[str, Any], operands: list[Any], wanted: Any) -> None:
    [y] = results(op, operands, attributes, opset)
    assert y.dtype == wanted.dtype
    np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize("x", [np.zeros((2, 3), F), np.full(3, -0.0, F), np.full(2, 1e-45, F), np.array([1, 0.5], F), np.array([-2, 1], F)])
def test_a_dynamic_scale_is_never_zero(x: Any) -> None:
    """Dequantised values are within half a step of the quantised ones."""
    y, scale, zero = results("DynamicQuantizeLinear", [x], {}, 11, outputs=3)
    assert scale > 0 and y.dtype == zero.dtype == U
    np.testing.assert_allclose((y.astype(F) - zero) * scale, x, atol=0.51 * scale)


def test_softplus_has_no_threshold() -> None:
    x = np.array([-30.0, 0, 21, 25, 800])
    [y] = results("Softplus", [x], {}, 1)
    np.testing.assert_allclose(y, np.maximum(x, 0) + np.log1p(np.exp(-abs(x))), rtol=4e-16)


def test_positions_of_maxima_are_never_in_the_padding() -> None:
    """Zeros are as small as the padding of unsigned integers."""
    x = np.zeros((1, 1, 2, 3), U)
    y, at = results("MaxPool", [x], {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1]}, 12, outputs=2)
    assert not y.any()
    np.testing.assert_array_equal(at[0, 0], [[0, 0, 1, 2], [0, 0, 1, 2], [3, 3, 4, 5]])


@pytest.mark.parametrize("as_weights", [False, True])
@pytest.mark.parametrize("op", ["Softmax", "MaxPool", "ReduceSumSquare"])
def test_operators_of_weights_have_the_meaning_of_their_version(op: str, as_weights: bool) -> None:
    """Before opset 13 a row of Softmax began at the axis and ended with the tensor. The sum of squares of int32 is int32."""
    if op == "Softmax":
        x = np.linspace(-1, 1, 12, dtype=F).reshape(2, 3, 2)
        rows = np.exp(x.reshape(2, 6))
        [y] = results(op, [x], {"axis": 1}, 11, as_weights)
        np.testing.assert_allclose(y, (rows / rows.sum(1, keepdims=True)).reshape(x.shape), rtol=1e-5)
    elif op == "MaxPool":
        x = np.arange(12, dtype=F).reshape(2, 2, 3)
        _, at = results(op, [x], {"kernel_shape": [2]}, 12, as_weights, 2)
        np.testing.assert_array_equal(at.reshape(-1), [1, 2, 4, 5, 7, 8, 10, 11])
    else:
        [y] = results(op, [np.array([1, 2], np.int32)], {"keepdims": 0}, 11, as_weights)
        assert y.dtype == np.int32 and y == 5


def test_the_largest_of_known_numbers_is_known() -> None:
    [y] = results("Max", [np.array(3), np.array(5), np.array(4)], {}, 13, as_weights=True)
    assert y == 5


def test_parameters_belong_to_the_activations_that_have_them() -> None:
    """The first direction uses tanh, which has no alpha, the second LeakyRelu, which has one."""
    one, nothing = np.full((2, 1, 1), 1, F), np.zeros((2, 1, 1), F)
    attributes = {"hidden_size": 1, "direction": "bidirectional", "activations": ["Tanh", "LeakyRelu"], "activation_alpha": [0.25]}
    [y] = results("RNN", [np.full((1, 1, 1), -1, F), one, nothing], attributes, 14)
    np.testing.assert_allclose(y.reshape(-1), [np.tanh(-1), -0.25], rtol=1e-5)


def attended(q: Any, k: Any, v: Any, allowed: Any) -> Any:
    scores = np.where(allowed, q @ k.swapaxes(-2, -1) / np.sqrt(q.shape[-1]), -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize(("steps", "keys"), a_half([(3, 3), (1, 4), (2, 5)]))
@pytest.mark.parametrize("masked", [False, True])
def test_steps_see_what_comes_before_them_whatever_else_is_masked(steps: int, keys: int, masked: bool) -> None:
    rng = np.random.default_rng(steps)
    q, k, v = (rng.standard_normal((2, n, 4)).astype(F) for n in (steps, keys, keys))
    mask = np.array([[1] * keys, [1] + [0] * (keys - 1)], np.int32)
    operands = [q, k, v, np.zeros(12, F), *([mask] if masked else [])]
    [y] = microsoft("MultiHeadAttention", operands, {"num_heads": 1, "unidirectional": 1})
    allowed = np.tril(np.ones((steps, keys), bool), keys - steps) & (mask[:, None].astype(bool) if masked else True)
    np.testing.assert_allclose(y, attended(q, k, v, allowed), rtol=1e-4, atol=1e-5)


def microsoft(op: str, operands: list[Any], attributes: dict[str, Any], outputs: int = 1) -> list[Any]:
    return results(op, operands, {**attributes, "domain": "com.microsoft"}, 17, outputs=outputs)


@pytest.mark.parametrize(("bits", "zeros", "ordered"), a_quarter(product([2, 4, 8], [False, True], [True, False])))
def test_weights_of_few_bits(bits: int, zeros: bool, ordered: bool) -> None:
    """33 rows are two blocks of 32, and zero points fill whole bytes. Rows may belong to other blocks than the ones that contain them."""
    rng = np.random.default_rng(bits)
    whole, middle = rng.integers(0, 1 << bits, (3, 2, 32)), rng.integers(0, 1 << bits, (3, 2))

    def packed(values: Any) -> Any:
        each = 8 // bits
        filled = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % each)]).reshape(*values.shape[:-1], -1, each)
        return (filled << np.arange(0, 8, bits)).sum(-1).astype(U)
    a, scales = rng.standard_normal((2, 33)).astype(F), rng.random((3, 2)).astype(F)
    groups = np.repeat([0, 1], 32)[:33] if ordered else rng.integers(0, 2, 33)
    operands = [a, packed(whole), scales.reshape(-1), packed(middle).reshape(-1) if zeros else None,
                None if ordered else groups.astype(np.int32)]
    [y] = microsoft("MatMulNBits", operands, {"K": 33, "N": 3, "bits": bits, "block_size": 32})
    weights = (whole.reshape(3, 64)[:, :33] - (middle[:, groups] if zeros else 1 << (bits - 1))) * scales[:, groups]
    np.testing.assert_allclose(y, a @ weights.T, rtol=1e-3, atol=1e-3)


def test_products_of_matrices_whose_rows_stand_before_the_batch() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 5, 3)).astype(F), rng.standard_normal((7, 5, 3)).astype(F)
    [y] = microsoft("FusedMatMul", [a, b], {"transBatchA": 1, "transBatchB": 1, "transB": 1})
    np.testing.assert_allclose(y, np.einsum("nbk,mbk->bnm", a, b), rtol=1e-4, atol=1e-5)


def test_averages_of_quantised_channels_that_are_last() -> None:
    x, one, zero = np.arange(12, dtype=U).reshape(1, 2, 3, 2), np.array(1, F), np.array(0, U)
    [y] = microsoft("QLinearGlobalAveragePool", [x, one, zero, one, zero], {"channels_last": 1})
    np.testing.assert_array_equal(y, [[[[5, 6]]]])


@pytest.mark.parametrize(("pads", "strides", "dilations", "group", "apart", "masked"), a_half([
    ([0, 0, 0, 0], [1, 1], [1, 1], 1, 1, False), ([1, 0, 2, 1], [2, 1], [1, 2], 2, 1, True), ([1, 1, 1, 1], [1, 2], [1, 1], 1, 2, True)]))
def test_convolutions_with_taps_that_move(pads: Any, strides: Any, dilations: Any, group: int, apart: int, masked: bool) -> None:
    """Samples between four elements, with zeros outside, compared position by position."""
    rng = np.random.default_rng(group + apart)
    x, w, b = rng.standard_normal((2, 4, 5, 7)), rng.standard_normal((6, 4 // group, 3, 2)), rng.standard_normal(6)
    size = [(n + pads[i] + pads[i + 2] - d * (k - 1) - 1) // s + 1
            for i, (n, k, s, d) in enumerate(zip((5, 7), (3, 2), strides, dilations, strict=True))]
    offset, mask = rng.uniform(-2, 2, (2, apart * 12, *size)), rng.random((2, apart * 6, *size)) if masked else np.ones(
        (2, apart * 6, *size))

    def sample(image: Any, r: float, c: float) -> float:
        total = 0.0
        for y in (int(np.floor(r)), int(np.floor(r)) + 1):
            for z in (int(np.floor(c)), int(np.floor(c)) + 1):
                if 0 <= y < 5 and 0 <= z < 7:
                    total += image[y, z] * (1 - abs(r - y)) * (1 - abs(c - z))
        return total
    wanted = np.broadcast_to(b[:, None, None], (2, 6, *size)).copy()
    for n, o, i, u, v, r, c in np.ndindex(2, 6, 4 // group, 3, 2, *size):
        channel = o // (6 // group) * (4 // group) + i
        g, tap = channel // (4 // apart), u * 2 + v
        at = [p * s - pads[k] + t * d + offset[n, g * 12 + tap * 2 + k, r, c]
              for k, (p, s, t, d) in enumerate(zip((r, c), strides, (u, v), dilations, strict=True))]
        wanted[n, o, r, c] += w[o, i, u, v] * mask[n, g * 6 + tap, r, c] * sample(x[n, channel], *at)
    operands = [v.astype(F) for v in (x, w, offset, b)] + ([mask.astype(F)] if masked else [])
    [y] = results("DeformConv", operands, {"pads": pads, "strides": strides, "dilations": dilations, "group": group, "offset_group": apart,
                                           "kernel_shape": [3, 2]}, 19)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.37])
def test_the_largest_elements_of_regions(scale: float) -> None:
    """Bins overlap if a region has fewer elements than bins, and are empty outside of the image."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 7, 5)).astype(F)
    rois = np.array([[0, 0, 0, 4, 6], [1, 2, 1, 3, 2], [1, -5, -4, 30, 9], [0, 9, 9, 9, 9], [1, 4, 6, 2, 3], [0, 1.5, 2.5, 2.5, 4.5]], F)
    bins = (3, 2)
    wanted = np.zeros((len(rois), 3, *bins), F)
    for i, roi in enumerate(rois):
        x1, y1, x2, y2 = (int(np.sign(v) * np.floor(abs(v) + 0.5)) for v in roi[1:] * F(scale))
        for r, c in np.ndindex(*bins):
            spans = []
            for first, last, at, count, n in ((y1, y2, r, 3, 7), (x1, x2, c, 2, 5)):
                step = F(max(last - first + 1, 1)) / F(count)
                spans.append(slice(*(min(max(int(v) + first, 0), n) for v in (np.floor(at * step), np.ceil((at + 1) * step)))))
            part = x[int(roi[0]), :, spans[0], spans[1]]
            wanted[i, :, r, c] = part.max((1, 2)) if part.size else 0
    [y] = results("MaxRoiPool", [x, rois], {"pooled_shape": list(bins), "spatial_scale": scale}, 16)
    np.testing.assert_array_equal(y, wanted)
