"""Weights of few bits and layers of integers, as in quantised files, against NumPy in float64."""
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import svod.onnx
from svod.errors import UnsupportedError
from tests.draws import a_half
from tests.onnx.test_model import info, model
from tests.onnx.test_numbers import microsoft, results

F, U, D = np.float32, np.uint8, np.float64
RNG = np.random.default_rng(5)


def packed(values: Any, bits: int) -> Any:
    """Pack numbers into bytes along the last axis, the first number in the lowest bits."""
    each = 8 // bits
    filled = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % each)]).reshape(*values.shape[:-1], -1, each)
    return (filled << np.arange(0, 8, bits)).sum(-1).astype(U)


def loaded(node: Any, weights: dict[str, Any], inputs: dict[str, Any], made: int = 0) -> Any:
    infos = [info(k, list(v.shape), helper.np_dtype_to_tensor_dtype(v.dtype)) for k, v in inputs.items()]
    out = helper.make_empty_tensor_value_info(node.output[0])
    out.type.tensor_type.elem_type = made
    return svod.onnx.load(model([node], infos, [out], weights, 21))


@pytest.mark.parametrize("bits", a_half([2, 4, 8]))
@pytest.mark.parametrize("zeros", [False, True])
def test_rows_of_a_table_of_few_bits(bits: int, zeros: bool) -> None:
    """Three blocks of 16, the last with 8 rows; an index out of range gives zeros."""
    whole, scales = RNG.integers(0, 1 << bits, (10, 40)), (RNG.random((10, 3)) + 0.1).astype(F)
    middle = RNG.integers(0, 1 << bits, (10, 3)) if zeros else np.full((10, 3), 1 << (bits - 1))
    at = np.array([[0, -1, 3], [2, 9, 12]])
    operands = [packed(whole, bits), at, scales, *([packed(middle, bits)] if zeros else [])]
    [y] = microsoft("GatherBlockQuantized", operands, {"gather_axis": 0, "quantize_axis": 1, "block_size": 16, "bits": bits})
    table = (whole - np.repeat(middle, 16, 1)[:, :40]) * np.repeat(scales, 16, 1)[:, :40]
    wanted = np.where((at < 10)[..., None], table[at % 10], 0)
    np.testing.assert_allclose(y, wanted, rtol=1e-6)


@pytest.mark.parametrize("kind", ["int4", "uint4"])
def test_tables_and_blocks_of_integers_of_4_bits(kind: str) -> None:
    """Integers of 4 bits as elements: in GatherBlockQuantized, where their zero point is 0, and in DequantizeLinear, along either axis."""
    low, high = (-8, 8) if kind == "int4" else (0, 16)
    whole, middle = RNG.integers(low, high, (6, 5)), RNG.integers(low, high, (6, 2))
    scales, narrow = (RNG.random((6, 2)) + 0.1).astype(F), np.dtype(getattr(ml_dtypes, kind))
    node = helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=1, block_size=3)
    y = loaded(node, {"q": whole.astype(narrow), "s": scales, "z": middle.astype(narrow)}, {}, TensorProto.FLOAT)()
    np.testing.assert_allclose(y, (whole - np.repeat(middle, 3, 1)[:, :5]) * np.repeat(scales, 3, 1)[:, :5], rtol=1e-6)
    node = helper.make_node("GatherBlockQuantized", ["q", "i", "s"], ["y"], domain="com.microsoft", gather_axis=1, quantize_axis=0,
                            block_size=16)
    at, row = np.array([4, -5]), scales[:1, [0, 1, 0, 1, 0]]
    y = loaded(node, {"q": whole.astype(narrow), "s": row}, {"i": at}, TensorProto.FLOAT)(at)
    np.testing.assert_allclose(y, (whole * row)[:, at], rtol=1e-6)


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.UINT4])
@pytest.mark.parametrize("shape", [(3, 5), (1,), (4, 2)])
def test_initializers_of_4_bits(kind: int, shape: tuple[int, ...], tmp_path: Any) -> None:
    """Two numbers per byte, in the file and in an external file, through a Cast, a Transpose and a Reshape."""
    values = RNG.integers(-8 if kind == TensorProto.INT4 else 0, 8 if kind == TensorProto.INT4 else 16, shape)
    bits = packed(values.reshape(-1) & 15, 4).tobytes()
    tensor = helper.make_tensor("q", kind, shape, bits, raw=True)
    (tmp_path / "bits").write_bytes(bits)
    beside = TensorProto(name="q", data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
    beside.external_data.add(key="location", value="bits")
    for q in (tensor, beside, numpy_helper.from_array(values.astype(helper.tensor_dtype_to_np_dtype(kind)), "q")):
        nodes = [helper.make_node("Transpose", ["q"], ["t"]), helper.make_node("Reshape", ["t", "flat"], ["r"]),
                 helper.make_node("Cast", ["r"], ["y"], to=TensorProto.FLOAT)]
        proto = model(nodes, [], [info("y", None)], {"flat": np.array([-1])}, 21)
        proto.graph.initializer.append(q)
        (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
        assert svod.onnx.load(tmp_path / "m.onnx")().tolist() == values.T.reshape(-1).tolist()


def test_results_of_4_bits_are_refused() -> None:
    node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])
    x, weights = np.ones(3, F), {"s": np.array(1, F), "z": np.array(0, ml_dtypes.int4)}
    with pytest.raises(UnsupportedError, match="outputs y: int4"):
        loaded(node, weights, {"x": x}, TensorProto.INT4)
    with pytest.raises(UnsupportedError, match="values of the type int4"):
        loaded(node, weights, {"x": x})(x)


