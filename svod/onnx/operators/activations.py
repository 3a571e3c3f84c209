"""Activations and rows: relu and its relatives, softmax."""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from svod.errors import UnsupportedError
from svod.onnx.operators.elementwise import unary
from svod.onnx.registry import Array, Node, axis_in, operator
from svod.tensor import Tensor, where

_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "Sigmoid": Tensor.sigmoid, "Softplus": lambda x: x.softplus(threshold=math.inf), "Softsign": Tensor.softsign,
    "Mish": Tensor.mish, "HardSwish": Tensor.hardswish}

for _name, _function in _PLAIN.items():
    unary(_name, _function)
unary("Relu", Tensor.relu, exact=True)


def _number(value: float) -> float:
    """A float attribute as text writes it: the file has it in 32 bits."""
    return float(str(np.float32(value)))


@operator("LeakyRelu")
def leaky_relu(node: Node, x: Tensor) -> Tensor:
    return x.leaky_relu(_number(node.get("alpha", 0.01)))


@operator("Elu")
def elu(node: Node, x: Tensor) -> Tensor:
    return x.elu(_number(node.get("alpha", 1.0)))


@operator("Celu", 12)
def celu(node: Node, x: Tensor) -> Tensor:
    return x.celu(_number(node.get("alpha", 1.0)))


@operator("Selu")
def selu(node: Node, x: Tensor) -> Tensor:
    alpha, gamma = node.get("alpha", 1.67326319217681884765625), node.get("gamma", 1.05070102214813232421875)
    return (where(x.gt(0), x, x.exp().sub(1).mul(alpha))).mul(gamma)


@operator("HardSigmoid")
def hard_sigmoid(node: Node, x: Tensor) -> Tensor:
    return x.mul(_number(node.get("alpha", 0.2))).add(_number(node.get("beta", 0.5))).clamp(0.0, 1.0)


@operator("Gelu", 20)
def gelu(node: Node, x: Tensor) -> Tensor:
    return x.gelu(node.get("approximate", "none"))


@operator("Swish", 24)
def swish(node: Node, x: Tensor) -> Tensor:
    return x.mul(x.mul(_number(node.get("alpha", 1.0))).sigmoid())


@operator("SwiGLU", 27)
def swiglu(node: Node, gate: Tensor, x: Tensor) -> Tensor:
    return gate.mul(gate.mul(_number(node.get("alpha", 1.0))).sigmoid()).mul(x)


@operator("PRelu")
def prelu(node: Node, x: Tensor, slope: Tensor) -> Tensor:
    if slope.ndim == 1 and node.version < 7:
        slope = slope.reshape(-1, *(1,) * (x.ndim - 2))
    return where(x.lt(0), x.mul(slope), x).cast(x.dtype)


@operator("ThresholdedRelu")
def thresholded_relu(node: Node, x: Tensor) -> Tensor:
    return where(x.gt(_number(node.get("alpha", 1.0))), x, 0)


@operator("Shrink", 9)
def shrink(node: Node, x: Tensor) -> Tensor:
    bias, edge = _number(node.get("bias", 0.0)), _number(node.get("lambd", 0.5))
    return where(x.lt(-edge), x.add(bias), where(x.gt(edge), x.sub(bias), 0)).cast(x.dtype)


# -- rows ----------------------------------------------------------------------------------------------------------------------
def rows(name: str, function: Callable[[Tensor, int], Tensor], exact: bool = False) -> None:
    @operator(name, exact=exact)
    def flattened(node: Node, x: Tensor) -> Tensor:
        """Before opset 13 everything from `axis` on was one row."""
        axis = axis_in(node.get("axis", 1), max(1, x.ndim))
        return function(x.reshape(int(np.prod(x.shape[:axis])), -1), -1).reshape(x.shape)

    @operator(name, 13, exact=exact)
    def along(node: Node, x: Tensor) -> Tensor:
        return function(x, node.get("axis", -1))


def hardmax_of(x: Tensor, axis: int) -> Tensor:
    at = axis_in(axis, x.ndim)
    if 0 in x.shape:
        return x
    positions = Tensor.arange(x.shape[at]).reshape(*(-1 if i == at else 1 for i in range(x.ndim)))
    return positions.eq(x.argmax(at, keepdim=True)).cast(x.dtype)


rows("Softmax", Tensor.softmax)
rows("LogSoftmax", Tensor.log_softmax)
rows("Hardmax", hardmax_of, exact=True)


@operator("Dropout", known=("training",), exact=True)
def dropout(node: Node, x: Tensor, ratio: Tensor | None = None, training: Array | None = None) -> tuple[Tensor, Tensor]:
    """The identity: svod runs models and does not train them."""
    if training is not None and bool(training.any()):
        raise UnsupportedError(f"{node} in training mode: svod runs models and does not train them")
    return x, Tensor.full(x.shape, True, "bool")
