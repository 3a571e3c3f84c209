"""Chains of nodes that read a value directly and through a view: NumPy's numbers, and work that grows at most as the length squared."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import svod.onnx
from tests.growth import check_growth
from tests.onnx.test_model import info, model

N = 8
X = np.random.default_rng(0).standard_normal((N, N)).astype(np.float32)
KNOWN = {"half": np.array(0.5, np.float32), "wide": np.array([4, 16]), "square": np.array([N, N]), 
         "last": np.array([-1]), "end": np.array([-N - 1]), "back": np.array([-1]), "axis": np.array([0]),
         "order": np.array([3, 1, -4, 1, 5, 2, 6, 0]), "grid": np.broadcast_to(np.array([3, 1, 4, 1, 5, 2, -2, 0]), (N, N)),
         "points": np.array([[3], [1], [4], [1], [5], [-6], [6], [0]]),
         "image": np.array([1, 1, N, N]), "twice": np.array([2, 1]), "zero": np.array([0]), "first": np.array([4])}
Views = dict[str, tuple[list[tuple[str, list[str], dict[str, Any]]], Callable[[Any], Any]]]

# the nodes of a step, each with its further operands and attributes, and NumPy's equivalent
VIEWS: Views = {
    "Transpose": ([("Transpose", [], {})], lambda a: a.T),
    "Reshape": ([("Reshape", ["wide"], {}), ("Transpose", [], {}), ("Reshape", ["square"], {})],
                lambda a: a.reshape(4, 16).T.reshape(N, N)),
    "Slice": ([("Slice", ["last", "end", "axis", "back"], {}), ("Transpose", [], {})], lambda a: a[::-1].T),
    "Tile": ([("Slice", ["zero", "first", "axis"], {}), ("Tile", ["twice"], {})], lambda a: np.tile(a[:4], (2, 1))),
    "Gather": ([("Gather", ["order"], {"axis": 1}), ("Transpose", [], {})], lambda a: a[:, KNOWN["order"]].T),
    "GatherElements": ([("GatherElements", ["grid"], {"axis": 1}), ("Transpose", [], {})], lambda a: a[:, KNOWN["grid"][0]].T),
    "GatherND": ([("GatherND", ["points"], {}), ("Transpose", [], {})], lambda a: a[KNOWN["points"][:, 0]].T),
    "AveragePool": ([("Reshape", ["image"], {}),
                     ("AveragePool", [], {"kernel_shape": [3, 1], "pads": [1, 0, 1, 0], "count_include_pad": 1}),
                     ("Reshape", ["square"], {}), ("Transpose", [], {})],
                    lambda a: ((np.pad(a, ((1, 1), (0, 0)))[:N] + a + np.pad(a, ((1, 1), (0, 0)))[2:]) / 3).T),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_a_value_and_a_view_of_it(name: str) -> None:
    steps, array_view = VIEWS[name]

    def run(length: int) -> None:
        nodes, value, expected = [], "x", X.astype(np.float64)
        for i in range(length):
            view = value
            for k, (op, operands, attributes) in enumerate(steps):
                nodes.append(helper.make_node(op, [view, *operands], [f"v{i}_{k}"], **attributes))
                view = f"v{i}_{k}"
            nodes += [helper.make_node("Add", [value, view], [f"s{i}"]), helper.make_node("Mul", [f"s{i}", "half"], [f"t{i}"])]
            value, expected = f"t{i}", (expected + array_view(expected)) * 0.5
        shape = info(value, [N, N], TensorProto.FLOAT)
        y = svod.onnx.load(model(nodes, [info("x", [N, N], TensorProto.FLOAT)], [shape], KNOWN, 18))({"x": X})
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    check_growth(run)
