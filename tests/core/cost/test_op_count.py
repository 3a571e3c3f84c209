"""Estimated numbers of operations against counts by hand."""
from __future__ import annotations

import math

import pytest

from svod.core.cost.op_count import count_operations
from svod.core.ir import symbolic as sy
from svod.tensor import Tensor
from tests.core.corpus import CORPUS, conv, data, kernel_of
from tests.draws import a_quarter


def test_gemm() -> None:
    e = count_operations(kernel_of(data(17, 23) @ data(23, 19)))
    assert (e.flops, e.bytes_read, e.bytes_written) == (2 * 17 * 19 * 23, 4 * (17 * 23 + 23 * 19), 4 * 17 * 19)


def test_gemm_with_epilogue_and_half_inputs() -> None:
    e = count_operations(kernel_of(data(12, 20, dtype="float16").linear(data(18, 20, dtype="float16"), data(18, dtype="float16")).relu()))
    assert e.bytes_read == 2 * (12 * 20 + 18 * 20 + 18) and e.bytes_written == 2 * 12 * 18
    assert e.flops == 2 * 12 * 18 * 20 + 2 * 12 * 18


@pytest.mark.parametrize(("left", "right", "wide", "dtype"), [
    ("float32", "float32", "float32", "float32"), ("int8", "int8", "int32", "int8"), ("uint8", "int8", "int32", "int8"),
    ("int16", "int8", "int32", "int16"), ("bfloat16", "bfloat16", "float32", "bfloat16"), ("float16", "float16", "float32", "float16"),
    ("float16", "bfloat16", "float32", "float32"), ("int8", "int8", "float32", "float32"), ("int8", "int32", "int32", "int32"),
    ("uint8", "uint8", "uint32", "uint32"), ("bool", "bool", "int32", "int32"), ("float32", "float32", "float64", "float64")])
def test_products_are_of_the_type_before_it_was_made_wide(left: str, right: str, wide: str, dtype: str) -> None:
    """Products of narrow types that have dot instructions count with the type before the conversion to a wider one."""
    a, b = data(12, 20, dtype=left).cast(wide), data(20, 7, dtype=right).cast(wide)
    assert [(d.name, n) for d, n in count_operations(kernel_of(a @ b)).arithmetic] == [(dtype, 2 * 12 * 20 * 7)]


def test_arithmetic_is_counted_by_type() -> None:
    def done(t: Tensor) -> dict[str, int]:
        return {d.name: n for d, n in count_operations(kernel_of(t)).arithmetic}
    assert done(data(30, dtype="float64") * 2.0) == {"float64": 30}
    assert done(data(30) > 0.5) == {"float32": 30}, "not of the result"
    assert done(data(30, dtype="float64").cast("float32")) == {}
    assert done((data(30, 50, dtype="float64") * 3.0).sum(1).cast("float32") + 1.0) == {"float64": 3000, "float32": 30}
    product = (data(12, 20, dtype="int8").cast("int32") @ data(20, 7, dtype="int8").cast("int32")).cast("float32")
    assert done(product * 0.5 + data(7)) == {"int8": 2 * 12 * 20 * 7, "float32": 2 * 12 * 7}


def test_conv_reads_no_padding() -> None:
    e = count_operations(kernel_of(conv(3, 8, 10, 3, padding=1)))
    assert (e.flops, e.bytes_read, e.bytes_written) == (2 * 8 * 100 * 27, 4 * (300 + 8 * 27), 4 * 800)


def test_softmax() -> None:
    e = count_operations(kernel_of(data(5, 37).softmax(-1)))
    # max, subtract, exp, add, multiply per element; a reciprocal per element of the expression that is stored
    assert e.flops == 5 * 37 * 6 and e.transcendental == 5 * 37
    assert e.bytes_read == e.bytes_written == 4 * 5 * 37


def test_pool_and_sum() -> None:
    assert count_operations(kernel_of(data(1, 3, 11, 11).max_pool2d(3, 2, 1))).flops == 3 * 36 * 9
    e = count_operations(kernel_of(data(7, 9, 5).sum()))
    assert (e.flops, e.bytes_read, e.bytes_written) == (315, 1260, 4)


def test_pad_counts_gates_as_free() -> None:
    e = count_operations(kernel_of(data(5, 6).pad((1, 2, 0, 3)) + 1.0))
    assert (e.flops, e.bytes_read, e.bytes_written) == (72, 120, 288)


def test_gather_reads_its_positions() -> None:
    e = count_operations(kernel_of(data(50, 8).take(data(10, dtype="int64"), 0)))
    assert (e.flops, e.bytes_read, e.bytes_written) == (0, 10 * 8 * 4 + 10 * 8, 10 * 8 * 4)


@pytest.mark.parametrize("name", a_quarter(CORPUS))
def test_reads_are_within_params(name: str) -> None:
    ast = CORPUS[name]()
    e = count_operations(ast)
    params = {u for u in ast.toposort() if u.op.value == "PARAM"}
    outputs = {s.src[0].src[0] for s in ast.src}
    assert e.bytes_read <= sum(p.arg.size * p.dtype.itemsize for p in params - outputs)
    # a kernel that writes a part of its buffer leaves what lies between as it was
    stores = [s.src[0].src[0].dtype.itemsize * math.prod(sy.extent_of(r) for r in s.src[2:]) for s in ast.src]
    assert e.bytes_written == sum(stores) <= sum(p.arg.size * p.dtype.itemsize for p in outputs)
