"""Resize to the nearest elements: every mode of computing positions with every mode of rounding."""
from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

import svod.onnx
from tests.draws import a_quarter
from tests.onnx.test_model import info

F = np.float32
POSITIONS = ["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn",
             "tf_crop_and_resize"]
ROUNDED = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
SCALES = [0.3, 0.5, 0.6, 0.7, 5 / 6, 1.1, 1.3, 1.5, 2.0, 2.5, 3.4930897]


def model(n: int, wanted: int | float, opset: int = 19, op: str = "Resize", region: tuple[float, float] | None = None, **names: str) -> Any:
    """A model that resizes a row of n elements to an extent, or by a scale."""
    given = {"scales": np.array([1, wanted], F)} if isinstance(wanted, float) else {"sizes": np.array([1, wanted])}
    inputs = ["x", *given] if opset < 11 else ["x", "roi" if region else "", *([""] if "sizes" in given else []), *given]
    if region:
        given["roi"] = np.array([0, region[0], 1, region[1]], F)
    node = helper.make_node(op, inputs, ["y"], mode="nearest", **names)
    graph = helper.make_graph([node], "g", [info("x", [1, n])], [helper.make_empty_tensor_value_info("y")],
                              [numpy_helper.from_array(v, k) for k, v in given.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def row(n: int) -> Any:
    return np.arange(n, dtype=F).reshape(1, n)


@pytest.mark.parametrize(("n", "wanted", "positions", "rounded", "elements"), [
    (29, 5 / 6, "half_pixel", "round_prefer_floor",
     [0, 1, 2, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 22, 23, 24, 25, 26, 28]),
    (11, 0.3, "half_pixel", "round_prefer_ceil", [1, 5, 8]),
    (13, 0.6, "asymmetric", "floor", [0, 1, 3, 5, 6, 8, 10]),
    (10, 0.3, "align_corners", "floor", [0, 4, 9]),
    (8, 3 / 7, "align_corners", "ceil", [0, 4, 7]),
    (97, 7, "tf_half_pixel_for_nn", "round_prefer_floor", [7, 21, 35, 49, 62, 76, 90]),
    (5, 2.5, "half_pixel_symmetric", "ceil", [0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4]),
    (1, 3, "half_pixel", "ceil", [0, 0, 0]), (7, 1, "pytorch_half_pixel", "ceil", [0]), (7, 1, "half_pixel", "round_prefer_ceil", [3])])
def test_the_nearest_elements(n: int, wanted: int | float, positions: str, rounded: str, elements: list[int]) -> None:
    made = svod.onnx.load(model(n, wanted, coordinate_transformation_mode=positions, nearest_mode=rounded))(row(n))
    np.testing.assert_array_equal(made, np.array([elements], F))


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_extents_are_products_of_float32(mode: str) -> None:
    proto = model(10, 0.7)      # in float32, 0.7 is less than 7/10, but its product with 10 is 7
    proto.graph.node[0].attribute[0].s = mode.encode()
    assert np.shape(svod.onnx.load(proto)(row(10))) == (1, 7)


def theirs(proto: Any, x: Any) -> Any:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


@pytest.mark.parametrize(("positions", "rounded"), a_quarter(itertools.product(POSITIONS, ROUNDED)))
def test_the_nearest_elements_are_those_of_onnxruntime(positions: str, rounded: str) -> None:
    draw = np.random.default_rng(len(positions) * len(rounded))
    for n in (1, 7, 10, 31, 97):
        for wanted in [int(draw.choice([1, 2, 5, 8, 11, 29, 64])), *draw.choice(SCALES, 2).tolist()]:
            new = math.floor(F(n) * F(wanted)) if isinstance(wanted, float) else wanted
            if new in (0, n):       # onnxruntime copies its operand if the extent does not change, regardless of the scale
                continue
            region = (float(draw.uniform(-0.2, 0.5)), float(draw.uniform(0.5, 1.2))) if positions == "tf_crop_and_resize" else None
            proto = model(n, wanted, region=region, coordinate_transformation_mode=positions, nearest_mode=rounded)
            np.testing.assert_array_equal(svod.onnx.load(proto)(row(n)), theirs(proto, row(n)), f"{n} to {wanted}")


@pytest.mark.parametrize(("op", "opset"), [("Upsample", 9), ("Resize", 10)])
def test_operator_sets_before_11_round_up_where_they_leave_out(op: str, opset: int) -> None:
    np.testing.assert_array_equal(svod.onnx.load(model(7, 1.5, opset, op))(row(7)), [[0, 0, 1, 2, 2, 3, 4, 4, 5, 6]])
    if op == "Resize":
        np.testing.assert_array_equal(svod.onnx.load(model(7, 0.6, opset, op))(row(7)), [[0, 2, 4, 5]])
    for n, scale in itertools.product((1, 13, 31), SCALES):
        if (new := math.floor(F(n) * F(scale))) not in (0, n) and (op == "Resize" or scale > 1):
            proto = model(n, float(scale), opset, op)
            np.testing.assert_array_equal(svod.onnx.load(proto)(row(n)), theirs(proto, row(n)), f"{n} to {new}")
