"""Estimates against counts done by hand."""
from __future__ import annotations

import math

import pytest

from svod.core import symbolic as sy
from svod.core.estimate import estimate
from tests.core.corpus import CORPUS, conv, data, kernel_of


def test_gemm() -> None:
    e = estimate(kernel_of(data(17, 23) @ data(23, 19)))
    assert (e.flops, e.bytes_read, e.bytes_written) == (2 * 17 * 19 * 23, 4 * (17 * 23 + 23 * 19), 4 * 17 * 19)


def test_gemm_with_epilogue_and_half_inputs() -> None:
    e = estimate(kernel_of(data(12, 20, dtype="float16").linear(data(18, 20, dtype="float16"), data(18, dtype="float16")).relu()))
    assert e.bytes_read == 2 * (12 * 20 + 18 * 20 + 18) and e.bytes_written == 2 * 12 * 18
    assert e.flops == 2 * 12 * 18 * 20 + 2 * 12 * 18


def test_conv_reads_no_padding() -> None:
    e = estimate(kernel_of(conv(3, 8, 10, 3, padding=1)))
    assert (e.flops, e.bytes_read, e.bytes_written) == (2 * 8 * 100 * 27, 4 * (300 + 8 * 27), 4 * 800)


def test_softmax() -> None:
    e = estimate(kernel_of(data(5, 37).softmax(-1)))
    # max, subtract, exp, add, multiply per element; a reciprocal per element of the expression that is stored
    assert e.flops == 5 * 37 * 6 and e.transcendental == 5 * 37
    assert e.bytes_read == e.bytes_written == 4 * 5 * 37


def test_pool_and_sum() -> None:
    assert estimate(kernel_of(data(1, 3, 11, 11).max_pool2d(3, 2, 1))).flops == 3 * 36 * 9
    e = estimate(kernel_of(data(7, 9, 5).sum()))
    assert (e.flops, e.bytes_read, e.bytes_written) == (315, 1260, 4)


def test_pad_counts_gates_as_free() -> None:
    e = estimate(kernel_of(data(5, 6).pad((1, 2, 0, 3)) + 1.0))
    assert (e.flops, e.bytes_read, e.bytes_written) == (72, 120, 288)


def test_gather_reads_its_positions() -> None:
    e = estimate(kernel_of(data(50, 8).take(data(10, dtype="int64"), 0)))
    assert (e.flops, e.bytes_read, e.bytes_written) == (0, 10 * 8 * 4 + 10 * 8, 10 * 8 * 4)


@pytest.mark.parametrize("name", CORPUS)
def test_reads_are_within_params(name: str) -> None:
    ast = CORPUS[name]()
    e = estimate(ast)
    params = {u for u in ast.toposort() if u.op.value == "PARAM"}
    outputs = {s.src[0].src[0] for s in ast.src}
    assert e.bytes_read <= sum(p.arg.size * p.dtype.itemsize for p in params - outputs)
    # a kernel that writes a part of its buffer leaves what lies between as it was
    stores = [s.src[0].src[0].dtype.itemsize * math.prod(sy.extent_of(r) for r in s.src[2:]) for s in ast.src]
    assert e.bytes_written == sum(stores) <= sum(p.arg.size * p.dtype.itemsize for p in outputs)