@pytest.mark.parametrize("kind", ["uint8", "int8", "uint16", "int16"])
def test_the_older_forms_of_quantised_tensors(kind: str) -> None:
    x, scale, zero = RNG.standard_normal((3, 4)).astype(F) * 9, (RNG.random(4) + 0.1).astype(F), np.arange(4).astype(kind)
    [q] = microsoft("QuantizeLinear", [x, scale, zero], {"axis": 1})
    span = np.iinfo(kind)
    np.testing.assert_array_equal(q, np.clip(np.rint(x / scale) + zero, span.min, span.max).astype(kind))
    [y] = microsoft("DequantizeLinear", [q, scale, zero], {"axis": 1})
    np.testing.assert_allclose(y, (q.astype(D) - zero) * scale, rtol=1e-6)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_products_of_quantised_matrices(whole: bool, turned: bool) -> None:
    a, b = RNG.integers(0, 256, (5, 7)).astype(U), RNG.integers(-128, 128, (7, 3)).astype(np.int8)
    scale, zero = (RNG.random(3) / 50).astype(F), np.array([1, -2, 3], np.int8)
    c = RNG.integers(-999, 999, 3).astype(np.int32)
    exact = ((a.astype(D) - 120) @ (b.astype(D) - zero) + c) * (0.5 * 0.02 * scale.astype(D))
    operands = [a.T.copy() if turned else a, np.array(0.02, F), np.array(120, U), b.T.copy() if turned else b, scale, zero, c]
    operands += [np.array(0.3, F), np.array(110, U)] if whole else []
    [y] = microsoft("QGemm", operands, {"alpha": 0.5, "transA": int(turned), "transB": int(turned)})
    if whole:
        assert y.dtype == U and np.abs(y - np.clip(exact / 0.3 + 110, 0, 255)).max() <= 0.501
    else:
        np.testing.assert_allclose(y, exact, rtol=1e-5)


@pytest.mark.parametrize("last", [False, True])
def test_averages_of_quantised_windows(last: bool) -> None:
    x = RNG.integers(0, 256, (1, 3, 7, 5)).astype(U)
    attributes = {"kernel_shape": [3, 2], "strides": [2, 1], "channels_last": int(last)}
    operands = [np.moveaxis(x, 1, -1).copy() if last else x, np.array(0.1, F), np.array(10, U), np.array(0.07, F), np.array(3, U)]
    [y] = microsoft("QLinearAveragePool", operands, attributes)
    windows = np.lib.stride_tricks.sliding_window_view((x.astype(D) - 10) * 0.1, (3, 2), (2, 3))[:, :, ::2]
    wanted = np.clip(windows.mean((-2, -1)) / 0.07 + 3, 0, 255)
    assert np.abs((np.moveaxis(y, -1, 1) if last else y) - wanted).max() <= 0.501


@pytest.mark.parametrize("per_column", a_half([False, True]))
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_an_lstm_with_weights_of_8_bits_is_one_with_the_weights_that_they_are(per_column: bool, direction: str) -> None:
    ways, n, hidden = 1 + (direction == "bidirectional"), 4, 3
    x, bias = RNG.standard_normal((5, 2, n)).astype(F), RNG.standard_normal((ways, 8 * hidden)).astype(F)
    shape = (ways, 4 * hidden) if per_column else (ways,)
    wide, quantised = [], []
    for rows in (n, hidden):
        q, scale = RNG.integers(0, 256, (ways, rows, 4 * hidden)).astype(U), (RNG.random(shape) / 50).astype(F)
        zero = np.full(shape, 128, U)
        quantised.append((q, scale, zero))
        wide.append(((q.astype(D) - 128) * scale.reshape(ways, 1, -1)).transpose(0, 2, 1).astype(F))
    (w, ws, wz), (r, rs, rz) = quantised
    attributes = {"hidden_size": hidden, "direction": direction}
    got = microsoft("DynamicQuantizeLSTM", [x, w, r, bias, None, None, None, None, ws, wz, rs, rz], attributes, 3)
    for a, b in zip(got, results("LSTM", [x, *wide, bias], attributes, 14, outputs=3), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_nf4", a_half([0, 1]))
@pytest.mark.parametrize("transposed", [0, 1])
def test_weights_of_bitsandbytes(is_nf4: int, transposed: int) -> None:
    """165 numbers are 83 bytes and 11 blocks. NF4 are the medians of 16 parts of a normal distribution, as the paper gives them."""
    rows, columns = (33, 5) if transposed else (5, 33)
    four, largest = RNG.integers(0, 16, 33 * 5 + 1), (RNG.random(11) + 0.1).astype(F)
    fp4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
    nf4 = np.array([-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1])
    shares = (nf4 if is_nf4 else np.concatenate([fp4, -fp4]))[four[:165]] * np.repeat(largest, 16)[:165]
    weights = shares.reshape(columns, rows)
    a = RNG.standard_normal((2, rows if transposed else columns)).astype(F)
    operands = [a, (four[0::2] << 4 | four[1::2]).astype(U), largest]
    [y] = microsoft("MatMulBnb4", operands, {"K": rows, "N": columns, "block_size": 16, "quant_type": is_nf4, "transB": transposed})
    np.testing.assert_allclose(y, a @ (weights.T if transposed else weights), atol=2e-3)
