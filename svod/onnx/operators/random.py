"""Random numbers, new in each run: from svod's stream, or for a node with a seed from a separate generator."""
from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from svod.core.ir.dtype import DType, dtypes
from svod.onnx.operators.elementwise import svod_type
from svod.onnx.registry import OnnxNode, operator
from svod.tensor import Tensor
from svod.tensor.operations.random import SeededKeys, keys_from


@contextmanager
def generator(node: OnnxNode) -> Iterator[None]:
    """A context in which random numbers come from the node's seed, if it has one. Two nodes with the same seed draw the same numbers, as
    in onnxruntime."""
    if "seed" not in node.attributes:
        yield
        return
    run, turn = node.walk.run_number(), node.walk.turn()
    [bits] = struct.unpack("<I", struct.pack("<f", node.get("seed")))
    with keys_from(SeededKeys(bits, run.reshape(()).uop, turn)):
        yield


def _type_of(node: OnnxNode, default: DType) -> DType:
    return svod_type(node.get("dtype"), node) if node.get("dtype") else default


def _drawn(node: OnnxNode, shape: tuple[int, ...], kind: DType, is_normal: bool) -> Tensor:
    with generator(node):
        if is_normal:
            return Tensor.normal(shape, mean=node.get("mean", 0.0), std=node.get("scale", 1.0), dtype=kind)
        return Tensor.uniform(shape, low=node.get("low", 0.0), high=node.get("high", 1.0), dtype=kind)


def _random(name: str, is_normal: bool) -> None:
    @operator(name)
    def of_shape(node: OnnxNode) -> Tensor:
        return _drawn(node, tuple(node.need("shape")), _type_of(node, dtypes.float32), is_normal)

    @operator(f"{name}Like", exact=True)
    def like(node: OnnxNode, x: Tensor) -> Tensor:
        return _drawn(node, x.shape, _type_of(node, x.dtype), is_normal)


_random("RandomNormal", True)
_random("RandomUniform", False)


@operator("Bernoulli", 15, exact=True)
def bernoulli(node: OnnxNode, x: Tensor) -> Tensor:
    """A sample that is 1 with the probability given by each element of x, else 0."""
    with generator(node):
        return Tensor.rand(x.shape, dtype=_precise(x)).lt(x).cast(_type_of(node, x.dtype))


@operator("Multinomial", exact=True)
def multinomial(node: OnnxNode, x: Tensor) -> Tensor:
    """Draw classes, (batch, samples), with probabilities given by logarithms of weights, (batch, classes)."""
    shares = x.cast(_precise(x)).softmax(-1).cumsum(-1).unsqueeze(1)
    with generator(node):
        at = Tensor.rand((x.shape[0], node.get("sample_size", 1), 1), dtype=shares.dtype).mul(shares[..., -1:])
    return shares[..., :-1].le(at).sum(-1).cast(_type_of(node, dtypes.int32))


def _precise(x: Tensor) -> DType:
    return dtypes.float64 if x.dtype is dtypes.float64 else dtypes.float32
